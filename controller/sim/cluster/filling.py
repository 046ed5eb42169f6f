"""Rates of usages that meet on links: max-min by progressive filling, classes, floors.

The arrays are flat and small; what stands here runs at every event of a simulation.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from controller.priority.classes import CLASSES

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Levels that differ by less are one: they differ by rounding.
ROUNDING = 1e-12
# A link with less of its capacity left is full.
_FULL = 1e-9


class Entries(NamedTuple):
    """Who uses what: an entry for each usage on each of its links.

    Parameters
    ----------
    user, link, flow
        Of each entry: usage, link, and the usage's flows on it.
    """

    user: Integers
    link: Integers
    flow: Floats

    def only(self, chosen: Integers | slice) -> Entries:
        """Some of the entries."""
        return Entries(self.user[chosen], self.link[chosen], self.flow[chosen])

    def load(self, rates: Floats, links: int) -> Floats:
        """What crosses each link when the usages have these rates."""
        return cast(Floats, np.bincount(self.link, self.flow * rates[self.user], links))

    def tight(self, capacity: Floats, cap: Floats) -> tuple[Entries, Floats, Floats]:
        """Entries of the links that can be full, these links numbered anew; capacities; caps.

        No usage can have more than a link gives it alone: that is its cap. A link that is not full
        when all send at their caps holds nobody.
        """
        cap = cap.copy()
        np.minimum.at(cap, self.user, capacity[self.link] / self.flow)
        full = self.load(cap, len(capacity)) > capacity * (1 + ROUNDING)
        chosen = full[self.link].nonzero()[0]
        entries = self.only(chosen)
        if chosen.size:
            entries = entries._replace(link=(full.cumsum() - 1)[entries.link])
        return entries, capacity[full], cap


def with_floors(
    entries: Entries, capacity: Floats, rank: Integers, weight: Floats, cap: Floats, floors: Floats
) -> Floats:
    """Rates with floors: the three passes of `allocate`."""
    links = len(capacity)
    # Each class has the floors for itself: links of its own.
    own = entries._replace(link=entries.link + links * rank[entries.user])
    kept = level_out(*own.tight(np.tile(floors, CLASSES), cap), weight)
    rates = strict(entries, capacity, rank, weight, cap, kept)
    if (rates >= kept * (1 - _FULL)).all():
        # All that was kept is used: the link that held a usage in its turn is full.
        return rates
    left = capacity - entries.load(rates, links)
    stuck = rates >= cap * (1 - _FULL)
    stuck[entries.user[left[entries.link] <= _FULL * capacity[entries.link]]] = True
    rest = entries.only((~stuck)[entries.user].nonzero()[0])
    more = np.where(stuck, 0.0, cap - rates)
    return rates + strict(rest, np.maximum(left, 0.0), rank, weight, more)


def strict(
    entries: Entries,
    capacity: Floats,
    rank: Integers,
    weight: Floats,
    cap: Floats,
    kept: Floats | None = None,
) -> Floats:
    """Rates from the highest class down, each from what those below do not keep."""
    links = len(capacity)
    rates = cap.copy()
    ranks = rank[entries.user]
    entries = entries.only(ranks.argsort(kind="stable"))
    ends = np.bincount(ranks, minlength=CLASSES).cumsum().tolist()
    left = capacity if kept is None else capacity - entries.load(kept, links)
    # What rounding leaves of a full link is nothing.
    nothing = ROUNDING * capacity
    for number in range(CLASSES - 1, -1, -1):
        first, last = ends[number - 1] if number else 0, ends[number]
        if first == last:
            continue
        own = entries.only(slice(first, last))
        room = left if kept is None else left + own.load(kept, links)
        room = np.where(room < nothing, 0.0, room)
        filled = level_out(*own.tight(room, cap), weight)
        rates = np.where(rank == number, filled, rates)
        left = room - own.load(rates, links)
    return rates


def level_out(entries: Entries, capacity: Floats, cap: Floats, weight: Floats) -> Floats:
    """Max-min rates by progressive filling.

    A link's level is the rate for a weight of 1 at which it would be full. A usage's level is the
    least of its links' and of its cap's. Where all usages of a link have the link's level, the link
    is what holds them: their rates are known. Many links are done in one round, not one as with
    filling in small steps; the order does not change the rates.
    """
    if not entries.user.size:
        return cap
    links = len(capacity)
    left = capacity.copy()
    # Level of each usage; of those not yet known, what the cap allows.
    level = cap / weight
    while True:
        user, link, flow = entries
        demand = np.bincount(link, flow * weight[user], links)
        # Nobody looks at a link without demand.
        at = (np.maximum(left, 0.0) / (demand + (demand == 0)))[link]
        lowest = level.copy()
        np.minimum.at(lowest, user, at)
        # A link holds its usages when none of them is held lower elsewhere.
        holds = np.ones(links, np.bool_)
        holds[link[lowest[user] < at * (1 - ROUNDING)]] = False
        known = lowest >= level
        known[user[holds[link]]] = True
        level = np.where(known, lowest, level)
        gone = known[user]
        rest = (~gone).nonzero()[0]
        if not rest.size:
            return level * weight
        left -= entries.only(gone.nonzero()[0]).load(level * weight, links)
        entries = entries.only(rest)
