"""Periodic or not: error rates on random series, power on series with jitter."""

from __future__ import annotations

import math
from random import Random

import pytest

from controller.iteration.periodicity import irregularity, judge, lengths_agree

FAMILIES = {
    "exponential": lambda random: random.expovariate(1),
    "uniform": lambda random: random.uniform(0, 2),
    "lognormal": lambda random: random.lognormvariate(0, 1),
    "narrow lognormal": lambda random: random.lognormvariate(0, 0.5),
}


def share(make, length, seeds=1000):
    """Of so many series, how many are called periodic."""
    found = 0
    for seed in range(seeds):
        random = Random(seed * 31 + length)
        found += judge([make(random) for _ in range(length)]).is_periodic
    return found / seeds


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("length", [3, 4, 6, 9, 14, 24, 60])
def test_less_than_one_in_a_hundred_random_series_is_called_periodic(name, length):
    # The rate is below 0.6 %; of 1000 seeds 1.4 % is three deviations more.
    assert share(FAMILIES[name], length) <= 0.014


def test_over_all_lengths_the_error_rate_stays_below_one_percent():
    rates = [share(FAMILIES["uniform"], length, 250) for length in range(2, 30, 2)]
    assert sum(rates) / len(rates) < 0.01


@pytest.mark.parametrize(("jitter", "length"), [(0.005, 3), (0.02, 4), (0.05, 6), (0.14, 12)])
def test_a_job_with_jitter_is_called_periodic_soon(jitter, length):
    assert share(lambda random: random.gauss(1, jitter), length, 300) > 0.93


def test_two_periods_must_agree_closely_unless_bytes_and_lengths_speak_for_them():
    assert not judge((100.0, 101.0)).is_periodic
    assert judge((100.0, 101.0), has_evidence=True).is_periodic
    assert not judge((100.0, 103.0), has_evidence=True).is_periodic


def test_one_period_is_too_few_to_tell():
    verdict = judge((100.0,))
    assert not verdict.is_periodic
    assert math.isnan(verdict.irregularity)


@pytest.mark.parametrize("independent", [0, 1])
def test_durations_that_are_not_free_to_differ_are_no_evidence(independent):
    verdict = judge([1.0] * 8, has_evidence=True, was=True, independent=independent)
    assert not verdict.is_periodic
    assert f"{independent} periods are known" in verdict.why
    assert judge([1.0] * 8, independent=2).is_periodic


def test_fewer_free_durations_make_the_bound_tighter():
    durations = [100.0, 108, 94, 105, 97, 103, 92, 106]
    assert judge(durations).is_periodic
    assert not judge(durations, independent=3).is_periodic


def test_pauses_do_not_hide_a_period():
    assert judge([100.0, 101, 99, 100, 900, 100, 101, 99, 100, 100]).is_periodic


def test_the_verdict_does_not_flap_on_jitter_but_falls_when_the_period_is_lost():
    edge = [100.0, 75, 125, 78, 122, 100, 76, 124]
    assert not judge(edge).is_periodic
    assert judge(edge, was=True).is_periodic
    assert not judge([10.0, 500, 30, 90, 4, 200, 60, 1], was=True).is_periodic


def test_confidence_grows_with_agreement_and_with_what_is_known():
    loose, tight = judge([100.0, 110, 95, 104, 92, 99]), judge([100.0, 100.2, 99.9, 100, 100, 100])
    assert loose.confidence < tight.confidence
    assert judge([100.0] * 3).confidence < judge([100.0] * 20).confidence <= 1


def test_the_reasons_are_told_in_numbers():
    assert "differ by" in judge([1.0, 5, 9]).why
    assert "bytes repeat exactly" in judge([1.0, 1.0], has_evidence=True).why


def test_irregularity_is_the_mean_distance_from_the_median():
    assert irregularity([90.0, 100.0, 120.0]) == pytest.approx(0.1)
    assert irregularity([90.0, 100.0, 120.0], 1) == pytest.approx(0.05)
    assert irregularity([0.0, 0.0]) == math.inf


def test_lengths_of_windows_agree_within_a_quarter():
    assert lengths_agree([100, 110, 95])
    assert not lengths_agree([100, 200, 50])
    assert not lengths_agree([100])
