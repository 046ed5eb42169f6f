"""Memory regions, registered without holding Python's lock.

pyverbs keeps the interpreter's lock during ibv_reg_mr, which takes milliseconds for large buffers:
nothing else in the process could post or poll meanwhile. ctypes releases it, and the two work
together in one protection domain: queue pairs are pyverbs' and the regions they use are these.
(pyverbs' own MR also holds lengths in 32 bits in places.)
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from controller.errors import StellarError, UnsupportedError


class RegistrationError(StellarError):
    """The kernel or the device refused to register memory."""


@dataclass(eq=False)
class MemoryRegion:
    """One registered range of memory.

    Parameters
    ----------
    address, nbytes
        The range. After deregistration `handle` is 0 and the keys are worth nothing.
    lkey, rkey
        What this host's work requests, and the peers', name it by.
    handle
        Where libibverbs keeps its ``struct ibv_mr``.
    """

    address: int
    nbytes: int
    lkey: int
    rkey: int
    handle: int = 0


@dataclass(frozen=True)
class DeviceLimits:
    """What a device can register.

    Parameters
    ----------
    device
        Its name.
    max_mr, max_mr_nbytes
        Number of regions, and size of one.
    numa_node
        Where its memory is near; -1 when the machine does not say.
    """

    device: str
    max_mr: int
    max_mr_nbytes: int
    numa_node: int = -1


class Registrar(Protocol):
    """Registers memory; the pool's view of a device."""

    @property
    def limits(self) -> DeviceLimits:
        """What the device can register."""

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        """Register a range for local writes and remote reads and writes."""

    def register_dmabuf(self, fd: int, offset: int, nbytes: int, address: int) -> MemoryRegion:
        """Register a part of a dmabuf; peers address it from `address` on."""

    def deregister(self, region: MemoryRegion) -> None:
        """Give a region back; its keys are worth nothing from then on."""


class _IbvMr(ctypes.Structure):
    """struct ibv_mr of <infiniband/verbs.h>; a stable interface of libibverbs.so.1."""

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("pd", ctypes.c_void_p),
        ("addr", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("handle", ctypes.c_uint32),
        ("lkey", ctypes.c_uint32),
        ("rkey", ctypes.c_uint32),
    )


@cache
def _libibverbs() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    except OSError as error:
        raise UnsupportedError(
            f"libibverbs cannot be loaded ({error}).", "Install rdma-core (libibverbs1)."
        ) from None
    pointer = ctypes.POINTER(_IbvMr)
    library.ibv_reg_mr.restype = pointer
    library.ibv_reg_mr.argtypes = (
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
    )  # fmt: skip
    library.ibv_dereg_mr.restype = ctypes.c_int
    library.ibv_dereg_mr.argtypes = (pointer,)
    if hasattr(library, "ibv_reg_dmabuf_mr"):  # rdma-core 34
        library.ibv_reg_dmabuf_mr.restype = pointer
        library.ibv_reg_dmabuf_mr.argtypes = (
            ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_int,
            ctypes.c_int,
        )  # fmt: skip
    return library


def _memlock_text() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"


# What ibv_reg_mr's errors mean, beside their own text.
_MEANINGS = {
    errno.ENOMEM: "more pages than may be pinned (RLIMIT_MEMLOCK is {memlock}), more in one region "
    "than the driver has a table for (soft-RoCE: 1 GiB of 4 KiB pages), or no memory left",
    errno.EFAULT: "a part of the range is not mapped, or not writable",
    errno.EINVAL: "the device takes no region of this size or address",
    errno.EPERM: "this process may not use the device",
    errno.EIO: "the device is gone",
    errno.ENODEV: "the device is gone",
}
_REMEDIES = {
    errno.ENOMEM: "Raise the limit (ulimit -l unlimited, or grant CAP_IPC_LOCK), or register less "
    "at a time (of a pool: chunk_nbytes).",
    errno.EFAULT: "Register memory that is mapped for reading and writing.",
}


class VerbsRegistrar:
    """Registers memory in one protection domain.

    Parameters
    ----------
    pd
        Address of its ``struct ibv_pd``; it must outlive every region.
    limits
        Of its device.
    """

    def __init__(self, pd: int, limits: DeviceLimits) -> None:
        self._pd = pd
        self._limits = limits
        # Imported late: who leases, reads status or replays has no need of pyverbs.
        from controller.verbs.enums import verbs

        self._access = (
            verbs.IBV_ACCESS_LOCAL_WRITE
            | verbs.IBV_ACCESS_REMOTE_WRITE
            | verbs.IBV_ACCESS_REMOTE_READ
        )

    @property
    def limits(self) -> DeviceLimits:
        """What the device can register."""
        return self._limits

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        """Register a range for local writes and remote reads and writes.

        The interpreter's lock is free while the kernel pins the pages.

        Parameters
        ----------
        address, nbytes
            The range; any alignment, at least one byte.

        Raises
        ------
        RegistrationError
            Names the range, the device and what the error means there.
        """
        pointer = _libibverbs().ibv_reg_mr(self._pd, address, nbytes, self._access)
        if not pointer:
            code = ctypes.get_errno()
            raise RegistrationError(
                f"{self._limits.device} cannot register {nbytes} bytes at {address:#x}: "
                f"{os.strerror(code)} ("
                + _MEANINGS.get(code, "no further reason").format(memlock=_memlock_text())
                + ").",
                _REMEDIES.get(code, ""),
            )
        return self._region(pointer, address, nbytes)

    def register_dmabuf(self, fd: int, offset: int, nbytes: int, address: int) -> MemoryRegion:
        """Register a part of a dmabuf.

        Parameters
        ----------
        fd
            Of the dmabuf.
        offset, nbytes
            The part.
        address
            What work requests will call its first byte.

        Raises
        ------
        UnsupportedError
            Neither this device nor this kernel registers dmabufs.
        RegistrationError
            It does, but not this one.
        """
        library = _libibverbs()
        missing = f"dmabuf memory regions are not supported by {self._limits.device}"
        if not hasattr(library, "ibv_reg_dmabuf_mr"):
            raise UnsupportedError(f"{missing}: libibverbs is older than rdma-core 34.")
        pointer = library.ibv_reg_dmabuf_mr(self._pd, offset, nbytes, address, fd, self._access)
        if not pointer:
            code = ctypes.get_errno()
            if code in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise UnsupportedError(f"{missing} ({os.strerror(code)}).")
            raise RegistrationError(
                f"{self._limits.device} cannot register {nbytes} bytes of dmabuf {fd} from "
                f"{offset} on: {os.strerror(code)}."
            )
        return self._region(pointer, address, nbytes)

    def deregister(self, region: MemoryRegion) -> None:
        """Give a region back; its keys are worth nothing from then on. Twice is an error.

        Raises
        ------
        RegistrationError
            It was given back before, or the kernel refuses.
        """
        handle, region.handle = region.handle, 0
        if not handle:
            raise RegistrationError(
                f"The region at {region.address:#x} ({region.nbytes} bytes) is not registered.",
                "Deregister each region once.",
            )
        code = _libibverbs().ibv_dereg_mr(ctypes.cast(handle, ctypes.POINTER(_IbvMr)))
        if code:
            region.handle = handle
            raise RegistrationError(
                f"{self._limits.device} keeps the region at {region.address:#x}: "
                f"{os.strerror(code)}."
            )

    @staticmethod
    def _region(pointer: Any, address: int, nbytes: int) -> MemoryRegion:
        mr = pointer.contents
        handle = ctypes.cast(pointer, ctypes.c_void_p).value or 0
        return MemoryRegion(address, nbytes, int(mr.lkey), int(mr.rkey), handle)


def numa_node_of(device: str) -> int:
    """NUMA node of an RDMA device; -1 when the machine does not say."""
    try:
        return int(Path(f"/sys/class/infiniband/{device}/device/numa_node").read_text())
    except (OSError, ValueError):
        return -1
