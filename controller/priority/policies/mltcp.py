"""`mltcp`: shares of the link grow with what of the window is done.

Rajasekaran, Narang, Zabreyko, Ghobadi, "MLTCP: A Distributed Technique to Approximate
Centralized Flow Scheduling For Machine Learning", HotNets 2024, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from controller.priority.jobs import DEFAULT_CLASS
from controller.priority.policies.limits import exactly
from controller.priority.policy import Assignment, JobView

# F(ratio) = slope * ratio + intercept, the paper's values.
SLOPE = 1.75
INTERCEPT = 0.25


def aggressiveness(job: JobView) -> float:
    """F of the share of the window that is done, 0.25 .. 2."""
    done = job.done_bytes / job.expected_bytes if job.expected_bytes > 0 else 1.0
    return SLOPE * min(1.0, max(0.0, done)) + INTERCEPT


def weights(jobs: Sequence[JobView]) -> dict[str, float]:
    """Weight of each job's flows; before a window, the one with which it will begin."""
    return {job.name: aggressiveness(job) if job.is_open else INTERCEPT for job in jobs}


class MltcpPolicy:
    """All in one class; open windows are paced in proportion to F of their progress."""

    name = "mltcp"
    # A window of 100 ms gets some steps; between two of them the ratio of the shares of two
    # jobs does not change anyway, because F of both grows in proportion to F.
    tick_ns = 20_000_000
    needs_pacing = True
    newcomers_first = False

    def assign(
        self, now_ns: int, jobs: Sequence[JobView], link_Bps: float
    ) -> Mapping[str, Assignment]:
        """See `controller.priority.policy.Policy.assign`."""
        weight = weights(jobs)
        sending = [job.name for job in jobs if job.is_open]
        total = sum(weight[name] for name in sending)
        result = {}
        for job in jobs:
            # Who has the link alone is not paced, and neither is a job before its window: it
            # takes its equal part until the agent has seen it.
            share = weight[job.name] / total if job.is_open and len(sending) > 1 else 0.0
            why = f"share {share:.0%} by its progress" if share else "not paced: sends alone"
            if not job.is_open:
                why = "no window is open"
            result[job.name] = exactly(
                job, DEFAULT_CLASS, share=share, why=why, weight=weight[job.name]
            )
        return result
