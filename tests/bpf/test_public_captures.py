"""Public captures, where somebody put them beside the checkout, against tshark and scapy's counts.

They may not be redistributed, so they are no part of the project: without
``../shared/data/pcap`` there is nothing to collect here.
"""

from __future__ import annotations

import subprocess
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from controller.dataplane.compile import Artifact
from controller.errors import InputError
from controller.observe import replay as replay_module
from controller.observe.analyze import Analysis, analyze_file

FOLDER = Path(__file__).parents[2].parent / "shared" / "data" / "pcap"
CAPTURES = sorted(FOLDER.glob("*.pcap"))
ETHERNET_CAPTURES = [path for path in CAPTURES if "native-ib" not in path.name]

# Frames, RoCEv2, RoCEv1 (PROVENANCE.md, counted there with scapy and tshark).
COUNTS = {
    "mag_nvme_host-echo": (69, 69, 0),
    "mag_nvme_host_cat": (49, 49, 0),
    "mag_rdma.dump": (19, 19, 0),
    "mag_read2": (16, 13, 0),
    "mag_rocev1_test": (624, 301, 323),
    "mag_rocev2-2_test": (641, 641, 0),
    "mag_rocev2_test": (708, 708, 0),
    "mag_send": (9, 9, 0),
    "mag_write": (17, 17, 0),
    "scapy_uts_captured_hex": (3, 1, 2),
}
# PSNs jumped over, and how many of them a later ACK covers, RoCEv1 included. The second
# number takes an ACK only if its PSN lies among the stream's requests in the file.
JUMPED_OVER = {
    "mag_rocev1_test": (7045, 4998),
    "mag_rocev2-2_test": (6747, 5101),
    "mag_rocev2_test": (6912, 5088),
}
# The queue pairs of one file start their PSNs more than this apart, so that an ACK this far
# beyond the last request seen still belongs to one stream only.
STREAM_DISTANCE = 1000
ACKNOWLEDGE = 0x11
CNP = 0x81
FIELDS = (
    "udp.dstport", "eth.src", "eth.dst", "ip.src", "ip.dst", "ip.dsfield.ecn",
    "infiniband.bth.opcode", "infiniband.bth.destqp", "infiniband.bth.psn",
)  # fmt: skip


class Packet(NamedTuple):
    """One RoCE packet as tshark sees it."""

    is_v2: bool
    macs: tuple[str, str]
    flow: tuple[str, str, int]
    ecn: int
    opcode: int
    psn: int


def tshark(path: Path) -> list[Packet]:
    """All RoCE packets of a file; TFTP and its like may not take port 4791's other end."""
    command = ["tshark", "-r", str(path), "--disable-protocol", "tftp", "-Y", "infiniband.bth"]
    command += ["-T", "fields", "-E", "separator=,", "-E", "occurrence=f"]
    command += [argument for field in FIELDS for argument in ("-e", field)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    packets = []
    for line in output.splitlines():
        port, mac_src, mac_dst, src, dst, ecn, opcode, qpn, psn = line.split(",")
        packets.append(
            Packet(
                port == "4791",
                (mac_src, mac_dst),
                (src, dst, int(qpn, 0)),
                int(ecn or 0),
                int(opcode, 0),
                int(psn, 0),
            )
        )
    return packets


def distance(start: int, psn: int) -> int:
    """How far `psn` is beyond `start`, in 24-bit arithmetic."""
    return (psn - start + (1 << 23)) % (1 << 24) - (1 << 23)


class Stream(NamedTuple):
    """Requests of one direction of a queue pair and the ACKs that may be theirs."""

    is_v2: bool
    flow: tuple[str, str, int]
    missing: list[int]  # PSNs jumped over, counted from the first one seen
    length: int
    acks: list[int]  # likewise, of all ACKs between these two hosts the other way

    def acknowledged(self, beyond: int) -> int:
        """PSNs of `missing` covered by an ACK at most `beyond` past the last request."""
        ours = [ack for ack in self.acks if 0 <= ack < self.length + beyond]
        return sum(1 for psn in self.missing if psn <= max(ours, default=-1))


def streams(packets: Sequence[Packet]) -> list[Stream]:
    """Every request stream of a capture, from tshark's fields alone."""
    requests: dict[tuple[tuple[str, str], int], list[Packet]] = defaultdict(list)
    acks: dict[tuple[str, str], list[int]] = defaultdict(list)
    for packet in packets:
        if packet.opcode == ACKNOWLEDGE:
            acks[packet.macs].append(packet.psn)
        else:
            requests[packet.macs, packet.flow[2]].append(packet)
    result = []
    for (macs, _), group in requests.items():
        first = group[0].psn
        seen = [distance(first, packet.psn) for packet in group]
        assert seen == sorted(set(seen)), "no stream of these captures repeats or goes back"
        length = seen[-1] + 1
        missing = sorted(set(range(length)) - set(seen))
        answers = [distance(first, psn) for psn in acks[macs[1], macs[0]]]
        result.append(Stream(group[0].is_v2, group[0].flow, missing, length, answers))
    return result


@pytest.fixture(scope="module")
def analyses() -> dict[Path, Analysis]:
    """Captures analyzed so far."""
    return {}


# A class, since pytest leaves one with __test__ = False alone; an empty list of parameters
# would be a skipped test.
class TestPublicCaptures:
    """Each of them as tshark sees it."""

    __test__ = bool(CAPTURES)

    @pytest.fixture(autouse=True)
    def analyzer(
        self,
        analyses: dict[Path, Analysis],
        replay_artifact: Artifact,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Compile once, analyze each file once."""
        monkeypatch.setattr(replay_module, "compile_programs", lambda *_: replay_artifact)
        self.analyses = analyses

    def analysis(self, path: Path) -> Analysis:
        """The file, analyzed."""
        if path not in self.analyses:
            self.analyses[path] = analyze_file(path)
        return self.analyses[path]

    @pytest.mark.parametrize("path", ETHERNET_CAPTURES, ids=lambda path: path.stem)
    def test_packets_and_opcodes_are_those_of_tshark(self, path: Path) -> None:
        document = self.analysis(path).to_json()
        packets = tshark(path)
        v2 = [packet for packet in packets if packet.is_v2]
        opcodes = Counter(f"0x{packet.opcode:02x}" for packet in v2)
        assert document["rocev2_packets"] == len(v2)
        assert document["rocev1_packets"] == len(packets) - len(v2)
        assert document["opcodes"] == dict(sorted(opcodes.items()))
        counts = (document["frames"], document["rocev2_packets"], document["rocev1_packets"])
        assert counts == COUNTS.get(path.stem, counts)
        assert document["frames"] == counts[1] + counts[2] + sum(document["ignored"].values())
        assert not document["truncated_file"]

    @pytest.mark.parametrize("path", ETHERNET_CAPTURES, ids=lambda path: path.stem)
    def test_packets_marks_and_cnps_of_each_flow_are_those_of_tshark(self, path: Path) -> None:
        v2 = [packet for packet in tshark(path) if packet.is_v2]
        rows = self.analysis(path).rows
        ours = {(row["src"], row["dst"], row["dqpn"]): row for row in rows}
        assert len(ours) == len(rows)

        def of_rows(key: str) -> dict[tuple[str, str, int], int]:
            return {flow: row[key] for flow, row in ours.items() if row[key]}

        assert of_rows("packets") == Counter(packet.flow for packet in v2)
        assert of_rows("ce") == Counter(packet.flow for packet in v2 if packet.ecn == 3)
        assert of_rows("cnp") == Counter(packet.flow for packet in v2 if packet.opcode == CNP)
        # None of these files has a NAK or a repeated request.
        for key in ("naks", "rnr_naks", "duplicates", "recovered", "psn_resyncs"):
            assert of_rows(key) == {}, key

    @pytest.mark.parametrize("path", ETHERNET_CAPTURES, ids=lambda path: path.stem)
    def test_nothing_is_called_network_loss(self, path: Path) -> None:
        assert "network_loss" not in {v.verdict for v in self.analysis(path).verdicts}

    @pytest.mark.parametrize(
        "path",
        [path for path in CAPTURES if path.stem in JUMPED_OVER],
        ids=lambda path: path.stem,
    )
    def test_psns_that_the_capture_missed_are_counted_as_such(self, path: Path) -> None:
        found = streams(tshark(path))
        jumped, acknowledged = JUMPED_OVER[path.stem]
        assert sum(len(stream.missing) for stream in found) == jumped
        assert sum(stream.acknowledged(beyond=0) for stream in found) == acknowledged

        # We see the RoCEv2 half only. And we know each ACK's queue pair, so that one beyond
        # the last request in the file counts, too: it acknowledges all before it. In the
        # RoCEv1 file the ACKs of RoCEv2 requests are RoCEv1 frames: nothing is decided.
        ours = {(row["src"], row["dst"], row["dqpn"]): row for row in self.analysis(path).rows}
        is_half = any(not stream.is_v2 for stream in found)
        for stream in found:
            if stream.is_v2:
                row = ours[stream.flow]
                known = 0 if is_half else stream.acknowledged(STREAM_DISTANCE)
                assert row["gap_packets"] == len(stream.missing)
                assert row["capture_loss_packets"] == known
        verdicts = Counter(verdict.verdict for verdict in self.analysis(path).verdicts)
        assert verdicts["undecided_gaps"] > 0
        assert (verdicts["capture_loss"] == 0) == is_half

    @pytest.mark.parametrize(
        "path", sorted(set(CAPTURES) - set(ETHERNET_CAPTURES)), ids=lambda path: path.stem
    )
    def test_native_infiniband_is_named_as_what_it_is(self, path: Path) -> None:
        with pytest.raises(InputError, match=r"197 \(ERF: native InfiniBand"):
            self.analysis(path)
