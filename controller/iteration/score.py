"""How good the predictor is on a trace, beside what needs no predictor."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from controller.errors import InputError
from controller.iteration.experts import quantile
from controller.iteration.predictor import Prediction, Predictor
from controller.iteration.series import SyncWindow, Trace
from controller.iteration.windows import find_windows

# One period to predict from, one to be predicted.
WINDOWS_NEEDED = 3
_EWMA = 0.2
_NS_PER_US = 1000
# A longer period is a pause, not one of the usual ones.
_PAUSE = 1.6
_TOLD_EVERY = 256


@dataclass(frozen=True)
class Row:
    """One scored prediction: of the period that ends with window `window` (from 0)."""

    window: int
    actual_ns: int
    predicted_ns: int
    naive_ns: tuple[float, float, float]
    period_ns: int
    is_periodic: bool
    changed: bool

    @property
    def error_pct(self) -> float:
        """Of the predicted period."""
        return abs(self.predicted_ns - self.actual_ns) / self.actual_ns * 100

    @property
    def start_error_pct(self) -> float:
        """Of the predicted begin, as a share of the iteration's period."""
        return abs(self.predicted_ns - self.actual_ns) / max(self.period_ns, 1) * 100

    @property
    def naive_error_pct(self) -> tuple[float, float, float]:
        """Of the last period, the mean so far, and EWMA 0.2."""
        last, mean, ewma = (
            abs(naive - self.actual_ns) / self.actual_ns * 100 for naive in self.naive_ns
        )
        return last, mean, ewma


@dataclass(frozen=True)
class Score:
    """Errors of the predicted next period, strictly online.

    Parameters
    ----------
    prediction
        The last one: of the window after the trace.
    period_ns
        Mean since the last change, pauses left out.
    rows
        One per scored prediction.
    bytes_error_pct
        Mean over windows whose bytes are known; None: none.
    changes
        Iterations (from 1) at which a change of the period was noticed.
    notes
        Of the trace.
    """

    prediction: Prediction
    period_ns: float
    rows: tuple[Row, ...]
    bytes_error_pct: float | None
    changes: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The interface of ``controller predict --json``."""
        naive = [row.naive_error_pct for row in self.rows]
        return {
            "periodic": self.prediction.is_periodic,
            "why": self.prediction.why,
            "confidence": round(self.prediction.confidence, 4),
            "period_us": self.period_ns / _NS_PER_US,
            "iterations": self.prediction.iterations,
            "bursts_per_iteration": self.prediction.bursts_per_iteration,
            "scored": len(self.rows),
            "error_pct": _summary([row.error_pct for row in self.rows]),
            "naive_error_pct": {
                name: statistics.fmean(errors[place] for errors in naive)
                for place, name in enumerate(("last", "mean", "ewma02"))
            },
            "start_error_pct": _summary([row.start_error_pct for row in self.rows]),
            "bytes_error_pct": self.bytes_error_pct,
            "changes": list(self.changes),
            "pauses": self.prediction.anomalies,
            "next": {
                "window_us": self.prediction.window_ns / _NS_PER_US,
                "bytes": self.prediction.bytes,
                "spread_us": self.prediction.spread_ns / _NS_PER_US,
            },
            "notes": list(self.notes),
        }


def _summary(errors: Sequence[float]) -> dict[str, float]:
    return {
        "mean": statistics.fmean(errors),
        "p50": statistics.median(errors),
        "p95": quantile(sorted(errors), 0.95),
    }


def score(
    trace: Trace | Sequence[SyncWindow],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Score:
    """Predict every window of a trace from those before it.

    Parameters
    ----------
    trace
        Windows, or a trace whose windows are its own or are found in its collectives.
    progress
        Called now and then with (windows scored, windows in all).

    Returns
    -------
    Score
        Every period that has one before it is scored, ours and the naive ones alike. A
        prediction is made at the end of the window before (at its begin where ends are unknown).

    Raises
    ------
    InputError
        Fewer than three windows.
    """
    notes: tuple[str, ...] = ()
    if isinstance(trace, Trace):
        notes = trace.notes
        windows: Sequence[SyncWindow] = trace.windows or find_windows(trace.collectives)
        what = f"{len(windows)} sync windows in {len(trace.collectives)} collectives"
        if trace.windows:
            what = f"{len(windows)} sync windows"
    else:
        windows = trace
        what = f"{len(windows)} sync windows"
    windows = _distinct(windows)
    if len(windows) < WINDOWS_NEEDED:
        raise InputError(
            f"The trace has {what}; {WINDOWS_NEEDED} with different begins are needed.",
            "Record more iterations.",
        )
    return _replay(windows, notes, progress)


def _distinct(windows: Sequence[SyncWindow]) -> list[SyncWindow]:
    """In order of begin, without those that begin when the one before does."""
    result: list[SyncWindow] = []
    for window in sorted(windows, key=lambda window: window.start_ns):
        if not result or window.start_ns > result[-1].start_ns:
            result.append(window)
    # From the first on: floats hold a clock that counts from 1970 to a quarter microsecond only.
    origin_ns = result[0].start_ns if result else 0
    return [
        replace(window, start_ns=window.start_ns - origin_ns, end_ns=window.end_ns - origin_ns)
        for window in result
    ]


def _replay(
    windows: Sequence[SyncWindow],
    notes: tuple[str, ...],
    progress: Callable[[int, int], None],
) -> Score:
    predictor = Predictor()
    rows: list[Row] = []
    bytes_errors: list[float] = []
    changes: list[int] = []
    last_change = 0
    last_ns = total_ns = 0
    ewma = 0.0
    for number, window in enumerate(windows):
        if number % _TOLD_EVERY == 0:
            progress(number, len(windows))
        if number:
            actual_ns = window.start_ns - windows[number - 1].start_ns
            prediction = predictor.predict()
            if window.bytes and prediction.bytes is not None:
                bytes_errors.append(abs(prediction.bytes - window.bytes) / window.bytes * 100)
            if number > 1:
                predicted_ns = prediction.next_start_ns - windows[number - 1].start_ns
                naive = (float(last_ns), total_ns / (number - 1), ewma)
                known = predictor.changes
                rows.append(
                    Row(
                        number, actual_ns, predicted_ns, naive, prediction.period_ns,
                        prediction.is_periodic, prediction.changed,
                    )
                )  # fmt: skip
                ewma += _EWMA * (actual_ns - ewma)
            else:
                known = 0
                ewma = float(actual_ns)
            last_ns = actual_ns
            total_ns += actual_ns
            predictor.begin(window.start_ns)
            if predictor.changes > known:
                bursts = prediction.bursts_per_iteration
                changes.append(number // bursts + 1)
                last_change = max(0, number - 2 * bursts)
        else:
            predictor.begin(window.start_ns)
        if window.end_ns > window.start_ns or window.bytes is not None:
            predictor.end(window.end_ns, window.bytes)
    final = predictor.predict()
    bursts = final.bursts_per_iteration
    starts = [window.start_ns for window in windows[last_change:]]
    whole = [later - earlier for earlier, later in zip(starts, starts[bursts:], strict=False)]
    usual = statistics.median(whole) if whole else final.period_ns
    kept = [period for period in whole if period <= _PAUSE * usual] or [final.period_ns]
    return Score(
        final,
        statistics.fmean(kept),
        tuple(rows),
        statistics.fmean(bytes_errors) if bytes_errors else None,
        tuple(changes),
        notes,
    )
