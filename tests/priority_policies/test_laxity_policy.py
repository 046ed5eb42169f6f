from __future__ import annotations

import pytest

from controller.priority.policies.guard import guard_margin_ns
from controller.priority.policies.laxity import LaxityPolicy
from tests.priority_policies.views import MS, LINK_Bps, idle, sending


def classes(now_ms: float, *jobs):
    decided = LaxityPolicy().assign(round(now_ms * MS), jobs, LINK_Bps)
    assert all(each.class_floor == each.class_ceiling for each in decided.values())
    return {name: each.class_floor for name, each in decided.items()}


def test_the_window_that_is_open_alone_has_its_jobs_ceiling():
    assert classes(0, sending("a", 0, 120)) == {"a": 6}
    assert classes(0, sending("a", 0, 120, class_ceiling=4)) == {"a": 4}


def test_of_equal_windows_the_first_to_begin_goes_first():
    given = classes(30, sending("b", 20, 120), sending("a", 0, 120, 30, current_class=6))
    assert given == {"a": 6, "b": 5}


def test_a_short_window_overtakes_a_long_one_that_has_just_begun():
    long = sending("long", 0, 400, 10, current_class=6, compute_ms=900)
    assert classes(10, long, sending("short", 10, 60)) == {"long": 5, "short": 6}


def test_a_short_window_waits_for_a_long_one_that_began_long_ago():
    long = sending("long", 0, 400, 300, current_class=6, compute_ms=900)
    assert classes(300, long, sending("short", 300, 60)) == {"long": 6, "short": 5}


def test_no_window_is_raised_when_the_one_before_it_ends():
    waiting = sending("b", 20, 120, 5, current_class=4)
    assert classes(130, waiting, idle("a", 400, 120))["b"] == 4


def test_a_window_that_begins_while_a_low_one_is_served_goes_below_it():
    served = sending("b", 20, 120, 5, current_class=4)
    assert classes(130, served, sending("c", 130, 120))["c"] == 3


def test_a_job_whose_laxity_runs_out_goes_first_by_lowering_the_other():
    # Iteration alone: 400 ms; bound 1.1, so it may end 40 ms late: at 160 ms.
    late = sending("late", 0, 120, 4, max_slowdown=1.1, current_class=5)
    other = sending("other", -20, 120, 40, max_slowdown=3, current_class=6)
    assert late.laxity_ns(40 * MS) < guard_margin_ns(late, 1, LINK_Bps)
    assert classes(40, late, other) == {"late": 5, "other": 4}


def test_a_job_with_laxity_left_does_not_jump_the_queue():
    early = sending("early", 0, 120, 4, max_slowdown=1.5, current_class=5)
    other = sending("other", -20, 120, 40, max_slowdown=3, current_class=6)
    assert classes(40, early, other) == {"early": 5, "other": 6}


def test_the_guard_takes_nothing_from_a_job_that_would_pass_its_own_bound_then():
    late = sending("late", 0, 120, 4, max_slowdown=1.1, current_class=5)
    # 120 ms of the late job do not fit into what this one has to spare.
    other = sending("other", -20, 120, 40, max_slowdown=1.2, current_class=6)
    assert classes(40, late, other) == {"late": 5, "other": 6}


def test_the_guard_raises_where_no_class_is_left_to_lower_the_other_to():
    late = sending("late", 0, 120, 4, max_slowdown=1.1, current_class=0)
    other = sending("other", -20, 120, 40, max_slowdown=3, current_class=1)
    given = classes(40, late, other)
    assert given["late"] > given["other"]


def test_a_job_that_was_held_up_in_its_last_iterations_goes_before_one_that_was_not():
    held_up = sending("b", 20, 120, slowdown=1.4)
    assert classes(20, sending("a", 0, 120), held_up) == {"a": 5, "b": 6}
    little = sending("b", 20, 120, slowdown=1.15)
    assert classes(20, sending("a", 0, 120), little) == {"a": 6, "b": 5}


def test_an_idle_job_begins_below_the_window_that_is_open():
    served = sending("a", 0, 120, 20, current_class=6)
    assert classes(20, served, idle("b", 60, 120))["b"] == 5


def test_an_idle_job_begins_at_its_ceiling_when_the_open_window_has_nothing_left():
    served = sending("a", 0, 120, 120, current_class=6)
    assert classes(120, served, idle("b", 200, 120))["b"] == 6


def test_an_idle_job_that_will_go_first_begins_above_the_open_window():
    long = sending("long", 0, 400, 10, current_class=5, compute_ms=900)
    assert classes(10, long, idle("short", 30, 60))["short"] == 6


@pytest.mark.parametrize("floor", [0, 2])
def test_no_class_is_below_a_jobs_floor(floor):
    jobs = [
        sending(name, place, 120, class_floor=floor, current_class=floor + 1)
        for place, name in enumerate("abcdefg")
    ]
    given = classes(10, *jobs, idle("h", 20, 120, class_floor=floor))
    assert min(given.values()) == floor
    assert given["a"] == floor + 1


def test_the_order_does_not_depend_on_the_order_of_the_views():
    jobs = [sending(name, 0, 120) for name in "cab"]
    assert classes(0, *jobs) == classes(0, *reversed(jobs)) == {"a": 6, "b": 5, "c": 4}


def test_a_job_is_told_whom_it_waits_for():
    decided = LaxityPolicy().assign(
        5 * MS, [sending("a", 0, 120), sending("b", 5, 120), idle("c", 10, 120)], LINK_Bps
    )
    assert decided["b"].waits_for == ("a",)
    assert decided["b"].why == "waits for a"
    assert decided["c"].waits_for == ("a", "b")
    assert decided["a"].why == "goes first"


def test_a_window_that_is_about_to_end_lets_the_next_into_its_class():
    ending = sending("ending", 0, 120, 110, current_class=4)
    assert classes(115, ending, sending("next", 115, 120)) == {"ending": 4, "next": 4}
    middle = sending("middle", 0, 120, 60, current_class=4)
    assert classes(60, middle, sending("next", 60, 120)) == {"middle": 4, "next": 3}


def test_windows_that_follow_one_another_do_not_use_up_the_classes():
    current = None
    for number in range(20):
        begin_ms = number * 115  # 5 ms before the one before it ends
        jobs = [sending("new", begin_ms, 120)]
        if current is not None:
            jobs.append(sending("old", begin_ms - 115, 120, 115, current_class=current))
        given = classes(begin_ms, *jobs)
        current = given["new"]
    assert current == 6


def test_a_late_job_waits_for_the_little_that_is_left_of_another():
    # 100 ms of laxity: less than the margin of a change here, more than what it has to wait.
    late = sending("late", 0, 120, 4, max_slowdown=1.1, current_class=5)
    other = sending("other", -130, 120, 119, max_slowdown=3, current_class=6)
    assert late.laxity_ns(0) < guard_margin_ns(late, 1, LINK_Bps) + 40 * MS
    assert classes(0, late, other) == {"late": 5, "other": 6}
