from __future__ import annotations

import math
import random

import pytest

from controller.errors import UsageError
from controller.priority.coordination import (
    COORDINATORS,
    Contention,
    SharedLink,
    find_coordinator,
)
from controller.priority.policies import POLICIES, find_policy
from controller.priority.policies.laxity import rank
from controller.priority.policies.mltcp import INTERCEPT, aggressiveness
from controller.priority.policy import JobView
from tests.priority_policies.views import MS, LINK_Bps, idle, sending


def graph(jobs: str, *links: str, capacity_Bps: float = LINK_Bps) -> Contention:
    """Jobs and links whose names have one letter."""
    return Contention([SharedLink(capacity_Bps, tuple(link)) for link in links], jobs)


def classes(now_ms: float, contention: Contention, *jobs: JobView) -> dict[str, int]:
    decided = rank(round(now_ms * MS), jobs, contention)
    assert all(each.class_floor == each.class_ceiling for each in decided.values())
    return {name: each.class_floor for name, each in decided.items()}


def some_views(stream: random.Random, count: int) -> list[JobView]:
    """Jobs of all kinds: late, held up, with limits, with windows hardly begun and overdue."""
    views = []
    for number in range(count):
        floor = stream.choice([0, 0, 0, 1, 2, 5])
        ceiling = max(floor, stream.choice([6, 6, 5, 7]))
        window_ms = stream.choice([0, 5, 60, 120, stream.randint(1, 300)])
        more = {
            "max_slowdown": stream.choice([1.0, 1.1, 1.5, 3.0]),
            "slowdown": stream.choice([1.0, 1.1, 1.4, 2.0]),
            "compute_ms": stream.choice([0, 100, 280]),
            "class_floor": floor,
            "class_ceiling": ceiling,
            "traffic_class": stream.randint(floor, ceiling),
            "work": stream.choice([0.0, 5.0, 50.0]),
        }
        name = f"{stream.randrange(100):02}-{number}"
        if stream.random() < 0.4:
            views.append(idle(name, stream.randint(0, 600), window_ms, **more))
            continue
        views.append(
            sending(
                name,
                stream.randint(-200, 200),
                window_ms,
                stream.random() * window_ms * 1.1,
                current_class=stream.choice([None, *range(floor, ceiling + 1)]),
                **more,
            )
        )
    return views


# ---- one code for one link and many ----


@pytest.mark.parametrize("name", POLICIES)
def test_on_one_link_a_coordinator_decides_what_the_policy_decides(name):
    seen = set()
    for seed in range(150):
        stream = random.Random(seed)
        views = some_views(stream, stream.randint(0, 9))
        names = tuple(view.name for view in views)
        contention = Contention([SharedLink(LINK_Bps, names)], names)
        coordinator, policy = find_coordinator(name), find_policy(name)
        # Twice, since some remember what they have decided.
        for now_ns in (200 * MS, 210 * MS):
            decided = coordinator.assign(now_ns, views, contention)
            assert decided == policy.assign(now_ns, views, LINK_Bps)
            seen.update(decided.values())
    assert len(seen) > 1


@pytest.mark.parametrize("name", COORDINATORS)
def test_a_coordinator_decides_for_all_jobs_whatever_the_network(name):
    for seed in range(60):
        stream = random.Random(seed)
        views = some_views(stream, stream.randint(2, 12))
        names = [view.name for view in views]
        links = [
            SharedLink(
                stream.choice([LINK_Bps, 1e9, 0.0]),
                tuple(stream.sample(names, stream.randint(1, min(5, len(names))))),
            )
            for _ in range(stream.randint(0, 12))
        ]
        contention = Contention(links, names)
        coordinator = find_coordinator(name)
        decided = coordinator.assign(200 * MS, views, contention)
        assert decided.keys() == set(names)
        for view in views:
            given = decided[view.name]
            assert view.class_floor <= given.class_floor <= given.class_ceiling
            assert given.class_ceiling <= view.class_ceiling
            assert contention.neighbours(view.name).issuperset(given.waits_for)
            assert given.weight > 0
            assert given.why
        again = find_coordinator(name).assign(200 * MS, views, contention)
        assert again == decided


@pytest.mark.parametrize("name", COORDINATORS)
def test_components_that_are_asked_about_together_are_decided_apart(name):
    stream = random.Random(7)
    views = some_views(stream, 8)
    names = [view.name for view in views]
    contention = Contention(
        [
            SharedLink(LINK_Bps, tuple(names[:2])),
            SharedLink(LINK_Bps, tuple(names[1:4])),
            SharedLink(LINK_Bps, tuple(names[4:7])),
        ],
        names,
    )
    together = find_coordinator(name).assign(200 * MS, views, contention)
    coordinator = find_coordinator(name)
    apart: dict[str, object] = {}
    for part in (views[:4], views[4:7], views[7:]):
        apart.update(coordinator.assign(200 * MS, part, contention))
    assert apart == together


def test_every_coordinator_is_found_by_the_name_of_its_policy():
    # What classes alone can do across links has a name of its own.
    assert set(COORDINATORS) == {*POLICIES, "strict"}
    for name in COORDINATORS:
        coordinator = find_coordinator(name)
        policy = find_policy("laxity" if name == "strict" else name)
        assert coordinator.name == name
        assert coordinator.needs_pacing == policy.needs_pacing
        assert coordinator.tick_ns(1) == policy.tick_ns
    # Across links its weights follow the progress.
    assert find_coordinator("laxity").tick_ns(2) == find_policy("mltcp").tick_ns


def test_on_several_links_laxity_weighs_by_progress_and_by_how_much_a_job_was_held_up():
    contention = graph("abc", "ab", "bc")
    views = [
        sending("a", 0, 100, 50.0),
        sending("b", 0, 100, 50.0, slowdown=1.5),
        idle("c", 300, 100),
    ]
    decided = find_coordinator("laxity").assign(50 * MS, views, contention)
    progress = math.sqrt(aggressiveness(views[0]))
    assert 1 < progress < math.sqrt(2)
    assert decided["a"].weight == pytest.approx(progress)
    assert decided["b"].weight == pytest.approx(progress * 1.5)
    assert decided["c"].weight == pytest.approx(math.sqrt(INTERCEPT))
    assert len({(each.class_floor, each.class_ceiling) for each in decided.values()}) == 1


def test_strict_laxity_orders_jobs_on_several_links_by_classes():
    contention = graph("abc", "ab", "bc")
    views = [sending(name, place, 100, 0.0) for place, name in enumerate("abc")]
    decided = find_coordinator("strict").assign(5 * MS, views, contention)
    assert [decided[name].class_floor for name in "abc"] == [6, 5, 4]
    assert {each.weight for each in decided.values()} == {1.0}


def test_an_unknown_coordinator_is_refused_and_the_known_ones_are_listed():
    with pytest.raises(UsageError, match="'fifo'; allowed: laxity, fair, static, mltcp, crux, cas"):
        find_coordinator("fifo")


def test_a_job_that_the_network_does_not_know_is_refused():
    with pytest.raises(UsageError, match="Job x is not known; known: a, b"):
        find_coordinator("laxity").assign(0, [sending("x", 0, 10)], graph("ab", "ab"))


# ---- laxity ----


def test_windows_that_do_not_meet_keep_the_highest_class():
    jobs = [sending(name, place, 120) for place, name in enumerate("abcd")]
    assert classes(10, graph("abcd", "ab", "cd"), *jobs) == {"a": 6, "b": 5, "c": 6, "d": 5}
    assert classes(10, graph("abcd", "ad"), *jobs) == {"a": 6, "b": 6, "c": 6, "d": 5}


def test_classes_fall_along_chains_of_jobs_that_meet():
    jobs = [sending(name, place, 120) for place, name in enumerate("abc")]
    assert classes(10, graph("abc", "ab", "bc"), *jobs) == {"a": 6, "b": 5, "c": 4}
    # b is last: both others are one step above it, not two.
    assert classes(10, graph("abc", "ac", "bc"), *jobs) == {"a": 6, "b": 6, "c": 5}


def test_eight_jobs_of_a_ring_of_links_need_two_classes_if_every_other_one_goes_first():
    # On one link as many windows would need eight classes, one more than there are.
    ring = graph("abcdefgh", "ab", "bc", "cd", "de", "ef", "fg", "gh", "ha")
    jobs = [sending(name, place // 4, 120) for place, name in enumerate("acegbdfh")]
    assert classes(10, ring, *jobs) == dict.fromkeys("aceg", 6) | dict.fromkeys("bdfh", 5)


def test_the_last_windows_of_a_chain_that_is_too_long_tie_and_say_so():
    names = "abcdefghi"
    chain = graph(names, *(names[place : place + 2] for place in range(8)))
    jobs = [sending(name, place, 120) for place, name in enumerate(names)]
    decided = rank(20 * MS, jobs, chain)
    assert [decided[name].class_floor for name in names] == [6, 5, 4, 3, 2, 1, 0, 0, 0]
    assert decided["g"].why == "waits for f"
    assert decided["h"].why == "waits for g; no class is left below"
    assert decided["i"].why == "waits for h; no class is left below"


def test_an_idle_job_begins_below_those_that_it_meets_only():
    jobs = [sending("a", 0, 120, 20, current_class=6), sending("b", 0, 120, current_class=4)]
    given = classes(20, graph("abcd", "ac", "bd"), *jobs, idle("c", 60, 120), idle("d", 60, 120))
    assert (given["c"], given["d"]) == (5, 3)


def test_an_idle_job_below_which_no_class_is_left_says_so():
    decided = rank(
        20 * MS, [sending("a", 0, 120, current_class=0), idle("b", 60, 120)], graph("ab", "ab")
    )
    assert decided["b"].class_floor == 0
    assert decided["b"].why == "will wait for a; no class is left below"


# Iteration alone: 400 ms; bound 1.1, so it may end 40 ms late: at 160 ms.
LATE = sending("l", 0, 120, 4, max_slowdown=1.1, current_class=5)


def test_the_guard_lowers_only_jobs_that_the_late_one_meets():
    before = [sending(name, -20, 120, 40, max_slowdown=3, current_class=6) for name in "ab"]
    contention = graph("abl", "al", "ab")
    decided = rank(40 * MS, [*before, LATE], contention)
    # b goes after a, as before; that the late job is put before a does not touch b.
    assert {name: each.class_floor for name, each in decided.items()} == {"l": 5, "a": 4, "b": 3}
    assert decided["l"].why == "would pass 1.1 times its undisturbed iteration"
    assert decided["l"].waits_for == ()
    assert decided["a"].waits_for == ("l",)
    assert decided["b"].waits_for == ("a",)


def test_a_job_that_the_late_one_does_not_meet_need_not_be_able_to_wait():
    # 30 ms of laxity only; but it is on another link.
    busy = sending("b", -1, 120, 4, max_slowdown=1.1, current_class=6)
    patient = sending("a", -20, 120, 40, max_slowdown=3, current_class=6)
    given = classes(40, graph("abl", "al"), patient, busy, LATE)
    assert given == {"a": 4, "b": 6, "l": 5}


def test_a_job_is_late_by_what_is_before_it_on_its_longest_link_not_by_the_sum():
    # 4 ms of laxity are left, and 3 ms on each of two links before it, which go in parallel.
    late = sending("l", 0, 120, 84, max_slowdown=1.01, compute_ms=280)
    now_ms = 84
    assert late.laxity_ns(now_ms * MS) == pytest.approx(4 * MS)
    before = [sending(name, -120, 120, 117, max_slowdown=3, current_class=6) for name in "ab"]
    apart, together = graph("abl", "al", "bl"), graph("abl", "abl")
    assert rank(now_ms * MS, [*before, late], apart)["l"].waits_for == ("a", "b")
    assert rank(now_ms * MS, [*before, late], together)["l"].waits_for == ()


def test_a_class_that_is_missing_far_away_raises_nobody_near_a_late_job():
    late = sending("l", 0, 120, 4, max_slowdown=1.1, current_class=4)
    patient = sending("p", -20, 120, 40, max_slowdown=3, current_class=4)
    far = [sending(name, place, 120, current_class=0) for place, name in enumerate("xy")]
    contention = graph("lpxyz", "lp", "xy")
    assert classes(40, contention, patient, late, *far) == {"l": 4, "p": 3, "x": 0, "y": 0}
    # Near it, it does; and those that it does not meet keep their classes.
    low = [
        sending("l", 0, 120, 4, max_slowdown=1.1, current_class=0),
        sending("p", -20, 120, 40, max_slowdown=3, current_class=0),
    ]
    given = classes(40, contention, *low, *far)
    assert given == {"l": 6, "p": 5, "x": 0, "y": 0}


# ---- mltcp ----


def test_mltcp_paces_on_one_link_and_weighs_across_links():
    jobs = [sending("a", 0, 120, 60), sending("b", 0, 120), idle("c", 300, 120)]
    coordinator = find_coordinator("mltcp")
    paced = coordinator.assign(0, jobs, graph("abc", "abc"))
    # F(0.5) = 1.125 and F(0) = 0.25.
    assert [paced[name].share for name in "abc"] == pytest.approx([1.125 / 1.375, 0.25 / 1.375, 0])
    weighed = coordinator.assign(0, jobs, graph("abc", "ab", "bc"))
    assert {each.share for each in weighed.values()} == {0.0}
    for decided in (paced, weighed):
        assert [decided[name].weight for name in "abc"] == [1.125, 0.25, INTERCEPT]
    assert weighed["a"].why == "weight 1.12 by its progress"
