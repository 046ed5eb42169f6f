"""The parser's table: a frame, what becomes of it, and what is read from it.

Every frame, whatever it holds, has to pass unchanged; ``Hook.run`` checks that for each.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from scapy.contrib.roce import GRH
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import (
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
    PadN,
)
from scapy.layers.ipsec import AH
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Packet, Raw

from controller.dataplane.layout import Reason
from controller.observe.snapshot import pack_address
from tests.hook import Hook
from tests.packets import (
    ACK,
    BY_NAME,
    BY_VALUE,
    CNP,
    OPCODES,
    SEND_MIDDLE,
    SEND_ONLY,
    V4,
    V6,
    WRITE_ONLY,
    Opcode,
    link,
    roce,
)

V6_ENDS = {"src": V6[0], "dst": V6[1]}
PAYLOAD = bytes(range(32))


def patched(frame: bytes, offset: int, value: int, width: int = 1) -> bytes:
    """The frame with one big-endian field overwritten."""
    return frame[:offset] + value.to_bytes(width, "big") + frame[offset + width :]


def ah(words: int, next_header: int = 17) -> Packet:
    """Authentication header with `words` 32-bit words behind its first eight bytes."""
    # Its length counts 32-bit words less two, unlike the 64-bit words of all others.
    return AH(nh=next_header, payloadlen=words, spi=1, seq=1, icv=bytes(4 * words - 4))


def padded(header: type[Packet], total_bytes: int) -> Packet:
    """An options header of `total_bytes`."""
    return header(options=[PadN(optdata=bytes(total_bytes - 4))])


@dataclass(frozen=True)
class Row:
    """One line of the table; `fields` are members of struct roce_packet."""

    description: str
    frame: bytes
    reason: Reason
    fields: dict[str, Any] = field(default_factory=dict)


def accepted(description: str, frame: bytes, **fields: Any) -> Row:
    return Row(description, frame, Reason.ROCE, fields)


V4_BASE = roce(SEND_ONLY, PAYLOAD)  # IPv4 at 14, UDP at 34, BTH at 42
V6_BASE = roce(SEND_ONLY, PAYLOAD, **V6_ENDS)  # IPv6 at 14, UDP at 54, BTH at 62


def bare(network: Packet, payload: bytes = b"") -> bytes:
    return bytes(link(()) / network / Raw(payload))


EXTENSIONS = {
    "hop-by-hop": IPv6ExtHdrHopByHop(),
    "long hop-by-hop": padded(IPv6ExtHdrHopByHop, 72),
    "routing": IPv6ExtHdrRouting(addresses=["fd00::9"]),
    "atomic fragment": IPv6ExtHdrFragment(offset=0, m=0, id=7),
    "destination options": IPv6ExtHdrDestOpt(),
    "authentication of 12 + 12 bytes": ah(4),
    "authentication of 12 + 4 bytes": ah(2),
}

ROWS = [
    accepted(
        "IPv4",
        roce(WRITE_ONLY, PAYLOAD, psn=0xABCDEF, dqpn=0xFEDCBA, tos=0x6A, sport=49999, ack_req=True),
        psn=0xABCDEF, sport=49999, traffic_class=0x6A, payload_len=32, wire_len=106, tags=0,
        ack_request=1, opcode=0x0A, cut=0,
    ),
    accepted("IPv6", roce(SEND_ONLY, PAYLOAD, tos=0xB9, **V6_ENDS), traffic_class=0xB9,
             payload_len=32, wire_len=110),
    accepted("payload of 2048 bytes", roce(SEND_MIDDLE, bytes(2048)), payload_len=2048),
    accepted("padded payload", roce(SEND_ONLY, b"12345"), payload_len=5),
    accepted("no payload", roce(SEND_ONLY), payload_len=0, wire_len=58),
    accepted("frame padded to 60 bytes", roce(SEND_ONLY) + bytes(2), payload_len=0, wire_len=58),
    accepted("bytes behind the IP length", V4_BASE + b"trailer", payload_len=32),
    accepted("FECN", roce(SEND_ONLY, PAYLOAD, fecn=True), fecn=1, becn=0),
    accepted("BECN", roce(ACK, becn=True), fecn=0, becn=1),
    accepted("CNP", roce(CNP, becn=True), payload_len=0, becn=1, opcode=0x81),
    accepted("VLAN", roce(SEND_ONLY, PAYLOAD, vlans=(0x6005,)), tags=1, vlan_tci=0x6005,
             payload_len=32, wire_len=len(V4_BASE) + 4),
    accepted("QinQ", roce(SEND_ONLY, PAYLOAD, vlans=(0x2007, 0x4009)), tags=2, vlan_tci=0x2007,
             payload_len=32, wire_len=len(V4_BASE) + 8),
    accepted("IPv6 in QinQ", roce(SEND_ONLY, PAYLOAD, vlans=(7, 9), **V6_ENDS), tags=2,
             wire_len=len(V6_BASE) + 8),
    Row("three tags", roce(SEND_ONLY, PAYLOAD, vlans=(1, 2, 3)), Reason.TOO_MANY_TAGS),
    accepted("one word of IPv4 options", roce(SEND_ONLY, PAYLOAD, options=1), payload_len=32,
             wire_len=len(V4_BASE) + 4),
    accepted("ten words of IPv4 options", roce(BY_NAME["RD_COMPARE_SWAP"], options=10),
             wire_len=14 + 60 + 8 + 12 + 12 + 28 + 4),
    *(
        accepted(f"IPv6 with {name}", roce(SEND_ONLY, PAYLOAD, extensions=[header], **V6_ENDS),
                 payload_len=32, wire_len=len(V6_BASE) + len(header))
        for name, header in EXTENSIONS.items()
    ),
    accepted(
        "IPv6 with all extension headers in turn",
        roce(SEND_ONLY, PAYLOAD, extensions=[*list(EXTENSIONS.values())[1:5], ah(4, 51), ah(2)],
             **V6_ENDS),
        payload_len=32,
    ),
    Row("seven extension headers",
        roce(SEND_ONLY, PAYLOAD, extensions=[IPv6ExtHdrDestOpt()] * 7, **V6_ENDS),
        Reason.TOO_MANY_EXTENSIONS),
    Row("TCP behind six extension headers",
        patched(roce(SEND_ONLY, PAYLOAD, extensions=[IPv6ExtHdrDestOpt()] * 6, **V6_ENDS),
                14 + 40 + 5 * 8, 6), Reason.NOT_ROCE),
    Row("extension headers beyond the bound of their length",
        roce(SEND_ONLY, PAYLOAD, extensions=[padded(IPv6ExtHdrDestOpt, 256)] * 2, **V6_ENDS),
        Reason.TOO_MANY_EXTENSIONS),
    Row("extension header beyond the IPv6 payload",
        patched(roce(SEND_ONLY, PAYLOAD, extensions=[IPv6ExtHdrDestOpt()], **V6_ENDS), 55, 40),
        Reason.BAD_IP),
    Row("no next header", patched(V6_BASE, 20, 59), Reason.NOT_ROCE),
    Row("ESP", patched(V6_BASE, 20, 50), Reason.NOT_ROCE),
    # fragments
    Row("IPv4 first fragment", roce(SEND_ONLY, PAYLOAD, ip={"flags": "MF"}), Reason.IP_FRAGMENT),
    Row("IPv4 middle fragment", roce(SEND_ONLY, PAYLOAD, ip={"flags": "MF", "frag": 185}),
        Reason.IP_FRAGMENT),
    Row("IPv4 last fragment", roce(SEND_ONLY, PAYLOAD, ip={"frag": 185}), Reason.IP_FRAGMENT),
    Row("IPv4 fragment of TCP", bare(IP(src=V4[0], dst=V4[1], flags="MF") / TCP()),
        Reason.NOT_ROCE),
    accepted("IPv4 with don't fragment", roce(SEND_ONLY, PAYLOAD, ip={"flags": "DF"})),
    *(
        Row(f"IPv6 {name} fragment",
            roce(SEND_ONLY, PAYLOAD, extensions=[IPv6ExtHdrFragment(offset=o, m=m)], **V6_ENDS),
            Reason.IP_FRAGMENT)
        for name, o, m in (("first", 0, 1), ("middle", 180, 1), ("last", 180, 0))
    ),
    Row("IPv6 fragment of TCP",
        bare(IPv6(src=V6[0], dst=V6[1]) / IPv6ExtHdrFragment(m=1) / TCP()), Reason.NOT_ROCE),
    # other protocols
    Row("RoCEv1", bytes(Ether(type=0x8915) / GRH() / Raw(bytes(40))), Reason.ROCEV1),
    Row("RoCEv1 in a VLAN", bytes(link((5,)) / Raw(b"")) [:16] + b"\x89\x15" + bytes(60),
        Reason.ROCEV1),
    Row("ARP", bytes(Ether() / ARP()) + bytes(18), Reason.NOT_ROCE),
    Row("TCP to port 4791", bare(IP(src=V4[0], dst=V4[1]) / TCP(dport=4791)), Reason.NOT_ROCE),
    Row("another UDP port", roce(SEND_ONLY, PAYLOAD, dport=4790), Reason.NOT_ROCE),
    Row("4791 as source port only", roce(SEND_ONLY, PAYLOAD, sport=4791, dport=53),
        Reason.NOT_ROCE),
    accepted("4791 as both ports", roce(SEND_ONLY, PAYLOAD, sport=4791), sport=4791),
    # impossible IP headers
    Row("IPv4 header length 4", patched(V4_BASE, 14, 0x44), Reason.BAD_IP),
    Row("IPv4 header length 0", patched(V4_BASE, 14, 0x40), Reason.BAD_IP),
    Row("IP version 5", patched(V4_BASE, 14, 0x55), Reason.BAD_IP),
    Row("IPv6 ethertype, version 4", patched(V6_BASE, 14, 0x40), Reason.BAD_IP),
    Row("IPv4 total length below its header", patched(V4_BASE, 16, 19, 2), Reason.BAD_IP),
    Row("IPv4 total length 0", patched(V4_BASE, 16, 0, 2), Reason.BAD_IP),
    Row("IPv4 total length beyond the frame",
        patched(V4_BASE, 16, len(V4_BASE) - 14 + 1, 2), Reason.TRUNCATED),
    Row("IPv6 payload length beyond the frame",
        patched(V6_BASE, 18, len(V6_BASE) - 54 + 1, 2), Reason.TRUNCATED),
    Row("IPv6 payload length 0", patched(V6_BASE, 18, 0, 2), Reason.BAD_UDP_LENGTH),
    # UDP lengths
    Row("UDP length 0", patched(V4_BASE, 38, 0, 2), Reason.BAD_UDP_LENGTH),
    Row("UDP length without room for BTH and ICRC", patched(V4_BASE, 38, 23, 2),
        Reason.BAD_UDP_LENGTH),
    Row("UDP length beyond IP's", patched(V4_BASE, 38, len(V4_BASE) - 34 + 1, 2),
        Reason.BAD_UDP_LENGTH),
    accepted("UDP length of BTH and ICRC alone", patched(V4_BASE, 38, 24, 2), payload_len=0),
    Row("UDP length without room for the RETH", patched(roce(WRITE_ONLY), 38, 39, 2),
        Reason.BAD_UDP_LENGTH),
    Row("CNP without its reserved bytes",
        bare(IP(src=V4[0], dst=V4[1]) / UDP(sport=1, dport=4791), b"\x81" + bytes(15)),
        Reason.BAD_UDP_LENGTH),
    Row("CNP of 31 bytes", patched(roce(CNP), 38, 39, 2), Reason.BAD_UDP_LENGTH),
    # BTH
    *(
        Row(f"transport version {tver}", roce(SEND_ONLY, PAYLOAD, tver=tver), Reason.BAD_BTH)
        for tver in (1, 8, 15)
    ),
    Row("pad longer than the payload", patched(roce(SEND_ONLY), 43, 0x10), Reason.BAD_BTH),
    accepted("pad as long as the payload", patched(roce(SEND_ONLY, b"abcd"), 43, 0x30),
             payload_len=1),
    accepted("migration and solicited bits", patched(V4_BASE, 43, 0xC0), payload_len=32),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.description)
def test_the_table_holds(row: Row, hook: Hook) -> None:
    assert hook.outcome(row.frame) == Counter({row.reason: 1})
    parsed = hook.parsed(row.frame)
    assert {name: int(parsed[name]) for name in row.fields} == row.fields
    keys, _ = hook.flows()
    assert len(keys) == (row.reason == Reason.ROCE)


def test_the_flow_key_holds_addresses_qpn_port_and_direction(hook: Hook) -> None:
    for src, dst in (V4, V6, ("192.0.2.255", "255.1.2.3"), ("::1", "2001:db8::ff")):
        key = hook.parsed(roce(SEND_ONLY, dqpn=0x800001, src=src, dst=dst))["key"]
        assert key["saddr"].tobytes() == pack_address(src)
        assert key["daddr"].tobytes() == pack_address(dst)
        assert key["dqpn"] == 0x800001
        assert (key["port"], key["direction"], key["pad"]) == (hook.port, hook.direction, 0)


def test_exactly_the_opcodes_of_the_specification_are_known(hook: Hook) -> None:
    for value in range(256):
        # Long enough for any extension header.
        frame = roce(SEND_ONLY, bytes(64))
        expected = Reason.ROCE if value in BY_VALUE else Reason.UNKNOWN_OPCODE
        assert hook.outcome(patched(frame, 42, value)) == Counter({expected: 1}), hex(value)


@pytest.mark.parametrize("opcode", OPCODES, ids=lambda opcode: opcode.name)
def test_headers_longer_than_the_datagram_are_rejected(opcode: Opcode, xdp: Hook) -> None:
    frame = roce(opcode)
    udp_length = 8 + opcode.header_bytes + 4
    assert int.from_bytes(frame[38:40], "big") == udp_length
    xdp.expect(Reason.ROCE, [frame])
    shorter = [patched(frame, 38, length, 2) for length in range(udp_length)]
    xdp.expect(Reason.BAD_UDP_LENGTH, shorter)


# name -> arguments of roce(), bytes in front of the UDP header
SHAPES: dict[str, dict[str, Any]] = {
    "IPv4": {},
    "IPv6": V6_ENDS,
    "QinQ": {"vlans": (5, 6)},
    "IPv4 options": {"options": 10},
    "IPv6 extensions": {
        **V6_ENDS,
        "extensions": (padded(IPv6ExtHdrHopByHop, 24), IPv6ExtHdrFragment(), ah(4)),
    },
}


def shortest(hook: Hook, frame: bytes) -> int:
    """Bytes that a test run of this hook needs: Ethernet for XDP, and an IP header for tc."""
    if hook.is_xdp:
        return 14
    return 14 + {0x0800: 20, 0x86DD: 40}.get(int.from_bytes(frame[12:14], "big"), 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_frame_cut_at_any_byte_is_truncated_and_passes(shape: str, hook: Hook) -> None:
    for opcode in OPCODES:
        frame = roce(opcode, b"12345" if opcode.payload else b"", **SHAPES[shape])
        hook.expect(Reason.ROCE, [frame])
        lengths = range(shortest(hook, frame), len(frame))
        hook.expect(Reason.TRUNCATED, [frame[:length] for length in lengths])


def test_a_cut_frame_makes_no_flow(xdp: Hook) -> None:
    xdp.run(*(V4_BASE[:length] for length in range(14, len(V4_BASE))))
    assert len(xdp.flows()[0]) == 0


def test_a_large_frame_in_several_buffers_is_parsed(xdp: Hook) -> None:
    # Beyond one page XDP hands the frame over in fragments; its own length counts all.
    frame = roce(SEND_MIDDLE, bytes(4096), vlans=(1, 2), **V6_ENDS)
    assert xdp.outcome(frame) == Counter({Reason.ROCE: 1})
    assert xdp.flow(src=V6[0], dst=V6[1])["payload_bytes"] == 4096
    assert xdp.outcome(frame[:-1]) == Counter({Reason.TRUNCATED: 1})


FUZZ = settings(
    max_examples=150,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SEEDS = [
    roce(opcode, b"12345" if opcode.payload else b"", **shape)
    for shape in SHAPES.values()
    for opcode in OPCODES[::7]
]
RUNS = 20  # mutations of each frame


@FUZZ
@given(data=st.binary(min_size=64, max_size=200))
@example(data=bytes(64))
@example(data=b"\xff" * 64)
def test_random_bytes_pass_unchanged_and_are_counted_once(data: bytes, hook: Hook) -> None:
    assert hook.outcome(data).total() == 1


@FUZZ
@given(seed=st.sampled_from(SEEDS), entropy=st.integers(0, 1 << 32))
def test_mutated_frames_pass_unchanged_and_are_counted_once(
    seed: bytes, entropy: int, hook: Hook
) -> None:
    generator = random.Random(entropy)
    frames = []
    for _ in range(RUNS):
        frame = bytearray(seed)
        for _ in range(generator.randint(1, 6)):
            frame[generator.randrange(12, len(frame))] = generator.randrange(256)
        length = generator.choice((len(frame), generator.randint(64, len(frame) + 40)))
        frames.append(bytes(frame[:length]).ljust(length, b"\x5a"))
    if not hook.is_xdp:
        frames = [frame.ljust(80, b"\0") for frame in frames]
    assert hook.outcome(*frames).total() == len(frames)


@FUZZ
@given(entropy=st.integers(0, 1 << 32))
def test_no_mutation_makes_the_payload_longer_than_the_frame(entropy: int, xdp: Hook) -> None:
    generator = random.Random(entropy)
    frame = bytearray(generator.choice(SEEDS))
    for _ in range(generator.randint(1, 4)):
        frame[generator.randrange(12, len(frame))] = generator.randrange(256)
    if xdp.outcome(bytes(frame)) == Counter({Reason.ROCE: 1}):
        parsed = xdp.parsed(bytes(frame))
        assert parsed["payload_len"] <= parsed["wire_len"] <= len(frame)
