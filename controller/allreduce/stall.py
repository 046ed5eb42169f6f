"""Which rank keeps the others waiting, from what each of them waits for.

A rank that waits for data cannot tell whether its neighbour is the cause or waits itself. So ranks
whose time is over tell one another what they wait for: at fault are those that others wait for and
that do not wait themselves. One that has not called the operation reports that it waits for none;
one that hangs reports nothing at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Waits = Mapping[int, str]  # rank -> what is missing from it
_TEXT_LIMIT = 200


def culprits(reports: Mapping[int, Waits], rank: int, size: int) -> dict[int, str]:
    """Ranks at fault, and what is missing from each.

    Parameters
    ----------
    reports
        Reporting rank -> what it waits for; own report included.
    rank, size
        Own rank, and how many there are.

    Returns
    -------
    dict
        Those that somebody waits for and that wait for nobody. When all wait, everything that is
        waited for: a circle, or packets that vanish. Rank 0 relays the reports: when it relayed
        none, it is the one that hangs.
    """
    missing: dict[int, str] = {}
    for _, waits in sorted(reports.items()):
        for other, text in waits.items():
            # A missing call says more than missing data.
            if other not in missing or "called" in text:
                missing[other] = text
    if rank != 0 and size > 2 and set(reports) == {rank}:
        return {0: missing.get(0, "relays nothing of what the other ranks say")}
    at_fault = {other: text for other, text in missing.items() if not reports.get(other)}
    return dict(sorted((at_fault or missing).items()))


def to_json(waits: Waits) -> dict[str, str]:
    """As it travels."""
    return {str(rank): text for rank, text in waits.items()}


def from_json(document: Any, size: int) -> dict[int, str]:
    """What another rank sent; whatever is no report of this group is left out."""
    if not isinstance(document, Mapping):
        return {}
    found = {}
    for key, text in document.items():
        if isinstance(key, str) and key.isascii() and key.isdecimal() and isinstance(text, str):
            rank = int(key[:9])
            if rank < size:
                found[rank] = text[:_TEXT_LIMIT]
    return found
