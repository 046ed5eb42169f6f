from __future__ import annotations

import pytest

from controller.errors import UsageError
from controller.sim.cluster.placement import WAYS, place
from controller.sim.cluster.topology import LeafSpine

NETWORK = LeafSpine(4, 8, 2, 1.0, 1.0)


def leaves(nics):
    return [NETWORK.leaf_of(nic) for nic in nics]


def crossings(nics):
    there = leaves(nics)
    return sum(one != other for one, other in zip(there, there[1:] + there[:1], strict=True))


def test_packed_jobs_fill_leaf_after_leaf():
    assert place([5, 5], NETWORK, "packed") == [tuple(range(5)), tuple(range(5, 10))]


def test_spread_jobs_take_leaves_in_turn():
    first, second = place([6, 4], NETWORK, "spread")
    assert leaves(first) == [0, 1, 2, 3, 0, 1]
    assert leaves(second) == [2, 3, 0, 1]


def test_random_jobs_depend_on_the_seed_only():
    assert place([9, 9], NETWORK, "random", 1) == place([9, 9], NETWORK, "random", 1)
    assert place([9, 9], NETWORK, "random", 1) != place([9, 9], NETWORK, "random", 2)


def test_a_ring_crosses_least_when_packed_and_most_when_spread():
    packed, random, spread = (
        crossings(place([16], NETWORK, how, 3)[0]) for how in ("packed", "random", "spread")
    )
    assert packed < random < spread == 16


@pytest.mark.parametrize("how", WAYS)
def test_each_nic_belongs_to_one_job(how):
    nics = [nic for job in place([7, 1, 20, 4], NETWORK, how, 5) for nic in job]
    assert sorted(nics) == list(range(32))


@pytest.mark.parametrize("how", WAYS)
def test_jobs_that_share_nics_are_placed_as_if_alone(how):
    jobs = place([32, 32, 8], NETWORK, how, 5, share=True)
    assert [len(set(job)) for job in jobs] == [32, 32, 8]


def test_jobs_that_share_the_first_nics_have_the_same():
    assert place([3, 3], NETWORK, "packed", share=True) == [(0, 1, 2)] * 2


def test_no_jobs_need_no_place():
    assert place([], NETWORK, "packed") == []


def test_what_does_not_fit_is_refused():
    with pytest.raises(UsageError, match="need 33 NICs and the network has 32"):
        place([32, 1], NETWORK, "packed")
    with pytest.raises(UsageError, match="need 33 NICs"):
        place([33, 1], NETWORK, "packed", share=True)
    with pytest.raises(UsageError, match="allowed: packed, spread, random"):
        place([1], NETWORK, "anywhere")
    with pytest.raises(UsageError, match="from 1 NIC each"):
        place([1, 0], NETWORK, "packed")
