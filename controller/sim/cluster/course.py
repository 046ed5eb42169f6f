"""The steps of a job's collectives on its links, and how long they take when nobody disturbs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.sim.cluster.collectives import Stage, stages
from controller.sim.cluster.jobs import ClusterJob
from controller.sim.cluster.topology import LeafSpine

_S = 1e9


@dataclass(frozen=True, eq=False)
class Step:
    """A stage of a bucket's collective, with what follows from its links.

    Parameters
    ----------
    stage
        Links, flows and bytes of a flow.
    bucket
        Number of the bucket in its iteration.
    alone_Bps
        Rate of each flow when nobody else sends.
    flow_count
        Flows of the stage.
    flows_per_rank
        Most flows that one NIC sends: what a flow moves times this is what the busiest rank
        sends.
    """

    stage: Stage
    bucket: int
    alone_Bps: float
    flow_count: float
    flows_per_rank: float

    @property
    def alone_ns(self) -> float:
        """How long it takes when nobody else sends."""
        return self.stage.nbytes / self.alone_Bps * _S

    @property
    def rank_bytes(self) -> float:
        """What the busiest rank sends."""
        return self.stage.nbytes * self.flows_per_rank


@dataclass(frozen=True, eq=False)
class Undisturbed:
    """Iterations as they are when nobody else sends, each array of shape (iterations,).

    Parameters
    ----------
    lead_ns
        From the begin of an iteration to that of its window.
    window_ns
        Length of the window: more than the bytes need where a bucket waits for the backward
        pass.
    duration_ns
        Length of the iteration.
    """

    lead_ns: NDArray[np.float64]
    window_ns: NDArray[np.float64]
    duration_ns: NDArray[np.float64]


class Course:
    """What a job sends in each of its iterations, step by step.

    Parameters
    ----------
    job
        With its buckets.
    topology
        Whose links they cross.
    qps_per_peer
        Queue pairs that each edge's bytes are split over.
    key
        Of the ECMP hashes.

    Raises
    ------
    UsageError
        The topology lacks a NIC of the job, or `qps_per_peer` is below 1.
    """

    def __init__(
        self, job: ClusterJob, topology: LeafSpine, qps_per_peer: int = 1, key: int = 0
    ) -> None:
        self.job = job
        self.steps = tuple(
            _step(number, stage, topology)
            for number, bucket in enumerate(job.buckets)
            for stage in stages(job, topology, bucket.nbytes, qps_per_peer, key)
        )
        self.window_bytes = sum(step.rank_bytes for step in self.steps)
        self._bucket_ns = [0.0] * len(job.buckets)
        for step in self.steps:
            self._bucket_ns[step.bucket] += step.alone_ns
        self._sending_ns = [0.0]
        for step in reversed(self.steps):
            self._sending_ns.insert(0, self._sending_ns[0] + step.alone_ns)

    def sending_ns(self, first_step: int) -> float:
        """How long the steps from one on take when nobody else sends."""
        return self._sending_ns[first_step]

    def ready_ns(self, bucket: int) -> float:
        """Mean time from the begin of an iteration until a bucket is ready."""
        return self.job.forward_ns + self.job.buckets[bucket].ready_share * self.job.backward_ns

    def undisturbed(self, factors: Sequence[float] | NDArray[np.float64]) -> Undisturbed:
        """Iterations whose passes are the means times these factors."""
        factor = np.asarray(factors, np.float64)
        compute_ns = (self.job.forward_ns + self.job.backward_ns) * factor
        if not self.steps:
            return Undisturbed(compute_ns, np.zeros_like(factor), compute_ns)
        lead_ns = self.ready_ns(0) * factor
        now_ns = lead_ns
        for bucket, needed_ns in enumerate(self._bucket_ns):
            now_ns = np.maximum(now_ns, self.ready_ns(bucket) * factor) + needed_ns
        return Undisturbed(lead_ns, now_ns - lead_ns, np.maximum(now_ns, compute_ns))


def even_iterations(jobs: Sequence[ClusterJob], topology: LeafSpine, least: int) -> dict[str, int]:
    """Iterations of each job so that all end at about the same time.

    Parameters
    ----------
    jobs
        At least one; a job that leaves early has as many as it stays for.
    topology
        Where they run.
    least
        Of the job with the longest undisturbed iteration.
    """
    period_ns = {
        job.name: float(Course(job, topology).undisturbed([1.0]).duration_ns[0]) for job in jobs
    }
    longest_ns = max(period_ns.values())
    counts = {name: round(least * longest_ns / period) for name, period in period_ns.items()}
    for job in jobs:
        if job.iterations:
            counts[job.name] = min(counts[job.name], job.iterations)
    return counts


def _step(bucket: int, stage: Stage, topology: LeafSpine) -> Step:
    # Links below this number are those from NICs up, see `LeafSpine`: each flow crosses one.
    sent = stage.flows[stage.links < topology.nics]
    return Step(
        stage=stage,
        bucket=bucket,
        alone_Bps=float((topology.capacity_Bps[stage.links] / stage.flows).min()),
        flow_count=float(sent.sum()),
        flows_per_rank=float(sent.max()),
    )
