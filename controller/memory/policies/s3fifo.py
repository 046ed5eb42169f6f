"""S3-FIFO: a small queue for newcomers, a main queue for what was asked for again, and a ghost.

References
----------
J. Yang et al.: FIFO Queues are All You Need for Cache Eviction. SOSP 2023, algorithm 1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import chain

from controller.memory.policies.shadow import Shadow

# Paper, section 4: the small queue has a tenth of the cache, the ghost as much as the main queue.
_SMALL_SHARE = 0.1
_GHOST_SHARE = 0.9
# Two bits of frequency; a newcomer asked for more than once goes to the main queue.
_MAX_FREQUENCY = 3
_MOVE_TO_MAIN = 2


class S3FifoShadow(Shadow):
    """S3-FIFO by bytes."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small_limit = int(capacity * _SMALL_SHARE)
        self._small_used = 0
        self._small: OrderedDict[Hashable, int] = OrderedDict()
        self._main: OrderedDict[Hashable, int] = OrderedDict()
        self._ghost: OrderedDict[Hashable, int] = OrderedDict()
        self._ghost_used = 0
        self._full_once = False

    def _hit(self, key: Hashable) -> None:
        queue = self._small if key in self._small else self._main
        queue[key] = min(queue[key] + 1, _MAX_FREQUENCY)

    def _miss(self, key: Hashable, weight: int) -> None:
        known = key in self._ghost
        if known:
            self._ghost_used -= self._ghost.pop(key)
        while self.used > self.capacity:
            self._full_once = True
            if self._small_used > self._small_limit or not self._main:
                self._evict_small()
            else:
                self._evict_main()
        # Until the pool has been full once, there is nothing to defend the main queue against.
        if known or (not self._full_once and self._small_used + weight > self._small_limit):
            self._main[key] = 0
        else:
            self._small[key] = 0
            self._small_used += weight

    def _evict_small(self) -> None:
        key, frequency = self._small.popitem(last=False)
        weight = self.weights[key]
        self._small_used -= weight
        if frequency >= _MOVE_TO_MAIN:
            self._main[key] = 0
            return
        self._ghost[key] = weight
        self._ghost_used += weight
        while self._ghost_used > _GHOST_SHARE * self.capacity and self._ghost:
            self._ghost_used -= self._ghost.popitem(last=False)[1]
        self._drop(key)

    def _evict_main(self) -> None:
        key, frequency = self._main.popitem(last=False)
        if frequency:
            self._main[key] = frequency - 1
        else:
            self._drop(key)

    def _leave(self, key: Hashable) -> None:
        if key in self._small:
            del self._small[key]
            self._small_used -= self.weights[key]
        else:
            del self._main[key]

    def coldest(self) -> Iterator[Hashable]:
        """The small queue, then the main queue, those asked for again last."""
        return chain(
            (key for key, frequency in self._small.items() if frequency < _MOVE_TO_MAIN),
            (key for key, frequency in self._main.items() if not frequency),
            (key for key, frequency in self._main.items() if frequency),
            (key for key, frequency in self._small.items() if frequency >= _MOVE_TO_MAIN),
        )
