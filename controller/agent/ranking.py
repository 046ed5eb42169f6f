"""Which job of a link goes first: looks at the jobs, asks the policy, writes the plans.

No thread and no lock of its own: the planner's thread and requests call it under the planner's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from controller.agent import maps
from controller.agent.job_state import JobState
from controller.agent.planned import Decision, Planned
from controller.agent.steering import Steering
from controller.priority.jobs import JobPlan
from controller.priority.policies import find_policy
from controller.priority.policies.guard import guard_margin_ns
from controller.priority.policy import OFF, Assignment, JobView, Policy
from controller.priority.ranges import MAX_BYTES, MAX_RATE_Bps, MIN_RATE_Bps

_MS = 1_000_000
# A plan also covers the beginning of the next window, until the agent has seen it; when nobody
# renews it, the job is back at its default class after so many periods.
_VALID_PERIODS = 3.0
# A job that is not predicted after so many windows is not periodic; until then it is new. Jobs
# that are disturbed and compute a fifth longer now and then take 10 to 20; with 8, one of three
# was starved for good (1.73 times its undisturbed iteration instead of 1.27).
_LEARNING_WINDOWS = 32
_LEARNING_HOLDS_NS = 10_000_000_000
# Payload of a full packet to its bytes on the wire: 4096 of 4170 (path MTU 4096).
_PAYLOAD_SHARE = 0.98
# A window is looked at again this long after its expected end, and then each such share of it.
_LATE_SHARE = 0.1
_LEAST_WAIT_NS = 2 * _MS
# Last packets and credits of a window come this long after its bytes are complete. Far below a
# compute phase, far above a round trip.
_SETTLE_NS = 10 * _MS
_NONE = Assignment(0, 7, why="no plan: nothing is predicted")


class Ranking:
    """The jobs of one controller, in groups that share links.

    Parameters
    ----------
    steering
        Jobs and ports; writes the plans.
    fds
        Maps by name.
    max_slowdown
        Of jobs that name none.
    surviving
        Context in which a failure is told and does not reach the caller.
    """

    def __init__(
        self,
        steering: Steering,
        fds: Mapping[str, int],
        max_slowdown: float,
        surviving: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._steering = steering
        self._fds = fds
        self._max_slowdown = max_slowdown
        self._surviving = surviving
        self.jobs: dict[str, Planned] = {}
        self.policy_name = OFF
        # A policy may remember what it decided: one for each set of jobs that share a link.
        self._policies: dict[frozenset[str], Policy] = {}
        # When to plan again though nothing begins; None: nothing is awaited.
        self.due_ns: int | None = None
        # All groups, whether or not something is due.
        self.must_plan = False
        self.plans_written = 0

    def set_policy(self, name: str) -> None:
        """Rank by another policy from now on; plans of the one before are taken away."""
        self.policy_name = name
        self._policies.clear()
        for planned in self.jobs.values():
            self._take_plan(planned)
            planned.shift_ns = 0
        self.must_plan, self.due_ns = True, time.monotonic_ns()

    def plan(self, now_ns: int, begun: Planned | None = None) -> None:
        """Rank the jobs that share a link with `begun`, or those where something is due."""
        self.due_ns = None
        if self.policy_name == OFF:
            return
        everybody, self.must_plan = self.must_plan, False
        groups = {frozenset(each.name for each in group): group for group in self._groups()}
        self._policies = {
            names: self._policies.get(names) or find_policy(self.policy_name) for names in groups
        }
        for names, group in groups.items():
            policy = self._policies[names]
            with self._surviving():
                concerned = begun in group if begun else self._is_due(policy, group, now_ns)
                if concerned or everybody:
                    self._plan_group(policy, group, now_ns, begun)
                self._schedule(policy, group, now_ns)

    def _is_due(self, policy: Policy, group: list[Planned], now_ns: int) -> bool:
        """Whether a timer has to do with a group: a window is over, a laxity out, a tick due."""
        opened = [planned for planned in group if planned.is_open]
        if policy.tick_ns and len(opened) > 1:
            return True
        if any(each.settled_ns is not None and now_ns >= each.settled_ns for each in group):
            return True
        if any(each.guard_ns is not None and now_ns >= each.guard_ns for each in opened):
            return True
        if any(each.gap_ns > self._gap_ns(each, now_ns) for each in opened):
            return True
        return not all(self._still_open(planned, now_ns) for planned in opened)

    def _still_open(self, planned: Planned, now_ns: int) -> bool:
        planned.last_ns = 0
        if not planned.by_reports:
            progress = maps.read_progress(self._fds, planned.state.number)
            planned.done_bytes, planned.last_ns = int(progress["bytes"]), int(progress["last_ns"])
        return planned.tracker.is_open(
            now_ns, planned.done_bytes, planned.last_ns, self._gap_ns(planned, now_ns)
        )

    def _groups(self) -> list[list[Planned]]:
        """Jobs that share an interface, directly or by others; one without any stands alone."""
        groups: list[tuple[set[int], list[Planned]]] = []
        for planned in self.jobs.values():
            ports = set(planned.state.ports)
            members = [planned]
            apart = []
            for known_ports, known in groups:
                # Ranks of jobs whose packets we do not see may share any link of this host.
                if known_ports & ports or not (known_ports or ports):
                    ports |= known_ports
                    members = known + members
                else:
                    apart.append((known_ports, known))
            groups = [*apart, (ports, members)]
        return [members for _, members in groups]

    def look(self, planned: Planned, now_ns: int) -> JobView | None:
        """What the policy sees of a job; None: nothing is predicted."""
        state, tracker = planned.state, planned.tracker
        job = state.job
        planned.view = None
        planned.is_open = self._still_open(planned, now_ns)
        if not tracker.is_predicted:
            return None
        coming = tracker.prediction
        if planned.is_open:
            start_ns, expected = tracker.start_ns, tracker.expected_bytes(now_ns)
            done = planned.done_bytes
        else:
            start_ns, expected = round(coming.next_start_ns), round(coming.bytes or 0)
            if planned.last_ns > tracker.start_ns:
                # Others may have stretched its window: the compute phase begins when that ends.
                start_ns = planned.last_ns + round(coming.compute_ns)
            # Overdue: it may begin at any moment, and its deadline counts from then.
            start_ns = max(now_ns, start_ns)
            done = 0
        alone_Bps = tracker.alone_Bps(self._limit_Bps(state))
        if expected <= 0 or alone_Bps <= 0:
            return None
        compute_ns = max(0, round(coming.compute_ns))
        current = None
        if planned.is_open and planned.decision:
            # Also of a window that has just begun: its first packets have left in this class, and
            # a higher one would overtake them.
            current = planned.decision.assignment.class_floor
        planned.view = JobView(
            name=job.name,
            is_open=planned.is_open,
            window_start_ns=start_ns,
            expected_bytes=min(expected, MAX_BYTES),
            done_bytes=min(done, MAX_BYTES),
            alone_Bps=alone_Bps,
            compute_ns=compute_ns,
            max_slowdown=self.max_slowdown(planned),
            slowdown=tracker.slowdown(alone_Bps),
            traffic_class=job.traffic_class,
            class_floor=job.class_floor,
            class_ceiling=job.class_ceiling,
            current_class=current,
            work=float(job.gpus) * compute_ns,
        )
        return planned.view

    def max_slowdown(self, planned: Planned) -> float:
        """The bound of a job."""
        return planned.state.job.max_slowdown or self._max_slowdown

    def _gap_ns(self, planned: Planned, now_ns: int) -> int:
        """Silence that ends its window. While others go first it may be silent for long.

        But not for more than an iteration and a half: its compute phase may have become shorter,
        and its windows run into one another.
        """
        job, tracker, decision = planned.state.job, planned.tracker, planned.decision
        default_ns = self._steering.gap_ns(job)
        waits = planned.is_open and decision is not None and bool(decision.assignment.waits_for)
        waits = waits and now_ns - tracker.start_ns < 1.5 * tracker.prediction.period_ns
        if job.gap_ns and not waits:
            return default_ns + planned.held_ns  # as it was configured
        return tracker.gap_ns(default_ns, waits) + planned.held_ns

    def _limit_Bps(self, state: JobState) -> float:
        """What all links of a job carry together, as payload; 0: one is not known."""
        rates = [self._steering.link_Bps([port]) for port in state.ports]
        return sum(rates) * _PAYLOAD_SHARE if all(rates) else 0.0

    def _plan_group(
        self, policy: Policy, group: list[Planned], now_ns: int, begun: Planned | None
    ) -> None:
        looks = [(planned, self.look(planned, now_ns)) for planned in group]
        views = [view for _, view in looks if view is not None]
        ports = {port for planned in group for port in planned.state.ports}
        link_Bps = self._steering.link_Bps(ports)
        payload_Bps = link_Bps * _PAYLOAD_SHARE or max((v.alone_Bps for v in views), default=0.0)
        decided = policy.assign(now_ns, views, payload_Bps) if views else {}
        # The one that begins now comes first: its packets are on their way.
        for planned, view in sorted(looks, key=lambda look: look[0] is not begun):
            assignment = decided.get(planned.name)
            planned.guard_ns = planned.settled_ns = None
            if assignment is not None:
                planned.shift_ns = planned.shift_ns or assignment.shift_ns
            if view is not None and assignment is not None and assignment.waits_for:
                laxity_ns = view.laxity_ns(now_ns) - guard_margin_ns(
                    view, len(assignment.waits_for), payload_Bps
                )
                planned.guard_ns = now_ns + round(laxity_ns) if laxity_ns > 0 else None
            if view is None and views and policy.newcomers_first and self._is_new(planned):
                # In mid-window it would rise, and its packets overtake one another.
                if planned is begun or not planned.is_open:
                    self._put_first(planned, now_ns)
            elif view is None or assignment is None:
                self._take_plan(planned)
            else:
                is_new = planned is begun or planned.is_next == planned.is_open
                if self._is_settling(planned, now_ns):
                    continue
                self._decide(planned, view, assignment, now_ns, is_new, link_Bps)

    @staticmethod
    def _is_settling(planned: Planned, now_ns: int) -> bool:
        """Whether a window is over by its bytes and its last packets may still be under way.

        With the plan of the next window they might rise and overtake those before them.
        """
        settled_ns = planned.last_ns + _SETTLE_NS
        waits = not planned.is_open and not planned.is_next and now_ns < settled_ns
        planned.settled_ns = settled_ns if waits and planned.decision else None
        return planned.settled_ns is not None

    def _decide(
        self,
        planned: Planned,
        view: JobView,
        assignment: Assignment,
        now_ns: int,
        is_new: bool,
        link_Bps: int,
    ) -> None:
        """Write a job's plan if the decision, or the window that it is about, is another one."""
        old = planned.decision.assignment if planned.decision else None
        same = old is not None and (old.class_floor, old.class_ceiling, old.share) == (
            assignment.class_floor, assignment.class_ceiling, assignment.share,
        )  # fmt: skip
        period_ns = max(view.ideal_period_ns, planned.tracker.prediction.period_ns)
        gap_ns = self._gap_ns(planned, now_ns)
        holds = now_ns + period_ns < planned.valid_until_ns and gap_ns == planned.gap_ns
        if same and holds and not is_new:
            planned.decision = Decision(now_ns, assignment)
            return
        rate_Bps = view.alone_Bps
        paced = bool(assignment.share and link_Bps)
        if paced:
            rate_Bps = assignment.share * link_Bps
        window_ns = max(1, round(view.ideal_window_ns))
        deadline_ns = max(view.window_start_ns + 1, round(view.deadline_ns))
        valid_until_ns = max(deadline_ns, now_ns) + round(_VALID_PERIODS * period_ns)
        plan = JobPlan(
            job=planned.name,
            expected_bytes=max(1, view.expected_bytes),
            window_start_ns=view.window_start_ns,
            deadline_ns=deadline_ns,
            valid_until_ns=valid_until_ns,
            rate_Bps=min(MAX_RATE_Bps, max(MIN_RATE_Bps, round(rate_Bps))),
            gap_ns=gap_ns,
            class_floor=assignment.class_floor,
            class_ceiling=assignment.class_ceiling,
            pace=paced,
        )
        if not self._steering.write_policy_plan(planned.state, plan, window_ns):
            planned.decision = None  # a plan by hand holds
            return
        planned.decision = Decision(now_ns, assignment)
        if not same:
            planned.history.append(planned.decision)
        planned.is_next = not planned.is_open
        planned.gap_ns, planned.valid_until_ns = gap_ns, valid_until_ns
        planned.plans_written += 1
        self.plans_written += 1

    @staticmethod
    def _is_new(planned: Planned) -> bool:
        """Whether too little is known of a job to say that it is not periodic."""
        tracker = planned.tracker
        return tracker.start_ns > 0 and len(tracker.past) < _LEARNING_WINDOWS

    def _put_first(self, planned: Planned, now_ns: int) -> None:
        """The highest class for a job that is being learned; renewed with each of its windows."""
        job = planned.state.job
        start_ns = planned.tracker.start_ns
        if planned.decision is not None and planned.learning_ns == start_ns:
            return
        plan = JobPlan(
            job=planned.name,
            expected_bytes=1,
            window_start_ns=start_ns,
            deadline_ns=start_ns + 1,
            valid_until_ns=now_ns + _LEARNING_HOLDS_NS,
            rate_Bps=0,
            gap_ns=0,
            class_floor=job.class_ceiling,
            class_ceiling=job.class_ceiling,
        )
        if self._steering.write_policy_plan(planned.state, plan, is_predicted=False):
            first = planned.decision is None
            planned.learning_ns = start_ns
            planned.decision = Decision(
                now_ns,
                Assignment(job.class_ceiling, job.class_ceiling, why="its iterations are learned"),
            )
            if first:
                planned.history.append(planned.decision)
            planned.plans_written += 1
            self.plans_written += 1

    def _take_plan(self, planned: Planned) -> None:
        """A job that nobody ranks has its default class."""
        if planned.decision is None:
            return
        planned.decision, planned.is_next = None, False
        planned.history.append(Decision(time.monotonic_ns(), _NONE))
        self._steering.write_policy_plan(planned.state, None)

    # ---- when to look again ----

    def _schedule(self, policy: Policy, group: list[Planned], now_ns: int) -> None:
        """Look again when a window should be over, a laxity runs out, or the policy ticks."""
        opened = [planned for planned in group if planned.is_open]
        dues: list[float] = [each.settled_ns for each in group if each.settled_ns is not None]
        if policy.tick_ns and len(opened) > 1:
            dues.append(now_ns + policy.tick_ns)
        for planned in opened:
            tracker = planned.tracker
            if not tracker.is_predicted:
                continue
            length_ns = max(tracker.current.window_ns, 1.0)
            late_ns = max(_LEAST_WAIT_NS, _LATE_SHARE * length_ns)
            dues.append(max(tracker.start_ns + length_ns, now_ns) + late_ns)
            if planned.gap_ns > self._gap_ns(planned, now_ns):
                dues.append(now_ns + _LEAST_WAIT_NS)
            if planned.guard_ns is not None:
                dues.append(max(planned.guard_ns, now_ns + _LEAST_WAIT_NS))
        if dues:
            due_ns = round(min(dues))
            self.due_ns = due_ns if self.due_ns is None else min(self.due_ns, due_ns)
