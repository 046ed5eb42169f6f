"""The predictor, told windows as the dataplane tells them: begin, end, begin, ..."""

from __future__ import annotations

import statistics
from random import Random

import pytest

from controller.iteration.predictor import Predictor

MS = 1_000_000


def tell(predictor, start_ns, length_ns=None, size=None):
    """One window; what was predicted of it before it began."""
    before = predictor.predict()
    predictor.begin(start_ns)
    if length_ns is not None:
        predictor.end(start_ns + length_ns, size)
    return before


def drive(predictor, gaps_ms, start_ns=0, length_ms=30.0, sizes=(4_000_000,)):
    """Windows `gaps_ms` apart; predictions made before each, and the begin after the last gap."""
    made = []
    for number, gap_ms in enumerate(gaps_ms):
        made.append(
            (tell(predictor, start_ns, int(length_ms * MS), sizes[number % len(sizes)]), start_ns)
        )
        start_ns += int(gap_ms * MS)
    return made, start_ns


def start_errors_pct(made, period_ms):
    return [abs(p.next_start_ns - at) / (period_ms * MS) * 100 for p, at in made]


def test_three_iterations_that_agree_are_periodic_and_predict_the_fourth():
    predictor = Predictor()
    _, following = drive(predictor, (100, 100.2, 99.9))
    prediction = predictor.predict()
    assert prediction.is_periodic
    assert prediction.iterations == 3
    assert prediction.next_start_ns == pytest.approx(following, abs=0.5 * MS)
    assert prediction.period_ns == pytest.approx(100 * MS, rel=0.005)
    assert prediction.window_ns == 30 * MS
    assert prediction.bytes == 4_000_000
    assert prediction.compute_ns == pytest.approx(70 * MS, rel=0.005)


def test_nothing_is_predicted_of_a_job_that_was_never_seen():
    prediction = Predictor().predict()
    assert not prediction.is_periodic
    assert (prediction.period_ns, prediction.next_start_ns, prediction.bytes) == (0, 0, None)
    assert prediction.confidence == 0
    assert "2 are needed" in prediction.why


def test_an_end_told_right_before_the_next_begin_gives_the_same_as_one_told_at_once():
    late, early = Predictor(), Predictor()
    random, start_ns, told = Random(3), 0, None
    for _ in range(20):
        if told is not None:
            late.end(told, 1000)
        late.begin(start_ns)
        early.begin(start_ns)
        told = start_ns + int(random.uniform(20, 30) * MS)
        early.end(told, 1000)
        start_ns += int(random.uniform(98, 102) * MS)
    late.end(told, 1000)
    assert late.predict() == early.predict()


def test_a_longer_window_moves_the_next_begin_since_computing_starts_after_it():
    predictor = Predictor()
    random, start_ns = Random(1), 0
    for _ in range(30):
        length_ns = int(random.uniform(20, 60) * MS)
        before = tell(predictor, start_ns, length_ns, 1000)
        error_ns = abs(before.next_start_ns - start_ns)
        start_ns += length_ns + 70 * MS
    assert error_ns < 1 * MS


def test_a_clock_that_jitters_about_exact_ticks_is_predicted_better_than_by_its_last_period():
    random = Random(5)
    starts = [n * 100 * MS + int(random.gauss(0, 3 * MS)) for n in range(80)]
    predictor, ours, last = Predictor(), [], []
    for number, start_ns in enumerate(starts):
        before = tell(predictor, start_ns)
        if number > 10:
            ours.append(abs(before.next_start_ns - start_ns))
            last.append(abs(2 * starts[number - 1] - starts[number - 2] - start_ns))
    assert statistics.fmean(ours) < 0.65 * statistics.fmean(last)


@pytest.mark.parametrize("new_ms", [60, 80, 130, 300])
def test_a_new_period_is_followed_within_two_iterations(new_ms):
    predictor = Predictor()
    _, at = drive(predictor, [100] * 10)
    made, _ = drive(predictor, [new_ms] * 6, at)
    errors = start_errors_pct(made, new_ms)
    assert max(errors[3:]) < 2, "two periods of the new length were seen by then"
    after = predictor.predict()
    assert after.is_periodic
    assert after.changed
    assert after.period_ns == pytest.approx(new_ms * MS, rel=0.02)


def test_new_bytes_are_followed_within_two_iterations():
    predictor = Predictor()
    _, at = drive(predictor, [100] * 8, sizes=(5_000_000,))
    drive(predictor, [100] * 2, at, sizes=(7_000_000,))
    assert predictor.predict().bytes == 7_000_000


def test_a_single_window_of_other_bytes_changes_nothing():
    predictor = Predictor()
    _, at = drive(predictor, [100] * 8, sizes=(5_000_000,))
    drive(predictor, [100], at, sizes=(9_000,))
    assert predictor.predict().bytes == 5_000_000


@pytest.mark.parametrize("pause_ms", [180, 900, 60_000])
def test_a_pause_leaves_the_estimate_as_it_was(pause_ms):
    predictor = Predictor()
    _, at = drive(predictor, [100, 101, 99, 100, 100.5, 99.5, 100, pause_ms, 100, 100])
    prediction = predictor.predict()
    assert prediction.period_ns == pytest.approx(100 * MS, rel=0.01)
    assert prediction.next_start_ns == pytest.approx(at, abs=1.5 * MS)
    assert prediction.is_periodic
    assert prediction.anomalies == 1
    assert not prediction.changed


def test_pauses_at_equal_distance_are_foreseen():
    predictor = Predictor()
    made, _ = drive(predictor, ([100] * 7 + [400]) * 8)
    assert max(start_errors_pct(made[-16:], 100)) < 2


def test_a_restart_with_another_period_is_learnt_anew():
    predictor = Predictor()
    _, at = drive(predictor, [100] * 20 + [3_600_000])
    made, _ = drive(predictor, [140] * 6, at)
    assert max(start_errors_pct(made[3:], 140)) < 2
    assert predictor.predict().period_ns == pytest.approx(140 * MS, rel=0.01)


def test_bursts_of_gradient_accumulation_make_one_iteration():
    predictor = Predictor()
    sizes = (1_000, 2_000, 3_000, 9_000)
    made, at = drive(predictor, (100, 100, 100, 700) * 6, length_ms=10, sizes=sizes)
    assert max(start_errors_pct(made[12:], 1000)) < 1, "three iterations were seen by then"
    assert [p.bytes for p, _ in made[12:16]] == list(sizes)
    prediction = predictor.predict()
    assert prediction.bursts_per_iteration == 4
    assert prediction.position == 0, "the burst after the longest silence"
    assert prediction.period_ns == pytest.approx(1000 * MS, rel=0.01)
    assert prediction.next_start_ns == pytest.approx(at, abs=5 * MS)
    assert prediction.iterations == 6


def test_accumulation_with_jitter_is_still_one_iteration_of_k_bursts():
    random = Random(2)
    gaps = [gap * random.uniform(0.9, 1.1) for gap in (100, 100, 700) * 12]
    predictor = Predictor()
    drive(predictor, gaps, length_ms=10)
    prediction = predictor.predict()
    assert prediction.bursts_per_iteration == 3
    assert prediction.is_periodic
    assert prediction.period_ns == pytest.approx(900 * MS, rel=0.05)


def test_jitter_is_not_taken_for_bursts():
    for seed in range(40):
        random = Random(seed)
        predictor = Predictor()
        drive(predictor, [100 * random.uniform(0.8, 1.2) for _ in range(60)])
        assert predictor.predict().bursts_per_iteration == 1


def test_the_spread_covers_most_of_the_begins():
    random, start_ns, inside, count = Random(8), 0, 0, 0
    predictor = Predictor()
    for number in range(200):
        before = tell(predictor, start_ns, 20 * MS, 1000)
        if number > 30:
            count += 1
            inside += abs(before.next_start_ns - start_ns) <= before.spread_ns
        start_ns += int(random.gauss(100, 3) * MS)
    assert inside / count > 0.88


def test_begins_out_of_order_and_ends_without_a_begin_are_ignored():
    predictor = Predictor()
    predictor.end(5, 5)
    _, at = drive(predictor, [100] * 5)
    expected = predictor.predict()
    predictor.begin(at - 150 * MS)
    predictor.end(at, 77)
    assert predictor.predict() == expected


def test_the_same_windows_give_the_same_prediction():
    def run():
        random, predictor = Random(9), Predictor()
        drive(predictor, [100 * random.uniform(0.9, 1.1) for _ in range(50)])
        return predictor.predict()

    assert run() == run()
