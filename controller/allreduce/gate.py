"""Rank 0 while the group meets: it lets the others in, all together, and keeps strangers out.

When all are there it stops listening. Until then a rank that went away may come again, and a
stranger gets a few seconds and a few kilobytes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from controller.allreduce.control_socket import (
    Listener,
    Target,
    check_user,
    peer_name,
    resolve,
    tls_context,
    tune,
)
from controller.allreduce.environment import Master
from controller.allreduce.errors import StallError
from controller.allreduce.frames import (
    MAX_FRAME_BYTES,
    Connection,
    FrameError,
    JsonObject,
    describe,
    message_frame,
)
from controller.allreduce.rendezvous import (
    HANDSHAKE_S,
    PROTOCOL,
    Meeting,
    Take,
    clean,
    ranks_text,
)
from controller.errors import PrivilegeError, UsageError

log = logging.getLogger("stellar.rendezvous")

# Connections at a time that have not greeted, besides the ranks that may come at once.
_STRANGERS = 16
# Connections wait here, in the kernel, while a crowd of strangers is turned away; beyond it they
# would be tried again only after a second.
_BACKLOG = 128
_PAUSE_S = 0.5
_FAREWELL_S = 1.0
_TELL_S = 0.1
# Missing ranks that the others are told of.
_LISTED = 100


class _Gate:
    """Rank 0 while it waits."""

    def __init__(self, meeting: Meeting, listener: Listener, context: ssl.SSLContext | None):
        self._meeting, self._listener, self._context = meeting, listener, context
        self._size = meeting.placement.size
        self.members: dict[int, Connection] = {}
        self.gone: set[int] = set()
        self.changed = asyncio.Event()
        self.last_refusal = ""
        self._strangers: dict[Connection, asyncio.Future[JsonObject]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._telling = False
        self._open = True
        for each in listener.sockets:
            asyncio.get_running_loop().add_reader(each, self._accept, each)

    @property
    def missing(self) -> list[int]:
        """Ranks that are not there."""
        return [rank for rank in range(1, self._size) if rank not in self.members]

    @property
    def awaited(self) -> list[int]:
        """Whom all wait for: ranks that never came; if there are none, those that went again.

        The latter have mostly lost patience because of the former.
        """
        missing = self.missing
        return [rank for rank in missing if rank not in self.gone] or missing

    def close(self) -> None:
        """Stop listening and drop strangers; members stay."""
        self._open = False
        for each in self._listener.sockets:
            asyncio.get_running_loop().remove_reader(each)
        self._listener.close()
        for timer in self._timers:
            timer.cancel()
        for task in self._tasks:
            task.cancel()

    def _accept(self, listener: socket.socket) -> None:
        try:
            stream, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            # No descriptors are left: the socket stays readable, so look away for a while.
            log.warning("rank 0 cannot accept a connection: %s", describe(error))
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            self._later(_PAUSE_S, lambda: loop.add_reader(listener, self._accept, listener))
            return
        if len(self._tasks) >= self._size + _STRANGERS:
            stream.close()
            return
        stream.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._greet(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _greet(self, stream: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        peer = "a connection"
        connection: Connection | None = None
        try:
            peer = peer_name(stream)
            if stream.family == socket.AF_UNIX:
                check_user(stream)
            tune(stream, self._meeting.vanished_s)
            made = connection = Connection(stream, peer, self._on_hello, self._on_stranger_lost)
            greeting = self._strangers[connection] = loop.create_future()
            async with asyncio.timeout(HANDSHAKE_S):
                await loop.connect_accepted_socket(
                    lambda: made,
                    stream,
                    ssl=self._context,
                    ssl_handshake_timeout=HANDSHAKE_S if self._context else None,
                    ssl_shutdown_timeout=_FAREWELL_S if self._context else None,
                )
                hello = await greeting
        except BaseException as error:
            if connection is not None and connection.made:
                connection.abort()
            else:
                stream.close()
            if isinstance(error, TimeoutError):
                self._note(peer, f"no greeting within {HANDSHAKE_S:g} s")
            elif isinstance(error, OSError | PrivilegeError):
                self._note(peer, describe(error))
            else:
                raise
        else:
            # Here, where this task can no longer be cancelled, and not when the greeting came:
            # a member's connection must not end with the task.
            if not connection.closing:
                self._judge(connection, hello)
        finally:
            if connection is not None:
                self._strangers.pop(connection, None)

    def _note(self, peer: str, reason: str) -> None:
        self.last_refusal = f"{peer}: {reason}"
        log.warning("rank 0 refused %s: %s", peer, reason)

    def _on_stranger_lost(self, connection: Connection, reason: str) -> None:
        self._note(connection.peer, reason)
        connection.send(_refused(f"This connection {reason}.", ""))
        greeting = self._strangers[connection]
        if not greeting.done():
            greeting.set_result({})

    def _on_member_lost(self, connection: Connection, reason: str) -> None:
        for rank, member in list(self.members.items()):
            if member is connection:
                log.warning("rank %d (%s) went away while the group met: %s", rank,
                            connection.peer, reason)  # fmt: skip
                del self.members[rank]
                self.gone.add(rank)
                self._tell_soon()

    def _on_early(self, connection: Connection, message: JsonObject, payload: bytes) -> None:
        raise FrameError("a message before the group was complete")

    def _on_hello(self, connection: Connection, message: JsonObject, payload: bytes) -> None:
        connection.on_message = self._on_early
        greeting = self._strangers[connection]
        if not greeting.done():  # else it came just too late
            greeting.set_result(message)

    def _judge(self, connection: Connection, hello: JsonObject) -> None:
        reason, remedy = self._objection(hello)
        if reason:
            self._note(connection.peer, reason)
            connection.send(_refused(reason, remedy))
            connection.close()
            return
        connection.on_lost = self._on_member_lost
        self.members[hello["rank"]] = connection
        connection.send(self._waiting())
        self._tell_soon()
        self.changed.set()

    def _objection(self, message: JsonObject) -> tuple[str, str]:
        """Why a greeting is not accepted, and what to do; empty when it is."""
        if message.get("type") != "hello":
            return "The first message was no greeting.", "Connect with controller.allreduce."
        if message.get("protocol") != PROTOCOL:
            return (
                f"Rank 0 speaks version {PROTOCOL} of the rendezvous protocol; this rank speaks "
                f"{clean(message.get('protocol'))}.",
                "Install the same version of stellar-dataplane on all hosts.",
            )
        if message.get("group") != self._meeting.group:
            return (
                f"At {self._meeting.master} group {self._meeting.group!r} meets, not "
                f"{clean(message.get('group'))!r}.",
                "Give each group that forms at the same time its own MASTER_PORT, and make groups "
                "in the same order on all ranks.",
            )
        rank, size = message.get("rank"), message.get("size")
        if type(size) is not int or size != self._size:
            return (
                f"Rank 0 has {self._size} ranks in group {self._meeting.group!r}; this rank has "
                f"{clean(size)}.",
                "Start all ranks with the same WORLD_SIZE.",
            )
        if type(rank) is not int or not 1 <= rank < self._size:
            return (
                f"Rank {clean(rank)} cannot join; allowed: 1 .. {self._size - 1}.",
                "Give each process a RANK of its own; rank 0 is there already.",
            )
        if rank in self.members:
            return (
                f"Rank {rank} has joined already, from {self.members[rank].peer}.",
                "Give each process a RANK of its own.",
            )
        return "", ""

    def _waiting(self) -> bytes:
        return message_frame({"type": "waiting", "missing": self.awaited[:_LISTED]})

    def _tell_soon(self) -> None:
        """Tell all who is missing; a thousand that come at once are told a few times, not each."""
        if not self._telling and self._open:
            self._telling = True
            self._later(_TELL_S, self._tell)

    def _tell(self) -> None:
        self._telling = False
        for member in self.members.values():
            member.send(self._waiting())

    def _later(self, delay_s: float, function: Callable[[], None]) -> None:
        def run() -> None:
            self._timers.discard(timer)
            function()

        timer = asyncio.get_running_loop().call_later(delay_s, run)
        self._timers.add(timer)


def _refused(reason: str, remedy: str) -> bytes:
    return message_frame({"type": "refused", "error": reason, "remedy": remedy})


async def _resolve_own(master: Master, deadline_s: float) -> list[Target]:
    """Addresses of rank 0's own name, which a cluster's name server may learn late."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return await resolve(master)
        except OSError as error:
            if loop.time() + _PAUSE_S > deadline_s:
                raise UsageError(
                    f"Master {master} of rank 0 has no address: {describe(error)}.",
                    "MASTER_ADDR must be an address of the host that rank 0 runs on.",
                ) from error
        await asyncio.sleep(_PAUSE_S)


async def admit(meeting: Meeting, take: Take) -> None:
    """As rank 0: wait for all others, hand their connections to `take` and let them in.

    Raises
    ------
    StallError
        Some have not come within the timeout; `waiting_for` has their ranks.
    UsageError, ConflictError
        This rank cannot listen there.
    """
    master, placement = meeting.master, meeting.placement
    deadline_s = asyncio.get_running_loop().time() + meeting.timeout_s
    targets = await _resolve_own(master, deadline_s)
    context = tls_context(master, targets, meeting.tls, meeting.insecure, server=True)
    listener = Listener(master, targets, placement.size + _BACKLOG)
    where = f"{master}" if master.path else f"{master} ({listener})"
    gate = _Gate(meeting, listener, context)
    complete = False
    try:
        async with asyncio.timeout_at(deadline_s):
            while gate.missing:
                await gate.changed.wait()
                gate.changed.clear()
        complete = True
    except TimeoutError:
        awaited = gate.awaited
        gone = [rank for rank in gate.missing if rank in gate.gone]
        text = (
            f"{ranks_text(awaited)} of group {meeting.group!r} did not "
            f"{'stay with' if awaited == gone else 'come to'} rank 0, which waited "
            f"{meeting.timeout_s:g} s on {where}."
        )
        if gone and gone != awaited:
            text += f" {ranks_text(gone)} came and went away again."
        if gate.last_refusal:
            text += f" Last refused: {gate.last_refusal}"
        farewell = message_frame({"type": "failed", "error": text, "missing": awaited[:_LISTED]})
        members = list(gate.members.values())
        for member in members:
            member.send(farewell)
            member.close()
        if members:
            await asyncio.wait([member.ended for member in members], timeout=_FAREWELL_S)
        raise StallError(
            text,
            "Look at what these ranks report; all must be given the same master.",
            waiting_for=awaited,
        ) from None
    finally:
        gate.close()
        if not complete:
            for member in gate.members.values():
                member.abort()
    # Nobody else listens or reads between here and the welcome: this is one step of the loop.
    for rank, member in gate.members.items():
        member.limit = MAX_FRAME_BYTES
        take(rank, member)
    for member in gate.members.values():
        member.send(message_frame({"type": "welcome"}))
