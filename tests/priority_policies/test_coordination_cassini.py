from __future__ import annotations

import itertools
import random

import pytest

from controller.errors import UsageError
from controller.priority.coordination import Contention, SharedLink
from controller.priority.coordinators import CassiniCoordinator
from controller.priority.policies.circles import Circle, best_shifts, place_on_links
from tests.priority_policies.views import MS, LINK_Bps, idle, sending


def graph(jobs: str, *links: str) -> Contention:
    return Contention([SharedLink(LINK_Bps, tuple(link)) for link in links], jobs)


def overlap(circles, shifts, one, other):
    """Share of time in which two jobs of one period want the link together."""
    a, b = circles[one], circles[other]
    begin_a, begin_b = (circles[name].begin_ns + shifts[name] for name in (one, other))
    apart = (begin_b - begin_a) % a.period_ns
    return (max(0.0, a.window_ns - apart) + max(0.0, apart + b.window_ns - a.period_ns)) / (
        a.period_ns
    )


# ---- shifts over the affinity graph ----


def test_one_link_has_the_shifts_of_the_link():
    circles = {name: Circle(100, 25, begin_ns=place) for place, name in enumerate("abc")}
    placed = place_on_links(circles, ["abc"])
    found = best_shifts(list(circles.values()))
    assert tuple(placed.shifts.values()) == found[0]
    assert placed.loops == 0


@pytest.mark.parametrize("seed", range(8))
def test_without_loops_every_link_is_as_good_as_it_can_be_by_itself(seed):
    # NSDI 2024, section 4: on a loop-free affinity graph one shift for each job keeps the
    # relations of all links.
    stream = random.Random(seed)
    names = "abcdefghij"
    circles = {
        name: Circle(100, stream.choice([20, 30, 45]), stream.randrange(100)) for name in names
    }
    # Each link joins one job that is known to one or two new ones: a tree.
    links, known, new = [], [names[0]], list(names[1:])
    while new:
        link = stream.choice(known) + "".join(new.pop() for _ in range(min(len(new), 2)))
        known += link[1:]
        links.append(link)
    placed = place_on_links(circles, stream.sample(links, len(links)))
    assert placed.loops == 0
    assert placed.shifts.keys() == circles.keys()
    for link in links:
        there = [
            Circle(100, circles[name].window_ns, circles[name].begin_ns + placed.shifts[name])
            for name in link
        ]
        _, reached = best_shifts(there, fixed=len(there))
        _, best = best_shifts([circles[name] for name in link])
        # A step of the circle is 1 / 72 of it.
        assert reached == pytest.approx(best, abs=0.03)


def test_a_triangle_of_links_is_a_loop_that_is_counted():
    circles = {name: Circle(100, 30) for name in "abc"}
    placed = place_on_links(circles, ["ab", "bc", "ca"])
    assert placed.loops == 1
    # Three times 30 of 100 fit: but c was placed beside b alone, and may meet a.
    assert overlap(circles, placed.shifts, "a", "b") == pytest.approx(0, abs=0.01)
    assert overlap(circles, placed.shifts, "b", "c") == pytest.approx(0, abs=0.01)
    assert overlap(circles, placed.shifts, "a", "c") > 0.25


def test_a_job_is_placed_beside_all_those_of_a_link_that_have_a_place():
    # a, b by one link; both and c on another, which is visited later since it has less demand.
    circles = {
        "a": Circle(100, 30),
        "b": Circle(100, 30),
        "d": Circle(100, 40),
        "c": Circle(100, 25),
    }
    placed = place_on_links(circles, ["abd", "abc"])
    assert placed.loops == 1
    for one, other in itertools.combinations("abc", 2):
        assert overlap(circles, placed.shifts, one, other) == pytest.approx(0, abs=0.01)


def test_a_link_whose_jobs_are_apart_on_another_is_no_loop():
    circles = {name: Circle(100, 30) for name in "abc"}
    assert place_on_links(circles, ["ab", "abc", "bc"]).loops == 0


def test_links_without_a_common_circle_do_not_count():
    circles = {"a": Circle(100, 30), "b": Circle(161.8, 30), "c": Circle(100, 30)}
    placed = place_on_links(circles, ["ab", "ac"], tolerance=0.001)
    assert placed.shifts["b"] == 0
    assert overlap(circles, placed.shifts, "a", "c") == pytest.approx(0, abs=0.01)


def test_a_job_without_a_period_is_refused():
    with pytest.raises(UsageError, match="periods above 0"):
        place_on_links({"a": Circle(0, 1), "b": Circle(100, 1)}, ["ab"])


# ---- the coordinator ----


def shifts(decided):
    return {name: round(each.shift_ns / MS) for name, each in decided.items()}


def test_jobs_along_a_chain_of_links_are_moved_apart_at_once_when_all_compute():
    jobs = [idle(name, 400, 120) for name in "abc"]
    given = shifts(CassiniCoordinator().assign(0, jobs, graph("abc", "ab", "bc")))
    # c may begin with a, whom it does not meet.
    assert given == {"a": 0, "b": pytest.approx(120, abs=6), "c": 0}


def test_a_job_whose_window_is_held_up_is_told_when_it_is_through():
    coordinator = CassiniCoordinator()
    contention = graph("abc", "ab", "bc")
    # a and b send together: their ends are not clear, c's next begin is.
    jobs = [sending("a", 0, 120), sending("b", 0, 120), idle("c", 400, 120)]
    first = coordinator.assign(0, jobs, contention)
    assert shifts(first) == {"a": 0, "b": 0, "c": 0}
    # Both were expected to begin their next at 520, b was to move by 120. They do at 500.
    later = [idle("a", 500, 120), idle("b", 500, 120), idle("c", 400, 120)]
    second = shifts(coordinator.assign(240 * MS, later, contention))
    assert second["a"] == pytest.approx(20, abs=6)
    assert second["b"] == pytest.approx(140, abs=6)
    assert second["c"] == 0
    assert not any(shifts(coordinator.assign(250 * MS, later, contention)).values())


def test_a_job_that_comes_to_its_place_a_little_late_is_not_held_up_for_a_period():
    coordinator = CassiniCoordinator()
    contention = graph("abc", "ab", "bc")
    coordinator.assign(
        0, [sending("a", 0, 120), sending("b", 0, 120), idle("c", 400, 120)], contention
    )
    later = [idle("a", 525, 120), idle("b", 600, 120), idle("c", 400, 120)]
    assert shifts(coordinator.assign(240 * MS, later, contention))["a"] == 0


def test_loops_that_were_left_open_are_told():
    jobs = [idle(name, 400, 120) for name in "abc"]
    decided = CassiniCoordinator().assign(0, jobs, graph("abc", "ab", "bc", "ca"))
    assert decided["b"].why == "windows are moved apart (1 loop of links left open)"


def test_a_component_to_which_a_job_comes_is_planned_anew_and_others_are_not():
    coordinator = CassiniCoordinator()
    jobs = [idle(name, 400, 120) for name in "abcdx"]
    before = graph("abcd", "ab", "cd")
    assert shifts(coordinator.assign(0, jobs[:4], before)) == {
        "a": 0, "b": pytest.approx(120, abs=6), "c": 0, "d": pytest.approx(120, abs=6),
    }  # fmt: skip
    moved = [
        idle(name, 400 + late_ms, 120)
        for name, late_ms in (("a", 0), ("b", 0), ("c", 0), ("d", 120), ("x", 0))
    ]
    after = shifts(coordinator.assign(10 * MS, moved, graph("abcdx", "ab", "cdx")))
    # a and b have been told; only the job that is new has to move.
    assert after == {"a": 0, "b": 0, "c": 0, "d": 0, "x": pytest.approx(240, abs=6)}
