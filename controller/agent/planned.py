"""What the planner keeps of a job."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from controller.agent.job_state import JobState
from controller.iteration.tracker import JobTracker
from controller.priority.policy import Assignment, JobView

_HISTORY_KEPT = 16


@dataclass(frozen=True)
class Decision:
    """An assignment of a policy, and when it was made."""

    at_ns: int
    assignment: Assignment


@dataclass(eq=False)
class Planned:
    """A job with its iterations and what the policy said of it last.

    ``is_next``: its plan is about the next window, which has not begun.
    """

    state: JobState
    tracker: JobTracker = field(default_factory=JobTracker)
    decision: Decision | None = None
    is_next: bool = False
    iteration: int = 0
    done_bytes: int = 0
    last_ns: int = 0
    is_open: bool = False
    # Without packets that we see, its ranks' reports are the events.
    by_reports: bool = False
    # Begin of the window for which it was put first to be learned.
    learning_ns: int = 0
    # Of that: when they stopped to send last and what they had sent; bytes of windows before in the
    # same count; whether they number iterations, and the last number.
    stopped: tuple[int, int] | None = None
    sent_before: int = 0
    is_numbered: bool = False
    told_iteration: int = -1
    # How much later its next window is to begin; and how long the open one was held.
    shift_ns: int = 0
    held_ns: int = 0
    # Of the plan that is written.
    gap_ns: int = 0
    valid_until_ns: int = 0
    view: JobView | None = None
    # When the plan of its next window may be written, should that wait.
    settled_ns: int | None = None
    # When its laxity has run out, should it still wait then.
    guard_ns: int | None = None
    history: deque[Decision] = field(default_factory=lambda: deque(maxlen=_HISTORY_KEPT))
    plans_written: int = 0

    @property
    def name(self) -> str:
        """Of the job."""
        return self.state.job.name
