"""Congestion scenarios: TOML to experiment, table, JSON, figures, command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from controller.cli_lab_congestion import congestion_command
from controller.congestion.dcqcn import preset
from controller.errors import UsageError
from controller.lab.congestion_report import IncastReport, SteadyReport
from controller.lab.congestion_scenario import KIND, CongestionScenario, load_scenario, run
from controller.lab.kinds import builtins
from controller.sim.congestion.experiment import VARIANTS, IncastExperiment
from controller.sim.congestion.steady_experiment import SteadyExperiment

SMALL = """
kind = "congestion"
about = "small"
[incast]
degrees = [2, 6]
variants = ["prediction", "live"]
seeds = 3
duration = "12ms"
warmup = "2ms"
[network]
link = "100gbit"
pause = "2MB"
step = "5us"
[workload]
window = "25MB"
compute = "1ms"
"""
LONG = """
kind = "congestion"
[steady]
flows = [2]
delays = ["1us", "20us"]
windows = [false, true]
seeds = 2
duration = "10ms"
warmup = "1ms"
[network]
link = "40gbit"
packet = 1000
step = "5us"
"""


def scenario(folder: Path, text: str) -> CongestionScenario:
    path = folder / "mine.toml"
    path.write_text(text)
    return load_scenario(path)


@pytest.fixture(scope="module")
def incast(tmp_path_factory: pytest.TempPathFactory) -> IncastReport:
    report = run(scenario(tmp_path_factory.mktemp("incast"), SMALL))
    assert isinstance(report, IncastReport)
    return report


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> SteadyReport:
    report = run(scenario(tmp_path_factory.mktemp("steady"), LONG))
    assert isinstance(report, SteadyReport)
    return report


def test_every_built_in_congestion_scenario_can_be_read() -> None:
    found = [one for one in builtins().values() if one.kind == KIND]
    assert len(found) >= 5
    for one in found:
        loaded = load_scenario(one.path)
        assert loaded.name == one.name
        assert loaded.about


def test_a_file_becomes_what_it_says(tmp_path: Path) -> None:
    experiment = scenario(tmp_path, SMALL).experiment
    assert isinstance(experiment, IncastExperiment)
    assert experiment.degrees == (2, 6)
    assert experiment.variants == ("standard", "prediction", "live")
    conditions = experiment.conditions
    assert conditions.parameters == preset("paper", 12.5e9)
    assert conditions.port.pause_bytes == 2e6
    # Kmin and Kmax grow with the rate above 40 Gbit/s.
    assert (conditions.port.kmin_bytes, conditions.port.kmax_bytes) == (12_500, 500_000)
    assert (conditions.workload.window_bytes, conditions.step_ns) == (25_000_000, 5_000)


def test_without_a_pause_threshold_the_queue_has_no_bound(tmp_path: Path) -> None:
    experiment = scenario(tmp_path, SMALL.replace('pause = "2MB"', "")).experiment
    assert isinstance(experiment, IncastExperiment)
    assert math.isinf(experiment.conditions.port.pause_bytes)


def test_long_flows_become_every_combination(tmp_path: Path) -> None:
    experiment = scenario(tmp_path, LONG).experiment
    assert isinstance(experiment, SteadyExperiment)
    assert len(experiment.cases()) == 1 * 2 * 2 * 2
    assert experiment.conditions.kmax_bytes == 200_000
    assert experiment.conditions.seconds == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("degrees = [2, 6]", "degrees = [1]", "incast.degrees"),
        ("degrees = [2, 6]", "degrees = []", "incast.degrees"),
        ("degrees = [2, 6]", "degrees = [2, 2]", "twice"),
        ('"live"', '"fast"', "incast.variants"),
        ('"live"', '["live"]', "incast.variants"),
        ('duration = "12ms"', 'duration = "12500us"', "whole bins"),
        ('duration = "12ms"', 'duration = "60s"', "samples of all queues"),
        ("seeds = 3", "seeds = 0", "incast.seeds"),
        ("seeds = 3", "seeds = 3\nspeed = 1", "incast.speed"),
        ('link = "100gbit"', 'link = "100"', "network.link"),
        ('link = "100gbit"', 'preset = "mine"', "network.preset"),
        ('step = "5us"', 'step = "3us"', "whole steps"),
        ('warmup = "2ms"', 'warmup = "11ms"', "warm-up"),
        ('window = "25MB"', 'window = "0"', "workload.window"),
        ("[workload]", "[work]", "key work is unknown"),
        ("[incast]", "[steady]\n[incast]", "one of the tables"),
        ('kind = "congestion"', 'kind = "cluster"', "key kind"),
        ("[network]", "[network]\nkmin = 900000", "kmin_bytes"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_it(
    tmp_path: Path, old: str, new: str, found: str
) -> None:
    assert old in SMALL
    with pytest.raises(UsageError, match=found) as caught:
        scenario(tmp_path, SMALL.replace(old, new, 1))
    assert str(caught.value).count("mine.toml") == 1


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ('delays = ["1us", "20us"]', "delays = [1]", "steady.delays"),
        ('delays = ["1us", "20us"]', 'delays = ["1s"]', "steady.delays"),
        ("windows = [false, true]", "windows = [1]", "steady.windows"),
        ("[network]", "[workload]\n[network]", "workload"),
        ("flows = [2]", "flows = [2, 2]", "stands twice"),
        ("windows = [false, true]", "windows = [true, true]", "stands twice"),
        ("[steady]", '[steady]\nmodel = "swift"', "steady.model"),
        ("[steady]", '[steady]\nmodel = "timely"', "marks no packets"),
        ("[network]", "[network]\necho_holds = 1", "network.echo_holds"),
    ],
)
def test_what_is_wrong_with_long_flows_is_named(
    tmp_path: Path, old: str, new: str, found: str
) -> None:
    with pytest.raises(UsageError, match=found):
        scenario(tmp_path, LONG.replace(old, new, 1))


def test_changes_are_taken_seed_by_seed(incast: IncastReport) -> None:
    table = incast.table
    standard = table.values(6, "standard", "stability")
    changes = 100 * (table.values(6, "prediction", "stability") / standard - 1)
    found = table.change(6, "prediction", "stability")
    assert found is not None
    assert found.mean == pytest.approx(changes.mean())
    # Student's t of two degrees of freedom: 4.303 (two-sided, 95 %).
    assert found.half_width == pytest.approx(4.3027 * changes.std(ddof=1) / 3**0.5, rel=1e-4)
    mean = table.mean_change("prediction", "stability")
    other = table.change(2, "prediction", "stability")
    assert mean is not None
    assert other is not None
    assert mean.mean == pytest.approx((found.mean + other.mean) / 2)
    assert table.possible_change(6) == pytest.approx(np.mean(100 * (1 / standard - 1)))


def test_the_document_has_figures_and_changes_of_every_degree(incast: IncastReport) -> None:
    document = json.loads(json.dumps(incast.to_json(), allow_nan=False))
    assert document["kind"] == KIND
    assert document["seeds"] == 3
    assert set(document["degrees"]) == {"2", "6"}
    entry = document["degrees"]["6"]["live"]
    assert set(entry["stability"]) == {"mean", "ci95"}
    assert entry["stability_change_percent"]["mean"] == pytest.approx(
        incast.table.change(6, "live", "stability").mean  # type: ignore[union-attr]
    )
    assert document["degrees"]["6"]["standard"].keys() >= {"jain", "queue_p99_bytes"}
    assert document["target_percent"] == 35
    assert set(document["mean_change_percent"]["flow_stability"]) == {"prediction", "live"}


def test_reports_fit_into_80_columns(incast: IncastReport, steady: SteadyReport) -> None:
    for report in (incast, steady):
        lines = report.text().splitlines()
        assert max(map(len, lines)) <= 80
    assert any(line.split()[:1] == ["6"] for line in incast.text().splitlines())


def test_more_variants_than_a_line_holds_go_on_below(tmp_path: Path) -> None:
    names = ", ".join(f'"{name}"' for name in VARIANTS)
    text = SMALL.replace('"prediction", "live"', names).replace("[2, 6]", "[2]")
    report = run(scenario(tmp_path, text.replace("seeds = 3", "seeds = 1")))
    lines = report.text().splitlines()
    assert max(map(len, lines)) <= 80
    for name in VARIANTS:
        assert any(name in line.split() for line in lines)


def test_long_flows_are_reported_by_combination(steady: SteadyReport) -> None:
    rows = json.loads(json.dumps(steady.to_json(), allow_nan=False))["rows"]
    assert [(row["flows"], row["delay_ns"], row["window"]) for row in rows] == [
        (2, 1_000, False), (2, 20_000, False), (2, 1_000, True), (2, 20_000, True)
    ]  # fmt: skip
    assert all(0 < row["utilisation"] <= 1 for row in rows)
    assert rows[0]["queue_bytes"]["ci95"] > 0


def test_the_mean_change_stands_below_the_changes(tmp_path: Path) -> None:
    names = ", ".join(f'"{name}"' for name in VARIANTS)
    text = SMALL.replace('"prediction", "live"', names).replace("[2, 6]", "[2]")
    lines = run(scenario(tmp_path, text.replace("seeds = 3", "seeds = 1"))).text().splitlines()
    means = [number for number, line in enumerate(lines) if line.split()[:1] == ["mean"]]
    assert len(means) == 2
    # Of one degree its change is the mean, block by block; the first begins with "most".
    assert [lines[number].split()[-1] for number in means] == [
        lines[number - 1].split()[-1] for number in means
    ]
    assert len(lines[means[0]].split()) == len(lines[means[0] - 1].split()) - 1


def test_echoes_may_be_forgotten(tmp_path: Path, steady: SteadyReport) -> None:
    text = LONG.replace("[network]", "[network]\necho_holds = false")
    document = run(scenario(tmp_path, text)).to_json()
    assert document["setting"]["echo_holds"] is False
    assert steady.to_json()["setting"]["echo_holds"] is True
    assert document["rows"] != steady.to_json()["rows"]


def test_long_flows_may_be_under_timely(tmp_path: Path) -> None:
    text = LONG.replace("[steady]", '[steady]\nmodel = "timely"')
    text = text.replace("windows = [false, true]", "").replace("40gbit", "10gbit")
    report = run(scenario(tmp_path, text))
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert document["model"] == "timely"
    assert "beta" in document["setting"]["parameters"]
    assert "pmax" not in document["setting"]
    assert "none" in report.text().split()


def test_pictures_are_the_same_each_time(
    incast: IncastReport, steady: SteadyReport, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    for report in (incast, steady):
        first = report.figures(tmp_path / "a")
        second = report.figures(tmp_path / "b")
        assert first
        for one, other in zip(first, second, strict=True):
            assert one.read_bytes() == other.read_bytes()
            assert b"<svg" in one.read_bytes()


def command(*arguments: str) -> Result:
    return CliRunner().invoke(congestion_command, list(arguments))


def test_the_command_takes_degrees_and_seeds_and_prints_json(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SMALL)
    result = command(str(path), "--degrees", "3", "--seeds", "1", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert list(document["degrees"]) == ["3"]
    assert document["degrees"]["3"]["standard"]["stability"]["ci95"] is None


def test_the_command_writes_a_report_and_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "mine.toml").write_text(LONG)
    result = command(str(tmp_path / "mine.toml"), "-o", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.json", "queues.svg"}
    assert "instant" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--degrees", "2,x"], "cannot be read"),
        (["--degrees", "1"], "allowed: 2"),
        (["--seeds", "0"], "seeds"),
        (["steady", "--degrees", "4"], "no incast degrees"),
        (["no-such"], "unknown"),
        (["quick"], "key kind"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], found: str) -> None:
    error = command(*arguments).exception
    assert isinstance(error, UsageError)
    assert found in str(error)
