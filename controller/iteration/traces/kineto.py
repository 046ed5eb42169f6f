"""Traces of the PyTorch profiler (Kineto): communication kernels on the GPU's clock.

What a kernel did is told by its own arguments (PyTorch >= 2.3) or by the call on the CPU that
launched it; its name comes last, since RCCL calls every kernel "Generic" and NCCL runs all-to-all
as SendRecv.
"""

from __future__ import annotations

import bisect
import collections
import decimal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from controller.iteration.series import Collective, Trace
from controller.iteration.traces.names import canonical_op, payload_bytes, tensors_bytes
from controller.iteration.traces.source import MAX_ROWS, TraceSource

_KERNELS = ("kernel",)
_RUNTIMES = ("cuda_runtime", "cuda_driver", "runtime", "hip_runtime")
_LIBRARIES = ("nccl", "rccl")
_STEP = "ProfilerStep#"
# Calls nest c10d:: > record_param_comms > nccl:, and a coalescing manager around them.
_NESTING = 8
_NS_PER_US = 1_000
# 2^63 ns is the year 2262; also keeps "1e999999999" from becoming an integer.
_MAX_TIME_US = 2**63 // _NS_PER_US


class _Call(NamedTuple):
    """A call of a collective on a CPU thread."""

    start_ns: int
    end_ns: int
    op: str
    bytes: int | None
    communicator: str


class _Kernel(NamedTuple):
    start_ns: int
    end_ns: int
    correlation: int
    device: object
    name: str
    call: _Call | None


@dataclass
class _Events:
    """What is kept of the trace: some hundred bytes for each launch, nothing of the rest."""

    kernels: list[_Kernel] = field(default_factory=list)
    # Correlation -> (thread, begin) of the launch.
    launches: dict[int, tuple[object, int]] = field(default_factory=dict)
    calls: dict[object, list[_Call]] = field(default_factory=dict)
    # Number of the step -> begin and end on the CPU.
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)
    first_ns: int | None = None
    count: int = 0


def read_kineto(source: TraceSource, prefix: str = "traceEvents.item") -> Trace:
    """Collectives of one rank from a profiler trace.

    Parameters
    ----------
    source
        JSON: an object with ``traceEvents``, or a bare list of events.
    prefix
        ``traceEvents.item``, or ``item`` for the list.

    Returns
    -------
    Trace
        Times count from the first ProfilerStep, or else from the first event. `bytes` is the
        input of this rank: what it gives to an all-gather, not what it gets. `iteration` is the
        ProfilerStep during which the CPU launched the kernel; the GPU may be a step behind.

    Raises
    ------
    InputError
        Not JSON, cut, or no communication kernel in it.
    """
    events = _Events()
    for event in source.json_values(prefix):
        events.count += 1
        if isinstance(event, dict):
            _keep(source, events, event)
    if not events.kernels:
        raise source.error(
            f"has {events.count} profiler events, none of them an NCCL or RCCL kernel on a GPU.",
            "Profile a rank that communicates, with ProfilerActivity.CUDA.",
        )
    return _assemble(events)


def _keep(source: TraceSource, events: _Events, event: Mapping[str, Any]) -> None:
    if event.get("ph") != "X":
        return
    name, category = event.get("name"), event.get("cat")
    if not isinstance(name, str) or not isinstance(category, str):
        return
    category = category.lower()
    arguments = event.get("args")
    if not isinstance(arguments, dict):
        arguments = {}
    if events.first_ns is None or category in _KERNELS or name.startswith(_STEP):
        start_ns = _time_ns(source, events, event, "ts")
        events.first_ns = start_ns if events.first_ns is None else min(events.first_ns, start_ns)
    if category in _RUNTIMES:
        correlation = arguments.get("correlation")
        # HIP launches by hipExtModuleLaunchKernel and the like, CUDA by cudaLaunchKernelExC.
        if isinstance(correlation, int) and "launch" in name.lower():
            thread = _thread(event)
            events.launches[correlation] = (thread, _time_ns(source, events, event, "ts"))
    elif category in _KERNELS:
        if any(library in name.lower() for library in _LIBRARIES):
            _keep_kernel(source, events, event, name, arguments)
    elif category in ("cpu_op", "user_annotation", "operator"):
        if name.startswith(_STEP):
            _keep_step(source, events, event, name)
        elif name == "record_param_comms" or name.startswith("nccl:"):
            call = _call(source, events, event, name, arguments)
            events.calls.setdefault(_thread(event), []).append(call)
    if len(events.kernels) + len(events.launches) > 10 * MAX_ROWS:
        raise source.error(
            f"holds more than {10 * MAX_ROWS} launches.", "Profile fewer steps at a time."
        )


def _keep_kernel(
    source: TraceSource,
    events: _Events,
    event: Mapping[str, Any],
    name: str,
    arguments: Mapping[str, Any],
) -> None:
    call = _call(source, events, event, name, arguments)
    correlation = arguments.get("correlation")
    events.kernels.append(
        _Kernel(
            call.start_ns,
            call.end_ns,
            correlation if isinstance(correlation, int) else -1,
            arguments.get("device"),
            name,
            call if "Collective name" in arguments else None,
        )
    )


def _keep_step(source: TraceSource, events: _Events, event: Mapping[str, Any], name: str) -> None:
    number = name.removeprefix(_STEP)
    start_ns = _time_ns(source, events, event, "ts")
    end_ns = start_ns + _time_ns(source, events, event, "dur")
    # Not int(): it takes "²" for a digit and then fails.
    if number.isascii() and number.isdigit() and len(number) < 19:
        events.steps[int(number)] = (start_ns, end_ns)


def _call(
    source: TraceSource,
    events: _Events,
    event: Mapping[str, Any],
    name: str,
    arguments: Mapping[str, Any],
) -> _Call:
    start_ns = _time_ns(source, events, event, "ts")
    end_ns = start_ns + _time_ns(source, events, event, "dur")
    told = arguments.get("Collective name")
    op = canonical_op(told if isinstance(told, str) else name)
    size = payload_bytes(arguments.get("In msg nelems"), arguments.get("dtype"))
    # record_param_comms lists numbers and names among its inputs; nccl: only tensors.
    if size is None and name.startswith("nccl:"):
        size = tensors_bytes(arguments.get("Input Dims"), arguments.get("Input type"))
    return _Call(start_ns, end_ns, op, size, _communicator(arguments))


def _communicator(arguments: Mapping[str, Any]) -> str:
    group, ranks = arguments.get("Process Group Name"), arguments.get("Group size")
    name = f"pg{group}" if isinstance(group, str) and group else ""
    size = f"x{ranks}" if isinstance(ranks, int) else ""
    return f"{name} {size}".strip()[:80]


def _thread(event: Mapping[str, Any]) -> object:
    # Some writers give numbers, some text; both as text also keeps lists out of the dict.
    return f"{event.get('pid')}/{event.get('tid')}"


def _time_ns(source: TraceSource, events: _Events, event: Mapping[str, Any], key: str) -> int:
    value = event.get(key, 0 if key == "dur" else None)
    if isinstance(value, bool) or not isinstance(value, int | decimal.Decimal):
        found = "nothing" if value is None else repr(value)[:40]
        raise source.error(f"event {events.count}: {key} is {found}; microseconds were expected.")
    if not -_MAX_TIME_US <= value <= _MAX_TIME_US or (key == "dur" and value < 0):
        raise source.error(f"event {events.count}: {key} is {str(value)[:40]}, which is no time.")
    return int((decimal.Decimal(value) * _NS_PER_US).to_integral_value())


def _assemble(events: _Events) -> Trace:
    devices = collections.Counter(str(kernel.device) for kernel in events.kernels)
    device, _ = devices.most_common(1)[0]
    for calls in events.calls.values():
        calls.sort(key=lambda call: call.start_ns)
    steps = sorted((begin, end, number) for number, (begin, end) in events.steps.items())
    origin_ns = steps[0][0] if steps else events.first_ns or 0
    # A kernel of the step before may still run when the first step begins.
    origin_ns = min(origin_ns, *(kernel.start_ns for kernel in events.kernels))
    collectives = []
    unexplained = 0
    for kernel in sorted(events.kernels, key=lambda kernel: kernel.start_ns):
        if str(kernel.device) != device:
            continue
        launch = events.launches.get(kernel.correlation)
        call = kernel.call
        if call is None and launch is not None:
            call = _enclosing(events.calls.get(launch[0], []), launch[1])
        unexplained += call is None
        collectives.append(
            Collective(
                kernel.start_ns - origin_ns,
                kernel.end_ns - origin_ns,
                call.bytes if call else None,
                call.op if call and call.op != "unknown" else canonical_op(kernel.name),
                call.communicator if call else "",
                _step_of(steps, launch[1]) if launch else None,
            )
        )
    notes = ["times are those of the GPU, from the first profiler step on"]
    if unexplained:
        notes.append(
            f"{unexplained} kernels were launched before the recording began: bytes unknown"
        )
    if len(devices) > 1:
        notes.append(f"only GPU {device} of {len(devices)} is read")
    return Trace("kineto", tuple(collectives), notes=tuple(notes))


def _enclosing(calls: list[_Call], time_ns: int) -> _Call | None:
    """The innermost call around a moment, completed by what the ones around it tell."""
    found: _Call | None = None
    position = bisect.bisect_right(calls, time_ns, key=lambda call: call.start_ns)
    for call in reversed(calls[max(0, position - _NESTING) : position]):
        if call.end_ns < time_ns:
            continue
        if found is None:
            found = call
            continue
        found = found._replace(
            op=found.op if found.op != "unknown" else call.op,
            bytes=found.bytes if found.bytes is not None else call.bytes,
            communicator=found.communicator or call.communicator,
        )
    return found


def _step_of(steps: list[tuple[int, int, int]], time_ns: int) -> int | None:
    position = bisect.bisect_right(steps, time_ns, key=lambda step: step[0]) - 1
    if position < 0 or time_ns > steps[position][1]:
        return None
    return steps[position][2]
