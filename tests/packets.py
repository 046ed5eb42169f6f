"""RoCEv2 frames for tests: built with scapy, opcode table written from the specification.

``OPCODES`` restates IBTA Architecture Specification vol. 1, 9.2.1 table 38 (RC, UC, RD,
UD), annexes A14 (XRC), A17 (CNP) and A19 (FLUSH, ATOMIC WRITE). It shares nothing with
``bpf/roce.h``: what both say is what the tests compare.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from scapy.contrib.roce import AETH, BTH, CNPPadding
from scapy.fields import BitField, IntField, LongField, XIntField
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Dot1AD, Dot1Q, Ether
from scapy.packet import Packet, Raw

ROCE_PORT = 4791
SOURCE_MAC = "02:00:00:00:00:01"
DESTINATION_MAC = "02:00:00:00:00:02"
V4 = ("10.0.0.1", "10.0.0.2")
V6 = ("fd00::1", "fd00::2")


class RDETH(Packet):
    """Reliable datagram extended transport header."""

    name = "RDETH"
    fields_desc: ClassVar[list[Any]] = [
        BitField("reserved", 0, 8),
        BitField("ee_context", 0x000EEC, 24),
    ]


class DETH(Packet):
    """Datagram extended transport header."""

    name = "DETH"
    fields_desc: ClassVar[list[Any]] = [
        XIntField("q_key", 0x11111111),
        BitField("reserved", 0, 8),
        BitField("source_qpn", 0x000021, 24),
    ]


class XRCETH(Packet):
    """XRC extended transport header."""

    name = "XRCETH"
    fields_desc: ClassVar[list[Any]] = [
        BitField("reserved", 0, 8),
        BitField("xrcsrq", 0x0005A5, 24),
    ]


class RETH(Packet):
    """RDMA extended transport header."""

    name = "RETH"
    fields_desc: ClassVar[list[Any]] = [
        LongField("address", 0x00007F0011223344),
        XIntField("rkey", 0x12345678),
        IntField("dma_length", 0),
    ]


class AtomicETH(Packet):
    """Atomic extended transport header."""

    name = "AtomicETH"
    fields_desc: ClassVar[list[Any]] = [
        LongField("address", 0x00007F0011223344),
        XIntField("rkey", 0x12345678),
        LongField("swap_or_add", 1),
        LongField("compare", 2),
    ]


class AtomicAckETH(Packet):
    """Atomic acknowledge extended transport header."""

    name = "AtomicAckETH"
    fields_desc: ClassVar[list[Any]] = [LongField("original", 3)]


class ImmDt(Packet):
    """Immediate data."""

    name = "ImmDt"
    fields_desc: ClassVar[list[Any]] = [XIntField("data", 0xCAFEF00D)]


class IETH(Packet):
    """Invalidate extended transport header."""

    name = "IETH"
    fields_desc: ClassVar[list[Any]] = [XIntField("rkey", 0x87654321)]


class FETH(Packet):
    """Flush extended transport header."""

    name = "FETH"
    fields_desc: ClassVar[list[Any]] = [
        BitField("reserved", 0, 26),
        BitField("selectivity", 0, 2),
        BitField("placement", 1, 4),
    ]


@dataclass(frozen=True)
class Opcode:
    """One BTH opcode.

    ``kind`` is the observer's name for it (``layout.Kind``), ``ends`` tells whether it
    completes a request message, ``payload`` whether the specification lets it carry data.
    """

    name: str
    value: int
    transport: str
    kind: str
    headers: tuple[type[Packet], ...]
    ends: bool = False
    payload: bool = False

    @property
    def header_bytes(self) -> int:
        """BTH and all extension headers."""
        return 12 + sum(len(header()) for header in self.headers)


# Operation: (opcode bits 4..0, kind, extension headers of RC, ends a message, payload)
_OPERATIONS: dict[str, tuple[int, str, tuple[type[Packet], ...], bool, bool]] = {
    "SEND_FIRST": (0x00, "SEND", (), False, True),
    "SEND_MIDDLE": (0x01, "SEND", (), False, True),
    "SEND_LAST": (0x02, "SEND", (), True, True),
    "SEND_LAST_WITH_IMMEDIATE": (0x03, "SEND", (ImmDt,), True, True),
    "SEND_ONLY": (0x04, "SEND", (), True, True),
    "SEND_ONLY_WITH_IMMEDIATE": (0x05, "SEND", (ImmDt,), True, True),
    "RDMA_WRITE_FIRST": (0x06, "WRITE", (RETH,), False, True),
    "RDMA_WRITE_MIDDLE": (0x07, "WRITE", (), False, True),
    "RDMA_WRITE_LAST": (0x08, "WRITE", (), True, True),
    "RDMA_WRITE_LAST_WITH_IMMEDIATE": (0x09, "WRITE", (ImmDt,), True, True),
    "RDMA_WRITE_ONLY": (0x0A, "WRITE", (RETH,), True, True),
    "RDMA_WRITE_ONLY_WITH_IMMEDIATE": (0x0B, "WRITE", (RETH, ImmDt), True, True),
    "RDMA_READ_REQUEST": (0x0C, "READ_REQUEST", (RETH,), True, False),
    "RDMA_READ_RESPONSE_FIRST": (0x0D, "READ_RESPONSE", (AETH,), False, True),
    "RDMA_READ_RESPONSE_MIDDLE": (0x0E, "READ_RESPONSE", (), False, True),
    "RDMA_READ_RESPONSE_LAST": (0x0F, "READ_RESPONSE", (AETH,), False, True),
    "RDMA_READ_RESPONSE_ONLY": (0x10, "READ_RESPONSE", (AETH,), False, True),
    "ACKNOWLEDGE": (0x11, "ACK", (AETH,), False, False),
    "ATOMIC_ACKNOWLEDGE": (0x12, "ATOMIC_ACK", (AETH, AtomicAckETH), False, False),
    "COMPARE_SWAP": (0x13, "ATOMIC", (AtomicETH,), True, False),
    "FETCH_ADD": (0x14, "ATOMIC", (AtomicETH,), True, False),
    "RESYNC": (0x15, "OTHER", (), False, False),
    "SEND_LAST_WITH_INVALIDATE": (0x16, "SEND", (IETH,), True, True),
    "SEND_ONLY_WITH_INVALIDATE": (0x17, "SEND", (IETH,), True, True),
    "FLUSH": (0x1C, "OTHER", (FETH, RETH), True, False),
    "ATOMIC_WRITE": (0x1D, "WRITE", (RETH,), True, True),
}
_RESPONSES = frozenset(name for name in _OPERATIONS if "RESPONSE" in name or "ACKNOWLEDGE" in name)
_UP_TO_FETCH_ADD = tuple(_OPERATIONS)[: tuple(_OPERATIONS).index("FETCH_ADD") + 1]
_UP_TO_WRITE_ONLY_IMM = _UP_TO_FETCH_ADD[: _UP_TO_FETCH_ADD.index("RDMA_READ_REQUEST")]
_INVALIDATES = ("SEND_LAST_WITH_INVALIDATE", "SEND_ONLY_WITH_INVALIDATE")
_TRANSPORTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "RC": (0x00, (*_UP_TO_FETCH_ADD, *_INVALIDATES, "FLUSH", "ATOMIC_WRITE")),
    "UC": (0x20, _UP_TO_WRITE_ONLY_IMM),
    "RD": (0x40, (*_UP_TO_FETCH_ADD, "RESYNC", "FLUSH", "ATOMIC_WRITE")),
    "UD": (0x60, ("SEND_ONLY", "SEND_ONLY_WITH_IMMEDIATE")),
    "XRC": (0xA0, (*_UP_TO_FETCH_ADD, *_INVALIDATES)),
}


def _opcode(transport: str, operation: str) -> Opcode:
    base = _TRANSPORTS[transport][0]
    bits, kind, headers, ends, payload = _OPERATIONS[operation]
    response = operation in _RESPONSES
    if transport == "RD":
        headers = (RDETH, *headers) if response else (RDETH, DETH, *headers)
    elif transport == "UD":
        headers = (DETH, *headers)
    elif transport == "XRC" and not response:
        headers = (XRCETH, *headers)
    name = f"{transport}_{operation}"
    return Opcode(name, base | bits, transport, kind, headers, ends, payload)


OPCODES: tuple[Opcode, ...] = (
    *(
        _opcode(transport, operation)
        for transport, (_, operations) in _TRANSPORTS.items()
        for operation in operations
    ),
    Opcode("CNP", 0x81, "CNP", "CNP", (CNPPadding,)),
)
BY_VALUE = {opcode.value: opcode for opcode in OPCODES}
BY_NAME = {opcode.name: opcode for opcode in OPCODES}

# The names that tests of behaviour use all the time.
SEND_FIRST, SEND_MIDDLE, SEND_LAST = (BY_NAME[f"RC_SEND_{n}"] for n in ("FIRST", "MIDDLE", "LAST"))
SEND_ONLY = BY_NAME["RC_SEND_ONLY"]
WRITE_FIRST, WRITE_MIDDLE, WRITE_LAST, WRITE_ONLY = (
    BY_NAME[f"RC_RDMA_WRITE_{n}"] for n in ("FIRST", "MIDDLE", "LAST", "ONLY")
)
READ_REQUEST = BY_NAME["RC_RDMA_READ_REQUEST"]
READ_FIRST, READ_MIDDLE, READ_LAST, READ_ONLY = (
    BY_NAME[f"RC_RDMA_READ_RESPONSE_{n}"] for n in ("FIRST", "MIDDLE", "LAST", "ONLY")
)
ACK = BY_NAME["RC_ACKNOWLEDGE"]
CNP = BY_NAME["CNP"]

# AETH syndromes
ACK_SYNDROME = 0x1F  # ACK, no credits reported
RNR_SYNDROME = 0x20
NAK_SYNDROME = 0x60


def _network_layers(
    src: str, dst: str, tos: int, options: int, extensions: Sequence[Packet], **ip: Any
) -> Packet:
    if ":" in src:
        layer: Packet = IPv6(src=src, dst=dst, tc=tos, **ip)
        for extension in extensions:
            layer = layer / extension.copy()
        return layer
    # No-operations (one byte, 1), as one item: scapy copies every item of a list at every layer.
    words = [Raw(b"\x01" * (4 * options))] if options else []
    return IP(src=src, dst=dst, tos=tos, options=words, **ip)


def link(vlans: Sequence[int]) -> Packet:
    """Ethernet header and tags; the outer one of two or more is a service tag."""
    layer: Packet = Ether(src=SOURCE_MAC, dst=DESTINATION_MAC)
    for number, tci in enumerate(vlans):
        tag = Dot1AD if number == 0 and len(vlans) > 1 else Dot1Q
        layer = layer / tag(prio=tci >> 13, dei=tci >> 12 & 1, vlan=tci & 0xFFF)
    return layer


def roce(
    opcode: Opcode | int,
    payload: bytes = b"",
    *,
    psn: int = 0,
    dqpn: int = 0x000011,
    src: str = V4[0],
    dst: str = V4[1],
    sport: int = 0xC000,
    dport: int = ROCE_PORT,
    tos: int = 0,
    vlans: Sequence[int] = (),
    options: int = 0,
    extensions: Sequence[Packet] = (),
    ack_req: bool = False,
    fecn: bool = False,
    becn: bool = False,
    tver: int = 0,
    pad: int | None = None,
    syndrome: int = ACK_SYNDROME,
    dma_length: int = 0,
    source_qpn: int = 0x000021,
    ip: dict[str, Any] | None = None,
    udp: dict[str, Any] | None = None,
) -> bytes:
    """One frame, from the Ethernet header to the ICRC.

    Parameters
    ----------
    opcode
        A row of ``OPCODES``, or a number (unknown ones get no extension headers).
    options
        32-bit words of IPv4 options (0 .. 10).
    extensions
        IPv6 extension headers in front of UDP.
    pad
        BTH pad count; by default what `payload` needs for a multiple of four bytes.
        That many bytes are appended.
    ip, udp
        Field values for scapy, to build impossible headers.
    """
    value = opcode if isinstance(opcode, int) else opcode.value
    known = BY_VALUE.get(value)
    pad = -len(payload) % 4 if pad is None else pad
    bth = BTH(
        opcode=value,
        padcount=pad,
        version=tver,
        dqpn=dqpn,
        psn=psn,
        ackreq=int(ack_req),
        fecn=int(fecn),
        becn=int(becn),
    )
    if extensions:
        bth.icrc = 0  # scapy computes it behind IP only
    network = _network_layers(src, dst, tos, options, extensions, **(ip or {}))
    # Zero is what RoCEv2 senders put into the UDP checksum (A17.3.1).
    header = UDP(**{"sport": sport, "dport": dport, "chksum": 0, **(udp or {})})
    layers = link(vlans) / network / header / bth
    for kind in known.headers if known else ():
        extension = kind()
        if kind is AETH:
            extension.syndrome = syndrome
        elif kind is RETH:
            extension.dma_length = dma_length
        elif kind is DETH:
            extension.source_qpn = source_qpn
        layers = layers / extension
    body = payload + bytes(pad)
    return bytes(layers / Raw(body) if body else layers)


@functools.lru_cache(maxsize=4096)
def _template(opcode: Opcode, payload_bytes: int, items: tuple[tuple[str, Any], ...]) -> bytes:
    return roce(opcode, bytes(payload_bytes), **dict(items))


def packet(opcode: Opcode, psn: int, payload_bytes: int = 0, **arguments: Any) -> bytes:
    """``roce()`` for long sequences: scapy builds each shape once, PSN and ICRC are patched.

    No VLAN tags, IPv4 options or IPv6 extension headers.
    """
    frame = bytearray(_template(opcode, payload_bytes, tuple(sorted(arguments.items()))))
    bth = 62 if frame[12:14] == b"\x86\xdd" else 42
    frame[bth + 9 : bth + 12] = (psn & 0xFFFFFF).to_bytes(3, "big")
    frame[-4:] = icrc(bytes(frame[14:-4]))
    return bytes(frame)


def icrc(datagram: bytes) -> bytes:
    """Invariant CRC of an IP datagram without options, its own ICRC left off (A17.3.3)."""
    covered = bytearray(datagram)
    if datagram[0] >> 4 == 4:
        udp = 20
        covered[1] = covered[8] = 0xFF
        covered[10:12] = b"\xff\xff"
    else:
        udp = 40
        covered[0:4] = b"\x6f\xff\xff\xff"
        covered[7] = 0xFF
    covered[udp + 6 : udp + 8] = b"\xff\xff"
    covered[udp + 12] = 0xFF
    return struct.pack("<I", zlib.crc32(b"\xff" * 8 + covered))


def wire_bytes(frame: bytes) -> int:
    """Link header and IP length, as scapy reads them."""
    layers = Ether(frame)
    if IP in layers:
        return len(frame) - len(bytes(layers[IP])) + layers[IP].len
    return len(frame) - len(bytes(layers[IPv6])) + 40 + layers[IPv6].plen
