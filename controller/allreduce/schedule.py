"""Schedules of the collectives: who sends which elements to whom, and what comes before.

Pure: ranks and element counts in, a `Plan` out. All ranks compute their plans from the same
numbers, so that the k-th message from a to b is the same in both plans.

Every element is reduced in one fixed order, at one place at a time, and copied from where its
reduction ended: all ranks end with the same bits, and the next run gives them again. The order
depends on the algorithm and the number of ranks, not on who is early.

References
----------
Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH,
International Journal of High Performance Computing Applications 19(1), 2005.
Hensgen, Finkel, Manber: Two Algorithms for Barrier Synchronization, International Journal of
Parallel Programming 17(1), 1988 (dissemination barrier).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from itertools import pairwise

from controller.allreduce.halving import Fold, Halving, distances_among
from controller.allreduce.plan import Plan, PlanBuilder, Receive, Send, split
from controller.errors import UsageError

__all__ = [
    "Algorithm",
    "Plan",
    "Receive",
    "Send",
    "choose_algorithm",
    "peers",
    "plan_all_gather",
    "plan_all_reduce",
    "plan_barrier",
    "plan_broadcast",
    "plan_reduce_scatter",
]

# Bytes that a link carries in the time that one more step of a schedule costs. About 50 us a step
# (a message through queue pair, completion channel and Python) at 1 GB/s.
STEP_BYTES = 50_000
# Halving-doubling has to be faster by a tenth to be chosen: where both need the same time, the ring
# keeps to one neighbour on each side, and its chunks are on one grid from first step to last.
_CLEARLY = 0.9


class Algorithm(enum.Enum):
    """How a reduction or a gathering is done."""

    RING = "ring"
    HALVING_DOUBLING = "halving-doubling"


def plan_all_reduce(algorithm: Algorithm, rank: int, size: int, count: int, chunk: int) -> Plan:
    """Reduce `count` elements over all ranks; every rank ends with the result.

    Parameters
    ----------
    algorithm
        Ring: 2 (size - 1) steps, each rank sends 2 (size - 1) / size of its elements, the least
        possible. Halving-doubling: 2 log2(size) steps and the same bytes for powers of two; else
        2 steps and, at the first ranks, up to twice the bytes more.
    rank, size
        This rank, of 0 .. `size` - 1.
    count
        Elements of the working buffer.
    chunk
        Most elements of one message.

    Raises
    ------
    UsageError
        A number is out of its range.
    """
    builder = _builder(rank, size, count, chunk)
    if algorithm is Algorithm.RING:
        bounds = split(0, count, size)
        _ring_reduce(builder, rank, size, bounds)
        _ring_gather(builder, rank, size, bounds)
        return builder.plan()
    fold = Fold(rank, size)
    fold.reduce_in(builder, 0, count)
    if fold.member is not None:
        # The largest parts go to the nearest rank, as those are likely behind the same switch.
        halving = Halving(fold, distances_among(fold.members), split(0, count, fold.members))
        halving.reduce(builder)
        halving.gather(builder)
    fold.copy_out(builder, (0, count))
    return builder.plan()


def plan_reduce_scatter(algorithm: Algorithm, rank: int, size: int, count: int, chunk: int) -> Plan:
    """Reduce `size` blocks over all ranks; rank r ends with the result of block r.

    Parameters
    ----------
    algorithm
        As in `plan_all_reduce`, with half its steps.
    rank, size
        This rank, of 0 .. `size` - 1.
    count
        Elements of a block. The working buffer has `size` blocks; at the end those of the other
        ranks hold intermediate results.
    chunk
        Most elements of one message.

    Raises
    ------
    UsageError
        A number is out of its range.
    """
    builder = _builder(rank, size, count, chunk)
    if algorithm is Algorithm.RING:
        _ring_reduce(builder, rank, size, split(0, size * count, size))
        return builder.plan()
    fold = Fold(rank, size)
    fold.reduce_in(builder, 0, size * count)
    if fold.member is not None:
        # Falling distances leave the blocks with their ranks in rising order.
        Halving(fold, distances_among(fold.members)[::-1], fold.bounds(count)).reduce(builder)
    fold.copy_out(builder, fold.block_of_absent(count))
    return builder.plan()


def plan_all_gather(algorithm: Algorithm, rank: int, size: int, count: int, chunk: int) -> Plan:
    """Copy each rank's block to all ranks.

    Parameters
    ----------
    algorithm
        As in `plan_all_reduce`, with half its steps.
    rank, size
        This rank, of 0 .. `size` - 1.
    count
        Elements of a block. The working buffer has `size` blocks; this rank's own is in place at
        the start.
    chunk
        Most elements of one message.

    Raises
    ------
    UsageError
        A number is out of its range.
    """
    builder = _builder(rank, size, count, chunk)
    if algorithm is Algorithm.RING:
        _ring_gather(builder, rank, size, split(0, size * count, size))
        return builder.plan()
    fold = Fold(rank, size)
    start, stop = fold.block_of_absent(count)
    fold.copy_in(builder, start, stop)
    if fold.member is not None:
        Halving(fold, distances_among(fold.members)[::-1], fold.bounds(count)).gather(builder)
    fold.copy_out(builder, (0, start), (stop, size * count))
    return builder.plan()


def plan_broadcast(rank: int, size: int, root: int, count: int, chunk: int) -> Plan:
    """Copy the root's elements to all ranks.

    With few messages along a binomial tree, log2(size) steps for each; with many along a chain from
    the root, in which each rank passes a message on while the next comes in. The number of messages
    that leave one after the other until the last rank has everything decides.

    Parameters
    ----------
    rank, size
        This rank, of 0 .. `size` - 1.
    root
        Rank whose elements are copied.
    count
        Elements of the working buffer.
    chunk
        Most elements of one message.

    Raises
    ------
    UsageError
        A number is out of its range.
    """
    builder = _builder(rank, size, count, chunk)
    if not 0 <= root < size:
        raise UsageError(f"Root is {root}; allowed: a rank, 0 .. {size - 1}.")
    place = (rank - root) % size
    messages = -(-count // chunk)
    chained = messages + size - 2 < messages * (size - 1).bit_length()
    if chained:
        source, targets = place - 1, [place + 1]
    else:
        # A place's source lacks its lowest bit; those that lack any bit below lead to others.
        lowest = place & -place if place else 1 << (size - 1).bit_length()
        source = place - lowest
        targets = [place + distance for distance in reversed(distances_among(lowest))]
    bounds = split(0, count, max(1, messages))
    for start, stop in pairwise(bounds):
        if place:
            builder.receive((root + source) % size, start, stop, reduce=False)
        for target in targets:
            if target < size:
                builder.send((root + target) % size, start, stop, direct=True)
    return builder.plan()


def plan_barrier(rank: int, size: int) -> Plan:
    """Messages without payload after whose receipt every rank has entered the barrier.

    Dissemination: in step k a rank tells the one 2^k after it that all it has heard of are there.

    Raises
    ------
    UsageError
        A number is out of its range.
    """
    builder = _builder(rank, size, 0, 1)
    for distance in _spans(size):
        builder.signal((rank + distance) % size)
        builder.await_signal((rank - distance) % size)
    return builder.plan()


def peers(rank: int, size: int) -> tuple[int, ...]:
    """Ranks that any plan here may send to or receive from, in rising order.

    Symmetric: a rank is a peer of each of its peers. At most 3 log2(size) + 1, so that queue pairs
    stay few with many ranks.

    Raises
    ------
    UsageError
        A number is out of its range.
    """
    _builder(rank, size, 0, 1)
    found = {(rank + sign * distance) % size for distance in _spans(size) for sign in (1, -1)}
    fold = Fold(rank, size)
    found |= set(fold.partners())
    return tuple(sorted(found - {rank}))


def choose_algorithm(size: int, nbytes: int) -> Algorithm:
    """The faster algorithm for an AllReduce, by a cost model of steps and bytes.

    Ring: 2 (n - 1) steps, 2 (n - 1) / n of the bytes. Halving-doubling on p, the largest power of
    two up to n: 2 log2 p steps, 2 (p - 1) / p of the bytes; where n is larger than p, 2 steps and
    twice the bytes more. A step costs as much as `STEP_BYTES`.

    Parameters
    ----------
    size
        Number of ranks.
    nbytes
        Bytes to reduce.
    """
    members = 1 << (size.bit_length() - 1)
    ring = 2 * (size - 1) * STEP_BYTES + 2 * (size - 1) / size * nbytes
    halving = 2 * (members.bit_length() - 1) * STEP_BYTES + 2 * (members - 1) / members * nbytes
    if members < size:
        halving += 2 * STEP_BYTES + 2 * nbytes
    return Algorithm.HALVING_DOUBLING if halving < _CLEARLY * ring else Algorithm.RING


def _builder(rank: int, size: int, count: int, chunk: int) -> PlanBuilder:
    if size < 1:
        raise UsageError(f"Number of ranks is {size}; allowed: 1 and more.")
    if not 0 <= rank < size:
        raise UsageError(f"Rank is {rank}; allowed: 0 .. {size - 1}.")
    if count < 0:
        raise UsageError(f"Number of elements is {count}; allowed: 0 and more.")
    if chunk < 1:
        raise UsageError(f"Chunk is {chunk} elements; allowed: 1 and more.")
    return PlanBuilder(chunk)


def _spans(size: int) -> list[int]:
    """Powers of two below the number of ranks."""
    return [1 << power for power in range((size - 1).bit_length())]


def _ring_reduce(builder: PlanBuilder, rank: int, size: int, bounds: Sequence[int]) -> None:
    """Each block goes once round the ring, starts after its rank, and ends there."""
    after, before = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        out, into = (rank - 1 - step) % size, (rank - 2 - step) % size
        builder.send(after, bounds[out], bounds[out + 1], direct=False)
        builder.receive(before, bounds[into], bounds[into + 1], reduce=True)


def _ring_gather(builder: PlanBuilder, rank: int, size: int, bounds: Sequence[int]) -> None:
    """Each block goes once round the ring from its rank."""
    after, before = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        out, into = (rank - step) % size, (rank - 1 - step) % size
        builder.send(after, bounds[out], bounds[out + 1], direct=True)
        builder.receive(before, bounds[into], bounds[into + 1], reduce=False)
