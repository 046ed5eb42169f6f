"""Patched TIMELY: fluid model, fixed point, linearisations, convergence.

Model: Zhu et al., CoNEXT 2016, section 4, "Patched TIMELY" (the decrease follows the RTT, and its
weight the RTT's gradient). Original TIMELY has no fixed point, or infinitely many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from controller.congestion.convergence import EQUAL_SHARE
from controller.congestion.delay_equations import Array, History, integrate
from controller.congestion.fluid import check_loop
from controller.congestion.linear import DelayedSystem, DelayTerm

_NS = 1e-9
_Mbit_Bps = 10**6 / 8

# Of the weight over the gradient: from 0 at -1/4 to 1 at +1/4 (CoNEXT 2016, equation 27).
WEIGHT_SLOPE = 2.0
# The published phase margins were computed with this one instead.
PUBLISHED_WEIGHT_SLOPE = 0.5


@dataclass(frozen=True)
class TimelyLoop:
    """N equal flows under patched TIMELY through one queue.

    Attributes
    ----------
    flows
        N.
    delay_ns
        Propagation. The loop's delay has the queue's and one packet's time on top.
    link_Bps
        C.
    step_Bps, decrease, gain
        delta, beta and the gradient's EWMA gain alpha.
    low_ns, high_ns, min_rtt_ns
        T_low, T_high and D_minRTT.
    segment_bytes, packet_bytes
        A rate changes once a segment; MTU.

    Raises
    ------
    UsageError
        A value is out of range; names it and what is allowed.
    """

    flows: int
    delay_ns: float = 0.0
    # CoNEXT 2016, section 4 and the authors' data: 10 Gb/s, delta 10 Mb/s, beta 0.008, 16 KB.
    link_Bps: float = 10_000 * _Mbit_Bps
    step_Bps: float = 10 * _Mbit_Bps
    decrease: float = 0.008
    gain: float = 0.875
    low_ns: float = 50_000.0
    high_ns: float = 500_000.0
    min_rtt_ns: float = 20_000.0
    segment_bytes: float = 16_000.0
    packet_bytes: float = 1000.0

    def __post_init__(self) -> None:
        check_loop(
            "TIMELY",
            self,
            ("link_Bps", self.link_Bps > 0, "above 0"),
            ("step_Bps", 0 < self.step_Bps <= self.link_Bps, "above 0, at most the link's rate"),
            ("decrease", 0 < self.decrease <= 1, "above 0, at most 1"),
            ("gain", 0 < self.gain <= 1, "above 0, at most 1"),
            ("low_ns", self.low_ns > 0, "above 0"),
            ("high_ns", self.high_ns > self.low_ns, "above low_ns"),
            ("min_rtt_ns", self.min_rtt_ns > 0, "above 0"),
            ("segment_bytes", self.segment_bytes > 0, "above 0"),
            ("packet_bytes", 0 < self.packet_bytes <= self.segment_bytes, "1 .. segment_bytes"),
        )

    @property
    def share_Bps(self) -> float:
        """Each flow's fair share of the link."""
        return self.link_Bps / self.flows

    @property
    def reference_bytes(self) -> float:
        """The queue q' that decreases aim at: C T_low."""
        return self.link_Bps * self.low_ns * _NS


def fixed_queue_bytes(loop: TimelyLoop) -> float:
    """Queue at the fixed point, ``q' + N delta q' / (beta C)``: exact (CoNEXT 2016, equation 28).

    Beyond C T_high the equation is another one, and this is no fixed point.
    """
    growth = loop.flows * loop.step_Bps / (loop.decrease * loop.link_Bps)
    return loop.reference_bytes * (1 + growth)


def has_fixed_point(loop: TimelyLoop) -> bool:
    """Whether the fixed point's queue is below C T_high."""
    return fixed_queue_bytes(loop) <= loop.link_Bps * loop.high_ns * _NS


def linearised(loop: TimelyLoop, weight_slope: float = WEIGHT_SLOPE) -> DelayedSystem:
    """Queue, gradient and rate of equal flows at the fixed point, without propagation.

    Variables are the queue in parts of q', the gradient, the rate in parts of the fair share.
    Delays depend on the state, but what they move is constant at the fixed point, so they enter
    with their values there.

    Parameters
    ----------
    loop
        The setting.
    weight_slope
        Of the weight over the gradient; `PUBLISHED_WEIGHT_SLOPE` gives the published margins.
    """
    rate, reference = loop.share_Bps, loop.reference_bytes
    segment_s = loop.segment_bytes / rate
    seen_s = (fixed_queue_bytes(loop) + loop.packet_bytes) / loop.link_Bps
    step = loop.step_Bps / rate
    present = np.zeros((3, 3))
    present[0, 2] = loop.link_Bps / reference
    present[1, 1] = -loop.gain / segment_s
    # At the fixed point the weight is 1/2 and beta R (q - q') / q' is delta.
    present[2, 1] = -2 * step * weight_slope / segment_s
    present[2, 2] = -step / 2 / segment_s
    newer, older = np.zeros((3, 3)), np.zeros((3, 3))
    difference = reference / (loop.link_Bps * loop.min_rtt_ns * _NS)
    newer[1, 0] = loop.gain / segment_s * difference
    older[1, 0] = -newer[1, 0]
    newer[2, 0] = -loop.decrease / 2 / segment_s
    return DelayedSystem(present, (DelayTerm(newer, seen_s), DelayTerm(older, seen_s + segment_s)))


def difference_mode(loop: TimelyLoop) -> DelayedSystem:
    """What one flow has more than another; it has no delay."""
    return DelayedSystem(linearised(loop).present[1:, 1:], ())


def timely_convergence_s(loop: TimelyLoop) -> float | None:
    """Time until rates that differed by the whole link differ by 10 % of the fair share.

    CoNEXT 2016, equation 31, for a queue that rests; None: one flow has nothing to converge to.
    """
    if loop.flows == 1:
        return None
    per_s = loop.step_Bps * (loop.flows - 1) / (2 * loop.segment_bytes)
    return math.log(loop.flows / EQUAL_SHARE) / per_s


class _TimelySystem:
    """State: queue, then rate and gradient of every flow; the queue is remembered."""

    def __init__(self, loop: TimelyLoop, rates_Bps: Array, queue_bytes: float) -> None:
        self.loop, self.width = loop, loop.flows
        # Twice the queue at which every rate falls: only a start far from rest gets there.
        self._most_bytes = 2 * loop.link_Bps * loop.high_ns * _NS
        # A flow hears of the queue once a segment: a rate of 0 would never change again.
        self._least_Bps = min(loop.step_Bps, loop.share_Bps)
        self.start = np.concatenate([[queue_bytes], rates_Bps, np.zeros(self.width)])[None, :]
        self.longest_lag_s = (
            (self._most_bytes + loop.packet_bytes) / loop.link_Bps
            + loop.delay_ns * _NS
            + max(loop.segment_bytes / self._least_Bps, loop.min_rtt_ns * _NS)
        )

    def past(self, time_s: float) -> Array:
        return self.start[:, :1]

    def memory(self, state: Array) -> Array:
        return state[:, :1]

    def derivative(self, state: Array, history: History) -> Array:
        loop, width = self.loop, self.width
        queue, rates, gradients = state[:, :1], state[:, 1 : 1 + width], state[:, 1 + width :]
        seen_s = (queue + loop.packet_bytes) / loop.link_Bps + loop.delay_ns * _NS
        segment_s = loop.segment_bytes / rates
        older_s = seen_s + np.maximum(segment_s, loop.min_rtt_ns * _NS)
        then = history.column(history.look(seen_s), 0)
        before = history.column(history.look(older_s), 0)
        weight = np.clip(WEIGHT_SLOPE * gradients + 0.5, 0, 1)
        error = (then - loop.reference_bytes) / loop.reference_bytes
        high_bytes = loop.link_Bps * loop.high_ns * _NS
        gentle = loop.step_Bps * (1 - weight) - weight * loop.decrease * rates * error
        steep = -loop.decrease * (1 - high_bytes / np.maximum(then, high_bytes)) * rates
        change = np.where(
            then < loop.reference_bytes, loop.step_Bps, np.where(then > high_bytes, steep, gentle)
        )
        slope = (then - before) / (loop.link_Bps * loop.min_rtt_ns * _NS)
        result = np.empty_like(state)
        result[:, :1] = rates.sum(axis=1, keepdims=True) - loop.link_Bps
        result[:, 1 : 1 + width] = change / segment_s
        result[:, 1 + width :] = loop.gain / segment_s * (slope - gradients)
        return result

    def limited(self, state: Array) -> Array:
        np.clip(state[:, 0], 0.0, self._most_bytes, out=state[:, 0])
        rates = state[:, 1 : 1 + self.width]
        np.clip(rates, self._least_Bps, self.loop.link_Bps, out=rates)
        return state


def simulate_timely(
    loop: TimelyLoop,
    duration_s: float,
    *,
    rates_Bps: Array | None = None,
    queue_bytes: float = 0.0,
    step_s: float = 1e-6,
    samples: int = 1000,
) -> tuple[Array, Array, Array]:
    """Integrate patched TIMELY's fluid model.

    Parameters
    ----------
    loop
        The setting.
    duration_s, step_s, samples
        Length of the run and of a step; points of the series.
    rates_Bps, queue_bytes
        State before the start; None: every flow has its fair share.

    Returns
    -------
    tuple of arrays
        Times in s (samples,), queue in bytes (samples,), rates in B/s (samples, flows).
    """
    rates = np.full(loop.flows, loop.share_Bps) if rates_Bps is None else np.asarray(rates_Bps)
    system = _TimelySystem(loop, rates, queue_bytes)
    times, states = integrate(system, system.start, duration_s, step_s, samples)
    return times, states[:, 0, 0], states[:, 0, 1 : 1 + loop.flows]
