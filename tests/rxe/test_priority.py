"""Real AllReduce jobs on shared links: order helps, and the end of the controller harms nobody."""

from __future__ import annotations

import os
import signal
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.ops import testbed
from controller.ops.qdisc import read
from controller.priority.jobs import DEFAULT_CLASS
from controller.sim.measures import Iteration
from controller.workload.control import FAIR, controlled
from controller.workload.crew import Crew
from controller.workload.fabric import increase, read_counters, shared_hosts
from controller.workload.mixes import Mix, MixJob
from controller.workload.plan import Course, Traffic, plan_round

MS = 1_000_000
# Both jobs want the link at the same moments: without an order each window takes twice as long.
MIX = Mix(
    "test",
    (
        MixJob("first", "resnet50", 500 * MS, 0.4, 5),
        MixJob("second", "bert-large", 500 * MS, 0.4, 4),
    ),
    jitter=0.0,
)
# Slow enough that links, not processors, are what six ranks in a user-mode kernel wait for.
TRAFFIC = Traffic(rate_Bps=1_500_000)
WARMUP = 4
# HTB's classes change under a flow once, when it is matched: what is sent then may overtake.
MAX_RESENT_SHARE = 0.02
ROUNDS = 3
TOP_CLASS = 7


@pytest.fixture(scope="module")
def bed(rxe_kernel: None) -> Iterator[testbed.Testbed]:
    """Three hosts with shaped egress."""
    with shared_hosts(TRAFFIC) as hosts:
        yield hosts


@pytest.fixture
def crew(bed: testbed.Testbed, tmp_path: Path) -> Iterator[Crew]:
    """Two jobs of three ranks each, that report to a controller in `tmp_path`."""
    with Crew(MIX, TRAFFIC, bed, tmp_path / "run") as running:
        yield running


def together(iterations: int) -> dict[str, Course]:
    """Both jobs begin at one moment and compute alike."""
    courses = plan_round(MIX, iterations, WARMUP, seed=1, number=0)
    return {name: Course(0, course.compute_ns) for name, course in courses.items()}


def mean_ms(records: tuple[Iteration, ...]) -> float:
    return statistics.mean(r.window_ns for r in records if r.iteration >= WARMUP) / MS


def assert_complete(records: tuple[Iteration, ...], courses: dict[str, Course]) -> None:
    """Each rank of each job told each of its iterations."""
    counts = {name: sum(r.job == name for r in records) for name in courses}
    assert counts == {name: len(course.compute_ns) for name, course in courses.items()}


def test_two_jobs_that_contend_wait_less_under_laxity_than_without_a_controller(
    bed: testbed.Testbed, crew: Crew, tmp_path: Path
) -> None:
    courses = together(8)
    means: dict[str, list[float]] = {FAIR: [], "laxity": []}
    for _ in range(ROUNDS):
        for policy, found in means.items():
            with controlled(MIX, TRAFFIC, bed, policy, tmp_path / "run"):
                before = read_counters(bed)
                records = crew.run(courses)
                gained = increase(before, read_counters(bed))
            assert_complete(records, courses)
            assert gained["retry_exceeded_err"] == gained["send_err"] == 0
            assert gained["duplicate_request"] <= MAX_RESENT_SHARE * gained["sent_pkts"]
            found.append(mean_ms(records))
        # A machine that is busy with something else may hide it in one round.
        if statistics.mean(means["laxity"]) < 0.9 * statistics.mean(means[FAIR]):
            break
    print(f"mean AllReduce in ms, by round: {means}")  # pytest -rP
    assert statistics.mean(means["laxity"]) < 0.9 * statistics.mean(means[FAIR])
    assert crew.control_bytes > 0


def test_a_killed_controller_leaves_jobs_that_go_on_in_their_default_class(
    bed: testbed.Testbed, crew: Crew, tmp_path: Path
) -> None:
    courses = together(16)
    killed: list[int] = []
    sent_before: dict[int | None, int] = {}

    def sent() -> dict[int | None, int]:
        classes = read(bed.hosts[0].netns, bed.hosts[0].interface).classes
        return {entry.number: entry.sent_bytes for entry in classes}

    with controlled(MIX, TRAFFIC, bed, "laxity", tmp_path / "run") as controller:
        assert controller is not None

        def during(share: float) -> None:
            if share > 0.25 and not killed:
                os.kill(controller.pid, signal.SIGKILL)
                killed.append(controller.pid)
            # Seconds later: plans hold for a multiple of a period at most.
            if share > 0.7 and not sent_before:
                sent_before.update(sent())

        records = crew.run(courses, during=during)
        gained = {number: count - sent_before[number] for number, count in sent().items()}
    assert killed
    assert_complete(records, courses)
    # Data of both jobs and nothing else went through their default class.
    assert gained[DEFAULT_CLASS] > 0
    assert {n for n, count in gained.items() if count} <= {DEFAULT_CLASS, TOP_CLASS, None}
    # Nobody hung: the slowest of the last windows is within what two jobs in one class take.
    last = [r.window_ns for r in records if r.iteration >= len(courses["first"].compute_ns) - 5]
    assert max(last) < 10 * max(job.window_ns for job in MIX.jobs)
