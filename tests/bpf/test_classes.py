"""Which class a packet gets: when a flow may change it, and where its answers travel."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from controller.agent import maps
from controller.dataplane.layout import CLASS_UNSET, Act, Direction, PortFlag
from tests.acting import DSCPS, Acting, Sent
from tests.hook import TC_ACT_UNSPEC, flow_key
from tests.packets import (
    ACK,
    BY_NAME,
    CNP,
    NAK_SYNDROME,
    OPCODES,
    READ_FIRST,
    READ_LAST,
    READ_MIDDLE,
    READ_ONLY,
    READ_REQUEST,
    RNR_SYNDROME,
    SEND_FIRST,
    SEND_LAST,
    SEND_MIDDLE,
    SEND_ONLY,
    V4,
    WRITE_FIRST,
    WRITE_LAST,
    WRITE_MIDDLE,
    Opcode,
    packet,
)

MTU = 1024
TOP = 7
ATOMIC_ACK = BY_NAME["RC_ATOMIC_ACKNOWLEDGE"]
UD_SEND_ONLY = BY_NAME["UD_SEND_ONLY"]
FOREIGN = 0x7C  # traffic class with a DSCP that no class has, Not-ECT
# Packets that begin a message, by the ends of their opcodes' names.
BEGINS = ("FIRST", "ONLY", "READ_REQUEST", "COMPARE_SWAP", "FETCH_ADD", "FLUSH", "ATOMIC_WRITE")


def begins(opcode: Opcode) -> bool:
    return opcode.name.split("_WITH_")[0].endswith(BEGINS)


def is_answer(opcode: Opcode) -> bool:
    return opcode.kind in ("ACK", "NAK", "CNP", "ATOMIC_ACK")


def frame_of(opcode: Opcode, psn: int, **arguments: int) -> bytes:
    payload = MTU if "FIRST" in opcode.name or "MIDDLE" in opcode.name else 4
    return packet(opcode, psn, payload if opcode.payload else 0, tos=FOREIGN, **arguments)


def class_of(sent: Sent) -> int | None:
    """Class by DSCP and priority, which have to agree; None when both are as they were."""
    dscp, priority = sent.frame[15] >> 2, sent.priority
    if (dscp, priority) == (FOREIGN >> 2, 0):
        return None
    assert DSCPS[priority - 8] == dscp
    return priority - 8


@pytest.fixture
def flow(acting: Acting) -> Acting:
    """A flow of a job in class 3 that has sent nothing yet."""
    acting.port()
    acting.job(class_default=3)
    acting.assign()
    return acting


@pytest.mark.parametrize("opcode", OPCODES, ids=lambda opcode: opcode.name)
def test_a_flow_is_in_no_class_until_a_message_begins(opcode: Opcode, flow: Acting) -> None:
    expected = TOP if is_answer(opcode) else 3 if begins(opcode) else None
    assert class_of(flow.send(frame_of(opcode, 0))) == expected
    assert flow.control()["class"] == (3 if expected == 3 else CLASS_UNSET)
    assert flow.control()["packets"] == (not is_answer(opcode))
    assert flow.control()["class_packets"].sum() == (expected == 3)
    assert flow.acts() == ({Act.CLASSED: 1, Act.REWRITTEN: 1} if expected is not None else {})


@pytest.mark.parametrize("opcode", OPCODES, ids=lambda opcode: opcode.name)
def test_a_flow_changes_its_class_where_a_message_begins(opcode: Opcode, flow: Acting) -> None:
    flow.send(frame_of(SEND_ONLY, 0))
    for number, changes in ((5, 1), (1, 2)):
        flow.job(class_default=number)
        before = flow.control()["class"]
        expected = TOP if is_answer(opcode) else number if begins(opcode) else before
        if "READ_RESPONSE" not in opcode.name:
            flow.egress.forget()  # its answers would stay with READ responses
        assert class_of(flow.send(frame_of(opcode, number))) == expected
        assert flow.control()["class"] == (number if begins(opcode) else before)
        assert flow.control()["class_changes"] == (changes if begins(opcode) else 0)


WRITES = (WRITE_FIRST, WRITE_MIDDLE, WRITE_MIDDLE, WRITE_LAST)


@pytest.mark.parametrize(
    "message",
    [
        WRITES,
        (SEND_FIRST, SEND_MIDDLE, SEND_LAST),
        (READ_FIRST, READ_MIDDLE, READ_LAST),
        (READ_FIRST, READ_LAST),
        tuple(BY_NAME[f"UC_RDMA_WRITE_{part}"] for part in ("FIRST", "MIDDLE", "LAST")),
        tuple(BY_NAME[f"XRC_SEND_{part}"] for part in ("FIRST", "MIDDLE", "LAST")),
    ],
    ids=lambda message: message[0].name,
)
@pytest.mark.parametrize("changed_at", [1, 2])
def test_a_message_ends_in_the_class_in_which_it_began(
    message: tuple[Opcode, ...], changed_at: int, flow: Acting
) -> None:
    seen = []
    for psn, opcode in enumerate((*message, *message)):
        if psn == changed_at:
            flow.job(class_default=6)
        seen.append(class_of(flow.send(frame_of(opcode, psn))))
    assert seen == [3] * len(message) + [6] * len(message)
    assert flow.control()["class_changes"] == 1


def test_the_rest_of_a_half_seen_message_is_left_as_it_was(flow: Acting) -> None:
    for psn, opcode in enumerate((WRITE_MIDDLE, WRITE_MIDDLE, WRITE_LAST)):
        frame = frame_of(opcode, psn)
        assert flow.send(frame, 5, 777) == Sent(TC_ACT_UNSPEC, frame, 5, 777)
    assert not flow.acts()
    assert class_of(flow.send(frame_of(WRITE_FIRST, 3))) == 3


def test_each_class_has_its_own_dscp_and_priority_and_is_counted(flow: Acting) -> None:
    for number in range(8):
        flow.job(class_default=number)
        assert class_of(flow.send(frame_of(SEND_ONLY, number))) == number
    assert flow.control()["class_packets"].tolist() == [1] * 8
    assert flow.acts() == {Act.CLASSED: 8, Act.REWRITTEN: 8}


def test_a_packet_that_has_its_dscp_already_is_not_counted_as_rewritten(flow: Acting) -> None:
    frame = packet(SEND_ONLY, 0, 4, tos=DSCPS[3] << 2 | 2)
    assert flow.send(frame) == Sent(TC_ACT_UNSPEC, frame, 8 + 3, 0)
    assert flow.acts() == {Act.CLASSED: 1}


@pytest.mark.parametrize("number", range(8))
def test_on_an_htb_tree_the_priority_is_the_leaf(number: int, flow: Acting) -> None:
    base = 0x57E1_0010
    flow.port(priority_base=base)
    flow.job(class_default=number)
    assert flow.send(frame_of(SEND_ONLY, 0)).priority == base + number
    assert flow.send(frame_of(ACK, 0)).priority == base + TOP


# ---- changes of assignments ----


def test_a_flow_gets_its_job_and_loses_it_with_its_next_packet(acting: Acting) -> None:
    acting.port()
    acting.job(class_default=3)
    frame = frame_of(SEND_ONLY, 0)
    assert class_of(acting.send(frame)) is None
    acting.assign()
    assert class_of(acting.send(frame)) == 3
    maps.unassign(acting.fds, flow_key(direction=Direction.EGRESS))
    assert class_of(acting.send(frame)) == 3, "not before the epoch changes"
    maps.begin_epoch(acting.fds)
    assert class_of(acting.send(frame)) is None


def test_a_slot_without_a_job_changes_nothing(acting: Acting) -> None:
    acting.port()
    acting.job(class_default=3)
    acting.assign(job=0)
    assert class_of(acting.send(frame_of(SEND_ONLY, 0))) is None
    assert not acting.acts()


# ---- raise_drained ----


@dataclass(frozen=True)
class Drained:
    """Packets sent and an ACK for them; does the flow rise with the next packet?"""

    description: str
    before: tuple[tuple[Opcode, int], ...]
    acked: int | None
    then: Opcode
    psn: int
    rises: bool


DRAINED = [
    Drained("nothing is acknowledged", ((SEND_ONLY, 7),), None, SEND_ONLY, 8, False),
    Drained("nothing is acknowledged, PSN 1", ((SEND_ONLY, 0),), None, SEND_ONLY, 1, False),
    Drained("all is acknowledged", ((SEND_ONLY, 7), (SEND_ONLY, 8)), 8, SEND_ONLY, 9, True),
    Drained("one lacks its ACK", ((SEND_ONLY, 7), (SEND_ONLY, 8)), 7, SEND_ONLY, 9, False),
    Drained("across the end of the PSNs", ((SEND_ONLY, 0xFFFFFF),), 0xFFFFFF, SEND_ONLY, 0, True),
    Drained("a READ request", ((SEND_ONLY, 7),), 7, READ_REQUEST, 8, True),
    Drained("a READ request behind what lacks its ACK", ((SEND_ONLY, 7),), 6, READ_REQUEST, 8,
            False),
    # What nobody acknowledges never lacks an ACK.
    Drained("READ responses alone", ((READ_ONLY, 50),), None, READ_ONLY, 51, True),
    Drained("READ responses beside requests", ((SEND_ONLY, 7), (READ_ONLY, 50)), None, READ_ONLY,
            51, False),
    Drained("READ responses beside acknowledged requests", ((SEND_ONLY, 7), (READ_ONLY, 50)), 7,
            READ_ONLY, 51, True),
    Drained("datagrams", ((UD_SEND_ONLY, 7),), None, UD_SEND_ONLY, 8, True),
    Drained("unreliable connection", ((BY_NAME["UC_SEND_ONLY"], 7),), None,
            BY_NAME["UC_SEND_ONLY"], 8, True),
]  # fmt: skip


@pytest.mark.parametrize("row", DRAINED, ids=lambda row: row.description)
def test_a_flow_rises_only_when_nothing_it_sent_lacks_its_acknowledgement(
    row: Drained, flow: Acting
) -> None:
    maps.write_laxity(flow.fds, [0] * 7, [0] * 7, drained=True)
    flow.egress.write_pair(0x11, 0x22)
    for opcode, psn in row.before:
        assert class_of(flow.send(frame_of(opcode, psn))) == 3
    if row.acked is not None:
        ack = packet(ACK, row.acked, dqpn=0x22, src=V4[1], dst=V4[0])
        flow.tc_ingress.write_pair(0x22, 0x11, V4[1], V4[0])
        flow.receive(ack)
    flow.job(class_default=5)
    assert class_of(flow.send(frame_of(row.then, row.psn))) == (5 if row.rises else 3)
    # Down it may go at any time: it overtakes nobody.
    flow.job(class_default=1)
    assert class_of(flow.send(frame_of(row.then, row.psn + 1))) == 1
    maps.write_laxity(flow.fds, [0] * 7, [0] * 7, drained=False)
    flow.job(class_default=6)
    assert class_of(flow.send(frame_of(row.then, row.psn + 2))) == 6


def test_the_first_class_of_a_flow_asks_for_no_acknowledgement(flow: Acting) -> None:
    maps.write_laxity(flow.fds, [0] * 7, [0] * 7, drained=True)
    flow.send(frame_of(WRITE_LAST, 7))
    assert class_of(flow.send(frame_of(SEND_ONLY, 8))) == 3


# ---- BY_DSCP ----


def test_a_forwarder_takes_the_class_from_the_dscp(flow: Acting) -> None:
    flow.port(PortFlag.BY_DSCP)
    for number, dscp in enumerate(DSCPS):
        for psn, opcode in enumerate((WRITE_MIDDLE, SEND_ONLY)):
            frame = packet(opcode, psn, 4, tos=dscp << 2 | 1)
            assert flow.send(frame) == Sent(TC_ACT_UNSPEC, frame, 8 + number, 0)
    assert flow.control()["class_packets"].tolist() == [2] * 8
    assert flow.control()["class"] == CLASS_UNSET
    assert flow.acts() == {Act.CLASSED: 16}


def test_on_a_forwarder_a_dscp_of_no_class_gets_that_of_the_job(flow: Acting) -> None:
    flow.port(PortFlag.BY_DSCP)
    others = [dscp for dscp in range(64) if dscp not in DSCPS]
    for psn, dscp in enumerate(others):
        sent = flow.send(packet(SEND_ONLY, psn, 4, tos=dscp << 2))
        assert (sent.frame[15] >> 2, sent.priority) == (DSCPS[3], 8 + 3)
    assert flow.acts()[Act.REWRITTEN] == len(others) == 56


# ---- answers ----

ANSWERS = {
    "ACK": (ACK, 0x1F),
    "ACK with credits": (ACK, 0x05),
    "NAK": (ACK, NAK_SYNDROME),
    "RNR NAK": (ACK, RNR_SYNDROME | 14),
    "atomic ACK": (ATOMIC_ACK, 0x1F),
    "CNP": (CNP, 0x1F),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_travel_in_the_top_class_whatever_the_flow_is_in(name: str, flow: Acting) -> None:
    opcode, syndrome = ANSWERS[name]
    for psn in range(2):
        assert class_of(flow.send(frame_of(opcode, psn, syndrome=syndrome))) == TOP
        flow.send(frame_of(SEND_ONLY, 0))
    assert flow.control()["class"] == 3
    assert flow.control()["packets"] == 2  # of data
    assert flow.progress()["bytes"] == 4


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_stay_with_the_read_responses_of_their_queue_pair(name: str, flow: Acting) -> None:
    """One that overtakes a READ response tells the requester that the response is lost."""
    opcode, syndrome = ANSWERS[name]
    expected = TOP if opcode is CNP else 3
    flow.send(frame_of(READ_FIRST, 0))
    assert class_of(flow.send(frame_of(opcode, 7, syndrome=syndrome))) == expected
    flow.job(class_default=5)
    assert class_of(flow.send(frame_of(opcode, 8, syndrome=syndrome))) == expected
    flow.send(frame_of(READ_LAST, 1))
    flow.send(frame_of(READ_ONLY, 2))
    expected = TOP if opcode is CNP else 5
    assert class_of(flow.send(frame_of(opcode, 9, syndrome=syndrome))) == expected


def test_beside_half_seen_read_responses_an_ack_is_left_as_it_was(flow: Acting) -> None:
    flow.send(frame_of(READ_MIDDLE, 1))
    frame = frame_of(ACK, 2)
    assert flow.send(frame, 5, 777) == Sent(TC_ACT_UNSPEC, frame, 5, 777)


def test_answers_take_their_part_of_the_port_in_the_marker(flow: Acting) -> None:
    flow.port(PortFlag.MARK)
    frames = [frame_of(ACK, 0), frame_of(CNP, 0), frame_of(SEND_ONLY, 0)]
    for frame in frames:
        flow.send(frame)
    other = frame_of(SEND_ONLY, 0, dqpn=0x99)  # of no job
    flow.send(other)
    assert flow.marker()["arrived"] == sum(len(frame) for frame in (*frames, other))
    assert flow.marker(3)["arrived"] == len(frames[-1])


def test_what_is_counted_on_one_port_is_of_that_port(flow: Acting) -> None:
    flow.send(frame_of(SEND_ONLY, 0))
    for port in range(64):
        expected = Counter({Act.CLASSED: 1, Act.REWRITTEN: 1}) if port == 3 else Counter()
        assert Counter(maps.read_acts(flow.fds, port)) == expected
