"""`laxity` across links: a strict order where jobs meet on one link, weights where on several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from controller.priority.contention import Contention
from controller.priority.jobs import DEFAULT_CLASS
from controller.priority.policies.laxity import LaxityPolicy, rank
from controller.priority.policies.limits import exactly
from controller.priority.policies.mltcp import INTERCEPT, MltcpPolicy, aggressiveness
from controller.priority.policy import Assignment, JobView

# Weight of a window: F of its progress to this power, times how much the job was held up. Chosen
# among 16 rules on the five mixes of 256 NICs in controller/lab/scenarios (seeds 1 to 4, 12
# iterations): with power 1 and without slowdown (MLTCP) the mean window of few-large is 19 % longer
# than under `fair`, so 2 to 7 %; the other mixes differ by less than 5 points but for steady-equal,
# where power 1 gains 39 or 17 % by seed and this 31 to 33 %.
PROGRESS_POWER = 0.5


class LaxityCoordinator:
    """What waits costs more across links, so that nobody is made to stand still.

    On one link a strict order of windows is the best: whom the first one holds up has nowhere
    else to send. The flows of an AllReduce go on together, so a job that is held up on one of
    its links leaves its part of all the others to nobody; one window that goes first on twenty
    links stops twenty others. Where jobs meet on several links all have one class, and the
    flows of a job weigh the more, the nearer its window is to its end and the more the job has been
    held up lately. Weights need a congestion control that heeds them, as MLTCP's does.
    """

    name = LaxityPolicy.name
    needs_pacing = LaxityPolicy.needs_pacing

    def tick_ns(self, links: int) -> int:
        """See `controller.priority.coordination.Coordinator.tick_ns`."""
        # Progress changes weights while nothing else happens.
        return MltcpPolicy.tick_ns if links > 1 else LaxityPolicy.tick_ns

    def assign(
        self, now_ns: int, jobs: Sequence[JobView], contention: Contention
    ) -> Mapping[str, Assignment]:
        """See `controller.priority.coordination.Coordinator.assign`."""
        result: dict[str, Assignment] = {}
        for component, members in contention.by_component(jobs):
            if len(contention.links_within(component)) < 2:
                result.update(rank(now_ns, members, contention))
            else:
                result.update({job.name: _weighed(job) for job in members})
        return result


def _weighed(job: JobView) -> Assignment:
    held_up = max(1.0, job.slowdown)
    # Before its window: the weight with which it will begin.
    progress = (aggressiveness(job) if job.is_open else INTERCEPT) ** PROGRESS_POWER
    why = f"weight {progress * held_up:.2f}: {progress:.2f} by progress, slowdown {held_up:.2f}"
    return exactly(job, DEFAULT_CLASS, weight=progress * held_up, why=why)


class StrictLaxityCoordinator:
    """One order of all windows; classes fall along it only from job to job that it meets.

    What classes alone can do, without weights. Jobs that do not meet keep the highest class, so
    that the seven classes last longer than on one link with as many jobs. Chains count all the
    same: behind a job that waits for a third one goes lower still, also where the third would not
    disturb it.
    """

    name = "strict"
    needs_pacing = LaxityPolicy.needs_pacing

    def tick_ns(self, links: int) -> int:
        """See `controller.priority.coordination.Coordinator.tick_ns`."""
        return LaxityPolicy.tick_ns

    def assign(
        self, now_ns: int, jobs: Sequence[JobView], contention: Contention
    ) -> Mapping[str, Assignment]:
        """See `controller.priority.coordination.Coordinator.assign`."""
        return rank(now_ns, jobs, contention)
