"""Eviction policies: against brute force, known sequences and the rules of their papers."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import OrderedDict
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.errors import UsageError
from controller.memory.policies import ONLINE_POLICIES, make_policy
from controller.memory.policies.belady import NEVER, BeladyPolicy, next_uses
from controller.memory.policies.election import Election
from controller.memory.policies.families import FAMILIES, make_family
from controller.memory.policies.following import FollowingPolicy
from controller.memory.policies.lirs import LirsShadow
from controller.memory.policies.next_use import NextUseShadow
from controller.memory.policies.s3fifo import S3FifoShadow
from controller.memory.policies.shadow import LruShadow, Shadow
from controller.memory.policies.tinylfu import TinyLfuShadow
from controller.memory.replay import Request, SimulatedPool

SHADOWS = (LruShadow, LirsShadow, S3FifoShadow, TinyLfuShadow, NextUseShadow)
TRACES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), max_size=300)


def serve(shadow: Shadow, keys, weight=1):
    """Which of the requests are hits."""
    return [shadow.request(key, weight) for key in keys]


def hits_of(policy, keys, capacity):
    """Hits of a pool with room for so many regions of one size."""
    pool = SimulatedPool("", policy, capacity)
    return sum(pool.request(Request(str(key), 1, 0.0, None)) for key in keys)


# ---- all of them ----


@pytest.mark.parametrize("kind", SHADOWS)
@given(TRACES)
@settings(max_examples=60)
def test_a_shadow_never_holds_more_than_its_capacity_and_orders_what_it_holds(kind, trace):
    shadow = kind(100)
    held = {}
    for key, weight in trace:
        expected = held.get(key, 0) >= weight
        assert shadow.request(key, weight) == expected
        if not expected:
            held.pop(key, None)
            held[key] = weight
        for gone in shadow.dropped:
            if gone not in shadow.weights:
                held.pop(gone, None)
        shadow.dropped.clear()
        assert held == shadow.weights
        assert shadow.used == sum(held.values()) <= 100
    order = list(shadow.coldest())
    assert len(order) == len(set(order))
    assert set(order) == set(held)


@pytest.mark.parametrize("kind", SHADOWS)
@given(TRACES, st.lists(st.integers(0, 30), max_size=20))
@settings(max_examples=60)
def test_a_shadow_goes_on_after_keys_were_forgotten(kind, trace, forgotten):
    shadow = kind(100)
    for number, (key, weight) in enumerate(trace):
        shadow.request(key, weight)
        if number < len(forgotten):
            shadow.forget(forgotten[number])
            assert forgotten[number] not in shadow.weights
        assert shadow.used == sum(shadow.weights.values()) <= 100
    assert set(shadow.coldest()) == set(shadow.weights)


@pytest.mark.parametrize("name", ONLINE_POLICIES)
@given(TRACES, st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_victims_are_all_resident_keys_once_whatever_the_cache_does(name, trace, random):
    policy = make_policy(name, 100)
    resident = set()
    for key, nbytes in trace:
        policy.on_request(key, nbytes)
        if key not in resident and random.random() < 0.9:
            policy.on_insert(key, nbytes)
            resident.add(key)
        if random.random() < 0.05:  # prefetched
            other = random.randrange(31)
            policy.on_insert(other, 1)
            resident.add(other)
        order = list(policy.victims())
        assert len(order) == len(resident)
        assert set(order) == resident
        while len(resident) > 8:
            # Those in use are skipped; one of the others goes.
            gone = order.pop(random.randrange(min(3, len(order))))
            policy.on_remove(gone, forget=random.random() < 0.2)
            resident.discard(gone)
        assert not set(policy.prefetch_candidates(4)) & resident


def test_the_same_trace_has_the_same_result_in_every_process():
    code = (
        "from controller.memory.policies import ONLINE_POLICIES, make_policy\n"
        "from controller.memory.policies.families import make_family\n"
        "from controller.memory.replay import Request, SimulatedPool\n"
        "family = make_family('two jobs, bursts', 3, 0.05)\n"
        "for name in ONLINE_POLICIES:\n"
        "    policy = make_policy(name, family.capacity_bytes)\n"
        "    pool = SimulatedPool(name, policy, family.capacity_bytes)\n"
        "    print([pool.request(Request(k, b, 0.0, None)) for k, b in family.requests])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert len(outputs.pop().splitlines()) == len(ONLINE_POLICIES)


def test_a_limit_in_regions_counts_like_one_in_bytes():
    policy = make_policy("lru", 1 << 20, max_regions=3)
    for key in "abcd":
        policy.on_request(key, 100)
        policy.on_insert(key, 100)
    assert next(policy.victims()) == "a"
    assert policy.leader.weights.keys() == {"b", "c", "d"}


@pytest.mark.parametrize("capacity, regions", [(0, None), (-1, None), (10, 0)])
def test_a_pool_that_holds_nothing_is_refused(capacity, regions):
    with pytest.raises(UsageError, match="holds nothing"):
        make_policy("lru", capacity, regions)


def test_an_unknown_policy_is_refused_with_the_names_there_are():
    with pytest.raises(UsageError, match="'fifo' does not exist; allowed: heat, lru, lirs"):
        make_policy("fifo", 10)


# ---- LRU ----


@given(st.lists(st.integers(0, 12), max_size=200), st.integers(1, 8))
def test_lru_is_what_brute_force_says(keys, capacity):
    order = OrderedDict()
    expected = 0
    for key in keys:
        expected += key in order
        order[key] = None
        order.move_to_end(key)
        if len(order) > capacity:
            order.popitem(last=False)
    assert hits_of(make_policy("lru", capacity), keys, capacity) == expected


# ---- LIRS ----


def test_lirs_keeps_all_but_a_hundredth_of_a_loop():
    shadow = LirsShadow(100)
    serve(shadow, range(120))
    assert sum(serve(shadow, range(120))) == 99


def test_lirs_promotes_a_key_that_comes_back_while_it_is_remembered():
    shadow = LirsShadow(4)
    serve(shadow, "abcd")  # d passes through the queue
    assert serve(shadow, "d") == [True]  # it was used since a was: d stays now, a passes
    serve(shadow, "e")
    assert set(shadow.weights) == {"b", "c", "d", "e"}


# ---- S3-FIFO ----


def test_s3_fifo_lets_keys_used_once_pass_through_the_small_queue():
    shadow = S3FifoShadow(10)
    serve(shadow, range(10))
    main = set(range(2, 10))  # 0 was the first in the small queue, 1 made room
    serve(shadow, range(100, 200))
    assert main <= set(shadow.weights)


def test_s3_fifo_puts_a_key_that_its_ghost_remembers_into_the_main_queue():
    shadow = S3FifoShadow(10)
    serve(shadow, range(10))
    serve(shadow, ["x", "y", "z", "x"])  # z pushed x out, the ghost remembers it
    serve(shadow, range(100, 120))
    assert "x" in shadow.weights
    assert "y" not in shadow.weights


# ---- W-TinyLFU ----


def test_w_tinylfu_admits_only_what_is_used_more_often_than_what_would_go():
    shadow = TinyLfuShadow(100)
    serve(shadow, [*range(100)] * 2)
    serve(shadow, ["new", "newer"])
    assert "new" not in shadow.weights
    serve(shadow, ["new", "other"] * 3)
    assert "new" in shadow.weights


def test_w_tinylfu_forgets_what_was_popular_long_ago():
    shadow = TinyLfuShadow(20)
    serve(shadow, [*range(20)] * 15)
    for _ in range(40):
        serve(shadow, range(100, 120))
    assert set(shadow.weights) & set(range(100, 120)) == set(shadow.weights)


# ---- Belady ----


def fewest_misses(keys, capacity):
    """By trying every choice of what goes."""
    states = {frozenset(): 0}
    for key in keys:
        following = {}
        for held, misses in states.items():
            if key in held:
                choices = [(held, misses)]
            elif len(held) < capacity:
                choices = [(held | {key}, misses + 1)]
            else:
                choices = [((held - {gone}) | {key}, misses + 1) for gone in held]
            for state, cost in choices:
                following[state] = min(cost, following.get(state, cost))
        states = following
    return min(states.values())


@given(st.lists(st.integers(0, 5), min_size=1, max_size=25), st.integers(1, 4))
def test_belady_has_the_fewest_misses_possible(keys, capacity):
    policy = BeladyPolicy(next_uses(str(key) for key in keys))
    assert len(keys) - hits_of(policy, keys, capacity) == fewest_misses(keys, capacity)


def test_next_uses_are_the_numbers_of_the_next_requests():
    assert list(next_uses("abaca")) == [2, NEVER, 4, NEVER, NEVER]


def test_belady_names_those_that_were_skipped_again():
    policy = BeladyPolicy(next_uses("abcab"))
    for key in "abc":
        policy.on_request(key, 1)
        policy.on_insert(key, 1)
    assert list(policy.victims()) == ["c", "b", "a"]
    assert list(policy.victims()) == ["c", "b", "a"]


# ---- heat ----


def hit_ratio(name, keys, capacity):
    """Of our policy, or Belady's."""
    keys = [str(key) for key in keys]
    policy = BeladyPolicy(next_uses(keys)) if name == "belady" else make_policy(name, capacity)
    return hits_of(policy, keys, capacity) / len(keys)


@pytest.mark.parametrize("room", [30, 60, 90, 99])
def test_heat_is_within_a_point_of_belady_on_a_loop(room):
    keys = [*range(100)] * 40
    assert hit_ratio("heat", keys, room) >= hit_ratio("belady", keys, room) - 0.01


def test_keys_used_once_do_not_displace_a_loop():
    fresh = itertools.count(1000)
    keys = [key for _ in range(40) for n in range(100) for key in (n, next(fresh))]
    assert hit_ratio("heat", keys, 105) >= 0.95 * 39 / 80
    assert hit_ratio("lru", keys, 105) == 0


def test_a_sweep_forward_and_backward_is_foreseen_by_the_gap_before_the_last():
    sweep = [*range(200), *reversed(range(200))] * 30
    shadow = NextUseShadow(120)
    serve(shadow, sweep[:-400])
    foreseen = sum(serve(shadow, sweep[-400:])) / 400
    assert foreseen >= hit_ratio("belady", sweep, 120) - 0.02


def test_a_job_that_has_ended_does_not_keep_its_memory():
    shadow = NextUseShadow(100)
    serve(shadow, [*range(100)] * 5)
    serve(shadow, [*range(500, 600)] * 4)
    assert sum(key >= 500 for key in shadow.weights) >= 95


def test_a_stream_that_waits_gives_way_to_the_one_that_runs():
    policy = make_policy("heat", 100)
    pool = SimulatedPool("heat", policy, 100)
    hits = []
    for turn in range(12):
        stream = "ab"[turn % 2]
        hits.append(
            sum(
                pool.request(Request(f"{stream}/{n}", 1, 0.0, stream))
                for _ in range(5)
                for n in range(100)
            )
        )
    assert hits[0] == 400
    # The loops fill the pool: four of five rounds can hit.
    assert min(hits[4:]) >= 385


def test_of_keys_needed_alike_the_one_cheaper_to_register_for_its_bytes_goes():
    shadow = NextUseShadow(1000)
    sizes = {n: 100 if n % 2 else 10 for n in range(40)}
    for _ in range(30):
        for key, weight in sizes.items():
            shadow.request(key, weight, register_us=20.0)
    assert sum(weight == 10 for weight in shadow.weights.values()) == 20


def test_prefetch_names_the_absent_keys_that_a_loop_needs_next():
    policy = make_policy("heat", 80)
    pool = SimulatedPool("heat", policy, 80)
    for key in [*range(100)] * 6:
        pool.request(Request(str(key), 1, 0.0, None))
    named = []
    for key in range(100):
        pool.request(Request(str(key), 1, 0.0, None))
        candidates = policy.prefetch_candidates(4)
        coming = [str((key + ahead) % 100) for ahead in range(1, 18)]
        assert [one for one in coming if one in candidates] == candidates
        named += candidates
    assert len(set(named)) >= 15


def test_prefetch_names_nothing_while_nothing_repeats():
    random = Random(1)
    policy = make_policy("heat", 80)
    pool = SimulatedPool("heat", policy, 80)
    named = []
    for _ in range(3000):
        pool.request(Request(str(random.randrange(400)), 1, 0.0, None))
        named += policy.prefetch_candidates(4)
    assert named == []


def test_memory_that_is_gone_is_not_named_for_prefetch():
    policy = make_policy("heat", 80)
    pool = SimulatedPool("heat", policy, 80)
    requests = itertools.cycle(range(100))
    while not (named := policy.prefetch_candidates(4)):
        pool.request(Request(str(next(requests)), 1, 0.0, None))
    policy.on_remove(named[0], forget=True)
    assert policy.prefetch_candidates(4)[: len(named) - 1] == named[1:]


def test_what_was_prefetched_is_kept_until_it_is_asked_for():
    policy = FollowingPolicy([NextUseShadow(80)])
    pool = SimulatedPool("heat", policy, 80)
    requests = itertools.cycle(range(100))
    while not (named := policy.prefetch_candidates(4)):
        pool.request(Request(str(next(requests)), 1, 0.0, None))
    gone = next(policy.victims())
    policy.on_remove(gone)
    policy.on_insert(named[0], 1)
    assert list(policy.victims())[-1] == named[0]
    policy.on_request(named[0], 1)
    for _ in range(20):
        policy.on_request(str(next(requests)), 1)
    # It was used last of all, so it is needed last.
    assert list(policy.victims()).index(named[0]) < 40


def test_a_region_registered_late_is_not_taken_for_a_prefetched_one():
    policy = make_policy("lru", 3)
    for key in "abc":
        policy.on_request(key, 1)
    for key in "abc":
        policy.on_insert(key, 1)
    assert list(policy.victims()) == ["a", "b", "c"]


# ---- which one leads ----


def test_the_leader_changes_once_a_challenger_is_ahead_by_what_the_change_costs():
    election = Election(2)
    changes = [election.vote((False, True), lambda _number: 50) for _ in range(60)]
    assert changes.index(True) == 50
    assert election.leader == 1


def test_a_lead_that_comes_and_goes_changes_nothing():
    election = Election(2)
    for _ in range(50):
        for hits in [(True, False)] * 40 + [(False, True)] * 40:
            assert not election.vote(hits, lambda _number: 50)


def test_the_favourite_needs_half_the_lead():
    election = Election(2, favourite=1)
    changes = [election.vote((False, True), lambda _number: 50) for _ in range(60)]
    assert changes.index(True) == 25


def test_heat_falls_back_to_lru_where_recency_is_what_counts():
    family = make_family("recent", 1, 0.1)
    policy = make_policy("heat", family.capacity_bytes)
    for key, nbytes in family.requests:
        policy.on_request(key, nbytes)
        policy.on_insert(key, nbytes)
    assert isinstance(policy.leader, LruShadow)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_keeps_its_regions_below_a_hundredth_of_the_pool(name):
    # Models have the sizes that they have.
    family = make_family(name, 1, 1.0 if name.startswith("run") else 0.3)
    assert max(nbytes for _key, nbytes in family.requests) < family.capacity_bytes / 100
