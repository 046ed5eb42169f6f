from __future__ import annotations

import pytest

from controller.priority.coordination import find_coordinator
from controller.priority.policies import find_policy
from controller.sim.cluster.engine import simulate_cluster
from controller.sim.cluster.outcome import ClusterConditions
from controller.sim.mixes import even_iterations, mix
from controller.sim.shared_link import Conditions, alone, simulate
from tests.sim.cluster_mixes import MS, ONE_SWITCH, LINK_Bps, link_job

MIXES = [
    ((400, 400, 400), (0.3, 0.3, 0.3)),
    ((400, 600, 1000), (0.4, 0.3, 0.3)),
    ((400, 647, 1047), (0.25, 0.25, 0.5)),
]


def both(name, periods, shares, *, floor_share=0.05, plan_ns=0.0, max_slowdown=1.5, **errors):
    jobs = mix(
        [each * MS for each in periods], shares, LINK_Bps, jitter=0.2, max_slowdown=max_slowdown
    )
    counts = even_iterations(jobs, LINK_Bps, 20)
    link = Conditions(LINK_Bps, floor_share=floor_share, message_bytes=0, plan_ns=plan_ns, **errors)
    on_link = simulate(jobs, find_policy(name), link, counts, seed=3)
    on_cluster = simulate_cluster(
        [link_job(each) for each in jobs],
        ONE_SWITCH,
        find_coordinator(name),
        ClusterConditions(floor_share=floor_share, plan_ns=plan_ns, **errors),
        until_iterations=counts,
        seed=3,
    )
    return jobs, on_link, on_cluster


def times(outcome):
    return {
        (each.job, each.iteration): (each.window_begin_ns, each.window_end_ns)
        for each in outcome.iterations
    }


def assert_same(on_link, on_cluster):
    one, other = times(on_link), times(on_cluster)
    assert one.keys() == other.keys()
    for key, expected in one.items():
        assert other[key] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("periods", "shares"), MIXES)
@pytest.mark.parametrize("name", ["fair", "static", "laxity", "crux", "mltcp", "cassini"])
def test_jobs_that_meet_on_one_link_only_do_as_in_the_simulator_of_one_link(name, periods, shares):
    jobs, on_link, on_cluster = both(name, periods, shares)
    assert_same(on_link, on_cluster)
    lone = alone(jobs, LINK_Bps)
    for each in jobs:
        # The one counts what its very iterations need, the other the mean compute time.
        assert on_cluster.alone[each.name].window_ns == pytest.approx(lone[each.name].window_ns)
        assert on_cluster.alone[each.name].iteration_ns == pytest.approx(
            lone[each.name].iteration_ns, rel=0.05
        )


@pytest.mark.parametrize("name", ["fair", "static", "laxity", "crux"])
def test_so_do_they_when_plans_take_time_and_raised_flows_send_again(name):
    _, on_link, on_cluster = both(
        name, (400, 600, 1000), (0.4, 0.3, 0.3), plan_ns=1e6, raise_bytes=20_000
    )
    assert_same(on_link, on_cluster)
    # Two ranks send where the link of the other simulator carries one.
    resent = {job: nbytes / 2 for job, nbytes in on_cluster.resent_bytes.items()}
    assert resent == pytest.approx(on_link.resent_bytes)


def test_so_do_they_when_the_coordinator_predicts_badly_and_bounds_are_tight():
    _, on_link, on_cluster = both(
        "laxity", (400, 647, 1047), (0.25, 0.25, 0.5), max_slowdown=1.2, start_error=0.05,
        bytes_error=0.01, floor_share=0.05,
    )  # fmt: skip
    assert_same(on_link, on_cluster)
