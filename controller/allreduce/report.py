"""Reports of a rank to the controller of its host, and the class that it answers with.

The engine calls `JobReporter.begin`, then sets figures; a thread of the reporter's own does
the talking. Where no controller runs, or it goes away, the engine notices nothing but
``in_force`` being None.
"""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import os
import socket
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from controller.errors import StellarError, UsageError
from controller.priority.classes import CLASSES
from controller.priority.jobs import JobReport
from controller.priority.ranges import MAX_BYTES, MAX_TIME_ns, check_integer, check_share

log = logging.getLogger("stellar.report")

RUN_DIR_VARIABLE = "STELLAR_RUN_DIR"
DEFAULT_RUN_DIR = Path("/run/stellar")
# As `controller.agent.state` has it; a library need not load the agent for a file's name.
_SOCKET_NAME = "control.sock"

MIN_PERIOD_ms, MAX_PERIOD_ms = 5, 1000

# An idle reporter says that it is still there, and hears of a class set meanwhile. The controller
# drops those that are silent for five times as long.
IDLE_PERIOD_S = 1.0
# Where the controller counts the job's packets itself, it needs to hear only when the rank begins
# and stops to send.
CALM_PERIOD_S = 0.5
RECONNECT_S = 1.0
# A controller that reads the queue pairs of a busy host may need tens of ms.
ANSWER_TIMEOUT_S = 1.0
MAX_ANSWER_BYTES = 4096
# Beginnings and ends do not wait for the period, but operations of some us must not make
# a message each: so many may go in a period.
_MESSAGES_A_PERIOD = 5


@dataclass(frozen=True, slots=True)
class ClassInForce:
    """What the controller gives a job now.

    Parameters
    ----------
    number
        Class, 0 (lowest) .. 7.
    traffic_class
        Traffic class byte of an address handle: the class's DSCP << 2.
    plan_valid_until_ns
        CLOCK_MONOTONIC; None: it is the job's default class, no plan says otherwise.
    packets_seen
        Whether the controller's dataplane sees the job's packets.
    """

    number: int
    traffic_class: int
    plan_valid_until_ns: int | None
    packets_seen: bool = False


class ReportedOperation:
    """One collective operation that is reported. Made by `JobReporter.begin`."""

    __slots__ = ("_reporter", "compression_ratio", "expected_bytes", "iteration", "sent_bytes")

    def __init__(
        self,
        reporter: JobReporter,
        iteration: int,
        expected_bytes: int,
        compression_ratio: float,
    ) -> None:
        self._reporter = reporter
        self.iteration = iteration
        self.expected_bytes = expected_bytes
        self.compression_ratio = compression_ratio
        self.sent_bytes = 0

    def progress(self, sent_bytes: int) -> None:
        """Note what has been sent of this operation in all, bytes on the wire; told later."""
        # One store, so no lock: the reporter's thread sees the old number or the new one.
        self.sent_bytes = int(sent_bytes)

    def end(self) -> None:
        """The operation is over, done or failed. May be called twice."""
        self._reporter._end(self)


class JobReporter:
    """Tells the controller of this host how far a rank is. Safe to use from several threads.

    Nothing here waits for the controller, and no state of it raises an error.

    Parameters
    ----------
    job
        Name of the job, as in ``[[job]]`` or ``controller job set``.
    run_dir
        Run directory of the controller; None: ``$STELLAR_RUN_DIR``, else ``/run/stellar``.
    period_ms
        While an operation runs, a report goes out so often; beginnings and ends at once, at
        most five reports a period.
    rank, size
        Place of the process in the communicator.
    communicator
        What tells two communicators of a process apart, up to 64 printable characters.

    Attributes
    ----------
    in_force
        Class to use for the next chunk; None: no controller answers, or none that has the job;
        use a class of your own.
    messages, control_bytes
        Reports that were answered, and bytes sent and received for all.

    Raises
    ------
    UsageError
        A parameter is out of range.
    """

    def __init__(
        self,
        job: str,
        run_dir: Path | str | None = None,
        period_ms: int = 50,
        *,
        rank: int = 0,
        size: int = 1,
        communicator: str = "",
    ) -> None:
        check_integer("Period of reports in ms", period_ms, MIN_PERIOD_ms, MAX_PERIOD_ms)
        # Of nothing yet: what is wrong with the names shows here, not in the thread.
        self._report = JobReport(job, rank, size, communicator, 0, "idle", 0, 0, 0, 1.0)
        directory = Path(run_dir or os.environ.get(RUN_DIR_VARIABLE) or DEFAULT_RUN_DIR)
        self._path = directory / _SOCKET_NAME
        self._period_s = period_ms / 1000
        self.in_force: ClassInForce | None = None
        self.messages = 0
        self.control_bytes = 0

        self._lock = threading.Lock()
        self._running: list[ReportedOperation] = []
        self._last = ReportedOperation(self, 0, 0, 1.0)
        # Bytes of operations that are over, of the iteration that began last.
        self._iteration, self._iteration_bytes = 0, 0
        self._began = self._ended = False
        # The first operation began to run, or the last one is over, and it is not told yet.
        self._turned = False

        self._wake = threading.Event()
        self._closing = threading.Event()
        self._connection: socket.socket | None = None
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name="stellar-report", daemon=True)
        self._thread.start()

    # ---- for the engine ----

    @property
    def class_in_force(self) -> int | None:
        """Class for the next chunk, 0 .. 7; None: nobody says."""
        in_force = self.in_force
        return in_force.number if in_force else None

    @property
    def traffic_class(self) -> int | None:
        """Traffic class byte of that class; None: nobody says."""
        in_force = self.in_force
        return in_force.traffic_class if in_force else None

    def begin(
        self, iteration: int, expected_wire_bytes: int, compression_ratio: float = 1.0
    ) -> ReportedOperation:
        """Begin to report an operation; several may run at once.

        Parameters
        ----------
        iteration
            Training iteration that it belongs to; with another number than before, the count
            of the iteration's bytes starts anew.
        expected_wire_bytes
            Payload that this rank will send in it, after compression.
        compression_ratio
            Bytes on the wire for each byte before compression, above 0; more than 1 is
            reported as 1, since to a plan that is none.

        Returns
        -------
        ReportedOperation
            Its ``progress`` and ``end``; one that is never ended stays reported as running.

        Raises
        ------
        UsageError
            A number is impossible.
        """
        # numpy's numbers are welcome; what goes into JSON has to be Python's.
        iteration, expected = operator.index(iteration), operator.index(expected_wire_bytes)
        ratio = min(float(compression_ratio), 1.0)
        check_integer("Iteration", iteration, 0, MAX_TIME_ns)
        check_integer("Expected bytes", expected, 0, MAX_BYTES)
        check_share("Compression ratio", ratio, zero=False)
        operation = ReportedOperation(self, iteration, expected, ratio)
        with self._lock:
            if iteration != self._iteration:
                self._iteration, self._iteration_bytes = iteration, 0
            self._turned |= not self._running
            self._running.append(operation)
            self._began = True
            self._urge()
        return operation

    def _end(self, operation: ReportedOperation) -> None:
        with self._lock:
            if operation not in self._running:
                return
            self._running.remove(operation)
            self._last = operation
            if operation.iteration == self._iteration:
                self._iteration_bytes += operation.sent_bytes
            self._ended = True
            self._turned |= not self._running
            self._urge()

    def _urge(self) -> None:
        # Once a report: many short operations must not wake the thread each.
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Stop reporting; the controller forgets this rank. May be called twice."""
        with self._lock:
            self._closing.set()
            connection = self._connection
        self._wake.set()
        if connection:
            with contextlib.suppress(OSError):  # it is gone already
                connection.shutdown(socket.SHUT_RDWR)  # ends a wait for the answer
        if self._thread is not threading.current_thread():
            self._thread.join(2 * ANSWER_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- the thread ----

    def _run(self) -> None:
        reported_s = tried_s = -float("inf")
        try:
            while not self._closing.is_set():
                now_s = time.monotonic()
                in_force = self.in_force
                is_calm = in_force is not None and in_force.packets_seen
                news = self._turned if is_calm else self._began or self._ended
                if self._connection is None:
                    due_s = tried_s + RECONNECT_S
                elif news:
                    due_s = reported_s + self._period_s / _MESSAGES_A_PERIOD
                else:
                    period_s = max(self._period_s, CALM_PERIOD_S) if is_calm else self._period_s
                    due_s = reported_s + (period_s if self._running else IDLE_PERIOD_S)
                if due_s > now_s:
                    # With news to tell, only time counts; without, news may cut the time short.
                    only_time = news or self._connection is None
                    if not only_time and is_calm:
                        self._rest()
                    (self._closing if only_time else self._wake).wait(due_s - now_s)
                    continue
                tried_s = reported_s = now_s
                try:
                    self._tell()
                    self._trouble = ""
                except (OSError, ValueError, StellarError) as error:
                    self._disconnect(error)
        finally:
            self._disconnect(None)  # whatever ended this thread: no class that nobody renews

    def _rest(self) -> None:
        """Sleep over what is no turn: it waits for the next message."""
        with self._lock:
            if not self._turned and not self._closing.is_set():
                self._wake.clear()

    def _disconnect(self, error: Exception | None) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection:
            connection.close()
        self.in_force = None
        # Not once a second for as long as a job runs.
        if error and not self._trouble:
            self._trouble = str(error) or type(error).__name__
            log.debug("no class from a controller at %s: %s", self._path.parent, self._trouble)

    def _take_news(self) -> JobReport:
        """What there is to tell; from here on it counts as told."""
        with self._lock:
            began, ended = self._began, self._ended
            self._began = self._ended = self._turned = False
            self._wake.clear()
            running = tuple(self._running)
            iteration, iteration_bytes = self._iteration, self._iteration_bytes
            shown = running or (self._last,)
        phase = "progress" if running else "idle"
        if began and running:
            phase = "begin"
        elif ended and not running:
            phase = "end"
        iteration_bytes += sum(
            operation.sent_bytes for operation in running if operation.iteration == iteration
        )
        expected = sum(operation.expected_bytes for operation in shown)
        before = sum(operation.expected_bytes / operation.compression_ratio for operation in shown)
        return replace(
            self._report,
            iteration=iteration,
            phase=phase,
            expected_bytes=min(expected, MAX_BYTES),
            sent_bytes=min(sum(operation.sent_bytes for operation in shown), MAX_BYTES),
            iteration_bytes=min(iteration_bytes, MAX_BYTES),
            compression_ratio=min(1.0, expected / before)
            if expected
            else shown[-1].compression_ratio,
        )

    def _tell(self) -> None:
        connection = self._connection or self._connect()
        document = {"command": "job-report", "arguments": self._take_news().to_json()}
        line = json.dumps(document).encode() + b"\n"
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        connection.settimeout(ANSWER_TIMEOUT_S)
        connection.sendall(line)
        self.control_bytes += len(line)
        answer = b""
        while not answer.endswith(b"\n"):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no answer within {ANSWER_TIMEOUT_S:g} s")
            connection.settimeout(left_s)
            part = connection.recv(MAX_ANSWER_BYTES + 1 - len(answer))
            if not part:
                raise ConnectionError("it closed the connection")
            answer += part
            self.control_bytes += len(part)
            if len(answer) > MAX_ANSWER_BYTES:
                raise ValueError(f"its answer is longer than {MAX_ANSWER_BYTES} bytes")
        self.in_force = parse_answer(answer)
        self.messages += 1

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(ANSWER_TIMEOUT_S)
            connection.connect(str(self._path))
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._connection = connection
        return connection


def parse_answer(raw: bytes) -> ClassInForce | None:
    """Read the controller's answer to a report; None: it knows no such job.

    Raises
    ------
    ValueError
        It is none, or the controller refused; says what it was.
    """
    try:
        document = json.loads(raw)
    except RecursionError as error:
        raise ValueError("its answer is nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError(f"its answer is a {type(document).__name__}, not an object")
    if "error" in document:
        raise ValueError(str(document["error"])[:200])
    number: Any = document.get("class")
    traffic_class: Any = document.get("traffic_class")
    until_ns: Any = document.get("plan_valid_until_ns")
    packets_seen: Any = document.get("packets_seen", False)
    if number is None:
        return None
    try:
        check_integer("class", number, 0, CLASSES - 1)
        check_integer("traffic_class", traffic_class, 0, 255)
        if until_ns is not None:
            check_integer("plan_valid_until_ns", until_ns, 0, MAX_TIME_ns)
        if traffic_class & 3:
            raise UsageError(f"traffic_class is {traffic_class}; allowed: a DSCP << 2.")
        if not isinstance(packets_seen, bool):
            raise UsageError(f"packets_seen is {packets_seen!r}; allowed: true, false.")
    except UsageError as error:
        raise ValueError(error.message) from error
    return ClassInForce(number, traffic_class, until_ns, packets_seen)
