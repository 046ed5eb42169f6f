"""What `controller trace import` writes: a trace as CSV."""

from __future__ import annotations

from collections.abc import Sequence

from controller.errors import InputError
from controller.iteration.series import SyncWindow, Trace
from controller.iteration.traces import require_times
from controller.iteration.traces.table_csv import collectives_csv, windows_csv


def trace_csv(
    trace: Trace, windows: Sequence[SyncWindow], as_windows: bool, name: str
) -> tuple[str, int]:
    """A trace as CSV that `read_trace` reads again.

    Parameters
    ----------
    trace, windows
        As read, and the sync windows in it.
    as_windows
        Write windows. A trace that has windows of its own is written so in any case: they are not
        to be found again in its collectives.
    name
        What errors call the trace.

    Returns
    -------
    tuple of str and int
        The text, and its rows.

    Raises
    ------
    InputError
        The trace has no times, or windows are asked for and none were found.
    """
    require_times(trace, name)
    if as_windows or trace.windows:
        if not windows:
            raise InputError(
                f"{name}: no sync window was found in {len(trace.collectives)} collectives.",
                "Leave --windows out to write the collectives.",
            )
        return windows_csv(windows), len(windows)
    return collectives_csv(trace.collectives), len(trace.collectives)
