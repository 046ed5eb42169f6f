"""Results of ``controller bench dataplane``: JSON and text."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HOOKS = ("xdp_ingress", "tc_ingress", "tc_egress")
PACKETS = ("ack", "data4k")
PROGRAMS = ("empty", "parse", "lookup", "observe", "full")
# Those that count their packets.
COUNTING = ("observe", "full")
# The promise: accounting costs at most this many times a parse with one flow lookup,
# when one flow is in the table.
RATIO_LIMIT = 2.5
# And acting on an outgoing packet, with everything on, at most this many times the accounting.
FULL_RATIO_LIMIT = 2.0


@dataclass(frozen=True)
class BenchResult:
    """Time of one program at one hook for one packet and number of flows.

    Parameters
    ----------
    hook, program, packet
        One of HOOKS, PROGRAMS and PACKETS.
    flows
        Flows that the packets are spread over.
    ns_per_packet, ns_median
        Lowest and median time of one packet over the rounds, in ns.
    rounds, repeat
        Runs, and packets in each of them.
    wire_bytes, frame_bytes
        Length of the packet as its headers tell, and of the part the test run was given.
    counted_packets
        Packets that the flow table gained during the measured runs; None for programs
        that count nothing.
    """

    hook: str
    program: str
    packet: str
    flows: int
    ns_per_packet: int
    ns_median: float
    rounds: int
    repeat: int
    wire_bytes: int
    frame_bytes: int
    counted_packets: int | None


@dataclass(frozen=True)
class BenchReport:
    """All results of one run, and the machine that gave them."""

    results: tuple[BenchResult, ...]
    machine: Mapping[str, Any]

    def _scenarios(self) -> dict[tuple[str, str, int], dict[str, BenchResult]]:
        scenarios: dict[tuple[str, str, int], dict[str, BenchResult]] = {}
        for result in self.results:
            key = (result.hook, result.packet, result.flows)
            scenarios.setdefault(key, {})[result.program] = result
        return scenarios

    def ratios(self, program: str = "observe", base: str = "lookup") -> list[dict[str, Any]]:
        """Time of one program over that of another, both the lowest of their rounds."""
        return [
            {"hook": hook, "packet": packet, "flows": flows, "ratio": _ratio(found, program, base)}
            for (hook, packet, flows), found in self._scenarios().items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        return {
            "machine": dict(self.machine),
            "results": [asdict(result) for result in self.results],
            "ratio_observe_to_lookup": self.ratios(),
            "ratio_limit_one_flow": RATIO_LIMIT,
            "ratio_full_to_observe": self.ratios("full", "observe"),
            "ratio_limit_full_egress": FULL_RATIO_LIMIT,
        }

    def to_text(self) -> str:
        """Return a table of at most 80 columns: lowest ns per packet, and the ratio."""
        machine = self.machine
        first = self.results[0]
        lines = [
            f"{machine['cpu']}, {machine['cpus']} CPUs, Linux {machine['kernel']}, "
            f"BPF {machine['bpf_jit']}"[:80],
            f"ns per packet, lowest of {first.rounds} rounds of {first.repeat:,} packets",
            "",
            f"{'hook':<12}{'packet':<7}{'flows':>7}"
            + "".join(f"{program:>8}" for program in PROGRAMS)
            + f"{'o / l':>7}{'f / o':>7}",
        ]
        for (hook, packet, flows), programs in self._scenarios().items():
            lines.append(
                f"{hook:<12}{packet:<7}{flows:>7,}"
                + "".join(f"{programs[program].ns_per_packet:>8}" for program in PROGRAMS)
                + f"{_ratio(programs, 'observe', 'lookup'):>7.2f}"
                + f"{_ratio(programs, 'full', 'observe'):>7.2f}"
            )
        lines += [
            "",
            f"o / l: observe / lookup; at most {RATIO_LIMIT} is expected for one flow.",
            f"f / o: full / observe; at most {FULL_RATIO_LIMIT} is expected at tc_egress, where it",
            "classes, rewrites, marks or echoes, limits (DCQCN) and paces every packet.",
            "More flows than 16,383 share the slots of flow state.",
            "An ACK updates two flows, its own and the one of the request it answers.",
            "data4k at tc: the head of the frame, whose headers say 4 KB.",
        ]
        return "\n".join(lines)


def _ratio(results: Mapping[str, BenchResult], program: str, base: str) -> float:
    return round(results[program].ns_per_packet / max(1, results[base].ns_per_packet), 2)


def machine_facts() -> dict[str, Any]:
    """Tell what the times depend on: CPU, kernel, and how it runs BPF."""
    cpu = platform.machine()
    cpus = 0
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        cpus += name.strip() == "processor"
        if name.strip() == "model name":
            cpu = value.strip()
    return {
        "cpu": cpu,
        "cpus": cpus,
        "kernel": platform.release(),
        "bpf_jit": _jit(),
        "bpf_stats_enabled": _sysctl("kernel/bpf_stats_enabled") == "1",
        "clock_source": _read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
    }


def _jit() -> str:
    jit = _sysctl("net/core/bpf_jit_enable")
    hardened = " hardened" if _sysctl("net/core/bpf_jit_harden") == "2" else ""
    return {"": "JIT unknown", "0": "interpreted"}.get(jit, f"JIT on{hardened}")


def _sysctl(name: str) -> str:
    return _read(f"/proc/sys/{name}")


def _read(path: str) -> str:
    """Read a one-line file; empty where this kernel has none or root is needed."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
