"""W-TinyLFU: a newcomer takes a place only from what is asked for less often.

References
----------
G. Einziger, R. Friedman, B. Manes: TinyLFU: A Highly Efficient Cache Admission Policy.
ACM Transactions on Storage 13(4), 2017, sections 3 and 4.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import chain

from controller.memory.policies.shadow import Shadow

# Paper, section 4: the window has 1 % of the cache, protected keys 80 % of the rest.
_WINDOW_SHARE = 0.01
_PROTECTED_SHARE = 0.8
# Counters of four bits, halved when there were ten requests for each key held (paper, section 3.3).
_MAX_COUNT = 15
_SAMPLE_PER_KEY = 10


class TinyLfuShadow(Shadow):
    """W-TinyLFU by bytes, with an exact count where the paper has a sketch.

    A pool holds thousands of regions, not millions: the counts fit in memory, and halving drops
    those that reach 0.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._window_limit = max(1, int(capacity * _WINDOW_SHARE))
        self._main_limit = capacity - self._window_limit
        self._protected_limit = int(self._main_limit * _PROTECTED_SHARE)
        self._window: OrderedDict[Hashable, None] = OrderedDict()
        self._probation: OrderedDict[Hashable, None] = OrderedDict()
        self._protected: OrderedDict[Hashable, None] = OrderedDict()
        self._window_used = 0
        self._protected_used = 0
        self._counts: dict[Hashable, int] = {}
        self._counted = 0

    def _count(self, key: Hashable) -> None:
        count = self._counts.get(key, 0)
        if count < _MAX_COUNT:
            self._counts[key] = count + 1
        self._counted += 1
        if self._counted > _SAMPLE_PER_KEY * (len(self.weights) + 1):
            self._counts = {key: count >> 1 for key, count in self._counts.items() if count > 1}
            self._counted >>= 1

    def _hit(self, key: Hashable) -> None:
        self._count(key)
        if key in self._window:
            self._window.move_to_end(key)
        elif key in self._protected:
            self._protected.move_to_end(key)
        else:
            del self._probation[key]
            self._protected[key] = None
            self._protected_used += self.weights[key]
            while self._protected_used > self._protected_limit:
                lowered = self._protected.popitem(last=False)[0]
                self._protected_used -= self.weights[lowered]
                self._probation[lowered] = None

    def _miss(self, key: Hashable, weight: int) -> None:
        self._count(key)
        self._window[key] = None
        self._window_used += weight
        while self._window_used > self._window_limit:
            candidate = self._window.popitem(last=False)[0]
            self._window_used -= self.weights[candidate]
            self._admit(candidate)

    def _admit(self, candidate: Hashable) -> None:
        """Give it a place in the main part if it is asked for more than those that have to go."""
        excess = self.used - self._window_used - self._main_limit
        count = self._counts.get(candidate, 0)
        going = []
        for victim in chain(self._probation, self._protected):
            if excess <= 0:
                break
            if self._counts.get(victim, 0) >= count:
                self._drop(candidate)
                return
            going.append(victim)
            excess -= self.weights[victim]
        for victim in going:
            self._leave(victim)
            self._drop(victim)
        self._probation[candidate] = None

    def _leave(self, key: Hashable) -> None:
        if key in self._window:
            del self._window[key]
            self._window_used -= self.weights[key]
        elif key in self._protected:
            del self._protected[key]
            self._protected_used -= self.weights[key]
        else:
            del self._probation[key]

    def coldest(self) -> Iterator[Hashable]:
        """Probation, the window, then the protected, least recently used first."""
        return chain(self._probation, self._window, self._protected)
