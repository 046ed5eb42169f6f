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
from controller.verbs.registration import Registrar

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


@dataclass(frozen=True)
class Source:
    """Where registered memory comes from.

    Parameters
    ----------
    pool
        Leases and cached registrations.
    registrar
        For what the pool does not hold: registered for one operation.
    staged_nbytes
        Buffers are copied up to this size and registered beyond it.
    """

    pool: Pool
    registrar: Registrar
    staged_nbytes: int

    def scratch(self, dtype: np.dtype[Any], count: int, key: Any = None) -> Buffer:
        """Memory of the pool's own, or of numpy's where the pool has none so large."""
        nbytes = count * dtype.itemsize
        if not nbytes:
            return Buffer(np.empty(0, dtype), None)
        try:
            lease = self.pool.lease(nbytes, key=key)
        except PoolExhaustedError:
            return self._registered(np.empty(count, dtype))
        memory = Range(lease.addr, nbytes, lease.lkey, lease.rkey)
        return Buffer(lease.array(dtype, count), memory, release=lease.release)

    def _registered(self, array: Array) -> Buffer:
        """The array itself, registered by the pool, or for once when that has no room for it."""
        try:
            region = self.pool.register(array)
            lkey, rkey, release = region.lkey, region.rkey, region.release
        except (PoolExhaustedError, UsageError):
            once = self.registrar.register(array.ctypes.data, array.nbytes)
            lkey, rkey = once.lkey, once.rkey

            def release() -> None:
                self.registrar.deregister(once)

        return Buffer(array, Range(array.ctypes.data, array.nbytes, lkey, rkey), release=release)

    def working(self, array: Array, *, is_result: bool = True) -> Buffer:
        """Memory to work in that holds what `array` holds, and whose result ends there.

        Parameters
        ----------
        array
            From flat().
        is_result
            False: the array stays as it is, and may be read-only.
        """
        if not array.nbytes:
            return Buffer(array, None)
        address = array.ctypes.data
        keys = self.pool.find(address, array.nbytes)
        if keys is not None:
            return Buffer(array, Range(address, array.nbytes, *keys))
        if array.nbytes > self.staged_nbytes and array.flags.writeable:
            return self._registered(array)
        copy = self.scratch(array.dtype, array.size, key="allreduce/staging")
        copy.array[:] = array

        def store() -> None:
            array[:] = copy.array

        return Buffer(copy.array, copy.memory, store if is_result else _nothing, copy.release)
