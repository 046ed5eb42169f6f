"""What the tests of the region cache watch: a device, a policy, memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np

from controller.errors import UnsupportedError
from controller.memory.region_cache import RegionCache
from controller.memory.stats import PoolStats
from controller.verbs.registration import MemoryRegion
from tests.memory.fakes import FakeRegistrar

PAGE = mmap.PAGESIZE


@dataclass
class WatchedRegistrar(FakeRegistrar):
    """Calls a hook before it does anything; keeps the order; has no dmabufs."""

    before_register: Callable[[int, int], object] = lambda address, nbytes: None
    before_deregister: Callable[[MemoryRegion], object] = lambda region: None
    came: list[tuple[int, int]] = field(default_factory=list)
    went: list[tuple[int, int]] = field(default_factory=list)

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        self.before_register(address, nbytes)
        region = super().register(address, nbytes)
        self.came.append((address, nbytes))
        return region

    def register_dmabuf(self, fd: int, offset: int, nbytes: int, address: int) -> MemoryRegion:
        raise UnsupportedError("dmabuf memory regions are not supported by fake0.")

    def deregister(self, region: MemoryRegion) -> None:
        self.before_deregister(region)
        super().deregister(region)
        self.went.append((region.address, region.nbytes))

    @property
    def live_nbytes(self) -> int:
        return sum(region.nbytes for region in list(self.regions.values()))


class OldestFirst:
    """LRU that keeps what it was told, and predicts what a test says."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Hashable]] = []
        self.resident: dict[Hashable, None] = {}
        self.forgotten: list[Hashable] = []
        self.streams: list[Hashable] = []
        self.predicted: list[Hashable] = []

    def on_request(
        self, key: Hashable, nbytes: int, register_us: float = 0.0, stream: Hashable = None
    ) -> None:
        assert nbytes > 0
        self.told.append(("request", key))
        self.streams.append(stream)
        if key in self.resident:
            del self.resident[key]
            self.resident[key] = None

    def on_insert(self, key: Hashable, nbytes: int) -> None:
        self.told.append(("insert", key))
        assert key not in self.resident
        self.resident[key] = None

    def on_remove(self, key: Hashable, *, forget: bool = False) -> None:
        self.told.append(("remove", key))
        self.resident.pop(key, None)
        if forget:
            self.forgotten.append(key)

    def victims(self) -> Iterator[Hashable]:
        return iter(list(self.resident))

    def prefetch_candidates(self, limit: int) -> list[Hashable]:
        return [key for key in self.predicted if key not in self.resident][:limit]


@dataclass
class Rig:
    """A cache and all that it is made of."""

    cache: RegionCache
    registrar: WatchedRegistrar
    policy: OldestFirst
    stats: PoolStats

    def evictions(self, reason: str) -> int:
        return int(self.stats.snapshot()["evictions"].get(reason, 0))


def make_rig(
    capacity_pages: int = 64, max_regions: int = 1000, registrar: WatchedRegistrar | None = None
) -> Rig:
    """A cache of so many pages on a device that registers everything."""
    registrar = registrar or WatchedRegistrar()
    policy, stats = OldestFirst(), PoolStats()
    cache = RegionCache(
        registrar,
        capacity_bytes=capacity_pages * PAGE,
        max_regions=max_regions,
        policy=policy,
        stats=stats,
        name="test",
    )
    return Rig(cache, registrar, policy, stats)


def pages(count: int) -> np.ndarray:
    """An array of whole pages that owns its memory's mapping."""
    return np.frombuffer(mmap.mmap(-1, count * PAGE), np.uint8)
