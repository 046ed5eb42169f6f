"""Which jobs of a cluster meet on which links: what a coordinator knows of the network."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from controller.errors import UsageError
from controller.priority.policy import JobView


@dataclass(frozen=True)
class SharedLink:
    """A link on which jobs may have to wait for each other.

    A caller leaves out links that all their jobs together cannot fill.

    Parameters
    ----------
    capacity_Bps
        Payload rate; 0: not known.
    jobs
        Names of those whose flows cross it, each once.
    """

    capacity_Bps: float
    jobs: tuple[str, ...]


class Contention:
    """The contention graph of a set of jobs; built once for every change of that set.

    Jobs are numbered in the order in which they were given, and sets of jobs are bit masks: bit
    ``1 << number`` stands for a job.

    Parameters
    ----------
    links
        Links that the jobs use. Of those with the same jobs the one with the smallest capacity
        stays; those with fewer than two jobs go.
    jobs
        Names of all jobs, also of those that meet nobody; each once.

    Attributes
    ----------
    jobs
        The names, by number.
    links
        Those that stay, in the order in which their jobs were first met.
    link_masks
        The jobs of each of them, as a mask.

    Raises
    ------
    UsageError
        A name stands twice, a link has a job that is not among the jobs, or its capacity is not
        a number from 0.
    """

    def __init__(self, links: Iterable[SharedLink], jobs: Iterable[str]) -> None:
        self.jobs = tuple(jobs)
        self._number = {name: number for number, name in enumerate(self.jobs)}
        if len(self._number) < len(self.jobs):
            raise UsageError(f"Jobs are {', '.join(self.jobs)}; allowed: each name once.")
        least: dict[int, SharedLink] = {}
        for link in links:
            mask = self._mask_of(link)
            if len(link.jobs) > 1:
                least[mask] = min(least.get(mask, link), link, key=lambda each: each.capacity_Bps)
        self.links = tuple(least.values())
        self.link_masks = tuple(least)
        self._meets = [0] * len(self.jobs)
        self._links_of: list[list[int]] = [[] for _ in self.jobs]
        self._link_Bps = [0.0] * len(self.jobs)
        for place, (mask, link) in enumerate(least.items()):
            for name in link.jobs:
                number = self._number[name]
                self._meets[number] |= mask & ~(1 << number)
                self._links_of[number].append(place)
                smallest_Bps = self._link_Bps[number]
                if len(self._links_of[number]) == 1 or link.capacity_Bps < smallest_Bps:
                    self._link_Bps[number] = link.capacity_Bps
        self._component = self._components()
        self._links_within: dict[int, list[int]] = {}
        for place, link in enumerate(self.links):
            component = self._component[self._number[link.jobs[0]]]
            self._links_within.setdefault(component, []).append(place)

    def _mask_of(self, link: SharedLink) -> int:
        if not 0 <= link.capacity_Bps < math.inf:
            raise UsageError(
                f"A link of {', '.join(link.jobs)} has a capacity of {link.capacity_Bps!r} bytes/s;"
                " allowed: a number from 0."
            )
        mask = 0
        for name in link.jobs:
            bit = 1 << self.number(name)
            if mask & bit:
                raise UsageError(f"Job {name} is twice on one link; allowed: once.")
            mask |= bit
        return mask

    def _components(self) -> list[int]:
        found = [0] * len(self.jobs)
        for number in range(len(self.jobs)):
            if found[number]:
                continue
            mask, fringe = 0, 1 << number
            while fringe:
                mask |= fringe
                reached = 0
                for each in numbers_in(fringe):
                    reached |= self._meets[each]
                fringe = reached & ~mask
            for each in numbers_in(mask):
                found[each] = mask
        return found

    def number(self, name: str) -> int:
        """Place of a job in `jobs`.

        Raises
        ------
        UsageError
            There is no such job.
        """
        try:
            return self._number[name]
        except KeyError:
            known = ", ".join(self.jobs) or "none"
            raise UsageError(f"Job {name} is not known; known: {known}.") from None

    def meets(self, one: str, other: str) -> bool:
        """Whether two jobs share a link; a job does not meet itself."""
        return bool(self._meets[self.number(one)] >> self.number(other) & 1)

    def neighbours(self, name: str) -> frozenset[str]:
        """Jobs that a job meets."""
        return frozenset(self.jobs[each] for each in numbers_in(self.neighbour_mask(name)))

    def neighbour_mask(self, name: str) -> int:
        """Jobs that a job meets, as a mask."""
        return self._meets[self.number(name)]

    def component(self, name: str) -> tuple[str, ...]:
        """Jobs that a job meets directly or by others, and itself; in the order of `jobs`."""
        return tuple(self.jobs[each] for each in numbers_in(self.component_mask(name)))

    def component_mask(self, name: str) -> int:
        """Jobs that a job meets directly or by others, and itself, as a mask."""
        return self._component[self.number(name)]

    def links_of(self, name: str) -> list[int]:
        """Places in `links` of those that a job shares with others."""
        return self._links_of[self.number(name)]

    def link_Bps(self, name: str) -> float:
        """Smallest capacity of the links that a job shares with others; 0: none, or not known."""
        return self._link_Bps[self.number(name)]

    def links_within(self, component: int) -> list[int]:
        """Places in `links` of those among the jobs of one component (a mask)."""
        return self._links_within.get(component, [])

    def by_component(self, jobs: Sequence[JobView]) -> list[tuple[int, list[JobView]]]:
        """Jobs of each component together, in the order in which they are given, with its mask."""
        found: dict[int, list[JobView]] = {}
        for job in jobs:
            found.setdefault(self.component_mask(job.name), []).append(job)
        return list(found.items())


def numbers_in(mask: int) -> list[int]:
    """Numbers of the jobs of a mask, rising."""
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found


@functools.lru_cache(maxsize=256)
def one_link(jobs: tuple[str, ...], capacity_Bps: float) -> Contention:
    """Jobs that all share one link, and no other."""
    return Contention([SharedLink(capacity_Bps, jobs)], jobs)
