"""The memory of arenas: what was got, where it lies, and that it is there."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from controller.errors import UnsupportedError, UsageError
from controller.memory import numa
from controller.memory import pages as module
from controller.memory.errors import PoolError
from controller.memory.numa import node_of, online_nodes
from controller.memory.pages import (
    HUGE_2MIB_NBYTES,
    PAGE_NBYTES,
    AnonymousPages,
    Pages,
    free_huge_pages,
    map_nbytes,
    report_pages,
    touch_range,
    transparent_mode,
)

MIB = 1 << 20


def resident_nbytes(pages: Pages) -> int:
    """Bytes of a mapping that are there, by mincore(2)."""
    flags = (ctypes.c_ubyte * (pages.nbytes // PAGE_NBYTES))()
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(pages.address), ctypes.c_size_t(pages.nbytes), flags) == 0
    return sum(flag & 1 for flag in flags) * PAGE_NBYTES


def is_mapped(address: int) -> bool:
    """Whether a mapping of this process holds that address."""
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        for line in maps:
            first, last = (int(text, 16) for text in line.split()[0].split("-"))
            if first <= address < last:
                return True
    return False


@pytest.mark.parametrize("kind", ["auto", "base"])
def test_touched_memory_is_all_there_and_zero(kind: str) -> None:
    source = AnonymousPages(kind)
    pages = source.allocate(8 * MIB)
    source.touch(pages)
    assert resident_nbytes(pages) == 8 * MIB
    view = np.asarray(pages)
    assert view.shape == (8 * MIB,) and not view.any()
    view[:] = 1


def test_base_pages_are_base_pages_and_the_report_says_so() -> None:
    source = AnonymousPages("base")
    pages = source.allocate(4 * MIB)
    assert sum(report_pages([pages]).nbytes.values()) == 0, "nothing is there before it is touched"
    source.touch(pages)
    found = report_pages([pages])
    # Where transparent huge pages are on for everybody, base pages are merged, too.
    if transparent_mode() != "always":
        assert found.nbytes == {PAGE_NBYTES: 4 * MIB}
    assert sum(found.nbytes.values()) == 4 * MIB


def test_auto_gets_aligned_transparent_huge_pages_where_the_kernel_has_them() -> None:
    if transparent_mode() not in ("always", "madvise"):
        assert AnonymousPages("auto").allocate(16 * MIB).kind in ("base", "2MiB")
        return
    source = AnonymousPages("transparent")
    pages = source.allocate(16 * MIB)
    source.touch(pages)
    assert pages.address % HUGE_2MIB_NBYTES == 0
    # The kernel may be short of them; what it gave is what is reported.
    found = report_pages([pages]).nbytes
    assert sum(found.values()) == 16 * MIB
    assert AnonymousPages("auto").allocate(16 * MIB).kind in ("transparent", "2MiB")
    assert AnonymousPages("auto").allocate(MIB).kind == "base", "too small for a huge page"


@contextlib.contextmanager
def reserved_huge_pages(count: int) -> Iterator[int]:
    """Reserve some huge pages more; how many there are, as the kernel may have no room."""
    path = Path("/proc/sys/vm/nr_hugepages")
    before = int(path.read_text())
    try:
        path.write_text(str(before + count))
        yield free_huge_pages(HUGE_2MIB_NBYTES)
    finally:
        path.write_text(str(before))


@pytest.mark.usefixtures("root")
def test_reserved_huge_pages_are_used_first_and_missing_ones_are_an_error_that_says_where() -> None:
    with reserved_huge_pages(4) as free:
        if free >= 4:
            source = AnonymousPages("auto")
            pages = source.allocate(8 * MIB)
            source.touch(pages)
            assert pages.kind == "2MiB"
            assert report_pages([pages]).nbytes == {HUGE_2MIB_NBYTES: 8 * MIB}
            del pages
        free = free_huge_pages(HUGE_2MIB_NBYTES)
        with pytest.raises(
            (PoolError, UnsupportedError), match=rf"2MiB.*{free} of them are free.*Reserve"
        ):
            AnonymousPages("2MiB").allocate((free + 1) * HUGE_2MIB_NBYTES)


def test_more_than_the_address_space_is_an_error_not_a_crash() -> None:
    with pytest.raises(PoolError, match="cannot be mapped"):
        AnonymousPages("base").allocate(1 << 60)


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match=r"allowed: auto, 1GiB, 2MiB, transparent, base"):
        AnonymousPages("huge")


def test_memory_goes_with_the_last_array_over_it() -> None:
    pages = AnonymousPages("base").allocate(MIB)
    address = pages.address
    view = np.asarray(pages)[10:]
    del pages
    gc.collect()
    assert is_mapped(address)
    view[0] = 1
    del view
    gc.collect()
    assert not is_mapped(address)


def test_children_do_not_inherit_the_memory() -> None:
    pages = AnonymousPages("base").allocate(MIB)
    pid = os.fork()
    if pid == 0:
        os._exit(1 if is_mapped(pages.address) else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert is_mapped(pages.address)


def longest_gap_s(times_s: list[float], first_s: float, last_s: float) -> float:
    """The longest time within first_s .. last_s without one of `times_s`."""
    inside = [first_s, *(each for each in times_s if first_s < each < last_s), last_s]
    return max(later - earlier for earlier, later in itertools.pairwise(inside))


def test_other_threads_run_while_memory_is_touched() -> None:
    """Python's lock is free: a thread goes on during one call that fills 64 MiB."""
    shares = []
    for _ in range(5):
        pages = AnonymousPages("base").allocate(64 * MIB)
        times_s: list[float] = []
        done = threading.Event()

        def run(times_s: list[float] = times_s, done: threading.Event = done) -> None:
            while not done.is_set():
                times_s.append(time.perf_counter())

        thread = threading.Thread(target=run)
        thread.start()
        first_s = time.perf_counter()
        touch_range(pages.address, 64 * MIB)
        last_s = time.perf_counter()
        done.set()
        thread.join()
        shares.append(longest_gap_s(times_s, first_s, last_s) / (last_s - first_s))
        if shares[-1] < 0.5:
            return
    raise AssertionError(f"the other thread stood still for {shares} of the time")


def test_without_populate_every_page_is_written_to_and_contents_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = AnonymousPages("base")
    pages = source.allocate(MIB)
    np.asarray(pages)[PAGE_NBYTES] = 77
    # An advice that no kernel knows, as an old one does not know this.
    monkeypatch.setattr(module, "_MADV_POPULATE_WRITE", 9999)
    assert not touch_range(pages.address, MIB)
    source.touch(pages)
    assert resident_nbytes(pages) == MIB
    assert np.asarray(pages)[PAGE_NBYTES] == 77


def test_touching_what_is_not_mapped_is_an_error() -> None:
    address = map_nbytes(MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert touch_range(address, MIB)
    pages = Pages(address, MIB, "base")
    del pages
    gc.collect()
    with pytest.raises(PoolError, match="cannot be filled"):
        touch_range(address, MIB)


def test_memory_lies_on_the_node_it_was_bound_to() -> None:
    if not online_nodes():
        with pytest.raises(UnsupportedError, match="the kernel knows no NUMA"):
            AnonymousPages("base", numa_node=0).allocate(MIB)
        return
    node = online_nodes()[-1]
    source = AnonymousPages("base", numa_node=node)
    pages = source.allocate(MIB)
    source.touch(pages)
    assert node_of(pages.address) == node
    assert report_pages([pages]).to_json() == {
        "present_nbytes": {f"{PAGE_NBYTES >> 10}KiB": MIB}, "numa_nodes": [node],
    }  # fmt: skip


def test_a_node_without_memory_is_refused_with_those_that_have_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numa, "online_nodes", lambda: [0, 1])
    missing = 2
    with pytest.raises(UsageError, match=f"node {missing} has no memory; allowed: "):
        AnonymousPages("base", numa_node=missing).allocate(MIB)


def test_without_numa_binding_is_refused_and_the_node_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = AnonymousPages("base")
    pages = source.allocate(MIB)
    source.touch(pages)
    monkeypatch.setattr(numa, "online_nodes", lambda: [])
    assert node_of(pages.address) == -1
    with pytest.raises(UnsupportedError, match="the kernel knows no NUMA"):
        AnonymousPages("base", numa_node=0).allocate(MIB)
