"""JSON messages over a stream between two ranks, each with its length in front.

Whatever comes from the other side is bounded (length, depth) before anybody looks at it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Any

from controller.errors import UsageError

JsonObject = dict[str, Any]

MAX_DOCUMENT_BYTES = 1 << 20
# A document travels in a message that says whose it is and where it belongs.
MAX_FRAME_BYTES = MAX_DOCUMENT_BYTES + 4096
# Enough for a greeting or a refusal; all that a stranger may send.
MAX_GREETING_BYTES = 16 * 1024
# Documents of ranks are a few levels deep; Python's own recursion limit is a thousand.
MAX_DEPTH = 64

_LENGTH = struct.Struct(">I")
# First byte of a TLS record: alert, handshake (RFC 8446, section 5.1). As the first byte of a
# length it would be 350 MB.
_TLS_RECORDS = (0x15, 0x16)


class FrameError(ValueError):
    """Bytes that no rank of this version sends."""


def encode_document(document: JsonObject, what: str) -> bytes:
    """The JSON text of a document.

    Raises
    ------
    UsageError
        It is no JSON object, too deep, or longer than MAX_DOCUMENT_BYTES.
    """
    if not isinstance(document, dict):
        raise UsageError(f"{what} is a {type(document).__name__}; expected a dictionary.")
    try:
        text = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
        _check_depth(document, MAX_DEPTH)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{what} cannot be sent as JSON: {error}.") from error
    if len(text) > MAX_DOCUMENT_BYTES:
        raise UsageError(
            f"{what} is {len(text)} bytes of JSON; allowed: {MAX_DOCUMENT_BYTES}.",
            "Send data through the collectives; this channel is for descriptions.",
        )
    return text


def frame(payload: bytes) -> bytes:
    """A message as it goes over the stream."""
    return _LENGTH.pack(len(payload)) + payload


def message_frame(message: JsonObject) -> bytes:
    """A frame of a message of our own making, which is JSON and small."""
    return frame(json.dumps(message, separators=(",", ":")).encode())


def decode_object(payload: bytes) -> JsonObject:
    """A JSON object from the other side.

    Raises
    ------
    FrameError
        It is something else.
    """
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"no JSON: {error}") from error
    if not isinstance(document, dict):
        raise FrameError(f"a JSON {type(document).__name__}, not an object")
    _check_depth(document, MAX_DEPTH + 1)  # the message is one more
    return document


def _check_depth(document: JsonObject, allowed: int) -> None:
    level: list[Any] = [document]
    for _ in range(allowed):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list | tuple)
        ]
        if not level:
            return
    raise FrameError(f"a document of more than {MAX_DEPTH} levels")


class Connection(asyncio.Protocol):
    """One side of a stream that carries frames; lives in an event loop's thread.

    Parameters
    ----------
    stream
        The connected socket, which is the caller's until the loop has taken it.
    peer
        What to call the other side in messages: its address.
    on_message
        Called with the connection, the message and its payload.
    on_lost
        Called once with the connection and the reason when it ends without `close`.

    Attributes
    ----------
    limit
        Longest frame that is accepted, in bytes.
    quiet_beats
        How many heartbeats of ours have passed since something came.
    error
        What ended it, if an exception did.
    """

    def __init__(
        self,
        stream: socket.socket,
        peer: str,
        on_message: Callable[[Connection, JsonObject, bytes], None],
        on_lost: Callable[[Connection, str], None],
    ) -> None:
        self.peer, self.on_message, self.on_lost = peer, on_message, on_lost
        self.limit = MAX_GREETING_BYTES
        self.quiet_beats = 0
        self.error: Exception | None = None
        self.ended = asyncio.get_running_loop().create_future()
        self._stream = stream
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._made = False
        self._closing = False

    # ---- what asyncio calls ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The stream is ready (TLS has shaken hands)."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._made = transport, True

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._closing:
            return
        self.quiet_beats = 0
        self._buffer += data
        try:
            while len(self._buffer) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer)
                if length > self.limit:
                    raise FrameError(
                        "TLS, which is not used here"
                        if self._buffer[0] in _TLS_RECORDS
                        else f"a message of {length} bytes (allowed: {self.limit})"
                    )
                end = _LENGTH.size + length
                if len(self._buffer) < end:
                    return
                payload = bytes(memoryview(self._buffer)[_LENGTH.size : end])
                del self._buffer[:end]
                self.on_message(self, decode_object(payload), payload)
                if self.closing:
                    return
        except FrameError as error:
            self.error = error
            self.fail(f"sent {error}")

    def connection_lost(self, error: Exception | None) -> None:
        """The stream is over."""
        # abort() of a transport that the other side reset while it had something to send fails.
        self._transport = None
        if not self.ended.done():
            self.ended.set_result(None)
        self.error = self.error or error
        self._lost(
            "closed its connection without a goodbye"
            if error is None
            else f"connection lost: {describe(error)}"
        )

    # ---- what its owner calls ----

    @property
    def made(self) -> bool:
        """Whether the stream was ready once, so that it is the loop's to close."""
        return self._made

    @property
    def closing(self) -> bool:
        """Whether it has ended, or is going to once all is sent."""
        return self._closing

    @property
    def idle(self) -> bool:
        """Whether all that was sent has gone to the kernel."""
        return self._transport is None or self._transport.get_write_buffer_size() == 0

    def send(self, data: bytes) -> None:
        """Send a frame; nothing happens when the connection is over."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def fail(self, reason: str) -> None:
        """End it now because of what the other side did or did not do.

        What `on_lost` sends as a last word goes out if the kernel takes it at once.
        """
        self._lost(reason)
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """End it; what was sent still goes out."""
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End it; what was sent may be lost."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def close_in_child(self) -> None:
        """After fork: give up the child's copy of the socket, and leave the connection alone."""
        with contextlib.suppress(OSError):
            self._stream.close()

    def _lost(self, reason: str) -> None:
        if not self._closing:
            self._closing = True
            self.on_lost(self, reason)


def describe(error: BaseException) -> str:
    """An error of a socket in a few words."""
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno)  # asyncio has texts of its own in its place
    return str(error) or ("timed out" if isinstance(error, TimeoutError) else type(error).__name__)
