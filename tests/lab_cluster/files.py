"""Scenario files for tests."""

from __future__ import annotations

from pathlib import Path

from controller.lab.kinds import load_cluster
from controller.lab.scenario import ClusterScenario

NETWORK = """
[topology]
leaves = 2
nics_per_leaf = 4
spines = 1
nic_rate = "100gbit"
"""
JOB = """
[[job]]
name = "a"
nics = 2
model = "resnet50"
"""


def write(folder: Path, text: str) -> Path:
    """A scenario file with this text."""
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def load(folder: Path, text: str) -> ClusterScenario:
    """The scenario of this text."""
    return load_cluster(str(write(folder, text)))


def with_job(keys: str, head: str = "", network: str = NETWORK) -> str:
    """A scenario with one job of these keys."""
    return f"{head}\n{network}\n[[job]]\n{keys}\n"
