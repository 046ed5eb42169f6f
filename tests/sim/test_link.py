from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.errors import UsageError
from controller.sim.link import allocate_Bps, check_floor, check_rate, max_min_Bps

FREE = math.inf


def test_flows_of_one_class_share_equally():
    assert allocate_Bps(90, 0.05, [3, 3, 3], [FREE] * 3) == [30, 30, 30]


def test_the_highest_class_gets_all_but_the_floors():
    assert allocate_Bps(100, 0.05, [6, 5, 1], [FREE] * 3) == pytest.approx([90, 5, 5])


def test_without_floors_the_highest_class_gets_everything():
    assert allocate_Bps(100, 0, [2, 6, 2], [FREE] * 3) == [0, 100, 0]


def test_what_a_paced_flow_leaves_goes_to_the_others_of_its_class():
    assert allocate_Bps(100, 0.05, [3, 3, 3], [20, FREE, FREE]) == [20, 40, 40]


def test_what_a_class_cannot_use_goes_to_the_next():
    assert allocate_Bps(100, 0.05, [6, 5, 4], [30, FREE, FREE]) == pytest.approx([30, 65, 5])


def test_a_floor_that_is_not_used_up_goes_to_the_highest_class():
    assert allocate_Bps(100, 0.05, [6, 1], [FREE, 2]) == pytest.approx([98, 2])


def test_an_idle_link_has_no_rates():
    assert allocate_Bps(100, 0.05, [], []) == []


@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.one_of(st.just(FREE), st.floats(0.01, 200))),
        min_size=1,
        max_size=12,
    )
)
def test_the_link_is_used_up_and_no_cap_passed_whatever_the_flows(flows):
    classes, caps = zip(*flows, strict=True)
    rates = allocate_Bps(100, 0.05, classes, caps)
    assert sum(rates) == pytest.approx(min(100, sum(caps)))
    assert all(0 <= rate <= cap * (1 + 1e-9) for rate, cap in zip(rates, caps, strict=True))
    # Strict priority: a class gets more than its floor only when all above have what they want.
    for number in set(classes):
        own = sum(rate for rate, each in zip(rates, classes, strict=True) if each == number)
        above = [place for place, each in enumerate(classes) if each > number]
        if own > 5 * (1 + 1e-9):
            assert all(rates[place] == pytest.approx(caps[place]) for place in above)


@pytest.mark.parametrize("seed", range(5))
def test_max_min_parts_cannot_be_made_fairer(seed):
    caps = np.random.default_rng(seed).uniform(1, 50, 9)
    rates = max_min_Bps(100, list(caps))
    # Every flow below its cap has the largest part that there is.
    assert sum(rates) == pytest.approx(min(100, caps.sum()))
    for rate, cap in zip(rates, caps, strict=True):
        assert rate == pytest.approx(cap) or rate == pytest.approx(max(rates))


def test_an_impossible_link_is_refused():
    with pytest.raises(UsageError, match="Link rate is 0"):
        check_rate(0)
    with pytest.raises(UsageError, match="so that 8 floors fit"):
        check_floor(0.2, 8)
