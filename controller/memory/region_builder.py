"""A region comes: what is registered for a request that no region covers.

Regions do not share a byte. A request that overlaps some of them is registered together with them,
as one region, while that stays within the limits; else they make way. Regions that others still use
are then *retired*: found no more, deregistered when the last user lets go. What is registered are
whole pages; two regions may meet in a page, which the device does not mind, so that the neighbours
in one flat array of gradients do not grow into one region.

A range that is being registered is *pending*: who wants a part of it waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from controller.errors import UsageError
from controller.memory.errors import PoolError, PoolExhaustedError
from controller.memory.region_eviction import Evictor
from controller.memory.region_map import page_range
from controller.memory.region_state import CacheState, Entry
from controller.memory.stats import PoolStats
from controller.verbs.registration import MemoryRegion, Registrar, RegistrationError

# Once more after room was made on the device.
_ATTEMPTS = 2


@dataclass(frozen=True)
class Claim:
    """A range that one thread is going to register.

    Parameters
    ----------
    start, end
        All of it.
    asked
        The part that a request needs.
    merged
        Regions whose memory is in it.
    """

    start: int
    end: int
    asked: tuple[int, int]
    merged: Sequence[Entry]

    @property
    def pinned_nbytes(self) -> int:
        """Of its whole pages."""
        first, behind = page_range(self.start, self.end)
        return behind - first


class RegionBuilder:
    """Registers ranges for the cache.

    Parameters
    ----------
    state, evictor
        The cache's.
    registrar, stats, clock
        As for the cache.
    name
        Of the pool, in messages.
    """

    def __init__(
        self,
        state: CacheState,
        evictor: Evictor,
        registrar: Registrar,
        stats: PoolStats,
        clock: Callable[[], int],
        name: str,
    ) -> None:
        self._state, self._evictor = state, evictor
        self._registrar, self._stats, self._clock = registrar, stats, clock
        self._name = name
        self._spent = threading.local()

    @property
    def spent_ns(self) -> int:
        """Time that the calling thread has spent in the device's registrations so far."""
        spent_ns: int = getattr(self._spent, "ns", 0)
        return spent_ns

    def check_size(self, start: int, end: int) -> None:
        """Refuse what can never be registered.

        Raises
        ------
        UsageError
            Names the limit.
        """
        first, behind = page_range(start, end)
        state, limits = self._state, self._registrar.limits
        if behind - first > state.capacity_bytes:
            raise UsageError(
                f"A buffer of {end - start} bytes needs {behind - first} bytes of whole pages; the "
                f"cache of pool {self._name!r} holds {state.capacity_bytes} in all.",
                "Give the cache more room, or register the buffer in parts.",
            )
        if behind - first > limits.max_mr_nbytes:
            raise UsageError(
                f"A buffer of {end - start} bytes is more than {limits.device} registers at once "
                f"({limits.max_mr_nbytes} bytes).",
                "Register the buffer in parts.",
            )

    def wait_for(self, start: int, end: int) -> Entry | None:
        """Wait until nothing in a range is under way; return what covers it then.

        Under the lock, which waiting lets go.

        Raises
        ------
        PoolError
            The cache is closed.
        """
        state = self._state
        while True:
            if state.closed:
                raise PoolError(f"Pool {self._name!r} is closed.", "Open a new one.")
            state.settle()
            entry = state.found.covering(start, end)
            if entry is not None:
                return entry
            start_all, end_all = self._union(start, end)
            if not state.is_pending(start_all, end_all):
                return None
            state.wait()

    def _union(self, start: int, end: int) -> tuple[int, int]:
        """The range together with the regions that it overlaps, if that can be one region."""
        state = self._state
        overlapping = state.found.overlapping(start, end)
        if not overlapping:
            return start, end
        first, behind = min(start, overlapping[0].start), max(end, overlapping[-1].end)
        low, high = page_range(first, behind)
        fits = high - low <= min(state.capacity_bytes, self._registrar.limits.max_mr_nbytes)
        return (first, behind) if fits else (start, end)

    def claim(self, start: int, end: int) -> Claim:
        """Take a range for registration, and retire what is in the way and out of use.

        Under the lock. Regions in use stay to be found until the new one is there.
        """
        state = self._state
        asked = start, end
        start, end = self._union(start, end)
        state.pending.append((start, end))
        overlapping = state.found.overlapping(start, end)
        for entry in overlapping:
            if not entry.references and not entry.exports:
                state.retire(entry, "merged")
        inside = [e for e in overlapping if start <= e.start and e.end <= end]
        return Claim(start, end, asked, inside)

    def build(
        self, claim: Claim, owners: Sequence[Any], label: Hashable, ahead: bool = False
    ) -> Entry:
        """Register what was claimed, without the lock.

        Parameters
        ----------
        claim
            Ends in any case.
        owners
            Alive, of the memory that was asked for; None where nobody knows.
        label
            What messages call it.
        ahead
            Nobody has asked yet: the region is not in use, and takes less room from others.

        Returns
        -------
        Entry
            With a user, unless it is ahead.
        """
        state = self._state
        (start, end), merged = (claim.start, claim.end), claim.merged
        is_union = (start, end) != claim.asked
        # Kept until the lock is given back: the last reference to an owner must not go under it.
        inherited: list[Any] = []
        try:
            try:
                region, elapsed_ns = self._reserve_and_register(start, end, ahead, is_union)
            except (RegistrationError, PoolExhaustedError):
                if not is_union:
                    raise
                # No room for both, or what it was to be merged with is gone without notice.
                (start, end), merged = claim.asked, []
                region, elapsed_ns = self._reserve_and_register(start, end, ahead)
            entry = Entry(start, end, label)
            entry.mr, entry.register_us = region, elapsed_ns / 1000
            entry.prefetched = ahead
            if not ahead:
                entry.users.append(None)
            with self._state.lock:
                for old in state.found.overlapping(start, end):
                    state.retire(old, "merged")
                for owner in owners:
                    state.watch(entry, owner)
                for old in merged:
                    inherited += self._inherit(entry, old)
                state.install(entry)
            return entry
        finally:
            with self._state.lock:
                state.pending.remove((claim.start, claim.end))
                state.notify()
            self._evictor.sweep()

    def _inherit(self, entry: Entry, old: Entry) -> list[Any]:
        """The memory of a merged region has its owners still; they are returned."""
        entry.ownerless |= old.ownerless
        owners = [reference() for reference in list(old.owners.values())]
        for owner in owners:
            if owner is None:  # died just now, and its death was told of the old region
                entry.orphaned = True
                self._state.dead.append(entry)
            else:
                self._state.watch(entry, owner)
        return owners

    def _reserve_and_register(
        self, start: int, end: int, ahead: bool, is_try: bool = False
    ) -> tuple[MemoryRegion, int]:
        """Evict what is in the way, and register; what others need stays for a mere try.

        What the device cannot take beside all that is registered it may take without some of it.
        Pages that are pinned count, whosever they are: as many less than it is asked for suffice.
        It does not say what is wrong, so for memory that cannot be registered at all, no more
        than that goes in vain.
        """
        first, behind = page_range(start, end)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._attempt(first, behind - first, ahead)
            except RegistrationError:
                if ahead or is_try or attempt == _ATTEMPTS:
                    raise
                if not self._evictor.make_way(behind - first):
                    raise
        raise AssertionError

    def _attempt(self, first: int, nbytes: int, ahead: bool) -> tuple[MemoryRegion, int]:
        self._evictor.reserve(nbytes, urgent=not ahead)
        begin_ns = self._clock()
        try:
            region = self._registrar.register(first, nbytes)
        except BaseException:
            with self._state.lock:
                self._state.give_back(nbytes)
            raise
        finally:
            elapsed_ns = self._clock() - begin_ns
            self._spent.ns = self.spent_ns + elapsed_ns
        self._stats.registered(nbytes, elapsed_ns)
        return region, elapsed_ns
