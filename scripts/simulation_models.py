"""What scripts/simulate takes from models of congestion control: margins, map, incast."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from controller.congestion.dcqcn import PRESETS
from controller.congestion.fixed_point import fixed_point
from controller.congestion.fluid import DcqcnLoop
from controller.congestion.stability import (
    Stability,
    dcqcn_stability,
    margin_ladder,
    timely_stability,
)
from controller.congestion.stability_map import stability_map
from controller.priority.ports import SLOT_ns

US_ns = 1e3
# CoNEXT 2016, section 3: N flows at 40 Gb/s, feedback after tau*.
FLOWS, DELAYS_us = (2, 10, 64), (1, 50, 85, 100)
QUESTION_FLOWS, QUESTION_us = 10, 50

MAP_FLOWS = (2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MAP_DELAYS_us = tuple(range(0, 201, 10))
# 0: DCQCN's own marking. The last is the live marker's window.
MAP_WINDOWS_us = (0.0, 50.0, 192.0, DcqcnLoop(1).window_slots * SLOT_ns / US_ns)
# The delay at which the longest stable window is looked for: one switch, short cables.
NEAR_us = 1.0

INCASTS = ("incast", "incast-shared", "incast-endless")


@dataclass(frozen=True)
class How:
    """How measurements are taken.

    Attributes
    ----------
    folder
        Where figures go.
    processes
        At once.
    quick
        Few seeds and short runs, to try the script; figures mean nothing then.
    """

    folder: Path
    processes: int
    quick: bool


def side_by_side(
    function: Callable[[Any], Any], tasks: Sequence[Any], processes: int
) -> Iterator[tuple[Any, Any]]:
    """Tasks and what `function` gave for them, in the order in which they are done."""
    # Not fork: scipy and numpy have threads.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(min(processes, len(tasks)), context)
    try:
        futures = {executor.submit(function, task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        # After Ctrl-C or an error nobody wants the rest.
        executor.shutdown(wait=False, cancel_futures=True)


# ---- margins ----


def margins(_how: How) -> dict[str, Any]:
    """The published stability analysis beside the exact one, and beside the published numbers."""
    rows = []
    for flows in FLOWS:
        for delay_us in DELAYS_us:
            loop = DcqcnLoop(flows, delay_us * US_ns)
            found = dcqcn_stability(loop)
            rows.append(
                {
                    "flows": flows,
                    "delay_us": delay_us,
                    "published_deg": found.published.margin_deg,
                    "published_stable": found.published.stable,
                    "published_p": found.published.share,
                    "published_q_bytes": found.published.queue_bytes,
                    "published_critical_us": found.published.critical_delay_us,
                    "exact_deg": found.exact.margin_deg,
                    "p": float(fixed_point([loop]).share[0, 0]),
                    "q_bytes": found.exact.queue_bytes,
                    "critical_us": found.exact.critical_delay_us,
                    "stable": found.exact.stable,
                    "missing": found.exact.missing,
                }
            )
    question = DcqcnLoop(QUESTION_FLOWS, QUESTION_us * US_ns)
    return {
        "rows": rows,
        "question": {"flows": QUESTION_FLOWS, "delay_us": QUESTION_us},
        "ladder": [
            {"what": step.what, "margin_deg": step.margin_deg, "alone_deg": step.alone_deg}
            for step in margin_ladder(question)
        ],
        "agreement": _agreement(),
    }


def finite(critical_us: float) -> float | None:
    """A critical delay for JSON; None: none was found, up to 10 ms."""
    return None if np.isinf(critical_us) else critical_us


def _off(found: Stability, margin_deg: float) -> float:
    """How far our published margin is from the authors' own; without one, infinitely."""
    ours_deg = found.published.margin_deg
    return float("inf") if ours_deg is None else abs(ours_deg - margin_deg)


def _agreement() -> dict[str, Any]:
    """Largest differences from the authors' own numbers, which the tests have."""
    from controller.congestion.convergence import convergence_s
    from controller.congestion.timely import TimelyLoop
    from tests.congestion.settings import paper_loop
    from tests.congestion.test_stability_published import CONVERGENCE, MARGINS, TIMELY_MARGINS

    dcqcn = [
        _off(dcqcn_stability(paper_loop(flows, delay_us, link, kmax, step)), margin_deg)
        for (link, kmax, step, delay_us), column in MARGINS.items()
        for flows, margin_deg in column.items()
    ]
    timely = [
        _off(timely_stability(TimelyLoop(flows, delay_us * US_ns)), margin_deg)
        for delay_us, column in TIMELY_MARGINS.items()
        for flows, margin_deg in column.items()
    ]
    times = [
        abs(convergence_s(paper_loop(flows, kmax_KB=kmax, r_ai_Mbps=step, g=1 / per_g)) / s - 1)
        for (kmax, step, per_g), column in CONVERGENCE.items()
        for flows, s in column.items()
    ]
    return {
        "dcqcn_margins": {"numbers": len(dcqcn), "settings": len(MARGINS), "worst": max(dcqcn)},
        "timely_margins": {
            "numbers": len(timely),
            "settings": len(TIMELY_MARGINS),
            "worst": max(timely),
        },
        "convergence": {"numbers": len(times), "settings": len(CONVERGENCE), "worst": max(times)},
    }


# ---- map ----


def longest_window_us(loop: DcqcnLoop) -> float:
    """The longest window up to the live one with which a loop is stable at a short delay.

    0: not even without a window; where there is no fixed point, as if the line went on.
    """

    def is_stable(window_us: float) -> bool:
        found = stability_map(loop, [loop.flows], [NEAR_us], [window_us])
        return bool(found.rightmost_per_s[0, 0, 0] < 0)

    low, high = 0.0, MAP_WINDOWS_us[-1]
    if is_stable(high):
        return high
    if not is_stable(low):
        return 0.0
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (middle, high) if is_stable(middle) else (low, middle)
    return low


def stability(how: How) -> dict[str, Any]:
    """Where the loop is stable, over flows, delays and windows, for both sets of constants."""
    flows = MAP_FLOWS[::3] if how.quick else MAP_FLOWS
    delays_us = MAP_DELAYS_us[::5] if how.quick else MAP_DELAYS_us
    tasks = [(name, count, delays_us) for name in PRESETS for count in flows]
    found: dict[tuple[str, int], dict[str, Any]] = {
        (task[0], task[1]): row for task, row in side_by_side(_map_row, tasks, how.processes)
    }
    return {
        "flows": list(flows),
        "delays_us": list(delays_us),
        "windows_us": list(MAP_WINDOWS_us),
        "near_us": NEAR_us,
        "presets": {name: [found[name, count] for count in flows] for name in PRESETS},
    }


def _map_row(task: tuple[str, int, Sequence[float]]) -> dict[str, Any]:
    """One number of flows; axes of `per_s` are windows and delays."""
    name, flows, delays_us = task
    loop = DcqcnLoop(flows, 0.0, PRESETS[name])
    found = stability_map(loop, [flows], delays_us, MAP_WINDOWS_us)
    critical_us = found.critical_delay_us[:, 0].tolist()
    return {
        "flows": flows,
        "p": float(found.share[0]),
        "exists": bool(found.exists[0]),
        "critical_us": [finite(delay_us) for delay_us in critical_us],
        "per_s": found.rightmost_per_s[:, 0, :].tolist(),
        "longest_window_us": longest_window_us(loop),
    }


# ---- incast ----


def incast(how: How) -> dict[str, Any]:
    """Throughput stability under incast: DCQCN and our changes to it."""
    names = ("incast-quick",) if how.quick else INCASTS
    tasks = [(name, str(how.folder)) for name in names]
    found = {}
    for (name, _), document in side_by_side(_incast, tasks, how.processes):
        print(f"simulate: incast: {name} in {document['took_s']:.0f} s", flush=True)
        found[name] = document
    return {"scenarios": {name: found[name] for name in names}}


def _incast(task: tuple[str, str]) -> dict[str, Any]:
    from controller.lab.congestion_scenario import load_scenario, run
    from controller.lab.kinds import find_scenario

    name, folder = task
    began_s = time.monotonic()
    report = run(load_scenario(find_scenario(name).path))
    document = report.to_json()
    with TemporaryDirectory() as drawn:
        for path in report.figures(Path(drawn)):
            if path.stem == "stability":
                (Path(folder) / f"model-{name}.svg").write_bytes(path.read_bytes())
    return {**document, "took_s": time.monotonic() - began_s}
