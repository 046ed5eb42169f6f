"""Many priorities -> few classes, so that little is lost where jobs of one class contend.

Cao et al., "Crux", SIGCOMM 2024, section 4.3: a cut of the contention graph into at most K parts.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# Random orders of a contention graph that compression tries; the paper's Algorithm 1 samples as
# well.
DEFAULT_ORDERS = 16


def compress(
    priority: Mapping[str, float],
    contention: Mapping[tuple[str, str], float],
    levels: int,
    seed: int = 0,
    orders: int = DEFAULT_ORDERS,
) -> dict[str, int]:
    """Many priorities -> few levels, so that what is lost between jobs of one level is least.

    Max-K-cut on the contention graph, whose edges go from higher to lower priority: for random
    topological orders the best cut into `levels` consecutive groups, by dynamic programming.

    Parameters
    ----------
    priority
        Name -> priority.
    contention
        Pair of jobs that share a link -> what is lost when both have one level; either order.
    levels
        How many there are, from 1.
    seed
        Of the random orders.
    orders
        How many are tried, from 1.

    Returns
    -------
    dict
        Name -> level, 0 for the highest. A job is never above one that it contends with and that
        has the higher priority.
    """
    names = sorted(priority, key=lambda name: (-priority[name], name))
    place = {name: number for number, name in enumerate(names)}
    loss = np.zeros((len(names), len(names)))
    before = dict.fromkeys(names, 0)
    after: dict[str, dict[str, None]] = {name: {} for name in names}
    for (one, other), lost in contention.items():
        high, low = (one, other) if place[one] < place[other] else (other, one)
        before[low] += low not in after[high]
        after[high][low] = None
        loss[place[high], place[low]] += lost
    stream = random.Random(seed)
    best: tuple[float, dict[str, int]] | None = None
    for _ in range(orders):
        order = _topological(names, before, after, stream)
        rank = np.array([place[name] for name in order], dtype=np.int64)
        cost, edges = _cut(loss[np.ix_(rank, rank)], levels)
        if best is None or cost < best[0]:
            # Groups at the front may be empty; the first that is not is level 0.
            groups = [order[first:last] for first, last in pairwise(edges) if last > first]
            best = cost, {name: level for level, group in enumerate(groups) for name in group}
    return best[1] if best else {}


def _topological(
    names: Sequence[str],
    before: Mapping[str, int],
    after: Mapping[str, Iterable[str]],
    stream: random.Random,
) -> list[str]:
    """A random order in which every edge goes forward.

    Parameters
    ----------
    names
        Of the jobs, in the order in which those without an edge to them are chosen from.
    before, after
        How many edges come to each job, and where its own go.
    stream
        Of random numbers.
    """
    left = dict(before)
    ready = [name for name in names if not left[name]]
    order = []
    while ready:
        name = ready.pop(stream.randrange(len(ready)))
        order.append(name)
        for other in after[name]:
            left[other] -= 1
            if not left[other]:
                ready.append(other)
    return order


def _cut(loss: NDArray[np.float64], levels: int) -> tuple[float, list[int]]:
    """Cut an order into consecutive groups.

    Parameters
    ----------
    loss
        Shape (n, n): of each pair of places of the order, the earlier first.
    levels
        How many groups there may be.

    Returns
    -------
    tuple
        The loss inside the groups, and where each group begins and the last one ends.
    """
    count = len(loss)
    # inside[first, last]: loss between the jobs first .. last - 1.
    inside = np.full((count + 1, count + 1), np.inf)
    inside[count, count] = 0.0
    rows = np.cumsum(loss, axis=1)
    for first in range(count - 1, -1, -1):
        inside[first, first] = 0.0
        below = inside[first + 1, first + 1 :]
        inside[first, first + 1 :] = below + rows[first, first:]
    # Fewer groups win ties, so that no level is wasted on what does not contend.
    costs = inside[0].copy()
    cuts = [np.zeros(count + 1, dtype=np.int64)]
    for _ in range(1, levels):
        total = costs[:, None] + inside
        cuts.append(total.argmin(axis=0))
        costs = total.min(axis=0)
    edges = [count]
    for level in range(levels - 1, -1, -1):
        edges.append(int(cuts[level][edges[-1]]) if level else 0)
    return float(costs[count]), edges[::-1]
