"""Event-driven fluid simulation of jobs on one link, under a policy of the live controller.

Rates are constant between events, so nothing is approximated but packets: no queue, no loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from controller.errors import UsageError
from controller.priority.policies.guard import guard_margin_ns
from controller.priority.policy import Assignment, Policy
from controller.sim.conditions import Conditions, Outcome
from controller.sim.job_state import END_bytes, JobState
from controller.sim.jobs import Iteration, SimJob, StarvedError, names_differ
from controller.sim.link import allocate_Bps
from controller.sim.measures import Alone

__all__ = ["Conditions", "Outcome", "alone", "simulate"]

_S = 1e9
# Two events closer than this are one: far below what a message needs on any link.
_SAME_ns = 1e-3
# A simulation with more events for each iteration asked for does not come to an end.
_EVENTS_PER_ITERATION = 5_000


def alone(jobs: Sequence[SimJob], link_Bps: float) -> dict[str, Alone]:
    """What each job needs when nobody disturbs it, for `controller.sim.measures.measure`."""
    return {job.name: Alone(job.window_ns(link_Bps), job.period_ns(link_Bps)) for job in jobs}


def simulate(
    jobs: Sequence[SimJob],
    policy: Policy,
    conditions: Conditions,
    iterations: Mapping[str, int],
    seed: int = 0,
) -> Outcome:
    """Run jobs on one link until each has done its number of iterations.

    A job that is through goes on, so that the others never have the link to themselves.

    Parameters
    ----------
    jobs
        At least one; names differ.
    policy
        Asked when a window begins or ends, every `tick_ns` while several are open, and when a
        waiting job's laxity runs out.
    conditions
        The link and the controller.
    iterations
        Name -> how many of each job, from 1; see `controller.sim.mixes.even_iterations`.
    seed
        Of compute times and prediction errors; the same for every policy.

    Raises
    ------
    UsageError
        There is no job, two have one name, one has no number of iterations, or one
        never gets the link.
    """
    names = [job.name for job in jobs]
    names_differ(names)
    for name in names:
        if iterations.get(name, 0) < 1:
            raise UsageError(f"Job {name}: {iterations.get(name, 0)} iterations; allowed: from 1.")
    return _Simulation(jobs, policy, conditions, iterations, seed).run()


class _Simulation:
    """All jobs, and what is on its way from the policy to them."""

    def __init__(
        self,
        jobs: Sequence[SimJob],
        policy: Policy,
        conditions: Conditions,
        iterations: Mapping[str, int],
        seed: int,
    ) -> None:
        self.policy = policy
        self.conditions = conditions
        self.iterations = iterations
        self.jobs = [JobState(job, conditions, seed) for job in jobs]
        self.now_ns = 0.0
        self.asked_ns = 0.0
        self.decisions = 0
        self.on_the_way: list[tuple[float, Mapping[str, Assignment]]] = []
        self.rows: list[Iteration] = []

    def run(self) -> Outcome:
        """Event by event until every job has enough iterations."""
        wanted = sum(self.iterations[job.spec.name] for job in self.jobs)
        self._ask()
        # What is decided before the first job begins is in force when it does.
        self._apply(math.inf)
        for _ in range(_EVENTS_PER_ITERATION * wanted):
            self._advance(self._next_ns())
            if self._happen():
                self._ask()
            self._apply(self.now_ns)
            if len(self.rows) == wanted:
                break
        else:
            done = {job.spec.name: job.iteration for job in self.jobs}
            stuck = min(done, key=lambda name: done[name] / self.iterations[name])
            raise StarvedError.of(stuck)
        return Outcome(
            iterations=tuple(self.rows),
            carried_bytes={job.spec.name: job.carried_bytes for job in self.jobs},
            resent_bytes={job.spec.name: job.resent_bytes for job in self.jobs},
            decisions=self.decisions,
            end_ns=self.rows[-1].window_end_ns,
        )

    def _open(self) -> list[JobState]:
        return [job for job in self.jobs if job.is_open]

    def _next_ns(self) -> float:
        """Set the rates, and find when something happens next."""
        now_ns, conditions = self.now_ns, self.conditions
        sending = self._open()
        rates = allocate_Bps(
            conditions.link_Bps,
            conditions.floor_share,
            [job.class_now for job in sending],
            [job.assignment.share * conditions.link_Bps or math.inf for job in sending],
        )
        times = [job.begin_ns for job in self.jobs if not job.is_open]
        times += [when for when, _ in self.on_the_way]
        for job, rate_Bps in zip(sending, rates, strict=True):
            job.rate_Bps = rate_Bps
            job.guard_ns = self._guard_ns(job, sending)
            times.append(job.guard_ns)
            if rate_Bps > 0:
                times.append(now_ns + (job.total_bytes - job.done_bytes) / rate_Bps * _S)
                if job.class_next != job.class_now:
                    times.append(now_ns + (job.switch_bytes - job.done_bytes) / rate_Bps * _S)
            times.append(job.crossing_ns(now_ns))
        if self.policy.tick_ns and len(sending) > 1:
            times.append(self.asked_ns + self.policy.tick_ns)
        return max(now_ns, min(times))

    def _advance(self, to_ns: float) -> None:
        elapsed_s = (to_ns - self.now_ns) / _S
        for job in self.jobs:
            if job.is_open:
                sent = min(job.rate_Bps * elapsed_s, job.total_bytes - job.done_bytes)
                job.done_bytes += sent
                job.carried_bytes += sent
        self.now_ns = to_ns

    def _happen(self) -> bool:
        """Carry out what is due; return whether the policy has to be asked."""
        now_ns, ask = self.now_ns, False
        for job in self.jobs:
            if job.is_open and job.total_bytes - job.done_bytes <= END_bytes:
                self._end(job)
                ask = True
            elif not job.is_open and job.begin_ns <= now_ns + _SAME_ns:
                job.choose(now_ns)
                job.is_open = True
                ask = True
            elif job.is_open:
                if job.assignment.class_floor < job.assignment.class_ceiling:
                    job.choose(now_ns)
                job.switch()
                ask = ask or job.guard_ns <= now_ns + _SAME_ns
        tick_ns = self.policy.tick_ns
        if tick_ns and now_ns + _SAME_ns >= self.asked_ns + tick_ns and len(self._open()) > 1:
            ask = True
        return ask

    def _end(self, job: JobState) -> None:
        row = job.end(self.now_ns)
        if row.iteration < self.iterations[row.job]:
            self.rows.append(row)

    def _ask(self) -> None:
        views = [job.view() for job in self.jobs]
        now_ns = round(self.now_ns)
        decided = self.policy.assign(now_ns, views, self.conditions.link_Bps)
        self.on_the_way.append((self.now_ns + self.conditions.plan_ns, decided))
        self.asked_ns = self.now_ns
        self.decisions += 1

    def _apply(self, until_ns: float) -> None:
        """Put what has arrived from the policy in force, the oldest first."""
        due = [each for each in self.on_the_way if each[0] <= until_ns + _SAME_ns]
        self.on_the_way = self.on_the_way[len(due) :]
        for _, decided in due:
            for job in self.jobs:
                default = Assignment(job.spec.traffic_class, job.spec.traffic_class)
                job.assignment = decided.get(job.spec.name, default)
                job.shift(job.assignment.shift_ns)
                job.choose(self.now_ns)
                job.switch()

    def _guard_ns(self, job: JobState, sending: Sequence[JobState]) -> float:
        """When the laxity of a job that waits runs out at the rates in force."""
        ahead = [each for each in sending if each.class_now >= job.class_now and each is not job]
        if not ahead:
            return math.inf
        view = job.view()
        margin_ns = guard_margin_ns(view, len(sending) - 1, self.conditions.link_Bps)
        laxity = view.laxity_ns(round(self.now_ns)) - margin_ns
        falls = 1 - job.rate_Bps / self.conditions.link_Bps
        return self.now_ns + laxity / falls + 1 if laxity > 0 and falls > 0 else math.inf
