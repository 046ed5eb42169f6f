"""`cassini`: every job's windows are moved once, so that they interleave on the link.

Rajasekaran, Ghobadi, Akella, "CASSINI: Network-Aware Job Scheduling in Machine Learning
Clusters", NSDI 2024, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.errors import UsageError
from controller.priority.jobs import DEFAULT_CLASS
from controller.priority.policies.limits import exactly
from controller.priority.policy import Assignment, JobView

# How far a period may be from a whole part of the unified circle, as a share of the period. What
# is left over drifts through the whole circle in 1 / tolerance iterations.
TOLERANCE = 0.02
# Longest circle, in periods of the slowest job: beyond it there is no pattern worth keeping.
MAX_TURNS = 8
# Positions on the circle that are tried for each turn of the slowest job (the paper: 5 degrees).
STEPS_PER_TURN = 72
_PASSES = 4  # over all jobs, after they were placed one after the other
# A change of period or window by less than this does not make a new plan.
_SAME = 0.05


@dataclass(frozen=True)
class Circle:
    """One job's demand: windows of a length, once in every period.

    Parameters
    ----------
    period_ns
        Iteration time when nobody disturbs.
    window_ns
        How long the job fills the link in it.
    begin_ns
        When a window begins, as things are.
    """

    period_ns: float
    window_ns: float
    begin_ns: float = 0.0


def unified_ns(periods_ns: Sequence[float], tolerance: float = TOLERANCE) -> float | None:
    """Least common multiple of periods that are not whole numbers.

    Parameters
    ----------
    periods_ns
        Of all jobs, above 0.
    tolerance
        How far each may be from a whole part of it, as a share of the period.

    Returns
    -------
    float or None
        A multiple of the longest period; None where up to `MAX_TURNS` of them do not do.
    """
    longest = max(periods_ns)
    for turns in range(1, MAX_TURNS + 1):
        circle = turns * longest
        parts = [circle / period for period in periods_ns]
        if all(abs(part - round(part)) <= tolerance * round(part) for part in parts):
            return circle
    return None


def score(demand: NDArray[np.float64], link: float = 1.0) -> float:
    """Compatibility of jobs: 1 minus the mean of what they want beyond the link, over the link.

    Parameters
    ----------
    demand
        What all jobs together want at each position of the unified circle, in the link's unit.
    link
        Its rate; above 0.

    Returns
    -------
    float
        1 where nothing ever waits; may be negative.
    """
    return 1.0 - float(np.maximum(0.0, demand - link).mean()) / link


def best_shifts(
    circles: Sequence[Circle], tolerance: float = TOLERANCE
) -> tuple[tuple[float, ...], float] | None:
    """Rotate the jobs' circles against each other until the score is highest.

    The first job stays; the others are placed one after the other, and then moved again in turn.
    Among equal places the one with the least delay is taken.

    Parameters
    ----------
    circles
        Of jobs that share one link, whose rate each of them fills in its windows.
    tolerance
        See `unified_ns`.

    Returns
    -------
    tuple or None
        How much later each job's windows have to begin, in ns, 0 .. its period; and the score.
        None where the periods have no common circle.

    Raises
    ------
    UsageError
        There is no job, or a period is not above 0.
    """
    if not circles or min(each.period_ns for each in circles) <= 0:
        raise UsageError("Shifts need one job or more, with periods above 0.")
    circle_ns = unified_ns([each.period_ns for each in circles], tolerance)
    if circle_ns is None:
        return None
    turns = round(circle_ns / max(each.period_ns for each in circles))
    steps = STEPS_PER_TURN * turns
    demands = [_on_circle(each, circle_ns, steps) for each in circles]
    counts = [round(circle_ns / each.period_ns) for each in circles]
    placed = [0] * len(circles)
    total = demands[0].copy()
    for number in range(1, len(circles)):
        placed[number] = _best_place(total, demands[number], counts[number])
        total += np.roll(demands[number], placed[number])
    for _ in range(_PASSES):
        for number in range(1, len(circles)):
            total -= np.roll(demands[number], placed[number])
            placed[number] = _best_place(total, demands[number], counts[number])
            total += np.roll(demands[number], placed[number])
    step_ns = circle_ns / steps
    return tuple(place * step_ns for place in placed), score(total)


def _on_circle(job: Circle, circle_ns: float, steps: int) -> NDArray[np.float64]:
    """Share of each of the circle's steps in which a job sends."""
    count = round(circle_ns / job.period_ns)
    step_ns = circle_ns / steps
    demand = np.zeros(steps)
    edges = np.arange(steps + 1) * step_ns
    for turn in range(count):
        begin = (job.begin_ns + turn * circle_ns / count) % circle_ns
        for low in (begin, begin - circle_ns):
            high = low + min(job.window_ns, circle_ns / count)
            covered = np.minimum(edges[1:], high) - np.maximum(edges[:-1], low)
            demand += np.maximum(0.0, covered) / step_ns
    return demand


def _best_place(others: NDArray[np.float64], own: NDArray[np.float64], count: int) -> int:
    """Rotation of a job, in steps, that makes least excess over the link with the others."""
    steps = len(own)
    places = np.arange(-(-steps // count))
    rolled = own[(np.arange(steps)[None, :] - places[:, None]) % steps]
    excess = np.maximum(0.0, others[None, :] + rolled - 1.0).mean(axis=1)
    # Excesses that differ by rounding only are equal: the first is the least delay.
    return int(np.argmax(excess <= excess.min() + 1e-9))


class CassiniPolicy:
    """One class for all; each job is moved once for every set of jobs and demands."""

    name = "cassini"
    tick_ns = 0
    needs_pacing = True
    newcomers_first = False

    def __init__(self) -> None:
        self._planned: dict[str, tuple[float, float]] = {}

    def assign(
        self, now_ns: int, jobs: Sequence[JobView], link_Bps: float
    ) -> Mapping[str, Assignment]:
        """See `controller.priority.policy.Policy.assign`."""
        shifts = self._shifts(now_ns, jobs)
        return {
            job.name: exactly(
                job,
                DEFAULT_CLASS,
                shift_ns=shifts.get(job.name, 0),
                why="windows are moved apart" if shifts.get(job.name) else "keeps its place",
            )
            for job in jobs
        }

    def _shifts(self, now_ns: int, jobs: Sequence[JobView]) -> dict[str, int]:
        known = [job for job in jobs if job.ideal_period_ns > 0 and _next_ns(job, now_ns)]
        demands = {job.name: (job.ideal_period_ns, job.ideal_window_ns) for job in known}
        # Windows that are open together end when the others let them: where the next ones
        # will begin is known when at most one is.
        unclear = len(known) < len(jobs) or sum(job.is_open for job in jobs) > 1
        if unclear or len(known) < 2 or self._is_planned(demands):
            return {}
        self._planned = demands
        # A job that is under way is the one that stays.
        known.sort(key=lambda job: not job.is_open)
        found = best_shifts(
            [
                Circle(job.ideal_period_ns, job.ideal_window_ns, _next_ns(job, now_ns) - now_ns)
                for job in known
            ]
        )
        if found is None:
            return {}
        return {job.name: round(shift) for job, shift in zip(known, found[0], strict=True)}

    def _is_planned(self, demands: Mapping[str, tuple[float, float]]) -> bool:
        if demands.keys() != self._planned.keys():
            return False
        return all(
            abs(new - old) <= _SAME * old
            for name, values in demands.items()
            for new, old in zip(values, self._planned[name], strict=True)
        )


def _next_ns(job: JobView, now_ns: int) -> float:
    """When the job's next window begins; 0: not known."""
    if job.is_open:
        return now_ns + job.rest_ns + job.compute_ns
    return max(now_ns, job.window_start_ns) if job.window_start_ns else 0.0
