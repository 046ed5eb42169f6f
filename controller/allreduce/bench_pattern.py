"""Inputs whose collective result is known exactly, and the count of elements that differ from it.

Every value is an integer that its type holds exactly, and so is every sum or product of any
subset of ranks. The order of reduction does not matter then, the allowed error is zero for every
type, and a single wrong bit of a value counts. Integers wrap as they do in C.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Primes: what lands a power of two of elements away from where it belongs does not fit there.
PERIOD = 65_521
SHORT_PERIOD = 8_191

# Up to here a type holds every integer.
_EXACT = {"bfloat16": 1 << 8, "float16": 1 << 11, "float32": 1 << 24, "float64": 1 << 53}
_LARGEST_VALUE = 1 << 20
# A product of more factors than these could leave the range of float16.
_FACTORS_OF_TWO = 8


class Pattern:
    """Inputs of all ranks for one operation and type, and the result.

    Parameters
    ----------
    op
        ``sum``, ``avg``, ``min``, ``max`` or ``prod``.
    dtype
        Type of the elements.
    size
        Number of ranks.
    seed
        The same on all ranks.
    period
        Elements after which the pattern repeats.
    """

    def __init__(
        self, op: str, dtype: np.dtype[Any], size: int, seed: int = 0, period: int = PERIOD
    ) -> None:
        self.dtype = dtype
        self.period = period
        generator = np.random.default_rng([seed, size, len(op), ord(op[0]), ord(op[1])])
        wide = _inputs(generator, op, dtype, size, period)
        # Casts from int64 wrap; those to a float are exact.
        self._inputs = wide.astype(dtype)
        with np.errstate(over="ignore"):
            self._result = _result(op, wide).astype(dtype)

    def fill(self, array: Array, rank: int, shift: int = 0) -> None:
        """Write the input of `rank`; `shift` gives another one."""
        for start, part in self._parts(self._inputs[rank], array.size, shift):
            array[start : start + part.size] = part

    def count_wrong_result(self, array: Array, shift: int = 0, first: int = 0) -> int:
        """Elements of `array` that are not the result, from its element `first` on."""
        return self._count_wrong(self._result, array, shift + first)

    def count_wrong_input(self, array: Array, rank: int, shift: int = 0) -> int:
        """Elements of `array` that are not the input of `rank`."""
        return self._count_wrong(self._inputs[rank], array, shift)

    def _count_wrong(self, table: Array, array: Array, shift: int) -> int:
        wrong = 0
        for start, part in self._parts(table, array.size, shift):
            # A NaN differs from everything, so it counts.
            wrong += int(np.count_nonzero(array[start : start + part.size] != part))
        return wrong

    def _parts(self, table: Array, count: int, shift: int) -> list[tuple[int, Array]]:
        shifted = np.roll(table, -(shift % self.period))
        return [
            (start, shifted[: min(self.period, count - start)])
            for start in range(0, count, self.period)
        ]


def _inputs(
    generator: np.random.Generator, op: str, dtype: np.dtype[Any], size: int, period: int
) -> npt.NDArray[np.int64]:
    """Integers, one row a rank."""
    shape = (size, period)
    exact = _EXACT.get(dtype.name, 0)
    if op == "avg":
        # All ranks have the average of their column, some one more and as many one less.
        largest = exact or np.iinfo(dtype).max
        middle = max(0, (min(largest, _LARGEST_VALUE) - size) // size)
        average = generator.integers(-middle, middle, period, endpoint=True)
        deviation = np.where(np.arange(size) % 2, 1, -1)
        if size % 2:
            deviation[-1] = 0
        turns = (np.arange(size)[:, None] + np.arange(period)) % size
        return np.asarray(average + deviation[turns], np.int64)
    if not exact:
        info = np.iinfo(dtype)
        return generator.integers(info.min, info.max, shape, dtype=np.int64, endpoint=True)
    if op == "prod":
        factors = generator.integers(1, 2, shape, endpoint=True)
        factors[_FACTORS_OF_TWO:] = 1
        return factors * (1 - 2 * generator.integers(0, 1, shape, endpoint=True))
    largest = min(exact // size if op == "sum" else exact, _LARGEST_VALUE)
    return generator.integers(-max(1, largest), max(1, largest), shape, endpoint=True)


def _result(op: str, wide: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The reduction of the rows, in 64 bits: the lowest bits are those of any narrower type."""
    if op == "sum":
        return np.asarray(wide.sum(axis=0, dtype=np.int64))
    if op == "avg":
        return np.asarray(wide.sum(axis=0, dtype=np.int64) // wide.shape[0])
    if op == "prod":
        return np.asarray(wide.prod(axis=0, dtype=np.int64))
    return np.asarray(wide.min(axis=0) if op == "min" else wide.max(axis=0))
