"""Reads a congestion scenario from TOML, and runs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from controller.config_reader import Section, read_document, told_with
from controller.congestion.dcqcn import PRESETS, preset
from controller.congestion.timely_flows import TimelyParameters
from controller.errors import UsageError
from controller.lab.congestion_report import IncastReport, SteadyReport
from controller.lab.reading import HIGH_Bps, LOW_Bps
from controller.priority.classes import default_classes, thresholds
from controller.sim.congestion.experiment import (
    MAX_SEEDS,
    STANDARD,
    VARIANTS,
    IncastExperiment,
)
from controller.sim.congestion.incast import MAX_SENDERS, IncastConditions
from controller.sim.congestion.links import Link
from controller.sim.congestion.steady import SteadyConditions
from controller.sim.congestion.steady_experiment import SteadyExperiment
from controller.sim.congestion.windows import Workload
from controller.sim.progress import Progress
from controller.units import format_duration, parse_ns

KIND = "congestion"
# What may stand at the top of a file.
KEYS = ("kind", "about", "incast", "steady", "network", "workload")
_MS, _S = 10**6, 10**9
_MAX_bytes = 1 << 40
_SAMPLE_ns = min(IncastConditions.sample_ns, SteadyConditions.sample_ns)


@dataclass(frozen=True)
class CongestionScenario:
    """A scenario that was read.

    Attributes
    ----------
    name, about
        Of the file; its own line about itself.
    experiment
        What is simulated.
    """

    name: str
    about: str
    experiment: IncastExperiment | SteadyExperiment


def load_scenario(path: Path) -> CongestionScenario:
    """A congestion scenario from a file.

    Raises
    ------
    UsageError
        The file cannot be read, or has a wrong key or value; names it.
    """
    document = read_document(path, KEYS)
    kind = document.get("kind", KIND)
    if kind != KIND:
        raise UsageError(
            f"{path}: key kind is {kind!r}; allowed here: {KIND!r}.", "Name another file."
        )
    if ("incast" in document) == ("steady" in document):
        both = "incast" in document
        raise UsageError(
            f"{path}: incast and steady are {'both there' if both else 'missing'}; allowed: one of "
            "the tables.",
            "Leave one out." if both else "Add [incast] or [steady].",
        )
    network_section = Section(path, "network", document.get("network", {}))
    if "incast" in document:
        network = _Network(network_section)
        workload = Section(path, "workload", document.get("workload", {}))
        section = Section(path, "incast", document["incast"])
        experiment: IncastExperiment | SteadyExperiment = _incast(section, network, workload)
    elif "workload" in document:
        raise UsageError(f"{path}: key workload has no effect beside steady.", "Leave it out.")
    else:
        experiment = _steady(Section(path, "steady", document["steady"]), network_section)
    return CongestionScenario(path.stem, str(document.get("about", "")), experiment)


def with_options(
    scenario: CongestionScenario, degrees: tuple[int, ...], seeds: int | None
) -> CongestionScenario:
    """The same with other degrees and seeds, where they are given.

    Raises
    ------
    UsageError
        They are out of range, or the scenario has no degrees.
    """
    experiment = scenario.experiment
    if seeds is not None:
        experiment = replace(experiment, seeds=seeds)
    if degrees:
        if not isinstance(experiment, IncastExperiment):
            raise UsageError(
                f"Scenario {scenario.name} has long flows and no incast degrees; allowed: none.",
                "Leave --degrees out.",
            )
        for degree in degrees:
            _whole(degree, "Degree", 2, MAX_SENDERS)
        experiment = replace(experiment, degrees=degrees)
    return replace(scenario, experiment=experiment)


def run(
    scenario: CongestionScenario, progress: Progress | None = None
) -> IncastReport | SteadyReport:
    """Simulate a scenario."""
    experiment = scenario.experiment
    if isinstance(experiment, IncastExperiment):
        return IncastReport(scenario.name, experiment.run(progress))
    return SteadyReport(scenario.name, experiment.run(progress))


class _Network:
    """The table `network`."""

    def __init__(self, section: Section) -> None:
        self.section = section
        link_Bps = section.rate("link", 12_500_000_000, LOW_Bps, HIGH_Bps)
        self.parameters = preset(section.text("preset", "paper", tuple(PRESETS)), link_Bps)
        kmin, kmax, pmax = thresholds(default_classes()[0], link_Bps)
        self.kmin_bytes = section.size("kmin", kmin, 0, _MAX_bytes)
        self.kmax_bytes = section.size("kmax", kmax, 0, _MAX_bytes)
        self.pmax = section.share("pmax", pmax)
        self.echo_holds = section.flag("echo_holds", True)
        self.packet_bytes, self.step_ns = _packets(section)

    def port(self, pause_bytes: float) -> Link:
        """The congested port."""
        with told_with(self.section.label):
            return Link(
                self.parameters.link_Bps,
                self.kmin_bytes,
                self.kmax_bytes,
                self.pmax,
                pause_bytes=pause_bytes,
            )


def _packets(section: Section) -> tuple[int, int]:
    """Bytes of a packet, and length of a step."""
    step_ns = section.duration("step", 1_000, 10, _SAMPLE_ns)
    if _SAMPLE_ns % step_ns:
        raise UsageError(
            f"{section.where('step')} is {format_duration(step_ns)}; allowed: whole "
            f"steps in {format_duration(_SAMPLE_ns)}, after which the queue is looked at.",
            "Use 1us, 2us or 5us, say.",
        )
    return section.size("packet", 4_200, 64, 65_536), step_ns


def _incast(section: Section, network: _Network, workload: Section) -> IncastExperiment:
    # Without a pause threshold the queue has no bound.
    pause_bytes = network.section.size("pause", float("inf"), 1, _MAX_bytes)
    feedback_ns = network.section.duration("feedback", 10_000, 0, 10 * _MS)
    network.section.finish()
    has_windows = workload.flag("windows", True)
    load = Workload(
        window_bytes=workload.size("window", 100_000_000, 1, _MAX_bytes) if has_windows else 0,
        compute_ns=workload.duration("compute", 4 * _MS, 0, 60 * _S) if has_windows else 0,
        compute_jitter=workload.share("compute_jitter", 0.05),
        start_jitter_ns=workload.duration("start_jitter", 50_000, 0, _S),
        bytes_error=workload.share("bytes_error", 0.0),
    )
    workload.finish()
    degrees = _numbers(section, "degrees", (2, 4, 8, 16, 32, 64, 128, 255), 2, MAX_SENDERS)
    variants = _variants(section)
    seeds = section.integer("seeds", 10, 1, MAX_SEEDS)
    jobs = section.integer("jobs", 1, 1, MAX_SENDERS)
    duration_ns = section.duration("duration", 200 * _MS, 3 * _MS, 60 * _S)
    warmup_ns = section.duration("warmup", 20 * _MS, 0, 60 * _S)
    section.finish()
    port = network.port(pause_bytes)
    with told_with(section.label):
        conditions = IncastConditions(
            parameters=network.parameters,
            port=port,
            workload=load,
            duration_ns=duration_ns,
            warmup_ns=warmup_ns,
            feedback_ns=feedback_ns,
            step_ns=network.step_ns,
            packet_bytes=network.packet_bytes,
            echo_holds=network.echo_holds,
        )
        return IncastExperiment(degrees, variants, seeds, jobs, conditions)


def _steady(section: Section, network_section: Section) -> SteadyExperiment:
    is_timely = section.text("model", "dcqcn", ("dcqcn", "timely")) == "timely"
    conditions = (
        _timely_conditions(network_section) if is_timely else _dcqcn_conditions(network_section)
    )
    network_section.finish()
    windows = section.raw("windows", [False])
    if not isinstance(windows, list) or not all(isinstance(entry, bool) for entry in windows):
        raise UsageError(
            f"{section.where('windows')} is {windows!r}; allowed: [false, true].", "Correct it."
        )
    flows = _numbers(section, "flows", (2, 10, 64), 1, MAX_SENDERS)
    delays_ns = _delays(section)
    seeds = section.integer("seeds", 5, 1, MAX_SEEDS)
    duration_ns = section.duration("duration", 300 * _MS, 5 * _MS, 60 * _S)
    warmup_ns = section.duration("warmup", 100 * _MS, 0, 60 * _S)
    section.finish()
    with told_with(section.label):
        conditions = replace(conditions, seconds=duration_ns / _S, warmup_s=warmup_ns / _S)
        return SteadyExperiment(flows, delays_ns, tuple(windows), seeds, conditions)


def _dcqcn_conditions(section: Section) -> SteadyConditions:
    network = _Network(section)
    network.port(float("inf"))  # for its checks
    with told_with(section.label):
        return SteadyConditions(
            parameters=network.parameters,
            kmin_bytes=network.kmin_bytes,
            kmax_bytes=network.kmax_bytes,
            pmax=network.pmax,
            step_ns=network.step_ns,
            packet_bytes=network.packet_bytes,
            echo_holds=network.echo_holds,
        )


def _timely_conditions(section: Section) -> SteadyConditions:
    link_Bps = section.rate("link", round(TimelyParameters().link_Bps), LOW_Bps, HIGH_Bps)
    packet_bytes, step_ns = _packets(section)
    with told_with(section.label):
        return SteadyConditions(
            parameters=TimelyParameters(link_Bps=link_Bps),
            step_ns=step_ns,
            packet_bytes=packet_bytes,
        )


def _variants(section: Section) -> tuple[str, ...]:
    names = section.raw("variants", ["prediction", "window", "phases", "all"])
    if not isinstance(names, list) or not all(
        isinstance(name, str) and name in VARIANTS for name in names
    ):
        raise UsageError(
            f"{section.where('variants')} is {names!r}; allowed: a list of {', '.join(VARIANTS)}.",
            "Correct it.",
        )
    # The standard one first, always.
    return tuple(dict.fromkeys([STANDARD, *names]))


def _listed(section: Section, key: str, default: list[Any], what: str) -> list[Any]:
    """A list that is not empty, of values that nobody has looked at."""
    values = section.raw(key, default)
    if not isinstance(values, list) or not values:
        raise UsageError(
            f"{section.where(key)} is {values!r}; allowed: a list of {what}.", "Correct it."
        )
    return values


def _numbers(
    section: Section, key: str, default: tuple[int, ...], low: int, high: int
) -> tuple[int, ...]:
    values = _listed(section, key, list(default), "numbers")
    return tuple(_whole(value, section.where(key), low, high) for value in values)


def _whole(value: Any, where: str, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UsageError(f"{where}: {value!r}; allowed: {low} .. {high}.", "Correct it.")
    return value


def _delays(section: Section) -> tuple[int, ...]:
    result = []
    for value in _listed(section, "delays", ["1us", "50us", "85us", "100us"], "durations"):
        with told_with(section.where("delays")):
            delay_ns = parse_ns(str(value))
        if delay_ns > 10 * _MS:
            raise UsageError(
                f"{section.where('delays')}: {value!r}; allowed: up to 10 ms.", "Correct it."
            )
        result.append(delay_ns)
    return tuple(result)
