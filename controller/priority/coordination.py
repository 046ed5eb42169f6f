"""The policies across links: what one coordinator decides for the jobs of a whole cluster.

A job's flows cross many links, and a class is set at the hosts and travels with the packets, so
one decision for each job must suit all its links. Coordinators are pure, as policies are, and
share their code: of jobs that meet on one link a coordinator decides what the policy of its name
does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from controller.errors import UsageError
from controller.priority.contention import Contention, SharedLink
from controller.priority.coordinators import (
    CassiniCoordinator,
    CruxCoordinator,
    FairCoordinator,
    LaxityCoordinator,
    MltcpCoordinator,
    StaticCoordinator,
    StrictLaxityCoordinator,
)
from controller.priority.policy import Assignment, JobView

__all__ = ["COORDINATORS", "Contention", "Coordinator", "SharedLink", "find_coordinator"]


class Coordinator(Protocol):
    """How the jobs of a cluster share its links."""

    name: str
    # Whether it gives shares or shifts, which need pacing at the hosts.
    needs_pacing: bool

    def tick_ns(self, links: int) -> int:
        """How often it wants to be asked while more than one window of a component is open.

        Parameters
        ----------
        links
            That the jobs of the component share.

        Returns
        -------
        int
            0: when a window begins or ends, and when a job's laxity is about to run out, only.
        """
        ...

    def assign(
        self, now_ns: int, jobs: Sequence[JobView], contention: Contention
    ) -> Mapping[str, Assignment]:
        """Decide for jobs of a cluster.

        Parameters
        ----------
        now_ns
            On the clock of the views.
        jobs
            All jobs of one component of the contention graph or more, in a fixed order.
        contention
            Who meets whom on which links; one object as long as the set of jobs stays.

        Returns
        -------
        mapping
            Name -> assignment, for each of the jobs.

        Raises
        ------
        UsageError
            The contention graph does not know a job.
        """
        ...


# Name -> how to make one. It may remember what it has decided: one object for each cluster.
COORDINATORS: Mapping[str, Callable[[], Coordinator]] = MappingProxyType(
    {
        "laxity": LaxityCoordinator,
        "fair": FairCoordinator,
        "static": StaticCoordinator,
        "mltcp": MltcpCoordinator,
        "crux": CruxCoordinator,
        "cassini": CassiniCoordinator,
        "strict": StrictLaxityCoordinator,
    }
)


def find_coordinator(name: str) -> Coordinator:
    """Make a coordinator by the name of its policy.

    Raises
    ------
    UsageError
        There is none of this name.
    """
    if name not in COORDINATORS:
        raise UsageError(f"Policy is {name!r}; allowed: {', '.join(COORDINATORS)}.")
    return COORDINATORS[name]()
