"""TOML -> dataclasses. An error names the file, the key and what is allowed."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controller.dataplane import layout
from controller.dataplane.attachment import MODES, parse_target
from controller.errors import UsageError

MIN_FLOWS = 64
MAX_FLOWS_LIMIT = 1 << 20


@dataclass(frozen=True)
class InterfaceConfig:
    """One interface to attach to."""

    netns: str
    name: str
    mode: str = "native"

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
class Config:
    """Everything that `controller start` can be told."""

    interfaces: tuple[InterfaceConfig, ...] = ()
    observe: ObserveConfig = field(default_factory=ObserveConfig)


class _Section:
    """One TOML table while it is read: takes keys out, complains about what is left."""

    def __init__(self, path: Path, name: str, values: Any) -> None:
        self._path, self._name = path, name
        if not isinstance(values, Mapping):
            raise self._error(name, f"is {values!r}", "a table")
        self._values = dict(values)
        self._known: list[str] = []

    def _error(self, key: str, found: str, allowed: str) -> UsageError:
        return UsageError(f"{self._path}: key {key} {found}; allowed: {allowed}.")

    def integer(self, key: str, default: int, low: int, high: int) -> int:
        self._known.append(key)
        value = self._values.pop(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._error(f"{self._name}.{key}", f"is {value!r}", f"{low} .. {high}")
        return value

    def text(self, key: str, default: str | None, choices: tuple[str, ...] = ()) -> str:
        self._known.append(key)
        value = self._values.pop(key, default)
        if not isinstance(value, str) or (choices and value not in choices):
            found = "is missing" if value is None else f"is {value!r}"
            raise self._error(f"{self._name}.{key}", found, ", ".join(choices) or "a string")
        return value

    def finish(self) -> None:
        if self._values:
            key = next(iter(self._values))
            raise self._error(f"{self._name}.{key}", "is unknown", ", ".join(self._known))


def load_config(path: Path) -> Config:
    """Read a configuration file.

    Raises
    ------
    UsageError
        The file cannot be read, is no TOML, or has a wrong key or value.
    """
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.", "Name a readable file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not TOML: {error}.") from error
    allowed = ("observe", "interface")
    for key in document:
        if key not in allowed:
            raise UsageError(f"{path}: key {key} is unknown; allowed: {', '.join(allowed)}.")

    section = _Section(path, "observe", document.get("observe", {}))
    defaults = ObserveConfig()
    observe = ObserveConfig(
        section.integer("max_flows", defaults.max_flows, MIN_FLOWS, MAX_FLOWS_LIMIT),
        section.integer("idle_flow_s", defaults.idle_flow_s, 0, 10**9),
    )
    section.finish()

    interfaces = []
    entries = document.get("interface", [])
    if not isinstance(entries, list):
        raise UsageError(f"{path}: key interface is a table; allowed: [[interface]] entries.")
    for number, entry in enumerate(entries, start=1):
        section = _Section(path, f"interface[{number}]", entry)
        target = section.text("name", None)
        interfaces.append(InterfaceConfig.parse(target, section.text("mode", "native", MODES)))
        section.finish()
    return Config(tuple(interfaces), observe)
