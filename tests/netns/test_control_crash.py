"""What a crash, a damaged file or a wrong request leaves of control: nothing half done."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.agent.control import request
from controller.dataplane import layout, libbpf
from controller.errors import StellarError, UsageError
from tests.hosts import Controller, Host
from tests.waiting import wait

Hosts = tuple[Host, Host]


def start(controller: Controller, tmp_path: Path, text: str, *targets: str) -> int:
    path = tmp_path / "stellar.toml"
    path.write_text(text)
    return controller.start(*targets, extra=("--config", str(path)))


def written_gap_ns(controller: Controller, number: int) -> int:
    """`gap_ns` of a job as the programs see it."""
    state = json.loads((controller.run_dir / "state.json").read_text())
    fd = libbpf.map_fd_by_id(state["map_ids"]["jobs"])
    raw = libbpf.map_lookup(fd, struct.pack("<I", number), layout.JOB_SETTINGS.itemsize)
    assert raw is not None
    return int(np.frombuffer(raw, layout.JOB_SETTINGS)[0]["gap_ns"])


def test_the_gap_of_a_configured_job_goes_by_the_slowest_link(
    hosts: Hosts, controller: Controller, tmp_path: Path
) -> None:
    text = (
        f'[[interface]]\nname = "{hosts[0].target}"\nrate = "100mbit"\n'
        '[[job]]\nname = "train"\n[job.match]\ndst = "10.0.0.0/8"\n'
    )
    start(controller, tmp_path, text)
    job = controller.json("job", "show", "train")["job"]
    expected = 2 * 128 * 4200 * 10**9 // 12_500_000
    assert job["gap_in_force_ns"] == written_gap_ns(controller, job["number"]) == expected


def test_an_adoption_that_fails_leaves_no_program_behind(
    hosts: Hosts, controller: Controller, tmp_path: Path
) -> None:
    before = hosts[0].network_state()
    text = f'[[interface]]\nname = "{hosts[0].target}"\nrate = "100mbit"\n[[job]]\nname = "x"\n'
    controller.kill(start(controller, tmp_path, text))
    path = tmp_path / "wrong.toml"
    path.write_text(text + 'rate = "200mbit"\n')  # of the job: above the link
    result = controller.run("start", "--detach", "--config", str(path), check=False)
    assert result.returncode == 2, result.stderr
    assert "200 Mbit/s" in result.stderr
    controller.run("stop")
    assert hosts[0].network_state() == before


DAMAGES: list[dict[str, Any]] = [
    {"jobs": [{"job": {"name": "x"}}]},
    {"jobs": [{"job": {"name": "x"}, "number": 300}]},
    {"jobs": [{"job": {"nam": "x"}, "number": 1}]},
    {"classes": [{"number": 0}]},
    {"interfaces": [{"netns": "", "name": "eth0", "mark": "bogus"}]},
    {"interfaces": ["eth0"]},
]


def test_a_damaged_state_file_is_told_of_and_nothing_is_touched(
    hosts: Hosts, controller: Controller
) -> None:
    controller.kill(controller.start(hosts[0].target))
    attached = hosts[0].network_state()
    path = controller.run_dir / "state.json"
    whole = json.loads(path.read_text())
    for damage in DAMAGES:
        damaged = json.dumps(whole | {"control": damage})
        path.write_text(damaged)
        result = controller.run("start", "--detach", check=False)
        assert result.returncode == 1, damage
        assert "state.json is damaged" in result.stderr, damage
        assert "Traceback" not in result.stderr, damage
        assert hosts[0].network_state() == attached, damage
        assert path.read_text() == damaged
    path.write_text(json.dumps(whole))
    controller.run("stop")


def test_a_deleted_jobs_number_comes_back_without_its_progress(
    hosts: Hosts, controller: Controller, tmp_path: Path, send: Any
) -> None:
    a, b = hosts
    text = '[[job]]\nname = "first"\n[job.match]\ndst = "10.1.0.0/16"\n'
    pid = start(controller, tmp_path, text, a.target)
    controller.run("job", "set", "second", "--match", f"dst={b.address}")
    send(a, b, 0, 1)  # tells the agent of the flow
    wait(lambda: controller.json("job", "show", "second")["job"]["flows"])
    send(a, b, 1, 5)
    assert controller.json("job", "show", "second")["job"]["iteration_bytes"] > 0
    controller.run("job", "delete", "second")
    controller.kill(pid)
    start(controller, tmp_path, '[[job]]\nname = "third"\n[job.match]\nqpn = 99\n' + text)
    third = controller.json("job", "show", "third")["job"]
    assert (third["iteration"], third["iteration_bytes"]) == (0, 0)
    # In the order of the file, whatever was saved before.
    assert [job["name"] for job in controller.json("job", "list")["jobs"]] == ["third", "first"]


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("class-set", {"number": 3.7, "changes": {"dscp": 1}}),
        ("class-set", {"number": 3, "changes": {"dcsp": 1}}),
        ("class-set", {"number": 3}),
        ("job-set", {"job": {"name": "x", "rate_Bps": 1.5}}),
        ("job-set", {"job": {"name": "x", "match": {"src": "fish"}}}),
        ("job-set", {"job": ["x"]}),
        ("job-plan", {"plan": {"job": "train"}}),
        ("job", {"name": "nobody"}),
    ],
)
def test_a_wrong_request_is_answered_with_what_is_wrong(
    running: Controller, command: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises((StellarError, UsageError)) as caught:
        request(running.run_dir / "control.sock", command, arguments)
    assert "ended before" not in str(caught.value)
    assert running.json("status")["running"]


def test_a_plan_in_no_time_is_answered_and_a_rate_of_no_integer_refused(
    hosts: Hosts, controller: Controller
) -> None:
    controller.start(hosts[0].target)
    controller.run("job", "set", "train", "--match", "dst=10.0.0.0/8")
    controller.run("job", "plan", "train", "--bytes", "20GB", "--deadline", "1ns", "--valid", "9s")
    plan = controller.json("job", "show", "train")["job"]["plan"]
    with pytest.raises(UsageError, match="rate"):
        request(
            controller.run_dir / "control.sock", "job-plan",
            {"plan": {k: v for k, v in plan.items() if k not in ("in_force", "laxity_ms")}
             | {"rate_Bps": 0.0}},
        )  # fmt: skip
    assert controller.json("status")["jobs"][0]["name"] == "train"
