"""Groups of ranks for tests: threads of this process, and strangers that speak by hand."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import queue
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from controller.allreduce.control_channel import ControlChannel, Departure
from controller.allreduce.environment import Master, Placement

JsonObject = dict[str, Any]


def free_master() -> Master:
    """A loopback port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Master("127.0.0.1", probe.getsockname()[1])


def join(
    rank: int, size: int, master: Master, timeout_s: float = 20.0, **options: Any
) -> ControlChannel:
    return ControlChannel.join(Placement(rank, size, 0, master), timeout_s=timeout_s, **options)


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Results of calls that run at the same time; exceptions as values."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception() or future.result() for future in futures]


@contextlib.contextmanager
def group(size: int, master: Master, **options: Any) -> Iterator[list[ControlChannel]]:
    """All ranks of a group, in this process; closed afterwards."""
    channels = in_threads(
        *(lambda rank=rank: join(rank, size, master, **options) for rank in range(size))
    )
    try:
        for channel in channels:
            if isinstance(channel, BaseException):
                raise channel
        yield channels
    finally:
        in_threads(*(c.close for c in channels if isinstance(c, ControlChannel)))


def gather(channels: list[ControlChannel], timeout_s: float = 20.0) -> list[Any]:
    """What each rank gets when all gather their rank at once."""
    return in_threads(*(lambda c=c: c.all_gather({"rank": c.rank}, timeout_s) for c in channels))


def heard(channel: ControlChannel) -> queue.Queue[Departure]:
    """Departures as the channel tells of them."""
    departures: queue.Queue[Departure] = queue.Queue()
    channel.set_callback(departures.put)
    return departures


class Stranger:
    """Something that connects to rank 0 and says what it likes."""

    def __init__(self, master: Master, context: Any = None) -> None:
        family = socket.AF_UNIX if master.path else socket.AF_INET
        address = master.path or (master.address, master.port)
        deadline_s = time.monotonic() + 20
        while True:
            self.stream = socket.socket(family, socket.SOCK_STREAM)
            self.stream.settimeout(20)
            try:
                self.stream.connect(address)
                break
            except (ConnectionRefusedError, FileNotFoundError):
                self.stream.close()
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.01)
        if context is not None:
            self.stream = context.wrap_socket(self.stream)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    def say(self, message: JsonObject | bytes) -> None:
        payload = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.stream.sendall(struct.pack(">I", len(payload)) + payload)

    def hello(self, number: int, ranks: int, **other: Any) -> None:
        greeting = {"type": "hello", "protocol": 1, "group": "world", "rank": number, "size": ranks}
        self.say(greeting | other)

    def hear(self) -> JsonObject:
        """The next message but heartbeats; {} at the end."""
        while True:
            header = self._read(4)
            if len(header) < 4:
                return {}
            message: JsonObject = json.loads(self._read(struct.unpack(">I", header)[0]))
            if message["type"] != "beat":
                return message

    def hear_until(self, kind: str) -> JsonObject:
        """The next message of a type; {} at the end."""
        while (message := self.hear()) and message["type"] != kind:
            pass
        return message

    def seconds_to_end(self) -> float:
        """How long the other side lets the connection live."""
        start_s = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while self.stream.recv(65536):
                pass
        return time.monotonic() - start_s

    def _read(self, nbytes: int) -> bytes:
        data = b""
        with contextlib.suppress(ConnectionError):
            while len(data) < nbytes and (more := self.stream.recv(nbytes - len(data))):
                data += more
        return data


class Opened:
    """What this process has since then that it had not.

    Sets, not counts: a thread of a test before may end meanwhile, and would hide one of ours.
    """

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._descriptors = self._all_descriptors()

    @staticmethod
    def _all_descriptors() -> set[tuple[str, str]]:
        found = set()
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the one this list was read with
                found.add((entry.name, str(entry.readlink())))
        return found

    @property
    def threads(self) -> set[threading.Thread]:
        """Threads that run and did not."""
        return set(threading.enumerate()) - self._threads

    @property
    def descriptors(self) -> set[tuple[str, str]]:
        """Numbers and targets of open descriptors that were not open."""
        return self._all_descriptors() - self._descriptors


# ---- ranks in processes of their own ----


def be_rank(
    rank: int, size: int, master: Master, options: dict[str, Any], pipe: Connection
) -> None:
    """A rank in a process of its own; prints what it hears."""
    with join(rank, size, master, **options) as channel:
        channel.set_callback(lambda departure: pipe.send((departure, time.monotonic())))
        channel.all_gather({"rank": rank}, 20)
        pipe.send("ready")
        signal.pause()


def be_rank_with_child(
    rank: int, size: int, master: Master, options: dict[str, Any], pipe: Connection
) -> None:
    with join(rank, size, master, **options) as channel:
        channel.all_gather({"rank": rank}, 20)
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        pipe.send(child)
        signal.pause()
