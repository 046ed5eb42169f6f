"""One job while it is simulated: its iteration, its class, and how the policy sees it."""

from __future__ import annotations

import math

from controller.priority.policy import Assignment, JobView
from controller.sim.conditions import Conditions
from controller.sim.jobs import SimJob
from controller.sim.laxity_class import laxity_class, until_next_class_ns
from controller.sim.measures import Iteration
from controller.sim.slowdown import RecentSlowdown

# A window with less than this to go is over: floating point leaves about 1e-6 of a byte.
END_bytes = 1e-3


class JobState:
    """One job while it is simulated."""

    def __init__(self, spec: SimJob, conditions: Conditions, seed: int) -> None:
        self.spec = spec
        self.conditions = conditions
        self.seed = seed
        self.compute_ns: list[float] = []
        self.errors: list[tuple[float, float]] = []
        self.iteration = -1
        self.is_open = False
        self.compute_begin_ns = 0.0
        self.begin_ns = 0.0  # of the window that is open, or the next
        self.predicted_ns = 0.0
        self.expected_bytes = 0
        self.total_bytes = 0.0
        self.done_bytes = 0.0
        self.rate_Bps = 0.0
        self.assignment = Assignment(spec.traffic_class, spec.traffic_class)
        self.class_now = spec.traffic_class
        self.class_next = spec.traffic_class
        self.switch_bytes = 0.0
        self.guard_ns = math.inf
        self.shift_ns = 0.0  # of the next window, told while one is open
        self._slowdown = RecentSlowdown()
        self.carried_bytes = 0.0
        self.resent_bytes = 0.0
        self.next_iteration(spec.offset_ns)

    def next_iteration(self, now_ns: float) -> None:
        """Begin to compute."""
        self.iteration += 1
        if self.iteration >= len(self.compute_ns):
            self._draw(max(64, 2 * self.iteration))
        self.is_open = False
        self.compute_begin_ns = now_ns
        self.begin_ns = now_ns + self.compute_ns[self.iteration] + self.shift_ns
        start_error, bytes_error = self.errors[self.iteration]
        self.predicted_ns = now_ns + self.spec.compute_ns * (1 + start_error) + self.shift_ns
        self.shift_ns = 0.0
        self.expected_bytes = max(1, round(self.spec.window_bytes * (1 + bytes_error)))
        self.total_bytes = float(self.spec.window_bytes)
        self.done_bytes = 0.0
        self.rate_Bps = 0.0
        self.guard_ns = math.inf

    def shift(self, shift_ns: float) -> None:
        """Let the next window begin later; while one is open, that is the one after it."""
        if self.is_open:
            # As in the agent, the first one told holds.
            self.shift_ns = self.shift_ns or shift_ns
            return
        self.begin_ns += shift_ns
        self.predicted_ns += shift_ns

    def _draw(self, count: int) -> None:
        self.compute_ns = self.spec.compute_times_ns(count, self.seed)
        self.errors = self.conditions.prediction_errors(self.spec.name, count, self.seed)

    def view(self) -> JobView:
        """As the policy sees it."""
        spec, link_Bps = self.spec, self.conditions.link_Bps
        return JobView(
            name=spec.name,
            is_open=self.is_open,
            window_start_ns=round(self.begin_ns if self.is_open else self.predicted_ns),
            expected_bytes=self.expected_bytes,
            done_bytes=round(self.done_bytes),
            alone_Bps=link_Bps,
            compute_ns=round(spec.compute_ns),
            max_slowdown=spec.max_slowdown,
            slowdown=self._slowdown.value,
            traffic_class=spec.traffic_class,
            class_floor=spec.class_floor,
            class_ceiling=spec.class_ceiling,
            current_class=self.class_next if self.is_open else None,
            work=spec.work,
        )

    def end(self, now_ns: float) -> Iteration:
        """End the iteration and begin the next; what it leaves behind."""
        row = Iteration(
            self.spec.name, self.iteration, self.compute_begin_ns, self.begin_ns, now_ns
        )
        compute_ns = row.window_begin_ns - row.compute_begin_ns
        alone_ns = compute_ns + self.spec.window_ns(self.conditions.link_Bps)
        self._slowdown.add(row.duration_ns, alone_ns)
        self.next_iteration(now_ns)
        return row

    def wanted_class(self, view: JobView, now_ns: float) -> int:
        """The class that the dataplane gives within the limits in force, by laxity."""
        limits = self.assignment
        if limits.class_floor >= limits.class_ceiling:
            return limits.class_floor
        current = self.class_now if self.is_open and self.done_bytes else 0
        return laxity_class(limits, view.laxity_ns(round(now_ns)), current)

    def choose(self, now_ns: float) -> None:
        """Take the class that is called for; at the next message boundary where one is open."""
        wanted = self.wanted_class(self.view(), now_ns)
        if not self.is_open or self.done_bytes <= 0:
            self.class_now = self.class_next = wanted
            return
        self.class_next = wanted
        message_bytes = self.conditions.message_bytes
        if wanted == self.class_now:
            return
        self.switch_bytes = self.done_bytes
        if message_bytes:
            # What is sent so far may be a hair below a boundary that has just been reached.
            messages = math.ceil((self.done_bytes - END_bytes) / message_bytes)
            self.switch_bytes = max(self.done_bytes, float(messages * message_bytes))

    def switch(self) -> None:
        """Go over to the class that is called for, once the boundary is reached."""
        if not self.is_open or self.class_next == self.class_now:
            return
        if self.done_bytes + END_bytes < self.switch_bytes:
            return
        if self.class_next > self.class_now:
            again = min(float(self.conditions.raise_bytes), self.done_bytes)
            self.total_bytes += again
            self.resent_bytes += again
        self.class_now = self.class_next

    def crossing_ns(self, now_ns: float) -> float:
        """When laxity reaches the next threshold within the limits in force."""
        limits = self.assignment
        falls = 1 - self.rate_Bps / self.conditions.link_Bps
        if limits.class_floor >= limits.class_ceiling or falls <= 0:
            return math.inf
        laxity = self.view().laxity_ns(round(now_ns))
        return now_ns + until_next_class_ns(limits, laxity, self.class_next, falls)
