"""A port that serves packets in order at a fixed rate, and the mark that it puts on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from controller.congestion.marking import mark_probability
from controller.errors import UsageError
from controller.sim.packets.events import EventQueue

_NS = 10**9


class Receiver(Protocol):
    """Whoever is told that a packet left the port: the flow it belongs to."""

    def delivered(self, now_ns: int, nbytes: int, marked: bool) -> None:
        """Take a packet."""


class Yardstick(Protocol):
    """What a marker looks at: `VirtualQueue` or `SlidingWindow` of the live controller."""

    def arrive(self, now_ns: int, nbytes: int) -> float:
        """Add a packet; the bytes that decide on its mark."""


@dataclass(frozen=True)
class MarkingLine:
    """RED's line: no mark up to Kmin, `pmax` at Kmax, every packet above."""

    kmin_bytes: float
    kmax_bytes: float
    pmax: float

    def __post_init__(self) -> None:
        mark_probability(0, self.kmin_bytes, self.kmax_bytes, self.pmax)  # refuses what is none


class Marker:
    """Decides packet by packet on a mark.

    Parameters
    ----------
    line
        Marking line.
    random
        Draws from [0, 1), as `random.Random.random` does.
    yardstick
        Looked at instead of the port's queue; sees packets as they arrive.
    at_departure
        Mark by the queue that a packet leaves behind, as switches with a shared buffer do, and
        the fluid model: the delay of the signal is then free of the queue. Else, by the queue
        that it finds.

    Raises
    ------
    UsageError
        A yardstick at departure: what leaves a port cannot build up a queue at its rate.
    """

    def __init__(
        self,
        line: MarkingLine,
        random: Callable[[], float],
        yardstick: Yardstick | None = None,
        at_departure: bool = False,
    ) -> None:
        if yardstick is not None and at_departure:
            raise UsageError(
                "A marker at departure looks at a virtual queue; allowed: the port's own queue.",
                "Mark at arrival.",
            )
        self._line = (line.kmin_bytes, line.kmax_bytes, line.pmax)
        self.at_departure = at_departure
        self._random = random
        self._yardstick = yardstick

    def marks(self, now_ns: int, nbytes: int, queue_bytes: int) -> bool:
        """Whether a packet is marked.

        Parameters
        ----------
        now_ns, nbytes
            Of the packet.
        queue_bytes
            The port's queue without it.
        """
        seen = queue_bytes if self._yardstick is None else self._yardstick.arrive(now_ns, nbytes)
        probability = mark_probability(seen, *self._line)
        return probability > 0 and self._random() < probability


class FifoPort:
    """First come, first served; the buffer has no end, nothing is lost and nobody is paused.

    Parameters
    ----------
    events
        Clock.
    rate_Bps
        Whole bytes a second; service times are exact over a busy period, not each rounded.
    marker
        None: no packet is marked.

    Attributes
    ----------
    queue_bytes
        Of all packets in the port, with all of the one in service.
    arrived_packets, arrived_bytes, departed_packets, departed_bytes, marked_packets
        Counters since the begin.
    largest_bytes
        Longest queue since statistics began.
    wait_ns
        Sum, since statistics began, of the time from arrival to the begin of service.
    """

    def __init__(self, events: EventQueue, rate_Bps: int, marker: Marker | None = None) -> None:
        if not (isinstance(rate_Bps, int) and rate_Bps > 0):
            raise UsageError(f"Port rate is {rate_Bps!r}; allowed: whole bytes a second, above 0.")
        self.rate_Bps = rate_Bps
        self.queue_bytes = 0
        self.arrived_packets = self.arrived_bytes = 0
        self.departed_packets = self.departed_bytes = self.marked_packets = 0
        self.largest_bytes = 0
        self.wait_ns = 0
        self._at = events.at
        self._at_arrival = marker if marker and not marker.at_departure else None
        self._at_departure = marker if marker and marker.at_departure else None
        self._packets: deque[tuple[Receiver, int, int, bool]] = deque()
        self._rest = 0  # of the last service time, in ns x rate, that no whole ns held
        self._area = 0
        self._changed_ns = self._since_ns = 0
        self._served_before = 0

    def arrive(self, now_ns: int, flow: Receiver, nbytes: int) -> None:
        """Take a packet of a flow."""
        found = self.queue_bytes
        marker = self._at_arrival
        marked = marker is not None and marker.marks(now_ns, nbytes, found)
        self._area += found * (now_ns - self._changed_ns)
        self._changed_ns = now_ns
        self.queue_bytes = queue_bytes = found + nbytes
        if queue_bytes > self.largest_bytes:
            self.largest_bytes = queue_bytes
        self.arrived_packets += 1
        self.arrived_bytes += nbytes
        self._packets.append((flow, nbytes, now_ns, marked))
        if not found:
            service_ns, self._rest = divmod(nbytes * _NS, self.rate_Bps)
            self._at(now_ns + service_ns, self._depart)

    def _depart(self, now_ns: int) -> None:
        packets = self._packets
        flow, nbytes, _, marked = packets.popleft()
        left = self.queue_bytes
        self._area += left * (now_ns - self._changed_ns)
        self._changed_ns = now_ns
        self.queue_bytes = left = left - nbytes
        self.departed_packets += 1
        self.departed_bytes += nbytes
        if packets:
            _, following_bytes, arrived_ns, _ = packets[0]
            self.wait_ns += now_ns - arrived_ns
            service_ns, self._rest = divmod(following_bytes * _NS + self._rest, self.rate_Bps)
            self._at(now_ns + service_ns, self._depart)
        marker = self._at_departure
        if marker is not None:
            marked = marker.marks(now_ns, nbytes, left)
        if marked:
            self.marked_packets += 1
        flow.delivered(now_ns, nbytes, marked)

    def begin_statistics(self, now_ns: int) -> None:
        """Forget means and the longest queue so far: the warm-up is over."""
        self._area = self.wait_ns = 0
        self._changed_ns = self._since_ns = now_ns
        self._served_before = self._begun()
        self.largest_bytes = self.queue_bytes

    def mean_queue_bytes(self, now_ns: int) -> float:
        """Mean over time since statistics began."""
        area = self._area + self.queue_bytes * (now_ns - self._changed_ns)
        return area / (now_ns - self._since_ns)

    def mean_wait_ns(self) -> float:
        """Mean wait of the packets whose service began since statistics did."""
        return self.wait_ns / (self._begun() - self._served_before)

    def _begun(self) -> int:
        return self.departed_packets + (1 if self._packets else 0)
