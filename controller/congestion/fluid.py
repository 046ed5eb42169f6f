"""The fluid model of DCQCN: N flows through one marking queue, as delay differential equations.

Model: Zhu, Ghobadi, Misra, Padhye, "ECN or Delay: Lessons Learnt from Analysis of DCQCN and
TIMELY", CoNEXT 2016, section 3, and three additions of ours, each with its own switch: marks from
a window's average, a multiplier of R_AI by phase, a floor under the target rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

import numpy as np

from controller.congestion.dcqcn import MAX_PHASE_MULTIPLIER, PRESETS, DcqcnParameters
from controller.congestion.delay_equations import Array, History, Look, integrate
from controller.errors import UsageError
from controller.priority.classes import KMAX_BYTES, KMIN_BYTES, PMAX

_NS = 1e-9
# The largest probability that still has a logarithm of its complement.
_ALMOST_ONE = 1 - 2.0**-52
# More flows than this at one queue is a mistake in a number rather than a network.
MAX_FLOWS = 100_000


class Loop(Protocol):
    """What the loops of all models have."""

    @property
    def flows(self) -> int:
        """Flows through the queue."""

    @property
    def delay_ns(self) -> float:
        """Delay of the loop, without the queue's."""


def check_loop(kind: str, loop: Loop, *rows: tuple[str, bool, str]) -> None:
    """Raise UsageError unless all numbers of a loop are in range.

    Parameters
    ----------
    kind
        What errors call it.
    loop
        Its flows and its delay are checked first, then the rest.
    rows
        Of the rest: member, whether it is in range, and what is allowed. Infinite is never.
    """
    for key, good, allowed in (
        ("flows", 1 <= loop.flows <= MAX_FLOWS, f"1 .. {MAX_FLOWS}"),
        ("delay_ns", 0 <= loop.delay_ns <= 1e9, "0 .. 1e9 ns"),
        *rows,
    ):
        value = getattr(loop, key)
        if not (good and math.isfinite(value)):
            raise UsageError(f"{kind} key {key} is {value!r}; allowed: {allowed}.")


@dataclass(frozen=True)
class DcqcnLoop:
    """N equal flows, one queue, and the way of a mark back to the senders.

    Attributes
    ----------
    flows
        N.
    delay_ns
        Of the control loop: from a mark to the cut that arrives at the queue (the paper's tau*).
    parameters
        Constants of DCQCN with the link's rate C; of them the minimum rate and the limit of a cut
        are no part of the equations, hyper increase neither.
    kmin_bytes, kmax_bytes, pmax
        Marking: linear from 0 at Kmin to Pmax at Kmax, every packet above. Defaults: those of a
        traffic class at 40 Gb/s.
    window_ns, window_slots
        Marks follow the queue's average over a sliding window of so many slots (`bpf/ecn.h`);
        0 ns: the queue of the moment.
    phase_multiplier
        Of R_AI; 1: plain DCQCN.
    predicted_Bps
        A cut leaves the target rate at least here; 0: plain DCQCN.
    packet_bytes
        Marks are drawn per packet. 1000: the paper's MTU.

    Raises
    ------
    UsageError
        A value is out of range; names it and what is allowed.
    """

    flows: int
    delay_ns: float = 0.0
    parameters: DcqcnParameters = PRESETS["paper"]
    kmin_bytes: float = KMIN_BYTES
    kmax_bytes: float = KMAX_BYTES
    pmax: float = PMAX
    window_ns: float = 0.0
    window_slots: int = 16
    phase_multiplier: float = 1.0
    predicted_Bps: float = 0.0
    packet_bytes: float = 1000.0

    def __post_init__(self) -> None:
        check_loop(
            "Loop",
            self,
            ("kmin_bytes", self.kmin_bytes >= 0, "0 and more"),
            # The queue moves in packets: on a shorter line no slope is what it meets.
            (
                "kmax_bytes",
                self.kmax_bytes >= self.kmin_bytes + self.packet_bytes,
                "a packet above kmin_bytes at least",
            ),
            ("pmax", 0 < self.pmax <= 1, "above 0, at most 1"),
            ("window_ns", 0 <= self.window_ns <= 1e9, "0 .. 1e9 ns"),
            ("window_slots", self.window_slots >= 1, "1 and more"),
            (
                "phase_multiplier",
                0 < self.phase_multiplier <= MAX_PHASE_MULTIPLIER,
                f"above 0, at most {MAX_PHASE_MULTIPLIER:g}",
            ),
            (
                "predicted_Bps",
                0 <= self.predicted_Bps <= self.parameters.link_Bps,
                "0 .. the link's rate",
            ),
            ("packet_bytes", 1 <= self.packet_bytes <= 65_536, "1 .. 65536"),
        )

    @property
    def share_Bps(self) -> float:
        """Each flow's fair share of the link."""
        return self.parameters.link_Bps / self.flows


@dataclass(frozen=True)
class LoopConstants:
    """Constants of several loops, each of shape (settings, 1), in bytes and seconds.

    `cut_s` is the least time between two cuts of a flow (the paper's tau), `alpha_s` its tau',
    `step_Bps` is R_AI, `floor_Bps` the target rate's floor. Of the queue's average, `now_weight`
    is the queue of the moment and the rest is the mean of the `window_s` before.
    """

    flows: Array
    delay_s: Array
    link_Bps: Array
    share_Bps: Array
    min_rate_Bps: Array
    g: Array
    alpha_s: Array
    cut_s: Array
    timer_s: Array
    byte_counter_bytes: Array
    recovery_steps: Array
    step_Bps: Array
    floor_Bps: Array
    kmin_bytes: Array
    kmax_bytes: Array
    pmax: Array
    window_s: Array
    now_weight: Array
    packet_bytes: Array


def constants(loops: Sequence[DcqcnLoop]) -> LoopConstants:
    """Constants of `loops` as columns, in units of bytes and seconds."""
    rows = []
    for loop in loops:
        law = loop.parameters
        slots = loop.window_slots if loop.window_ns else 1
        rows.append(
            LoopConstants(
                flows=np.asarray(loop.flows, dtype=float),
                delay_s=np.asarray(loop.delay_ns * _NS),
                link_Bps=np.asarray(law.link_Bps),
                share_Bps=np.asarray(loop.share_Bps),
                min_rate_Bps=np.asarray(law.min_rate_Bps),
                g=np.asarray(law.g),
                alpha_s=np.asarray(law.alpha_update_ns * _NS),
                cut_s=np.asarray(max(law.echo_interval_ns, law.decrease_interval_ns, 1) * _NS),
                timer_s=np.asarray(law.timer_ns * _NS),
                byte_counter_bytes=np.asarray(float(law.byte_counter_bytes)),
                recovery_steps=np.asarray(float(law.fast_recovery_steps)),
                step_Bps=np.asarray(law.rate_ai_Bps * loop.phase_multiplier),
                floor_Bps=np.asarray(loop.predicted_Bps),
                kmin_bytes=np.asarray(loop.kmin_bytes),
                kmax_bytes=np.asarray(loop.kmax_bytes),
                pmax=np.asarray(loop.pmax),
                # The marker averages the ends of the slots before with the queue of the moment,
                # which stands for the open slot; a packet is anywhere in that slot.
                window_s=np.asarray(loop.window_ns * _NS * (slots - 1) / slots),
                now_weight=np.asarray(1 / slots),
                packet_bytes=np.asarray(loop.packet_bytes),
            )
        )
    return LoopConstants(
        **{
            field.name: np.array([[getattr(row, field.name)] for row in rows])
            for field in fields(LoopConstants)
        }
    )


def mark_share(queue_bytes: Array, of: LoopConstants) -> Array:
    """Share of packets that are marked, from the queue: `marking.mark_probability` on arrays."""
    line = of.pmax * (queue_bytes - of.kmin_bytes) / (of.kmax_bytes - of.kmin_bytes)
    marked: Array = np.where(queue_bytes > of.kmax_bytes, 1.0, np.maximum(line, 0.0))
    return marked


class Signals(NamedTuple):
    """What a flow feels of a share of marks: shapes as those of share and rate.

    `cut` is the chance of a cut in each `cut_s`, `congested` the share of alpha's periods with a
    notification, `recoveries_per_s` how often Rc moves half way to Rt, `additions_per_s` how
    often Rt grows by R_AI.
    """

    cut: Array
    congested: Array
    recoveries_per_s: Array
    additions_per_s: Array


def _per_event(events: Array) -> Array:
    """``x / (e^x - 1)``: the share of increase events that are left when marks reset counters."""
    gone = np.expm1(-events)
    left: Array = -events * (1 + gone) / gone
    return left


def signals(share: Array, rate_Bps: Array, of: LoopConstants) -> Signals:
    """What a flow at `rate_Bps` feels when a `share` (above 0) of packets is marked.

    CoNEXT 2016, equations 3 to 5, in a form that neither overflows nor loses digits near 0; exact
    for complex arguments, too. The paper's alpha has one update per period that holds a mark,
    where notifications are as frequent as they may be. Where updates are more frequent than
    notifications (ConnectX: 1 us and 50 us), only one period of those in between has one.
    """
    mark = -np.log1p(-share)
    per_mark = share / mark
    packets_per_s = rate_Bps / of.packet_bytes
    by_bytes = mark * of.byte_counter_bytes / of.packet_bytes
    by_timer = mark * of.timer_s * packets_per_s
    byte_events = rate_Bps / of.byte_counter_bytes * per_mark * _per_event(by_bytes)
    timer_events = per_mark / of.timer_s * _per_event(by_timer)
    period_s = np.maximum(of.alpha_s, of.cut_s)
    return Signals(
        cut=-np.expm1(-mark * of.cut_s * packets_per_s),
        congested=np.minimum(1.0, of.alpha_s / of.cut_s)
        * -np.expm1(-mark * period_s * packets_per_s),
        recoveries_per_s=byte_events + timer_events,
        additions_per_s=byte_events * np.exp(-of.recovery_steps * by_bytes)
        + timer_events * np.exp(-of.recovery_steps * by_timer),
    )


def drift(
    alpha: Array,
    target_Bps: Array,
    rate_Bps: Array,
    share: Array,
    rate_then_Bps: Array,
    of: LoopConstants,
) -> tuple[Array, Array, Array]:
    """Change per second of alpha, target and current rate: CoNEXT 2016, equations 3 to 5.

    Parameters
    ----------
    alpha, target_Bps, rate_Bps
        Of each flow, now.
    share, rate_then_Bps
        Share of packets marked, and the flow's rate, one loop delay ago.
    of
        Constants of the loops.
    """
    felt = signals(share, rate_then_Bps, of)
    # A cut makes Rt what Rc was, but not less than the prediction.
    falls_to = np.where(rate_Bps.real > of.floor_Bps, rate_Bps, of.floor_Bps)
    half = (target_Bps - rate_Bps) / 2
    return (
        of.g / of.alpha_s * (felt.congested - alpha),
        (falls_to - target_Bps) * felt.cut / of.cut_s + of.step_Bps * felt.additions_per_s,
        half * felt.recoveries_per_s - rate_Bps * alpha * felt.cut / (2 * of.cut_s),
    )


@dataclass(frozen=True)
class FluidStart:
    """States to start from, arrays of shape (settings, flows), the queue's (settings,).

    Before the start everything was as it is then. Columns beyond a setting's own flows count for
    nothing.
    """

    queue_bytes: Array
    rate_Bps: Array
    target_Bps: Array
    alpha: Array


@dataclass(frozen=True)
class FluidSeries:
    """A run of the fluid model.

    Attributes
    ----------
    time_s
        Shape (samples,).
    queue_bytes
        Shape (samples, settings).
    rate_Bps
        Shape (samples, settings, flows); 0 beyond a setting's own flows.
    """

    time_s: Array
    queue_bytes: Array
    rate_Bps: Array


def line_rate_start(loops: Sequence[DcqcnLoop]) -> FluidStart:
    """All flows begin at line rate, as DCQCN has it, with an empty queue and alpha 1."""
    shape = (len(loops), max(loop.flows for loop in loops))
    line = np.broadcast_to(np.array([[loop.parameters.link_Bps] for loop in loops]), shape)
    return FluidStart(np.zeros(shape[0]), line, line, np.ones(shape))


class _DcqcnSystem:
    """State: queue, its integral over time, then Rc, Rt and alpha of every flow."""

    def __init__(self, loops: Sequence[DcqcnLoop], start: FluidStart) -> None:
        self.of = constants(loops)
        self.width = width = start.rate_Bps.shape[1]
        self._present = np.arange(width) < self.of.flows
        lags_s = self.of.delay_s + self.of.window_s
        self.longest_lag_s = float(lags_s.max())
        self._lags_s = self.of.delay_s[:, 0], lags_s
        self._windowed = bool((self.of.window_s > 0).any())
        # Without a window the queue of the moment has all the weight.
        spans_s = np.where(self.of.window_s > 0, self.of.window_s, np.inf)
        self._per_span = (1 - self.of.now_weight) / spans_s
        self._looks: tuple[Look, Look] | None = None
        self._lowest_Bps = np.minimum(self.of.min_rate_Bps, self.of.share_Bps)
        # Of flows that are not there nothing may grow.
        rates = np.tile(np.where(self._present, self._lowest_Bps, 0.0), 2)
        lines = np.tile(np.where(self._present, self.of.link_Bps, 0.0), 2)
        column, alphas = np.ones((len(loops), 1)), np.ones((len(loops), width))
        self._low = np.hstack([0 * column, -np.inf * column, rates, 0 * alphas])
        self._high = np.hstack([np.inf * column, np.inf * column, lines, alphas])
        self.start = np.hstack(
            [start.queue_bytes[:, None], 0 * column, start.rate_Bps, start.target_Bps, start.alpha]
        )

    def past(self, time_s: float) -> Array:
        remembered = self.start[:, : 2 + self.width].copy()
        remembered[:, 1] = remembered[:, 0] * time_s
        return remembered

    def memory(self, state: Array) -> Array:
        return state[:, : 2 + self.width]

    def derivative(self, state: Array, history: History) -> Array:
        of, width = self.of, self.width
        if self._looks is None:
            self._looks = history.look(self._lags_s[0]), history.look(self._lags_s[1])
        then = history.rows(self._looks[0])
        queue = then[:, :1]
        if self._windowed:
            span = then[:, 1:2] - history.column(self._looks[1], 1)
            queue = of.now_weight * queue + self._per_span * span
        # One mark in 2^52 packets stands for none: the formulas have their limit there.
        share = np.clip(mark_share(queue, of), 2.0**-52, _ALMOST_ONE)
        rates = state[:, 2 : 2 + width]
        targets, alphas = state[:, 2 + width : 2 + 2 * width], state[:, 2 + 2 * width :]
        # Nobody divides by the rate of a flow that is not there.
        rate_then = np.maximum(then[:, 2:], self._lowest_Bps)
        slopes = drift(alphas, targets, rates, share, rate_then, of)
        change = np.empty_like(state)
        change[:, :1] = rates.sum(axis=1, keepdims=True) - of.link_Bps
        change[:, 1] = state[:, 0]
        change[:, 2 + 2 * width :] = slopes[0]
        change[:, 2 + width : 2 + 2 * width] = slopes[1]
        change[:, 2 : 2 + width] = slopes[2]
        return change

    def limited(self, state: Array) -> Array:
        np.maximum(state, self._low, out=state)
        np.minimum(state, self._high, out=state)
        return state


def simulate_dcqcn(
    loops: Sequence[DcqcnLoop],
    duration_s: float,
    *,
    start: FluidStart | None = None,
    step_s: float = 1e-6,
    samples: int = 1000,
) -> FluidSeries:
    """Integrate the fluid model of several loops at once.

    Rates stay between the minimum rate (or the fair share where that is lower) and the link's.

    Parameters
    ----------
    loops
        The settings; their numbers of flows may differ.
    duration_s, step_s
        Length of the run and of a step; a step should be a small part of the shortest delay and
        of the cut interval.
    start
        Where to begin; None: `line_rate_start`.
    samples
        Points of the series.
    """
    system = _DcqcnSystem(loops, start or line_rate_start(loops))
    times, states = integrate(system, system.start, duration_s, step_s, samples)
    return FluidSeries(times, states[:, :, 0], states[:, :, 2 : 2 + system.width])
