"""How much one experiment of flows in steps of time may be."""

from __future__ import annotations

from controller.errors import UsageError

# Cases run side by side, and their arrays want to fit into the cache.
MAX_FLOWS = 200_000
# A step takes some 0.1 ms and 20 ns a flow more: about an hour, and about two.
MAX_STEPS = 30_000_000
MAX_FLOW_STEPS = 300_000_000_000
# Of all queues together: 8 bytes each, and their table is once as large again.
MAX_SAMPLES = 50_000_000


def check_work(flows: int, cases: int, steps: float, samples: float) -> None:
    """Refuse an experiment that would not end in hours, or not fit into memory.

    Parameters
    ----------
    flows
        Of all cases together.
    cases
        Side by side.
    steps, samples
        Of time; of one queue.

    Raises
    ------
    UsageError
        It is too large; names what is, and by how much.
    """
    for what, found, most in (
        ("flows in all cases together", flows, MAX_FLOWS),
        ("steps of time", steps, MAX_STEPS),
        ("flows times steps", flows * steps, MAX_FLOW_STEPS),
        ("samples of all queues", cases * samples, MAX_SAMPLES),
    ):
        if found > most:
            raise UsageError(
                f"{found:,.0f} {what}; allowed: {most:,}.",
                "Take fewer flows, seeds or combinations, a shorter time or longer steps.",
            )
