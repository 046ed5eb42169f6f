"""What the ranks of a mix do, as numbers: bytes, compute times, beginnings. No I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from controller.allreduce.settings import Settings
from controller.ops.qdisc_tree import safe_timeout, window_bytes
from controller.sim.models import find_model
from controller.workload.mixes import TOGETHER, Mix, MixJob

# What a packet carries beside its payload, as a qdisc counts it (no FCS): Ethernet 14, IPv4 20,
# UDP 8, BTH 12, ICRC 4; a WRITE's first packet also RETH 16 and immediate data 4.
_PACKET_OVERHEAD_BYTES = 58
_MESSAGE_OVERHEAD_BYTES = 20
PATH_MTU_BYTES = 4096
MAX_RANKS = 16
# A class that gets its floor only. `controller qdisc setup` gives each class this share.
_FLOOR_SHARE = 0.05
# Of a job's shortest compute phase: a silence that long ends its iteration. The controller's own
# default is two windows of a queue pair, which on links as slow as these is longer than the
# compute phases: iterations would run into one another.
_GAP_SHARE = 0.5
# Of the communicator. A gradient gets twice its bytes: leases are rounded up.
_POOL_NBYTES = 64 << 20
# Shorter jobs end last, so that the longest one never runs alone: what the slowest of them may
# take longer than planned.
_SPARE = 1.15


@dataclass(frozen=True)
class Traffic:
    """How the ranks send.

    Parameters
    ----------
    rate_Bps
        Of every host's egress, Ethernet frames without FCS.
    ranks
        Of each job, one a host.
    chunk_nbytes, tokens
        As in `controller.allreduce.settings.Settings`: a class changes between messages, and
        what is in flight in the old class is tokens x chunk.
    """

    rate_Bps: int
    ranks: int = 3
    chunk_nbytes: int = 16 << 10
    tokens: int = 8

    @property
    def payload_Bps(self) -> float:
        """Payload that a host sends in a second when its egress is full."""
        packets = math.ceil(self.chunk_nbytes / PATH_MTU_BYTES)
        overhead = packets * _PACKET_OVERHEAD_BYTES + _MESSAGE_OVERHEAD_BYTES
        return self.rate_Bps * self.chunk_nbytes / (self.chunk_nbytes + overhead)

    @property
    def queue_pair_timeout(self) -> int:
        """Timeout attribute: a class at its floor drains a window in half of it."""
        drain_ns = window_bytes(PATH_MTU_BYTES + 104) * 1e9 / (_FLOOR_SHARE * self.rate_Bps)
        return safe_timeout(round(drain_ns))

    def buckets_nbytes(self, job: MixJob) -> tuple[int, ...]:
        """Gradient buckets that take the job's window when nobody else sends.

        A ring of n ranks sends 2 (n - 1) / n of the gradient over each link.
        """
        wire_nbytes = job.window_ns / 1e9 * self.payload_Bps
        factor = 2 * (self.ranks - 1) / self.ranks if self.ranks > 1 else 1
        smallest = self.ranks * self.chunk_nbytes
        return find_model(job.model).scaled(round(wire_nbytes / factor), smallest)

    def sent_nbytes(self, job: MixJob) -> int:
        """Payload that each host sends in a window of the job."""
        total = sum(self.buckets_nbytes(job))
        return round(total * 2 * (self.ranks - 1) / self.ranks)

    def settings(self, gradient_nbytes: int = 0) -> Settings:
        """Of the ranks' communicators.

        Parameters
        ----------
        gradient_nbytes
            What a rank keeps in the pool, beside what the communicator needs.
        """
        return Settings(
            chunk_nbytes=self.chunk_nbytes,
            tokens=self.tokens,
            queue_pair_timeout=self.queue_pair_timeout,
            pool_nbytes=_POOL_NBYTES + 2 * gradient_nbytes,
        )

    def to_json(self) -> dict[str, Any]:
        """Members by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Traffic:
        """From `to_json`."""
        return cls(**document)


def gap_ns(mix: Mix, job: MixJob) -> int:
    """Silence that ends an iteration of a job, as its configuration names it."""
    return round(_GAP_SHARE * (1 - mix.jitter) * job.compute_ns)


@dataclass(frozen=True)
class Course:
    """What one job does in an episode.

    Parameters
    ----------
    offset_ns
        Begin of its first compute phase after the begin of the episode.
    compute_ns
        Of each iteration; the same on all ranks.
    """

    offset_ns: int
    compute_ns: tuple[int, ...]


def counted(mix: Mix, job: MixJob, iterations: int) -> int:
    """Iterations of a job in the time in which the longest one makes `iterations`."""
    return max(1, round(iterations * mix.longest_ns / job.period_ns))


def plan_round(mix: Mix, iterations: int, warmup: int, seed: int, number: int) -> dict[str, Course]:
    """What all jobs do in a round: the same for every policy.

    Parameters
    ----------
    mix
        The jobs.
    iterations, warmup
        Of the job with the longest period; others make as many as fit.
    seed, number
        Of the run, and which round of it: jitter and offsets follow from them.

    Returns
    -------
    dict
        Name -> course. Where jobs do not start together, offsets are drawn evenly from their
        periods.
    """
    result = {}
    for place, job in enumerate(mix.jobs):
        generator = np.random.default_rng((seed, number, place))
        drawn_ns = int(generator.uniform(0, job.period_ns))
        offset_ns = 0 if mix.start == TOGETHER else drawn_ns
        count = math.ceil(counted(mix, job, iterations + warmup) * _SPARE) + 1
        factors = generator.uniform(1 - mix.jitter, 1 + mix.jitter, count)
        result[job.name] = Course(offset_ns, tuple(round(job.compute_ns * f) for f in factors))
    return result


def plan_alone(job: MixJob, iterations: int) -> dict[str, Course]:
    """One job and nobody else, without jitter: what its window takes undisturbed."""
    # Little compute: only the windows are of interest.
    return {job.name: Course(0, (job.compute_ns // 4,) * iterations)}
