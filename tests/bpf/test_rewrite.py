"""What leaves in place of a packet: another traffic class, a mended checksum, and nothing else.

The frame that is expected is scapy's own, built with the other traffic class.
"""

from __future__ import annotations

import functools
import os
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scapy.layers.inet6 import IPv6ExtHdrDestOpt, IPv6ExtHdrFragment, IPv6ExtHdrHopByHop

from controller.agent import maps
from controller.agent.maps import ClassSettings
from controller.dataplane import libbpf
from controller.dataplane.compile import compile_programs
from controller.dataplane.layout import Act, JobFlag, PortFlag
from controller.dataplane.loader import TC_EGRESS, Dataplane
from tests.acting import DSCPS, Acting, LINK_Bps, Sent
from tests.hook import PORT, TC_ACT_UNSPEC, XDP_PASS, Hook
from tests.packets import OPCODES, SEND_MIDDLE, SEND_ONLY, V6, Opcode, icrc, roce

CLASS, TOP = 3, 7
ANSWERS = ("ACK", "NAK", "CNP", "ATOMIC_ACK")
NOT_ECT, ECT1, ECT0, CE = range(4)
# What the packet had before: neither 0, which a lost write would give, nor a class's.
PRIORITY, TSTAMP = 5, 777

V6_ENDS: dict[str, Any] = {"src": V6[0], "dst": V6[1]}
# name -> arguments of roce()
SHAPES: dict[str, dict[str, Any]] = {
    "IPv4": {},
    **{f"IPv4 with {words} words of options": {"options": words} for words in range(1, 11)},
    "IPv4 in a VLAN": {"vlans": (0x6005,)},
    "IPv4 in QinQ": {"vlans": (0x2007, 0x4009)},
    "IPv4 with options in QinQ": {"vlans": (0x2007, 0x4009), "options": 10},
    "IPv6": V6_ENDS,
    "IPv6 with a flow label": {**V6_ENDS, "ip": {"fl": 0xFEDCB, "hlim": 1}},
    "IPv6 with destination options": {**V6_ENDS, "extensions": (IPv6ExtHdrDestOpt(),)},
    "IPv6 with three extension headers": {
        **V6_ENDS,
        "extensions": (IPv6ExtHdrHopByHop(), IPv6ExtHdrDestOpt(), IPv6ExtHdrFragment(id=7)),
    },
    "IPv6 in a VLAN": {**V6_ENDS, "vlans": (0xEFFF,)},
    "IPv6 in QinQ": {**V6_ENDS, "vlans": (7, 9)},
    "IPv6 with destination options in QinQ": {
        **V6_ENDS,
        "vlans": (7, 9),
        "extensions": (IPv6ExtHdrDestOpt(),),
    },
}
CHECKSUMS: dict[str, dict[str, Any]] = {
    "no UDP checksum": {},
    "a UDP checksum": {"udp": {"chksum": None}},
}
PROPERTY = settings(
    max_examples=100,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
TRAFFIC_CLASSES = st.integers(0, 255)


def invariant_crc(frame: bytes, opcode: Opcode, payload_bytes: int) -> bytes:
    """ICRC of a frame, by its masks (A17.3.3), whatever stands between IP and UDP."""
    udp_bytes = 8 + opcode.header_bytes + payload_bytes + -payload_bytes % 4 + 4
    network = 14
    while frame[network - 2 : network] in (b"\x81\x00", b"\x88\xa8"):
        network += 4
    covered = bytearray(frame[network:-4])
    udp = len(frame) - udp_bytes - network
    if covered[0] >> 4 == 4:
        masked = [1, 8, 10, 11]
    else:
        covered[0] |= 0x0F
        masked = [1, 2, 3, 7]
    for offset in (*masked, udp + 6, udp + 7, udp + 12):
        covered[offset] = 0xFF
    return struct.pack("<I", zlib.crc32(b"\xff" * 8 + covered))


def differing(one: bytes, other: bytes) -> set[int]:
    assert len(one) == len(other)
    return {offset for offset in range(len(one)) if one[offset] != other[offset]}


def ends_of(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in ("src", "dst") if name in arguments}


def prepare(acting: Acting, shape: dict[str, Any], flags: JobFlag = JobFlag(0)) -> None:  # noqa: B008
    """A job's flow of this shape that is in class CLASS, and that was not observed yet."""
    ends = ends_of(shape)
    acting.port()
    acting.job(flags, class_default=CLASS)
    acting.assign(**ends)
    acting.send(roce(SEND_ONLY, b"data", **shape))
    acting.egress.forget(**ends)
    assert acting.control()["class"] == CLASS


def payload_of(opcode: Opcode) -> bytes:
    return b"12345" if opcode.payload else b""


@functools.cache
def frames_of(shape: str) -> list[bytes]:
    """One frame of each opcode, with the traffic classes in turn."""
    return [
        roce(opcode, payload_of(opcode), tos=number * 5 & 0xFF, **SHAPES[shape])
        for number, opcode in enumerate(OPCODES)
    ]


@pytest.mark.parametrize("checksum", CHECKSUMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_table_holds(shape: str, checksum: str, acting: Acting) -> None:
    """All opcodes: frame out, priority, departure, verdict and counters."""
    arguments = SHAPES[shape] | CHECKSUMS[checksum]
    prepare(acting, arguments)
    for number, opcode in enumerate(OPCODES):
        payload, ecn = payload_of(opcode), number % 4
        of_class = TOP if opcode.kind in ANSWERS else CLASS
        arguments["tos"] = 17 << 2 | ecn  # no class's
        frame = roce(opcode, payload, **arguments)
        arguments["tos"] = DSCPS[of_class] << 2 | ecn
        expected = roce(opcode, payload, **arguments)
        before, control = acting.acts(), acting.control()
        sent = acting.send(frame, PRIORITY, TSTAMP)
        assert sent == Sent(TC_ACT_UNSPEC, expected, 8 + of_class, TSTAMP), opcode.name
        assert acting.acts() - before == Counter({Act.CLASSED: 1, Act.REWRITTEN: 1}), opcode.name
        data = of_class == CLASS
        assert acting.control()["packets"] - control["packets"] == data
        assert acting.control()["class_packets"][CLASS] - control["class_packets"][CLASS] == data
        # Nothing that the ICRC covers has changed; scapy writes none behind extension headers.
        after = invariant_crc(sent.frame, opcode, len(payload))
        assert after == invariant_crc(frame, opcode, len(payload))
        if "extensions" not in arguments:
            assert after == sent.frame[-4:] == frame[-4:]
        # A queue pair with READ responses treats its answers otherwise: each opcode anew.
        acting.egress.forget(**ends_of(arguments))


def test_the_masks_above_are_those_of_the_other_implementation() -> None:
    for ends in ({}, V6_ENDS):
        frame = roce(SEND_ONLY, b"12345678", tos=0x6A, **ends)
        assert invariant_crc(frame, SEND_ONLY, 8) == icrc(frame[14:-4]) == frame[-4:]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_flow_of_no_job_is_left_exactly_as_it_was(shape: str, acting: Acting) -> None:
    acting.port(PortFlag.PACE | PortFlag.DCQCN | PortFlag.ECHO_BECN | PortFlag.MARK)
    acting.job(JobFlag.SET_ECT | JobFlag.DCQCN, pace_Bps=1000)
    acting.assign(dqpn=0x12)
    for frame in frames_of(shape):
        assert acting.send(frame, PRIORITY, TSTAMP) == Sent(TC_ACT_UNSPEC, frame, PRIORITY, TSTAMP)
    assert not acting.acts()
    assert acting.progress()["bytes"] == acting.control()["packets"] == 0


@pytest.fixture
def observer(acting: Acting) -> Iterator[Hook]:
    """tc egress that only observes, on the maps of programs that act."""
    hook = Hook(acting.dataplane, TC_EGRESS, acting.egress.packet_dtype, acts=False)
    yield hook
    hook.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_an_observer_changes_nothing_of_a_flow_of_a_job(
    shape: str, acting: Acting, observer: Hook
) -> None:
    prepare(acting, SHAPES[shape], JobFlag.SET_ECT)
    acting.port(PortFlag.PACE)
    acting.job(JobFlag.SET_ECT, pace_Bps=1000)
    before = acting.acts()
    for frame in frames_of(shape):
        sent = acting.run_program(observer.fd, frame, PRIORITY, TSTAMP)
        assert sent == Sent(TC_ACT_UNSPEC, frame, PRIORITY, TSTAMP)
    assert acting.acts() == before


@pytest.mark.parametrize("shape", SHAPES)
def test_what_arrives_is_left_exactly_as_it_was(shape: str, acting: Acting) -> None:
    prepare(acting, SHAPES[shape], JobFlag.SET_ECT)
    for frame in frames_of(shape):
        assert acting.receive(frame) == Sent(TC_ACT_UNSPEC, frame, 0, 0)
        result = libbpf.test_run(acting.xdp.fd, frame)
        assert (result.retval, result.data) == (XDP_PASS, frame)


def test_frames_that_are_not_rocev2_are_left_exactly_as_they_were(acting: Acting) -> None:
    prepare(acting, {})
    before = acting.acts()
    first_fragment = roce(SEND_ONLY, b"data", ip={"flags": "MF"})
    for frame in (roce(SEND_ONLY, b"data", dport=4790), roce(SEND_ONLY, b"data", tver=1),
                  roce(0x1F, bytes(16)), first_fragment):  # fmt: skip
        sent = acting.send(frame, PRIORITY, TSTAMP)
        assert sent == Sent(TC_ACT_UNSPEC, frame, PRIORITY, TSTAMP)
    assert acting.acts() == before


@pytest.fixture(scope="module")
def tagged_fd(_acting: Acting) -> Iterator[int]:
    """tc egress behind a tag that travels beside the frame, on the maps of `acting`."""
    source = str(Path(__file__).with_name("tagged_out.c"))
    artifact = compile_programs([source], ["stellar_tagged_out"], {"STELLAR_TEST_CLOCK": "1"})
    dataplane = Dataplane(artifact, adopt=_acting.dataplane.map_ids)
    fd = dataplane.load("stellar_tagged_out", PORT, acts=True)
    yield fd
    os.close(fd)
    dataplane.close()


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if "QinQ" not in shape])
def test_a_tag_beside_the_frame_moves_nothing(shape: str, acting: Acting, tagged_fd: int) -> None:
    """A test run gives back what lies in the frame: the tag beside it is not there."""
    arguments = SHAPES[shape]
    prepare(acting, arguments)
    frame = roce(SEND_ONLY, b"data", tos=0xA1, **arguments)
    sent = acting.run_program(tagged_fd, frame, PRIORITY, TSTAMP)
    expected = roce(SEND_ONLY, b"data", tos=DSCPS[CLASS] << 2 | 1, **arguments)
    assert sent == Sent(TC_ACT_UNSPEC, expected, 8 + CLASS, TSTAMP)
    assert acting.egress.flow(**ends_of(arguments))["vlan_packets"] == 1


@PROPERTY
@given(
    tos=TRAFFIC_CLASSES,
    dscp=st.integers(0, 63),
    payload=st.binary(max_size=64),
    shape=st.sampled_from(sorted(SHAPES)),
    checksum=st.sampled_from(sorted(CHECKSUMS)),
    ident=st.integers(0, 0xFFFF),
)
def test_only_the_dscp_and_the_checksum_change(
    tos: int, dscp: int, payload: bytes, shape: str, checksum: str, ident: int, acting: Acting
) -> None:
    arguments = SHAPES[shape] | CHECKSUMS[checksum]
    is_v4 = "src" not in arguments
    if is_v4:
        arguments["ip"] = {"id": ident}
    acting.reset()
    prepare(acting, arguments)
    classes = [ClassSettings(dscp, 8 + each, 1, 2, 1.0, LINK_Bps) for each in range(8)]
    maps.write_classes(acting.fds, PORT, classes)
    frame = roce(SEND_ONLY, payload, tos=tos, **arguments)
    sent = acting.send(frame)
    assert sent.frame == roce(SEND_ONLY, payload, tos=dscp << 2 | tos & 3, **arguments)
    network = 14 + 4 * len(arguments.get("vlans", ()))
    allowed = {1, 10, 11} if is_v4 else {0, 1}
    assert differing(frame, sent.frame) <= {network + offset for offset in allowed}


@PROPERTY
@given(tos=TRAFFIC_CLASSES, shape=st.sampled_from(sorted(SHAPES)), by_dscp=st.booleans())
def test_marking_keeps_the_dscp_and_marks_ect_only(
    tos: int, shape: str, by_dscp: bool, acting: Acting
) -> None:
    arguments = SHAPES[shape]
    acting.reset()
    prepare(acting, arguments)
    acting.port(PortFlag.MARK_INSTANT | (PortFlag.BY_DSCP if by_dscp else PortFlag(0)))
    acting.classes(kmin_bytes=1, kmax_bytes=1, pmax=1.0)
    acting.send(roce(SEND_MIDDLE, b"queue", **arguments))  # the queue that the next one meets
    before = acting.acts()
    sent = acting.send(roce(SEND_ONLY, b"data", tos=tos, **arguments))
    dscp = tos >> 2 if by_dscp and tos >> 2 in DSCPS else DSCPS[CLASS]
    ecn = CE if tos & 3 else NOT_ECT
    assert sent.frame == roce(SEND_ONLY, b"data", tos=dscp << 2 | ecn, **arguments)
    done = acting.acts() - before
    assert done[Act.MARKED] == (tos & 3 in (ECT0, ECT1))
    assert done[Act.NOT_ECT] == (tos & 3 == NOT_ECT)
    assert done[Act.REWRITTEN] == (dscp != tos >> 2)


@pytest.mark.parametrize("ecn", [NOT_ECT, ECT1, ECT0, CE])
def test_set_ect_makes_not_ect_data_ect0_and_nothing_else(ecn: int, acting: Acting) -> None:
    prepare(acting, {}, JobFlag.SET_ECT)
    for opcode in OPCODES:
        before, payload = acting.acts(), payload_of(opcode)
        sent = acting.send(roce(opcode, payload, tos=0x14 | ecn))
        answer = opcode.kind in ANSWERS
        set_here = ecn == NOT_ECT and not answer
        dscp = DSCPS[TOP if answer else CLASS]
        expected = roce(opcode, payload, tos=dscp << 2 | (ECT0 if set_here else ecn))
        assert sent.frame == expected, opcode.name
        assert (acting.acts() - before)[Act.ECT_SET] == set_here, opcode.name
        acting.egress.forget()


@PROPERTY
@given(tos=TRAFFIC_CLASSES, by_dscp=st.booleans(), marks=st.booleans())
def test_set_ect_changes_the_codepoint_from_not_ect_only(
    tos: int, by_dscp: bool, marks: bool, acting: Acting
) -> None:
    acting.reset()
    prepare(acting, {}, JobFlag.SET_ECT)
    none = PortFlag(0)
    acting.port((PortFlag.MARK if marks else none) | (PortFlag.BY_DSCP if by_dscp else none))
    sent = acting.send(roce(SEND_ONLY, b"data", tos=tos)).frame
    assert sent[15] & 3 == (tos & 3 or ECT0)


def test_what_is_set_ect_here_can_be_marked_here(acting: Acting) -> None:
    prepare(acting, {}, JobFlag.SET_ECT)
    acting.port(PortFlag.MARK_INSTANT)
    acting.classes(kmin_bytes=1, kmax_bytes=1, pmax=1.0)
    first, second = (acting.send(roce(SEND_ONLY, b"data")).frame for _ in range(2))
    assert (first[15] & 3, second[15] & 3) == (ECT0, CE)
    assert acting.control()["marked"] == 1


def checksum(header: bytes) -> int:
    """The Internet checksum (RFC 1071)."""
    total: int = sum(struct.unpack(f">{len(header) // 2}H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


@PROPERTY
@given(
    source=st.integers(0, 0xFFFFFFFF),
    ident=st.integers(0, 0xFFFF),
    ttl=st.integers(0, 255),
    old=TRAFFIC_CLASSES,
    new=st.sampled_from(range(8)),
)
def test_the_ip_checksum_stays_right_whatever_the_header(
    source: int, ident: int, ttl: int, old: int, new: int, acting: Acting
) -> None:
    src, ip = str(IPv4Address(source)), {"id": ident, "ttl": ttl}
    acting.reset()
    prepare(acting, {"src": src})
    acting.job(class_default=new)
    sent = acting.send(roce(SEND_ONLY, tos=old, src=src, ip=ip))
    assert sent.frame == roce(SEND_ONLY, tos=DSCPS[new] << 2 | old & 3, src=src, ip=ip)
    assert checksum(sent.frame[14:34]) == 0


@pytest.mark.parametrize("wanted", ["0000", "0001", "fffe", "ff00", "00ff", "0100", "feff"])
@pytest.mark.parametrize("number", range(8))
def test_a_checksum_at_a_carry_comes_out_right(wanted: str, number: int, acting: Acting) -> None:
    prepare(acting, {})
    acting.job(class_default=number)
    for old in (0x00, 0x01, 0x7C, 0xFF):
        tos = DSCPS[number] << 2 | old & 3
        with_id_0 = int.from_bytes(roce(SEND_ONLY, tos=tos, ip={"id": 0})[24:26], "big")
        ident = (with_id_0 - int(wanted, 16)) % 0xFFFF
        expected = roce(SEND_ONLY, tos=tos, ip={"id": ident})
        assert expected[24:26].hex() == wanted
        assert acting.send(roce(SEND_ONLY, tos=old, ip={"id": ident})).frame == expected
