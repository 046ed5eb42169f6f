"""How much slower than alone a job has been of late, as the agent knows it."""

from __future__ import annotations

from collections import deque

# Iterations whose mean slowdown a policy is told, and how many there must be: as in
# controller/iteration/tracker.py.
_RECENT = 8
_LEAST_RECENT = 2


class RecentSlowdown:
    """Mean slowdown of a job's last iterations.

    Attributes
    ----------
    value
        Their time over that of the same iterations undisturbed; 1 until there are enough.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)

    def add(self, duration_ns: float, alone_ns: float) -> None:
        """Take an iteration: how long it was, and would have been undisturbed."""
        self._recent.append((duration_ns, alone_ns))
        if len(self._recent) >= _LEAST_RECENT:
            self.value = sum(each[0] for each in self._recent) / sum(
                each[1] for each in self._recent
            )
