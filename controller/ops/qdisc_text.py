"""What `controller qdisc` prints, as text and as JSON."""

from __future__ import annotations

import textwrap
from typing import Any

from controller.ops.qdisc import Setup
from controller.ops.qdisc_state import QdiscState
from controller.ops.qdisc_tree import safe_timeout, window_bytes
from controller.units import format_bytes, format_duration, format_rate

_WIDTH = 80


def _paragraph(text: str, first: str = "", rest: str = "  ") -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=first, subsequent_indent=rest,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def setup_json(setup: Setup) -> dict[str, Any]:
    """Members of what `controller qdisc setup --json` prints."""
    result: dict[str, Any] = {
        "interface": setup.interface,
        "kind": setup.kind,
        "action": setup.action,
        "leaf_kind": setup.leaf_kind,
        "hardware": setup.hardware,
        "warnings": list(setup.warnings),
        "advice": list(setup.advice),
    }
    tree = setup.tree
    if tree is None:
        return result
    return result | {
        "rate_Bps": tree.rate_Bps,
        "qp_timeout": tree.qp_timeout,
        "window_bytes": window_bytes(tree.mtu_bytes),
        "classes": [
            {
                "number": leaf.number,
                "classid": leaf.classid,
                "floor_Bps": leaf.floor_Bps,
                "ceiling_Bps": leaf.ceiling_Bps,
                "raised": leaf.raised,
                "window_drain_ns": tree.drain_ns(leaf),
                "safe_qp_timeout": safe_timeout(tree.drain_ns(leaf)),
            }
            for leaf in tree.leaves
        ],
    }


def setup_text(setup: Setup) -> str:
    """What `controller qdisc setup` prints."""
    done = {"added": "added", "changed": "changed in place", "replaced": "put in place of the old"}
    tree = setup.tree
    rate = f" of {format_rate(tree.rate_Bps)}" if tree else ""
    lines = [f"{setup.interface}: {setup.kind}{rate} {done[setup.action]}"]
    if tree:
        lines[0] += f", leaves {setup.leaf_kind}"
        lines += ["", f"{'CLASS':5} {'CLASSID':8} {'FLOOR':15} {'CEILING':13} "
                      f"{'WINDOW TAKES':13} SAFE QP TIMEOUT"]  # fmt: skip
        for leaf in tree.leaves:
            number = "other" if leaf.number is None else str(leaf.number)
            floor = format_rate(leaf.floor_Bps) + (" *" if leaf.raised else "")
            lines.append(
                f"{number:5} {leaf.classid:8} {floor:15} {format_rate(leaf.ceiling_Bps):13} "
                f"{format_duration(tree.drain_ns(leaf)):13} "
                f"{safe_timeout(tree.drain_ns(leaf))} or more"
            )
        lines.append("")
        lines.append(_paragraph(
            f"WINDOW TAKES: how long the {format_bytes(window_bytes(tree.mtu_bytes))} that one "
            "queue pair may have in flight take at the floor; several queue pairs in one class "
            "take as many times longer.", rest=""))  # fmt: skip
        if any(leaf.raised for leaf in tree.leaves):
            lines.append(_paragraph(
                "*: raised, so that this is within half of the QP timeout "
                f"(attribute {tree.qp_timeout}).", rest=""))  # fmt: skip
    if setup.advice:
        lines += [
            "",
            _paragraph("On a NIC with DCB, run these as well (Stellar does not):", rest=""),
        ]
        lines += [_command(command) for command in setup.advice]
    lines += [_paragraph(f"warning: {text}") for text in setup.warnings]
    return "\n".join(lines)


def _command(command: str) -> str:
    """A command line that can be pasted although it is broken."""
    parts = textwrap.wrap(command, _WIDTH - 8, break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(f"  {part}" if not place else f"      {part}"
                        for place, part in enumerate(parts))  # fmt: skip


def state_text(state: QdiscState) -> str:
    """What `controller qdisc show` prints."""
    root = f"{state.root_kind} {state.root_handle}"
    whose = "ours" if state.ours else "the kernel's default" if state.is_default else "not ours"
    rate = f", {format_rate(state.rate_Bps)}" if state.rate_Bps else ""
    lines = [f"{state.interface}: {root} ({whose}){rate}"]
    if state.ours and not state.complete:
        lines.append("warning: parts are missing; `controller qdisc setup` mends that")
    where = "on all queues" if state.all_fq else "on some queues" if state.has_fq else "none"
    lines.append(f"fq: {where}" + (
        f"; departure times refused {state.horizon_drops}, pulled nearer {state.horizon_caps}; "
        f"flow too long {state.flow_limit_drops}" if state.has_fq else "; nothing can be paced"
    ))  # fmt: skip
    lines.append(f"dropped: {state.drops} packets")
    if state.queue_map:
        mapping = state.queue_map.priority_to_class
        known = " ".join(f"{priority}:{number}" for priority, number in enumerate(mapping[:8]))
        more = " ".join(f"{priority}:{mapping[priority]}" for priority in range(8, len(mapping)))
        lines += [f"priority:class  {known}", f"                {more}"]
        queues = " ".join(f"{number}:{first}-{first + count - 1}" for number, (count, first)
                          in enumerate(state.queue_map.queues))  # fmt: skip
        lines.append(f"class:queues    {queues}")
        lines.append(f"in the driver   {'yes' if state.hardware else 'no'}")
    if state.classes:
        lines += ["", f"{'CLASS':5} {'CLASSID':8} {'FLOOR':13} {'CEILING':13} {'LEAF':5} "
                      f"{'SENT':>9} {'WAITING':>9} {'DROPS':>7}"]  # fmt: skip
        for each in state.classes:
            number = "other" if each.number is None else str(each.number)
            lines.append(
                f"{number:5} {each.classid:8} {format_rate(each.floor_Bps):13} "
                f"{format_rate(each.ceiling_Bps):13} {each.leaf_kind or '-':5} "
                f"{format_bytes(each.sent_bytes):>9} {format_bytes(each.backlog_bytes):>9} "
                f"{each.drops:>7}"
            )
    return "\n".join(lines)
