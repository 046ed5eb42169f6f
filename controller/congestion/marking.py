"""The congestion point as numbers: virtual queue, sliding window over it, marking probability.

In floats and one arrival after the other: the yardstick for the marker in BPF.
"""

from __future__ import annotations

from collections import deque

from controller.errors import UsageError

_NS = 10**9


def mark_probability(
    queue_bytes: float, kmin_bytes: float, kmax_bytes: float, pmax: float
) -> float:
    """Probability that a packet is marked, from the queue it finds.

    RED's line as DCQCN uses it (Zhu et al., SIGCOMM 2015, section 3.1): none up to Kmin, then
    linear to Pmax at Kmax, and every packet above Kmax.

    Raises
    ------
    UsageError
        Kmin is negative or above Kmax, or Pmax is not a probability.
    """
    if not 0 <= kmin_bytes <= kmax_bytes:
        raise UsageError(
            f"Marking key kmin_bytes is {kmin_bytes!r}; allowed: 0 .. kmax_bytes ({kmax_bytes!r})."
        )
    if not 0 <= pmax <= 1:
        raise UsageError(f"Marking key pmax is {pmax!r}; allowed: 0 .. 1.")
    if queue_bytes <= kmin_bytes:
        return 0.0
    if queue_bytes > kmax_bytes:
        return 1.0
    return pmax * (queue_bytes - kmin_bytes) / (kmax_bytes - kmin_bytes)


class VirtualQueue:
    """A queue that packets enter as they pass and that drains at a fixed rate.

    Lindley's recursion on bytes: before an arrival, max(0, queue - drain x time since the last).

    Parameters
    ----------
    drain_Bps
        Drain rate: the port's (or class's) rate, or a fraction of it.

    Attributes
    ----------
    last_ns
        Time of the last arrival.
    """

    def __init__(self, drain_Bps: float) -> None:
        if not drain_Bps > 0:
            raise UsageError(f"Marking key drain_Bps is {drain_Bps!r}; allowed: above 0.")
        self.drain_Bps = drain_Bps
        self.last_ns = 0
        self._bytes = 0.0

    def bytes_at(self, now_ns: int) -> float:
        """Queue at a time not before the last arrival, should nothing arrive until then."""
        if now_ns < self.last_ns:
            raise ValueError(f"time went back from {self.last_ns} to {now_ns} ns")
        return max(0.0, self._bytes - self.drain_Bps * (now_ns - self.last_ns) / _NS)

    def arrive(self, now_ns: int, nbytes: int) -> float:
        """Add a packet.

        Returns
        -------
        float
            The queue that the packet found, without itself.
        """
        found = self.bytes_at(now_ns)
        self._bytes, self.last_ns = found + nbytes, now_ns
        return found


class SlidingWindow:
    """Average of a virtual queue over the last slots of time.

    The queue is sampled at the end of each slot (slots start at multiples of `slot_ns`). The
    average is over the samples of the last `slots` - 1 completed slots and the queue that the
    arriving packet finds. A packet at the very end of a slot belongs to the next one.

    Parameters
    ----------
    queue
        The queue to average; arrivals go through this window.
    slot_ns
        Length of a slot.
    slots
        Slots of the window, with the current one.
    """

    def __init__(self, queue: VirtualQueue, slot_ns: int, slots: int = 16) -> None:
        if slot_ns < 1:
            raise UsageError(f"Marking key slot_ns is {slot_ns!r}; allowed: 1 and more.")
        if slots < 1:
            raise UsageError(f"Marking key slots is {slots!r}; allowed: 1 and more.")
        self.queue = queue
        self.slot_ns, self.slots = slot_ns, slots
        self._samples = deque([0.0] * (slots - 1), maxlen=slots - 1)

    def arrive(self, now_ns: int, nbytes: int) -> float:
        """Add a packet.

        Returns
        -------
        float
            The average, in bytes, that decides on this packet's mark.
        """
        slot = now_ns // self.slot_ns
        # After a pause longer than the window only its own slots are looked at: earlier
        # samples would fall out of it again.
        first = max(self.queue.last_ns // self.slot_ns, slot - self.slots + 1)
        for ended in range(first, slot):
            self._samples.append(self.queue.bytes_at((ended + 1) * self.slot_ns))
        return (sum(self._samples) + self.queue.arrive(now_ns, nbytes)) / self.slots
