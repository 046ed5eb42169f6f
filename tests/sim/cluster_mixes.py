"""Jobs on small clusters, and how they are run, for the tests of the cluster simulator."""

from __future__ import annotations

import numpy as np

from controller.priority.coordination import find_coordinator
from controller.priority.policy import Assignment
from controller.sim.cluster.engine import simulate_cluster
from controller.sim.cluster.jobs import Bucket, ClusterJob
from controller.sim.cluster.outcome import ClusterConditions
from controller.sim.cluster.topology import LeafSpine

LINK_Bps = 12.5e6
MS = 1e6
# Nothing between a decision and its effect.
IDEAL = ClusterConditions(floor_share=0, plan_ns=0)
ONE_SWITCH = LeafSpine(1, 4, 0, LINK_Bps, LINK_Bps)


def link_job(job, nics=(0, 1)):
    """A job of the one-link simulator: on a ring of two, each rank sends the gradient once."""
    return ClusterJob(
        job.name,
        nics,
        0.4 * job.compute_ns,
        0.6 * job.compute_ns,
        (Bucket(1.0, job.window_bytes),),
        jitter=job.jitter,
        arrival_ns=job.offset_ns,
        traffic_class=job.traffic_class,
        max_slowdown=job.max_slowdown,
    )


def two_rank_job(name, compute_ms, window_ms, nics=(0, 1), **more):
    """One bucket at the end of the backward pass, which is all of the computation."""
    nbytes = round(window_ms * LINK_Bps / 1000)
    return ClusterJob(name, nics, 0.0, compute_ms * MS, (Bucket(1.0, nbytes),), **more)


def random_cluster(seed, jobs=10, leaves=4, nics_per_leaf=8, algorithms=("ring",)):
    """A leaf-spine network with one spine for four NICs, and jobs anywhere on it."""
    rng = np.random.default_rng(seed)
    topology = LeafSpine(leaves, nics_per_leaf, nics_per_leaf // 4, LINK_Bps, 2 * LINK_Bps)
    places = rng.permutation(topology.nics)
    sizes = rng.integers(2, topology.nics // jobs, jobs, endpoint=True)
    ends = np.cumsum(sizes)
    made = []
    for number, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        compute_ns = float(rng.uniform(100, 400) * MS)
        buckets = tuple(
            Bucket(share, int(rng.uniform(0.02, 0.2) * LINK_Bps))
            for share in sorted(rng.uniform(0, 1, rng.integers(1, 4)).tolist())
        )
        made.append(
            ClusterJob(
                f"j{number}",
                tuple(places[end - size : end].tolist()),
                compute_ns / 3,
                compute_ns * 2 / 3,
                buckets,
                algorithm=str(rng.choice(algorithms)),
                jitter=0.2,
                arrival_ns=float(rng.uniform(0, 200) * MS),
            )
        )
    return topology, made


class Fixed:
    """Gives each job what it is told to."""

    name, needs_pacing = "fixed", False

    def __init__(self, **given):
        self.given = given

    def tick_ns(self, links):
        return 0

    def assign(self, now_ns, jobs, contention):
        return self.given


def classes(**given):
    return Fixed(**{name: Assignment(number, number) for name, number in given.items()})


def run(jobs, coordinator="fair", iterations=3, *, topology=ONE_SWITCH, conditions=IDEAL, **more):
    if isinstance(coordinator, str):
        coordinator = find_coordinator(coordinator)
    return simulate_cluster(
        jobs, topology, coordinator, conditions, until_iterations=iterations, **more
    )


def windows_ms(outcome, name):
    return [each.window_ns / MS for each in outcome.iterations if each.job == name]


def durations_ms(outcome, name):
    return [each.duration_ns / MS for each in outcome.iterations if each.job == name]
