"""What could be gained on a cluster by somebody who knows everything and acts at once.

Two figures: every window undisturbed, which no schedule can beat and most cannot reach; and the
best of some rules, which is possible but not proven to be the best there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from controller.priority.coordination import find_coordinator
from controller.priority.coordinators.laxity import PROGRESS_POWER
from controller.priority.policies.mltcp import INTERCEPT, SLOPE
from controller.sim.cluster.course import Course
from controller.sim.cluster.engine import simulate_cluster, wanted_iterations
from controller.sim.cluster.job_run import JobRun
from controller.sim.cluster.jobs import ClusterJob
from controller.sim.cluster.outcome import ClusterConditions, ClusterOutcome
from controller.sim.cluster.simulation import Simulation
from controller.sim.cluster.topology import LeafSpine
from controller.sim.jobs import StarvedError, names_differ
from controller.sim.measures import Iteration, Measures, measure
from controller.sim.progress import Progress

_S = 1e9
# Less of a link than this share of what a flow could have is nothing: rounding leaves it.
_NOTHING = 1e-9

# Of a job that is sending, given the time and what of its window is left when nobody else sends,
# both in ns: its place, of which the lowest goes first; or the weight of its flows.
Rule = Callable[[JobRun, float, float], float]


@dataclass(frozen=True)
class BestKnown:
    """What could have been gained.

    Parameters
    ----------
    name
        Of the best rule: of `ORDERS` or `WEIGHTS`, or "fair" where none is better.
    outcome
        What it gives.
    bound
        Figures of the same iterations, every window undisturbed.
    gains
        Rule -> change of the mean window and of the mean of the slowest 10 % against `fair`, as
        shares (-0.4: 40 % lower). An order in which a job never gets through is left out.
    """

    name: str
    outcome: ClusterOutcome
    bound: Measures
    gains: Mapping[str, tuple[float, float]]


def _shortest(_: JobRun, __: float, rest_ns: float) -> float:
    return rest_ns


def _first_come(run: JobRun, _: float, __: float) -> float:
    return run.window_begin_ns


def _earliest_due(run: JobRun, _: float, __: float) -> float:
    return run.begin_ns + run.alone_ns


def _by_progress(run: JobRun, _: float, rest_ns: float) -> float:
    """As `controller.priority.policies.mltcp` weighs jobs."""
    return SLOPE * (1 - rest_ns / run.course.sending_ns(0)) + INTERCEPT


def _by_laxity(run: JobRun, now_ns: float, rest_ns: float) -> float:
    """As the coordinator `laxity` weighs jobs that meet on several links."""
    return float(_by_progress(run, now_ns, rest_ns) ** PROGRESS_POWER * max(1.0, run.slowdown))


# Strict orders of all jobs, and weights inside one class for all. Strict orders are best where
# jobs meet on one link. Where they meet on many, a job that has to wait on one of them leaves its
# part of the others to nobody, and weights do better.
ORDERS: Mapping[str, Rule] = MappingProxyType(
    {
        "shortest rest": _shortest,
        "first come": _first_come,
        "earliest due": _earliest_due,
    }
)
WEIGHTS: Mapping[str, Rule] = MappingProxyType(
    {"progress": _by_progress, "progress and slowdown": _by_laxity}
)
FAIR = "fair"


def best_known(
    jobs: Sequence[ClusterJob],
    topology: LeafSpine,
    conditions: ClusterConditions,
    *,
    until_iterations: int | Mapping[str, int],
    warmup: int = 0,
    seed: int = 0,
    base: ClusterOutcome | None = None,
    progress: Progress | None = None,
) -> BestKnown:
    """The best of some rules by which jobs could send, and a bound for all.

    A rule is a strict order of all jobs of the cluster, so that one may take all of a link from
    those after it, without floors and without limits of classes; or it weighs them. It is looked
    at again at each event, is in force at once, and knows the true bytes and compute times. The
    best has the lowest sum of the mean window and of the mean of the slowest 10 %, each over that
    of `fair`. No proof says that there is no better schedule: rules that look ahead, or let links
    idle, are not among them.

    Parameters
    ----------
    jobs, topology, until_iterations, warmup, seed
        As in `controller.sim.cluster.engine.simulate_cluster`.
    conditions
        Under which `fair` runs.
    base
        What `fair` gives, where that is known already.
    progress
        Called now and then with the iterations done and those wanted, of all rules together.

    Raises
    ------
    UsageError
        As `simulate_cluster`.
    """
    names_differ([job.name for job in jobs])
    wanted = wanted_iterations(jobs, until_iterations, warmup)
    names = [*ORDERS, *WEIGHTS]
    runs = len(names) + (base is None)
    begun = 0

    def part(count: int, total: int) -> None:
        if progress:
            progress((begun - 1) * total + count, runs * total)

    if base is None:
        begun += 1
        base = simulate_cluster(
            jobs,
            topology,
            find_coordinator("fair"),
            conditions,
            until_iterations=wanted,
            warmup=warmup,
            seed=seed,
            progress=part,
        )
    before = base.measures().over_all
    gains: dict[str, tuple[float, float]] = {}
    best, gains[FAIR] = (FAIR, base), (0.0, 0.0)
    for name in names:
        simulation = _Clairvoyant(jobs, topology, name, conditions, wanted, warmup, seed)
        begun += 1
        try:
            outcome = simulation.run(part)
        except StarvedError:
            continue
        after = outcome.measures().over_all
        gains[name] = (
            after.allreduce_mean_ns / before.allreduce_mean_ns - 1,
            after.allreduce_slowest_ns / before.allreduce_slowest_ns - 1,
        )
        if sum(gains[name]) < sum(gains[best[0]]):
            best = name, outcome
    rows = undisturbed_iterations(jobs, topology, conditions, wanted, warmup, seed)
    return BestKnown(*best, measure(rows, base.alone), gains)


def undisturbed_iterations(
    jobs: Sequence[ClusterJob],
    topology: LeafSpine,
    conditions: ClusterConditions,
    wanted: Mapping[str, int],
    warmup: int,
    seed: int,
) -> tuple[Iteration, ...]:
    """Iterations of all jobs as they are when each has the network to itself.

    Parameters
    ----------
    jobs, topology, conditions, warmup, seed
        As in `controller.sim.cluster.engine.simulate_cluster`.
    wanted
        Name -> iterations, with the warm-up.
    """
    rows = []
    for job in jobs:
        count = wanted[job.name]
        factors = job.compute_factors(count, seed)
        lone = Course(job, topology, conditions.qps_per_peer, seed).undisturbed(factors)
        begin_ns = job.arrival_ns
        for number, factor in enumerate(factors):
            window_ns = begin_ns + float(lone.lead_ns[number])
            row = Iteration(
                job.name,
                number,
                begin_ns,
                window_ns,
                window_ns + float(lone.window_ns[number]),
                begin_ns + factor * (job.forward_ns + job.backward_ns),
            )
            begin_ns += row.duration_ns
            if number >= warmup:
                rows.append(row)
    return tuple(sorted(rows, key=lambda row: row.window_end_ns))


class _Clairvoyant(Simulation):
    """Jobs that send by a rule instead of classes, and nobody who has to be asked."""

    # Without floors, a job may wait for ever behind others that fill its links; an order in which
    # one waits for this long is not the best anyway.
    starved_after = 100.0

    def __init__(
        self,
        jobs: Sequence[ClusterJob],
        topology: LeafSpine,
        rule: str,
        conditions: ClusterConditions,
        wanted: Mapping[str, int],
        warmup: int,
        seed: int,
    ) -> None:
        super().__init__(jobs, topology, None, conditions, wanted, warmup, seed)
        self._rule = ORDERS[rule] if rule in ORDERS else WEIGHTS[rule]
        self._is_strict = rule not in WEIGHTS

    def _load(self, job: int, *, keeps_rate: bool = False) -> None:
        # Places and weights move with what is sent: a step over the same links asks, too.
        super()._load(job, keeps_rate=False)

    def _rates_Bps(self, members: NDArray[np.int64]) -> NDArray[np.float64]:
        rest_bytes = self.transfers.step_rest_bytes(members, self.now_ns).tolist()
        ruled = [
            self._ruled(job, rest) for job, rest in zip(members.tolist(), rest_bytes, strict=True)
        ]
        if self._is_strict:
            return self._in_order(members, np.argsort(ruled, kind="stable"))
        return self.fabric.allocate(self.usage[members], np.zeros_like(members), ruled)

    def _in_order(
        self, members: NDArray[np.int64], order: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """The first takes what it can use, the next what that leaves, and so on."""
        left_Bps = self.topology.capacity_Bps.copy()
        rates = np.zeros(len(members))
        for place in order.tolist():
            run = self.runs[int(members[place])]
            step = run.steps[run.step]
            links, flows = step.stage.links, step.stage.flows
            rate_Bps = float((left_Bps[links] / flows).min())
            if rate_Bps > _NOTHING * step.alone_Bps:
                rates[place] = rate_Bps
                left_Bps[links] -= flows * rate_Bps
        return rates

    def _ruled(self, job: int, step_rest_bytes: float) -> float:
        """Place or weight of a job that is sending."""
        run = self.runs[job]
        step = run.steps[run.step]
        rest_ns = step_rest_bytes / step.alone_Bps * _S + run.course.sending_ns(run.step + 1)
        return self._rule(run, self.now_ns, rest_ns)
