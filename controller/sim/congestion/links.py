"""Links of a simulated network: queues, marking probabilities, back-pressure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from controller.congestion.flows import FloatArray
from controller.congestion.marking import mark_probability
from controller.errors import UsageError
from controller.priority.classes import default_classes, thresholds
from controller.priority.ports import slot_ns_of

# Of the sliding window, as in `bpf/ecn.h`.
SLOTS = 16
_NS = 10**9
# Less than any packet has.
_CRUMB_bytes = 1e-9


@dataclass(frozen=True)
class Link:
    """One link, the queue in front of it, and how it marks.

    Attributes
    ----------
    rate_Bps
        What it carries.
    kmin_bytes, kmax_bytes, pmax
        Marking line, see `controller.congestion.marking.mark_probability`.
    window
        Marks by the average of the queue over the sliding window
        (`controller.congestion.marking.SlidingWindow`) instead of by the queue of the moment.
    drain_share
        Share of `rate_Bps` at which the queue that decides on marks drains. 1: it is the real
        one; less: a virtual queue (`controller.congestion.marking.VirtualQueue`) as the
        live marker has it, 0.95 there.
    pause_bytes
        Senders are held so that the queue does not get longer: an ideal PFC, without its delay
        and without head-of-line blocking. Infinite: never, the queue grows without bound.

    Raises
    ------
    UsageError
        A value is out of range.
    """

    rate_Bps: float
    kmin_bytes: float
    kmax_bytes: float
    pmax: float
    window: bool = False
    drain_share: float = 1.0
    pause_bytes: float = float("inf")

    def __post_init__(self) -> None:
        # Its own checks of the line.
        mark_probability(0, self.kmin_bytes, self.kmax_bytes, self.pmax)
        for key in ("rate_Bps", "pause_bytes"):
            if not getattr(self, key) > 0:
                raise UsageError(f"Link key {key} is {getattr(self, key)!r}; allowed: above 0.")
        if not 0 < self.drain_share <= 1:
            raise UsageError(
                f"Link key drain_share is {self.drain_share!r}; allowed: above 0 .. 1."
            )

    @classmethod
    def by_rate(cls, rate_Bps: float) -> Link:
        """A link that marks by the thresholds of a class that names none, at its rate."""
        return cls(rate_Bps, *thresholds(default_classes()[0], rate_Bps))

    def unmarked(self) -> Link:
        """The same without marks, as a sender's own link is."""
        # Thresholds that no queue reaches; infinite ones would have no line between them.
        return replace(self, kmin_bytes=sys.float_info.max, kmax_bytes=sys.float_info.max)


class Links:
    """The queues of many links, step by step.

    Windows of all links have slots of one length, the longest that one of them would have by its
    rate (`controller.priority.ports.slot_ns_of`).

    A queue is what arrived and was not served: bytes of packets go in, each link serves up to
    its rate in a step. Packets of one step are not told apart, so a queue is as exact as
    its change within a step is small.

    Parameters
    ----------
    links
        At least one.
    step_ns
        Length of a step.

    Attributes
    ----------
    queue_bytes
        Shape (links,).
    served_bytes
        In the last step, shape (links,).
    """

    def __init__(self, links: Sequence[Link], step_ns: int) -> None:
        if not links:
            raise UsageError("There are no links; allowed: one or more.")
        if step_ns < 1:
            raise UsageError(f"A step of {step_ns} ns; allowed: from 1.")

        def column(key: str) -> FloatArray:
            return np.array([float(getattr(link, key)) for link in links])

        self.count = len(links)
        self.rate_Bps = column("rate_Bps")
        self.queue_bytes: FloatArray = np.zeros(self.count)
        self.served_bytes: FloatArray = np.zeros(self.count)
        self._step_ns, self._now_ns = step_ns, 0
        self._most_bytes = self.rate_Bps * step_ns / _NS
        self._kmin, self._kmax, pmax = column("kmin_bytes"), column("kmax_bytes"), column("pmax")
        # A line without a length steps from 0 to 1.
        span = self._kmax - self._kmin
        self._slope = np.divide(pmax, span, out=np.zeros(self.count), where=span > 0)
        self._pause_bytes = column("pause_bytes")
        self.may_pause = bool(np.isfinite(self._pause_bytes).any())
        drain = column("drain_share")
        self._virtual = self.queue_bytes if (drain == 1).all() else np.zeros(self.count)
        self._drain_bytes = self._most_bytes * drain
        self._window: NDArray[np.bool_] = np.array([link.window for link in links])
        self._any_window = bool(self._window.any())
        self._slot_ns = max(slot_ns_of(round(link.rate_Bps)) for link in links)
        self._samples: FloatArray = np.zeros((SLOTS - 1, self.count))
        self._sample_sum: FloatArray = np.zeros(self.count)
        self._ended_slots = 0

    def marking_queue(self) -> FloatArray:
        """What decides on marks now: queue of the moment, or the window's average, in bytes."""
        if not self._any_window:
            return self._virtual
        average = (self._sample_sum + self._virtual) / SLOTS
        return np.where(self._window, average, self._virtual)

    def probabilities(self) -> FloatArray:
        """Probability that each link marks a packet that comes now, shape (links,)."""
        queue = self.marking_queue()
        line = np.maximum((queue - self._kmin) * self._slope, 0.0)
        result: FloatArray = np.where(queue > self._kmax, 1.0, line)
        return result

    def room_bytes(self) -> FloatArray:
        """What may arrive in the next step until senders are held, shape (links,)."""
        room: FloatArray = np.maximum(0.0, self._pause_bytes - self.queue_bytes)
        return room + self._most_bytes

    def drop(self, lost_bytes: FloatArray) -> None:
        """Take bytes out of the queues, shape (links,)."""
        self.queue_bytes -= np.minimum(self.queue_bytes, lost_bytes)

    def step(self, arrived_bytes: FloatArray) -> FloatArray:
        """Let bytes arrive, shape (links,), serve, and take the window's samples.

        Returns
        -------
        ndarray
            Share of each queue that left it in this step, shape (links,), 0 .. 1.
        """
        self._now_ns += self._step_ns
        if self._virtual is not self.queue_bytes:
            self._virtual += arrived_bytes
            self._virtual -= np.minimum(self._virtual, self._drain_bytes)
        queue = self.queue_bytes
        queue += arrived_bytes
        served = np.minimum(queue, self._most_bytes)
        # Where all is served the share must be exactly 1, or crumbs stay behind: so it is, for
        # then the two are the same number. A queue that is empty has no share.
        share: FloatArray = served / np.maximum(queue, _CRUMB_bytes)
        queue -= served
        self.served_bytes = served
        while self._now_ns >= (self._ended_slots + 1) * self._slot_ns:
            self._samples[self._ended_slots % (SLOTS - 1)] = self._virtual
            self._sample_sum = self._samples.sum(axis=0)
            self._ended_slots += 1
        return share
