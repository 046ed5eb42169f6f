"""How one link's rate is shared: strict priority with floors, max-min inside a class."""

from __future__ import annotations

from collections.abc import Sequence

from controller.errors import UsageError


def check_rate(rate_Bps: float) -> None:
    """Raise UsageError unless a link has a rate."""
    if not 0 < rate_Bps < float("inf"):
        raise UsageError(f"Link rate is {rate_Bps!r} bytes/s; allowed: a number above 0.")


def check_floor(floor_share: float, classes: int) -> None:
    """Raise UsageError unless the floors of so many classes fit on a link."""
    if not 0 <= floor_share * classes <= 1:
        raise UsageError(
            f"Floor of a class is {floor_share!r} of the link; allowed: 0 .. {1 / classes:.3g}, so "
            f"that {classes} floors fit."
        )


def allocate_Bps(
    link_Bps: float, floor_share: float, classes: Sequence[int], caps_Bps: Sequence[float]
) -> list[float]:
    """Rate of each flow on a link that every flow wants as much of as it may have.

    Like HTB with a class's floor as `rate`, the link as `ceil` and the class as `prio`: every
    class first gets its floor, then what is left goes to the highest class that can use it.

    Parameters
    ----------
    link_Bps
        Rate of the link.
    floor_share
        What a class with traffic is sure of, as a share of the link.
    classes
        Of each flow; a higher number goes first.
    caps_Bps
        Most that each flow sends (pacing); infinity: not paced.

    Returns
    -------
    list of float
        Bytes a second, in the order of the flows. Their sum is the smaller of the link and the
        caps' sum.
    """
    members: dict[int, list[int]] = {}
    for flow, number in enumerate(classes):
        members.setdefault(number, []).append(flow)
    demand = {
        number: min(link_Bps, sum(caps_Bps[flow] for flow in flows))
        for number, flows in members.items()
    }
    granted = {number: min(wanted, floor_share * link_Bps) for number, wanted in demand.items()}
    left = max(0.0, link_Bps - sum(granted.values()))
    rates = [0.0] * len(classes)
    for number in sorted(members, reverse=True):
        extra = min(left, demand[number] - granted[number])
        left -= extra
        flows = members[number]
        filled = max_min_Bps(granted[number] + extra, [caps_Bps[flow] for flow in flows])
        for flow, rate_Bps in zip(flows, filled, strict=True):
            rates[flow] = rate_Bps
    return rates


def max_min_Bps(total_Bps: float, caps_Bps: Sequence[float]) -> list[float]:
    """Max-min fair parts of a total: equal, except where a cap is less (water-filling).

    Parameters
    ----------
    total_Bps
        What there is.
    caps_Bps
        Most that each can use.

    Returns
    -------
    list of float
        In the order of the caps; the sum is the smaller of the total and the caps' sum.
    """
    rates = [0.0] * len(caps_Bps)
    left = total_Bps
    order = sorted(range(len(caps_Bps)), key=lambda flow: caps_Bps[flow])
    for place, flow in enumerate(order):
        rates[flow] = min(caps_Bps[flow], left / (len(order) - place))
        left -= rates[flow]
    return rates
