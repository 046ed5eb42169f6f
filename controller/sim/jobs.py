"""Simulated training jobs: what one is, its compute times, and what an iteration leaves behind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from controller.errors import UsageError
from controller.priority.jobs import DEFAULT_CEILING, DEFAULT_CLASS
from controller.priority.policy import DEFAULT_MAX_SLOWDOWN
from controller.priority.ranges import check_slowdown
from controller.sim.measures import Iteration
from controller.sim.streams import stream

__all__ = ["AnyJob", "Iteration", "SimJob", "StarvedError", "check_from_zero", "names_differ"]


class StarvedError(UsageError):
    """A job never gets through."""

    @classmethod
    def of(cls, job: str) -> StarvedError:
        """The error that names a job."""
        return cls(
            f"The simulation does not come to an end: job {job} does not get through.",
            "Give classes a floor, or let the jobs above it compute.",
        )


@dataclass(frozen=True)
class AnyJob:
    """What jobs on one link and on a cluster have in common.

    Parameters
    ----------
    name
        Of the job; its random stream depends on it and the seed only, so that every policy
        meets the same compute times.
    jitter
        Compute times of an iteration are the means times a number drawn evenly from
        ``1 - jitter .. 1 + jitter``; 0 .. 1.
    traffic_class, class_floor, class_ceiling, max_slowdown
        As in `controller.priority.policy.JobView`.

    Raises
    ------
    UsageError
        A value is impossible.
    """

    name: str
    _: KW_ONLY
    jitter: float = 0.0
    traffic_class: int = DEFAULT_CLASS
    class_floor: int = 0
    class_ceiling: int = DEFAULT_CEILING
    max_slowdown: float = DEFAULT_MAX_SLOWDOWN

    def __post_init__(self) -> None:
        where = self._where
        if not 0 <= self.jitter <= 1:
            raise UsageError(f"{where} jitter is {self.jitter!r}; allowed: 0 .. 1.")
        check_slowdown(f"{where} max_slowdown", self.max_slowdown)
        if not self.class_floor <= self.traffic_class <= self.class_ceiling:
            raise UsageError(
                f"{where} class is {self.traffic_class}; allowed: {self.class_floor} .. "
                f"{self.class_ceiling} (class_floor .. class_ceiling)."
            )

    @property
    def _where(self) -> str:
        """How errors begin."""
        return f"Job {self.name}:"

    def compute_factors(self, count: int, seed: int) -> list[float]:
        """Of the first `count` iterations; a longer list begins with a shorter."""
        drawn = stream(seed, self.name).uniform(-1, 1, count)
        return [float(value) for value in 1 + self.jitter * drawn]


@dataclass(frozen=True)
class SimJob(AnyJob):
    """A loop of computation, then a sync window.

    Parameters
    ----------
    name, jitter, traffic_class, class_floor, class_ceiling, max_slowdown
        As in `AnyJob`.
    compute_ns
        Mean time from the end of a window to the begin of the next.
    window_bytes
        What a window moves.
    offset_ns
        When its first compute phase begins.
    work
        As in `controller.priority.policy.JobView`.

    Raises
    ------
    UsageError
        A value is impossible.
    """

    compute_ns: float
    window_bytes: int
    offset_ns: float = 0.0
    work: float = 0.0

    def __post_init__(self) -> None:
        if self.window_bytes < 1:
            raise UsageError(f"{self._where} window_bytes is {self.window_bytes}; allowed: from 1.")
        check_from_zero(self, ("compute_ns", "offset_ns"), f"{self._where} ")
        super().__post_init__()

    def window_ns(self, link_Bps: float) -> float:
        """Length of a window when nobody else sends."""
        return self.window_bytes / link_Bps * 1e9

    def period_ns(self, link_Bps: float) -> float:
        """Mean iteration time when nobody else sends."""
        return self.compute_ns + self.window_ns(link_Bps)

    def compute_times_ns(self, count: int, seed: int) -> list[float]:
        """Compute times of the first `count` iterations; a longer list begins with a shorter."""
        return [self.compute_ns * factor for factor in self.compute_factors(count, seed)]


def check_from_zero(of: object, members: Sequence[str], where: str = "") -> None:
    """Raise UsageError unless members of an object are finite numbers from 0.

    Parameters
    ----------
    of
        The object.
    members
        Their names.
    where
        What the error begins with.
    """
    for what in members:
        value = getattr(of, what)
        if not 0 <= value < math.inf:
            raise UsageError(f"{where}{what} is {value!r}; allowed: a number from 0.")


def names_differ(names: Sequence[str]) -> None:
    """Raise UsageError unless there are jobs, each with a name of its own."""
    if not names or len(set(names)) != len(names):
        raise UsageError(f"Jobs are {', '.join(names) or 'none'}; allowed: one or more, each once.")
