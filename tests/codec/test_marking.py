"""The marker's numbers: marking line, virtual queue and window against simulation and theory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.congestion.marking import SlidingWindow, VirtualQueue, mark_probability
from controller.errors import UsageError

BYTE_A_NS = 1e9  # drain rate at which queue and time have the same numbers


@pytest.mark.parametrize(
    ("queue_bytes", "probability"),
    [
        (0, 0),
        (5_000, 0),
        (5_001, 0.01 / 195_000),
        (102_500, 0.005),
        (200_000, 0.01),
        (200_001, 1),
        (1e9, 1),
    ],
)
def test_marking_follows_the_line_of_the_paper(queue_bytes: float, probability: float) -> None:
    assert mark_probability(queue_bytes, 5_000, 200_000, 0.01) == pytest.approx(probability)


def test_equal_thresholds_are_a_step() -> None:
    assert [mark_probability(q, 100, 100, 0.2) for q in (99, 100, 100.5)] == [0, 0, 1]


@given(
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.floats(0, 1e5),
    st.floats(1e-3, 1e6),
    st.floats(0, 1),
)
def test_marking_never_falls_as_the_queue_grows(
    queue: float, more: float, kmin: float, width: float, pmax: float
) -> None:
    low = mark_probability(queue, kmin, kmin + width, pmax)
    high = mark_probability(queue + more, kmin, kmin + width, pmax)
    assert 0 <= low <= high <= 1


@pytest.mark.parametrize(
    ("kmin", "kmax", "pmax", "message"),
    [
        (2, 1, 0.1, r"kmin_bytes is 2; allowed: 0 .. kmax_bytes \(1\)"),
        (-1, 1, 0.1, "kmin_bytes is -1"),
        (1, 2, 1.5, "pmax is 1.5; allowed: 0 .. 1"),
        (1, 2, -0.1, "pmax is -0.1"),
    ],
)
def test_impossible_lines_are_refused(kmin: float, kmax: float, pmax: float, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        mark_probability(0, kmin, kmax, pmax)


def test_impossible_queues_and_windows_are_refused() -> None:
    with pytest.raises(UsageError, match="drain_Bps is 0; allowed: above 0"):
        VirtualQueue(0)
    with pytest.raises(UsageError, match="slot_ns is 0; allowed: 1 and more"):
        SlidingWindow(VirtualQueue(1), 0)
    with pytest.raises(UsageError, match="slots is 0; allowed: 1 and more"):
        SlidingWindow(VirtualQueue(1), 1, slots=0)


def test_regular_arrivals_below_the_drain_rate_find_an_empty_queue() -> None:
    queue = VirtualQueue(1e9)  # D/D/1: 1000 B each 1001 ns
    assert [queue.arrive(n * 1001, 1000) for n in range(50)] == [0] * 50


def test_regular_arrivals_above_the_drain_rate_find_the_excess_of_all_before() -> None:
    queue = VirtualQueue(0.5e9)  # 1000 B each 1000 ns: 500 B too many each
    assert [queue.arrive(n * 1000, 1000) for n in range(50)] == [500 * n for n in range(50)]


def test_a_queue_drains_at_its_rate_to_empty_and_stays_there() -> None:
    queue = VirtualQueue(1.25e9)
    queue.arrive(1_000, 10_000)
    assert [queue.bytes_at(1_000 + t) for t in (0, 800, 8_000, 9_000)] == [10_000, 9_000, 0, 0]
    with pytest.raises(ValueError, match="time went back from 1000 to 999 ns"):
        queue.bytes_at(999)


def poisson_finds(load: float, packets: int) -> tuple[np.ndarray, np.ndarray]:
    """What Poisson arrivals of 1000 B find: in the queue, and as the window's average."""
    times = np.random.default_rng(7).exponential(1000 / load, packets).cumsum().round().astype(int)
    window = SlidingWindow(VirtualQueue(BYTE_A_NS), slot_ns=5_000)
    witness = VirtualQueue(BYTE_A_NS)
    averages = [window.arrive(int(t), 1000) for t in times]
    return np.array([witness.arrive(int(t), 1000) for t in times]), np.array(averages)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_poisson_arrivals_find_the_queue_of_m_d_1(load: float) -> None:
    found, averages = poisson_finds(load, 300_000)
    expected = 1000 * load / (2 * (1 - load))  # Pollaczek-Khinchine, unfinished work
    assert found.mean() == pytest.approx(expected, rel=0.03)
    # Slot ends see the same distribution (PASTA), and averaging takes most of its spread.
    assert averages.mean() == pytest.approx(expected, rel=0.03)
    assert averages.std() < 0.9 * found.std()
    # An empty system has the share 1 - load of all time.
    assert (found == 0).mean() == pytest.approx(1 - load, abs=0.01)


ARRIVALS = st.lists(st.tuples(st.integers(0, 120), st.integers(1, 90)), min_size=1, max_size=60)


@given(ARRIVALS, st.integers(1, 25), st.integers(1, 6))
def test_window_equals_a_simulation_in_steps_of_one_nanosecond(
    arrivals: list[tuple[int, int]], slot_ns: int, slots: int
) -> None:
    window = SlidingWindow(VirtualQueue(BYTE_A_NS), slot_ns, slots)
    now = queue = 0
    ends = [0] * (slots - 1)  # the queue at the end of each slot so far
    for gap_ns, nbytes in arrivals:
        for _ in range(gap_ns):
            now, queue = now + 1, max(0, queue - 1)
            if now % slot_ns == 0:
                ends.append(queue)
        average = (sum(ends[len(ends) - slots + 1 :]) + queue) / slots
        assert window.arrive(now, nbytes) == pytest.approx(average, rel=1e-12)
        queue += nbytes


def test_after_a_pause_longer_than_the_window_only_what_did_not_drain_is_left() -> None:
    slot_ns = 1_000
    for burst, left in ((100_000, 8_000), (95_000, 3_000), (10_000, 0)):
        window = SlidingWindow(VirtualQueue(BYTE_A_NS), slot_ns)
        window.arrive(0, burst)
        now = 92 * slot_ns  # 92 kB have drained; the samples are those of slots 77 .. 91
        samples = [max(0, burst - end * slot_ns) for end in range(78, 93)]
        assert window.arrive(now, 1) == pytest.approx((sum(samples) + left) / 16)


def test_a_pause_of_a_year_costs_no_more_than_the_window() -> None:
    window = SlidingWindow(VirtualQueue(BYTE_A_NS), 62_500)
    window.arrive(0, 1_000_000)
    assert window.arrive(365 * 24 * 3600 * 10**9, 1) == 0  # 5e11 slots: must not be stepped through


def test_a_single_burst_moves_the_average_only_by_its_share_of_the_window() -> None:
    window = SlidingWindow(VirtualQueue(BYTE_A_NS), 1_000)
    window.arrive(0, 160)
    assert window.arrive(0, 1) == pytest.approx(160 / 16)
    assert window.arrive(500, 1) == 0


def test_a_packet_at_the_end_of_a_slot_belongs_to_the_next() -> None:
    window = SlidingWindow(VirtualQueue(BYTE_A_NS), 100, slots=2)
    window.arrive(0, 150)
    # At 100 ns the slot ends with 50 B; the packet of that moment is not part of the sample.
    assert window.arrive(100, 1_000) == (50 + 50) / 2
    assert window.arrive(101, 1) == (50 + 1_049) / 2
