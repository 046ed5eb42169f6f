"""Congestion point: the virtual queue, its window, and what is marked."""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Raw

from controller.agent import maps
from controller.agent.maps import ClassSettings, PortSettings
from controller.congestion.marking import SlidingWindow, VirtualQueue, mark_probability
from controller.dataplane import layout, libbpf
from controller.dataplane.layout import Act, Direction, PortFlag
from controller.dataplane.loader import TC_EGRESS
from tests.acting import DSCPS, JOB, SLOT, Acting, LINK_Bps, START_ns
from tests.hook import PORT, TC_ACT_UNSPEC, Hook, flow_key
from tests.packets import SEND_ONLY, roce

CLASS = 4
ECN_ECT1, ECN_ECT0, ECN_CE = 1, 2, 3
# 998 bytes on the wire leave a 1 Gbit/s link in 7984 ns, without a rest.
PAYLOAD_BYTES, WIRE_BYTES, PACKET_ns = 940, 998, 7984
SLOT_ns = 4 * PACKET_ns
OTHER_PORT = 4


def frame(ecn: int = ECN_ECT0, payload_bytes: int = PAYLOAD_BYTES, dqpn: int = 0x11) -> bytes:
    """A request that has its class's DSCP already: only a mark can change it."""
    return roce(SEND_ONLY, bytes(payload_bytes), tos=DSCPS[CLASS] << 2 | ecn, dqpn=dqpn)


DATA = frame()


def ecn_of(data: bytes) -> int:
    return data[15] & 3


def write_classes(
    acting: Acting,
    kmin_bytes: int,
    kmax_bytes: int,
    pmax: float,
    drain_Bps: float = LINK_Bps,
    port: int = PORT,
    other: ClassSettings | None = None,
) -> None:
    """All classes alike, but class 2 if `other` is given."""
    rows = [
        ClassSettings(dscp, number, kmin_bytes, kmax_bytes, pmax, drain_Bps)
        for number, dscp in enumerate(DSCPS)
    ]
    if other:
        rows[2] = other
    maps.write_classes(acting.fds, port, rows)


def clear_queues(acting: Acting) -> None:
    for number in (CLASS, layout.CLASSES):
        index = PORT * layout.MARKERS_PER_PORT + number
        libbpf.map_update(
            acting.fds["markers"], struct.pack("<I", index), bytes(layout.MARKER.itemsize)
        )


@pytest.fixture
def marking(acting: Acting) -> Acting:
    """One flow of a job in class 4, on a port whose queues drain at 1 Gbit/s."""
    acting.job(class_default=CLASS)
    acting.assign()
    acting.port(PortFlag.MARK, drain_share=1.0, slot_ns=SLOT_ns)
    return acting


def marks(acting: Acting, packets: int, data: bytes = DATA) -> int:
    """Send packets, return how many were marked."""
    return sum(ecn_of(acting.send(data).frame) == ECN_CE for _ in range(packets))


# ---- queue and window ----

FRAMES = {size: frame(payload_bytes=size) for size in (0, 64, PAYLOAD_BYTES, 3000)}
STEPS = st.lists(
    st.tuples(
        st.one_of(
            st.integers(0, 3),
            st.integers(0, 10**6),
            st.integers(0, 4 * 10**9),
            # the n-th slot end from now, or a nanosecond off it
            st.tuples(st.integers(1, 40), st.integers(-1, 1)),
        ),
        st.sampled_from(sorted(FRAMES)),
        st.integers(1, 4),
    ),
    min_size=1,
    max_size=30,
)


@pytest.mark.parametrize("link_Bps", [125_000, 12_500_000, 1_250_000_000, 50_000_000_000])
@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=STEPS, slot_ns=st.sampled_from([1_000, 62_500, 25_000_000]), phase=st.integers(0))
def test_queue_and_window_equal_the_model(
    marking: Acting, link_Bps: int, steps: list[Any], slot_ns: int, phase: int
) -> None:
    """1 Mbit/s to 400 Gbit/s. The dataplane counts whole bytes, rounded up, and takes up a
    rounded one each 2^26 ns of a busy period: that is the tolerance."""
    port_settings = PortSettings(PortFlag.MARK, link_Bps, drain_share=0.95, slot_ns=slot_ns)
    maps.write_port(marking.fds, PORT, port_settings)
    write_classes(marking, 0, 1 << 31, 0.0, drain_Bps=link_Bps * 0.25)
    clear_queues(marking)
    models = {}
    for number, share in ((CLASS, 0.25), (layout.CLASSES, 0.95)):
        # the rate as the dataplane has it, so that its rounding is no part of the comparison
        drain_Bps = maps.drain_q24(link_Bps * share) * 1e9 / (1 << 24)
        models[number] = SlidingWindow(VirtualQueue(drain_Bps), slot_ns)
    now = START_ns + phase % slot_ns
    busy_since = dict.fromkeys(models, now)
    for gap, size, packets in steps:
        if isinstance(gap, tuple):
            now = max(now, (now // slot_ns + gap[0]) * slot_ns + gap[1])
        else:
            now += gap
        marking.at(now)
        for _ in range(packets):
            sent = marking.send(FRAMES[size])
            assert sent.frame == FRAMES[size]  # Kmin 0, but Pmax is 0, too
            for number, window in models.items():
                found = window.queue.bytes_at(now)
                average = window.arrive(now, len(FRAMES[size]))
                if not found:
                    busy_since[number] = now
                slack = 1 + ((now - busy_since[number]) >> 26)
                marker = marking.marker(number)
                assert found - 1e-3 <= marker["queue"] < found + slack + 1e-3
                # rounded down when divided
                assert average - 1 < marker["average"] < average + slack + 1e-3


def test_a_silence_of_years_empties_queue_and_window(marking: Acting) -> None:
    maps.write_port(
        marking.fds, PORT, PortSettings(PortFlag.MARK, 125_000, drain_share=1.0, slot_ns=62_500)
    )
    now = START_ns
    for seconds in (5, 3600, 10**8):
        marking.at(now)
        for _ in range(100):  # 0.8 s of the link
            marking.send(DATA)
        assert marking.marker()["queue"] >= 99 * WIRE_BYTES
        now += seconds * 10**9
        marking.at(now)
        marking.send(DATA)
        assert marking.marker()["queue"] == marking.marker()["average"] == 0


def test_a_clock_that_is_behind_drains_nothing_and_loses_nothing(marking: Acting) -> None:
    """As that of a packet which another CPU overtook."""
    marking.at(START_ns)
    for _ in range(10):
        marking.send(DATA)
    marking.at(START_ns - 5_000_000)
    for packets in (10, 11):
        marking.send(DATA)
        assert marking.marker()["queue"] == packets * WIRE_BYTES
    marking.at(START_ns + PACKET_ns)
    marking.send(DATA)
    assert marking.marker()["queue"] == 11 * WIRE_BYTES


def test_an_overload_is_forgotten_when_a_multiple_of_kmax_has_drained(marking: Acting) -> None:
    kmax_packets = 10
    write_classes(marking, 0, kmax_packets * WIRE_BYTES, 1.0)
    marking.at(START_ns)
    marks(marking, 1000)  # a hundred times Kmax, of a sender that heeds no marks
    for number in (CLASS, layout.CLASSES):
        queue = marking.marker(number)["queue"]
        # Half of it, in any one slot, is enough for an average above Kmax.
        assert 16 * kmax_packets * WIRE_BYTES < queue <= 32 * (kmax_packets * WIRE_BYTES + 1)
    # One slot later the average is above Kmax; with all drained, and fifteen slots later, 0.
    marking.at(START_ns + SLOT_ns)
    assert marks(marking, 1) == 1
    marking.at(START_ns + (32 * kmax_packets + 2 + 15 * SLOT_ns // PACKET_ns) * PACKET_ns)
    assert marks(marking, 1) == 0
    assert marking.marker()["average"] == 0


def test_without_drain_rate_or_slot_there_is_no_queue(marking: Acting) -> None:
    write_classes(marking, 0, 0, 1.0)
    marking.port(PortFlag.MARK, slot_ns=0)
    libbpf.map_update(
        marking.fds["class_controls"],
        struct.pack("<I", PORT * layout.CLASSES + CLASS),
        bytes(layout.CLASS_CONTROL.itemsize),
    )
    data = roce(SEND_ONLY, bytes(64), tos=ECN_ECT0)  # the DSCP of an empty entry
    assert marks(marking, 10, data) == 0
    for number in (CLASS, layout.CLASSES):
        assert marking.marker(number) == np.zeros((), layout.MARKER)


def test_two_cpus_at_once_lose_no_bytes_and_leave_no_queue(marking: Acting) -> None:
    """Under a light load, so that both find the queue empty over and over again. The test's
    clock is not atomic: at worst both see one step where there were two."""
    packets = 100_000
    marking.at(START_ns, 4 * PACKET_ns)

    def run() -> None:
        libbpf.test_run(marking.egress.fd, DATA, repeat=packets, data_out_bytes=0)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (CLASS, layout.CLASSES):
        marker = marking.marker(number)
        assert marker["arrived"] == 2 * packets * WIRE_BYTES
        assert marker["queue"] < 20 * WIRE_BYTES


# ---- probability ----

KMIN, KMAX = 10, 60  # packets
PROBABILITY_PACKETS = 16_000  # standard error at most 0.4 percentage points
TOLERANCE = 0.02


def hold(acting: Acting, packets: int) -> None:
    """From here on every packet finds, now and as the window's average, so many before it."""
    clear_queues(acting)
    start_ns = START_ns // SLOT_ns * SLOT_ns
    acting.at(start_ns)
    marks(acting, packets + 1)
    # One packet's time apart they keep the queue as long as it is; slots end with packets.
    acting.at(start_ns + PACKET_ns, PACKET_ns)
    marks(acting, 16 * SLOT_ns // PACKET_ns)


@pytest.mark.parametrize("pmax", [1.0, 0.5, 0.1])
def test_probability_is_the_line_of_kmin_kmax_and_pmax(marking: Acting, pmax: float) -> None:
    kmin_bytes, kmax_bytes = KMIN * WIRE_BYTES, KMAX * WIRE_BYTES
    write_classes(marking, kmin_bytes, kmax_bytes, pmax)
    for level in (5, KMIN, 20, 35, 50, KMAX, KMAX + 1):
        hold(marking, level)
        before = marking.acts()
        intended = mark_probability(level * WIRE_BYTES, kmin_bytes, kmax_bytes, pmax)
        packets = PROBABILITY_PACKETS if 0 < intended < 1 else 500
        marked = marks(marking, packets)
        queue = marking.marker()
        assert (queue["queue"], queue["average"]) == (level * WIRE_BYTES, level * WIRE_BYTES)
        assert (marking.acts() - before)[Act.MARKED] == marked
        if 0 < intended < 1:
            assert marked / packets == pytest.approx(intended, abs=TOLERANCE)
        else:
            assert marked == intended * packets


@pytest.mark.parametrize("flag", [PortFlag.MARK, PortFlag.MARK_INSTANT])
@pytest.mark.parametrize("load", [0.8, 0.95, 1.05])
def test_under_random_load_as_many_are_marked_as_the_line_says(
    marking: Acting, flag: PortFlag, load: float
) -> None:
    kmin_bytes, kmax_bytes = 2 * WIRE_BYTES, 40 * WIRE_BYTES
    write_classes(marking, kmin_bytes, kmax_bytes, 0.8)
    marking.port(flag, drain_share=1.0, slot_ns=SLOT_ns)
    packets = 10_000
    gaps = np.random.default_rng(11).exponential(PACKET_ns / load, packets)
    window = SlidingWindow(VirtualQueue(LINK_Bps), SLOT_ns)
    intended = marked = 0.0
    for now in (START_ns + gaps.cumsum()).astype(int).tolist():
        marking.at(now)
        marked += marks(marking, 1)
        found = window.queue.bytes_at(now)
        average = window.arrive(now, WIRE_BYTES)
        decides = average if flag == PortFlag.MARK else found
        intended += mark_probability(decides, kmin_bytes, kmax_bytes, 0.8)
    assert marked / packets == pytest.approx(intended / packets, abs=TOLERANCE)
    assert load < 0.9 or intended / packets > 0.05


def test_equal_thresholds_are_a_step(marking: Acting) -> None:
    marking.port(PortFlag.MARK_INSTANT, drain_share=1.0, slot_ns=SLOT_ns)
    write_classes(marking, 3 * WIRE_BYTES, 3 * WIRE_BYTES, 0.0)
    marking.at(START_ns)
    found = [ecn_of(marking.send(DATA).frame) == ECN_CE for _ in range(6)]
    assert found == [False] * 4 + [True] * 2  # above three packets, not at three


# ---- window and moment ----


def test_the_window_spares_a_short_burst_that_the_moment_marks(marking: Acting) -> None:
    write_classes(marking, 5 * WIRE_BYTES, 5 * WIRE_BYTES, 0.0)
    for flag, expected in ((PortFlag.MARK, 0), (PortFlag.MARK_INSTANT, 44)):
        marking.port(flag, drain_share=1.0, slot_ns=SLOT_ns)
        clear_queues(marking)
        before = marking.acts()
        marking.at(START_ns)
        assert marks(marking, 50) == expected
        did = marking.acts() - before
        # A sixteenth of the burst counts, and Kmin is five packets.
        assert did[Act.WINDOW_SPARED] == (44 if flag == PortFlag.MARK else 0)
        assert did[Act.WINDOW_ONLY] == 0


def test_the_window_remembers_a_long_queue_that_is_gone(marking: Acting) -> None:
    write_classes(marking, 5 * WIRE_BYTES, 5 * WIRE_BYTES, 0.0)
    for flag, expected in ((PortFlag.MARK, 1), (PortFlag.MARK_INSTANT, 0)):
        marking.port(flag, drain_share=1.0, slot_ns=SLOT_ns)
        clear_queues(marking)
        before = marking.acts()
        marking.at(START_ns // SLOT_ns * SLOT_ns)
        marks(marking, 60)
        did = marking.acts() - before
        marking.at(START_ns // SLOT_ns * SLOT_ns + 60 * PACKET_ns)
        assert marks(marking, 1) == expected
        assert marking.marker()["queue"] == 0
        # What the slots' ends found: 56, 52, .. 0 packets; the moment finds none.
        assert marking.marker()["average"] == sum(range(0, 57, 4)) * WIRE_BYTES // 16
        assert did[Act.WINDOW_ONLY] == 0
        assert (marking.acts() - before)[Act.WINDOW_ONLY] == expected


# ---- who is marked ----


@pytest.fixture
def congested(marking: Acting) -> Iterator[Acting]:
    """Every packet that finds another one before it is marked."""
    write_classes(marking, 0, 0, 0.0)
    marking.port(PortFlag.MARK_INSTANT, drain_share=1.0, slot_ns=SLOT_ns)
    marking.send(DATA)
    yield marking


@pytest.mark.parametrize("ecn", [ECN_ECT0, ECN_ECT1])
def test_ect_is_marked_and_keeps_its_dscp(congested: Acting, ecn: int) -> None:
    assert congested.send(frame(ecn)).frame == frame(ECN_CE)
    assert congested.acts()[Act.MARKED] == congested.control()["marked"] == 1


def test_not_ect_is_counted_and_stays(congested: Acting) -> None:
    assert congested.send(frame(0)).frame == frame(0)
    acts = congested.acts()
    assert (acts[Act.NOT_ECT], acts[Act.MARKED], congested.control()["marked"]) == (1, 0, 0)


def test_ce_stays_and_is_not_counted_again(congested: Acting) -> None:
    assert congested.send(frame(ECN_CE)).frame == frame(ECN_CE)
    acts = congested.acts()
    assert (acts[Act.NOT_ECT], acts[Act.MARKED], congested.control()["marked"]) == (0, 0, 0)


def test_without_mark_nothing_is_marked_or_queued(congested: Acting) -> None:
    clear_queues(congested)
    congested.port(PortFlag(0), drain_share=1.0, slot_ns=SLOT_ns)
    for ecn in range(4):
        assert congested.send(frame(ecn)).frame == frame(ecn)
    congested.send(ARP_FRAME)
    assert congested.marker() == np.zeros((), layout.MARKER)
    assert congested.acts()[Act.NOT_ECT] == congested.acts()[Act.MARKED] == 0


ETHER = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")
ARP_FRAME = bytes(ETHER / ARP(psrc="10.0.0.1", pdst="10.0.0.2"))
TCP_FRAME = bytes(ETHER / IP(src="10.0.0.1", dst="10.0.0.2", tos=2) / TCP() / Raw(bytes(900)))


@pytest.mark.parametrize(
    "data",
    [frame(dqpn=0x99), frame(0, dqpn=0x99), frame(ECN_CE, dqpn=0x99), ARP_FRAME, TCP_FRAME],
    ids=["ect", "not-ect", "ce", "arp", "tcp"],
)
def test_other_traffic_fills_the_port_and_is_left_as_it_was(congested: Acting, data: bytes) -> None:
    clear_queues(congested)
    before = congested.acts()
    for _ in range(3):
        sent = congested.send(data, priority=5)
        assert (sent.verdict, sent.frame, sent.priority) == (TC_ACT_UNSPEC, data, 5)
    assert congested.acts() == before
    assert congested.marker()["arrived"] == 3 * len(data)
    # The flow's class has no queue, but the port has: the next packet of the flow is marked.
    assert marks(congested, 1) == 1
    assert congested.marker(CLASS)["queue"] == 0
    assert congested.marker()["queue"] > 0


def test_a_class_is_marked_by_its_own_thresholds_and_queue(marking: Acting) -> None:
    """Class 4 is allowed a tenth of the link, class 2 all of it; Kmin and Kmax differ."""
    marking.port(PortFlag.MARK_INSTANT, drain_share=1.0, slot_ns=SLOT_ns)
    write_classes(
        marking, 20_400, 20_400, 0.0, drain_Bps=LINK_Bps / 10,
        other=ClassSettings(DSCPS[2], 2, 5 * WIRE_BYTES, 5 * WIRE_BYTES, 0.0, LINK_Bps),
    )  # fmt: skip
    marking.job(job=2, class_default=2)
    marking.assign(dqpn=0x22, slot=2, job=2)
    low = roce(SEND_ONLY, bytes(PAYLOAD_BYTES), tos=DSCPS[2] << 2 | ECN_ECT0, dqpn=0x22)
    marked: Counter[int] = Counter()
    # Half the link each: what class 4 has more than its tenth stays in its own queue only.
    for number in range(40):
        for dqpn, data in ((0x11, DATA), (0x22, low)):
            marking.at(START_ns + (2 * number + (dqpn == 0x22)) * PACKET_ns)
            marked[dqpn] += marks(marking, 1, data)
    # The n-th of class 4 finds 0.8 (n - 1) packets: above 20.4 from the 27th on.
    assert marked == {0x11: 40 - 26, 0x22: 0}
    marking.at(START_ns + 80 * PACKET_ns)
    assert marks(marking, 10, low) == 4  # those that find more than five


def test_ports_have_queues_of_their_own(congested: Acting, packet_dtype: np.dtype) -> None:
    other = Hook(congested.dataplane, TC_EGRESS, packet_dtype, port=OTHER_PORT, acts=True)
    fds = congested.fds
    try:
        maps.clear_port(fds, OTHER_PORT)
        maps.write_port(
            fds, OTHER_PORT, PortSettings(PortFlag.MARK_INSTANT, LINK_Bps, drain_share=1.0)
        )
        write_classes(congested, 2 * WIRE_BYTES, 2 * WIRE_BYTES, 0.0, port=OTHER_PORT)
        maps.write_control(fds, SLOT + 1, JOB)
        maps.assign(fds, flow_key(direction=Direction.EGRESS, port=OTHER_PORT), SLOT + 1)
        maps.begin_epoch(fds)
        before = congested.acts()
        assert marks(congested, 20) == 20
        results = [ecn_of(libbpf.test_run(other.fd, DATA).data) for _ in range(5)]
        assert results == [ECN_ECT0] * 3 + [ECN_CE] * 2
        assert (congested.acts() - before)[Act.MARKED] == 20
        assert maps.read_acts(fds, OTHER_PORT)[Act.MARKED] == 2
        assert maps.read_marker(fds, OTHER_PORT)["arrived"] == 5 * WIRE_BYTES
    finally:
        maps.unassign(fds, flow_key(direction=Direction.EGRESS, port=OTHER_PORT))
        maps.clear_port(fds, OTHER_PORT)
        other.close()
