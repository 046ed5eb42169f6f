"""`cassini`: every job's windows are moved once, so that they interleave on its links.

Rajasekaran, Ghobadi, Akella, "CASSINI: Network-Aware Job Scheduling in Machine Learning
Clusters", NSDI 2024, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from controller.priority.contention import Contention, one_link
from controller.priority.jobs import DEFAULT_CLASS
from controller.priority.policies.circles import (
    Circle,
    best_shifts,
    place_on_links,
    score,
    unified_ns,
)
from controller.priority.policies.limits import exactly
from controller.priority.policy import Assignment, JobView

__all__ = ["CassiniPolicy", "Circle", "Mover", "best_shifts", "score", "unified_ns"]

# A change of period or window by less than this does not make a new plan, and a window that is
# off its place by less than this share of the period is not moved there: it would be held up for
# nearly a whole period.
_SAME = 0.05


class CassiniPolicy:
    """One class for all; each job is moved once for every set of jobs and demands."""

    name = "cassini"
    tick_ns = 0
    needs_pacing = True
    newcomers_first = False

    def __init__(self) -> None:
        self._mover = Mover()

    def assign(
        self, now_ns: int, jobs: Sequence[JobView], link_Bps: float
    ) -> Mapping[str, Assignment]:
        """See `controller.priority.policy.Policy.assign`."""
        contention = one_link(tuple(job.name for job in jobs), link_Bps)
        return self._mover.assign(now_ns, jobs, contention)


class Mover:
    """Plans places for the windows of one component's jobs, and moves each job to its own once."""

    def __init__(self) -> None:
        self._planned: dict[str, tuple[float, float]] = {}
        # Begin of a window in its place, of jobs that could not be told yet.
        self._places_ns: dict[str, float] = {}
        self._loops = 0

    def assign(
        self, now_ns: int, jobs: Sequence[JobView], contention: Contention
    ) -> dict[str, Assignment]:
        """Decide for all jobs of one component of a contention graph.

        Parameters
        ----------
        now_ns
            On the clock of the views.
        jobs
            All of the component, in a fixed order.
        contention
            Who meets whom, and on which links.
        """
        shifts = self._shifts(now_ns, jobs, contention)
        moved = "windows are moved apart"
        if self._loops:
            loops = "1 loop" if self._loops == 1 else f"{self._loops} loops"
            moved += f" ({loops} of links left open)"
        return {
            job.name: exactly(
                job,
                DEFAULT_CLASS,
                shift_ns=shifts.get(job.name, 0),
                why=moved if shifts.get(job.name) else "keeps its place",
            )
            for job in jobs
        }

    def _shifts(
        self, now_ns: int, jobs: Sequence[JobView], contention: Contention
    ) -> dict[str, int]:
        known = [job for job in jobs if job.ideal_period_ns > 0 and _next_ns(job, now_ns)]
        if len(known) < 2:
            return {}
        links = contention.links_within(contention.component_mask(known[0].name))
        unclear = _held_up(known, contention)
        if len(links) == 1 and (unclear or len(known) < len(jobs)):
            # It will be clear some time. On many links it hardly ever is for all jobs at once.
            return {}
        demands = {job.name: (job.ideal_period_ns, job.ideal_window_ns) for job in known}
        if not self._is_planned(demands):
            self._planned = demands
            # A job that is under way is the one that stays.
            known.sort(key=lambda job: not job.is_open)
            nexts_ns = {
                # What equal shares make of it. Who comes too early for its place waits a little,
                # who comes too late nearly a period.
                job.name: _next_ns(job, now_ns) - now_ns + job.rest_ns * unclear.get(job.name, 0)
                for job in known
            }
            placement = place_on_links(
                {
                    job.name: Circle(job.ideal_period_ns, job.ideal_window_ns, nexts_ns[job.name])
                    for job in known
                },
                [contention.links[link].jobs for link in links],
            )
            self._loops = placement.loops
            self._places_ns = {
                name: now_ns + nexts_ns[name] + shift
                for name, shift in placement.shifts.items()
                if name in unclear
            }
            return {
                name: round(shift)
                for name, shift in placement.shifts.items()
                if name not in unclear
            }
        told = [job for job in known if job.name in self._places_ns and job.name not in unclear]
        return {job.name: self._move(job, now_ns) for job in told}

    def _move(self, job: JobView, now_ns: int) -> int:
        """How much later a job's next window begins in its place."""
        period_ns = job.ideal_period_ns
        shift_ns = (self._places_ns.pop(job.name) - _next_ns(job, now_ns)) % period_ns
        return round(shift_ns) if shift_ns < (1 - _SAME) * period_ns else 0

    def _is_planned(self, demands: Mapping[str, tuple[float, float]]) -> bool:
        if demands.keys() != self._planned.keys():
            return False
        return all(
            abs(new - old) <= _SAME * old
            for name, values in demands.items()
            for new, old in zip(values, self._planned[name], strict=True)
        )


def _held_up(jobs: Sequence[JobView], contention: Contention) -> dict[str, int]:
    """Jobs with an open window that ends when others let it, and how many those are.

    Where their next one will begin is not known yet.
    """
    opened = 0
    for job in jobs:
        if job.is_open:
            opened |= 1 << contention.number(job.name)
    others = {
        job.name: (contention.neighbour_mask(job.name) & opened).bit_count()
        for job in jobs
        if job.is_open
    }
    return {name: count for name, count in others.items() if count}


def _next_ns(job: JobView, now_ns: int) -> float:
    """When the job's next window begins; 0: not known."""
    if job.is_open:
        return now_ns + job.rest_ns + job.compute_ns
    return max(now_ns, job.window_start_ns) if job.window_start_ns else 0.0
