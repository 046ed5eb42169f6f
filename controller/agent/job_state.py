"""What the agent keeps of a job."""

from __future__ import annotations

from dataclasses import dataclass

from controller.priority.jobs import Job, JobPlan


@dataclass(frozen=True)
class Iteration:
    """An iteration that is over: payload, first to last packet, and begin to begin."""

    number: int
    sent_bytes: int
    window_ns: int
    period_ns: int


@dataclass
class JobState:
    """A job with its number in the dataplane and what it was told last.

    ``follows_ratio``: its plan takes the compression ratio that ranks report. ``by_hand``: the plan
    was set from outside and holds until it expires. ``ports``: those on which it has flows;
    ``senders``: how many of these have sent data.
    """

    job: Job
    number: int
    since_s: float
    plan: JobPlan | None = None
    follows_ratio: bool = False
    was_matched: bool = False
    is_warned: bool = False
    last_iteration: Iteration | None = None
    by_hand: bool = False
    ports: frozenset[int] = frozenset()
    senders: int = 0
