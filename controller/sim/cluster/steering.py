"""The coordinator's side of a simulated cluster: when it is asked, and what its answers change."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from controller.priority.contention import Contention
from controller.priority.coordination import Coordinator
from controller.priority.policy import Assignment
from controller.sim.cluster.guards import Guards
from controller.sim.cluster.job_run import JobRun, Phase
from controller.sim.cluster.outcome import ClusterConditions
from controller.sim.cluster.transfers import Transfers

# Two events closer than this are one: far below what a packet needs on any link.
SAME_ns = 1e-3


class Steering:
    """Asks the coordinator about components of jobs, and puts its answers in force.

    Parameters
    ----------
    coordinator
        Of the cluster; None: nobody is asked.
    conditions
        How late and how well it acts.
    runs
        All jobs, also those that are not there; elsewhere jobs are numbers in this order.
    transfers, guards
        Of these jobs.
    timer_ns
        When each job's bucket is ready next, shape (jobs,): a shift moves it.

    Attributes
    ----------
    component
        Number of each job's component, shape (jobs,); -1: it meets nobody.
    weight
        Of each job inside its class, shape (jobs,).
    stale
        Jobs whose part of the network changes: their components' rates have to be set.
    paced
        Whether a job has been given a share.
    resent_bytes
        Of each job, see `ClusterConditions.raise_bytes`.
    decisions
        How often the coordinator was asked.
    """

    def __init__(
        self,
        coordinator: Coordinator | None,
        conditions: ClusterConditions,
        runs: Sequence[JobRun],
        transfers: Transfers,
        guards: Guards,
        timer_ns: NDArray[np.float64],
    ) -> None:
        self._coordinator, self._conditions = coordinator, conditions
        self._runs, self._transfers, self._guards = runs, transfers, guards
        self._timer_ns = timer_ns
        self._number = {run.spec.name: number for number, run in enumerate(runs)}
        guards.classes[:] = [run.class_now for run in runs]
        self.component = np.full(len(runs), -1)
        self.weight = np.ones(len(runs))
        self.stale: set[int] = set()
        self.paced = False
        self.resent_bytes = [0.0] * len(runs)
        self.decisions = 0
        self._has_begun = False
        self._contention = Contention((), ())
        self._members: list[list[int]] = []
        self._asked_ns: list[float] = []
        self._tick_ns: list[int] = []
        self._ask: set[int] = set()
        self._ranged: set[int] = set()  # jobs that have more than one class to choose from
        self._on_the_way: deque[tuple[float, list[int], Mapping[str, Assignment]]] = deque()

    def regroup(self, contention: Contention, now_ns: float) -> None:
        """Another set of jobs is there; the coordinator has to be asked about all."""
        self._contention = contention
        self._guards.meet(contention, self._number)
        self.component[:] = -1
        self._members = []
        for name in contention.jobs:
            number = self._number[name]
            if not contention.neighbours(name):
                self._apply(number, self._runs[number].default, now_ns)
            elif self.component[number] < 0:
                members = [self._number[each] for each in contention.component(name)]
                self.component[members] = len(self._members)
                self._members.append(members)
        self._asked_ns = [-math.inf] * len(self._members)
        self._tick_ns = [self._tick_of(members) for members in self._members]
        self._ask = set(range(len(self._members)))
        self.stale.update(np.flatnonzero(self._transfers.sending).tolist())

    def link_Bps(self, job: int) -> float:
        """Capacity of the slowest link that a job shares with others."""
        return self._contention.link_Bps(self._runs[job].spec.name)

    def ask_about(self, job: int) -> None:
        """The coordinator has to be asked about a job's component, if there is one."""
        component = int(self.component[job])
        if component >= 0:
            self._ask.add(component)

    def next_ns(self, now_ns: float) -> float:
        """When something is due here, as things are now."""
        times = [self._on_the_way[0][0]] if self._on_the_way else []
        times += [
            asked_ns + tick_ns
            for asked_ns, tick_ns, members in zip(
                self._asked_ns, self._tick_ns, self._members, strict=True
            )
            if tick_ns and self._contend(members)
        ]
        times += [self._crossing_ns(job, now_ns) for job in self._ranged]
        return min(times, default=math.inf)

    def step(self, now_ns: float) -> bool:
        """Ask what has to be asked, and apply what has arrived; return whether anything was due."""
        # A decision about the first jobs is in force when they begin.
        limit_ns = now_ns + SAME_ns if self._has_begun else math.inf
        self._has_begun = True
        self._add_ticks(now_ns)
        due = bool(self._ask or self.stale)
        if self._coordinator:
            for component in sorted(self._ask):
                self._decide(self._coordinator, component, now_ns)
        self._ask.clear()
        while self._on_the_way and self._on_the_way[0][0] <= limit_ns:
            _, members, decided = self._on_the_way.popleft()
            due = True
            for job in members:
                run = self._runs[job]
                new = decided.get(run.spec.name, run.default)
                # A job that has left, or has nobody left to meet, is not in a component.
                if (new is not run.assignment or new.shift_ns) and self.component[job] >= 0:
                    self._apply(job, new, now_ns)
        for job in sorted(self._ranged):
            self._choose(job, now_ns)
            due = True
        return due

    def _contend(self, members: Sequence[int]) -> bool:
        return int(self._guards.open[members].sum()) > 1

    def _add_ticks(self, now_ns: float) -> None:
        for component, (asked_ns, tick_ns, members) in enumerate(
            zip(self._asked_ns, self._tick_ns, self._members, strict=True)
        ):
            if tick_ns and now_ns + SAME_ns >= asked_ns + tick_ns and self._contend(members):
                self._ask.add(component)

    def _tick_of(self, members: Sequence[int]) -> int:
        """How often the coordinator wants to be asked about a component; 0: at events only."""
        if not self._coordinator:
            return 0
        component = self._contention.component_mask(self._runs[members[0]].spec.name)
        return self._coordinator.tick_ns(len(self._contention.links_within(component)))

    def _decide(self, coordinator: Coordinator, component: int, now_ns: float) -> None:
        members = self._members[component]
        rest_bytes = self._transfers.rest_bytes(now_ns)[members].tolist()
        views = [self._runs[job].view(rest) for job, rest in zip(members, rest_bytes, strict=True)]
        decided = coordinator.assign(round(now_ns), views, self._contention)
        self._on_the_way.append((now_ns + self._conditions.plan_ns, members, decided))
        self._asked_ns[component] = now_ns
        self.decisions += 1

    def _apply(self, job: int, new: Assignment, now_ns: float) -> None:
        """Put an assignment in force."""
        run, old = self._runs[job], self._runs[job].assignment
        run.assignment = new
        if new.shift_ns:
            if run.phase is Phase.COMPUTING:
                self._timer_ns[job] += new.shift_ns
            run.shift(new.shift_ns)
        if new.class_floor < new.class_ceiling:
            self._ranged.add(job)
        elif self._ranged:
            self._ranged.discard(job)
        self._choose(job, now_ns)
        if new.share != old.share or new.weight != old.weight:
            self.weight[job] = new.weight
            self.paced = self.paced or new.share > 0
            self.stale.add(job)

    def _choose(self, job: int, now_ns: float) -> None:
        """Take the class that the assignment calls for."""
        run = self._runs[job]
        limits = run.assignment
        wanted = limits.class_floor
        if wanted < limits.class_ceiling:
            wanted = run.wanted_class(now_ns, self._rest_bytes(job, now_ns))
        if wanted == run.class_now:
            return
        if run.phase is Phase.SENDING:
            self.stale.add(job)
            if wanted > run.class_now and self._conditions.raise_bytes:
                self.resent_bytes[job] += self._transfers.resend(
                    job, self._conditions.raise_bytes, now_ns
                )
        run.class_now = wanted
        self._guards.classes[job] = wanted

    def _rest_bytes(self, job: int, now_ns: float) -> float:
        return float(self._transfers.rest_bytes(now_ns)[job])

    def _crossing_ns(self, job: int, now_ns: float) -> float:
        rate_Bps = float(self._transfers.rank_rate_Bps()[job])
        return self._runs[job].crossing_ns(now_ns, self._rest_bytes(job, now_ns), rate_Bps)
