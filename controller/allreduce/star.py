"""Messages between ranks through rank 0, as they go on after all have met.

Rank 0 relays what a rank says to all others, byte for byte, and tells them when one is gone.
Everything here happens in the thread of one event loop.

A rank is taken for dead when its connection ends without a goodbye: when its process ends, or when
the kernel has had no acknowledgement from its host for a while, for which heartbeats give it
something to acknowledge. A process that is there and silent is given several times as long: it may
hold Python's lock in a long call, or sit in a debugger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from controller.allreduce.frames import Connection, FrameError, JsonObject, frame, message_frame

Kind = Literal["abort", "died", "left"]

BEATS_PER_TIMEOUT = 5
# Heartbeat timeouts without a sign of life from a process whose kernel still answers.
_HUNG_TIMEOUTS = 6
# For the other side to close as well.
_GOODBYE_S = 1.0
_BEAT = message_frame({"type": "beat"})


@dataclass(frozen=True)
class Departure:
    """A rank went away, or wants all to stop.

    Attributes
    ----------
    rank
        Whose.
    kind
        ``left``: closed its channel. ``died``: its process or host is gone. ``abort``: it called
        `ControlChannel.abort`; its channel is still there.
    reason
        Of an abort: what was given. Of a death: ``error``, a text.
    """

    rank: int
    kind: Kind
    reason: JsonObject

    def to_json(self) -> JsonObject:
        """As a message."""
        return {
            "type": "departure",
            "rank": self.rank,
            "kind": self.kind,
            "reason": self.reason,
        }


class Star:
    """A rank's connections: to all others at rank 0, to rank 0 elsewhere.

    Parameters
    ----------
    rank, size
        Of this process.
    on_part
        Called with (rank, number of the gathering, document), of this rank too.
    on_departure
        Called once with each departure of another rank.
    heartbeat_timeout_s
        As in `ControlChannel.join`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        on_part: Callable[[int, int, JsonObject], None],
        on_departure: Callable[[Departure], None],
        heartbeat_timeout_s: float,
    ) -> None:
        self._rank, self._size = rank, size
        self._on_part, self._on_departure = on_part, on_departure
        self._timeout_s = heartbeat_timeout_s
        self._peers: dict[int, Connection] = {}
        self._rank_of: dict[Connection, int] = {}
        # Gatherings are numbered from 1; the last that a rank has taken part in.
        self._last = [0] * size
        self._gone: set[int] = set()
        self._aborted: set[int] = set()
        self._leaving = False

    # ---- what this rank does ----

    def take(self, rank: int, connection: Connection) -> None:
        """Take over a connection from the rendezvous."""
        connection.on_message, connection.on_lost = self._on_message, self._on_lost
        self._peers[rank] = connection
        self._rank_of[connection] = rank

    def send_part(self, number: int, document: JsonObject) -> None:
        """Give all ranks this rank's document of a gathering."""
        self._last[self._rank] = number
        message = {"type": "part", "rank": self._rank, "seq": number, "document": document}
        self._send(message_frame(message))
        self._on_part(self._rank, number, document)

    def abort(self, reason: JsonObject) -> None:
        """Tell all others to stop; the first time only."""
        if self._rank not in self._aborted:
            self._aborted.add(self._rank)
            self._send(message_frame(Departure(self._rank, "abort", reason).to_json()))

    async def beat(self) -> None:
        """Send heartbeats and look for silent processes, for ever."""
        limit = _HUNG_TIMEOUTS * BEATS_PER_TIMEOUT
        while True:
            await asyncio.sleep(self._timeout_s / BEATS_PER_TIMEOUT)
            for rank, connection in list(self._peers.items()):
                if rank in self._gone:
                    continue
                # Counted in beats of ours: while this process stood still itself, none were.
                connection.quiet_beats += 1
                if connection.quiet_beats > limit:
                    connection.fail(
                        f"has given no sign of life for {_HUNG_TIMEOUTS * self._timeout_s:g} s"
                    )
                elif connection.idle:
                    connection.send(_BEAT)

    async def leave(self) -> None:
        """Say goodbye and close all connections, together with the other side.

        The side that says goodbye reads on until the other has closed: closing with something
        unread would reset the connection, and the goodbye could be lost.
        """
        self._leaving = True
        self._send(message_frame(Departure(self._rank, "left", {}).to_json()))
        waiting = {connection.ended for connection in self._peers.values()}
        if waiting:
            await asyncio.wait(waiting, timeout=_GOODBYE_S)
        for connection in self._peers.values():
            connection.abort()

    def close_in_child(self) -> None:
        """After fork: give up the child's copies of the sockets."""
        for connection in self._peers.values():
            connection.close_in_child()

    def _send(self, data: bytes, but: int | None = None) -> None:
        for rank, connection in self._peers.items():
            if rank != but and rank not in self._gone:
                connection.send(data)

    # ---- what others do ----

    def _on_message(self, connection: Connection, message: JsonObject, payload: bytes) -> None:
        kind = message.get("type")
        if kind == "beat":
            return
        sender = self._rank_of[connection]
        rank = message.get("rank")
        if type(rank) is not int or not 0 <= rank < self._size or rank == self._rank:
            raise FrameError(f"a message of rank {rank!r}")
        if self._rank == 0 and rank != sender:
            raise FrameError(f"a message in the name of rank {rank}")
        if kind == "part":
            self._take_part(rank, message, payload)
        elif kind == "departure":
            self._take_departure(sender, rank, message, payload)
        else:
            raise FrameError(f"a message of type {str(kind)[:40]!r}")

    def _take_part(self, rank: int, message: JsonObject, payload: bytes) -> None:
        number, document = message.get("seq"), message.get("document")
        # No rank can be two ahead of this one: the gathering between needs this one's document.
        # So documents of two gatherings are kept at most.
        if (
            type(number) is not int
            or number != self._last[rank] + 1
            or number > self._last[self._rank] + 1
        ):
            raise FrameError(f"a document for gathering {number!r} out of order")
        if not isinstance(document, dict):
            raise FrameError("a document that is no JSON object")
        if self._leaving:
            return
        self._last[rank] = number
        self._relay(rank, payload)
        self._on_part(rank, number, document)

    def _take_departure(self, sender: int, rank: int, message: JsonObject, payload: bytes) -> None:
        kind, reason = message.get("kind"), message.get("reason")
        if not isinstance(reason, dict):
            raise FrameError("a departure without a reason")
        if kind == "abort":
            if rank not in self._aborted and not self._leaving:
                self._aborted.add(rank)
                self._relay(rank, payload)
                self._on_departure(Departure(rank, "abort", reason))
        elif kind == "left" or (kind == "died" and self._rank != 0):
            if rank == sender:
                self._peers[rank].close()
            self._depart(Departure(rank, "left" if kind == "left" else "died", reason))
        else:
            raise FrameError(f"a departure of kind {str(kind)[:40]!r}")

    def _on_lost(self, connection: Connection, reason: str) -> None:
        self._depart(Departure(self._rank_of[connection], "died", {"error": reason}))

    def _depart(self, departure: Departure) -> None:
        if departure.rank in self._gone or self._leaving:
            return
        self._gone.add(departure.rank)
        if self._rank == 0:
            self._send(message_frame(departure.to_json()))
        self._on_departure(departure)

    def _relay(self, rank: int, payload: bytes) -> None:
        if self._rank == 0:
            self._send(frame(payload), but=rank)
