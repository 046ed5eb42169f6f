"""Keeps a streaming JSON parser from being led astray: depth and size of what it must hold."""

from __future__ import annotations

from typing import IO

import numpy as np

# Profiler and execution traces nest about ten levels. The parser keeps the path of each level,
# which grows with the square: 200,000 open brackets took more than 20 GB.
MAX_DEPTH = 200
# Of one string, or of one element of the list of events.
MAX_VALUE_BYTES = 64 << 20
# The file's object, and the list of events in it; the third level is one event.
_LIST_DEPTH = 2

_OTHERS = bytes(set(range(256)) - set(b'[]{}"'))
_STEPS = np.zeros(256, dtype=np.int64)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1


class TooDeepError(Exception):
    """The JSON nests deeper than `MAX_DEPTH`, or one value of it is above `MAX_VALUE_BYTES`."""


class BoundedJson:
    """A stream that passes JSON on unchanged while it counts brackets outside of strings.

    Parameters
    ----------
    stream
        To read from.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._depth = 0
        self._in_string = False
        self._after_backslash = False
        self._value_bytes = 0

    def read(self, size: int = -1) -> bytes:
        """The next bytes.

        Raises
        ------
        TooDeepError
            See there.
        """
        data = self._stream.read(size)
        self._count(data)
        return data

    def _count(self, data: bytes) -> None:
        text = data[1:] if self._after_backslash else data
        # An escaped backslash first: what follows it is not escaped.
        text = text.replace(b"\\\\", b"")
        self._after_backslash = text.endswith(b"\\")
        pieces = text.replace(b'\\"', b"").translate(None, _OTHERS).split(b'"')
        outside = b"".join(pieces[int(self._in_string) :: 2])
        self._in_string ^= len(pieces) % 2 == 0
        lowest = self._depth
        if outside:
            depths = self._depth + np.cumsum(_STEPS[np.frombuffer(outside, dtype=np.uint8)])
            self._depth = int(depths[-1])
            lowest = min(lowest, int(depths.min()))
            if int(depths.max()) > MAX_DEPTH:
                raise TooDeepError(f"nests deeper than {MAX_DEPTH} levels")
        within_string = self._in_string and len(pieces) == 1
        if within_string or lowest > _LIST_DEPTH:
            self._value_bytes += len(data)
        else:
            self._value_bytes = 0
        if self._value_bytes > MAX_VALUE_BYTES:
            raise TooDeepError(f"holds one value of more than {MAX_VALUE_BYTES >> 20} MiB")
