"""The SLO guard: when a job that waits has to go first so that it keeps its `max_slowdown`."""

from __future__ import annotations

from controller.priority.policy import JobView

# What each other class with traffic keeps of the link, whatever the order (classes.py, _FLOORS).
FLOOR_SHARE = 0.05
# The lowered jobs finish the message that they are in, in their old class; 128 KiB is the
# AllReduce engine's chunk.
MESSAGE_BYTES = 128 * 1024
_MESSAGE_SHARE = 0.05
# From the event to the plan in force (the agent's bound for it), and as much for the timer.
REACTION_ns = 2_000_000


def guard_margin_ns(job: JobView, others: int, link_Bps: float) -> float:
    """Laxity at which a waiting job has to be put first to end by its deadline.

    Above zero, because going first is not having the link: the floors of the others' classes
    make the rest slower, and the change itself waits for the plan and a message boundary.

    Parameters
    ----------
    job
        That waits.
    others
        Jobs that send beside it.
    link_Bps
        Payload rate of the link.
    """
    floors = min(0.5, FLOOR_SHARE * others)
    message_ns = MESSAGE_BYTES / link_Bps * 1e9 if link_Bps > 0 else 0.0
    # On a slow link a message that takes a good part of the iteration would be a smaller one.
    change_ns = REACTION_ns + min(message_ns, _MESSAGE_SHARE * job.ideal_period_ns)
    return (job.rest_ns * floors + change_ns) / (1 - floors)
