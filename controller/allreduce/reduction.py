"""Reductions: element types and operations with their numbers on the wire, and the arithmetic.

Accumulators have the type of the elements. Floats round once an operation, to nearest, ties to
even, and overflow to infinity without a warning. Integers wrap as in C.

An average is a sum first: in float16 it is infinite when the sum exceeds 65504, and in int8 it is
wrong when the sum wraps, even where the average itself would fit.
"""

from __future__ import annotations

import enum
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from controller.allreduce import half
from controller.errors import UsageError

Array = npt.NDArray[Any]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class DType(enum.IntEnum):
    """Element types. The numbers are on the wire; they are those of NCCL's ncclDataType_t."""

    INT8 = 0
    INT32 = 2
    INT64 = 4
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9

    @property
    def label(self) -> str:
        """As people write it: float32."""
        return self.name.lower()

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy type; bfloat16 is that of ml_dtypes."""
        return _BFLOAT16 if self is DType.BFLOAT16 else np.dtype(self.label)

    @classmethod
    def of(cls, dtype: npt.DTypeLike) -> DType:
        """The element type of an array's dtype.

        Raises
        ------
        UsageError
            Another type, or one in the other byte order.
        """
        found = np.dtype(dtype)
        for known in cls:
            if known.numpy == found:
                return known
        raise UsageError(f"Elements are {found}; allowed: {_labels(cls)}, in native byte order.")

    @classmethod
    def parse(cls, label: str) -> DType:
        """The element type of a name.

        Raises
        ------
        UsageError
            No such type.
        """
        return _labelled(cls, "Element type", label)


class Op(enum.IntEnum):
    """Operations. The numbers are on the wire; they are those of NCCL's ncclRedOp_t."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4

    @property
    def label(self) -> str:
        """As people write it: sum."""
        return self.name.lower()

    @classmethod
    def parse(cls, label: str) -> Op:
        """The operation of a name.

        Raises
        ------
        UsageError
            No such operation.
        """
        return _labelled(cls, "Operation", label)


class Collective(enum.Enum):
    """Collective operations, by the names of nccl-tests."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"


_Labelled = TypeVar("_Labelled", DType, Op)


def _labels(known: type[DType] | type[Op]) -> str:
    return ", ".join(each.label for each in known)


def _labelled(known: type[_Labelled], what: str, label: str) -> _Labelled:
    for each in known:
        if each.label == label:
            return each
    raise UsageError(f"{what} is {label!r}; allowed: {_labels(known)}.")


_UFUNCS = {
    Op.SUM: np.add,
    Op.AVG: np.add,
    Op.PROD: np.multiply,
    Op.MAX: np.maximum,
    Op.MIN: np.minimum,
}


def reduce_into(op: Op, dtype: DType, accumulator: Array, incoming: Array) -> None:
    """Set `accumulator` to `accumulator` op `incoming`, in place.

    The minimum or maximum of a NaN and anything is NaN, whichever side it is on.

    Parameters
    ----------
    op
        `Op.AVG` adds; `finish` divides.
    dtype
        Type of both arrays.
    accumulator, incoming
        One-dimensional, contiguous, of one length; not overlapping.

    Raises
    ------
    ValueError
        The arrays differ in length or are not of this type.
    """
    if accumulator.shape != incoming.shape or accumulator.ndim != 1:
        raise ValueError(f"shapes {accumulator.shape} and {incoming.shape} are not one length")
    if not accumulator.dtype == incoming.dtype == dtype.numpy:
        raise ValueError(f"types {accumulator.dtype} and {incoming.dtype} are not {dtype.label}")
    with np.errstate(all="ignore"):
        if dtype is DType.FLOAT16 and op in (Op.SUM, Op.AVG):
            half.add(accumulator, incoming)
        elif dtype is DType.BFLOAT16:
            _by_single(_UFUNCS[op], accumulator, incoming)
        else:
            _UFUNCS[op](accumulator, incoming, out=accumulator)


def finish(op: Op, dtype: DType, array: Array, size: int) -> None:
    """Divide an average's sum by the number of ranks, in place; nothing for other operations.

    Integers are truncated towards zero, as NCCL does.

    Parameters
    ----------
    op
        The operation.
    dtype
        Type of the array.
    array
        One-dimensional, contiguous; reduced over all ranks.
    size
        Number of ranks.
    """
    if op is not Op.AVG or size == 1:
        return
    with np.errstate(all="ignore"):
        if dtype is DType.FLOAT32 or dtype is DType.FLOAT64:
            np.divide(array, dtype.numpy.type(size), out=array)
        elif dtype is DType.FLOAT16 or dtype is DType.BFLOAT16:
            _by_single(np.divide, array, np.full(1, size, np.float32))
        else:
            _truncating_divide(array, size)


def bus_factor(collective: Collective, size: int) -> float:
    """Bus bandwidth as a multiple of algorithm bandwidth (bytes of the larger buffer / time).

    Parameters
    ----------
    collective
        The operation.
    size
        Number of ranks.

    References
    ----------
    nccl-tests, doc/PERFORMANCE.md.
    """
    if collective is Collective.BROADCAST:
        return 1.0
    once = (size - 1) / size
    return 2 * once if collective is Collective.ALL_REDUCE else once


def _by_single(ufunc: np.ufunc, accumulator: Array, incoming: Array) -> None:
    """Do in float32 and round once: an array with one of its type, or with a single float32."""
    first, second = np.empty(half.BLOCK, np.float32), np.empty(half.BLOCK, np.float32)
    for start in range(0, accumulator.size, half.BLOCK):
        block = accumulator[start : start + half.BLOCK]
        left = first[: block.size]
        np.copyto(left, block)
        right = incoming
        if incoming.dtype == accumulator.dtype:
            right = second[: block.size]
            np.copyto(right, incoming[start : start + half.BLOCK])
        ufunc(left, right, out=left)
        np.copyto(block, left, casting="unsafe")


def _truncating_divide(array: Array, size: int) -> None:
    """Divide integers in 64 bits: the number of ranks need not fit into theirs."""
    wide = np.empty(half.BLOCK, np.int64)
    for start in range(0, array.size, half.BLOCK):
        block = array[start : start + half.BLOCK]
        quotient = wide[: block.size]
        np.copyto(quotient, block)
        # Floor division of a negative number moved up by size - 1 is truncation.
        quotient += (quotient < 0) * (size - 1)
        np.floor_divide(quotient, size, out=quotient)
        np.copyto(block, quotient, casting="unsafe")
