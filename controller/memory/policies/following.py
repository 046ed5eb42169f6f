"""The pool's real content follows a simulated one, or the best of several.

The pool differs from what the policy would hold: regions are in use when they should go, others
are prefetched, and the leader may change. What the leader does not hold goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence

from controller.memory.policies.election import ADAPT_EVERY, Election
from controller.memory.policies.next_use import NextUseShadow
from controller.memory.policies.shadow import Shadow

# A region that was prefetched and not asked for within so many requests was a wrong guess.
_AWAIT_REQUESTS = 1024
# How far ahead to look for each region that may be prefetched; most of those due are resident.
_LOOK_AHEAD = 4
_MIN_LOOK_AHEAD = 16


class FollowingPolicy:
    """An `EvictionPolicy` that follows shadows.

    Parameters
    ----------
    shadows
        The first leads until another one has proved better.
    min_weight
        Bytes that every region counts at least: its share of a pool that is limited in regions.
    """

    def __init__(self, shadows: Sequence[Shadow], min_weight: int = 1) -> None:
        self._shadows = list(shadows)
        self._min_weight = min_weight
        self._leader = self._shadows[0]
        self._heat = next((one for one in self._shadows if isinstance(one, NextUseShadow)), None)
        favourite = None if self._heat is None else self._shadows.index(self._heat)
        self._election = Election(len(self._shadows), favourite)
        # A dict: the same order in every process, which a set of strings has not.
        self._resident: dict[Hashable, None] = {}
        # Resident, and not held by the leader: those go first, oldest first.
        self._strays: OrderedDict[Hashable, None] = OrderedDict()
        # Named for prefetch, and not asked for since.
        self._named: OrderedDict[Hashable, None] = OrderedDict()
        # Prefetched and not asked for yet, with the request count after which it was a wrong guess.
        self._awaited: OrderedDict[Hashable, int] = OrderedDict()
        self._requests = 0

    @property
    def leader(self) -> Shadow:
        """What the content follows now."""
        return self._leader

    @property
    def changes(self) -> int:
        """How often another shadow took the lead."""
        return self._election.changes

    def on_request(
        self, key: Hashable, nbytes: int, register_us: float = 0.0, stream: Hashable = None
    ) -> None:
        """See `EvictionPolicy`."""
        weight = max(nbytes, self._min_weight)
        self._requests += 1
        hits = [shadow.request(key, weight, register_us, stream) for shadow in self._shadows]
        if len(hits) > 1 and self._election.vote(hits, self._missing):
            self._follow(self._shadows[self._election.leader])
        elif self._leader.dropped:
            self._sort_out(self._leader.dropped)
        self._named.pop(key, None)
        self._awaited.pop(key, None)
        if key in self._resident:
            self._sort_out((key,))
        if self._requests % ADAPT_EVERY == 0:
            self._tidy()

    def on_insert(self, key: Hashable, nbytes: int) -> None:
        """See `EvictionPolicy`."""
        self._resident[key] = None
        if key in self._named:
            del self._named[key]
            self._awaited[key] = self._requests + _AWAIT_REQUESTS
        self._sort_out((key,))

    def on_remove(self, key: Hashable, *, forget: bool = False) -> None:
        """See `EvictionPolicy`."""
        self._resident.pop(key, None)
        self._strays.pop(key, None)
        self._awaited.pop(key, None)
        if forget:
            self._named.pop(key, None)
            for shadow in self._shadows:
                shadow.forget(key)

    def victims(self) -> Iterator[Hashable]:
        """See `EvictionPolicy`."""
        late: list[Hashable] = []
        for key in self._strays:
            if self._awaited.get(key, 0) > self._requests:
                late.append(key)
            else:
                yield key
        for key in self._leader.coldest():
            if key in self._resident:
                if key in self._awaited:
                    late.append(key)
                else:
                    yield key
        yield from late

    def prefetch_candidates(self, limit: int) -> list[Hashable]:
        """See `EvictionPolicy`."""
        if self._heat is None:
            return []
        coming = self._heat.coming(max(_MIN_LOOK_AHEAD, _LOOK_AHEAD * limit))
        candidates = [key for key in coming if key not in self._resident][:limit]
        self._named.update(dict.fromkeys(candidates))
        while len(self._named) > _AWAIT_REQUESTS:
            self._named.popitem(last=False)
        return candidates

    def _sort_out(self, keys: Sequence[Hashable]) -> None:
        """Strays are those resident keys that the leader does not hold."""
        for key in keys:
            if key in self._leader.weights or key not in self._resident:
                self._strays.pop(key, None)
            else:
                self._strays[key] = None
        self._leader.dropped.clear()

    def _follow(self, leader: Shadow) -> None:
        self._leader = leader
        leader.dropped.clear()
        self._strays = OrderedDict.fromkeys(
            key for key in self._resident if key not in leader.weights
        )

    def _missing(self, number: int) -> int:
        return sum(key not in self._resident for key in self._shadows[number].weights)

    def _tidy(self) -> None:
        for shadow in self._shadows:
            if shadow is not self._leader:
                shadow.dropped.clear()
        if self._heat is not None:
            self._election.adapt(len(self._resident), self._heat.typical_gap)
        while self._awaited and next(iter(self._awaited.values())) <= self._requests:
            self._awaited.popitem(last=False)
