"""A network of links with queues, and flows under congestion control through it, step by step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.congestion.flows import FloatArray, IntArray
from controller.errors import UsageError
from controller.sim.congestion.feedback import Feedback
from controller.sim.congestion.links import Link, Links

_NS = 10**9
# More than any flow ever sends.
ENDLESS_bytes = float("inf")


class Network:
    """Flows that send packets at their rates, over paths of links in series.

    In each step: signals arrive and timers expire; each flow that has something to send earns
    rate x step of credit, and a packet leaves when its credit pays for it; packets enter the
    first queue of their path; each link serves up to its rate; what it served enters the
    next queue in the following step. Within a queue bytes are mixed: each flow's part of what is
    served is its part of the queue. Marks of all links of the path are drawn as the
    packet leaves its sender, from the queues of that moment.

    PFC is what `Link.pause_bytes` says: senders are slowed down, all in the same proportion, where
    a link of their path would have a longer queue. There is no delay in that and no
    head-of-line blocking of others, and nothing is ever lost.

    Parameters
    ----------
    feedback
        The flows' rate control, see `controller.sim.congestion.feedback`.
    links
        At least one.
    paths
        Positions of links, shape (streams, hops), or (streams,) for one hop each; -1 ends a
        shorter path. A stream is what is told apart in queues.
    streams
        Stream of each flow, shape (flows,); None: each flow is its own, in order.
    step_ns
        Length of a step: a few packet times, and well below timers and delays.
    packet_bytes
        Largest packet on the wire.

    Attributes
    ----------
    now_ns
        End of the last step.
    links
        Queues and what they served.
    unsent_bytes
        What each flow still has to send, shape (flows,); endless in the beginning.
    sent_flows, sent_bytes
        Positions of flows of which packets left in the last step, and how much, shape (n,).
    delivered_bytes
        Of each stream, all together, shape (streams,).
    """

    def __init__(
        self,
        feedback: Feedback,
        links: Sequence[Link],
        paths: NDArray[np.integer],
        streams: IntArray | None = None,
        *,
        step_ns: int = 1_000,
        packet_bytes: int = 4_200,
    ) -> None:
        count = feedback.rates_Bps.size
        self.feedback, self.step_ns, self.now_ns = feedback, step_ns, 0
        self.links = Links(links, step_ns)
        self._paths = self._checked_paths(paths)
        self._stream = np.arange(count) if streams is None else np.asarray(streams, dtype=np.int64)
        if (
            self._stream.shape != (count,)
            or not ((self._stream >= 0) & (self._stream < len(self._paths))).all()
        ):
            raise UsageError(f"Streams are not those of {count} flows over {len(paths)} paths.")
        if packet_bytes < 1:
            raise UsageError(f"Packets of {packet_bytes} bytes; allowed: from 1.")
        # Where flows come in the order of their streams, sums over each are quick.
        present, starts = np.unique(self._stream, return_index=True)
        in_order = len(present) == len(self._paths) and (np.diff(self._stream) >= 0).all()
        self._starts = starts if in_order else None
        self._packet_bytes = float(packet_bytes)
        # Of each hop and stream: bytes in its queue, and bytes that enter it in the next step.
        self._backlog: FloatArray = np.zeros(self._paths.shape[::-1])
        self._between: FloatArray = np.zeros(self._paths.shape[::-1])
        self._lay_paths()
        self.unsent_bytes: FloatArray = np.full(count, ENDLESS_bytes)
        self.sent_flows: IntArray = np.zeros(0, dtype=np.int64)
        self.sent_bytes: FloatArray = np.zeros(0)
        self.delivered_bytes: FloatArray = np.zeros(len(self._paths))
        self._credit: FloatArray = np.zeros(count)
        self._earned: FloatArray = np.zeros(count)
        # Seconds of a step that a flow earns for: 0 where it has nothing to send, or may not.
        self._earning_s: FloatArray = np.full(count, step_ns / _NS)
        self._next_bytes: FloatArray = np.full(count, self._packet_bytes)

    def _checked_paths(self, paths: NDArray[np.integer]) -> IntArray:
        result = np.array(paths, dtype=np.int64, ndmin=1)
        if result.ndim == 1:
            result = result[:, np.newaxis]
        used = result >= 0
        if result.ndim != 2 or not used[:, 0].all() or result.max() >= self.links.count:
            raise UsageError(f"Paths name links other than 0 .. {self.links.count - 1}.")
        if (used[:, 1:] & ~used[:, :-1]).any():
            raise UsageError("A path goes on behind its end (-1).")
        return result

    def _lay_paths(self) -> None:
        hops = self._paths.shape[1]
        self._is_simple = hops == 1
        self._used = (self._paths >= 0).T
        # Unused hops point at link 0; what is worked out for them is not looked at.
        self._hop_links = np.maximum(self._paths, 0).T
        self._last = self._used.sum(axis=0) - 1

    def offer(self, flows: IntArray, nbytes: FloatArray, phases: FloatArray) -> None:
        """Give flows, shape (n,), bytes to send from now on, on top of what they have not sent.

        Parameters
        ----------
        nbytes
            Above 0, shape (n,).
        phases
            Share of its first packet's time that has passed already, 0 .. 1, shape (n,):
            flows that begin together do not send their packets together.
        """
        self.unsent_bytes[flows] += nbytes
        self._next_bytes[flows] = np.minimum(self._packet_bytes, self.unsent_bytes[flows])
        self._credit[flows] = phases * self._next_bytes[flows]
        self._earning_s[flows] = self.step_ns / _NS

    def silence(self, flows: IntArray) -> None:
        """Take from flows, shape (n,), what they have not sent."""
        self.unsent_bytes[flows] = self._earning_s[flows] = self._credit[flows] = 0.0
        self._next_bytes[flows] = ENDLESS_bytes

    def reroute(self, streams: IntArray, paths: NDArray[np.integer]) -> None:
        """Give streams, shape (n,), other paths, shape (n, hops) with the hops of the network.

        Their bytes in queues are lost, and their flows are new ones.
        """
        laid = self._checked_paths(paths)
        if laid.shape != (len(streams), self._paths.shape[1]):
            raise UsageError(f"Paths of shape {laid.shape} for {len(streams)} streams.")
        lost, links = self._backlog[:, streams], self._hop_links[:, streams]
        self.links.drop(_summed(links.ravel(), lost.ravel(), self.links.count))
        self._backlog[:, streams] = self._between[:, streams] = 0.0
        self._paths[streams] = laid
        self._lay_paths()
        self.feedback.reset(np.flatnonzero(np.isin(self._stream, streams)))

    def delays_ns(self, streams: IntArray) -> FloatArray:
        """What a byte that enters now would wait in the queues of streams' paths, shape (n,)."""
        waits = self.links.queue_bytes / self.links.rate_Bps * _NS
        if self._is_simple:
            result: FloatArray = waits[self._hop_links[0, streams]]
            return result
        total: FloatArray = (waits[self._hop_links[:, streams]] * self._used[:, streams]).sum(
            axis=0
        )
        return total

    def step(self, sending: NDArray[np.bool_] | None = None) -> FloatArray:
        """One step of time.

        Parameters
        ----------
        sending
            Which flows may send, shape (flows,); None: as before. One that may not loses
            the credit for its next packet.

        Returns
        -------
        ndarray
            Bytes of each stream that reached the end of its path in this step, (streams,).
        """
        if sending is not None:
            may = sending & (self.unsent_bytes > 0)
            self._earning_s = np.where(may, self.step_ns / _NS, 0.0)
            self._credit[~may] = 0.0
        self.now_ns += self.step_ns
        self.feedback.advance(self.now_ns)
        self._send()
        entering = _summed(self._stream[self.sent_flows], self.sent_bytes, len(self._paths))
        return self._forward_one(entering) if self._is_simple else self._forward(entering)

    def _send(self) -> None:
        np.multiply(self.feedback.rates_Bps, self._earning_s, out=self._earned)
        if self.links.may_pause:
            self._hold_back()
        self._credit += self._earned
        flows = (self._credit >= self._next_bytes).nonzero()[0]
        credit, unsent = self._credit[flows], self.unsent_bytes[flows]
        packets = np.floor_divide(credit, self._packet_bytes)
        nbytes = packets * self._packet_bytes
        ending = credit >= unsent
        if ending.any():
            nbytes[ending] = unsent[ending]
            packets[ending] = np.ceil(unsent[ending] / self._packet_bytes)
        credit -= nbytes
        unsent -= nbytes
        self._credit[flows], self.unsent_bytes[flows] = credit, unsent
        short = unsent < self._packet_bytes
        if short.any():
            self._next_bytes[flows[short]] = unsent[short]
            self.silence(flows[unsent <= 0])
        self.sent_flows, self.sent_bytes = flows, nbytes
        streams = self._stream[flows]
        unmarked = self._unmarked(streams) ** packets
        self.feedback.sent(flows, nbytes, unmarked, lambda: self.delays_ns(streams))

    def _hold_back(self) -> None:
        """Take from the flows' credit what the links of their paths have no room for."""
        if self._starts is None:
            wanted = _summed(self._stream, self._earned, len(self._paths))
        else:
            wanted = np.add.reduceat(self._earned, self._starts)
        if self._is_simple:
            wanted = _summed(self._hop_links[0], wanted, self.links.count)
        else:
            each = wanted * self._used
            wanted = _summed(self._hop_links.ravel(), each.ravel(), self.links.count)
        room = self.links.room_bytes()
        if (room >= wanted).all():
            return
        share = np.ones(self.links.count)
        np.divide(room, wanted, out=share, where=wanted > room)
        held = np.where(self._used, share[self._hop_links], 1.0).min(axis=0)
        self._earned *= held[self._stream]

    def _unmarked(self, streams: IntArray) -> FloatArray:
        """Probability that no link of these streams' paths marks a packet, shape (n,)."""
        passing = 1 - self.links.probabilities()
        if self._is_simple:
            result: FloatArray = passing[self._hop_links[0, streams]]
            return result
        each = np.where(self._used[:, streams], passing[self._hop_links[:, streams]], 1.0)
        product: FloatArray = each.prod(axis=0)
        return product

    def _forward_one(self, entering: FloatArray) -> FloatArray:
        links, backlog = self._hop_links[0], self._backlog[0]
        share = self.links.step(_summed(links, entering, self.links.count))
        backlog += entering
        leaving: FloatArray = backlog * share[links]
        backlog -= leaving
        self.delivered_bytes += leaving
        return leaving

    def _forward(self, entering: FloatArray) -> FloatArray:
        """The same over several hops: what leaves one enters the next a step later."""
        links, backlog = self._hop_links, self._backlog
        arriving = self._between
        arriving[0] = entering
        share = self.links.step(_summed(links.ravel(), arriving.ravel(), self.links.count))
        backlog += arriving
        leaving = backlog * share[links]
        backlog -= leaving
        np.multiply(leaving[:-1], self._used[1:], out=arriving[1:])
        ends: FloatArray = leaving[self._last, np.arange(leaving.shape[1])]
        self.delivered_bytes += ends
        return ends


def _summed(where: IntArray, nbytes: FloatArray, count: int) -> FloatArray:
    """Bytes by position 0 .. `count` - 1."""
    # Without any, bincount forgets that they are floats.
    result: FloatArray = np.bincount(where, nbytes, count).astype(np.float64, copy=False)
    return result
