"""How far a job is in its iteration: payload sent for the first time since the last pause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from controller.agent import maps
from controller.dataplane import layout, libbpf
from controller.dataplane.layout import Direction
from controller.dataplane.loader import TC_EGRESS
from controller.priority.jobs import JobPlan
from tests.acting import JOB, Acting, START_ns
from tests.bpf.test_observe import on_every_cpu
from tests.hook import Hook, flow_key
from tests.packets import (
    ACK,
    BY_NAME,
    CNP,
    READ_FIRST,
    READ_LAST,
    READ_MIDDLE,
    READ_REQUEST,
    SEND_ONLY,
    V4,
    packet,
)

MS, S = 1_000_000, 1_000_000_000
GAP_ns = 3 * MS
UD_SEND_ONLY = BY_NAME["UD_SEND_ONLY"]
OTHER_JOB, OTHER_SLOT, OTHER_PORT = 9, 6, 4
PLAN = JobPlan("train", 1 << 30, START_ns, START_ns + S, START_ns + 60 * S, 0, 0)


@pytest.fixture
def flow(acting: Acting) -> Acting:
    """A flow of a job."""
    acting.port()
    acting.job()
    acting.assign()
    return acting


class Sender:
    """Sends one-packet messages of 4 bytes, numbered."""

    def __init__(self, acting: Acting) -> None:
        self.acting = acting
        self.psn = 0

    def send(self, now_ns: int) -> None:
        """A packet now."""
        self.acting.at(now_ns)
        self.acting.send(packet(SEND_ONLY, self.psn, 4))
        self.psn += 1


@pytest.fixture
def events(flow: Acting) -> Iterator[Callable[[], list[np.void]]]:
    """Starts of iterations that were reported since the last call."""
    records: list[bytes] = []
    ring = libbpf.RingBuffer(flow.fds["events"], records.append)
    ring.consume()  # of earlier tests
    records.clear()

    def read() -> list[np.void]:
        ring.consume()
        size = layout.ITERATION_EVENT.itemsize
        found = [np.frombuffer(raw, layout.ITERATION_EVENT)[0] for raw in records
                 if len(raw) == size]  # fmt: skip
        records.clear()
        return found

    assert layout.ITERATION_EVENT.itemsize != layout.FLOW_EVENT.itemsize
    yield read
    ring.close()


def test_a_pause_above_the_gap_begins_an_iteration_and_reports_the_one_before(
    flow: Acting, events: Callable[[], list[np.void]]
) -> None:
    flow.job(gap_ns=GAP_ns)
    sender = Sender(flow)
    # The first packet ever begins the first one.
    sender.send(START_ns)
    assert [event.tolist() for event in events()] == [(JOB, 1, START_ns, 0, 0, 0)]
    # Not above the gap.
    sender.send(START_ns + GAP_ns)
    sender.send(START_ns + 2 * GAP_ns)
    assert not events()
    assert flow.progress().tolist() == (0, 1, START_ns, START_ns + 2 * GAP_ns, 12)
    second = START_ns + 3 * GAP_ns + 1
    sender.send(second)
    expected = (JOB, 2, second, START_ns, START_ns + 2 * GAP_ns, 12)
    assert [event.tolist() for event in events()] == [expected]
    assert flow.progress().tolist() == (0, 2, second, second, 4)
    sender.send(second + 1)
    assert not events()


def test_without_a_gap_there_are_no_iterations(
    flow: Acting, events: Callable[[], list[np.void]]
) -> None:
    sender = Sender(flow)
    for number in range(3):
        sender.send(START_ns + number * 100 * S)
    assert not events()
    assert flow.progress().tolist() == (0, 0, 0, START_ns + 200 * S, 12)


def test_the_gap_of_a_plan_stands_in_for_that_of_the_job(flow: Acting) -> None:
    flow.job(gap_ns=GAP_ns)
    sender = Sender(flow)
    sender.send(START_ns)
    maps.write_plan(flow.fds, JOB, replace(PLAN, gap_ns=10 * GAP_ns))
    sender.send(START_ns + 10 * GAP_ns)
    assert flow.progress()["iteration"] == 1
    maps.write_plan(flow.fds, JOB, replace(PLAN, gap_ns=0))
    sender.send(START_ns + 11 * GAP_ns + 1)
    assert flow.progress()["iteration"] == 2


@pytest.mark.parametrize(
    ("psns", "counted"),
    [
        ((0, 1, 2, 3), 4),
        ((0, 1, 2, 1, 2, 3), 4),  # go-back-N
        ((0, 1, 1, 1), 2),
        ((0, 1, 4, 5), 4),
        ((0, 1, 4, 2, 3, 5), 6),  # late, and seen once each
        ((0, 1, 4, 2, 2, 3, 4, 5), 6),
        ((0xFFFFFE, 0xFFFFFF, 0, 0xFFFFFF, 0, 1), 4),
    ],
)
def test_payload_is_counted_the_first_time_it_is_sent(
    psns: tuple[int, ...], counted: int, flow: Acting
) -> None:
    for psn in psns:
        flow.send(packet(SEND_ONLY, psn, 100))
    assert flow.progress()["bytes"] == 100 * counted
    assert flow.control()["packets"] == len(psns)


def test_a_pause_that_a_retransmission_ends_is_a_loss_and_no_iteration(
    flow: Acting, events: Callable[[], list[np.void]]
) -> None:
    flow.job(gap_ns=GAP_ns)
    for psn in range(4):
        flow.send(packet(SEND_ONLY, psn, 4))
    assert len(events()) == 1
    flow.at(START_ns + 2 * GAP_ns)
    flow.send(packet(SEND_ONLY, 2, 4))
    flow.send(packet(SEND_ONLY, 3, 4))
    flow.at(START_ns + 3 * GAP_ns)
    flow.send(packet(SEND_ONLY, 4, 4))
    assert not events()
    assert flow.progress().tolist() == (0, 1, START_ns, START_ns + 3 * GAP_ns, 20)


def test_read_responses_count_and_what_carries_no_data_does_not(flow: Acting) -> None:
    for psn, opcode in enumerate((READ_FIRST, READ_MIDDLE, READ_LAST)):
        flow.send(packet(opcode, psn, 1024))
    assert flow.progress()["bytes"] == 3 * 1024
    flow.send(packet(READ_REQUEST, 0, dma_length=1 << 20))
    flow.send(packet(BY_NAME["RC_FETCH_ADD"], 256))
    assert flow.progress()["bytes"] == 3 * 1024
    assert flow.control()["packets"] == 5


def test_answers_and_what_arrives_keep_no_iteration_going(flow: Acting) -> None:
    flow.job(gap_ns=GAP_ns)
    sender = Sender(flow)
    sender.send(START_ns)
    flow.at(START_ns + GAP_ns)
    for opcode in (ACK, CNP, BY_NAME["RC_ATOMIC_ACKNOWLEDGE"]):
        flow.send(packet(opcode, 0))
    flow.receive(packet(SEND_ONLY, 0, 4, src=V4[1], dst=V4[0]))
    assert flow.progress().tolist() == (0, 1, START_ns, START_ns, 4)
    sender.send(START_ns + GAP_ns + 1)
    assert flow.progress()["iteration"] == 2


def test_flows_of_one_job_add_up_whatever_their_port(flow: Acting) -> None:
    flow.assign(dqpn=0x12, slot=OTHER_SLOT)
    flow.assign(dqpn=0x13, slot=OTHER_SLOT + 1, job=OTHER_JOB)
    flow.job(job=OTHER_JOB)
    other_port = Hook(flow.dataplane, TC_EGRESS, flow.egress.packet_dtype, OTHER_PORT, acts=True)
    key = flow_key(0x14, direction=Direction.EGRESS, port=OTHER_PORT)
    maps.write_control(flow.fds, OTHER_SLOT + 2, JOB)
    maps.assign(flow.fds, key, OTHER_SLOT + 2)
    maps.begin_epoch(flow.fds)
    for dqpn, size in ((0x11, 100), (0x12, 20), (0x13, 3)):
        flow.send(packet(SEND_ONLY, 0, size, dqpn=dqpn))
    flow.run_program(other_port.fd, packet(SEND_ONLY, 0, 1000, dqpn=0x14))
    other_port.close()
    assert flow.progress()["bytes"] == 1120
    assert flow.progress(OTHER_JOB)["bytes"] == 3


def test_bytes_are_exact_and_an_iteration_begins_once_when_cpus_share_a_job(
    flow: Acting, events: Callable[[], list[np.void]]
) -> None:
    flow.job(gap_ns=GAP_ns)
    frame, repeat, rounds = packet(UD_SEND_ONLY, 0, 100), 200, 20

    def send() -> None:
        libbpf.test_run(flow.egress.fd, frame, repeat=repeat)

    for number in range(rounds):
        flow.at(START_ns + number * (GAP_ns + 1))
        on_every_cpu(send)
    starts = events()
    assert [int(event["iteration"]) for event in starts] == list(range(1, rounds + 1))
    # Both may find the pause at the same moment: then one packet counts for the one before.
    total = sum(int(event["previous_bytes"]) for event in starts) + int(flow.progress()["bytes"])
    assert total == pytest.approx(2 * rounds * repeat * 100, abs=rounds * 100)
    assert flow.control()["packets"] == 2 * rounds * repeat
