"""One job in full: what `controller explain JOB` tells, with what is uncertain about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from controller.priority.policy import DEFAULT_POLICY
from controller.telemetry.job_advice import Advice, advise
from controller.telemetry.job_views import (
    Document,
    bar,
    bound_of,
    class_text,
    duration_ms,
    iteration_of,
    names_text,
    next_window_text,
    policy_of,
    prediction_of,
    recent_windows,
)
from controller.telemetry.text import WIDTH, wrapped
from controller.telemetry.timeline import text_timeline
from controller.units import format_bytes, format_rate

# Below, a prediction is told to be shaky: as likely right as wrong.
_LOW_CONFIDENCE = 0.5
# The predictor is meant to have converged by then.
_FEW_ITERATIONS = 3
# A scatter of the period above this share moves the window's begin by more than a class.
_WIDE_SPREAD = 0.10
_BAR_CHARACTERS = 20
_FLOWS_SHOWN = 8


@dataclass(frozen=True)
class JobExplanation:
    """A job, what is uncertain about it and what to do.

    ``job`` is a document of the request ``job``; ``interfaces`` are (label, kind) of those that
    its flows use, of all that are attached while no flow is known; ``also_flows`` are flows that
    the same name could mean; ``neighbours`` are documents of the jobs that delay it or wait for it.
    """

    job: Document
    interfaces: tuple[tuple[str, str], ...]
    uncertain: tuple[str, ...]
    advice: Advice | None
    also_flows: tuple[str, ...] = ()
    neighbours: tuple[Document, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """``explain --json`` of a job."""
        return {
            "job": dict(self.job),
            "interfaces": [{"interface": label, "kind": kind} for label, kind in self.interfaces],
            "uncertain": list(self.uncertain),
            "advice": self.advice.to_json() if self.advice else None,
            "also_flows": list(self.also_flows),
        }

    def to_text(self) -> str:
        """For a person, at most 80 columns."""
        job, prediction = self.job, prediction_of(self.job)
        lines = [wrapped(f"Job {job['name']}: {job['rule']}")]
        lines += _paragraphs(_head(job))
        if prediction:
            lines += ["Iteration", *_paragraphs(_iteration(prediction))]
        lines += ["Class", *_paragraphs(_class(job))]
        if prediction:
            lines += ["Who delays whom", *_paragraphs(_delays(prediction))]
        if history := prediction.get("class_history"):
            lines += ["Class history, newest last", *_history(history)]
        lines += _windows([job, *self.neighbours])
        if self.uncertain:
            lines += ["What is uncertain", *_paragraphs(self.uncertain)]
        if self.advice:
            lines += ["Advice", *self.advice.to_lines()]
        if self.also_flows:
            lines.append(
                wrapped(
                    f"note: {job['name']} could also mean the flow "
                    f"{names_text(self.also_flows, 2)}; give a flow's whole name to have it "
                    "explained."
                )
            )
        return "\n".join(lines)


def explain_job(
    job: Document,
    interfaces: Sequence[Document],
    classes: Sequence[Document],
    also_flows: Sequence[str] = (),
    others: Sequence[Document] = (),
) -> JobExplanation:
    """Everything about one job.

    Parameters
    ----------
    job
        A document of the request ``job``.
    interfaces
        As ``status`` has them: ``interface``, ``kind`` and ``control`` are read.
    classes
        As the request ``classes`` has them, all eight.
    also_flows
        Names of flows that the job's name could mean as well.
    others
        Documents of all jobs: those that delay this one or wait for it are drawn below it.
    """
    prediction = prediction_of(job)
    names = {*(prediction.get("waits_for") or ()), *(prediction.get("delays") or ())}
    used = {flow["interface"] for flow in job["flows"]}
    chosen = [entry for entry in interfaces if not used or entry["interface"] in used]
    return JobExplanation(
        job=job,
        interfaces=tuple((entry["interface"], entry["kind"]) for entry in chosen),
        uncertain=tuple(_uncertain(job, chosen)),
        advice=advise(job, chosen, classes),
        also_flows=tuple(also_flows),
        neighbours=tuple(each for each in others if each["name"] in names - {job["name"]}),
    )


# ---- what is not known ----


def _uncertain(job: Document, interfaces: Sequence[Document]) -> list[str]:
    """Reasons to trust what is told less, the weightiest first."""
    prediction = prediction_of(job)
    found = []
    if policy_of(job) is None:
        found.append(
            "The policy is off: no class follows the iteration. To have that: "
            f"`controller policy {DEFAULT_POLICY}`."
        )
    elif not prediction:
        found.append("Nothing was seen of its iterations yet.")
    if not job["flows"]:
        seen = "has no flows at present" if job["matched"] else "never had a flow here"
        found.append(f"It {seen}; its rule: {job['rule']}.")
    found += _doubts(prediction, bound_of(job)) if prediction else []
    by_dscp = [entry["interface"] for entry in interfaces
               if entry["control"] and entry["control"].get("by_dscp")]  # fmt: skip
    if by_dscp:
        found.append(
            f"On {names_text(by_dscp)} the class is taken from each packet's own DSCP and not from "
            'the job (classify = "job" in its [[interface]] changes that).'
        )
    return found


def _doubts(prediction: Document, max_slowdown: float | None) -> list[str]:
    found = []
    if not prediction.get("is_periodic"):
        why = prediction.get("why") or "no reason is known"
        found.append(f"Not periodic: {why}. No next window is predicted.")
    elif (confidence := prediction.get("confidence")) is not None and confidence < _LOW_CONFIDENCE:
        why = f": {prediction['why']}" if prediction.get("why") else ""
        found.append(f"The prediction is shaky, confidence {confidence:.0%}{why}.")
    iterations = prediction.get("iterations") or 0
    if iterations < _FEW_ITERATIONS:
        found.append(f"Iterations seen so far: {iterations}; {_FEW_ITERATIONS} are needed.")
    spread_ms, period_ms = prediction.get("spread_ms"), prediction.get("period_ms")
    if spread_ms and period_ms and spread_ms > _WIDE_SPREAD * period_ms:
        found.append(
            f"Its period scatters by {duration_ms(spread_ms)}, {spread_ms / period_ms:.0%} of it: "
            "the next window may begin that much earlier or later."
        )
    start_in_ms = prediction.get("next_start_in_ms")
    if start_in_ms is not None and start_in_ms < 0 and prediction.get("phase") != "sync":
        found.append(
            f"The next window is {duration_ms(-start_in_ms)} overdue: an evaluation, a "
            "checkpoint or a slow step; or the job has ended."
        )
    if prediction.get("source") == "dataplane":
        found.append(
            "Windows are told apart by pauses between packets on this host; ranks that use "
            "controller.allreduce report theirs."
        )
    if prediction.get("alone_bps") is None:
        found.append("The rate that it reaches alone is not known, and so neither is its laxity.")
    slowdown = prediction.get("slowdown")
    if slowdown is not None and max_slowdown is not None and slowdown > max_slowdown:
        found.append(
            f"It is slower than its bound: {slowdown:.2f} x its undisturbed iteration, "
            f"allowed {max_slowdown:g} x. Either nobody has laxity to give, or the time is lost "
            "elsewhere (computation, another host)."
        )
    return found


# ---- what is known ----


def _paragraphs(texts: Sequence[str]) -> list[str]:
    return [wrapped(text, "  ") for text in texts if text]


def _head(job: Document) -> list[str]:
    prediction, policy = prediction_of(job), policy_of(job)
    facts = [f"policy {policy or 'off'}"]
    if (bound := bound_of(job)) is not None:
        facts.append(f"bound {bound:g} x its undisturbed iteration")
    facts.append(f"iteration {iteration_of(job):,}")
    if prediction:
        told = "its ranks' reports" if prediction.get("source") == "reports" else "its packets"
        facts.append(f"{prediction.get('iterations') or 0:,} seen by {told}")
    return [", ".join(facts)]


def _iteration(prediction: Document) -> list[str]:
    return [_rhythm(prediction), _moment(prediction), _time_left(prediction), _seen(prediction)]


def _rhythm(prediction: Document) -> str:
    """Period and what it is made of."""
    period_ms, spread_ms = prediction.get("period_ms"), prediction.get("spread_ms")
    if period_ms is None:
        return "period not known"
    parts = [f"period {duration_ms(period_ms)}"]
    if spread_ms is not None:
        parts[0] += f" ± {duration_ms(spread_ms)}"
    for name, label in (("compute_ms", "compute"), ("window_ms", "sync window")):
        if prediction.get(name) is not None:
            parts.append(f"{label} {duration_ms(prediction[name])}")
    if (bursts := prediction.get("bursts_per_iteration") or 0) > 1:
        parts[-1] += f" in {bursts} bursts"
    if prediction.get("expected_bytes") is not None:
        parts.append(f"{format_bytes(prediction['expected_bytes'])} a window")
    if prediction.get("confidence") is not None:
        parts.append(f"confidence {prediction['confidence']:.0%}")
    return ", ".join(parts)


def _moment(prediction: Document) -> str:
    """Where in the iteration it is, and what comes next."""
    phase = prediction.get("phase") or "unknown"
    parts = [f"phase {phase}"]
    if phase == "sync":
        if prediction.get("window_open_ms") is not None:
            parts[0] += f" since {duration_ms(prediction['window_open_ms'])}"
        if prediction.get("progress") is not None:
            share = prediction["progress"]
            parts[0] += f" {bar(share, _BAR_CHARACTERS)} {share:.0%}"
    parts.append(next_window_text(prediction))
    return ", ".join(part for part in parts if part)


def _time_left(prediction: Document) -> str:
    parts = []
    deadline_ms, laxity_ms = prediction.get("deadline_in_ms"), prediction.get("laxity_ms")
    if deadline_ms is not None:
        parts.append(
            f"deadline in {duration_ms(deadline_ms)}" if deadline_ms >= 0
            else f"deadline passed {duration_ms(-deadline_ms)} ago"
        )  # fmt: skip
    if laxity_ms is not None:
        parts.append(f"laxity {duration_ms(laxity_ms)}")
    if prediction.get("alone_bps") is not None:
        parts.append(f"alone it reaches {format_rate(prediction['alone_bps'] / 8)}")
    return ", ".join(parts)


def _seen(prediction: Document) -> str:
    """Times measured lately, and what they are against an undisturbed iteration."""
    parts = []
    for name, label in (("iteration_ms", "iterations"), ("window_ms_seen", "sync windows")):
        times = prediction.get(name)
        if times:
            parts.append(
                f"{label} p50 {duration_ms(times['p50'])}, p99 {duration_ms(times['p99'])}, mean "
                f"{duration_ms(times['mean'])}"
            )
    if prediction.get("slowdown") is not None:
        parts.append(f"slowdown {prediction['slowdown']:.2f} (1: undisturbed)")
    return "; ".join(parts)


def _class(job: Document) -> list[str]:
    prediction = prediction_of(job)
    given = class_text(prediction)
    limits = (
        f"the job's own: {job['traffic_class']} without a plan, {job['class_floor']} .. "
        f"{job['class_ceiling']} with one"
    )
    if share := prediction.get("share"):
        limits += f"; paced to {share:.0%} of the link"
    lines = [f"{given}; {limits}" if given else limits]
    if prediction.get("assignment"):
        lines.append(f"why: {prediction['assignment']}")
    numbers = [flow["class"] for flow in job["flows"][:_FLOWS_SHOWN] if flow["class"] is not None]
    if numbers:
        more = len(job["flows"]) - _FLOWS_SHOWN
        lines.append(
            f"in its packets now: {', '.join(map(str, numbers))}"
            + (f" and {more} more flows" if more > 0 else "")
        )
    if job["reports"]:
        lines.append("its ranks report: each message goes out on the queue pair of its class")
    return lines


def _delays(prediction: Document) -> list[str]:
    waits, delays = prediction.get("waits_for") or (), prediction.get("delays") or ()
    if not waits and not delays:
        return ["waits for nobody, and nobody waits for it"]
    return [
        f"waits for {names_text(waits)}" if waits else "waits for nobody",
        f"{names_text(delays)} wait{'s' if len(delays) == 1 else ''} for it"
        if delays
        else "nobody waits for it",
    ]


def _windows(jobs: Sequence[Document]) -> list[str]:
    rows, span_ns = recent_windows(jobs)
    if not rows:
        return []
    picture = text_timeline(rows, WIDTH - 2, span_ns).splitlines()
    span_ms = (span_ns[1] - span_ns[0]) / 1e6
    return [f"Sync windows of the last {duration_ms(span_ms)}", *(f"  {line}" for line in picture)]


def _history(history: Sequence[Document]) -> list[str]:
    lines = []
    for entry in history:
        low, high = entry["class_floor"], entry["class_ceiling"]
        classes = f"class {low}" if low == high else f"class {low} .. {high}"
        lines.append(
            wrapped(f"{duration_ms(entry['ago_ms'])} ago: {classes}: {entry['why']}", "  ")
        )
    return lines
