"""What is measured of iterations, simulated or real: AllReduce and iteration times, slowdowns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from controller.errors import InputError

# "The slowest 10 %": of AllReduce times.
SLOWEST_SHARE = 0.1


@dataclass(frozen=True)
class Iteration:
    """One iteration of a job: computation, then a sync window. Times on any one clock.

    Parameters
    ----------
    job
        Its name.
    iteration
        Its number.
    compute_begin_ns
        End of the iteration before.
    window_begin_ns, window_end_ns
        When the job wants to send the first byte, and has the last.
    compute_end_ns
        When it has computed, which may be after the window: buckets that are sent during the
        backward pass may all be through before it is. None: before the window.
    """

    job: str
    iteration: int
    compute_begin_ns: float
    window_begin_ns: float
    window_end_ns: float
    compute_end_ns: float | None = None

    @property
    def window_ns(self) -> float:
        """Communication time (AllReduce time) of the iteration."""
        return self.window_end_ns - self.window_begin_ns

    @property
    def duration_ns(self) -> float:
        """Iteration time: until both the window and the computation are over."""
        computed_ns = self.window_end_ns if self.compute_end_ns is None else self.compute_end_ns
        return max(self.window_end_ns, computed_ns) - self.compute_begin_ns


@dataclass(frozen=True)
class Alone:
    """What a job needs when nobody disturbs it: its window, and its mean iteration."""

    window_ns: float
    iteration_ns: float


@dataclass(frozen=True)
class Figures:
    """Of a set of iterations; times in ns, slowdowns as multiples of the undisturbed time.

    Parameters
    ----------
    iterations
        How many there are.
    allreduce_mean_ns, allreduce_slowest_ns
        Mean window, and mean of the slowest 10 % of windows.
    iteration_mean_ns, iteration_p50_ns, iteration_p99_ns
        Of iteration times.
    allreduce_slowdown_mean, allreduce_slowdown_slowest
        Mean window over the job's window alone, and mean of the highest 10 % of that: where
        jobs differ in size, times alone are those of the largest job.
    slowdown
        Mean iteration time over the job's undisturbed one.
    """

    iterations: int
    allreduce_mean_ns: float
    allreduce_slowest_ns: float
    iteration_mean_ns: float
    iteration_p50_ns: float
    iteration_p99_ns: float
    allreduce_slowdown_mean: float
    allreduce_slowdown_slowest: float
    slowdown: float


@dataclass(frozen=True)
class Measures:
    """Figures of each job and of all iterations together.

    Parameters
    ----------
    jobs
        Name -> figures.
    over_all
        Of all iterations, whatever job they are of.
    worst_job
        The one with the highest `slowdown`.
    """

    jobs: Mapping[str, Figures]
    over_all: Figures
    worst_job: str

    def to_json(self) -> dict[str, Any]:
        """Members by name."""
        return asdict(self)


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return math.fsum(values) / len(values)


def slowest_mean(values: Sequence[float], share: float = SLOWEST_SHARE) -> float:
    """Mean of the highest `share` of the values; of one value at least."""
    count = max(1, round(len(values) * share))
    return mean(sorted(values)[-count:])


def percentile(values: Sequence[float], rank: float) -> float:
    """Smallest value that at least `rank` (0 .. 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(rank * len(ordered)) - 1)]


def measure(iterations: Iterable[Iteration], alone: Mapping[str, Alone]) -> Measures:
    """Figures of each job and over all.

    Parameters
    ----------
    iterations
        Of any number of jobs, in any order.
    alone
        Of each job that occurs.

    Raises
    ------
    InputError
        There is no iteration, or one is of a job that `alone` does not name.
    """
    by_job: dict[str, list[Iteration]] = {}
    for each in iterations:
        by_job.setdefault(each.job, []).append(each)
    if not by_job:
        raise InputError("There are no iterations to measure.", "Run at least one of each job.")
    unknown = sorted(set(by_job) - set(alone))
    if unknown:
        raise InputError(
            f"Nothing is known of job {unknown[0]} alone; expected: one of "
            f"{', '.join(sorted(alone))}.",
            "Measure it alone first.",
        )
    jobs = {name: _figures(rows, alone) for name, rows in by_job.items()}
    every = [each for rows in by_job.values() for each in rows]
    worst = max(jobs, key=lambda name: jobs[name].slowdown)
    return Measures(jobs=jobs, over_all=_figures(every, alone), worst_job=worst)


def relative_change(base: Figures, other: Figures) -> dict[str, float]:
    """How much lower (below 0) or higher `other` is than `base`, as a share of `base`.

    Parameters
    ----------
    base, other
        Of the same jobs, for example under `fair` and under another policy.

    Returns
    -------
    dict
        Member of `Figures` -> change; the number of iterations is left out.
    """
    before, after = asdict(base), asdict(other)
    return {
        name: after[name] / before[name] - 1
        for name in before
        if name != "iterations" and before[name] > 0
    }


def _figures(rows: Sequence[Iteration], alone: Mapping[str, Alone]) -> Figures:
    windows = [each.window_ns for each in rows]
    durations = [each.duration_ns for each in rows]
    stretched = [_stretched(each.window_ns, alone[each.job].window_ns) for each in rows]
    return Figures(
        iterations=len(rows),
        allreduce_mean_ns=mean(windows),
        allreduce_slowest_ns=slowest_mean(windows),
        iteration_mean_ns=mean(durations),
        iteration_p50_ns=percentile(durations, 0.5),
        iteration_p99_ns=percentile(durations, 0.99),
        allreduce_slowdown_mean=mean(stretched),
        allreduce_slowdown_slowest=slowest_mean(stretched),
        slowdown=mean([each.duration_ns / alone[each.job].iteration_ns for each in rows]),
    )


def _stretched(window_ns: float, alone_ns: float) -> float:
    """A window over the window alone; a job that sends nothing is never held up."""
    return window_ns / alone_ns if alone_ns > 0 else 1.0
