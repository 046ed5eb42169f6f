"""The one interface of all policies: what a policy sees of the jobs, and what it decides.

Policies are pure: numbers in, numbers out, no clock and no I/O. The agent calls them at every
iteration event and writes what they say into the dataplane; the simulator calls the same ones.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

DEFAULT_POLICY = "laxity"
# Iterations are watched and predicted, and nobody is ranked.
OFF = "off"
# Half as long again: what a job may lose so that others lose less.
DEFAULT_MAX_SLOWDOWN = 1.5


@dataclass(frozen=True)
class JobView:
    """One job as a policy sees it. Times are on the caller's clock, all of one kind.

    Parameters
    ----------
    name
        Of the job.
    is_open
        Whether its sync window is open (it sends, or wants to).
    window_start_ns
        Begin of the open window; while none is: predicted begin of the next, 0 where nothing is
        predicted.
    expected_bytes, done_bytes
        Of that window: payload on the wire of this host, and what of it is sent.
    alone_Bps
        Payload rate that it reaches on the link when nobody else sends.
    compute_ns
        From the end of a sync window to the begin of the next: what no network can shorten.
    max_slowdown
        Bound for its iteration time as a multiple of the undisturbed one.
    slowdown
        Recent iteration time over the undisturbed one; 1.0: undisturbed or not known.
    traffic_class
        Its class without a policy.
    class_floor, class_ceiling
        Limits of its class.
    current_class
        Class given last in this open window; None: none yet.
    work
        Computation of an iteration in any unit that is common to the jobs (Crux: W_j); by default
        GPUs times `compute_ns`.
    traffic_ns
        How long its traffic of a window keeps its busiest link busy, where that is known to be less
        than the window alone: buckets that wait for the backward pass leave gaps. 0: not known.
    """

    name: str
    is_open: bool
    window_start_ns: int
    expected_bytes: int
    done_bytes: int
    alone_Bps: float
    compute_ns: int
    max_slowdown: float = DEFAULT_MAX_SLOWDOWN
    slowdown: float = 1.0
    traffic_class: int = 3
    class_floor: int = 0
    class_ceiling: int = 6
    current_class: int | None = None
    work: float = 0.0
    traffic_ns: int = 0

    @functools.cached_property
    def rest_bytes(self) -> int:
        """What of the window is still to be sent."""
        return max(0, self.expected_bytes - self.done_bytes)

    @functools.cached_property
    def rest_ns(self) -> float:
        """How long that takes alone."""
        return self.rest_bytes / self.alone_Bps * 1e9 if self.alone_Bps else 0.0

    @functools.cached_property
    def ideal_window_ns(self) -> float:
        """Length of the whole window alone."""
        return self.expected_bytes / self.alone_Bps * 1e9 if self.alone_Bps else 0.0

    @functools.cached_property
    def ideal_period_ns(self) -> float:
        """Iteration time when nobody disturbs: compute, then the window alone."""
        return self.compute_ns + self.ideal_window_ns

    @functools.cached_property
    def deadline_ns(self) -> float:
        """End of the window that still keeps the iteration within `max_slowdown`."""
        spare = max(0.0, self.max_slowdown - 1.0) * self.ideal_period_ns
        return self.window_start_ns + self.ideal_window_ns + spare

    def laxity_ns(self, now_ns: int) -> float:
        """Time that is left to wait: deadline - now - rest alone."""
        return self.deadline_ns - now_ns - self.rest_ns


@dataclass(frozen=True)
class Assignment:
    """What a policy decides for one job.

    Parameters
    ----------
    class_floor, class_ceiling
        Limits within which the dataplane moves the class by laxity; equal: exactly this class.
    share
        Share of the link that its flows are paced to, above 0 .. 1; 0: not paced.
    shift_ns
        How much later than it would the job's next window begins (CASSINI); 0: no change. Given
        once, later windows follow from it.
    waits_for
        Jobs that go first.
    why
        One short sentence for people.
    weight
        Relative share inside its class where the network weighs flows, as MLTCP's congestion
        window does; above 0. The agent of a host, whose network does not, paces by `share`.
    """

    class_floor: int
    class_ceiling: int
    share: float = 0.0
    shift_ns: int = 0
    waits_for: tuple[str, ...] = ()
    why: str = ""
    weight: float = 1.0


class Policy(Protocol):
    """How the jobs of one link share it."""

    name: str
    # How often the policy wants to be asked while more than one window is open; 0: at iteration
    # events, and when a job's laxity is about to run out, only.
    tick_ns: int
    # Whether it gives shares or shifts, which need pacing at the interfaces.
    needs_pacing: bool
    # Whether a job whose iterations are still being learned has its highest class meanwhile, where
    # others are ranked: below them its windows would be torn, and never learned.
    newcomers_first: bool

    def assign(
        self, now_ns: int, jobs: Sequence[JobView], link_Bps: float
    ) -> Mapping[str, Assignment]:
        """Decide for all jobs.

        Parameters
        ----------
        now_ns
            On the clock of the views.
        jobs
            All that share the link, in a fixed order.
        link_Bps
            Payload rate of the link.

        Returns
        -------
        mapping
            Name -> assignment, for each job; a job that is left out keeps its default class.
        """
        ...
