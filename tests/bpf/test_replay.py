"""Captures made here, replayed: formats, damage, link types, times, and what BPF counted."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import Ether
from scapy.utils import RawPcapNgWriter, RawPcapWriter

from controller.dataplane.compile import Artifact
from controller.errors import InputError
from controller.observe import replay as replay_module
from controller.observe.analyze import Analysis, analyze_file
from tests.packets import (
    ACK,
    NAK_SYNDROME,
    READ_FIRST,
    READ_LAST,
    READ_MIDDLE,
    READ_REQUEST,
    SEND_ONLY,
    V4,
    V6,
    WRITE_FIRST,
    WRITE_LAST,
    WRITE_MIDDLE,
    WRITE_ONLY,
    packet,
    roce,
)

START_US = 1_700_000_000_000_000
BACK: dict[str, Any] = {"src": V4[1], "dst": V4[0], "dqpn": 0x21}
ETHERNET, SLL, SLL2, ERF = 1, 113, 276, 197
FLOW, OPPOSITE = f"{V4[0]}-{V4[1]}-0x000011", f"{V4[1]}-{V4[0]}-0x000021"


@pytest.fixture(autouse=True)
def compiled_once(replay_artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay's program, compiled for all tests together."""

    def compile_programs(
        sources: Sequence[str], functions: Sequence[str], defines: dict[str, str]
    ) -> Artifact:
        assert defines == {"STELLAR_REPLAY": "1", "STELLAR_ALLOW_CUT": "1"}
        return replay_artifact

    monkeypatch.setattr(replay_module, "compile_programs", compile_programs)


def exchange() -> list[bytes]:
    """A WRITE of three packets and a SEND, acknowledged, in path MTU 1024."""
    return [
        packet(WRITE_FIRST, 100, 1024, tos=0x6A),
        packet(WRITE_MIDDLE, 101, 1024, tos=0x6A),
        packet(WRITE_LAST, 102, 500, tos=0x6A, ack_req=True),
        packet(ACK, 102, tos=0x6A, **BACK),
        packet(SEND_ONLY, 103, 8, tos=0x6A, ack_req=True),
        packet(ACK, 103, tos=0x6A, **BACK),
    ]


def write_pcap(
    path: Path,
    frames: Iterable[bytes],
    *,
    endianness: str = "<",
    nano: bool = False,
    gz: bool = False,
    link: int = ETHERNET,
    times_us: Sequence[int] | None = None,
    wire_lengths: Sequence[int] | None = None,
) -> Path:
    """A pcap file; 10 us between frames unless `times_us` tells their offsets."""
    writer = RawPcapWriter(str(path), linktype=link, endianness=endianness, nano=nano, gz=gz)
    writer.write_header(None)
    for number, frame in enumerate(frames):
        time_us = START_US + (10 * number if times_us is None else times_us[number])
        fraction = time_us % 1_000_000
        writer.write_packet(
            frame,
            sec=time_us // 1_000_000,
            usec=fraction * 1000 if nano else fraction,
            caplen=len(frame),
            wirelen=len(frame) if wire_lengths is None else wire_lengths[number],
        )
    writer.close()
    return path


def block(kind: int, body: bytes, endian: str = "<") -> bytes:
    """One pcapng block."""
    body += bytes(-len(body) % 4)
    length = struct.pack(endian + "I", len(body) + 12)
    return struct.pack(endian + "I", kind) + length + body + length


def option(code: int, value: bytes, endian: str = "<") -> bytes:
    """One pcapng option."""
    return struct.pack(endian + "HH", code, len(value)) + value + bytes(-len(value) % 4)


def section(endian: str = "<") -> bytes:
    """Section header block."""
    return block(0x0A0D0D0A, struct.pack(endian + "IHHq", 0x1A2B3C4D, 1, 0, -1), endian)


def interface(link: int, name: str = "", endian: str = "<", tsresol: int | None = None) -> bytes:
    """Interface description block."""
    options = option(2, name.encode(), endian) if name else b""
    if tsresol is not None:
        options += option(9, bytes([tsresol]), endian)
    if options:
        options += option(0, b"", endian)
    return block(1, struct.pack(endian + "HHI", link, 0, 0) + options, endian)


def enhanced(frame: bytes, number: int = 0, ticks: int = START_US, endian: str = "<") -> bytes:
    """Enhanced packet block."""
    head = struct.pack(
        endian + "IIIII", number, ticks >> 32, ticks & 0xFFFFFFFF, len(frame), len(frame)
    )
    return block(6, head + frame, endian)


def row(analysis: Analysis, flow: str = FLOW) -> dict[str, Any]:
    """The one row of a flow."""
    (found,) = (row for row in analysis.rows if row["flow"] == flow)
    return found


def expect_exchange(analysis: Analysis) -> None:
    """What `exchange()` holds, whatever file brought it."""
    document = json.loads(json.dumps(analysis.to_json()))
    assert document["frames"] == document["rocev2_packets"] == 6
    assert document["rocev1_packets"] == 0
    assert document["ignored"] == {}
    assert document["opcodes"] == {"0x04": 1, "0x06": 1, "0x07": 1, "0x08": 1, "0x11": 2}
    assert document["first_time"] == "2023-11-14T22:13:20.000000000Z"
    assert document["duration_s"] == pytest.approx(50e-6)
    assert not document["truncated_file"]
    assert not document["backward_timestamps"]
    request = row(analysis)
    assert request["packets"] == 4
    assert request["messages"] == 2
    assert request["wire_bytes"] == sum(map(len, exchange()[:3])) + len(exchange()[4])
    assert request["payload_bytes"] == 1024 + 1024 + 500 + 8
    assert request["path_mtu"] == 1024
    assert request["peer_qpn"] == 0x21
    assert (request["gap_packets"], request["duplicates"]) == (0, 0)
    figures = dict(request["rtt_us"])
    assert figures.pop("histogram") == [[8.192, 2]]  # 8.192 .. 12.288 us
    ten = dict.fromkeys(("min", "mean", "p50", "p99", "max"), 10.0)
    assert figures == {"samples": 2} | ten
    assert row(analysis, OPPOSITE)["kinds"] == {"ack": 2}
    assert [verdict["verdict"] for verdict in document["verdicts"]] == ["nothing_wrong"]


# ---- formats ----


@pytest.mark.parametrize("endianness", ["<", ">"], ids=["little", "big"])
@pytest.mark.parametrize("nano", [False, True], ids=["us", "ns"])
@pytest.mark.parametrize("gz", [False, True], ids=["plain", "gzip"])
def test_every_form_of_pcap_gives_the_same(
    tmp_path: Path, endianness: str, nano: bool, gz: bool
) -> None:
    path = tmp_path / "any name"
    write_pcap(path, exchange(), endianness=endianness, nano=nano, gz=gz)
    expect_exchange(analyze_file(path))


@pytest.mark.parametrize("gz", [False, True], ids=["plain", "gzip"])
def test_pcapng_as_scapy_writes_it_gives_the_same(tmp_path: Path, gz: bool) -> None:
    path = tmp_path / "capture.pcapng"
    writer = RawPcapNgWriter(str(path))
    writer.linktype = ETHERNET
    writer.write_header(None)
    for number, frame in enumerate(exchange()):
        writer.write_packet(frame, sec=START_US // 1_000_000 + number / 100_000)
    writer.close()
    if gz:
        path.write_bytes(gzip.compress(path.read_bytes()))
    expect_exchange(analyze_file(path))


@pytest.mark.parametrize("endian", ["<", ">"], ids=["little", "big"])
@pytest.mark.parametrize(("tsresol", "factor"), [(None, 1), (9, 1000)], ids=["us", "ns"])
def test_pcapng_of_either_byte_order_and_resolution_gives_the_same(
    tmp_path: Path, endian: str, tsresol: int | None, factor: int
) -> None:
    blocks = [section(endian), interface(ETHERNET, "eth0", endian, tsresol)]
    blocks += [
        enhanced(frame, 0, (START_US + 10 * number) * factor, endian)
        for number, frame in enumerate(exchange())
    ]
    # Blocks of kinds that are none of our business.
    blocks += [block(0x0BAD, b"custom", endian), block(5, bytes(12), endian)]
    path = tmp_path / "capture.pcapng"
    path.write_bytes(b"".join(blocks))
    analysis = analyze_file(path)
    expect_exchange(analysis)
    assert row(analysis)["interface"] == "capture.pcapng:eth0"


def test_pcapng_sections_number_their_interfaces_anew(tmp_path: Path) -> None:
    first, *others = exchange()
    path = tmp_path / "joined.pcapng"
    path.write_bytes(
        section() + interface(ERF, "ib0") + enhanced(b"not ethernet at all")
        + section() + interface(ETHERNET, "eth0") + enhanced(first)
        + b"".join(enhanced(frame, 0, START_US + 10 * n) for n, frame in enumerate(others, 1))
    )  # fmt: skip
    analysis = analyze_file(path)
    assert analysis.replay.rocev2_packets == 6
    assert analysis.replay.ignored == {"other_link_type": 1}
    assert row(analysis)["gap_packets"] == 0


def test_interfaces_of_one_pcapng_are_observed_apart(tmp_path: Path) -> None:
    path = tmp_path / "two.pcapng"
    blocks = [section(), interface(ETHERNET, "eth0"), interface(ETHERNET, "eth1")]
    for number, frame in enumerate(exchange()):
        blocks += [enhanced(frame, at, START_US + 10 * number + at) for at in (0, 1)]
    path.write_bytes(b"".join(blocks))
    analysis = analyze_file(path)
    rows = [row for row in analysis.rows if row["flow"] == FLOW]
    assert [row["interface"] for row in rows] == ["two.pcapng:eth0", "two.pcapng:eth1"]
    # Seen twice, not sent twice.
    assert [row["duplicates"] for row in rows] == [0, 0]
    assert [verdict.verdict for verdict in analysis.verdicts] == ["nothing_wrong"]


def test_simple_packet_blocks_have_no_time_but_count(tmp_path: Path) -> None:
    path = tmp_path / "simple.pcapng"
    idb = block(1, struct.pack("<HHI", ETHERNET, 0, 65535))
    simple = (block(3, struct.pack("<I", len(frame)) + frame) for frame in exchange())
    path.write_bytes(section() + idb + b"".join(simple))
    analysis = analyze_file(path)
    assert analysis.replay.rocev2_packets == 6
    assert analysis.replay.last_ns == 0


@pytest.mark.parametrize(
    ("link", "header"),
    [
        (SLL, struct.pack(">HHH", 4, 1, 6) + bytes(8) + b"\x08\x00"),
        (SLL2, b"\x08\x00" + struct.pack(">HIHBB", 0, 7, 1, 4, 6) + bytes(8)),
    ],
    ids=["SLL", "SLL2"],
)
def test_linux_cooked_captures_give_the_same(tmp_path: Path, link: int, header: bytes) -> None:
    frames = [header + frame[14:] for frame in exchange()]
    expect_exchange(analyze_file(write_pcap(tmp_path / "any.pcap", frames, link=link)))


def test_the_same_frame_on_two_interfaces_of_a_cooked_capture_is_no_duplicate(
    tmp_path: Path,
) -> None:
    frames = [
        b"\x08\x00" + struct.pack(">HIHBB", 0, index, 1, 4, 6) + bytes(8) + frame[14:]
        for frame in exchange()
        for index in (3, 4)
    ]
    analysis = analyze_file(write_pcap(tmp_path / "any.pcap", frames, link=SLL2))
    assert {row["duplicates"] for row in analysis.rows} == {0}
    assert {row["interface"] for row in analysis.rows} == {"any.pcap:any#3", "any.pcap:any#4"}


# ---- what cannot be read ----


@pytest.mark.parametrize(
    ("link", "name"),
    [(ERF, "native InfiniBand"), (247, "InfiniBand"), (101, "raw IP"), (105, "802.11"), (9999, "")],
)
def test_another_link_type_is_named(tmp_path: Path, link: int, name: str) -> None:
    path = write_pcap(tmp_path / "other.pcap", exchange(), link=link)
    with pytest.raises(InputError, match="link type") as raised:
        analyze_file(path)
    assert raised.value.exit_code == 7
    for part in (str(link), name, "1 (Ethernet)", str(path), "tcpdump"):
        assert part in str(raised.value)


def test_a_pcapng_without_ethernet_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ib.pcapng"
    path.write_bytes(section() + interface(ERF, "mlx5_0") + enhanced(bytes(64)))
    with pytest.raises(InputError, match="197"):
        analyze_file(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\xd4\xc3", "not a capture"),
        (b"\xd4\xc3\xb2\xa1", "file header"),
        (b"\xd4\xc3\xb2\xa1\x02\x00\x04\x00", "file header"),
        (b"\x0a\x0d\x0d\x0a", "file header"),
        (section()[:20], "file header"),
        (b"# a text file\n", "not a capture: it starts with 23 20 61 20"),
        (b"\x1f\x8b", "damaged gzip"),
        (b"\x1f\x8bnot gzip after all", "damaged gzip"),
        (gzip.compress(b""), "is empty"),
        (gzip.compress(b"text"), "not a capture"),
        (gzip.compress(gzip.compress(b"text")), "not a capture"),
    ],
    ids=[
        "empty", "half a magic number", "magic number alone", "cut pcap header",
        "cut pcapng magic", "cut pcapng section", "text", "half a gzip magic", "broken gzip",
        "empty gzip", "gzipped text", "text gzipped twice",
    ],
)  # fmt: skip
def test_what_is_no_capture_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "no.pcap"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as raised:
        analyze_file(path)
    assert str(path) in str(raised.value)
    assert raised.value.remedy


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.pcap", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            analyze_file(path)


def test_a_capture_without_frames_is_empty_and_no_error(tmp_path: Path) -> None:
    analysis = analyze_file(write_pcap(tmp_path / "none.pcap", []))
    document = analysis.to_json()
    assert (document["frames"], document["flows"], document["verdicts"]) == (0, [], [])
    assert document["first_time"] is None
    assert "No RoCEv2 flows" in analysis.to_text()


# ---- files that break off ----


def as_pcap(path: Path, gz: bool) -> tuple[bytes, int]:
    content = write_pcap(path, exchange()).read_bytes()
    return content, 16 + len(exchange()[-1])


def as_pcapng(path: Path, gz: bool) -> tuple[bytes, int]:
    blocks = [enhanced(frame, 0, START_US + n) for n, frame in enumerate(exchange())]
    return section() + interface(ETHERNET) + b"".join(blocks), len(blocks[-1])


@pytest.mark.parametrize("make", [as_pcap, as_pcapng])
def test_a_file_that_ends_inside_a_record_gives_all_before_it(
    tmp_path: Path, make: Callable[[Path, bool], tuple[bytes, int]]
) -> None:
    path = tmp_path / "cut.pcap"
    content, last_bytes = make(path, False)
    for missing in (*range(0, last_bytes + 1, 7), 1, last_bytes):
        path.write_bytes(content[: len(content) - missing])
        analysis = analyze_file(path)
        assert analysis.replay.frames == (6 if not missing else 5), missing
        assert analysis.replay.truncated_file == (missing not in (0, last_bytes)), missing
        assert row(analysis)["packets"] == 4
    assert "ends inside a record" not in analysis.to_text()


def test_a_file_that_ends_inside_its_first_record_is_an_error(tmp_path: Path) -> None:
    path = write_pcap(tmp_path / "cut.pcap", exchange()[:1])
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(InputError, match="first record"):
        analyze_file(path)


@pytest.mark.parametrize("damage", ["cut", "overwritten"])
def test_a_damaged_gzip_file_gives_what_can_be_unpacked(tmp_path: Path, damage: str) -> None:
    frames = [roce(SEND_ONLY, bytes((n * 7 + k * k) % 251 for k in range(200)), psn=n)
              for n in range(400)]  # fmt: skip
    path = write_pcap(tmp_path / "cut.pcap.gz", frames, gz=True)
    content = path.read_bytes()
    middle = len(content) // 2
    cut = content[:middle] if damage == "cut" else content[:middle] + bytes(64)
    path.write_bytes(cut)
    analysis = analyze_file(path)
    assert 0 < analysis.replay.frames < 400
    assert analysis.replay.truncated_file
    assert row(analysis)["gap_packets"] == 0
    assert "ends inside a record or is damaged" in analysis.to_text()


def test_a_record_that_claims_gigabytes_ends_the_file(tmp_path: Path) -> None:
    path = write_pcap(tmp_path / "wild.pcap", exchange())
    wild = struct.pack("<IIII", START_US // 1_000_000, 0, 0xFFFFFFF0, 0xFFFFFFF0) + bytes(100)
    path.write_bytes(path.read_bytes() + wild)
    analysis = analyze_file(path)
    assert analysis.replay.truncated_file
    assert analysis.replay.frames == 6


def test_nothing_is_printed_about_damage(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_pcap(tmp_path / "cut.pcap", exchange())
    path.write_bytes(path.read_bytes()[:-5])
    assert analyze_file(path).replay.truncated_file
    assert capfd.readouterr() == ("", "")


# ---- frames ----


def test_a_cut_packet_counts_by_its_ip_length_whether_the_record_says_so_or_not(
    tmp_path: Path,
) -> None:
    frames = exchange()
    heads = [frame[:96] for frame in frames]
    honest = analyze_file(
        write_pcap(tmp_path / "honest.pcap", heads, wire_lengths=[len(frame) for frame in frames])
    )
    silent = analyze_file(write_pcap(tmp_path / "silent.pcap", heads))
    assert honest.replay.cut_packets == 0  # the record has the whole length
    assert silent.replay.cut_packets == sum(len(frame) > 96 for frame in frames)
    assert "cut short" in silent.to_text()
    for analysis in (honest, silent):
        request = row(analysis)
        assert request["wire_bytes"] == sum(map(len, frames[:3])) + len(frames[4])
        assert request["payload_bytes"] == 1024 + 1024 + 500 + 8
        assert request["messages"] == 2
        assert analysis.replay.ignored == {}


def test_frames_too_short_for_their_headers_are_truncated(tmp_path: Path) -> None:
    frame = exchange()[0]
    frames = [b"", frame[:1], frame[:13], frame[:14], frame[:41], frame[:53], frame]
    analysis = analyze_file(write_pcap(tmp_path / "short.pcap", frames))
    document = analysis.to_json()
    assert document["ignored"] == {"truncated": 6}
    assert (document["frames"], document["rocev2_packets"]) == (7, 1)


def test_jumbo_frames_count_in_full(tmp_path: Path) -> None:
    frames = [packet(WRITE_ONLY, n, size) for n, size in enumerate((4096, 8192, 8900))]
    analysis = analyze_file(write_pcap(tmp_path / "jumbo.pcap", frames))
    assert row(analysis)["wire_bytes"] == sum(map(len, frames))
    assert row(analysis)["payload_bytes"] == 4096 + 8192 + 8900
    assert analysis.replay.cut_packets == 0


def test_other_frames_are_counted_by_what_they_are(tmp_path: Path) -> None:
    rocev1 = bytes(12) + b"\x89\x15" + bytes(60)
    frames = [
        *exchange(),
        rocev1,
        rocev1,
        bytes(Ether() / IP(src=V4[0], dst=V4[1]) / TCP()),
        roce(SEND_ONLY, bytes(8), ip={"flags": "MF"}),
        roce(SEND_ONLY, bytes(8), tver=1),
        roce(0xFF, bytes(8)),
    ]
    document = analyze_file(write_pcap(tmp_path / "mixed.pcap", frames)).to_json()
    assert document["rocev2_packets"] == 6
    assert document["rocev1_packets"] == 2
    assert document["ignored"] == {
        "not_roce": 1, "ip_fragment": 1, "bad_bth": 1, "unknown_opcode": 1,
    }  # fmt: skip
    assert document["frames"] == 6 + 2 + sum(document["ignored"].values())
    assert sum(document["opcodes"].values()) == document["rocev2_packets"]


def test_source_ports_of_other_protocols_do_not_matter(tmp_path: Path) -> None:
    ports = (69, 53, 443, 4791, 65535)
    frames = [packet(SEND_ONLY, n, 8, sport=port) for n, port in enumerate(ports)]
    frames.append(packet(SEND_ONLY, 9, 8, sport=4791, dport=4790))
    analysis = analyze_file(write_pcap(tmp_path / "ports.pcap", frames))
    assert analysis.replay.rocev2_packets == len(ports)
    assert analysis.replay.ignored == {"not_roce": 1}


def test_ipv6_and_tags_are_flows_like_any(tmp_path: Path) -> None:
    frames = [roce(SEND_ONLY, bytes(8), src=V6[0], dst=V6[1], vlans=(0x6005, 7), tos=0x6B)]
    found = row(analyze_file(write_pcap(tmp_path / "v6.pcap", frames)), f"{V6[0]}-{V6[1]}-0x000011")
    assert (found["ce"], found["dscp"], found["vlan_packets"]) == (1, [26], 1)
    assert found["wire_bytes"] == len(frames[0])


# ---- order and time ----


def test_a_read_uses_as_many_psns_as_its_response_has_packets(tmp_path: Path) -> None:
    frames = [
        packet(READ_REQUEST, 10, dma_length=8 * 1024),
        packet(READ_FIRST, 10, 1024, **BACK),
        *(packet(READ_MIDDLE, 10 + n, 1024, **BACK) for n in range(1, 7)),
        packet(READ_LAST, 17, 1024, **BACK),
        packet(SEND_ONLY, 18, 8, ack_req=True),
        packet(ACK, 18, **BACK),
        packet(READ_REQUEST, 19, dma_length=1025),
        packet(SEND_ONLY, 21, 8),
    ]
    analysis = analyze_file(write_pcap(tmp_path / "read.pcap", frames))
    request = row(analysis)
    assert (request["gap_packets"], request["duplicates"], request["messages"]) == (0, 0, 4)
    assert row(analysis, OPPOSITE)["response_gap_packets"] == 0
    assert {verdict.verdict for verdict in analysis.verdicts} <= {
        "nothing_wrong", "dscp_0", "not_ect",
    }  # fmt: skip


def test_a_loss_with_its_nak_is_network_loss(tmp_path: Path) -> None:
    sent = [packet(SEND_ONLY, n, 8, ack_req=True, tos=0x6A) for n in range(8)]
    frames = [
        sent[0], packet(ACK, 0, tos=0x6A, **BACK), sent[1], sent[3], sent[4],
        packet(ACK, 2, syndrome=NAK_SYNDROME, tos=0x6A, **BACK), *sent[2:],
    ]  # fmt: skip
    analysis = analyze_file(write_pcap(tmp_path / "loss.pcap", frames))
    (verdict,) = analysis.verdicts
    assert (verdict.flow, verdict.verdict) == (FLOW, "network_loss")
    assert verdict.evidence["psn_sequence_naks"] == 1
    assert verdict.evidence["recovered"] == 1
    assert verdict.evidence["duplicates"] == 2


def test_frames_that_only_the_capture_missed_are_no_network_loss(tmp_path: Path) -> None:
    sent = [packet(SEND_ONLY, n, 8, ack_req=True, tos=0x6A) for n in range(8)]
    acks = [packet(ACK, n, tos=0x6A, **BACK) for n in range(8)]
    analysis = analyze_file(
        write_pcap(tmp_path / "missed.pcap", [sent[0], acks[0], sent[5], acks[5], sent[7]])
    )
    assert row(analysis)["gap_packets"] == 5
    assert row(analysis)["capture_loss_packets"] == 4
    assert {verdict.verdict: dict(verdict.evidence) for verdict in analysis.verdicts}.keys() == {
        "capture_loss", "undecided_gaps",
    }  # fmt: skip


def test_time_that_goes_backwards_breaks_nothing(tmp_path: Path) -> None:
    times = [1000, 990, 2000, 1500, 1400, 1600, 1700, 1725]
    frames = [
        *exchange(),
        packet(SEND_ONLY, 104, 8, tos=0x6A, ack_req=True),
        packet(ACK, 104, tos=0x6A, **BACK),
    ]
    analysis = analyze_file(write_pcap(tmp_path / "back.pcap", frames, times_us=times))
    assert analysis.replay.backward_timestamps == 3
    assert analysis.replay.frames == 8
    assert analysis.replay.first_ns == (START_US + 990) * 1000
    assert analysis.snapshot.taken_ns == analysis.replay.last_ns == (START_US + 2000) * 1000
    assert analysis.duration_s == pytest.approx(1010e-6)
    request = row(analysis)
    assert (request["packets"], request["gap_packets"]) == (5, 0)
    # The first ACK came before its request: no round trip can be made of that.
    assert request["rtt_us"]["max"] <= 200.0
    assert row(analysis, OPPOSITE)["last_ns"] == (START_US + 1725) * 1000
    assert "backwards 3 times" in analysis.to_text()


# ---- the rest of the interface ----


def test_progress_goes_from_the_start_to_the_size_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "_PROGRESS_EVERY_FRAMES", 100)
    frames = [packet(SEND_ONLY, n, 1000) for n in range(1000)]
    path = write_pcap(tmp_path / "long.pcap", frames)
    calls: list[tuple[int, int]] = []
    analyze_file(path, lambda done, total: calls.append((done, total)))
    size = path.stat().st_size
    assert len(calls) == 11
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert {total for _, total in calls} == {size}
    assert calls[-1] == (size, size)


def many_flows(count: int) -> list[bytes]:
    """One packet each of so many flows."""
    frame = packet(SEND_ONLY, 1, 8)
    return [frame[:47] + number.to_bytes(3, "big") + frame[50:] for number in range(count)]


def test_more_flows_than_the_first_table_holds_are_all_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "_FIRST_MAX_FLOWS", 256)
    analysis = analyze_file(write_pcap(tmp_path / "flows.pcap", many_flows(1000)))
    assert analysis.replay.ignored == {}
    assert len(analysis.snapshot.keys) == 1000


def test_flows_beyond_the_largest_table_are_missed_loudly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "_FIRST_MAX_FLOWS", 256)
    monkeypatch.setattr(replay_module, "_LARGEST_MAX_FLOWS", 512)
    analysis = analyze_file(write_pcap(tmp_path / "flows.pcap", many_flows(1000)))
    kept = len(analysis.snapshot.keys)
    assert 512 <= kept < 1000  # the kernel may round up
    assert analysis.replay.ignored == {"flow_table_full": 1000 - kept}
    assert "More flows than the table holds" in analysis.to_text()


def test_the_report_fits_the_screen(tmp_path: Path) -> None:
    frames = [*exchange(), *(packet(SEND_ONLY, n, 8, dqpn=n) for n in range(64, 128))]
    analysis = analyze_file(write_pcap(tmp_path / "r.pcap", frames))
    lines = analysis.to_text(80).splitlines()
    assert max(len(line) for line in lines[1:]) <= 80  # the first one is the file's path
    assert any("flows more (--wide lists them)" in line for line in lines)
    wide = analysis.to_text(80, wide=True)
    assert "--wide" not in wide
    for number in range(64, 128):
        assert f"{V4[0]}-{V4[1]}-0x{number:06x}" in wide
