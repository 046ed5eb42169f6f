"""Does a series go up and down by itself? Autocorrelation and spectrum of a sampled queue."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import signal

from controller.errors import UsageError

# A Welch segment is two eighths of the series: seven that overlap by half.
_SEGMENTS = 8


@dataclass(frozen=True)
class Oscillation:
    """What repeats in a series.

    Attributes
    ----------
    dominant_hz
        Frequency with the highest power density; 0: the series is constant.
    sharpness
        Share of the variance within a tenth of that frequency, 0 .. 1: near 1 for a tone.
    correlation
        Autocorrelation at its first crest after lag 0 (having been negative in between): how
        much of a swing is left one period later. 1 for an oscillation that keeps its pace,
        near 0 for noise.
    period_s
        Lag of that crest; 0: there is none.
    """

    dominant_hz: float
    sharpness: float
    correlation: float
    period_s: float


def autocorrelation(series: NDArray[np.float64]) -> NDArray[np.float64]:
    """Normalised autocorrelation at lags 0 .. n/2, each of the pairs that there are.

    Parameters
    ----------
    series
        Shape (n,), equally spaced; not constant.

    Returns
    -------
    ndarray
        Shape (n // 2 + 1,); 1 at lag 0.
    """
    centred = series - series.mean()
    full = signal.correlate(centred, centred, mode="full", method="fft")
    lags = np.arange(len(series) // 2 + 1)
    values: NDArray[np.float64] = full[len(series) - 1 + lags] / (len(series) - lags)
    values /= values[0]
    return values


def oscillation(series: NDArray[np.float64], sample_s: float) -> Oscillation:
    """Dominant frequency and what of a swing is left after one period.

    Parameters
    ----------
    series
        Shape (n,), n at least 16.
    sample_s
        Time between two of them.

    Raises
    ------
    UsageError
        Too few samples.
    """
    if len(series) < 2 * _SEGMENTS:
        raise UsageError(
            f"A spectrum of {len(series)} samples; allowed: from {2 * _SEGMENTS}.",
            "Simulate longer, or sample more often.",
        )
    if np.ptp(series) == 0:
        return Oscillation(0.0, 0.0, 0.0, 0.0)
    # Hann windows do not leak the mean's rest into the lowest bins as plain ones do.
    frequencies, density = signal.welch(
        series, fs=1 / sample_s, nperseg=2 * len(series) // _SEGMENTS, detrend="linear"
    )
    dominant = float(frequencies[1:][np.argmax(density[1:])])
    near = np.abs(frequencies - dominant) <= max(0.1 * dominant, frequencies[1])
    sharpness = float(density[near].sum() / density.sum())
    correlations = autocorrelation(series)
    top = _first_crest(correlations)
    if top is None:
        return Oscillation(dominant, sharpness, 0.0, 0.0)
    return Oscillation(dominant, sharpness, float(correlations[top]), top * sample_s)


def _first_crest(correlations: NDArray[np.float64]) -> int | None:
    """Lag of the highest value between the second and the third change of sign."""
    positive = correlations > 0
    turns = np.flatnonzero(positive[1:] != positive[:-1]) + 1
    if len(turns) < 2:
        return None
    end = int(turns[2]) if len(turns) > 2 else len(correlations)
    return int(turns[1] + np.argmax(correlations[turns[1] : end]))
