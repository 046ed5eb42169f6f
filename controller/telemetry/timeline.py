"""Timelines of what ran when: one line per iteration or job, as text or as SVG. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from controller.units import format_duration

# begin, end, kind of one stretch of a row.
Segment = tuple[int, int, str]
Row = tuple[str, Sequence[Segment]]

# Kind -> (sign, colour, legend). Okabe and Ito's palette: told apart by colour-blind readers, too.
KINDS = {
    "compute": ("░", "#d9d9d9", "compute"),
    "sync": ("█", "#0072b2", "sync window"),
    "wait": ("▒", "#e69f00", "waiting"),
    "other": ("▓", "#56b4e9", "other communication"),
}
_UNKNOWN = ("▚", "#999999")
_EMPTY = " "

_LABEL_MOST = 24
_TEXT_LEAST = 20
_SVG_ROW, _SVG_BAR, _SVG_LEFT_PER_CHARACTER = 18, 12, 7
_SVG_MARGIN = 12
_TICKS = 6


def _span(rows: Sequence[Row], span_ns: tuple[int, int] | None) -> tuple[int, int]:
    """The time that the picture shows; never empty."""
    if span_ns is None:
        times = [time for _, segments in rows for segment in segments for time in segment[:2]]
        span_ns = (min(times), max(times)) if times else (0, 1)
    begin_ns, end_ns = span_ns
    return begin_ns, max(end_ns, begin_ns + 1)


def _kinds(rows: Sequence[Row]) -> list[str]:
    """Kinds that occur, the known ones first."""
    found = {segment[2] for _, segments in rows for segment in segments}
    return [kind for kind in KINDS if kind in found] + sorted(found - KINDS.keys())


def _label(text: str) -> str:
    clean = "".join(character if character.isprintable() else "?" for character in text)
    return clean if len(clean) <= _LABEL_MOST else clean[: _LABEL_MOST - 1] + "…"


def text_timeline(
    rows: Sequence[Row], width: int = 80, span_ns: tuple[int, int] | None = None
) -> str:
    """A timeline of block characters.

    Parameters
    ----------
    rows
        (label, segments), one line each; segments are (begin, end, kind) in ns on one clock, in
        any order. Kinds are those of `KINDS`; others are drawn with a sign of their own.
    width
        Columns of the whole picture; at least 20 beside the labels are used in any case.
    span_ns
        Begin and end of what is shown; None: all there is.

    Returns
    -------
    str
        Lines without trailing spaces: the rows, the axis, the legend. Empty without rows. A cell
        shows the kind that fills most of it, but a "sync" too short for that keeps one cell.
    """
    if not rows:
        return ""
    begin_ns, end_ns = _span(rows, span_ns)
    labels = [_label(label) for label, _ in rows]
    left = max(map(len, labels))
    cells = max(width - left - 1, _TEXT_LEAST)
    lines = [
        f"{label:>{left}} {_cells(segments, cells, begin_ns, end_ns)}".rstrip()
        for label, (_, segments) in zip(labels, rows, strict=True)
    ]
    until = format_duration(end_ns - begin_ns)
    lines.append(f"{'':>{left}} 0{until:>{cells - 1}}")
    legend = "   ".join(
        f"{KINDS.get(kind, _UNKNOWN)[0]} {KINDS[kind][2] if kind in KINDS else _label(kind)}"
        for kind in _kinds(rows)
    )
    if legend:
        lines.append(f"{'':>{left}} {legend}")
    return "\n".join(lines)


def _cells(segments: Iterable[Segment], cells: int, begin_ns: int, end_ns: int) -> str:
    scale = cells / (end_ns - begin_ns)
    covered: list[dict[str, float]] = [{} for _ in range(cells)]
    keep: list[tuple[float, float]] = []
    for start_ns, stop_ns, kind in segments:
        first = (max(start_ns, begin_ns) - begin_ns) * scale
        last = (min(stop_ns, end_ns) - begin_ns) * scale
        if last < first or first > cells:
            continue
        if kind == "sync":
            keep.append((first, last))
        for cell in range(int(first), min(math.ceil(last), cells)):
            share = min(last, cell + 1) - max(first, cell)
            covered[cell][kind] = covered[cell].get(kind, 0.0) + share
    drawn = [
        max(shares, key=lambda kind: (shares[kind], kind)) if shares else None for shares in covered
    ]
    for first, last in keep:
        inside = range(int(first), max(min(math.ceil(last), cells), int(first) + 1))
        if not any(cell < cells and drawn[cell] == "sync" for cell in inside):
            drawn[min(int((first + last) / 2), cells - 1)] = "sync"
    return "".join(_EMPTY if kind is None else KINDS.get(kind, _UNKNOWN)[0] for kind in drawn)


def nice_step(span: float, ticks: int = _TICKS) -> float:
    """The distance of ticks of an axis: 1, 2 or 5 times a power of ten.

    Parameters
    ----------
    span
        Length of the axis, above 0, in any unit.
    ticks
        About so many at most.
    """
    rough = span / ticks
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def svg_timeline(
    rows: Sequence[Row],
    title: str = "",
    width: int = 800,
    span_ns: tuple[int, int] | None = None,
) -> str:
    """A timeline as an SVG picture that needs no style sheet, font or script.

    Parameters
    ----------
    rows, span_ns
        See `text_timeline`.
    title
        Above the picture, and read aloud by screen readers.
    width
        Pixels.

    Returns
    -------
    str
        The document, in UTF-8 when written so. A segment is at least half a pixel wide.
    """
    begin_ns, end_ns = _span(rows, span_ns)
    labels = [_label(label) for label, _ in rows]
    left = _SVG_MARGIN + max(map(len, labels), default=0) * _SVG_LEFT_PER_CHARACTER + 6
    plot = max(width - left - 2 * _SVG_MARGIN, 100)
    top = 36 if title else 14
    bottom = top + len(rows) * _SVG_ROW
    scale = plot / (end_ns - begin_ns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 52}" '
        f'viewBox="0 0 {width} {bottom + 52}" role="img" font-family="sans-serif" '
        'font-size="11">',
        f"<title>{escape(title or 'timeline')}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    if title:
        parts.append(f'<text x="{_SVG_MARGIN}" y="20" font-size="14">{escape(title)}</text>')
    parts += _axis(begin_ns, end_ns, left, top, bottom, scale)
    for index, (label, (_, segments)) in enumerate(zip(labels, rows, strict=True)):
        y = top + index * _SVG_ROW
        parts.append(f'<text x="{left - 6}" y="{y + 13}" text-anchor="end">{escape(label)}</text>')
        for start_ns, stop_ns, kind in segments:
            start_ns, stop_ns = max(start_ns, begin_ns), min(stop_ns, end_ns)
            if stop_ns < start_ns:
                continue
            parts.append(
                f'<rect x="{left + (start_ns - begin_ns) * scale:.2f}" y="{y + 3}" '
                f'width="{max((stop_ns - start_ns) * scale, 0.5):.2f}" height="{_SVG_BAR}" '
                f'fill="{KINDS.get(kind, _UNKNOWN)[1]}"/>'
            )
    parts += _legend(_kinds(rows), left, bottom + 34)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _axis(begin_ns: int, end_ns: int, left: int, top: int, bottom: int, scale: float) -> list[str]:
    step_ns = nice_step(end_ns - begin_ns)
    parts = []
    for index in range(int((end_ns - begin_ns) / step_ns) + 1):
        x = left + index * step_ns * scale
        text = format_duration(index * step_ns) if index else "0"
        parts.append(
            f'<line x1="{x:.2f}" y1="{top}" x2="{x:.2f}" y2="{bottom}" stroke="#eeeeee"/>'
            f'<text x="{x:.2f}" y="{bottom + 14}" text-anchor="middle">{text}</text>'
        )
    return parts


def _legend(kinds: Sequence[str], left: int, y: int) -> list[str]:
    parts = []
    x = left
    for kind in kinds:
        text = KINDS[kind][2] if kind in KINDS else _label(kind)
        colour = KINDS.get(kind, _UNKNOWN)[1]
        parts.append(
            f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>'
            f'<text x="{x + 14}" y="{y}">{escape(text)}</text>'
        )
        x += 14 + len(text) * _SVG_LEFT_PER_CHARACTER + 16
    return parts
