"""The section of docs/simulated-results.md about marks by windows on links of several rates."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from simulation_text import bold_if, counted, critical_delay, listed, table

# Of the port; a smaller difference may be noise of a run.
COST = 0.02
MODELS = {"flows": "flow by flow", "packets": "packet by packet"}
LEFT_OUT = "(left out)"


def _of(rows: Sequence[Mapping[str, Any]], **wanted: Any) -> list[Mapping[str, Any]]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def _links(document: Mapping[str, Any]) -> list[int]:
    return [link["link_Gbps"] for link in document["links"]]


def costs(document: Mapping[str, Any], link_Gbps: int) -> bool:
    """Whether all models say that the first window costs throughput."""
    window_us = document["windows_us"][0]
    return all(is_worse(document, link_Gbps, window_us, model) for model in MODELS)


def is_worse(document: Mapping[str, Any], link_Gbps: int, window_us: float, model: str) -> bool:
    """Whether at each delay the use of the port is lower than with instant marks by `COST`."""
    return all(
        used(document, link_Gbps, window_us, model, delay_us)
        < used(document, link_Gbps, 0, model, delay_us) - COST
        for delay_us in document["delays_us"]
    )


def used(
    document: Mapping[str, Any], link_Gbps: int, window_us: float, model: str, delay_us: float
) -> float:
    """Share of the port that is used, mean over seeds."""
    rows = _of(
        document["rows"],
        link_Gbps=link_Gbps, window_us=window_us, model=model, delay_us=delay_us,
    )  # fmt: skip
    return _mean(rows, "utilisation")


def _percent(document: Mapping[str, Any], link_Gbps: int, window_us: float) -> str:
    """The range over models and delays."""
    found = [
        used(document, link_Gbps, window_us, model, delay_us)
        for model in MODELS
        for delay_us in document["delays_us"]
    ]
    low, high = f"{100 * min(found):.0f}", f"{100 * max(found):.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def _missing(document: Mapping[str, Any]) -> str:
    """What is left out, and why."""
    groups: dict[tuple[str, float, str], list[int]] = {}
    for row in document["left_out"]:
        key = (row["model"], row["window_us"], row["why"])
        groups.setdefault(key, []).append(row["link_Gbps"])
    return "".join(
        f" Left out, {MODELS[model]}: {listed(links)} Gbit/s with {window_us:g} us, as {why}."
        for (model, window_us, why), links in groups.items()
    )


def marks_section(documents: Mapping[str, Any]) -> str:
    """The section's text, of `model-marks`."""
    document = documents["model-marks"]
    delays = listed([f"{delay_us:g}" for delay_us in document["delays_us"]])
    seconds = max(row["seconds"] for row in document["rows"])
    shortest = min(row["seconds"] for row in document["rows"])
    seeds = listed([
        f"{counted(len({row['seed'] for row in _of(document['rows'], model=model)}), 'seed')} {name}"
        for model, name in MODELS.items()
    ])  # fmt: skip
    head = (
        "link, Gbit/s", "marks", "critical delay, us", "the least of all flows, us",
        *(
            f"{name}: {what}"
            for name in MODELS.values()
            for what in ("port used, %", "queue, mean/std, KB", "Jain")
        ),
    )  # fmt: skip
    lines = [
        _line(document, link_Gbps, window_us)
        for link_Gbps in _links(document)
        for window_us in document["windows_us"]
    ]
    return f"""{verdict(document)}

Linearised, for every number of flows from {document["looked_at"][0]} to {document["looked_at"][1]} that has a fixed point ({_fixed_points(document)}):

{chr(10).join(f"* {claim}" for claim in claims(document))}

`{document["command"]}`; one linearised row of 40 Gbit/s: `{document["stability_command"]} --window-us {document["windows_us"][0]:g}`. {document["flows"]} flows without end, `{document["preset"]}` constants
and marking line [scaled to the link](control.md#scaling-with-the-link), windows of {document["slots"]} slots, packets of {document["packet_bytes"]:,} bytes, `drain` {document["drain"]:g}, echoes {document["echo"]}. *Critical delay*: linearised, of {document["flows"]}
flows, 0: unstable at any delay; then the least of all numbers of flows that have a fixed point. The other cells
are for feedback after {delays} us; bold: at each delay used by more than {100 * COST:g} points less than with instant marks. Packets are marked as they arrive; flow by flow marks are of the queue's moment at the sender, so there the
queue is no part of the delay, and a window of other slots than the live ones runs with all rates and times slowed evenly. {shortest:g} to {seconds:g} s are simulated, below 40 Gbit/s longer as times stretch; {seeds}.{_missing(document)}

{table(head, lines, left=2)}"""


def _fixed_points(document: Mapping[str, Any]) -> str:
    """``2 to 31 at 100 Gbit/s, 2 to 14 at 40, 10 and 1 Gbit/s``."""
    groups: dict[str, list[int]] = {}
    for row in _of(document["linear"], window_us=0):
        flows = row["fixed_points"]
        whole = flows == list(range(flows[0], flows[-1] + 1))
        text = f"{flows[0]} to {flows[-1]}" if whole else listed(flows)
        groups.setdefault(text, []).append(row["link_Gbps"])
    return ", ".join(f"{flows} at {listed(links)} Gbit/s" for flows, links in groups.items())


def verdict(document: Mapping[str, Any]) -> str:
    """What the live window costs, and where."""
    window_us, flows = document["windows_us"][0], document["flows"]
    costly = [link_Gbps for link_Gbps in _links(document) if costs(document, link_Gbps)]
    others = [link_Gbps for link_Gbps in _links(document) if link_Gbps not in costly]
    parts = []
    if costly:
        shares = listed([_shares(document, link_Gbps) for link_Gbps in costly])
        parts.append(
            f"**The live window of {window_us:g} us costs {flows} long flows throughput at {listed(costly)} Gbit/s.** "
            f"Over models and delays, they use {shares}."
        )
    if others:
        shares = listed([_shares(document, link_Gbps) for link_Gbps in others])
        parts.append(
            f"At {listed(others)} Gbit/s the live window of {window_us:g} us does not surely cost more than {100 * COST:g} points: {shares}."
        )
    return " ".join(parts)


def _shares(document: Mapping[str, Any], link_Gbps: int) -> str:
    live, instant = (
        _percent(document, link_Gbps, window_us) for window_us in (document["windows_us"][0], 0)
    )
    return f"{live} of the port at {link_Gbps} Gbit/s (instant: {instant})"


def claims(document: Mapping[str, Any]) -> list[str]:
    """For each kind of marks, where all loops with a fixed point are stable."""
    found = []
    for window_us in document["windows_us"]:
        rows = _of(document["linear"], window_us=window_us)
        never = [row["link_Gbps"] for row in rows if row["most_critical_us"] == 0]
        parts = []
        if never:
            parts.append(f"unstable at any delay at {listed(never)} Gbit/s")
        within = [
            f"{_within(row['least_critical_us'])} at {row['link_Gbps']} Gbit/s"
            for row in rows
            if row["link_Gbps"] not in never and row["least_critical_us"] != 0
        ]
        if within:
            parts.append(f"stable with feedback within {listed(within)}")
        some = [
            row["link_Gbps"]
            for row in rows
            if row["link_Gbps"] not in never and row["least_critical_us"] == 0
        ]
        if some:
            parts.append(f"for some numbers of flows only at {listed(some)} Gbit/s")
        found.append(f"{_marks(window_us)}: {', '.join(parts)}")
    return found


def _within(delay_us: float | None) -> str:
    """Rounded down, so that it holds."""
    return "10 ms" if delay_us is None else f"{int(delay_us)} us"


def _marks(window_us: float) -> str:
    return f"window of {window_us:g} us" if window_us else "instant"


def _line(document: Mapping[str, Any], link_Gbps: int, window_us: float) -> list[str]:
    here = {"link_Gbps": link_Gbps, "window_us": window_us}
    (linear,) = _of(document["linear"], **here)
    unstable = linear["exists"] and linear["critical_us"] == 0
    cells = [
        f"{link_Gbps}",
        _marks(window_us),
        bold_if(critical_delay(linear["critical_us"]), unstable)
        if linear["exists"]
        else "no fixed point",
        critical_delay(linear["least_critical_us"]),
    ]
    for model in MODELS:
        rows = [
            _of(document["rows"], model=model, delay_us=delay_us, **here)
            for delay_us in document["delays_us"]
        ]
        if not all(rows):
            cells += [LEFT_OUT, "", ""]
            continue
        shares = ", ".join(f"{100 * _mean(each, 'utilisation'):.1f}" for each in rows)
        cells += [
            bold_if(shares, bool(window_us) and is_worse(document, link_Gbps, window_us, model)),
            ", ".join(
                f"{_mean(each, 'queue_mean_bytes') / 1e3:.0f}/{_mean(each, 'queue_std_bytes') / 1e3:.0f}"
                for each in rows
            ),
            ", ".join(f"{_mean(each, 'jain'):.3f}" for each in rows),
        ]
    return cells
