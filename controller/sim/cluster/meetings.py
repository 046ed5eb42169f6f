"""Which jobs of a cluster meet where: the contention graph of those that are there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from controller.priority.contention import Contention, SharedLink
from controller.sim.cluster.course import Course
from controller.sim.cluster.topology import LeafSpine

# A link that all its jobs together just fill holds up nobody; sums of rates differ by rounding.
_ROUNDING = 1e-9


def contention(courses: Sequence[Course], topology: LeafSpine) -> Contention:
    """The links that some jobs can fill together, with those that use them.

    Parameters
    ----------
    courses
        Of the jobs that are there.
    topology
        Whose links they use.

    Returns
    -------
    Contention
        Without links that their jobs cannot fill even when all send at their highest rates: on
        these nobody waits.
    """
    links, owners, wanted = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]
    for number, course in enumerate(courses):
        most: dict[int, float] = {}
        for usage in {id(step.stage.links): step for step in course.steps}.values():
            rates = usage.stage.flows * usage.alone_Bps
            for link, rate_Bps in zip(usage.stage.links.tolist(), rates.tolist(), strict=True):
                most[link] = max(rate_Bps, most.get(link, 0.0))
        links.append(np.fromiter(most, np.int64, len(most)))
        wanted.append(np.fromiter(most.values(), np.float64, len(most)))
        owners.append(np.full(len(most), number))
    link, owner = np.concatenate(links), np.concatenate(owners)
    capacity = topology.capacity_Bps
    total = np.bincount(link, np.concatenate(wanted), len(capacity))
    users = np.bincount(link, minlength=len(capacity))
    tight = (users > 1) & (total > capacity * (1 + _ROUNDING))
    names = [course.job.name for course in courses]
    met: dict[int, list[str]] = {place: [] for place in np.flatnonzero(tight).tolist()}
    entries = np.flatnonzero(tight[link])
    for place, number in zip(link[entries].tolist(), owner[entries].tolist(), strict=True):
        met[place].append(names[number])
    return Contention(
        (SharedLink(float(capacity[place]), tuple(jobs)) for place, jobs in met.items()), names
    )
