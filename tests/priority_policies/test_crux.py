from __future__ import annotations

import itertools
import random

import pytest

from controller.priority.policies.crux import (
    CruxPolicy,
    Demand,
    compress,
    correction,
    pair_link_shares,
    priorities,
)
from tests.priority_policies.views import LINK_Bps, idle

# First worked example of Crux (SIGCOMM 2024): W 10 and 5, communication 2 and 1 s, compute 2 and
# 1 s, on one link.
BIG, SMALL = Demand(2, 2, 10), Demand(1, 1, 5)


def test_the_worked_examples_jobs_have_one_intensity():
    assert BIG.intensity == SMALL.intensity == 5


def test_the_worked_examples_link_shares_come_out():
    assert pair_link_shares(BIG, SMALL) == pytest.approx((1 / 2, 1 / 4))
    assert pair_link_shares(SMALL, BIG) == pytest.approx((1 / 2, 1 / 3))


def test_the_worked_examples_utilisation_comes_out_for_both_orders():
    def utilisation(shares):
        # Ten GPUs each; both compute as long as they communicate.
        return sum(shares) / 2

    assert utilisation(pair_link_shares(BIG, SMALL)) == pytest.approx(0.375)
    assert utilisation(pair_link_shares(SMALL, BIG)) == pytest.approx(0.41667, abs=1e-5)


def test_the_worked_examples_correction_is_one_and_a_half():
    assert correction(SMALL, BIG) == pytest.approx(1.5)
    assert priorities({"big": BIG, "small": SMALL}) == pytest.approx({"big": 5, "small": 7.5})


def test_the_small_job_of_the_worked_example_goes_first():
    views = [
        idle("big", 0, 2000, compute_ms=2000, work=10),
        idle("small", 0, 1000, compute_ms=1000, work=5),
    ]
    decided = CruxPolicy().assign(0, views, LINK_Bps)
    assert decided["small"].class_floor == 6
    assert decided["big"].class_floor == 5
    assert decided["big"].waits_for == ("small",)


def test_a_job_with_a_higher_intensity_goes_first():
    high, low = Demand(1, 3, 40), Demand(1, 3, 10)
    given = priorities({"low": low, "high": high})
    assert given["high"] > given["low"]


def test_jobs_that_never_meet_lose_nothing():
    # Both have period 2 and fit into each other's gaps.
    assert pair_link_shares(Demand(1, 1, 1), Demand(0.5, 1.5, 1)) == pytest.approx((0.5, 0.25))


def test_periods_without_a_common_multiple_are_averaged():
    high, low = pair_link_shares(Demand(1, 2, 1), Demand(1, 2**0.5, 1))
    assert high == pytest.approx(1 / 3)
    assert 0.2 < low < 1 / (1 + 2**0.5)


def test_more_levels_than_jobs_keep_the_order():
    assert compress({"a": 1, "b": 3, "c": 2}, {("a", "b"): 1, ("b", "c"): 1, ("a", "c"): 1}, 7) == {
        "b": 0,
        "c": 1,
        "a": 2,
    }


def test_one_level_takes_everybody():
    assert compress({"a": 1, "b": 2}, {("a", "b"): 1}, 1) == {"a": 0, "b": 0}


def test_the_jobs_that_lose_least_by_it_share_a_level():
    levels = compress({"a": 3, "b": 2, "c": 1}, {("a", "b"): 1, ("b", "c"): 5, ("a", "c"): 1}, 2)
    assert levels == {"a": 0, "b": 0, "c": 1}


@pytest.mark.parametrize("seed", range(8))
def test_compression_finds_the_best_cut_of_jobs_that_all_contend(seed):
    stream = random.Random(seed)
    names = "abcdef"
    priority = {name: stream.random() for name in names}
    loss = {pair: stream.random() for pair in itertools.combinations(names, 2)}

    def lost(levels):
        return sum(value for (a, b), value in loss.items() if levels[a] == levels[b])

    order = sorted(names, key=lambda name: -priority[name])
    cuts = itertools.combinations(range(1, len(order)), 2)
    every = [
        lost({name: sum(place >= cut for cut in pair) for place, name in enumerate(order)})
        for pair in cuts
    ]
    found = compress(priority, loss, 3, seed)
    assert lost(found) == pytest.approx(min(every))
    assert [found[name] for name in order] == sorted(found.values())


def test_jobs_that_do_not_contend_may_share_a_level_out_of_order():
    # b and c meet nobody else's link: two levels are enough for four jobs.
    levels = compress({"a": 4, "b": 3, "c": 2, "d": 1}, {("a", "c"): 1, ("b", "d"): 1}, 2)
    assert levels["a"] < levels["c"]
    assert levels["b"] < levels["d"]


def test_an_estimate_that_moves_a_little_does_not_change_the_classes():
    def given(work):
        views = [idle("a", 0, 100, work=10.0), idle("b", 0, 100, work=work)]
        return {k: v.class_floor for k, v in CruxPolicy().assign(0, views, LINK_Bps).items()}

    assert given(10.02) == given(9.98)
