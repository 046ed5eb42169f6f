"""What happened to the cached regions, told to the eviction policy when its answer is needed.

A policy that predicts takes some 10 µs a request; a hit should take 2. So a hit is only written
down, and the policy hears of it before it is asked for a victim, or after so many that the memory
for them counts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from controller.memory.policies import EvictionPolicy

# One hit in so many waits while the policy hears of all of them: seldom enough that the 99th
# percentile of hits does not see it, and few enough that the wait is some milliseconds.
LONG = 1024

_REQUEST, _INSERT, _REMOVE = range(3)


class PolicyLog:
    """Events in order; the policy behind them has one caller at a time.

    `requested`, `inserted` and `removed` are called under the cache's lock, which is what puts them
    in order. The policy's own lock is never taken while the cache's is held.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._lock = threading.Lock()
        self._events: deque[tuple[int, Hashable, int, float, Hashable]] = deque()

    def requested(self, key: Hashable, nbytes: int, register_us: float, stream: Hashable) -> None:
        """Somebody asked for a region, resident or not."""
        self._events.append((_REQUEST, key, nbytes, register_us, stream))

    def inserted(self, key: Hashable, nbytes: int) -> None:
        """A region is resident."""
        self._events.append((_INSERT, key, nbytes, 0.0, None))

    def removed(self, key: Hashable, forget: bool) -> None:
        """A region is no longer resident; with `forget`, its memory is gone, too."""
        self._events.append((_REMOVE, key, forget, 0.0, None))

    def is_long(self) -> bool:
        """Whether it is time to deliver although nobody asked."""
        return len(self._events) >= LONG

    def deliver(self) -> None:
        """Tell the policy, unless another thread is at it."""
        if self._lock.acquire(blocking=False):
            try:
                self._tell()
            finally:
                self._lock.release()

    @contextmanager
    def policy(self) -> Iterator[EvictionPolicy]:
        """The policy, knowing all that happened so far; for this thread alone."""
        with self._lock:
            self._tell()
            yield self._policy

    def _tell(self) -> None:
        policy, events = self._policy, self._events
        for _ in range(len(events)):
            kind, key, number, register_us, stream = events.popleft()
            if kind == _REQUEST:
                policy.on_request(key, number, register_us, stream)
            elif kind == _INSERT:
                policy.on_insert(key, number)
            else:
                policy.on_remove(key, forget=bool(number))
