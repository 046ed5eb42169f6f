"""What a simulated cluster is under, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.errors import UsageError
from controller.sim.conditions import AnyConditions
from controller.sim.measures import Alone, Iteration, Measures, measure

CLASSES_SHARING, DCQCN_SHARING = SHARINGS = ("classes", "dcqcn")


@dataclass(frozen=True)
class ClusterConditions(AnyConditions):
    """How links are shared, and how well the coordinator sees and acts.

    Parameters
    ----------
    floor_share, plan_ns, raise_bytes, start_error, bytes_error
        As in `controller.sim.conditions.AnyConditions`; each flow sends `raise_bytes` twice, at
        most what it has sent of the step of a collective that is under way.
    qps_per_peer
        Queue pairs between two ranks, over which their bytes are split; each has a path of its own.
    sharing
        "classes": weighted max-min inside strict classes with floors, at once. "dcqcn": rates
        are what DCQCN's reaction points make of the marks of the links on the way.

    Raises
    ------
    UsageError
        A value is impossible.
    """

    qps_per_peer: int = 1
    sharing: str = CLASSES_SHARING

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.qps_per_peer < 1:
            raise UsageError(f"qps_per_peer is {self.qps_per_peer}; allowed: from 1.")
        if self.sharing not in SHARINGS:
            raise UsageError(f"sharing is {self.sharing!r}; allowed: {', '.join(SHARINGS)}.")


@dataclass(frozen=True)
class ClusterOutcome:
    """What a simulation of a cluster gives.

    Parameters
    ----------
    iterations
        Of each job those that were asked for, without the warm-up, in the order in which they
        ended. A window that nothing is sent in begins and ends with its iteration.
    alone
        Of each job with iterations: mean window and iteration that these very iterations would
        have taken undisturbed.
    link_bytes
        Shape (links,): what each link carried from time 0 to `end_ns`.
    carried_bytes
        Name -> bytes that the job's flows moved in that time, each byte once however many links
        it crossed.
    resent_bytes
        What of them was sent twice, see `ClusterConditions.raise_bytes`.
    decisions
        How often the coordinator was asked.
    events
        Begins of windows, steps of collectives that ended, ends of iterations, arrivals.
    flow_events
        Sum over the events of the number of flows that were sending when they happened.
    begin_ns, end_ns
        When the first job had its warm-up behind it, and when the last of `iterations` ended.
    utilisation
        Part of the time in which GPUs compute, over each job's whole iterations after its warm-up;
        mean of the jobs, by their GPUs and the time for which they had them.
    """

    iterations: tuple[Iteration, ...]
    alone: Mapping[str, Alone]
    link_bytes: NDArray[np.float64]
    carried_bytes: Mapping[str, float]
    resent_bytes: Mapping[str, float]
    decisions: int
    events: int
    flow_events: int
    begin_ns: float
    end_ns: float
    utilisation: float

    def measures(self) -> Measures:
        """Figures of each job and over all, see `controller.sim.measures.measure`."""
        return measure(self.iterations, self.alone)
