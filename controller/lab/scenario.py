"""A scenario of the cluster simulator: which jobs meet on which network, and who orders them."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from controller.errors import UsageError
from controller.priority.jobs import check_name
from controller.priority.ranges import check_integer
from controller.sim.cluster.jobs import RING, Bucket
from controller.sim.cluster.outcome import DCQCN_SHARING, ClusterConditions
from controller.sim.cluster.placement import RANDOM as RANDOM_PLACEMENT
from controller.sim.cluster.placement import WAYS
from controller.sim.cluster.topology import LeafSpine

ORACLE = "oracle"
FAIR = "fair"
# In the order of tables: no order of jobs, orders of others, ours, and who knows everything.
KNOWN_POLICIES = (FAIR, "static", "mltcp", "crux", "cassini", "strict", "laxity", ORACLE)
RANDOM, TOGETHER = STARTS = ("random", "together")

# A typing error ends here, not after days: the simulator takes minutes for 100 jobs, 1,024 NICs
# and 1,000 iterations.
MAX_JOBS = 1000
MAX_NICS = 1 << 14
MAX_FIRST_SEED = 2**31
MAX_SEEDS = 1000
MAX_ITERATIONS = 100_000


@dataclass(frozen=True)
class Network:
    """The network, and where jobs are on it.

    Parameters
    ----------
    fabric
        Its links.
    placement
        One of `controller.sim.cluster.placement.WAYS`.
    share_nics
        Every job gets its NICs as if it were alone.

    Raises
    ------
    UsageError
        A value is impossible.
    """

    fabric: LeafSpine
    placement: str = RANDOM_PLACEMENT
    share_nics: bool = False

    def __post_init__(self) -> None:
        check_integer("Number of NICs", self.fabric.nics, 1, MAX_NICS)
        if self.placement not in WAYS:
            raise UsageError(
                f"placement is {self.placement!r}; allowed: {', '.join(WAYS)}.", "Correct it."
            )

    def to_json(self) -> dict[str, Any]:
        """For reports; rates in bits/s."""
        fabric = self.fabric
        return {
            "leaves": fabric.leaves,
            "nics_per_leaf": fabric.nics_per_leaf,
            "spines": fabric.spines,
            "uplinks_per_spine": fabric.uplinks_per_spine,
            "nic_rate_bps": fabric.nic_Bps * 8,
            "uplink_rate_bps": fabric.uplink_Bps * 8,
            "placement": self.placement,
            "share_nics": self.share_nics,
        }


@dataclass(frozen=True)
class JobSpec:
    """One ``[[job]]``: a job, or several like it.

    Parameters
    ----------
    name
        Of the job; with a count above 1 followed by -1, -2, ...
    nics
        Of each; they are placed by the network's rule.
    forward_ns, backward_ns, buckets, algorithm, jitter, factors
        As in `controller.sim.cluster.jobs.ClusterJob`.
    places
        Its NICs by number, where the scenario names them; else none.
    count
        How many like it.
    gpus_per_nic
        That compute for it.
    traffic_class
        Class of the policy ``static``; None: one that a person would give by hand, see `classes`.
    max_slowdown
        Bound for its iteration time.
    arrival_ns, every_ns
        When the first comes, and how long after another the next one: on average where the
        scenario starts at random, else exactly.
    iterations
        After which it leaves; 0: it stays.
    source
        What it is made of, for reports.
    """

    name: str
    nics: int
    forward_ns: float
    backward_ns: float
    buckets: tuple[Bucket, ...]
    algorithm: str = RING
    jitter: float = 0.0
    factors: tuple[float, ...] = ()
    places: tuple[int, ...] = ()
    count: int = 1
    gpus_per_nic: int = 1
    traffic_class: int | None = None
    max_slowdown: float = 1.5
    arrival_ns: float = 0.0
    every_ns: float = 0.0
    iterations: int = 0
    source: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the jobs that it stands for."""
        if self.count == 1:
            return (self.name,)
        return tuple(f"{self.name}-{number + 1}" for number in range(self.count))

    def to_json(self) -> dict[str, Any]:
        """For reports; times in ms."""
        return {
            "name": self.name,
            "count": self.count,
            "nics": list(self.places) or self.nics,
            "gpus_per_nic": self.gpus_per_nic,
            "forward_ms": round(self.forward_ns / 1e6, 6),
            "backward_ms": round(self.backward_ns / 1e6, 6),
            "buckets": [
                {"ready_share": round(bucket.ready_share, 4), "bytes": bucket.nbytes}
                for bucket in self.buckets
            ],
            "algorithm": self.algorithm,
            "jitter": self.jitter,
            "factors": len(self.factors),
            "class": self.traffic_class,
            "max_slowdown": self.max_slowdown,
            "arrival_ms": self.arrival_ns / 1e6,
            "every_ms": self.every_ns / 1e6,
            "iterations": self.iterations,
            "source": self.source,
        }


@dataclass(frozen=True)
class ClusterScenario:
    """Jobs, network and policies of one comparison.

    Parameters
    ----------
    name, about
        In reports; `about` in one line.
    network
        Links and placement.
    jobs
        One or more.
    conditions
        How links are shared, and how well the coordinator sees and acts.
    policies
        Names of `KNOWN_POLICIES`, each once.
    seeds, first_seed
        Runs of each policy, and the seed of the first; the others count on from it. A seed draws
        placement, compute times and begins.
    iterations
        Of the job with the longest period, those that count; others have as many as fit into
        that time.
    warmup
        Iterations of each job before them, which do not count.
    start
        "random": each job begins at a moment of its own within its first period; "together": all
        at once.

    Raises
    ------
    UsageError
        A value is impossible, or values do not fit together.
    """

    name: str
    network: Network
    jobs: tuple[JobSpec, ...]
    about: str = ""
    conditions: ClusterConditions = field(default_factory=ClusterConditions)
    policies: tuple[str, ...] = KNOWN_POLICIES
    seeds: int = 10
    first_seed: int = 1
    iterations: int = 100
    warmup: int = 10
    start: str = RANDOM

    def __post_init__(self) -> None:
        check_integer("seeds", self.seeds, 1, MAX_SEEDS)
        check_integer("first_seed", self.first_seed, 0, MAX_FIRST_SEED)
        check_integer("iterations", self.iterations, 1, MAX_ITERATIONS)
        check_integer("warmup", self.warmup, 0, MAX_ITERATIONS)
        if self.start not in STARTS:
            raise UsageError(
                f"start is {self.start!r}; allowed: {', '.join(STARTS)}.", "Correct it."
            )
        check_policies(self.policies)
        self._check_jobs()

    def _check_jobs(self) -> None:
        names = [name for spec in self.jobs for name in spec.names]
        if not 1 <= len(names) <= MAX_JOBS:
            raise UsageError(
                f"There are {len(names)} jobs; allowed: 1 .. {MAX_JOBS}.", "Use fewer."
            )
        for name, times in Counter(names).items():
            check_name(name)
            if times > 1:
                raise UsageError(
                    f"{times} jobs are named {name}; allowed: each once.", "Rename all but one."
                )
        named = [bool(spec.places) for spec in self.jobs]
        if any(named) and not all(named):
            raise UsageError(
                "Some jobs name their NICs and others leave them to the placement; allowed: all "
                "name them, or none does.",
                "Give each job a number of NICs, or each a list.",
            )
        for spec in self.jobs:
            if 0 < spec.iterations <= self.warmup:
                raise UsageError(
                    f"Job {spec.name} leaves after {spec.iterations} iterations, of which the "
                    f"warm-up is {self.warmup}; allowed: more.",
                    "Let it stay longer, or shorten the warm-up.",
                )
        self._check_places(all(named))

    def _check_places(self, named: bool) -> None:
        nics = self.network.fabric.nics
        for spec in self.jobs:
            for nic in spec.places:
                check_integer(f"NIC of job {spec.name}", nic, 0, nics - 1)
            if len(set(spec.places)) != len(spec.places):
                raise UsageError(
                    f"Job {spec.name} names a NIC twice; allowed: each once.", "Leave one out."
                )
        if named:
            return
        sizes = [spec.nics for spec in self.jobs for _ in range(spec.count)]
        wanted = max(sizes) if self.network.share_nics else sum(sizes)
        if wanted > nics:
            raise UsageError(
                f"Jobs need {wanted} NICs and the network has {nics}.",
                "Use fewer or smaller jobs, more leaves, or share_nics = true.",
            )

    @property
    def job_count(self) -> int:
        """How many jobs there are in all."""
        return sum(spec.count for spec in self.jobs)

    def classes(self) -> tuple[int, ...]:
        """Class of each job under ``static``, in the order of `jobs` and their names.

        Where the scenario gives none: 5 for the first, and downwards, again and again; what a
        person gives who knows of each job no more than that there are others.
        """
        downwards = itertools.cycle(range(5, -1, -1))
        return tuple(
            next(downwards) if spec.traffic_class is None else spec.traffic_class
            for spec in self.jobs
            for _ in range(spec.count)
        )

    @property
    def ignored(self) -> tuple[str, ...]:
        """What policies and conditions say and nobody heeds, see `DcqcnSimulation`."""
        is_dcqcn = self.conditions.sharing == DCQCN_SHARING
        return ("classes", "floor_share", "shares") if is_dcqcn else ()

    def to_json(self) -> dict[str, Any]:
        """For reports."""
        conditions = self.conditions
        return {
            "kind": "cluster",
            "name": self.name,
            "about": self.about,
            "topology": self.network.to_json(),
            "conditions": {
                "floor_share": conditions.floor_share,
                "plan_ms": conditions.plan_ns / 1e6,
                "raise_bytes": conditions.raise_bytes,
                "start_error": conditions.start_error,
                "bytes_error": conditions.bytes_error,
                "sharing": conditions.sharing,
                "ignored": list(self.ignored),
                "qps_per_peer": conditions.qps_per_peer,
            },
            "iterations": self.iterations,
            "warmup": self.warmup,
            "start": self.start,
            "jobs": [spec.to_json() for spec in self.jobs],
        }


def check_policies(names: tuple[str, ...]) -> None:
    """Raise UsageError unless these are policies, each once, one at least."""
    allowed = ", ".join(KNOWN_POLICIES)
    if not names:
        raise UsageError(f"No policy is named; allowed: {allowed}.", "Name one.")
    for name, times in Counter(names).items():
        if name not in KNOWN_POLICIES:
            raise UsageError(f"Policy {name!r} is unknown; allowed: {allowed}.", "Correct it.")
        if times > 1:
            raise UsageError(
                f"Policy {name} is named {times} times; allowed: each once.", "Name it once."
            )
