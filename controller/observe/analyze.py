"""`controller analyze FILE`: a capture's facts, flows and verdicts, as JSON and as text."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from controller.observe.replay import ProgressCallback, Replay, replay
from controller.observe.report import counts_text, flows_table, paragraph, verdicts_text
from controller.observe.snapshot import Snapshot, flow_rows
from controller.observe.verdicts import Verdict, judge

_MAX_FLOWS_SHOWN = 20

# BTH opcode bits 7..5 and 4..0 (IBTA vol. 1, table 38; A17, A19).
_TRANSPORTS = ("RC", "UC", "RD", "UD", "CNP", "XRC")
_OPERATIONS = (
    "SEND First", "SEND Middle", "SEND Last", "SEND Last Imm", "SEND Only", "SEND Only Imm",
    "WRITE First", "WRITE Middle", "WRITE Last", "WRITE Last Imm", "WRITE Only",
    "WRITE Only Imm", "READ Request", "READ Response First", "READ Response Middle",
    "READ Response Last", "READ Response Only", "Acknowledge", "ATOMIC Acknowledge",
    "CmpSwap", "FetchAdd", "Resync", "SEND Last Inv", "SEND Only Inv", "", "", "", "",
    "FLUSH", "ATOMIC WRITE", "", "",
)  # fmt: skip


def opcode_name(opcode: int) -> str:
    """``RC WRITE Only`` for 0x0a."""
    if opcode == 0x81:
        return "CNP"
    transport = opcode >> 5
    if transport >= len(_TRANSPORTS):
        return "unknown"
    return f"{_TRANSPORTS[transport]} {_OPERATIONS[opcode & 0x1F]}".strip()


@dataclass(frozen=True)
class Analysis:
    """A capture, analyzed."""

    path: Path
    replay: Replay

    @property
    def snapshot(self) -> Snapshot:
        """The flows, as all reports take them."""
        return self.replay.snapshot

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """``flow_rows`` of the capture."""
        return flow_rows(self.snapshot)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Worst first."""
        return judge(self.snapshot, self.rows)

    def to_json(self) -> dict[str, Any]:
        """``analyze --json``.

        ``frames`` = ``rocev2_packets`` + ``rocev1_packets`` + the sum of ``ignored``;
        ``opcodes`` counts RoCEv2 packets only.
        """
        facts = self.replay
        return {
            "file": str(self.path),
            "frames": facts.frames,
            "rocev2_packets": facts.rocev2_packets,
            "rocev1_packets": facts.rocev1_packets,
            "ignored": facts.ignored,
            "opcodes": facts.opcodes,
            "first_time": _iso_time(facts.first_ns) if facts.frames else None,
            "duration_s": self.duration_s,
            "backward_timestamps": facts.backward_timestamps,
            "cut_packets": facts.cut_packets,
            "truncated_file": facts.truncated_file,
            "flows": self.rows,
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
        }

    @property
    def duration_s(self) -> float:
        """From the earliest to the latest frame."""
        return (self.replay.last_ns - self.replay.first_ns) / 1e9

    def to_text(self, width: int = 80, wide: bool = False) -> str:
        """The report for a person; `wide` leaves nothing out."""
        rows = self.rows
        shown = rows
        if not wide and len(rows) > _MAX_FLOWS_SHOWN:
            shown = sorted(rows, key=lambda row: -int(row["packets"]))[:_MAX_FLOWS_SHOWN]
        lines = [*self._header_lines(width), "", flows_table(shown, width, wide)]
        if len(shown) < len(rows):
            lines.append(f"... and {len(rows) - len(shown)} flows more (--wide lists them)")
        lines += ["", verdicts_text(self.verdicts, width, wide)]
        return "\n".join(lines)

    def _header_lines(self, width: int) -> list[str]:
        facts = self.replay
        lines = [f"{self.path}"]
        if facts.frames:
            lines.append(f"  {_iso_time(facts.first_ns)}, {self.duration_s:.6f} s")
        lines.append(
            f"  {facts.frames} frames: {facts.rocev2_packets} RoCEv2, {facts.rocev1_packets} RoCEv1"
            f", {sum(facts.ignored.values())} others"
        )
        if facts.ignored:
            ignored = counts_text((name.replace("_", " "), n) for name, n in facts.ignored.items())
            lines.append(paragraph(f"others: {ignored}", width, "    ", "  "))
        if facts.opcodes:
            opcodes = counts_text((opcode_name(int(op, 16)), n) for op, n in facts.opcodes.items())
            lines.append(paragraph(f"opcodes: {opcodes}", width, "    ", "  "))
        lines += [paragraph(note, width, "    ", "  ! ") for note in self._notes()]
        return lines

    def _notes(self) -> list[str]:
        facts, notes = self.replay, []
        if facts.truncated_file:
            notes.append(
                "The file ends inside a record or is damaged; all that came before it counts."
            )
        if facts.backward_timestamps:
            notes.append(
                f"Time goes backwards {facts.backward_timestamps} times: round trips are "
                "doubtful, and so is the order of packets."
            )
        if facts.cut_packets:
            notes.append(
                f"{facts.cut_packets} packets are cut short; their bytes are counted by the IP "
                "length."
            )
        if facts.rocev1_packets:
            notes.append(
                "RoCEv1 is counted, not analyzed: the answers to RoCEv2 requests may be among it."
            )
        if "flow_table_full" in facts.ignored:
            notes.append("More flows than the table holds: the last ones are not shown.")
        return notes


def _iso_time(time_ns: int) -> str:
    moment = datetime.fromtimestamp(time_ns // 1_000_000_000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{time_ns % 1_000_000_000:09d}Z"


def analyze_file(path: str | Path, progress: ProgressCallback | None = None) -> Analysis:
    """Replay a capture and judge it; parameters and errors are those of ``replay``."""
    return Analysis(Path(path), replay(path, progress))
