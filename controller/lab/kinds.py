"""Scenarios of every kind: the built-in ones, files of others, and what runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from controller import lab
from controller.config_reader import read_document
from controller.errors import UsageError
from controller.lab import reading
from controller.lab.scenario import ClusterScenario

if TYPE_CHECKING:
    from controller.sim.progress import Progress

CLUSTER, CONGESTION = KINDS = (reading.KIND, "congestion")


class Report(Protocol):
    """What running a scenario of any kind gives."""

    def to_json(self) -> dict[str, Any]:
        """The document of ``--json``."""
        ...

    def text(self) -> str:
        """For people, at most 80 columns wide."""
        ...

    def figures(self, folder: Path) -> list[Path]:
        """Draw pictures into a folder, and name them."""
        ...


@dataclass(frozen=True)
class ScenarioFile:
    """A scenario that was found and not read as a whole yet.

    Parameters
    ----------
    name
        Of the scenario: that of the file.
    path
        Of the file.
    kind
        One of `KINDS`.
    about
        One line.
    """

    name: str
    path: Path
    kind: str
    about: str


@cache
def builtins() -> Mapping[str, ScenarioFile]:
    """The scenarios that come with the package, by name."""
    paths = sorted((Path(lab.__path__[0]) / "scenarios").glob("*.toml"))
    return {path.stem: _peek(path) for path in paths}


@cache
def _keys() -> tuple[str, ...]:
    """What may stand at the top of a file of any kind; each kind's reader is stricter."""
    from controller.lab.congestion_scenario import KEYS as CONGESTION_KEYS

    return tuple(dict.fromkeys((*reading.KEYS, *CONGESTION_KEYS)))


def find_scenario(text: str) -> ScenarioFile:
    """A built-in scenario by its name, or that of a file.

    Raises
    ------
    UsageError
        Neither; or the file cannot be read, is no TOML, or of no known kind.
    """
    if text in builtins():
        return builtins()[text]
    # What is neither is looked for last: exists() fails on a name that is too long for a file.
    with contextlib.suppress(OSError, ValueError):
        if "/" in text or text.endswith(".toml") or Path(text).exists():
            return _peek(Path(text))
    raise UsageError(
        f"Scenario {text[:80]!r} is unknown; allowed: {', '.join(builtins())}, or a TOML file.",
        "controller lab list shows the built-in ones.",
    )


def load_cluster(text: str) -> ClusterScenario:
    """A cluster scenario by name or file.

    Raises
    ------
    UsageError, InputError
        There is none, it is of another kind, or has a wrong key or value.
    """
    found = find_scenario(text)
    if found.kind != CLUSTER:
        raise UsageError(
            f"{found.path}: key kind is {found.kind!r}; allowed here: {CLUSTER!r}.",
            runs_any(text),
        )
    document = read_document(found.path, reading.KEYS)
    return reading.read_cluster(found.path, document, found.name)


def runs_any(text: str) -> str:
    """What to do with a scenario of another kind than a command's."""
    return f"controller lab run {text} -o FOLDER runs any kind."


def run_scenario(found: ScenarioFile, progress: Progress, processes: int | None = None) -> Report:
    """Read and run a scenario of any kind.

    Parameters
    ----------
    found
        Which.
    progress
        Called now and then with what is done and what there is to do.
    processes
        At once, where the kind knows several; None: one for each processor.

    Raises
    ------
    UsageError, InputError
        The file has a wrong key or value, or cannot be simulated.
    """
    if found.kind == CLUSTER:
        from controller.lab.run import run_cluster

        return run_cluster(load_cluster(str(found.path)), progress, processes)
    from controller.lab.congestion_scenario import load_scenario, run

    return run(load_scenario(found.path), progress)


def _peek(path: Path) -> ScenarioFile:
    document = read_document(path, _keys())
    foreign = [key for key in document if key not in reading.KEYS]
    if foreign and "kind" not in document:
        raise UsageError(
            f"{path}: key kind is missing, and key {foreign[0]} is none of a {CLUSTER} scenario; "
            f"allowed: {', '.join(KINDS)}.",
            f'Write kind = "{CONGESTION}" at its top.',
        )
    kind = document.get("kind", CLUSTER)
    if kind not in KINDS:
        raise UsageError(
            f"{path}: key kind is {kind!r}; allowed: {', '.join(KINDS)}.", "Correct it."
        )
    return ScenarioFile(path.stem, path, kind, str(document.get("about", "")))
