"""`fair`, `static` and `mltcp` across links: each job is looked at by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from controller.priority.contention import Contention
from controller.priority.jobs import DEFAULT_CLASS
from controller.priority.policies.fair import FairPolicy
from controller.priority.policies.limits import exactly
from controller.priority.policies.mltcp import MltcpPolicy, weights
from controller.priority.policies.static import StaticPolicy
from controller.priority.policy import Assignment, JobView

# What these two decide does not depend on the link's rate.
_ANY_Bps = 0.0


class FairCoordinator:
    """Everybody in the default class."""

    name = FairPolicy.name
    needs_pacing = FairPolicy.needs_pacing

    def tick_ns(self, links: int) -> int:
        """See `controller.priority.coordination.Coordinator.tick_ns`."""
        return FairPolicy.tick_ns

    def assign(
        self, now_ns: int, jobs: Sequence[JobView], contention: Contention
    ) -> Mapping[str, Assignment]:
        """See `controller.priority.coordination.Coordinator.assign`."""
        return FairPolicy().assign(now_ns, jobs, _ANY_Bps)


class StaticCoordinator:
    """Everybody in the class of its configuration."""

    name = StaticPolicy.name
    needs_pacing = StaticPolicy.needs_pacing

    def tick_ns(self, links: int) -> int:
        """See `controller.priority.coordination.Coordinator.tick_ns`."""
        return StaticPolicy.tick_ns

    def assign(
        self, now_ns: int, jobs: Sequence[JobView], contention: Contention
    ) -> Mapping[str, Assignment]:
        """See `controller.priority.coordination.Coordinator.assign`."""
        return StaticPolicy().assign(now_ns, jobs, _ANY_Bps)


class MltcpCoordinator:
    """All in one class, with F of each job's progress as the weight of its flows.

    A share of one link says nothing about another: jobs that meet on several are not paced, and
    the network weighs their flows on each link, as congestion windows do.
    """

    name = MltcpPolicy.name
    needs_pacing = MltcpPolicy.needs_pacing

    def tick_ns(self, links: int) -> int:
        """See `controller.priority.coordination.Coordinator.tick_ns`."""
        return MltcpPolicy.tick_ns

    def assign(
        self, now_ns: int, jobs: Sequence[JobView], contention: Contention
    ) -> Mapping[str, Assignment]:
        """See `controller.priority.coordination.Coordinator.assign`."""
        result: dict[str, Assignment] = {}
        for component, members in contention.by_component(jobs):
            links = contention.links_within(component)
            if len(links) < 2:
                link_Bps = contention.links[links[0]].capacity_Bps if links else _ANY_Bps
                result.update(MltcpPolicy().assign(now_ns, members, link_Bps))
                continue
            weight = weights(members)
            for job in members:
                why = f"weight {weight[job.name]:.2f} by its progress"
                if not job.is_open:
                    why = "no window is open"
                result[job.name] = exactly(job, DEFAULT_CLASS, why=why, weight=weight[job.name])
        return result
