"""Forecasts of the next duration, beside last value, mean so far and EWMA 0.2."""

from __future__ import annotations

import itertools
import math
import statistics
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controller.iteration.forecast import Forecaster
from controller.iteration.repeats import RepeatPattern


def errors_pct(series):
    """Mean error of ours, and of last value, mean so far and EWMA 0.2."""
    forecaster = Forecaster()
    ours, naive = [], ([], [], [])
    ewma = series[0]
    for number, value in enumerate(series):
        if number:
            ours.append(abs(forecaster.next - value) / value * 100)
            simple = (series[number - 1], statistics.fmean(series[:number]), ewma)
            for errors, guess in zip(naive, simple, strict=True):
                errors.append(abs(guess - value) / value * 100)
            ewma += 0.2 * (value - ewma)
        forecaster.add(value)
    return statistics.fmean(ours), [statistics.fmean(errors) for errors in naive]


def worst_ratio(make, seeds=8, length=120):
    """Mean over seeds of our error by that of the best naive one."""
    ratios = []
    for seed in range(seeds):
        ours, naive = errors_pct(make(Random(seed + 900), length))
        ratios.append(ours / min(naive))
    return statistics.fmean(ratios)


def start_jitter(random, length):
    starts = [n * 100 + random.gauss(0, 3) for n in range(length + 1)]
    return [later - earlier for earlier, later in itertools.pairwise(starts)]


def alternating(random, length):
    return [(90, 115, 100)[n % 3] + random.gauss(0, 1) for n in range(length)]


def pauses(random, length):
    return [
        100 + random.gauss(0, 1) + (400 if random.random() < 0.06 else 0) for _ in range(length)
    ]


def skewed(random, length):
    return [95 + 5 * math.exp(0.8 * random.gauss(0, 1)) for _ in range(length)]


def logged_twice(random, length):
    """Each value twice, but every seventh step: how logs that are sampled too fast look."""
    series, value, level = [], 0.0, 100.0
    for n in range(length):
        if n % 7 not in (1, 3, 5):
            level += random.gauss(0, 0.3)
            value = float(round(10 * random.gauss(level, 1.5)))
        series.append(value)
    return series


@pytest.mark.parametrize(
    ("make", "ratio"),
    [(start_jitter, 0.9), (alternating, 0.5), (pauses, 0.75), (skewed, 1.0), (logged_twice, 0.95)],
)
def test_a_series_with_structure_is_forecast_better_than_by_any_naive_guess(make, ratio):
    # Patterns of repeats take some tens of values to learn.
    assert worst_ratio(make, length=250 if make is logged_twice else 120) < ratio


def test_independent_noise_costs_little_against_the_mean_which_is_best_there():
    assert worst_ratio(lambda r, n: [r.gauss(100, 5) for _ in range(n)]) < 1.04


def test_a_wandering_level_costs_little_against_the_better_of_last_and_average():
    def wander(random, length):
        level, series = 100.0, []
        for _ in range(length):
            level += random.gauss(0, 0.5)
            series.append(level + random.gauss(0, 1))
        return series

    assert worst_ratio(wander) < 1.04


def test_a_new_level_is_taken_after_two_values():
    forecaster = Forecaster()
    for value in [100.0] * 12 + [140.0, 140.0]:
        forecaster.add(value)
    assert forecaster.changes == 1
    assert forecaster.next == pytest.approx(140, rel=0.01)
    assert forecaster.level == pytest.approx(140)


def test_a_pause_is_counted_and_changes_no_level():
    forecaster = Forecaster()
    for value in [100.0, 101, 99, 100, 100, 700, 100, 101]:
        forecaster.add(value)
    assert (forecaster.pauses, forecaster.changes) == (1, 0)
    assert forecaster.next == pytest.approx(100, rel=0.01)


def test_the_third_pause_at_equal_distance_foretells_the_fourth():
    forecaster = Forecaster()
    for value in ([100.0] * 4 + [500.0]) * 3 + [100.0] * 4:
        forecaster.add(value)
    assert forecaster.next == pytest.approx(500)


def test_the_longer_of_two_periods_is_taken_for_the_disturbed_one():
    forecaster = Forecaster()
    forecaster.add(100.0)
    forecaster.add(110.0)
    assert 100 < forecaster.next < 105


def test_one_value_is_forecast_to_come_again():
    forecaster = Forecaster()
    assert math.isnan(forecaster.next)
    forecaster.add(42.0)
    assert forecaster.next == pytest.approx(42)


# Two that differ by powers of ten in turn: an expert once expected the next below 0.
@example([3.5e12, 1.0, 4.7e13, 1.0, 6.4e13, 1.0, 1.2e14])
@given(st.lists(st.floats(1, 1e15), min_size=1, max_size=80))
@settings(max_examples=80)
def test_a_forecast_stays_near_what_was_seen_whatever_comes(series):
    forecaster = Forecaster()
    for value in series:
        forecaster.add(value)
        assert math.isfinite(forecaster.next)
    assert 0 < forecaster.next <= 3 * max(series)


def test_a_pattern_of_repeats_tells_when_the_next_is_due():
    pattern, last, right = RepeatPattern(), 0.0, 0
    flags = [n % 7 in (1, 3, 5) for n in range(280)]
    for number, repeats in enumerate(flags):
        if number >= 210:
            right += (pattern.probability > 0.5) == repeats
        value = last if repeats else last + 1
        pattern.add(last, value)
        last = value
    assert pattern.matters
    assert right == 70


def test_series_that_never_repeat_have_no_pattern():
    pattern, random = RepeatPattern(), Random(1)
    last = random.random()
    for _ in range(100):
        value = random.random()
        assert not pattern.add(last, value)
        last = value
    assert not pattern.matters
    assert pattern.probability < 0.1
