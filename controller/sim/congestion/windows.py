"""Sync windows of jobs whose senders share a port: when they begin, what is sent, when they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.congestion.dcqcn import PhaseIncrease, predicted_rate_Bps
from controller.congestion.flows import DcqcnFlows, FloatArray, IntArray
from controller.priority.policies.mltcp import INTERCEPT, SLOPE
from controller.sim.congestion.network import Network

_NS = 10**9


@dataclass(frozen=True)
class Workload:
    """What each job does, again and again: compute, then a window of bytes through the port.

    Attributes
    ----------
    window_bytes
        Of the whole window, all senders of the job together. 0: no windows, every sender
        sends without end.
    compute_ns
        Mean time from the end of a window to the begin of the next.
    compute_jitter
        Standard deviation of it, as a share.
    start_jitter_ns
        Senders of a job begin their parts evenly spread over this time.
    bytes_error
        Standard deviation of the predicted bytes of a window, as a share; of the predicted
        rate, too.
    """

    window_bytes: int
    compute_ns: int
    compute_jitter: float = 0.05
    start_jitter_ns: int = 50_000
    bytes_error: float = 0.0


@dataclass(frozen=True)
class Changes:
    """What is different from plain DCQCN.

    Attributes
    ----------
    prediction
        A window starts at the predicted rate, which is the floor of Rt.
    window_marks
        Marks by the sliding window's average.
    phases
        Increase steps by phase of the window.
    mltcp
        Increase steps times MLTCP's F of what of the window is done.
    drain_share
        Of the queue that decides on marks, see `controller.sim.congestion.links.Link`.
    """

    prediction: bool = False
    window_marks: bool = False
    phases: bool = False
    mltcp: bool = False
    drain_share: float = 1.0


@dataclass(frozen=True)
class Job:
    """One job: its senders, its port, its randomness.

    Attributes
    ----------
    senders
        Positions of its flows, consecutive.
    port
        Position of its link.
    seed
        Of its compute times, start times and prediction errors: the same under all changes.
    changes
        To plain DCQCN.
    """

    senders: range
    port: int
    seed: tuple[int, ...]
    changes: Changes


class Windows:
    """Drives the windows of jobs over a network; knows who sends what, and when each is over.

    A window begins with its first sender. Its senders have equal parts of its bytes. It is over
    when the last byte has left the port, and the job computes from then on.

    Parameters
    ----------
    jobs
        In the order of their senders; all flows of the network belong to one.
    workload
        Of every job.
    network
        Its flows have nothing to send yet.
    flows
        Reaction points of the network.

    Attributes
    ----------
    begins_ns, ends_ns
        Of each job's windows so far; an open one has no end yet.
    flow_began_ns
        When each flow began its part of the window, shape (flows,); a time to come: not yet.
    """

    def __init__(
        self, jobs: Sequence[Job], workload: Workload, network: Network, flows: DcqcnFlows
    ) -> None:
        self._jobs, self._workload, self._network, self._flows = jobs, workload, network, flows
        count = flows.rates_Bps.size
        self.begins_ns: list[list[float]] = [[] for _ in jobs]
        self.ends_ns: list[list[float]] = [[] for _ in jobs]
        self.flow_began_ns: FloatArray = np.full(count, np.inf)
        self._job_of: IntArray = np.repeat(np.arange(len(jobs)), [len(j.senders) for j in jobs])
        self._random = [np.random.default_rng(job.seed) for job in jobs]
        self._open = np.zeros(len(jobs), dtype=np.int64)
        self._last_ns: FloatArray = np.zeros(len(jobs))
        self._parts: FloatArray = np.zeros(count)
        self._expected: FloatArray = np.zeros(count)
        phased = [j for j in jobs for _ in j.senders]
        self._phased = np.array([job.changes.phases for job in phased])
        self._mltcp = np.array([job.changes.mltcp for job in phased])
        self._shaped = bool((self._phased | self._mltcp).any())
        self._calendar: dict[int, list[tuple[IntArray, FloatArray, FloatArray]]] = {}
        self._steps = flows.parameters.phase_steps
        network.silence(np.arange(count))
        for number in range(len(jobs)):
            # Not all jobs begin at once: each somewhere in its first compute phase.
            self._plan(number, self._random[number].uniform(0, workload.compute_ns))
        self._shape(np.arange(count))

    def begin(self) -> None:
        """Let the senders begin whose time has come; call it after each step."""
        for flows, predicted, phases in self._calendar.pop(self._network.now_ns, ()):
            self.flow_began_ns[flows] = self._network.now_ns
            known = predicted > 0
            if known.any():
                self._flows.begin_window(flows[known], predicted[known])
            self._network.offer(flows, self._parts[flows], phases)
            self._shape(flows)

    def account(self) -> None:
        """Take what left the senders in the network's last step."""
        network = self._network
        if not self._workload.window_bytes:
            return
        flows = network.sent_flows
        if self._shaped:
            self._shape(flows)
        done = flows[network.unsent_bytes[flows] <= 0]
        if not done.size:
            return
        self.flow_began_ns[done] = np.inf
        jobs = self._job_of[done]
        leaves_ns = network.now_ns + network.delays_ns(jobs)
        np.maximum.at(self._last_ns, jobs, leaves_ns)
        np.subtract.at(self._open, jobs, 1)
        for job in np.unique(jobs):
            if not self._open[job]:
                self._end(int(job))

    def jobs_of(self, port: int) -> list[int]:
        """Positions of the jobs whose senders share a port."""
        return [number for number, job in enumerate(self._jobs) if job.port == port]

    def open_spans(self, number: int, begin_ns: float, end_ns: float) -> FloatArray:
        """Begins and ends of a job's windows within a time, cut to it, shape (n, 2)."""
        begins, ends = self.begins_ns[number], self.ends_ns[number]
        closed = [*ends, np.inf][: len(begins)]
        spans = np.clip(np.stack((begins, closed), axis=1), begin_ns, end_ns)
        result: FloatArray = spans[spans[:, 1] > spans[:, 0]]
        return result

    def lengths_ns(self, number: int, begin_ns: float) -> list[float]:
        """Lengths of a job's completed windows that did not begin before a time."""
        return [
            end - begin
            for begin, end in zip(self.begins_ns[number], self.ends_ns[number], strict=False)
            if begin >= begin_ns
        ]

    def _end(self, number: int) -> None:
        end_ns = float(self._last_ns[number])
        self.ends_ns[number].append(end_ns)
        self._last_ns[number] = 0.0
        workload = self._workload
        factor = max(0.0, 1 + workload.compute_jitter * self._random[number].standard_normal())
        self._plan(number, end_ns + workload.compute_ns * factor)

    def _plan(self, number: int, begin_ns: float) -> None:
        """Write the senders' begins of a job's next window into the calendar."""
        job, workload, random = self._jobs[number], self._workload, self._random[number]
        flows = np.arange(job.senders.start, job.senders.stop)
        step_ns = self._network.step_ns
        late_ns = random.uniform(0, 1, flows.size) * workload.start_jitter_ns
        phases = random.uniform(0, 1, flows.size)
        error = max(-0.9, workload.bytes_error * random.standard_normal())
        ticks = np.ceil((begin_ns + late_ns) / step_ns).astype(np.int64) * step_ns
        # Not in a step that is over.
        ticks = np.maximum(ticks, self._network.now_ns + step_ns)
        predicted = np.zeros(flows.size)
        if workload.window_bytes:
            expected = workload.window_bytes * (1 + error)
            self._parts[flows] = workload.window_bytes / flows.size
            self._expected[flows] = expected / flows.size
            if job.changes.prediction:
                # As the live planner has it: the window lasts as long as its bytes take alone.
                # Its length is as true as can be: an error of the bytes is one of the rate.
                alone_ns = workload.window_bytes / self._network.links.rate_Bps[job.port] * _NS
                predicted[:] = predicted_rate_Bps(
                    expected, 1.0, max(1, round(alone_ns)), flows.size
                )
        else:
            self._parts[flows] = np.inf
        self.begins_ns[number].append(float(ticks.min()))
        self._open[number] = flows.size
        for tick in np.unique(ticks):
            now = ticks == tick
            entry = (flows[now], predicted[now], phases[now])
            self._calendar.setdefault(int(tick), []).append(entry)

    def _shape(self, flows: IntArray) -> None:
        """Set the multipliers of flows by where they stand in their windows."""
        shaped = self._phased[flows] | self._mltcp[flows]
        flows = flows[shaped]
        if not flows.size or not self._workload.window_bytes:
            return
        unsent = self._network.unsent_bytes[flows]
        expected = self._expected[flows]
        # Of a flow that has sent all, the next window: nothing.
        sent = np.where(unsent > 0, self._parts[flows] - unsent, 0.0)
        factors = np.ones(flows.size)
        phased, mltcp = self._phased[flows], self._mltcp[flows]
        factors[phased] = phase_multipliers(self._steps, sent, expected, unsent > 0)[phased]
        factors[mltcp] *= mltcp_multipliers(sent, expected)[mltcp]
        self._flows.multipliers.reshape(-1)[flows] = factors


def phase_multipliers(
    steps: PhaseIncrease,
    sent_bytes: FloatArray,
    expected_bytes: FloatArray,
    in_window: NDArray[np.bool_],
) -> FloatArray:
    """`PhaseIncrease.multiplier` of `PhaseIncrease.phase`, for arrays of shape (n,).

    Parameters
    ----------
    steps
        Multipliers by phase.
    sent_bytes, expected_bytes
        Of each flow's window; the second above 0.
    in_window
        Whether each flow's window is open.
    """
    result: FloatArray = np.full(sent_bytes.shape, steps.middle)
    result[sent_bytes < steps.begin_share * expected_bytes] = steps.begin
    result[sent_bytes >= steps.end_share * expected_bytes] = steps.end
    result[~in_window] = steps.idle
    return result


def mltcp_multipliers(sent_bytes: FloatArray, expected_bytes: FloatArray) -> FloatArray:
    """MLTCP's F of what of each window is sent: 0.25 .. 2, arrays of shape (n,).

    Rajasekaran et al., "MLTCP", HotNets 2024, section 3; there it scales TCP's additive
    increase, here DCQCN's R_AI and R_HAI.
    """
    result: FloatArray = SLOPE * np.clip(sent_bytes / expected_bytes, 0.0, 1.0) + INTERCEPT
    return result
