"""What the ranks on this host report of their jobs, and the class that a report is answered with.

A report is of one connection to the control socket: it is there as long as the connection is,
so a process that ends, however it ends, leaves none behind.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from controller.errors import ConflictError, StellarError
from controller.priority import laxity
from controller.priority.jobs import Job, JobPlan, JobReport

if TYPE_CHECKING:
    from controller.agent.agent import Agent

# A host has a few ranks; each takes a thread of the control socket.
MAX_REPORTERS = 1024
# Reporters say at least once a second that they are there.
REPORT_SILENCE_S = 5.0
MAX_REPORT_BYTES = 4096


@dataclass
class Reporter:
    """One connection that reports: the process, its newest report and what it was answered.

    ``pid`` is the kernel's word, as seen from the controller's namespace; 0: not visible there.
    """

    pid: int
    report: JobReport | None = None
    class_number: int | None = None
    heard_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Its report, who sent it and how long ago."""
        assert self.report is not None
        return (
            {"pid": self.pid or None}
            | self.report.to_json()
            | {
                "class": self.class_number,
                "heard_ms_ago": round((time.monotonic() - self.heard_s) * 1000, 3),
            }
        )


class JobReports:
    """All that report at present; the caller keeps its threads apart."""

    def __init__(self) -> None:
        self._reporters: list[Reporter] = []

    def open(self, pid: int) -> Reporter:
        """A connection begins to report.

        Raises
        ------
        ConflictError
            There are too many.
        """
        if len(self._reporters) >= MAX_REPORTERS:
            raise ConflictError(
                f"{MAX_REPORTERS} processes report to this controller, the most that it takes.",
                "End some; `controller job list --json` names them.",
            )
        reporter = Reporter(pid)
        self._reporters.append(reporter)
        return reporter

    def close(self, reporter: Reporter) -> None:
        """Forget a connection and what it reported."""
        self._reporters = [entry for entry in self._reporters if entry is not reporter]

    def of_job(self, name: str) -> list[Reporter]:
        """Those that report a job, by rank."""
        found = [entry for entry in self._reporters if entry.report and entry.report.job == name]
        return sorted(found, key=lambda entry: entry.report.rank if entry.report else 0)

    def strangers(self, known: Collection[str]) -> list[str]:
        """Names of jobs that are reported and not in `known`, in order."""
        return sorted({entry.report.job for entry in self._reporters if entry.report} - set(known))

    def iteration_bytes(self, name: str) -> int:
        """Payload that all ranks here have sent in the iteration each of them is in."""
        return sum(entry.report.iteration_bytes for entry in self.of_job(name) if entry.report)

    def is_open(self, name: str) -> bool:
        """Whether an operation of any rank here runs."""
        running = ("begin", "progress")
        return any(e.report is not None and e.report.phase in running for e in self.of_job(name))

    def iteration(self, name: str) -> int:
        """The latest training iteration that a rank here is in; 0: nobody reports."""
        return max((e.report.iteration for e in self.of_job(name) if e.report), default=0)

    def expected_bytes(self, name: str) -> int:
        """Payload of the iteration that the ranks here know of: sent, and of what runs."""
        return sum(
            entry.report.iteration_bytes
            + max(0, entry.report.expected_bytes - entry.report.sent_bytes)
            for entry in self.of_job(name)
            if entry.report
        )

    def compression_ratio(self, name: str) -> float | None:
        """Bytes on the wire for each byte before compression, of all ranks here; None: unknown."""
        return mean_ratio([entry.report for entry in self.of_job(name) if entry.report])


def mean_ratio(reports: Sequence[JobReport]) -> float | None:
    """Ratio of the sums of what goes on the wire and of what that was before compression.

    None when nothing is expected: an operation without bytes has no ratio.
    """
    wire = sum(report.expected_bytes for report in reports)
    before = sum(report.expected_bytes / report.compression_ratio for report in reports)
    return min(1.0, wire / before) if wire else None


def class_now(
    job: Job,
    plan: JobPlan | None,
    now_ns: int,
    bytes_done: int,
    current_class: int | None,
    thresholds_ns: Sequence[int] = laxity.DEFAULT_THRESHOLDS_ns,
    hysteresis: float = laxity.DEFAULT_HYSTERESIS,
) -> int:
    """The class that the dataplane would give a message of the job that begins now.

    Parameters
    ----------
    job
        With its default class and limits.
    plan
        The last one; None, or past ``valid_until_ns``: the default class.
    now_ns
        CLOCK_MONOTONIC.
    bytes_done
        Payload sent in this iteration, after compression.
    current_class
        What was answered before; None: nothing yet.
    thresholds_ns, hysteresis
        As `laxity.class_of` has them.
    """
    if plan is None or not plan.in_force(now_ns):
        return job.traffic_class
    number = laxity.class_of(
        laxity.laxity_ns(plan, now_ns, bytes_done),
        thresholds_ns,
        current_class or 0,
        hysteresis,
        plan.class_floor,
        plan.class_ceiling,
    )
    # The job may have been changed since the plan was narrowed to it.
    return min(max(number, job.class_floor), job.class_ceiling)


class ReportTalk:
    """What one rank reports, as long as its connection lasts.

    Raises
    ------
    ConflictError
        Too many report.
    """

    def __init__(self, agent: Agent, reports: JobReports, pid: int) -> None:
        self._agent = agent
        self._reports = reports
        with agent.guard:
            self._reporter: Reporter = reports.open(pid)

    def answer(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Keep a report; the class that the job's next message gets, null for an unknown job."""
        report = JobReport.from_json(arguments)
        agent, reporter = self._agent, self._reporter
        with agent.guard:
            is_new = reporter.report is None or reporter.report.job != report.job
            reporter.report, reporter.heard_s = report, time.monotonic()
            state = agent.steering.jobs.get(report.job)
            if state is None:
                reporter.class_number = None
                if is_new:
                    agent.note(
                        f"job {report.job} is reported by pid {reporter.pid or 'unknown'}, and "
                        "there is no such job: controller job set, or [[job]]"
                    )
                return {
                    "class": None,
                    "traffic_class": None,
                    "plan_valid_until_ns": None,
                    "packets_seen": False,
                }
            if ratio := self._reports.compression_ratio(report.job):
                agent.steering.report_ratio(report.job, ratio)
            self._tell_planner(report.job)
            number = agent.steering.class_now(
                report.job, self._reports.iteration_bytes(report.job), reporter.class_number
            )
            reporter.class_number = number
            plan = state.plan
            holds = plan is not None and plan.in_force(time.monotonic_ns())
            return {
                "class": number,
                # The ECN bits are the NIC's own.
                "traffic_class": agent.steering.classes[number].dscp << 2,
                "plan_valid_until_ns": plan.valid_until_ns if plan and holds else None,
                # Then the rank need not tell how far it is.
                "packets_seen": state.was_matched,
            }

    def _tell_planner(self, job: str) -> None:
        reports = self._reports
        self._agent.planner.reported(
            job,
            reports.is_open(job),
            reports.expected_bytes(job),
            reports.iteration_bytes(job),
            reports.iteration(job),
        )

    def close(self) -> None:
        """Forget what was reported; a rank that died in an operation does not hold it open."""
        with self._agent.guard:
            self._reports.close(self._reporter)
            report = self._reporter.report
            if report is not None:
                with contextlib.suppress(StellarError):  # the controller is stopping
                    self._tell_planner(report.job)
