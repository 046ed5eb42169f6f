"""The channel beside the data: ranks exchange descriptions, and hear when one of them is gone.

A star over rank 0. A thread of its own reads and sends, so a rank is heard of whatever the caller
does; callers' threads only wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable

from controller.allreduce.environment import Placement, TlsFiles, insecure_allowed
from controller.allreduce.errors import ClosedError, CollectiveError, PeerError, StallError
from controller.allreduce.frames import JsonObject, encode_document
from controller.allreduce.gate import admit
from controller.allreduce.rendezvous import MAX_GROUP_CHARS, Meeting, clean, enter, ranks_text
from controller.allreduce.star import BEATS_PER_TIMEOUT, Departure, Star
from controller.errors import UsageError

__all__ = ["ControlChannel", "Departure", "DepartureError", "JsonObject", "TlsFiles"]

log = logging.getLogger("stellar.rendezvous")

_ABORT_WAIT_S = 0.1
# A shorter one would be about scheduling, not about hosts.
_MIN_HEARTBEAT_TIMEOUT_S = 0.5
_NEW_GROUP = "Close the channel and make a new group."


class DepartureError(PeerError):
    """A gathering cannot be completed because a rank departed.

    Attributes
    ----------
    departure
        Which, and why.
    """

    def __init__(self, departure: Departure) -> None:
        verb = {"left": "left the group", "died": "died", "abort": "stopped the group"}
        text = f"Rank {departure.rank} {verb[departure.kind]}"
        if departure.reason:
            text += f": {_reason_text(departure.reason)}"
        super().__init__(text.rstrip(".") + ".", _NEW_GROUP, rank=departure.rank)
        self.departure = departure


class ControlChannel:
    """A rank's end of the channel; made by `join`.

    Attributes
    ----------
    rank, size
        Of this process in the group.
    """

    def __init__(self, rank: int, size: int, heartbeat_timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._star = Star(rank, size, self._on_part, self._on_departure, heartbeat_timeout_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # One gathering at a time; the condition guards what the thread and callers share.
        self._gathering = threading.Lock()
        self._condition = threading.Condition()
        self._number = 0
        self._parts: dict[int, dict[int, JsonObject]] = {}
        self._departures: list[Departure] = []
        self._broken: CollectiveError | None = None
        self._closed = False
        # Of the thread alone.
        self._callback: Callable[[Departure], None] | None = None
        self._undelivered: list[Departure] = []

    # ---- made ----

    @classmethod
    def join(
        cls,
        placement: Placement,
        *,
        timeout_s: float,
        tls: TlsFiles | None = None,
        insecure: bool = False,
        group: str = "world",
        heartbeat_timeout_s: float = 5.0,
    ) -> ControlChannel:
        """Meet the other ranks; returns when all are there.

        Parameters
        ----------
        placement
            Of this process.
        timeout_s
            For all ranks to be there.
        tls
            Files of mutual TLS; None: STELLAR_TLS_CA, STELLAR_TLS_CERT and STELLAR_TLS_KEY, if
            they are set. A Unix socket needs none and uses none.
        insecure
            Allow plain connections between hosts, as STELLAR_INSECURE_RENDEZVOUS=1 does.
        group
            Name of the group; a rank of another one is refused.
        heartbeat_timeout_s
            A host that has vanished is noticed within this time. A process that is stopped or
            hangs, on a host that answers, after six times as long.

        Raises
        ------
        StallError
            Not all came in time; the message and `waiting_for` name the missing ranks.
        UsageError
            Wrong arguments or files, no authentication, or rank 0 refused this rank.
        ConflictError
            Another process listens where rank 0 should.
        PrivilegeError
            The other side of the Unix socket is another user's.
        """
        _check_times(timeout_s, heartbeat_timeout_s)
        if not group.isprintable() or not 1 <= len(group) <= MAX_GROUP_CHARS:
            raise UsageError(
                f"Group name {group[:MAX_GROUP_CHARS]!r} cannot be used; expected 1 .. "
                f"{MAX_GROUP_CHARS} printable characters."
            )
        channel = cls(placement.rank, placement.size, heartbeat_timeout_s)
        if placement.size == 1:
            return channel
        meeting = Meeting(
            placement=placement,
            group=group,
            timeout_s=timeout_s,
            tls=tls if tls is not None else TlsFiles.from_environment(os.environ),
            insecure=insecure or insecure_allowed(os.environ),
            vanished_s=heartbeat_timeout_s * (1 - 1 / BEATS_PER_TIMEOUT),
        )
        channel._start(meeting)
        return channel

    def _start(self, meeting: Meeting) -> None:
        loop = self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_run, args=(loop,), name=f"control-channel-{self.rank}", daemon=True
        )
        self._thread.start()
        _living.add(self)
        meet = admit if self.rank == 0 else enter
        met = asyncio.run_coroutine_threadsafe(meet(meeting, self._star.take), loop)
        try:
            met.result()
        except BaseException:
            met.cancel()
            self.close()
            raise
        asyncio.run_coroutine_threadsafe(self._star.beat(), loop)

    # ---- used ----

    def all_gather(self, document: JsonObject, timeout_s: float) -> list[JsonObject]:
        """Every rank's document; also a barrier. All ranks call it in the same order.

        Parameters
        ----------
        document
            A JSON object of up to 1 MiB.
        timeout_s
            For all ranks to call.

        Returns
        -------
        list
            By rank; as JSON has it (tuples are lists), of this rank too.

        Raises
        ------
        DepartureError
            A rank departed whose document is needed, or one called `abort`.
        StallError
            Not all called in time; `waiting_for` has those that did not.
        ClosedError
            This channel is closed.
        UsageError
            The document cannot be sent; nothing was.

        Notes
        -----
        After any error but UsageError no gathering works any more: the others may have completed
        this one.
        """
        own: JsonObject = json.loads(encode_document(document, "The document to gather"))
        if threading.current_thread() is self._thread:
            raise UsageError(
                "all_gather() was called from the channel's callback, where nothing is read.",
                "Call it from another thread.",
            )
        with self._gathering:
            with self._condition:
                self._check_usable()
                self._number += 1
                number = self._number
            if self.size == 1:
                return [own]
            self._call(lambda: self._star.send_part(number, own))
            deadline_s = time.monotonic() + timeout_s
            with self._condition:
                try:
                    return self._wait(number, deadline_s, timeout_s)
                except BaseException as error:
                    self._broken = self._broken or (
                        error
                        if isinstance(error, CollectiveError)
                        else CollectiveError("A gathering was interrupted.", _NEW_GROUP)
                    )
                    raise

    def _wait(self, number: int, deadline_s: float, timeout_s: float) -> list[JsonObject]:
        while True:
            # Complete first: a rank may leave right after a gathering that needed it no more.
            parts = self._parts.get(number, {})
            if len(parts) == self.size:
                del self._parts[number]
                return [parts[rank] for rank in range(self.size)]
            self._check_usable()
            for departure in self._departures:
                if departure.kind != "left" or departure.rank not in parts:
                    raise DepartureError(departure)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                missing = [rank for rank in range(self.size) if rank not in parts]
                raise StallError(
                    f"{ranks_text(missing)} sent nothing to gathering {number} within "
                    f"{timeout_s:g} s.",
                    "All ranks must make the same calls in the same order.",
                    rank=missing[0],
                    waiting_for=missing,
                )
            self._condition.wait(min(left_s, threading.TIMEOUT_MAX))

    def abort(self, reason: JsonObject) -> None:
        """Tell all others to stop; takes up to 100 ms and never raises.

        Only the first call of a rank is heard. Gatherings end, here too.
        """
        try:
            encoded: JsonObject = json.loads(encode_document(reason, "The reason"))
        except UsageError as error:
            encoded = {"error": f"(reason not sent: {error.message})"[:1000]}
        with self._condition:
            if self._broken is None:
                text = f"This rank stopped the group: {_reason_text(encoded)}."
                self._broken = CollectiveError(text, _NEW_GROUP, rank=self.rank)
            self._condition.notify_all()
        sent = threading.Event()

        def send() -> None:
            self._star.abort(encoded)
            sent.set()

        if self.size > 1 and self._call(send) and threading.current_thread() is not self._thread:
            # The caller may end the process next.
            sent.wait(_ABORT_WAIT_S)

    def set_callback(self, callback: Callable[[Departure], None]) -> None:
        """Call `callback` once with each departure, from the channel's thread.

        Those that were before come first. While it runs nothing is read or sent, so it must be
        short; `abort` and `close` may be called from it. After `close` nothing is delivered.
        """

        def install() -> None:
            self._callback = callback
            undelivered, self._undelivered = self._undelivered, []
            for departure in undelivered:
                self._deliver(departure)

        if self.size > 1:
            self._call(install)

    def close(self) -> None:
        """Leave the group: the others see ``left``. Nothing is left behind; may be called twice."""
        with self._condition:
            first, self._closed = not self._closed, True
            self._condition.notify_all()
        if first:
            _living.discard(self)
            self._call(self._leave_soon)
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> ControlChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the thread ----

    def _on_part(self, rank: int, number: int, document: JsonObject) -> None:
        with self._condition:
            parts = self._parts.setdefault(number, {})
            parts[rank] = document
            if len(parts) == self.size:
                self._condition.notify_all()

    def _on_departure(self, departure: Departure) -> None:
        with self._condition:
            self._departures.append(departure)
            self._condition.notify_all()
        if self._callback is None:
            self._undelivered.append(departure)
        else:
            self._deliver(departure)

    def _deliver(self, departure: Departure) -> None:
        assert self._callback is not None
        try:
            self._callback(departure)
        except Exception:  # others must still hear of the next one
            log.exception("callback of the control channel failed on %s", departure)

    def _leave_soon(self) -> None:
        async def leave() -> None:
            try:
                await self._star.leave()
            except Exception:  # nobody waits for it, and `close` must come to an end
                log.exception("rank %d: the control channel did not close in order", self.rank)
            finally:
                asyncio.get_running_loop().stop()

        self._leaving_task = asyncio.get_running_loop().create_task(leave())

    def _call(self, function: Callable[[], None]) -> bool:
        """Have the thread call it; False when there is none any more."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("The control channel is closed.", "Make a new group.")
        if self._broken is not None:
            raise self._broken

    def _forget_in_child(self) -> None:
        """After fork: the parent's death must end its connections, whoever else is there."""
        self._closed = True
        self._thread = self._loop = None
        self._star.close_in_child()


def _reason_text(reason: JsonObject) -> str:
    return clean(reason.get("error") or reason.get("message") or json.dumps(reason)).rstrip(".")


def _check_times(timeout_s: float, heartbeat_timeout_s: float) -> None:
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise UsageError(f"Timeout of the rendezvous is {timeout_s!r} s; allowed: above 0.")
    if not (math.isfinite(heartbeat_timeout_s) and heartbeat_timeout_s >= _MIN_HEARTBEAT_TIMEOUT_S):
        raise UsageError(
            f"Heartbeat timeout is {heartbeat_timeout_s!r} s; allowed: "
            f"{_MIN_HEARTBEAT_TIMEOUT_S} and more."
        )


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        # Transports close their sockets in the next step of the loop.
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


# Channels with sockets, for a fork: a child that keeps them open hides the parent's death.
_living: weakref.WeakSet[ControlChannel] = weakref.WeakSet()


def _forget_all_in_child() -> None:
    for channel in list(_living):
        channel._forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)
