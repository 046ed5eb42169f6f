"""Traffic of a job's collective on the links of a network: who sends how much across what."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from controller.allreduce.halving import Fold, distances_among
from controller.errors import UsageError
from controller.sim.cluster.jobs import RING, ClusterJob
from controller.sim.cluster.topology import LeafSpine, mixed


@dataclass(frozen=True, eq=False)
class Stage:
    """A step of a collective: all its flows move as many bytes and progress together.

    They are tied because the ranks wait for each other: a ring moves chunk by chunk, so that its
    slowest edge holds up all others.

    Parameters
    ----------
    links
        Numbers of the links used, each once, rising; shape (used,), not to be written to.
    flows
        How many of the job's flows cross each of them; shape (used,), not to be written to.
    nbytes
        What each flow moves.
    """

    links: NDArray[np.int64]
    flows: NDArray[np.float64]
    nbytes: float


# What a stage is for any size of bucket: links, flows, and what a flow moves of the bucket.
_Pattern = tuple[NDArray[np.int64], NDArray[np.float64], float]


def stages(
    job: ClusterJob,
    topology: LeafSpine,
    bucket_nbytes: float,
    qps_per_peer: int = 1,
    key: int = 0,
) -> tuple[Stage, ...]:
    """Steps of the AllReduce of one bucket, as `controller.allreduce` would do it.

    Ring: one stage, in which ``2 (n - 1) / n`` of the bucket crosses each edge. Halving-doubling:
    ``2 log2 n`` stages between partners, the first of the reduce-scatter with half the bucket, the
    next with a quarter, and back; for other n two stages more, in which ranks too many hand over
    their bucket and get the result. Payload only; headers are the link rate's matter.

    Parameters
    ----------
    job
        Its NICs, algorithm and name count.
    topology
        The network.
    bucket_nbytes
        Size of the bucket on each rank.
    qps_per_peer
        Queue pairs that each edge's bytes are split over, each with its own ECMP path.
    key
        Of all ECMP hashes: another draw of the paths.

    Returns
    -------
    tuple of Stage
        In the order in which they follow each other. Stages over the same links have the same
        arrays, also those of other buckets. A path depends on job, edge and queue pair only, as a
        queue pair keeps its UDP source port. One rank: none.

    Raises
    ------
    UsageError
        The topology lacks a NIC, or a number is impossible.

    References
    ----------
    Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH,
    International Journal of High Performance Computing Applications 19(1), 2005.
    """
    if qps_per_peer < 1:
        raise UsageError(f"Number of queue pairs is {qps_per_peer}; allowed: from 1.")
    if not bucket_nbytes > 0:
        raise UsageError(f"Bucket has {bucket_nbytes!r} bytes; allowed: above 0.")
    patterns = _patterns(job.name, job.nics, job.algorithm, topology, qps_per_peer, key)
    return tuple(Stage(links, flows, share * bucket_nbytes) for links, flows, share in patterns)


# Every bucket of a job asks for the same patterns.
@lru_cache(maxsize=1024)
def _patterns(
    name: str, nics: tuple[int, ...], algorithm: str, topology: LeafSpine, qps: int, key: int
) -> tuple[_Pattern, ...]:
    if len(nics) == 1:
        return ()
    steps = _ring(len(nics)) if algorithm == RING else _halving_doubling(len(nics))
    places = np.asarray(nics, np.int64)
    used: dict[bytes, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
    patterns: list[_Pattern] = []
    for senders, receivers, share in steps:
        # The two halves of the exchange have the same partners: the same queue pairs.
        edges = senders.tobytes() + receivers.tobytes()
        if edges not in used:
            used[edges] = _crossings(
                edge_paths(name, topology, places[senders], places[receivers], qps, key)
            )
        patterns.append((*used[edges], share / qps))
    return tuple(patterns)


def edge_paths(
    name: str,
    topology: LeafSpine,
    sources: NDArray[np.int64],
    destinations: NDArray[np.int64],
    qps_per_peer: int,
    key: int,
) -> NDArray[np.int64]:
    """Links that the flows of a job's edges cross, shape (edges, qps_per_peer, 4).

    Parameters
    ----------
    name
        Of the job: its queue pairs have UDP source ports of their own.
    topology
        The network; see `LeafSpine.paths` for the last axis.
    sources, destinations
        NICs of each edge, shape (edges,).
    qps_per_peer, key
        As in `stages`.
    """
    keys = mixed(key, zlib.crc32(name.encode()), np.arange(qps_per_peer))
    return topology.paths(sources[:, None], destinations[:, None], keys[None, :])


def _crossings(paths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Links used, and how many flows cross each."""
    links, counts = np.unique(paths[paths >= 0], return_counts=True)
    flows = counts.astype(np.float64)
    links.setflags(write=False)
    flows.setflags(write=False)
    return links, flows


_Step = tuple[NDArray[np.int64], NDArray[np.int64], float]


def _ring(ranks: int) -> Iterator[_Step]:
    """Senders, receivers, and what each sends of the bucket."""
    senders = np.arange(ranks)
    yield senders, (senders + 1) % ranks, 2 * (ranks - 1) / ranks


def _halving_doubling(ranks: int) -> Iterator[_Step]:
    """Senders, receivers, and what each sends of the bucket, step by step."""
    fold = Fold(0, ranks)
    members = np.arange(fold.members)
    rank_of = np.array([fold.rank_of(member) for member in members.tolist()])
    odd = rank_of[: ranks - fold.members]
    if odd.size:
        yield odd - 1, odd, 1.0
    exchanges = [
        (rank_of, rank_of[members ^ distance], 0.5 ** (step + 1))
        for step, distance in enumerate(distances_among(fold.members))
    ]
    yield from exchanges
    yield from reversed(exchanges)
    if odd.size:
        yield odd, odd - 1, 1.0
