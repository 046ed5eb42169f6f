"""What one rank sends and receives in a collective, and the order it has to keep.

A plan is made of numbers alone. Whoever runs it keeps these rules, and may do everything else in
any order:

* Messages to one peer leave in index order. One may leave once the receives it `needs` are applied.
* A receive is applied once its message is there and the receives it `needs` are applied: a message
  to reduce waits in a slot until then, any other has been written in place by the sender.
* The sender of a message that is not reduced may write it as soon as the receiver has begun the
  operation. Within the operation no further handshake is needed: every plan here makes such a write
  only causally after the receiver's own messages from those elements were taken in by their peers,
  and after whatever the receiver had to apply there.
* No receive changes elements that an earlier message of this rank, still on its way, is read from.
* Slots per peer may be as few as one: every wait is for something earlier in one order of all
  messages of all ranks, so nothing waits in a circle.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Send:
    """A message of this rank.

    Parameters
    ----------
    peer
        Rank that it goes to.
    index
        Number of the message among those to this peer in this operation, from 0.
    start, stop
        Elements of the working buffer; none when equal.
    direct
        The peer copies it: write it into the peer's working buffer at the same elements. Else the
        peer reduces it, and it goes to a slot.
    needs
        Numbers of the receives in the plan that must be applied before it may leave.
    """

    peer: int
    index: int
    start: int
    stop: int
    direct: bool
    needs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Receive:
    """A message to this rank.

    Parameters
    ----------
    peer
        Rank that it comes from.
    index
        Number of the message among those from this peer in this operation, from 0.
    start, stop
        Elements of the working buffer; none when equal.
    reduce
        Reduce it from its slot into the working buffer. Else it was written there.
    needs
        Numbers of the receives in the plan that must be applied before it.
    """

    peer: int
    index: int
    start: int
    stop: int
    reduce: bool
    needs: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Messages of one rank in one operation, both in program order."""

    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]


class _LastWriters:
    """Which receive last changed each element: disjoint ranges, in rising order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._receives: list[int] = []

    def _overlapping(self, start: int, stop: int) -> slice:
        return slice(bisect_right(self._stops, start), bisect_left(self._starts, stop))

    def of(self, start: int, stop: int) -> tuple[int, ...]:
        """Receives that last changed any of these elements, in rising order."""
        if start == stop:
            return ()
        return tuple(sorted(set(self._receives[self._overlapping(start, stop)])))

    def write(self, start: int, stop: int, receive: int) -> None:
        """Let `receive` be the last that changed these elements."""
        if start == stop:
            return
        found = self._overlapping(start, stop)
        starts, stops, receives = [start], [stop], [receive]
        if found.start < found.stop:
            # What sticks out of the new range on either side keeps its writer.
            first, last = found.start, found.stop - 1
            if self._starts[first] < start:
                starts.insert(0, self._starts[first])
                stops.insert(0, start)
                receives.insert(0, self._receives[first])
            if self._stops[last] > stop:
                starts.append(stop)
                stops.append(self._stops[last])
                receives.append(self._receives[last])
        self._starts[found] = starts
        self._stops[found] = stops
        self._receives[found] = receives


class PlanBuilder:
    """Takes down the messages of one rank in program order and finds out what each has to wait for.

    Parameters
    ----------
    chunk
        Most elements of one message. A longer range goes as several of nearly equal length.
    """

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._sends: list[Send] = []
        self._receives: list[Receive] = []
        self._sent_to: Counter[int] = Counter()
        self._received_from: Counter[int] = Counter()
        self._writers = _LastWriters()

    def send(self, peer: int, start: int, stop: int, *, direct: bool) -> None:
        """Send these elements, as all receives so far have left them."""
        for low, high in pieces(start, stop, self._chunk):
            self._send(peer, low, high, direct, self._writers.of(low, high))

    def receive(self, peer: int, start: int, stop: int, *, reduce: bool) -> None:
        """Receive these elements, after all receives so far."""
        for low, high in pieces(start, stop, self._chunk):
            self._receive(peer, low, high, reduce, self._writers.of(low, high))
            self._writers.write(low, high, len(self._receives) - 1)

    def signal(self, peer: int) -> None:
        """Send a message without payload after all receives so far."""
        self._send(peer, 0, 0, True, tuple(range(len(self._receives))))

    def await_signal(self, peer: int) -> None:
        """Receive a message without payload."""
        self._receive(peer, 0, 0, False, ())

    def plan(self) -> Plan:
        """What was taken down."""
        return Plan(tuple(self._sends), tuple(self._receives))

    def _send(self, peer: int, start: int, stop: int, direct: bool, needs: tuple[int, ...]) -> None:
        self._sends.append(Send(peer, self._sent_to[peer], start, stop, direct, needs))
        self._sent_to[peer] += 1

    def _receive(
        self, peer: int, start: int, stop: int, reduce: bool, needs: tuple[int, ...]
    ) -> None:
        self._receives.append(Receive(peer, self._received_from[peer], start, stop, reduce, needs))
        self._received_from[peer] += 1


def split(start: int, stop: int, parts: int) -> list[int]:
    """Bounds of the parts, one more than these, as of numpy.array_split: longer parts first."""
    length, longer = divmod(stop - start, parts)
    return [start + part * length + min(part, longer) for part in range(parts + 1)]


def pieces(start: int, stop: int, chunk: int) -> list[tuple[int, int]]:
    """The range in pieces of at most `chunk` and of nearly equal length; none of an empty range."""
    bounds = split(start, stop, max(1, -(-(stop - start) // chunk)))
    return [(low, high) for low, high in pairwise(bounds) if low < high]
