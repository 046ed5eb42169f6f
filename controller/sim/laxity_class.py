"""The class that the dataplane gives by laxity within a job's limits, as both simulators ask."""

from __future__ import annotations

import math

from controller.priority.laxity import DEFAULT_HYSTERESIS, DEFAULT_THRESHOLDS_ns, class_of
from controller.priority.policy import Assignment


def laxity_class(limits: Assignment, laxity_ns: float, current: int) -> int:
    """Class within the limits in force.

    Parameters
    ----------
    limits
        Whose floor and ceiling hold, the floor below the ceiling.
    laxity_ns
        Of the job now.
    current
        Its class; 0: it has sent nothing yet.
    """
    return class_of(
        math.floor(laxity_ns),
        DEFAULT_THRESHOLDS_ns,
        current,
        DEFAULT_HYSTERESIS,
        limits.class_floor,
        limits.class_ceiling,
    )


def until_next_class_ns(limits: Assignment, laxity_ns: float, current: int, falls: float) -> float:
    """How long until laxity is below the next threshold within the limits; infinity: never.

    Parameters
    ----------
    limits, laxity_ns, current
        As in `laxity_class`.
    falls
        By how much laxity falls in a nanosecond, above 0.
    """
    below = [
        value
        for number, value in enumerate(DEFAULT_THRESHOLDS_ns, start=1)
        if current < number <= limits.class_ceiling and value <= laxity_ns
    ]
    # One more nanosecond, since laxity must be below the threshold.
    return (laxity_ns - max(below) + 1) / falls if below else math.inf
