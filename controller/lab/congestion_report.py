"""What a congestion scenario showed: as a document, as a text of 80 columns, as pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from controller.congestion.timely_flows import TimelyParameters
from controller.sim.congestion.experiment import FIGURES, STANDARD, IncastTable
from controller.sim.congestion.steady_experiment import SteadyExperiment, SteadyRow, SteadyTable
from controller.sim.intervals import Estimate
from controller.units import format_bytes, format_duration, format_rate

# What the project wants of the throughput's stability, against standard DCQCN.
TARGET_PERCENT = 35.0
# Beside stability: figures of `IncastOutcome`, their titles, what their numbers are divided by.
_OTHERS = (
    ("job_stability", "Throughput stability of each job, mean", 1.0, "z.3f"),
    ("flow_stability", "Throughput stability of each flow, mean", 1.0, "z.3f"),
    ("utilisation", "Utilisation of the port while a window is open", 1.0, "z.3f"),
    ("jain", "Jain's index of the flows in a bin", 1.0, "z.3f"),
    ("queue_p99_bytes", "Queue, p99, KB", 1e3, ".0f"),
    ("window_mean_ns", "Length of a window, mean, ms", 1e6, ".2f"),
    ("window_slowest_ns", "Length of a window, slowest 10 %, ms", 1e6, ".2f"),
)
_FIRST, _COLUMN = 7, 12
# A line of 80 columns has room for as many.
_ACROSS = (80 - _FIRST) // _COLUMN


@dataclass(frozen=True, eq=False)
class IncastReport:
    """Report of an incast scenario.

    Parameters
    ----------
    name
        Of the scenario.
    table
        What came of it.
    """

    name: str
    table: IncastTable

    @property
    def _compared(self) -> list[str]:
        return [name for name in self.table.experiment.variants if name != STANDARD]

    def to_json(self) -> dict[str, Any]:
        """See `controller.lab.kinds.Report`."""
        table, experiment = self.table, self.table.experiment
        return {
            "scenario": self.name,
            "kind": "congestion",
            "experiment": "incast",
            "seeds": experiment.seeds,
            "jobs": experiment.jobs,
            "setting": _plain(asdict(experiment.conditions)),
            "degrees": {str(degree): self._degree(degree) for degree in experiment.degrees},
            "mean_change_percent": {
                figure: {
                    variant: _json(table.mean_change(variant, figure)) for variant in self._compared
                }
                for figure in ("stability", "job_stability", "flow_stability")
            },
            "target_percent": TARGET_PERCENT,
        }

    def _degree(self, degree: int) -> dict[str, Any]:
        table = self.table
        result: dict[str, Any] = {
            variant: {name: _json(table.estimate(degree, variant, name)) for name in FIGURES}
            for variant in table.experiment.variants
        }
        for variant in self._compared:
            change = table.change(degree, variant, "stability")
            result[variant]["stability_change_percent"] = _json(change)
        result["possible_change_percent"] = _finite(table.possible_change(degree))
        return result

    def text(self) -> str:
        """See `controller.lab.kinds.Report`."""
        table, variants = self.table, list(self.table.experiment.variants)
        lines = self._setting()
        lines += self._block(
            "Throughput stability of the port: 1 - CoV of its bins",
            variants,
            lambda degree, variant: _number(table.estimate(degree, variant, "stability"), "z.3f"),
        )
        lines += self._block(
            f"Change against {STANDARD}, % (most: where stability is 1)",
            ["most", *self._compared],
            self._change,
            self._mean_change,
        )
        if not all(
            table.estimate(degree, variant, "stability")
            for degree in table.experiment.degrees
            for variant in variants
        ):
            bin_ns = format_duration(table.experiment.conditions.bin_ns)
            lines += ["", f"-: no two bins of {bin_ns} with a window open all through them"]
        for name, title, unit, form in _OTHERS:
            if self._is_measured(name):
                lines += self._block(title, variants, self._other(name, unit, form))
        return "\n".join(lines)

    def _setting(self) -> list[str]:
        experiment = self.table.experiment
        conditions, workload = experiment.conditions, experiment.conditions.workload
        port = conditions.port
        held = (
            f"senders held above {format_bytes(port.pause_bytes)}"
            if math.isfinite(port.pause_bytes)
            else "no bound on the queue"
        )
        load = (
            f"windows of {format_bytes(workload.window_bytes)}, "
            f"{format_duration(workload.compute_ns)} of computation"
            if workload.window_bytes
            else "flows without end"
        )
        return [
            f"Incast into {format_rate(port.rate_Bps)}, {held}",
            f"{experiment.jobs} job(s): {load}",
            f"bins of {format_duration(conditions.bin_ns)}, {experiment.seeds} seed(s), ± 95 %",
        ]

    def _change(self, degree: int, column: str) -> str:
        if column == "most":
            return _plus(self.table.possible_change(degree))
        return _number(self.table.change(degree, column, "stability"), "+z.1f")

    def _mean_change(self, column: str) -> str:
        if column == "most":
            return ""
        return _number(self.table.mean_change(column, "stability"), "+z.1f")

    def _is_measured(self, name: str) -> bool:
        experiment = self.table.experiment
        return any(
            self.table.estimate(degree, variant, name)
            for degree in experiment.degrees
            for variant in experiment.variants
        )

    def _other(self, name: str, unit: float, form: str) -> Callable[[int, str], str]:
        def cell(degree: int, variant: str) -> str:
            found = self.table.estimate(degree, variant, name)
            return format(found.mean / unit, form) if found else "-"

        return cell

    def _block(
        self,
        title: str,
        columns: Sequence[str],
        cell: Callable[[int, str], str],
        mean: Callable[[str], str] | None = None,
    ) -> list[str]:
        lines = []
        for part in _lines(columns):
            lines += ["", title, _row("degree", part)]
            for degree in self.table.experiment.degrees:
                lines.append(_row(str(degree), [cell(degree, column) for column in part]))
            if mean:
                lines.append(_row("mean", [mean(column) for column in part]))
        return lines

    def figures(self, folder: Path) -> list[Path]:
        """See `controller.lab.kinds.Report`."""
        from controller.lab.congestion_figures import draw_incast

        return draw_incast(self.table, folder)


@dataclass(frozen=True, eq=False)
class SteadyReport:
    """Report of a scenario of long flows.

    Parameters
    ----------
    name
        Of the scenario.
    table
        What came of it.
    """

    name: str
    table: SteadyTable

    def to_json(self) -> dict[str, Any]:
        """See `controller.lab.kinds.Report`."""
        experiment = self.table.experiment
        rows = []
        for row in self.table.rows():
            entry = _plain(asdict(row))
            entry["queue_bytes"] = _json(row.queue_bytes)
            rows.append(entry)
        return {
            "scenario": self.name,
            "kind": "congestion",
            "experiment": "steady",
            "seeds": experiment.seeds,
            "model": _model(experiment),
            "setting": _steady_setting(experiment),
            "rows": rows,
        }

    def text(self) -> str:
        """See `controller.lab.kinds.Report`."""
        experiment = self.table.experiment
        conditions = experiment.conditions
        lines = [
            f"Long flows of {_model(experiment)} into "
            f"{format_rate(conditions.parameters.link_Bps)}, "
            f"{conditions.seconds:g} s, {experiment.seeds} seed(s), queue ± 95 %",
            "left: autocorrelation of the queue one period later",
            "",
            f"{'marks':>8}{'flows':>6}{'delay':>8}{'queue, KB':>14}{'std, KB':>8}"
            f"{'empty':>7}{'used':>7}{'Hz':>6}{'left':>6}  ",
        ]
        return "\n".join(
            lines + [_steady_line(row, _model(experiment)) for row in self.table.rows()]
        )

    def figures(self, folder: Path) -> list[Path]:
        """See `controller.lab.kinds.Report`."""
        from controller.lab.congestion_figures import draw_steady

        return draw_steady(self.table, folder)


def _model(experiment: SteadyExperiment) -> str:
    is_timely = isinstance(experiment.conditions.parameters, TimelyParameters)
    return "timely" if is_timely else "dcqcn"


def _steady_setting(experiment: SteadyExperiment) -> Any:
    setting = _plain(asdict(experiment.conditions))
    if _model(experiment) == "timely":
        for key in ("kmin_bytes", "kmax_bytes", "pmax", "echo_holds"):
            del setting[key]
    return setting


def _steady_line(row: SteadyRow, model: str) -> str:
    half = row.queue_bytes.half_width
    # A queue without bound may take any number of digits; five of them say enough.
    digits = ".1f" if row.queue_bytes.mean + (half or 0) < 1e7 else ".4g"
    queue = f"{row.queue_bytes.mean / 1e3:{digits}}" + (f" ±{half / 1e3:{digits}}" if half else "")
    spread = f"{row.queue_std_bytes / 1e3:{'.1f' if row.queue_std_bytes < 1e7 else '.3g'}}"
    marks = "none" if model == "timely" else "window" if row.window else "instant"
    return (
        f"{marks:>8}{row.flows:>6}"
        f"{format_duration(row.delay_ns):>8}{queue:>14}{spread:>8}"
        f"{row.empty:>7.1%}{row.utilisation:>7.3f}{row.dominant_hz:>6.0f}{row.correlation:>z6.2f}"
        f"  {'swings' if row.oscillates else 'settles'}"
    )


def _lines(columns: Sequence[str]) -> list[list[str]]:
    """Columns in parts that fit beside each other."""
    return [list(columns[begin : begin + _ACROSS]) for begin in range(0, len(columns), _ACROSS)]


def _row(first: str, cells: Sequence[str]) -> str:
    return f"{first:>{_FIRST - 1}}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells)


def _number(found: Estimate | None, form: str) -> str:
    if found is None:
        return "-"
    text = format(found.mean, form)
    return text if found.half_width is None else f"{text}±{format(found.half_width, form[-3:])}"


def _plus(value: float) -> str:
    return format(value, "+z.1f") if math.isfinite(value) else "-"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _json(found: Estimate | None) -> dict[str, float | None] | None:
    return None if found is None else {"mean": found.mean, "ci95": found.half_width}


def _plain(value: Any) -> Any:
    """Without what JSON has not: infinite is null."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return _finite(value) if isinstance(value, float) else value
