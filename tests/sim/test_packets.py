"""Packets through a port, against what queueing theory says of it."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy import stats

from controller.congestion.marking import SlidingWindow, VirtualQueue
from controller.errors import UsageError
from controller.sim.packets.events import EventQueue
from controller.sim.packets.port import FifoPort, Marker, MarkingLine
from controller.sim.packets.sources import Flow, PacedFlow, WindowFlow, constant_gap, poisson_gap

NBYTES = 1000
RATE_Bps = 10**9  # a packet in 1000 ns
SERVICE_ns = 1000


def test_events_of_one_moment_happen_in_the_order_of_their_entry() -> None:
    events, seen = EventQueue(), list[str]()
    events.at(5, lambda now_ns: seen.append("second"))
    events.at(3, lambda now_ns: events.at(5, lambda now_ns: seen.append("third")))
    events.at(3, lambda now_ns: seen.append("first"))
    events.at(6, lambda now_ns: seen.append("too late"))
    events.run(5)
    assert seen == ["first", "second", "third"]
    assert (events.now_ns, events.happened) == (5, 4)
    with pytest.raises(ValueError, match="event at 4 ns, but it is 5 ns already"):
        events.at(4, lambda now_ns: None)


def poisson_run(load: float, seed: int, packets: int) -> tuple[float, float]:
    """Mean wait in service times and mean number in the system of M/D/1."""
    events = EventQueue()
    port = FifoPort(events, RATE_Bps)
    gap = poisson_gap(NBYTES, load * RATE_Bps, random.Random(seed).random)
    PacedFlow(events, port, NBYTES, gap)
    warm_ns = 1_000 * SERVICE_ns
    events.run(warm_ns)
    port.begin_statistics(warm_ns)
    end_ns = warm_ns + round(packets / load) * SERVICE_ns
    events.run(end_ns)
    return port.mean_wait_ns() / SERVICE_ns, port.mean_queue_bytes(end_ns) / NBYTES


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8, 0.9])
def test_random_arrivals_wait_as_long_as_theory_says(load: float) -> None:
    """Pollaczek and Khinchine's mean for a fixed service time, within 99 % confidence."""
    waits, numbers = np.array([poisson_run(load, seed, 12_000) for seed in range(10)]).T
    wait = load / (2 * (1 - load))
    for measured, expected in ((waits, wait), (numbers, load * wait + load)):
        half = stats.t.ppf(0.995, len(measured) - 1) * stats.sem(measured)
        assert abs(measured.mean() - expected) < half
        assert half < 0.15 * expected


@pytest.mark.parametrize(("share", "packets"), [(0.4, 4000), (0.5, 5000)])
def test_packets_that_come_apart_never_wait(share: float, packets: int) -> None:
    events = EventQueue()
    port = FifoPort(events, RATE_Bps)
    gap = constant_gap(NBYTES, share * RATE_Bps)
    flows = [
        PacedFlow(events, port, NBYTES, gap, start_ns) for start_ns in (0, SERVICE_ns / 2 / share)
    ]
    events.run(10**7)
    assert port.wait_ns == 0
    assert [flow.delivered_packets for flow in flows] == [packets, packets]
    assert port.mean_queue_bytes(10**7) == pytest.approx(2 * share * NBYTES, rel=1e-3)


def test_packets_that_come_together_wait_for_one_another() -> None:
    events = EventQueue()
    port = FifoPort(events, RATE_Bps)
    for _ in range(2):
        PacedFlow(events, port, NBYTES, constant_gap(NBYTES, RATE_Bps / 4))
    events.run(4 * 10**6)
    assert port.largest_bytes == 2 * NBYTES
    assert port.mean_wait_ns() == pytest.approx(SERVICE_ns / 2, rel=1e-3)


@pytest.mark.parametrize(("first", "second"), [(1, 1), (1, 3), (7, 2)])
def test_full_windows_share_a_port_as_their_sizes(first: int, second: int) -> None:
    events = EventQueue()
    port = FifoPort(events, RATE_Bps)
    flows = [WindowFlow(events, port, NBYTES, packets) for packets in (first, second)]
    packets = 1000 * (first + second)
    events.run(packets * SERVICE_ns)
    assert [flow.delivered_packets for flow in flows] == [1000 * first, 1000 * second]
    assert port.queue_bytes == port.largest_bytes == (first + second) * NBYTES


def test_nothing_is_lost_and_nothing_comes_from_nowhere() -> None:
    events, draw = EventQueue(), random.Random(1).random
    port = FifoPort(events, RATE_Bps)
    flows: list[Flow] = [
        PacedFlow(events, port, 300, poisson_gap(300, 0.5 * RATE_Bps, draw)),
        PacedFlow(events, port, 1500, poisson_gap(1500, 0.7 * RATE_Bps, draw)),
        WindowFlow(events, port, 64, 5, start_ns=50_000),
    ]
    events.run(3 * 10**6)
    sent = sum(flow.sent_packets * flow.nbytes for flow in flows)
    delivered = sum(flow.delivered_packets * flow.nbytes for flow in flows)
    assert sent == port.arrived_bytes and delivered == port.departed_bytes
    assert sent - delivered == port.queue_bytes > 100_000
    assert port.arrived_packets == sum(flow.sent_packets for flow in flows)
    # It had work from the first packet on: only the one in service is not counted yet.
    assert 0 <= 3 * 10**6 - delivered <= 1500 + 5_000


def test_service_times_do_not_drift() -> None:
    """7 bytes at 3 bytes/ns take 2 1/3 ns."""
    events = EventQueue()
    port = FifoPort(events, 3 * 10**9)
    WindowFlow(events, port, 7, 2)
    events.run(7 * 10**4)
    assert port.departed_packets == 3 * 10**4


@pytest.mark.parametrize("at_departure", [False, True])
def test_marks_follow_the_line_at_the_queue_that_is_seen(at_departure: bool) -> None:
    """A window of 60 packets holds the queue: each finds 59 of them, and leaves 59 behind."""
    events = EventQueue()
    line = MarkingLine(10 * NBYTES, 110 * NBYTES, 0.4)
    port = FifoPort(events, RATE_Bps, Marker(line, random.Random(3).random, None, at_departure))
    flow = WindowFlow(events, port, NBYTES, 60)
    events.run(20_000 * SERVICE_ns)
    expected = 0.4 * 49 / 100
    spread = math.sqrt(expected * (1 - expected) / 20_000)
    assert abs(flow.marked_packets / flow.delivered_packets - expected) < 4 * spread
    assert port.marked_packets == flow.marked_packets


def first_mark_ns(slots: int, slot_ns: int, kmin_bytes: float) -> int:
    """When the first packet is marked, should half as much again arrive as leaves."""
    events = EventQueue()
    line = MarkingLine(kmin_bytes, kmin_bytes, 1)
    yardstick = SlidingWindow(VirtualQueue(RATE_Bps), slot_ns, slots) if slots else None
    marked = list[int]()

    class Watched(Marker):
        def marks(self, now_ns: int, nbytes: int, queue_bytes: int) -> bool:
            answer = super().marks(now_ns, nbytes, queue_bytes)
            if answer:
                marked.append(now_ns)
            return answer

    port = FifoPort(events, RATE_Bps, Watched(line, random.Random(0).random, yardstick))
    PacedFlow(events, port, NBYTES, constant_gap(NBYTES, 1.5 * RATE_Bps))
    while not marked:
        events.run(events.now_ns + 10_000)
    return marked[0]


def test_the_window_marks_a_rising_queue_later_by_half_its_length() -> None:
    """The samples of 16 slots are 0 .. 15 slots old, the newest up to one more."""
    slot_ns, kmin_bytes = 62_500, 2_000_000
    at_once, averaged = first_mark_ns(0, 1, kmin_bytes), first_mark_ns(16, slot_ns, kmin_bytes)
    # The queue rises by half a byte a ns.
    assert at_once == pytest.approx(kmin_bytes / 0.5, rel=0.001)
    lag_slots = (averaged - at_once) / slot_ns
    assert sum(range(15)) / 16 - 0.1 < lag_slots < sum(range(1, 16)) / 16 + 0.1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda events, port: FifoPort(events, 0), "Port rate is 0; allowed: whole bytes"),
        (lambda events, port: Flow(events, port, 0), "Packet size is 0 bytes; allowed: from 1"),
        (
            lambda events, port: WindowFlow(events, port, 1, 0),
            "Window is 0 packets; allowed: from 1",
        ),
        (lambda events, port: MarkingLine(2, 1, 0.1), "kmin_bytes is 2"),
        (
            lambda events, port: Marker(
                MarkingLine(1, 2, 0.1), random.random, VirtualQueue(1), at_departure=True
            ),
            "at departure looks at a virtual queue",
        ),
    ],
)
def test_impossible_parts_are_refused(make, message: str) -> None:
    events = EventQueue()
    with pytest.raises(UsageError, match=message):
        make(events, FifoPort(events, 1))
