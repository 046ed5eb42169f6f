"""Pictures of a congestion scenario as SVG: stability by incast degree, queues over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from controller.lab.drawing import draw
from controller.sim.congestion.experiment import IncastTable
from controller.sim.congestion.steady_experiment import SteadyTable
from controller.units import format_duration

# Of a queue's series: what is shown.
_SHOWN_S = 0.02


def draw_incast(table: IncastTable, folder: Path) -> list[Path]:
    """Draw ``stability.svg`` and ``queue.svg``: by incast degree, a line for each variant.

    Raises
    ------
    UsageError
        matplotlib is not there, or the folder cannot be written to.
    """
    return draw(
        {
            "stability": lambda: _by_degree(table, "stability", 1.0, "throughput stability"),
            "queue": lambda: _by_degree(table, "queue_p99_bytes", 1e3, "p99 of the queue, KB"),
        },
        folder,
    )


def draw_steady(table: SteadyTable, folder: Path) -> list[Path]:
    """Draw ``queues.svg``: the first seed's queue of each combination over time.

    Raises
    ------
    UsageError
        matplotlib is not there, or the folder cannot be written to.
    """
    return draw({"queues": lambda: _queues(table)}, folder)


def _by_degree(table: IncastTable, figure: str, unit: float, label: str) -> Any:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(6, 3.5))
    axes = picture.subplots()
    degrees = table.experiment.degrees
    for variant in table.experiment.variants:
        found = [table.estimate(degree, variant, figure) for degree in degrees]
        means = [each.mean / unit if each else np.nan for each in found]
        halves = [(each.half_width or 0.0) / unit if each else 0.0 for each in found]
        axes.errorbar(degrees, means, yerr=halves, marker=".", capsize=2, label=variant)
    axes.set_xscale("log", base=2)
    axes.set_xticks(degrees, [str(degree) for degree in degrees])
    axes.set_xlabel("senders into one port")
    axes.set_ylabel(label)
    axes.legend()
    axes.grid(alpha=0.3)
    return picture


def _queues(table: SteadyTable) -> Any:
    from matplotlib.figure import Figure

    experiment = table.experiment
    sample_s = experiment.conditions.sample_ns / 1e9
    down = [(flows, window) for window in experiment.windows for flows in experiment.flows]
    picture = Figure(figsize=(2.6 * len(experiment.delays_ns), 1.6 * len(down)))
    grid = picture.subplots(len(down), len(experiment.delays_ns), squeeze=False, sharex=True)
    for case, outcome in table.outcomes:
        if case.seed:
            continue
        row = down.index((case.flows, case.window))
        axes = grid[row, experiment.delays_ns.index(case.delay_ns)]
        shown = outcome.queue_bytes[: round(_SHOWN_S / sample_s)]
        axes.plot(np.arange(len(shown)) * sample_s * 1e3, shown / 1e3, linewidth=0.7)
        marks = ", window" if case.window else ""
        axes.set_title(f"N {case.flows}, {format_duration(case.delay_ns)}{marks}", fontsize=8)
    for axes in grid[-1]:
        axes.set_xlabel("ms")
    for axes in grid[:, 0]:
        axes.set_ylabel("queue, KB")
    picture.tight_layout()
    return picture
