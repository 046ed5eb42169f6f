"""Per-flow accounting: what a flow's counters say after known frames."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from controller.dataplane import layout, libbpf
from controller.dataplane.compile import compile_programs
from controller.dataplane.layout import Direction, Kind, NakCode, Reason, Transport
from controller.dataplane.loader import TC_EGRESS, XDP_INGRESS, Dataplane
from tests.hook import MAX_FLOWS, PORT, TC_ACT_UNSPEC, Hook, Replay, flow_key
from tests.packets import (
    ACK,
    BY_NAME,
    CNP,
    NAK_SYNDROME,
    OPCODES,
    READ_FIRST,
    READ_MIDDLE,
    RNR_SYNDROME,
    SEND_FIRST,
    SEND_LAST,
    SEND_MIDDLE,
    SEND_ONLY,
    V4,
    V6,
    WRITE_FIRST,
    WRITE_LAST,
    WRITE_MIDDLE,
    Opcode,
    packet,
    roce,
)

UD_SEND_ONLY = BY_NAME["UD_SEND_ONLY"]


def on_every_cpu(work: Callable[[], None], times: int = 2) -> None:
    """Run `work` in `times` threads at once, spread over the CPUs of this process."""
    cpus = sorted(os.sched_getaffinity(0))
    barrier = threading.Barrier(times)
    errors: list[BaseException] = []

    def body(number: int) -> None:
        try:
            os.sched_setaffinity(0, {cpus[number % len(cpus)]})  # of this thread
            barrier.wait(timeout=10)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(times)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize("opcode", OPCODES, ids=lambda opcode: opcode.name)
def test_a_packet_is_counted_by_kind_bytes_and_message(opcode: Opcode, hook: Hook) -> None:
    payload = b"12345" if opcode.payload else b""
    frame = roce(opcode, payload, src=V6[0], dst=V6[1])
    hook.run(frame)
    flow = hook.flow(src=V6[0], dst=V6[1])
    assert flow["packets"] == 1
    assert flow["wire_bytes"] == len(frame)
    assert flow["payload_bytes"] == flow["max_payload"] == len(payload)
    assert flow["messages"] == opcode.ends
    assert flow["kinds"][Kind[opcode.kind]] == 1
    assert flow["kinds"].sum() == 1
    assert Transport(flow["transport"]).name == opcode.transport


def test_every_name_of_a_kind_is_produced_by_some_opcode_or_a_nak() -> None:
    assert {opcode.kind for opcode in OPCODES} | {"NAK"} == {kind.name for kind in Kind}


def test_bytes_of_several_packets_add_up(hook: Hook) -> None:
    sizes = [1024, 1024, 1024, 1, 0, 13]
    frames = [packet(SEND_MIDDLE, psn, size) for psn, size in enumerate(sizes)]
    hook.run(*frames)
    flow = hook.flow()
    # packet() gives the pad bytes that a size needs; they are no payload.
    assert flow["payload_bytes"] == sum(sizes)
    assert flow["wire_bytes"] == sum(len(frame) for frame in frames)
    assert flow["max_payload"] == 1024


def test_ethernet_padding_is_not_counted(hook: Hook) -> None:
    frame = roce(SEND_ONLY)
    hook.run(frame.ljust(60, b"\0"))
    assert hook.flow()["wire_bytes"] == len(frame) == 58


@pytest.mark.parametrize(
    "opcodes",
    [
        (SEND_FIRST, SEND_MIDDLE, SEND_MIDDLE, SEND_LAST),
        (WRITE_FIRST, WRITE_MIDDLE, WRITE_MIDDLE, WRITE_LAST),
        (BY_NAME["UC_SEND_FIRST"], BY_NAME["UC_SEND_MIDDLE"], BY_NAME["UC_SEND_LAST"]),
        (BY_NAME["XRC_SEND_FIRST"], BY_NAME["XRC_SEND_LAST_WITH_INVALIDATE"]),
        (BY_NAME["RD_SEND_FIRST"], BY_NAME["RD_SEND_MIDDLE"], BY_NAME["RD_SEND_LAST"]),
        (BY_NAME["RD_RDMA_WRITE_FIRST"], BY_NAME["RD_RDMA_WRITE_LAST"]),
    ],
    ids=lambda opcodes: opcodes[0].name,
)
def test_a_message_of_many_packets_is_counted_once_when_it_is_complete(
    opcodes: tuple[Opcode, ...], hook: Hook
) -> None:
    for psn, opcode in enumerate(opcodes):
        assert psn == 0 or hook.flow()["messages"] == 0
        hook.run(packet(opcode, psn, 256))
    assert hook.flow()["messages"] == 1


def test_a_repeated_last_packet_completes_no_second_message(hook: Hook) -> None:
    last = packet(SEND_LAST, 1, 64)
    hook.run(packet(SEND_FIRST, 0, 256), last, last)
    assert hook.flow()["messages"] == 1


def test_every_datagram_is_a_message(hook: Hook) -> None:
    hook.run(*[packet(UD_SEND_ONLY, 7, 8)] * 3)
    assert hook.flow()["messages"] == 3


def test_ecn_codepoints_and_dscps_are_told_apart(hook: Hook) -> None:
    traffic_classes = [0x00, 0x01, 0x02, 0x02, 0x03, 0x03, 0x03, 0x6A, 0xB8, 0xFF]
    for psn, tos in enumerate(traffic_classes):
        hook.run(packet(SEND_ONLY, psn, 4, tos=tos), packet(SEND_ONLY, psn, 4, tos=tos, src=V6[0],
                                                            dst=V6[1]))  # fmt: skip
    for src, dst in (V4, V6):
        flow = hook.flow(src=src, dst=dst)
        seen = Counter(tos & 3 for tos in traffic_classes)
        assert flow["ecn"].tolist() == [seen[codepoint] for codepoint in range(4)]
        dscps = {bit for bit in range(64) if int(flow["dscp_seen"]) >> bit & 1}
        assert dscps == {tos >> 2 for tos in traffic_classes}


def test_fecn_becn_and_ack_requests_are_counted(hook: Hook) -> None:
    hook.run(
        packet(SEND_ONLY, 0, 4, fecn=True),
        packet(SEND_ONLY, 1, 4, becn=True, ack_req=True),
        packet(SEND_ONLY, 2, 4, becn=True, fecn=True, ack_req=True),
        packet(SEND_ONLY, 3, 4, becn=True, ack_req=True),
        packet(SEND_ONLY, 4, 4),
    )
    flow = hook.flow()
    assert (flow["fecn"], flow["becn"], flow["ack_requests"]) == (2, 3, 3)


def test_acknowledgements_are_counted_by_syndrome(hook: Hook) -> None:
    for code in range(32):
        hook.run(
            packet(ACK, 5, syndrome=code),
            packet(ACK, 5, syndrome=RNR_SYNDROME | code),
            packet(ACK, 5, syndrome=NAK_SYNDROME | code),
        )
    flow = hook.flow()
    assert flow["kinds"][Kind.ACK] == 32
    assert flow["kinds"][Kind.NAK] == 64
    assert flow["rnr_naks"] == 32
    assert flow["naks"].tolist() == [1, 1, 1, 1, 1, 32 - int(NakCode.OTHER)]


def test_source_port_changes_are_counted(hook: Hook) -> None:
    ports = [50000, 50000, 50001, 50001, 50000]
    hook.run(*(packet(SEND_ONLY, psn, 4, sport=port) for psn, port in enumerate(ports)))
    flow = hook.flow()
    assert (flow["sport"], flow["sport_changes"]) == (50000, 2)


def test_tagged_packets_are_counted_with_their_tag(hook: Hook) -> None:
    frames = [
        roce(SEND_ONLY, b"data", psn=0, vlans=(0x6005,)),
        roce(SEND_ONLY, b"data", psn=1, vlans=(0x4006, 0x0007)),
        roce(SEND_ONLY, b"data", psn=2),
    ]
    hook.run(*frames)
    flow = hook.flow()
    assert (flow["vlan_packets"], flow["vlan_tci"]) == (2, 0x4006)
    assert flow["wire_bytes"] == sum(len(frame) for frame in frames)


def test_a_tag_beside_the_frame_counts_like_one_inside(packet_dtype: np.dtype) -> None:
    source = str(Path(__file__).with_name("tagged.c"))
    dataplane = Dataplane(compile_programs([source], ["stellar_tagged"]), MAX_FLOWS)
    fd = dataplane.load("stellar_tagged", PORT)
    frame = roce(SEND_ONLY, b"data")
    result = libbpf.test_run(fd, frame)
    assert result.retval == TC_ACT_UNSPEC
    raw = libbpf.map_lookup(dataplane.map_fds["flows"], flow_key(), layout.FLOW_STATS.itemsize)
    assert raw is not None
    flow = np.frombuffer(raw, layout.FLOW_STATS)[0]
    assert (flow["vlan_packets"], flow["vlan_tci"]) == (1, 0x6005)
    assert flow["wire_bytes"] == len(frame) + 4
    os.close(fd)
    dataplane.close()


def test_datagrams_tell_their_source_queue_pair(hook: Hook) -> None:
    hook.run(packet(UD_SEND_ONLY, 0, 4, source_qpn=0xABCDEF))
    assert hook.flow()["source_qpn"] == 0xABCDEF


@pytest.mark.parametrize("opcode", [SEND_FIRST, WRITE_MIDDLE, READ_FIRST, READ_MIDDLE])
@pytest.mark.parametrize("mtu", [256, 512, 1024, 2048])
def test_the_path_mtu_is_the_payload_of_a_first_or_middle_packet(
    opcode: Opcode, mtu: int, hook: Hook
) -> None:
    hook.run(packet(SEND_ONLY, 0, 100), packet(opcode, 1, mtu), packet(SEND_LAST, 2, 8))
    assert 1 << int(hook.flow()["pmtu_log2"]) == mtu


def test_only_packets_of_known_size_tell_the_path_mtu(hook: Hook) -> None:
    hook.run(packet(SEND_ONLY, 0, 1000), packet(CNP, 0), packet(ACK, 0))
    assert hook.flow()["pmtu_log2"] == 0


def test_a_cnp_in_front_does_not_decide_the_transport(hook: Hook) -> None:
    hook.run(packet(CNP, 0, becn=True))
    assert hook.flow()["transport"] == Transport.CNP
    hook.run(packet(SEND_ONLY, 3, 4), packet(CNP, 0, becn=True))
    assert hook.flow()["transport"] == Transport.RC
    assert hook.flow()["becn"] == 2


def test_times_are_the_monotonic_clock(hook: Hook) -> None:
    before = time.monotonic_ns()
    hook.run(packet(SEND_ONLY, 0, 4))
    between = time.monotonic_ns()
    hook.run(packet(SEND_ONLY, 1, 4))
    flow = hook.flow()
    assert before <= flow["first_ns"] <= between <= flow["last_ns"] <= time.monotonic_ns()


def test_flows_differ_by_each_part_of_their_key(hook: Hook) -> None:
    keys = {
        (V4[0], V4[1], 1),
        (V4[0], V4[1], 2),
        (V4[0], "10.0.0.3", 1),
        ("10.0.0.4", V4[1], 1),
        (V6[0], V6[1], 1),
        ("::ffff:10.0.0.9", V6[1], 1),
    }
    for src, dst, dqpn in keys:
        hook.run(packet(SEND_ONLY, 0, 4, src=src, dst=dst, dqpn=dqpn))
    found, stats = hook.flows()
    assert len(found) == len(keys)
    assert stats["packets"].tolist() == [1] * len(keys)


def test_directions_do_not_mix(xdp: Hook, egress: Hook) -> None:
    xdp.run(*[packet(SEND_ONLY, 0, 4)] * 3)
    egress.run(packet(SEND_ONLY, 100, 4))
    assert xdp.flow()["packets"] == 3
    assert egress.flow()["packets"] == 1
    assert egress.flow()["duplicates"] == 0
    assert xdp.reasons() == Counter({Reason.ROCE: 3})
    assert egress.reasons() == Counter({Reason.ROCE: 1})


@pytest.mark.parametrize("other", [0, PORT + 1, layout.MAX_PORTS - 1])
def test_ports_do_not_mix(other: int, xdp: Hook) -> None:
    neighbour = Hook(xdp.dataplane, XDP_INGRESS, xdp.packet_dtype, other)
    xdp.run(packet(SEND_ONLY, 0, 4))
    neighbour.run(*[packet(SEND_ONLY, 0, 4)] * 2, bytes(60))
    assert xdp.flow()["packets"] == 1
    assert neighbour.flow()["packets"] == 2
    assert xdp.reasons() == Counter({Reason.ROCE: 1})
    assert neighbour.reasons() == Counter({Reason.ROCE: 2, Reason.NOT_ROCE: 1})
    neighbour.close()


def test_a_full_table_passes_packets_and_says_so(hook: Hook) -> None:
    many = [packet(SEND_ONLY, 0, 4, dqpn=dqpn) for dqpn in range(2, MAX_FLOWS + 52)]
    assert hook.outcome(*many) == Counter({Reason.ROCE: MAX_FLOWS, Reason.FLOW_TABLE_FULL: 50})
    # Those that are in keep counting.
    assert hook.outcome(many[0], many[-1]) == Counter({Reason.ROCE: 1, Reason.FLOW_TABLE_FULL: 1})
    assert hook.flow(2)["packets"] == 2


def test_a_new_flow_sends_exactly_one_event(xdp: Hook, egress: Hook) -> None:
    records: list[bytes] = []
    ring = libbpf.RingBuffer(xdp.maps["events"], records.append)
    ring.consume()  # what earlier tests left
    records.clear()
    before = time.monotonic_ns()
    for psn in range(3):
        for dqpn in (0x11, 0x12):
            xdp.run(packet(SEND_ONLY, 500 + psn, 4, dqpn=dqpn))
        egress.run(packet(ACK, 500 + psn, dqpn=0x11))
    xdp.run(bytes(60))
    assert ring.consume() == 3
    ring.close()
    events = [np.frombuffer(record, layout.FLOW_EVENT)[0] for record in records]
    assert [event["key"].tobytes() for event in events] == [
        flow_key(0x11),
        flow_key(0x12),
        flow_key(0x11, direction=Direction.EGRESS),
    ]
    assert [int(event["psn"]) for event in events] == [500] * 3
    assert [int(event["opcode"]) for event in events] == [SEND_ONLY.value, SEND_ONLY.value, 0x11]
    assert all(before <= event["first_ns"] <= time.monotonic_ns() for event in events)


def test_a_full_ring_loses_events_but_no_flow(xdp: Hook) -> None:
    ring = libbpf.RingBuffer(xdp.maps["events"], lambda _: None)
    ring.consume()
    # A record has a header of 8 bytes.
    capacity = libbpf.map_info(xdp.maps["events"]).max_entries // (8 + layout.FLOW_EVENT.itemsize)
    frame, key = packet(SEND_ONLY, 0, 4), flow_key()
    for _ in range(capacity + 100):
        xdp.run(frame)
        assert libbpf.map_delete(xdp.maps["flows"], key)
    assert xdp.reasons() == Counter({Reason.ROCE: capacity + 100})
    assert capacity - 1 <= ring.consume() <= capacity
    ring.close()


def test_counters_stay_exact_when_two_cpus_serve_one_flow(xdp: Hook) -> None:
    repeat = 20000
    frame = packet(SEND_ONLY, 9, 64, tos=3, becn=True)

    def work() -> None:
        libbpf.test_run(xdp.fd, frame, repeat=repeat, data_out_bytes=0)

    on_every_cpu(work, times=4)
    flow = xdp.flow()
    total = 4 * repeat
    for member in ("packets", "becn"):
        assert flow[member] == total, member
    assert flow["wire_bytes"] == total * len(frame)
    assert flow["payload_bytes"] == total * 64
    assert flow["ecn"].tolist() == [0, 0, 0, total]
    # One of them was first; all others were seen before.
    assert (flow["messages"], flow["duplicates"]) == (1, total - 1)
    assert xdp.reasons() == Counter({Reason.ROCE: total})


def test_only_one_of_many_cpus_announces_a_flow(xdp: Hook) -> None:
    records: list[bytes] = []
    ring = libbpf.RingBuffer(xdp.maps["events"], records.append)
    ring.consume()
    records.clear()

    def work() -> None:
        for dqpn in range(2, 302):
            libbpf.test_run(xdp.fd, packet(SEND_ONLY, 0, 4, dqpn=dqpn), data_out_bytes=0)

    on_every_cpu(work)
    ring.consume()
    ring.close()
    assert len(records) == len(set(records)) == 300
    assert xdp.flows()[1]["packets"].tolist() == [2] * 300


def test_both_directions_at_once_stay_exact(xdp: Hook, egress: Hook) -> None:
    repeat = 10000
    xdp.write_pair(0x11, 0x22)
    egress.write_pair(0x22, 0x11, V4[1], V4[0])
    data = packet(SEND_ONLY, 5, 64, ack_req=True)
    answer = packet(ACK, 5, dqpn=0x22, src=V4[1], dst=V4[0])
    xdp.run(data)
    turns = [(xdp.fd, data), (egress.fd, answer)]

    def work() -> None:
        fd, frame = turns.pop()
        libbpf.test_run(fd, frame, repeat=repeat, data_out_bytes=0)

    on_every_cpu(work)
    assert xdp.flow()["packets"] == repeat + 1
    assert egress.flow(0x22, V4[1], V4[0])["kinds"][Kind.ACK] == repeat


def test_replay_takes_time_and_length_from_the_capture(replay: Replay) -> None:
    frame = packet(SEND_MIDDLE, 0, 1024)
    replay.run_at(1_000_000, frame)
    replay.run_at(5_000_000, packet(SEND_MIDDLE, 1, 1024)[:128], wire_len=len(frame))
    flow = replay.flow()
    assert (flow["first_ns"], flow["last_ns"]) == (1_000_000, 5_000_000)
    assert flow["payload_bytes"] == 2048
    assert flow["wire_bytes"] == 2 * len(frame)
    assert (flow["cut_packets"], flow["packets"]) == (0, 2)


def test_replay_reports_frames_that_a_capture_cut(replay: Replay) -> None:
    frame = packet(SEND_MIDDLE, 0, 1024)
    replay.run_at(1, frame[:200])
    assert replay.flow()["cut_packets"] == 1
    assert replay.flow()["payload_bytes"] == 1024
    # Without its transport headers a frame cannot be accounted.
    replay.run_at(2, frame[:53])
    assert replay.reasons() == Counter({Reason.ROCE: 1, Reason.TRUNCATED: 1})


def test_a_program_that_is_loaded_twice_shares_the_maps(xdp: Hook) -> None:
    again = Hook(xdp.dataplane, TC_EGRESS, xdp.packet_dtype)
    again.run(packet(SEND_ONLY, 0, 4))
    assert again.flow()["packets"] == 1
    again.close()
