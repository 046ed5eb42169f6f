from __future__ import annotations

import pytest

from controller.errors import UsageError
from controller.priority.policies import find_policy
from controller.sim.measures import measure
from controller.sim.mixes import even_iterations, mix
from controller.sim.oracle import OracleJob, gain, known_jobs, search
from controller.sim.shared_link import Conditions, alone, simulate

LINK_Bps = 12.5e6
MS = 1e6


def run(policy, periods, shares, jitter, least=30):
    jobs = mix([each * MS for each in periods], shares, LINK_Bps, jitter=jitter)
    counts = even_iterations(jobs, LINK_Bps, least)
    outcome = simulate(jobs, find_policy(policy), Conditions(LINK_Bps), counts, seed=1)
    return outcome.iterations, alone(jobs, LINK_Bps)


def test_two_equal_jobs_that_begin_together_can_halve_their_windows():
    base, lone = run("fair", (400, 400), (0.3, 0.3), 0.0)
    bound = gain(base, lone)
    assert bound.isolated_mean == pytest.approx(-0.5)
    # In the first iteration one has to wait for the other: 61 windows' time for 60.
    assert bound.found_mean == pytest.approx(61 / 120 - 1, abs=1e-6)


def test_a_job_alone_can_gain_nothing():
    base, lone = run("fair", (400,), (0.3,), 0.2)
    bound = gain(base, lone)
    assert bound.isolated_mean == pytest.approx(0, abs=1e-9)
    assert bound.found_mean == pytest.approx(0, abs=1e-9)
    assert bound.found_slowest == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("periods", [(400, 400, 400), (400, 600, 1000)])
def test_the_schedule_found_is_possible_and_no_better_than_without_contention(periods):
    base, lone = run("fair", periods, (0.3, 0.3, 0.3), 0.2, least=15)
    bound = gain(base, lone, beam=24)
    assert bound.isolated_mean <= bound.found_mean + 1e-9
    assert bound.isolated_slowest <= bound.found_slowest + 1e-9
    assert len(bound.iterations) == len(base)

    def computes(rows):
        return {
            (row.job, row.iteration): round(row.window_begin_ns - row.compute_begin_ns)
            for row in rows
        }

    assert computes(bound.iterations) == computes(base)
    for row in bound.iterations:
        assert row.window_ns >= lone[row.job].window_ns - 1
    # One at a time: what has ended by any moment fits into the time since the first began.
    first = min(row.window_begin_ns for row in bound.iterations)
    carried = 0.0
    for row in bound.iterations:
        carried += lone[row.job].window_ns
        assert carried <= row.window_end_ns - first + 1


def test_the_oracle_is_better_than_every_policy_on_a_mix_of_equal_jobs():
    base, lone = run("fair", (400, 400, 400), (0.3, 0.3, 0.3), 0.2)
    bound = gain(base, lone)
    before = measure(base, lone).over_all
    for name in ("laxity", "static", "mltcp"):
        rows, _ = run(name, (400, 400, 400), (0.3, 0.3, 0.3), 0.2)
        after = measure(rows, lone).over_all
        assert bound.found_mean <= after.allreduce_mean_ns / before.allreduce_mean_ns - 1


def test_the_search_lets_a_short_window_go_before_a_long_one_ends():
    # The long window begins first and is cut into pieces; the short one waits for one of them.
    long = OracleJob("long", 0, [0.0], 400.0)
    short = OracleJob("short", 0, [60.0], 100.0)
    rows = {row.job: row for row in search([long, short], 0.0, 1e9, beam=16)}
    assert rows["short"].window_ns == pytest.approx(140)
    assert rows["long"].window_ns == pytest.approx(500)


def test_the_search_keeps_the_link_idle_where_that_is_better():
    long = OracleJob("long", 0, [0.0], 400.0)
    short = OracleJob("short", 0, [10.0], 100.0)
    rows = {row.job: row for row in search([long, short], 0.0, 1e9, beam=16)}
    assert rows["short"].window_ns == pytest.approx(100)
    assert rows["long"].window_ns == pytest.approx(510)


def test_known_jobs_are_read_from_a_run():
    base, lone = run("fair", (400, 400), (0.3, 0.3), 0.2)
    jobs = {job.name: job for job in known_jobs(base, lone)}
    assert len(jobs["a"].compute_ns) == 30
    assert jobs["a"].window_ns == pytest.approx(120 * MS)
    assert jobs["b"].begin_ns == 0


def test_a_search_without_room_is_refused():
    base, lone = run("fair", (400,), (0.3,), 0.0, least=2)
    with pytest.raises(UsageError, match="Beam of the oracle's search is 0"):
        gain(base, lone, beam=0)
