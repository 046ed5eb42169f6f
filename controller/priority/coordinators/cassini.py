"""`cassini` across links: one shift for each job, from link to link through the affinity graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from controller.priority.contention import Contention
from controller.priority.policies.cassini import CassiniPolicy, Mover
from controller.priority.policy import Assignment, JobView


class CassiniCoordinator:
    """One class for all; the windows of every component are moved once for its jobs and demands.

    On one link it waits until it is clear where all jobs' next windows will begin. Jobs that meet
    on several links are planned at once, and each is told its shift when that is clear of it.
    """

    name = CassiniPolicy.name
    needs_pacing = CassiniPolicy.needs_pacing

    def __init__(self) -> None:
        self._contention: Contention | None = None
        # Names of a component -> what is planned for it; it lives as long as these jobs meet.
        self._movers: dict[tuple[str, ...], Mover] = {}

    def tick_ns(self, links: int) -> int:
        """See `controller.priority.coordination.Coordinator.tick_ns`."""
        return CassiniPolicy.tick_ns

    def assign(
        self, now_ns: int, jobs: Sequence[JobView], contention: Contention
    ) -> Mapping[str, Assignment]:
        """See `controller.priority.coordination.Coordinator.assign`."""
        if contention is not self._contention:
            self._contention = contention
            stay = {contention.component(name) for name in contention.jobs}
            self._movers = {names: each for names, each in self._movers.items() if names in stay}
        result: dict[str, Assignment] = {}
        for _, members in contention.by_component(jobs):
            mover = self._movers.setdefault(contention.component(members[0].name), Mover())
            result.update(mover.assign(now_ns, members, contention))
        return result
