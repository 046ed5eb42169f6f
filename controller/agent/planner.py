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
from collections.abc import Callable, Iterable, Iterator, Mapping

from controller.agent.job_state import Iteration, JobState
from controller.agent.planned import Planned
from controller.agent.ranking import Ranking
from controller.agent.steering import Steering
from controller.dataplane import libbpf
from controller.errors import StellarError, UsageError
from controller.iteration.tracker import JobTracker
from controller.priority.policies import POLICIES, find_policy
from controller.priority.policy import OFF

log = logging.getLogger("stellar.planner")

# struct iteration_event of bpf/shared.h.
_EVENT = struct.Struct("<IIQQQQ")
_LATENCIES_KEPT = 1024
_RETRY_NS = 100_000_000
_CPU_PERIOD_NS = 5_000_000_000


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
        self.ranking = Ranking(steering, fds, max_slowdown, self._surviving)
        self._on_flow = on_flow
        self._note = note
        self.lock = threading.RLock()
        self._numbers: dict[int, Planned] = {}
        self.events = 0
        self._latencies_us: deque[float] = deque(maxlen=_LATENCIES_KEPT)
        self._cpu_share = 0.0
        self._cpu_at = (time.monotonic_ns(), time.process_time())
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing = threading.Event()
        # Events of before waited for us, not we for them.
        self._started_ns = time.monotonic_ns()
        self.set_policy(policy)
        self._ring = libbpf.RingBuffer(fds["events"], self._receive)
        self._thread = threading.Thread(target=self._run, name="stellar-planner", daemon=True)

    def start(self) -> None:
        """Begin to wait for events."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; plans that were written stay until they expire. May be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        os.write(self._wake_write, b"x")
        if self._thread.is_alive():
            self._thread.join()
        self._ring.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        if not self._closing.is_set():  # a rank may still report when the pipe is closed
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_write, b"x")

    # ---- policy ----

    @property
    def policy_name(self) -> str:
        """The policy in force, or ``off``."""
        return self.ranking.policy_name

    @property
    def paces(self) -> bool:
        """Whether the policy gives rates or shifts windows: ports must pace."""
        return self.policy_name != OFF and find_policy(self.policy_name).needs_pacing

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
            self.ranking.set_policy(name)
        self._wake()

    # ---- jobs ----

    def jobs_changed(self, states: Iterable[JobState]) -> None:
        """Jobs were added, changed or deleted; those that stay keep their history."""
        with self.lock:
            old = self.ranking.jobs
            self.ranking.jobs = {}
            for state in states:
                name = state.job.name
                known = old.get(name)
                is_same = known is not None and known.state is state
                self.ranking.jobs[name] = known if known and is_same else Planned(state)
            self._numbers = {each.state.number: each for each in self.ranking.jobs.values()}

    def find(self, name: str) -> Planned | None:
        """A job's iterations; hold `lock` while reading."""
        return self.ranking.jobs.get(name)

    def all(self) -> list[Planned]:
        """All jobs; hold `lock` while reading."""
        return list(self.ranking.jobs.values())

    def reported(
        self, name: str, is_open: bool, expected_bytes: int, sent_bytes: int, iteration: int
    ) -> None:
        """Take what the ranks of a job here say together.

        Parameters
        ----------
        is_open, expected_bytes
            See `JobTracker.reported`.
        sent_bytes
            Payload of the iteration that is sent.
        iteration
            By the ranks' own count.
        """
        with self.lock:
            planned = self.ranking.jobs.get(name)
            if planned is None:
                return
            now_ns = time.monotonic_ns()
            changed = planned.tracker.reported(now_ns, is_open, expected_bytes)
            by_reports = not planned.state.was_matched
            if by_reports != planned.by_reports:
                self._start_anew(planned, by_reports)
            if by_reports and changed:
                self._turned(planned, now_ns, is_open, sent_bytes, iteration)
            if by_reports:
                planned.done_bytes = max(0, sent_bytes - planned.sent_before)
            if changed and not is_open:
                self.plan_soon()  # the plan of its next window

    def _turned(
        self, planned: Planned, now_ns: int, is_open: bool, sent_bytes: int, iteration: int
    ) -> None:
        """Ranks of which we see no packet begin to send, or stop.

        Ranks that number their iterations may stop within one, between two collectives: then the
        number tells the windows. Others have a window for each time that they send.
        """
        tracker = planned.tracker
        if not is_open:
            planned.stopped = (now_ns, max(0, sent_bytes - planned.sent_before))
            if not planned.is_numbered:
                tracker.ended(*planned.stopped)
                planned.sent_before = sent_bytes
            return
        planned.is_numbered |= iteration != planned.told_iteration and tracker.start_ns > 0
        if planned.is_numbered and iteration == planned.told_iteration:
            return
        if iteration != planned.told_iteration:
            planned.sent_before = 0
        if planned.is_numbered and planned.stopped is not None:
            tracker.ended(*planned.stopped)
        planned.told_iteration, planned.stopped = iteration, None
        tracker.began(now_ns)
        tracker.learn()
        self.ranking.plan(now_ns, begun=planned)

    @staticmethod
    def _start_anew(planned: Planned, by_reports: bool) -> None:
        """Events come from another source now: what one has begun the other does not end."""
        planned.by_reports = by_reports
        planned.tracker = JobTracker()
        planned.sent_before, planned.stopped, planned.is_numbered = 0, None, False

    def plan_soon(self) -> None:
        """Rank all jobs again; hold `lock`."""
        self.ranking.must_plan, self.ranking.due_ns = True, time.monotonic_ns()
        self._wake()

    def forget_decision(self, name: str) -> None:
        """A plan by hand was cleared: the policy's is written anew."""
        with self.lock:
            planned = self.ranking.jobs.get(name)
            if planned is not None:
                planned.decision = None
                self.plan_soon()

    # ---- the thread ----

    def _run(self) -> None:
        fds = [self._ring.fileno(), self._wake_read]
        while not self._closing.is_set():
            due_ns = self.ranking.due_ns
            wait_s = None if due_ns is None else max(0, due_ns - time.monotonic_ns()) / 1e9
            ready, _, _ = select.select(fds, [], [], wait_s)
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            with self._surviving():
                if fds[0] in ready:
                    self._ring.consume()
                with self.lock:
                    self._note_cpu(time.monotonic_ns())
                    if (
                        self.ranking.due_ns is not None
                        and time.monotonic_ns() >= self.ranking.due_ns
                    ):
                        self.ranking.plan(time.monotonic_ns())

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        """What fails is told, and tried again in a moment: it must not end all planning."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, (StellarError, OSError)):
                log.exception("planning failed")
            self._note(f"planning failed: {error}")
            self.ranking.due_ns = time.monotonic_ns() + _RETRY_NS

    def _receive(self, record: bytes) -> None:
        # An error that left this would be lost in the library that calls it.
        with self._surviving():
            self._event(record)

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
            if planned.by_reports:
                self._start_anew(planned, by_reports=False)
            planned.held_ns, planned.shift_ns = planned.shift_ns, 0
            if planned.held_ns:
                self._steering.hold_departures(planned.state, start_ns + planned.held_ns)
            # The plan first: learning takes as long again.
            planned.tracker.began(start_ns)
            written = planned.plans_written
            self.ranking.plan(time.monotonic_ns(), begun=planned)
            if planned.plans_written > written and start_ns > self._started_ns:
                self._latencies_us.append((time.monotonic_ns() - start_ns) / 1000)
            seen_all = previous_start_ns and iteration == planned.iteration + 1
            planned.iteration = iteration
            ended = (last_ns, sent_bytes) if seen_all else ()
            if planned.tracker.learn(*ended):
                self.ranking.plan(time.monotonic_ns(), begun=planned)

    # ---- reports ----

    @property
    def plans_written(self) -> int:
        """Plans that were written, of all jobs."""
        return self.ranking.plans_written

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
