"""DCQCN's reaction points for many flows at once, as numpy arrays.

The same rules as `controller.congestion.reaction_point.ReactionPoint`, which is one flow, one
event after the other; tests hold the two together.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controller.congestion.dcqcn import DcqcnParameters
from controller.congestion.reaction_point import RELEASE_SHARE
from controller.errors import UsageError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# Later than any time of a simulation; differences to it do not overflow.
NEVER_ns = 2**62
# As in the yardstick: an alpha this small cuts a rate by less than a float can tell.
_ALPHA_NOTHING = 2.0**-60


class DcqcnFlows:
    """Rates of many flows, from their congestion notifications, their bytes and the time.

    Flows are addressed by their positions in the flattened arrays; a call must not name one of
    them twice. Times are nanoseconds of one clock and must not go back. Between two calls
    of `advance`, rates change only by what the other methods are told.

    Parameters
    ----------
    parameters
        Constants, at the rate of the flows' links.
    shape
        Of the arrays: flows, or (replicates, flows), or any other.

    Attributes
    ----------
    rates_Bps, targets_Bps
        Rc and Rt, of `shape`. A flow that was never cut has the link's rate.
    multipliers
        Of R_AI and R_HAI, of `shape`, for the increase events from now on: phase of the sync
        window, MLTCP's weight, or both. Writable.
    floors_Bps
        Of Rt in a cut, of `shape`; 0: none.
    limited
        Whether the rate is below the link's, of `shape`.
    timer_stages, byte_stages
        T and BC of `shape`: increase events by timer and by bytes since the last cut.
    cuts, hyper_increases
        How often either happened to each flow, of `shape`.
    """

    def __init__(self, parameters: DcqcnParameters, shape: int | tuple[int, ...]) -> None:
        self.parameters = parameters
        link_Bps = float(parameters.link_Bps)
        self.rates_Bps: FloatArray = np.full(shape, link_Bps)
        self.targets_Bps: FloatArray = np.full(shape, link_Bps)
        self.multipliers: FloatArray = np.ones(shape)
        self.floors_Bps: FloatArray = np.zeros(shape)
        self.limited: NDArray[np.bool_] = np.zeros(shape, dtype=bool)
        self.timer_stages: IntArray = np.zeros(shape, dtype=np.int64)
        self.byte_stages: IntArray = np.zeros(shape, dtype=np.int64)
        self.cuts: IntArray = np.zeros(shape, dtype=np.int64)
        self.hyper_increases: IntArray = np.zeros(shape, dtype=np.int64)
        self._now_ns = 0
        # Flat views: what follows works on positions.
        self._rates, self._targets = self.rates_Bps.reshape(-1), self.targets_Bps.reshape(-1)
        self._multipliers, self._floors = self.multipliers.reshape(-1), self.floors_Bps.reshape(-1)
        self._limited = self.limited.reshape(-1)
        self._timers, self._stages = self.timer_stages.reshape(-1), self.byte_stages.reshape(-1)
        self._cuts, self._hyper = self.cuts.reshape(-1), self.hyper_increases.reshape(-1)
        count = self._rates.size
        self._bytes: FloatArray = np.zeros(count)
        self._next_timer_ns: IntArray = np.full(count, NEVER_ns, dtype=np.int64)
        self._last_cut_ns: IntArray = np.full(count, -NEVER_ns, dtype=np.int64)
        # Alpha after the last cut; its decay since then is worked out when it is asked for.
        self._alphas: FloatArray = np.full(count, float(parameters.initial_alpha))
        self._alpha_from_ns: IntArray = np.full(count, NEVER_ns, dtype=np.int64)

    @property
    def now_ns(self) -> int:
        """Time of the last `advance`."""
        return self._now_ns

    def alphas(self) -> FloatArray:
        """Alpha of each flow at the time of the last `advance`, of `shape`."""
        flat = self._alpha(np.arange(self._alphas.size))
        return flat.reshape(self.rates_Bps.shape)

    def advance(self, now_ns: int) -> None:
        """Let the timers expire that are due up to and including `now_ns`.

        Raises
        ------
        ValueError
            Time went back.
        """
        if now_ns < self._now_ns:
            raise ValueError(f"time went back from {self._now_ns} to {now_ns} ns")
        self._now_ns = now_ns
        due = (self._next_timer_ns <= now_ns).nonzero()[0]
        while due.size:
            self._next_timer_ns[due] += self.parameters.timer_ns
            self._timers[due] += 1
            self._increase(due)
            due = due[self._next_timer_ns[due] <= now_ns]

    def sent(self, flows: IntArray, nbytes: FloatArray) -> None:
        """Account bytes that flows sent by now.

        A call with more bytes than the byte counter makes as many increase events as they
        come to.

        Parameters
        ----------
        flows
            Positions, shape (n,).
        nbytes
            Bytes on the wire of each, shape (n,).
        """
        limited = self._limited[flows]
        if not limited.all():
            flows, nbytes = flows[limited], nbytes[limited]
        counted = self._bytes[flows] + nbytes
        self._bytes[flows] = counted
        full = flows[counted >= self.parameters.byte_counter_bytes]
        while full.size:
            self._bytes[full] -= self.parameters.byte_counter_bytes
            self._stages[full] += 1
            self._increase(full)
            # One that was set free by it counts no bytes any more: its counter is 0.
            full = full[self._bytes[full] >= self.parameters.byte_counter_bytes]

    def notify(self, flows: IntArray) -> None:
        """Take one CNP (or ACK with BECN) for each of these flows, shape (n,), now.

        One too soon after a cut of its flow changes nothing at all.
        """
        parameters = self.parameters
        if parameters.decrease_interval_ns:
            since_ns = self._now_ns - self._last_cut_ns[flows]
            flows = flows[since_ns >= parameters.decrease_interval_ns]
        if not flows.size:
            return
        alphas, rates = self._alpha(flows), self._rates[flows]
        shares = np.maximum(1 - alphas / 2, parameters.min_decrease_factor)
        cut = np.maximum(parameters.min_rate_Bps, rates * shares)
        if parameters.first_cut_rate_Bps:
            first = ~self._limited[flows]
            cut[first] = rates[first] = parameters.first_cut_rate_Bps
        self._rates[flows] = cut
        self._targets[flows] = np.maximum(rates, self._floors[flows])
        self._cuts[flows] += 1
        self._last_cut_ns[flows] = self._now_ns
        self._alphas[flows] = (1 - parameters.g) * alphas + parameters.g
        self._alpha_from_ns[flows] = self._now_ns
        self._restart_increase(flows)

    def begin_window(self, flows: IntArray, predicted_Bps: FloatArray) -> None:
        """Start a sync window of these flows at predicted rates instead of line rate, now.

        Alpha is kept: it tells about the network, not about the window.

        Parameters
        ----------
        flows
            Positions, shape (n,).
        predicted_Bps
            Start of Rc and Rt, and floor of Rt until the next window, shape (n,); 0: no
            prediction, the flow goes on as it is. See
            `controller.congestion.dcqcn.predicted_rate_Bps`.
        """
        predicted = np.minimum(predicted_Bps, self.parameters.link_Bps)
        self._floors[flows] = predicted
        known = predicted > 0
        self.set_rates(flows[known], predicted[known])

    def set_rates(self, flows: IntArray, rates_Bps: FloatArray) -> None:
        """Put Rc and Rt of these flows, shape (n,), to given rates, counters to 0, now.

        Raises
        ------
        UsageError
            A rate is not above 0.
        """
        if not (rates_Bps > 0).all():
            raise UsageError(f"A flow's rate is {rates_Bps.min():g}; allowed: above 0 bytes/s.")
        rates = np.clip(rates_Bps, self.parameters.min_rate_Bps, self.parameters.link_Bps)
        self._rates[flows] = self._targets[flows] = rates
        self._restart_increase(flows)

    def reset(self, flows: IntArray) -> None:
        """Make these flows, shape (n,), new ones: line rate, first alpha, no history."""
        self._release(flows)
        self._floors[flows], self._multipliers[flows] = 0.0, 1.0
        self._cuts[flows] = self._hyper[flows] = 0
        self._last_cut_ns[flows] = -NEVER_ns
        self._alphas[flows] = self.parameters.initial_alpha
        self._alpha_from_ns[flows] = NEVER_ns

    def _alpha(self, flows: IntArray) -> FloatArray:
        from_ns = self._alpha_from_ns[flows]
        periods = np.maximum(0, self._now_ns - from_ns) // self.parameters.alpha_update_ns
        alphas: FloatArray = self._alphas[flows] * (1 - self.parameters.g) ** periods
        alphas[alphas < _ALPHA_NOTHING] = 0.0
        return alphas

    def _restart_increase(self, flows: IntArray) -> None:
        self._limited[flows] = True
        self._timers[flows] = self._stages[flows] = 0
        self._bytes[flows] = 0.0
        self._next_timer_ns[flows] = self._now_ns + self.parameters.timer_ns
        # A small alpha, or a high prediction, leaves nothing to limit.
        self._release_at_line_rate(flows)

    def _increase(self, flows: IntArray) -> None:
        """One increase event of each; why so: `ReactionPoint._increase`."""
        parameters = self.parameters
        timers, stages = self._timers[flows], self._stages[flows]
        recovered = np.maximum(timers, stages) > parameters.fast_recovery_steps
        targets = self._targets[flows]
        if recovered.any():
            beyond = np.minimum(timers, stages) - parameters.fast_recovery_steps
            hyper = beyond > 0
            steps = np.where(hyper, beyond * parameters.rate_hai_Bps, parameters.rate_ai_Bps)
            steps *= recovered * self._multipliers[flows]
            targets = np.minimum(targets + steps, parameters.link_Bps)
            self._targets[flows] = targets
            self._hyper[flows] += hyper
        self._rates[flows] = (targets + self._rates[flows]) / 2
        self._release_at_line_rate(flows)

    def _release_at_line_rate(self, flows: IntArray) -> None:
        free = self._rates[flows] >= self.parameters.link_Bps * RELEASE_SHARE
        if free.any():
            self._release(flows[free])

    def _release(self, flows: IntArray) -> None:
        self._rates[flows] = self._targets[flows] = self.parameters.link_Bps
        self._limited[flows] = False
        self._timers[flows] = self._stages[flows] = 0
        self._bytes[flows] = 0.0
        self._next_timer_ns[flows] = NEVER_ns
