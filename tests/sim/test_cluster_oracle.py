from __future__ import annotations

import dataclasses

import pytest

from controller.errors import UsageError
from controller.sim.cluster.oracle import (
    FAIR,
    ORDERS,
    WEIGHTS,
    best_known,
    undisturbed_iterations,
)
from controller.sim.cluster.outcome import ClusterConditions
from tests.sim.cluster_mixes import (
    MS,
    ONE_SWITCH,
    random_cluster,
    run,
    two_rank_job,
    windows_ms,
)


def known(jobs, iterations=6, topology=ONE_SWITCH, **more):
    return best_known(jobs, topology, ClusterConditions(), until_iterations=iterations, **more)


def test_two_equal_jobs_that_begin_together_can_halve_their_windows():
    best = known([two_rank_job("a", 280, 120), two_rank_job("b", 280, 120)], 30)
    # In the first iteration one has to wait for the other: 61 windows' time for 60.
    mean, _ = best.gains[best.name]
    assert mean == pytest.approx(61 / 120 - 1)
    assert best.bound.over_all.allreduce_mean_ns == pytest.approx(120 * MS)
    assert sum(windows_ms(best.outcome, "a")) == pytest.approx(30 * 120)


def test_a_job_alone_can_gain_nothing():
    best = known([two_rank_job("a", 280, 120, jitter=0.2)])
    assert set(best.gains) == {*ORDERS, *WEIGHTS, FAIR}
    assert best.name == FAIR
    assert all(gain == pytest.approx((0, 0)) for gain in best.gains.values())


def test_a_short_window_goes_before_the_rest_of_a_long_one():
    jobs = [two_rank_job("long", 100, 400), two_rank_job("short", 160, 100)]
    outcome = known(jobs, {"long": 1, "short": 1}).outcome
    assert windows_ms(outcome, "short") == pytest.approx([100])
    assert windows_ms(outcome, "long") == pytest.approx([500])


@pytest.mark.parametrize("seed", [1, 3])
def test_the_best_rule_lies_between_the_bound_and_fair(seed):
    topology, jobs = random_cluster(seed)
    best = known(jobs, 5, topology, warmup=1, seed=seed)
    fair = run(
        jobs, "fair", 5, topology=topology, conditions=ClusterConditions(), warmup=1, seed=seed
    )
    given = known(jobs, 5, topology, warmup=1, seed=seed, base=fair)
    assert given.gains == best.gains
    assert best.name == min(best.gains, key=lambda name: sum(best.gains[name]))
    assert sum(best.gains[best.name]) < 0
    found, before = best.outcome.measures().over_all, fair.measures().over_all
    assert best.gains[best.name] == pytest.approx(
        (
            found.allreduce_mean_ns / before.allreduce_mean_ns - 1,
            found.allreduce_slowest_ns / before.allreduce_slowest_ns - 1,
        )
    )
    bound = best.bound.over_all
    assert bound.slowdown == pytest.approx(1)
    assert bound.allreduce_mean_ns <= found.allreduce_mean_ns
    assert bound.allreduce_slowest_ns <= found.allreduce_slowest_ns
    assert len(best.outcome.iterations) == bound.iterations == len(fair.iterations)
    # Links hold what they can, in an order as well.
    most = topology.capacity_Bps * best.outcome.end_ns / 1e9
    assert (best.outcome.link_bytes <= most * (1 + 1e-9)).all()


def test_undisturbed_iterations_are_those_of_a_job_simulated_alone():
    topology, jobs = random_cluster(4, algorithms=("ring", "halving-doubling"))
    for job in jobs[:3]:
        outcome = run([job], iterations=5, topology=topology, warmup=2, seed=9)
        rows = undisturbed_iterations([job], topology, ClusterConditions(), {job.name: 5}, 2, 9)
        assert [each.iteration for each in rows] == [2, 3, 4]
        for expected, row in zip(outcome.iterations, rows, strict=True):
            assert dataclasses.astuple(row) == pytest.approx(dataclasses.astuple(expected))


def test_an_order_in_which_a_job_never_gets_through_is_left_out():
    # Computation for a moment only: ranked by it, the other one never sends.
    jobs = [two_rank_job("busy", 1e-6, 100), two_rank_job("idle", 50, 200)]
    best = known(jobs, 1)
    assert "shortest rest" not in best.gains
    assert "first come" in best.gains


def test_progress_is_of_all_rules_together():
    told = []
    rules = len(ORDERS) + len(WEIGHTS) + 1
    known([two_rank_job("a", 10, 1)], 200, progress=lambda *each: told.append(each))
    assert {total for _, total in told} == {200 * (rules)}
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] > 190 * (rules)


def test_impossible_jobs_are_refused():
    with pytest.raises(UsageError, match="Jobs are none"):
        known([])
    with pytest.raises(UsageError, match="Job a: 0 iterations"):
        known([two_rank_job("a", 10, 1)], 0)
