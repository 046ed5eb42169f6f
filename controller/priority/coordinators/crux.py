"""`crux` across links: priorities in each component, compressed on the real contention graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller.priority.contention import Contention
from controller.priority.jobs import DEFAULT_CEILING
from controller.priority.policies.crux import CruxPolicy, Demand, assignments, demand_of, ranked
from controller.priority.policy import Assignment, JobView

# A demand counts as another one when its window, compute time or work has moved by more than
# this: estimates move a little in every iteration, and all classes of the component depend on it.
_SAME = 0.05


@dataclass
class _Taken:
    """What a component's classes were decided from, and the classes."""

    demands: tuple[tuple[str, Demand], ...]
    limits: tuple[tuple[int, int], ...]
    decided: dict[str, Assignment]


class CruxCoordinator:
    """Fixed classes by k_j I_j, for all jobs that meet directly or by others.

    The paper's t_j is the time of the job's traffic on the link where it takes longest, which is
    the length of its window alone; the reference job is that of the component.

    Parameters
    ----------
    levels
        Classes that are used, from the default ceiling downwards; 1 .. 7.
    """

    name = CruxPolicy.name
    needs_pacing = CruxPolicy.needs_pacing

    def __init__(self, levels: int = DEFAULT_CEILING + 1) -> None:
        self.levels = levels
        self._contention: Contention | None = None
        self._demands: dict[str, tuple[tuple[float, float, float], Demand]] = {}
        self._taken: dict[int, _Taken] = {}

    def tick_ns(self, links: int) -> int:
        """See `controller.priority.coordination.Coordinator.tick_ns`."""
        return CruxPolicy.tick_ns

    def assign(
        self, now_ns: int, jobs: Sequence[JobView], contention: Contention
    ) -> Mapping[str, Assignment]:
        """See `controller.priority.coordination.Coordinator.assign`."""
        if contention is not self._contention:
            self._contention = contention
            self._taken.clear()
            stay = set(contention.jobs)
            self._demands = {name: each for name, each in self._demands.items() if name in stay}
        components = contention.by_component(jobs)
        if len(components) == 1:
            return self._decide(*components[0], contention)
        result: dict[str, Assignment] = {}
        for component, members in components:
            result.update(self._decide(component, members, contention))
        return result

    def _decide(
        self, component: int, jobs: Sequence[JobView], contention: Contention
    ) -> dict[str, Assignment]:
        demands = tuple([(job.name, self._demand(job)) for job in jobs])
        limits = tuple([(job.class_floor, job.class_ceiling) for job in jobs])
        taken = self._taken.get(component)
        if taken is None or taken.demands != demands or taken.limits != limits:
            priority, level_of = ranked(demands, contention, self.levels)
            decided = assignments(jobs, contention, priority, level_of)
            taken = self._taken[component] = _Taken(demands, limits, decided)
        return taken.decided

    def _demand(self, job: JobView) -> Demand:
        """A job's demand: the one taken before, unless it has moved since."""
        now = (job.ideal_window_ns, float(job.compute_ns), job.work)
        known = self._demands.get(job.name)
        if known is not None and all(
            abs(new - old) <= _SAME * old for new, old in zip(now, known[0], strict=True)
        ):
            return known[1]
        demand = demand_of(job)
        self._demands[job.name] = now, demand
        return demand
