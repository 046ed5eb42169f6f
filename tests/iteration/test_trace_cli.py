"""``controller trace import`` and ``show`` as people and scripts use them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from controller.cli_trace import trace_group
from controller.errors import InputError, UsageError
from controller.iteration.traces import read_trace
from tests.iteration import fixtures


def trace(*arguments: str | Path, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(trace_group, [str(one) for one in arguments], input=stdin)


def document(*arguments: str | Path) -> dict[str, Any]:
    result = trace(*arguments, "--json")
    assert result.exit_code == 0, result.output
    loaded: dict[str, Any] = json.loads(result.output)
    return loaded


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    lengths_s = tuple(2 + 0.1 * (number % 3) for number in range(30))
    return fixtures.write(tmp_path / "steps.gz", fixtures.straggler_csv(lengths_s), packed=True)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return fixtures.write(tmp_path / "profile", fixtures.kineto_json(fixtures.kineto_events(5)))


@pytest.fixture
def untimed(tmp_path: Path) -> Path:
    return fixtures.write(tmp_path / "et.json", fixtures.host_trace_json())


def test_import_prints_format_windows_and_counts_within_80_columns(steps: Path) -> None:
    result = trace("import", steps)
    assert result.exit_code == 0
    assert "format       straggler" in result.output
    assert "windows      30" in result.output
    assert "reduce_scatter" in result.output
    assert "grads stage 0" in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_sync_windows_of_a_profiler_trace_are_found_in_its_collectives(profile: Path) -> None:
    found = document("import", profile)
    assert found["format"] == "kineto"
    assert found["windows"] == found["iterations"] == 5
    assert found["window_bytes"] == {"mean": fixtures.RESNET50_BYTES}
    assert found["period_us"] == {"mean": 1000.0, "std": 0.0}


def test_what_import_writes_reads_as_the_same_collectives(profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    result = trace("import", profile, "-o", out)
    assert "25 rows written to" in result.output
    assert read_trace(out).collectives == read_trace(profile).collectives
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_windows_are_written_when_asked_for_or_when_the_trace_has_them(
    profile: Path, steps: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.csv"
    assert document("import", profile, "-o", out, "--windows")["output"] == str(out)
    assert [window.bytes for window in read_trace(out).windows] == 5 * [fixtures.RESNET50_BYTES]
    trace("import", steps, "-o", out, "--force")
    written, own = read_trace(out).windows, read_trace(steps).windows
    assert [w.start_ns for w in written] == [w.start_ns - own[0].start_ns for w in own]


def test_a_file_is_overwritten_only_by_force(steps: Path, tmp_path: Path) -> None:
    out = fixtures.write(tmp_path / "out.csv", "mine")
    result = trace("import", steps, "-o", out)
    assert isinstance(result.exception, UsageError)
    assert "--force" in str(result.exception)
    assert out.read_text() == "mine"
    assert trace("import", steps, "-o", out, "--force").exit_code == 0
    assert out.read_text().startswith("start_us,end_us,bytes\n")


@pytest.mark.parametrize("place", [".", "nowhere/out.csv", "x" * 300])
def test_an_output_that_cannot_be_is_refused_before_reading(tmp_path: Path, place: str) -> None:
    result = trace("import", tmp_path / "no such trace", "-o", tmp_path / place)
    assert isinstance(result.exception, UsageError)


def test_show_prints_a_table_and_one_line_per_iteration(steps: Path) -> None:
    result = trace("show", steps, "--iterations", "4")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("█" in line and "░" in line for line in lines) == 4 + 1  # and the legend
    assert "26 more iterations" in result.output


def test_show_as_json_has_each_iteration_with_units_in_its_keys(profile: Path) -> None:
    shown = document("show", profile, "--iterations", "2")["shown"]
    assert shown[1] == {
        "iteration": 1,
        "start_us": 1000.0,
        "period_us": 1000.0,
        "window_us": pytest.approx(4 * 40.5 + 30.125),
        "bytes": fixtures.RESNET50_BYTES,
        "collectives": 5,
    }
    assert len(shown) == 2


def test_show_writes_a_picture(steps: Path, tmp_path: Path) -> None:
    picture = tmp_path / "out.svg"
    assert trace("show", steps, "--svg", picture).exit_code == 0
    root = ElementTree.fromstring(picture.read_text())
    assert root.find("{http://www.w3.org/2000/svg}title").text == (  # type: ignore[union-attr]
        "Sync windows of steps.gz"
    )


def test_a_trace_without_times_is_shown_but_neither_drawn_nor_written(
    untimed: Path, tmp_path: Path
) -> None:
    result = trace("show", untimed)
    assert result.exit_code == 0
    assert "all_reduce" in result.output
    assert "not say when" in result.output
    for arguments in (("show", untimed, "--svg"), ("import", untimed, "-o")):
        out = tmp_path / "out"
        refused = trace(*arguments, out)
        assert isinstance(refused.exception, InputError)
        assert not out.exists()


def test_a_trace_comes_from_standard_input(steps: Path) -> None:
    result = trace("import", "-", "--json", stdin=steps.read_bytes())
    assert json.loads(result.output)["windows"] == 30


def test_a_foreign_file_is_an_input_error_that_names_it(tmp_path: Path) -> None:
    result = trace("show", fixtures.write(tmp_path / "notes.txt", "hello"))
    assert isinstance(result.exception, InputError)
    assert "notes.txt" in str(result.exception)


def test_a_name_that_is_too_long_is_told_without_a_traceback(tmp_path: Path) -> None:
    refused = trace("show", tmp_path / ("x" * 300))
    assert isinstance(refused.exception, InputError)
    assert "File name too long" in str(refused.exception)


def test_a_closed_standard_input_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputError, match="Standard input is closed"):
        read_trace(Path("-"))


@pytest.mark.parametrize(
    "arguments",
    [("import", "--windows"), ("import", "--force"), ("show", "--force")],
)
def test_an_option_without_effect_is_refused(steps: Path, arguments: tuple[str, str]) -> None:
    command, option = arguments
    refused = trace(command, steps, option)
    assert isinstance(refused.exception, UsageError)
    assert f"{option} has no effect here" in str(refused.exception)
