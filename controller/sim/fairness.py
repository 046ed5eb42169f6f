"""Jain's index of fairness: 1 where all have the same, 1 / n where one has all.

References
----------
Jain, Chiu, Hawe: A Quantitative Measure of Fairness and Discrimination for Resource Allocation in
Shared Computer Systems, DEC Research Report TR-301, 1984.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def jain(amounts: NDArray[Any]) -> float:
    """Jain's index of amounts, shape (n,); NaN where all are 0."""
    values = amounts.astype(np.float64)
    squares = float(np.square(values).sum())
    return float(jain_of_sums(len(values), float(values.sum()), squares))


def jain_of_sums(
    counts: NDArray[Any] | float, totals: NDArray[Any] | float, squares: NDArray[Any] | float
) -> NDArray[np.float64]:
    """Jain's index of each of several groups: squared sum over n times sum of squares.

    Parameters
    ----------
    counts, totals, squares
        Of each group: how many amounts, their sum and the sum of their squares; all of one shape.

    Returns
    -------
    ndarray
        In that shape; NaN where all amounts of a group are 0, or it has none.
    """
    below = np.asarray(counts * squares)
    index: NDArray[np.float64] = np.full(below.shape, np.nan)
    np.divide(totals**2, below, out=index, where=below > 0)
    return index
