"""What scripts/test makes of a tier whose tests fail once, twice or are too many."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/test"
# Fails in the first run only: the file tells that there was one.
ONCE = """
def test_once():
    from pathlib import Path
    seen = Path(__file__).with_name("seen")
    was_there = seen.exists()
    seen.touch()
    assert was_there
"""


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    """scripts/test as a module."""
    loader = importlib.machinery.SourceFileLoader("tier_runner", str(SCRIPT))
    spec = importlib.util.spec_from_loader("tier_runner", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tier_runner"] = module  # dataclasses look it up
    loader.exec_module(module)
    return module


def run(runner: ModuleType, folder: Path, text: str):
    (folder / "test_it.py").write_text(text)
    # Of this project's settings none: the tests there are not ours.
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [*runner.PYTEST, "-q", "--rootdir", str(folder), "-c", str(folder / "pytest.ini")]
    return runner.run_tier("some", [*command, str(folder)], str(folder))


def test_a_test_that_fails_once_is_named_and_the_tier_passes(
    runner: ModuleType, tmp_path: Path
) -> None:
    outcome = run(runner, tmp_path, ONCE + "def test_good(): pass\n")
    assert (outcome.passed, outcome.failed, outcome.problem) == (2, 0, "")
    assert [name.rpartition("::")[2] for name in outcome.repeated] == ["test_once"]


def test_a_test_that_fails_twice_has_failed(runner: ModuleType, tmp_path: Path) -> None:
    text = ONCE + "def test_good(): pass\ndef test_bad(): assert 0\n"
    outcome = run(runner, tmp_path, text)
    assert (outcome.passed, outcome.failed, outcome.problem) == (2, 1, "tests failed twice")
    assert [name.rpartition("::")[2] for name in outcome.failures] == ["test_bad"]


def test_many_failures_are_not_run_again(runner: ModuleType, tmp_path: Path) -> None:
    many = "".join(f"def test_{n}(): assert 0\n" for n in range(5))
    outcome = run(runner, tmp_path, ONCE + many)
    assert (outcome.passed, outcome.failed, outcome.problem) == (0, 6, "tests failed")


def test_what_was_broken_off_is_not_run_again(runner: ModuleType, tmp_path: Path) -> None:
    text = "import pytest\ndef test_ends(): pytest.exit('over', returncode=3)\ndef test_z(): 0/0\n"
    outcome = run(runner, tmp_path, ONCE + text)
    assert (outcome.failed, outcome.repeated) == (1, [])
    assert outcome.problem == "it ended with status 3"


def test_skips_are_not_run_again(runner: ModuleType, tmp_path: Path) -> None:
    text = "import pytest\ndef test_skipped(): pytest.skip()\n"
    outcome = run(runner, tmp_path, ONCE + text)
    assert (outcome.failed, outcome.skipped, outcome.repeated) == (1, 1, [])
    assert "skipped tests prove nothing" in outcome.problem


def test_what_is_skipped_the_second_time_has_not_passed(runner: ModuleType, tmp_path: Path) -> None:
    skips = "import pytest\n    was_there and pytest.skip()\n    assert was_there"
    outcome = run(runner, tmp_path, ONCE.replace("assert was_there", skips))
    assert (outcome.passed, outcome.failed, outcome.problem) == (0, 1, "tests failed")
