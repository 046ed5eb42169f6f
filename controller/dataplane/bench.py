"""What the dataplane costs: ns per packet by BPF_PROG_TEST_RUN, beside yardsticks.

For each hook, packet and number of flows one *scenario* is measured: fresh maps, then
rounds in which every program runs in turn, so that a change of clock rate or a busy
neighbour meets all of them. The yardsticks (``bpf/bench.c``) do nothing, parse, or parse
and look one flow up; ``observe`` is the program that the controller attaches to observe, and
``full`` the same when it acts: every flow belongs to a job, and everything is on
(``bench_control.py``).

Each repetition carries the next PSN of the next flow (``bpf/spread.h``). An ACK costs
what it costs in traffic: its queue pair is known, the request that it answers was sent
just before through the opposite hook, and both flow entries are found. After every run
the maps are read: a run whose packets were not all counted, classed, rewritten, marked
and paced raises an error instead of reporting a time.

A repeated test run goes on with the packet that the last repetition has changed; the
parsed packet is set back, so that DSCP and BECN are written each time. More flows than
the dataplane has slots for (16,383) share them.

The 4 KB packet of the tc hooks is the head of a frame whose headers say 4 KB: the kernel
takes at most one page less its overhead for a tc test run. No program reads beyond the
headers, so the time is that of the whole frame. XDP gets the whole frame, in two buffers.
"""

from __future__ import annotations

import os
import statistics
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from controller.dataplane import layout, libbpf, tables
from controller.dataplane.bench_control import BenchControl
from controller.dataplane.bench_report import (
    COUNTING,
    HOOKS,
    PACKETS,
    PROGRAMS,
    BenchReport,
    BenchResult,
    machine_facts,
)
from controller.dataplane.compile import Artifact, compile_programs
from controller.dataplane.layout import Direction, Kind, PairState
from controller.dataplane.loader import (
    SOURCES,
    TC_EGRESS,
    TC_INGRESS,
    XDP_INGRESS,
    Dataplane,
)
from controller.errors import InputError, StellarError

DEFAULT_REPEAT = 200_000
DEFAULT_ROUNDS = 5
DEFAULT_FLOWS = (1, 50_000)

_FUNCTIONS: Mapping[str, Mapping[str, str]] = {
    "xdp_ingress": {
        "empty": "stellar_xdp_empty",
        "parse": "stellar_xdp_parse",
        "lookup": "stellar_xdp_lookup",
        "observe": XDP_INGRESS,
        "full": XDP_INGRESS,
    },
    "tc_ingress": {
        "empty": "stellar_tc_empty",
        "parse": "stellar_tc_parse_in",
        "lookup": "stellar_tc_lookup_in",
        "observe": TC_INGRESS,
        "full": TC_INGRESS,
    },
    "tc_egress": {
        "empty": "stellar_tc_empty",
        "parse": "stellar_tc_parse_out",
        "lookup": "stellar_tc_lookup_out",
        "observe": TC_EGRESS,
        "full": TC_EGRESS,
    },
}
# What a lookup returns when it found its flow: XDP_PASS, TC_ACT_UNSPEC.
_FOUND = {"xdp_ingress": 2, "tc_ingress": 0xFFFFFFFF, "tc_egress": 0xFFFFFFFF}

_SPREAD_FIRST_QPN = 17  # bpf/spread.h
_PSN_MASK = 0xFFFFFF
_OPCODE_WRITE_ONLY = 0x0A
_OPCODE_ACKNOWLEDGE = 0x11
_ROCE_PORT = 4791
_RETH_BYTES = 16
_PAYLOAD_BYTES = 4096
_ECT0, _CE = 2, 3
# Of the frame in a tc test run: less than one page with skb overhead on every kernel.
_TC_HEAD_BYTES = 2048
_LOCAL = bytes([10, 0, 0, 1])
_REMOTE = bytes([10, 0, 0, 2])
_V4_MAPPED = b"\0" * 10 + b"\xff\xff"


def build_frame(
    source: bytes, destination: bytes, packet: str, ack_request: bool = False, ecn: int = _ECT0
) -> bytes:
    """Build an Ethernet frame with a RoCEv2 packet over IPv4.

    Parameters
    ----------
    source, destination
        IPv4 addresses, 4 bytes each.
    packet
        ``ack`` (RC Acknowledge) or ``data4k`` (RC RDMA WRITE Only, 4096 bytes: a message
        of its own, so its class is chosen).
    ack_request
        Sets the BTH's AckReq bit.
    ecn
        ECN codepoint.

    Returns
    -------
    bytes
        The frame without FCS; queue pair and PSN are 0, and so is the ICRC, which no
        program here reads.
    """
    if packet == "ack":
        opcode, behind_bth = _OPCODE_ACKNOWLEDGE, b"\x1f" + bytes(3)
    else:
        reth = bytes(_RETH_BYTES - 4) + struct.pack(">I", _PAYLOAD_BYTES)
        opcode, behind_bth = _OPCODE_WRITE_ONLY, reth + bytes(_PAYLOAD_BYTES)
    bth = struct.pack(">BBHII", opcode, 0, 0xFFFF, 0, ack_request << 31)
    udp_payload = bth + behind_bth + bytes(4)
    udp = struct.pack(">HHHH", 50000, _ROCE_PORT, 8 + len(udp_payload), 0)
    ip_len = 20 + len(udp) + len(udp_payload)
    fields = [0x45, ecn, ip_len, 0, 0x4000, 64, 17]  # do not fragment
    header = struct.pack(">BBHHHBBH4s4s", *fields, 0, source, destination)
    total = sum(struct.unpack(">10H", header))
    total = (total & 0xFFFF) + (total >> 16)
    checksum = ~(total + (total >> 16)) & 0xFFFF
    header = header[:10] + struct.pack(">H", checksum) + header[12:]
    ethernet = bytes.fromhex("020000000002 020000000001 0800")
    return ethernet + header + udp + udp_payload


class _Scenario:
    """Maps and programs for one hook, packet and number of flows.

    A *position* is a number of repetitions since the scenario began; ``bpf/spread.h``
    makes flow and PSN of it.
    """

    def __init__(self, artifact: Artifact, hook: str, packet: str, flows: int) -> None:
        self.hook, self.packet, self.flows = hook, packet, flows
        self.direction = Direction.EGRESS if hook == "tc_egress" else Direction.INGRESS
        near, far = (_LOCAL, _REMOTE) if hook == "tc_egress" else (_REMOTE, _LOCAL)
        whole = build_frame(near, far, packet)
        self.wire_bytes = len(whole)
        self.frame = whole if hook == "xdp_ingress" else whole[:_TC_HEAD_BYTES]
        # Marked: an ACK that leaves has something to tell the sender.
        request = build_frame(far, near, "data4k", ack_request=True, ecn=_CE)
        self._request = request[:_TC_HEAD_BYTES]
        self._position = self._acted = 0
        # Packets that the flow table gained by each program.
        self.counted = dict.fromkeys(COUNTING, 0)
        self._cpus = libbpf.possible_cpus()
        self._dataplane = Dataplane(artifact, max(layout.MAX_FLOWS, 2 * flows))
        self._fds: dict[str, int] = {}
        try:
            for program, function in _FUNCTIONS[hook].items():
                self._fds[program] = self._dataplane.load(function, 0, acts=program == "full")
            self._control = BenchControl(self._dataplane.map_fds, flows)
            if packet == "ack":
                opposite = TC_INGRESS if hook == "tc_egress" else TC_EGRESS
                self._fds["request"] = self._dataplane.load(opposite, 0)
                self._write_pairs(near, far)
        except BaseException:
            self.close()
            raise

    def _write_pairs(self, near: bytes, far: bytes) -> None:
        """Both directions of each pair; a queue pair has one number at both ends here."""
        pairs = {}
        for source, destination, direction in (
            (near, far, self.direction),
            (far, near, Direction(self.direction ^ 1)),
        ):
            start = _V4_MAPPED + source + _V4_MAPPED + destination
            for qpn in range(_SPREAD_FIRST_QPN, _SPREAD_FIRST_QPN + self.flows):
                pairs[start + struct.pack("<IHBB", qpn, 0, direction, 0)] = qpn
        tables.write_pairs(self._dataplane.map_fds["pairs"], pairs)

    def _run(self, program: str, frame: bytes, repeat: int) -> libbpf.TestRun:
        """Run a program from the current position on."""
        value = struct.pack("<Q", self._position) * self._cpus
        libbpf.map_update(self._dataplane.map_fds["spread_count"], struct.pack("<I", 0), value)
        return libbpf.test_run(self._fds[program], frame, repeat=repeat, data_out_bytes=0)

    def measure(self, program: str, repeat: int) -> int:
        """Run `program` on `repeat` packets; returns ns per packet.

        Raises StellarError when the maps do not show what the program must have done.
        """
        if program not in COUNTING:
            run = self._run(program, self.frame, repeat)
            if program == "lookup" and run.retval != _FOUND[self.hook]:
                raise self._broken("lookup", f"returned {run.retval}: its flow was not found")
            return run.ns_per_run
        if self.packet == "ack":
            self._run("request", self._request, repeat)
        run = self._run(program, self.frame, repeat)
        self._position += repeat
        if program == "full":
            self._acted += repeat
        self._verify(program)
        return run.ns_per_run

    def warm_up(self, repeat: int) -> None:
        """Make all flows, and let the job have them: each measured packet is like the others."""
        self.measure("observe", max(repeat, 2 * self.flows))
        self._control.take_flows(_SPREAD_FIRST_QPN)
        self.measure("full", max(repeat, 2 * self.flows))

    def _broken(self, program: str, what: str) -> StellarError:
        return StellarError(
            f"Benchmark of {program} at {self.hook} ({self.packet}, {self.flows} flows): {what}.",
            "The figures would be wrong, so none are given; please report it.",
        )

    def _verify(self, program: str) -> None:
        keys, stats = tables.read_flows(self._dataplane.map_fds["flows"])
        own = stats[keys["direction"] == self.direction]
        packets = int(own["packets"].sum())
        self.counted[program] += packets - sum(self.counted.values())
        kind = Kind.ACK if self.packet == "ack" else Kind.WRITE
        checks: list[tuple[str, int, int]] = [
            ("flows", len(own), min(self.flows, self._position)),
            ("packets", packets, self._position),
            (f"{kind.name} packets", int(own["kinds"][:, kind].sum()), self._position),
        ]
        requests = own
        if self.packet == "ack":
            requests = stats[keys["direction"] != self.direction]
            known = int((own["pair_state"] == PairState.REGISTRY).sum())
            checks.append(("flows with a known pair", known, len(own)))
            checks.append(("requests", int(requests["packets"].sum()), self._position))
            answered = int((requests["acked_psn"] + 1 & _PSN_MASK == requests["next_psn"]).sum())
            checks.append(("flows with all requests acknowledged", answered, len(requests)))
        for member in ("gap_packets", "duplicates", "psn_resyncs"):
            checks.append((member, int(requests[member].sum()), 0))
        for what, found, expected in checks:
            if found != expected:
                raise self._broken(program, f"{found} {what}, expected {expected}")
        if program == "full":
            self._verify_acts()

    def _verify_acts(self) -> None:
        done, acted = self._control.work_done(), self._acted
        leaving = acted if self.direction == Direction.EGRESS else 0
        data = 0 if self.packet == "ack" else leaving
        checks = {
            "packets of the job": data,
            "packets of its class": data,
            "paced packets": data,
            "packets beyond the horizon": 0,
            "slots that DCQCN limits": self._control.slots,
            "bytes in the marker": leaving * self.wire_bytes,
            "payload of the iteration": data * _PAYLOAD_BYTES,
            "classed packets": leaving,
            "rewritten packets": leaving,
            "cuts": 0,
        }
        for what, expected in checks.items():
            if done[what] != expected:
                raise self._broken("full", f"{done[what]} {what}, expected {expected}")
        if (done["echoes"] > 0) != (leaving > data):
            raise self._broken("full", f"{done['echoes']} ACKs with an echo of marks")

    def close(self) -> None:
        """Release programs and maps."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        self._dataplane.close()


@contextmanager
def _one_cpu() -> Iterator[None]:
    """Keep this thread on one CPU: positions are counted by CPU, and caches stay warm."""
    allowed = os.sched_getaffinity(0)
    # The last one: interrupts of small machines mostly go to the first.
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _measure_scenario(scenario: _Scenario, repeat: int, rounds: int) -> list[BenchResult]:
    scenario.warm_up(repeat)
    times: dict[str, list[int]] = {program: [] for program in PROGRAMS}
    before = dict(scenario.counted)
    for _ in range(rounds):
        for program in PROGRAMS:
            times[program].append(scenario.measure(program, repeat))
    counted = {program: scenario.counted[program] - before[program] for program in COUNTING}
    return [
        BenchResult(
            hook=scenario.hook,
            program=program,
            packet=scenario.packet,
            flows=scenario.flows,
            ns_per_packet=min(times[program]),
            ns_median=float(statistics.median(times[program])),
            rounds=rounds,
            repeat=repeat,
            wire_bytes=scenario.wire_bytes,
            frame_bytes=len(scenario.frame),
            counted_packets=counted.get(program),
        )
        for program in PROGRAMS
    ]


def bench_dataplane(
    progress: Callable[[int, int], None] | None = None,
    repeat: int = DEFAULT_REPEAT,
    flows: Sequence[int] = DEFAULT_FLOWS,
    packets: Sequence[str] = PACKETS,
    rounds: int = DEFAULT_ROUNDS,
) -> BenchReport:
    """Measure every program at every hook.

    Parameters
    ----------
    progress
        Called with the scenarios done and their total.
    repeat
        Packets of one run.
    flows
        Numbers of flows to spread the packets over.
    packets
        Of PACKETS.
    rounds
        Runs of each program, in turn with the others.

    Returns
    -------
    BenchReport
        With one result for each number of flows, hook, packet and program.

    Raises
    ------
    InputError
        An argument is out of range.
    PrivilegeError, UnsupportedError
        This process or this kernel cannot load the programs.
    StellarError
        A run did not do to all its packets what it should.
    """
    if repeat < 1 or rounds < 1 or any(count < 1 for count in flows):
        raise InputError(
            f"repeat {repeat}, rounds {rounds}, flows {list(flows)}: all must be at least 1."
        )
    unknown = sorted(set(packets) - set(PACKETS))
    if unknown:
        raise InputError(f"Packet {unknown[0]!r} is unknown: it is one of {', '.join(PACKETS)}.")
    functions = sorted({name for programs in _FUNCTIONS.values() for name in programs.values()})
    results: list[BenchResult] = []
    total = len(flows) * len(HOOKS) * len(packets)
    for count in flows:
        artifact = compile_programs(
            ("bench.c", *SOURCES),
            functions,
            {"STELLAR_BENCH_FLOWS": str(count), "STELLAR_ALLOW_CUT": "1"},
        )
        for hook in HOOKS:
            for packet in packets:
                if progress:
                    progress(len(results) // len(PROGRAMS), total)
                scenario = _Scenario(artifact, hook, packet, count)
                try:
                    with _one_cpu():
                        results += _measure_scenario(scenario, repeat, rounds)
                finally:
                    scenario.close()
    if progress:
        progress(total, total)
    return BenchReport(tuple(results), machine_facts())
