"""The calls that ranks must agree about: their numbers on the wire, names, plans, differences."""

from __future__ import annotations

import contextlib
import enum
import functools

from controller.allreduce import schedule
from controller.allreduce.reduction import DType, Op
from controller.allreduce.schedule import Algorithm, Plan
from controller.allreduce.wire import Description

ALGORITHM_NUMBERS = {None: 0, Algorithm.RING: 1, Algorithm.HALVING_DOUBLING: 2}


class Call(enum.IntEnum):
    """A collective; the numbers are on the wire."""

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    BARRIER = 5
    TOP_K = 6

    @property
    def label(self) -> str:
        """As people call it."""
        return "all_reduce of the largest" if self is Call.TOP_K else self.name.lower()


@functools.lru_cache(maxsize=256)
def plan_call(
    call: Call,
    algorithm: Algorithm | None,
    rank: int,
    size: int,
    count: int,
    chunk: int,
    root: int,
) -> Plan:
    """Messages of a rank.

    Parameters
    ----------
    call, algorithm
        What, and how; None for calls that have one way only.
    rank, size, root
        Own rank, number of ranks, and the root of a broadcast.
    count
        Elements: of the array, or of a block of a gathering or scattering.
    chunk
        Elements a message at most.
    """
    if not count or call is Call.BARRIER:
        # Without elements there is still something to agree about.
        return schedule.plan_barrier(rank, size)
    if call is Call.BROADCAST:
        return schedule.plan_broadcast(rank, size, root, count, chunk)
    assert algorithm is not None
    if call is Call.REDUCE_SCATTER:
        return schedule.plan_reduce_scatter(algorithm, rank, size, count, chunk)
    if call in (Call.ALL_GATHER, Call.TOP_K):
        return schedule.plan_all_gather(algorithm, rank, size, count, chunk)
    return schedule.plan_all_reduce(algorithm, rank, size, count, chunk)


def difference(ours: Description, theirs: Description) -> str:
    """What two ranks do not agree about: "dtype float32 here, int8 there"."""
    if ours.collective != theirs.collective:
        return f"{_call_label(ours.collective)} here, {_call_label(theirs.collective)} there"
    parts = []
    for key in ("op", "dtype", "algorithm", "compression", "root", "size", "count", "chunk"):
        mine, other = getattr(ours, key), getattr(theirs, key)
        if mine != other:
            parts.append(f"{key} {_label(key, mine)} here, {_label(key, other)} there")
    return "; ".join(parts) or f"operation {ours.sequence} here, {theirs.sequence} there"


def _call_label(number: int) -> str:
    with contextlib.suppress(ValueError):
        return Call(number).label
    return f"call {number}"


def _label(key: str, value: int) -> str:
    with contextlib.suppress(ValueError):
        if key == "dtype":
            return DType(value).label
        if key == "op":
            return Op(value).label
        if key == "algorithm":
            names = {n: a.value for a, n in ALGORITHM_NUMBERS.items() if a is not None}
            return names.get(value, "none")
    return str(value)
