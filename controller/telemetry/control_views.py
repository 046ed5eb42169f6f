"""Classes, jobs and what is done on ports, for people: at most 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from controller.telemetry.job_views import outlook_lines
from controller.telemetry.text import wrapped
from controller.units import format_bytes, format_duration, format_rate

Document = Mapping[str, Any]
# Of a host with many ranks the first ones tell enough.
_REPORTS_SHOWN = 8


def classes_text(classes: Sequence[Document]) -> str:
    """A table of classes."""
    lines = [f"{'class':>5}{'DSCP':>6}{'priority':>10}{'Kmin':>10}{'Kmax':>10}{'Pmax':>7}"
             f"{'floor':>8}{'ceiling':>9}"]  # fmt: skip
    for entry in classes:
        by_rate = entry["kmin_bytes"] is None
        kmin = "by rate" if by_rate else format_bytes(entry["kmin_bytes"])
        kmax = "by rate" if by_rate else format_bytes(entry["kmax_bytes"])
        lines.append(
            f"{entry['number']:>5}{entry['dscp']:>6}{entry['priority']:>10}{kmin:>10}{kmax:>10}"
            f"{entry['pmax']:>7.4g}{entry['floor_share']:>8.1%}{entry['ceiling_share']:>9.0%}"
        )
    return "\n".join(lines)


def jobs_text(jobs: Sequence[Document], reported_only: Sequence[Document] = ()) -> str:
    """A table of jobs, one line each, and their rules; then names that are only reported."""
    strangers = []
    if reported_only:
        names = ", ".join(f"{entry['name']} ({len(entry['reports'])})" for entry in reported_only)
        strangers = [wrapped(f"reported by processes here, but no such job: {names}")]
    if not jobs:
        none = "no jobs; create one: controller job set NAME --match src=10.0.0.0/8"
        return "\n".join([none, *strangers])
    lines = [f"{'job':<20}{'class':>6}{'flows':>7}{'packets':>12}{'marked':>9}{'cuts':>8}"
             f"{'rate':>14}"]  # fmt: skip
    for entry in jobs:
        rate = format_rate(entry["rate_Bps"]) if entry["rate_Bps"] else "-"
        lines.append(
            f"{entry['name'][:19]:<20}{entry['traffic_class']:>6}{entry['flows']:>7}"
            f"{entry['packets']:>12,}{entry['marked']:>9,}{entry['cuts']:>8,}{rate:>14}"
        )
        lines.append(wrapped(entry["rule"], "  "))
        lines += [wrapped(text, "  ") for text in outlook_lines(entry)]
    unmatched = [entry["name"] for entry in jobs if not entry["matched"]]
    if unmatched:
        lines.append(wrapped(f"no flow was ever seen of: {', '.join(unmatched)}"))
    return "\n".join(lines + strangers)


def plan_text(plan: Document, now_ns: int) -> str:
    """A plan in two lines."""
    left = format_duration(max(0, plan["deadline_ns"] - now_ns))
    rate = format_rate(plan["rate_Bps"]) if plan["rate_Bps"] else "an unknown rate"
    valid = format_duration(max(0, plan["valid_until_ns"] - now_ns))
    return (
        f"plan of {plan['job']}: {format_bytes(plan['expected_bytes'])} within {left} at {rate}"
        f"{', paced' if plan['pace'] else ''}\n"
        f"  class {plan['class_floor']} .. {plan['class_ceiling']}, holds for {valid}"
    )


def job_text(job: Document) -> str:
    """One job with its flows."""
    lines = [
        wrapped(f"job {job['name']}: {job['rule']}"),
        f"  class {job['traffic_class']} (plans: {job['class_floor']} .. {job['class_ceiling']}), "
        f"DCQCN {'on' if job['dcqcn_in_force'] else 'off'}, "
        f"ECT {'set' if job['set_ect'] else 'kept'}, "
        f"rate {format_rate(job['rate_Bps']) if job['rate_Bps'] else 'not paced'}",
        f"  iteration {job['iteration']}: {format_bytes(job['iteration_bytes'])} so far, ends "
        f"after {format_duration(job['gap_in_force_ns'])} of silence",
    ]
    last = job["last_iteration"]
    if last:
        lines.append(
            f"  the one before: {format_bytes(last['sent_bytes'])} in "
            f"{format_duration(last['window_ns'])}, then silence; "
            f"{format_duration(last['period_ns'])} in all"
        )
    plan = job["plan"]
    if plan is None:
        lines.append("  no plan")
    elif not plan["in_force"]:
        lines.append("  its plan is over: default class, no pacing by it")
    else:
        lines.append(
            f"  plan: {format_bytes(plan['expected_bytes'])}, laxity {plan['laxity_ms']:.1f} ms"
        )
    lines += [wrapped(text, "  ") for text in outlook_lines(job)]
    lines += _report_lines(job["reports"])
    if not job["flows"]:
        lines.append("  no flows" + ("" if job["matched"] else "; none was ever seen"))
    for flow in job["flows"]:
        rate = f"{flow['rate_bps'] / 1e6:.1f} Mbit/s" if flow["rate_limited"] else "no limit"
        number = "-" if flow["class"] is None else flow["class"]
        lines.append(wrapped(flow["flow"], "  "))
        lines.append(
            f"    class {number}, {flow['packets']:,} packets, {flow['marked']:,} marked, "
            f"{flow['cuts']:,} cuts, {rate}"
        )
    return "\n".join(lines)


def _report_lines(reports: Sequence[Document]) -> list[str]:
    lines = []
    for entry in reports[:_REPORTS_SHOWN]:
        pid = f" (pid {entry['pid']})" if entry["pid"] else ""
        lines.append(
            wrapped(
                f"rank {entry['rank']} of {entry['size']}{pid} reports iteration "
                f"{entry['iteration']}, {entry['phase']}: {format_bytes(entry['sent_bytes'])} of "
                f"{format_bytes(entry['expected_bytes'])} sent, compression "
                f"{entry['compression_ratio']:.3g}; was told class {entry['class']}",
                "  ",
            )
        )
    if len(reports) > _REPORTS_SHOWN:
        lines.append(f"  and {len(reports) - _REPORTS_SHOWN} more ranks report")
    return lines


def port_lines(control: Document | None) -> list[str]:
    """What is done on an interface, for `status`."""
    if not control:
        return []
    link = format_rate(control["link_Bps"]) if control["link_Bps"] else "unknown"
    done = [f"mark {control['mark']}", f"echo {control['echo']}"]
    done += [name for name in ("dcqcn", "pace") if control[name]]
    if control["by_dscp"]:
        done.append("class by DSCP")
    lines = [f"link {link}; {', '.join(done)}"]
    acts = [f"{name.replace('_', ' ')} {count:,}" for name, count in control["acts"].items()]
    return [*lines, f"acts: {', '.join(acts)}"] if acts else lines
