"""Senders of the packet simulator: paced, at random, always with a window under way, DCQCN."""

from __future__ import annotations

import math
from collections.abc import Callable

from controller.congestion.reaction_point import ReactionPoint
from controller.errors import UsageError
from controller.sim.packets.events import EventQueue
from controller.sim.packets.port import FifoPort

_NS = 1e9


class Flow:
    """Packets of one size through one port, counted.

    Parameters
    ----------
    events, port
        Clock, and where packets go.
    nbytes
        Of a packet on the wire.

    Attributes
    ----------
    sent_packets, delivered_packets, marked_packets
        Counters; the last is of delivered ones.
    """

    def __init__(self, events: EventQueue, port: FifoPort, nbytes: int) -> None:
        if nbytes < 1:
            raise UsageError(f"Packet size is {nbytes} bytes; allowed: from 1.")
        self.nbytes = nbytes
        self.sent_packets = self.delivered_packets = self.marked_packets = 0
        self._at = events.at
        self._port = port

    def _send(self, now_ns: int) -> None:
        self.sent_packets += 1
        self._port.arrive(now_ns, self, self.nbytes)

    def delivered(self, now_ns: int, nbytes: int, marked: bool) -> None:
        """Count a packet that left the port."""
        self.delivered_packets += 1
        self.marked_packets += marked


class PacedFlow(Flow):
    """A packet after each gap, for ever; gaps are kept in fractions of a ns.

    Parameters
    ----------
    events, port, nbytes
        See `Flow`.
    gap_ns
        Asked for the time to the next packet, after each one.
    start_ns
        Time of the first.
    """

    def __init__(
        self,
        events: EventQueue,
        port: FifoPort,
        nbytes: int,
        gap_ns: Callable[[], float],
        start_ns: float = 0,
    ) -> None:
        super().__init__(events, port, nbytes)
        self._gap_ns = gap_ns
        self._due_ns = float(start_ns)
        events.at(int(start_ns), self._pace)

    def _pace(self, now_ns: int) -> None:
        self._due_ns += self._gap_ns()
        self._at(int(self._due_ns), self._pace)
        self._send(now_ns)


def constant_gap(nbytes: int, rate_Bps: float) -> Callable[[], float]:
    """Gaps of a constant bit rate."""
    gap_ns = nbytes * _NS / rate_Bps
    return lambda: gap_ns


def poisson_gap(nbytes: int, rate_Bps: float, random: Callable[[], float]) -> Callable[[], float]:
    """Gaps of Poisson arrivals of that mean rate; `random` draws from [0, 1)."""
    mean_ns = nbytes * _NS / rate_Bps
    return lambda: -mean_ns * math.log(1 - random())


class WindowFlow(Flow):
    """Always has `packets` in the port: each that leaves lets the next one go.

    Parameters
    ----------
    events, port, nbytes
        See `Flow`.
    packets
        The window, at least 1.
    start_ns
        When it sends all of it.
    """

    def __init__(
        self, events: EventQueue, port: FifoPort, nbytes: int, packets: int, start_ns: int = 0
    ) -> None:
        super().__init__(events, port, nbytes)
        if packets < 1:
            raise UsageError(f"Window is {packets} packets; allowed: from 1.")
        self._packets = packets
        events.at(start_ns, self._open)

    def _open(self, now_ns: int) -> None:
        for _ in range(self._packets):
            self._send(now_ns)

    def delivered(self, now_ns: int, nbytes: int, marked: bool) -> None:
        """Count a packet, and send the next."""
        super().delivered(now_ns, nbytes, marked)
        self._send(now_ns)


class NotificationPoint:
    """When a receiver tells the sender of a flow about marks: at most once in an interval.

    Parameters
    ----------
    interval_ns
        Least time between two CNPs.
    holds
        A mark that comes too early is told at the end of the interval, as the paper words it
        and the live one does (`bpf/hand_over.h`); else it is forgotten.
    """

    def __init__(self, interval_ns: int, holds: bool = True) -> None:
        self.interval_ns = interval_ns
        self.holds = holds
        self._last_ns: int | None = None  # of the last CNP; lies ahead where one is held

    def marked(self, now_ns: int) -> int | None:
        """Take a marked packet; when its CNP leaves, None: there is none for this one."""
        last_ns = self._last_ns
        if last_ns is None or now_ns >= last_ns + self.interval_ns:
            self._last_ns = now_ns
        elif self.holds and now_ns >= last_ns:
            self._last_ns = last_ns + self.interval_ns
        else:
            return None
        return self._last_ns


class DcqcnFlow(Flow):
    """A sender with DCQCN that always has something to send, and its receiver.

    Each packet sets the time of the next by the rate of that moment, as departure times do: a
    cut takes effect with the packet after the next.

    Parameters
    ----------
    events, port, nbytes
        See `Flow`.
    reaction
        Reaction point of the flow.
    notification
        Of its receiver.
    delay_ns
        From the port to the reaction point: of mark, CNP and all between.
    start_ns
        Time of the first packet.

    Attributes
    ----------
    cnps
        CNPs that arrived.
    """

    def __init__(
        self,
        events: EventQueue,
        port: FifoPort,
        nbytes: int,
        reaction: ReactionPoint,
        notification: NotificationPoint,
        delay_ns: int,
        start_ns: float = 0,
    ) -> None:
        super().__init__(events, port, nbytes)
        if delay_ns < 0:
            raise UsageError(f"Feedback delay is {delay_ns} ns; allowed: 0 and more.")
        self.reaction = reaction
        self.cnps = 0
        self._notification = notification
        self._delay_ns = delay_ns
        self._due_ns = float(start_ns)
        self._work = nbytes * _NS
        events.at(int(start_ns), self._pace)

    def _pace(self, now_ns: int) -> None:
        reaction = self.reaction
        reaction.sent(now_ns, self.nbytes)
        self._due_ns += self._work / reaction.rc_Bps
        self._at(int(self._due_ns), self._pace)
        self.sent_packets += 1
        self._port.arrive(now_ns, self, self.nbytes)

    def delivered(self, now_ns: int, nbytes: int, marked: bool) -> None:
        """Count a packet; the receiver may answer a mark."""
        self.delivered_packets += 1
        if marked:
            self.marked_packets += 1
            leaves_ns = self._notification.marked(now_ns)
            if leaves_ns is not None:
                self._at(leaves_ns + self._delay_ns, self._notify)

    def _notify(self, now_ns: int) -> None:
        self.cnps += 1
        self.reaction.notify(now_ns)
