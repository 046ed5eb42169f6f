"""The figure of docs/simulated-results.md that is drawn from JSON: where DCQCN's loop is stable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Told apart without colours, too: by lightness.
_STATES = (
    ("stable", "#1b6ca8"),
    ("unstable", "#f0a33a"),
    ("no fixed point; were the line endless: stable", "#c9d8e3"),
    ("no fixed point; were the line endless: unstable", "#f7e3c5"),
)


def states(rows: list[Mapping[str, Any]], window: int) -> list[list[int]]:
    """Positions in `_STATES`, by delay and number of flows.

    Parameters
    ----------
    rows
        One for each number of flows, of `model-map.json`.
    window
        Position on the axis of windows.
    """
    columns = [
        [2 * (not row["exists"]) + (value >= 0) for value in row["per_s"][window]] for row in rows
    ]
    return [list(line) for line in zip(*columns, strict=True)]


def map_figure(document: Mapping[str, Any]) -> Any:
    """Panels by constants and window; flows to the right, delay upwards.

    Returns
    -------
    matplotlib.figure.Figure
        For `controller.lab.drawing.draw`.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    flows, delays_us, windows_us, presets = (
        document[key] for key in ("flows", "delays_us", "windows_us", "presets")
    )
    figure = Figure(figsize=(9, 2.3 * len(presets) + 0.6), layout="constrained")
    grid = figure.subplots(len(presets), len(windows_us), sharex=True, sharey=True)
    half_us = (delays_us[1] - delays_us[0]) / 2
    colours = ListedColormap([colour for _, colour in _STATES])
    for line, (name, rows) in zip(grid, presets.items(), strict=True):
        for window, axes in enumerate(line):
            axes.imshow(
                states(rows, window),
                cmap=colours,
                vmin=0,
                vmax=len(_STATES) - 1,
                origin="lower",
                aspect="auto",
                interpolation="nearest",
                extent=(-0.5, len(flows) - 0.5, delays_us[0] - half_us, delays_us[-1] + half_us),
            )
            shown = range(0, len(flows), 3)
            axes.set_xticks(shown, [str(flows[index]) for index in shown])
            title = f"window {windows_us[window]:g} us" if windows_us[window] else "no window"
            axes.set_title(f"{name}, {title}")
        line[0].set_ylabel("loop delay, us")
    for axes in grid[-1]:
        axes.set_xlabel("flows")
    figure.legend(
        handles=[Patch(color=colour, label=label) for label, colour in _STATES],
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    return figure
