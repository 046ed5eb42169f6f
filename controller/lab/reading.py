"""Reads a cluster scenario from TOML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from controller.config_reader import Section, told_with
from controller.errors import InputError, UsageError
from controller.lab.reading_jobs import read_job
from controller.lab.scenario import (
    KNOWN_POLICIES,
    MAX_FIRST_SEED,
    MAX_ITERATIONS,
    MAX_NICS,
    MAX_SEEDS,
    RANDOM,
    STARTS,
    ClusterScenario,
    Network,
)
from controller.sim.cluster.outcome import (
    CLASSES_SHARING,
    DCQCN_SHARING,
    SHARINGS,
    ClusterConditions,
)
from controller.sim.cluster.placement import RANDOM as RANDOM_PLACEMENT
from controller.sim.cluster.placement import WAYS
from controller.sim.cluster.topology import LeafSpine

KIND = "cluster"
# What may stand at the top of a file.
KEYS = (
    "kind", "about", "policies", "seeds", "first_seed", "iterations", "warmup", "start", "jitter",
    "topology", "conditions", "job",
)  # fmt: skip
# One megabit to ten terabit a second.
LOW_Bps, HIGH_Bps = 125_000, 1_250_000_000_000
_MAX_PLAN_ns = 60_000_000_000
_MAX_QPS = 64
_MAX_RAISE_nbytes = 1 << 30
# Of GPUs that do nothing else: published traces vary by 0.3 to 2.3 % (see workload/mixes.py).
DEFAULT_JITTER = 0.02


class _Top(Section):
    """The keys of a document that are in no table."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        super().__init__(path, "", values)
        self._file = path

    def where(self, key: str) -> str:
        return f"{self._file}: key {key}"


def read_cluster(path: Path, document: Mapping[str, Any], name: str) -> ClusterScenario:
    """A cluster scenario from what a TOML file says.

    Parameters
    ----------
    path
        The file, for errors; traces that it names are looked for beside it.
    document
        As `controller.config_reader.read_document` gives it.
    name
        Of the scenario.

    Raises
    ------
    UsageError, InputError
        A key is missing, unknown or has a wrong value, values do not fit together, or a trace
        cannot be read.
    """
    top = _Top(path, document)
    top.raw("kind", KIND)
    entries = top.raw("job", [])
    fabric_table = top.raw("topology", None)
    conditions_table = top.raw("conditions", {})
    if fabric_table is None:
        raise UsageError(
            f"{path}: key topology is missing; allowed: a table [topology].", "Add it."
        )
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{path}: key job is missing; allowed: [[job]] entries.", "Add one.")
    jitter = top.share("jitter", DEFAULT_JITTER)
    values: dict[str, Any] = {
        "name": name,
        "about": top.text("about", ""),
        "policies": _policies(path, top.raw("policies", list(KNOWN_POLICIES))),
        "seeds": top.integer("seeds", 10, 1, MAX_SEEDS),
        "first_seed": top.integer("first_seed", 1, 0, MAX_FIRST_SEED),
        "iterations": top.integer("iterations", 100, 1, MAX_ITERATIONS),
        "warmup": top.integer("warmup", 10, 0, MAX_ITERATIONS),
        "start": top.text("start", RANDOM, STARTS),
        "network": _network(Section(path, "topology", fabric_table)),
        "conditions": _conditions(Section(path, "conditions", conditions_table)),
    }
    top.finish()
    fabric = values["network"].fabric
    jobs = []
    for number, entry in enumerate(entries):
        section = Section(path, f"job[{number + 1}]", entry)
        try:
            jobs.append(read_job(section, fabric, jitter, path.parent))
        except InputError as error:
            raise InputError(f"{section.where('trace')}: {error.message}", error.remedy) from error
    with told_with(str(path)):
        return ClusterScenario(jobs=tuple(jobs), **values)


def _policies(path: Path, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UsageError(
            f"{path}: key policies is {value!r}; allowed: a list of {', '.join(KNOWN_POLICIES)}.",
            "Correct it.",
        )
    return tuple(value)


def _network(section: Section) -> Network:
    section.require("nics_per_leaf", f"1 .. {MAX_NICS}")
    section.require("nic_rate", "a rate, as in 100gbit")
    nic_Bps = section.rate("nic_rate", 0, LOW_Bps, HIGH_Bps)
    leaves = section.integer("leaves", 1, 1, MAX_NICS)
    if leaves > 1:
        section.require("spines", f"1 .. {MAX_NICS}, where there are several leaves")
    values: dict[str, Any] = {
        "leaves": leaves,
        "nics_per_leaf": section.integer("nics_per_leaf", 1, 1, MAX_NICS),
        "spines": section.integer("spines", 0, 0, MAX_NICS),
        "uplink_Bps": float(section.rate("uplink_rate", nic_Bps, LOW_Bps, HIGH_Bps)),
        "uplinks_per_spine": section.integer("uplinks_per_spine", 1, 1, MAX_NICS),
    }
    placement = section.text("placement", RANDOM_PLACEMENT, WAYS)
    share_nics = section.flag("share_nics", False)
    section.finish()
    with told_with(section.label):
        fabric = LeafSpine(nic_Bps=float(nic_Bps), **values)
        return Network(fabric, placement, share_nics)


def _conditions(section: Section) -> ClusterConditions:
    usual = ClusterConditions()
    values: dict[str, Any] = {
        "floor_share": section.share("floor_share", usual.floor_share),
        "plan_ns": section.duration("plan", usual.plan_ns, 0, _MAX_PLAN_ns),
        "raise_bytes": section.size("raise", usual.raise_bytes, 0, _MAX_RAISE_nbytes),
        "start_error": section.share("start_error", usual.start_error),
        "bytes_error": section.share("bytes_error", usual.bytes_error),
        "sharing": section.text("sharing", CLASSES_SHARING, SHARINGS),
        "qps_per_peer": section.integer("qps_per_peer", usual.qps_per_peer, 1, _MAX_QPS),
    }
    section.finish()
    if values["raise_bytes"] and values["sharing"] == DCQCN_SHARING:
        raise UsageError(
            f'{section.where("raise")} is given beside sharing = "{DCQCN_SHARING}", where no class '
            "rises; allowed: one of both.",
            "Leave one of them out.",
        )
    with told_with(section.label):
        return ClusterConditions(**values)
