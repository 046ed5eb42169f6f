"""How a rank comes to rank 0 and is let in; the other side of it is in `gate`.

A rank greets with what it believes about the group. Rank 0 answers at once: refused, with the
reason, or who is still missing. When all are there it welcomes them together.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from controller.allreduce.control_socket import (
    Target,
    check_user,
    resolve,
    tls_context,
    tune,
)
from controller.allreduce.environment import Master, Placement, TlsFiles
from controller.allreduce.errors import StallError
from controller.allreduce.frames import (
    MAX_FRAME_BYTES,
    Connection,
    FrameError,
    JsonObject,
    describe,
    message_frame,
)
from controller.errors import PrivilegeError, UsageError

PROTOCOL = 1
MAX_GROUP_CHARS = 100
# From the first byte of a connection to its greeting.
HANDSHAKE_S = 5.0
_CONNECT_S = 5.0
_SHUTDOWN_S = 1.0
_RETRY_S, _MAX_RETRY_S = 0.02, 0.5
# A rank 0 that answers does so at once. One or two connections may fall to a listener that closes.
_SILENT_CLOSES = 6
_MAX_TEXT_CHARS = 1000

# Takes over a connection to a rank, before anything more is read from it.
Take = Callable[[int, Connection], None]


@dataclass(frozen=True)
class Meeting:
    """What a rank needs to know to meet the others.

    Attributes
    ----------
    placement
        Of this rank; with a master.
    group
        Name of the group; the same on all ranks.
    timeout_s
        For the whole group to be there.
    tls, insecure
        As in `ControlChannel.join`.
    vanished_s
        A host that is gone for so long ends its connection.
    """

    placement: Placement
    group: str
    timeout_s: float
    tls: TlsFiles | None
    insecure: bool
    vanished_s: float

    @property
    def master(self) -> Master:
        """Where rank 0 is met."""
        assert self.placement.master is not None
        return self.placement.master

    def greeting(self) -> JsonObject:
        """What a rank says first."""
        return {
            "type": "hello",
            "protocol": PROTOCOL,
            "group": self.group,
            "rank": self.placement.rank,
            "size": self.placement.size,
        }


def ranks_text(ranks: Iterable[int]) -> str:
    """``Rank 3``, or ``Ranks 3, 4, 5``; a few of many."""
    numbers = list(ranks)
    shown = ", ".join(map(str, numbers[:16]))
    more = f" and {len(numbers) - 16} more" if len(numbers) > 16 else ""
    return f"{'Rank' if len(numbers) == 1 else 'Ranks'} {shown}{more}"


def _rank_list(value: object) -> list[int]:
    if not isinstance(value, list) or not all(type(rank) is int for rank in value):
        raise FrameError("ranks that are no list of numbers")
    return value[:1000]


def clean(value: object) -> str:
    """Text of the other side, fit for a terminal."""
    text = value if isinstance(value, str) else "nothing" if value is None else repr(value)
    return "".join(c if c.isprintable() else "?" for c in text[:_MAX_TEXT_CHARS])


class _Lost(Exception):
    """A connection ended before rank 0 let this rank in."""

    def __init__(self, reason: str, error: Exception | None) -> None:
        super().__init__(reason)
        self.error = error


class _Knock:
    """One attempt of a rank to be let in."""

    def __init__(self, meeting: Meeting, take: Take) -> None:
        self._meeting, self._take = meeting, take
        self.missing: list[int] = []
        self.answered = False
        self.admitted = asyncio.get_running_loop().create_future()

    async def run(self, target: Target, context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        family, address = target
        stream = socket.socket(family, socket.SOCK_STREAM)
        connection = None
        try:
            stream.setblocking(False)
            async with asyncio.timeout(_CONNECT_S):
                await loop.sock_connect(stream, address)
            if family == socket.AF_UNIX:
                check_user(stream)
            elif stream.getsockname() == stream.getpeername():
                # An ephemeral port on loopback that nobody listens on can be our own.
                raise ConnectionRefusedError("nobody listens yet")
            tune(stream, self._meeting.vanished_s)
            connection = Connection(
                stream, str(self._meeting.master), self._on_answer, self._on_lost
            )
            made = connection
            await loop.create_connection(
                lambda: made,
                sock=stream,
                ssl=context,
                server_hostname="" if context else None,
                ssl_handshake_timeout=HANDSHAKE_S if context else None,
                ssl_shutdown_timeout=_SHUTDOWN_S if context else None,
            )
            connection.send(message_frame(self._meeting.greeting()))
            await self.admitted
        except BaseException:
            # What else became of it is told by this error.
            if not self.admitted.cancel() and not self.admitted.cancelled():
                self.admitted.exception()
            if connection is not None and connection.made:
                connection.abort()
            else:
                stream.close()
            raise

    def _on_lost(self, connection: Connection, reason: str) -> None:
        if not self.admitted.done():
            self.admitted.set_exception(_Lost(reason, connection.error))

    def _on_answer(self, connection: Connection, message: JsonObject, payload: bytes) -> None:
        kind = message.get("type")
        self.answered = True
        if self.admitted.done():
            return
        if kind == "waiting":
            self.missing = _rank_list(message.get("missing"))
        elif kind == "welcome":
            connection.limit = MAX_FRAME_BYTES
            # In this step of the loop: the next message may be in the same bytes.
            self._take(0, connection)
            self.admitted.set_result(None)
        elif kind == "failed":
            self.admitted.set_exception(
                StallError(
                    clean(message.get("error")),
                    "Look at what the missing ranks report.",
                    waiting_for=_rank_list(message.get("missing")),
                )
            )
        elif kind == "refused":
            self.admitted.set_exception(
                UsageError(
                    f"Rank 0 at {self._meeting.master} refused rank "
                    f"{self._meeting.placement.rank}: {clean(message.get('error'))}",
                    clean(message.get("remedy")),
                )
            )
        else:
            raise FrameError(f"{clean(kind)!r} in place of an answer")


async def enter(meeting: Meeting, take: Take) -> None:
    """As another rank: come to rank 0 until it lets this rank in.

    Raises
    ------
    StallError
        The group was not complete within the timeout; `waiting_for` has the missing ranks.
    UsageError
        Rank 0 refused, or what is at the master is no rank 0.
    PrivilegeError
        Rank 0 is another user's.
    """
    knocks = _Knocks(meeting, take)
    try:
        async with asyncio.timeout(meeting.timeout_s):
            pause_s = _RETRY_S
            while not await knocks.round():
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_RETRY_S)
    except TimeoutError:
        start = (
            f"Rank {meeting.placement.rank} could not join group {meeting.group!r} at "
            f"{meeting.master} within {meeting.timeout_s:g} s"
        )
        missing = knocks.missing
        if missing:
            raise StallError(
                f"{start}: {ranks_text(missing)} did not come.",
                "Look at what these ranks report.",
                waiting_for=missing,
            ) from None
        raise StallError(
            f"{start}: {knocks.reason or 'no connection'}.",
            "Rank 0 has not started, listens elsewhere, or its group is complete already; all "
            "ranks must be given the same master.",
            rank=0,
            waiting_for=[0],
        ) from None


class _Knocks:
    """The attempts of a rank, and what is known from them."""

    def __init__(self, meeting: Meeting, take: Take) -> None:
        self._meeting, self._take = meeting, take
        self._last: _Knock | None = None
        self._silent = 0
        self.reason = ""

    @property
    def missing(self) -> list[int]:
        """Ranks for which rank 0 is known to wait."""
        return self._last.missing if self._last else []

    async def round(self) -> bool:
        """Try all addresses once; whether this rank is in."""
        meeting = self._meeting
        try:
            targets = await resolve(meeting.master)
        except OSError as error:
            self.reason = f"no address: {describe(error)}"  # a name may become known later
            return False
        context = tls_context(
            meeting.master, targets, meeting.tls, meeting.insecure, server=False
        )  # fmt: skip
        for target in targets:
            self._last = knock = _Knock(meeting, self._take)
            try:
                await knock.run(target, context)
                return True
            except _Lost as error:
                self._judge(knock, str(error), error.error)
            except PermissionError as error:
                raise PrivilegeError(
                    f"The socket at {meeting.master} may not be opened.",
                    "Run all ranks as one user.",
                ) from error
            except OSError as error:
                self.reason = describe(error)
                self._judge(knock, self.reason, error)
        return False

    def _judge(self, knock: _Knock, reason: str, error: Exception | None) -> None:
        """Raise unless the next attempt may do better."""
        self.reason, knock.missing = reason, []
        remedy = (
            "Give TLS files of one authority to all ranks, or to none; rank 0's log has its reason."
        )
        if isinstance(error, ssl.SSLError):
            raise UsageError(
                f"TLS with rank 0 at {self._meeting.master} failed: {reason}.", remedy
            ) from error
        if isinstance(error, FrameError):
            raise UsageError(
                f"What listens at {self._meeting.master} is no rank 0: it {reason}.", remedy
            ) from error
        if isinstance(error, OSError) and not isinstance(
            error, ConnectionResetError | BrokenPipeError
        ):
            return  # nobody was there
        self._silent = 0 if knock.answered else self._silent + 1
        if self._silent >= _SILENT_CLOSES:
            raise UsageError(
                f"Rank 0 at {self._meeting.master} closed the connection without an answer, "
                f"{self._silent} times.",
                remedy,
            )
