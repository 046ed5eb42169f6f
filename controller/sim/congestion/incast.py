"""Incast: senders of jobs into one port, many cases side by side, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from controller.congestion.dcqcn import DcqcnParameters
from controller.congestion.flows import DcqcnFlows
from controller.errors import UsageError
from controller.sim.congestion import chance
from controller.sim.congestion.bins import Bins
from controller.sim.congestion.feedback import CnpFeedback
from controller.sim.congestion.links import Link
from controller.sim.congestion.network import Network
from controller.sim.congestion.outcome import IncastOutcome, Measured
from controller.sim.congestion.windows import Changes, Job, Windows, Workload
from controller.sim.progress import Progress

__all__ = [
    "Changes",
    "IncastCase",
    "IncastConditions",
    "IncastOutcome",
    "Workload",
    "simulate_incast",
]

MAX_SENDERS = 4096
# Progress is told each so many steps.
_TOLD_STEPS = 500


@dataclass(frozen=True)
class IncastCase:
    """One port and who sends to it.

    Attributes
    ----------
    senders
        Incast degree, from 1.
    jobs
        That they belong to, in equal parts; at most as many as senders.
    seed
        Of marks, compute times and starts.
    changes
        To plain DCQCN.
    """

    senders: int
    jobs: int = 1
    seed: int = 0
    changes: Changes = field(default_factory=Changes)

    def __post_init__(self) -> None:
        if not 1 <= self.senders <= MAX_SENDERS:
            raise UsageError(f"An incast of {self.senders} senders; allowed: 1 .. {MAX_SENDERS}.")
        if not 1 <= self.jobs <= self.senders:
            raise UsageError(f"{self.jobs} jobs of {self.senders} senders; allowed: 1 .. senders.")
        if self.seed < 0:
            raise UsageError(f"A seed of {self.seed}; allowed: from 0.")


@dataclass(frozen=True)
class IncastConditions:
    """What holds for all cases of a run.

    Attributes
    ----------
    parameters
        DCQCN's constants, at the senders' link rate.
    port
        The congested link; `window` and `drain_share` are set by each case's changes.
    workload
        Of the jobs.
    duration_ns, warmup_ns
        Simulated time, and the part of it in the beginning that is not measured.
    feedback_ns
        From a mark to the reaction to it.
    echo_holds
        See `controller.sim.congestion.feedback.CnpFeedback`.
    step_ns
        Of the simulation.
    packet_bytes
        On the wire.
    bin_ns, sample_ns
        Bins of throughput; time between two looks at the queue.
    """

    parameters: DcqcnParameters
    port: Link
    workload: Workload
    duration_ns: int = 200_000_000
    warmup_ns: int = 20_000_000
    feedback_ns: int = 10_000
    step_ns: int = 1_000
    packet_bytes: int = 4_200
    bin_ns: int = 1_000_000
    sample_ns: int = 10_000
    echo_holds: bool = True

    def __post_init__(self) -> None:
        for key in ("bin_ns", "sample_ns"):
            value = getattr(self, key)
            if value < self.step_ns or value % self.step_ns:
                raise UsageError(f"{key} is {value} ns; allowed: whole steps of {self.step_ns}.")
        if (
            self.warmup_ns % self.bin_ns
            or self.duration_ns % self.bin_ns
            or self.duration_ns - self.warmup_ns < 2 * self.bin_ns
        ):
            raise UsageError(
                f"{self.duration_ns} ns with a warm-up of {self.warmup_ns}; allowed: whole bins of "
                f"{self.bin_ns} ns, and two more at least than the warm-up has."
            )


def simulate_incast(
    cases: Sequence[IncastCase],
    conditions: IncastConditions,
    progress: Progress | None = None,
) -> list[IncastOutcome]:
    """Simulate all cases side by side; each comes out as it would alone.

    Parameters
    ----------
    cases
        At least one.
    conditions
        The same for all.
    progress
        Told (steps done, steps) now and then.

    Returns
    -------
    list of IncastOutcome
        In the order of the cases.
    """
    if not cases:
        raise UsageError("There is no case to simulate; allowed: one or more.")
    return _Run(cases, conditions).outcomes(progress)


def _parts(total: int, count: int) -> list[int]:
    """`total` in `count` parts that differ by one at most."""
    return [total // count + (number < total % count) for number in range(count)]


class _Run:
    """The arrays of one run, and its loop."""

    def __init__(self, cases: Sequence[IncastCase], conditions: IncastConditions) -> None:
        self.cases, self.conditions = cases, conditions
        self.jobs: list[Job] = []
        begin = 0
        for port, case in enumerate(cases):
            for number, senders in enumerate(_parts(case.senders, case.jobs)):
                part = range(begin, begin + senders)
                self.jobs.append(Job(part, port, (case.seed, number), case.changes))
                begin += senders
        self.flows = DcqcnFlows(conditions.parameters, begin)
        keys = np.concatenate([chance.keys(case.seed, case.senders) for case in cases])
        self.feedback = CnpFeedback(
            self.flows, keys, conditions.feedback_ns, conditions.step_ns, conditions.echo_holds
        )
        self.network = Network(
            self.feedback,
            [
                replace(
                    conditions.port,
                    window=case.changes.window_marks,
                    drain_share=case.changes.drain_share,
                )
                for case in cases
            ],
            np.array([job.port for job in self.jobs]),
            np.repeat(np.arange(len(self.jobs)), [len(job.senders) for job in self.jobs]),
            step_ns=conditions.step_ns,
            packet_bytes=conditions.packet_bytes,
        )
        self.windows = Windows(self.jobs, conditions.workload, self.network, self.flows)
        self.flow_port = np.repeat(np.arange(len(cases)), [case.senders for case in cases])

    def outcomes(self, progress: Progress | None) -> list[IncastOutcome]:
        conditions, windows = self.conditions, self.windows
        steps = conditions.duration_ns // conditions.step_ns
        warm = conditions.warmup_ns // conditions.step_ns
        bins, before = None, (self.flows.cuts, self.feedback.notifications)
        for step in range(steps):
            if step == warm:
                bins = Bins(self.network, self.flow_port, conditions.bin_ns, conditions.sample_ns)
                before = (self.flows.cuts.copy(), self.feedback.notifications.copy())
            self.network.step()
            windows.account()
            if bins:
                bins.account(windows.flow_began_ns)
            windows.begin()
            if progress and step % _TOLD_STEPS == 0:
                progress(step, steps)
        assert bins is not None  # `IncastConditions` sees to it that there is something to measure
        kept = Measured(
            bins,
            windows,
            conditions.warmup_ns,
            conditions.duration_ns,
            np.bincount(self.flow_port, self.flows.cuts - before[0]).astype(float),
            np.bincount(self.flow_port, self.feedback.notifications - before[1]).astype(float),
        )
        ends = np.cumsum([case.senders for case in self.cases]).tolist()
        return [
            kept.outcome(port, slice(end - case.senders, end), conditions.port.rate_Bps)
            for port, (case, end) in enumerate(zip(self.cases, ends, strict=True))
        ]
