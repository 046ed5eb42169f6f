"""What the controller expects of each job: rows of `top`, and a line or two for other views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from controller.priority.policy import OFF
from controller.telemetry.timeline import Row
from controller.units import format_bytes, format_duration

Document = Mapping[str, Any]

# Left-hand eighths of a character cell, Unicode "Block Elements".
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
# A timeline shows so many iterations of the slowest job: enough to see who gives way to whom.
_ITERATIONS_DRAWN = 6
_NS_PER_MS = 1e6
# Members of a prediction that `top --json` repeats as they are.
_REPEATED = (
    "why", "confidence", "period_ms", "spread_ms", "expected_bytes", "next_start_in_ms", "phase",
    "progress", "window_open_ms", "deadline_in_ms", "laxity_ms", "class", "class_floor",
    "class_ceiling", "share", "waits_for", "delays", "iteration_ms", "slowdown",
)  # fmt: skip


def prediction_of(job: Document) -> Document:
    """The member `prediction` of a job; empty when there is none.

    Parameters
    ----------
    job
        A document of the request ``job`` or ``jobs``. A controller of an earlier release gives
        none of it; with the policy off, or before anything was seen, it is null.
    """
    return job.get("prediction") or {}


def policy_of(job: Document) -> str | None:
    """Name of the policy that governs the job; None: none does."""
    policy = job.get("policy")
    return None if policy in (None, OFF) else str(policy)


def bound_of(job: Document) -> float | None:
    """The `max_slowdown` in force, a multiple of the undisturbed iteration; None: not known."""
    return job.get("max_slowdown_in_force") or None


def is_reported(job: Document) -> bool:
    """Whether the iterations are those that the job's own ranks report."""
    return prediction_of(job).get("source") == "reports"


def iteration_of(job: Document) -> int:
    """Number of the iteration it is in: by its ranks where these report, else as counted here."""
    reports = job.get("reports") or ()
    if is_reported(job) and reports:
        return max(int(entry["iteration"]) for entry in reports)
    return int(job["iteration"])


def job_row(job: Document) -> dict[str, Any]:
    """A job as `top` shows it, ready for JSON; null where nothing is known.

    Parameters
    ----------
    job
        A document of the request ``job`` or ``jobs``.

    Returns
    -------
    dict
        ``job``, ``policy`` (None: off), ``iteration``, ``flows``, ``is_periodic``,
        ``max_slowdown``, and members of its prediction by their names. Times end in ``_ms``,
        ``progress`` and ``confidence`` are shares in 0 .. 1, ``slowdown`` is a multiple.
    """
    prediction = prediction_of(job)
    flows = job["flows"]
    row: dict[str, Any] = {
        "job": job["name"],
        "policy": policy_of(job),
        "iteration": iteration_of(job),
        # `jobs` counts them, `job` lists them.
        "flows": flows if isinstance(flows, int) else len(flows),
        "is_periodic": prediction.get("is_periodic"),
        "max_slowdown": bound_of(job),
    }
    row.update((name, prediction.get(name)) for name in _REPEATED)
    for name in ("waits_for", "delays"):
        row[name] = list(row[name] or ())
    return row


def recent_windows(jobs: Sequence[Document]) -> tuple[list[Row], tuple[int, int]]:
    """The last sync windows of jobs on one axis, for `timeline.text_timeline`.

    Parameters
    ----------
    jobs
        Documents of the request ``job`` or ``jobs``.

    Returns
    -------
    rows
        One for each job that had a window lately, in their order; times in ns, 0 is now.
    span_ns
        Begin and end of what to show.
    """
    rows: list[Row] = []
    longest_ms = 0.0
    for job in jobs:
        prediction = prediction_of(job)
        recent = prediction.get("recent") or ()
        segments = [
            (
                round(-window["start_ago_ms"] * _NS_PER_MS),
                round((window["window_ms"] - window["start_ago_ms"]) * _NS_PER_MS),
                "sync",
            )
            for window in recent
        ]
        open_ms = prediction.get("window_open_ms")
        if open_ms is not None:
            segments.append((round(-open_ms * _NS_PER_MS), 0, "sync"))
        if segments:
            rows.append((job["name"], segments))
            longest_ms = max(longest_ms, prediction.get("period_ms") or 0.0)
    if not longest_ms:
        # Nothing is periodic: all that is known.
        return rows, (min((begin for _, each in rows for begin, _, _ in each), default=-1), 0)
    begin_ns = -round(_ITERATIONS_DRAWN * longest_ms * _NS_PER_MS)
    shown = [(name, each) for name, each in rows if any(end > begin_ns for _, end, _ in each)]
    return shown, (begin_ns, 0)


def duration_ms(value_ms: float) -> str:
    """Milliseconds for people, with a sign and a unit that fits: ``-1.5 s``, ``250 us``."""
    if not value_ms:
        return "0 ms"
    return f"{'-' if value_ms < 0 else ''}{format_duration(abs(value_ms) * _NS_PER_MS)}"


def short_ms(value_ms: float | None) -> str:
    """Milliseconds without a unit, in five characters at most; seconds have an `s`.

    ``-`` stands for unknown.
    """
    if value_ms is None:
        return "-"
    size = abs(value_ms)
    if size < 9.995:
        return f"{value_ms:.2f}" if value_ms >= 0 else f"{value_ms:.1f}"
    if size < 99.95:
        return f"{value_ms:.1f}"
    if size < 9999.5:
        return f"{value_ms:.0f}"
    seconds = value_ms / 1e3
    for unit, limit in (("s", 999.5), ("m", 59970.0), ("h", 3.5982e6)):
        if abs(seconds) < limit:
            return f"{seconds / {'s': 1, 'm': 60, 'h': 3600}[unit]:.0f}{unit}"
    return "long" if value_ms > 0 else "-long"


def bar(share: float, width: int) -> str:
    """A bar of block characters, filled to `share`.

    Parameters
    ----------
    share
        0 .. 1; what is outside is taken as the nearer end.
    width
        Characters.
    """
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + _EIGHTHS[rest]).ljust(width, "░")


def next_window_text(prediction: Document) -> str:
    """When the next sync window begins: ``next window in 31 ms``; empty where unknown."""
    start_in_ms = prediction.get("next_start_in_ms")
    if start_in_ms is None:
        return ""
    if start_in_ms < 0:
        # An open window is the one that was expected.
        if prediction.get("phase") == "sync":
            return ""
        return f"next window {duration_ms(-start_in_ms)} overdue"
    return f"next window in {duration_ms(start_in_ms)}"


def window_text(prediction: Document) -> str:
    """How far an open sync window is; empty while none is open."""
    if prediction.get("phase") != "sync":
        return ""
    parts = ["in its sync window"]
    open_ms, progress = prediction.get("window_open_ms"), prediction.get("progress")
    if open_ms is not None:
        parts.append(f"since {duration_ms(open_ms)}")
    if progress is not None:
        parts.append(f"({progress:.0%} sent)")
    return " ".join(parts)


def class_text(row: Document) -> str:
    """Class in force and its limits: ``class 5 (4 .. 6)``; empty where unknown."""
    number, low, high = row.get("class"), row.get("class_floor"), row.get("class_ceiling")
    has_limits = low is not None and high is not None
    if number is None:
        return f"class {low} .. {high}" if has_limits else ""
    if not has_limits or low == high == number:
        return f"class {number}"
    return f"class {number} ({low} .. {high})"


def outlook_lines(job: Document) -> list[str]:
    """What is expected of the job, in two lines at most; none without policy and prediction.

    Parameters
    ----------
    job
        A document of the request ``job``, ``jobs`` or ``status``.
    """
    policy, prediction = policy_of(job), prediction_of(job)
    if policy is None:
        if not prediction:
            return []
        policy = "no policy"
    if not prediction:
        return [f"{policy}: nothing was seen of its iterations yet"]
    if not prediction.get("is_periodic"):
        first = f"{policy}: not periodic: {prediction.get('why') or 'no reason is known'}"
    else:
        facts = [f"period {duration_ms(prediction['period_ms'])}"] if prediction.get(
            "period_ms") is not None else []  # fmt: skip
        if prediction.get("expected_bytes"):
            facts.append(format_bytes(prediction["expected_bytes"]))
        facts += [window_text(prediction), next_window_text(prediction)]
        first = f"{policy}: {', '.join(fact for fact in facts if fact) or 'periodic'}"
    second = [class_text(prediction)]
    if prediction.get("laxity_ms") is not None:
        second.append(f"laxity {duration_ms(prediction['laxity_ms'])}")
    if prediction.get("slowdown") is not None:
        second.append(f"slowdown {prediction['slowdown']:.2f}")
    if prediction.get("waits_for"):
        second.append(f"waits for {names_text(prediction['waits_for'])}")
    facts = [fact for fact in second if fact]
    return [first, ", ".join(facts)] if facts else [first]


def names_text(names: Sequence[str], shown: int = 4) -> str:
    """Some names, and how many more there are."""
    text = ", ".join(names[:shown])
    return text if len(names) <= shown else f"{text} and {len(names) - shown} more"


def planner_text(planner: Document) -> str:
    """What the agent's planner does and costs, for `status`."""
    policy = planner.get("policy")
    if policy in (None, OFF):
        return "policy off: iterations are watched, jobs keep their default class"
    facts = [
        f"policy {policy}",
        f"iteration events {planner['events']:,}",
        f"plans written {planner['plans_written']:,}",
    ]
    latency = planner.get("plan_latency_us")
    if latency:
        facts.append(
            f"event to plan p50 {duration_ms(latency['p50'] / 1e3)}, "
            f"p99 {duration_ms(latency['p99'] / 1e3)}"
        )
    if planner.get("cpu_share") is not None:
        facts.append(f"CPU {planner['cpu_share']:.1%}")
    return ", ".join(facts)


def worst_first(rows: Sequence[Document], room: int) -> list[Document]:
    """Rows for which there is room, in the order given.

    Parameters
    ----------
    rows
        Of `job_row`.
    room
        Rows at most. Where there are more, the slowest stay; among equals the ones with the least
        laxity, then the first.
    """
    if len(rows) <= room:
        return list(rows)

    def badness(index: int) -> tuple[float, float, int]:
        slowdown, laxity_ms = rows[index].get("slowdown"), rows[index].get("laxity_ms")
        return (
            -(slowdown if slowdown is not None else 0.0),
            laxity_ms if laxity_ms is not None else float("inf"),
            index,
        )

    kept = sorted(sorted(range(len(rows)), key=badness)[: max(0, room)])
    return [rows[index] for index in kept]
