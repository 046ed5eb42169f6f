"""What every job has on the network: bytes left of its step, their rate, and when it ends."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from controller.sim.cluster.course import Step

_S = 1e9


class Transfers:
    """Steps under way, one for each job at most; arrays are by the job's number.

    Between two changes of its rate a job costs nothing: what is left of it is known as of the
    time of the last change.

    Parameters
    ----------
    finish_ns
        Where it writes when each step will have ended at the rate in force, shape (jobs,);
        infinity: never, or there is none.

    Attributes
    ----------
    sending
        Whether the job has a step under way.
    rate_Bps
        Of each flow of a job.
    flows
        Of all jobs that are sending, together.
    carried_bytes
        What a job's flows have moved, as of its last change of rate.
    """

    def __init__(self, finish_ns: NDArray[np.float64]) -> None:
        jobs = len(finish_ns)
        self.finish_ns = finish_ns
        self.sending = np.zeros(jobs, np.bool_)
        self.rate_Bps = np.zeros(jobs)
        self.carried_bytes = np.zeros(jobs)
        self.flows = 0.0
        self._since_ns = np.zeros(jobs)
        self._step_bytes = np.zeros(jobs)  # of each flow
        self._rest_bytes = np.zeros(jobs)  # of each flow, of the step
        self._window_bytes = np.zeros(jobs)  # of the busiest rank, of the window
        self._per_rank = np.zeros(jobs)
        self._flow_count = np.zeros(jobs)

    def open(self, job: int, window_bytes: float) -> None:
        """A window begins, in which the busiest rank has so much to send."""
        self._window_bytes[job] = window_bytes
        self.rate_Bps[job] = 0.0

    def load(self, job: int, step: Step, now_ns: float, *, keeps_rate: bool) -> None:
        """Begin a step.

        Parameters
        ----------
        job
            That has none under way.
        step
            What is to be sent.
        now_ns
            Time.
        keeps_rate
            Whether it is over the same links, at the rate of the one before it; else there is
            none until `set_rates`.
        """
        self.sending[job] = True
        self._step_bytes[job] = self._rest_bytes[job] = step.stage.nbytes
        self._since_ns[job] = now_ns
        self._per_rank[job] = step.flows_per_rank
        self._flow_count[job] = step.flow_count
        self.flows += step.flow_count
        if not keeps_rate:
            self.rate_Bps[job] = 0.0
            self.finish_ns[job] = math.inf
        elif self.rate_Bps[job] > 0:
            self.finish_ns[job] = now_ns + step.stage.nbytes / self.rate_Bps[job] * _S

    def end(self, job: int) -> float:
        """A job's step is through, to the last byte; return what each flow has sent."""
        rest_bytes = self._rest_bytes[job]
        self.carried_bytes[job] += rest_bytes * self._flow_count[job]
        self._window_bytes[job] -= rest_bytes * self._per_rank[job]
        self._rest_bytes[job] = 0.0
        self.flows -= float(self._flow_count[job])
        self.sending[job] = False
        self.finish_ns[job] = math.inf
        return float(self._step_bytes[job])

    def sent_bytes(self, job: int) -> float:
        """What each flow of a job has sent of the step under way, as of its last change."""
        return float(self._step_bytes[job] - self._rest_bytes[job])

    def settle(self, jobs: NDArray[np.int64], now_ns: float) -> None:
        """Bring what is left of some jobs' steps up to date."""
        moved = self.rate_Bps[jobs] * ((now_ns - self._since_ns[jobs]) / _S)
        # Rounding must not leave less than nothing.
        moved = np.minimum(moved, self._rest_bytes[jobs])
        self._rest_bytes[jobs] -= moved
        self._window_bytes[jobs] -= moved * self._per_rank[jobs]
        self.carried_bytes[jobs] += moved * self._flow_count[jobs]
        self._since_ns[jobs] = now_ns

    def set_rates(
        self, jobs: NDArray[np.int64], rates_Bps: NDArray[np.float64], now_ns: float
    ) -> None:
        """Rates from now on, of jobs that are sending."""
        changed = np.flatnonzero(rates_Bps != self.rate_Bps[jobs])
        if not changed.size:
            return
        jobs, rates_Bps = jobs[changed], rates_Bps[changed]
        self.settle(jobs, now_ns)
        self.rate_Bps[jobs] = rates_Bps
        with np.errstate(divide="ignore"):
            self.finish_ns[jobs] = now_ns + self._rest_bytes[jobs] / rates_Bps * _S

    def rank_rate_Bps(self) -> NDArray[np.float64]:
        """What the busiest rank of each job sends; 0 where no step is under way."""
        return np.where(self.sending, self.rate_Bps * self._per_rank, 0.0)

    def rest_bytes(self, now_ns: float) -> NDArray[np.float64]:
        """What the busiest rank of each job has still to send in the open window."""
        return self._window_bytes - self.rank_rate_Bps() * ((now_ns - self._since_ns) / _S)

    def step_rest_bytes(self, jobs: NDArray[np.int64], now_ns: float) -> NDArray[np.float64]:
        """What each flow of some jobs has still to send of its step."""
        moved = self.rate_Bps[jobs] * ((now_ns - self._since_ns[jobs]) / _S)
        return np.maximum(self._rest_bytes[jobs] - moved, 0.0)

    def resend(self, job: int, most_bytes: float, now_ns: float) -> float:
        """Let each flow of a step send again what it has sent, up to a limit.

        Returns
        -------
        float
            What all flows together send again. As in `controller.sim.shared_link`, it counts as
            sent when it is: the coordinator sees more sent than the window has.
        """
        self.settle(np.array([job]), now_ns)
        again = min(most_bytes, self.sent_bytes(job))
        self._rest_bytes[job] += again
        self._step_bytes[job] += again
        if self.rate_Bps[job] > 0:
            self.finish_ns[job] = now_ns + self._rest_bytes[job] / self.rate_Bps[job] * _S
        return again * float(self._flow_count[job])
