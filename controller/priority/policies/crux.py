"""`crux`: the job goes first whose communication holds up most computation.

Cao, Guan, Qian, Gao, Xiao, Dong, Li, Zhao, Xu, Wei et al., "Crux: GPU-Efficient Communication
Scheduling for Deep Learning Training", SIGCOMM 2024, sections 4.2 and 4.3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller.priority.contention import Contention, one_link
from controller.priority.jobs import DEFAULT_CEILING
from controller.priority.policies.levels import DEFAULT_ORDERS, compress
from controller.priority.policies.limits import exactly
from controller.priority.policy import Assignment, JobView

__all__ = [
    "CruxPolicy",
    "Demand",
    "assignments",
    "compress",
    "correction",
    "demand_of",
    "pair_link_shares",
    "priorities",
    "ranked",
]

# Iterations of the lower job after which two jobs that have not come back to an earlier phase are
# averaged.
_PAIR_ITERATIONS = 256
# Phases closer than this share of the higher job's period are one.
_SAME_PHASE = 1e-9
_STEP = 0.02
_S = 1e9


@dataclass(frozen=True)
class Demand:
    """What a job asks of a link and of its GPUs in one iteration.

    Parameters
    ----------
    communication_s
        Time on the link alone (the paper's t_j).
    compute_s
        From the end of its communication to the begin of the next.
    work
        Computation, in any unit common to the jobs (the paper's W_j).
    """

    communication_s: float
    compute_s: float
    work: float

    @property
    def intensity(self) -> float:
        """I_j = W_j / t_j."""
        return self.work / self.communication_s if self.communication_s > 0 else 0.0


def pair_link_shares(high: Demand, low: Demand) -> tuple[float, float]:
    """Long-run shares of the link of two jobs under strict priority.

    Parameters
    ----------
    high, low
        The job that goes first, and the one that gets what is left.

    Returns
    -------
    tuple of float
        Share of time in which each is on the link: of the first, and of the second.
    """
    period_s = high.communication_s + high.compute_s
    if high.communication_s <= 0 or low.communication_s <= 0:
        return (
            high.communication_s / period_s if period_s > 0 else 0.0,
            low.communication_s / (low.communication_s + low.compute_s or 1.0),
        )
    if high.compute_s <= 0:
        return 1.0, 0.0
    # The higher job sends in [0, communication) of every period; the lower one begins its first
    # window with the gap after it.
    now_s = high.communication_s
    seen: dict[int, tuple[int, float]] = {}
    for done in range(_PAIR_ITERATIONS):
        phase_s = now_s % period_s
        key = round(phase_s / period_s / _SAME_PHASE) % round(1 / _SAME_PHASE)
        if key in seen:
            count, since_s = seen[key]
            return (
                high.communication_s / period_s,
                (done - count) * low.communication_s / (now_s - since_s),
            )
        seen[key] = (done, now_s)
        now_s = _served_s(now_s, low.communication_s, high) + low.compute_s
    spent_s = now_s - high.communication_s
    return high.communication_s / period_s, _PAIR_ITERATIONS * low.communication_s / spent_s


def _served_s(begin_s: float, needed_s: float, high: Demand) -> float:
    """When a window has had so much of the gaps that the higher job leaves."""
    period_s = high.communication_s + high.compute_s
    phase_s = begin_s % period_s
    if phase_s < high.communication_s:
        begin_s += high.communication_s - phase_s
        phase_s = high.communication_s
    first_s = period_s - phase_s
    if needed_s <= first_s:
        return begin_s + needed_s
    needed_s -= first_s
    gaps, rest_s = divmod(needed_s, high.compute_s)
    end_s = begin_s + first_s + gaps * period_s
    return end_s + high.communication_s + rest_s if rest_s > 0 else end_s


@functools.lru_cache(maxsize=1024)
def correction(job: Demand, reference: Demand) -> float:
    """k_j: how much more a second of the link brings to a job than its intensity says.

    What the job gains on the link by going first, over what the reference job loses by it. With
    it, k_j I_j above the reference's intensity means that computation gains more than it loses.

    Parameters
    ----------
    job, reference
        The reference's own factor is 1.
    """
    reference_first, job_second = pair_link_shares(reference, job)
    job_first, reference_second = pair_link_shares(job, reference)
    gained, lost = job_first - job_second, reference_first - reference_second
    # A job that loses nothing has no reason to go first, and one from which nothing is taken
    # does not mind; both are off the scale.
    if lost <= 0:
        return 1.0 if gained <= 0 else 1e9
    return max(gained, 0.0) / lost


def priorities(jobs: Mapping[str, Demand]) -> dict[str, float]:
    """P_j = k_j I_j of jobs that share a link.

    The reference job is the one with most traffic: largest share of its time on the link, then
    longest window.

    Parameters
    ----------
    jobs
        Name -> demand.
    """
    if not jobs:
        return {}

    def traffic(name: str) -> tuple[float, float]:
        job = jobs[name]
        period_s = job.communication_s + job.compute_s
        return (job.communication_s / period_s if period_s > 0 else 0.0, job.communication_s)

    reference = max(jobs, key=traffic)
    return {
        name: (1.0 if name == reference else correction(job, jobs[reference])) * job.intensity
        for name, job in jobs.items()
    }


class CruxPolicy:
    """Fixed classes by k_j I_j; they change when jobs come, go or change their demand.

    Parameters
    ----------
    levels
        Classes that are used, from the default ceiling downwards; 1 .. 7.
    """

    name = "crux"
    tick_ns = 0
    needs_pacing = False
    newcomers_first = False

    def __init__(self, levels: int = DEFAULT_CEILING + 1) -> None:
        self.levels = levels

    def assign(
        self, now_ns: int, jobs: Sequence[JobView], link_Bps: float
    ) -> Mapping[str, Assignment]:
        """See `controller.priority.policy.Policy.assign`."""
        contention = one_link(tuple(job.name for job in jobs), link_Bps)
        demands = tuple((job.name, demand_of(job)) for job in jobs)
        return assignments(jobs, contention, *ranked(demands, contention, self.levels))


def assignments(
    jobs: Sequence[JobView],
    contention: Contention,
    priority: Mapping[str, float],
    level_of: Mapping[str, int],
) -> dict[str, Assignment]:
    """What levels mean for jobs.

    Parameters
    ----------
    jobs
        In the order in which `waits_for` names them.
    contention
        Who meets whom: a job waits for those of higher levels that it meets.
    priority, level_of
        Of each job, as `ranked` returns them.
    """
    known = [(job.name, level_of[job.name], 1 << contention.number(job.name)) for job in jobs]
    result = {}
    for job, (name, level, _) in zip(jobs, known, strict=True):
        meets = contention.neighbour_mask(name)
        result[name] = exactly(
            job,
            DEFAULT_CEILING - level,
            waits_for=tuple([other for other, its, bit in known if its < level and bit & meets]),
            why=f"priority {priority[name]:.4g} (intensity times correction)",
        )
    return result


# The demands of jobs change seldom, and this is asked at every event.
@functools.lru_cache(maxsize=256)
def ranked(
    demands: tuple[tuple[str, Demand], ...], contention: Contention, levels: int
) -> tuple[dict[str, float], dict[str, int]]:
    """Priority and level of jobs of one component.

    Parameters
    ----------
    demands
        Name and demand of each job, all of one component of `contention`.
    contention
        Who meets whom.
    levels
        How many there are, from 1.

    Returns
    -------
    tuple of dict
        Name -> priority, by the component's reference job, and name -> level, 0 for the highest.
    """
    priority = priorities(dict(demands))
    lost = {}
    for place, (one, demand) in enumerate(demands):
        met = contention.neighbour_mask(one)
        for other, against in demands[place + 1 :]:
            if met >> contention.number(other) & 1:
                lost[one, other] = max(demand.intensity, against.intensity)
    # Where all contend there is one topological order.
    all_meet = 2 * len(lost) == len(demands) * (len(demands) - 1)
    orders = 1 if all_meet else DEFAULT_ORDERS
    return priority, compress(priority, lost, levels, orders=orders)


def demand_of(job: JobView) -> Demand:
    """A job's demand, in steps so coarse that an estimate which moves a little is the same."""
    traffic_ns = job.traffic_ns or job.ideal_window_ns
    # What of the window is no traffic overlaps with computation.
    rest_ns = job.ideal_window_ns - traffic_ns
    return _demand(traffic_ns, job.compute_ns + rest_ns, job.work)


@functools.lru_cache(maxsize=4096)
def _demand(traffic_ns: float, compute_ns: float, work: float) -> Demand:
    return Demand(
        communication_s=_coarse(traffic_ns / _S),
        compute_s=_coarse(compute_ns / _S),
        work=_coarse(work or compute_ns / _S),
    )


def _coarse(value: float) -> float:
    """The value in steps of 2 %.

    An estimate that moves a little must not turn the order around, and what is known of a pair
    of jobs need not be worked out again.
    """
    if value <= 0:
        return 0.0
    step = math.log1p(_STEP)
    return math.exp(round(math.log(value) / step) * step)
