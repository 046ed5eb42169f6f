"""Pictures of a cluster scenario as SVG: windows, distributions, links."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from controller.lab import drawing
from controller.lab.scenario import FAIR
from controller.lab.tasks import QUANTILES

if TYPE_CHECKING:
    from controller.lab.report import ClusterReport

# Beside fair, the one whose links and windows are compared with it.
_OURS = "laxity"
_WIDE = 10


def draw(report: ClusterReport, folder: Path) -> list[Path]:
    """Draw ``timeline.svg``, ``cdf.svg`` and ``links.svg``.

    Parameters
    ----------
    report
        What is drawn.
    folder
        Made where it is not there.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    UsageError
        matplotlib is not there, or the folder cannot be written to.
    """
    return drawing.draw(
        {
            "timeline": lambda: _timeline(report),
            "cdf": lambda: _cdf(report),
            "links": lambda: _links(report),
        },
        folder,
    )


def _figure(size: tuple[float, float]) -> Any:
    # Not by pyplot: it would keep every figure, and look for a display.
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def _compared(report: ClusterReport) -> list[str]:
    """Fair and ours where they are there; else the first two."""
    wanted = [policy for policy in (FAIR, _OURS) if policy in report.by_policy]
    return wanted if len(wanted) == 2 else list(report.by_policy)[:2]


def _timeline(report: ClusterReport) -> Any:
    """Windows of the jobs that meet on the busiest link, one panel for each policy."""
    first = {policy: runs[0] for policy, runs in report.by_policy.items()}
    seen = {job for run in first.values() for job, _, _ in run.windows}
    names = [name for name in report.any_runs[0].job_slowdown if name in seen]
    figure = _figure((8, 0.5 + len(first) * (0.35 + 0.16 * len(names))))
    axes = figure.subplots(len(first), 1, sharex=True, squeeze=False)
    for axis, (policy, run) in zip(axes[:, 0], first.items(), strict=True):
        for place, name in enumerate(names):
            bars = [(begin, end - begin) for job, begin, end in run.windows if job == name]
            axis.broken_barh(bars, (place - 0.35, 0.7), color=f"C{place % 10}")
        axis.set_yticks(range(len(names)), names)
        axis.set_ylabel(policy)
        axis.invert_yaxis()
    axes[-1, 0].set_xlim(left=0)
    axes[-1, 0].set_xlabel("time, ms")
    figure.suptitle(
        f"{report.scenario.name}: sync windows on the busiest link, seed {report.any_runs[0].seed}"
    )
    return figure


def _cdf(report: ClusterReport) -> Any:
    """Distributions of AllReduce and iteration times, quantile by quantile over the seeds."""
    figure = _figure((8, 3.2))
    axes = figure.subplots(1, 2, sharey=True)
    for axis, what, member in (
        (axes[0], "AllReduce", "allreduce_ms"),
        (axes[1], "iteration", "iteration_ms"),
    ):
        for policy, runs in report.by_policy.items():
            times_ms = np.mean([getattr(run, member) for run in runs], axis=0)
            axis.plot(times_ms, QUANTILES, label=policy, linewidth=1)
        low, high = axis.get_xlim()
        # Jobs of milliseconds beside jobs of seconds.
        if high > _WIDE * max(low, 0.0):
            axis.set_xscale("log")
        axis.set_xlabel(f"{what} time, ms")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of iterations")
    axes[1].legend(loc="lower right", fontsize=7)
    figure.suptitle(f"{report.scenario.name}: distribution of times")
    return figure


def _links(report: ClusterReport) -> Any:
    """How much of each link is used: leaf by spine, or NIC by NIC where there is one switch."""
    policies = _compared(report)
    panels = [
        (f"{policy}, {direction}", use)
        for policy in policies
        for direction, use in _grids(report, policy).items()
    ]
    most = max(float(use.max()) for _, use in panels) or 1.0
    columns = len(panels) // len(policies)
    figure = _figure((4 * columns, 2.6 * len(policies)))
    axes = figure.subplots(len(policies), columns, squeeze=False)
    has_core = report.scenario.network.fabric.leaves > 1
    for axis, (title, use) in zip(axes.flat, panels, strict=True):
        image = axis.imshow(use, aspect="auto", vmin=0, vmax=most, cmap="magma", origin="lower")
        axis.set_title(title)
        axis.set_ylabel("leaf")
        axis.set_xlabel("link to spine" if has_core else "NIC")
    figure.colorbar(image, ax=axes, label="share of the link that is used")
    figure.suptitle(f"{report.scenario.name}: links, seed {report.any_runs[0].seed}")
    return figure


def _grids(report: ClusterReport, policy: str) -> dict[str, NDArray[np.float64]]:
    """Direction -> use of links, shape (leaves, links of each)."""
    fabric = report.scenario.network.fabric
    use = report.by_policy[policy][0].link_use
    core = fabric.leaves * fabric.uplinks
    if fabric.leaves > 1:
        ups = use[fabric.nics : fabric.nics + core]
        downs = use[fabric.nics + core : fabric.nics + 2 * core]
    else:
        ups, downs = use[: fabric.nics], use[-fabric.nics :]
    return {"up": ups.reshape(fabric.leaves, -1), "down": downs.reshape(fabric.leaves, -1)}
