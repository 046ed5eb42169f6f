"""Timelines as text and SVG: what stands where."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from controller.iteration.series import Collective, SyncWindow, Trace
from controller.iteration.traces.summary import iteration_rows, summarize, timeline_rows
from controller.telemetry.timeline import KINDS, nice_step, svg_timeline, text_timeline

_SVG = "{http://www.w3.org/2000/svg}"
_COMPUTE, _SYNC, _WAIT = (KINDS[kind][0] for kind in ("compute", "sync", "wait"))


def test_a_cell_shows_what_fills_most_of_it() -> None:
    rows = [("a", [(0, 26, "compute"), (26, 100, "sync")]), ("bb", [(50, 100, "wait")])]
    first, second, axis, legend = text_timeline(rows, width=23).splitlines()
    assert first == " a " + 5 * _COMPUTE + 15 * _SYNC
    assert second == "bb " + 10 * " " + 10 * _WAIT
    assert axis == "   0             100 ns"
    assert legend.split() == ["░", "compute", "█", "sync", "window", "▒", "waiting"]


@pytest.mark.parametrize("begin", [0, 17, 499, 990, 1000])
def test_a_short_sync_keeps_a_cell(begin: int) -> None:
    rows = [("a", [(0, 1000, "compute"), (begin, begin + 3, "sync")])]
    assert text_timeline(rows, width=22).splitlines()[0].count(_SYNC) == 1


def test_lines_are_as_wide_as_asked_and_long_labels_are_cut() -> None:
    rows = [("a job with a name that is far too long", [(0, 10**9, "sync")]), ("\x1b[2J", [])]
    lines = text_timeline(rows, width=80).splitlines()
    assert max(map(len, lines)) == 80
    assert "\x1b" not in "".join(lines)


def test_only_the_span_that_is_asked_for_is_drawn() -> None:
    rows = [("a", [(0, 100, "compute"), (100, 200, "sync"), (900, 950, "sync")])]
    line = text_timeline(rows, width=22, span_ns=(100, 300)).splitlines()[0]
    assert line == "a " + 10 * _SYNC


def test_no_rows_and_rows_without_length_draw_nothing_wrong() -> None:
    assert text_timeline([]) == ""
    assert _SYNC in text_timeline([("a", [(5, 5, "sync")])])
    ElementTree.fromstring(svg_timeline([]))
    ElementTree.fromstring(svg_timeline([("a", [(5, 5, "sync")])]))


@pytest.mark.parametrize(
    ("span", "step"), [(6, 1), (7, 2), (100, 20), (1e9, 2e8), (2.9e9, 5e8), (0.06, 0.01)]
)
def test_ticks_are_one_two_or_five_times_a_power_of_ten(span: float, step: float) -> None:
    assert nice_step(span) == pytest.approx(step)


def test_svg_is_well_formed_with_every_segment_in_its_place() -> None:
    rows = [("a<b", [(0, 500, "compute"), (500, 1000, "sync")]), ("c & d", [(250, 250, "odd")])]
    root = ElementTree.fromstring(svg_timeline(rows, title='1 < 2 "x"', width=600))
    assert root.find(f"{_SVG}title").text == '1 < 2 "x"'  # type: ignore[union-attr]
    bars = [r for r in root.iter(f"{_SVG}rect") if r.get("height") == "12"]
    assert [bar.get("fill") for bar in bars] == ["#d9d9d9", "#0072b2", "#999999"]
    left, middle = float(bars[0].get("x", 0)), float(bars[1].get("x", 0))
    width = float(bars[1].get("width", 0))
    assert middle - left == pytest.approx(width, abs=0.02)
    assert middle + width <= 600
    assert float(bars[2].get("width", 0)) == 0.5
    texts = [text.text for text in root.iter(f"{_SVG}text")]
    assert {"a<b", "c & d", "odd", "0"} <= set(texts)


def a_trace() -> Trace:
    """Windows of 200 ns every 1000 ns, one other collective at 600 ns of the first one."""
    collectives = (
        Collective(100, 200, 10, "all_reduce", "dp", 0),
        Collective(200, 300, 20, "all_reduce", "dp", 0),
        Collective(700, 750, None, "all_gather", "tp", 0),
        Collective(730, 800, None, "all_gather", "tp", 0),
        Collective(1100, 1300, 30, "all_reduce", "dp", 1),
    )
    windows = (SyncWindow(100, 300, 30), SyncWindow(1100, 1300, 30), SyncWindow(2200, 2300, 30))
    return Trace("csv", collectives, windows)


def test_iterations_have_period_window_bytes_and_collectives() -> None:
    trace = a_trace()
    rows = iteration_rows(trace, trace.windows)
    assert [row.start_ns for row in rows] == [0, 1000, 2100]
    assert [row.period_ns for row in rows] == [1000, 1100, None]
    assert [row.window_ns for row in rows] == [200, 200, 100]
    assert [row.collectives for row in rows] == [2, 1, 0]


def test_a_row_of_the_timeline_is_the_window_then_what_runs_until_the_next() -> None:
    trace = a_trace()
    first, second, last = timeline_rows(trace, trace.windows)
    assert first == (
        "0",
        [(0, 200, "sync"), (200, 600, "compute"), (600, 650, "other"), (650, 700, "other"),
         (700, 1000, "compute")],
    )  # fmt: skip
    assert second == ("1", [(0, 200, "sync"), (200, 1100, "compute")])
    assert last == ("2", [(0, 100, "sync")])


def test_a_summary_counts_by_operation_and_communicator() -> None:
    trace = a_trace()
    document = summarize(trace, trace.windows).to_json()
    assert document["ops"] == {
        "all_reduce": {"collectives": 3, "bytes": 60},
        "all_gather": {"collectives": 2, "bytes": None},
    }
    assert document["communicators"]["dp"] == {"collectives": 3, "bytes": 60}
    assert document["iterations"] == 2
    assert document["windows"] == 3
    assert document["period_us"] == {"mean": 1.05, "std": pytest.approx(0.0707, abs=1e-4)}
    assert document["duration_us"] == 2.2
