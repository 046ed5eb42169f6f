"""The clock of the packet simulator: a heap of events."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

Action = Callable[[int], None]


class EventQueue:
    """Events in order of time; those of one moment in the order in which they were entered.

    Attributes
    ----------
    now_ns
        Time of the last event, or the end of the last run.
    happened
        Events that happened.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.happened = 0
        # The number of entry decides between equal times, so no run depends on addresses.
        self._entered = count()
        self._heap: list[tuple[int, int, Action]] = []

    def at(self, time_ns: int, action: Action) -> None:
        """Call `action` with the time when it has come.

        Raises
        ------
        ValueError
            The time is past.
        """
        if time_ns < self.now_ns:
            raise ValueError(f"event at {time_ns} ns, but it is {self.now_ns} ns already")
        heappush(self._heap, (time_ns, next(self._entered), action))

    def run(self, until_ns: int) -> None:
        """Let everything happen up to and including `until_ns`."""
        heap, happened = self._heap, 0
        while heap and heap[0][0] <= until_ns:
            time_ns, _, action = heappop(heap)
            self.now_ns = time_ns
            happened += 1
            action(time_ns)
        self.now_ns = max(self.now_ns, until_ns)
        self.happened += happened
