"""Scores of the predictor beside naive predictions, on series computed by hand or generated."""

from __future__ import annotations

import itertools
import statistics
from random import Random

import pytest

from controller.errors import InputError
from controller.iteration.experts import quantile
from controller.iteration.score import score
from controller.iteration.series import Collective, SyncWindow, Trace

MS = 1_000_000


def windows_of(periods_ms, size=None, length_ms=0.0):
    start_ms, windows = 0.0, []
    for period_ms in (*periods_ms, 0.0):
        start_ns = round(start_ms * MS)
        windows.append(SyncWindow(start_ns, start_ns + round(length_ms * MS), size))
        start_ms += period_ms
    return windows


def test_naive_errors_are_those_computed_by_hand():
    document = score(windows_of((100, 110, 100, 80))).to_json()
    naive = document["naive_error_pct"]
    # Last: 10/110, 10/100, 20/80. Mean: 100, 105, 103.3. EWMA 0.2: 100, 102, 101.6.
    assert naive["last"] == pytest.approx(100 * (10 / 110 + 10 / 100 + 20 / 80) / 3)
    assert naive["mean"] == pytest.approx(100 * (10 / 110 + 5 / 100 + (310 / 3 - 80) / 80) / 3)
    assert naive["ewma02"] == pytest.approx(100 * (10 / 110 + 2 / 100 + 21.6 / 80) / 3)
    assert document["scored"] == 3
    assert document["iterations"] == 5


def test_what_comes_later_changes_no_earlier_prediction():
    random = Random(1)
    periods = [random.gauss(100, 3) for _ in range(30)]
    whole, part = score(windows_of(periods)), score(windows_of(periods[:15]))
    assert whole.rows[: len(part.rows)] == part.rows


# First AllReduce of a step, end of the last, us: HolisticTraceAnalysis nccl_data.json and TraceLens
# resnet_act_checkpoint.json (both MIT), three steps each; HTA trace_diff/control, six steps.
A100X2 = ((107928.0, 191777.1), (329516.4, 412375.2), (548945.9, 637398.5))
MI300X8 = ((32885.6, 48747.9), (51819.7, 67725.5), (70882.8, 86309.6))
A100X8 = (
    (59425, 65761), (136190, 143195), (214685, 221185), (291697, 297984), (370882, 377493),
    (449984, 456621),
)  # fmt: skip


@pytest.mark.parametrize(("steps", "naive_last"), [(A100X2, 0.98), (MI300X8, 0.68), (A100X8, 1.74)])
def test_recorded_training_steps_are_predicted_better_than_by_every_naive_guess(steps, naive_last):
    windows = [SyncWindow(round(begin * 1000), round(end * 1000), 1000) for begin, end in steps]
    document = score(windows).to_json()
    assert document["naive_error_pct"]["last"] == pytest.approx(naive_last, abs=0.006)
    assert document["error_pct"]["mean"] < min(document["naive_error_pct"].values())
    assert document["periodic"]
    assert document["bytes_error_pct"] == 0


def test_a_change_of_the_period_is_told_with_its_iteration():
    random = Random(6)
    periods = [random.gauss(100, 1) for _ in range(20)] + [random.gauss(130, 1) for _ in range(20)]
    result = score(windows_of(periods))
    (noticed,) = result.changes
    assert 21 <= noticed <= 24
    assert result.period_ns == pytest.approx(130 * MS, rel=0.01)


def test_random_begins_are_not_periodic_but_are_scored():
    random = Random(2)
    document = score(windows_of([random.expovariate(0.01) + 1e-3 for _ in range(60)])).to_json()
    assert not document["periodic"]
    assert document["error_pct"]["mean"] > 20
    assert "by chance" in document["why"]


def test_a_shuffled_trace_is_not_periodic():
    collectives = [
        Collective((n * 100 + m * 3) * MS, (n * 100 + m * 3 + 2) * MS, 1000 + m, "all_reduce")
        for n in range(12)
        for m in range(5)
    ]
    assert score(Trace("csv", tuple(collectives))).prediction.is_periodic
    gaps = [later.start_ns - earlier.start_ns for earlier, later in itertools.pairwise(collectives)]
    found = 0
    for seed in range(60):
        shuffled = list(gaps)
        Random(seed).shuffle(shuffled)
        start_ns, moved = 0, []
        for one, gap_ns in zip(collectives, [*shuffled, 0], strict=True):
            moved.append(Collective(start_ns, start_ns + 2 * MS, one.bytes, one.op))
            start_ns += gap_ns
        found += score(Trace("csv", tuple(moved))).prediction.is_periodic
    assert found <= 2


def test_the_windows_of_a_trace_go_before_its_collectives():
    windows = tuple(windows_of((100, 100, 100)))
    trace = Trace("csv", (Collective(0, 1, 1, "all_reduce"),), windows, ("a note",))
    result = score(trace)
    assert result.prediction.iterations == 4
    assert result.to_json()["notes"] == ["a note"]


def test_bursts_of_accumulation_count_as_one_iteration():
    document = score(windows_of((100, 100, 100, 700) * 6, 1000)).to_json()
    assert document["bursts_per_iteration"] == 4
    assert document["period_us"] == pytest.approx(1_000_000)
    assert document["error_pct"]["mean"] < min(document["naive_error_pct"].values()) / 2


def test_pauses_do_not_lengthen_the_period():
    document = score(windows_of(([100.0] * 7 + [900.0]) * 4 + [100.0] * 2)).to_json()
    assert document["period_us"] == pytest.approx(100_000)
    assert document["pauses"] == 4


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_windows_are_refused_with_their_number(count):
    with pytest.raises(InputError, match=f"{count} sync windows.* 3 "):
        score(windows_of((100, 100))[:count])


def test_windows_at_one_time_count_once():
    with pytest.raises(InputError, match="different begins"):
        score([SyncWindow(5, 5)] * 10)


def test_quantiles_are_linear_between_neighbours():
    values = [1.0, 2.0, 4.0, 5.0]
    assert quantile(values, 0.5) == statistics.median(values)
    assert quantile(values, 0.95) == pytest.approx(4.85)
    assert quantile([7.0], 0.95) == 7


def test_a_clock_that_counts_from_1970_makes_no_difference():
    random = Random(4)
    windows = windows_of([random.gauss(1, 0.02) for _ in range(30)], 1000, 0.3)
    epoch_ns = 1_711_964_646_000_000_123
    later = [
        SyncWindow(window.start_ns + epoch_ns, window.end_ns + epoch_ns, window.bytes)
        for window in windows
    ]
    assert score(later) == score(windows)


def test_the_progress_of_a_long_series_is_told():
    told = []
    score(windows_of([100.0] * 600), lambda done, total: told.append((done, total)))
    assert told == [(0, 601), (256, 601), (512, 601)]
