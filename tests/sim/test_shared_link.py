from __future__ import annotations

import dataclasses

import pytest

from controller.errors import UsageError
from controller.priority.policies import POLICIES, find_policy
from controller.priority.policy import Assignment
from controller.sim.jobs import SimJob
from controller.sim.measures import measure
from controller.sim.mixes import even_iterations, mix
from controller.sim.shared_link import Conditions, alone, simulate

LINK_Bps = 12.5e6
MS = 1e6
# Nothing between a decision and its effect.
IDEAL = Conditions(LINK_Bps, floor_share=0, message_bytes=0, plan_ns=0)


class Fixed:
    """Gives each job what it is told to."""

    name, tick_ns, needs_pacing = "fixed", 0, False

    def __init__(self, **given):
        self.given = given

    def assign(self, now_ns, jobs, link_Bps):
        return self.given


def classes(**given):
    return Fixed(**{name: Assignment(number, number) for name, number in given.items()})


def job(name, compute_ms, window_ms, **more):
    return SimJob(name, compute_ms * MS, round(window_ms * LINK_Bps / 1000), **more)


def windows_ms(outcome, name):
    return [each.window_ns / MS for each in outcome.iterations if each.job == name]


def test_a_job_alone_takes_what_it_needs():
    outcome = simulate([job("a", 280, 120)], find_policy("fair"), IDEAL, {"a": 5})
    assert windows_ms(outcome, "a") == pytest.approx([120] * 5)
    assert outcome.end_ns == pytest.approx(5 * 400 * MS)
    assert outcome.carried_bytes["a"] == pytest.approx(5 * 0.12 * LINK_Bps)


@pytest.mark.parametrize("apart_ms", [0, 20, 60, 119])
def test_two_equal_jobs_under_fair_need_twice_the_window_less_what_they_are_apart(apart_ms):
    jobs = [job("a", 280, 120), job("b", 280, 120, offset_ns=apart_ms * MS)]
    outcome = simulate(jobs, find_policy("fair"), IDEAL, {"a": 6, "b": 6})
    for name in "ab":
        assert windows_ms(outcome, name) == pytest.approx([240 - apart_ms] * 6)


def test_the_higher_class_does_not_notice_the_lower():
    jobs = [job("a", 280, 120), job("b", 280, 120)]
    outcome = simulate(jobs, classes(a=6, b=1), IDEAL, {"a": 3, "b": 3})
    assert windows_ms(outcome, "a") == pytest.approx([120] * 3)
    # The lower one sends once the higher has ended, and is out of its way from then on.
    assert windows_ms(outcome, "b") == pytest.approx([240, 120, 120])


def test_the_lower_class_keeps_its_floor():
    jobs = [job("a", 280, 120), job("b", 280, 120)]
    conditions = dataclasses.replace(IDEAL, floor_share=0.05)
    outcome = simulate(jobs, classes(a=6, b=1), conditions, {"a": 1, "b": 1})
    assert windows_ms(outcome, "a") == pytest.approx([120 / 0.95])
    assert windows_ms(outcome, "b") == pytest.approx([240])


def test_a_paced_job_takes_its_share_though_the_link_is_free():
    policy = Fixed(a=Assignment(3, 3, share=0.25))
    outcome = simulate([job("a", 280, 120)], policy, IDEAL, {"a": 2})
    assert windows_ms(outcome, "a") == pytest.approx([480] * 2)


def test_a_shift_moves_windows_once():
    class Once(Fixed):
        def assign(self, now_ns, jobs, link_Bps):
            return {"b": Assignment(3, 3, shift_ns=0 if now_ns else 120_000_000)}

    jobs = [job("a", 280, 120), job("b", 280, 120)]
    outcome = simulate(jobs, Once(), IDEAL, {"a": 3, "b": 3})
    begins = [each.window_begin_ns / MS for each in outcome.iterations if each.job == "b"]
    assert begins == pytest.approx([400, 800, 1200])


def test_a_shift_that_arrives_while_a_window_is_open_moves_the_next_one():
    class Late(Fixed):
        """Shifts b at the begin of its first window, which is open then."""

        told = False

        def assign(self, now_ns, jobs, link_Bps):
            shift_ns = 0
            if jobs[0].is_open and not self.told:
                shift_ns, self.told = 120_000_000, True
            return {"b": Assignment(3, 3, shift_ns=shift_ns)}

    outcome = simulate([job("b", 280, 120)], Late(), IDEAL, {"b": 3})
    begins = [each.window_begin_ns / MS for each in outcome.iterations]
    assert begins == pytest.approx([280, 800, 1200])
    assert windows_ms(outcome, "b") == pytest.approx([120] * 3)


def test_a_class_changes_at_a_message_boundary():
    class Swap(Fixed):
        """Puts b first once it has begun, 50 ms into the window of a."""

        def assign(self, now_ns, jobs, link_Bps):
            higher = 5 if jobs[1].is_open else 1
            return {"a": Assignment(3, 3), "b": Assignment(higher, higher)}

    jobs = [job("a", 280, 120), job("b", 330, 120)]
    at_once = simulate(jobs, Swap(), IDEAL, {"a": 1, "b": 1})
    # b sends its first message in its old class, with the floor's rate until a has ended.
    late = dataclasses.replace(IDEAL, message_bytes=500_000, floor_share=0.05, plan_ns=MS)
    waits = simulate(jobs, Swap(), late, {"a": 1, "b": 1})
    assert windows_ms(at_once, "b") == pytest.approx([120])
    assert windows_ms(waits, "b")[0] > 150


def test_what_is_overtaken_in_mid_window_is_sent_again():
    class Raise(Fixed):
        def assign(self, now_ns, jobs, link_Bps):
            number = 5 if any(each.name == "b" and each.is_open for each in jobs) else 1
            return {"a": Assignment(number, number), "b": Assignment(0, 0)}

    jobs = [job("a", 280, 120), job("b", 330, 50)]
    conditions = dataclasses.replace(IDEAL, raise_bytes=250_000)
    outcome = simulate(jobs, Raise(), conditions, {"a": 1, "b": 1})
    assert outcome.resent_bytes == {"a": 250_000, "b": 0}
    assert windows_ms(outcome, "a") == pytest.approx([120 + 20])


def test_the_dataplane_moves_the_class_by_laxity_within_the_limits():
    # Both may have any class; b's bound is tight, so its laxity is less.
    policy = Fixed(a=Assignment(0, 6), b=Assignment(0, 6))
    jobs = [job("a", 280, 120, max_slowdown=3.0), job("b", 280, 120, max_slowdown=1.05)]
    outcome = simulate(jobs, policy, IDEAL, {"a": 1, "b": 1})
    assert windows_ms(outcome, "b")[0] == pytest.approx(120)
    assert windows_ms(outcome, "a")[0] == pytest.approx(240)


class Watched:
    """Another policy, and how long windows were open: it is asked at every begin and end."""

    def __init__(self, policy):
        self.policy, self.name = policy, policy.name
        self.tick_ns, self.needs_pacing = policy.tick_ns, policy.needs_pacing
        self.busy_ns, self.since_ns, self.is_busy = 0, 0, False

    def assign(self, now_ns, jobs, link_Bps):
        self.busy_ns += now_ns - self.since_ns if self.is_busy else 0
        self.since_ns, self.is_busy = now_ns, any(job.is_open for job in jobs)
        return self.policy.assign(now_ns, jobs, link_Bps)


@pytest.mark.parametrize("name", POLICIES)
def test_the_link_is_used_up_while_a_window_is_open(name):
    jobs = mix([400 * MS, 600 * MS, 500 * MS], [0.3, 0.25, 0.3], LINK_Bps, jitter=0.2)
    watched = Watched(find_policy(name))
    outcome = simulate(jobs, watched, IDEAL, dict.fromkeys("abc", 12), seed=3)
    carried = sum(outcome.carried_bytes.values())
    assert watched.busy_ns > 0.5 * outcome.end_ns
    assert carried == pytest.approx(watched.busy_ns / 1e9 * LINK_Bps, rel=1e-6)


@pytest.mark.parametrize("name", POLICIES)
def test_no_byte_is_lost_or_sent_twice(name):
    # As many iterations as the slow job does: the fast ones go on, so count the slow one's.
    jobs = mix([400 * MS, 1600 * MS], [0.4, 0.4], LINK_Bps, jitter=0.2)
    outcome = simulate(jobs, find_policy(name), Conditions(LINK_Bps), {"a": 4, "b": 8}, seed=1)
    slow = [each for each in outcome.iterations if each.job == "b"]
    assert len(slow) == 8
    assert outcome.end_ns == slow[-1].window_end_ns
    assert outcome.carried_bytes["b"] == pytest.approx(8 * jobs[1].window_bytes)
    assert not any(outcome.resent_bytes.values())


def test_the_same_seed_gives_the_same_and_another_does_not():
    jobs = mix([400 * MS] * 3, [0.3] * 3, LINK_Bps, jitter=0.2)
    counts = even_iterations(jobs, LINK_Bps, 10)

    def run(seed):
        return simulate(jobs, find_policy("laxity"), Conditions(LINK_Bps), counts, seed)

    assert run(1) == run(1)
    assert run(1).iterations != run(2).iterations


def test_every_policy_meets_the_same_compute_times():
    jobs = mix([400 * MS] * 2, [0.4] * 2, LINK_Bps, jitter=0.2)
    conditions = Conditions(LINK_Bps, start_error=0.05, bytes_error=0.01)

    def compute(name):
        outcome = simulate(jobs, find_policy(name), conditions, {"a": 9, "b": 9}, seed=4)
        return {
            (each.job, each.iteration): round(each.window_begin_ns - each.compute_begin_ns)
            for each in outcome.iterations
        }

    assert compute("fair") == compute("laxity") == compute("mltcp") == compute("static")


def test_crux_worked_example_has_the_published_utilisation():
    # Crux (SIGCOMM 2024): communication 2 and 1 s, compute 2 and 1 s, 10 GPUs each: long-run
    # utilisation 37.5 % with the big job first and 41.7 % with the small one first.
    jobs = [job("big", 2000, 2000), job("small", 1000, 1000)]

    def utilisation(policy):
        outcome = simulate(jobs, policy, IDEAL, {"big": 24, "small": 48})
        total = 0.0
        for each in jobs:
            rows = [row for row in outcome.iterations if row.job == each.name]
            lasted = rows[-1].window_end_ns - rows[5].window_end_ns
            total += each.compute_ns * (len(rows) - 6) / lasted / len(jobs)
        return total

    assert utilisation(classes(big=6, small=5)) == pytest.approx(0.375, abs=5e-5)
    assert utilisation(classes(big=5, small=6)) == pytest.approx(0.41667, abs=5e-5)
    works = [dataclasses.replace(each, work=work) for each, work in zip(jobs, (10, 5), strict=True)]
    chosen = simulate(works, find_policy("crux"), IDEAL, {"big": 3, "small": 6})
    assert windows_ms(chosen, "small") == pytest.approx([1000] * 6)


@pytest.mark.parametrize(
    ("apart", "expected"), [(0.01, 0.0702), (0.05, 0.2353), (0.10, 0.3333), (0.20, 0.4211)]
)
def test_mltcp_moves_two_jobs_apart_by_the_published_map(apart, expected):
    # MLTCP (HotNets 2024): from D to D + S D (aT - D) / (aT I + D S) in one iteration, with
    # aT = 0.5, S = 1.75, I = 0.25; times as shares of the period.
    period_ms = 1000
    jobs = [
        job("a", 500, 500),
        job("b", 500, 500, offset_ns=apart * period_ms * MS),
    ]
    outcome = simulate(jobs, find_policy("mltcp"), IDEAL, {"a": 1, "b": 1})
    ends = {each.job: each.window_end_ns for each in outcome.iterations}
    assert (ends["b"] - ends["a"]) / (period_ms * MS) == pytest.approx(expected, abs=5e-5)


def test_laxity_interleaves_jobs_that_begin_together_within_two_iterations():
    jobs = mix([400 * MS] * 3, [0.3] * 3, LINK_Bps)
    outcome = simulate(jobs, find_policy("laxity"), IDEAL, dict.fromkeys("abc", 6))
    settled = [each.window_ns / MS for each in outcome.iterations if each.iteration >= 2]
    assert settled == pytest.approx([120] * len(settled), rel=0.02)


def test_the_guard_keeps_a_job_with_a_tight_bound_within_it():
    # The others may take thrice their time; the first may take 1.25 of its own.
    base = mix([400 * MS, 1000 * MS, 1000 * MS], [0.3] * 3, LINK_Bps, jitter=0.2, max_slowdown=3.0)
    conditions = Conditions(LINK_Bps)

    def worst(jobs):
        outcome = simulate(jobs, find_policy("laxity"), conditions, dict.fromkeys("abc", 60), 5)
        rows = [each for each in outcome.iterations if each.job == "a"]
        alone_ns = jobs[0].window_ns(LINK_Bps)
        # The bound is on the window: what a late window costs beyond the undisturbed one.
        return max(each.window_ns - alone_ns for each in rows) / jobs[0].period_ns(LINK_Bps)

    assert worst(base) > 0.30
    assert worst([dataclasses.replace(base[0], max_slowdown=1.25), *base[1:]]) <= 0.25


@pytest.mark.parametrize("periods", [(400, 400, 400), (400, 600, 400), (400, 647, 1047)])
def test_no_job_is_slower_under_laxity_than_under_fair(periods):
    jobs = mix([each * MS for each in periods], [0.25] * 3, LINK_Bps, jitter=0.2)
    counts = even_iterations(jobs, LINK_Bps, 30)
    lone = alone(jobs, LINK_Bps)

    def figures(name):
        outcome = simulate(jobs, find_policy(name), Conditions(LINK_Bps), counts, seed=2)
        return measure(outcome.iterations, lone)

    fair, ours = figures("fair"), figures("laxity")
    for name in "abc":
        assert ours.jobs[name].slowdown <= 1.05 * fair.jobs[name].slowdown
    assert ours.over_all.allreduce_mean_ns < 0.95 * fair.over_all.allreduce_mean_ns


def test_a_job_that_never_gets_the_link_is_named():
    # Without computation the high job never lets go, and there is no floor.
    jobs = [job("greedy", 0, 100), job("starved", 100, 100)]
    with pytest.raises(UsageError, match="job starved does not get through"):
        simulate(jobs, classes(greedy=6, starved=1), IDEAL, {"greedy": 1, "starved": 1})


def test_impossible_simulations_are_refused():
    one = job("a", 280, 120)
    with pytest.raises(UsageError, match="Jobs are none"):
        simulate([], find_policy("fair"), IDEAL, {})
    with pytest.raises(UsageError, match="Jobs are a, a"):
        simulate([one, one], find_policy("fair"), IDEAL, {"a": 1})
    with pytest.raises(UsageError, match="Job a: 0 iterations"):
        simulate([one], find_policy("fair"), IDEAL, {})
    with pytest.raises(UsageError, match="plan_ns is -1"):
        Conditions(LINK_Bps, plan_ns=-1)
    with pytest.raises(UsageError, match="bytes_error is 1"):
        Conditions(LINK_Bps, bytes_error=1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"window_bytes": 0}, "window_bytes is 0"),
        ({"compute_ns": float("nan")}, "compute_ns is nan"),
        ({"offset_ns": -1}, "offset_ns is -1"),
        ({"jitter": 1.5}, "jitter is 1.5"),
        ({"traffic_class": 7}, "class is 7"),
        ({"max_slowdown": 0.5}, "max_slowdown is 0.5"),
    ],
)
def test_an_impossible_job_is_refused(wrong, message):
    with pytest.raises(UsageError, match=message):
        SimJob(**{"name": "a", "compute_ns": 1.0, "window_bytes": 1} | wrong)


def test_a_mix_with_numbers_missing_is_refused():
    with pytest.raises(UsageError, match="There are 1 shares for 2 periods"):
        mix([1e6, 1e6], [0.5], LINK_Bps)
    with pytest.raises(UsageError, match="share is 0"):
        mix([1e6], [0], LINK_Bps)


def test_jobs_with_even_iterations_end_together():
    jobs = mix([400 * MS, 600 * MS], [0.1, 0.1], LINK_Bps)
    assert even_iterations(jobs, LINK_Bps, 60) == {"a": 90, "b": 60}
