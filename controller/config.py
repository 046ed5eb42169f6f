"""TOML -> dataclasses. An error names the file, the key and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from controller.config_reader import Section, read_document, told_with
from controller.congestion import dcqcn as reaction
from controller.dataplane import layout
from controller.dataplane.attachment import MODES, parse_target
from controller.errors import UsageError
from controller.priority import classes as traffic
from controller.priority import laxity as policy
from controller.priority.jobs import (
    DEFAULT_CEILING,
    DEFAULT_CLASS,
    DEFAULT_ENV_VARIABLE,
    MAX_GPUS,
    Job,
    JobMatch,
    check_jobs,
)
from controller.priority.policies import POLICIES
from controller.priority.policy import DEFAULT_MAX_SLOWDOWN, DEFAULT_POLICY, OFF
from controller.priority.ranges import MAX_SLOWDOWN, MAX_RATE_Bps, MIN_RATE_Bps
from controller.priority.rules import check_variable

MIN_FLOWS = 64
MAX_FLOWS_LIMIT = 1 << 20

MARKS = ("window", "instant", "off")
ECHOES = ("becn", "cnp", "off")
CLASSIFIERS = ("job", "dscp")
RAISES = ("message", "drained")
BEYOND_HORIZON = ("clamp", "drop")

_US = 1_000
_MS = 1_000_000
_S = 1_000_000_000


@dataclass(frozen=True)
class InterfaceConfig:
    """One interface to attach to. None: the controller decides by what the interface is.

    Parameters
    ----------
    rate_Bps
        Link rate; None: what the interface says.
    mark
        Congestion point: by the average of the sliding window, by the queue of the moment, off.
    echo
        Notification point: BECN in the next ACK, CNP packets, off.
    pace
        Whether departure times are written (they need fq).
    classify
        Class of a packet: from its job, or from its DSCP as a forwarder does.
    drain
        Share of the link rate at which the virtual queues drain.
    """

    netns: str
    name: str
    mode: str = "native"
    rate_Bps: int | None = None
    mark: str | None = None
    echo: str | None = None
    pace: bool | None = None
    classify: str | None = None
    drain: float = 0.95

    def check(self) -> None:
        """Raise UsageError unless every member is one of those allowed."""
        for name, allowed in (("mode", MODES), ("mark", MARKS), ("echo", ECHOES),
                              ("classify", CLASSIFIERS)):  # fmt: skip
            value = getattr(self, name)
            if value not in (None, *allowed):
                raise UsageError(
                    f"Interface {self.name}: {name} is {value!r}; allowed: {', '.join(allowed)}."
                )

    @classmethod
    def parse(cls, target: str, mode: str = "native") -> InterfaceConfig:
        """From ``NETNS:IF`` or ``IF`` as the command line gives it."""
        netns, name = parse_target(target)
        if mode not in MODES:
            raise UsageError(f"Mode {mode!r} is unknown; allowed: {', '.join(MODES)}.")
        return cls(netns, name, mode)


@dataclass(frozen=True)
class ObserveConfig:
    """Sizes and times of the observer.

    Parameters
    ----------
    max_flows
        Entries of the flow table; a flow takes one for each interface and direction.
    idle_flow_s
        A flow without packets for so long is taken out of the table (its totals are kept
        in the interface's sums). 0: never.
    """

    max_flows: int = layout.MAX_FLOWS
    idle_flow_s: int = 3600


@dataclass(frozen=True)
class ControlConfig:
    """What holds for all jobs.

    Parameters
    ----------
    env_variable
        Variable in a process's environment that names its job.
    horizon_ns
        No packet departs later than this from now.
    beyond_horizon
        What becomes of one that would: it departs at the horizon, or (unreliable transports
        only) it is dropped.
    """

    env_variable: str = DEFAULT_ENV_VARIABLE
    horizon_ns: int = _S
    beyond_horizon: str = "clamp"


@dataclass(frozen=True)
class EcnConfig:
    """Marker: length of one of the window's slots; None: by link rate."""

    slot_ns: int | None = None


@dataclass(frozen=True)
class LaxityConfig:
    """Laxity -> class; see `controller.priority.laxity`.

    ``raise_at``: a flow rises at the next message, or when all it sent is acknowledged.
    """

    thresholds_ns: tuple[int, ...] = policy.DEFAULT_THRESHOLDS_ns
    hysteresis: float = policy.DEFAULT_HYSTERESIS
    raise_at: str = "message"


@dataclass(frozen=True)
class PriorityConfig:
    """How jobs that share a link are ranked.

    Parameters
    ----------
    policy
        One of `controller.priority.policies`, or ``off``: iterations are watched and predicted,
        no plan is made.
    max_slowdown
        Bound for a job's iteration time as a multiple of the undisturbed one, where the job
        names none.
    """

    policy: str = DEFAULT_POLICY
    max_slowdown: float = DEFAULT_MAX_SLOWDOWN


@dataclass(frozen=True)
class DcqcnConfig:
    """Reaction point.

    Parameters
    ----------
    enabled
        For jobs that do not say otherwise.
    preset
        Name of the constants.
    prediction, phases
        Rates from the predicted window; increase steps by phase of it.
    overrides
        Constants given in place of the preset's, by the names of `DcqcnParameters`. They hold
        as given, whatever the link rate.
    phase_overrides
        The same by the names of `PhaseIncrease`.
    """

    enabled: bool = False
    preset: str = "paper"
    prediction: bool = True
    phases: bool = True
    overrides: Mapping[str, float | int] = field(default_factory=dict)
    phase_overrides: Mapping[str, float] = field(default_factory=dict)

    def parameters(self, link_Bps: float) -> reaction.DcqcnParameters:
        """The constants on a link.

        Raises
        ------
        UsageError
            They do not fit together there; names the constant.
        """
        scaled = reaction.preset(self.preset, link_Bps)
        steps = replace(scaled.phase_steps, **self.phase_overrides)
        changes: dict[str, Any] = dict(self.overrides)
        return replace(scaled, phase_steps=steps, **changes)


@dataclass(frozen=True)
class Config:
    """Everything that `controller start` can be told."""

    interfaces: tuple[InterfaceConfig, ...] = ()
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    classes: tuple[traffic.TrafficClass, ...] = field(default_factory=traffic.default_classes)
    jobs: tuple[Job, ...] = ()
    ecn: EcnConfig = field(default_factory=EcnConfig)
    laxity: LaxityConfig = field(default_factory=LaxityConfig)
    dcqcn: DcqcnConfig = field(default_factory=DcqcnConfig)
    priority: PriorityConfig = field(default_factory=PriorityConfig)


_KEYS = ("observe", "interface", "class", "job", "control", "ecn", "laxity", "dcqcn", "priority")
_LISTS = ("interface", "class", "job")


def load_config(path: Path) -> Config:
    """Read a configuration file.

    Raises
    ------
    UsageError
        The file cannot be read, is no TOML, or has a wrong key or value.
    """
    document = read_document(path, _KEYS)
    entries = {name: _entries(path, name, document.get(name, [])) for name in _LISTS}
    tables = {
        name: Section(path, name, document.get(name, {})) for name in _KEYS if name not in _LISTS
    }
    config = Config(
        interfaces=_read_interfaces(entries["interface"]),
        observe=_read_observe(tables["observe"]),
        control=_read_control(tables["control"]),
        classes=_read_classes(path, entries["class"]),
        jobs=_read_jobs(path, entries["job"]),
        ecn=EcnConfig(tables["ecn"].duration("slot", None, _US, _S)),
        laxity=_read_laxity(tables["laxity"]),
        dcqcn=_read_dcqcn(tables["dcqcn"], "dcqcn" in document),
        priority=_read_priority(tables["priority"]),
    )
    for section in (*tables.values(), *(entry for each in entries.values() for entry in each)):
        section.finish()
    if config.dcqcn.enabled:
        for interface in config.interfaces:
            if interface.rate_Bps is not None:
                with told_with(f"{path}: key dcqcn on {interface.name}"):
                    config.dcqcn.parameters(interface.rate_Bps)
    return config


def _entries(path: Path, name: str, found: Any) -> list[Section]:
    if not isinstance(found, list):
        kind = "a table" if isinstance(found, Mapping) else repr(found)
        raise UsageError(f"{path}: key {name} is {kind}; allowed: [[{name}]] entries.")
    return [Section(path, f"{name}[{number}]", entry) for number, entry in enumerate(found, 1)]


def _read_interfaces(entries: list[Section]) -> tuple[InterfaceConfig, ...]:
    result: list[InterfaceConfig] = []
    for section in entries:
        section.require("name", "NETNS:IF or IF")
        target = section.text("name", "")
        with told_with(section.where("name")):
            interface = InterfaceConfig.parse(target, section.text("mode", "native", MODES))
        if any((each.netns, each.name) == (interface.netns, interface.name) for each in result):
            raise UsageError(f"{section.where('name')} is {target!r} again; allowed: each once.")
        result.append(
            replace(
                interface,
                rate_Bps=section.rate("rate", None, MIN_RATE_Bps, MAX_RATE_Bps),
                mark=section.text("mark", None, MARKS),
                echo=section.text("echo", None, ECHOES),
                pace=section.flag("pace", None),
                classify=section.text("classify", None, CLASSIFIERS),
                drain=section.share("drain", interface.drain, above=True),
            )
        )
    return tuple(result)


def _read_observe(section: Section) -> ObserveConfig:
    default = ObserveConfig()
    return ObserveConfig(
        section.integer("max_flows", default.max_flows, MIN_FLOWS, MAX_FLOWS_LIMIT),
        section.integer("idle_flow_s", default.idle_flow_s, 0, 10**9),
    )


def _read_control(section: Section) -> ControlConfig:
    default = ControlConfig()
    variable = section.text("env_variable", default.env_variable)
    check_variable(section.where("env_variable"), variable)
    return ControlConfig(
        variable,
        # fq itself drops what is more than 10 s ahead (its default horizon).
        section.duration("horizon", default.horizon_ns, _MS, 10 * _S),
        section.text("beyond_horizon", default.beyond_horizon, BEYOND_HORIZON),
    )


def _read_classes(path: Path, entries: list[Section]) -> tuple[traffic.TrafficClass, ...]:
    classes = list(traffic.default_classes())
    seen: set[int] = set()
    for section in entries:
        section.require("number", f"0 .. {traffic.CLASSES - 1}")
        number = section.integer("number", 0, 0, traffic.CLASSES - 1)
        if number in seen:
            raise UsageError(f"{section.where('number')} is {number} again; allowed: each once.")
        seen.add(number)
        old = classes[number]
        changes: dict[str, Any] = {
            "dscp": section.integer("dscp", old.dscp, 0, traffic.MAX_DSCP),
            "priority": section.integer("priority", old.priority, 0, traffic.MAX_PRIORITY),
            "kmin_bytes": section.size("kmin", None, 0, traffic.MAX_QUEUE_BYTES),
            "kmax_bytes": section.size("kmax", None, 0, traffic.MAX_QUEUE_BYTES),
            "pmax": section.share("pmax", old.pmax, above=True),
            "floor_share": section.share("floor", old.floor_share),
            "ceiling_share": section.share("ceiling", old.ceiling_share, above=True),
        }
        with told_with(section.label):
            classes[number] = replace(old, **changes)
    with told_with(f"{path}: key class"):
        traffic.validate(classes)
    return tuple(classes)


def _read_jobs(path: Path, entries: list[Section]) -> tuple[Job, ...]:
    jobs = []
    top = traffic.CLASSES - 1
    for section in entries:
        section.require("name", "a name")
        name = section.text("name", "")
        match = JobMatch.parse(section.raw("match", {}), section.where("match"))
        values: dict[str, Any] = {
            "traffic_class": section.integer("class", DEFAULT_CLASS, 0, top),
            "class_floor": section.integer("class_floor", 0, 0, top),
            "class_ceiling": section.integer("class_ceiling", DEFAULT_CEILING, 0, top),
            "set_ect": section.flag("set_ect", False),
            "rate_Bps": section.rate("rate", 0, MIN_RATE_Bps, MAX_RATE_Bps),
            "dcqcn": section.flag("dcqcn", None),
            "gap_ns": section.duration("gap", 0, 1, 3600 * _S),
            "max_slowdown": section.number("max_slowdown", 0.0, 1.0, MAX_SLOWDOWN),
            "gpus": section.integer("gpus", 1, 1, MAX_GPUS),
        }
        with told_with(section.label):
            jobs.append(Job(name, match, **values))
    with told_with(f"{path}: key job"):
        check_jobs(jobs)
    return tuple(jobs)


def _read_laxity(section: Section) -> LaxityConfig:
    default = LaxityConfig()
    count = len(default.thresholds_ns)
    config = LaxityConfig(
        section.durations("thresholds", default.thresholds_ns, count),
        section.share("hysteresis", default.hysteresis),
        section.text("raise", default.raise_at, RAISES),
    )
    with told_with(section.where("thresholds")):
        policy.check_thresholds(config.thresholds_ns, config.hysteresis)
    return config


def _read_priority(section: Section) -> PriorityConfig:
    default = PriorityConfig()
    return PriorityConfig(
        section.text("policy", default.policy, (*POLICIES, OFF)),
        section.number("max_slowdown", default.max_slowdown, 1.0, MAX_SLOWDOWN),
    )


def _read_dcqcn(section: Section, given: bool) -> DcqcnConfig:
    steps = section.table("phase_steps")
    default = DcqcnConfig()
    config = DcqcnConfig(
        enabled=section.flag("enabled", given),
        preset=section.text("preset", default.preset, tuple(reaction.PRESETS)),
        prediction=section.flag("prediction", default.prediction),
        phases=section.flag("phases", default.phases),
        overrides=_without_none(
            g=section.share("g", None, above=True),
            initial_alpha=section.share("initial_alpha", None, above=True),
            alpha_update_ns=section.duration("alpha_update", None, 1, 10 * _S),
            decrease_interval_ns=section.duration("decrease_interval", None, 0, 10 * _S),
            timer_ns=section.duration("timer", None, 1, 10 * _S),
            echo_interval_ns=section.duration("echo_interval", None, 0, 10 * _S),
            byte_counter_bytes=section.size("byte_counter", None, 1, traffic.MAX_QUEUE_BYTES),
            fast_recovery_steps=section.integer(
                "fast_recovery_steps", None, 1, reaction.MAX_FAST_RECOVERY_STEPS
            ),
            rate_ai_Bps=section.rate("rate_ai", None, 1, MAX_RATE_Bps),
            rate_hai_Bps=section.rate("rate_hai", None, 1, MAX_RATE_Bps),
            min_rate_Bps=section.rate("min_rate", None, MIN_RATE_Bps, MAX_RATE_Bps),
            first_cut_rate_Bps=section.rate("first_cut_rate", None, 0, MAX_RATE_Bps),
            min_decrease_factor=section.share("min_decrease_factor", None, above=True),
        ),
        phase_overrides=_without_none(
            idle=steps.number("idle", None, 0, reaction.MAX_PHASE_MULTIPLIER),
            begin=steps.number("begin", None, 0, reaction.MAX_PHASE_MULTIPLIER),
            middle=steps.number("middle", None, 0, reaction.MAX_PHASE_MULTIPLIER),
            end=steps.number("end", None, 0, reaction.MAX_PHASE_MULTIPLIER),
            begin_share=steps.share("begin_share", None),
            end_share=steps.share("end_share", None),
        ),
    )
    steps.finish()
    with told_with(section.label):
        _check_constants(config)
    return config


def _check_constants(config: DcqcnConfig) -> None:
    """Check what does not depend on the link; the rest is checked for each interface's."""
    fixed: dict[str, Any] = {
        name: value
        for name, value in config.overrides.items()
        if name not in ("min_rate_Bps", "first_cut_rate_Bps")
    }
    if not {"rate_ai_Bps", "rate_hai_Bps"} <= fixed.keys():
        # The preset's other step grows with the link.
        fixed.pop("rate_ai_Bps", None)
        fixed.pop("rate_hai_Bps", None)
    constants = replace(reaction.PRESETS[config.preset], link_Bps=MAX_RATE_Bps, **fixed)
    replace(constants.phase_steps, **config.phase_overrides)


def _without_none(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
