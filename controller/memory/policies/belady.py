"""Belady's MIN: what is needed last goes first. Needs the future, so it is for replay only.

References
----------
L. A. Belady: A study of replacement algorithms for a virtual-storage computer. IBM Systems Journal
5(2), 1966. With regions of unequal size it is a yardstick, not the optimum.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from heapq import heappop, heappush

# Next use of a request whose key is never asked for again.
NEVER = (1 << 63) - 1


def next_uses(keys: Iterable[Hashable]) -> array[int]:
    """For each request, the number of the next one for the same key; `NEVER` for the last.

    Parameters
    ----------
    keys
        Of all requests, in order. Eight bytes are kept for each.
    """
    result = array("q")
    last: dict[Hashable, int] = {}
    for number, key in enumerate(keys):
        before = last.get(key)
        if before is not None:
            result[before] = number
        last[key] = number
        result.append(NEVER)
    return result


class BeladyPolicy:
    """An `EvictionPolicy` that is told the future.

    Parameters
    ----------
    next_use
        As `next_uses` gives it; the requests must be those.
    """

    def __init__(self, next_use: Sequence[int]) -> None:
        self._next_use = next_use
        self._requests = 0
        self._next: dict[Hashable, int] = {}
        self._resident: set[Hashable] = set()
        # (-next use, number of the entry, key); void unless resident and next use still the same.
        self._heap: list[tuple[int, int, Hashable]] = []
        self._entries = 0
        # Taken from the heap by `victims`; those that were skipped go back.
        self._named: list[Hashable] = []

    def on_request(
        self, key: Hashable, nbytes: int, register_us: float = 0.0, stream: Hashable = None
    ) -> None:
        """See `EvictionPolicy`."""
        self._next[key] = self._next_use[self._requests]
        self._requests += 1
        if key in self._resident:
            self._enter(key)

    def on_insert(self, key: Hashable, nbytes: int) -> None:
        """See `EvictionPolicy`."""
        self._resident.add(key)
        self._enter(key)

    def on_remove(self, key: Hashable, *, forget: bool = False) -> None:
        """See `EvictionPolicy`."""
        self._resident.discard(key)
        if self._next.get(key) == NEVER:
            del self._next[key]

    def victims(self) -> Iterator[Hashable]:
        """See `EvictionPolicy`."""
        for key in self._named:
            if key in self._resident:
                self._enter(key)
        self._named.clear()
        named = set()
        while self._heap:
            next_use, _entry, key = heappop(self._heap)
            if key in self._resident and -next_use == self._next[key] and key not in named:
                named.add(key)
                self._named.append(key)
                yield key

    def prefetch_candidates(self, limit: int) -> list[Hashable]:
        """None: the bound is one on eviction alone."""
        return []

    def _enter(self, key: Hashable) -> None:
        self._entries += 1
        heappush(self._heap, (-self._next[key], self._entries, key))
