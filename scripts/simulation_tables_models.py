"""Sections of docs/simulated-results.md about models of congestion control."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from simulation_text import bold_if, counted, critical_delay, listed, table

from controller.sim.congestion.experiment import STANDARD
from controller.sim.congestion.steady_experiment import SWING_LEFT

MARGIN_BOUND_deg, TIME_BOUND = 0.1, 1e-4
# Rows of the map's table; the figure has all.
OTHERS = (
    ("length of a window", "window_mean_ns"),
    ("its slowest 10 %", "window_slowest_ns"),
    ("port used while a window is open", "utilisation"),
    ("p99 of the queue", "queue_p99_bytes"),
)
MAP_SHOWN = (2, 4, 8, 10, 16, 32, 64, 128, 256)
NONE = "none"


def _deg(margin: float | None) -> str:
    return NONE if margin is None else f"{margin:+.2f}"


def _KB(size_bytes: float | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / 1e3:.1f}"


# ---- margins ----


def contradicted(row: Mapping[str, Any]) -> bool:
    """Whether the published margin says another thing than the exact roots."""
    published = row["published_stable"]
    return published is not None and published != (row["stable"] and not row["missing"])


def margins_section(documents: Mapping[str, Any]) -> str:
    """The section's text, of `model-margins`."""
    document = documents["model-margins"]
    agreement, rows = document["agreement"], document["rows"]
    dcqcn, timely, times = (
        agreement[key] for key in ("dcqcn_margins", "timely_margins", "convergence")
    )
    met = dcqcn["worst"] <= MARGIN_BOUND_deg and times["worst"] <= TIME_BOUND
    wrong = [row for row in rows if contradicted(row)]
    lines = [
        [
            f"{row['flows']}",
            f"{row['delay_us']}",
            bold_if(_deg(row["published_deg"]), contradicted(row)),
            "no fixed point" if row["missing"] else _deg(row["exact_deg"]),
            "stable" if row["stable"] else "unstable",
            f"{row['published_p']:.4g}",
            f"{row['p']:.4g}",
            _KB(row["q_bytes"]),
            NONE if row["published_critical_us"] is None else f"{row['published_critical_us']:.1f}",
            "" if row["missing"] or row["critical_us"] is None else f"{row['critical_us']:.1f}",
        ]
        for row in rows
    ]
    question, ladder = document["question"], document["ladder"]
    steps = [
        [step["what"], _deg(step["margin_deg"]), "" if index < 1 else _deg(step["alone_deg"])]
        for index, step in enumerate(ladder)
    ]
    return f"""{"The published method is met." if met else "**The published method is not met.**"} Against the authors' own numbers (Zhu et al., "ECN or Delay", CoNEXT 2016), largest differences: {dcqcn["numbers"]} phase
margins of DCQCN in {dcqcn["settings"]} settings {dcqcn["worst"]:.3f} degrees, {timely["numbers"]} of patched TIMELY {timely["worst"]:.3f} degrees (bound: {MARGIN_BOUND_deg:g}); {times["numbers"]} convergence times
{times["worst"]:.1e} relative (bound: {TIME_BOUND:.0e}).

But it says another thing than the model that it is about in {len(wrong)} of {len(rows)} settings below (bold). Exact: fixed point and linearisation
of the same equations without approximations, and the roots of the delayed system. A critical delay is the smallest at which the loop
is unstable. Where p* is above Pmax there is no fixed point, and the queue cycles.

`scripts/simulate margins`; one row: `controller lab stability --flows {question["flows"]} --delay-us {question["delay_us"]}`.

{table(("flows", "delay, us", "published margin, deg", "exact margin, deg", "exact verdict", "published p*", "exact p*", "queue at exact p*, KB", "published critical delay, us", "exact"), lines)}

Why they differ with {question["flows"]} flows at {question["delay_us"]} us: each step replaces one more of the published approximations by the model's own derivative; the last
column replaces this one alone.

{table(("step", "margin, deg", "alone, deg"), steps, left=1)}"""


# ---- queue ----


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row from those of several seeds."""
    found = dict(rows[0])
    for key in ("queue_mean_bytes", "queue_std_bytes", "utilisation", "empty", "left", "hz"):
        found[key] = statistics.fmean(row[key] for row in rows)
    return {**found, "seeds": len(rows)}


def queue_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Means over the seeds of each setting, in the order of the document."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in document["rows"]:
        key = tuple(row[name] for name in ("model", "line", "scale", "echo", "delay_us", "start"))
        groups.setdefault(key, []).append(row)
    return [_means(rows) for rows in groups.values()]


def swings(row: Mapping[str, Any]) -> bool:
    """Whether more than `SWING_LEFT` of a swing is left one period later."""
    return bool(row["left"] > SWING_LEFT)


def _does(row: Mapping[str, Any]) -> str:
    return "swings" if swings(row) else "settles"


def _model_name(row: Mapping[str, Any]) -> str:
    name = {"fluid": "fluid", "flows": "flow by flow", "packets": "packets"}[row["model"]]
    if row["echo"]:
        name += f", echoes {row['echo']}"
    if row["scale"] > 1:
        name += f", {row['scale']} x flows and link"
    return name + (", endless line" if row["line"] == "endless" else "")


def queue_section(documents: Mapping[str, Any]) -> str:
    """The section's text, of `model-queue`."""
    document = documents["model-queue"]
    rows = queue_rows(document)
    lines = [
        [
            _model_name(row), row["start"], f"{row['delay_us']:g}", f"{row['seeds']}",
            _KB(row["queue_mean_bytes"]), _KB(row["queue_std_bytes"]),
            f"{100 * row['utilisation']:.1f}", f"{row['left']:.2f}",
            f"{row['hz']:.0f}" if swings(row) else "", bold_if(_does(row), swings(row)),
        ]
        for row in rows
    ]  # fmt: skip
    return f"""{queue_verdict(document, rows)}

`scripts/simulate queue`; more of it: `controller lab congestion steady`. 40 Gbit/s, Kmin 5 KB, Kmax 200 KB, Pmax 1 %, packets of 1,000 bytes. *Left*: autocorrelation of the
queue after one period, 1 for a swing that goes on, 0 for noise; above {SWING_LEFT:g} it swings. *Echoes*: what the receiver does with a mark
that comes less than 50 us after a CNP: it is held until the 50 us are over, as ours does, or forgotten. *Endless line*: marks go on rising along
the line beyond Kmax, without the step to 100 % there. q* is the queue of the fixed point.

{table(("model", "begins at", "delay, us", "seeds", "queue, KB", "its std, KB", "link used, %", "left", "Hz", ""), lines, left=2)}"""


def _find(rows: Sequence[Mapping[str, Any]], model: str, **wanted: Any) -> list[Mapping[str, Any]]:
    plain = {"line": "paper", "scale": 1, **wanted}
    return [
        row
        for row in rows
        if row["model"] == model and all(row[key] == value for key, value in plain.items())
    ]


def queue_verdict(document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """What the figures say about the published verdict."""
    delay_us = document["delay_us"]
    at = {"delay_us": delay_us}
    parts = [
        f"The published margin of {document['flows']} flows at {delay_us} us is {_deg(document['published_deg'])} degrees, the exact one "
        f"{_deg(document['exact_deg'])} (critical delay {document['critical_us']:.1f} us). So the fixed point, "
        f"{_KB(document['fixed_point_bytes'])} KB, is {'stable' if document['exact_deg'] > 0 else 'unstable'} "
        "to small disturbances; what the model and a port do is another matter:",
        "",
    ]
    fluid = _find(rows, "fluid", **at)
    for does in ("settles", "swings"):
        starts = [row["start"] for row in fluid if _does(row) == does]
        if starts:
            parts.append(f"* the fluid model {does} when it begins at {listed(starts)}")
    kmax, rest = document["kmax_bytes"], document["fixed_point_bytes"]
    beyond = {swings(row): row["factor"] > kmax / rest for row in fluid if row["factor"]}
    if beyond == {False: False, True: True}:
        parts[-1] += (
            f": once the queue has passed Kmax ({kmax / rest:.2f} q*), above which every packet is marked, "
            "it never comes back to rest"
        )
    endless = _find(rows, "fluid", line="endless", **at)
    parts += [f"* without the step at Kmax it {_does(row)} from {row['start']}" for row in endless]
    for model, name in (("flows", "flow by flow"), ("packets", "packet by packet")):
        for echo in dict.fromkeys(row["echo"] for row in rows if row["model"] == model):
            parts.append(f"* {name}, echoes {echo}, it {_by_delay(_find(rows, model, echo=echo))}")
    for row in _find(rows, "packets", line="endless", **at):
        parts.append(f"* packet by packet without the step at Kmax it {_does(row)}")
    pairs = _scaled(rows)
    for large, small in pairs:
        parts.append(
            f"* {large['scale']} times the flows on {large['scale']} times the link, where noise of single packets is {large['scale'] ** 0.5:.1f} times smaller"
            f"{', without that step' if large['line'] == 'endless' else ''}: the queue's std is {_KB(large['queue_std_bytes'])} KB, beside {_KB(small['queue_std_bytes'])} KB"
        )
    disputed = document["published_deg"] < 0 < document["exact_deg"]
    sustained = [large["line"] for large, small in pairs if is_sustained(large, small)]
    if disputed and sustained and all(swings(row) for row in _find(rows, "flows", **at)):
        causes = ["noise"] + ["the step at Kmax alone"] * ("endless" in sustained)
        parts += [
            "",
            f"**The fixed point is stable on paper, and real flows do not stay there.** What keeps them swinging is not {' nor '.join(causes)}. "
            "What the fluid model averages out, CNPs 50 us apart and a timer of each flow, acts like more delay in the loop. The published "
            "verdict (unstable) is wrong about the model and right about the port.",
        ]
    return "\n".join(parts)


def _scaled(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Runs of more flows, each with that of as many as asked for."""
    alike = ("model", "line", "echo", "delay_us", "start")
    return [
        (large, small)
        for large in rows
        for small in rows
        if large["scale"] > 1 == small["scale"] and all(large[key] == small[key] for key in alike)
    ]


def is_sustained(large: Mapping[str, Any], small: Mapping[str, Any]) -> bool:
    """Whether a swing is as large with more flows; as noise it would shrink by their root."""
    as_noise_bytes = small["queue_std_bytes"] / large["scale"] ** 0.5
    middle_bytes = (as_noise_bytes + small["queue_std_bytes"]) / 2
    return swings(large) and bool(large["queue_std_bytes"] > middle_bytes)


def _by_delay(rows: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for does in ("settles", "swings"):
        delays = sorted({f"{row['delay_us']:g}" for row in rows if _does(row) == does}, key=float)
        if delays:
            parts.append(f"{does} at {listed(delays)} us")
    return ", ".join(parts)


# ---- map ----


def map_section(documents: Mapping[str, Any]) -> str:
    """The section's text, of `model-map`."""
    document = documents["model-map"]
    windows_us = document["windows_us"]
    live_us, near_us = windows_us[-1], document["near_us"]
    lines, claims = [], []
    for name, rows in document["presets"].items():
        for row in rows:
            if row["flows"] in MAP_SHOWN:
                lines.append([
                    name, f"{row['flows']}", bold_if(f"{row['p']:.4f}", not row["exists"]),
                    *(critical_delay(row["critical_us"][index]) for index in range(len(windows_us))),
                    f"{row['longest_window_us']:.0f}",
                ])  # fmt: skip
        resting = [row for row in rows if row["exists"]]
        live = [row for row in resting if row["longest_window_us"] >= live_us]
        plain = [row for row in resting if row["per_s"][0][0] < 0]
        windows = [
            f"{row['longest_window_us']:.0f} us ({row['flows']} flows)"
            for row in resting
            if row["longest_window_us"]
        ]
        claims.append(
            f"* `{name}`: there is a fixed point for {_count(resting, rows)}. Without delay it is stable for {_count(plain, rows)}, "
            + bold_if(f"with the live window of {live_us:g} us for {_count(live, rows)}", not live)
            + (f". The longest stable windows at {near_us:g} us: {listed(windows)}" * bool(windows))
        )
    head = ["constants", "flows", "p*"]
    head += [f"window {us:g} us" if us else "no window" for us in windows_us]
    head.append(f"longest window at {near_us:g} us")
    return f"""Marks by a window's average are a long delay in the loop. Of flows without end at 40 Gbit/s:

{chr(10).join(claims)}

Where the loop is not stable the queue cycles between empty and full. The next section tells what that means for the port, on other links too; for
windows of jobs see [incast](#throughput-stability-under-incast).

`scripts/simulate map`. Critical delays in us by the exact roots, 0: unstable without any delay; then the longest window that is stable at
{near_us:g} us. Bold p*: above Pmax (1 %), so there is no fixed point; what follows then would hold if the marking line went on beyond Kmax.

{table(head, lines, left=1)}

![where the loop is stable](results/model-map.svg)"""


def _count(some: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> str:
    if not some:
        return f"none of {len(rows)} numbers of flows"
    return f"{len(some)} of {len(rows)} numbers of flows ({listed([row['flows'] for row in some])})"


# ---- incast ----


def _pm(found: Mapping[str, Any] | None, form: str) -> str:
    if found is None:
        return ""
    half = found["ci95"]
    return format(found["mean"], form) + ("" if half is None else f" ± {format(half, form[-3:])}")


def incast_section(documents: Mapping[str, Any]) -> str:
    """The section's text, of `model-incast`."""
    scenarios = documents["model-incast"]["scenarios"]
    head = """`scripts/simulate incast`. Standard DCQCN into one port, and beside it: `prediction` (a window's first rate and the floor of the target
rate come from its bytes), `window` (marks by the average of the live window), `phases` (steps of the increase by the part of the window), `all`
three; `live` is all with the live marker's virtual queue, `mltcp` weighs steps by the bytes sent. Throughput stability of the port is 1 - CoV of
its bins while a job's window is open. Bold: surely less stable than standard DCQCN."""
    return "\n\n".join([head, *(incast_part(*each) for each in scenarios.items())])


def incast_part(name: str, document: Mapping[str, Any]) -> str:
    """Table, verdict and figure of one scenario."""
    degrees = document["degrees"]
    compared = list(document["mean_change_percent"]["stability"])
    head = ["senders", STANDARD, "most possible, %"]
    head += [f"{variant}: change, %" for variant in compared]
    lines = [
        [
            degree,
            _pm(found[STANDARD]["stability"], ".3f"),
            f"{found['possible_change_percent']:+.1f}",
            *(_change(found[variant]["stability_change_percent"]) for variant in compared),
        ]
        for degree, found in degrees.items()
    ]
    means = document["mean_change_percent"]["stability"]
    lines.append(["mean", "", "", *(_change(means[variant]) for variant in compared)])
    conditions = document["setting"]
    windows = conditions["workload"]["window_bytes"]
    load = f"windows of {windows / 1e6:g} MB" if windows else "flows without end"
    return f"""### `{name}`

{incast_verdict(document)}

`controller lab congestion {name}`: {counted(document["jobs"], "job")}, {load}, {conditions["parameters"]["link_Bps"] * 8 / 1e9:g} Gbit/s, bins of {conditions["bin_ns"] / 1e6:g} ms, {counted(document["seeds"], "seed")}.

{table(head, lines)}

Beside stability, change against `{STANDARD}`, means over the numbers of senders:

{others_table(document, compared)}

![throughput stability](results/model-{name}.svg)"""


def _change(found: Mapping[str, Any] | None) -> str:
    worse = found is not None and found["mean"] < -(found["ci95"] or 0.0)
    return bold_if(_pm(found, "+.1f"), worse)


def others_table(document: Mapping[str, Any], compared: Sequence[str]) -> str:
    """What else the variants change; of what every number of senders has measured."""
    lines = []
    for label, key in OTHERS:
        cells = [
            [found[variant][key] for variant in (STANDARD, *compared)]
            for found in document["degrees"].values()
        ]
        if any(cell is None for row in cells for cell in row):
            continue
        changes = [
            statistics.fmean(row[index + 1]["mean"] / row[0]["mean"] - 1 for row in cells)
            for index in range(len(compared))
        ]
        lines.append([label, *(f"{100 * change:+.1f} %" for change in changes)])
    return table(("", *(f"`{variant}`" for variant in compared)), lines, left=1)


def incast_verdict(document: Mapping[str, Any]) -> str:
    """Whether the target is reached, and if not, why."""
    target, degrees = document["target_percent"], document["degrees"]
    lines = []
    for variant, found in document["mean_change_percent"]["stability"].items():
        if found is None:
            continue
        others = [
            f"of each {what} {_pm(document['mean_change_percent'][key][variant], '+.1f')} %"
            for what, key in (("job", "job_stability"), ("flow", "flow_stability"))
            if document["mean_change_percent"][key][variant] is not None
        ]
        verdict = "reached" if found["mean"] >= target else "**missed**"
        lines.append(
            f"* `{variant}`: {_pm(found, '+.1f')} % ({verdict}: {target:+g} %); {', '.join(others)}"
        )
    most = {degree: row["possible_change_percent"] for degree, row in degrees.items()}
    short = [degree for degree, value in most.items() if value < target]
    if short:
        standard = [degrees[degree][STANDARD]["stability"]["mean"] for degree in short]
        where = "any of these numbers of" if len(short) == len(degrees) else listed(short)
        lines += [
            "",
            f"{target:+g} % cannot be had with {where} senders: stability is 1 at most, and standard DCQCN has "
            f"{min(standard):.3f} to {max(standard):.3f} there. It would have to be below {1 / (1 + target / 100):.3f}.",
        ]
    return "\n".join(lines)
