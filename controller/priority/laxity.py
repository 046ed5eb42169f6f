"""Laxity -> class: less time to spare, higher class.

The dataplane (bpf/priority.h) computes the same from the same integers: this is what it is
tested against, and what simulations run.
"""

from __future__ import annotations

from collections.abc import Sequence

from controller.errors import UsageError
from controller.priority.classes import CLASSES
from controller.priority.jobs import JobPlan
from controller.priority.ranges import MAX_TIME_ns, check_integer, check_share

_US = 1_000
_MS = 1_000_000
_S = 1_000_000_000

# Laxity below which class 1, 2, .. 7 begins. Training iterations last from about 50 ms to some
# seconds, so a job with half a second to spare can wait for everybody. Each threshold is at most
# half of the one before: a flow that falls behind climbs one class at a time, and hysteresis
# never spans two thresholds. The last is what a change of class needs to work at all: it waits for
# a message boundary, and a message of 16 MB takes 5 ms at 25 Gbit/s.
DEFAULT_THRESHOLDS_ns = tuple(ms * _MS for ms in (500, 200, 100, 50, 20, 10, 5))
# A message more or less changes the laxity by its time on the wire; an eighth of the smallest
# threshold (0.6 ms) is 2 MB at 25 Gbit/s.
DEFAULT_HYSTERESIS = 1 / 8


def check_thresholds(thresholds_ns: Sequence[int], hysteresis: float) -> None:
    """Raise UsageError unless these are 7 falling times from 1 us, and a share in 0 .. 1.

    A threshold of 0 is refused because a share of it is no band: a flow would flap there.
    """
    if len(thresholds_ns) != CLASSES - 1:
        raise UsageError(
            f"Laxity has {len(thresholds_ns)} thresholds; allowed: {CLASSES - 1}, for classes 1 .. "
            f"{CLASSES - 1}."
        )
    for number, value in enumerate(thresholds_ns, start=1):
        check_integer(f"Laxity threshold of class {number} in ns", value, _US, MAX_TIME_ns // 2)
    for number in range(1, len(thresholds_ns)):
        above, below = thresholds_ns[number - 1], thresholds_ns[number]
        if below >= above:
            raise UsageError(
                f"Laxity threshold of class {number + 1} is {below} ns, not below class {number}'s "
                f"{above} ns; allowed: falling times (less laxity, higher class)."
            )
    check_share("Laxity hysteresis", hysteresis, zero=True)


def hysteresis_q8(hysteresis: float) -> int:
    """The share as the dataplane has it, in 1/256."""
    return round(hysteresis * 256)


def lowering_ns(thresholds_ns: Sequence[int], hysteresis: float) -> tuple[int, ...]:
    """Laxity from which on class 1, 2, .. 7 is left downward: its threshold and a band above."""
    share_q8 = hysteresis_q8(hysteresis)
    return tuple(value + (value >> 8) * share_q8 for value in thresholds_ns)


def laxity_ns(plan: JobPlan, now_ns: int, bytes_done: int) -> int:
    """Time to spare: until the deadline, less what the remaining bytes need at the plan's rate.

    Parameters
    ----------
    plan
        With a rate of 0 (not known) the remaining bytes count as no time.
    now_ns
        On the clock of the plan's times.
    bytes_done
        Payload that has left in this iteration, after compression.

    Returns
    -------
    int
        Negative when the deadline cannot be kept. Whole KiB and KiB/s go in: the time of the
        remaining bytes is off by less than 1 KiB, and by up to 0.1 % at 1 MB/s, less above.
    """
    remaining_KiB = max(0, plan.wire_bytes - bytes_done) >> 10
    rate_KiBps = max(1, plan.rate_Bps >> 10)
    needed_ns = remaining_KiB * _S // rate_KiBps if plan.rate_Bps else 0
    return plan.deadline_ns - now_ns - needed_ns


def class_of(
    laxity: int,
    thresholds_ns: Sequence[int],
    current_class: int,
    hysteresis: float = DEFAULT_HYSTERESIS,
    floor: int = 0,
    ceiling: int = CLASSES - 1,
) -> int:
    """The class that a laxity calls for.

    Raising is immediate. A class is left downward only when the laxity is above its threshold
    by `hysteresis` (a share of it), so that a laxity near a threshold does not flap.

    Parameters
    ----------
    laxity
        In ns.
    thresholds_ns
        Laxity below which class 1, 2, .. 7 begins; falling.
    current_class
        The class in force; 0 for a flow that has none yet.
    hysteresis
        Share in 0 .. 1, in steps of 1/256.
    floor, ceiling
        Limits of the result.
    """
    raised = sum(laxity < value for value in thresholds_ns)
    kept = sum(laxity < value for value in lowering_ns(thresholds_ns, hysteresis))
    wanted = min(max(current_class, raised), kept)
    return min(max(wanted, floor), ceiling)
