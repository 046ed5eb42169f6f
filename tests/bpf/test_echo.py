"""Notification point: who is told of marks, when, and by what; CNPs that arrive.

Real CNPs need a real interface: tests/netns/test_cnp.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from controller.agent import maps
from controller.dataplane.layout import Act, Kind, PortFlag
from controller.dataplane.loader import TC_INGRESS, XDP_INGRESS
from tests.acting import DSCPS, Acting, START_ns
from tests.hook import TC_ACT_UNSPEC, XDP_PASS
from tests.packets import (
    ACK,
    BY_NAME,
    CNP,
    NAK_SYNDROME,
    SEND_ONLY,
    V4,
    V6,
    roce,
)

XDP_DROP = 1
TC_ACT_SHOT = 2
CE = 3
INTERVAL_ns = 50_000
# The peer's queue pair sends to ours, and is sent our ACKs.
OUR_QPN, PEER_QPN = 0x22, 0x11
TOP_TOS = DSCPS[7] << 2


class Receiver:
    """A host that is sent marked data and answers it; hooks and addresses as given."""

    def __init__(self, acting: Acting, ingress: str, addresses: tuple[str, str]) -> None:
        self.acting = acting
        self.ingress = ingress
        self.here, self.there = addresses
        acting.job(class_default=4)
        acting.assign(PEER_QPN, self.here, self.there)
        acting.egress.write_pair(PEER_QPN, OUR_QPN, self.here, self.there)
        acting.port(PortFlag.ECHO_BECN, echo_interval_ns=INTERVAL_ns)

    def arrives(self, frame: bytes) -> int:
        """One frame through the ingress hook; returns the verdict."""
        if self.ingress == XDP_INGRESS:
            return self.acting.receive_xdp(frame)
        sent = self.acting.receive(frame)
        assert sent.frame == frame
        return sent.verdict

    def data(self, ecn: int = CE, **arguments: Any) -> None:
        """Data from the peer, on its way for no longer than this test looks."""
        arguments = {"psn": 7, "dqpn": OUR_QPN, **arguments}
        frame = roce(SEND_ONLY, bytes(64), src=self.there, dst=self.here, tos=ecn, **arguments)
        assert self.arrives(frame) == self.passes

    @property
    def passes(self) -> int:
        return XDP_PASS if self.ingress == XDP_INGRESS else TC_ACT_UNSPEC

    def ack_frame(self, becn: bool = False, opcode: Any = ACK, **arguments: Any) -> bytes:
        arguments = {
            "psn": 3, "dqpn": PEER_QPN, "src": self.here, "dst": self.there, "tos": TOP_TOS,
            **arguments,
        }  # fmt: skip
        return roce(opcode, becn=becn, **arguments)

    def tells(self, **arguments: Any) -> bool:
        """Send an ACK: whether it tells of marks. All else of it has to stay as it was."""
        sent = self.acting.send(self.ack_frame(**arguments))
        assert sent.verdict == TC_ACT_UNSPEC
        told = sent.frame == self.ack_frame(becn=True, **arguments)
        assert told or sent.frame == self.ack_frame(**arguments)
        return told


@pytest.fixture
def receiver(acting: Acting) -> Receiver:
    return Receiver(acting, XDP_INGRESS, V4)


@pytest.mark.parametrize("vlans", [(), (5,), (5, 6)], ids=["untagged", "tag", "two-tags"])
@pytest.mark.parametrize("addresses", [V4, V6], ids=["ipv4", "ipv6"])
@pytest.mark.parametrize("ingress", [XDP_INGRESS, TC_INGRESS])
def test_the_next_ack_tells_of_marked_data(
    acting: Acting, ingress: str, addresses: tuple[str, str], vlans: tuple[int, ...]
) -> None:
    """As scapy builds it with BECN: ICRC and checksums are right, and nothing else differs."""
    receiver = Receiver(acting, ingress, addresses)
    receiver.data(ecn=2, vlans=vlans)
    assert not receiver.tells(vlans=vlans)
    receiver.data(vlans=vlans)
    assert receiver.tells(vlans=vlans)
    assert acting.acts()[Act.ECHO_BECN] == 1
    assert acting.acts()[Act.ECHO_FAILED] == acting.acts()[Act.ECHO_CNP] == 0


@pytest.mark.parametrize("addresses", [V4, V6], ids=["ipv4", "ipv6"])
def test_a_filled_in_udp_checksum_is_mended(acting: Acting, addresses: tuple[str, str]) -> None:
    receiver = Receiver(acting, XDP_INGRESS, addresses)
    receiver.data()
    # None: scapy computes it, for both the frame that goes in and the one expected
    assert receiver.tells(udp={"chksum": None})


def test_an_ack_in_a_lower_class_gets_class_and_becn_at_once(receiver: Receiver) -> None:
    receiver.data()
    sent = receiver.acting.send(receiver.ack_frame(tos=0))
    assert sent.frame == receiver.ack_frame(becn=True, tos=TOP_TOS)
    assert sent.priority == 8 + 7


def test_an_ack_that_has_becn_keeps_it(receiver: Receiver) -> None:
    receiver.data()
    frame = receiver.ack_frame(becn=True)
    assert receiver.acting.send(frame).frame == frame


def test_marks_are_told_once(receiver: Receiver) -> None:
    for _ in range(5):
        receiver.data()
    assert receiver.tells()
    receiver.acting.at(START_ns + 10 * INTERVAL_ns)
    assert not receiver.tells()
    receiver.data(ecn=2)  # not marked
    assert not receiver.tells()


def test_marks_are_told_at_most_once_an_interval(receiver: Receiver) -> None:
    start_ns = START_ns
    receiver.data()
    assert receiver.tells()
    for offset_ns, told in (
        (0, False), (1, False), (INTERVAL_ns - 1, False), (INTERVAL_ns, True),
        (INTERVAL_ns + 1, False), (2 * INTERVAL_ns - 1, False), (2 * INTERVAL_ns, True),
        (7 * INTERVAL_ns + 3, True), (8 * INTERVAL_ns + 2, False), (8 * INTERVAL_ns + 3, True),
    ):  # fmt: skip
        receiver.acting.at(start_ns + offset_ns)
        receiver.data()
        assert receiver.tells() == told, offset_ns
    assert receiver.acting.acts()[Act.ECHO_BECN] == 5
    flow = receiver.acting.xdp.flow(OUR_QPN, receiver.there, receiver.here)
    assert flow["echoes"] == 5


def test_marks_within_an_interval_are_told_after_it_without_further_ones(
    receiver: Receiver,
) -> None:
    receiver.data()
    assert receiver.tells()
    receiver.data()
    assert not receiver.tells()
    receiver.acting.at(START_ns + INTERVAL_ns)
    assert receiver.tells()


def test_each_flow_has_an_interval_of_its_own(receiver: Receiver) -> None:
    acting = receiver.acting
    acting.assign(PEER_QPN + 1, receiver.here, receiver.there, slot=9)
    acting.egress.write_pair(PEER_QPN + 1, OUR_QPN + 1, receiver.here, receiver.there)
    receiver.data()
    # Of another pair, to which nothing marked has come.
    assert not receiver.tells(dqpn=PEER_QPN + 1)
    receiver.data(dqpn=OUR_QPN + 1)
    assert receiver.tells()
    assert receiver.tells(dqpn=PEER_QPN + 1)
    assert acting.acts()[Act.ECHO_BECN] == 2


def test_without_a_known_pair_nobody_is_told(receiver: Receiver) -> None:
    acting = receiver.acting
    acting.assign(PEER_QPN + 1, receiver.here, receiver.there, slot=9)
    receiver.data(dqpn=OUR_QPN + 1)
    assert not receiver.tells(dqpn=PEER_QPN + 1)


def test_a_pair_inferred_from_a_psn_is_enough(receiver: Receiver) -> None:
    acting = receiver.acting
    acting.assign(PEER_QPN + 1, receiver.here, receiver.there, slot=9)
    receiver.data(dqpn=OUR_QPN + 1, psn=77, ack_req=True)
    assert receiver.tells(dqpn=PEER_QPN + 1, psn=77)


def test_a_flow_of_no_job_is_left_as_it_was(receiver: Receiver) -> None:
    acting = receiver.acting
    acting.egress.write_pair(PEER_QPN + 1, OUR_QPN + 1, receiver.here, receiver.there)
    receiver.data(dqpn=OUR_QPN + 1)
    frame = receiver.ack_frame(dqpn=PEER_QPN + 1, tos=0)
    sent = acting.send(frame, priority=3)
    assert (sent.frame, sent.priority) == (frame, 3)
    assert not acting.acts()


def test_a_nak_tells_nothing_and_the_ack_behind_it_does(receiver: Receiver) -> None:
    """A NAK makes the sender stop and go back; what it did about marks was not heard yet."""
    receiver.data()
    assert not receiver.tells(syndrome=NAK_SYNDROME)
    assert receiver.tells()


def test_nobody_is_told_where_the_echo_is_off(receiver: Receiver) -> None:
    receiver.acting.port(PortFlag.MARK)
    receiver.data()
    assert not receiver.tells()
    receiver.acting.port(PortFlag.ECHO_BECN)
    assert receiver.tells()


NOT_PLAIN: dict[str, tuple[dict[str, Any], bytes]] = {
    "trailing-bytes": ({}, bytes(6)),
    "one-option": ({"options": 1}, b""),
    # an IPv4 header as long as that of IPv6
    "five-options": ({"options": 5}, b""),
    "udp-checksum": ({"udp": {"chksum": None}}, b""),
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_where_no_cnp_can_be_made_the_ack_tells(receiver: Receiver, kind: str) -> None:
    arguments, trailer = NOT_PLAIN[kind]
    receiver.acting.port(PortFlag.ECHO_CNP)
    receiver.data()
    sent = receiver.acting.send(receiver.ack_frame(**arguments) + trailer)
    assert sent.frame == receiver.ack_frame(becn=True, **arguments) + trailer
    acts = receiver.acting.acts()
    assert (acts[Act.ECHO_FAILED], acts[Act.ECHO_BECN], acts[Act.ECHO_CNP]) == (1, 1, 0)


def test_no_ack_of_a_host_is_padded() -> None:
    """Ethernet pads to 60 bytes: the shortest ACK is longer, so a CNP can be made of each."""
    frame = roce(ACK, src=V4[0], dst=V4[1])
    assert len(frame) == 62
    assert len(roce(ACK, src=V6[0], dst=V6[1])) > len(frame)
    assert min(len(roce(BY_NAME[name])) for name in ("RC_ACKNOWLEDGE", "XRC_ACKNOWLEDGE")) == 62


# ---- what comes in ----


@pytest.mark.parametrize("addresses", [V4, V6], ids=["ipv4", "ipv6"])
@pytest.mark.parametrize("ingress", [XDP_INGRESS, TC_INGRESS])
def test_cnps_end_here_where_they_are_consumed_and_are_observed(
    acting: Acting, ingress: str, addresses: tuple[str, str]
) -> None:
    receiver = Receiver(acting, ingress, addresses)
    frame = roce(CNP, src=receiver.there, dst=receiver.here, dqpn=OUR_QPN, becn=True)
    for number, (flags, ends) in enumerate(
        ((PortFlag.CONSUME_CNP, True), (PortFlag(0), False), (PortFlag.CONSUME_CNP, True)), start=1
    ):
        acting.port(flags)
        dropped = XDP_DROP if ingress == XDP_INGRESS else TC_ACT_SHOT
        assert receiver.arrives(frame) == (dropped if ends else receiver.passes)
        flow = acting.xdp.flow(OUR_QPN, receiver.there, receiver.here)
        assert flow["kinds"][Kind.CNP] == flow["becn"] == flow["packets"] == number
    assert acting.acts() == {Act.CNP_CONSUMED: 2}


def test_a_port_that_only_observes_passes_cnps(receiver: Receiver) -> None:
    maps.clear_port(receiver.acting.fds, receiver.acting.xdp.port)
    assert receiver.arrives(roce(CNP, src=V4[1], dst=V4[0], dqpn=OUR_QPN)) == XDP_PASS


@pytest.mark.parametrize("ingress", [XDP_INGRESS, TC_INGRESS])
def test_an_ack_with_becn_passes(acting: Acting, ingress: str) -> None:
    receiver = Receiver(acting, ingress, V4)
    acting.port(PortFlag.CONSUME_CNP | PortFlag.DCQCN)
    frame = roce(ACK, src=V4[1], dst=V4[0], dqpn=OUR_QPN, becn=True)
    assert receiver.arrives(frame) == receiver.passes
    assert acting.xdp.flow(OUR_QPN, V4[1], V4[0])["becn"] == 1
    assert not acting.acts()
