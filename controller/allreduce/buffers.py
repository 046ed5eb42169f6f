"""Where an operation works: in the caller's buffer when it is registered, else in a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from controller.allreduce.link import Range
from controller.errors import UsageError
from controller.memory import PoolExhaustedError

Array = npt.NDArray[Any]


class Pool(Protocol):
    """What is needed of the registration pool."""

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Keys of the lease or held region that covers a range."""

    def lease(self, nbytes: int, key: Any = None) -> Any:
        """Registered memory."""

    def register(self, buffer: Any, key: Any = None) -> Any:
        """Register the owner's memory, or find it registered."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Buffer:
    """Registered memory for one operation.

    Parameters
    ----------
    array
        One-dimensional, `dtype` of the caller's array.
    memory
        Where it lies; None when it is empty.
    store
        Copies the result to where the caller wants it.
    release
        Gives the memory back.
    """

    array: Array
    memory: Range | None
    store: Callable[[], None] = _nothing
    release: Callable[[], None] = _nothing


def flat(name: str, array: Any, *, writable: bool = True) -> Array:
    """A one-dimensional view of a caller's array.

    Raises
    ------
    UsageError
        It is no contiguous numpy array, or it is read-only.
    """
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{name} is a {type(array).__name__}; expected a numpy array.")
    if not array.flags.c_contiguous:
        raise UsageError(
            f"{name} is not contiguous (strides {array.strides}).", "Pass a contiguous array."
        )
    if writable and not array.flags.writeable:
        raise UsageError(f"{name} is read-only.", "Pass a writable array.")
    return array.reshape(-1)


def scratch(pool: Pool, dtype: np.dtype[Any], count: int, key: Any = None) -> Buffer:
    """Memory of the pool's own, or memory registered for once when the pool has none so large."""
    nbytes = count * dtype.itemsize
    if not nbytes:
        return Buffer(np.empty(0, dtype), None)
    try:
        lease = pool.lease(nbytes, key=key)
    except PoolExhaustedError:
        return _registered(pool, np.empty(count, dtype))
    memory = Range(lease.addr, nbytes, lease.lkey, lease.rkey)
    return Buffer(lease.array(dtype, count), memory, release=lease.release)


def _registered(pool: Pool, array: Array) -> Buffer:
    region = pool.register(array)
    memory = Range(array.ctypes.data, array.nbytes, region.lkey, region.rkey)
    return Buffer(array, memory, release=region.release)


def working(pool: Pool, array: Array, staged_nbytes: int) -> Buffer:
    """Memory to work in that holds what `array` holds, and whose result ends there.

    Parameters
    ----------
    pool
        Where memory comes from.
    array
        From flat().
    staged_nbytes
        Copy up to this size; register beyond it.
    """
    if not array.nbytes:
        return Buffer(array, None)
    address = array.ctypes.data
    keys = pool.find(address, array.nbytes)
    if keys is not None:
        return Buffer(array, Range(address, array.nbytes, *keys))
    if array.nbytes > staged_nbytes:
        return _registered(pool, array)
    copy = scratch(pool, array.dtype, array.size, key="allreduce/staging")
    copy.array[:] = array

    def store() -> None:
        array[:] = copy.array

    return Buffer(copy.array, copy.memory, store, copy.release)
