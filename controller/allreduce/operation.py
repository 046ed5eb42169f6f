"""One collective in flight on one rank: what it waits for, how far it is, how it ended."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy.typing as npt

from controller.allreduce.errors import CollectiveError
from controller.allreduce.link import Range
from controller.allreduce.schedule import Plan
from controller.allreduce.wire import Description

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Reduce = Callable[[Array, Array], None]  # accumulator, incoming


class Progress(NamedTuple):
    """How far an operation is.

    Parameters
    ----------
    fraction
        0 .. 1, of the bytes to send and to receive.
    nbytes, total_nbytes
        The same in bytes.
    """

    fraction: float
    nbytes: int
    total_nbytes: int


@dataclass(frozen=True)
class Work:
    """What an operation works on.

    Parameters
    ----------
    array
        The working buffer, one-dimensional, in registered memory.
    memory
        Where it lies; None for an operation without bytes.
    reduce
        Combines a chunk of the working buffer with what came; None where the plan only copies.
    finish
        Called once everything has arrived, by the engine's thread: final division, copies out.
    release
        Called last, also after a failure, once no peer can reach the buffer any more.
    """

    array: Array
    memory: Range | None
    reduce: Reduce | None = None
    finish: Callable[[], None] | None = None
    release: Callable[[], None] | None = None


class Operation:
    """State of one collective; only the engine's thread changes it once it is submitted.

    Parameters
    ----------
    name
        For errors: "all_reduce of 1024 float32".
    description
        What the peers compare.
    plan
        Messages of this rank.
    work
        Buffers and what to do with them.
    agree_with
        Ranks that get the description, and must have sent theirs before this can end.
    """

    def __init__(
        self,
        name: str,
        description: Description,
        plan: Plan,
        work: Work,
        agree_with: frozenset[int],
    ) -> None:
        self.name = name
        self.description = description
        self.sequence = description.sequence
        self.plan = plan
        self.work = work
        self.iteration = 0
        self.compression_ratio = 1.0
        self.itemsize = work.array.dtype.itemsize
        self.agree_with = agree_with
        # Peer -> its description, once it was found to agree.
        self.described: dict[int, Description] = {}
        self.missing_descriptions = set(agree_with)
        self.sends_to: dict[int, list[int]] = {}
        for number, send in enumerate(plan.sends):
            self.sends_to.setdefault(send.peer, []).append(number)
        self.next_send = dict.fromkeys(self.sends_to, 0)
        self.receive_of = {
            (receive.peer, receive.index): number for number, receive in enumerate(plan.receives)
        }
        self.send_needs = [len(send.needs) for send in plan.sends]
        self.receive_needs = [len(receive.needs) for receive in plan.receives]
        self.unlocks_sends: list[list[int]] = [[] for _ in plan.receives]
        self.unlocks_receives: list[list[int]] = [[] for _ in plan.receives]
        for number, send in enumerate(plan.sends):
            for need in send.needs:
                self.unlocks_sends[need].append(number)
        for number, receive in enumerate(plan.receives):
            for need in receive.needs:
                self.unlocks_receives[need].append(number)
        self.applied = bytearray(len(plan.receives))
        # Peer -> (index, token, bytes) of messages that came before its description.
        self.held: dict[int, list[tuple[int, int, int]]] = {}
        self.arrived: dict[int, int] = {}  # receive -> token, not applied yet
        self.unapplied = len(plan.receives)
        self.unsent = len(plan.sends)
        self.total_nbytes = self.itemsize * (
            sum(send.stop - send.start for send in plan.sends)
            + sum(receive.stop - receive.start for receive in plan.receives)
        )
        self.moved_nbytes = 0
        self.sent_nbytes = 0
        # Counted on the way of messages, turned into a time by whoever watches.
        self.moves = self.moves_seen = 0
        self.last_progress_s = time.monotonic()
        self.is_submitted = False
        self.error: CollectiveError | None = None
        self.done = threading.Event()

    @property
    def is_complete(self) -> bool:
        """Whether all has been sent, received, and agreed."""
        return not (self.unapplied or self.unsent or self.missing_descriptions)

    def waits_for(self) -> dict[int, str]:
        """Peers from which something is missing, and what; the likeliest culprits first."""
        missing: dict[int, list[int]] = {}
        for number, receive in enumerate(self.plan.receives):
            if not self.applied[number]:
                missing.setdefault(receive.peer, []).append(number)
        result = {}
        for peer in sorted(self.missing_descriptions):
            result[peer] = "has not called it"
        for peer in sorted(set(missing) - self.missing_descriptions):
            total = sum(1 for receive in self.plan.receives if receive.peer == peer)
            result[peer] = f"{len(missing[peer])} of its {total} messages are missing"
        for peer, numbers in self.sends_to.items():
            left = len(numbers) - self.next_send[peer]
            if left and peer not in result:
                result[peer] = f"takes no more: {left} messages to it wait"
        return result

    def view(self, start: int, stop: int) -> Array:
        """A part of the working buffer."""
        part: Array = self.work.array[start:stop]
        return part

    def end(self, error: CollectiveError | None = None) -> None:
        """Finish, release, and wake whoever waits; called once.

        Raises
        ------
        CollectiveError
            What had arrived could not be used; whoever waits gets the same.
        """
        if error is None and self.work.finish is not None:
            try:
                self.work.finish()
            except Exception as reason:
                error = CollectiveError(f"The result of {self.name} cannot be used: {reason}")
                self._end(error)
                raise error from reason
        self._end(error)

    def _end(self, error: CollectiveError | None) -> None:
        try:
            if self.work.release is not None:
                self.work.release()
        except Exception:  # whoever waits must not wait for ever because of it
            log.exception("%s: its memory could not be released", self.name)
        finally:
            self.error = error
            self.done.set()


class Handle:
    """An operation that was started.

    Parameters
    ----------
    operation
        Submitted to the engine, or complete.
    """

    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is complete.

        Parameters
        ----------
        timeout_s
            Of this wait. The operation's own limit is the communicator's timeout.

        Raises
        ------
        TimeoutError
            It is not complete yet; it goes on.
        CollectiveError
            It failed, and the communicator with it.
        """
        if not self._operation.done.wait(timeout_s):
            done = self.progress
            raise TimeoutError(
                f"{self._operation.name} is not complete after {timeout_s} s "
                f"({done.nbytes} of {done.total_nbytes} bytes moved); it goes on."
            )
        self._check()

    def test(self) -> bool:
        """Whether it is complete.

        Raises
        ------
        CollectiveError
            It failed.
        """
        if not self._operation.done.is_set():
            return False
        self._check()
        return True

    def _check(self) -> None:
        error = self._operation.error
        if error is not None:
            # A fresh traceback for each waiting thread would need a copy; the cause is the same.
            raise error

    @property
    def progress(self) -> Progress:
        """How far it is; may be read at any time."""
        operation = self._operation
        total = operation.total_nbytes
        if operation.done.is_set() and operation.error is None:
            return Progress(1.0, total, total)
        moved = min(operation.moved_nbytes, total)
        return Progress(moved / total if total else 0.0, moved, total)
