"""Traces of training communication: one call reads any of the known formats.

The format is told by the content: gzip by its magic number, JSON by its keys, CSV by its columns,
logs by their lines. Names and suffixes of files mean nothing.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from controller.errors import InputError, UsageError
from controller.iteration.series import Trace
from controller.iteration.traces import aicb, minibatch, straggler, table_csv
from controller.iteration.traces.chakra import read_chakra
from controller.iteration.traces.kineto import read_kineto
from controller.iteration.traces.nccl import read_nccl
from controller.iteration.traces.source import ProgressCallback, TraceSource, open_source

__all__ = ["FORMATS", "has_times", "read_trace", "require_times"]

# What people may ask for -> what it is.
FORMATS: Mapping[str, str] = {
    "kineto": "PyTorch profiler JSON (traceEvents)",
    "chakra": "Chakra execution trace as JSON",
    "nccl": "NCCL or RCCL log (NCCL_DEBUG=INFO, subsystem COLL), or nccl-tests table",
    "straggler": "CSV of steps of all ranks (dp_rank,stage,rank,step,optype,...)",
    "minibatch": "CSV of mini-batch times (worker,gpu,time,batch_time_norm)",
    "aicb": "AICB workload CSV (comm_type,...,_elapsed_time)",
    "csv": f"CSV {table_csv.FORM}",
}

# Top-level keys of a JSON file -> format, and where its elements are.
_JSON_KEYS = {
    "traceEvents": ("kineto", read_kineto, "traceEvents.item"),
    "workload_graph": ("chakra", read_chakra, "workload_graph.item"),
    "nodes": ("chakra", read_chakra, "nodes.item"),
}
# Profiler metadata before the events is some hundred parts per GPU.
_MOST_PARTS_BEFORE = 1_000_000
_LOG_MARKS = (b" NCCL INFO ", b"NCCL version ", b"out-of-place", b"size_bytes,")
# A list of events; "[2024-05-22 17:15:22] host:...", "[1,0]<stdout>:" and "[rank0 ~ rank127]"
# begin with a bracket, too.
_JSON_BEGIN = re.compile(rb"\{|\[\s*(?:[\[\]{\"]|$)")


def read_trace(
    path: Path, format: str | None = None, progress: ProgressCallback | None = None
) -> Trace:
    """Read a trace of any known format.

    Parameters
    ----------
    path
        Plain or gzip; ``-`` is standard input. Files of some hundred MB are read as a stream.
    format
        One of `FORMATS` where the content shall not be asked; None: by content.
    progress
        Called now and then with (bytes read, bytes in all).

    Returns
    -------
    Trace
        See `has_times` for those that say in which order only.

    Raises
    ------
    InputError
        Missing, damaged, of no known format, or without communication; says what was found.
    UsageError
        No format has that name.
    """
    if format is not None and format not in FORMATS:
        raise UsageError(f"No trace format {format!r}; known are {', '.join(FORMATS)}.")
    with open_source(path, progress or (lambda _done, _total: None)) as source:
        return _reader(source, format)(source)


def has_times(trace: Trace) -> bool:
    """Whether the trace says when things happened; else only what happened in which order."""
    return bool(trace.windows) or any(
        one.start_ns != trace.collectives[0].start_ns for one in trace.collectives
    )


def require_times(trace: Trace, name: str) -> None:
    """Refuse a trace that cannot be timed.

    Parameters
    ----------
    trace
        As read.
    name
        What the error calls it.

    Raises
    ------
    InputError
        See `has_times`.
    """
    if not has_times(trace):
        raise InputError(
            f"{name} ({trace.source}) says which collectives ran, not when: "
            "it has no sync window that could be timed or predicted.",
            "Use a profiler trace, a log with time stamps, or CSV start_us,bytes.",
        )


def _reader(source: TraceSource, wanted: str | None) -> Callable[[TraceSource], Trace]:
    """The function that reads this content."""
    found, reader = _detect(source, wanted)
    if wanted is not None and found != wanted:
        raise source.error(
            f"is not {FORMATS[wanted]}" + (f", but {FORMATS[found]}." if found else "."),
            "Leave the format out, or give the right one.",
        )
    if reader is None:
        begin = source.head.lstrip()[:40].decode("utf-8", "replace")
        raise source.error(
            f"is no trace that is known; it begins with {begin!r}.",
            "Read are: " + "; ".join(FORMATS.values()) + ".",
        )
    return reader


def _detect(
    source: TraceSource, wanted: str | None
) -> tuple[str | None, Callable[[TraceSource], Trace] | None]:
    head = source.head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if b"\x00" in head:
        raise source.error(
            "is binary; JSON, CSV and logs are read.",
            "A Chakra trace in protobuf form (.et) becomes JSON by "
            "`chakra_jsonizer --input_filename FILE --output_filename FILE.json`.",
        )
    if _JSON_BEGIN.match(head):
        return _detect_json(source, head)
    if wanted == "nccl" or any(mark in head for mark in _LOG_MARKS):
        return "nccl", read_nccl
    found, reader = _detect_csv(head)
    # A training program may print a lot before its first collective.
    if reader is None and wanted is None and source.mentions(_LOG_MARKS[0]):
        return "nccl", read_nccl
    return found, reader


def _detect_json(source: TraceSource, head: bytes) -> tuple[str, Callable[[TraceSource], Trace]]:
    if head.startswith(b"["):
        return "kineto", functools.partial(read_kineto, prefix="item")
    keys: list[str] = []
    for number, (prefix, event, value) in enumerate(source.json_parts()):
        if prefix == "" and event == "map_key":
            keys.append(str(value))
            if value in _JSON_KEYS:
                format, reader, items = _JSON_KEYS[value]
                return format, functools.partial(reader, prefix=items)
            # The first object of the protobuf form as JSON: version and attributes of the trace.
            if value in ("ctrlDeps", "dataDeps") or (value == "type" and "id" in keys):
                return "chakra", functools.partial(read_chakra, prefix="")
        if number > _MOST_PARTS_BEFORE:
            break
    raise source.error(
        f"is JSON with the keys {', '.join(keys)[:120] or '(none)'}; a profiler trace has "
        "traceEvents, an execution trace nodes or workload_graph."
    )


def _detect_csv(head: bytes) -> tuple[str | None, Callable[[TraceSource], Trace] | None]:
    lines = [
        line
        for line in head.decode("utf-8", "replace").splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ][:2]
    skip_lines = 1 if lines and lines[0].startswith("[rank") else 0
    if len(lines) <= skip_lines:
        # Comments only, as far as one can see: what follows may be numbers.
        return "csv", table_csv.read_table
    try:
        names = [name.strip() for name in next(csv.reader([lines[skip_lines]]))]
    except (csv.Error, StopIteration):
        return None, None
    if set(straggler.COLUMNS) <= set(names):
        return "straggler", straggler.read_straggler
    if set(minibatch.COLUMNS) <= set(names):
        return "minibatch", minibatch.read_minibatch
    if set(aicb.COLUMNS) <= set(names):
        return "aicb", functools.partial(aicb.read_aicb, skip_lines=skip_lines)
    if table_csv.looks_like(names):
        return "csv", table_csv.read_table
    return None, None
