"""The registration pool: leases of memory registered before, and a cache for memory of others.

>>> with RegistrationPool(device.registrar, PoolConfig(capacity_nbytes=8 << 30)) as pool:
...     with pool.lease(1 << 20, key="bucket 3") as lease:
...         gradients = lease.array("float32", 1 << 18)
...     with pool.register(tensor) as region:
...         send(region.address, region.nbytes, region.lkey)
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from controller.errors import StellarError, UsageError
from controller.memory.arena import Arena
from controller.memory.background import DEFAULT_BUSY_SHARE
from controller.memory.buffers import locate
from controller.memory.cached_region import CachedRegion
from controller.memory.errors import LeaseError, RegionInUseError
from controller.memory.lease import Lease, LeasedRange
from controller.memory.limits import fork_support
from controller.memory.policies import DEFAULT_POLICY, ONLINE_POLICIES, make_policy
from controller.memory.pool_background import PoolBackground
from controller.memory.prefetch import DEFAULT_DEPTH
from controller.memory.region_cache import RegionCache
from controller.memory.region_state import CacheState
from controller.memory.stats import PoolStats, TraceRecorder
from controller.memory.status_files import StatusFile

if TYPE_CHECKING:
    from controller.verbs.registration import Registrar

_MAX_NAME_CHARACTERS = 64
# Each is a region that the cache gives up for one that may be needed.
_MAX_PREFETCH_DEPTH = 64


@dataclass(frozen=True)
class PoolConfig:
    """What a pool is made of.

    Parameters
    ----------
    capacity_nbytes
        Memory to lease from, rounded up to whole chunks; 0: none.
    chunk_nbytes
        Largest lease; a power of two up to 2 GiB. None: 512 MiB (1 GiB where there are pages of
        that size), or what capacity and device allow.
    numa_node
        Where the memory has to lie; None: near the device.
    pages
        ``auto``, ``1GiB``, ``2MiB``, ``transparent`` or ``base``.
    prepare
        ``now``, or in the ``background``.
    cache_nbytes, cache_regions
        What the cache of others' memory may hold; 0 bytes: no cache.
    policy
        Says which region the cache gives up first.
    prefetch_depth
        How many regions the cache registers ahead of need while the policy foresees it; 0: none.
    background_busy_share
        Share of the time that the thread which registers ahead and asynchronously works at most
        while it touches pages, above 0 to 1.
    record
        File that takes a trace of all requests, for `controller pool replay`.
    name
        In messages and in `controller pool status`; up to 64 printable characters.

    Raises
    ------
    UsageError
        A value is not allowed. What depends on machine and device is checked by the pool.
    """

    capacity_nbytes: int
    chunk_nbytes: int | None = None
    numa_node: int | None = None
    pages: str = "auto"
    prepare: Literal["now", "background"] = "now"
    cache_nbytes: int = 1 << 30
    cache_regions: int = 4096
    policy: str = DEFAULT_POLICY
    prefetch_depth: int = DEFAULT_DEPTH
    background_busy_share: float = DEFAULT_BUSY_SHARE
    record: Path | None = None
    name: str = "pool"

    def __post_init__(self) -> None:
        for key in ("capacity_nbytes", "cache_nbytes"):
            if getattr(self, key) < 0:
                raise UsageError(f"{key} is {getattr(self, key)}; allowed: from 0.")
        if not self.capacity_nbytes and not self.cache_nbytes:
            raise UsageError("capacity_nbytes and cache_nbytes are both 0: a pool of nothing.")
        if self.cache_regions < 1:
            raise UsageError(f"cache_regions is {self.cache_regions}; allowed: from 1.")
        if self.policy not in ONLINE_POLICIES:
            raise UsageError(f"policy is {self.policy!r}; allowed: {', '.join(ONLINE_POLICIES)}.")
        if not 0 <= self.prefetch_depth <= _MAX_PREFETCH_DEPTH:
            raise UsageError(
                f"prefetch_depth is {self.prefetch_depth}; allowed: 0 .. {_MAX_PREFETCH_DEPTH}."
            )
        if not 0 < self.background_busy_share <= 1:
            raise UsageError(
                f"background_busy_share is {self.background_busy_share}; allowed: above 0, up to 1."
            )
        if not 0 < len(self.name) <= _MAX_NAME_CHARACTERS or not self.name.isprintable():
            raise UsageError(
                f"name is {self.name!r}; allowed: 1 .. {_MAX_NAME_CHARACTERS} printable characters."
            )


class RegistrationPool:
    """Memory for one device: leases from an arena, and registrations of others' memory.

    Safe for threads. Not for use in a forked child, which is told so (ForkError).

    Parameters
    ----------
    registrar
        Of the device; ``Device.registrar``. Close the pool before the device.
    config
        What it is made of.

    Raises
    ------
    PoolError
        A limit of machine or device does not suffice, or memory ran out: nothing is kept.
    UsageError
        Sizes or names do not fit.
    """

    def __init__(self, registrar: Registrar, config: PoolConfig) -> None:
        self.config = config
        self.device = registrar.limits.device
        recorder = TraceRecorder(config.record) if config.record is not None else None
        self._recorder = recorder
        self._stats = PoolStats(recorder)
        self._fork = fork_support()
        self._pages_told: dict[str, Any] = {}
        self._arena: Arena | None = None
        self._cache: RegionCache | None = None
        self._background: PoolBackground | None = None
        # Weakly: a pool that nobody refers to any more must not live on for its status.
        this = weakref.ref(self)

        def describe() -> dict[str, Any] | None:
            pool = this()
            return None if pool is None else pool.describe()

        with contextlib.ExitStack() as undo:
            if recorder is not None:
                undo.callback(recorder.close)
            if config.capacity_nbytes:
                self._arena = Arena(
                    registrar,
                    config.capacity_nbytes,
                    chunk_nbytes=config.chunk_nbytes,
                    numa_node=config.numa_node,
                    pages=config.pages,
                    prepare=config.prepare,
                    stats=self._stats,
                    name=f"Pool {config.name!r}",
                )
                undo.callback(self._arena.close, force=True)
            if config.cache_nbytes:
                self._cache = RegionCache(
                    registrar,
                    capacity_bytes=config.cache_nbytes,
                    max_regions=config.cache_regions,
                    policy=make_policy(config.policy, config.cache_nbytes, config.cache_regions),
                    stats=self._stats,
                    name=config.name,
                )
                undo.callback(self._cache.close, force=True)
                # Handles and exports keep the cache alive, so nothing of it is in use at its end.
                end = weakref.finalize(
                    self._cache, _tell_if_dropped, self._cache._state, config.name, os.getpid()
                )
                end.atexit = False  # the kernel takes everything back with the process
                self._background = PoolBackground(
                    self._cache,
                    prefetch_depth=config.prefetch_depth,
                    busy_share=config.background_busy_share,
                )
            self._status = StatusFile(describe)
            undo.pop_all()

    @property
    def arena(self) -> Arena:
        """What leases come from.

        Raises
        ------
        UsageError
            The pool has none (capacity_nbytes is 0).
        """
        if self._arena is None:
            raise UsageError(
                f"Pool {self.config.name!r} has no memory to lease (capacity_nbytes is 0).",
                "Give it a capacity.",
            )
        return self._arena

    @property
    def cache(self) -> RegionCache:
        """What remembers registrations of others' memory.

        Raises
        ------
        UsageError
            The pool has none (cache_nbytes is 0).
        """
        if self._cache is None:
            raise self._no_cache()
        return self._cache

    def _no_cache(self) -> UsageError:
        return UsageError(
            f"Pool {self.config.name!r} registers no memory of others (cache_nbytes is 0).",
            "Lease memory, or give it a cache.",
        )

    @property
    def ready(self) -> bool:
        """Whether all memory to lease from is registered."""
        return self._arena is None or self._arena.ready

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait for that; False when the time is over. See `Arena.wait_ready`."""
        return self._arena is None or self._arena.wait_ready(timeout_s)

    def lease(self, nbytes: int, key: Hashable = None, *, timeout_s: float = 0.0) -> Lease:
        """Take a piece of registered memory; see `Arena.lease`."""
        return self.arena.lease(nbytes, key, timeout_s=timeout_s)

    def register(
        self, buffer: Any, key: Hashable = None, stream: Hashable = None
    ) -> CachedRegion | LeasedRange:
        """Keys for a buffer, whoever owns it, until `release()`.

        Memory of a lease is registered already, and is found by its address.

        Parameters
        ----------
        buffer
            A numpy array or anything else with a writable, contiguous buffer; or (address, nbytes).
        key, stream
            As for `RegionCache.acquire`.

        Returns
        -------
        CachedRegion or LeasedRange
            With `address`, `nbytes`, `lkey`, `rkey`; a context manager.

        Raises
        ------
        UsageError
            The buffer cannot be registered, or the pool has no cache.
        LeaseError
            The buffer is a view of a lease that is released.
        PoolExhaustedError, RegistrationError, ForkError
            As for `RegionCache.acquire`.
        """
        return self._leased(buffer) or self.cache.acquire(buffer, key, stream)

    def register_async(
        self, buffer: Any, key: Hashable = None, stream: Hashable = None
    ) -> Future[CachedRegion] | Future[LeasedRange]:
        """Have a buffer registered without waiting for it.

        A thread touches its pages in steps, with rests, and registers it in one call that leaves
        Python's lock free.

        Parameters
        ----------
        buffer, key, stream
            As for `register`; the buffer is kept alive until it is done.

        Returns
        -------
        Future
            Its result is that of `register`, to be released like that; its exception is what
            `register` would raise. ``cancel()`` reaches work that has begun at its next step: the
            exception is `PoolError` then. Closing the pool cancels what is not done.

        Raises
        ------
        UsageError
            The buffer cannot be registered, or the pool has no cache.
        LeaseError
            The buffer is a view of a lease that is released.
        PoolError, ForkError
            The pool is closed, or belongs to the parent process.
        """
        leased = self._leased(buffer)
        if leased is not None:
            done: Future[LeasedRange] = Future()
            done.set_result(leased)
            return done
        if self._background is None:
            raise self._no_cache()
        return self._background.acquire(buffer, key, stream)

    def _leased(self, buffer: Any) -> LeasedRange | None:
        """Keys of a buffer that lies in a lease.

        Raises
        ------
        LeaseError
            It lay in one that is released: its memory is nobody's, or somebody else's.
        """
        if self._arena is None:
            return None
        address, nbytes, owner = locate(buffer)
        if isinstance(owner, Lease) and not owner.is_live:
            raise owner.stale_error()
        keys = self._arena.find(address, nbytes)
        return None if keys is None else LeasedRange(address, nbytes, *keys, owner)

    def invalidate(self, buffer: Any, timeout_s: float = 0.0) -> int:
        """Deregister a buffer whose memory is about to be freed; see `RegionCache.invalidate`."""
        return self.cache.invalidate(buffer, timeout_s)

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """(lkey, rkey) of a range that lies in one live lease; None when it does not.

        What is in the cache may go at any moment unless it is held: `register` holds it.
        """
        return None if self._arena is None else self._arena.find(address, nbytes)

    def stats(self) -> dict[str, Any]:
        """All counters; see `PoolStats.snapshot`."""
        return self._stats.snapshot()

    def describe(self) -> dict[str, Any]:
        """What `controller pool status` shows of it, but for the process."""
        arena = self._arena
        if arena is None:
            described: dict[str, Any] = {
                "chunk_nbytes": 0, "chunks": 0, "chunks_wanted": 0, "capacity_nbytes": 0,
                "leased_nbytes": 0, "pages": [], "numa_node": None,
            }  # fmt: skip
            told: dict[str, Any] = {"present_nbytes": {}, "numa_nodes": []}
        else:
            described = arena.describe()
            if self._pages_told.get("chunks") != described["chunks"]:
                # Pinned pages stay as they are: asked once for each number of chunks.
                self._pages_told = arena.describe(with_pages=True)
            told = {name: self._pages_told[name] for name in ("present_nbytes", "numa_nodes")}
        return {
            "name": self.config.name,
            "device": self.device,
            "policy": self.config.policy,
            "fork": self._fork,
            "cache_nbytes": self.config.cache_nbytes,
            "cache_regions": self.config.cache_regions,
            "prefetch_depth": self.config.prefetch_depth,
            **described,
            **told,
            "stats": self.stats(),
        }

    def close(self, *, force: bool = False) -> None:
        """Deregister everything; twice does no harm.

        Registrations that nobody waits for are called off; one that the device is busy with is
        waited for.

        Parameters
        ----------
        force
            Also what is in use: leases and regions are worth nothing afterwards.

        Raises
        ------
        LeaseError
            Leases are out; names their keys.
        RegionInUseError
            Regions of the cache are in use. Leases cannot be taken any more then.
        RegistrationError
            The device keeps a region. All else is closed, and that one is tried again next time.
        """
        problems: list[StellarError] = []
        if self._arena is not None:
            try:
                self._arena.close(force=force)
            except LeaseError:
                raise
            except StellarError as error:
                problems.append(error)
        if self._cache is not None and self._background is not None:
            self._background.stop()
            try:
                self._cache.close(force=force)
            except RegionInUseError:
                self._background.resume()
                raise
            except StellarError as error:
                problems.append(error)
        self._status.close()
        if self._recorder is not None:
            self._recorder.close()
        if problems:
            raise problems[0]

    def __enter__(self) -> RegistrationPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        # Leases that an error left out must not keep the device busy, nor anything here hide it.
        with contextlib.suppress(StellarError):
            self.close(force=True)


def _tell_if_dropped(state: CacheState, name: str, pid: int) -> None:
    """Warn that a cache, which nobody can reach any more, leaves regions registered.

    They are not deregistered here: the device may have been dropped with the pool, and libibverbs
    looks into its memory.
    """
    regions = len(state.found) + len(state.retired)
    if regions and not state.closed and os.getpid() == pid:
        warnings.warn(
            f"pool {name!r} was dropped without close(): {regions} regions of its cache stay "
            "registered until the process ends",
            ResourceWarning,
            stacklevel=2,
        )
