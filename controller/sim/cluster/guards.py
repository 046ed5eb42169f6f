"""When the laxity of jobs that wait runs out, for all jobs of a cluster at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from controller.priority.contention import Contention
from controller.priority.policies.guard import guard_margin_ns
from controller.priority.policy import JobView

# Margins are asked for at the nanosecond at which laxity has come down to them, rounded up.
_ROUND_UP_ns = 1.0
_PROBE_bytes = 10**9
_PROBE = JobView("probe", True, 0, _PROBE_bytes, 0, float(_PROBE_bytes), 10**9)


class Guards:
    """Times at which a coordinator has to be asked because a waiting job is about to be late.

    As in `controller.sim.shared_link`: laxity falls by what a job is slower than alone, and it
    has run out at the margin of `controller.priority.policies.guard`.

    Parameters
    ----------
    jobs
        How many there are; arrays are by their numbers.
    """

    def __init__(self, jobs: int) -> None:
        self.open = np.zeros(jobs, np.bool_)
        self.classes = np.zeros(jobs, np.int64)
        self._deadline_ns = np.zeros(jobs)
        self._alone_Bps = np.ones(jobs)
        self._expected_bytes = np.zeros(jobs)
        self._window_bytes = np.zeros(jobs)
        self._change_ns = np.zeros(jobs)
        self._others: NDArray[np.int64] = np.zeros(jobs, np.int64)
        self._meets = np.zeros((jobs, jobs), np.bool_)
        self._link_Bps = [0.0] * jobs
        # The margin is linear in what is left of the window: what it is for each number of other
        # jobs is found by asking for two windows.
        done = dataclasses.replace(_PROBE, done_bytes=_PROBE_bytes)
        change_ns = guard_margin_ns(done, 0, math.inf)
        empty = [guard_margin_ns(done, others, math.inf) for others in range(jobs + 1)]
        whole = [guard_margin_ns(_PROBE, others, math.inf) for others in range(jobs + 1)]
        self._per_change = np.array(empty) / change_ns
        self._per_rest = (np.array(whole) - np.array(empty)) / _PROBE.rest_ns

    def meet(self, contention: Contention, numbers: Mapping[str, int]) -> None:
        """Another set of jobs is there."""
        self._meets[:] = False
        for name in contention.jobs:
            others = [numbers[other] for other in contention.neighbours(name)]
            self._meets[numbers[name], others] = True
            self._link_Bps[numbers[name]] = contention.link_Bps(name)
        self._others = self._meets.astype(np.int64) @ self.open.astype(np.int64)

    def begin(self, job: int, view: JobView, window_bytes: float) -> None:
        """A window begins that has so many bytes; the view may know it less well."""
        self.open[job] = True
        self._others += self._meets[:, job]
        self._deadline_ns[job] = view.deadline_ns
        self._alone_Bps[job] = view.alone_Bps
        self._expected_bytes[job] = view.expected_bytes
        self._window_bytes[job] = window_bytes
        self._change_ns[job] = guard_margin_ns(view, 0, self._link_Bps[job])

    def end(self, job: int) -> None:
        """A window is over."""
        self.open[job] = False
        self._others -= self._meets[:, job]

    def times_ns(
        self, rest_bytes: NDArray[np.float64], rate_Bps: NDArray[np.float64], now_ns: float
    ) -> NDArray[np.float64]:
        """When the laxity of each job has come down to its margin.

        Parameters
        ----------
        rest_bytes, rate_Bps
            What is left of each window, and how fast it becomes less.
        now_ns
            Time.

        Returns
        -------
        ndarray, shape (jobs,)
            Infinity where it has already, or does not fall, or no window is open.
        """
        # In whole bytes and nanoseconds, as a coordinator sees it.
        known_bytes = self._expected_bytes - np.rint(self._window_bytes - rest_bytes)
        rest_ns = np.maximum(known_bytes, 0.0) / self._alone_Bps * 1e9
        margin_ns = (
            self._change_ns * self._per_change[self._others]
            + rest_ns * self._per_rest[self._others]
        )
        left_ns = self._deadline_ns - round(now_ns) - rest_ns - margin_ns
        falls = 1.0 - rate_Bps / self._alone_Bps
        runs_out = self.open & (left_ns > 0) & (falls > 0)
        times = np.full(len(left_ns), math.inf)
        np.divide(left_ns, falls, out=times, where=runs_out)
        return times + now_ns + _ROUND_UP_ns

    def has_to_wait(self, job: int) -> bool:
        """Whether a job that it meets has its window open, and a class that is not below."""
        ahead = self._meets[job] & self.open & (self.classes >= self.classes[job])
        return bool(ahead.any())
