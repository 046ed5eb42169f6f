"""The thread that drives a communicator's operations: sends what may go, reduces what came.

It polls for a moment, then sleeps on the completion channel: ranks often outnumber processors, and
one that polls takes the processor from soft-RoCE, which moves its own packets.

Whatever goes wrong ends in fail(): every operation gets the error, the queue pairs are destroyed
before any buffer is released (a peer could still write into it), and all other ranks are told.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pyverbs.pyverbs_error import PyverbsError

from controller.allreduce import stall, troubles
from controller.allreduce.errors import ClosedError, CollectiveError, PeerError, StallError
from controller.allreduce.link import (
    CONTROL,
    CONTROL_SENT,
    DATA,
    RECEIVE,
    Link,
    numbers_of,
    split_wr_id,
)
from controller.allreduce.operation import Operation
from controller.allreduce.star import Departure
from controller.allreduce.troubles import broken_protocol
from controller.allreduce.wire import (
    MAX_MESSAGES,
    MAX_OPERATIONS,
    Description,
    WireError,
    max_in_flight,
    pack_credits,
    pack_immediate,
    unpack,
    unpack_immediate,
)
from controller.verbs.completions import CompletionQueue
from controller.verbs.device import Device
from controller.verbs.enums import status_name, verbs

log = logging.getLogger(__name__)

# Looks at an empty queue before sleeping; about 20 us.
SPIN_POLLS = 50
_ROUNDS_BETWEEN_CLOCKS = 16
_REQUEST_SHIFT = 16  # index of the message in the lower bits of a work request's identifier
_MAX_EARLY = 4 * MAX_OPERATIONS  # descriptions of operations not begun here; bounds memory only
# Own port, stalled operations: looked at so often.
WATCH_PERIOD_S = 0.1
# How long ranks whose time is over wait for what others have to say about it.
STALL_REPORTS_S = 0.4
# How long fail() waits for flushed work to say how it ended.
FLUSH_WAIT_S = 0.5
_FLUSHED = "WR_FLUSH_ERR"


class Engine:
    """Drives the operations of one communicator.

    Parameters
    ----------
    device, completions
        Shared by all links.
    links
        Connected peers.
    rank, size
        Own rank, and how many there are.
    describe
        Text of an agreement's difference: (own, theirs) -> "dtype float32 here, int8 there".
    class_in_force
        Class of the next message, one of those the links have.
    abort
        Tells all other ranks why this one gives up.
    timeout_s
        An operation that does not move for so long fails.
    on_progress
        Called with (operation, event) at ``begin``, ``progress`` and ``end``; must not block.
    spin_polls
        Looks at an empty completion queue before sleeping.
    """

    def __init__(
        self,
        device: Device,
        completions: CompletionQueue,
        links: Sequence[Link],
        *,
        rank: int,
        size: int,
        describe: Callable[[Description, Description], str],
        class_in_force: Callable[[], int],
        abort: Callable[[dict[str, Any]], None],
        timeout_s: float,
        on_progress: Callable[[Operation, str], None] | None = None,
        spin_polls: int = SPIN_POLLS,
    ) -> None:
        self._device = device
        self._completions = completions
        self._links = {link.peer: link for link in links}
        self._pairs = numbers_of(links)
        self._rank, self._size = rank, size
        self._describe = describe
        self._class_in_force = class_in_force
        self._abort = abort
        self._timeout_s = timeout_s
        self._on_progress = on_progress or (lambda _operation, _event: None)
        self._spin_polls = spin_polls

        self._inbox: deque[Operation | Departure | None] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sleeping = False
        self._room = threading.Semaphore(max_in_flight(size))
        self._rooms_freed = 0  # operations in front of which all have ended
        self._lock = threading.Lock()  # of error and closed against submit()
        self.error: CollectiveError | None = None
        self._closed = False

        self._operations: dict[int, Operation] = {}  # in order of their start
        self._next_sequence = 0  # of the operation that starts next
        self._early_messages: dict[int, list[tuple[Link, int, int, int]]] = {}
        self._early_descriptions: dict[int, dict[int, Description]] = {}
        self._gone: dict[int, Departure] = {}
        self._owing: set[int] = set()
        self._next_watch_s = 0.0

        self._poller = select.poll()
        self._poller.register(self._completions.fd, select.POLLIN)
        self._poller.register(self._wake, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name=f"allreduce-{rank}", daemon=True)
        self._thread.start()

    # ---- called by other threads ----

    def reserve(self) -> None:
        """Wait until one more operation may begin; then submit() one, or unreserve().

        Raises
        ------
        CollectiveError
            The communicator failed before, or is closed.
        """
        self._room.acquire()
        error = self.error or (ClosedError("The communicator is closed.") if self._closed else None)
        if error is not None:
            self._room.release()
            raise error.with_traceback(None)

    def unreserve(self) -> None:
        """Take a reserve() back."""
        self._room.release()

    def submit(self, operation: Operation) -> None:
        """Start an operation for which there is room. All ranks start theirs in the same order.

        Raises
        ------
        CollectiveError
            The communicator failed before, or is closed.
        """
        with self._lock:
            error = self.error
            if error is None and self._closed:
                error = ClosedError("The communicator is closed.")
            if error is None:
                operation.is_submitted = True
                self._inbox.append(operation)
        if error is not None:
            raise error.with_traceback(None)
        self._rouse()

    def depart(self, departure: Departure) -> None:
        """Take note of a rank that is gone; the control channel's callback."""
        self._inbox.append(departure)
        self._rouse()

    def close(self) -> None:
        """End the thread and destroy the queue pairs. Operations in flight fail."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._inbox.append(None)
        self._rouse()
        self._thread.join()
        os.close(self._wake)

    def _rouse(self) -> None:
        if self._sleeping:
            with contextlib.suppress(BlockingIOError, OSError):
                os.eventfd_write(self._wake, 1)

    # ---- the loop ----

    def _run(self) -> None:
        try:
            self._loop()
        except CollectiveError as error:
            self._fail(error, tell=not error.is_known_to_all)
        except PyverbsError as error:
            self._fail(
                CollectiveError(
                    f"{self._device.name} at rank {self._rank} refused a work request: {error}"
                ),
                tell=True,
            )
        except Exception as error:
            # Whatever it is: nobody may wait forever, and no peer may write on.
            log.exception("rank %d: the engine failed", self._rank)
            self._fail(CollectiveError(f"Rank {self._rank} failed: {error!r}"), tell=True)
        with contextlib.suppress(PyverbsError):
            for link in self._links.values():
                link.close()

    def _loop(self) -> None:
        # No clock is read on the way of a message: that is a system call on some kernels.
        poll = self._completions.poll
        idle = rounds = 0
        while True:
            while self._inbox:
                if not self._take(self._inbox.popleft()):
                    return
            completions = poll()
            if completions:
                idle = 0
                for completion in completions:
                    self._complete(completion)
                self._give_credits(all_of_them=False)
            else:
                idle += 1
                if idle > self._spin_polls:
                    idle = 0
                    self._give_credits(all_of_them=True)
                    self._sleep()
            rounds += 1
            if rounds % _ROUNDS_BETWEEN_CLOCKS == 0 and time.monotonic() >= self._next_watch_s:
                self._watch()

    def _sleep(self) -> None:
        """Wait for a completion, a call or the next watch."""
        self._completions.arm()
        self._sleeping = True
        try:
            # Between the last look and the arming something may have come.
            completions = self._completions.poll()
            if not completions and not self._inbox:
                ready = self._poller.poll(WATCH_PERIOD_S * 1000)
                for fd, _ in ready:
                    if fd == self._wake:
                        os.eventfd_read(self._wake)
                    else:
                        self._completions.take_events()
                if not ready:
                    self._watch()
        finally:
            self._sleeping = False
        for completion in completions:
            self._complete(completion)

    def _take(self, item: Operation | Departure | None) -> bool:
        """Handle what another thread asked for; False ends the loop."""
        if item is None:
            if self._operations:
                error = ClosedError("The communicator was closed with operations in flight.")
                self._fail(error, tell=False)
            return False
        if isinstance(item, Operation):
            self._start(item)
        else:
            self._departed(item)
        return True

    # ---- operations ----

    def _start(self, operation: Operation) -> None:
        operation.last_progress_s = time.monotonic()
        sequence = operation.sequence
        self._operations[sequence] = operation
        self._next_sequence = sequence + 1
        for peer in operation.agree_with:
            if peer in self._gone:
                raise troubles.gone(self._gone[peer], operation.name, self._size)
        message = operation.description.pack()
        for peer in operation.agree_with:
            self._links[peer].send_control(message)
        self._on_progress(operation, "begin")
        for peer, description in self._early_descriptions.pop(sequence, {}).items():
            self._described(operation, peer, description)
        for link, index, token, nbytes in self._early_messages.pop(sequence, ()):
            self._accept(operation, link, index, token, nbytes)
        self._pump(operation)
        self._end_if_complete(operation)

    def _end_if_complete(self, operation: Operation) -> None:
        if not operation.is_complete or operation.sequence not in self._operations:
            return
        was_oldest = operation is self._oldest()
        del self._operations[operation.sequence]
        # In order: a later operation that ended first makes no room, or the others would fall so
        # far behind that numbers in immediate data were mistaken.
        oldest = self._oldest().sequence if self._operations else self._next_sequence
        while self._rooms_freed < oldest:
            self._rooms_freed += 1
            self._room.release()
        operation.end()
        self._on_progress(operation, "end")
        if was_oldest and self._operations:
            following = self._oldest()
            following.last_progress_s = time.monotonic()  # it may have waited for this one
            self._pump(following)

    def _oldest(self) -> Operation:
        return next(iter(self._operations.values()))

    def _pump(self, operation: Operation) -> None:
        for peer in operation.sends_to:
            self._pump_peer(operation, self._links[peer])

    def _pump_peer(self, operation: Operation, link: Link) -> None:
        """Post what may go to one peer, in the order of the plan."""
        peer = link.peer
        numbers, position = operation.sends_to[peer], operation.next_send[peer]
        theirs = operation.described.get(peer)
        while position < len(numbers):
            number = numbers[position]
            if operation.send_needs[number]:
                break
            send = operation.plan.sends[number]
            # A peer that has not called this yet keeps what we send in its slots. That is right for
            # the oldest operation only: a later one could take the tokens an older one needs.
            if theirs is None and (send.direct or operation is not self._oldest()):
                break
            # The last token is the oldest operation's: what a later one sends may have to wait at
            # the peer for a third rank, and that one for the oldest.
            if len(link.free_tokens) < 2 and operation is not self._oldest():
                break
            traffic_class = self._class_in_force()
            if not link.can_send(traffic_class):
                break
            token = link.free_tokens.pop()
            nbytes = (send.stop - send.start) * operation.itemsize
            memory = operation.work.memory
            source = (0, 0, 0)
            if nbytes:
                assert memory is not None
                source = (
                    memory.address + send.start * operation.itemsize, nbytes, memory.lkey,
                )  # fmt: skip
            remote = (
                (theirs.address + send.start * operation.itemsize, theirs.rkey)
                if send.direct and theirs is not None
                else link.remote_slot(token)
            )
            link.post_data(
                traffic_class,
                (operation.sequence & 0xFFFFFFFF) << _REQUEST_SHIFT | send.index,
                source,
                remote,
                pack_immediate(token, operation.sequence, send.index),
            )
            operation.sent_nbytes += nbytes
            position += 1
            operation.next_send[peer] = position

    def _described(self, operation: Operation, peer: int, theirs: Description) -> None:
        ours = operation.description
        if ours.agreement() != theirs.agreement():
            raise troubles.disagreement(
                self._rank, operation.name, peer, ours.sequence, self._describe(ours, theirs)
            )
        operation.described[peer] = theirs
        operation.missing_descriptions.discard(peer)
        operation.moves += 1
        link = self._links[peer]
        for index, token, nbytes in operation.held.pop(peer, ()):
            self._arrived(operation, link, index, token, nbytes)

    # ---- completions ----

    def _complete(self, completion: Any) -> None:
        kind, rest = split_wr_id(completion.wr_id)
        link, number = self._pairs[completion.qp_num]
        if completion.status != verbs.IBV_WC_SUCCESS:
            raise self._peer_error(link.peer, status_name(completion.status))
        if kind == RECEIVE:
            if number == CONTROL:
                message = link.take_message(rest, completion.byte_len)
                link.repost(rest)
                self._control(link, message)
            else:
                link.repost(rest)
                self._message(link, completion.imm_data, completion.byte_len)
        elif kind == DATA:
            link.outstanding[number] -= 1
            self._sent(link, rest)
        elif kind == CONTROL_SENT:
            link.control_sent(rest)

    def _control(self, link: Link, message: bytes) -> None:
        try:
            content = unpack(message)
        except WireError as error:
            raise broken_protocol(link.peer, str(error)) from None
        if isinstance(content, int):
            if not link.give_back(content):
                raise broken_protocol(link.peer, f"credits {content:#x} that it does not owe")
            for waiting in list(self._operations.values()):
                if link.peer in waiting.sends_to:
                    self._pump_peer(waiting, link)
            return
        operation = self._operations.get(content.sequence)
        if operation is not None:
            self._described(operation, link.peer, content)
            if link.peer in operation.sends_to:
                self._pump_peer(operation, link)
            self._end_if_complete(operation)
        elif self._next_sequence <= content.sequence < self._next_sequence + _MAX_EARLY:
            self._early_descriptions.setdefault(content.sequence, {})[link.peer] = content
        else:
            raise broken_protocol(link.peer, f"a description of operation {content.sequence}")

    def _message(self, link: Link, immediate: int, nbytes: int) -> None:
        """A data message has arrived."""
        token, low, index = unpack_immediate(immediate)
        if token >= link.tokens or link.is_owed(token):
            raise broken_protocol(link.peer, f"a message with token {token}, which it has not")
        oldest = self._oldest().sequence if self._operations else self._next_sequence
        sequence = oldest + (low - oldest) % MAX_OPERATIONS
        operation = self._operations.get(sequence)
        if operation is not None:
            self._accept(operation, link, index, token, nbytes)
            self._end_if_complete(operation)
        elif sequence >= self._next_sequence:
            early = self._early_messages.setdefault(sequence, [])
            early.append((link, index, token, nbytes))
        else:
            raise broken_protocol(link.peer, f"a message of operation {sequence}, which is over")

    def _accept(
        self, operation: Operation, link: Link, index: int, token: int, nbytes: int
    ) -> None:
        """Take a message, or hold it until its sender is known to agree about the operation."""
        if link.peer in operation.described:
            self._arrived(operation, link, index, token, nbytes)
        else:
            operation.held.setdefault(link.peer, []).append((index, token, nbytes))

    def _arrived(
        self, operation: Operation, link: Link, index: int, token: int, nbytes: int
    ) -> None:
        number = operation.receive_of.get((link.peer, index))
        if number is None or operation.applied[number] or number in operation.arrived:
            raise broken_protocol(link.peer, f"message {index} of {operation.name}")
        receive = operation.plan.receives[number]
        if nbytes != (receive.stop - receive.start) * operation.itemsize:
            raise broken_protocol(link.peer, f"{nbytes} bytes in message {index}")
        if operation.receive_needs[number]:
            operation.arrived[number] = token
            return
        self._apply(operation, number, token)

    def _apply(self, operation: Operation, number: int, token: int) -> None:
        """Use what has arrived, and all that waited for it."""
        work = operation.work
        ready = [(number, token)]
        sendable: set[int] = set()
        while ready:
            number, token = ready.pop()
            receive = operation.plan.receives[number]
            link = self._links[receive.peer]
            if receive.reduce and receive.stop > receive.start:
                assert work.reduce is not None
                incoming = link.slot_view(
                    token, (receive.stop - receive.start) * operation.itemsize, work.array.dtype
                )
                work.reduce(operation.view(receive.start, receive.stop), incoming)
            link.owe(token)
            self._owing.add(receive.peer)
            operation.applied[number] = 1
            operation.unapplied -= 1
            operation.moved_nbytes += (receive.stop - receive.start) * operation.itemsize
            for later in operation.unlocks_receives[number]:
                operation.receive_needs[later] -= 1
                if not operation.receive_needs[later] and later in operation.arrived:
                    ready.append((later, operation.arrived.pop(later)))
            for send in operation.unlocks_sends[number]:
                operation.send_needs[send] -= 1
                if not operation.send_needs[send]:
                    sendable.add(operation.plan.sends[send].peer)
        operation.moves += 1
        for peer in sendable:
            self._pump_peer(operation, self._links[peer])

    def _sent(self, link: Link, request: int) -> None:
        """One of our data messages has been acknowledged."""
        low, index = request >> _REQUEST_SHIFT, request & (MAX_MESSAGES - 1)
        for operation in self._operations.values():
            if operation.sequence & 0xFFFFFFFF == low:
                break
        else:
            return
        send = operation.plan.sends[operation.sends_to[link.peer][index]]
        operation.unsent -= 1
        operation.moved_nbytes += (send.stop - send.start) * operation.itemsize
        operation.moves += 1
        if link.was_full:
            link.was_full = False
            for waiting in list(self._operations.values()):
                if link.peer in waiting.sends_to:
                    self._pump_peer(waiting, link)
        self._end_if_complete(operation)

    def _give_credits(self, *, all_of_them: bool) -> None:
        """Give tokens back: some at a time while busy, all before sleeping."""
        for peer in list(self._owing):
            link = self._links[peer]
            if all_of_them or link.owed_count * 4 >= link.tokens:
                link.send_control(pack_credits(link.owed))
                link.owed = link.owed_count = 0
                self._owing.discard(peer)

    # ---- what goes wrong ----

    def _watch(self) -> None:
        """Look for a port that is down and for operations that do not move."""
        now_s = time.monotonic()
        self._next_watch_s = now_s + WATCH_PERIOD_S
        if not self._operations:
            return
        oldest = self._oldest()
        if oldest.moves != oldest.moves_seen:
            oldest.moves_seen, oldest.last_progress_s = oldest.moves, now_s
        self._on_progress(oldest, "progress")
        if not self._device.is_active():
            raise self._port_error()
        if now_s - oldest.last_progress_s > self._timeout_s:
            raise self._stall({})

    def _stall(self, reports: dict[int, stall.Waits]) -> StallError:
        """Say what this rank waits for, hear what others wait for, and find who is at fault."""
        still, waits = "No operation is in flight", dict[int, str]()
        if self._operations:
            operation = self._oldest()
            waits = operation.waits_for()
            still_s = time.monotonic() - operation.last_progress_s
            still = f"{operation.name} has not moved for {still_s:.1f} s"
        reports[self._rank] = waits
        self._abort(
            {
                "error": StallError.__name__,
                "message": f"{still}, waiting for {troubles.listed(waits)}",
                "waits": stall.to_json(waits),
            }
        )
        deadline = time.monotonic() + STALL_REPORTS_S
        while (left_s := deadline - time.monotonic()) > 0:
            for item in list(self._inbox):
                if item is None or isinstance(item, Operation):
                    continue
                if item.kind == "abort" and "waits" in item.reason:
                    reports[item.rank] = stall.from_json(item.reason["waits"], self._size)
            time.sleep(min(left_s, 0.01))
        found = stall.culprits(reports, self._rank, self._size)
        error = troubles.stalled(still, self._rank, self._timeout_s, found)
        error.is_known_to_all = True
        return error

    def _departed(self, departure: Departure) -> None:
        if departure.kind == "abort" and "waits" in departure.reason:
            waits = stall.from_json(departure.reason["waits"], self._size)
            raise self._stall({departure.rank: waits})
        if departure.kind == "left":
            self._gone[departure.rank] = departure
            for waiting in self._operations.values():
                if departure.rank in waiting.agree_with:
                    raise troubles.gone(departure, waiting.name, self._size)
            return
        error = troubles.gone(departure, self._during(), self._size)
        error.is_known_to_all = True
        raise error

    def _during(self) -> str:
        return self._oldest().name if self._operations else ""

    def _port_error(self, status: str = "") -> PeerError:
        device = self._device
        return troubles.port_down(device.name, device.port, self._rank, self._during(), status)

    def _peer_error(self, peer: int, status: str) -> PeerError:
        if not self._device.is_active():
            return self._port_error(status)
        return troubles.unreachable(peer, self._rank, self._during(), status)

    def _fail(self, error: CollectiveError, *, tell: bool) -> None:
        """End everything with an error. Afterwards no peer reaches any buffer."""
        if tell and not isinstance(error, ClosedError):
            self._abort(
                {
                    "error": type(error).__name__,
                    "message": error.message,
                    "rank": error.rank,
                    "status": error.status,
                }
            )
        statuses: dict[int, str] = {}
        try:
            statuses = self._flush()
        except PyverbsError:
            log.exception("rank %d: the completion queue cannot be read", self._rank)
        if (
            isinstance(error, (PeerError, StallError))
            and not error.status
            and error.rank in statuses
        ):
            error.status = statuses[error.rank]
            error.message += f" Work requests to rank {error.rank} ended with {error.status}."
        with self._lock:
            self.error = error
            waiting = [item for item in self._inbox if isinstance(item, Operation)]
            self._inbox.clear()
        try:
            for link in self._links.values():
                link.close()
        except PyverbsError:
            log.exception("rank %d: queue pairs could not be destroyed", self._rank)
        finally:
            for operation in [*self._operations.values(), *waiting]:
                operation.end(error)
                self._room.release()
            self._operations.clear()
            self._room.release()  # whoever waits takes it, sees the error, and passes it on

    def _flush(self) -> dict[int, str]:
        """Put all queue pairs into error; peer -> how its outstanding work ended."""
        for link in self._links.values():
            link.fail()
        statuses: dict[int, str] = {}
        deadline = time.monotonic() + FLUSH_WAIT_S
        while len(statuses) < len(self._links) and time.monotonic() < deadline:
            completions = self._completions.poll()
            if not completions:
                time.sleep(0.001)
            for completion in completions:
                link, _ = self._pairs[completion.qp_num]
                status = status_name(completion.status)
                # What ended it says more than what was flushed after it.
                if completion.status != verbs.IBV_WC_SUCCESS and (
                    statuses.get(link.peer, _FLUSHED) == _FLUSHED
                ):
                    statuses[link.peer] = status
        return statuses
