"""What is predicted of a job and why it has its class, as documents for `explain` and `top`."""

from __future__ import annotations

import time
from typing import Any

from controller.agent.planned import Planned
from controller.agent.planner import Planner
from controller.iteration.tracker import Quantiles

_RECENT_SHOWN = 32
_NS_PER_MS = 1e6


def describe_planner(planner: Planner) -> dict[str, Any]:
    """The policy and what planning costs, for `status`."""
    return {
        "policy": planner.policy_name,
        "events": planner.events,
        "plans_written": planner.plans_written,
        "plan_latency_us": _latency(planner),
        "cpu_share": round(planner.cpu_share(), 4),
    }


def _latency(planner: Planner) -> dict[str, float] | None:
    latency = planner.latency_us()
    return {"p50": round(latency[0], 1), "p99": round(latency[1], 1)} if latency else None


def describe_prediction(planner: Planner, name: str) -> dict[str, Any]:
    """Members ``policy``, ``max_slowdown`` and ``prediction`` of a job's document."""
    with planner.lock:
        planned = planner.find(name)
        if planned is None:
            return {
                "policy": planner.policy_name,
                "max_slowdown_in_force": None,
                "prediction": None,
            }
        seen = planned.tracker.start_ns > 0
        return {
            "policy": planner.policy_name,
            "max_slowdown_in_force": planner.ranking.max_slowdown(planned),
            "prediction": _describe(planner, planned) if seen else None,
        }


def _describe(planner: Planner, planned: Planned) -> dict[str, Any]:
    now_ns = time.monotonic_ns()
    was_open = planned.is_open
    view = planner.ranking.look(planned, now_ns)
    if planned.is_open != was_open:
        planner.plan_soon()  # who looks must not take a window's end from the planner
    tracker = planned.tracker
    coming, current = tracker.prediction, tracker.current
    decision = planned.decision
    assignment = decision.assignment if decision else None
    known = tracker.is_predicted
    phase = "sync" if planned.is_open else "compute" if known else "unknown"
    expected = tracker.expected_bytes(now_ns)
    alone_Bps = view.alone_Bps if view else 0.0
    is_open = planned.is_open
    return {
        "is_periodic": known,
        "why": coming.why,
        "confidence": round(coming.confidence, 3),
        "source": "reports" if planned.by_reports else "dataplane",
        "iterations": coming.iterations,
        "bursts_per_iteration": coming.bursts_per_iteration,
        "period_ms": _ms(coming.period_ns) if known else None,
        "window_ms": _ms(coming.window_ns) if known else None,
        "compute_ms": _ms(coming.compute_ns) if known else None,
        "spread_ms": _ms(coming.spread_ns) if known else None,
        "expected_bytes": round(coming.bytes) if known and coming.bytes else None,
        "next_start_in_ms": _ms(coming.next_start_ns - now_ns) if known else None,
        "phase": phase,
        "progress": round(min(1.0, planned.done_bytes / expected), 4)
        if is_open and expected
        else None,
        "window_open_ms": _ms(now_ns - tracker.start_ns) if is_open else None,
        "deadline_in_ms": _ms(view.deadline_ns - now_ns) if view else None,
        "laxity_ms": _ms(view.laxity_ns(now_ns)) if view else None,
        "alone_bps": round(alone_Bps * 8) if alone_Bps else None,
        "class": assignment.class_floor
        if assignment and assignment.class_floor == assignment.class_ceiling
        else None,
        "class_floor": assignment.class_floor if assignment else None,
        "class_ceiling": assignment.class_ceiling if assignment else None,
        "share": round(assignment.share, 4) if assignment else 0,
        "assignment": assignment.why if assignment else "",
        "waits_for": list(assignment.waits_for) if assignment else [],
        "delays": [
            other.name
            for other in planner.all()
            if other.decision and planned.name in other.decision.assignment.waits_for
        ],
        "class_history": [
            {
                "ago_ms": _ms(now_ns - entry.at_ns),
                "class_floor": entry.assignment.class_floor,
                "class_ceiling": entry.assignment.class_ceiling,
                "why": entry.assignment.why,
            }
            for entry in planned.history
        ],
        "iteration_ms": _quantiles(tracker.iteration_ns()),
        "window_ms_seen": _quantiles(tracker.window_ns()),
        "slowdown": round(tracker.slowdown(alone_Bps), 3) if known and alone_Bps else None,
        "changed": coming.changed,
        "expected_now_bytes": round(current.bytes) if current.bytes else None,
        "recent": [
            {
                "start_ago_ms": _ms(now_ns - window.start_ns),
                "window_ms": _ms(window.window_ns),
                "bytes": window.bytes,
                "period_ms": _ms(window.period_ns),
            }
            for window in tracker.past[-_RECENT_SHOWN:]
        ],
        "plans_written": planned.plans_written,
        "plan_latency_us": _latency(planner),
    }


def _quantiles(found: Quantiles | None) -> dict[str, float] | None:
    if found is None:
        return None
    return {"p50": _ms(found.p50), "p99": _ms(found.p99), "mean": _ms(found.mean)}


def _ms(value_ns: float) -> float:
    return round(value_ns / _NS_PER_MS, 3)
