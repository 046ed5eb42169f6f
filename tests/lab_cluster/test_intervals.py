"""Confidence intervals over seeds."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from controller.sim.intervals import estimate


@pytest.mark.parametrize("count", [2, 3, 10, 50])
def test_the_interval_is_students(count):
    values = np.random.default_rng(count).normal(5, 2, count)
    found = estimate(values.tolist())
    low, high = stats.t.interval(0.95, count - 1, loc=values.mean(), scale=stats.sem(values))
    assert found.mean == pytest.approx(values.mean())
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx(
        (low, high)
    )


def test_two_seeds_have_the_wide_interval_of_the_tables():
    # Student's t with one degree of freedom, two-sided 95 %: 12.706; deviation of 1 and 3: 2 ** .5.
    assert estimate([1, 3]).half_width == pytest.approx(12.7062, abs=1e-4)


def test_of_one_seed_nothing_is_said():
    assert estimate([4.0]).half_width is None


def test_the_interval_covers_the_mean_in_about_95_of_100_cases():
    drawn = np.random.default_rng(1).normal(0, 1, (2000, 5))
    found = [estimate(row) for row in drawn.tolist()]
    inside = sum(abs(each.mean) <= each.half_width for each in found)
    assert 0.93 < inside / len(found) < 0.97
