"""DCQCN's reaction point as the paper words it: one flow, one event after the other, in floats.

The yardstick for the integer arithmetic in BPF, so it shares nothing with it: no lazy closed
forms, every timer expiry is a step of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.congestion.dcqcn import DcqcnParameters

# The rate approaches its target by halves and would never reach line rate. Hardware frees the
# flow at its maximum rate; here that is within 11.5 halvings of the link, 1/2897. Cuts and
# recoveries lead to whole ones, and rounding errors shall not decide.
RELEASE_SHARE = 1 - 2.0**-11.5

# An alpha this small cuts a rate by less than a float can tell; the steps to it end here.
_ALPHA_NOTHING = 2.0**-60


@dataclass
class ReactionCounters:
    """What a reaction point did so far.

    Attributes
    ----------
    cuts, suppressed
        Notifications that cut the rate, and those too soon after a cut.
    fast_recovery, additive, hyper
        Increase events of each kind.
    released
        Times that increase events brought the flow back to line rate, unlimited again.
    windows, floored
        Sync windows that started at a predicted rate; cuts whose target rate the prediction
        held up.
    """

    cuts: int = 0
    suppressed: int = 0
    fast_recovery: int = 0
    additive: int = 0
    hyper: int = 0
    released: int = 0
    windows: int = 0
    floored: int = 0


class ReactionPoint:
    """Rate of one flow, from its congestion notifications, its bytes and the time.

    An unlimited flow has Rc = Rt = link rate, and nothing to increase. Times are nanoseconds of
    one clock and must not go back.

    Parameters
    ----------
    parameters
        Constants, at the rate of the flow's link.

    Attributes
    ----------
    rc_Bps, rt_Bps
        Current and target rate.
    alpha
        Estimate of congestion, at the time of the last call.
    limited
        Whether the rate is below the link's.
    timer_stage, byte_stage
        T and BC: increase events by timer and by bytes since the last cut.
    predicted_Bps
        Floor of Rt in a cut; 0: none.
    phase_multiplier
        Of R_AI and R_HAI, for the increase events from now on.
    counters
        What happened so far.
    """

    def __init__(self, parameters: DcqcnParameters) -> None:
        self.parameters = parameters
        self.rc_Bps = self.rt_Bps = float(parameters.link_Bps)
        self.alpha = float(parameters.initial_alpha)
        self.limited = False
        self.timer_stage = self.byte_stage = 0
        self.predicted_Bps = 0.0
        self.phase_multiplier = 1.0
        self.counters = ReactionCounters()
        self._bytes = 0
        self._now_ns = 0
        self._last_cut_ns: int | None = None
        self._next_alpha_ns: int | None = None  # None: alpha has not been touched yet
        self._next_timer_ns = 0

    def advance(self, now_ns: int) -> None:
        """Let the timers expire that are due up to and including `now_ns`."""
        if now_ns < self._now_ns:
            raise ValueError(f"time went back from {self._now_ns} to {now_ns} ns")
        self._now_ns = now_ns
        while self._next_alpha_ns is not None and self._next_alpha_ns <= now_ns:
            self._next_alpha_ns += self.parameters.alpha_update_ns
            self.alpha *= 1 - self.parameters.g
            if self.alpha < _ALPHA_NOTHING:
                self.alpha, self._next_alpha_ns = 0.0, None
        while self.limited and self._next_timer_ns <= now_ns:
            self._next_timer_ns += self.parameters.timer_ns
            self.timer_stage += 1
            self._increase()

    def sent(self, now_ns: int, nbytes: int) -> None:
        """Account bytes sent at `now_ns`, after the timers due by then.

        At most one increase event a call; the rest of the bytes stays on the counter.
        """
        self.advance(now_ns)
        if not self.limited:
            return
        self._bytes += nbytes
        if self._bytes >= self.parameters.byte_counter_bytes:
            self._bytes -= self.parameters.byte_counter_bytes
            self.byte_stage += 1
            self._increase()

    def notify(self, now_ns: int) -> bool:
        """Take a CNP, or an ACK with BECN, that arrived at `now_ns`.

        Returns
        -------
        bool
            Whether it cut the rate. Too soon after a cut, it changes nothing at all.
        """
        self.advance(now_ns)
        last_ns = self._last_cut_ns
        if last_ns is not None and now_ns - last_ns < self.parameters.decrease_interval_ns:
            self.counters.suppressed += 1
            return False
        self.counters.cuts += 1
        self._cut_rate()
        self._last_cut_ns = now_ns
        self.alpha = (1 - self.parameters.g) * self.alpha + self.parameters.g
        self._next_alpha_ns = now_ns + self.parameters.alpha_update_ns
        self._restart_increase(now_ns)
        return True

    def begin_window(self, now_ns: int, predicted_Bps: float) -> None:
        """Start a sync window at a predicted rate instead of line rate.

        The rate may grow from there by the usual events, should the prediction have been too
        low. Alpha is kept: it tells about the network, not about the window.

        Parameters
        ----------
        now_ns
            Start of the window.
        predicted_Bps
            Start of Rc and Rt, and floor of Rt until the next window; 0: no prediction, the
            flow goes on as it is.
        """
        self.advance(now_ns)
        self.predicted_Bps = min(predicted_Bps, self.parameters.link_Bps)
        if not predicted_Bps:
            return
        self.counters.windows += 1
        self.rc_Bps = self.rt_Bps = max(self.predicted_Bps, self.parameters.min_rate_Bps)
        self._restart_increase(now_ns)

    def _cut_rate(self) -> None:
        parameters = self.parameters
        if not self.limited and parameters.first_cut_rate_Bps:
            self.rc_Bps = self.rt_Bps = parameters.first_cut_rate_Bps
        else:
            share = max(1 - self.alpha / 2, parameters.min_decrease_factor)
            self.rt_Bps = self.rc_Bps
            self.rc_Bps = max(parameters.min_rate_Bps, self.rc_Bps * share)
        if self.rt_Bps < self.predicted_Bps:
            self.rt_Bps = self.predicted_Bps
            self.counters.floored += 1

    def _restart_increase(self, now_ns: int) -> None:
        self.limited = True
        self.timer_stage = self.byte_stage = self._bytes = 0
        self._next_timer_ns = now_ns + self.parameters.timer_ns
        # A small alpha, or a high prediction, leaves nothing to limit.
        if self._at_line_rate():
            self._release()

    def _increase(self) -> None:
        # Paper, section 3.1 and figure 7: max(T, BC) < F is fast recovery, min(T, BC) > F hyper
        # increase, all else additive. The event being handled is counted already, so F events
        # of one counter recover and the next one is the first to add, as the paper's text and
        # fluid model have it: hence <=.
        steps = self.parameters.fast_recovery_steps
        beyond = min(self.timer_stage, self.byte_stage) - steps
        if max(self.timer_stage, self.byte_stage) <= steps:
            self.counters.fast_recovery += 1
        elif beyond > 0:
            # The paper gives no formula; QCN (802.1Qau) adds i R_HAI in the i-th such cycle.
            self.counters.hyper += 1
            self.rt_Bps += beyond * self.parameters.rate_hai_Bps * self.phase_multiplier
        else:
            self.counters.additive += 1
            self.rt_Bps += self.parameters.rate_ai_Bps * self.phase_multiplier
        self.rt_Bps = min(self.rt_Bps, self.parameters.link_Bps)
        self.rc_Bps = (self.rt_Bps + self.rc_Bps) / 2
        if self._at_line_rate():
            self.counters.released += 1
            self._release()

    def _at_line_rate(self) -> bool:
        return self.rc_Bps >= self.parameters.link_Bps * RELEASE_SHARE

    def _release(self) -> None:
        self.rc_Bps = self.rt_Bps = float(self.parameters.link_Bps)
        self.limited = False
        self.timer_stage = self.byte_stage = self._bytes = 0
