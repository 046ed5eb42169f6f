"""Jobs as circles that are rotated against each other until their windows interleave.

Rajasekaran, Ghobadi, Akella, "CASSINI: Network-Aware Job Scheduling in Machine Learning
Clusters", NSDI 2024, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from controller.errors import UsageError

# How far a period may be from a whole part of the unified circle, as a share of the period. What
# is left over drifts through the whole circle in 1 / tolerance iterations.
TOLERANCE = 0.02
# Longest circle, in periods of the slowest job: beyond it there is no pattern worth keeping.
MAX_TURNS = 8
# Positions on the circle that are tried for each turn of the slowest job (the paper: 5 degrees).
STEPS_PER_TURN = 72
_PASSES = 4  # over all jobs, after they were placed one after the other


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

    @property
    def share(self) -> float:
        """What of the link's time the job fills."""
        return self.window_ns / self.period_ns if self.period_ns > 0 else 0.0


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
    circles: Sequence[Circle], tolerance: float = TOLERANCE, fixed: int = 1
) -> tuple[tuple[float, ...], float] | None:
    """Rotate the jobs' circles against each other until the score is highest.

    The first jobs stay; the others are placed one after the other, and then moved again in turn.
    Among equal places the one with the least delay is taken.

    Parameters
    ----------
    circles
        Of jobs that share one link, whose rate each of them fills in its windows.
    tolerance
        See `unified_ns`.
    fixed
        How many of the first stay, from 1.

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
    total = np.sum(demands[:fixed], axis=0)
    for number in range(fixed, len(circles)):
        placed[number] = _best_place(total, demands[number], counts[number])
        total += np.roll(demands[number], placed[number])
    for _ in range(_PASSES):
        for number in range(fixed, len(circles)):
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


@dataclass(frozen=True)
class Placement:
    """Where the jobs of several links go.

    Parameters
    ----------
    shifts
        Name -> how much later its windows have to begin, in ns.
    loops
        Relations of a job to a link that were not heeded, since both had been placed by way of
        others; 0: every link has the places that suit it best.
    """

    shifts: dict[str, float]
    loops: int


def place_on_links(
    circles: Mapping[str, Circle], links: Sequence[Sequence[str]], tolerance: float = TOLERANCE
) -> Placement:
    """One shift for each job that suits all the links which it shares.

    Goes through the paper's affinity graph, whose vertices are jobs and links, from one job
    along a spanning tree: the jobs of a link that have a place stay, the others are placed
    beside them. Without loops every link has its best places, as in the paper, which admits no
    others. A cluster has loops; there what is found first holds. The fullest links on which all
    jobs fit come first, and then those on which they do not, the emptiest first: there little is
    won wherever they are.

    Parameters
    ----------
    circles
        Name -> demand; the first job of every component stays.
    links
        Names of the jobs on each link; those without a circle, and links whose jobs have no
        common one, do not count.
    tolerance
        See `unified_ns`.

    Raises
    ------
    UsageError
        A period is not above 0.
    """
    shared = [set(link) for link in links]
    members = [names for link in shared if len(names := [n for n in circles if n in link]) > 1]
    members.sort(key=lambda link: _urgency(sum(circles[name].share for name in link)))
    shifts: dict[str, float] = {}
    heeded: list[set[str]] = []
    loops = 0
    for root in circles:
        if root in shifts:
            continue
        shifts[root] = 0.0
        while (link := _next_link(members, shifts)) is not None:
            members.remove(link)
            # Those that have a place first, in the order in which they got it.
            names = [name for name in shifts if name in link]
            fixed = len(names)
            # Jobs that are apart on one link are on another which only some of them share.
            if fixed == len(link) and any(each.issuperset(link) for each in heeded):
                continue
            names += [name for name in link if name not in shifts]
            found = best_shifts(
                [_moved(circles[name], shifts.get(name, 0.0)) for name in names], tolerance, fixed
            )
            if found is not None:
                loops += fixed - 1
                heeded.append(set(link))
                shifts.update(zip(names[fixed:], found[0][fixed:], strict=True))
    return Placement(shifts, loops)


def _urgency(load: float) -> tuple[bool, float]:
    """Sorts links by what their jobs together fill of them."""
    return load > 1, load if load > 1 else -load


def _next_link(links: Sequence[list[str]], placed: Mapping[str, float]) -> list[str] | None:
    """The first link of which a job has a place; None: there is none."""
    return next((link for link in links if any(name in placed for name in link)), None)


def _moved(circle: Circle, shift_ns: float) -> Circle:
    return replace(circle, begin_ns=circle.begin_ns + shift_ns) if shift_ns else circle
