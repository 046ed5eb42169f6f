"""A network of leaf and spine switches: its links, and the path that ECMP gives a flow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from controller.errors import UsageError
from controller.sim.splitmix import GAMMA, finalised

KINDS = ("nic_up", "leaf_up", "leaf_down", "nic_down")
# More than any cluster that was described; a scenario with a digit too many ends here and not
# where the memory does.
MAX_NICS = 1 << 20
MAX_LINKS = 1 << 23

_WORD = (1 << 64) - 1


def mixed(*words: ArrayLike) -> NDArray[np.uint64]:
    """Hash of some integers, in which every bit of each changes every bit of the result.

    Parameters
    ----------
    words
        Arrays that broadcast; their lowest 64 bits count. The order of the words counts.

    Returns
    -------
    ndarray of uint64
        In the shape that they broadcast to; `controller.sim.splitmix`.
    """
    state: NDArray[np.uint64] = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            state = finalised((state ^ _uint64(word)) + GAMMA)
    return state


@dataclass(frozen=True)
class LeafSpine:
    """Leaf switches with NICs below and spine switches above, each leaf linked to each spine.

    Links carry one direction each. Their numbers: the NICs' links up, the leaves' links up, the
    leaves' links down, the NICs' links down; see `link_name`.

    Parameters
    ----------
    leaves
        Number of leaf switches.
    nics_per_leaf
        NICs at each; NIC n is at leaf ``n // nics_per_leaf``.
    spines
        Number of spine switches; 0 with one leaf: a single switch.
    nic_Bps
        Rate of a NIC's link, each direction.
    uplink_Bps
        Rate of a link between leaf and spine, each direction.
    uplinks_per_spine
        Parallel links between a leaf and a spine.

    Raises
    ------
    UsageError
        A number or rate is impossible, or leaves are not linked to each other.
    """

    leaves: int
    nics_per_leaf: int
    spines: int
    nic_Bps: float
    uplink_Bps: float
    uplinks_per_spine: int = 1

    def __post_init__(self) -> None:
        for what, value, least in (
            ("leaves", self.leaves, 1),
            ("NICs per leaf", self.nics_per_leaf, 1),
            ("spines", self.spines, 0),
            ("uplinks per spine", self.uplinks_per_spine, 1),
        ):
            if value < least:
                raise UsageError(f"Number of {what} is {value}; allowed: from {least}.")
        for what, rate_Bps in (("NIC", self.nic_Bps), ("Uplink", self.uplink_Bps)):
            if not 0 < rate_Bps < math.inf:
                raise UsageError(f"{what} rate is {rate_Bps!r} bytes/s; allowed: above 0.")
        if self.leaves > 1 and not self.spines:
            raise UsageError(
                f"There are {self.leaves} leaves and no spine; allowed: spines from 1, or one leaf."
            )
        for what, value, most in (("NICs", self.nics, MAX_NICS), ("links", self.links, MAX_LINKS)):
            if value > most:
                raise UsageError(f"Network has {value} {what}; allowed: up to {most}.")

    @property
    def nics(self) -> int:
        """Number of NICs."""
        return self.leaves * self.nics_per_leaf

    @property
    def uplinks(self) -> int:
        """Number of links from one leaf to spines, and of those to it."""
        return self.spines * self.uplinks_per_spine

    @property
    def links(self) -> int:
        """Number of links, each direction one."""
        return 2 * (self.nics + self.leaves * self.uplinks)

    @cached_property
    def capacity_Bps(self) -> NDArray[np.float64]:
        """Rate of each link, shape (links,); not to be written to."""
        edge = np.full(self.nics, float(self.nic_Bps))
        core = np.full(2 * self.leaves * self.uplinks, float(self.uplink_Bps))
        capacity = np.concatenate((edge, core, edge))
        capacity.setflags(write=False)
        return capacity

    def leaf_of(self, nics: ArrayLike) -> NDArray[np.int64]:
        """Leaf that each of some NICs is at, in their shape.

        Raises
        ------
        UsageError
            There is no such NIC.
        """
        known = np.asarray(nics, np.int64)
        if known.size and not 0 <= known.min() <= known.max() < self.nics:
            wrong = known[(known < 0) | (known >= self.nics)].flat[0]
            raise UsageError(f"NIC is {wrong}; allowed: 0 .. {self.nics - 1}.")
        return known // self.nics_per_leaf

    def path(self, source: int, destination: int, key: int) -> tuple[int, ...]:
        """Links that a flow crosses, in their order.

        ECMP: switches choose among equal links by a hash of (source, destination, key), so that a
        flow keeps its path, whoever else sends.

        Parameters
        ----------
        source, destination
            NICs.
        key
            What else tells flows between the two apart, as the UDP source port does.

        Returns
        -------
        tuple of int
            NIC up and NIC down; between different leaves also leaf up and leaf down in the middle.

        Raises
        ------
        UsageError
            There is no such NIC, or source and destination are the same.
        """
        row = self.paths(source, destination, key).tolist()
        return tuple(link for link in row if link >= 0)

    def paths(
        self, sources: ArrayLike, destinations: ArrayLike, keys: ArrayLike
    ) -> NDArray[np.int64]:
        """Links that each of many flows crosses, as `path`.

        Parameters
        ----------
        sources, destinations, keys
            Of the flows; they broadcast.

        Returns
        -------
        ndarray of int64, shape (..., 4)
            NIC up, leaf up, leaf down, NIC down; -1 for the two in the middle at one leaf.

        Raises
        ------
        UsageError
            There is no such NIC, or source and destination are the same.
        """
        source, destination = np.broadcast_arrays(
            np.asarray(sources, np.int64), np.asarray(destinations, np.int64)
        )
        sender, receiver = self.leaf_of(source), self.leaf_of(destination)
        if np.any(source == destination):
            raise UsageError("A flow goes from a NIC to itself; allowed: between two NICs.")
        hashes = mixed(source, destination, keys)
        source, destination, sender, receiver, hashes = np.broadcast_arrays(
            source, destination, sender, receiver, hashes
        )
        leaves_up = self.nics
        leaves_down = leaves_up + self.leaves * self.uplinks
        links = np.full((*hashes.shape, 4), -1, np.int64)
        links[..., 0] = source
        links[..., 3] = destination + leaves_down + self.leaves * self.uplinks
        crossing = sender != receiver
        if crossing.any():
            up = self._choose(hashes[crossing], self.uplinks)
            # The spine chooses among its own links to the leaf by another hash: with the leaf's,
            # parallel links down would be used as unevenly as those up, but no more often.
            down = self._choose(mixed(hashes[crossing], 1), self.uplinks_per_spine)
            down += up // self.uplinks_per_spine * self.uplinks_per_spine
            links[crossing, 1] = leaves_up + sender[crossing] * self.uplinks + up
            links[crossing, 2] = leaves_down + receiver[crossing] * self.uplinks + down
        return links

    def kind_of(self, link: int) -> str:
        """One of "nic_up", "leaf_up", "leaf_down", "nic_down".

        Raises
        ------
        UsageError
            There is no such link.
        """
        return KINDS[self._locate(link)[0]]

    def link_name(self, link: int) -> str:
        """What a person calls it: "nic 3 up", "leaf 2 -> spine 5", ...

        Raises
        ------
        UsageError
            There is no such link.
        """
        kind, place = self._locate(link)
        if kind in (0, 3):
            return f"nic {place} {'down' if kind else 'up'}"
        leaf, choice = divmod(place, self.uplinks)
        spine, parallel = divmod(choice, self.uplinks_per_spine)
        ends = f"leaf {leaf} -> spine {spine}" if kind == 1 else f"spine {spine} -> leaf {leaf}"
        return f"{ends} #{parallel}" if self.uplinks_per_spine > 1 else ends

    def _locate(self, link: int) -> tuple[int, int]:
        """Kind of a link, and its place among those of the kind."""
        if not 0 <= link < self.links:
            raise UsageError(f"Link is {link}; allowed: 0 .. {self.links - 1}.")
        core = self.leaves * self.uplinks
        place = link
        for kind, count in enumerate((self.nics, core, core)):
            if place < count:
                return kind, place
            place -= count
        return 3, place

    @staticmethod
    def _choose(hashes: NDArray[np.uint64], choices: int) -> NDArray[np.int64]:
        return (hashes % np.uint64(choices)).astype(np.int64)


def _uint64(word: ArrayLike) -> NDArray[np.uint64]:
    values = np.asarray(word)
    if values.dtype == np.object_:
        # A Python integer of more than 64 bits.
        values = np.asarray(values & _WORD)
    return values.astype(np.uint64)
