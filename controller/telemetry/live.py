"""`controller top`: the jobs and the rates of the busiest flows, refreshed in place."""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from controller.observe.snapshot import Snapshot, flow_rows
from controller.telemetry.job_views import (
    Document,
    bar,
    duration_ms,
    job_row,
    recent_windows,
    short_ms,
    worst_first,
)
from controller.telemetry.timeline import text_timeline

_MAX_ROWS = 40
# Where output is no terminal, and so has no height.
_MAX_JOBS = 40
# Of a terminal's height: titles, headings and captions of both tables, and the prompt.
_OTHER_LINES = 9
_FEWEST_FLOWS = 3
# What the picture of the sync windows takes besides a line a job: a blank, title, axis, legend.
_PICTURE_LINES = 4
# The flows need more columns than the jobs' names and numbers; these leave 80.
_BAR_CHARACTERS = 10
_JOB_NAME_CHARACTERS = 14
# What went wrong since the last refresh, in the order in which it is worth a look.
_TROUBLE = (
    ("duplicates", "dup"),
    ("gap_packets", "gap"),
    ("naks", "nak"),
    ("rnr_naks", "rnr"),
    ("ce", "ce"),
    ("cnp", "cnp"),
)


def flow_rates(
    before: list[dict[str, Any]], after: list[dict[str, Any]], seconds: float
) -> list[dict[str, Any]]:
    """Rates between two readings, busiest first; quiet flows are left out.

    Parameters
    ----------
    before, after
        Rows of ``flow_rows``.
    seconds
        Time between the two.
    """
    seen = {(r["flow"], r["interface"], r["direction"]): r for r in before}
    rates = []
    for row in after:
        old = seen.get((row["flow"], row["interface"], row["direction"]))
        delta = {
            name: row[name] - (old[name] if old else 0)
            for name in ("packets", "wire_bytes", "messages", *(name for name, _ in _TROUBLE))
        }
        if delta["packets"] <= 0:
            continue
        rates.append(
            {
                "flow": row["flow"],
                "interface": row["interface"],
                "direction": row["direction"],
                "packets_per_s": delta["packets"] / seconds,
                "bits_per_s": delta["wire_bytes"] * 8 / seconds,
                "messages_per_s": delta["messages"] / seconds,
                "trouble": {short: delta[name] for name, short in _TROUBLE if delta[name]},
                "rtt_p50_us": row["rtt_us"]["p50"] if row["rtt_us"] else None,
                "pid": row["pid"],
                "command": row["command"],
            }
        )
    rates.sort(key=lambda rate: -rate["bits_per_s"])
    return rates


def _short_rate(value: float) -> str:
    for unit in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.0f}{unit}" if value >= 100 or not unit else f"{value:.1f}{unit}"
        value /= 1000
    return f"{value:.1f}T"


def rates_table(rates: list[dict[str, Any]], flows: int, room: int = _MAX_ROWS) -> Table:
    """The live table of flows, for 80 columns.

    Parameters
    ----------
    rates
        Of `flow_rates`.
    flows
        How many there are, quiet ones included.
    room
        Rows at most.
    """
    table = Table(
        title=f"{len(rates)} of {flows} flows active", title_justify="left", box=None, expand=False
    )
    table.add_column("flow", no_wrap=True, overflow="ellipsis", max_width=34)
    table.add_column("dir", no_wrap=True)
    for name in ("bit/s", "pkt/s", "msg/s", "rtt us"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("trouble", overflow="ellipsis", no_wrap=True)
    for rate in rates[:room]:
        trouble = " ".join(f"{name} {count}" for name, count in rate["trouble"].items())
        rtt = rate["rtt_p50_us"]
        table.add_row(
            rate["flow"],
            {"ingress": "in", "egress": "out"}.get(rate["direction"], "-"),
            _short_rate(rate["bits_per_s"]),
            _short_rate(rate["packets_per_s"]),
            _short_rate(rate["messages_per_s"]),
            f"{rtt:.0f}" if rtt is not None else "-",
            trouble or "-",
        )
    if len(rates) > room:
        table.caption = f"and {len(rates) - room} more"
    return table


def _window_cell(row: Document) -> str:
    """Progress of the open sync window, else how long until the next one."""
    if row["phase"] == "sync" and row["progress"] is not None:
        return bar(row["progress"], _BAR_CHARACTERS)
    if row["phase"] == "sync" and row["window_open_ms"] is not None:
        return f"for {duration_ms(row['window_open_ms'])}"
    start_in_ms = row["next_start_in_ms"]
    if start_in_ms is not None:
        text = short_ms(abs(start_in_ms))
        unit = "" if text[-1].isalpha() else " ms"
        return f"{'late' if start_in_ms < 0 else 'in'} {text}{unit}"
    return "irregular" if row["is_periodic"] is False else "-"


def _class_cell(row: Document) -> str:
    """The class in force; while the dataplane chooses by laxity, its limits."""
    if row["class"] is None and row["class_floor"] is not None:
        return f"{row['class_floor']}-{row['class_ceiling']}"
    return "-" if row["class"] is None else str(row["class"])


def jobs_table(rows: Sequence[Document], room: int = _MAX_JOBS, width: int = 80) -> Table:
    """The live table of jobs.

    Parameters
    ----------
    rows
        Of `job_row`, in the order to show.
    room
        Rows at most; where there are more, the slowest are shown.
    width
        Characters a line; above 80, names are given more of them.
    """
    policies = sorted({row["policy"] or "off" for row in rows})
    syncing = sum(row["phase"] == "sync" for row in rows)
    table = Table(
        title=f"{len(rows)} job{'' if len(rows) == 1 else 's'}, {syncing} in the sync window; "
        f"policy {', '.join(policies)}",
        title_justify="left", box=None, expand=False, padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    spare = max(0, width - 80)
    table.add_column("job", no_wrap=True, overflow="ellipsis", min_width=_JOB_NAME_CHARACTERS,
                     max_width=min(31, _JOB_NAME_CHARACTERS + spare // 2))  # fmt: skip
    table.add_column("iter", justify="right", no_wrap=True)
    table.add_column("phase", no_wrap=True)
    table.add_column("sync window", no_wrap=True, min_width=_BAR_CHARACTERS)
    table.add_column("lax ms", justify="right", no_wrap=True)
    table.add_column("cl", justify="right", no_wrap=True)
    table.add_column("p50/p99 ms", justify="right", no_wrap=True)
    table.add_column("slow", justify="right", no_wrap=True)
    table.add_column("waits for", no_wrap=True, overflow="ellipsis", max_width=14 + spare // 2)
    for row in worst_first(rows, room):
        times, slowdown, bound = row["iteration_ms"], row["slowdown"], row["max_slowdown"]
        is_too_slow = slowdown is not None and bound and slowdown > bound
        table.add_row(
            Text(row["job"]),
            str(row["iteration"]),
            row["phase"] if row["phase"] in ("compute", "sync") else "-",
            _window_cell(row),
            short_ms(row["laxity_ms"]),
            _class_cell(row),
            f"{short_ms(times['p50'])}/{short_ms(times['p99'])}" if times else "-",
            Text("-" if slowdown is None else f"{slowdown:.2f}", "red" if is_too_slow else ""),
            Text(",".join(row["waits_for"]) or "-"),
        )
    if len(rows) > room:
        table.caption = f"and {len(rows) - room} more, less slow: controller job list"
    return table


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Gives a function that waits some seconds and tells whether `q` was pressed."""
    if sys.stdin is None or not sys.stdin.isatty():

        def sleep(seconds: float) -> bool:
            time.sleep(seconds)
            return False

        yield sleep
        return
    fd = sys.stdin.fileno()
    saved = termios.tcgetattr(fd)
    tty.setcbreak(fd)

    def wait(seconds: float) -> bool:
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            ready, _, _ = select.select([fd], [], [], left_s)
            # Not sys.stdin: its buffer would keep what was typed together.
            if ready and set(os.read(fd, 64)) & set(b"qQ"):
                return True
        return False

    try:
        yield wait
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, saved)


def windows_picture(jobs: Sequence[Document], width: int) -> Text | None:
    """The last sync windows of jobs below each other; None: nobody had one.

    Parameters
    ----------
    jobs
        As the request ``jobs`` has them.
    width
        Columns.
    """
    rows, span_ns = recent_windows(jobs)
    if not rows:
        return None
    span = duration_ms((span_ns[1] - span_ns[0]) / 1e6)
    return Text(
        f"\nsync windows of the last {span}\n{text_timeline(rows, width, span_ns)}",
        no_wrap=True,
        overflow="crop",
    )


def _screen(
    jobs: Sequence[Document], rates: list[dict[str, Any]], flows: int, console: Console
) -> RenderableType:
    """What one refresh shows; on a terminal, no more than fits it."""
    lines = max(0, console.height - _OTHER_LINES) if console.is_terminal else None
    if not jobs:
        return rates_table(rates, flows, _MAX_ROWS if lines is None else min(_MAX_ROWS, lines))
    rows = [job_row(job) for job in jobs]
    room = min(len(jobs), _MAX_JOBS if lines is None else max(1, lines // 3))
    parts: list[RenderableType] = [jobs_table(rows, room, console.width)]
    left = None if lines is None else lines - room - _FEWEST_FLOWS
    if left is None or left >= room + _PICTURE_LINES:
        shown = {row["job"] for row in worst_first(rows, room)}
        picture = windows_picture([job for job in jobs if job["name"] in shown], console.width)
        if picture is not None:
            parts.append(picture)
            left = None if left is None else left - room - _PICTURE_LINES
    flow_room = _MAX_ROWS if left is None else min(_MAX_ROWS, max(0, left) + _FEWEST_FLOWS)
    return Group(*parts, "", rates_table(rates, flows, flow_room))


def run_top(
    read: Callable[[], Snapshot],
    interval_s: float,
    count: int | None,
    as_json: bool,
    read_jobs: Callable[[], Sequence[Document]] | None = None,
) -> None:
    """Refresh until `count` refreshes are done, Ctrl-C or q.

    Parameters
    ----------
    read
        Gives the flows.
    interval_s
        Seconds between two refreshes.
    count
        End after so many; None: never.
    as_json
        Print one line of JSON a refresh.
    read_jobs
        Gives the jobs, as the request ``jobs`` has them; None: flows alone.
    """
    snapshot = read()
    rows, taken_ns = flow_rows(snapshot), snapshot.taken_ns
    console = Console()
    live = Live(console=console, auto_refresh=False, transient=False)
    try:
        with _keys() as wait:
            if not as_json and console.is_terminal:
                live.start()
            while count is None or count > 0:
                if wait(interval_s):
                    break
                snapshot = read()
                jobs = read_jobs() if read_jobs else ()
                new_rows = flow_rows(snapshot)
                seconds = max(1e-3, (snapshot.taken_ns - taken_ns) / 1e9)
                rates = flow_rates(rows, new_rows, seconds)
                rows, taken_ns = new_rows, snapshot.taken_ns
                if as_json:
                    document: dict[str, Any] = {"seconds": round(seconds, 3), "flows": rates}
                    if read_jobs:
                        document["jobs"] = [job_row(job) for job in jobs]
                    click.echo(json.dumps(document))
                elif live.is_started:
                    live.update(_screen(jobs, rates, len(rows), console), refresh=True)
                else:
                    console.print(_screen(jobs, rates, len(rows), console))
                count = None if count is None else count - 1
    except KeyboardInterrupt:
        pass  # the way to end it
    finally:
        if live.is_started:
            live.stop()
