"""Assignments that keep the limits which a job's configuration sets."""

from __future__ import annotations

from controller.priority.policy import Assignment, JobView


def exactly(
    job: JobView,
    traffic_class: int,
    *,
    share: float = 0.0,
    shift_ns: int = 0,
    waits_for: tuple[str, ...] = (),
    why: str = "",
    weight: float = 1.0,
) -> Assignment:
    """One class, the nearest to `traffic_class` that the job allows."""
    number = clamp(job, traffic_class)
    return Assignment(number, number, share, shift_ns, waits_for, why, weight)


def clamp(job: JobView, traffic_class: int) -> int:
    """Class within the job's limits that is nearest to `traffic_class`."""
    return min(max(traffic_class, job.class_floor), job.class_ceiling)
