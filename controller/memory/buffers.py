"""Where a caller's buffer lies in memory, and whose memory it is."""

from __future__ import annotations

import ctypes
import operator
from typing import Any

import numpy as np

from controller.errors import UsageError

_ADDRESS_LIMIT = 1 << 64


# Address of the first byte, length in bytes, and the object that frees the memory when it dies
# (None when only the caller knows). A plain tuple: this is made in every hit.
Located = tuple[int, int, Any]


def locate(buffer: Any) -> Located:
    """Find a buffer's memory.

    Parameters
    ----------
    buffer
        A numpy array or anything else with a writable, contiguous buffer; or (address, nbytes).

    Returns
    -------
    Located
        Address, length in bytes, owner. Of a view, the owner is what it is a view of, to the end of
        the chain.

    Raises
    ------
    UsageError
        It has no memory, is empty, has holes, or must not be written: a registered region can be
        written by the device.
    """
    if type(buffer) is tuple:
        return _given(buffer)
    try:
        # One call that finds the address, and refuses what is read-only, has holes or is empty.
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    except (TypeError, ValueError):
        return _awkward(buffer)
    if type(buffer) is np.ndarray:
        owner = buffer if buffer.base is None else _owner(buffer.base)
        return address, buffer.nbytes, owner
    return address, memoryview(buffer).nbytes, _owner(buffer)


def _owner(buffer: Any) -> Any:
    """The last of a chain of views."""
    while True:
        if isinstance(buffer, np.ndarray):
            if buffer.base is None:
                return buffer
            buffer = buffer.base
        elif isinstance(buffer, memoryview):
            buffer = buffer.obj
        else:
            return buffer


def _given(buffer: tuple[Any, ...]) -> Located:
    try:
        address, nbytes = map(operator.index, buffer)
    except (TypeError, ValueError):
        raise UsageError(f"{buffer!r} is no buffer; allowed: (address, nbytes).") from None
    if not (address > 0 and nbytes > 0 and address + nbytes <= _ADDRESS_LIMIT):
        raise UsageError(
            f"A buffer of {nbytes} bytes at {address:#x} cannot be; allowed: at least one byte, "
            "within 64 bits."
        )
    return address, nbytes, None


def _awkward(buffer: Any) -> Located:
    """What from_buffer() refuses: say why, or find the way around."""
    kind = type(buffer).__name__
    if isinstance(buffer, np.ndarray):  # of a dtype that no buffer can describe (bfloat16)
        array = buffer
    else:
        try:
            array = np.asarray(memoryview(buffer))
        except (TypeError, ValueError):
            raise UsageError(
                f"A {kind} has no buffer to register; expected a numpy array, an object with a "
                "buffer, or (address, nbytes)."
            ) from None
    if not array.nbytes:
        raise UsageError(f"The {kind} is empty: nothing to register.", "Leave empty buffers out.")
    if not array.flags.forc:
        raise UsageError(
            f"The {kind} of shape {array.shape} has holes (strides {array.strides}); a region is "
            "one range of memory.",
            "Register the array that it is a view of, or a contiguous copy.",
        )
    if not array.flags.writeable:
        raise UsageError(
            f"The {kind} of {array.nbytes} bytes is read-only, and a registered region can be "
            "written by the device and by peers.",
            "Register a copy, or (address, nbytes) where you know better.",
        )
    return int(array.ctypes.data), array.nbytes, _owner(buffer)
