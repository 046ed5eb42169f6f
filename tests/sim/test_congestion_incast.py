"""Sync windows of many senders into one port, and how their figures are made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from controller.congestion.dcqcn import PhaseIncrease, preset
from controller.errors import UsageError
from controller.priority.policies.mltcp import aggressiveness
from controller.priority.policy import JobView
from controller.sim.congestion.bins import merged, stability
from controller.sim.congestion.incast import (
    Changes,
    IncastCase,
    IncastConditions,
    Workload,
    simulate_incast,
)
from controller.sim.congestion.links import Link
from controller.sim.congestion.windows import mltcp_multipliers, phase_multipliers

RATE = 12.5e9
MS = 10**6
CONDITIONS = IncastConditions(
    preset("paper", RATE),
    replace(Link.by_rate(RATE), pause_bytes=4e6),
    Workload(window_bytes=25_000_000, compute_ns=MS),
    duration_ns=30 * MS,
    warmup_ns=5 * MS,
    step_ns=2_000,
)
ALL = Changes(prediction=True, window_marks=True, phases=True)


def test_one_sender_alone_has_the_whole_port_without_a_queue() -> None:
    (outcome,) = simulate_incast([IncastCase(1)], CONDITIONS)
    assert outcome.stability == pytest.approx(1, abs=1e-3)
    assert outcome.utilisation == pytest.approx(1, rel=5e-3)
    # 25 MB at 100 Gbit/s; up to 50 us late begins count from the first, and there is one.
    assert outcome.window_mean_ns == pytest.approx(2 * MS, rel=5e-3)
    assert outcome.window_slowest_ns >= outcome.window_mean_ns
    assert outcome.queue_max_bytes <= CONDITIONS.packet_bytes
    assert np.isnan(outcome.jain)
    assert outcome.windows == pytest.approx(25 / 3, abs=1.1)
    assert outcome.cuts_per_ms == 0


def test_what_a_case_comes_to_does_not_depend_on_its_neighbours() -> None:
    cases = [IncastCase(6, 2, 1), IncastCase(9, 1, 2, ALL), IncastCase(6, 2, 1, ALL)]
    short = replace(CONDITIONS, duration_ns=12 * MS)
    for case, outcome in zip(cases, simulate_incast(cases, short), strict=True):
        (alone,) = simulate_incast([case], short)
        np.testing.assert_equal(alone.__dict__, outcome.__dict__)


def test_seeds_differ_and_repeat() -> None:
    first, second, again = simulate_incast(
        [IncastCase(8, 1, seed) for seed in (1, 2, 1)], CONDITIONS
    )
    assert first == again
    assert first != second


def test_a_prediction_keeps_the_queue_short_and_the_port_busy() -> None:
    plain, predicted = simulate_incast(
        [IncastCase(16), IncastCase(16, changes=Changes(prediction=True))], CONDITIONS
    )
    assert predicted.stability > plain.stability
    assert predicted.queue_p99_bytes < 0.7 * plain.queue_p99_bytes
    assert predicted.window_mean_ns < plain.window_mean_ns
    # No window is shorter than its bytes take.
    assert predicted.window_mean_ns > 2 * MS


def test_an_error_of_predicted_bytes_changes_what_a_prediction_brings() -> None:
    known, wrong = (
        simulate_incast(
            [IncastCase(8, changes=Changes(prediction=True))],
            replace(CONDITIONS, workload=replace(CONDITIONS.workload, bytes_error=error)),
        )[0]
        for error in (0.0, 0.5)
    )
    assert wrong.stability < known.stability - 0.1
    assert wrong.window_mean_ns > 1.1 * known.window_mean_ns


def test_the_queue_stays_at_the_pause_threshold() -> None:
    low, free = (
        simulate_incast(
            [IncastCase(64)],
            replace(
                CONDITIONS,
                port=replace(CONDITIONS.port, pause_bytes=pause_bytes),
                duration_ns=12 * MS,
            ),
        )[0]
        for pause_bytes in (1e6, float("inf"))
    )
    assert low.queue_max_bytes <= 1e6 + 64 * CONDITIONS.packet_bytes
    assert free.queue_max_bytes > 4e6


def test_jobs_share_the_port_and_each_has_its_own_windows() -> None:
    (outcome,) = simulate_incast(
        [IncastCase(8, 4, changes=Changes(prediction=True))],
        replace(CONDITIONS, duration_ns=40 * MS),
    )
    # Four jobs want 4 x 2 ms of 3: the port is full, and windows last longer than alone.
    assert outcome.utilisation > 0.85
    assert outcome.window_mean_ns > 4 * MS
    assert outcome.job_stability < outcome.stability


def test_flows_without_end_fill_the_port() -> None:
    endless = replace(CONDITIONS, workload=Workload(0, 0))
    (outcome,) = simulate_incast([IncastCase(4)], endless)
    assert outcome.windows == 0
    assert np.isnan(outcome.window_mean_ns)
    assert outcome.bins == 25
    assert outcome.utilisation > 0.8


def test_half_the_step_gives_about_the_same() -> None:
    cases = [IncastCase(16, 1, seed) for seed in range(2)]
    coarse, fine = (
        np.mean([o.stability for o in simulate_incast(cases, replace(CONDITIONS, step_ns=step))])
        for step in (2_000, 1_000)
    )
    assert coarse == pytest.approx(fine, abs=0.06)


def test_a_bin_counts_when_a_window_was_open_all_through_it() -> None:
    # 25 ms measured, windows of 2 ms and more with 1 ms between: about a third of whole bins.
    (outcome,) = simulate_incast([IncastCase(1)], CONDITIONS)
    assert 5 <= outcome.bins <= 16


def test_spans_of_time_are_merged() -> None:
    spans = np.array([[5.0, 6.0], [0.0, 2.0], [1.0, 4.0], [1.5, 1.7], [4.0, 4.5]])
    assert merged(spans).tolist() == [[0, 4.5], [5, 6]]
    assert merged(np.zeros((0, 2))).shape == (0, 2)


def test_stability_is_one_minus_the_coefficient_of_variation() -> None:
    assert stability(np.array([3.0, 3.0, 3.0])) == 1
    assert stability(np.array([1.0, 3.0])) == pytest.approx(0.5)
    assert np.isnan(stability(np.array([1.0])))
    assert np.isnan(stability(np.zeros(4)))


def test_multipliers_of_phases_are_those_of_the_live_rule() -> None:
    steps = PhaseIncrease(begin=3.0, end=0.25)
    sent = np.array([0.0, 9.99, 10.0, 50.0, 89.9, 90.0, 130.0, 0.0])
    in_window = np.array([True] * 7 + [False])
    found = phase_multipliers(steps, sent, np.full(8, 100.0), in_window)
    wanted = [
        steps.multiplier(steps.phase(float(nbytes), 100.0, bool(inside)))
        for nbytes, inside in zip(sent, in_window, strict=True)
    ]
    assert found.tolist() == wanted


def test_mltcp_weighs_as_the_policy_does() -> None:
    sent = np.array([0, 25, 100, 170])
    wanted = [
        aggressiveness(
            JobView("j", is_open=True, window_start_ns=0, expected_bytes=100, done_bytes=int(done),
                    alone_Bps=1.0, compute_ns=1)
        )
        for done in sent
    ]  # fmt: skip
    assert mltcp_multipliers(sent * 1.0, np.full(4, 100.0)).tolist() == wanted


@pytest.mark.parametrize(
    ("senders", "jobs", "seed"), [(0, 1, 0), (5000, 1, 0), (2, 3, 0), (2, 0, 0), (2, 1, -1)]
)
def test_impossible_cases_are_refused(senders: int, jobs: int, seed: int) -> None:
    with pytest.raises(UsageError):
        IncastCase(senders, jobs, seed)


def test_times_that_are_no_whole_steps_or_bins_are_refused() -> None:
    for changes in (
        {"bin_ns": 999}, {"bin_ns": 3_001}, {"warmup_ns": 500}, {"warmup_ns": 29 * MS},
        {"duration_ns": 30 * MS + 500_000}
    ):  # fmt: skip
        with pytest.raises(UsageError):
            replace(CONDITIONS, **changes)
    with pytest.raises(UsageError, match="no case"):
        simulate_incast([], CONDITIONS)
