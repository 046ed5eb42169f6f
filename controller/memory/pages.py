"""Memory of our own: huge pages where there are any, near the device, touched before it is pinned.

A device translates addresses page by page, and pinning takes time page by page: 1 GiB is 262,144
pages of 4 KiB, 512 of 2 MiB. What was got is read back from the kernel, never assumed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from controller.errors import UnsupportedError, UsageError
from controller.memory.errors import PoolError
from controller.memory.fork import watch_fork
from controller.memory.numa import bind_to_node, node_of

PAGE_NBYTES = mmap.PAGESIZE
HUGE_1GIB_NBYTES = 1 << 30
HUGE_2MIB_NBYTES = 2 << 20
PAGE_KINDS = ("auto", "1GiB", "2MiB", "transparent", "base")

# asm-generic/mman-common.h, the same on x86-64 and arm64; Python's mmap has no huge page sizes.
_MAP_HUGETLB = 0x40000
_MAP_HUGE_SHIFT = 26
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MAP_FAILED = ctypes.c_void_p(-1).value
# Populating holds the lock of the address space for reading; steps let others map memory between.
# At 2 to 10 GB/s, the rate at which kernels clear pages, 64 MiB are 6 to 30 ms.
_TOUCH_STEP_NBYTES = 64 << 20
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages")
_TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    )  # fmt: skip
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library


# Kept here because a finalizer may run when modules are already half gone.
_munmap = _libc().munmap


def map_nbytes(nbytes: int, flags: int, address: int = 0, fd: int = -1) -> int:
    """Map readable and writable memory; its address.

    Raises
    ------
    OSError
        With the kernel's errno.
    """
    got = _libc().mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if got is None or got == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(got)


def _madvise(address: int, nbytes: int, advice: int) -> int:
    """0 or errno. Python's lock is free meanwhile."""
    return ctypes.get_errno() if _libc().madvise(address, nbytes, advice) else 0


class Pages:
    """Mapped memory, unmapped when nothing refers to it any more.

    There is no way to unmap it earlier: an array over unmapped memory would crash the process.

    Parameters
    ----------
    address, nbytes
        The mapping. It is ours from now on, and not inherited by children.
    kind
        One of `PAGE_KINDS` but ``auto``.

    Attributes
    ----------
    host_visible
        Whether the processor can read and write it at `address`.
    """

    host_visible = True

    def __init__(self, address: int, nbytes: int, kind: str) -> None:
        self.address = address
        self.nbytes = nbytes
        self.kind = kind
        self.forked = False
        watch_fork(self)

    def __del__(self) -> None:
        # A child has not inherited the mapping; something else may lie there by now.
        if not self.forked:
            _munmap(self.address, self.nbytes)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The protocol of numpy: arrays over the memory keep this object alive."""
        return {
            "version": 3,
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
        }


class PageSource(Protocol):
    """Where an arena's memory comes from."""

    def allocate(self, nbytes: int) -> Pages:
        """Map that much, not necessarily there yet."""

    def touch(self, pages: Pages) -> None:
        """Make it be there. Other threads run meanwhile."""


def free_huge_pages(page_nbytes: int) -> int:
    """Huge pages of this size that the kernel has reserved and nobody uses; 0 if it has none."""
    directory = _HUGE_PAGES / f"hugepages-{page_nbytes >> 10}kB"
    try:
        free = int((directory / "free_hugepages").read_text())
        promised = int((directory / "resv_hugepages").read_text())
    except (OSError, ValueError):
        return 0
    return max(0, free - promised)


def transparent_mode() -> str:
    """``always``, ``madvise``, ``never``; ``""`` when the kernel has no transparent huge pages."""
    try:
        text = _TRANSPARENT.read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


@dataclass(frozen=True)
class PageReport:
    """What a set of mappings is made of, as the kernel tells.

    Parameters
    ----------
    nbytes
        Present, by size of page in bytes.
    nodes
        NUMA nodes of the first page of each mapping; -1: not told.
    """

    nbytes: dict[int, int]
    nodes: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Members by name; units in the names."""
        return {
            "present_nbytes": {f"{size >> 10}KiB": count for size, count in self.nbytes.items()},
            "numa_nodes": sorted(set(self.nodes)),
        }


def report_pages(mappings: Iterable[Pages]) -> PageReport:
    """Read from /proc/self/smaps what pages these mappings have. Takes a few milliseconds."""
    wanted = [(pages.address, pages.address + pages.nbytes) for pages in mappings]
    found: dict[int, int] = {}
    share = 0.0
    huge = total = 0
    page_nbytes = PAGE_NBYTES

    def count() -> None:
        if total:
            for size, nbytes in ((HUGE_2MIB_NBYTES, huge), (page_nbytes, total - huge)):
                if nbytes:
                    found[size] = found.get(size, 0) + round(nbytes * share)

    with Path("/proc/self/smaps").open() as file:
        for line in file:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                count()
                first, last = (int(text, 16) for text in name.split("-"))
                # The kernel merges neighbours that are alike: count our part of an area.
                ours = sum(max(0, min(last, b) - max(first, a)) for a, b in wanted)
                share = ours / (last - first)
                huge = total = 0
            elif share:
                number = rest.split()[0] if rest.split() else ""
                if name == "KernelPageSize:":
                    page_nbytes = int(number) << 10
                elif name in ("Rss:", "Private_Hugetlb:", "Shared_Hugetlb:"):
                    total += int(number) << 10
                elif name in ("AnonHugePages:", "ShmemPmdMapped:"):
                    huge += int(number) << 10
        count()
    return PageReport(found, tuple(node_of(first) for first, _ in wanted))


class AnonymousPages:
    """Private memory of the process.

    Parameters
    ----------
    kind
        ``1GiB``, ``2MiB``: huge pages that the administrator reserved. ``transparent``: the kernel
        puts huge pages together when it can. ``base``: pages of the usual size. ``auto``: the
        first of these that there is, for each mapping.
    numa_node
        Where the memory has to lie; None: where the kernel puts it.

    Raises
    ------
    UsageError
        The kind does not exist.
    """

    def __init__(self, kind: str = "auto", numa_node: int | None = None) -> None:
        if kind not in PAGE_KINDS:
            raise UsageError(f"Pages {kind!r} do not exist; allowed: {', '.join(PAGE_KINDS)}.")
        self._kind = kind
        self._node = numa_node

    def allocate(self, nbytes: int) -> Pages:
        """Map `nbytes`, a multiple of the page size, at a multiple of up to 2 MiB.

        Raises
        ------
        PoolError
            No memory, or no huge pages of the kind that was asked for.
        """
        if self._kind == "auto":
            for kind, page_nbytes in (("1GiB", HUGE_1GIB_NBYTES), ("2MiB", HUGE_2MIB_NBYTES)):
                free_nbytes = free_huge_pages(page_nbytes) * page_nbytes
                if not nbytes % page_nbytes and free_nbytes >= nbytes:
                    # Somebody else may be faster.
                    with contextlib.suppress(PoolError):
                        return self._map_huge(nbytes, kind, page_nbytes)
            huge = transparent_mode() in ("always", "madvise") and nbytes >= HUGE_2MIB_NBYTES
            return self._map(nbytes, "transparent" if huge else "base")
        if self._kind in ("1GiB", "2MiB"):
            page_nbytes = HUGE_1GIB_NBYTES if self._kind == "1GiB" else HUGE_2MIB_NBYTES
            return self._map_huge(nbytes, self._kind, page_nbytes)
        return self._map(nbytes, self._kind)

    def _map_huge(self, nbytes: int, kind: str, page_nbytes: int) -> Pages:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB
        flags |= (page_nbytes.bit_length() - 1) << _MAP_HUGE_SHIFT
        try:
            return self._own(map_nbytes(nbytes, flags), nbytes, kind)
        except OSError as error:
            raise PoolError(
                f"{nbytes} bytes cannot be had in pages of {kind}: {error.strerror}; "
                f"{free_huge_pages(page_nbytes)} of them are free.",
                f"Reserve some: {_HUGE_PAGES}/hugepages-{page_nbytes >> 10}kB/nr_hugepages, or "
                "use pages='auto'.",
            ) from None

    def _map(self, nbytes: int, kind: str) -> Pages:
        # A transparent huge page needs an aligned place, which not every kernel gives by itself.
        align = HUGE_2MIB_NBYTES if nbytes >= HUGE_2MIB_NBYTES else PAGE_NBYTES
        try:
            start = map_nbytes(nbytes + align, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise PoolError(
                f"{nbytes} bytes of memory cannot be mapped: {error.strerror}.",
                "Use a smaller pool, or raise the limits (ulimit -v, vm.overcommit_memory, "
                "vm.max_map_count).",
            ) from None
        address = -(-start // align) * align
        if address > start:
            _munmap(start, address - start)
        if start + align > address:
            _munmap(address + nbytes, start + align - address)
        pages = self._own(address, nbytes, kind)
        if kind == "transparent":
            code = _madvise(address, nbytes, _MADV_HUGEPAGE)
            if code:
                raise UnsupportedError(
                    f"The kernel has no transparent huge pages: {os.strerror(code)}.",
                    "Use pages='auto' or 'base'.",
                )
        return pages

    def _own(self, address: int, nbytes: int, kind: str) -> Pages:
        pages = Pages(address, nbytes, kind)
        code = _madvise(address, nbytes, _MADV_DONTFORK)
        if code:
            raise PoolError(f"Memory cannot be kept from children: {os.strerror(code)}.")
        if self._node is not None:
            bind_to_node(address, nbytes, self._node)
        return pages

    def touch(self, pages: Pages) -> None:
        """Let every page be there and writable, in steps, without Python's lock.

        Raises
        ------
        PoolError
            No memory, which may be that of the NUMA node or of the control group.
        """
        for offset in range(0, pages.nbytes, _TOUCH_STEP_NBYTES):
            step = min(_TOUCH_STEP_NBYTES, pages.nbytes - offset)
            if not touch_range(pages.address + offset, step):
                _write_each_page(pages.address + offset, step)


def touch_range(address: int, nbytes: int) -> bool:
    """Let the pages of a range of the process be there and writable; their contents stay.

    Parameters
    ----------
    address, nbytes
        Whole pages of a writable mapping.

    Returns
    -------
    bool
        False when the kernel cannot (before Linux 5.14): nothing was done.

    Raises
    ------
    PoolError
        No memory, or nothing writable is mapped there.
    """
    while True:
        code = _madvise(address, nbytes, _MADV_POPULATE_WRITE)
        if code not in (errno.EAGAIN, errno.EINTR):
            break
    if code == errno.EINVAL:
        return False
    if code:
        raise PoolError(
            f"{nbytes} bytes at {address:#x} cannot be filled with pages: {os.strerror(code)}.",
            "Use a smaller pool, another numa_node, or more memory for the control group.",
        )
    return True


def _write_each_page(address: int, nbytes: int) -> None:
    """Read a byte of each page and write it back; for memory that nobody else uses yet.

    A call of memmove for each page takes about 1 us, page fault included, but ctypes leaves
    Python's lock free during it.
    """
    for page in range(address, address + nbytes, PAGE_NBYTES):
        ctypes.memmove(page, page, 1)
