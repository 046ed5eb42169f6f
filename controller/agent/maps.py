"""What the controller writes for the programs that act, and reads back from them.

Records go in and out as numbers here; what they mean is decided above. Every write is one
system call on one entry, so a packet sees the old or the new one (a plan: see `write_plan`).
"""

from __future__ import annotations

import ctypes as ct
import struct
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from controller.congestion.dcqcn import DcqcnParameters, Phase
from controller.dataplane import layout, libbpf
from controller.dataplane.layout import Act, DcqcnFlag, JobFlag, PhaseNumber, PortFlag
from controller.priority.jobs import JobPlan
from controller.priority.ranges import MAX_RATE_Bps

_Q8, _Q24, _Q32 = 1 << 8, 1 << 24, 1 << 32
_U32 = _Q32 - 1
_NS_PER_S = 10**9
_NO_PORT_FLAGS, _NO_JOB_FLAGS = PortFlag(0), JobFlag(0)
_PHASES = {
    PhaseNumber.IDLE: Phase.IDLE,
    PhaseNumber.BEGIN: Phase.BEGIN,
    PhaseNumber.MIDDLE: Phase.MIDDLE,
    PhaseNumber.END: Phase.END,
}


def drain_q24(rate_Bps: float) -> int:
    """A rate as the marker has it: bytes per ns << 24, at least 1."""
    return max(1, round(rate_Bps * _Q24 / _NS_PER_S))


def _key(index: int) -> bytes:
    return struct.pack("<I", index)


@dataclass(frozen=True)
class PortSettings:
    """What is done on one port.

    Parameters
    ----------
    flags
        What is switched on.
    link_Bps
        Its link; 0: not known (nothing that needs it may be switched on).
    priority_base
        0: each class's own ``skb->priority``; else class c gets ``priority_base + c``, the class
        ids of an HTB tree's leaves.
    drain_share
        Share of the link at which the port's virtual queue drains.
    slot_ns
        Slot of the marker's window of 16.
    horizon_ns
        No departure later than this from now.
    echo_interval_ns
        At most one echo a flow in it.
    """

    flags: PortFlag = _NO_PORT_FLAGS
    link_Bps: int = 0
    priority_base: int = 0
    drain_share: float = 0.95
    slot_ns: int = 62_500
    horizon_ns: int = _NS_PER_S
    echo_interval_ns: int = 50_000


@dataclass(frozen=True)
class ClassSettings:
    """One class on one port: what its packets carry, and when they are marked.

    ``drain_Bps`` is the rate of the class's own virtual queue.
    """

    dscp: int
    priority: int
    kmin_bytes: int
    kmax_bytes: int
    pmax: float
    drain_Bps: float


def write_port(fds: Mapping[str, int], port: int, settings: PortSettings) -> None:
    """Write what is done on a port."""
    record = np.zeros((), layout.PORT_CONTROL)
    record["flags"], record["priority_base"] = int(settings.flags), settings.priority_base
    record["link_Bps"] = settings.link_Bps
    record["drain_q24"] = drain_q24(settings.link_Bps * settings.drain_share)
    record["slot_ns"], record["horizon_ns"] = settings.slot_ns, settings.horizon_ns
    record["echo_interval_ns"] = settings.echo_interval_ns
    libbpf.map_update(fds["port_controls"], _key(port), record.tobytes())


def write_classes(fds: Mapping[str, int], port: int, classes: Sequence[ClassSettings]) -> None:
    """Write the eight classes of a port, lowest first."""
    for number, settings in enumerate(classes):
        record = np.zeros((), layout.CLASS_CONTROL)
        record["dscp"], record["priority"] = settings.dscp, settings.priority
        record["kmin_bytes"] = min(settings.kmin_bytes, _U32)
        record["kmax_bytes"] = min(settings.kmax_bytes, _U32)
        record["pmax_q32"] = min(round(settings.pmax * _Q32), _U32)
        record["drain_q24"] = drain_q24(settings.drain_Bps)
        libbpf.map_update(
            fds["class_controls"], _key(port * layout.CLASSES + number), record.tobytes()
        )


def write_dscp_classes(fds: Mapping[str, int], dscps: Sequence[int]) -> None:
    """Write which class a DSCP belongs to; `dscps` are those of class 0, 1, .. 7."""
    for dscp in range(64):
        number = dscps.index(dscp) if dscp in dscps else layout.CLASS_UNSET
        libbpf.map_update(fds["dscp_classes"], _key(dscp), _key(number))


def write_laxity(
    fds: Mapping[str, int], raise_ns: Sequence[int], lower_ns: Sequence[int], drained: bool
) -> None:
    """Write the laxity policy: thresholds in ns, 7 each, falling.

    `drained`: a flow rises only when all that it sent is acknowledged.
    """
    record = np.zeros((), layout.LAXITY_CONTROL)
    record["raise_ns"], record["lower_ns"], record["raise_drained"] = raise_ns, lower_ns, drained
    libbpf.map_update(fds["laxity_controls"], _key(0), record.tobytes())


def dcqcn_record(parameters: DcqcnParameters, prediction: bool, phases: bool) -> np.ndarray:
    """The reaction point's constants as the dataplane has them, dtype DCQCN_CONTROL."""
    record = np.zeros((), layout.DCQCN_CONTROL)
    for name in ("link_Bps", "min_rate_Bps", "rate_ai_Bps", "rate_hai_Bps"):
        record[name] = max(1, round(getattr(parameters, name)))
    for name in ("timer_ns", "alpha_update_ns", "decrease_interval_ns", "fast_recovery_steps"):
        record[name] = getattr(parameters, name)
    record["byte_counter"] = parameters.byte_counter_bytes
    record["initial_alpha_q32"] = round(parameters.initial_alpha * _Q32)
    record["g_q32"] = min(max(1, round(parameters.g * _Q32)), _U32)
    record["max_decrease_q24"] = round((1 - parameters.min_decrease_factor) * _Q24)
    record["first_cut_Bps"] = round(parameters.first_cut_rate_Bps)
    record["flags"] = DcqcnFlag.PREDICTION * prediction | DcqcnFlag.PHASES * phases
    steps = parameters.phase_steps
    for number, phase in _PHASES.items():
        record["phase_q8"][number] = round(steps.multiplier(phase) * _Q8)
    record["begin_q8"] = round(steps.begin_share * _Q8)
    record["end_q8"] = round(steps.end_share * _Q8)
    return record


def write_dcqcn(
    fds: Mapping[str, int],
    port: int,
    parameters: DcqcnParameters,
    prediction: bool = True,
    phases: bool = True,
) -> None:
    """Write the reaction point's constants for a port's link."""
    record = dcqcn_record(parameters, prediction, phases)
    libbpf.map_update(fds["dcqcn_controls"], _key(port), record.tobytes())


@dataclass(frozen=True)
class JobSettings:
    """A job as the dataplane knows it; ``pace_Bps`` 0: no pacing."""

    flags: JobFlag = _NO_JOB_FLAGS
    class_default: int = 3
    class_floor: int = 0
    class_ceiling: int = 6
    pace_Bps: int = 0
    gap_ns: int = 0


def write_job(fds: Mapping[str, int], job: int, settings: JobSettings) -> None:
    """Write a job's settings; its plan stays."""
    record = np.zeros((), layout.JOB_SETTINGS)
    record["flags"] = int(settings.flags)
    for name in ("class_default", "class_floor", "class_ceiling", "pace_Bps", "gap_ns"):
        record[name] = getattr(settings, name)
    record["plan_buffer"] = _plan_buffer(fds, job)
    libbpf.map_update(fds["jobs"], _key(job), record.tobytes())


def _plan_buffer(fds: Mapping[str, int], job: int) -> int:
    raw = libbpf.map_lookup(fds["jobs"], _key(job), layout.JOB_SETTINGS.itemsize)
    return int(np.frombuffer(raw, layout.JOB_SETTINGS)[0]["plan_buffer"]) if raw else 0


def write_plan(
    fds: Mapping[str, int],
    job: int,
    plan: JobPlan | None,
    predicted_Bps: float = 0.0,
    is_predicted: bool = True,
) -> None:
    """Write what is expected of a job's iteration; None takes its plan away.

    A plan is longer than what the kernel copies at once. It goes where no packet looks, then
    one byte switches over.

    Parameters
    ----------
    predicted_Bps
        Rate of one of its flows: start and floor of DCQCN's target rate; 0: unknown.
    is_predicted
        Whether its bytes mean something: else the dataplane has no phases of the window.
    """
    buffer = 1 - _plan_buffer(fds, job)
    record = np.zeros((), layout.JOB_PLAN)
    if plan is not None:
        record["expected_bytes"] = plan.wire_bytes if is_predicted else 0
        for name in ("window_start_ns", "deadline_ns", "valid_until_ns", "rate_Bps", "gap_ns",
                     "class_floor", "class_ceiling"):  # fmt: skip
            record[name] = getattr(plan, name)
        record["pace_Bps"] = plan.rate_Bps if plan.pace else 0
        record["predicted_Bps"] = min(round(predicted_Bps), MAX_RATE_Bps)
    libbpf.map_update(fds["plans"], _key(job * 2 + buffer), record.tobytes())
    raw = libbpf.map_lookup(fds["jobs"], _key(job), layout.JOB_SETTINGS.itemsize)
    settings = np.frombuffer(raw or bytes(layout.JOB_SETTINGS.itemsize), layout.JOB_SETTINGS).copy()
    settings["plan_buffer"] = buffer
    libbpf.map_update(fds["jobs"], _key(job), settings.tobytes())


def read_plan(fds: Mapping[str, int], job: int, name: str) -> JobPlan | None:
    """The plan that a job was given last, its bytes as they go on the wire; None without one."""
    key = _key(job * 2 + _plan_buffer(fds, job))
    raw = libbpf.map_lookup(fds["plans"], key, layout.JOB_PLAN.itemsize)
    record = np.frombuffer(raw or bytes(layout.JOB_PLAN.itemsize), layout.JOB_PLAN)[0]
    if not record["expected_bytes"]:
        return None
    numbers = {
        field: int(record[field])
        for field in ("expected_bytes", "window_start_ns", "deadline_ns", "valid_until_ns",
                      "rate_Bps", "gap_ns", "class_floor", "class_ceiling")
    }  # fmt: skip
    return JobPlan(name, **numbers, pace=bool(record["pace_Bps"]))


def read_progress(fds: Mapping[str, int], job: int) -> np.void:
    """How far a job is, dtype JOB_PROGRESS."""
    raw = libbpf.map_lookup(
        fds["progress"], _key(job), layout.JOB_PROGRESS.itemsize, libbpf.BPF_F_LOCK
    )
    assert raw is not None  # an array
    record: np.void = np.frombuffer(raw, layout.JOB_PROGRESS)[0]
    return record


def clear_progress(fds: Mapping[str, int], job: int) -> None:
    """A job's number goes to another job: nothing of the old one stays."""
    libbpf.map_update(fds["progress"], _key(job), bytes(layout.JOB_PROGRESS.itemsize))
    for port in range(layout.MAX_PORTS):
        libbpf.map_update(fds["job_departures"], _key(job * layout.MAX_PORTS + port), bytes(8))


def hold_departures(fds: Mapping[str, int], job: int, ports: Iterable[int], until_ns: int) -> None:
    """Nothing of a job departs from these ports before `until_ns` (CLOCK_MONOTONIC)."""
    for port in ports:
        key = _key(job * layout.MAX_PORTS + port)
        libbpf.map_update(fds["job_departures"], key, struct.pack("<Q", until_ns))


# ---- flows ----


def write_control(fds: Mapping[str, int], slot: int, job: int) -> None:
    """A slot's first state: a flow of `job` that has sent nothing under control yet."""
    record = np.zeros((), layout.FLOW_CONTROL)
    record["job"], record["class"] = job, layout.CLASS_UNSET
    libbpf.map_update(fds["controls"], _key(slot), record.tobytes())


def read_control(fds: Mapping[str, int], slot: int) -> np.void:
    """State of one flow, dtype FLOW_CONTROL."""
    raw = libbpf.map_lookup(
        fds["controls"], _key(slot), layout.FLOW_CONTROL.itemsize, libbpf.BPF_F_LOCK
    )
    assert raw is not None  # an array
    record: np.void = np.frombuffer(raw, layout.FLOW_CONTROL)[0]
    return record


def assign(fds: Mapping[str, int], key: bytes, slot: int) -> None:
    """An outgoing flow has a slot from the next `begin_epoch` on."""
    libbpf.map_update(fds["assignments"], key, _key(slot))


def unassign(fds: Mapping[str, int], key: bytes) -> None:
    """An outgoing flow belongs to no job from the next `begin_epoch` on."""
    libbpf.map_delete(fds["assignments"], key)


def read_assignments(fds: Mapping[str, int]) -> dict[bytes, int]:
    """Flow key -> slot of all outgoing flows of jobs."""
    keys = np.empty(layout.MAX_CONTROLS, layout.FLOW_KEY)
    slots = np.empty(layout.MAX_CONTROLS, "<u4")
    count, _ = libbpf.map_lookup_batch(
        fds["assignments"],
        None,
        keys.ctypes.data_as(ct.c_void_p),
        slots.ctypes.data_as(ct.c_void_p),
        layout.MAX_CONTROLS,
    )
    return {key.tobytes(): int(slot) for key, slot in zip(keys[:count], slots[:count], strict=True)}


def begin_epoch(fds: Mapping[str, int]) -> None:
    """Let every flow look its slot up anew with its next packet."""
    raw = libbpf.map_lookup(fds["control_epoch"], _key(0), 4)
    assert raw is not None  # an array
    # Flows outlive this map where nothing acted: count from a number that none of them has.
    last = struct.unpack("<I", raw)[0] or time.monotonic_ns() >> 16 & _U32
    epoch = (last + 1) & _U32
    # A new flow has epoch 0, which must never be the one in force.
    libbpf.map_update(fds["control_epoch"], _key(0), _key(epoch or 1))


def write_crc32_table(fds: Mapping[str, int]) -> None:
    """Write the CRC-32 of each byte (IEEE 802.3, reflected), for the ICRC of CNPs."""
    for byte in range(256):
        # zlib inverts before and behind: undone, this is the table's entry.
        entry = zlib.crc32(bytes([byte ^ 0xFF])) ^ _U32 ^ 0x00FFFFFF
        libbpf.map_update(fds["crc32_table"], _key(byte), _key(entry))


# ---- what was done ----


def read_acts(fds: Mapping[str, int], port: int) -> dict[Act, int]:
    """What was done on a port, zeros left out."""
    result = {}
    cpus = libbpf.possible_cpus()
    for act in Act:
        raw = libbpf.map_lookup(fds["acts"], _key(port * len(Act) + act), 8 * cpus)
        total = sum(struct.unpack(f"<{cpus}Q", raw)) if raw else 0
        if total:
            result[act] = total
    return result


def clear_port(fds: Mapping[str, int], port: int) -> None:
    """A port's number goes to another interface: its counters and queues start anew."""
    zeros = bytes(8 * libbpf.possible_cpus())
    for act in Act:
        libbpf.map_update(fds["acts"], _key(port * len(Act) + act), zeros)
    for number in range(layout.MARKERS_PER_PORT):
        index = port * layout.MARKERS_PER_PORT + number
        libbpf.map_update(fds["markers"], _key(index), bytes(layout.MARKER.itemsize))
    libbpf.map_update(fds["port_controls"], _key(port), bytes(layout.PORT_CONTROL.itemsize))


def read_marker(fds: Mapping[str, int], port: int, number: int = layout.CLASSES) -> np.void:
    """Virtual queue of a class of a port, or of the whole port (CLASSES), dtype MARKER."""
    raw = libbpf.map_lookup(
        fds["markers"],
        _key(port * layout.MARKERS_PER_PORT + number),
        layout.MARKER.itemsize,
        libbpf.BPF_F_LOCK,
    )
    assert raw is not None  # an array
    record: np.void = np.frombuffer(raw, layout.MARKER)[0]
    return record
