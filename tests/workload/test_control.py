"""A contest's controllers never take the place of somebody else's, nor end one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.agent import ending, launch
from controller.agent.state import RunDirectory
from controller.errors import ConflictError, StellarError
from controller.workload import runner
from controller.workload.contest import Options
from controller.workload.control import controlled, refuse_other
from controller.workload.plan import Traffic
from tests.workload.contests import MIX
from tests.workload.test_contest import BED

TRAFFIC = Traffic(6_250_000)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[RunDirectory]:
    """The run directory of a controller that runs."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.lock()
    yield run
    run.unlock()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to end controllers."""
    done: list[str] = []
    monkeypatch.setattr(ending, "end", lambda run, timeout_s: done.append("end"))
    monkeypatch.setattr(ending, "clean_up", lambda run: done.append("clean up"))
    return done


def test_a_directory_that_nobody_uses_is_free(tmp_path: Path) -> None:
    refuse_other(tmp_path / "missing")
    run = RunDirectory(tmp_path / "run")
    run.create()
    refuse_other(run.path)
    run.lock()  # nobody holds it afterwards


def test_a_controller_that_runs_is_refused_before_hosts_are_built(
    other: RunDirectory, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(_traffic: Traffic) -> None:
        raise AssertionError("hosts are built")

    monkeypatch.setattr(runner, "shared_hosts", build)
    with pytest.raises(ConflictError, match=f"runs already in {other.path}") as caught:
        runner.compare(MIX, TRAFFIC, Options(), lambda _: None, run_dir=other.path)
    assert f"controller --run-dir {other.path} stop" in caught.value.remedy
    assert ended == []


def test_what_a_dead_controller_left_is_not_adopted(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.state_path.write_text("{}")
    with pytest.raises(ConflictError, match="A controller died in"):
        refuse_other(run.path)


def test_a_controller_that_came_meanwhile_is_not_ended(
    other: RunDirectory, ended: list[str]
) -> None:
    with (
        pytest.raises(ConflictError),
        controlled(MIX, TRAFFIC, BED, "laxity", other.path),
    ):
        raise AssertionError("it has begun")
    assert ended == []
    assert not (other.path / "contest.toml").exists()


def test_a_controller_that_came_first_by_a_moment_is_not_ended(
    tmp_path: Path, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(run: RunDirectory, arguments: list[str]) -> int:
        raise ConflictError("A controller runs already.")

    monkeypatch.setattr(launch, "run_detached", late)
    with pytest.raises(ConflictError), controlled(MIX, TRAFFIC, BED, "laxity", tmp_path / "run"):
        raise AssertionError("it has begun")
    assert ended == []


@pytest.mark.parametrize(("locked_by", "done"), [(4711, ["end"]), (4712, [])])
def test_only_the_controller_that_was_started_is_ended(
    tmp_path: Path,
    ended: list[str],
    monkeypatch: pytest.MonkeyPatch,
    locked_by: int,
    done: list[str],
) -> None:
    def start(run: RunDirectory, arguments: list[str]) -> int:
        (run.path / "lock").write_text(str(locked_by))
        return 4711

    monkeypatch.setattr(launch, "run_detached", start)
    with controlled(MIX, TRAFFIC, BED, "laxity", tmp_path / "run") as controller:
        assert controller is not None
        assert controller.pid == 4711
        assert (tmp_path / "run/contest.toml").exists()
    assert ended == done
    assert not (tmp_path / "run/contest.toml").exists()


def test_one_that_does_not_come_up_is_cleaned_up_and_its_log_told(
    tmp_path: Path, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: RunDirectory, arguments: list[str]) -> int:
        run.log_path.write_text("the reason\n")
        raise StellarError("The controller did not come up.")

    monkeypatch.setattr(launch, "run_detached", fail)
    with (
        pytest.raises(StellarError, match=r"did not come up\.\nthe reason"),
        controlled(MIX, TRAFFIC, BED, "laxity", tmp_path / "run"),
    ):
        raise AssertionError("it has begun")
    assert ended == ["clean up"]


def test_without_a_controller_nothing_is_started_or_ended(tmp_path: Path, ended: list[str]) -> None:
    with controlled(MIX, TRAFFIC, BED, "fair", tmp_path / "run") as controller:
        assert controller is None
    assert ended == []
