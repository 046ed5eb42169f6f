"""What is done on ports and to jobs, as documents for `status` and `job show`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from controller.agent import maps
from controller.agent.steering import Steering
from controller.dataplane import layout
from controller.observe.snapshot import flow_name, format_address
from controller.priority import laxity
from controller.priority.jobs import describe_match


def describe_port(steering: Steering, fds: Mapping[str, int], number: int) -> dict[str, Any]:
    """What is done on a port and how often, for `status`."""
    port = steering.port(number)
    if port is None:
        return {}
    plan = asdict(port.plan)
    plan["missing"] = list(port.plan.missing) if steering.jobs else []
    marker = maps.read_marker(fds, number)
    return plan | {
        "acts": {act.name.lower(): count for act, count in maps.read_acts(fds, number).items()},
        "virtual_queue_bytes": int(marker["queue"]),
        "window_average_bytes": int(marker["average"]),
    }


def describe_job(steering: Steering, fds: Mapping[str, int], name: str) -> dict[str, Any]:
    """A job with its flows, plan and progress, for `job show`."""
    state = steering.find(name)
    now_ns = time.monotonic_ns()
    progress = maps.read_progress(fds, state.number)
    flows = [
        _describe_flow(steering, fds, key, slot)
        for key, slot in steering.flows.of_job(name).items()
    ]
    plan = state.plan
    return state.job.to_json() | {
        "number": state.number,
        "rule": describe_match(state.job, steering.env_variable),
        "dcqcn_in_force": steering.has_dcqcn(state.job),
        "gap_in_force_ns": steering.gap_ns(state.job),
        "matched": state.was_matched,
        "iteration": int(progress["iteration"]),
        "iteration_bytes": int(progress["bytes"]),
        "iteration_started_ms_ago": _ago_ms(now_ns, int(progress["start_ns"])),
        "last_iteration": asdict(state.last_iteration) if state.last_iteration else None,
        "last_packet_ms_ago": _ago_ms(now_ns, int(progress["last_ns"])),
        "plan": plan.to_json()
        | {
            "in_force": plan.in_force(now_ns),
            "laxity_ms": round(laxity.laxity_ns(plan, now_ns, int(progress["bytes"])) / 1e6, 3),
        }
        if plan
        else None,
        "flows": flows,
    }


def _describe_flow(
    steering: Steering, fds: Mapping[str, int], raw: bytes, slot: int
) -> dict[str, Any]:
    key = np.frombuffer(raw, layout.FLOW_KEY)[0]
    control = maps.read_control(fds, slot)
    port = steering.port(int(key["port"]))
    limited = bool(control["limited"])
    source, destination = (format_address(key[name].tobytes()) for name in ("saddr", "daddr"))
    return {
        "flow": flow_name(source, destination, int(key["dqpn"])),
        "interface": port.label if port else f"port {key['port']}",
        "class": None if control["class"] == layout.CLASS_UNSET else int(control["class"]),
        "rate_limited": limited,
        "rate_bps": int(control["rc_Bps"]) * 8 if limited else None,
        "target_rate_bps": int(control["rt_Bps"]) * 8 if limited else None,
        "alpha": round(int(control["alpha_q32"]) / 2**32, 6),
        "packets": int(control["packets"]),
        "class_packets": [int(count) for count in control["class_packets"]],
        "increases": {
            phase.name.lower(): int(control["increases"][phase])
            for phase in layout.PhaseNumber
        },
    } | {
        name: int(control[name])
        for name in ("class_changes", "marked", "feedback", "suppressed", "cuts",
                     "prediction_starts", "prediction_floors", "paced", "beyond_horizon")
    }  # fmt: skip


def _ago_ms(now_ns: int, then_ns: int) -> float | None:
    return round((now_ns - then_ns) / 1e6, 3) if then_ns else None
