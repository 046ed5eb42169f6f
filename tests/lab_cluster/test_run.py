"""Scenarios from end to end: processes, commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import click.testing
import pytest

from controller.cli_lab_cluster import cluster_command, list_command, run_command
from controller.cli_lab_congestion import congestion_command
from controller.cli_lab_stability import stability_command
from controller.errors import StellarError, UsageError
from controller.lab import run as running
from controller.lab.kinds import builtins, load_cluster
from controller.lab.run import run_cluster, with_options
from tests.waiting import wait

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


def test_an_empty_folder_name_is_refused(small):
    for command in (cluster_command, run_command, congestion_command):
        with pytest.raises(UsageError, match=r"-o names no folder: it is empty."):
            invoke(command, small, "-o", "")


def test_processes_are_refused_where_a_scenario_runs_in_one(tmp_path):
    with pytest.raises(UsageError, match="--processes has no effect here: a congestion scenario"):
        invoke(run_command, "incast-quick", "--processes", "2", "-o", str(tmp_path))


def test_a_scenario_of_another_kind_is_sent_to_the_command_that_runs_it():
    for command, name in ((cluster_command, "incast"), (congestion_command, "quick")):
        with pytest.raises(UsageError) as caught:
            invoke(command, name)
        assert caught.value.remedy == f"controller lab run {name} -o FOLDER runs any kind."


@pytest.mark.parametrize("step", ["3us", "20us"])
def test_a_step_of_the_congestion_simulator_is_told_by_its_key(tmp_path, step):
    path = tmp_path / "mine.toml"
    path.write_text(f'kind = "congestion"\n[incast]\n[network]\nstep = "{step}"\n')
    with pytest.raises(UsageError, match=r"key network\.step is .*; allowed: .*10 us"):
        invoke(congestion_command, str(path))


@pytest.mark.parametrize("arguments", [["lab", "list"], ["--help"], ["lab", "list", "--json"]])
def test_a_full_disk_is_an_error_of_one_line(arguments):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "controller", *arguments],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "Error: The output cannot be written: No space left on device.",
        "  Make room, or write it elsewhere.",
    ]


def test_timely_is_told_in_its_own_words():
    text = invoke(
        stability_command, "--flows", "10", "--delay-us", "50", "--model", "timely"
    ).stdout
    assert "T_low to T_high" in " ".join(text.split()) and "marking line" not in text


def test_dcqcn_refuses_bytes_that_are_sent_again_when_a_class_rises(small):
    scenario = load_cluster(small)
    conditions = replace(scenario.conditions, sharing="dcqcn", raise_bytes=1)
    with pytest.raises(UsageError, match="raise_bytes is 1 with DCQCN's rates"):
        run_cluster(replace(scenario, conditions=conditions), processes=1)


def test_a_folder_that_cannot_be_made_is_told_before_the_work(small, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(running, "run_cluster", None)
    with pytest.raises(UsageError, match="is no folder that can be made: Not a directory"):
        invoke(cluster_command, small, "-o", str(tmp_path / "file" / "out"))


def test_the_list_names_every_built_in_scenario_in_a_line():
    lines = invoke(list_command).stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(builtins())
    assert max(map(len, lines)) <= 80
    # Whole: nothing is cut off.
    assert [line.split(maxsplit=2)[2] for line in lines] == [
        found.about for found in builtins().values()
    ]
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
        yield process
        process.kill()


def wait_for_workers(process) -> None:
    # The command, Python's own that looks after semaphores, and two that simulate.
    wait(lambda: len(members(process.pid)) >= 4)


@pytest.mark.parametrize("later_s", [0.0, 0.2, 2.0])
def test_ctrl_c_ends_all_processes_soon_and_without_a_traceback(long_run, later_s):
    wait_for_workers(long_run)
    time.sleep(later_s)
    # As a terminal does: to all of them.
    os.killpg(long_run.pid, signal.SIGINT)
    _, errors = long_run.communicate(timeout=30)
    assert "Traceback" not in errors and long_run.returncode != 0
    wait(lambda: not members(long_run.pid))


def test_ctrl_c_while_the_first_worker_starts_leaves_no_traceback(long_run):
    wait(lambda: len(members(long_run.pid)) >= 3)
    os.killpg(long_run.pid, signal.SIGINT)
    _, errors = long_run.communicate(timeout=30)
    assert "Traceback" not in errors and long_run.returncode != 0


# Another thread hears of the signal where the main one has it blocked.
_INTERRUPTED = """
import os, signal, sys, threading, time
from controller.lab.run import _interrupts_wait
ended = threading.Event()
thread = threading.Thread(target=ended.wait)
thread.start()
try:
    with _interrupts_wait():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        print("started", end=" ")
    time.sleep(0.2)
    print("not interrupted", end=" ")
except KeyboardInterrupt:
    print("interrupted", end=" ")
ended.set()
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_ctrl_c_waits_for_workers_that_start_whichever_thread_hears_of_it():
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["started", "interrupted", "True"], done


def test_ctrl_c_ends_the_command_after_a_worker_was_killed(long_run):
    wait_for_workers(long_run)
    os.kill(max(members(long_run.pid)), signal.SIGKILL)
    _, errors = long_run.communicate(timeout=30)
    assert long_run.returncode != 0 and "killed" in errors
    wait(lambda: not members(long_run.pid))


def test_no_process_outlives_a_command_that_is_killed(long_run):
    wait_for_workers(long_run)
    long_run.kill()
    wait(lambda: not members(long_run.pid))


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
