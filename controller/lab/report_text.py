"""The tables of a cluster scenario for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from controller.lab.scenario import ORACLE
from controller.sim.intervals import Estimate
from controller.units import format_rate

if TYPE_CHECKING:
    from controller.lab.report import ClusterReport

_WIDTH = 80
_NAME = 9
# Two lines of heading and the key of each column.
_FIGURES = (
    ("AllReduce", "mean ms", "allreduce_ms.mean"),
    ("AllReduce", "slow 10 %", "allreduce_ms.slowest10"),
    ("AllReduce", "p99", "allreduce_ms.p99"),
    ("iteration", "mean ms", "iteration_ms.mean"),
    ("iteration", "p99", "iteration_ms.p99"),
    ("slowdown", "worst job", "worst_slowdown"),
    ("GPUs", "busy %", "utilisation"),
)
_FIGURE_WIDTH = 10
_CHANGES = (
    ("AllReduce", "mean", "allreduce_ms.mean"),
    ("AllReduce", "slow 10 %", "allreduce_ms.slowest10"),
    ("iteration", "mean", "iteration_ms.mean"),
    ("iteration", "p99", "iteration_ms.p99"),
    ("slowdown", "worst job", "worst_slowdown"),
    ("GPUs", "busy", "utilisation"),
)
_CHANGE_WIDTH = 11


def report_text(report: ClusterReport) -> str:
    """What was simulated, the figures of each policy, and their change against fair."""
    parts = [_head(report), _figures(report)]
    if report.changes:
        parts.append(_changes(report))
    parts.append(_foot(report))
    return "\n\n".join(parts)


def _head(report: ClusterReport) -> str:
    scenario = report.scenario
    fabric, network = scenario.network.fabric, scenario.network
    title = f"{scenario.name}: {scenario.about}" if scenario.about else scenario.name
    shape = f"{fabric.nics} NICs of {format_rate(fabric.nic_Bps)}"
    if fabric.leaves > 1:
        ratio = fabric.nics_per_leaf * fabric.nic_Bps / (fabric.uplinks * fabric.uplink_Bps)
        shape += f", {fabric.leaves} leaves, {_counted(fabric.spines, 'spine')}, {ratio:.3g}:1"
    runs = (
        f"{_counted(scenario.job_count, 'job')}, placement {network.placement}; "
        f"{_counted(scenario.seeds, 'seed')} x {_counted(scenario.iterations, 'iteration')}"
    )
    loads = ", ".join(
        f"{kind} {100 * mean:.0f} % (hottest {100 * most:.0f} %)"
        for kind, (mean, most) in report.loads.items()
    )
    return "\n".join(
        textwrap.fill(line, _WIDTH) for line in (title, shape, runs, f"load asked: {loads}")
    )


def _figures(report: ClusterReport) -> str:
    rows = [["", *(head for head, _, _ in _FIGURES)], ["policy", *(low for _, low, _ in _FIGURES)]]
    for policy, estimates in report.estimates.items():
        rows.append([policy, *(_figure(key, estimates[key].mean) for _, _, key in _FIGURES)])
    alone = {key: each.mean for key, each in report.bound.items()}
    rows.append(
        ["alone", *(_figure(key, alone[key]) if key in alone else "" for _, _, key in _FIGURES)]
    )
    return _table(rows, _FIGURE_WIDTH)


def _changes(report: ClusterReport) -> str:
    rows = [["", *(head for head, _, _ in _CHANGES)], ["policy", *(low for _, low, _ in _CHANGES)]]
    for policy, changes in report.changes.items():
        rows.append([policy, *(_change(changes.get(key)) for _, _, key in _CHANGES)])
    confidence = ", ± half of the 95 % confidence interval" * (report.scenario.seeds > 1)
    return f"Change against fair in %{confidence}\n{_table(rows, _CHANGE_WIDTH)}"


def _foot(report: ClusterReport) -> str:
    lines = ["alone: the same iterations, had nobody disturbed them; no policy can beat that"]
    if ORACLE in report.by_policy:
        chosen = sorted({run.order for run in report.by_policy[ORACLE]})
        lines.append(f"oracle: best of what is known on each seed ({', '.join(chosen)})")
    if report.scenario.ignored:
        lines.append("DCQCN: classes, floors and shares do nothing; weights scale increases")
    return "\n".join(textwrap.fill(line, _WIDTH) for line in lines)


def _table(rows: list[list[str]], width: int) -> str:
    return "\n".join(
        # The space keeps cells apart that are as wide as their column.
        f"{name:{_NAME}}{''.join(f' {cell:>{width - 1}}' for cell in cells)}".rstrip()
        for name, *cells in rows
    )


def _figure(key: str, value: float) -> str:
    if key == "utilisation":
        return f"{100 * value:.2f}"
    # Four significant digits, and no exponent where there is room for all.
    digits = next(count for count in range(4) if value * 10**count >= 1000 or count == 3)
    text = f"{value:.{3 if key == 'worst_slowdown' else digits}f}"
    return text if len(text) < _FIGURE_WIDTH else f"{value:.3e}"


def _change(change: Estimate | None) -> str:
    if change is None:
        return "-"
    mean, half_width = 100 * change.mean, 100 * (change.half_width or 0.0)
    # Where tenths are uncertain they are noise, and would not fit the column.
    digits = int(abs(mean) < 99.95 and half_width < 9.95)
    text = f"{mean:+z.{digits}f}"
    return text if change.half_width is None else f"{text} ±{half_width:.{digits}f}"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"
