"""Iteration events -> prediction -> policy -> plans in the dataplane.

A thread of its own waits for the dataplane's events, so that a slow request or a look at the
interfaces does not delay a plan. It takes nothing but its own lock; the decisions are the
policy's, which is pure.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from controller.agent import maps
from controller.agent.job_state import Iteration, JobState
from controller.agent.steering import Steering
from controller.dataplane import libbpf
from controller.errors import StellarError, UsageError
from controller.iteration.tracker import JobTracker
from controller.priority.jobs import JobPlan
from controller.priority.policies import POLICIES, find_policy
from controller.priority.policies.guard import guard_margin_ns
from controller.priority.policy import OFF, Assignment, JobView, Policy
from controller.priority.ranges import MAX_BYTES, MAX_RATE_Bps, MIN_RATE_Bps

log = logging.getLogger("stellar.planner")

_MS = 1_000_000
# struct iteration_event of bpf/shared.h.
_EVENT = struct.Struct("<IIQQQQ")
# A plan also covers the beginning of the next window, until the agent has seen it; when nobody
# renews it, the job is back at its default class after so many periods.
_VALID_PERIODS = 3.0
# A job that is not predicted after so many windows is not periodic; until then it is new.
_LEARNING_WINDOWS = 8
_LEARNING_HOLDS_NS = 10_000_000_000
_HISTORY_KEPT = 16
_LATENCIES_KEPT = 1024
# Payload of a full packet to its bytes on the wire: 4096 of 4170 (path MTU 4096).
_PAYLOAD_SHARE = 0.98
# A window is looked at again this long after its expected end, and then each such share of it.
_LATE_SHARE = 0.1
_LEAST_WAIT_NS = 2 * _MS
# Last packets and credits of a window come this long after its bytes are complete. Far below a
# compute phase, far above a round trip.
_SETTLE_NS = 10 * _MS
_CPU_PERIOD_NS = 5_000_000_000


@dataclass(frozen=True)
class Decision:
    """An assignment of a policy, and when it was made."""

    at_ns: int
    assignment: Assignment


@dataclass
class Planned:
    """A job with its iterations and what the policy said of it last.

    ``is_next``: its plan is about the next window, which has not begun.
    """

    state: JobState
    tracker: JobTracker = field(default_factory=JobTracker)
    decision: Decision | None = None
    is_next: bool = False
    iteration: int = 0
    done_bytes: int = 0
    last_ns: int = 0
    is_open: bool = False
    # Without packets that we see, its ranks' reports are the events.
    by_reports: bool = False
    # Begin of the window for which it was put first to be learned.
    learning_ns: int = 0
    # Of its next window, until that begins.
    shift_ns: int = 0
    view: JobView | None = None
    # When the plan of its next window may be written, should that wait.
    settled_ns: int | None = None
    # When its laxity has run out, should it still wait then.
    guard_ns: int | None = None
    history: deque[Decision] = field(default_factory=lambda: deque(maxlen=_HISTORY_KEPT))
    plans_written: int = 0

    @property
    def name(self) -> str:
        """Of the job."""
        return self.state.job.name


class Planner:
    """Predicts the jobs of one controller and ranks them.

    Parameters
    ----------
    steering
        Jobs and ports; writes the plans.
    fds
        Maps by name.
    max_slowdown
        Of jobs that name none.
    policy
        Name of the policy, or ``off``.
    on_flow
        Gets the record of a new flow; called in this thread.
    note
        Gets what a user should read.
    """

    def __init__(
        self,
        steering: Steering,
        fds: Mapping[str, int],
        policy: str,
        max_slowdown: float,
        on_flow: Callable[[bytes], None],
        note: Callable[[str], None],
    ) -> None:
        self._steering = steering
        self._fds = fds
        self._max_slowdown = max_slowdown
        self._on_flow = on_flow
        self._note = note
        self.lock = threading.RLock()
        self._jobs: dict[str, Planned] = {}
        self._numbers: dict[int, Planned] = {}
        self._policy_name = OFF
        # A policy may remember what it decided: one for each set of jobs that share a link.
        self._policies: dict[frozenset[str], Policy] = {}
        self._due_ns: int | None = None
        # All groups, whether or not something is due.
        self._must_plan = False
        self.events = 0
        self.plans_written = 0
        self._latencies_us: deque[float] = deque(maxlen=_LATENCIES_KEPT)
        self._cpu_share = 0.0
        self._cpu_at = (time.monotonic_ns(), time.process_time())
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing = threading.Event()
        self.set_policy(policy)
        self._ring = libbpf.RingBuffer(fds["events"], self._event)
        self._thread = threading.Thread(target=self._run, name="stellar-planner", daemon=True)

    def start(self) -> None:
        """Begin to wait for events."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; plans that were written stay until they expire. May be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join()
        self._ring.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    # ---- policy ----

    @property
    def policy_name(self) -> str:
        """The policy in force, or ``off``."""
        return self._policy_name

    @property
    def paces(self) -> bool:
        """Whether the policy gives rates or shifts windows: ports must pace."""
        return self._policy_name != OFF and find_policy(self._policy_name).needs_pacing

    def set_policy(self, name: str) -> None:
        """Rank by another policy from now on; plans of the one before are taken away.

        Raises
        ------
        UsageError
            There is no such policy; names those that are.
        """
        if name != OFF and name not in POLICIES:
            allowed = ", ".join((*POLICIES, OFF))
            raise UsageError(f"Policy is {name!r}; allowed: {allowed}.")
        with self.lock:
            self._policy_name = name
            self._policies.clear()
            for planned in self._jobs.values():
                self._take_plan(planned)
                planned.shift_ns = 0
            self._must_plan = True
            self._due_ns = time.monotonic_ns()
        self._wake()

    # ---- jobs ----

    def jobs_changed(self, states: Iterable[JobState]) -> None:
        """Jobs were added, changed or deleted; those that stay keep their history."""
        with self.lock:
            old = self._jobs
            self._jobs = {}
            for state in states:
                name = state.job.name
                known = old.get(name)
                is_same = known is not None and known.state is state
                self._jobs[name] = known if known and is_same else Planned(state)
            self._numbers = {each.state.number: each for each in self._jobs.values()}

    def find(self, name: str) -> Planned | None:
        """A job's iterations; hold `lock` while reading."""
        return self._jobs.get(name)

    def all(self) -> list[Planned]:
        """All jobs; hold `lock` while reading."""
        return list(self._jobs.values())

    def reported(self, name: str, is_open: bool, expected_bytes: int, sent_bytes: int) -> None:
        """Take what the ranks of a job say; see `JobTracker.reported`."""
        with self.lock:
            planned = self._jobs.get(name)
            if planned is None:
                return
            now_ns = time.monotonic_ns()
            changed = planned.tracker.reported(now_ns, is_open, expected_bytes)
            planned.by_reports = not planned.state.was_matched
            if planned.by_reports:
                planned.done_bytes = sent_bytes
                if changed and is_open:
                    planned.tracker.began(now_ns)
                    planned.tracker.learn()
                    self._plan(now_ns, begun=planned)
                elif changed:
                    planned.tracker.ended(now_ns, sent_bytes)
            if changed and not is_open:
                self._must_plan, self._due_ns = True, now_ns  # the plan of its next window
                self._wake()

    # ---- the thread ----

    def _run(self) -> None:
        fds = [self._ring.fileno(), self._wake_read]
        while not self._closing.is_set():
            due_ns = self._due_ns
            wait_s = None if due_ns is None else max(0, due_ns - time.monotonic_ns()) / 1e9
            ready, _, _ = select.select(fds, [], [], wait_s)
            try:
                if self._wake_read in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                if fds[0] in ready:
                    self._ring.consume()
                with self.lock:
                    if self._due_ns is not None and time.monotonic_ns() >= self._due_ns:
                        self._plan(time.monotonic_ns())
            except (StellarError, OSError) as error:
                self._note(f"planning failed: {error}")
            except Exception as error:  # a defect here must not end all planning
                log.exception("planning failed")
                self._note(f"planning failed: {error!r}; the log has more")
                self._due_ns = None

    def _event(self, record: bytes) -> None:
        if len(record) != _EVENT.size:
            self._on_flow(record)
            return
        number, iteration, start_ns, previous_start_ns, last_ns, sent_bytes = _EVENT.unpack(record)
        with self.lock:
            self.events += 1
            planned = self._numbers.get(number)
            if planned is None:
                return
            if previous_start_ns:
                planned.state.last_iteration = Iteration(
                    iteration - 1,
                    sent_bytes,
                    last_ns - previous_start_ns,
                    start_ns - previous_start_ns,
                )
            planned.by_reports = False
            if planned.shift_ns:
                self._steering.hold_departures(planned.state, start_ns + planned.shift_ns)
                planned.shift_ns = 0
            # The plan first: learning takes as long again.
            planned.tracker.began(start_ns)
            self._plan(time.monotonic_ns(), begun=planned)
            self._latencies_us.append((time.monotonic_ns() - start_ns) / 1000)
            seen_all = iteration == planned.iteration + 1
            planned.iteration = iteration
            ended = (last_ns, sent_bytes) if seen_all else ()
            if planned.tracker.learn(*ended):
                self._plan(time.monotonic_ns(), begun=planned)

    # ---- planning ----

    def _plan(self, now_ns: int, begun: Planned | None = None) -> None:
        """Rank the jobs that share a link with `begun`, or those where something is due."""
        self._due_ns = None
        self._note_cpu(now_ns)
        if self._policy_name == OFF:
            return
        everybody, self._must_plan = self._must_plan, False
        groups = {frozenset(each.name for each in group): group for group in self._groups()}
        self._policies = {
            names: self._policies.get(names) or find_policy(self._policy_name) for names in groups
        }
        for names, group in groups.items():
            policy = self._policies[names]
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
        return not all(self._still_open(planned, now_ns) for planned in opened)

    def _still_open(self, planned: Planned, now_ns: int) -> bool:
        planned.last_ns = 0
        if not planned.by_reports:
            progress = maps.read_progress(self._fds, planned.state.number)
            planned.done_bytes, planned.last_ns = int(progress["bytes"]), int(progress["last_ns"])
        return planned.tracker.is_open(
            now_ns, planned.done_bytes, planned.last_ns, self._gap_ns(planned)
        )

    def _groups(self) -> list[list[Planned]]:
        """Jobs that share an interface, directly or by others; one without any stands alone."""
        groups: list[tuple[set[int], list[Planned]]] = []
        for planned in self._jobs.values():
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

    def _gap_ns(self, planned: Planned) -> int:
        job = planned.state.job
        default_ns = self._steering.gap_ns(job)
        decision = planned.decision
        waits = planned.is_open and decision is not None and bool(decision.assignment.waits_for)
        if job.gap_ns and not waits:
            return default_ns  # as it was configured
        return planned.tracker.gap_ns(default_ns, waits)

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
            planned.guard_ns = None
            if view is not None and assignment is not None and assignment.waits_for:
                laxity_ns = view.laxity_ns(now_ns) - guard_margin_ns(
                    view, len(assignment.waits_for), payload_Bps
                )
                planned.guard_ns = now_ns + round(laxity_ns) if laxity_ns > 0 else None
            if view is None and policy.newcomers_first and self._is_new(planned):
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
        planned.shift_ns = planned.shift_ns or assignment.shift_ns
        old = planned.decision.assignment if planned.decision else None
        same = old is not None and (old.class_floor, old.class_ceiling, old.share) == (
            assignment.class_floor, assignment.class_ceiling, assignment.share,
        )  # fmt: skip
        if same and not is_new:
            planned.decision = Decision(now_ns, assignment)
            return
        rate_Bps = view.alone_Bps
        paced = bool(assignment.share and link_Bps)
        if paced:
            rate_Bps = assignment.share * link_Bps
        window_ns = max(1, round(view.ideal_window_ns))
        deadline_ns = max(view.window_start_ns + 1, round(view.deadline_ns))
        period_ns = max(view.ideal_period_ns, planned.tracker.prediction.period_ns)
        valid_until_ns = max(deadline_ns, view.window_start_ns) + round(_VALID_PERIODS * period_ns)
        plan = JobPlan(
            job=planned.name,
            expected_bytes=max(1, view.expected_bytes),
            window_start_ns=view.window_start_ns,
            deadline_ns=deadline_ns,
            valid_until_ns=valid_until_ns,
            rate_Bps=min(MAX_RATE_Bps, max(MIN_RATE_Bps, round(rate_Bps))),
            gap_ns=self._gap_ns(planned),
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
        if self._steering.write_policy_plan(planned.state, plan):
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
            if planned.guard_ns is not None:
                dues.append(max(planned.guard_ns, now_ns + _LEAST_WAIT_NS))
        if dues:
            due_ns = round(min(dues))
            self._due_ns = due_ns if self._due_ns is None else min(self._due_ns, due_ns)

    # ---- reports ----

    def latency_us(self) -> tuple[float, float] | None:
        """Event -> plan in the map: p50 and p99 of the last thousand, in us."""
        with self.lock:
            values = sorted(self._latencies_us)
        if not values:
            return None
        return values[len(values) // 2], values[min(len(values) - 1, len(values) * 99 // 100)]

    def _note_cpu(self, now_ns: int) -> None:
        then_ns, used_s = self._cpu_at
        if now_ns - then_ns >= _CPU_PERIOD_NS:
            now_s = time.process_time()
            self._cpu_share = (now_s - used_s) * 1e9 / (now_ns - then_ns)
            self._cpu_at = (now_ns, now_s)

    def cpu_share(self) -> float:
        """Processor time of this process over wall time, of late; 1: one processor."""
        with self.lock:
            self._note_cpu(time.monotonic_ns())
            return self._cpu_share


_NONE = Assignment(0, 7, why="no plan: nothing is predicted")
