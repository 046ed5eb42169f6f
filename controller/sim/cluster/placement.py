"""Which NICs each job of a cluster gets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.errors import UsageError
from controller.sim.cluster.topology import LeafSpine

PACKED, SPREAD, RANDOM = WAYS = ("packed", "spread", "random")


def place(
    sizes: Sequence[int], topology: LeafSpine, how: str, seed: int = 0, *, share: bool = False
) -> list[tuple[int, ...]]:
    """NICs of each job, in the order of its ring.

    Parameters
    ----------
    sizes
        Number of NICs of each job.
    topology
        The network.
    how
        "packed": leaf after leaf is filled, so that a ring crosses few uplinks. "spread": one at
        each leaf in turn, so that nearly every edge of a ring crosses. "random": any that are free,
        as in a cluster where jobs have come and gone; the ring goes through them in rising order,
        as launchers number ranks by host.
    seed
        Of the random placement.
    share
        Every job gets its NICs as if it were alone, so that jobs share NICs. Else each NIC belongs
        to one job.

    Returns
    -------
    list of tuple of int
        In the order of `sizes`. Deterministic.

    Raises
    ------
    UsageError
        The jobs do not fit, or there is no such way.
    """
    if how not in WAYS:
        raise UsageError(f"Placement is {how!r}; allowed: {', '.join(WAYS)}.")
    if any(size < 1 for size in sizes):
        raise UsageError(f"Sizes of jobs are {list(sizes)}; allowed: from 1 NIC each.")
    wanted = max(sizes, default=0) if share else sum(sizes)
    if wanted > topology.nics:
        raise UsageError(
            f"Jobs need {wanted} NICs and the network has {topology.nics}.",
            "Use fewer or smaller jobs, more leaves, or let jobs share NICs.",
        )
    stream = np.random.default_rng(seed)
    order = _order(topology, how, stream)
    placed: list[tuple[int, ...]] = []
    first = 0
    for size in sizes:
        nics = order[first : first + size].tolist()
        placed.append(tuple(sorted(nics) if how == RANDOM else nics))
        if not share:
            first += size
        elif how == RANDOM:
            order = _order(topology, how, stream)
    return placed


def _order(topology: LeafSpine, how: str, stream: np.random.Generator) -> NDArray[np.int64]:
    nics = np.arange(topology.nics)
    if how == SPREAD:
        return nics.reshape(topology.leaves, topology.nics_per_leaf).T.ravel()
    return stream.permutation(nics) if how == RANDOM else nics
