"""One job of a cluster while it is simulated: its iterations, and how the coordinator sees it."""

from __future__ import annotations

import enum
import math
from typing import Any

from controller.priority.policy import Assignment, JobView
from controller.sim.cluster.course import Course
from controller.sim.cluster.outcome import ClusterConditions
from controller.sim.laxity_class import laxity_class, until_next_class_ns
from controller.sim.measures import Alone, Iteration
from controller.sim.slowdown import RecentSlowdown

_FIRST_DRAW = 64


class Phase(enum.Enum):
    """Where a job is in its iteration."""

    AWAY = "not there yet, or left"
    COMPUTING = "no bucket is ready"
    SENDING = "a bucket is on its way"
    WAITING = "all ready buckets are through, others are to come"
    TAIL = "all buckets are through, the backward pass goes on"


class JobRun:
    """One job while it is simulated.

    Parameters
    ----------
    course
        What it sends.
    conditions
        How well its iterations are predicted.
    seed
        Of its compute times and of what is predicted wrongly.
    """

    def __init__(self, course: Course, conditions: ClusterConditions, seed: int) -> None:
        self.course = course
        self.spec = spec = course.job
        self.steps = course.steps
        self._conditions = conditions
        self._seed = seed
        self.phase = Phase.AWAY
        self.iteration = -1
        self.begin_ns = 0.0
        self.window_begin_ns = 0.0
        self.window_end_ns = 0.0
        self.ready_ns: list[float] = []  # of each bucket
        self.compute_end_ns = 0.0
        self.step = 0
        self.compute_ns = 0.0  # of this iteration
        self.default = Assignment(spec.traffic_class, spec.traffic_class)
        self.assignment = self.default
        self.class_now = spec.traffic_class
        self._shift_ns = 0.0  # of the next window, told while one is open
        self._slowdown = RecentSlowdown()
        self._factors: list[float] = []
        self._draw(_FIRST_DRAW)
        mean = course.undisturbed([spec.mean_factor])
        self.alone_period_ns = float(mean.duration_ns[0])
        # From the end of a window to the begin of the next, and what of it is in the iteration
        # of the next: the rest is backward pass after the window.
        self._gap_ns = float(mean.duration_ns[0] - mean.window_ns[0])
        self._lead_ns = float(mean.lead_ns[0])
        self._predicted_ns = spec.arrival_ns + self._lead_ns
        self._expected_bytes = max(1, round(course.window_bytes))
        window_ns = float(mean.window_ns[0])
        self.alone_Bps = course.window_bytes / window_ns * 1e9 if window_ns else 0.0
        compute_ns = spec.forward_ns + spec.backward_ns
        self._fixed: dict[str, Any] = {
            "name": spec.name,
            "alone_Bps": self.alone_Bps,
            "compute_ns": round(self._gap_ns),
            "max_slowdown": spec.max_slowdown,
            "traffic_class": spec.traffic_class,
            "class_floor": spec.class_floor,
            "class_ceiling": spec.class_ceiling,
            "work": float(spec.gpu_count) * compute_ns,
            "traffic_ns": self._traffic_ns(),
        }
        self._idle_view: JobView | None = None
        self._open_view: dict[str, Any] = {}

    def _traffic_ns(self) -> int:
        """See `JobView.traffic_ns`; 0 where no bucket waits for the backward pass."""
        sending_ns = self.course.sending_ns(0)
        window_ns = self.course.window_bytes / self.alone_Bps * 1e9 if self.alone_Bps else 0.0
        return round(sending_ns) if sending_ns < window_ns * (1 - 1e-6) else 0

    @property
    def alone_ns(self) -> float:
        """How long this very iteration would take undisturbed."""
        return self._durations_ns[self.iteration]

    @property
    def slowdown(self) -> float:
        """Of the last iterations, as the agent knows it."""
        return self._slowdown.value

    @property
    def is_open(self) -> bool:
        """Whether its sync window is open."""
        return self.phase is Phase.SENDING or self.phase is Phase.WAITING

    @property
    def is_there(self) -> bool:
        """Whether it has arrived and not left."""
        return self.phase is not Phase.AWAY

    @property
    def is_last(self) -> bool:
        """Whether it leaves after this iteration."""
        return self.iteration + 1 == self.spec.iterations

    def begin(self, now_ns: float) -> float:
        """Begin an iteration; return when its first bucket is ready."""
        self.iteration += 1
        if self.iteration >= len(self._factors):
            self._draw(2 * self.iteration)
        factor = self._factors[self.iteration]
        spec, course = self.spec, self.course
        self.phase = Phase.COMPUTING
        self.begin_ns = now_ns
        start_ns = now_ns + self._shift_ns
        self.compute_ns = factor * (spec.forward_ns + spec.backward_ns)
        self.compute_end_ns = start_ns + self.compute_ns
        self.ready_ns = [
            start_ns + factor * course.ready_ns(bucket) for bucket in range(len(spec.buckets))
        ]
        self.step = 0
        start_error, bytes_error = self._errors[self.iteration]
        # Where the backward pass outlasts the window, part of the gap is over.
        gone_ns = now_ns - self.window_end_ns if self.iteration else self._gap_ns - self._lead_ns
        self._predicted_ns = start_ns + self._gap_ns * (1 + start_error) - gone_ns
        self._expected_bytes = max(1, round(course.window_bytes * (1 + bytes_error)))
        self._shift_ns = 0.0
        self._idle_view = None
        return self.ready_ns[0] if self.steps else self.compute_end_ns

    def open(self, now_ns: float) -> None:
        """The first bucket is ready."""
        self.phase = Phase.SENDING
        self.window_begin_ns = now_ns
        view = self._view(True, now_ns)
        # What is derived from these members stays as well as they do.
        self._open_view = {
            **view.__dict__,
            "ideal_window_ns": view.ideal_window_ns,
            "ideal_period_ns": view.ideal_period_ns,
            "deadline_ns": view.deadline_ns,
        }

    def close(self, now_ns: float) -> None:
        """The last bucket is through: until the iteration ends, the backward pass goes on."""
        self.window_end_ns = now_ns
        self.phase = Phase.TAIL
        self._predicted_ns = now_ns + self._gap_ns
        self._idle_view = None

    def end(self, now_ns: float) -> Iteration:
        """What the iteration leaves behind."""
        if not self.steps:
            self.window_begin_ns = self.window_end_ns = now_ns
        row = Iteration(
            self.spec.name,
            self.iteration,
            self.begin_ns,
            self.window_begin_ns,
            self.window_end_ns,
            self.compute_end_ns,
        )
        self._slowdown.add(row.duration_ns, self.alone_ns)
        return row

    def alone(self, first: int, count: int) -> Alone:
        """Mean window and iteration of some iterations, had nobody disturbed them."""
        rows = self.course.undisturbed(self._factors[first : first + count])
        return Alone(float(rows.window_ns.mean()), float(rows.duration_ns.mean()))

    def shift(self, shift_ns: float) -> None:
        """Let the next window begin later; while one is open, that is the one after it."""
        if self.phase is not Phase.COMPUTING:
            # As in the agent, the first one told holds.
            self._shift_ns = self._shift_ns or shift_ns
            return
        self.ready_ns = [each + shift_ns for each in self.ready_ns]
        self.compute_end_ns += shift_ns
        self._predicted_ns += shift_ns
        self._idle_view = None

    def view(self, rest_bytes: float) -> JobView:
        """As the coordinator sees it.

        Parameters
        ----------
        rest_bytes
            What the busiest rank has still to send in the open window.
        """
        if not self.is_open:
            if self._idle_view is None:
                self._idle_view = self._view(False, self._predicted_ns)
            return self._idle_view
        # Views of all open windows are made anew at each question, for which filling in a frozen
        # dataclass member by member would be most of the time.
        view = JobView.__new__(JobView)
        view.__dict__.update(
            self._open_view,
            done_bytes=round(self.course.window_bytes - rest_bytes),
            current_class=self.class_now,
        )
        return view

    def _view(self, is_open: bool, start_ns: float) -> JobView:
        return JobView(
            **self._fixed,
            is_open=is_open,
            window_start_ns=round(start_ns),
            expected_bytes=self._expected_bytes,
            done_bytes=0,
            slowdown=self.slowdown,
        )

    def wanted_class(self, now_ns: float, rest_bytes: float) -> int:
        """The class that the dataplane gives within the limits in force, by laxity."""
        limits = self.assignment
        if limits.class_floor >= limits.class_ceiling:
            return limits.class_floor
        current = self.class_now if self.is_open else 0
        return laxity_class(limits, self.view(rest_bytes).laxity_ns(round(now_ns)), current)

    def crossing_ns(self, now_ns: float, rest_bytes: float, rate_Bps: float) -> float:
        """When laxity reaches the next threshold within the limits in force."""
        limits = self.assignment
        falls = 1 - rate_Bps / self.alone_Bps if self.is_open else 0.0
        if limits.class_floor >= limits.class_ceiling or falls <= 0:
            return math.inf
        laxity = self.view(rest_bytes).laxity_ns(round(now_ns))
        return now_ns + until_next_class_ns(limits, laxity, self.class_now, falls)

    def _draw(self, count: int) -> None:
        self._factors = self.spec.compute_factors(count, self._seed)
        self._durations_ns: list[float] = self.course.undisturbed(
            self._factors
        ).duration_ns.tolist()
        self._errors = self._conditions.prediction_errors(self.spec.name, count, self._seed)
