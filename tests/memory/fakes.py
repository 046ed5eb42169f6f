"""A device that registers anything at once, and memory that costs nothing."""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass, field

from controller.memory.limits import Limits
from controller.memory.pages import Pages, map_nbytes
from controller.verbs.registration import DeviceLimits, MemoryRegion, RegistrationError

GIB = 1 << 30
MIB = 1 << 20
# asm-generic/mman-common.h; Python 3.11 does not name them.
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000

ROOMY = Limits(
    memlock_nbytes=None,
    may_exceed_memlock=False,
    pinned_nbytes=0,
    max_map_count=65530,
    map_count=100,
    available_nbytes=1 << 50,
)


@dataclass
class FakeRegistrar:
    """Remembers what is registered; refuses from the `fails_at`-th region on.

    While `gate` is there, a registration waits until it is set. Deregistrations of the regions in
    `kept` (by lkey) are refused.
    """

    fails_at: int = 1 << 30
    max_mr: int = 1 << 20
    max_mr_nbytes: int = 1 << 40
    gate: threading.Event | None = None
    regions: dict[int, MemoryRegion] = field(default_factory=dict)  # by lkey
    registered: int = 0
    kept: set[int] = field(default_factory=set)

    @property
    def limits(self) -> DeviceLimits:
        return DeviceLimits("fake0", self.max_mr, self.max_mr_nbytes)

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        if self.gate is not None:
            assert self.gate.wait(10)
        if self.registered >= self.fails_at:
            raise RegistrationError("fake0 has no room.", "Ask for less.")
        self.registered += 1
        region = MemoryRegion(address, nbytes, self.registered, 1000 + self.registered)
        self.regions[region.lkey] = region
        return region

    def register_dmabuf(self, fd: int, offset: int, nbytes: int, address: int) -> MemoryRegion:
        return self.register(address, nbytes)

    def deregister(self, region: MemoryRegion) -> None:
        if region.lkey in self.kept:
            raise RegistrationError("fake0 keeps the region.")
        del self.regions[region.lkey]


class RepeatedPages:
    """Chunks that show one small piece of memory over and over, one after the other in addresses.

    So that a pool of many GiB costs a few MiB: what is written at an offset is also found at every
    other one that differs by a multiple of `piece_nbytes`.
    """

    def __init__(self, piece_nbytes: int = 64 * MIB) -> None:
        self._piece_nbytes = piece_nbytes
        self._fd = os.memfd_create("repeated-pages")
        os.ftruncate(self._fd, piece_nbytes)

    def __enter__(self) -> RepeatedPages:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def allocate(self, nbytes: int) -> Pages:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        address = map_nbytes(nbytes, flags)
        for offset in range(0, nbytes, self._piece_nbytes):
            step = min(self._piece_nbytes, nbytes - offset)
            map_nbytes(step, mmap.MAP_SHARED | MAP_FIXED, address + offset, self._fd)
        return Pages(address, nbytes, "base")

    def touch(self, pages: Pages) -> None:
        """There once the first reader comes."""
