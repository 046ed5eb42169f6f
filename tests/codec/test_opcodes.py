"""Each opcode as three readers see it: our parser, scapy's table and tshark.

tshark 4.0 does not know the extension headers of RD and XRC, FLUSH and ATOMIC WRITE;
for those it is a witness of the BTH only.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from scapy.contrib.roce import AETH
from scapy.utils import PcapWriter

from controller.dataplane.layout import Kind, Transport
from tests.hook import Hook
from tests.packets import (
    BY_VALUE,
    DETH,
    OPCODES,
    READ_REQUEST,
    V4,
    V6,
    Opcode,
    icrc,
    packet,
    roce,
    wire_bytes,
)

TSHARK_FIELDS = (
    "infiniband.bth.opcode",
    "infiniband.bth.destqp",
    "infiniband.bth.psn",
    "infiniband.bth.padcnt",
    "infiniband.bth.a",
    "infiniband.deth.srcqp",
    "infiniband.reth.dmalen",
    "infiniband.aeth.syndrome",
    "data.len",
)
NO_EXTENSIONS_IN_TSHARK = ("RD_", "XRC_")
UNKNOWN_TO_TSHARK = ("RC_FLUSH", "RC_ATOMIC_WRITE")
PAYLOAD = b"thirteen byte"


class Sample(NamedTuple):
    """One frame and what went into it."""

    opcode: Opcode
    dqpn: int
    psn: int
    payload: bytes
    ack_req: bool
    frame: bytes


def _samples() -> Iterator[Sample]:
    for number, opcode in enumerate(OPCODES):
        for src, dst in (V4, V6):
            dqpn, psn, ack_req = 0xABC000 + number, 0xFFFFFF - 7 * number, bool(number % 2)
            payload = PAYLOAD if opcode.payload else b""
            frame = roce(
                opcode,
                payload,
                dqpn=dqpn,
                psn=psn,
                src=src,
                dst=dst,
                ack_req=ack_req,
                syndrome=0x63,
                dma_length=0x12345,
                source_qpn=0x00BEEF,
                becn=opcode.name == "CNP",
            )
            yield Sample(opcode, dqpn, psn, payload, ack_req, frame)


SAMPLES = list(_samples())


@pytest.fixture(scope="module")
def dissected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """tshark's reading of all samples."""
    capture: Path = tmp_path_factory.mktemp("tshark") / "opcodes.pcap"
    with PcapWriter(str(capture), linktype=1) as writer:
        for sample in SAMPLES:
            writer.write(sample.frame)
    command = ["tshark", "-n", "-r", str(capture), "-T", "fields", "-E", "separator=;"]
    # Guesses from payload bytes would take the frame from the InfiniBand dissector.
    command += ["--disable-protocol", "rpcordma"]
    for field in TSHARK_FIELDS:
        command += ["-e", field]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return [
        dict(zip(TSHARK_FIELDS, line.split(";"), strict=True))
        for line in result.stdout.splitlines()
    ]


def test_the_table_has_every_opcode_of_the_specification_once() -> None:
    values = [opcode.value for opcode in OPCODES]
    assert len(set(values)) == len(values)
    per_transport = {
        name: sum(opcode.transport == name for opcode in OPCODES)
        for name in ("RC", "UC", "RD", "UD", "CNP", "XRC")
    }
    # 9.2.1 table 38: 21 operations that RC and RD share, 12 of UC, 2 of UD.
    assert per_transport == {"RC": 25, "UC": 12, "RD": 24, "UD": 2, "CNP": 1, "XRC": 23}


@pytest.mark.parametrize("opcode", OPCODES, ids=lambda opcode: opcode.name)
def test_our_parser_reads_what_scapy_wrote(opcode: Opcode, xdp: Hook) -> None:
    for sample in (s for s in SAMPLES if s.opcode is opcode):
        parsed = xdp.parsed(sample.frame)
        syndrome = 0x63 if AETH in opcode.headers else 0
        assert {name: int(parsed[name]) for name in (
            "opcode", "psn", "payload_len", "wire_len", "ack_request", "has_aeth", "syndrome",
            "source_qpn", "read_len", "becn", "fecn", "sport",
        )} == {
            "opcode": opcode.value,
            "psn": sample.psn,
            "payload_len": len(sample.payload),
            "wire_len": len(sample.frame),
            "ack_request": sample.ack_req,
            "has_aeth": AETH in opcode.headers,
            "syndrome": syndrome,
            "source_qpn": 0xBEEF if DETH in opcode.headers else 0,
            "read_len": 0x12345 if opcode.value & 0x1F == READ_REQUEST.value else 0,
            "becn": opcode.name == "CNP",
            "fecn": 0,
            "sport": 0xC000,
        }  # fmt: skip
        assert parsed["key"]["dqpn"] == sample.dqpn
        assert Transport(parsed["transport"]).name == opcode.transport
        # The syndrome 0x63 is a NAK: an acknowledgement that carries it is counted as one.
        kind = "NAK" if opcode.kind == "ACK" else opcode.kind
        assert Kind(parsed["kind"]).name == kind


def test_tshark_reads_what_scapy_wrote(dissected: list[dict[str, str]]) -> None:
    assert len(dissected) == len(SAMPLES)
    for sample, fields in zip(SAMPLES, dissected, strict=True):
        name = sample.opcode.name
        bth = [fields[field] for field in TSHARK_FIELDS[:5]]
        expected_pad = -len(sample.payload) % 4
        assert [int(text, 0) for text in bth[:4]] == [
            sample.opcode.value,
            sample.dqpn,
            sample.psn,
            expected_pad,
        ], name
        assert bth[4] in (str(int(sample.ack_req)), str(sample.ack_req)), name
        if name.startswith(NO_EXTENSIONS_IN_TSHARK) or name in UNKNOWN_TO_TSHARK:
            continue
        # tshark counts the pad bytes as data.
        assert int(fields["data.len"] or 0) == len(sample.payload) + (
            expected_pad if sample.payload else 0
        ), name
        has = {header.__name__ for header in sample.opcode.headers}
        deth, reth, aeth = (fields[field] for field in TSHARK_FIELDS[5:8])
        assert (int(deth, 0) if deth else None) == (0xBEEF if "DETH" in has else None), name
        assert (int(reth, 0) if reth else None) == (0x12345 if "RETH" in has else None), name
        assert (int(aeth, 0) if aeth else None) == (0x63 if "AETH" in has else None), name


def test_tshark_and_our_parser_agree_on_every_bth(
    dissected: list[dict[str, str]], xdp: Hook
) -> None:
    for sample, fields in zip(SAMPLES, dissected, strict=True):
        parsed = xdp.parsed(sample.frame)
        ours = [int(parsed["opcode"]), int(parsed["key"]["dqpn"]), int(parsed["psn"])]
        assert ours == [int(fields[field], 0) for field in TSHARK_FIELDS[:3]], sample.opcode.name


def test_scapy_and_our_own_checksum_agree_on_every_icrc() -> None:
    for sample in SAMPLES:
        assert icrc(sample.frame[14:-4]) == sample.frame[-4:], sample.opcode.name


def test_patched_templates_equal_frames_built_from_scratch() -> None:
    for opcode in OPCODES:
        for src, dst in (V4, V6):
            patched = packet(opcode, 0x123456, 8, src=src, dst=dst, tos=3)
            assert patched == roce(opcode, bytes(8), psn=0x123456, src=src, dst=dst, tos=3)
            assert wire_bytes(patched) == len(patched)


def test_the_table_finds_each_opcode_by_its_value() -> None:
    assert {value: opcode.name for value, opcode in BY_VALUE.items()} == {
        opcode.value: opcode.name for opcode in OPCODES
    }
