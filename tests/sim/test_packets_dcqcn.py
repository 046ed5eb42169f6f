"""DCQCN packet by packet: one flow against the paper's rule, many against the fluid model."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from scipy import signal

from controller.congestion.dcqcn import PRESETS
from controller.congestion.reaction_point import ReactionPoint
from controller.errors import UsageError
from controller.sim.fairness import jain, jain_of_sums
from controller.sim.packets.events import EventQueue
from controller.sim.packets.oscillation import autocorrelation, oscillation
from controller.sim.packets.port import FifoPort, Marker, MarkingLine
from controller.sim.packets.sources import DcqcnFlow, NotificationPoint
from controller.sim.packets.steady import (
    PAPER_PARAMETERS,
    SteadyResult,
    SteadySetting,
    packet_steady,
)

US = 1000  # ns
LINK_Bps = 5_000_000_000


@pytest.mark.parametrize(
    ("holds", "told_us"),
    [
        # Marks at 0, 10, 20, 49, 50, 80, 200 us, told at most every 50.
        (True, [0, 50, None, None, 100, None, 200]),
        (False, [0, None, None, None, 50, None, 200]),
    ],
)
def test_a_receiver_spaces_its_notifications(holds: bool, told_us: list[int | None]) -> None:
    point = NotificationPoint(50 * US, holds)
    told = [point.marked(now_us * US) for now_us in (0, 10, 20, 49, 50, 80, 200)]
    assert [None if when is None else when / US for when in told] == told_us


@pytest.mark.parametrize("holds", [True, False])
def test_notifications_keep_their_distance_whatever_is_marked(holds: bool) -> None:
    draws, point = random.Random(5), NotificationPoint(50 * US, holds)
    marks = sorted(draws.randrange(10**8) for _ in range(5_000))
    told = [when for when in map(point.marked, marks) if when is not None]
    assert np.diff(told).min() >= 50 * US
    # A mark is never left untold when they are held: each has a CNP within the interval.
    if holds:
        after = np.searchsorted(told, marks)
        assert np.all(np.append(told, marks[-1] + 50 * US)[after] - marks <= 50 * US)


class _These(Marker):
    """Marks the packets of these numbers."""

    def __init__(self, *numbers: int) -> None:
        super().__init__(MarkingLine(0, 0, 0), lambda: 1.0)
        self._numbers, self._seen = numbers, 0

    def marks(self, now_ns: int, nbytes: int, queue_bytes: int) -> bool:
        self._seen += 1
        return self._seen - 1 in self._numbers


def one_flow(*marked: int) -> tuple[EventQueue, DcqcnFlow]:
    events = EventQueue()
    flow = DcqcnFlow(
        events,
        FifoPort(events, LINK_Bps, _These(*marked)),
        1000,
        ReactionPoint(PRESETS["paper"]),
        NotificationPoint(50 * US),
        delay_ns=10 * US,
    )
    return events, flow


def test_after_one_notification_each_timer_halves_the_gap() -> None:
    """SIGCOMM 2015, equations 1 to 3: alpha 1 halves the rate, the target stays."""
    events, flow = one_flow(0)
    cut_ns = 200 + 10 * US  # service and delay
    events.run(cut_ns - 1)
    assert flow.reaction.rc_Bps == LINK_Bps
    sent = flow.sent_packets
    for step in range(6):
        events.run(cut_ns + step * 55 * US)
        flow.reaction.advance(events.now_ns)
        assert flow.reaction.rc_Bps == pytest.approx(LINK_Bps * (1 - 0.5 ** (step + 1)))
        assert flow.reaction.rt_Bps == LINK_Bps
    # What went out is the sum of those rates over 55 us each.
    packets = sum(LINK_Bps * (1 - 0.5 ** (step + 1)) for step in range(5)) * 55e-6 / 1000
    assert abs(flow.sent_packets - sent - packets) < 5
    assert flow.cnps == 1


def test_after_fast_recovery_the_target_grows_by_steps() -> None:
    """Two CNPs in a row leave a quarter; five timers later R_AI is added with each."""
    events, flow = one_flow(0, 1)
    cut_ns = 200 + 10 * US + 50 * US  # the second mark is told 50 us after the first
    rate, target = LINK_Bps / 4, LINK_Bps / 2
    for step in range(30):
        events.run(cut_ns + step * 55 * US)
        flow.reaction.advance(events.now_ns)
        if step:
            target += PRESETS["paper"].rate_ai_Bps if step > 5 else 0
            rate = (rate + target) / 2
        assert flow.reaction.rc_Bps == pytest.approx(rate, rel=1e-9)
    assert flow.cnps == 2


def test_two_flows_share_the_link() -> None:
    result = packet_steady(SteadySetting(2, US, seconds=0.05, warm_up_s=0.02))
    assert result.jain > 0.99
    assert result.utilisation > 0.98
    assert result.hyper == 0
    # The fluid model settles at 20.2 KB; ten packets more or less are noise here.
    assert result.queue_mean_bytes == pytest.approx(20_200, abs=10_000)


def test_a_run_is_the_same_for_the_same_seed() -> None:
    setting = SteadySetting(4, 20 * US, seconds=0.01, warm_up_s=0.002, seed=7)
    first, again = packet_steady(setting), packet_steady(setting)
    assert first == again
    assert packet_steady(replace(setting, seed=8)) != first
    members = json.loads(json.dumps(first.to_json()))
    assert members["setting"]["line"]["kmax_bytes"] == 200_000
    assert members["swing"]["dominant_hz"] == first.swing.dominant_hz


@pytest.fixture(scope="module")
def ten_at_50_us() -> SteadyResult:
    return packet_steady(SteadySetting(10, 50 * US, seconds=0.05, warm_up_s=0.02))


def test_ten_flows_at_50_us_swing_through_the_whole_line(ten_at_50_us: SteadyResult) -> None:
    """Published phase margin: -6.58 degrees (CoNEXT 2016); the fluid model itself settles."""
    assert ten_at_50_us.swing.correlation > 0.7
    assert ten_at_50_us.queue_std_bytes > 50_000
    assert ten_at_50_us.idle_share > 0.02 and ten_at_50_us.queue_max_bytes > 200_000


class _Often(Marker):
    """Marks with one probability, whatever the queue."""

    def __init__(self, probability: float) -> None:
        super().__init__(MarkingLine(0, 0, 0), lambda: 1.0)
        self._probability, self._draw = probability, random.Random(2).random

    def marks(self, now_ns: int, nbytes: int, queue_bytes: int) -> bool:
        return self._draw() < self._probability


@pytest.mark.parametrize("holds", [True, False])
def test_the_queue_is_where_a_flow_alone_under_as_many_marks_has_its_share(holds: bool) -> None:
    """The line goes on beyond 200 KB at its slope: its step would set the marks, not its slope."""
    line = MarkingLine(5_000, 5_000 + 100 * 19_500, 0.1)
    together = packet_steady(
        SteadySetting(10, US, seconds=0.05, warm_up_s=0.02, line=line, echo_holds=holds)
    )
    on_the_line = 5_000 + together.marked_share / 0.01 * 195_000
    assert together.queue_mean_bytes == pytest.approx(on_the_line, rel=0.04)
    assert together.utilisation > 0.99

    events = EventQueue()
    flow = DcqcnFlow(
        events,
        FifoPort(events, LINK_Bps, _Often(together.marked_share)),
        1000,
        ReactionPoint(PAPER_PARAMETERS),
        NotificationPoint(50 * US, holds),
        US,
    )
    events.run(20_000 * US)
    warm = flow.delivered_packets
    events.run(220_000 * US)
    rate_Bps = (flow.delivered_packets - warm) * 1000 / 0.2
    assert rate_Bps == pytest.approx(LINK_Bps / 10, rel=0.1)


def test_the_window_costs_long_flows_throughput(ten_at_50_us: SteadyResult) -> None:
    """16 slots of 62.5 us are half a millisecond more in the loop than the loop can bear."""
    setting = replace(ten_at_50_us.setting, seconds=0.03, window_slots=16)
    averaged = packet_steady(setting)
    assert averaged.utilisation < ten_at_50_us.utilisation - 0.1
    assert averaged.queue_std_bytes > ten_at_50_us.queue_std_bytes


@pytest.mark.parametrize("hz", [400.0, 2000.0])
def test_a_tone_is_found(hz: float) -> None:
    times = np.arange(20_000) * 5e-6
    found = oscillation(np.sin(2 * np.pi * hz * times), 5e-6)
    assert found.dominant_hz == pytest.approx(hz, abs=40)
    assert found.period_s == pytest.approx(1 / hz, rel=0.01)
    assert found.correlation > 0.99 and found.sharpness > 0.95


def test_what_is_left_of_a_swing_is_its_damping() -> None:
    """Noise through a resonator: autocorrelation r^k cos(w k), so r^T one period later."""
    radius, period, count = 0.995, 100, 400_000
    noise = np.random.default_rng(4).standard_normal(count)
    poles = radius * np.exp(np.array([2j, -2j]) * np.pi / period)
    series = signal.lfilter([1.0], np.poly(poles).real, noise)
    found = oscillation(series, 1.0)
    assert found.correlation == pytest.approx(radius**period, abs=0.03)
    assert found.period_s == pytest.approx(period, rel=0.05)


def test_noise_and_silence_do_not_swing() -> None:
    noise = np.random.default_rng(0).standard_normal(20_000)
    assert oscillation(noise, 1e-6).correlation < 0.05
    assert autocorrelation(noise)[0] == 1
    assert oscillation(np.full(100, 7.0), 1e-6).dominant_hz == 0
    with pytest.raises(UsageError, match="A spectrum of 15 samples; allowed: from 16"):
        oscillation(np.arange(15.0), 1e-6)


def test_jain_tells_equal_from_unequal() -> None:
    assert jain(np.array([3, 3, 3])) == 1
    assert jain(np.array([1, 0, 0, 0])) == 0.25
    assert np.isnan(jain(np.zeros(3)))


def test_jain_of_groups_is_that_of_each() -> None:
    groups = [np.array([3, 3, 3]), np.array([1, 2, 4, 0]), np.zeros(2), np.zeros(0)]
    sums = np.array([[each.size, each.sum(), (each**2).sum()] for each in groups])
    np.testing.assert_equal(jain_of_sums(*sums.T), [jain(each) for each in groups])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flows": 0}, "Setting flows is 0; allowed: from 1"),
        ({"delay_ns": -1}, "Setting delay_ns is -1; allowed: from 0"),
        ({"seconds": 0.0}, "Setting seconds is 0.0"),
        ({"drain_share": 0.0}, "drain_share 0.0; allowed"),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(SteadySetting(2, 0), **change)
    assert PAPER_PARAMETERS.rate_hai_Bps == PAPER_PARAMETERS.rate_ai_Bps
