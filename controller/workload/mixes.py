"""Which jobs share the network: the built-in mixes, and mixes of a TOML file."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.config_reader import Section, read_document, told_with
from controller.errors import UsageError
from controller.priority.classes import CLASSES
from controller.priority.jobs import check_name
from controller.priority.policy import DEFAULT_MAX_SLOWDOWN
from controller.priority.ranges import MAX_SLOWDOWN, check_integer, check_slowdown
from controller.sim.models import MODELS, find_model

MAX_JOBS = 8
DEFAULT_JITTER = 0.2
# With all of the compute time to lose there would be no silence that ends an iteration.
MAX_JITTER = 0.9
RANDOM, TOGETHER = STARTS = ("random", "together")
_MS = 1_000_000
# A window of a few packets would measure the machine, an hour the patience.
MIN_PERIOD_ns, MAX_PERIOD_ns = 20 * _MS, 3_600_000 * _MS
# One below the top of what a job may have (6), downwards: what a person would give by hand.
_FIRST_STATIC_CLASS = 5
GOLDEN_RATIO = 1.618


@dataclass(frozen=True)
class MixJob:
    """One job of a mix.

    Parameters
    ----------
    name
        As in ``[[job]]``.
    model
        Whose gradient it has; see models.py.
    period_ns
        An undisturbed iteration without jitter: compute, then communication.
    share
        What of that is communication, above 0 and below 1.
    traffic_class
        Class of the policy ``static``.
    max_slowdown
        Bound for its iteration time, for policies that know one.

    Raises
    ------
    UsageError
        A value is impossible.
    """

    name: str
    model: str
    period_ns: int
    share: float
    traffic_class: int
    max_slowdown: float = DEFAULT_MAX_SLOWDOWN

    def __post_init__(self) -> None:
        check_name(self.name)
        find_model(self.model)
        check_integer(
            f"Job {self.name}: period in ns", self.period_ns, MIN_PERIOD_ns, MAX_PERIOD_ns
        )
        if not 0 < self.share < 1:
            raise UsageError(
                f"Job {self.name}: share is {self.share}; allowed: above 0 and below 1."
            )
        check_integer(f"Job {self.name}: class", self.traffic_class, 0, CLASSES - 2)
        check_slowdown(f"Job {self.name}: max_slowdown", self.max_slowdown)

    @property
    def compute_ns(self) -> int:
        """Compute of an iteration on average."""
        return round(self.period_ns * (1 - self.share))

    @property
    def window_ns(self) -> int:
        """Its sync window when nobody else sends."""
        return self.period_ns - self.compute_ns


@dataclass(frozen=True)
class Mix:
    """Jobs that share every host's link.

    Parameters
    ----------
    name
        In reports.
    jobs
        One or more, each name once.
    jitter
        Compute of an iteration is the mean times a number drawn evenly from 1 - jitter ..
        1 + jitter, 0 .. `MAX_JITTER`.
    start
        "random": each job begins at a moment of its own, drawn anew in each round; "together":
        all begin at one moment, as after a failure or a pause of all.

    Raises
    ------
    UsageError
        A value is impossible.
    """

    name: str
    jobs: tuple[MixJob, ...]
    jitter: float = DEFAULT_JITTER
    start: str = RANDOM

    def __post_init__(self) -> None:
        if not 1 <= len(self.jobs) <= MAX_JOBS:
            raise UsageError(
                f"Mix {self.name} has {len(self.jobs)} jobs; allowed: 1 .. {MAX_JOBS}."
            )
        names = [job.name for job in self.jobs]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"Mix {self.name} has two jobs {name}; allowed: each once.")
        if not 0 <= self.jitter <= MAX_JITTER:
            raise UsageError(
                f"Mix {self.name}: jitter is {self.jitter}; allowed: 0 .. {MAX_JITTER:g}."
            )
        if self.start not in STARTS:
            raise UsageError(
                f"Mix {self.name}: start is {self.start!r}; allowed: {', '.join(STARTS)}."
            )

    @property
    def longest_ns(self) -> int:
        """The longest period."""
        return max(job.period_ns for job in self.jobs)

    @property
    def load(self) -> float:
        """Sum of the shares: what of the link they ask for when none is delayed."""
        return sum(job.share for job in self.jobs)

    def to_json(self) -> dict[str, Any]:
        """For reports; times in ms."""
        return {
            "name": self.name,
            "jitter": self.jitter,
            "start": self.start,
            "load": round(self.load, 4),
            "jobs": [
                {
                    "name": job.name,
                    "model": job.model,
                    "period_ms": job.period_ns / _MS,
                    "share": job.share,
                    "class": job.traffic_class,
                    "max_slowdown": job.max_slowdown,
                }
                for job in self.jobs
            ],
        }


def find_mix(text: str) -> Mix:
    """A built-in mix by its name, or that of a file.

    Raises
    ------
    UsageError
        Neither; or the file has a wrong key or value.
    """
    if text in MIXES:
        return MIXES[text]
    # What is neither is looked for last: exists() fails on a name that is too long for a file.
    with contextlib.suppress(OSError, ValueError):
        if "/" in text or text.endswith(".toml") or Path(text).exists():
            return load_mix(Path(text))
    raise UsageError(
        f"Mix {text[:80]!r} is unknown; allowed: {', '.join(MIXES)}, or a TOML file.",
        "controller bench priority --list shows the built-in ones.",
    )


def load_mix(path: Path) -> Mix:
    """Read a mix from TOML.

    A table ``[mix]`` (``name``, ``jitter``, ``start``) and one ``[[job]]`` each (``name``,
    ``model``, ``period``, ``share``, ``class``, ``max_slowdown``); only the jobs' names and
    periods are needed.

    Raises
    ------
    UsageError
        The file cannot be read, is no TOML, or has a wrong key or value.
    """
    document = read_document(path, ("mix", "job"))
    section = Section(path, "mix", document.get("mix", {}))
    name = section.text("name", path.stem)
    jitter = section.number("jitter", DEFAULT_JITTER, 0, MAX_JITTER)
    start = section.text("start", RANDOM, STARTS)
    section.finish()
    entries = document.get("job", [])
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{path}: key job is missing; allowed: [[job]] entries.")
    jobs = tuple(_read_job(path, number, entry) for number, entry in enumerate(entries))
    with told_with(f"{path}"):
        return Mix(name, jobs, jitter, start)


def _read_job(path: Path, number: int, entry: Any) -> MixJob:
    section = Section(path, f"job[{number + 1}]", entry)
    section.require("name", "a name")
    section.require("period", "a duration, as in 500ms")
    model = section.text("model", "resnet50", tuple(MODELS))
    values: dict[str, Any] = {
        "name": section.text("name", ""),
        "model": model,
        "period_ns": section.duration("period", 0, MIN_PERIOD_ns, MAX_PERIOD_ns),
        "share": section.share("share", find_model(model).share, above=True),
        "traffic_class": section.integer("class", _static_class(number), 0, CLASSES - 2),
        "max_slowdown": section.number("max_slowdown", DEFAULT_MAX_SLOWDOWN, 1, MAX_SLOWDOWN),
    }
    section.finish()
    with told_with(section.label):
        return MixJob(**values)


def _static_class(number: int) -> int:
    return max(0, _FIRST_STATIC_CLASS - number)


def _mix(
    name: str,
    *jobs: tuple[str, float, float],
    jitter: float = DEFAULT_JITTER,
    start: str = RANDOM,
) -> Mix:
    """A mix of (model, period in ms, share) by position; jobs are named after their model."""
    named = []
    for number, (model, period_ms, share) in enumerate(jobs):
        job = model if [entry[0] for entry in jobs].count(model) == 1 else f"{model}-{number + 1}"
        named.append(MixJob(job, model, round(period_ms * _MS), share, _static_class(number)))
    return Mix(name, tuple(named), jitter, start)


_SLOW_ms = 500.0
_FAST_ms = _SLOW_ms * 2 / 3
_GOLDEN_ms = _SLOW_ms / GOLDEN_RATIO
_RESNET, _BERT = find_model("resnet50").share, find_model("bert-large").share
# With the shares of the models alone, three jobs would ask for more than the link has.
_THIRD = 0.25
# Compute time of GPUs that do nothing else: published traces vary by 0.3 to 2.3 % (PyTorch
# profiler traces of HolisticTraceAnalysis; StragglerAnalysis).
_STEADY = 0.02
# Periods equal, in the ratio 2:3, and incommensurate, with a fifth of jitter; then jobs that
# keep time and collide in each iteration unless somebody orders them.
MIXES = {
    mix.name: mix
    for mix in (
        _mix("two-equal", ("resnet50", _SLOW_ms, _RESNET), ("bert-large", _SLOW_ms, _BERT)),
        _mix("two-2-3", ("resnet50", _FAST_ms, _RESNET), ("bert-large", _SLOW_ms, _BERT)),
        _mix("two-golden", ("resnet50", _GOLDEN_ms, _RESNET), ("bert-large", _SLOW_ms, _BERT)),
        _mix(
            "three-equal",
            ("resnet50", _SLOW_ms, _RESNET),
            ("bert-large", _SLOW_ms, _BERT),
            ("resnet50", _SLOW_ms, _THIRD),
        ),
        _mix(
            "three-2-3",
            ("resnet50", _FAST_ms, _RESNET),
            ("bert-large", _SLOW_ms, _BERT),
            ("resnet50", _FAST_ms, _THIRD),
        ),
        _mix(
            "three-golden",
            ("resnet50", _GOLDEN_ms, _RESNET),
            ("bert-large", _SLOW_ms, _BERT),
            ("resnet50", _SLOW_ms / math.sqrt(GOLDEN_RATIO), _THIRD),
        ),
        _mix(
            "two-steady",
            ("resnet50", _SLOW_ms, _RESNET),
            ("bert-large", _SLOW_ms, _RESNET),
            jitter=_STEADY,
            start=TOGETHER,
        ),
        _mix(
            "three-steady",
            ("resnet50", _SLOW_ms, _BERT),
            ("bert-large", _SLOW_ms, _BERT),
            ("resnet50", _SLOW_ms, _BERT),
            jitter=_STEADY,
            start=TOGETHER,
        ),
    )
}
