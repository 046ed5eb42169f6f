from __future__ import annotations

import pytest

from controller.errors import UsageError
from controller.priority.policies import POLICIES, find_policy
from controller.priority.policies.mltcp import aggressiveness
from tests.priority_policies.views import MS, LINK_Bps, idle, sending

JOBS = [sending("a", 0, 120, 60, traffic_class=5), sending("b", 0, 120), idle("c", 300, 120)]


def test_every_policy_is_found_by_the_name_that_it_has():
    for name in POLICIES:
        assert find_policy(name).name == name


def test_an_unknown_policy_is_refused_and_the_known_ones_are_listed():
    with pytest.raises(UsageError, match="'fifo'; allowed: laxity, fair, static, mltcp, crux, cas"):
        find_policy("fifo")


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_decides_for_all_jobs_within_their_limits(name):
    jobs = [*JOBS, sending("d", 5, 30, traffic_class=2, class_floor=2, class_ceiling=2)]
    decided = find_policy(name).assign(30 * MS, jobs, LINK_Bps)
    assert decided.keys() == {"a", "b", "c", "d"}
    for job in jobs:
        given = decided[job.name]
        assert job.class_floor <= given.class_floor <= given.class_ceiling <= job.class_ceiling
        assert 0 <= given.share <= 1
        assert given.shift_ns >= 0
        assert given.why


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_takes_a_link_without_jobs_and_jobs_of_which_little_is_known(name):
    assert find_policy(name).assign(0, [], LINK_Bps) == {}
    blank = [idle("a", 0, 0, compute_ms=0), sending("b", 0, 0, compute_ms=0)]
    assert find_policy(name).assign(0, blank, 0.0).keys() == {"a", "b"}


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_decides_the_same_again(name):
    first, second = (find_policy(name).assign(30 * MS, JOBS, LINK_Bps) for _ in range(2))
    assert first == second


def test_fair_gives_one_class_to_all():
    decided = find_policy("fair").assign(0, JOBS, LINK_Bps)
    assert {each.class_floor for each in decided.values()} == {3}


def test_static_gives_each_job_the_class_of_its_configuration():
    decided = find_policy("static").assign(0, JOBS, LINK_Bps)
    assert {name: each.class_floor for name, each in decided.items()} == {"a": 5, "b": 3, "c": 3}


def test_mltcp_shares_by_progress():
    decided = find_policy("mltcp").assign(0, JOBS, LINK_Bps)
    # F(0.5) = 1.125 and F(0) = 0.25.
    assert decided["a"].share == pytest.approx(1.125 / 1.375)
    assert decided["b"].share == pytest.approx(0.25 / 1.375)
    assert decided["c"].share == 0


def test_mltcp_does_not_pace_a_job_that_sends_alone():
    assert find_policy("mltcp").assign(0, JOBS[1:], LINK_Bps)["b"].share == 0


def test_mltcps_aggressiveness_stays_in_its_range_when_more_is_sent_than_expected():
    assert aggressiveness(sending("a", 0, 100, 150)) == 2.0
    assert aggressiveness(sending("a", 0, 0)) == 2.0
