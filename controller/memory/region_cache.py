"""Memory that others own, registered once and found again in microseconds.

A request is a hit when one region covers all of its bytes; else it is registered (region_builder).

A region must go before its memory does. Either its owner calls `invalidate()`, or the owner is an
object that dies (a numpy array, an mmap), which the cache sees. While somebody holds a
`CachedRegion`, or a peer an rkey, the owner is kept alive. What no object stands for (a pair of
address and length, a bytearray) and memory that goes while its owner lives (mmap.close(), torch's
set_()) must be invalidated: nothing hooks malloc or munmap. An object that does not own what it
shows (a ctypes array at some address) takes the region with it when it dies: give the address.

One lock guards what is found and counted. It is never held while the device registers, so hits go
on meanwhile, and a second request for the same range waits for the first. A second lock lets one
thread at a time tell the policy what happened: that is put off until somebody needs its answer.

Finalizers and signal handlers may release regions and end exports anywhere. What could wait for
their own thread, which is in the middle of a call of the cache, is refused (PoolError).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from controller.errors import UsageError
from controller.memory.buffers import locate
from controller.memory.cached_region import CachedRegion
from controller.memory.errors import PoolError, RegionInUseError
from controller.memory.export import Export, OnRevoke
from controller.memory.fork import fork_error, watch_fork
from controller.memory.policies import EvictionPolicy
from controller.memory.policy_log import PolicyLog
from controller.memory.region_builder import RegionBuilder
from controller.memory.region_eviction import Evictor, holders_text, watch_deaths
from controller.memory.region_state import CacheState, Entry
from controller.memory.stats import PoolStats
from controller.verbs.registration import Registrar, RegistrationError

__all__ = ["CachedRegion", "RegionCache"]


class RegionCache:
    """Registered regions of memory that others own.

    Parameters
    ----------
    registrar
        Registers and deregisters.
    capacity_bytes, max_regions
        What may be registered at any moment, whole pages counted: regions in use, retired ones and
        those being registered, too.
    policy
        Says which region goes when there is no room; driven by one thread at a time.
    stats
        Counters; this is the only cache that writes to them.
    clock
        Time in ns, for the time that registrations take.
    name
        Of the pool, in messages.
    """

    def __init__(
        self,
        registrar: Registrar,
        *,
        capacity_bytes: int,
        max_regions: int,
        policy: EvictionPolicy,
        stats: PoolStats,
        clock: Callable[[], int] = time.monotonic_ns,
        name: str = "pool",
    ) -> None:
        for key, value in (("capacity_bytes", capacity_bytes), ("max_regions", max_regions)):
            if value < 1:
                raise UsageError(f"Cache key {key} is {value}; allowed: from 1.")
        self.registrar = registrar
        self.stats = stats
        self.name = name
        self.forked = False
        # Called without locks when the policy may see further than before: by a prefetcher.
        self.on_progress: Callable[[], None] | None = None
        self._log = PolicyLog(policy)
        max_regions = min(max_regions, registrar.limits.max_mr)
        self._state = CacheState(capacity_bytes, max_regions, self._log, stats)
        self._lock = self._state.lock
        self._evictor = Evictor(self._state, self._log, registrar, stats, name)
        self._builder = RegionBuilder(self._state, self._evictor, registrar, stats, clock, name)
        watch_deaths(self._evictor, self._state, name)
        self._end = weakref.finalize(self, self._state.signal.put, False)
        watch_fork(self)

    # ---- hits ----

    def acquire(self, buffer: Any, key: Hashable = None, stream: Hashable = None) -> CachedRegion:
        """Find the region that covers a buffer, or register it.

        Parameters
        ----------
        buffer
            A numpy array or anything else with a writable, contiguous buffer; or (address, nbytes).
        key
            What messages and recorded traces call it; the address when None.
        stream
            Communicator or job whose order of requests may repeat.

        Raises
        ------
        UsageError
            The buffer cannot be registered, or is larger than the cache or what the device takes.
        PoolExhaustedError
            There is no room, and all that could go is in use; names by whom.
        RegistrationError
            The device refuses.
        PoolError
            A miss in a finalizer or signal handler, in the middle of another call.
        ForkError
            In a child process.
        """
        if self.forked:
            raise fork_error(f"Pool {self.name!r}")
        address, nbytes, owner = locate(buffer)
        entry = self._find(address, address + nbytes)
        if (
            entry is not None
            and (id(owner) in entry.owners or (owner is None and entry.ownerless))
            and not entry.prefetched
        ):
            stats = self.stats
            stats.gets += 1  # no other thread runs within such a statement, in CPython
            stats.hits += 1
            self._log.requested(entry.start, entry.pinned_nbytes, entry.register_us, stream)
        else:
            if entry is not None:
                self._release(entry)
            label = f"{address:#x}" if key is None else key
            entry = self._acquire_slowly(address, nbytes, owner, label, stream)
        if self.stats.recorder is not None:
            label = entry.label if key is None else key
            self.stats.recorder.add(label, entry.pinned_nbytes, entry.register_us)
        if self._log.is_long() and not self._state.is_busy():
            with self._state.busy():
                self._log.deliver()
        return CachedRegion(self, entry, address, nbytes, owner)

    def _find(self, start: int, end: int) -> Entry | None:
        """A region in use from now on that covers a range, without the lock; None if unsure."""
        state = self._state
        if state.dead or state.dropped:
            return None
        try:
            entry = state.found.covering(start, end)
        except IndexError:  # another thread is changing the map
            return None
        # For the same reason, what was found may be another region.
        if entry is None or entry.start > start or entry.end < end:
            return None
        entry.users.append(None)
        if entry.hidden or entry.leaving:
            self._release(entry)
            return None
        return entry

    def _release(self, entry: Entry) -> None:
        entry.users.pop()
        state = self._state
        if entry.hidden or state.waiting:
            if state.holds_lock():
                state.defer(partial(state.let_go, entry))
            else:
                with self._lock:
                    state.let_go(entry)
        if state.doomed:
            self._evictor.sweep()

    # ---- misses ----

    def _acquire_slowly(
        self, address: int, nbytes: int, owner: Any, label: Hashable, stream: Hashable
    ) -> Entry:
        state, stats = self._state, self.stats
        self._builder.check_size(address, address + nbytes)
        self._refuse_within_calls("register memory")
        was_ahead = False
        with state.busy():
            with self._lock:
                entry = self._builder.wait_for(address, address + nbytes)
                stats.gets += 1
                if entry is not None:
                    stats.hits += 1
                    entry.users.append(None)
                    state.watch(entry, owner)
                    was_ahead, entry.prefetched = entry.prefetched, False
                    self._log.requested(entry.start, entry.pinned_nbytes, entry.register_us, stream)
                else:
                    stats.misses += 1
                    claim = self._builder.claim(address, address + nbytes)
                    expected_us = stats.registration_us(claim.pinned_nbytes)
                    self._log.requested(claim.start, claim.pinned_nbytes, expected_us, stream)
            if entry is None:
                entry = self._builder.build(claim, [owner], label)
            elif was_ahead:
                stats.prefetched("useful")
            else:
                return entry
        wake = self.on_progress  # read once: its end may come at any moment
        if wake is not None:
            wake()
        return entry

    # ---- ahead of need ----

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether a region has all of a range at this moment; it is not held."""
        self._refuse_within_calls("look memory up")
        with self._lock:
            self._state.settle()
            return self._state.found.covering(address, address + nbytes) is not None

    def candidates(self, limit: int) -> list[Hashable]:
        """Evicted regions that the policy expects to be asked for, most urgent first."""
        self._refuse_within_calls("look ahead")
        with self._state.busy(), self._log.policy() as policy:
            return policy.prefetch_candidates(limit)

    def prefetch(self, key: Hashable) -> bool:
        """Register an evicted region again, if its memory is known to be alive.

        Parameters
        ----------
        key
            One of `candidates`.

        Returns
        -------
        bool
            Whether it is registered now, and was not before.
        """
        self._refuse_within_calls("register memory")
        state = self._state
        ghost = state.ghosts.get(key) if isinstance(key, int) else None
        owners = ghost.living_owners() if ghost is not None else None
        if ghost is None or owners is None:
            with self._lock:
                state.settle()
            return False
        start, end = ghost.start, ghost.end
        with state.busy():
            with self._lock:
                state.settle()
                if state.closed or state.ghosts.get(start) is not ghost:
                    return False
                if state.found.overlapping(start, end) or state.is_pending(start, end):
                    return False
                claim = self._builder.claim(start, end)
            try:
                self._builder.build(claim, owners, ghost.label, ahead=True)
            except (PoolError, RegistrationError):
                return False  # who needs it will be told why
        self.stats.prefetched("issued")
        return True

    def registering_ns(self) -> int:
        """Time that the device took for the calling thread's registrations here so far, in ns."""
        return self._builder.spent_ns

    # ---- going ----

    def _refuse_within_calls(self, what: str) -> None:
        """Refuse what this thread would wait for itself with, or what a child has no part in.

        Raises
        ------
        PoolError, ForkError
        """
        if self.forked:
            raise fork_error(f"Pool {self.name!r}")
        if self._state.is_busy():
            raise PoolError(
                f"Pool {self.name!r} cannot {what} in a finalizer or signal handler whose thread "
                "is in the middle of another call of the pool.",
                "Do it outside of finalizers and signal handlers.",
            )

    def _withdraw(self, start: int, end: int) -> PoolError:
        """Let a range be found no more as soon as this thread goes on; the error for who asked."""
        self._state.dead.append((start, end))
        self._state.signal.put(True)
        return PoolError(
            f"Memory at {start:#x} ({end - start} bytes) is not deregistered yet: pool "
            f"{self.name!r} was told by a finalizer or signal handler whose thread is in the "
            "middle of another call of the pool. No request finds it any more, and it is "
            "deregistered as soon as nobody uses it.",
            "Invalidate outside of finalizers and signal handlers, and free the memory afterwards.",
        )

    def _export(
        self, handle: CachedRegion, entry: Entry, on_revoke: OnRevoke, timeout_s: float
    ) -> Export:
        state = self._state

        def forget(export: Export) -> None:
            entry.exports.remove(export)
            state.doom(entry)
            state.notify()

        def ended(export: Export) -> None:
            if state.holds_lock():
                state.defer(partial(forget, export))
                return
            with self._lock:
                forget(export)
            self._evictor.sweep()

        owners = [reference() for reference in list(entry.owners.values())]
        export = Export(
            handle.address, handle.nbytes, handle.rkey, handle.generation, on_revoke, timeout_s,
            (handle._owner, *owners), ended,
        )  # fmt: skip
        # Without the lock: `handle` is a user of the entry, so it cannot go meanwhile.
        entry.exports.append(export)
        return export

    def invalidate(self, buffer: Any, timeout_s: float = 0.0) -> int:
        """Deregister all regions that hold a byte of a buffer: its memory is about to be freed.

        Parameters
        ----------
        buffer
            As for `acquire`.
        timeout_s
            How long to wait for work requests in flight; by default not at all.

        Returns
        -------
        int
            Number of regions that went.

        Raises
        ------
        RegionInUseError
            A region is in use, or a peer did not give an rkey back: don't free the memory. The
            message says who.
        RegistrationError
            The device keeps a region; the others went.
        PoolError
            In a finalizer or signal handler, in the middle of another call: it goes later.
        """
        if self.forked:
            raise fork_error(f"Pool {self.name!r}")
        address, nbytes, _ = locate(buffer)
        end = address + nbytes
        state = self._state
        if state.holds_lock():
            raise self._withdraw(address, end)
        with self._lock, state.expecting_releases():
            entries = self._idle(address, end, time.monotonic() + timeout_s)
            for entry in entries:
                state.mark_leaving(entry)
            state.forget_ghosts(address, end)
        with state.busy():
            kept, error = self._evictor.expel_all(entries, "invalidated", forget=True)
        if error is not None:
            raise error
        if kept:
            raise RegionInUseError(
                f"Memory at {address:#x} ({nbytes} bytes) is still registered: "
                f"{holders_text(kept) or 'asked for again meanwhile'}.",
                "Don't free it; end what uses it, at the peers too, and invalidate again.",
            )
        return len(entries)

    def _idle(self, start: int, end: int, deadline_s: float) -> list[Entry]:
        """Wait until nobody uses the regions in a range; return them."""
        state = self._state
        while True:
            state.settle()
            entries = state.touching(start, end)
            in_use = [entry for entry in entries if entry.references]
            if in_use:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise RegionInUseError(
                        f"Memory at {start:#x} ({end - start} bytes) cannot be deregistered: "
                        f"{holders_text(in_use)}.",
                        "Release its regions when their work requests are done, or wait longer.",
                    )
                state.wait(left_s)
            elif state.is_pending(start, end) or any(entry.leaving for entry in entries):
                if state.is_in_call():
                    raise self._withdraw(start, end)
                state.wait()  # ends by itself
            else:
                return entries

    def close(self, force: bool = False) -> None:
        """Deregister everything. Twice does no harm.

        Parameters
        ----------
        force
            Even what is in use: work requests in flight fail, and so do peers' later ones.

        Raises
        ------
        RegionInUseError
            Something is in use, or a peer keeps an rkey; the cache stays open.
        RegistrationError
            The device keeps a region; the others are gone, and closing may be tried again.
        """
        self._refuse_within_calls("be closed")
        state = self._state
        with self._lock:
            if state.closed:
                return
            state.closed = True  # no new registrations
        try:
            with state.busy():
                self._deregister_all(force)
        except BaseException:
            state.closed = False
            raise
        self._end()
        self._evictor.sweep()

    def _deregister_all(self, force: bool) -> None:
        state = self._state
        with self._lock:
            while state.pending or state.leaving:
                state.wait()
            state.settle()
            entries = state.registered()
            used = [entry for entry in entries if entry.references]
            if used and not force:
                raise RegionInUseError(
                    f"Pool {self.name!r} cannot be closed: {holders_text(used)}.",
                    "Release all regions first, or close by force.",
                )
            for entry in entries:
                state.mark_leaving(entry)
        kept, error = self._evictor.expel_all(entries, "closed", forget=True, force=force)
        if error is not None:
            raise error
        if kept:
            raise RegionInUseError(
                f"Pool {self.name!r} cannot be closed: {holders_text(kept)}.",
                "Let the peers give their rkeys back, or close by force.",
            )
