from __future__ import annotations

import dataclasses
import math
from dataclasses import fields

import numpy as np
import pytest

from controller.errors import UsageError
from controller.priority.coordination import COORDINATORS, find_coordinator
from controller.priority.policy import Assignment, JobView
from controller.sim.cluster.course import Course, even_iterations
from controller.sim.cluster.jobs import Bucket, ClusterJob
from controller.sim.cluster.outcome import ClusterConditions
from controller.sim.cluster.topology import LeafSpine
from tests.sim.cluster_mixes import (
    IDEAL,
    MS,
    ONE_SWITCH,
    Fixed,
    LINK_Bps,
    classes,
    durations_ms,
    random_cluster,
    run,
    two_rank_job,
    windows_ms,
)


def bucketed(name, forward_ms, backward_ms, buckets, nics=(0, 1), **more):
    """Buckets as (ready share, ms on the link)."""
    made = tuple(Bucket(share, round(ms * LINK_Bps / 1000)) for share, ms in buckets)
    return ClusterJob(name, nics, forward_ms * MS, backward_ms * MS, made, **more)


def test_a_job_alone_takes_what_it_needs():
    outcome = run([two_rank_job("a", 280, 120)], iterations=5)
    assert windows_ms(outcome, "a") == pytest.approx([120] * 5)
    assert outcome.end_ns == pytest.approx(5 * 400 * MS)
    assert outcome.carried_bytes["a"] == pytest.approx(2 * 5 * 0.12 * LINK_Bps)
    assert outcome.utilisation == pytest.approx(0.7)
    assert outcome.measures().jobs["a"].slowdown == pytest.approx(1)
    # Of each iteration: the window's begin, the end of its step.
    assert outcome.events == 1 + 2 * 5
    assert outcome.decisions == 0


@pytest.mark.parametrize("apart_ms", [0, 20, 60, 119])
def test_two_equal_jobs_under_fair_need_twice_the_window_less_what_they_are_apart(apart_ms):
    jobs = [two_rank_job("a", 280, 120), two_rank_job("b", 280, 120, arrival_ns=apart_ms * MS)]
    outcome = run(jobs, iterations=6)
    for name in "ab":
        assert windows_ms(outcome, name) == pytest.approx([240 - apart_ms] * 6)


def test_jobs_that_share_no_link_do_not_notice_each_other():
    jobs = [two_rank_job("a", 280, 120), two_rank_job("b", 280, 120, nics=(2, 3))]
    outcome = run(jobs)
    assert windows_ms(outcome, "a") == windows_ms(outcome, "b") == pytest.approx([120] * 3)
    assert outcome.decisions == 0


def test_jobs_that_meet_on_an_uplink_share_it_and_nothing_else():
    # Two NICs at each leaf and one uplink as fast as a NIC: both rings cross it both ways.
    topology = LeafSpine(2, 2, 1, LINK_Bps, LINK_Bps)
    jobs = [two_rank_job("a", 280, 120, nics=(0, 2)), two_rank_job("b", 280, 120, nics=(1, 3))]
    outcome = run(jobs, topology=topology)
    assert windows_ms(outcome, "a") == pytest.approx([240] * 3)
    assert outcome.decisions > 0
    # An uplink with room for both holds up nobody, so there is nothing to decide.
    roomy = run(jobs, topology=dataclasses.replace(topology, uplink_Bps=2 * LINK_Bps))
    assert windows_ms(roomy, "a") == pytest.approx([120] * 3)
    assert roomy.decisions == 0


def test_buckets_are_sent_while_the_backward_pass_goes_on():
    # Ready at 100, 150 and 200 ms; the link is busy 100 .. 140, 150 .. 190, 200 .. 240.
    job = bucketed("a", 50, 150, [(1 / 3, 40), (2 / 3, 40), (1, 40)])
    outcome = run([job], iterations=3)
    assert windows_ms(outcome, "a") == pytest.approx([140] * 3)
    assert durations_ms(outcome, "a") == pytest.approx([240] * 3)


def test_a_bucket_waits_for_the_one_before_it():
    # Ready at 100, 150 and 200 ms, but the first takes until 190, the second until 250.
    job = bucketed("a", 50, 150, [(1 / 3, 90), (2 / 3, 60), (1, 40)])
    outcome = run([job], iterations=2)
    assert windows_ms(outcome, "a") == pytest.approx([190] * 2)
    assert durations_ms(outcome, "a") == pytest.approx([290] * 2)


def test_an_iteration_lasts_until_the_backward_pass_is_over():
    job = bucketed("a", 50, 150, [(0.2, 30)])
    outcome = run([job], iterations=3)
    assert windows_ms(outcome, "a") == pytest.approx([30] * 3)
    assert durations_ms(outcome, "a") == pytest.approx([200] * 3)
    assert outcome.utilisation == pytest.approx(1)
    assert outcome.measures().over_all.slowdown == pytest.approx(1)


@pytest.mark.parametrize("algorithm", ["ring", "halving-doubling"])
def test_undisturbed_iterations_are_what_the_closed_form_says(algorithm):
    job = bucketed(
        "a", 50, 150, [(0.1, 20), (0.4, 100), (0.8, 15)], nics=(0, 1, 2, 3), jitter=0.5,
        algorithm=algorithm,
    )  # fmt: skip
    outcome = run([job], iterations=40, seed=5)
    expected = Course(job, ONE_SWITCH).undisturbed(job.compute_factors(40, 5))
    rows = outcome.iterations
    assert [each.window_ns for each in rows] == pytest.approx(expected.window_ns.tolist())
    assert [each.duration_ns for each in rows] == pytest.approx(expected.duration_ns.tolist())
    assert outcome.measures().over_all.slowdown == pytest.approx(1)
    assert outcome.alone["a"].iteration_ns == pytest.approx(expected.duration_ns.mean())


def test_a_job_of_one_rank_computes_and_sends_nothing():
    jobs = [bucketed("a", 50, 150, [(1, 40)], nics=(0,)), two_rank_job("b", 280, 120)]
    outcome = run(jobs, iterations={"a": 4, "b": 2})
    assert windows_ms(outcome, "a") == [0] * 4
    assert durations_ms(outcome, "a") == pytest.approx([200] * 4)
    assert outcome.carried_bytes["a"] == 0
    assert outcome.measures().jobs["a"].allreduce_slowdown_mean == 1


def test_the_higher_class_does_not_notice_the_lower():
    jobs = [two_rank_job("a", 280, 120), two_rank_job("b", 280, 120)]
    outcome = run(jobs, classes(a=6, b=1))
    assert windows_ms(outcome, "a") == pytest.approx([120] * 3)
    # The lower one sends once the higher has ended, and is out of its way from then on.
    assert windows_ms(outcome, "b") == pytest.approx([240, 120, 120])


def test_the_lower_class_keeps_its_floor():
    jobs = [two_rank_job("a", 280, 120), two_rank_job("b", 280, 120)]
    conditions = dataclasses.replace(IDEAL, floor_share=0.05)
    outcome = run(jobs, classes(a=6, b=1), 1, conditions=conditions)
    assert windows_ms(outcome, "a") == pytest.approx([120 / 0.95])
    assert windows_ms(outcome, "b") == pytest.approx([240])


def test_weights_divide_a_class():
    jobs = [two_rank_job("a", 280, 120), two_rank_job("b", 280, 120)]
    outcome = run(jobs, Fixed(a=Assignment(3, 3, weight=3.0), b=Assignment(3, 3)), 1)
    # At three quarters of the link the first takes 160 ms, in which the second has sent 40.
    assert windows_ms(outcome, "a") == pytest.approx([160])
    assert windows_ms(outcome, "b") == pytest.approx([240])


def test_a_paced_job_takes_its_share_though_the_link_is_free():
    jobs = [two_rank_job("a", 280, 120), two_rank_job("b", 2000, 120)]
    outcome = run(jobs, Fixed(a=Assignment(3, 3, share=0.25), b=Assignment(3, 3)), {"a": 2, "b": 1})
    assert windows_ms(outcome, "a") == pytest.approx([480] * 2)


def test_a_shift_moves_windows_once():
    class Once(Fixed):
        def assign(self, now_ns, jobs, contention):
            return {"b": Assignment(3, 3, shift_ns=0 if now_ns else 120_000_000)}

    outcome = run([two_rank_job("a", 280, 120), two_rank_job("b", 280, 120)], Once())
    begins = [each.window_begin_ns / MS for each in outcome.iterations if each.job == "b"]
    assert begins == pytest.approx([400, 800, 1200])


def test_a_shift_that_arrives_while_a_window_is_open_moves_the_next_one():
    class Late(Fixed):
        told = False

        def assign(self, now_ns, jobs, contention):
            shift_ns = 0
            if jobs[1].is_open and not self.told:
                shift_ns, self.told = 120_000_000, True
            return {"b": Assignment(3, 3, shift_ns=shift_ns)}

    jobs = [two_rank_job("a", 5000, 10), two_rank_job("b", 280, 120)]
    outcome = run(jobs, Late(), {"a": 1, "b": 3})
    begins = [each.window_begin_ns / MS for each in outcome.iterations if each.job == "b"]
    assert begins == pytest.approx([280, 800, 1200])


def test_what_is_overtaken_in_mid_window_is_sent_again_by_every_flow():
    class Raise(Fixed):
        def assign(self, now_ns, jobs, contention):
            number = 5 if any(each.name == "b" and each.is_open for each in jobs) else 1
            return {"a": Assignment(number, number), "b": Assignment(0, 0)}

    jobs = [two_rank_job("a", 280, 120), two_rank_job("b", 330, 50)]
    conditions = dataclasses.replace(IDEAL, raise_bytes=250_000)
    outcome = run(jobs, Raise(), 1, conditions=conditions)
    assert outcome.resent_bytes == {"a": 2 * 250_000, "b": 0}
    assert windows_ms(outcome, "a") == pytest.approx([120 + 20])
    # At the end of its window both flows of a have moved the gradient and the 250 kB.
    assert outcome.carried_bytes["a"] == pytest.approx(2 * (0.12 * LINK_Bps + 250_000))


def test_a_plan_is_in_force_once_it_has_arrived():
    class Swap(Fixed):
        """Puts b first once it has begun, 50 ms into the window of a."""

        def assign(self, now_ns, jobs, contention):
            higher = 5 if jobs[1].is_open else 1
            return {"a": Assignment(3, 3), "b": Assignment(higher, higher)}

    jobs = [two_rank_job("a", 280, 120), two_rank_job("b", 330, 120)]
    assert windows_ms(run(jobs, Swap(), 1), "b") == pytest.approx([120])
    late = dataclasses.replace(IDEAL, plan_ns=10 * MS)
    assert windows_ms(run(jobs, Swap(), 1, conditions=late), "b") == pytest.approx([130])


def test_the_dataplane_moves_the_class_by_laxity_within_the_limits():
    # Both may have any class; b's bound is tight, so its laxity is less.
    coordinator = Fixed(a=Assignment(0, 6), b=Assignment(0, 6))
    jobs = [
        two_rank_job("a", 280, 120, max_slowdown=3.0),
        two_rank_job("b", 280, 120, max_slowdown=1.05),
    ]
    outcome = run(jobs, coordinator, 1)
    assert windows_ms(outcome, "b") == pytest.approx([120])
    assert windows_ms(outcome, "a") == pytest.approx([240])


def test_a_job_that_leaves_is_out_of_the_way_of_the_others():
    jobs = [two_rank_job("a", 280, 120), two_rank_job("b", 280, 120, iterations=2)]
    outcome = run(jobs, iterations=4)
    assert windows_ms(outcome, "a") == pytest.approx([240, 240, 120, 120])
    assert len(windows_ms(outcome, "b")) == 2
    # b has its GPUs for 2 x 520 ms, a for that and 2 x 400 ms more; both compute 280 ms each.
    assert outcome.utilisation == pytest.approx(6 * 280 / (2 * 2 * 520 + 2 * 400))


def test_a_job_that_arrives_later_is_decided_about_from_then_on():
    jobs = [two_rank_job("a", 280, 120), two_rank_job("b", 280, 120, arrival_ns=400 * MS)]
    outcome = run(jobs, classes(a=6, b=1), 3)
    assert windows_ms(outcome, "a") == pytest.approx([120] * 3)
    assert windows_ms(outcome, "b")[0] == pytest.approx(240)
    assert outcome.iterations[0].job == "a"


def test_the_warm_up_is_left_out():
    jobs = [two_rank_job("a", 280, 120), two_rank_job("b", 280, 120)]
    outcome = run(jobs, classes(a=6, b=1), 4, warmup=1)
    assert {each.iteration for each in outcome.iterations} == {1, 2, 3}
    assert windows_ms(outcome, "b") == pytest.approx([120] * 3)
    assert outcome.begin_ns == pytest.approx(400 * MS)
    assert outcome.utilisation == pytest.approx(0.7)


def test_crux_worked_example_has_the_published_utilisation():
    # Crux (SIGCOMM 2024): communication 2 and 1 s, compute 2 and 1 s, 10 GPUs each: long-run
    # utilisation 37.5 % with the big job first and 41.7 % with the small one first.
    jobs = [
        two_rank_job("big", 2000, 2000, gpus=10),
        two_rank_job("small", 1000, 1000, gpus=10),
    ]
    counts = {"big": 24, "small": 48}

    def utilisation(coordinator):
        return run(jobs, coordinator, counts, warmup=6).utilisation

    assert utilisation(classes(big=6, small=5)) == pytest.approx(0.375, abs=5e-5)
    assert utilisation(classes(big=5, small=6)) == pytest.approx(0.41667, abs=5e-5)


@pytest.mark.parametrize(
    ("apart", "expected"), [(0.01, 0.0702), (0.05, 0.2353), (0.10, 0.3333), (0.20, 0.4211)]
)
def test_mltcp_moves_two_jobs_apart_by_the_published_map(apart, expected):
    # MLTCP (HotNets 2024): from D to D + S D (aT - D) / (aT I + D S) in one iteration, with
    # aT = 0.5, S = 1.75, I = 0.25; times as shares of the period.
    period_ns = 1000 * MS
    jobs = [two_rank_job("a", 500, 500), two_rank_job("b", 500, 500, arrival_ns=apart * period_ns)]
    outcome = run(jobs, "mltcp", 1)
    ends = {each.job: each.window_end_ns for each in outcome.iterations}
    assert (ends["b"] - ends["a"]) / period_ns == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("name", COORDINATORS)
@pytest.mark.parametrize("seed", [1, 2])
def test_links_carry_what_jobs_send_and_never_more_than_they_can(name, seed):
    topology, jobs = random_cluster(seed, algorithms=("ring", "halving-doubling"))
    conditions = ClusterConditions(raise_bytes=30_000)
    outcome = run(jobs, name, 6, topology=topology, conditions=conditions, seed=seed)
    links = np.arange(topology.links)
    kinds = np.array([topology.kind_of(link) for link in links])
    carried = sum(outcome.carried_bytes.values())
    # Every byte leaves one NIC and reaches one; one half of the books is kept by steps, the
    # other by rates and times.
    for kind in ("nic_up", "nic_down"):
        assert outcome.link_bytes[kinds == kind].sum() == pytest.approx(carried, rel=1e-9)
    most = topology.capacity_Bps * outcome.end_ns / 1e9
    assert (outcome.link_bytes <= most * (1 + 1e-9)).all()
    for each in jobs:
        # In the iterations that are over, at least, everything has been sent; not much more.
        window = sum(
            step.stage.nbytes * step.flow_count for step in Course(each, topology, 1, seed).steps
        )
        windows = (outcome.carried_bytes[each.name] - outcome.resent_bytes[each.name]) / window
        assert windows >= 6 - 1e-9
        assert outcome.resent_bytes[each.name] == 0 or name in (
            "laxity",
            "strict",
            "crux",
            "static",
        )
    assert outcome.flow_events > outcome.events


@pytest.mark.parametrize("name", COORDINATORS)
def test_no_window_is_shorter_than_alone(name):
    topology, jobs = random_cluster(7)
    outcome = run(jobs, name, 5, topology=topology, seed=3)
    for each in jobs:
        lone = Course(each, topology, 1, 3).undisturbed(each.compute_factors(5, 3))
        rows = [row for row in outcome.iterations if row.job == each.name]
        assert len(rows) == 5
        for row in rows:
            assert row.duration_ns >= lone.duration_ns[row.iteration] * (1 - 1e-9)


def test_the_same_seed_gives_the_same_and_another_does_not():
    topology, jobs = random_cluster(1)

    def rows(seed):
        return run(jobs, "laxity", 4, topology=topology, seed=seed).iterations

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)


def test_every_coordinator_meets_the_same_compute_times():
    topology, jobs = random_cluster(2)
    conditions = ClusterConditions(start_error=0.05, bytes_error=0.01)

    def lead(name):
        outcome = run(jobs, name, 5, topology=topology, conditions=conditions, seed=4)
        return {
            (each.job, each.iteration): round(each.window_begin_ns - each.compute_begin_ns)
            for each in outcome.iterations
        }

    assert lead("fair") == lead("laxity") == lead("mltcp") == lead("crux")


def test_what_a_trace_says_is_repeated():
    job = two_rank_job("a", 100, 50, factors=(1.0, 2.0, 3.0))
    outcome = run([job], iterations=6)
    assert durations_ms(outcome, "a") == pytest.approx([150, 250, 350] * 2)


def test_jobs_with_even_iterations_end_together():
    jobs = [two_rank_job("a", 300, 100), two_rank_job("b", 500, 100, iterations=70)]
    jobs.append(two_rank_job("c", 100, 20, iterations=10))
    assert even_iterations(jobs, ONE_SWITCH, 60) == {"a": 90, "b": 60, "c": 10}


def test_progress_is_told():
    told = []
    run([two_rank_job("a", 10, 1)], iterations=200, progress=lambda *each: told.append(each))
    assert told[0][0] <= 100
    assert told[-1][1] == 200
    assert [done for done, _ in told] == sorted({done for done, _ in told})


def test_a_job_that_never_gets_the_link_is_named():
    # It computes for a moment only, always in the way of the other; and there is no floor.
    jobs = [two_rank_job("greedy", 1e-6, 50), two_rank_job("starved", 1, 1)]
    with pytest.raises(UsageError, match="job starved does not get through"):
        run(jobs, classes(greedy=6, starved=1), 1_000_000)


def test_impossible_simulations_are_refused():
    one = two_rank_job("a", 280, 120)
    with pytest.raises(UsageError, match="Jobs are none"):
        run([])
    with pytest.raises(UsageError, match="Jobs are a, a"):
        run([one, one])
    with pytest.raises(UsageError, match="Job a: 0 iterations"):
        run([one], iterations=0)
    with pytest.raises(UsageError, match="Job a: 0 iterations"):
        run([one], iterations={"b": 1})
    with pytest.raises(UsageError, match=r"2 of warm-up; allowed: 0 \.\. 1"):
        run([one], iterations=2, warmup=2)
    with pytest.raises(UsageError, match="NIC is 9"):
        run([two_rank_job("a", 280, 120, nics=(0, 9))])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"plan_ns": -1}, "plan_ns is -1"),
        ({"raise_bytes": math.inf}, "raise_bytes is inf"),
        ({"bytes_error": 1}, "bytes_error is 1"),
        ({"floor_share": 0.2}, "Floor of a class is 0.2"),
        ({"qps_per_peer": 0}, "qps_per_peer is 0"),
        ({"sharing": "tcp"}, "sharing is 'tcp'; allowed: classes, dcqcn"),
    ],
)
def test_impossible_conditions_are_refused(wrong, message):
    with pytest.raises(UsageError, match=message):
        ClusterConditions(**wrong)


@pytest.mark.parametrize("name", ["laxity", "mltcp"])
def test_views_are_what_they_would_be_if_made_from_their_members(name):
    class Watched:
        def __init__(self):
            self.inner = find_coordinator(name)
            self.name, self.needs_pacing = name, self.inner.needs_pacing
            self.tick_ns, self.seen = self.inner.tick_ns, 0

        def assign(self, now_ns, jobs, contention):
            for view in jobs:
                members = {each.name: getattr(view, each.name) for each in fields(JobView)}
                fresh = JobView(**members)
                assert view == fresh
                for derived in ("rest_ns", "ideal_window_ns", "ideal_period_ns", "deadline_ns"):
                    assert getattr(view, derived) == getattr(fresh, derived)
                assert view.is_open or view.done_bytes == 0
                self.seen += view.is_open
            return self.inner.assign(now_ns, jobs, contention)

    topology, jobs = random_cluster(6)
    watched = Watched()
    conditions = ClusterConditions(start_error=0.05, bytes_error=0.01)
    run(jobs, watched, 4, topology=topology, conditions=conditions)
    assert watched.seen > 100


def test_a_coordinator_is_told_what_a_job_would_need_alone():
    seen = {}

    class Watch(Fixed):
        def assign(self, now_ns, jobs, contention):
            seen.update({view.name: view for view in jobs if view.is_open})
            return {}

    # Ready at 100, 150 and 200 ms, 40 ms each: a window of 140 ms, 100 ms after the one before.
    one = bucketed("a", 50, 150, [(1 / 3, 40), (2 / 3, 40), (1, 40)], gpus=16)
    run([one, two_rank_job("b", 1000, 100)], Watch(), 1)
    assert seen["a"].compute_ns == 100 * MS
    assert seen["a"].ideal_window_ns == pytest.approx(140 * MS)
    assert seen["a"].expected_bytes == pytest.approx(0.12 * LINK_Bps)
    assert seen["a"].work == 16 * 200 * MS
