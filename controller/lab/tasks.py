"""One policy on one seed of a scenario: what a process works on, and what it sends back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from controller.lab.build import Setup, build
from controller.lab.scenario import FAIR, ORACLE, ClusterScenario
from controller.priority.coordination import find_coordinator
from controller.sim.cluster.engine import simulate_cluster
from controller.sim.cluster.oracle import best_known, undisturbed_iterations
from controller.sim.cluster.outcome import ClusterOutcome
from controller.sim.measures import Iteration, Measures, measure, percentile
from controller.sim.progress import Progress

_MS = 1e6
# Of the distributions that figures show; the tail is where policies differ.
QUANTILES = np.concatenate((np.linspace(0, 0.99, 199), (0.995, 0.999, 1.0)))
# A picture shows so many iterations of the slowest of the jobs in it.
_PICTURE_ITERATIONS = 5
_PICTURE_WINDOWS = 2000


@dataclass(frozen=True)
class Task:
    """What to simulate.

    Parameters
    ----------
    scenario
        Jobs and network.
    policy
        One of `controller.lab.scenario.KNOWN_POLICIES`.
    seed
        Of everything that is drawn.
    """

    scenario: ClusterScenario
    policy: str
    seed: int


@dataclass(frozen=True, eq=False)
class Run:
    """What came out of it, small enough to be sent between processes.

    Parameters
    ----------
    policy, seed
        Of the task.
    figures
        ``allreduce_ms.mean`` and the like -> value; what stands before a dot is a table of JSON.
    bound
        The same keys but for utilisation: of the same iterations, every window undisturbed.
    job_slowdown
        Name -> mean iteration over the undisturbed one.
    allreduce_ms, iteration_ms
        Times at `QUANTILES`, over all iterations.
    link_use
        Shape (links,): what each link carried, as a share of what it could.
    link_load
        Shape (links,): what jobs that are never held up would ask of it, as such a share.
    windows
        (job, begin, end) in ms of `Setup.shown` for a while, for a picture; 0: all have warmed up.
    events, decisions
        Of the simulation.
    order
        Of the oracle: what was the best, one of its rules or a policy.
    order_gains
        Of the oracle: rule -> change of the mean window, and of the mean of the slowest 10 %,
        against fair, as shares.
    """

    policy: str
    seed: int
    figures: dict[str, float]
    bound: dict[str, float]
    job_slowdown: dict[str, float]
    allreduce_ms: NDArray[np.float64]
    iteration_ms: NDArray[np.float64]
    link_use: NDArray[np.float64]
    link_load: NDArray[np.float64]
    windows: tuple[tuple[str, float, float], ...]
    events: int
    decisions: int
    order: str = ""
    order_gains: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def simulate(task: Task, progress: Progress | None = None) -> Run:
    """Build and simulate a task.

    Parameters
    ----------
    task
        What to simulate.
    progress
        Called now and then with iterations done and wanted.

    Raises
    ------
    UsageError
        A job never gets through, or does not fit the network.
    """
    scenario = task.scenario
    setup = build(scenario, task.seed)
    if task.policy == ORACLE:
        known = best_known(
            setup.jobs,
            scenario.network.fabric,
            scenario.conditions,
            until_iterations=setup.until,
            warmup=scenario.warmup,
            seed=task.seed,
            progress=progress,
        )
        return run_of(task, setup, known.outcome, known.name, known.gains)
    outcome = simulate_cluster(
        setup.jobs,
        scenario.network.fabric,
        find_coordinator(task.policy),
        scenario.conditions,
        until_iterations=setup.until,
        warmup=scenario.warmup,
        seed=task.seed,
        progress=progress,
    )
    return run_of(task, setup, outcome)


def run_of(
    task: Task,
    setup: Setup,
    outcome: ClusterOutcome,
    order: str = "",
    order_gains: Mapping[str, tuple[float, float]] | None = None,
) -> Run:
    """Figures of an outcome.

    Parameters
    ----------
    task, setup
        What was simulated.
    outcome
        What came out.
    order, order_gains
        As in `Run`.
    """
    scenario = task.scenario
    measures = outcome.measures()
    lone = undisturbed_iterations(
        setup.jobs,
        scenario.network.fabric,
        scenario.conditions,
        setup.until,
        scenario.warmup,
        task.seed,
    )
    # `link_bytes` counts from the first arrival on: before it nothing is sent.
    span_s = (outcome.end_ns - min(job.arrival_ns for job in setup.jobs)) / 1e9
    return Run(
        policy=task.policy,
        seed=task.seed,
        figures={
            **_figures(measures, outcome.iterations),
            "utilisation": outcome.utilisation,
        },
        bound=_figures(measure(lone, outcome.alone), lone),
        job_slowdown={job.name: measures.jobs[job.name].slowdown for job in setup.jobs},
        allreduce_ms=np.quantile(_windows_ms(outcome.iterations), QUANTILES),
        iteration_ms=np.quantile([row.duration_ns / _MS for row in outcome.iterations], QUANTILES),
        link_use=outcome.link_bytes / (scenario.network.fabric.capacity_Bps * span_s),
        link_load=setup.link_load,
        windows=_windows(outcome.iterations, setup),
        events=outcome.events,
        decisions=outcome.decisions,
        order=order,
        order_gains=dict(order_gains or {}),
    )


def with_best_known(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Let the oracle have done on each seed what the best of all runs of that seed did.

    Its own rules are few, and a policy may do better than all of them; with the runs of that policy
    among the candidates, none is better than the oracle in the sum that it is chosen by: mean
    window and mean of the slowest 10 %, each over that of `fair`. Without `fair`, runs stay as
    they are.

    Parameters
    ----------
    runs
        Of any policies and seeds.
    """
    base = {run.seed: run.figures for run in runs if run.policy == FAIR}
    best: dict[int, Run] = {}
    for run in runs:
        if run.seed in base and (
            run.seed not in best
            or _score(run, base[run.seed]) < _score(best[run.seed], base[run.seed])
        ):
            best[run.seed] = run
    return tuple(
        replace(
            best[run.seed],
            policy=ORACLE,
            order=best[run.seed].order or best[run.seed].policy,
            order_gains=run.order_gains,
            events=run.events,
        )
        if run.policy == ORACLE and run.seed in best
        else run
        for run in runs
    )


def _score(run: Run, fair: Mapping[str, float]) -> float:
    keys = ("allreduce_ms.mean", "allreduce_ms.slowest10")
    return sum(run.figures[key] / fair[key] for key in keys)


def _windows_ms(rows: Sequence[Iteration]) -> list[float]:
    return [row.window_ns / _MS for row in rows]


def _figures(measures: Measures, rows: Sequence[Iteration]) -> dict[str, float]:
    every = measures.over_all
    return {
        "allreduce_ms.mean": every.allreduce_mean_ns / _MS,
        "allreduce_ms.slowest10": every.allreduce_slowest_ns / _MS,
        "allreduce_ms.p99": percentile(_windows_ms(rows), 0.99),
        "allreduce_slowdown.mean": every.allreduce_slowdown_mean,
        "allreduce_slowdown.slowest10": every.allreduce_slowdown_slowest,
        "iteration_ms.mean": every.iteration_mean_ns / _MS,
        "iteration_ms.p50": every.iteration_p50_ns / _MS,
        "iteration_ms.p99": every.iteration_p99_ns / _MS,
        "iteration_slowdown.mean": every.slowdown,
        "worst_slowdown": measures.jobs[measures.worst_job].slowdown,
    }


def _windows(rows: Sequence[Iteration], setup: Setup) -> tuple[tuple[str, float, float], ...]:
    """Windows of the jobs that meet on the busiest link, from when all have warmed up."""
    begins: dict[str, float] = {}
    for row in rows:
        if row.job in setup.shown:
            begins[row.job] = min(row.compute_begin_ns, begins.get(row.job, math.inf))
    begin_ns = max(begins.values())
    end_ns = begin_ns + _PICTURE_ITERATIONS * max(setup.period_ns[name] for name in begins)
    inside = sorted(
        ((row.window_begin_ns - begin_ns) / _MS, (row.window_end_ns - begin_ns) / _MS, row.job)
        for row in rows
        if row.job in begins and row.window_end_ns > begin_ns and row.window_begin_ns < end_ns
    )
    return tuple((job, begin, end) for begin, end, job in inside[:_PICTURE_WINDOWS])
