"""LIRS: what came back soon after its last use stays.

References
----------
S. Jiang, X. Zhang: LIRS: An Efficient Low Inter-reference Recency Set Replacement Policy to Improve
Buffer Cache Performance. SIGMETRICS 2002.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import chain

from controller.memory.policies.shadow import Shadow

# Share of the pool that keys of high inter-reference recency pass through (paper, section 3.1).
_HIR_SHARE = 0.01
# Bytes of absent keys whose last use is remembered, in pools. A loop up to this size is recognised.
_GHOST_POOLS = 8


class LirsShadow(Shadow):
    """LIRS by bytes: the stack S, the queue Q, and absent keys in S up to a bound."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._lir_limit = capacity - max(1, int(capacity * _HIR_SHARE))
        self._lir_used = 0
        self._stack: OrderedDict[Hashable, None] = OrderedDict()
        self._lir: set[Hashable] = set()
        self._queue: OrderedDict[Hashable, None] = OrderedDict()
        self._ghosts: OrderedDict[Hashable, int] = OrderedDict()
        self._ghost_used = 0

    def _hit(self, key: Hashable) -> None:
        if key in self._lir:
            was_bottom = next(iter(self._stack)) == key
            self._stack.move_to_end(key)
            if was_bottom:
                self._prune()
        elif key in self._stack:
            self._stack.move_to_end(key)
            del self._queue[key]
            self._promote(key)
        else:
            self._stack[key] = None
            self._queue.move_to_end(key)

    def _miss(self, key: Hashable, weight: int) -> None:
        while self.used > self.capacity:
            if not self._queue:
                self._demote()
            self._evict()
        if key in self._ghosts:
            self._ghost_used -= self._ghosts.pop(key)
            self._stack.move_to_end(key)
            self._promote(key)
            return
        self._stack[key] = None
        if self._lir_used + weight <= self._lir_limit:
            self._lir.add(key)
            self._lir_used += weight
        else:
            self._queue[key] = None

    def _evict(self) -> None:
        key = self._queue.popitem(last=False)[0]
        if key in self._stack:
            self._ghosts[key] = self.weights[key]
            self._ghost_used += self.weights[key]
            while self._ghost_used > _GHOST_POOLS * self.capacity:
                oldest, weight = self._ghosts.popitem(last=False)
                self._ghost_used -= weight
                del self._stack[oldest]
        self._drop(key)

    def _promote(self, key: Hashable) -> None:
        self._lir.add(key)
        self._lir_used += self.weights[key]
        while self._lir_used > self._lir_limit and len(self._lir) > 1:
            self._demote()

    def _demote(self) -> None:
        """The key at the bottom of S goes to the end of Q."""
        self._prune()
        key = self._stack.popitem(last=False)[0]
        self._lir.discard(key)
        self._lir_used -= self.weights[key]
        self._queue[key] = None
        self._prune()

    def _prune(self) -> None:
        """The bottom of S is always of low inter-reference recency."""
        while self._stack:
            key = next(iter(self._stack))
            if key in self._lir:
                return
            del self._stack[key]
            if key in self._ghosts:
                self._ghost_used -= self._ghosts.pop(key)

    def _leave(self, key: Hashable) -> None:
        self._stack.pop(key, None)
        if key in self._lir:
            self._lir.remove(key)
            self._lir_used -= self.weights[key]
            self._prune()
        else:
            del self._queue[key]

    def coldest(self) -> Iterator[Hashable]:
        """Q from its head, then S from its bottom."""
        return chain(self._queue, (key for key in self._stack if key in self._lir))
