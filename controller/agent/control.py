"""The control socket: one JSON request a connection, one JSON answer, maybe descriptors.

A client that has something to say again and again holds a conversation instead: a request and
an answer a line, until it leaves or falls silent.

A Unix socket in an owner-only directory; the kernel's word for who is on the other side
(SO_PEERCRED) is checked as well. Requests are bounded in size and time.
"""

from __future__ import annotations

import array
import json
import logging
import os
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from controller import errors
from controller.errors import NotRunningError, StellarError, UsageError

log = logging.getLogger("stellar.control")

MAX_REQUEST_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 64 * 1024 * 1024
REQUEST_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 60.0
_MAX_FDS = 8
_ENDED, _LOOK = "The controller ended before it answered.", "Look at its log, then start it again."

# A handler gets the request's arguments and gives the answer and descriptors to pass on;
# these are closed afterwards.
Handler = Callable[[Mapping[str, Any]], tuple[Mapping[str, Any], list[int]]]


class Talk(Protocol):
    """One client's conversation."""

    def answer(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer one request of it."""

    def close(self) -> None:
        """The client is gone, or was silent for too long, or got an error."""


@dataclass(frozen=True)
class Conversation:
    """A command whose connection stays open for more of the same.

    Parameters
    ----------
    begin
        Process id of the client, as the kernel knows it (0: of a namespace that we do not
        see) -> the conversation.
    silence_s
        A client from which nothing comes for so long is let go.
    max_request_bytes
        Of one line.
    """

    begin: Callable[[int], Talk]
    silence_s: float
    max_request_bytes: int


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 16


class ControlServer:
    """Serves requests in threads of its own until `close`.

    Parameters
    ----------
    path
        Where to put the socket.
    handlers
        Command name -> handler. A StellarError that it raises goes to the client.
    """

    def __init__(self, path: Path, handlers: Mapping[str, Handler | Conversation]) -> None:
        self._path = path
        path.unlink(missing_ok=True)

        class _Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                _serve(self.request, handlers)

        old_mask = os.umask(0o177)
        try:
            self._server = _Server(str(path), _Handler)
        finally:
            os.umask(old_mask)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving and remove the socket."""
        self._server.shutdown()
        self._server.server_close()
        self._path.unlink(missing_ok=True)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other side, at the time it connected."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return int(pid), int(uid)


class _Client:
    """What goes on on one connection."""

    def __init__(self, handlers: Mapping[str, Handler | Conversation], pid: int) -> None:
        self._handlers = handlers
        self._pid = pid
        self._command = ""
        self._talk: Talk | None = None
        self.conversation: Conversation | None = None
        self.fds: list[int] = []

    def answer(self, request: bytes) -> Mapping[str, Any]:
        """The answer to a request, or what is wrong with that."""
        try:
            document = json.loads(request)
            try:
                return self._answer(document["command"], document.get("arguments", {}))
            except OSError as error:
                raise StellarError(f"{document['command']} failed: {error}.") from error
        except StellarError as error:
            return {"error": error.message, "remedy": error.remedy, "type": type(error).__name__}
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            return {"error": f"Request not understood: {error!r}.", "type": "StellarError"}
        except Exception as error:  # a bug of ours must not read as "it ended"
            log.exception("request failed")
            return {
                "error": f"Request failed: {error!r}.",
                "remedy": "The controller's log has more; please report it.",
                "type": "StellarError",
            }

    def _answer(self, command: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._talk and command != self._command:
            raise UsageError(
                f"{command!r:.100} comes in a conversation about {self._command}; allowed: one "
                "command a connection."
            )
        handler = self._handlers[command]
        if isinstance(handler, Conversation):
            if self._talk is None:
                self._talk = handler.begin(self._pid)
                self._command, self.conversation = command, handler
            return self._talk.answer(arguments)
        answer, self.fds = handler(arguments)
        return answer

    def close(self) -> None:
        """Forget the client, and let go of what it was to be sent."""
        if self._talk:
            self._talk.close()
        for fd in self.fds:
            os.close(fd)


def _serve(connection: socket.socket, handlers: Mapping[str, Handler | Conversation]) -> None:
    connection.settimeout(REQUEST_TIMEOUT_S)
    client: _Client | None = None
    try:
        pid, uid = _peer(connection)
        if uid not in (0, os.geteuid()):
            return
        client = _Client(handlers, pid)
        answer = client.answer(_read_line(connection, MAX_REQUEST_BYTES))
        data = json.dumps(answer).encode() + b"\n"
        connection.settimeout(ANSWER_TIMEOUT_S)
        if client.fds:
            # The descriptors travel with the first byte.
            socket.send_fds(connection, [data[:1]], client.fds)
            data = data[1:]
        connection.sendall(data)
        if client.conversation and "error" not in answer:
            _converse(connection, client, client.conversation)
    except OSError:
        pass  # the client went away; it has nothing of ours
    finally:
        if client:
            client.close()
        connection.close()


def _converse(connection: socket.socket, client: _Client, conversation: Conversation) -> None:
    """Answer line by line, until an error; OSError when the client is gone or silent."""
    connection.settimeout(conversation.silence_s)
    while request := _read_line(connection, conversation.max_request_bytes):
        answer = client.answer(request)
        connection.sendall(json.dumps(answer).encode() + b"\n")
        if "error" in answer:
            return


def _read_line(connection: socket.socket, limit: int) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        chunk = connection.recv(min(65536, limit + 1 - len(data)))
        if not chunk:
            break
        data += chunk
        if len(data) > limit:
            raise ConnectionError("request too long")
    return data


def request(
    path: Path,
    command: str,
    arguments: Mapping[str, Any] | None = None,
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> tuple[dict[str, Any], list[int]]:
    """Ask the controller behind `path`; returns the answer and passed descriptors.

    Raises
    ------
    NotRunningError
        Nobody answers there.
    StellarError
        What the controller reports, or it does not answer in time.
    """
    try:
        document = {"command": command, "arguments": dict(arguments or {})}
        answer, fds = _exchange(path, document, timeout_s)
    except ConnectionError as error:
        raise NotRunningError(_ENDED, _LOOK) from error
    except OSError as error:
        raise StellarError(
            f"The controller at {path.parent} cannot be asked: {error}.",
            "Look at its log; it may be stopped or overloaded.",
        ) from error
    if "error" in answer:
        kind_of_error = getattr(errors, str(answer.get("type")), StellarError)
        raise kind_of_error(answer["error"], answer.get("remedy", ""))
    return answer, fds


def _exchange(
    path: Path, document: Mapping[str, Any], timeout_s: float
) -> tuple[dict[str, Any], list[int]]:
    parts: list[bytes] = []
    fds: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
            raise NotRunningError(
                f"No controller runs at {path.parent}.",
                "Start one: controller start -i NETNS:IF; another directory: --run-dir.",
            ) from error
        except PermissionError as error:
            raise errors.PrivilegeError(
                f"The control socket {path} may not be opened.", "Run as root."
            ) from error
        connection.sendall(json.dumps(document).encode() + b"\n")
        size = 0
        while size <= MAX_ANSWER_BYTES:
            space = socket.CMSG_LEN(_MAX_FDS * array.array("i").itemsize)
            data, ancillary, _, _ = connection.recvmsg(1 << 20, space)
            for level, kind, payload in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    numbers = array.array("i")
                    numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                    fds.extend(numbers)
            if not data:
                break
            parts.append(data)
            size += len(data)
    try:
        answer = json.loads(b"".join(parts))
    except ValueError as error:
        raise NotRunningError(_ENDED, _LOOK) from error
    return answer, fds
