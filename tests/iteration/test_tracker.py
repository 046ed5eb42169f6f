"""From events of a job's windows to what a policy is told."""

from __future__ import annotations

import pytest

from controller.agent.planner import _EVENT
from controller.dataplane import layout
from controller.iteration.tracker import JobTracker, Quantiles

MS = 1_000_000
GAP_NS = 20 * MS


def fed(count: int, period_ms: int = 100, window_ms: int = 30, size: int = 3_000_000) -> JobTracker:
    """A tracker after `count` begins as the dataplane tells them."""
    tracker = JobTracker()
    for number in range(count):
        begin_ns = (1 + number * period_ms) * MS
        tracker.began(begin_ns)
        if number:
            tracker.learn(begin_ns - (period_ms - window_ms) * MS, size)
        else:
            tracker.learn()
    return tracker


def test_the_event_of_the_dataplane_is_read_as_it_is_laid_out() -> None:
    assert _EVENT.size == layout.ITERATION_EVENT.itemsize
    names = list(layout.ITERATION_EVENT.names or ())
    assert names == [
        "job", "iteration", "start_ns", "previous_start_ns", "previous_last_ns", "previous_bytes",
    ]  # fmt: skip


def test_a_steady_job_is_predicted_with_its_period_length_and_bytes() -> None:
    tracker = fed(6)
    assert tracker.is_predicted
    coming = tracker.prediction
    assert coming.period_ns == pytest.approx(100 * MS, rel=0.01)
    assert coming.next_start_ns == pytest.approx(601 * MS, rel=0.01)
    assert coming.bytes == 3_000_000
    assert coming.compute_ns == pytest.approx(70 * MS, rel=0.01)
    assert [window.period_ns for window in tracker.past] == [100 * MS] * 5
    assert tracker.past[-1].silence_ns == 70 * MS


def test_a_window_is_open_until_its_bytes_are_sent_or_silence_ends_it() -> None:
    tracker = fed(6)
    begin_ns = tracker.start_ns
    assert tracker.is_open(begin_ns + MS, 1_000_000, begin_ns + MS, GAP_NS)
    assert not tracker.is_open(begin_ns + 9 * MS, 3_000_000, begin_ns + 8 * MS, GAP_NS)
    assert not tracker.is_open(begin_ns + 60 * MS, 1_000_000, begin_ns + 30 * MS, GAP_NS)
    assert not JobTracker().is_open(begin_ns, 0, 0, GAP_NS)


def test_what_ranks_report_counts_more_than_silence_until_it_is_old() -> None:
    tracker = fed(6)
    begin_ns = tracker.start_ns
    assert tracker.reported(begin_ns + MS, True, 5_000_000)
    assert not tracker.reported(begin_ns + 2 * MS, True, 5_000_000)
    assert tracker.is_open(begin_ns + 60 * MS, 1_000_000, begin_ns + 30 * MS, GAP_NS)
    assert tracker.expected_bytes(begin_ns + 60 * MS) == 5_000_000
    assert tracker.reported(begin_ns + 70 * MS, False, 5_000_000)
    assert not tracker.is_open(begin_ns + 71 * MS, 1_000_000, begin_ns + 70 * MS, GAP_NS)
    late_ns = begin_ns + 5000 * MS
    assert tracker.expected_bytes(late_ns) == 3_000_000
    assert tracker.is_open(late_ns, 1_000_000, late_ns, GAP_NS)


def test_a_report_of_the_window_before_says_nothing_about_this_one() -> None:
    tracker = fed(6)
    tracker.reported(tracker.start_ns - MS, False, 3_000_000)
    now_ns = tracker.start_ns + MS
    assert tracker.is_open(now_ns, 1000, now_ns, GAP_NS)


def test_the_rate_alone_is_nearly_the_best_of_late_and_never_above_the_links() -> None:
    tracker = JobTracker()
    assert tracker.alone_Bps(0) == 0
    assert tracker.alone_Bps(1e9) == 1e9
    begin_ns = MS
    tracker.began(begin_ns)
    tracker.learn()
    # 100 MB/s disturbed, 300 MB/s at times, and once all at once after a standstill.
    for window_ms in [30, 10, 30, 10, 30, 10, 30, 10, 30, 10, 30, 1]:
        following_ns = begin_ns + 100 * MS
        tracker.began(following_ns)
        tracker.learn(begin_ns + window_ms * MS, 3_000_000)
        begin_ns = following_ns
    assert tracker.alone_Bps(0) == pytest.approx(300e6)
    assert tracker.alone_Bps(200e6) == 200e6


def test_slowdown_is_the_iteration_time_over_the_undisturbed_one() -> None:
    tracker = fed(12)  # 70 ms of compute, 30 ms of window
    assert tracker.slowdown(100e6) == pytest.approx(1.0)
    assert tracker.slowdown(300e6) == pytest.approx(100 / 80)
    assert JobTracker().slowdown(300e6) == 1.0


def test_the_gap_grows_with_the_compute_phase_and_not_beyond_it() -> None:
    assert fed(8).gap_ns(20 * MS) == 28 * MS
    assert fed(8).gap_ns(50 * MS) == 50 * MS
    assert fed(2).gap_ns(20 * MS) == 20 * MS


def test_an_end_that_is_told_at_once_closes_the_window_and_is_learned() -> None:
    tracker = JobTracker()
    for number in range(6):
        begin_ns = (1 + number * 100) * MS
        tracker.began(begin_ns)
        tracker.learn()
        assert tracker.is_open(begin_ns + MS, 10, begin_ns + MS, GAP_NS)
        tracker.ended(begin_ns + 30 * MS, 3_000_000)
        tracker.ended(begin_ns + 40 * MS, 9)  # once is enough
        assert not tracker.is_open(begin_ns + 31 * MS, 10, begin_ns + 30 * MS, GAP_NS)
    assert tracker.is_predicted and tracker.prediction.bytes == 3_000_000
    assert [window.window_ns for window in tracker.past] == [30 * MS] * 5


def test_another_number_of_bytes_changes_what_is_expected_at_once() -> None:
    tracker = fed(8)
    begin_ns = tracker.start_ns
    changes = []
    for number in (1, 2, 3):
        tracker.began(begin_ns + number * 100 * MS)
        size = 6_000_000
        changes.append(tracker.learn(begin_ns + (number - 1) * 100 * MS + 30 * MS, size))
    assert changes[0] and changes[1] in (True, False)
    assert tracker.expected_bytes(tracker.start_ns) == 6_000_000


def test_windows_of_one_iteration_are_summed_up_to_it() -> None:
    tracker = JobTracker()
    begin_ns = MS
    tracker.began(begin_ns)
    tracker.learn()
    for number in range(32):
        period_ms, size = (300, 2_000_000) if number % 2 else (100, 1_000_000)
        following_ns = begin_ns + period_ms * MS
        tracker.began(following_ns)
        tracker.learn(begin_ns + 20 * MS, size)
        begin_ns = following_ns
    assert tracker.prediction.bursts_per_iteration == 2
    found = tracker.iteration_ns()
    assert found is not None and found.p50 == 400 * MS and found.p99 == 400 * MS


def test_quantiles_of_nothing_are_none_and_p99_is_one_that_was_seen() -> None:
    assert Quantiles.of([]) is None
    found = Quantiles.of([float(n) for n in range(1, 101)])
    assert found is not None and found.p99 == 99.0 and found.p50 == 50.5 and found.mean == 50.5
