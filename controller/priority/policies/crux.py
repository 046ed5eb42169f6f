"""`crux`: the job goes first whose communication holds up most computation.

Cao, Guan, Qian, Gao, Xiao, Dong, Li, Zhao, Xu, Wei et al., "Crux: GPU-Efficient Communication
Scheduling for Deep Learning Training", SIGCOMM 2024, sections 4.2 and 4.3.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller.priority.jobs import DEFAULT_CEILING
from controller.priority.policies.limits import exactly
from controller.priority.policy import Assignment, JobView

# Iterations of the lower job after which two jobs that have not come back to an earlier phase are
# averaged.
_PAIR_ITERATIONS = 256
# Phases closer than this share of the higher job's period are one.
_SAME_PHASE = 1e-9
# Random orders of a contention graph that compression tries; the paper's Algorithm 1 samples as
# well.
DEFAULT_ORDERS = 16
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


def compress(
    priority: Mapping[str, float],
    contention: Mapping[tuple[str, str], float],
    levels: int,
    seed: int = 0,
    orders: int = DEFAULT_ORDERS,
) -> dict[str, int]:
    """Many priorities -> few levels, so that what is lost between jobs of one level is least.

    Max-K-cut on the contention graph, whose edges go from higher to lower priority: for random
    topological orders the best cut into `levels` consecutive groups, by dynamic programming.

    Parameters
    ----------
    priority
        Name -> priority.
    contention
        Pair of jobs that share a link -> what is lost when both have one level; either order.
    levels
        How many there are, from 1.
    seed
        Of the random orders.
    orders
        How many are tried, from 1.

    Returns
    -------
    dict
        Name -> level, 0 for the highest. A job is never above one that it contends with and that
        has the higher priority.
    """
    names = sorted(priority, key=lambda name: (-priority[name], name))
    place = {name: number for number, name in enumerate(names)}
    loss: dict[tuple[str, str], float] = {}
    for one, other in contention:
        pair = (one, other) if place[one] < place[other] else (other, one)
        loss[pair] = loss.get(pair, 0.0) + contention[one, other]
    stream = random.Random(seed)
    best: tuple[float, dict[str, int]] | None = None
    for _ in range(orders):
        order = _topological(names, loss, stream)
        found = _cut(order, loss, levels)
        if best is None or found[0] < best[0]:
            best = found
    return best[1] if best else {}


def _topological(
    names: Sequence[str], edges: Mapping[tuple[str, str], float], stream: random.Random
) -> list[str]:
    """A random order in which every edge goes forward."""
    before = dict.fromkeys(names, 0)
    after: dict[str, list[str]] = {name: [] for name in names}
    for one, other in edges:
        before[other] += 1
        after[one].append(other)
    ready = [name for name in names if not before[name]]
    order = []
    while ready:
        name = ready.pop(stream.randrange(len(ready)))
        order.append(name)
        for other in after[name]:
            before[other] -= 1
            if not before[other]:
                ready.append(other)
    return order


def _cut(
    order: Sequence[str], loss: Mapping[tuple[str, str], float], levels: int
) -> tuple[float, dict[str, int]]:
    """Cut an order into consecutive groups; return the loss inside groups, and each job's group."""
    count = len(order)
    # inside[first][last]: loss between the jobs first .. last - 1.
    inside = [[0.0] * (count + 1) for _ in range(count + 1)]
    for first in range(count - 1, -1, -1):
        row = 0.0
        for last in range(first + 1, count + 1):
            row += loss.get((order[first], order[last - 1]), 0.0)
            inside[first][last] = inside[first + 1][last] + row
    # Fewer groups win ties, so that no level is wasted on what does not contend.
    costs = [[inside[0][last] for last in range(count + 1)]]
    cuts: list[list[int]] = [[0] * (count + 1)]
    for _ in range(1, levels):
        row_costs, row_cuts = [], []
        for last in range(count + 1):
            cost, cut = min(
                (costs[-1][first] + inside[first][last], first) for first in range(last + 1)
            )
            row_costs.append(cost)
            row_cuts.append(cut)
        costs.append(row_costs)
        cuts.append(row_cuts)
    level_of = {}
    last = count
    for level in range(levels - 1, -1, -1):
        first = cuts[level][last] if level else 0
        for name in order[first:last]:
            level_of[name] = level
        last = first
    # Groups at the front may be empty; the first that is not is level 0.
    used = sorted(set(level_of.values()))
    return costs[-1][count], {name: used.index(level) for name, level in level_of.items()}


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
        names = [job.name for job in jobs]
        demands = tuple((job.name, _demand(job)) for job in jobs)
        priority, level_of = _ranked(demands, self.levels)
        return {
            job.name: exactly(
                job,
                DEFAULT_CEILING - level_of[job.name],
                waits_for=tuple(other for other in names if level_of[other] < level_of[job.name]),
                why=f"priority {priority[job.name]:.4g} (intensity times correction)",
            )
            for job in jobs
        }


# The demands of a link's jobs change seldom, and this is asked at every event.
@functools.lru_cache(maxsize=256)
def _ranked(
    demands: tuple[tuple[str, Demand], ...], levels: int
) -> tuple[dict[str, float], dict[str, int]]:
    """Priority and level of the jobs of one link, all of which contend."""
    priority = priorities(dict(demands))
    contention = {
        (one, other): max(demand.intensity, against.intensity)
        for place, (one, demand) in enumerate(demands)
        for other, against in demands[place + 1 :]
    }
    # Where all contend there is one topological order.
    return priority, compress(priority, contention, levels, orders=1)


def _demand(job: JobView) -> Demand:
    return Demand(
        communication_s=_coarse(job.ideal_window_ns / _S),
        compute_s=_coarse(job.compute_ns / _S),
        work=_coarse(job.work or job.compute_ns / _S),
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
