"""Text of `controller status`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from controller.dataplane.interfaces import ABILITIES
from controller.telemetry.control_views import jobs_text, port_lines
from controller.telemetry.job_views import planner_text
from controller.telemetry.text import wrapped


def human_bytes(count: float) -> str:
    """Bytes with a binary unit, at most 9 characters."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_duration(seconds: float) -> str:
    """Seconds as the two largest units."""
    whole = int(seconds)
    for unit, size, below in (("d", 86400, 3600), ("h", 3600, 60), ("m", 60, 1)):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size}{unit} {rest}{ {'d': 'h', 'h': 'm', 'm': 's'}[unit] }"
    return f"{seconds:.1f}s"


def status_text(answer: Mapping[str, Any]) -> str:
    """The `status` answer of an agent, at most 80 columns wide."""
    lines = [
        wrapped(
            f"controller {answer['version']}, pid {answer['pid']}, up "
            f"{human_duration(answer['uptime_s'])}, "
            f"{human_bytes(answer['resident_bytes'])} resident"
            + (", adopted an earlier one's flows" if answer["adopted"] else ""),
            "",
        ),
        f"flows {answer['flows']} of {answer['max_flows']}",
    ]
    if not answer["interfaces"]:
        lines.append("no interface is attached; next: controller attach [NETNS:]IF")
    for entry in answer["interfaces"]:
        device = f", {entry['rdma_device']}" if entry["rdma_device"] else ""
        lines.append("")
        lines.append(
            wrapped(f"{entry['interface']}  {entry['kind']} ({ABILITIES[entry['kind']]})", "")
        )
        lines.append(f"  ingress hook {entry['mode']}, MTU {entry['mtu_bytes']}{device}")
        for direction, frames in entry["frames"].items():
            seen = ", ".join(
                f"{reason.replace('_', ' ')} {count}" for reason, count in frames.items()
            )
            lines.append(wrapped(f"{direction:8}{seen or 'no frames'}", "  "))
        drops = {name: count for name, count in entry["drops"].items() if count}
        if drops:
            text = ", ".join(f"{name} {count}" for name, count in drops.items())
            lines.append(wrapped(f"drops on this host since attaching: {text}", "  "))
        lines += [wrapped(text, "  ") for text in port_lines(entry["control"])]
        if entry["retired_flows"]:
            lines.append(
                f"  idle flows taken out of the table: {entry['retired_flows']} "
                f"({entry['retired_packets']} packets)"
            )
    # A controller that was started by an earlier release has no planner.
    planner = answer.get("planner")
    if planner:
        lines += ["", wrapped(planner_text(planner))]
    if answer["jobs"]:
        lines += ["", jobs_text(answer["jobs"])]
    cautions: dict[str, list[str]] = {}
    for entry in answer["interfaces"]:
        for caution in entry["cautions"]:
            cautions.setdefault(caution, []).append(entry["interface"])
    for caution, names in cautions.items():
        lines += ["", wrapped(f"note on {', '.join(names)}: {caution}", "")]
    if answer["events"]:
        lines.append("")
        lines.append("last events")
        for event in answer["events"][-8:]:
            when = datetime.fromtimestamp(event["time"]).strftime("%H:%M:%S")
            lines.append(wrapped(f"{when} {event['event']}", "  "))
    return "\n".join(lines)
