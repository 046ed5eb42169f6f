"""How sure a mean over seeds is: Student's confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure over seeds.

    Parameters
    ----------
    mean
        Of the seeds.
    half_width
        Half of its 95 % confidence interval; None: of one seed nobody can tell.
    """

    mean: float
    half_width: float | None


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and half width of its confidence interval, by Student's t with n - 1 degrees.

    Parameters
    ----------
    values
        One for each seed, at least one; taken as independent and about normal.

    References
    ----------
    Student (W. S. Gosset): The Probable Error of a Mean, Biometrika 6(1), 1908.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean, None)
    deviation = statistics.stdev(values, xbar=mean)
    return Estimate(mean, _quantile(len(values) - 1) * deviation / math.sqrt(len(values)))


@lru_cache
def _quantile(degrees: int) -> float:
    """Of Student's distribution, two-sided."""
    # Half a second that a command without seeds need not wait.
    from scipy import stats

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees))
