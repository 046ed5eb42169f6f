"""Sending less in an AllReduce: a shorter float type, or only the largest elements.

Both are for sums and averages of float32 and float64. `Cast` changes the type that the AllReduce is
done in. `TopK` replaces the AllReduce by an all-gather of what each rank selected. All ranks still
end with the same bits.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from controller.allreduce import half
from controller.allreduce.reduction import DType
from controller.errors import InputError, UsageError

Array = npt.NDArray[Any]

_WIRE_IDS = {DType.FLOAT16: 1, DType.BFLOAT16: 2}
_TOP_K_WIRE_ID = 3
_SOURCES = (DType.FLOAT32, DType.FLOAT64)
_INT32_MAX = (1 << 31) - 1


class Compression(abc.ABC):
    """What `Cast` and `TopK` have in common.

    Attributes
    ----------
    wire_id
        Number of the kind of compression, for ranks to compare; above 0.
    """

    wire_id: int

    def __init__(self) -> None:
        self._last: tuple[int, DType] | None = None

    @abc.abstractmethod
    def wire_nbytes(self, count: int, dtype: DType) -> int:
        """Bytes that stand for `count` elements of a rank."""

    @abc.abstractmethod
    def traffic_ratio(self, count: int, dtype: DType, size: int) -> float:
        """Bytes that a rank sends on the wire, over those of an uncompressed AllReduce.

        The uncompressed one is that of a ring, 2 (size - 1) / size of its elements.
        """

    @property
    def ratio(self) -> float:
        """Bytes after compression over bytes before, of the last array; at first, of 1 MiB float32.

        A ratio of buffers. What a rank sends shrinks by `traffic_ratio`.
        """
        count, dtype = self._last or (1 << 18, DType.FLOAT32)
        return self.wire_nbytes(count, dtype) / (count * dtype.numpy.itemsize) if count else 1.0

    def _source(self, array: Array) -> DType:
        """Type of an array to compress, which is the last one from here on."""
        dtype = DType.of(array.dtype)
        if dtype not in _SOURCES:
            raise UsageError(
                f"{self} was given {dtype.label}; allowed: float32, float64.",
                "Leave the compression out.",
            )
        if array.ndim != 1:
            raise ValueError(f"{self} was given {array.ndim} dimensions, not 1")
        self._last = (array.size, dtype)
        return dtype


class Cast(Compression):
    """The AllReduce is done in float16 or bfloat16.

    Each of its additions then rounds to that type. A finite element beyond its range (65504 for
    float16) becomes infinite and is counted; a sum may still overflow on the way without being.

    Parameters
    ----------
    dtype
        float16 or bfloat16.

    Attributes
    ----------
    overflowed
        Finite elements that became infinite, in all arrays so far.

    Raises
    ------
    UsageError
        Another type.
    """

    def __init__(self, dtype: DType | str = DType.BFLOAT16) -> None:
        super().__init__()
        self.dtype = DType.parse(dtype) if isinstance(dtype, str) else dtype
        if self.dtype not in _WIRE_IDS:
            raise UsageError(f"Cast is to {self.dtype.label}; allowed: float16, bfloat16.")
        self.wire_id = _WIRE_IDS[self.dtype]
        self.overflowed = 0

    def __str__(self) -> str:
        return f"cast to {self.dtype.label}"

    def wire_nbytes(self, count: int, dtype: DType) -> int:
        """Bytes that stand for `count` elements of a rank."""
        return count * self.dtype.numpy.itemsize

    def traffic_ratio(self, count: int, dtype: DType, size: int) -> float:
        """Bytes that a rank sends, over those uncompressed: the ratio of the types."""
        return self.dtype.numpy.itemsize / dtype.numpy.itemsize

    def compress(self, array: Array, out: Array | None = None) -> Array:
        """The elements in the shorter type.

        Parameters
        ----------
        array
            float32 or float64, one-dimensional, contiguous; stays as it is.
        out
            As many elements of `self.dtype`; allocated if not given.

        Returns
        -------
        numpy.ndarray
            `out`.

        Raises
        ------
        UsageError
            Elements of another type.
        """
        self._source(array)
        result = np.empty(array.size, self.dtype.numpy) if out is None else out
        if result.shape != array.shape or result.dtype != self.dtype.numpy:
            raise ValueError(f"out is {result.shape} of {result.dtype}")
        infinity = np.array(np.inf, self.dtype.numpy).view(np.int16)
        for start in range(0, array.size, half.BLOCK):
            block = array[start : start + half.BLOCK]
            short = result[start : start + half.BLOCK]
            with np.errstate(all="ignore"):
                np.copyto(short, block, casting="unsafe")
            # Integers are compared faster, and seldom is any infinite.
            if (short.view(np.int16) & 0x7FFF).max() >= infinity:
                self.overflowed += int((np.isinf(short) & np.isfinite(block)).sum())
        return result

    def restore(self, wire: Array, out: Array) -> None:
        """Set `out` to the elements of `wire`, exactly."""
        if wire.dtype != self.dtype.numpy or wire.shape != out.shape:
            raise ValueError(f"{wire.shape} of {wire.dtype} do not stand for {out.shape}")
        if self.dtype is DType.FLOAT16 and out.dtype == np.float32:
            scratch = half.Scratch()
            for start in range(0, wire.size, half.BLOCK):
                stop = start + half.BLOCK
                half.widen(wire[start:stop], out[start:stop], scratch)
        else:
            np.copyto(out, wire)


class TopK(Compression):
    """Each rank sends its elements of largest magnitude; what it did not send it adds to the next.

    Error feedback: the residual of each key, as large as the array, is kept here. Every rank sends
    its selection to all others, so traffic grows with the number of ranks: see `traffic_ratio`.

    Parameters
    ----------
    density
        Share of the elements to send; at least one of a non-empty array is.

    Raises
    ------
    UsageError
        The density is not above 0 and at most 1.

    References
    ----------
    Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS 2018.
    """

    wire_id = _TOP_K_WIRE_ID

    def __init__(self, density: float) -> None:
        super().__init__()
        if not 0 < density <= 1:
            raise UsageError(f"Density is {density!r}; allowed: above 0, up to 1.")
        self.density = density
        self._residuals: dict[Hashable, Array] = {}

    def __str__(self) -> str:
        return f"top-k of density {self.density:g}"

    def selected(self, count: int) -> int:
        """Elements that a rank sends of `count`."""
        return min(count, max(1, round(count * self.density)))

    def wire_nbytes(self, count: int, dtype: DType) -> int:
        """Bytes that stand for `count` elements of a rank: values and their indices."""
        return self.selected(count) * (dtype.numpy.itemsize + _index_type(count).itemsize)

    def traffic_ratio(self, count: int, dtype: DType, size: int) -> float:
        """Bytes that a rank sends, over those uncompressed; above 1 where nothing is won."""
        if not count:
            return 1.0
        ratio = self.wire_nbytes(count, dtype) / (count * dtype.numpy.itemsize)
        # An all-gather sends size - 1 selections; an AllReduce 2 (size - 1) / size of an array.
        return ratio * size / 2

    def compress(self, array: Array, key: Hashable, out: Array | None = None) -> Array:
        """Select from the array and the residual of its key; what is left is the new residual.

        Where a selected element is infinite or NaN, others that are and were not selected leave the
        residual: the receivers see that this step is spoilt, and it shall not spoil the next ones.

        Parameters
        ----------
        array
            float32 or float64, one-dimensional; stays as it is.
        key
            Names the array from one iteration to the next.
        out
            `wire_nbytes` of int8; allocated if not given.

        Returns
        -------
        numpy.ndarray
            `out`: the values, then their indices in rising order. Of the same length on all ranks.

        Raises
        ------
        UsageError
            Elements of another type, or of another type or number than before with this key.
        """
        dtype = self._source(array)
        residual = self._residuals.get(key)
        if residual is not None and (residual.dtype, residual.size) != (array.dtype, array.size):
            raise UsageError(
                f"Key {key!r} of {self} is now {array.size} {array.dtype}, and was "
                f"{residual.size} {residual.dtype}.",
                "Use one key for each array, or forget the key.",
            )
        nbytes = self.wire_nbytes(array.size, dtype)
        packed = np.empty(nbytes, np.int8) if out is None else out
        if packed.shape != (nbytes,) or packed.dtype != np.int8:
            raise ValueError(f"out is {packed.shape} of {packed.dtype}, not {nbytes} int8")
        with np.errstate(all="ignore"):
            total = array.copy() if residual is None else array + residual
        chosen = _largest(total, self.selected(array.size))
        values, indices = _unpack(packed, array.size, array.dtype)
        values[:] = total[chosen]
        indices[:] = chosen
        total[chosen] = 0
        if not np.isfinite(values).all():
            total[~np.isfinite(total)] = 0
        self._residuals[key] = total
        return packed

    def decompress_sum(self, packed: Sequence[Array], out: Array) -> None:
        """Set `out` to the sum of what the ranks selected, added in the order given.

        Parameters
        ----------
        packed
            What `compress` gave on each rank, in the order of ranks.
        out
            float32 or float64 of the length and type that were compressed.

        Raises
        ------
        InputError
            Indices of a rank are not rising or outside the array, or their number is not that of
            this density.
        """
        nbytes = self.wire_nbytes(out.size, DType.of(out.dtype))
        out[:] = 0
        for rank, each in enumerate(packed):
            if each.nbytes != nbytes:
                raise InputError(f"Rank {rank} sent {each.nbytes} bytes of {self}, not {nbytes}.")
            values, indices = _unpack(each, out.size, out.dtype)
            if indices.size and (
                indices[0] < 0 or indices[-1] >= out.size or not (np.diff(indices) > 0).all()
            ):
                raise InputError(
                    f"Rank {rank} sent indices of {self} that are not rising within "
                    f"0 .. {out.size - 1}."
                )
            with np.errstate(all="ignore"):
                out[indices] += values

    def residual(self, key: Hashable) -> Array | None:
        """What has not been sent of a key's arrays; None if there was none yet."""
        return self._residuals.get(key)

    def forget(self, key: Hashable) -> None:
        """Drop the residual of a key, if there is one."""
        self._residuals.pop(key, None)


def _index_type(count: int) -> np.dtype[Any]:
    return np.dtype(np.int32 if count <= _INT32_MAX else np.int64)


def _unpack(packed: Array, count: int, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Views of the values and of the indices."""
    index_type = _index_type(count)
    selected = packed.nbytes // (dtype.itemsize + index_type.itemsize)
    middle = selected * dtype.itemsize
    return packed[:middle].view(dtype), packed[middle:].view(index_type)


def _largest(array: Array, selected: int) -> Array:
    """Indices of the elements of largest magnitude, NaN before all, in rising order."""
    if selected == array.size:
        return np.arange(array.size)
    chosen = np.argpartition(np.abs(array), array.size - selected)[array.size - selected :]
    chosen.sort()
    return chosen
