"""Scenarios from end to end: processes, commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click.testing
import pytest

from controller.cli_lab_cluster import cluster_command, list_command, run_command
from controller.errors import StellarError, UsageError
from controller.lab import run as running
from controller.lab.kinds import builtins, load_cluster
from controller.lab.run import run_cluster, with_options

ROOT = Path(__file__).resolve().parents[2]
SMALL = """
seeds = 2
iterations = 5
warmup = 1
policies = ["fair", "laxity"]
[topology]
nics_per_leaf = 2
nic_rate = "100gbit"
share_nics = true
[[job]]
name = "a"
nics = 2
count = 2
period = "100ms"
share = 0.3
overlap = false
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


def invoke(command, *arguments):
    return click.testing.CliRunner().invoke(command, list(arguments), catch_exceptions=False)


def test_a_quick_scenario_tells_all_policies():
    scenario = with_options(load_cluster("quick"), (), seeds=2, iterations=6)
    report = run_cluster(scenario, processes=1)
    document = report.to_json()
    assert tuple(document["policies"]) == scenario.policies
    bound = document["bound"]["allreduce_ms"]["mean"]
    for policy in document["policies"].values():
        assert policy["allreduce_ms"]["mean"] >= bound * (1 - 1e-9)
        assert policy["worst_slowdown"] >= 1 - 1e-9
        assert 0 < policy["utilisation"] <= 1
        assert policy["allreduce_ms"]["slowest10"] >= policy["allreduce_ms"]["mean"]


def test_several_processes_give_what_one_gives(small):
    scenario = load_cluster(small)
    told = []
    one = run_cluster(scenario, lambda done, total: told.append(done / total), processes=1)
    two = run_cluster(scenario, processes=2)
    assert one.to_json() == two.to_json()
    assert told == sorted(told) and told[-1] == 1


def test_worked_example_of_crux_has_its_utilisations():
    # Crux (SIGCOMM 2024): 37.5 % with the larger job first, 41.7 % (5/12) as Crux orders them.
    scenario = with_options(load_cluster("crux-example"), ["static", "crux"])
    policies = run_cluster(scenario, processes=1).to_json()["policies"]
    assert policies["static"]["utilisation"] == pytest.approx(0.375, abs=2e-3)
    assert policies["crux"]["utilisation"] == pytest.approx(5 / 12, abs=2e-3)


def test_a_worker_that_is_killed_is_an_error_that_says_so(small, monkeypatch):
    monkeypatch.setattr(running, "simulate", os._exit)
    monkeypatch.setattr(running, "Task", lambda *_: 1)
    with pytest.raises(StellarError, match="A process that simulated was killed"):
        run_cluster(load_cluster(small), processes=2)


def test_options_of_the_command_line_are_checked(small):
    scenario = load_cluster(small)
    assert with_options(scenario) == scenario
    with pytest.raises(UsageError, match="seeds is 0; allowed: 1"):
        with_options(scenario, seeds=0)
    with pytest.raises(UsageError, match="Policy 'best' is unknown"):
        with_options(scenario, ["best"])


def test_the_cluster_command_prints_json_and_writes_the_folder(small, tmp_path):
    folder = tmp_path / "new" / "results"
    result = invoke(
        cluster_command, small, "-p", "fair,laxity", "-p", "crux", "--seeds", "1", "-n", "4",
        "--processes", "1", "-o", str(folder), "--json",
    )  # fmt: skip
    document = json.loads(result.stdout)
    assert list(document["policies"]) == ["fair", "laxity", "crux"]
    assert document["seeds"] == 1 and document["scenario"]["iterations"] == 4
    assert json.loads((folder / "report.json").read_text()) == document
    assert {path.name for path in folder.iterdir()} == {
        "report.json", "timeline.svg", "cdf.svg", "links.svg",
    }  # fmt: skip


def test_the_run_command_prints_a_table_for_a_scenario_of_any_kind(small, tmp_path):
    result = invoke(run_command, small, "--processes", "1", "-o", str(tmp_path / "out"))
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80
    assert "report.json, timeline.svg, cdf.svg, links.svg" in result.stdout


def test_a_folder_that_cannot_be_made_is_told_before_the_work(small, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(running, "run_cluster", None)
    with pytest.raises(UsageError, match="is no folder that can be made: Not a directory"):
        invoke(cluster_command, small, "-o", str(tmp_path / "file" / "out"))


def test_the_list_names_every_built_in_scenario_in_a_line():
    lines = invoke(list_command).stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(builtins())
    assert max(map(len, lines)) <= 80
    listed = json.loads(invoke(list_command, "--json").stdout)
    assert [entry["name"] for entry in listed] == list(builtins())
    assert all(entry["about"] for entry in listed)


@pytest.fixture
def long_run(tmp_path):
    path = tmp_path / "long.toml"
    path.write_text(SMALL.replace("iterations = 5", "iterations = 100000"))
    script = tmp_path / "script.py"
    script.write_text(
        "from controller.cli_lab_cluster import cluster_command\n"
        "if __name__ == '__main__':\n    cluster_command()\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script), str(path), "--processes", "2"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        # The command, two that simulate, and Python's own that looks after them.
        wait_until(lambda: len(members(process.pid)) >= 3)
        yield process
        process.kill()


def test_ctrl_c_ends_all_processes_without_a_traceback(long_run):
    os.kill(long_run.pid, signal.SIGINT)
    _, errors = long_run.communicate(timeout=60)
    assert "Traceback" not in errors and long_run.returncode != 0
    wait_until(lambda: not members(long_run.pid))


def test_no_process_outlives_a_command_that_is_killed(long_run):
    long_run.kill()
    wait_until(lambda: not members(long_run.pid))


def members(session: int) -> list[int]:
    """Processes of a session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.parent.name))
    return found


def wait_until(is_so, timeout_s=60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.05)
