"""The frames that `scripts/lab` (host) and `scripts/lab-init` (guest) exchange over a serial line.

One line carries everything, so that output, exit status and signals keep their order and the exit
status cannot overtake the last byte of output.
"""

import enum
import struct
from collections.abc import Iterator

_HEADER = struct.Struct("!BI")

# The most that the host has on its way to the guest: the line discipline throttles the line at
# 3,968 unread bytes, and the serial driver of user-mode Linux (7.3) takes a throttled line out of
# its interrupts and never puts it back.
LINE_WINDOW_BYTES = 3072

# The most standard input that the command has not taken yet: signals must not queue behind more.
STDIN_WINDOW_BYTES = 64 * 1024


class Frame(enum.IntEnum):
    """Kinds of frame. The comment names the direction and the payload."""

    HELLO = 1  # guest -> host: the line is in raw mode, send START
    START = 2  # host -> guest: JSON, what to run (see spec.RunSpec.start_message)
    STDIN = 3  # host -> guest: bytes
    STDIN_EOF = 4  # host -> guest: empty
    STDIN_ACK = 5  # guest -> host: u32, bytes of standard input the command has taken
    LINE_ACK = 6  # guest -> host: u32, bytes of any kind read off the line
    STDOUT = 7  # guest -> host: bytes
    STDERR = 8  # guest -> host: bytes
    CLOSE = 9  # host -> guest: u32, 1 or 2: nobody reads this stream any more
    SIGNAL = 10  # host -> guest: u32, for the command's process group
    WINDOW = 11  # host -> guest: u32 rows << 16 | columns
    STARTED = 12  # guest -> host: the command runs; its time limit starts here
    EXIT = 13  # guest -> host: u32, exit status as a shell shows it; the last frame
    FAILED = 14  # guest -> host: text, why the guest could not be set up


def encode(kind: Frame, payload: bytes = b"") -> bytes:
    """Return one frame as bytes."""
    return _HEADER.pack(kind, len(payload)) + payload


def encode_number(kind: Frame, number: int) -> bytes:
    """Return one frame whose payload is a u32."""
    return encode(kind, number.to_bytes(4, "big"))


def number(payload: bytes) -> int:
    """Return the u32 of a payload made by `encode_number`."""
    return int.from_bytes(payload, "big")


class Decoder:
    """Cuts a byte stream, fed in arbitrary pieces, into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Frame, bytes]]:
        """Yield the frames that `data` completes."""
        self._pending += data
        while len(self._pending) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._pending)
            end = _HEADER.size + length
            if len(self._pending) < end:
                return
            payload = bytes(self._pending[_HEADER.size : end])
            del self._pending[:end]
            yield Frame(kind), payload
