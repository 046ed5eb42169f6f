"""Jobs on a cluster, event by event: what happens at each, and what comes next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from controller.priority.coordination import Coordinator
from controller.sim.cluster.course import Course
from controller.sim.cluster.guards import Guards
from controller.sim.cluster.job_run import JobRun, Phase
from controller.sim.cluster.jobs import ClusterJob
from controller.sim.cluster.meetings import contention
from controller.sim.cluster.outcome import ClusterConditions, ClusterOutcome
from controller.sim.cluster.sharing import Fabric
from controller.sim.cluster.steering import SAME_ns, Steering
from controller.sim.cluster.topology import LeafSpine
from controller.sim.cluster.transfers import Transfers
from controller.sim.jobs import StarvedError
from controller.sim.measures import Iteration
from controller.sim.progress import Progress

_CHECK_EVERY = 1024  # instants, for starved jobs
_PROGRESS_EVERY = 64  # iterations
# Rows of the table of what happens next to each job.
_FINISH, _TIMER, _GUARD = range(3)


class Simulation:
    """All jobs, what they have on the network, and what their coordinator decides."""

    # A job whose iteration lasts this many times as long as alone will not end in this life.
    starved_after = 10_000.0

    def __init__(
        self,
        jobs: Sequence[ClusterJob],
        topology: LeafSpine,
        coordinator: Coordinator | None,
        conditions: ClusterConditions,
        wanted: Mapping[str, int],
        warmup: int,
        seed: int,
    ) -> None:
        count = len(jobs)
        self.topology, self.conditions, self.warmup = topology, conditions, warmup
        self.wanted = [wanted[job.name] for job in jobs]
        self.runs = [
            JobRun(Course(job, topology, conditions.qps_per_peer, seed), conditions, seed)
            for job in jobs
        ]
        self.fabric = Fabric(topology)
        self.usages = [
            [self.fabric.register(place, step.stage.links, step.stage.flows) for step in run.steps]
            for place, run in enumerate(self.runs)
        ]
        self.usage = np.zeros(count, np.int64)  # of the step under way
        # What comes next of each job. There are a few hundred at most, so that finding the first
        # of all is one short call, where a heap would have to be told of every change of a rate.
        self.times_ns = np.full((3, count), math.inf)
        self.times_ns[_TIMER] = [job.arrival_ns for job in jobs]
        self.transfers = Transfers(self.times_ns[_FINISH])
        self.guards = Guards(count)
        self.steering = Steering(
            coordinator,
            conditions,
            self.runs,
            self.transfers,
            self.guards,
            self.times_ns[_TIMER],
        )
        self.is_guarded = coordinator is not None
        # When a simulation of another kind has something to do, see `_own`.
        self.own_ns = math.inf
        self.set_changed = False
        self.now_ns = 0.0
        self.moved_bytes = [[0.0] * len(run.steps) for run in self.runs]  # of a flow, by step
        self.rows: list[Iteration] = []
        self.measured_ns = [math.inf] * count  # end of the warm-up
        self.left_ns = [math.inf] * count
        self.busy_ns = [0.0] * count
        self.events = 0
        self.flow_events = 0.0

    def run(self, progress: Progress | None) -> ClusterOutcome:
        """Instant by instant until every job has enough iterations."""
        rows = sum(self.wanted) - self.warmup * len(self.runs)
        instants = told = 0
        while len(self.rows) < rows:
            self._instant()
            instants += 1
            if instants % _CHECK_EVERY == 0:
                self._check_starved()
            if progress and len(self.rows) - told >= _PROGRESS_EVERY:
                told = len(self.rows)
                progress(told, rows)
        return self._outcome()

    def _instant(self) -> None:
        """Go to the next time at which something happens, and let it happen."""
        next_ns = min(float(self.times_ns.min()), self.steering.next_ns(self.now_ns), self.own_ns)
        if next_ns == math.inf:
            self._check_starved(at_once=True)
        # What is due already comes from rounding, or from a policy that asks for the past.
        now_ns = self.now_ns = max(self.now_ns, next_ns)
        steering = self.steering
        count = len(self.runs)
        for place in np.flatnonzero(self.times_ns <= now_ns + SAME_ns).tolist():
            row, job = divmod(place, count)
            if row == _FINISH:
                self._step_over(job)
            elif row == _TIMER:
                self._timer(job)
            else:
                self.times_ns[_GUARD, job] = math.inf
                if self.guards.has_to_wait(job):
                    steering.ask_about(job)
        if self.own_ns <= now_ns + SAME_ns:
            self._own()
        if self.set_changed:
            self._regroup()
        if steering.step(now_ns):
            self._share()
            if self.is_guarded:
                self.times_ns[_GUARD] = self.guards.times_ns(
                    self.transfers.rest_bytes(now_ns), self.transfers.rank_rate_Bps(), now_ns
                )

    def _own(self) -> None:
        """Do what is due at `own_ns`, and set the next."""

    def _count(self) -> None:
        self.events += 1
        self.flow_events += self.transfers.flows

    def _timer(self, job: int) -> None:
        """A job arrives, a bucket is ready, or the backward pass is over."""
        run = self.runs[job]
        self._count()
        self.times_ns[_TIMER, job] = math.inf
        if run.phase is Phase.AWAY:
            self.set_changed = True
            if not self.warmup:
                self.measured_ns[job] = self.now_ns
            self.times_ns[_TIMER, job] = run.begin(self.now_ns)
        elif run.phase is Phase.TAIL or not run.steps:
            self._end(job)
        elif run.phase is Phase.WAITING:
            self._load(job)
        else:
            window_bytes = run.course.window_bytes
            self.transfers.open(job, window_bytes)
            run.open(self.now_ns)
            self._load(job)
            self.guards.begin(job, run.view(window_bytes), window_bytes)
            self.steering.ask_about(job)

    def _load(self, job: int, *, keeps_rate: bool = False) -> None:
        """Begin a job's next step."""
        run = self.runs[job]
        run.phase = Phase.SENDING
        step = run.steps[run.step]
        self.usage[job] = self.usages[job][run.step]
        self.transfers.load(job, step, self.now_ns, keeps_rate=keeps_rate)
        if not keeps_rate:
            self.steering.stale.add(job)

    def _step_over(self, job: int) -> None:
        """A job's step is through."""
        run, now_ns = self.runs[job], self.now_ns
        self._count()
        self.moved_bytes[job][run.step] += self.transfers.end(job)
        run.step += 1
        if run.step < len(run.steps):
            usages = self.usages[job]
            ready_ns = run.ready_ns[run.steps[run.step].bucket]
            if ready_ns <= now_ns + SAME_ns:
                self._load(job, keeps_rate=usages[run.step] == usages[run.step - 1])
                return
            run.phase = Phase.WAITING
            self.times_ns[_TIMER, job] = ready_ns
            self.steering.stale.add(job)
            return
        self.steering.stale.add(job)
        self.steering.ask_about(job)
        self.guards.end(job)
        run.close(now_ns)
        if run.compute_end_ns <= now_ns + SAME_ns:
            self._end(job)
        else:
            self.times_ns[_TIMER, job] = run.compute_end_ns

    def _end(self, job: int) -> None:
        """A job's iteration is over: it begins the next one, or leaves."""
        run, now_ns = self.runs[job], self.now_ns
        row = run.end(now_ns)
        if self.warmup <= run.iteration:
            self.busy_ns[job] += run.compute_ns
            if run.iteration < self.wanted[job]:
                self.rows.append(row)
        elif run.iteration + 1 == self.warmup:
            self.measured_ns[job] = now_ns
        if run.is_last:
            run.phase = Phase.AWAY
            self.left_ns[job] = now_ns
            self.set_changed = True
            self._count()
        else:
            self.times_ns[_TIMER, job] = run.begin(now_ns)

    def _regroup(self) -> None:
        """Another set of jobs is there."""
        self.set_changed = False
        there = [run for run in self.runs if run.is_there]
        meets = contention([run.course for run in there], self.topology)
        self.steering.regroup(meets, self.now_ns)

    def _share(self) -> None:
        """Give every job whose part of the network has changed its rate."""
        steering, transfers = self.steering, self.transfers
        components = set()
        for job in sorted(steering.stale):
            component = int(steering.component[job])
            if component >= 0:
                components.add(component)
            elif transfers.sending[job]:
                run = self.runs[job]
                alone_Bps = min(run.steps[run.step].alone_Bps, self._cap_Bps(job))
                transfers.set_rates(np.array([job]), np.array([alone_Bps]), self.now_ns)
        steering.stale.clear()
        for component in sorted(components):
            members = np.flatnonzero(transfers.sending & (steering.component == component))
            if members.size:
                transfers.set_rates(members, self._rates_Bps(members), self.now_ns)

    def _rates_Bps(self, members: NDArray[np.int64]) -> NDArray[np.float64]:
        """Rates of the jobs of a component that are sending."""
        caps_Bps = None
        if self.steering.paced:
            caps_Bps = [self._cap_Bps(job) for job in members.tolist()]
        return self.fabric.allocate(
            self.usage[members],
            self.guards.classes[members],
            self.steering.weight[members],
            caps_Bps,
            self.conditions.floor_share,
        )

    def _cap_Bps(self, job: int) -> float:
        """What a job is paced to, for each of its flows."""
        run = self.runs[job]
        if not run.assignment.share:
            return math.inf
        # A share is of the link that the job shares, not of what its flows could have.
        link_Bps = self.steering.link_Bps(job)
        stage = run.steps[run.step].stage
        flows = stage.flows[self.topology.capacity_Bps[stage.links] == link_Bps].max(initial=1.0)
        return float(run.assignment.share * link_Bps / flows)

    def _check_starved(self, *, at_once: bool = False) -> None:
        """Raise UsageError where a job does not get through."""
        slow = {
            (self.now_ns - run.begin_ns) / run.alone_period_ns: run.spec.name
            for run, wanted in zip(self.runs, self.wanted, strict=True)
            if run.is_there and run.iteration < wanted
        }
        if slow and (at_once or max(slow) > self.starved_after):
            raise StarvedError.of(slow[max(slow)])

    def _outcome(self) -> ClusterOutcome:
        now_ns, transfers = self.now_ns, self.transfers
        transfers.settle(np.arange(len(self.runs)), now_ns)
        link_bytes = np.zeros(self.topology.links)
        begin_ns = min(self.measured_ns)
        present = busy = 0.0
        for job, run in enumerate(self.runs):
            if run.phase is Phase.SENDING:
                self.moved_bytes[job][run.step] += transfers.sent_bytes(job)
            for step, moved in zip(run.steps, self.moved_bytes[job], strict=True):
                link_bytes[step.stage.links] += step.stage.flows * moved
            # By whole iterations, weighted with the time for which the job is there: what is under
            # way at the end would count as computation first.
            left_ns = min(now_ns, self.left_ns[job])
            last_ns = run.begin_ns if run.is_there else left_ns
            gpu_ns = run.spec.gpu_count * (left_ns - max(begin_ns, run.spec.arrival_ns))
            present += gpu_ns
            busy += gpu_ns * self.busy_ns[job] / (last_ns - self.measured_ns[job])
        counted = {
            run.spec.name: run.alone(self.warmup, wanted - self.warmup)
            for run, wanted in zip(self.runs, self.wanted, strict=True)
        }
        names = [run.spec.name for run in self.runs]
        return ClusterOutcome(
            iterations=tuple(self.rows),
            alone=counted,
            link_bytes=link_bytes,
            carried_bytes=dict(zip(names, transfers.carried_bytes.tolist(), strict=True)),
            resent_bytes=dict(zip(names, self.steering.resent_bytes, strict=True)),
            decisions=self.steering.decisions,
            events=self.events,
            flow_events=round(self.flow_events),
            begin_ns=begin_ns,
            end_ns=now_ns,
            utilisation=busy / present,
        )
