"""What a job of the simulator takes from a recorded trace: compute times and bytes."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from pathlib import Path

from controller.errors import InputError
from controller.iteration.series import SyncWindow, Trace
from controller.iteration.traces import read_trace, require_times
from controller.iteration.windows import find_windows

# One time between windows is a number, two are the least that a course has.
WINDOWS_NEEDED = 3


@dataclass(frozen=True)
class TraceShape:
    """The iterations of a trace.

    Parameters
    ----------
    compute_ns
        Mean time from the end of a sync window to the begin of the next; of traces that tell
        only when iterations ended, the mean iteration.
    factors
        That of each iteration over the mean, in order.
    window_nbytes
        Mean payload of a window on one rank; 0: the trace does not tell it.
    source
        Format of the trace, and how many iterations it has.
    """

    compute_ns: float
    factors: tuple[float, ...]
    window_nbytes: int
    source: str


def read_shape(path: Path) -> TraceShape:
    """Read a trace of any format that ``controller trace import`` reads.

    Raises
    ------
    InputError
        The file cannot be read, tells no times, or has fewer than three sync windows.
    """
    trace = read_trace(path)
    require_times(trace, str(path))
    return shape_of(trace, str(path))


def shape_of(trace: Trace, name: str) -> TraceShape:
    """The iterations of a trace that was read.

    Parameters
    ----------
    trace
        With times.
    name
        What errors call it.

    Raises
    ------
    InputError
        It has fewer than three sync windows.
    """
    windows = _in_order(trace.windows or find_windows(trace.collectives))
    if len(windows) < WINDOWS_NEEDED:
        raise InputError(
            f"{name} ({trace.source}) has {len(windows)} sync windows that follow one another; "
            f"{WINDOWS_NEEDED} are needed.",
            "Record more iterations.",
        )
    times_ns = [later.start_ns - earlier.end_ns for earlier, later in itertools.pairwise(windows)]
    mean_ns = statistics.fmean(times_ns)
    sizes = [window.bytes for window in windows if window.bytes]
    return TraceShape(
        compute_ns=mean_ns,
        factors=tuple(time_ns / mean_ns for time_ns in times_ns),
        window_nbytes=round(statistics.fmean(sizes)) if sizes else 0,
        source=f"{trace.source} trace, {len(times_ns)} iterations",
    )


def _in_order(windows: tuple[SyncWindow, ...]) -> list[SyncWindow]:
    """Those that begin after the one before has ended: between others nobody computes."""
    result: list[SyncWindow] = []
    for window in sorted(windows, key=lambda each: each.start_ns):
        if not result or window.start_ns > result[-1].end_ns:
            result.append(window)
    return result
