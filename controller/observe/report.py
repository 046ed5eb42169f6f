"""Text of the reports: flow tables, verdicts, one flow in full. Plain strings, 80 columns.

Not rich's tables: they take seconds for ten thousand rows.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from controller.observe.joined import Row
from controller.observe.verdicts import Verdict

if TYPE_CHECKING:
    from controller.observe.explain import Explanation

_MAX_NAME_CHARS = 40  # two IPv4 addresses and a QPN
_DIRECTIONS = {"ingress": "in", "egress": "out", "seen": "-"}
_KIND_LETTERS = {
    "send": "S",
    "write": "W",
    "read_request": "R",
    "read_response": "r",
    "atomic": "A",
    "atomic_ack": "a",
    "ack": "k",
    "nak": "n",
    "cnp": "c",
    "other": "o",
}
KIND_LEGEND = (
    "kinds: S send, W write, R read, r read response, A atomic, a its answer,\n"
    "       k ACK, n NAK, c CNP, o other"
)


_SMALL = tuple(map(str, range(1000)))


def human(value: int) -> str:
    """A count in four characters at most: 999, 1.2k, 12k, 123k, 1.2M."""
    if value < 1000:
        return _SMALL[value]
    scaled = float(value)
    for unit in "kMGTPE":
        scaled /= 1000
        if scaled < 9.95:
            return f"{scaled:.1f}{unit}"
        if scaled < 999.5:
            return f"{scaled:.0f}{unit}"
    return "lots"


class _Column(NamedTuple):
    title: str
    cells: Callable[[Sequence[Row]], list[str]]
    is_left: bool = False


def _count(title: str, key: str) -> _Column:
    return _Column(title, lambda rows: [human(row[key]) for row in rows])


def _directions(rows: Sequence[Row]) -> list[str]:
    return [_DIRECTIONS.get(row["direction"], "?") for row in rows]


def _interfaces(rows: Sequence[Row]) -> list[str]:
    return [str(row["interface"]) for row in rows]


def _kinds(rows: Sequence[Row]) -> list[str]:
    return ["".join([_KIND_LETTERS[kind] for kind in row["kinds"]]) for row in rows]


def _dscps(rows: Sequence[Row]) -> list[str]:
    return [
        ",".join(map(str, row["dscp"])) if len(row["dscp"]) < 3 else f"{len(row['dscp'])} kinds"
        for row in rows
    ]


def _rtts(rows: Sequence[Row]) -> list[str]:
    return [str(row["rtt_us"]["p50"]) if row["rtt_us"] else "-" for row in rows]


def _owners(rows: Sequence[Row]) -> list[str]:
    return [f"{row['pid']}/{row['command']}" if row["pid"] else "-" for row in rows]


# As shown, left to right. ACKD: jumped over, yet acknowledged (capture_loss_packets).
_COLUMNS = {
    "dir": _Column("DIR", _directions, is_left=True),
    "interface": _Column("INTERFACE", _interfaces, is_left=True),
    "kinds": _Column("KINDS", _kinds, is_left=True),
    "packets": _count("PKTS", "packets"),
    "bytes": _count("BYTE", "wire_bytes"),
    "messages": _count("MSGS", "messages"),
    "gaps": _count("GAPS", "gap_packets"),
    "capture": _count("ACKD", "capture_loss_packets"),
    "dup": _count("DUP", "duplicates"),
    "nak": _count("NAK", "naks"),
    "rnr": _count("RNR", "rnr_naks"),
    "ce": _count("CE", "ce"),
    "cnp": _count("CNP", "cnp"),
    "dscp": _Column("DSCP", _dscps),
    "rtt": _Column("RTT us", _rtts),
    "owner": _Column("PID/COMMAND", _owners, is_left=True),
}
# Which are shown first when there is room for some only.
_PRIORITY = (
    "packets", "bytes", "gaps", "dup", "nak", "rnr", "ce", "dir", "cnp", "dscp", "kinds",
    "messages", "rtt", "interface", "owner", "capture",
)  # fmt: skip


def flows_table(rows: Sequence[Row], width: int = 80, wide: bool = False) -> str:
    """A table of flows.

    Parameters
    ----------
    rows
        Of ``flow_rows``.
    width
        Characters a line; columns are chosen to fit.
    wide
        All columns and whole names, however long the lines get.
    """
    if not rows:
        return "No RoCEv2 flows."
    names = [str(row["flow"]) for row in rows]
    longest = max(map(len, names))
    if not wide and longest > _MAX_NAME_CHARS:
        names = [_shorten(name, _MAX_NAME_CHARS) for name in names]
        longest = _MAX_NAME_CHARS
    longest = max(longest, len("FLOW"))
    left = width - longest
    chosen: dict[str, tuple[list[str], int]] = {}
    for key in _PRIORITY:
        column = _COLUMNS[key]
        if not wide and left <= len(column.title):
            continue
        cells = column.cells(rows)
        size = max(len(column.title), max(map(len, cells)))
        if wide or left >= size + 1:
            chosen[key] = (cells, size)
            left -= size + 1
    shown = [key for key in _COLUMNS if key in chosen]
    form = f"{{:<{longest}}}"
    for key in shown:
        form += f" {{:{'<' if _COLUMNS[key].is_left else '>'}{chosen[key][1]}}}"
    lines = [form.format("FLOW", *(_COLUMNS[key].title for key in shown))]
    lines += map(form.format, names, *(chosen[key][0] for key in shown))
    return "\n".join(line.rstrip() for line in lines)


def _shorten(name: str, room: int) -> str:
    """The beginning and the end of a name: the end has the QPN."""
    if len(name) <= room:
        return name
    tail = room // 2
    return f"{name[: room - tail - 1]}~{name[-tail:]}"


def paragraph(text: str, width: int, indent: str, first: str | None = None) -> str:
    """Text wrapped at `width`; words longer than a line stay whole."""
    return textwrap.fill(
        text,
        width,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def verdicts_text(verdicts: Sequence[Verdict], width: int = 80, wide: bool = False) -> str:
    """Verdicts, equal ones of several flows together: the worst flow stands for them."""
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault((verdict.severity, verdict.verdict), []).append(verdict)
    parts = []
    for (severity, name), group in groups.items():
        ordered = sorted(group, key=_weight, reverse=True)
        worst = ordered[0]
        what = "host pairs" if name == "low_entropy" else "flows"
        count = f" ({len(group)} {what})" if len(group) > 1 else ""
        lines = [f"{severity.upper()}: {name}{count}"]
        lines.append(f"  {worst.flow}")
        lines.append(paragraph(worst.summary, width, "    "))
        lines.append(paragraph(evidence_text(worst.evidence), width, "    "))
        others = ordered[1:]
        listed = others if wide else others[:3]
        lines += [f"  {verdict.flow}" for verdict in listed]
        if len(listed) < len(others):
            lines.append(f"  ... and {len(others) - len(listed)} more (--wide lists them)")
        lines.append(paragraph(worst.remedy, width, "    ", "  > "))
        parts.append("\n".join(lines))
    return "\n".join(parts) if parts else "No verdict: no connected RoCEv2 flow was seen."


def _weight(verdict: Verdict) -> float:
    """How much evidence: the largest number in it."""
    numbers = [value for value in verdict.evidence.values() if isinstance(value, int | float)]
    return max(numbers, default=0)


def evidence_text(evidence: Mapping[str, Any]) -> str:
    """``name value`` pairs; unknown values (None) are left out."""
    parts = []
    for name, value in evidence.items():
        if value is None:
            continue
        label = name.replace("_pct", " %").replace("_", " ")
        if isinstance(value, bool):
            value = "yes" if value else "no"
        elif isinstance(value, Mapping):
            value = ", ".join(f"{key} {number}" for key, number in value.items())
        elif isinstance(value, list | tuple):
            value = "/".join(map(str, value))
        parts.append(f"{label} {value}")
    return "; ".join(parts)


def counts_text(counts: Iterable[tuple[str, int]]) -> str:
    """``name n, name n`` or ``none``."""
    return ", ".join(f"{name} {number}" for name, number in counts) or "none"


def explanation_text(explanation: Explanation, width: int = 80) -> str:
    """One flow in full."""
    lines = [f"Flow {explanation.flow}"]
    lines.append(verdicts_text(explanation.verdicts, width, wide=True))
    lines.append("What it rests on")
    for row in explanation.rows:
        lines += _point_lines(row, width)
    if explanation.opposite:
        lines.append(f"Opposite direction {explanation.opposite}")
        for row in explanation.opposite_rows:
            lines += _point_lines(row, width)
    else:
        lines.append("Opposite direction: not known")
    return "\n".join(lines)


def _point_lines(row: Row, width: int) -> list[str]:
    side = {"ingress": "entering", "egress": "leaving"}.get(row["direction"], "in")
    facts = [
        f"{row['transport']}, {side} {row['interface']}",
        f"owner {row['command']} (pid {row['pid']})" if row["pid"] else "",
        f"QPN 0x{row['dqpn']:06x}"
        + (f", opposite 0x{row['peer_qpn']:06x} ({row['pair']})" if row["peer_qpn"] else ""),
        f"path MTU {row['path_mtu']}" if row["path_mtu"] else "",
        f"UDP source port {row['sport']}",
    ]
    kinds = counts_text((name.replace("_", " "), n) for name, n in row["kinds"].items())
    order = [
        ("jumped over", row["gap_packets"]),
        ("came late", row["recovered"]),
        ("acknowledged unseen", row["capture_loss_packets"]),
        ("sent again", row["duplicates"]),
        ("read responses missing", row["response_gap_packets"]),
    ]
    ecn = counts_text((name.replace("_", "-"), n) for name, n in row["ecn"].items() if n)
    naks = [(name.replace("_", " "), n) for name, n in row["naks_by_code"].items()]
    if row["rnr_naks"]:
        naks.append(("RNR", row["rnr_naks"]))
    paragraphs = [
        "; ".join(fact for fact in facts if fact),
        f"{row['packets']} packets, {row['wire_bytes']} bytes on the wire, "
        f"{row['payload_bytes']} of payload, {row['messages']} messages: {kinds}",
        f"order: {counts_text((name, n) for name, n in order if n)}; NAKs: {counts_text(naks)}",
        f"DSCP {'/'.join(map(str, row['dscp']))}; ECN {ecn}; FECN {row['fecn']}, "
        f"BECN {row['becn']}, CNP {row['cnp']}",
    ]
    rtt = row["rtt_us"]
    if rtt:
        paragraphs.append(
            f"request to ACK here, us: min {rtt['min']}, p50 {rtt['p50']}, p99 {rtt['p99']}, "
            f"max {rtt['max']} ({rtt['samples']} samples)"
        )
    return [paragraph(text, width, "    ", "  ") for text in paragraphs]
