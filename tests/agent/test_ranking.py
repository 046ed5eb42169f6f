"""What is written into the dataplane when windows begin, end, wait and are not seen."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from controller.agent import maps, ranking
from controller.agent.job_state import JobState
from controller.agent.planned import Planned
from controller.agent.ranking import Ranking
from controller.priority.jobs import Job, JobPlan

MS = 1_000_000
SIZE = 3_000_000
PERIOD_MS, WINDOW_MS = 100, 30
LINK_Bps = 125_000_000


@dataclass
class FakeSteering:
    """Keeps what is written; refuses while `by_hand`."""

    plans: dict[str, list[JobPlan | None]] = field(default_factory=dict)
    predicted: dict[str, bool] = field(default_factory=dict)
    by_hand: bool = False

    def gap_ns(self, job: Job) -> int:
        return job.gap_ns or 20 * MS

    def link_Bps(self, ports: Collection[int]) -> int:
        return LINK_Bps if ports else 0

    def write_policy_plan(
        self, state: JobState, plan: JobPlan | None, window_ns: int | None = None,
        is_predicted: bool = True,
    ) -> bool:  # fmt: skip
        if self.by_hand:
            return False
        self.plans.setdefault(state.job.name, []).append(plan)
        self.predicted[state.job.name] = is_predicted
        return True


class Bed:
    """Jobs whose windows begin and end as a test says."""

    def __init__(self, policy: str, *jobs: Job) -> None:
        self.steering = FakeSteering()
        self.progress: dict[int, dict[str, int]] = {}
        self.failures: list[str] = []
        self.ranking = Ranking(self.steering, {}, 1.5, self._surviving)  # type: ignore[arg-type]
        for number, job in enumerate(jobs, 1):
            state = JobState(job, number, 0.0, was_matched=True, ports=frozenset({0}))
            self.ranking.jobs[job.name] = Planned(state)
            self.progress[number] = {"bytes": 0, "last_ns": 0}
        self.ranking.set_policy(policy)

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failures.append(repr(error))

    def job(self, name: str) -> Planned:
        return self.ranking.jobs[name]

    def send(self, name: str, size: int, at_ms: float) -> None:
        self.progress[self.job(name).state.number] = {"bytes": size, "last_ns": round(at_ms * MS)}

    def begin(self, name: str, at_ms: float, previous: tuple[float, int] | None = None) -> None:
        """A window begins; `previous`: end in ms and bytes of the one before."""
        planned = self.job(name)
        self.send(name, 1000, at_ms)
        planned.tracker.began(round(at_ms * MS))
        self.ranking.plan(round(at_ms * MS), begun=planned)
        ended = (round(previous[0] * MS), previous[1]) if previous else ()
        planned.tracker.learn(*ended)

    def run(self, name: str, count: int, from_ms: float = 1) -> float:
        """`count` regular windows; returns when the next one is due."""
        for number in range(count):
            at_ms = from_ms + number * PERIOD_MS
            self.begin(name, at_ms, (at_ms - PERIOD_MS + WINDOW_MS, SIZE) if number else None)
            self.send(name, SIZE, at_ms + WINDOW_MS)
            self.ranking.plan(round((at_ms + WINDOW_MS + 15) * MS))
        return from_ms + count * PERIOD_MS

    def plan(self, name: str) -> JobPlan:
        plan = self.steering.plans[name][-1]
        assert plan is not None
        return plan


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Bed:
    policy = getattr(request, "param", "laxity")
    result = Bed(policy, Job("a"), Job("b"))

    def read(_fds: Any, number: int) -> dict[str, int]:
        return result.progress[number]

    monkeypatch.setattr(maps, "read_progress", read)
    return result


def test_a_new_job_beside_ranked_ones_goes_first_with_a_plan_that_predicts_nothing(
    bed: Bed,
) -> None:
    due_ms = bed.run("b", 8)
    bed.begin("a", due_ms)
    plan = bed.plan("a")
    assert plan.class_floor == plan.class_ceiling == 6
    assert not bed.steering.predicted["a"]
    decision = bed.job("a").decision
    assert decision is not None and decision.assignment.why == "its iterations are learned"
    assert not bed.failures


def test_a_new_job_does_not_rise_in_mid_window(bed: Bed) -> None:
    due_ms = bed.run("b", 8)
    bed.job("b").state.ports = frozenset({1})
    bed.begin("a", due_ms - 10)
    assert "a" not in bed.steering.plans
    bed.job("b").state.ports = frozenset({0})
    bed.begin("b", due_ms, (due_ms - PERIOD_MS + WINDOW_MS, SIZE))
    assert "a" not in bed.steering.plans
    bed.begin("a", due_ms + 90, (due_ms + 20, SIZE))
    assert bed.plan("a").class_floor == 6


def test_a_new_job_that_nobody_is_ranked_beside_keeps_its_class(bed: Bed) -> None:
    bed.begin("a", 1)
    bed.begin("b", 2)
    assert not bed.steering.plans


@pytest.mark.parametrize("bed", ["static", "fair"], indirect=True)
def test_policies_that_do_not_rank_leave_new_jobs_alone(bed: Bed) -> None:
    due_ms = bed.run("b", 8)
    bed.begin("a", due_ms)
    assert "a" not in bed.steering.plans


def test_a_window_that_is_over_gets_the_plan_of_the_next_once_it_has_settled(bed: Bed) -> None:
    due_ms = bed.run("a", 8)
    bed.begin("a", due_ms, (due_ms - PERIOD_MS + WINDOW_MS, SIZE))
    written = len(bed.steering.plans["a"])
    assert bed.plan("a").window_start_ns == round(due_ms * MS)
    bed.send("a", SIZE, due_ms + WINDOW_MS)
    # Its last packets may still wait in a queue: a plan now could let others overtake them.
    bed.ranking.plan(round((due_ms + WINDOW_MS + 1) * MS))
    assert len(bed.steering.plans["a"]) == written
    assert bed.ranking.due_ns is not None
    assert bed.ranking.due_ns <= (due_ms + WINDOW_MS + 10) * MS + 1
    bed.ranking.plan(bed.ranking.due_ns)
    assert bed.plan("a").window_start_ns == pytest.approx((due_ms + PERIOD_MS) * MS, rel=0.01)
    assert not bed.failures


def test_who_waits_is_below_and_may_be_silent_for_longer(bed: Bed) -> None:
    bed.run("a", 8)
    due_ms = bed.run("b", 8)
    before = (due_ms - PERIOD_MS + WINDOW_MS, SIZE)
    bed.begin("a", due_ms, before)
    bed.send("a", SIZE // 4, due_ms + 5)
    bed.begin("b", due_ms + 5, before)
    assert bed.plan("a").class_floor > bed.plan("b").class_floor
    waiting = bed.job("b").decision
    assert waiting is not None and waiting.assignment.waits_for == ("a",)
    bed.ranking.must_plan = True
    bed.ranking.plan(round((due_ms + 6) * MS))
    assert bed.plan("b").gap_ns > bed.plan("a").gap_ns
    # Not for ever: its compute phases may have become shorter than that silence.
    assert bed.ranking._gap_ns(bed.job("b"), round((due_ms + 200) * MS)) == bed.plan("a").gap_ns
    assert not bed.failures


def test_a_plan_by_hand_is_not_what_the_report_says_the_policy_decided(bed: Bed) -> None:
    due_ms = bed.run("a", 8)
    bed.steering.by_hand = True
    bed.begin("a", due_ms, (due_ms - PERIOD_MS + WINDOW_MS, SIZE))
    assert bed.job("a").decision is None
    bed.steering.by_hand = False
    bed.ranking.must_plan = True
    bed.ranking.plan(round((due_ms + 1) * MS))
    assert bed.job("a").decision is not None
    assert bed.plan("a").window_start_ns == round(due_ms * MS)


def test_jobs_that_share_no_interface_do_not_wait_for_each_other(bed: Bed) -> None:
    bed.job("b").state.ports = frozenset({1})
    bed.run("a", 8)
    due_ms = bed.run("b", 8)
    before = (due_ms - PERIOD_MS + WINDOW_MS, SIZE)
    bed.begin("a", due_ms, before)
    bed.begin("b", due_ms + 5, before)
    assert bed.plan("a").class_floor == bed.plan("b").class_floor == 6


def test_a_job_that_turns_out_to_have_no_period_loses_its_plan(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking, "_LEARNING_WINDOWS", 8)
    at_ms, previous = bed.run("b", 8), None
    for number in range(12):
        bed.begin("a", at_ms, previous)
        bed.send("a", 1000 + 977 * number, at_ms + 3)
        previous = (at_ms + 3, 1000 + 977 * number)
        at_ms += (50, 400, 90, 700, 130)[number % 5] + 37 * number
    assert not bed.job("a").tracker.is_predicted
    assert bed.steering.plans["a"][0] is not None
    assert bed.steering.plans["a"][-1] is None and bed.job("a").decision is None


def test_what_fails_in_one_group_does_not_stop_the_others(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed.job("b").state.ports = frozenset({1})
    bed.run("a", 8)
    due_ms = bed.run("b", 8)
    find = bed.steering.link_Bps

    def fails(ports: Collection[int]) -> int:
        if 0 in ports:
            raise RuntimeError("gone")
        return find(ports)

    monkeypatch.setattr(bed.steering, "link_Bps", fails)
    written = len(bed.steering.plans["b"])
    bed.ranking.must_plan = True
    bed.begin("b", due_ms, (due_ms - PERIOD_MS + WINDOW_MS, SIZE))
    assert bed.failures and len(bed.steering.plans["b"]) == written + 1


@pytest.mark.parametrize("bed", ["cassini"], indirect=True)
def test_a_shift_is_kept_for_the_next_window(bed: Bed) -> None:
    bed.run("a", 8)
    due_ms = bed.run("b", 8, from_ms=6)
    before = (due_ms - PERIOD_MS + WINDOW_MS, SIZE)
    for number in range(3):
        at_ms = due_ms + number * PERIOD_MS
        bed.begin("a", at_ms - 5, before)
        bed.send("a", SIZE, at_ms - 5 + WINDOW_MS)
        bed.ranking.plan(round((at_ms + WINDOW_MS + 10) * MS))
        before = (at_ms - 5 + WINDOW_MS, SIZE)
    assert bed.job("a").shift_ns + bed.job("b").shift_ns > 0
    assert not bed.failures
