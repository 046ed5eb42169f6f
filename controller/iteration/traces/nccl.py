"""Logs of NCCL and RCCL (``NCCL_DEBUG=INFO``, subsystem COLL), and tables that nccl-tests prints.

Line format: ``INFO(NCCL_COLL, ...)`` in ncclEnqueueCheck, NCCL 2.3 to 2.30; time stamps by
``NCCL_DEBUG_TIMESTAMP_FORMAT`` (NCCL >= 2.26, "[%F %T] " with an optional fraction), or by what
collected the log.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import re
from typing import NamedTuple

from controller.iteration.series import Collective, Trace
from controller.iteration.traces.chakra import NO_TIMES
from controller.iteration.traces.names import (
    MAX_BYTES,
    canonical_op,
    element_bytes,
    nccl_element_bytes,
)
from controller.iteration.traces.source import MAX_ROWS, TraceSource

_CALL = re.compile(
    r"NCCL INFO (?P<op>[A-Za-z]+): opCount (?P<number>[0-9a-f]{1,16}) sendbuff \S+ recvbuff \S+ "
    r"count (?P<count>\d{1,19}) datatype (?P<datatype>\d{1,3}) op \d+ root -?\d+ "
    r"comm (?P<comm>\S{1,40}) \[nranks=(?P<ranks>\d{1,9})\]"
    r"(?:.* globalrank (?P<rank>\d{1,9}))?",
    re.ASCII,
)
_PROCESS = re.compile(r"(\S{1,200}):(\d{1,10}):\d{1,10} \[(\d{1,4})\] NCCL INFO", re.ASCII)
_STAMP = re.compile(
    r"(?:(?P<date>\d{4}-\d\d-\d\d)[ T_])?(?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?",
    re.ASCII,
)
_EPOCH = re.compile(r"^\D{0,3}(\d{10})(?:[.,](\d{1,9}))?\b", re.ASCII)
# Before the message stand host, process and what launchers add; beyond that no stamp is sought.
_STAMP_WITHIN = 120

_TABLE_ROW = re.compile(r"^(?:\[\d+,\d+\]<stdout>:)?\s*(\d{1,19})\s+(\d{1,19})\s+(\w+)\s+(.+)$")
_TEST = re.compile(r"\b([a-z_]+)_perf\b", re.ASCII)
_CSV_ROW = re.compile(r"^(\d{1,19}),(\d{1,12}(?:\.\d{1,9})?)(?:,|$)", re.ASCII)

_DAY_NS = 86_400 * 10**9


class _Logged(NamedTuple):
    time_ns: int | None
    collective: Collective


def read_nccl(source: TraceSource) -> Trace:
    """Collectives from a log, or else the sizes and times of an nccl-tests table.

    Parameters
    ----------
    source
        Text; lines of other kinds are passed over.

    Returns
    -------
    Trace
        Of a log: the calls of the one process that made most of them, `source` "nccl-log". They
        begin when the CPU hands them to NCCL; how long they take is not logged. Of a table:
        `source` "nccl-tests", one collective per size, with its duration and no begin.

    Raises
    ------
    InputError
        Neither a collective nor a row of a table.
    """
    calls: dict[str, list[_Logged]] = collections.defaultdict(list)
    rows: list[Collective] = []
    test = "unknown"
    count = lines = 0
    finest_digits = 0
    # Programs print anything between the lines that count.
    for line in source.lines(errors="replace"):
        lines += 1
        match = _CALL.search(line)
        if match:
            count += 1
            time_ns, digits = _time_ns(line[: min(match.start(), _STAMP_WITHIN)])
            finest_digits = max(finest_digits, digits)
            calls[_process(line, match)].append(_Logged(time_ns, _collective(match)))
        else:
            named = _TEST.search(line)
            if named and canonical_op(named[1]) != "unknown":
                test = canonical_op(named[1])
            row = _table_row(line)
            if row is not None:
                count += 1
                rows.append(row)
        if count > MAX_ROWS:
            raise source.error(f"holds more than {MAX_ROWS} collectives.", "Cut the log.")
    if calls:
        return _log_trace(calls, finest_digits)
    if rows:
        rows = [Collective(0, row.end_ns, row.bytes, test) for row in rows]
        return Trace("nccl-tests", tuple(rows), notes=("a table of sizes and times: " + NO_TIMES,))
    raise source.error(
        f"has {lines} lines of text, but no collective of an NCCL log and no row of nccl-tests.",
        "Log with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=COLL NCCL_DEBUG_TIMESTAMP_LEVELS=ALL "
        'NCCL_DEBUG_TIMESTAMP_FORMAT="[%F %T.%6f] ".',
    )


def _process(line: str, match: re.Match[str]) -> str:
    if match["rank"]:
        return f"rank {match['rank']}"
    found = _PROCESS.search(line)
    return f"{found[1]}:{found[2]} GPU {found[3]}" if found else "?"


def _collective(match: re.Match[str]) -> Collective:
    size = nccl_element_bytes(int(match["datatype"]))
    op, ranks = canonical_op(match["op"]), int(match["ranks"])
    payload = None if size is None else int(match["count"]) * size
    # NCCL counts what one rank gets of a reduce-scatter, and what goes to one peer of an
    # all-to-all; the input of this rank is that for all of them.
    if payload is not None and op in ("reduce_scatter", "all_to_all"):
        payload *= ranks
    if payload is not None and payload > MAX_BYTES:
        payload = None
    return Collective(0, 0, payload, op, f"{match['comm']} x{ranks}")


def _time_ns(prefix: str) -> tuple[int | None, int]:
    """Time of a log line in ns (of its day, where no date is told), and digits of its fraction."""
    found = _STAMP.search(prefix)
    if found is None:
        epoch = _EPOCH.search(prefix)
        if epoch is None:
            return None, 0
        part = epoch[2] or ""
        return int(epoch[1]) * 10**9 + int(part.ljust(9, "0")), len(part)
    part = found["part"] or ""
    try:
        clock = datetime.time.fromisoformat(found["clock"])
        # Local time; a run across a change of the clock is off by an hour, which shows.
        days = datetime.date.fromisoformat(found["date"]).toordinal() if found["date"] else 0
    except ValueError:
        return None, 0
    seconds = (clock.hour * 60 + clock.minute) * 60 + clock.second
    return days * _DAY_NS + seconds * 10**9 + int(part.ljust(9, "0")), len(part)


def _log_trace(calls: dict[str, list[_Logged]], digits: int) -> Trace:
    # max() keeps the first of equals: rank 0 mostly, and the same at each reading.
    process = max(calls, key=lambda name: len(calls[name]))
    logged = calls[process]
    notes = [f"calls of {process}" + (f", one of {len(calls)}" if len(calls) > 1 else "")]
    if any(call.time_ns is None for call in logged):
        notes.append(NO_TIMES + "; set NCCL_DEBUG_TIMESTAMP_LEVELS=ALL")
        return Trace("nccl-log", tuple(call.collective for call in logged), notes=tuple(notes))
    times_ns: list[int] = []
    midnights = 0
    for call in logged:
        time_ns = (call.time_ns or 0) + midnights * _DAY_NS
        # Without a date the clock starts again at midnight.
        if times_ns and time_ns < times_ns[-1] - _DAY_NS // 2:
            midnights += 1
            time_ns += _DAY_NS
        times_ns.append(time_ns)
    begin_ns = min(times_ns)
    collectives = [
        Collective(
            time_ns - begin_ns,
            time_ns - begin_ns,
            call.collective.bytes,
            call.collective.op,
            call.collective.communicator,
        )
        for time_ns, call in zip(times_ns, logged, strict=True)
    ]
    collectives.sort(key=lambda collective: collective.start_ns)
    notes.append("times are those of the calls on the CPU; durations are not logged")
    if digits < 3:
        notes.append(
            f"time stamps have {digits} digits below the second: too coarse for most jobs; use "
            'NCCL_DEBUG_TIMESTAMP_FORMAT="[%F %T.%6f] "'
        )
    return Trace("nccl-log", tuple(collectives), notes=tuple(notes))


def _table_row(line: str) -> Collective | None:
    """A row of nccl-tests (``size count type [redop] [root] time algbw busbw ...``), or of CSV."""
    found = _CSV_ROW.search(line)
    if found:
        return _timed_row(found[1], found[2])
    row = _TABLE_ROW.search(line)
    if row is None or element_bytes(row[3]) is None:
        return None
    # redop (text) and root (whole) stand before the time in some tests and versions, the time
    # always before algbw and busbw: it is the first of three numbers of which two have a point.
    cells = row[4].split()
    for position in range(min(3, len(cells) - 2)):
        time_us, *rates = cells[position : position + 3]
        if re.fullmatch(r"\d{1,12}(\.\d+)?", time_us) and all(
            re.fullmatch(r"\d{1,9}\.\d+", rate) for rate in rates
        ):
            return _timed_row(row[1], time_us)
    return None


def _timed_row(size: str, time_us: str) -> Collective | None:
    if int(size) > MAX_BYTES:
        return None
    return Collective(0, round(decimal.Decimal(time_us) * 1_000), int(size))
