"""`controller top`: rates of the busiest flows, refreshed in place."""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from controller.observe.snapshot import Snapshot, flow_rows

_MAX_ROWS = 40
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


def rates_table(rates: list[dict[str, Any]], flows: int) -> Table:
    """The live table, for 80 columns."""
    table = Table(
        title=f"{len(rates)} of {flows} flows active", title_justify="left", box=None, expand=False
    )
    table.add_column("flow", no_wrap=True, overflow="ellipsis", max_width=34)
    table.add_column("dir", no_wrap=True)
    for name in ("bit/s", "pkt/s", "msg/s", "rtt us"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("trouble", overflow="ellipsis", no_wrap=True)
    for rate in rates[:_MAX_ROWS]:
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
    if len(rates) > _MAX_ROWS:
        table.caption = f"and {len(rates) - _MAX_ROWS} more"
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


def run_top(
    read: Callable[[], Snapshot], interval_s: float, count: int | None, as_json: bool
) -> None:
    """Refresh until `count` refreshes are done, Ctrl-C or q."""
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
                new_rows = flow_rows(snapshot)
                seconds = max(1e-3, (snapshot.taken_ns - taken_ns) / 1e9)
                rates = flow_rates(rows, new_rows, seconds)
                rows, taken_ns = new_rows, snapshot.taken_ns
                if as_json:
                    click.echo(json.dumps({"seconds": round(seconds, 3), "flows": rates}))
                elif live.is_started:
                    live.update(rates_table(rates, len(rows)), refresh=True)
                else:
                    console.print(rates_table(rates, len(rows)))
                count = None if count is None else count - 1
    except KeyboardInterrupt:
        pass  # the way to end it
    finally:
        if live.is_started:
            live.stop()
