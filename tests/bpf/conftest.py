"""A cache of compiled programs of the test's own, and a compiler that counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.dataplane import compile
from controller.dataplane.artifact_cache import VARIABLE
from tests.bpf.cached import Compiler


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own."""
    path = tmp_path / "cache"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    instance = Compiler(tmp_path / "compilations")
    monkeypatch.setattr(compile, "_compile_apart", instance)
    return instance
