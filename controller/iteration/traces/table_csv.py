"""CSV of sync windows or collectives: what people write by hand, and what `trace import` writes."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Mapping

from controller.iteration.series import Collective, SyncWindow, Trace
from controller.iteration.traces.names import canonical_op
from controller.iteration.traces.source import TraceSource
from controller.iteration.traces.tables import MAX_CLOCK_NS, NS_PER_US, Row, cells_of

FORM = "start_us,bytes; start_us,end_us,bytes; or start_us,end_us|dur_us,op,bytes,..."

# What a column may be called; the first name is the one that is written.
_NAMES = {
    "start_us": "start_us", "t_us": "start_us",
    "end_us": "end_us",
    "dur_us": "dur_us", "duration_us": "dur_us",
    "bytes": "bytes", "op": "op",
    "communicator": "communicator",
    "iteration": "iteration", "cpu_step": "iteration",
}  # fmt: skip
_WITHOUT_HEADER = {
    1: ("start_us",),
    2: ("start_us", "bytes"),
    3: ("start_us", "end_us", "bytes"),
}
_MAX_ITERATION = 10**15


def is_header(names: Iterable[str]) -> bool:
    """Whether a row names columns of this format."""
    return any(_NAMES.get(name.strip()) == "start_us" for name in names)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def looks_like(names: list[str]) -> bool:
    """Whether a first row may be one of this format: its names, or numbers alone."""
    return is_header(names) or (
        len(names) in _WITHOUT_HEADER and all(not c.strip() or _is_number(c) for c in names)
    )


def read_table(source: TraceSource) -> Trace:
    """Sync windows, or collectives where there is a column ``op`` or ``communicator``.

    Parameters
    ----------
    source
        CSV; times in microseconds from any origin, not negative. Without a row of names the
        columns are ``start_us``, ``start_us,bytes`` or ``start_us,end_us,bytes``. A blank cell
        is "not told".

    Returns
    -------
    Trace
        In order of begin. Rows of windows that begin at the same time are one window.

    Raises
    ------
    InputError
        A row that cannot be read, an end before its begin, or no row.
    """
    columns: Mapping[str, int] | None = None
    width = 0
    windows: list[SyncWindow] = []
    collectives: list[Collective] = []
    is_windows = True
    for line, cells in cells_of(source):
        if columns is None:
            columns, width = _columns(source, cells), len(cells)
            is_windows = not columns.keys() & {"op", "communicator"}
            if is_header(cells):
                continue
        if len(cells) != width:
            raise source.error(
                f"line {line} has {len(cells)} columns, the first row {width}.",
                f"Expected {FORM}.",
            )
        row = Row(source, line, columns, cells)
        start_ns = row.time_ns("start_us", NS_PER_US)
        end_ns = _end_ns(row, start_ns)
        payload = row.optional_count("bytes")
        if is_windows:
            windows.append(SyncWindow(start_ns, end_ns, payload))
        else:
            collectives.append(
                Collective(
                    start_ns,
                    end_ns,
                    payload,
                    canonical_op(row["op"]) if "op" in row else "unknown",
                    row["communicator"][:80] if "communicator" in row else "",
                    row.optional_count("iteration", _MAX_ITERATION),
                )
            )
    if not windows and not collectives:
        raise source.error("has no row of numbers.", f"Expected {FORM}.")
    starts = [item.start_ns for item in (windows or collectives)]
    notes = []
    if any(one > other for one, other in itertools.pairwise(starts)):
        notes.append("rows were not in order of begin; they are sorted")
    collectives.sort(key=lambda collective: collective.start_ns)
    windows.sort(key=lambda window: window.start_ns)
    merged = _merge(windows)
    if len(merged) < len(windows):
        count = len(windows) - len(merged)
        notes.append(f"{count} rows begin when another does and are counted to its window")
    return Trace("csv", tuple(collectives), tuple(merged), tuple(notes))


def _columns(source: TraceSource, cells: list[str]) -> dict[str, int]:
    if not is_header(cells):
        names = _WITHOUT_HEADER.get(len(cells))
        if names is None:
            raise source.error(
                f"has {len(cells)} columns and no row that names them.", f"Expected {FORM}."
            )
        return {name: index for index, name in enumerate(names)}
    columns: dict[str, int] = {}
    for index, cell in enumerate(cells):
        name = _NAMES.get(cell.strip())
        if name is None:
            continue
        if name in columns:
            raise source.error(f"names the column {cell.strip()!r} twice.")
        columns[name] = index
    return columns


def _end_ns(row: Row, start_ns: int) -> int:
    if row.get("end_us"):
        end_ns = row.time_ns("end_us", NS_PER_US)
        if end_ns < start_ns:
            raise row.error("end_us", f"not less than start_us {row['start_us']}")
        return end_ns
    if row.get("dur_us"):
        return min(start_ns + row.duration_ns("dur_us", NS_PER_US), MAX_CLOCK_NS)
    return start_ns


def _merge(windows: list[SyncWindow]) -> list[SyncWindow]:
    """Windows in order of begin, those with the same begin made one."""
    merged: list[SyncWindow] = []
    for window in windows:
        if not merged or merged[-1].start_ns != window.start_ns:
            merged.append(window)
            continue
        last = merged[-1]
        payloads = [one.bytes for one in (last, window) if one.bytes is not None]
        merged[-1] = SyncWindow(
            last.start_ns, max(last.end_ns, window.end_ns), sum(payloads) if payloads else None
        )
    return merged


def _us(time_ns: int) -> str:
    """Microseconds with the nanoseconds behind the point, exact at any size."""
    whole, part = divmod(time_ns, NS_PER_US)
    return f"{whole}.{part:03d}" if part else str(whole)


def _cell(value: int | None) -> str:
    return "" if value is None else str(value)


def windows_csv(windows: Iterable[SyncWindow]) -> str:
    """Windows as CSV text that `read_table` reads back; times count from the first window.

    Parameters
    ----------
    windows
        In order of begin.
    """
    text = io.StringIO()
    text.write("start_us,end_us,bytes\n")
    origin_ns = None
    for window in windows:
        # Negative times are refused when read, and where a clock began says nothing.
        origin_ns = window.start_ns if origin_ns is None else origin_ns
        text.write(
            f"{_us(window.start_ns - origin_ns)},{_us(window.end_ns - origin_ns)},"
            f"{_cell(window.bytes)}\n"
        )
    return text.getvalue()


def collectives_csv(collectives: Iterable[Collective]) -> str:
    """Collectives as CSV text that `read_table` reads back.

    Parameters
    ----------
    collectives
        In order of begin. When the first begins below 0, times count from it.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("start_us", "end_us", "op", "bytes", "communicator", "iteration"))
    origin_ns: int | None = None
    for one in collectives:
        origin_ns = min(0, one.start_ns) if origin_ns is None else origin_ns
        writer.writerow(
            (
                _us(one.start_ns - origin_ns),
                _us(one.end_ns - origin_ns),
                one.op,
                _cell(one.bytes),
                one.communicator,
                _cell(one.iteration),
            )
        )
    return text.getvalue()
