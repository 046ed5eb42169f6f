"""Patched TIMELY for many flows at once: rates from queueing delays instead of marks.

Zhu, Ghobadi, Misra, Padhye, "ECN or Delay: Lessons Learnt from Analysis of DCQCN and TIMELY",
CoNEXT 2016, section 4.3; the algorithm that it mends is Mittal et al., "TIMELY", SIGCOMM 2015.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from controller.congestion.flows import FloatArray, IntArray
from controller.errors import UsageError

_Mbit_Bps = 10**6 / 8


@dataclass(frozen=True)
class TimelyParameters:
    """Constants of patched TIMELY; the defaults are those of CoNEXT 2016 at 10 Gbit/s.

    Attributes
    ----------
    link_Bps
        A flow's own link; no rate is above it.
    delta_Bps
        Additive step.
    beta
        Multiplicative decrease; TIMELY's own is 0.8, patched TIMELY's 0.008.
    alpha
        Weight of a new difference of delays in their mean.
    low_ns, high_ns
        T_low and T_high, thresholds of the queueing delay. The first is the reference too.
    min_rtt_ns
        D_minRTT: unit of the gradient, and the shortest time between two updates.
    segment_bytes
        A delay is measured once for each of them.

    Raises
    ------
    UsageError
        A value is out of range.
    """

    link_Bps: float = 10_000 * _Mbit_Bps
    delta_Bps: float = 10 * _Mbit_Bps
    beta: float = 0.008
    alpha: float = 0.875
    low_ns: int = 50_000
    high_ns: int = 500_000
    min_rtt_ns: int = 20_000
    segment_bytes: int = 16_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"TIMELY key {field.name} is {value!r}; allowed: above 0.")
        for key in ("alpha", "beta"):
            if getattr(self, key) > 1:
                raise UsageError(f"TIMELY key {key} is {getattr(self, key)!r}; allowed: up to 1.")
        if self.delta_Bps > self.link_Bps:
            raise UsageError(f"TIMELY key delta_Bps is above the link's {self.link_Bps:g} bytes/s.")
        if self.low_ns >= self.high_ns:
            raise UsageError(f"TIMELY key low_ns is {self.low_ns}; allowed: below high_ns.")


class TimelyFlows:
    """Rates of many flows from the queueing delays that their segments met.

    Addressed like `controller.congestion.flows.DcqcnFlows`. Where the paper's fluid model lets
    an update happen each max(segment / rate, D_minRTT), here a delay that arrives sooner
    than D_minRTT after an update is left out.

    Parameters
    ----------
    parameters
        Constants.
    shape
        Of the arrays.
    start_Bps
        First rate of all; None: the link's. (TIMELY starts a flow at link / (flows + 1).)

    Attributes
    ----------
    rates_Bps
        Of `shape`.
    gradients
        Normalised mean difference of delays, of `shape`.
    updates
        How often each rate was computed, of `shape`.
    """

    def __init__(
        self,
        parameters: TimelyParameters,
        shape: int | tuple[int, ...],
        start_Bps: float | None = None,
    ) -> None:
        self.parameters = parameters
        self._start_Bps = parameters.link_Bps if start_Bps is None else start_Bps
        self.rates_Bps: FloatArray = np.full(shape, float(self._start_Bps))
        self.gradients: FloatArray = np.zeros(shape)
        self.updates: IntArray = np.zeros(shape, dtype=np.int64)
        self._now_ns = 0
        self._rates, self._gradients = self.rates_Bps.reshape(-1), self.gradients.reshape(-1)
        self._updates = self.updates.reshape(-1)
        count = self._rates.size
        self._segment: FloatArray = np.zeros(count)
        self._last_ns: IntArray = np.full(count, -(2**62), dtype=np.int64)
        self._last_delay_ns: FloatArray = np.full(count, np.nan)

    def advance(self, now_ns: int) -> None:
        """Set the time; nothing is due by itself."""
        if now_ns < self._now_ns:
            raise ValueError(f"time went back from {self._now_ns} to {now_ns} ns")
        self._now_ns = now_ns

    def sent(self, flows: IntArray, nbytes: FloatArray) -> IntArray:
        """Account bytes that flows sent by now.

        Returns
        -------
        ndarray
            Positions of those of which a segment was completed by them: its delay is measured.
        """
        self._segment[flows] += nbytes
        done = flows[self._segment[flows] >= self.parameters.segment_bytes]
        self._segment[done] %= self.parameters.segment_bytes
        return done

    def measured(self, flows: IntArray, delays_ns: FloatArray) -> None:
        """Take the queueing delays, shape (n,), that segments of these flows met, now."""
        parameters = self.parameters
        fresh = self._now_ns - self._last_ns[flows] >= parameters.min_rtt_ns
        flows, delays_ns = flows[fresh], delays_ns[fresh]
        before_ns = self._last_delay_ns[flows]
        difference = np.where(np.isnan(before_ns), 0.0, delays_ns - before_ns)
        # The paper keeps the mean in ns and divides afterwards; the mean is linear.
        gradients = (1 - parameters.alpha) * self._gradients[flows]
        gradients += parameters.alpha * difference / parameters.min_rtt_ns
        self._gradients[flows] = gradients
        self._last_delay_ns[flows], self._last_ns[flows] = delays_ns, self._now_ns
        rates = self._rates[flows]
        weights = np.clip(2 * gradients + 0.5, 0.0, 1.0)
        errors = (delays_ns - parameters.low_ns) / parameters.low_ns
        between = parameters.delta_Bps * (1 - weights)
        between += rates * (1 - parameters.beta * weights * errors)
        above = rates * (1 - parameters.beta * (1 - parameters.high_ns / np.maximum(delays_ns, 1)))
        changed = np.where(delays_ns > parameters.high_ns, above, between)
        changed = np.where(delays_ns < parameters.low_ns, rates + parameters.delta_Bps, changed)
        # The paper gives no least rate. Ours: one step, as the DCQCN preset `paper` has it.
        self._rates[flows] = np.clip(changed, parameters.delta_Bps, parameters.link_Bps)
        self._updates[flows] += 1

    def set_rates(self, flows: IntArray, rates_Bps: FloatArray) -> None:
        """Put the rates of these flows, shape (n,), to given ones, up to the link's."""
        self._rates[flows] = np.minimum(rates_Bps, self.parameters.link_Bps)

    def reset(self, flows: IntArray) -> None:
        """Make these flows, shape (n,), new ones."""
        self._rates[flows] = self._start_Bps
        self._gradients[flows] = self._segment[flows] = 0.0
        self._updates[flows] = 0
        self._last_ns[flows], self._last_delay_ns[flows] = -(2**62), np.nan
