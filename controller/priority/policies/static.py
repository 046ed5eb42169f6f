"""`static`: the class that the configuration gives each job, whatever happens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from controller.priority.policies.limits import exactly
from controller.priority.policy import Assignment, JobView


class StaticPolicy:
    """Everybody in the class of its configuration."""

    name = "static"
    tick_ns = 0
    needs_pacing = False
    newcomers_first = False

    def assign(
        self, now_ns: int, jobs: Sequence[JobView], link_Bps: float
    ) -> Mapping[str, Assignment]:
        """See `controller.priority.policy.Policy.assign`."""
        return {
            job.name: exactly(job, job.traffic_class, why="class of the configuration")
            for job in jobs
        }
