"""Replay of a capture through the very BPF program that watches live traffic.

Each frame's head goes through BPF_PROG_TEST_RUN, preceded by struct replay_meta as XDP
metadata: the capture's time and the frame's own length. What the program then has in
its maps is the result; Python parses no packet.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from controller.dataplane import layout, libbpf, tables
from controller.dataplane.compile import Artifact, compile_programs
from controller.dataplane.layout import Direction, Reason
from controller.dataplane.loader import XDP_INGRESS, Dataplane
from controller.errors import InputError, StellarError
from controller.observe.capture import Capture, Record, wrong_link_type
from controller.observe.snapshot import Port, Snapshot

# bpf/roce.h looks for UDP at 511 bytes at most, and reads 48 bytes of headers behind it.
HEAD_BYTES = 1024
# BPF_PROG_TEST_RUN for XDP refuses shorter frames, which cannot be Ethernet either.
_MIN_FRAME_BYTES = 14
# The flow table is preallocated, about 1 KB a flow: the first size holds nearly every capture
# and is there in no time; one that needs more is read a second time.
_FIRST_MAX_FLOWS = layout.MAX_FLOWS
_LARGEST_MAX_FLOWS = 1 << 20
_XDP_PASS = 2
_PROGRESS_EVERY_FRAMES = 8192
_OPCODES = 256
_U64_MASK = (1 << 64) - 1
_NOT_IGNORED = (Reason.ROCE, Reason.ROCEV1)

ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True)
class Replay:
    """What a capture holds.

    ``frames`` = ``rocev2_packets`` + ``rocev1_packets`` + the sum of ``ignored``.
    Times are the capture's own (ns since its epoch); ``first_ns`` and ``last_ns`` are the
    earliest and latest, 0 without frames.
    """

    snapshot: Snapshot
    frames: int
    rocev2_packets: int
    rocev1_packets: int
    ignored: dict[str, int]
    opcodes: dict[str, int]
    cut_packets: int
    first_ns: int
    last_ns: int
    backward_timestamps: int
    truncated_file: bool


def replay(path: str | Path, progress: ProgressCallback | None = None) -> Replay:
    """Replay a capture file.

    Parameters
    ----------
    path
        pcap or pcapng, plain or gzip.
    progress
        Called now and then with (bytes read, size of the file), and at the end.

    Raises
    ------
    InputError
        Not a capture, or no Ethernet in it.
    PrivilegeError
        BPF needs root.
    """
    with Capture(path) as capture:  # says what is wrong with the file before anything else
        artifact = compile_programs(
            ("xdp_ingress.c",),
            (XDP_INGRESS,),
            {"STELLAR_REPLAY": "1", "STELLAR_ALLOW_CUT": "1"},
        )
        result = _replay_once(capture, artifact, _FIRST_MAX_FLOWS, progress)
    too_many = result.ignored.get(Reason.FLOW_TABLE_FULL.name.lower(), 0)
    if not too_many:
        return result
    # No more flows than packets.
    max_flows = min(result.rocev2_packets + too_many, _LARGEST_MAX_FLOWS)
    with Capture(path) as capture:
        try:
            return _replay_once(capture, artifact, max_flows, progress)
        except StellarError:  # no memory for so many: the first result says what is missing
            return result


def _replay_once(
    capture: Capture, artifact: Artifact, max_flows: int, progress: ProgressCallback | None
) -> Replay:
    machine = _Machine(capture.path.name, artifact, max_flows)
    try:
        return _run(capture, machine, progress)
    finally:
        machine.close()


class _Machine:
    """The replay program, one copy an interface of the capture."""

    def __init__(self, file_name: str, artifact: Artifact, max_flows: int) -> None:
        self._file_name = file_name
        self._dataplane = Dataplane(artifact, max_flows)
        self._program_fds: list[int] = []
        self._labels: list[str] = []
        self._port_of: dict[str, int] = {}

    def port(self, interface: str) -> int:
        """Number of the port for an interface of the capture, made when it is new.

        Interfaces beyond MAX_PORTS share the last number.
        """
        number = self._port_of.get(interface)
        if number is None:
            number = min(len(self._labels), layout.MAX_PORTS - 1)
            if number == len(self._labels):
                self._program_fds.append(self._dataplane.load(XDP_INGRESS, number))
                self._labels.append(interface)
            self._port_of[interface] = number
        return number

    def run(self, port: int, record: Record) -> None:
        """Give one frame to the program."""
        frame = record.frame or b""
        data = struct.pack("<QII", record.time_ns, record.wire_len, 0) + frame[:HEAD_BYTES]
        # struct xdp_md: `data` = length of the metadata, `data_end` = all of it.
        context = struct.pack("<6I", layout.REPLAY_META.itemsize, len(data), 0, 0, 0, 0)
        result = libbpf.test_run(self._program_fds[port], data, context, data_out_bytes=0)
        if result.retval != _XDP_PASS:
            raise StellarError(f"The replay program returned {result.retval}, not XDP_PASS.")

    def snapshot(self, taken_ns: int, unparsed: Counter[int]) -> Snapshot:
        """Everything counted; `unparsed` are frames too short to run, by port."""
        keys, stats = tables.read_flows(self._dataplane.map_fds["flows"])
        frames: dict[tuple[int, Direction], dict[Reason, int]] = {}
        ports = {}
        for number, label in enumerate(self._labels):
            name = f"{self._file_name}:{label}" if label else self._file_name
            ports[number] = Port(number, name)
            reasons = tables.read_reasons(
                self._dataplane.map_fds["reasons"], number, Direction.INGRESS
            )
            if unparsed[number]:
                reasons[Reason.TRUNCATED] = reasons.get(Reason.TRUNCATED, 0) + unparsed[number]
            frames[(number, Direction.INGRESS)] = reasons
        if not ports:
            ports[0] = Port(0, self._file_name)
        # By time of the first packet: a hash table has no order of its own.
        order = np.lexsort((keys["dqpn"], stats["first_ns"]))
        return Snapshot(taken_ns, ports, keys[order], stats[order], frames, is_capture=True)

    def opcodes(self) -> dict[str, int]:
        """RoCEv2 packets by BTH opcode, as ``0x04``."""
        fd = self._dataplane.map_fds["opcodes"]
        result = {}
        for opcode in range(_OPCODES):
            raw = libbpf.map_lookup(fd, struct.pack("<I", opcode), 8)
            count = int.from_bytes(raw or b"", "little")
            if count:
                result[f"0x{opcode:02x}"] = count
        return result

    def close(self) -> None:
        """Give the kernel its memory back."""
        for fd in self._program_fds:
            os.close(fd)
        self._dataplane.close()


def _run(capture: Capture, machine: _Machine, progress: ProgressCallback | None) -> Replay:
    frames = other_links = backward = 0
    first_ns, last_ns, previous_ns = _U64_MASK, 0, 0
    unparsed: Counter[int] = Counter()
    for record in capture:
        frames += 1
        time_ns = record.time_ns
        if time_ns < previous_ns:
            backward += 1
        previous_ns = time_ns
        first_ns, last_ns = min(first_ns, time_ns), max(last_ns, time_ns)
        if record.frame is None:
            other_links += 1
            continue
        port = machine.port(record.interface)
        if len(record.frame) < _MIN_FRAME_BYTES:
            unparsed[port] += 1
        else:
            machine.run(port, record)
        if progress and not frames % _PROGRESS_EVERY_FRAMES:
            progress(capture.done_bytes, capture.total_bytes)
    if frames and frames == other_links:
        raise wrong_link_type(capture.path, capture.link_types)
    if progress:
        progress(capture.total_bytes, capture.total_bytes)
    if not frames and capture.truncated:
        raise InputError(
            f"{capture.path} ends inside its first record.", "Capture or copy it again."
        )

    snapshot = machine.snapshot(last_ns, unparsed)
    reasons: Counter[Reason] = Counter()
    for counts in snapshot.frames.values():
        reasons.update(counts)
    ignored = {r.name.lower(): n for r, n in sorted(reasons.items()) if r not in _NOT_IGNORED}
    if other_links:
        ignored["other_link_type"] = other_links
    return Replay(
        snapshot=snapshot,
        frames=frames,
        rocev2_packets=reasons[Reason.ROCE],
        rocev1_packets=reasons[Reason.ROCEV1],
        ignored=ignored,
        opcodes=machine.opcodes(),
        cut_packets=int(snapshot.stats["cut_packets"].sum()),
        first_ns=first_ns if frames else 0,
        last_ns=last_ns,
        backward_timestamps=backward,
        truncated_file=capture.truncated,
    )
