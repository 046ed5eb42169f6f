"""Jobs: what each may do, plans and reports of its iterations, and which job a flow is of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from controller.errors import UsageError
from controller.priority.classes import CLASSES
from controller.priority.ranges import (
    MAX_BYTES,
    MAX_TIME_ns,
    MIN_RATE_Bps,
    check_integer,
    check_rate_or_none,
    check_share,
    check_slowdown,
)
from controller.priority.rules import (
    DEFAULT_ENV_VARIABLE,
    FlowFacts,
    JobMatch,
    ProcessFacts,
)
from controller.units import format_rate

__all__ = [
    "DEFAULT_ENV_VARIABLE",
    "FlowFacts",
    "Job",
    "JobMatch",
    "JobPlan",
    "JobReport",
    "ProcessFacts",
    "check_jobs",
    "check_name",
    "check_rate",
    "match_job",
    "needs_process",
]

# The dataplane's table of jobs, without the slot that means "none" (STELLAR_MAX_JOBS).
MAX_JOBS = 255
DEFAULT_CLASS = 3
# The top class is for ACK, NAK and CNP; a job gets there only when its ceiling says so.
DEFAULT_CEILING = CLASSES - 2

# 31 characters and a zero fit the name that the dataplane keeps. None of them means anything
# to fnmatch, so a name is a pattern for itself.
_NAME = re.compile(r"[A-Za-z0-9._-]{1,31}", re.ASCII)

MAX_RANKS = 1 << 20
MAX_GPUS = 1 << 20
MAX_COMMUNICATOR_CHARACTERS = 64
REPORT_PHASES = ("idle", "begin", "progress", "end")


@dataclass(frozen=True)
class Job:
    """One training run on this host: its flows, its default class and its limits.

    Parameters
    ----------
    name
        1 .. 31 of ``A-Za-z0-9._-``.
    match
        Its flows. Without any criterion: those of processes whose environment names it.
    traffic_class
        Class without a plan in force.
    class_floor, class_ceiling
        Lowest and highest class that a plan may give it.
    set_ect
        Make its packets ECN-capable, so that they can be marked.
    rate_Bps
        Pacing of the sum of its flows on one interface; 0: none.
    dcqcn
        Whether DCQCN governs its flows; None: as the configuration says for all.
    gap_ns
        A silence this long ends an iteration; 0: by the link's rate.
    max_slowdown
        Bound for its iteration time as a multiple of the undisturbed one, from 1; 0: as for all.
    gpus
        That it trains on: policies that weigh jobs by their computation count them.

    Raises
    ------
    UsageError
        A value is impossible.
    """

    name: str
    match: JobMatch = field(default_factory=JobMatch)
    traffic_class: int = DEFAULT_CLASS
    class_floor: int = 0
    class_ceiling: int = DEFAULT_CEILING
    set_ect: bool = False
    rate_Bps: int = 0
    dcqcn: bool | None = None
    gap_ns: int = 0
    max_slowdown: float = 0.0
    gpus: int = 1

    def __post_init__(self) -> None:
        check_name(self.name)
        where = f"Job {self.name}:"
        if not isinstance(self.set_ect, bool):
            raise UsageError(f"{where} set_ect is {self.set_ect!r}; allowed: true, false.")
        if self.dcqcn is not None and not isinstance(self.dcqcn, bool):
            raise UsageError(f"{where} dcqcn is {self.dcqcn!r}; allowed: true, false.")
        check_integer(f"{where} class", self.traffic_class, 0, CLASSES - 1)
        _check_range(where, self.class_floor, self.class_ceiling)
        if not self.class_floor <= self.traffic_class <= self.class_ceiling:
            raise UsageError(
                f"{where} class is {self.traffic_class}; allowed: {self.class_floor} .. "
                f"{self.class_ceiling} (class_floor .. class_ceiling)."
            )
        check_rate_or_none(f"{where} rate", self.rate_Bps)
        check_integer(f"{where} gap_ns", self.gap_ns, 0, MAX_TIME_ns)
        if self.max_slowdown != 0:
            check_slowdown(f"{where} max_slowdown", self.max_slowdown)
        check_integer(f"{where} gpus", self.gpus, 1, MAX_GPUS)

    def to_json(self) -> dict[str, Any]:
        """Members by name."""
        result = {member.name: getattr(self, member.name) for member in fields(self)}
        return result | {"match": self.match.to_json()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Job:
        """From `to_json`; a wrong member raises UsageError or TypeError."""
        return cls(**{**document, "match": JobMatch.from_json(document.get("match", {}))})


@dataclass(frozen=True)
class JobPlan:
    """What an agent expects of a job's current iteration. Times are CLOCK_MONOTONIC.

    Parameters
    ----------
    job
        Name of the job.
    expected_bytes
        Payload that this host's flows of the job send in the sync window, before compression.
    window_start_ns, deadline_ns
        When the window begins, and when its bytes have to be there.
    valid_until_ns
        From then on the plan means nothing: default class, no pacing.
    rate_Bps
        Rate that the job's flows can expect; 0: not known.
    gap_ns
        A longer silence begins a new iteration; 0: as without a plan.
    class_floor, class_ceiling
        Limits of the class during this iteration.
    compression_ratio
        Bytes on the wire for each expected byte, above 0 .. 1.
    pace
        Whether the flows are held to ``rate_Bps``.

    Raises
    ------
    UsageError
        A number is impossible.
    """

    job: str
    expected_bytes: int
    window_start_ns: int
    deadline_ns: int
    valid_until_ns: int
    rate_Bps: int
    gap_ns: int
    class_floor: int = 0
    class_ceiling: int = DEFAULT_CEILING
    compression_ratio: float = 1.0
    pace: bool = False

    def __post_init__(self) -> None:
        check_name(self.job)
        where = f"Plan of job {self.job}:"
        check_integer(f"{where} expected_bytes", self.expected_bytes, 1, MAX_BYTES)
        check_integer(f"{where} window_start_ns", self.window_start_ns, 0, MAX_TIME_ns)
        for name in ("deadline_ns", "valid_until_ns"):
            value = getattr(self, name)
            check_integer(f"{where} {name}", value, 0, MAX_TIME_ns)
            if value <= self.window_start_ns:
                raise UsageError(
                    f"{where} {name} is {value}, not after window_start_ns "
                    f"{self.window_start_ns}; allowed: a later time."
                )
        check_rate_or_none(f"{where} rate", self.rate_Bps)
        check_integer(f"{where} gap_ns", self.gap_ns, 0, MAX_TIME_ns)
        _check_range(where, self.class_floor, self.class_ceiling)
        check_share(f"{where} compression_ratio", self.compression_ratio, zero=False)
        if not isinstance(self.pace, bool):
            raise UsageError(f"{where} pace is {self.pace!r}; allowed: true, false.")
        if self.pace and not self.rate_Bps:
            raise UsageError(
                f"{where} pace is set and the rate is 0; allowed: a rate above 0, or no pacing."
            )

    @property
    def wire_bytes(self) -> int:
        """Expected payload on the wire, after compression; at least 1."""
        return max(1, round(self.expected_bytes * self.compression_ratio))

    def in_force(self, now_ns: int) -> bool:
        """Whether the plan still means something."""
        return now_ns < self.valid_until_ns

    def to_json(self) -> dict[str, Any]:
        """Members by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> JobPlan:
        """From `to_json`; a wrong member raises UsageError or TypeError."""
        return cls(**document)


@dataclass(frozen=True)
class JobReport:
    """What one rank says of the collective operations that it runs.

    Parameters
    ----------
    job
        Name of its job.
    rank, size
        Its place in the communicator.
    communicator
        What tells two communicators of one process apart.
    iteration
        Training iteration, by the rank's own count.
    phase
        ``begin`` or ``end``: an operation began, or the last one that ran is over, since the
        report before; ``progress``: some run; ``idle``: none does.
    expected_bytes, sent_bytes
        Payload on the wire of the operations that run; when none does, of the last one.
    iteration_bytes
        Payload that was sent in this iteration, of operations that are over as well.
    compression_ratio
        Bytes on the wire for each byte before compression, above 0 .. 1.

    Raises
    ------
    UsageError
        A value is impossible.
    """

    job: str
    rank: int
    size: int
    communicator: str
    iteration: int
    phase: str
    expected_bytes: int
    sent_bytes: int
    iteration_bytes: int
    compression_ratio: float

    def __post_init__(self) -> None:
        check_name(self.job)
        where = f"Report of job {self.job}:"
        check_integer(f"{where} size", self.size, 1, MAX_RANKS)
        check_integer(f"{where} rank", self.rank, 0, self.size - 1)
        name = self.communicator
        if (
            not isinstance(name, str)
            or len(name) > MAX_COMMUNICATOR_CHARACTERS
            or not (name.isascii() and name.isprintable())
        ):
            raise UsageError(
                f"{where} communicator is {name!r:.100}; allowed: up to "
                f"{MAX_COMMUNICATOR_CHARACTERS} printable ASCII characters."
            )
        check_integer(f"{where} iteration", self.iteration, 0, MAX_TIME_ns)
        if self.phase not in REPORT_PHASES:
            raise UsageError(
                f"{where} phase is {self.phase!r:.100}; allowed: {', '.join(REPORT_PHASES)}."
            )
        for member in ("expected_bytes", "sent_bytes", "iteration_bytes"):
            check_integer(f"{where} {member}", getattr(self, member), 0, MAX_BYTES)
        check_share(f"{where} compression_ratio", self.compression_ratio, zero=False)

    def to_json(self) -> dict[str, Any]:
        """Members by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> JobReport:
        """From `to_json`; a wrong member raises UsageError or TypeError."""
        return cls(**document)


def check_name(name: object) -> None:
    """Raise UsageError unless `name` can be a job's."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"Job name is {name!r}; allowed: 1 .. 31 letters, digits, dots, dashes, underscores."
        )


def check_jobs(jobs: Iterable[Job]) -> None:
    """Raise UsageError when two jobs have one name, or there are more than MAX_JOBS."""
    names: set[str] = set()
    for job in jobs:
        if len(names) == MAX_JOBS:
            raise UsageError(f"There are more than {MAX_JOBS} jobs; allowed: up to {MAX_JOBS}.")
        if job.name in names:
            raise UsageError(f"Job {job.name} stands twice; allowed: each name once.")
        names.add(job.name)


def check_rate(what: str, rate_Bps: int, link_Bps: int) -> None:
    """Raise UsageError unless a link can carry the rate."""
    if not MIN_RATE_Bps <= rate_Bps <= link_Bps:
        raise UsageError(
            f"{what} is {format_rate(rate_Bps)}; allowed: {format_rate(MIN_RATE_Bps)} .. "
            f"{format_rate(link_Bps)}, the link's rate."
        )


def needs_process(job: Job) -> bool:
    """Whether the job's rule cannot be decided without facts about a process."""
    return _rule(job).needs_process()


def match_job(
    jobs: Iterable[Job], facts: FlowFacts, env_variable: str = DEFAULT_ENV_VARIABLE
) -> Job | None:
    """The first job, in order, whose rule the flow fulfils.

    Parameters
    ----------
    jobs
        In the order of the configuration.
    facts
        The flow.
    env_variable
        Variable of a job without criteria, and of an ``env`` criterion without a name.
    """
    return next((job for job in jobs if _rule(job).matches(facts, env_variable)), None)


def _rule(job: Job) -> JobMatch:
    """Return the job's criteria; without any, its name in the environment is the one."""
    return job.match if job.match != JobMatch() else JobMatch(env=(job.name,))


def _check_range(where: str, floor: int, ceiling: int) -> None:
    check_integer(f"{where} class_floor", floor, 0, CLASSES - 1)
    check_integer(f"{where} class_ceiling", ceiling, 0, CLASSES - 1)
    if floor > ceiling:
        raise UsageError(
            f"{where} class_floor {floor} is above class_ceiling {ceiling}; allowed: a floor up "
            "to the ceiling."
        )


def describe_match(job: Job, env_variable: str) -> str:
    """A job's rule in one line."""
    criteria = job.match.to_json()
    if not criteria:
        return f"env {env_variable}={job.name}"
    return ", ".join(
        f"{name} {' | '.join(str(value) for value in values)}" for name, values in criteria.items()
    )
