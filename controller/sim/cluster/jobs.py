"""A training job on a cluster: where it runs, when its buckets are ready, how they travel."""

from __future__ import annotations

import math
from dataclasses import dataclass

from controller.errors import UsageError
from controller.sim.jobs import AnyJob, check_from_zero
from controller.sim.streams import stream

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
class ClusterJob(AnyJob):
    """A loop of forward pass, backward pass and AllReduce of its buckets.

    Parameters
    ----------
    name, jitter, traffic_class, class_floor, class_ceiling, max_slowdown
        As in `controller.sim.jobs.AnyJob`; both passes of an iteration have one factor.
    nics
        NICs of its ranks, in the order of the ring; each once.
    forward_ns, backward_ns
        Mean times of the two passes.
    buckets
        In the order in which they are ready, which is the order in which they are sent.
    algorithm
        "ring" or "halving-doubling".
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

    Raises
    ------
    UsageError
        A value is impossible.
    """

    nics: tuple[int, ...]
    forward_ns: float
    backward_ns: float
    buckets: tuple[Bucket, ...]
    algorithm: str = RING
    factors: tuple[float, ...] = ()
    arrival_ns: float = 0.0
    iterations: int = 0
    gpus: int = 0

    def __post_init__(self) -> None:
        where = self._where
        if not self.nics or len(set(self.nics)) != len(self.nics):
            raise UsageError(f"{where} NICs are {self.nics}; allowed: one or more, each once.")
        check_from_zero(self, ("forward_ns", "backward_ns", "arrival_ns"), f"{where} ")
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
        if any(not 0 < factor < math.inf for factor in self.factors):
            raise UsageError(f"{where} a factor of its compute times is not above 0.")
        if self.iterations < 0 or self.gpus < 0:
            raise UsageError(f"{where} iterations and GPUs are numbers from 0.")
        super().__post_init__()

    @property
    def gpu_count(self) -> int:
        """GPUs that compute for it."""
        return self.gpus or len(self.nics)

    @property
    def window_nbytes(self) -> int:
        """Gradient of an iteration, on each rank."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def mean_factor(self) -> float:
        """Of all iterations."""
        return sum(self.factors) / len(self.factors) if self.factors else 1.0

    def compute_factors(self, count: int, seed: int) -> list[float]:
        """Of the first `count` iterations; a longer list begins with a shorter."""
        if not self.factors:
            return super().compute_factors(count, seed)
        first = int(stream(seed, self.name).integers(len(self.factors))) if seed else 0
        return [self.factors[(first + place) % len(self.factors)] for place in range(count)]
