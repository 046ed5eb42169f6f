"""`fair`: one class for all, so that the link is shared equally."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from controller.priority.jobs import DEFAULT_CLASS
from controller.priority.policies.limits import exactly
from controller.priority.policy import Assignment, JobView


class FairPolicy:
    """Everybody in the default class, or the nearest that the job allows."""

    name = "fair"
    tick_ns = 0
    needs_pacing = False
    newcomers_first = False

    def assign(
        self, now_ns: int, jobs: Sequence[JobView], link_Bps: float
    ) -> Mapping[str, Assignment]:
        """See `controller.priority.policy.Policy.assign`."""
        return {job.name: exactly(job, DEFAULT_CLASS, why="all share equally") for job in jobs}
