"""A scenario and a seed become jobs on a network: placement, begins, numbers of iterations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.errors import UsageError
from controller.lab.scenario import RANDOM, ClusterScenario, JobSpec
from controller.sim.cluster.course import Course
from controller.sim.cluster.jobs import ClusterJob
from controller.sim.cluster.placement import place
from controller.sim.streams import BEGINS, stream
from controller.units import format_duration

MAX_SHOWN = 8
# Of all jobs of a seed: hours for each policy already, and each iteration is kept until the end.
MAX_TOTAL_ITERATIONS = 5_000_000
# Times are floats of ns: up to here they are exact to 2 ns, far below every time of the models.
MAX_END_ns = 1e16


@dataclass(frozen=True, eq=False)
class Setup:
    """What one seed of a scenario simulates.

    Parameters
    ----------
    jobs
        Placed, with their begins.
    period_ns
        Name -> mean iteration when nobody else sends.
    until
        Name -> how many iterations are wanted of it, with the warm-up.
    link_load
        Shape (links,): what jobs that are never held up ask of each link, as a share of it; a job
        that comes late or leaves counts in full.
    shown
        Names of some jobs that meet on the link with the highest load, for pictures.
    """

    jobs: tuple[ClusterJob, ...]
    period_ns: Mapping[str, float]
    until: Mapping[str, int]
    link_load: NDArray[np.float64]
    shown: tuple[str, ...]


def build(scenario: ClusterScenario, seed: int) -> Setup:
    """The jobs of a seed.

    Every policy meets the same ones: what is drawn depends on the seed and on names only.

    Parameters
    ----------
    scenario
        What is to be simulated.
    seed
        From 0.

    Raises
    ------
    UsageError
        Jobs do not fit the network, or it would take for ever: see `MAX_TOTAL_ITERATIONS` and
        `MAX_END_ns`.
    """
    fabric = scenario.network.fabric
    jobs, periods = [], {}
    asked_Bps, used = np.zeros(fabric.links), {}
    for job in _placed(scenario, seed):
        course = Course(job, fabric, scenario.conditions.qps_per_peer, seed)
        period_ns = float(course.undisturbed([job.mean_factor]).duration_ns[0])
        periods[job.name] = period_ns
        rates_Bps = _asked_Bps(course, period_ns, fabric.links)
        asked_Bps += rates_Bps
        used[job.name] = np.flatnonzero(rates_Bps)
        if scenario.start == RANDOM:
            first_ns = float(_begins(seed, job.name).uniform(0, period_ns))
            job = replace(job, arrival_ns=job.arrival_ns + first_ns)
        jobs.append(job)
    link_load = asked_Bps / fabric.capacity_Bps
    hottest = int(link_load.argmax())
    shown = [name for name, links in used.items() if hottest in links]
    return Setup(
        tuple(jobs),
        periods,
        _until(scenario, jobs, periods),
        link_load,
        tuple(shown[:MAX_SHOWN]),
    )


def _asked_Bps(course: Course, period_ns: float, links: int) -> NDArray[np.float64]:
    """What a job that is never held up sends on each link, on average."""
    nbytes = np.zeros(links)
    for step in course.steps:
        nbytes[step.stage.links] += step.stage.nbytes * step.stage.flows
    return nbytes / (period_ns / 1e9)


def _placed(scenario: ClusterScenario, seed: int) -> list[ClusterJob]:
    network = scenario.network
    specs = [spec for spec in scenario.jobs for _ in range(spec.count)]
    if specs[0].places:
        nics = [spec.places for spec in specs]
    else:
        nics = place(
            [spec.nics for spec in specs],
            network.fabric,
            network.placement,
            seed,
            share=network.share_nics,
        )
    names = [name for spec in scenario.jobs for name in spec.names]
    arrivals = [
        arrival_ns for spec in scenario.jobs for arrival_ns in _arrivals_ns(scenario, spec, seed)
    ]
    return [
        _job(spec, name, places, arrival_ns, traffic_class)
        for spec, name, places, arrival_ns, traffic_class in zip(
            specs, names, nics, arrivals, scenario.classes(), strict=True
        )
    ]


def _job(
    spec: JobSpec, name: str, nics: tuple[int, ...], arrival_ns: float, traffic_class: int
) -> ClusterJob:
    values: dict[str, Any] = {
        member: getattr(spec, member)
        for member in (
            "forward_ns", "backward_ns", "buckets", "algorithm", "jitter", "factors",
            "iterations", "max_slowdown",
        )
    }  # fmt: skip
    return ClusterJob(
        name=name,
        nics=nics,
        arrival_ns=arrival_ns,
        gpus=len(nics) * spec.gpus_per_nic,
        traffic_class=traffic_class,
        **values,
    )


def _arrivals_ns(scenario: ClusterScenario, spec: JobSpec, seed: int) -> list[float]:
    """When each job of a spec comes: a Poisson process where the scenario starts at random."""
    gaps_ns = np.full(spec.count, spec.every_ns)
    if scenario.start == RANDOM:
        gaps_ns = _begins(seed, spec.name, "arrivals").exponential(spec.every_ns, spec.count)
    gaps_ns[0] = spec.arrival_ns
    return [float(arrival_ns) for arrival_ns in np.cumsum(gaps_ns)]


def _begins(seed: int, *names: str) -> np.random.Generator:
    return stream(seed, "/".join(names), BEGINS)


def _until(
    scenario: ClusterScenario, jobs: list[ClusterJob], period_ns: Mapping[str, float]
) -> dict[str, int]:
    """Iterations of each job: as many as there is time for, one after the warm-up at least."""
    longest = max(period_ns, key=lambda name: period_ns[name])
    end_ns = (scenario.warmup + scenario.iterations) * period_ns[longest]
    until = {}
    for job in jobs:
        fitting = round((end_ns - job.arrival_ns) / period_ns[job.name])
        if job.iterations:
            fitting = min(fitting, job.iterations)
        # Who comes too late for that holds up the end.
        until[job.name] = max(1 + scenario.warmup, fitting)
        own_end_ns = job.arrival_ns + until[job.name] * period_ns[job.name]
        if max(end_ns, own_end_ns) > MAX_END_ns:
            slow = job.name if own_end_ns > end_ns else longest
            raise UsageError(
                f"Job {slow} ends {format_duration(max(end_ns, own_end_ns))} after the begin, with "
                f"a period of {format_duration(period_ns[slow])}; allowed: up to "
                f"{format_duration(MAX_END_ns)}.",
                "Use fewer iterations, a shorter period or an earlier arrival.",
            )
    total = sum(until.values())
    if total > MAX_TOTAL_ITERATIONS:
        most = max(until, key=lambda name: until[name])
        raise UsageError(
            f"All jobs together have {total:,} iterations, of which {until[most]:,} are of job "
            f"{most} with a period of {format_duration(period_ns[most])}, in the time that job "
            f"{longest} needs for its own of {format_duration(period_ns[longest])}; allowed: "
            f"{MAX_TOTAL_ITERATIONS:,}.",
            "Use fewer iterations or jobs, or periods nearer to each other.",
        )
    return until
