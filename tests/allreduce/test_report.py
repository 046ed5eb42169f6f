"""A rank reports to the controller of its host; whatever that one does, the engine goes on."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.agent.control import ControlServer, Conversation
from controller.agent.state import RunDirectory
from controller.allreduce import report
from controller.allreduce.report import ClassInForce, JobReporter, parse_answer
from controller.errors import UsageError
from controller.priority.jobs import JobReport
from tests.allreduce.ranks import Opened
from tests.waiting import wait

ANSWER = {"class": 5, "traffic_class": 136, "plan_valid_until_ns": None, "packets_seen": False}


class Fake:
    """A control socket that answers reports as the test says.

    ``answer`` gets the report and gives the bytes to send; None: say nothing.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.answer: Callable[[Mapping[str, Any]], bytes | None] = lambda _report: (
            json.dumps(ANSWER).encode() + b"\n"
        )
        self.reports: list[dict[str, Any]] = []
        self.times_s: list[float] = []
        self.received_bytes = self.sent_bytes = 0
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(run_dir / "control.sock"))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection.makefile("rb") as lines:
            for line in lines:
                document = json.loads(line)
                assert document["command"] == "job-report"
                self.received_bytes += len(line)
                self.times_s.append(time.monotonic())
                self.reports.append(document["arguments"])
                answer = self.answer(document["arguments"])
                if answer is not None:
                    self.sent_bytes += len(answer)
                    connection.sendall(answer)

    def wait_for(self, count: int) -> None:
        """Until there are so many reports."""
        wait(lambda: len(self.reports) >= count)

    def first(self, phase: str, iteration: int) -> int:
        """Place of the first report of a phase; waits for it."""

        def places() -> list[int]:
            return [
                place
                for place, entry in enumerate(self.reports)
                if (entry["phase"], entry["iteration"]) == (phase, iteration)
            ]

        wait(places)
        return places()[0]

    @property
    def connections(self) -> int:
        return len(self._connections)

    def hang_up(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        (self.run_dir / "control.sock").unlink(missing_ok=True)
        self.hang_up()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    instance = Fake(tmp_path)
    yield instance
    with contextlib.suppress(OSError):
        instance.close()


@pytest.fixture
def reporter(fake: Fake) -> Iterator[JobReporter]:
    with JobReporter("train", fake.run_dir, rank=1, size=4, communicator="world") as instance:
        wait(lambda: instance.in_force is not None)
        yield instance


def test_the_class_is_known_before_the_first_operation(reporter: JobReporter, fake: Fake) -> None:
    assert reporter.in_force == ClassInForce(5, 136, None)
    assert (reporter.class_in_force, reporter.traffic_class) == (5, 136)
    first = JobReport.from_json(fake.reports[0])
    assert (first.phase, first.rank, first.size, first.communicator) == ("idle", 1, 4, "world")


def test_a_beginning_and_an_end_do_not_wait_for_the_period(fake: Fake) -> None:
    late_s = []
    with JobReporter("train", fake.run_dir, period_ms=1000) as reporter:
        wait(lambda: reporter.in_force is not None)
        for iteration in range(7, 13):
            time.sleep(0.25)  # a fifth of the period lies between reports
            began_s = time.monotonic()
            operation = reporter.begin(iteration, 4_000_000, 0.5)
            begun = fake.first("begin", iteration)
            operation.progress(3_000_000)
            time.sleep(0.25)
            ended_s = time.monotonic()
            operation.end()
            operation.end()
            ended = fake.first("end", iteration)
            begin, end = (JobReport.from_json(fake.reports[place]) for place in (begun, ended))
            assert begin.sent_bytes == 0
            assert (begin.expected_bytes, begin.compression_ratio) == (4_000_000, 0.5)
            assert end.expected_bytes == 4_000_000
            assert end.sent_bytes == end.iteration_bytes == 3_000_000
            late_s.append(max(fake.times_s[begun] - began_s, fake.times_s[ended] - ended_s))
            if late_s[-1] < 0.3:
                break
    # The rest of a period is longer; one may be late where the machine stood still.
    assert min(late_s) < 0.3, late_s


def test_progress_goes_out_once_a_period(reporter: JobReporter, fake: Fake) -> None:
    operation = reporter.begin(7, 4_000_000, 1.0)
    count = fake.first("begin", 7) + 1
    for sent in range(0, 4_000_001, 1000):
        operation.progress(sent)
    wait(lambda: len(fake.reports) >= count + 10 and fake.reports[-1]["sent_bytes"] == 4_000_000)
    # Ten periods lie between; some may have been late.
    assert fake.times_s[count + 9] - fake.times_s[count - 1] > 0.4
    assert {entry["phase"] for entry in fake.reports[count : count + 10]} == {"progress"}
    operation.end()


def test_operations_at_once_are_summed_and_an_iteration_counts_those_that_are_over(
    reporter: JobReporter, fake: Fake
) -> None:
    first = reporter.begin(3, 1000, 1.0)
    second = reporter.begin(3, 3000, 0.5)
    first.progress(1000)
    first.end()
    second.progress(2000)
    third = reporter.begin(3, 1000, 1.0)
    third.progress(500)
    wait(lambda: fake.reports[-1]["iteration_bytes"] == 3500)
    newest = JobReport.from_json(fake.reports[-1])
    assert (newest.expected_bytes, newest.sent_bytes) == (4000, 2500)
    assert newest.compression_ratio == pytest.approx(4000 / 7000)
    second.end()
    third.end()
    reporter.begin(4, 1000, 1.0).progress(10)
    wait(lambda: (fake.reports[-1]["iteration"], fake.reports[-1]["iteration_bytes"]) == (4, 10))


def test_many_short_operations_make_five_reports_a_period_at_most(
    reporter: JobReporter, fake: Fake
) -> None:
    count, operations, began_s = len(fake.reports), 0, time.monotonic()
    while (elapsed_s := time.monotonic() - began_s) < 20:
        reporter.begin(operations, 64, 1.0).end()
        operations += 1
        made = len(fake.reports) - count
        if elapsed_s > 0.5 and operations > 500 and made >= 3:
            break
    elapsed_s = time.monotonic() - began_s
    assert operations > 500
    assert 3 <= made <= 5 * elapsed_s / 0.05 + 2, (made, elapsed_s)


def test_what_an_idle_reporter_hears_once_a_second_takes_effect(
    reporter: JobReporter, fake: Fake
) -> None:
    count, began_s = len(fake.reports), time.monotonic()
    fake.answer = lambda _report: b'{"class": 2, "traffic_class": 40, "plan_valid_until_ns": 9}\n'
    wait(lambda: reporter.in_force == ClassInForce(2, 40, 9), timeout_s=5)
    made = len(fake.reports) - count
    assert made <= time.monotonic() - began_s + 1


def test_every_byte_of_control_traffic_is_counted(reporter: JobReporter, fake: Fake) -> None:
    for iteration in range(20):
        count = len(fake.reports)
        operation = reporter.begin(iteration, 1 << 20, 1.0)
        operation.progress(1 << 20)
        operation.end()
        fake.wait_for(count + 1)
    # Of a message that is under way one side has counted more.
    wait(
        lambda: (
            reporter.messages == len(fake.reports) > 20
            and reporter.control_bytes == fake.received_bytes + fake.sent_bytes
        )
    )
    reporter.close()
    assert reporter.control_bytes / reporter.messages < 400


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"",
        b"\n",
        b"\xff\xfe\n",
        b"[]\n",
        b"{}",
        b"[" * 4000 + b"\n",
        b"x" * 100_000 + b"\n",
        b'{"error": "no such thing"}\n',
        b'{"class": 8, "traffic_class": 0}\n',
        b'{"class": true, "traffic_class": 0}\n',
        b'{"class": 3, "traffic_class": 2}\n',
        b'{"class": 3, "traffic_class": 256}\n',
        b'{"class": 3, "traffic_class": 0, "plan_valid_until_ns": "soon"}\n',
    ],
    ids=lambda answer: repr(answer)[:24],
)
def test_an_answer_that_is_none_leaves_the_rank_without_a_class(
    monkeypatch: pytest.MonkeyPatch, fake: Fake, reporter: JobReporter, answer: bytes | None
) -> None:
    monkeypatch.setattr(report, "RECONNECT_S", 0.2)
    monkeypatch.setattr(report, "ANSWER_TIMEOUT_S", 0.3)
    fake.answer = lambda _report: answer
    operation = reporter.begin(1, 1000, 1.0)
    wait(lambda: reporter.in_force is None)
    operation.end()
    fake.answer = lambda _report: json.dumps(ANSWER).encode() + b"\n"
    wait(lambda: reporter.class_in_force == 5)


def test_an_unknown_job_has_no_class_and_goes_on_reporting(
    fake: Fake, reporter: JobReporter
) -> None:
    fake.answer = lambda _report: b'{"class": null, "traffic_class": null}\n'
    operation = reporter.begin(1, 1000, 1.0)
    wait(lambda: reporter.in_force is None)
    count = len(fake.reports)
    wait(lambda: len(fake.reports) > count + 1)
    operation.end()
    assert fake.connections == 1


def told_of(run_dir: Path, caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Of this directory; a reporter of an earlier test may still say something of its own."""
    return [record for record in caplog.records if str(run_dir) in record.getMessage()]


def test_a_controller_that_ends_and_one_that_starts_are_noticed(
    fake: Fake, reporter: JobReporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "stellar.report")
    operation = reporter.begin(1, 1000, 1.0)
    fake.close()
    wait(lambda: reporter.in_force is None)
    time.sleep(2.2)  # some attempts
    assert len(told_of(fake.run_dir, caplog)) == 1
    again = Fake(fake.run_dir)
    try:
        wait(lambda: reporter.class_in_force == 5)
        assert again.reports[0]["phase"] == "progress"
        again.hang_up()
        wait(lambda: reporter.in_force is None)
        wait(lambda: reporter.class_in_force == 5)
        # Not more than one attempt a second.
        assert again.connections == 2
    finally:
        operation.end()
        again.close()


def test_nothing_that_the_engine_calls_waits_for_a_controller_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch, fake: Fake, reporter: JobReporter
) -> None:
    # So long that no machine stands still for a time like it.
    monkeypatch.setattr(report, "ANSWER_TIMEOUT_S", 10.0)
    fake.answer = lambda _report: None
    operation = reporter.begin(1, 1 << 30, 1.0)
    fake.first("begin", 1)  # the thread waits for the answer now
    times_ns = []
    for sent in range(20_000):
        began_ns = time.perf_counter_ns()
        operation.progress(sent)
        times_ns.append(time.perf_counter_ns() - began_ns)
    begin_ns = []
    for iteration in range(2000):
        began_ns = time.perf_counter_ns()
        reporter.begin(iteration, 1000, 1.0).end()
        begin_ns.append(time.perf_counter_ns() - began_ns)
    # One that waited would have waited for ANSWER_TIMEOUT_s; how fast they are is no test's matter.
    assert max(times_ns) < report.ANSWER_TIMEOUT_S / 2 * 1e9
    assert max(begin_ns) < report.ANSWER_TIMEOUT_S / 2 * 1e9
    closing_s = time.monotonic()
    reporter.close()
    assert time.monotonic() - closing_s < report.ANSWER_TIMEOUT_S / 2


def test_without_a_controller_nothing_happens_but_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "stellar.report")
    opened = Opened()
    with JobReporter("train", tmp_path / "none") as reporter:
        for iteration in range(100):
            operation = reporter.begin(iteration, 1000, 1.0)
            operation.progress(1000)
            operation.end()
        time.sleep(1.3)
        assert reporter.in_force is reporter.class_in_force is reporter.traffic_class is None
        assert (reporter.messages, reporter.control_bytes) == (0, 0)
    assert [record.levelno for record in told_of(tmp_path, caplog)] == [logging.DEBUG]
    assert not opened.threads


def test_a_directory_that_may_not_be_entered_is_no_controller(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    if os.geteuid() == 0:
        closed = tmp_path / ("long" * 40)  # root may enter any; a name too long for a socket
    with JobReporter("train", closed) as reporter:
        reporter.begin(1, 1000, 1.0).end()
        time.sleep(0.1)
        assert reporter.in_force is None


def test_no_descriptor_and_no_thread_is_left(fake: Fake) -> None:
    opened, connections = Opened(), fake.connections
    for _ in range(5):
        reporter = JobReporter("train", fake.run_dir)
        wait(lambda reporter=reporter: reporter.in_force is not None)
        reporter.close()
        reporter.close()
        assert reporter.in_force is None
    fake.hang_up()
    wait(lambda: not opened.threads)
    # Of a connection the fake has one end, and keeps it.
    assert len(opened.descriptors) == fake.connections - connections


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"job": "two words"}, "two words"),
        ({"period_ms": 1}, "5 .. 1000"),
        ({"rank": 4, "size": 4}, r"rank is 4; allowed: 0 \.\. 3"),
        ({"communicator": "x" * 65}, "64 printable"),
        ({"communicator": "a\nb"}, "64 printable"),
    ],
)
def test_a_reporter_with_a_wrong_parameter_is_refused(
    tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        JobReporter(**{"job": "train", "run_dir": tmp_path, **arguments})


@pytest.mark.parametrize(
    "numbers", [(-1, 0, 1.0), (0, -1, 1.0), (0, 1 << 43, 1.0), (0, 1, 0.0), (0, 1, float("nan"))]
)
def test_an_operation_with_an_impossible_number_is_refused(
    tmp_path: Path, numbers: tuple[int, int, float]
) -> None:
    with JobReporter("train", tmp_path) as reporter, pytest.raises(UsageError, match="allowed"):
        reporter.begin(*numbers)


def test_numbers_of_numpy_are_taken_and_an_expanding_compression_counts_as_none(
    reporter: JobReporter, fake: Fake
) -> None:
    operation = reporter.begin(np.int64(2), np.int64(1000), np.float32(1.25))
    operation.progress(np.int64(1000))
    operation.end()
    wait(lambda: fake.reports[-1]["sent_bytes"] == 1000)
    assert JobReport.from_json(fake.reports[-1]).compression_ratio == 1.0


def test_the_run_directory_is_the_controllers(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RunDirectory(fake.run_dir).socket_path == fake.run_dir / "control.sock"
    monkeypatch.setenv("STELLAR_RUN_DIR", str(fake.run_dir))
    with JobReporter("train") as reporter:
        wait(lambda: reporter.class_in_force == 5)


def test_an_answer_is_read_as_the_agent_writes_it() -> None:
    raw = json.dumps(ANSWER | {"plan_valid_until_ns": 123}).encode()
    assert parse_answer(raw) == ClassInForce(5, 136, 123)


# ---- the conversation at the socket of a controller ----


class Talk:
    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.is_closed = False

    def answer(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        self.heard.append(arguments)
        if arguments == {"bad": 1}:
            raise UsageError("bad is 1; allowed: 0.")
        return {"heard": len(self.heard)}

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def talks(tmp_path: Path) -> Iterator[list[Talk]]:
    """Conversations begun at a server in `tmp_path`."""
    begun: list[Talk] = []

    def begin(pid: int) -> Talk:
        assert pid == os.getpid()
        begun.append(Talk())
        return begun[-1]

    server = ControlServer(
        tmp_path / "control.sock",
        {
            "talk": Conversation(begin, 20, 200),
            "short talk": Conversation(begin, 0.3, 200),
            "other": lambda _arguments: ({"once": 1}, []),
        },
    )
    yield begun
    server.close()


def exchange(connection: socket.socket, document: Any) -> Any:
    connection.sendall(json.dumps(document).encode() + b"\n")
    answer = b""
    while not answer.endswith(b"\n") and (part := connection.recv(4096)):
        answer += part
    return json.loads(answer) if answer else None


@pytest.fixture
def talking(talks: list[Talk], tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(str(tmp_path / "control.sock"))
        yield connection


def test_a_conversation_lasts_until_the_client_leaves(
    talks: list[Talk], talking: socket.socket
) -> None:
    for count in (1, 2, 3):
        request = {"command": "talk", "arguments": {"n": count}}
        assert exchange(talking, request) == {"heard": count}
    assert not talks[0].is_closed
    talking.close()
    wait(lambda: talks[0].is_closed)
    assert talks[0].heard == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_a_conversation_in_which_the_client_says_nothing_ends(
    talks: list[Talk], talking: socket.socket
) -> None:
    exchange(talking, {"command": "short talk"})
    wait(lambda: talks[0].is_closed, timeout_s=10)
    assert talking.recv(10) == b""


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"command": "talk", "arguments": {"bad": 1}}, "allowed: 0"),
        ({"command": "other"}, "one command a connection"),
        ({"command": "nothing"}, "one command a connection"),
        ([], "not understood"),
    ],
)
def test_an_error_ends_a_conversation(
    talks: list[Talk], talking: socket.socket, request_: Any, words: str
) -> None:
    exchange(talking, {"command": "talk"})
    assert words in exchange(talking, request_)["error"]
    wait(lambda: talks[0].is_closed)
    assert talking.recv(10) == b""


def test_a_line_too_long_ends_a_conversation(talks: list[Talk], talking: socket.socket) -> None:
    exchange(talking, {"command": "talk"})
    with contextlib.suppress(ConnectionError):
        assert exchange(talking, {"command": "talk", "arguments": {"x": "y" * 300}}) is None
    wait(lambda: talks[0].is_closed)


def test_other_commands_are_answered_once(talks: list[Talk], talking: socket.socket) -> None:
    assert exchange(talking, {"command": "other"}) == {"once": 1}
    assert talking.recv(10) == b""
    assert talks == []
