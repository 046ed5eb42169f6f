"""Queue pairs in memory, for engines in one process: order and delays as adverse as RC allows.

Stands in for pyverbs below controller.allreduce.link: messages of one queue pair arrive in order,
those of different ones in any order, some late; memory is checked by key and bounds, and a message
without a posted receive breaks the queue pair, since the engine promises that it never happens.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import threading
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from controller.allreduce import link as link_module
from controller.verbs.enums import verbs
from controller.verbs.queue_pair import Endpoint

LOC_PROT_ERR, WR_FLUSH_ERR, REM_ACCESS_ERR, RNR_RETRY_EXC_ERR = 4, 5, 10, 13


@dataclass
class Entry:
    """SGE."""

    address: int
    length: int
    lkey: int


@dataclass
class Request:
    """SendWR and RecvWR."""

    wr_id: int
    num_sge: int
    sg: list[Entry]
    opcode: int = 0
    imm_data: int = 0
    remote: tuple[int, int] = (0, 0)

    def set_wr_rdma(self, rkey: int, address: int) -> None:
        self.remote = (rkey, address)


class Memory:
    """Registered memory of all ranks; a key is worth its range only."""

    def __init__(self) -> None:
        self._keys = itertools.count(1000)
        self.ranges: dict[int, tuple[int, int]] = {}
        self._kept: list[np.ndarray] = []

    def register(self, address: int, nbytes: int) -> int:
        key = next(self._keys)
        self.ranges[key] = (address, nbytes)
        return key

    def allows(self, key: int, address: int, nbytes: int) -> bool:
        start, size = self.ranges.get(key, (0, 0))
        return start <= address and address + nbytes <= start + size


class Completions:
    """CompletionQueue."""

    def __init__(self) -> None:
        self._queue: deque[Any] = deque()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._armed = False
        self._lock = threading.Lock()

    def poll(self, most: int = 32) -> list[Any]:
        return [self._queue.popleft() for _ in range(min(most, len(self._queue)))]

    def arm(self) -> None:
        self._armed = True

    def take_events(self) -> None:
        os.eventfd_read(self.fd)

    def add(self, qpn: int, wr_id: int, status: int = 0, nbytes: int = 0, imm: int = 0) -> None:
        self._queue.append(
            SimpleNamespace(qp_num=qpn, wr_id=wr_id, status=status, byte_len=nbytes, imm_data=imm)
        )
        with self._lock:
            if self._armed:
                self._armed = False
                os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        os.close(self.fd)


@dataclass
class Fabric:
    """All queue pairs, and the thread that moves messages between them."""

    seed: int
    memory: Memory = field(default_factory=Memory)
    pairs: dict[int, FabricPair] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers = itertools.count(100)
        self.lock = threading.Lock()
        self._random = random.Random(self.seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def number(self) -> int:
        return next(self._numbers)

    def _run(self) -> None:
        while not self._stop.is_set():
            with self.lock:
                loaded = [pair for pair in self.pairs.values() if pair.sending]
                chosen = self._random.choice(loaded) if loaded else None
                if chosen is not None:
                    for _ in range(self._random.randint(1, 4)):
                        if chosen.sending:
                            chosen.deliver(chosen.sending.popleft())
            if chosen is None or self._random.random() < 0.01:
                self._stop.wait(0.0005)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


class FabricPair:
    """QueuePair and the pyverbs QP in it."""

    def __init__(
        self, device: Any, completions: Completions, send_depth: int, receive_depth: int
    ) -> None:
        self.fabric: Fabric = device.fabric
        self.completions = completions
        self.number = self.fabric.number()
        self.endpoint = Endpoint(self.number, 0, "::ffff:10.0.0.1", 4096)
        self.qp = self
        self.receives: deque[Request] = deque()
        self.sending: deque[Request] = deque()
        self.depths = send_depth, receive_depth
        self.broken = False
        self.peer: FabricPair | None = None
        self.traffic_class = -1
        self.posted = 0
        with self.fabric.lock:
            self.fabric.pairs[self.number] = self

    def connect(self, remote: Endpoint, traffic_class: int, timing: Any) -> None:
        self.peer = self.fabric.pairs[remote.qpn]
        self.traffic_class = traffic_class

    def post_recv(self, request: Request) -> None:
        with self.fabric.lock:
            self.receives.append(request)
            if len(self.receives) > self.depths[1]:
                self.fabric.problems.append("more receives than the queue has room for")

    def post_send(self, request: Request) -> None:
        with self.fabric.lock:
            self.posted += 1
            if self.broken:
                self.completions.add(self.number, request.wr_id, WR_FLUSH_ERR)
                return
            self.sending.append(request)
            if len(self.sending) > self.depths[0]:
                self.fabric.problems.append("more sends than the queue has room for")

    def deliver(self, request: Request) -> None:
        """Called with the fabric's lock held."""
        peer, memory = self.peer, self.fabric.memory
        assert peer is not None
        if self.broken or peer.broken:
            self.completions.add(self.number, request.wr_id, WR_FLUSH_ERR)
            return
        entries = request.sg[: request.num_sge]
        nbytes = sum(entry.length for entry in entries)
        for entry in entries:
            if not memory.allows(entry.lkey, entry.address, entry.length):
                self.fabric.problems.append(f"lkey {entry.lkey} does not cover {entry}")
                self.completions.add(self.number, request.wr_id, LOC_PROT_ERR)
                return
        if not peer.receives:
            self.fabric.problems.append("a message found no receive")
            self.completions.add(self.number, request.wr_id, RNR_RETRY_EXC_ERR)
            return
        receive = peer.receives.popleft()
        if request.opcode == verbs.IBV_WR_SEND:
            target = receive.sg[0].address
        else:
            rkey, target = request.remote
            if nbytes and not memory.allows(rkey, target, nbytes):
                self.fabric.problems.append(f"rkey {rkey} does not cover {nbytes} at {target:#x}")
                self.completions.add(self.number, request.wr_id, REM_ACCESS_ERR)
                return
        for entry in entries:
            ctypes.memmove(target, entry.address, entry.length)
        peer.completions.add(peer.number, receive.wr_id, 0, nbytes, request.imm_data)
        self.completions.add(self.number, request.wr_id)

    def fail(self) -> None:
        with self.fabric.lock:
            if self.broken:
                return
            self.broken = True
            for request in [*self.sending, *self.receives]:
                self.completions.add(self.number, request.wr_id, WR_FLUSH_ERR)
            self.sending.clear()
            self.receives.clear()

    def close(self) -> None:
        self.fail()


class Device:
    """Device."""

    name, port = "fabric0", 1

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.active = True

    def is_active(self) -> bool:
        return self.active


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let controller.allreduce.link use this fabric."""
    monkeypatch.setattr(link_module, "QueuePair", FabricPair)
    monkeypatch.setattr(link_module, "SGE", Entry)
    monkeypatch.setattr(link_module, "SendWR", Request)
    monkeypatch.setattr(link_module, "RecvWR", Request)
