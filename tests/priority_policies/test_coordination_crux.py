from __future__ import annotations

import itertools
import random

import pytest

from controller.priority.coordination import Contention, SharedLink, find_coordinator
from controller.priority.coordinators import CruxCoordinator
from controller.priority.policies.crux import compress
from controller.priority.policies.levels import DEFAULT_ORDERS
from tests.priority_policies.views import LINK_Bps, idle


def graph(jobs: str, *links: str) -> Contention:
    return Contention([SharedLink(LINK_Bps, tuple(link)) for link in links], jobs)


def classes(coordinator, contention, *jobs):
    decided = coordinator.assign(0, jobs, contention)
    return {name: each.class_floor for name, each in decided.items()}


def jobs_by_intensity(names: str):
    """Jobs with the same window and compute time; the first has the highest intensity."""
    return [idle(name, 0, 100, work=100.0 - place) for place, name in enumerate(names)]


def test_each_component_has_its_own_highest_class():
    given = classes(CruxCoordinator(), graph("abcd", "ab", "cd"), *jobs_by_intensity("abcd"))
    assert given == {"a": 6, "b": 5, "c": 6, "d": 5}


def test_the_reference_is_the_job_with_most_traffic_of_the_component_not_of_the_cluster():
    # Crux's first worked example: small has 7.5 against big's reference of 5, and so goes first.
    big = idle("b", 0, 2000, compute_ms=2000, work=10)
    small = idle("s", 0, 1000, compute_ms=1000, work=5)
    more = idle("m", 0, 9000, compute_ms=100, work=20)
    contention = graph("bsmx", "bs", "mx")
    decided = find_coordinator("crux").assign(0, [big, small, more, idle("x", 0, 100)], contention)
    assert decided["s"].class_floor == 6 and decided["b"].class_floor == 5
    # In steps of 2 %, and k of demands in these steps.
    priority = {name: float(decided[name].why.split()[1]) for name in "bs"}
    assert priority["s"] / priority["b"] == pytest.approx(1.5, rel=0.05)


def test_jobs_that_do_not_meet_share_a_class_out_of_their_order():
    # A star: the hub has the lowest priority, and all others need no order among them.
    names = "abcdefghh"[:-1]
    contention = graph(names, *(name + "h" for name in names[:-1]))
    given = classes(CruxCoordinator(), contention, *jobs_by_intensity(names))
    assert given == dict.fromkeys("abcdefg", 6) | {"h": 5}
    decided = CruxCoordinator().assign(0, jobs_by_intensity(names), contention)
    assert decided["h"].waits_for == tuple("abcdefg")
    assert decided["g"].waits_for == ()


def test_jobs_that_tie_are_those_that_lose_least_by_it():
    # Three that meet and two classes: a cut between b and c leaves the pair of higher intensity
    # in one class, one between a and b the pair of lower.
    given = classes(CruxCoordinator(levels=2), graph("abc", "abc"), *jobs_by_intensity("abc"))
    assert given == {"a": 6, "b": 5, "c": 5}


@pytest.mark.parametrize("seed", range(6))
def test_compression_comes_near_the_best_cut_on_any_graph(seed):
    # The best: all assignments of 3 levels that never put a job above one which it meets and
    # which has the higher priority.
    stream = random.Random(seed)
    names = "abcdefg"
    priority = {name: stream.random() for name in names}
    pairs = [pair for pair in itertools.combinations(names, 2) if stream.random() < 0.5]
    loss = {pair: stream.random() for pair in pairs}

    def is_valid(levels):
        return all((priority[a] - priority[b]) * (levels[b] - levels[a]) >= 0 for a, b in pairs)

    def lost(levels):
        return sum(value for (a, b), value in loss.items() if levels[a] == levels[b])

    every = [
        lost(levels)
        for given in itertools.product(range(3), repeat=len(names))
        if is_valid(levels := dict(zip(names, given, strict=True)))
    ]
    found = compress(priority, loss, 3, orders=DEFAULT_ORDERS)
    assert is_valid(found)
    spread = sum(loss.values()) - min(every)
    assert lost(found) - min(every) <= 0.05 * spread


def test_a_demand_that_moves_a_little_does_not_change_classes_and_one_that_moves_much_does():
    coordinator = CruxCoordinator()
    contention = graph("abc", "ab", "bc")

    def given(work):
        jobs = [idle("a", 0, 100, work=10.0), idle("b", 0, 100, work=work), idle("c", 0, 100)]
        return classes(coordinator, contention, *jobs)

    first = given(10.3)
    assert first["b"] > first["a"]
    assert given(9.85) == first
    assert given(9.0)["b"] < first["b"]


def test_classes_of_one_component_are_worked_out_once_for_the_same_demands(monkeypatch):
    coordinator = CruxCoordinator()
    contention = graph("abc", "ab", "bc")
    jobs = jobs_by_intensity("abc")
    first = coordinator.assign(0, jobs, contention)
    monkeypatch.setattr("controller.priority.coordinators.crux.ranked", None)
    assert coordinator.assign(5, jobs, contention) == first


def test_a_job_with_other_limits_has_another_class():
    coordinator = CruxCoordinator()
    contention = graph("ab", "ab")
    high = idle("a", 0, 100, work=10.0, class_ceiling=4)
    assert classes(coordinator, contention, high, idle("b", 0, 100))["a"] == 4
    high = idle("a", 0, 100, work=10.0, class_ceiling=3)
    assert classes(coordinator, contention, high, idle("b", 0, 100))["a"] == 3
