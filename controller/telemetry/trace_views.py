"""Traces for people: a summary and a table of iterations, at most 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from controller.iteration.traces.summary import Count, IterationRow, Summary
from controller.telemetry.text import wrapped
from controller.units import format_bytes, format_duration

_MOST_GROUPS = 12
_UNTOLD = "-"


def _size(payload: float | None) -> str:
    return _UNTOLD if payload is None else format_bytes(payload)


def _time(time_ns: float | None) -> str:
    return _UNTOLD if time_ns is None else format_duration(time_ns)


def _groups(title: str, groups: Mapping[str, Count]) -> list[str]:
    lines = ["", f"{title:<40}{'collectives':>12}{'bytes':>14}"]
    for name, count in list(groups.items())[:_MOST_GROUPS]:
        label = name if len(name) < 40 else name[:38] + "…"
        lines.append(f"{label or '(not told)':<40}{count.collectives:>12}{_size(count.bytes):>14}")
    if len(groups) > _MOST_GROUPS:
        rest = sum(count.collectives for count in list(groups.values())[_MOST_GROUPS:])
        lines.append(f"{f'{len(groups) - _MOST_GROUPS} more':<40}{rest:>12}")
    return lines


def _notes(notes: Sequence[str]) -> list[str]:
    return ["", *(wrapped(f"note: {note}") for note in notes)] if notes else []


def summary_text(summary: Summary, with_groups: bool = True) -> str:
    """What was read from a trace.

    Parameters
    ----------
    summary
        Of the trace.
    with_groups
        Also list operations and communicators.
    """
    lines = [f"format       {summary.format}"]
    if summary.iterations is not None:
        lines.append(f"iterations   {summary.iterations} by the trace's own count")
    if summary.timed:
        lines.append(f"duration     {format_duration(summary.duration_ns)}")
        lines.append(f"windows      {summary.windows}")
    if summary.period_mean_ns is not None:
        spread = ""
        if summary.period_std_ns is not None:
            share = summary.period_std_ns / summary.period_mean_ns if summary.period_mean_ns else 0
            spread = f" +- {format_duration(summary.period_std_ns)} ({100 * share:.2f} %)"
        lines.append(f"period       {format_duration(summary.period_mean_ns)}{spread}")
    if summary.window_mean_ns:
        lines.append(f"window       {format_duration(summary.window_mean_ns)}")
    if summary.window_bytes is not None:
        lines.append(f"per window   {summary.window_bytes:.0f} bytes")
    if summary.bytes is not None:
        lines.append(f"bytes        {summary.bytes} ({format_bytes(summary.bytes)})")
    if summary.ops and with_groups:
        lines += _groups("operation", summary.ops)
    if with_groups and (len(summary.communicators) > 1 or any(summary.communicators)):
        lines += _groups("communicator", summary.communicators)
    return "\n".join([*lines, *_notes(summary.notes)])


def iterations_text(rows: Sequence[IterationRow]) -> str:
    """A table of iterations, in order and numbered from 0."""
    lines = [f"{'iteration':>9}{'start':>14}{'period':>14}{'window':>14}{'bytes':>15}{'colls':>8}"]
    for number, row in enumerate(rows):
        inside = _UNTOLD if row.collectives is None else str(row.collectives)
        payload = _UNTOLD if row.bytes is None else str(row.bytes)
        lines.append(
            f"{number:>9}{format_duration(row.start_ns):>14}{_time(row.period_ns):>14}"
            f"{_time(row.window_ns or None):>14}{payload:>15}{inside:>8}"
        )
    return "\n".join(lines)
