"""Tables and the figure of docs/results.md about incast, of `scripts/incast`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

VARIANTS = ("none", "window", "instant")
COLUMNS = {
    "goodput / port": (lambda run: run["goodput_share"], ".3f"),
    "Jain": (lambda run: run["jain"], ".3f"),
    "retransmitted / needed": (
        lambda run: run["retransmitted_of_run"] / run["needed_packets_of_run"], ".4f"
    ),
    "drops": (lambda run: run["drops_of_run"], ",.0f"),
    "backlog p50, kB": (lambda run: run["backlog_p50_bytes"] / 1e3, ".1f"),
    "backlog p99, kB": (lambda run: run["backlog_p99_bytes"] / 1e3, ".1f"),
    "CoV of the port's 10 ms bins": (lambda run: run["port_cov"], ".3f"),
    "CoV of a flow's 10 ms bins": (lambda run: statistics.mean(run["arrival_cov"]), ".3f"),
}  # fmt: skip


def incast_table(document: Any) -> str:
    """Markdown table of `scripts/incast`: medians of the rounds."""
    lines = [
        "| senders | variant | " + " | ".join(COLUMNS) + " |",
        "|---:|---|" + "---:|" * len(COLUMNS),
    ]
    for senders, variants in document["runs"].items():
        for variant, runs in variants.items():
            cells = [
                format(statistics.median(value(run) for run in runs), form)
                for value, form in COLUMNS.values()
            ]
            lines.append(f"| {senders} | {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def incast_verdicts(document: Any) -> str:
    """One line for each variant: how it does beside no control."""
    lines = []
    for senders, variants in document["verdicts"].items():
        for variant, verdict in variants.items():
            lines.append(
                f"* {senders}:1 `{variant}`: {verdict['retransmit_ratio']:,.0f} x fewer repeated "
                f"packets, p99 backlog {verdict['backlog_p99_ratio']:.1f} x lower"
                + ("" if verdict["reached"] else " (**bounds missed**)")
            )
    return "\n".join(lines)


def incast_figure(document: Any, path: Path) -> None:
    """Bars beside each other: goodput, p99 backlog, steadiness, by variant."""
    parts = {
        "goodput / port": lambda run: run["goodput_share"],
        "p99 backlog, kB": lambda run: run["backlog_p99_bytes"] / 1e3,
        "CoV of a flow's 10 ms bins": lambda run: statistics.mean(run["arrival_cov"]),
    }
    figure, all_axes = plt.subplots(1, len(parts), figsize=(8, 2.8), layout="constrained")
    for axes, (title, value) in zip(all_axes, parts.items(), strict=True):
        for number, variant in enumerate(VARIANTS):
            heights = [
                statistics.median(value(run) for run in variants[variant])
                for variants in document["runs"].values()
            ]
            places = [index + (number - 1) * 0.27 for index in range(len(heights))]
            axes.bar(places, heights, 0.25, label=variant)
        axes.set_xticks(range(len(document["runs"])), [f"{n}:1" for n in document["runs"]])
        axes.set_title(title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].legend(frameon=False, fontsize=8, loc="lower center")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
