"""What the ranks of a mix do: bytes that fill the window, and the same times for every policy."""

from __future__ import annotations

import dataclasses

import pytest

from controller.errors import UsageError
from controller.ops.qdisc_tree import timeout_ns, window_bytes
from controller.workload.mixes import MAX_JITTER, MIXES, Mix, MixJob
from controller.workload.plan import Traffic, counted, gap_ns, plan_alone, plan_round

MS = 1_000_000
MIX = Mix("mix", (MixJob("slow", "resnet50", 600 * MS, 0.4, 5),
                  MixJob("fast", "bert-large", 400 * MS, 0.25, 4)))  # fmt: skip


def test_a_window_alone_takes_its_share_of_the_period() -> None:
    traffic = Traffic(6_250_000, ranks=3, chunk_nbytes=32 << 10)
    for job in MIX.jobs:
        # A ring of three sends 4/3 of the gradient over each link.
        frames_nbytes = 4 / 3 * sum(traffic.buckets_nbytes(job)) * (4096 + 58 + 20 / 8) / 4096
        assert frames_nbytes / 6_250_000 * 1e9 == pytest.approx(job.window_ns, rel=1e-3)
        assert traffic.sent_nbytes(job) == pytest.approx(
            job.window_ns / 1e9 * traffic.payload_Bps, rel=1e-3
        )


@pytest.mark.parametrize("rate_Bps", [1_250_000, 6_250_000, 12_500_000, 125_000_000])
def test_a_class_at_its_floor_drains_a_window_in_half_of_the_timeout(rate_Bps: int) -> None:
    traffic = Traffic(rate_Bps)
    drain_ns = window_bytes(4200) * 1e9 / (0.05 * rate_Bps)
    assert drain_ns <= timeout_ns(traffic.queue_pair_timeout) / 2
    assert drain_ns > timeout_ns(traffic.queue_pair_timeout - 1) / 2
    assert traffic.settings().queue_pair_timeout == traffic.queue_pair_timeout


def test_the_gap_is_shorter_than_any_compute_phase_and_longer_than_a_few_messages() -> None:
    traffic = Traffic(1_500_000)  # the default of `bench priority`
    for mix in MIXES.values():
        for job in mix.jobs:
            assert gap_ns(mix, job) < 0.6 * (1 - mix.jitter) * job.compute_ns
            assert gap_ns(mix, job) > 3 * traffic.chunk_nbytes / traffic.payload_Bps * 1e9


def test_a_silence_of_the_gap_comes_in_every_compute_phase_that_is_drawn() -> None:
    for mix in MIXES.values():
        for jitter in (mix.jitter, MAX_JITTER):
            jumpy = dataclasses.replace(mix, jitter=jitter)
            courses = plan_round(jumpy, 500, 1, 3, 0)
            for job in jumpy.jobs:
                shortest_ns = min(courses[job.name].compute_ns)
                assert shortest_ns < 1.1 * (1 - jitter) * job.compute_ns + 1
                assert 0 < gap_ns(jumpy, job) < 0.6 * shortest_ns


def test_jitter_leaves_a_tenth_of_the_compute_time() -> None:
    with pytest.raises(UsageError, match=r"jitter is 1.0; allowed: 0 \.\. 0\.9"):
        dataclasses.replace(MIX, jitter=1.0)


def test_the_pool_holds_the_gradient_of_any_rate() -> None:
    for rate_Bps in (1_500_000, 12_500_000_000):
        traffic = Traffic(rate_Bps)
        for job in MIX.jobs:
            gradient_nbytes = sum(traffic.buckets_nbytes(job))
            settings = traffic.settings(gradient_nbytes)
            assert settings.pool_nbytes >= traffic.settings().pool_nbytes + gradient_nbytes


def test_traffic_survives_json() -> None:
    traffic = Traffic(6_250_000, 4, 16 << 10, 4)
    assert Traffic.from_json(traffic.to_json()) == traffic


def test_a_plan_follows_from_its_seed_and_round_alone() -> None:
    plans = [plan_round(MIX, 20, 3, seed, number) for seed, number in ((1, 0), (1, 0), (1, 1),
                                                                       (2, 0))]  # fmt: skip
    assert plans[0] == plans[1]
    assert plans[0] != plans[2]
    assert plans[0] != plans[3]
    assert plans[2] != plans[3]


def test_a_job_keeps_its_times_when_the_run_is_longer() -> None:
    short, long = (plan_round(MIX, count, 3, 1, 0) for count in (5, 30))
    for name in ("slow", "fast"):
        assert short[name].offset_ns == long[name].offset_ns
        times = short[name].compute_ns
        assert long[name].compute_ns[: len(times)] == times


def test_compute_times_stay_within_the_jitter_and_near_their_mean() -> None:
    for name, course in plan_round(MIX, 2000, 3, 7, 0).items():
        job = next(job for job in MIX.jobs if job.name == name)
        assert min(course.compute_ns) >= 0.8 * job.compute_ns - 1
        assert max(course.compute_ns) <= 1.2 * job.compute_ns + 1
        mean_ns = sum(course.compute_ns) / len(course.compute_ns)
        assert mean_ns == pytest.approx(job.compute_ns, rel=0.02)
        assert 0 <= course.offset_ns < job.period_ns


def test_jobs_that_start_together_have_no_offset_and_the_same_compute_times() -> None:
    apart = plan_round(MIX, 10, 1, 1, 0)
    joined = plan_round(dataclasses.replace(MIX, start="together"), 10, 1, 1, 0)
    assert {course.offset_ns for course in joined.values()} == {0}
    for name, course in joined.items():
        assert course.compute_ns == apart[name].compute_ns


def test_without_jitter_all_iterations_compute_alike() -> None:
    steady = dataclasses.replace(MIX, jitter=0.0)
    for name, course in plan_round(steady, 10, 1, 1, 0).items():
        job = next(job for job in MIX.jobs if job.name == name)
        assert set(course.compute_ns) == {job.compute_ns}


def test_faster_jobs_make_more_iterations_than_they_need() -> None:
    assert counted(MIX, MIX.jobs[0], 20) == 20
    assert counted(MIX, MIX.jobs[1], 20) == 30
    courses = plan_round(MIX, 20, 3, 1, 0)
    assert len(courses["slow"].compute_ns) > 23
    assert len(courses["fast"].compute_ns) > 34


def test_alone_only_one_job_runs_and_it_computes_little() -> None:
    courses = plan_alone(MIX.jobs[1], 4)
    assert list(courses) == ["fast"]
    assert courses["fast"].compute_ns == (75 * MS,) * 4


def test_no_built_in_mix_has_more_operations_in_a_window_than_may_be_in_flight() -> None:
    for mix in MIXES.values():
        for job in mix.jobs:
            assert len(Traffic(6_250_000).buckets_nbytes(job)) <= 31
