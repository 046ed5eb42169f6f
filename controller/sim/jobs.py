"""Simulated training jobs: what one is, its compute times, and what an iteration leaves behind."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controller.errors import UsageError
from controller.priority.jobs import DEFAULT_CEILING, DEFAULT_CLASS
from controller.priority.policy import DEFAULT_MAX_SLOWDOWN
from controller.priority.ranges import check_slowdown
from controller.sim.measures import Iteration

__all__ = ["Iteration", "SimJob", "names_differ"]


@dataclass(frozen=True)
class SimJob:
    """A loop of computation, then a sync window.

    Parameters
    ----------
    name
        Of the job; its random stream depends on it and the seed only, so that every policy
        meets the same compute times.
    compute_ns
        Mean time from the end of a window to the begin of the next.
    window_bytes
        What a window moves.
    jitter
        Compute times are uniform in ``compute_ns * (1 - jitter .. 1 + jitter)``; 0 .. 1.
    offset_ns
        When its first compute phase begins.
    traffic_class, class_floor, class_ceiling, max_slowdown, work
        As in `controller.priority.policy.JobView`.

    Raises
    ------
    UsageError
        A value is impossible.
    """

    name: str
    compute_ns: float
    window_bytes: int
    jitter: float = 0.0
    offset_ns: float = 0.0
    traffic_class: int = DEFAULT_CLASS
    class_floor: int = 0
    class_ceiling: int = DEFAULT_CEILING
    max_slowdown: float = DEFAULT_MAX_SLOWDOWN
    work: float = 0.0

    def __post_init__(self) -> None:
        where = f"Job {self.name}:"
        if self.window_bytes < 1:
            raise UsageError(f"{where} window_bytes is {self.window_bytes}; allowed: from 1.")
        for what, value in (("compute_ns", self.compute_ns), ("offset_ns", self.offset_ns)):
            if not 0 <= value < math.inf:
                raise UsageError(f"{where} {what} is {value!r}; allowed: a number from 0.")
        if not 0 <= self.jitter <= 1:
            raise UsageError(f"{where} jitter is {self.jitter!r}; allowed: 0 .. 1.")
        check_slowdown(f"{where} max_slowdown", self.max_slowdown)
        if not self.class_floor <= self.traffic_class <= self.class_ceiling:
            raise UsageError(
                f"{where} class is {self.traffic_class}; allowed: {self.class_floor} .. "
                f"{self.class_ceiling} (class_floor .. class_ceiling)."
            )

    def window_ns(self, link_Bps: float) -> float:
        """Length of a window when nobody else sends."""
        return self.window_bytes / link_Bps * 1e9

    def period_ns(self, link_Bps: float) -> float:
        """Mean iteration time when nobody else sends."""
        return self.compute_ns + self.window_ns(link_Bps)

    def compute_times_ns(self, count: int, seed: int) -> list[float]:
        """Compute times of the first `count` iterations; a longer list begins with a shorter."""
        stream = np.random.default_rng((seed, zlib.crc32(self.name.encode())))
        factors = 1 + self.jitter * stream.uniform(-1, 1, count)
        return [float(self.compute_ns * factor) for factor in factors]


def names_differ(names: Sequence[str]) -> None:
    """Raise UsageError unless there are jobs, each with a name of its own."""
    if not names or len(set(names)) != len(names):
        raise UsageError(f"Jobs are {', '.join(names) or 'none'}; allowed: one or more, each once.")
