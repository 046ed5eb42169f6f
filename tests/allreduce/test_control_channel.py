"""Ranks that have met exchange documents, and hear of one another's end."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import queue
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from controller.allreduce import control_channel, star
from controller.allreduce.control_channel import ControlChannel, Departure, DepartureError
from controller.allreduce.environment import Master
from controller.allreduce.errors import ClosedError, CollectiveError, StallError
from controller.allreduce.frames import MAX_DOCUMENT_BYTES, MAX_FRAME_BYTES
from controller.errors import UsageError
from tests.allreduce.ranks import (
    Opened,
    Stranger,
    be_rank,
    be_rank_with_child,
    free_master,
    gather,
    group,
    heard,
    in_threads,
    join,
)
from tests.waiting import wait

# A death must be heard of in less than a second, and is in milliseconds where the processors are
# free. No test fails because the machine stood still; but this is less than any timeout.
NOTICED_S = 4.0
ROUNDS = 20


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of a second or less are long ones: waiting in vain shows then, and slowness does not.

    A goodbye that is not answered in time would also look like a death.
    """
    monkeypatch.setattr(star, "_GOODBYE_S", 20.0)
    monkeypatch.setattr(control_channel, "_ABORT_WAIT_S", 20.0)


@pytest.fixture(params=["tcp", "unix"])
def master(request: pytest.FixtureRequest, tmp_path: Path) -> Master:
    return free_master() if request.param == "tcp" else Master(path=str(tmp_path / "meet"))


@pytest.fixture(scope="module")
def processes() -> Any:
    """Starts processes from a clean one that has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.allreduce.ranks"])
    return context


# ---- gathering ----


def test_every_rank_gets_every_document_by_rank(master: Master) -> None:
    with group(4, master) as channels:

        def run(channel: ControlChannel) -> list[Any]:
            own = {"rank": channel.rank, "é\ud800": [None, 1.5, {}]}
            return [channel.all_gather({**own, "n": number}, 20) for number in range(100)]

        expected = [
            [{"rank": rank, "é\ud800": [None, 1.5, {}], "n": number} for rank in range(4)]
            for number in range(100)
        ]
        assert in_threads(*(lambda c=c: run(c) for c in channels)) == [expected] * 4


def test_the_largest_documents_pass_and_larger_ones_are_refused_before_anything_is_sent(
    master: Master,
) -> None:
    room = MAX_DOCUMENT_BYTES - len('{"x":""}')
    with group(3, master) as channels:
        with pytest.raises(UsageError, match=f"{MAX_DOCUMENT_BYTES + 1} bytes"):
            channels[1].all_gather({"x": "y" * (room + 1)}, 1)
        for _ in range(3):
            results = in_threads(
                *(lambda c=c: c.all_gather({"x": "y" * room}, 20) for c in channels)
            )
            assert [[len(d["x"]) for d in result] for result in results] == [[room] * 3] * 3


def nested(levels: int) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for _ in range(levels - 1):
        document = {"": document}
    return document


UNSENDABLE: dict[str, Any] = {
    "list": [1],
    "text": "text",
    "nothing": None,
    "object": {"x": object()},
    "nan": {"x": float("nan")},
    "bytes": {"x": b""},
    "65 levels": nested(65),
    "5000 levels": nested(5000),
}


@pytest.mark.parametrize("name", UNSENDABLE)
def test_what_is_no_json_object_is_refused_and_the_channel_stays(name: str) -> None:
    with group(2, free_master()) as channels:
        with pytest.raises(UsageError, match="document to gather"):
            channels[0].all_gather(UNSENDABLE[name], 1)
        assert len(gather(channels)[1]) == 2


def test_a_document_of_64_levels_passes() -> None:
    with group(2, free_master()) as channels:
        results = in_threads(*(lambda c=c: c.all_gather(nested(64), 20) for c in channels))
        assert results == [[nested(64)] * 2] * 2


def test_a_gathering_is_a_barrier(master: Master) -> None:
    with group(3, master) as channels:
        last_s = []

        def late(channel: ControlChannel) -> float:
            if channel.rank == 2:
                time.sleep(0.3)
                last_s.append(time.monotonic())
            channel.all_gather({}, 20)
            return time.monotonic()

        ends_s = in_threads(*(lambda c=c: late(c) for c in channels))
        assert min(ends_s) >= last_s[0]


def test_a_fast_rank_may_be_one_gathering_ahead() -> None:
    with group(3, free_master()) as channels:

        def run(channel: ControlChannel) -> list[Any]:
            results = []
            for number in range(30):
                time.sleep(0.01 * ((channel.rank + number) % 3 == 0))
                results.append(channel.all_gather({"n": number}, 20))
            return results

        expected = [[{"n": number}] * 3 for number in range(30)]
        assert in_threads(*(lambda c=c: run(c) for c in channels)) == [expected] * 3


def test_a_timeout_names_the_ranks_that_did_not_call_and_ends_all_gathering() -> None:
    with group(4, free_master()) as channels:
        callers = [channels[0], channels[2]]
        for error in gather(callers, timeout_s=1):
            assert isinstance(error, StallError)
            assert error.waiting_for == (1, 3)
        # Whoever comes late completes it alone; nothing further can be in step.
        start_s = time.monotonic()
        with pytest.raises(StallError, match="gathering 1"):
            channels[0].all_gather({}, 20)
        assert time.monotonic() - start_s < 10


# ---- goodbye ----


def test_a_rank_that_leaves_is_told_of_once_and_as_left(master: Master) -> None:
    with group(3, master) as channels:
        queues = [heard(channel) for channel in channels]
        channels[1].close()
        for rank in (0, 2):
            assert queues[rank].get(timeout=NOTICED_S) == Departure(1, "left", {})
        with pytest.raises(DepartureError, match="Rank 1 left the group") as caught:
            channels[2].all_gather({}, 20)
        assert caught.value.departure == Departure(1, "left", {})
        assert caught.value.rank == 1
        time.sleep(0.1)
        assert all(queue.empty() for queue in queues)


def test_rank_0_may_leave_first(master: Master) -> None:
    with group(3, master) as channels:
        queues = [heard(channel) for channel in channels]
        channels[0].close()
        for rank in (1, 2):
            assert queues[rank].get(timeout=NOTICED_S) == Departure(0, "left", {})
        start_s = time.monotonic()
        channels[1].abort({"error": "nobody is there to hear it"})
        assert time.monotonic() - start_s < 10
        with pytest.raises(DepartureError, match="Rank 0 left"):
            channels[2].all_gather({}, 20)


def test_whoever_leaves_right_after_a_gathering_does_not_spoil_it(master: Master) -> None:
    for _ in range(ROUNDS):
        with group(3, master) as channels:

            def gather_and_leave(channel: ControlChannel) -> list[Any]:
                result = channel.all_gather({"rank": channel.rank}, 20)
                channel.close()
                return result

            results = in_threads(*(lambda c=c: gather_and_leave(c) for c in channels))
            assert results == [[{"rank": rank} for rank in range(3)]] * 3


def test_who_leaves_while_much_is_on_its_way_to_him_has_still_left(master: Master) -> None:
    for _ in range(5):
        with group(3, master) as channels:
            queues = [heard(channel) for channel in channels]
            large = {"x": "y" * 1_000_000}
            results = in_threads(
                lambda c=channels[0], d=large: c.all_gather(d, 20),
                lambda c=channels[2], d=large: c.all_gather(d, 20),
                channels[1].close,
            )
            assert all(isinstance(error, DepartureError) for error in results[:2])
            for rank in (0, 2):
                assert queues[rank].get(timeout=NOTICED_S) == Departure(1, "left", {})


def test_nothing_is_left_behind(master: Master) -> None:
    with group(2, master):
        pass  # whatever is made once in a process
    opened = Opened()
    with group(5, master) as channels:
        gather(channels)
        assert len(opened.threads) >= 5
    assert not opened.threads
    assert not opened.descriptors
    assert not master.path or not Path(master.path).exists()


def test_closing_all_at_once_is_quick_and_twice_is_once() -> None:
    with group(5, free_master()) as channels:
        start_s = time.monotonic()
        in_threads(*(channel.close for channel in channels))
        # Nobody waits in vain for the other side of a goodbye.
        assert time.monotonic() - start_s < 10
        for channel in channels:
            channel.close()
            channel.abort({})
            channel.set_callback(print)
            with pytest.raises(ClosedError):
                channel.all_gather({}, 1)


def test_closing_ends_a_gathering_of_another_thread() -> None:
    with group(2, free_master()) as channels:
        results = in_threads(
            lambda: channels[0].all_gather({}, 20),
            lambda: (time.sleep(0.1), channels[0].close()),
        )
        assert isinstance(results[0], ClosedError)


# ---- abort ----


def test_an_abort_reaches_all_others_with_its_reason_and_ends_their_gatherings(
    master: Master,
) -> None:
    reason = {"error": "QP 17 to rank 0: RETRY_EXC_ERR", "rank": 0, "nested": {"a": [1]}}
    for aborting in (0, 2):
        with group(3, master) as channels:
            queues = [heard(channel) for channel in channels]
            others = [c for c in channels if c.rank != aborting]
            start_s = time.monotonic()
            results = in_threads(
                *(lambda c=c: c.all_gather({}, 20) for c in others),
                lambda c=channels[aborting]: c.abort(reason),
            )
            assert time.monotonic() - start_s < 10
            for error in results[:2]:
                assert isinstance(error, DepartureError)
                assert error.departure == Departure(aborting, "abort", reason)
                assert "RETRY_EXC_ERR" in error.message
            for channel in others:
                assert queues[channel.rank].get(timeout=NOTICED_S) == Departure(
                    aborting, "abort", reason
                )
            assert queues[aborting].empty()
            with pytest.raises(CollectiveError, match="This rank stopped the group"):
                channels[aborting].all_gather({}, 20)


@pytest.mark.parametrize("reason", [{"x": object()}, {"x": "y" * 2_000_000}, None])
def test_an_abort_with_a_reason_that_cannot_be_sent_is_heard_all_the_same(reason: Any) -> None:
    with group(2, free_master()) as channels:
        departures = heard(channels[1])
        channels[0].abort(reason)
        departure = departures.get(timeout=NOTICED_S)
        assert (departure.rank, departure.kind) == (0, "abort")
        assert "reason not sent" in departure.reason["error"]


def test_all_may_abort_at_once_and_only_the_first_call_of_each_counts() -> None:
    with group(3, free_master()) as channels:
        queues = [heard(channel) for channel in channels]
        for _ in range(3):
            in_threads(*(lambda c=c: c.abort({"from": c.rank}) for c in channels))
        for channel in channels:
            got = {queues[channel.rank].get(timeout=NOTICED_S).rank for _ in range(2)}
            assert got == set(range(3)) - {channel.rank}
        time.sleep(0.1)
        assert all(queue.empty() for queue in queues)


# ---- the callback ----


def test_what_happened_before_the_callback_is_set_comes_first() -> None:
    with group(4, free_master()) as channels:
        channels[1].abort({"n": 1})
        channels[1].close()
        channels[2].close()
        time.sleep(0.2)
        departures = heard(channels[3])
        assert [departures.get(timeout=NOTICED_S) for _ in range(3)] == [
            Departure(1, "abort", {"n": 1}),
            Departure(1, "left", {}),
            Departure(2, "left", {}),
        ]


def test_a_callback_that_fails_does_not_end_the_channel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with group(3, free_master()) as channels:
        seen = []

        def failing(departure: Departure) -> None:
            seen.append(departure.rank)
            raise RuntimeError("callback's own")

        channels[0].set_callback(failing)
        channels[1].close()
        channels[2].close()
        wait(lambda: len(seen) == 2)
        assert sorted(seen) == [1, 2]
        wait(lambda: caplog.text.count("RuntimeError: callback's own") == 2)


def test_gathering_in_a_callback_is_refused_and_does_not_hang() -> None:
    with group(2, free_master()) as channels:
        errors: queue.Queue[BaseException] = queue.Queue()

        def gathering(departure: Departure) -> None:
            try:
                channels[0].all_gather({}, 20)
            except UsageError as error:
                errors.put(error)

        channels[0].set_callback(gathering)
        channels[1].close()
        assert "callback" in str(errors.get(timeout=NOTICED_S))


def test_a_callback_may_abort_and_close() -> None:
    with group(3, free_master()) as channels:
        departures = heard(channels[2])

        def both(departure: Departure) -> None:
            channels[0].abort({"because of": departure.rank})
            channels[0].close()

        channels[0].set_callback(both)
        channels[1].close()
        got = [departures.get(timeout=NOTICED_S) for _ in range(3)]
        assert Departure(1, "left", {}) in got
        assert Departure(0, "abort", {"because of": 1}) in got
        assert Departure(0, "left", {}) in got
        channels[0].close()  # waits for the thread


# ---- death ----


Start = Callable[..., tuple[Any, Connection]]


@pytest.fixture
def start(processes: Any) -> Iterator[Start]:
    """Starts a rank in a process; killed afterwards."""
    started = []

    def start_one(
        rank: int, size: int, master: Master, target: Any = be_rank, **options: Any
    ) -> tuple[Any, Connection]:
        ours, theirs = processes.Pipe()
        process = processes.Process(target=target, args=(rank, size, master, options, theirs))
        process.start()
        started.append(process)
        return process, ours

    yield start_one
    for process in started:
        process.kill()
        process.join()


def kill_one_of_three(start: Start, master: Master, victim: int) -> float:
    """Kill a rank; the longest time until another one heard of it."""
    size = 3
    process, pipe = start(victim, size, master)
    survivors = [rank for rank in range(size) if rank != victim]
    channels = in_threads(*(lambda r=r: join(r, size, master) for r in survivors))
    try:
        queues = [heard(channel) for channel in channels]
        gather(channels)
        assert pipe.recv() == "ready"
        start_s = time.monotonic()
        process.kill()
        for queue in queues:
            departure = queue.get(timeout=NOTICED_S)
            assert (departure.rank, departure.kind) == (victim, "died")
            assert "connection" in departure.reason["error"]
        return time.monotonic() - start_s
    finally:
        in_threads(*(channel.close for channel in channels))


@pytest.mark.parametrize("victim", [2, 0])
def test_when_a_rank_is_killed_all_others_hear_it_at_once_20_times_of_20(
    start: Start, master: Master, victim: int
) -> None:
    took_s = sorted(kill_one_of_three(start, master, victim) for _ in range(ROUNDS))
    assert took_s[ROUNDS // 2] < 1 and took_s[-1] < NOTICED_S
    # And no path, port or process is in the way of the next group.


def test_a_forked_child_does_not_hide_its_parents_death(start: Start, master: Master) -> None:
    process, pipe = start(1, 2, master, be_rank_with_child)
    with join(0, 2, master) as channel:
        departures = heard(channel)
        channel.all_gather({}, 20)
        child = pipe.recv()
        try:
            process.kill()
            assert departures.get(timeout=NOTICED_S).kind == "died"
            os.kill(child, 0)  # it lives on
        finally:
            os.kill(child, signal.SIGKILL)


def test_in_a_forked_child_the_channel_is_closed_and_the_parents_goes_on() -> None:
    with group(2, free_master()) as channels:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                channels[0].all_gather({}, 1)
            except ClosedError:
                channels[0].abort({})
                channels[0].close()
                os.write(writing, b"closed")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        assert os.read(reading, 10) == b"closed"
        os.close(reading)
        assert len(gather(channels)[0]) == 2


def test_a_stopped_process_is_waited_for_longer_than_a_vanished_host(start: Start) -> None:
    master = free_master()
    process, pipe = start(1, 2, master, heartbeat_timeout_s=0.5)
    with join(0, 2, master, heartbeat_timeout_s=0.5) as channel:
        departures = heard(channel)
        channel.all_gather({}, 20)
        assert pipe.recv() == "ready"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.2)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(1)  # some ten heartbeats
        assert departures.empty()
        os.kill(process.pid, signal.SIGSTOP)
        start_s = time.monotonic()
        departure = departures.get(timeout=20)
        assert time.monotonic() - start_s > 1.5
        assert departure.kind == "died"
        assert "no sign of life for 3 s" in departure.reason["error"]


_RANK_1 = """
import sys, warnings
warnings.simplefilter("ignore")
from controller.allreduce.control_channel import ControlChannel
from controller.allreduce.environment import Master, Placement
channel = ControlChannel.join(
    Placement(1, 2, 0, Master.parse(sys.argv[1])), timeout_s=20, insecure=True,
    heartbeat_timeout_s=1,
)
channel.set_callback(lambda departure: print(departure.kind, departure.rank, flush=True))
channel.all_gather({}, 20)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a network namespace")
@pytest.mark.filterwarnings("ignore:INSECURE")
def test_a_vanished_host_is_noticed_by_both_sides_within_the_heartbeat_timeout() -> None:
    name = f"stl-rdv-{os.getpid()}"
    ours, theirs = f"rdv{os.getpid() % 10**6}a", f"rdv{os.getpid() % 10**6}b"

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    ip("netns", "add", name)
    try:
        ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        ip("addr", "add", "198.18.77.1/30", "dev", ours)
        ip("link", "set", ours, "up")
        ip("-n", name, "addr", "add", "198.18.77.2/30", "dev", theirs)
        ip("-n", name, "link", "set", theirs, "up")
        master = Master("198.18.77.1", free_master().port)
        with subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-c", _RANK_1, str(master)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            with join(0, 2, master, 20, insecure=True, heartbeat_timeout_s=1) as channel:
                departures = heard(channel)
                channel.all_gather({}, 20)
                time.sleep(0.3)
                # Nothing that is sent arrives, and no side is told so.
                nobody = ("lladdr", "02:00:00:00:00:99", "nud", "permanent")
                ip("neigh", "replace", "198.18.77.2", "dev", ours, *nobody)
                ip("-n", name, "neigh", "replace", "198.18.77.1", "dev", theirs, *nobody)
                start_s = time.monotonic()
                departure = departures.get(timeout=20)
                # A process that says nothing is waited for six seconds.
                assert time.monotonic() - start_s < 4
                assert (departure.rank, departure.kind) == (1, "died")
                assert "timed out" in departure.reason["error"]
                assert process.stdout.readline() == "died 0\n"
            process.communicate()
    finally:
        ip("netns", "delete", name)


# ---- what no rank sends ----


VIOLATIONS: dict[str, dict[str, Any] | bytes] = {
    "another's name": {"type": "part", "rank": 2, "seq": 1, "document": {}},
    "rank 0's name": {"type": "departure", "rank": 0, "kind": "left", "reason": {}},
    "rank out of range": {"type": "part", "rank": 9, "seq": 1, "document": {}},
    "ahead": {"type": "part", "rank": 1, "seq": 2, "document": {}},
    "no number": {"type": "part", "rank": 1, "seq": True, "document": {}},
    "no document": {"type": "part", "rank": 1, "seq": 1, "document": [1]},
    "no reason": {"type": "departure", "rank": 1, "kind": "abort", "reason": "x"},
    "a kind of its own": {"type": "departure", "rank": 1, "kind": "bored", "reason": {}},
    "a death of its own": {"type": "departure", "rank": 1, "kind": "died", "reason": {}},
    "no type": {"rank": 1},
    "no json": b"{",
    "too deep": json.dumps({"type": "part", "rank": 1, "seq": 1, "document": nested(100)}).encode(),
}


@contextlib.contextmanager
def rank_1_by_hand() -> Iterator[tuple[list[ControlChannel], Stranger]]:
    """Ranks 0 and 2 of a group of three whose rank 1 says what it likes."""
    master = free_master()

    def by_hand() -> Stranger:
        stranger = Stranger(master)
        stranger.hello(1, 3)
        assert stranger.hear_until("welcome")
        return stranger

    rank_0, stranger, rank_2 = in_threads(
        lambda: join(0, 3, master), by_hand, lambda: join(2, 3, master)
    )
    with stranger:
        yield [rank_0, rank_2], stranger
    in_threads(rank_0.close, rank_2.close)


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_rank_that_breaks_the_protocol_is_dead_to_the_others_with_the_reason(name: str) -> None:
    with rank_1_by_hand() as (channels, stranger):
        queues = [heard(channel) for channel in channels]
        stranger.say(VIOLATIONS[name])
        for queue in queues:
            departure = queue.get(timeout=NOTICED_S)
            assert (departure.rank, departure.kind) == (1, "died")
            assert departure.reason["error"].startswith("sent ")


def test_a_message_over_the_limit_is_not_waited_for() -> None:
    with rank_1_by_hand() as (channels, stranger):
        departures = heard(channels[1])
        stranger.stream.sendall(struct.pack(">I", MAX_FRAME_BYTES + 1) + b"{")
        departure = departures.get(timeout=NOTICED_S)
        assert f"a message of {MAX_FRAME_BYTES + 1} bytes" in departure.reason["error"]


def test_a_rank_that_sends_without_end_costs_two_documents_at_most() -> None:
    with rank_1_by_hand() as (channels, stranger):
        departures = heard(channels[1])
        for number in (1, 2):
            stranger.say({"type": "part", "rank": 1, "seq": number, "document": {}})
        assert "gathering 2 out of order" in departures.get(timeout=NOTICED_S).reason["error"]
