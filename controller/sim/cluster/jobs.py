"""A training job on a cluster: where it runs, when its buckets are ready, how they travel."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np

from controller.errors import UsageError
from controller.priority.jobs import DEFAULT_CEILING, DEFAULT_CLASS
from controller.priority.policy import DEFAULT_MAX_SLOWDOWN
from controller.priority.ranges import check_slowdown

RING, HALVING_DOUBLING = ALGORITHMS = ("ring", "halving-doubling")


@dataclass(frozen=True)
class Bucket:
    """Part of a gradient that one AllReduce carries.

    Parameters
    ----------
    ready_share
        What of the backward pass is done when it is ready, 0 .. 1; 1: at its end.
    nbytes
        Size on each rank.
    """

    ready_share: float
    nbytes: int


@dataclass(frozen=True)
class ClusterJob:
    """A loop of forward pass, backward pass and AllReduce of its buckets.

    Parameters
    ----------
    name
        Of the job; its random stream depends on it and the seed only, so that every policy
        meets the same compute times.
    nics
        NICs of its ranks, in the order of the ring; each once.
    forward_ns, backward_ns
        Mean times of the two passes.
    buckets
        In the order in which they are ready, which is the order in which they are sent.
    algorithm
        "ring" or "halving-doubling".
    jitter
        Both passes of an iteration are the means times a number drawn evenly from
        ``1 - jitter .. 1 + jitter``; 0 .. 1.
    factors
        Instead of drawing: what the passes of each iteration are multiplied with, from a trace,
        again from the beginning when they are used up. Seed 0 begins with the first, as it was
        recorded; every other seed anywhere.
    arrival_ns
        When its first forward pass begins.
    iterations
        After which it leaves; 0: stays until the simulation ends.
    gpus
        That compute for it; 0: one for each NIC.
    traffic_class, class_floor, class_ceiling, max_slowdown
        As in `controller.priority.policy.JobView`.

    Raises
    ------
    UsageError
        A value is impossible.
    """

    name: str
    nics: tuple[int, ...]
    forward_ns: float
    backward_ns: float
    buckets: tuple[Bucket, ...]
    algorithm: str = RING
    jitter: float = 0.0
    factors: tuple[float, ...] = ()
    arrival_ns: float = 0.0
    iterations: int = 0
    gpus: int = 0
    traffic_class: int = DEFAULT_CLASS
    class_floor: int = 0
    class_ceiling: int = DEFAULT_CEILING
    max_slowdown: float = DEFAULT_MAX_SLOWDOWN

    def __post_init__(self) -> None:
        where = f"Job {self.name}:"
        if not self.nics or len(set(self.nics)) != len(self.nics):
            raise UsageError(f"{where} NICs are {self.nics}; allowed: one or more, each once.")
        for what in ("forward_ns", "backward_ns", "arrival_ns"):
            value = getattr(self, what)
            if not 0 <= value < math.inf:
                raise UsageError(f"{where} {what} is {value!r}; allowed: a number from 0.")
        if self.forward_ns + self.backward_ns <= 0:
            raise UsageError(f"{where} computes nothing; allowed: a time above 0.")
        if not self.buckets:
            raise UsageError(f"{where} has no bucket; allowed: one or more.")
        shares = [bucket.ready_share for bucket in self.buckets]
        if shares != sorted(shares) or not 0 <= shares[0] <= shares[-1] <= 1:
            raise UsageError(
                f"{where} buckets are ready at {shares}; allowed: rising shares, 0 .. 1."
            )
        if min(bucket.nbytes for bucket in self.buckets) < 1:
            raise UsageError(f"{where} a bucket is empty; allowed: from 1 byte.")
        if self.algorithm not in ALGORITHMS:
            raise UsageError(
                f"{where} algorithm is {self.algorithm!r}; allowed: {', '.join(ALGORITHMS)}."
            )
        if not 0 <= self.jitter <= 1:
            raise UsageError(f"{where} jitter is {self.jitter!r}; allowed: 0 .. 1.")
        if any(not 0 < factor < math.inf for factor in self.factors):
            raise UsageError(f"{where} a factor of its compute times is not above 0.")
        if self.iterations < 0 or self.gpus < 0:
            raise UsageError(f"{where} iterations and GPUs are numbers from 0.")
        check_slowdown(f"{where} max_slowdown", self.max_slowdown)
        if not self.class_floor <= self.traffic_class <= self.class_ceiling:
            raise UsageError(
                f"{where} class is {self.traffic_class}; allowed: {self.class_floor} .. "
                f"{self.class_ceiling} (class_floor .. class_ceiling)."
            )

    @property
    def gpu_count(self) -> int:
        """GPUs that compute for it."""
        return self.gpus or len(self.nics)

    @property
    def window_nbytes(self) -> int:
        """Gradient of an iteration, on each rank."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def compute_factors(self, count: int, seed: int) -> list[float]:
        """Of the first `count` iterations; a longer list begins with a shorter."""
        stream = np.random.default_rng((seed, zlib.crc32(self.name.encode())))
        if self.factors:
            first = int(stream.integers(len(self.factors))) if seed else 0
            return [self.factors[(first + place) % len(self.factors)] for place in range(count)]
        return [float(value) for value in 1 + self.jitter * stream.uniform(-1, 1, count)]
