"""What a trace comes to: counts by operation and communicator, iterations, rows of a timeline."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from controller.iteration.series import Collective, SyncWindow, Trace
from controller.iteration.traces import has_times

_NS_PER_US = 1_000


@dataclass(frozen=True)
class Count:
    """How many collectives, and their bytes as far as told (None: of none of them)."""

    collectives: int
    bytes: int | None


@dataclass(frozen=True)
class IterationRow:
    """One iteration: its sync window and what ran from that on to the next one.

    Parameters
    ----------
    start_ns
        Begin of the window, from the first one of the trace.
    period_ns
        To the begin of the next window; None for the last one.
    window_ns
        Length of the window; 0 where the trace does not tell it.
    bytes
        Payload of the window; None: not told.
    collectives
        Those that begin within the window; None where the trace has no collectives.
    """

    start_ns: int
    period_ns: int | None
    window_ns: int
    bytes: int | None
    collectives: int | None

    def to_json(self, number: int) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "iteration": number,
            "start_us": self.start_ns / _NS_PER_US,
            "period_us": _us(self.period_ns),
            "window_us": self.window_ns / _NS_PER_US,
            "bytes": self.bytes,
            "collectives": self.collectives,
        }


def sync_windows(trace: Trace) -> tuple[SyncWindow, ...]:
    """Sync windows of a trace: its own, or those found in its collectives; none without times."""
    if trace.windows or not has_times(trace):
        return trace.windows
    from controller.iteration.windows import find_windows

    return tuple(find_windows(trace.collectives))


def _total(collectives: Iterable[Collective | SyncWindow]) -> int | None:
    known = [one.bytes for one in collectives if one.bytes is not None]
    return sum(known) if known else None


def _grouped(collectives: Iterable[Collective], attribute: str) -> dict[str, Count]:
    groups: dict[str, list[Collective]] = {}
    for one in collectives:
        groups.setdefault(getattr(one, attribute), []).append(one)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return {name: Count(len(members), _total(members)) for name, members in ordered}


@dataclass(frozen=True)
class Summary:
    """What `summarize` found; times in ns.

    `iterations` is the trace's own count (profiler steps and the like), None where it has none;
    `period_mean_ns` and the others are None where there are too few windows.
    """

    format: str
    timed: bool
    collectives: int
    ops: dict[str, Count]
    communicators: dict[str, Count]
    bytes: int | None
    duration_ns: int
    iterations: int | None
    windows: int
    period_mean_ns: float | None
    period_std_ns: float | None
    window_mean_ns: float | None
    window_bytes: float | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""

        def counts(groups: dict[str, Count]) -> dict[str, Any]:
            return {
                name: {"collectives": one.collectives, "bytes": one.bytes}
                for name, one in groups.items()
            }

        return {
            "format": self.format,
            "timed": self.timed,
            "collectives": self.collectives,
            "ops": counts(self.ops),
            "communicators": counts(self.communicators),
            "bytes": self.bytes,
            "duration_us": self.duration_ns / _NS_PER_US if self.timed else None,
            "iterations": self.iterations,
            "windows": self.windows,
            "period_us": {"mean": _us(self.period_mean_ns), "std": _us(self.period_std_ns)},
            "window_us": {"mean": _us(self.window_mean_ns)},
            "window_bytes": {"mean": self.window_bytes},
            "notes": list(self.notes),
        }


def _us(time_ns: float | None) -> float | None:
    return None if time_ns is None else time_ns / _NS_PER_US


def summarize(trace: Trace, windows: Sequence[SyncWindow]) -> Summary:
    """Counts and means of a trace.

    Parameters
    ----------
    trace
        As read.
    windows
        Its sync windows in order of begin; see `sync_windows`.
    """
    periods_ns = [
        later.start_ns - earlier.start_ns for earlier, later in itertools.pairwise(windows)
    ]
    steps = {one.iteration for one in trace.collectives if one.iteration is not None}
    told = [window.bytes for window in windows if window.bytes is not None]
    everything: list[Collective | SyncWindow] = [*trace.collectives, *trace.windows]
    duration_ns = max((one.end_ns for one in everything), default=0) - min(
        (one.start_ns for one in everything), default=0
    )
    return Summary(
        format=trace.source,
        timed=has_times(trace),
        collectives=len(trace.collectives),
        ops=_grouped(trace.collectives, "op"),
        communicators=_grouped(trace.collectives, "communicator"),
        bytes=_total(trace.collectives or trace.windows),
        duration_ns=duration_ns,
        iterations=len(steps) or None,
        windows=len(windows),
        period_mean_ns=statistics.fmean(periods_ns) if periods_ns else None,
        period_std_ns=statistics.stdev(periods_ns) if len(periods_ns) > 1 else None,
        window_mean_ns=statistics.fmean(w.end_ns - w.start_ns for w in windows)
        if windows
        else None,
        window_bytes=statistics.fmean(told) if told else None,
        notes=trace.notes,
    )


def iteration_rows(trace: Trace, windows: Sequence[SyncWindow]) -> list[IterationRow]:
    """One row per sync window, in order.

    Parameters
    ----------
    trace, windows
        See `summarize`.
    """
    starts_ns = sorted(one.start_ns for one in trace.collectives)
    rows = []
    for index, window in enumerate(windows):
        later = windows[index + 1] if index + 1 < len(windows) else None
        inside = bisect.bisect_right(starts_ns, window.end_ns) - bisect.bisect_left(
            starts_ns, window.start_ns
        )
        rows.append(
            IterationRow(
                window.start_ns - windows[0].start_ns,
                later.start_ns - window.start_ns if later else None,
                window.end_ns - window.start_ns,
                window.bytes,
                inside if trace.collectives else None,
            )
        )
    return rows


def timeline_rows(
    trace: Trace, windows: Sequence[SyncWindow]
) -> list[tuple[str, list[tuple[int, int, str]]]]:
    """Rows for `controller.telemetry.timeline`: each iteration from the begin of its window on.

    Parameters
    ----------
    trace, windows
        See `summarize`.

    Returns
    -------
    list of (label, segments)
        Labels are numbers from 0. Segments in ns from the begin of the window: "sync", then
        "compute" up to the next window, within it "other" for collectives outside of windows. The
        last row ends with its window.
    """
    collectives = sorted(trace.collectives, key=lambda one: one.start_ns)
    starts_ns = [one.start_ns for one in collectives]
    rows = []
    for index, window in enumerate(windows):
        begin_ns, end_ns = window.start_ns, window.end_ns
        segments = []
        if index + 1 < len(windows):
            next_ns = windows[index + 1].start_ns
            end_ns = min(end_ns, next_ns)
            low = bisect.bisect_left(starts_ns, end_ns)
            high = bisect.bisect_left(starts_ns, next_ns)
            others = [
                (one.start_ns - begin_ns, min(one.end_ns, next_ns) - begin_ns)
                for one in collectives[low:high]
            ]
            segments = _between(end_ns - begin_ns, next_ns - begin_ns, others)
        rows.append((str(index), [(0, end_ns - begin_ns, "sync"), *segments]))
    return rows


def _between(
    begin_ns: int, end_ns: int, others: Iterable[tuple[int, int]]
) -> list[tuple[int, int, str]]:
    """Compute from begin to end, except where other collectives run; those in order of begin."""
    segments = []
    now_ns = begin_ns
    for start_ns, stop_ns in others:
        if start_ns > now_ns:
            segments.append((now_ns, start_ns, "compute"))
        # Collectives of several streams overlap; what was drawn is not drawn again.
        if stop_ns > max(now_ns, start_ns):
            segments.append((max(now_ns, start_ns), stop_ns, "other"))
        now_ns = max(now_ns, stop_ns)
    if end_ns > now_ns:
        segments.append((now_ns, end_ns, "compute"))
    return segments
