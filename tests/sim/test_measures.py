from __future__ import annotations

import pytest

from controller.errors import InputError
from controller.sim.measures import (
    Alone,
    Iteration,
    measure,
    percentile,
    relative_change,
    slowest_mean,
)


def rows(job, windows, compute=10.0):
    result, now = [], 0.0
    for number, window in enumerate(windows):
        result.append(Iteration(job, number, now, now + compute, now + compute + window))
        now += compute + window
    return result


def test_the_slowest_tenth_is_of_the_longest_values():
    assert slowest_mean(list(range(1, 21))) == pytest.approx(19.5)
    assert slowest_mean([3.0, 1.0]) == 3.0


def test_percentiles_are_values_that_occurred():
    values = list(range(1, 101))
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile([7], 0.99) == 7


def test_figures_of_a_job():
    found = measure(rows("a", [5.0] * 9 + [15.0]), {"a": Alone(5, 15)}).jobs["a"]
    assert found.iterations == 10
    assert found.allreduce_mean_ns == pytest.approx(6)
    assert found.allreduce_slowest_ns == pytest.approx(15)
    assert found.iteration_mean_ns == pytest.approx(16)
    assert found.iteration_p50_ns == pytest.approx(15)
    assert found.iteration_p99_ns == pytest.approx(25)
    assert found.allreduce_slowdown_mean == pytest.approx(1.2)
    assert found.allreduce_slowdown_slowest == pytest.approx(3)
    assert found.slowdown == pytest.approx(16 / 15)


def test_over_all_counts_every_iteration_and_names_the_worst_job():
    found = measure(
        rows("a", [5.0, 5.0]) + rows("b", [20.0]), {"a": Alone(5, 15), "b": Alone(10, 20)}
    )
    assert found.over_all.allreduce_mean_ns == pytest.approx(10)
    assert found.over_all.allreduce_slowdown_mean == pytest.approx(4 / 3)
    assert found.worst_job == "b"
    assert found.to_json()["jobs"]["b"]["slowdown"] == pytest.approx(1.5)


def test_a_change_is_relative_to_the_base():
    lone = {"a": Alone(5, 15)}
    base = measure(rows("a", [10.0] * 4), lone).over_all
    other = measure(rows("a", [6.0] * 8), lone).over_all
    change = relative_change(base, other)
    assert change["allreduce_mean_ns"] == pytest.approx(-0.4)
    assert change["iteration_mean_ns"] == pytest.approx(-0.2)
    assert "iterations" not in change


def test_nothing_to_measure_is_refused():
    with pytest.raises(InputError, match="no iterations"):
        measure([], {})
    with pytest.raises(InputError, match="Nothing is known of job b alone"):
        measure(rows("b", [1.0]), {"a": Alone(1, 2)})
