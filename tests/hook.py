"""Frames through the BPF programs by BPF_PROG_TEST_RUN, and a look at the maps behind them."""

from __future__ import annotations

import ctypes as ct
import os
import struct
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from controller.dataplane import layout, libbpf, tables
from controller.dataplane.compile import SOURCE_DIRECTORY
from controller.dataplane.layout import Direction, Reason
from controller.dataplane.loader import (
    TC_EGRESS,
    TC_INGRESS,
    XDP_INGRESS,
    Dataplane,
)
from controller.observe.snapshot import pack_address
from tests.packets import V4

XDP_PASS = 2
TC_ACT_UNSPEC = 0xFFFFFFFF  # -1
VERDICTS = {XDP_INGRESS: XDP_PASS, TC_INGRESS: TC_ACT_UNSPEC, TC_EGRESS: TC_ACT_UNSPEC}
DIRECTIONS = {
    XDP_INGRESS: Direction.INGRESS,
    TC_INGRESS: Direction.INGRESS,
    TC_EGRESS: Direction.EGRESS,
}
# Not 0, so that a port number that got lost is noticed.
PORT = 3
MAX_FLOWS = 512
# struct xdp_md: data, data_end, data_meta, ingress ifindex, rx queue, egress ifindex
_XDP_MD = struct.Struct("<6I")
# Members of struct roce_packet (bpf/roce.h) that the tests read.
PACKET_MEMBERS = (
    "key", "psn", "wire_len", "payload_len", "read_len", "source_qpn", "sport", "vlan_tci",
    "opcode", "operation", "transport", "syndrome", "has_aeth", "ack_request", "fecn", "becn",
    "traffic_class", "tags", "cut", "kind",
)  # fmt: skip


def flow_key(
    dqpn: int = 0x11,
    src: str = V4[0],
    dst: str = V4[1],
    direction: Direction = Direction.INGRESS,
    port: int = PORT,
) -> bytes:
    """A flow key as the kernel holds it."""
    key = np.zeros((), layout.FLOW_KEY)
    key["saddr"] = np.frombuffer(pack_address(src), np.uint8)
    key["daddr"] = np.frombuffer(pack_address(dst), np.uint8)
    key["dqpn"], key["port"], key["direction"] = dqpn, port, direction
    return key.tobytes()


def run_c(tmp: Path, source: str) -> str:
    """Compile a C program that includes headers of bpf/, run it, return what it prints."""
    file, program = tmp / "probe.c", tmp / "probe"
    file.write_text(source)
    command = ["gcc", "-Wall", "-Wno-unused", "-I", str(SOURCE_DIRECTORY)]
    command += ["-o", str(program), str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout


class Hook:
    """One loaded program on one port, and the maps behind it."""

    def __init__(
        self,
        dataplane: Dataplane,
        function: str,
        packet_dtype: np.dtype,
        port: int = PORT,
        acts: bool = False,
    ) -> None:
        self.dataplane = dataplane
        self.function = function
        self.port = port
        self.direction = DIRECTIONS[function]
        self.is_xdp = function == XDP_INGRESS
        self.packet_dtype = packet_dtype
        self.fd = dataplane.load(function, port, acts)
        self._verdict = VERDICTS[function]

    def close(self) -> None:
        """Unload the program."""
        os.close(self.fd)

    @property
    def maps(self) -> dict[str, int]:
        """Descriptors by map name."""
        return self.dataplane.map_fds

    def run(self, *frames: bytes) -> None:
        """Run frames; every one has to come out unchanged with the verdict to pass."""
        for frame in frames:
            result = libbpf.test_run(self.fd, frame)
            assert result.retval == self._verdict, frame.hex()
            assert result.data == frame, frame.hex()

    def reasons(self) -> Counter[Reason]:
        """Frames by what became of them."""
        return Counter(tables.read_reasons(self.maps["reasons"], self.port, self.direction))

    def outcome(self, *frames: bytes) -> Counter[Reason]:
        """Run frames and tell what became of these."""
        before = self.reasons()
        self.run(*frames)
        return self.reasons() - before

    def expect(self, reason: Reason, frames: Iterable[bytes]) -> None:
        """All frames have this outcome; a failure names the first one that has another."""
        frames = list(frames)
        if self.outcome(*frames) == Counter({reason: len(frames)} if frames else {}):
            return
        for frame in frames:
            assert self.outcome(frame) == Counter({reason: 1}), (len(frame), frame.hex())
        pytest.fail("the outcome of a frame depends on those before it")

    def parsed(self, frame: bytes) -> np.void:
        """What the parser left in the CPU's slot of `packet_in_hand`."""
        cpus, size = libbpf.possible_cpus(), -(-self.packet_dtype.itemsize // 8) * 8
        zero, fd = bytes(4), self.maps["packet_in_hand"]
        libbpf.map_update(fd, zero, bytes(cpus * size))
        self.run(frame)
        raw = libbpf.map_lookup(fd, zero, cpus * size)
        assert raw is not None
        slots = [raw[start : start + size] for start in range(0, len(raw), size)]
        (used,) = (slot for slot in slots if any(slot))  # the port number is never 0
        return np.frombuffer(used[: self.packet_dtype.itemsize], self.packet_dtype)[0]

    def flows(self) -> tuple[np.ndarray, np.ndarray]:
        """The whole flow table."""
        return tables.read_flows(self.maps["flows"])

    def flow(self, dqpn: int = 0x11, src: str = V4[0], dst: str = V4[1]) -> np.void:
        """Counters of one flow of this hook."""
        raw = libbpf.map_lookup(
            self.maps["flows"],
            flow_key(dqpn, src, dst, self.direction, self.port),
            layout.FLOW_STATS.itemsize,
            libbpf.BPF_F_LOCK,
        )
        assert raw is not None, f"no flow to QPN {dqpn:#x}"
        return np.frombuffer(raw, layout.FLOW_STATS)[0]

    def forget(self, dqpn: int = 0x11, src: str = V4[0], dst: str = V4[1]) -> None:
        """Delete a flow, if it is there."""
        libbpf.map_delete(self.maps["flows"], flow_key(dqpn, src, dst, self.direction, self.port))

    def write_pair(self, dqpn: int, peer_qpn: int, src: str = V4[0], dst: str = V4[1]) -> None:
        """What the registry does for one direction of a queue pair."""
        key = flow_key(dqpn, src, dst, self.direction, self.port)
        tables.write_pairs(self.maps["pairs"], {key: peer_qpn})


class Replay(Hook):
    """The XDP program of the replay build: each frame brings its time and length."""

    def run_at(self, now_ns: int, frame: bytes, wire_len: int | None = None) -> None:
        """Run one frame as if it had come at `now_ns` with `wire_len` bytes."""
        meta = np.zeros((), layout.REPLAY_META)
        meta["now_ns"], meta["wire_len"] = now_ns, len(frame) if wire_len is None else wire_len
        data = meta.tobytes() + frame
        context = _XDP_MD.pack(layout.REPLAY_META.itemsize, len(data), 0, 0, 0, 0)
        result = libbpf.test_run(self.fd, data, context)
        assert (result.retval, result.data) == (XDP_PASS, data)


def _clear_hash(fd: int, key_bytes: int, value_bytes: int) -> None:
    capacity = 20000
    keys = ct.create_string_buffer(capacity * key_bytes)
    values = ct.create_string_buffer(capacity * value_bytes)
    count, token = libbpf.map_lookup_batch(fd, None, keys, values, capacity)
    assert token is None
    raw = keys.raw
    for start in range(0, count * key_bytes, key_bytes):
        libbpf.map_delete(fd, raw[start : start + key_bytes])


def clear(dataplane: Dataplane) -> None:
    """Forget all flows, pairs, requests in flight, slots of flows and frame counters."""
    fds = dataplane.map_fds
    _clear_hash(fds["flows"], layout.FLOW_KEY.itemsize, layout.FLOW_STATS.itemsize)
    _clear_hash(fds["pairs"], layout.FLOW_KEY.itemsize, layout.PAIR.itemsize)
    _clear_hash(fds["inflight"], layout.INFLIGHT_KEY.itemsize, layout.INFLIGHT.itemsize)
    if "assignments" in fds:  # the replay build acts on nothing
        _clear_hash(fds["assignments"], layout.FLOW_KEY.itemsize, 4)
    for port in range(layout.MAX_PORTS):
        tables.clear_reasons(fds["reasons"], port)
