"""What a pool does beside its users: a thread that registers for them, started when there is work.

Most pools only lease, and a process may have many; so there is no thread before the first miss of
the cache (with prefetch on) or the first registration that nobody waits for.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Hashable
from typing import Any

from controller.memory.background import BackgroundRegistrar, Job
from controller.memory.errors import PoolError
from controller.memory.fork import fork_error
from controller.memory.prefetch import Prefetcher, acquire_in_background
from controller.memory.region_cache import CachedRegion, RegionCache

_LOG = logging.getLogger(__name__)


class PoolBackground:
    """Registers and prefetches for one cache.

    Parameters
    ----------
    cache
        Whose regions; it must have no other prefetcher.
    prefetch_depth
        Regions to look ahead; 0: no prefetch.
    busy_share
        As for `BackgroundRegistrar`.
    """

    def __init__(self, cache: RegionCache, *, prefetch_depth: int, busy_share: float) -> None:
        self._cache = cache
        self._depth, self._busy_share = prefetch_depth, busy_share
        self._lock = threading.RLock()
        self._starting = False
        self._thread: BackgroundRegistrar | None = None
        self._stopped = False
        self._watch_for_work()

    @property
    def running(self) -> bool:
        """Whether the thread has been started, and not stopped."""
        return self._thread is not None

    def acquire(self, buffer: Any, key: Hashable, stream: Hashable) -> Job[CachedRegion]:
        """Have a buffer registered without waiting; see `acquire_in_background`.

        Raises
        ------
        PoolError
            It is stopped.
        ForkError
            In a child process.
        UsageError
            There is no such buffer.
        """
        if self._cache.forked:
            raise fork_error(f"Pool {self._cache.name!r}")
        return acquire_in_background(self._cache, self._started(), buffer, key, stream)

    def stop(self) -> None:
        """Call off what waits and what runs; return when the device is left alone."""
        if self._cache.forked:
            return  # the thread is the parent's, and the lock may be held for good
        with self._lock:
            self._stopped = True
            self._cache.on_progress = None
            thread, self._thread = self._thread, None
        # Without the lock: what runs may be at a miss of the cache, and come here.
        if thread is not None:
            thread.close()

    def resume(self) -> None:
        """Work again, when there is something to do."""
        if self._cache.forked:
            return
        with self._lock:
            self._stopped = False
            self._watch_for_work()

    def _watch_for_work(self) -> None:
        if self._depth:
            self._cache.on_progress = self._first_miss

    def _first_miss(self) -> None:
        """Start prefetching; never in the way of the request that missed."""
        try:
            self._started()
        except PoolError:
            return  # stopped just now, or being started
        except RuntimeError as error:  # no more threads
            _LOG.warning("pool %s does not prefetch: %s", self._cache.name, error)
            self._cache.on_progress = None
            return
        wake = self._cache.on_progress
        if wake is not None and wake != self._first_miss:
            wake()

    def _started(self) -> BackgroundRegistrar:
        with self._lock:
            if self._stopped:
                raise PoolError(f"Pool {self._cache.name!r} is closed.", "Open a new one.")
            if self._starting:  # then by this thread, which has the lock
                raise PoolError(
                    f"Pool {self._cache.name!r} cannot register asynchronously in a finalizer or "
                    "signal handler whose thread is in the middle of another call of the pool.",
                    "Do it outside of finalizers and signal handlers.",
                )
            if self._thread is None:
                self._starting = True
                try:
                    self._thread = self._start()
                finally:
                    self._starting = False
            return self._thread

    def _start(self) -> BackgroundRegistrar:
        thread = BackgroundRegistrar(
            self._cache.registrar,
            busy_share=self._busy_share,
            name=f"registrar-{self._cache.name}",
        )
        # A pool that is dropped instead of closed must not leave its thread behind.
        end = weakref.finalize(self, thread.close, wait=False)
        end.atexit = False  # a daemon thread ends with the process
        if self._depth:
            Prefetcher(self._cache, thread, depth=self._depth)
        return thread
