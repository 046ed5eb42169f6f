"""How a network's links are shared by jobs whose flows progress together: the rate of each."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from controller.errors import UsageError
from controller.priority.classes import CLASSES
from controller.sim.cluster.filling import Entries, Floats, Integers, level_out, strict, with_floors
from controller.sim.cluster.topology import LeafSpine
from controller.sim.link import check_floor

Usage = tuple[Integers, Floats]


def max_min(
    usage: Sequence[Usage],
    capacity_Bps: ArrayLike,
    weights: ArrayLike | None = None,
    caps_Bps: ArrayLike | None = None,
) -> Floats:
    """Weighted max-min fair rates of jobs: no flow's can grow but at the cost of a smaller one.

    Parameters
    ----------
    usage
        Of each job: the links that it uses, and how many of its flows cross each.
    capacity_Bps
        Rate of each link, shape (links,).
    weights
        Of a flow of each job, above 0; by default 1. On a full link rates are as the weights.
    caps_Bps
        Most that a flow of each job sends (pacing); by default no limit.

    Returns
    -------
    ndarray of float64, shape (jobs,)
        Rate of every flow of each job in bytes a second.

    Raises
    ------
    UsageError
        The shapes differ, a value is impossible, or a job that uses no link has no cap: it has no
        rate.

    References
    ----------
    Bertsekas, Gallager: Data Networks, 2nd edition 1992, section 6.5.2 (max-min, progressive
    filling).
    """
    return allocate(usage, capacity_Bps, np.zeros(len(usage), np.int64), weights, caps_Bps)


def allocate(
    usage: Sequence[Usage],
    capacity_Bps: ArrayLike,
    classes: ArrayLike,
    weights: ArrayLike | None = None,
    caps_Bps: ArrayLike | None = None,
    floor_share: float = 0.0,
) -> Floats:
    """Rates of jobs under strict priority with floors between classes, max-min inside a class.

    What `controller.sim.link.allocate_Bps` does on one link, done on all of a network:

    1. Every class gets, on links where it meets another, its floor, and on others all; what its
       jobs can use of that, max-min, is kept for the class.
    2. From the highest class down, each is filled, max-min, from what those above use and those
       below have kept.
    3. What is still free, as a job kept it on one link and could not use it for another, is shared
       out as in 2. So every job ends with a full link or at its cap.

    Parameters
    ----------
    usage, capacity_Bps, weights, caps_Bps
        As in `max_min`.
    classes
        Of each job, 0 .. 7; a higher number goes first.
    floor_share
        What a class with traffic on a link is sure of there, as a share of the link; 0: nothing.

    Returns
    -------
    ndarray of float64, shape (jobs,)
        Rate of every flow of each job in bytes a second.

    Raises
    ------
    UsageError
        As `max_min`; a class is out of range or the floors of all classes do not fit on a link.
    """
    capacity = np.asarray(capacity_Bps, np.float64)
    pool = _Pool(capacity, usage)
    numbers = np.arange(len(usage), dtype=np.int64)
    return pool.rates(numbers, classes, weights, caps_Bps, floor_share)


class Fabric:
    """A network and the ways in which jobs use it, prepared so that sharing it is quick.

    Parameters
    ----------
    topology
        The network.
    """

    def __init__(self, topology: LeafSpine) -> None:
        self._capacity = topology.capacity_Bps
        self._usage: list[Usage] = []
        self._owners: list[Hashable] = []
        self._known: dict[tuple[Hashable, bytes, bytes], int] = {}
        self._pool: _Pool | None = None

    def register(self, owner: Hashable, links: Integers, flows: Floats) -> int:
        """Take down a way in which a job uses the network; the same gives the same number.

        Parameters
        ----------
        owner
            The job; at most one of its usages is in an allocation.
        links, flows
            As of `controller.sim.cluster.collectives.Stage`.

        Returns
        -------
        int
            Number of the usage in all other methods.
        """
        mark = (owner, links.tobytes(), flows.tobytes())
        number = self._known.setdefault(mark, len(self._usage))
        if number == len(self._usage):
            self._usage.append((links, flows))
            self._owners.append(owner)
            self._pool = None
        return number

    def allocate(
        self,
        usages: ArrayLike,
        classes: ArrayLike,
        weights: ArrayLike | None = None,
        caps_Bps: ArrayLike | None = None,
        floor_share: float = 0.0,
    ) -> Floats:
        """Rates as `allocate` gives them, of registered usages.

        Parameters
        ----------
        usages
            Numbers of the usages that are active, shape (active,).
        classes, weights, caps_Bps, floor_share
            As in `allocate`, in the order of the usages.

        Returns
        -------
        ndarray of float64, shape (active,)
            Rate of every flow of each usage in bytes a second.
        """
        return self._ready().rates(
            np.asarray(usages, np.int64), classes, weights, caps_Bps, floor_share
        )

    def _ready(self) -> _Pool:
        if self._pool is None:
            self._pool = _Pool(self._capacity, self._usage, self._owners)
        return self._pool


class _Pool:
    """Usages in flat arrays, without the links that only one owner uses.

    Parameters
    ----------
    capacity
        Of all links.
    usage
        Links and flows of each usage.
    owners
        Of each usage; by default each has its own.
    """

    def __init__(
        self, capacity: Floats, usage: Sequence[Usage], owners: Sequence[Hashable] | None = None
    ) -> None:
        places: dict[Hashable, int] = {}
        owner = np.array(
            [places.setdefault(each, len(places)) for each in owners or range(len(usage))], np.int64
        )
        links = np.concatenate([np.zeros(0, np.int64), *(each for each, _ in usage)])
        flows = np.concatenate([np.zeros(0), *(each for _, each in usage)])
        if any(len(each) != len(crossing) for each, crossing in usage):
            raise UsageError("A usage has another number of links than of flows.")
        if links.size and not 0 <= links.min() <= links.max() < len(capacity):
            raise UsageError(f"A usage has a link that is not of 0 .. {len(capacity) - 1}.")
        if not (flows > 0).all():
            raise UsageError("A usage has a link that no flow crosses.")
        if not ((capacity > 0) & (capacity < np.inf)).all():
            raise UsageError("A link's capacity is not a rate above 0 bytes/s.")
        user = np.repeat(np.arange(len(usage)), [len(each) for each, _ in usage])
        # Nobody can have more than with all links to himself.
        self._alone = np.full(len(usage), np.inf)
        np.minimum.at(self._alone, user, capacity[links] / flows)
        count = max(1, len(places))
        pairs = np.unique(links * count + owner[user])
        shared = np.bincount(pairs // count, minlength=len(capacity)) > 1
        keep = shared[links]
        self._capacity = capacity[shared]
        self._links = (np.cumsum(shared) - 1)[links[keep]]
        self._flows = flows[keep]
        self._sizes = np.bincount(user[keep], minlength=len(usage))
        self._starts = np.cumsum(self._sizes) - self._sizes

    def rates(
        self,
        numbers: Integers,
        classes: ArrayLike,
        weights: ArrayLike | None,
        caps_Bps: ArrayLike | None,
        floor_share: float,
    ) -> Floats:
        """See `allocate`; `numbers` are those of the usages that take part."""
        count = len(numbers)
        rank = np.asarray(classes, np.int64)
        weight = np.ones(count) if weights is None else np.asarray(weights, np.float64)
        cap = self._alone[numbers]
        if caps_Bps is not None:
            cap = np.minimum(cap, np.asarray(caps_Bps, np.float64))
        if not rank.shape == weight.shape == cap.shape == (count,):
            raise UsageError(f"Classes, weights or caps are not as many as usages ({count}).")
        if not count:
            return cap
        _check(rank, weight, cap, floor_share)
        sizes = self._sizes[numbers]
        user = np.repeat(np.arange(count), sizes)
        first = self._starts[numbers] - np.cumsum(sizes) + sizes
        place = np.arange(len(user)) + np.repeat(first, sizes)
        entries = Entries(user, self._links[place], self._flows[place])
        entries, capacity, cap = entries.tight(self._capacity, cap)
        if rank.min() == rank.max() or not entries.user.size:
            return level_out(entries, capacity, cap, weight)
        classes_there = np.zeros((CLASSES, len(capacity)), np.bool_)
        classes_there[rank[entries.user], entries.link] = True
        mixed = classes_there.sum(0) > 1
        if not mixed.any():
            return level_out(entries, capacity, cap, weight)
        if not floor_share:
            return strict(entries, capacity, rank, weight, cap)
        floors = np.where(mixed, floor_share, 1.0) * capacity
        return with_floors(entries, capacity, rank, weight, cap, floors)


def _check(rank: Integers, weight: Floats, cap: Floats, floor_share: float) -> None:
    if rank.min() < 0 or rank.max() >= CLASSES:
        raise UsageError(f"A class is not of 0 .. {CLASSES - 1}.")
    # Comparisons are written so that NaN fails.
    if not (weight.min() > 0 and weight.max() < np.inf):
        raise UsageError("A weight is not above 0, or is infinite.")
    if not cap.min() >= 0:
        raise UsageError("A cap is not a rate from 0 bytes/s.")
    if not cap.max() < np.inf:
        raise UsageError(
            "A job uses no link and has no cap: it has no rate.", "Leave it out of the allocation."
        )
    check_floor(floor_share, CLASSES)
