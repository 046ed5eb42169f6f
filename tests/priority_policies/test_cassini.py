from __future__ import annotations

import numpy as np
import pytest

from controller.errors import UsageError
from controller.priority.policies.cassini import (
    CassiniPolicy,
    Circle,
    best_shifts,
    score,
    unified_ns,
)
from tests.priority_policies.views import MS, LINK_Bps, idle, sending


def test_the_unified_circle_is_the_least_common_multiple():
    assert unified_ns([40, 60]) == pytest.approx(120)
    assert unified_ns([40, 60, 90]) == pytest.approx(360)
    assert unified_ns([40, 40]) == 40


def test_periods_that_are_nearly_commensurate_have_a_unified_circle():
    assert unified_ns([100, 149], 0.02) == pytest.approx(298)
    assert unified_ns([100, 149], 0.001) is None


def test_the_score_falls_by_what_is_wanted_beyond_the_link():
    # NSDI 2024, section 3: 1 - mean(max(0, demand - C)) / C.
    assert score(np.array([0.0, 1.0, 2.0, 1.0])) == pytest.approx(0.75)
    assert score(np.array([50.0, 150.0]), link=100.0) == pytest.approx(0.75)
    assert score(np.array([1.0, 0.0])) == 1


def test_two_jobs_that_fit_are_moved_apart():
    shifts, reached = best_shifts([Circle(100, 50), Circle(100, 50)])
    assert reached == pytest.approx(1)
    assert shifts == pytest.approx((0, 50))


def test_jobs_that_are_apart_already_stay():
    shifts, reached = best_shifts([Circle(100, 25), Circle(100, 25, begin_ns=25)])
    assert shifts == (0, 0)
    assert reached == pytest.approx(1)


def test_three_jobs_that_fit_are_moved_apart():
    shifts, reached = best_shifts([Circle(100, 25), Circle(100, 25), Circle(100, 25)])
    assert reached == pytest.approx(1)
    assert sorted(shifts) == pytest.approx([0, 25, 50])


def test_periods_two_to_three_are_rotated_on_the_circle_of_both():
    # Windows of a at 0 and 300 (of 600) leave gaps into which three of b fit only when
    # b begins behind a's window.
    shifts, reached = best_shifts([Circle(300, 60), Circle(200, 40)])
    assert reached == pytest.approx(1, abs=0.01)
    assert shifts[0] == 0
    assert 0 < shifts[1] < 200


def test_jobs_that_cannot_fit_have_the_score_of_their_least_overlap():
    # 60 % and 60 % of one link: 20 % of the time two want it.
    _, reached = best_shifts([Circle(100, 60), Circle(100, 60)])
    assert reached == pytest.approx(0.8, abs=0.01)


def test_periods_without_a_common_circle_are_left_alone():
    assert best_shifts([Circle(100, 10), Circle(161.8, 10)], tolerance=0.001) is None


def test_shifts_without_a_job_or_a_period_are_refused():
    with pytest.raises(UsageError, match="periods above 0"):
        best_shifts([])
    with pytest.raises(UsageError, match="periods above 0"):
        best_shifts([Circle(0, 10)])


def test_the_policy_moves_windows_once():
    policy = CassiniPolicy()
    jobs = [idle("a", 400, 120), idle("b", 400, 120)]
    first = policy.assign(0, jobs, LINK_Bps)
    assert first["a"].shift_ns == 0
    assert first["b"].shift_ns == pytest.approx(120 * MS, rel=0.05)
    assert not any(each.shift_ns for each in policy.assign(MS, jobs, LINK_Bps).values())


def test_the_policy_plans_anew_for_another_job_or_demand():
    policy = CassiniPolicy()
    policy.assign(0, [idle("a", 400, 120), idle("b", 400, 120)], LINK_Bps)
    longer = idle("b", 400, 150, compute_ms=250)
    assert policy.assign(0, [idle("a", 400, 120), longer], LINK_Bps)["b"].shift_ns
    assert policy.assign(0, [idle("a", 400, 120), idle("c", 400, 120)], LINK_Bps)["c"].shift_ns


def test_the_policy_waits_until_it_is_clear_when_windows_end():
    policy = CassiniPolicy()
    both = [sending("a", 0, 120), sending("b", 0, 120)]
    assert not any(each.shift_ns for each in policy.assign(0, both, LINK_Bps).values())
    # a's next window is expected at 400 ms, as b's.
    one = [sending("a", 0, 120), idle("b", 400, 120)]
    assert policy.assign(0, one, LINK_Bps)["b"].shift_ns == pytest.approx(120 * MS, rel=0.05)
