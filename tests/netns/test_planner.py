"""A real controller predicts the iterations on an interface, ranks them and writes plans."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.agent.client import ask
from controller.agent.state import RunDirectory
from controller.allreduce.report import JobReporter
from tests.hosts import Controller, Host, veth_hosts
from tests.waiting import wait

Hosts = tuple[Host, Host]

# Bursts of RC SEND Only packets: LIST is [[qpn, packets, first burst in ms, period in ms], ...].
_BURSTS = """
import json, socket, sys, time
from scapy.all import IP, UDP
from scapy.contrib.roce import BTH
source, destination, seconds, jobs = sys.argv[1:]
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
frames = {
    qpn: bytearray(bytes(IP(src=source, dst=destination) / UDP(sport=50000, dport=4791)
                         / BTH(opcode=4, psn=0, dqpn=qpn, ackreq=1) / (b"x" * 1024)))
    for qpn, packets, first, period in json.loads(jobs)
}
PSN = 20 + 8 + 9
due = sorted((first / 1000 + n * period / 1000 + packet * 0.0005, qpn)
             for qpn, packets, first, period in json.loads(jobs)
             for n in range(int(float(seconds) * 1000 / period))
             for packet in range(packets))
sent = dict.fromkeys(frames, 0)
begin = time.monotonic()
for at, qpn in due:
    while (left := begin + at - time.monotonic()) > 0:
        time.sleep(left)
    frames[qpn][PSN:PSN + 3] = sent[qpn].to_bytes(3, "big")
    sent[qpn] += 1
    raw.sendto(frames[qpn], (destination, 0))
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with veth_hosts() as pair:
        yield pair


@pytest.fixture(scope="module")
def planned(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    instance = Controller(tmp_path_factory.mktemp("planner") / "run")
    config = instance.run_dir.parent / "stellar.toml"
    config.write_text(
        f'[[interface]]\nname = "{hosts[0].target}"\nclassify = "job"\nrate = "1gbit"\n'
    )
    try:
        instance.start(extra=("--config", str(config)))
        yield instance
    finally:
        instance.close()


def order(planned: Controller, command: str, **arguments: Any) -> dict[str, Any]:
    return ask(RunDirectory(planned.run_dir), command, **arguments)


def shown(planned: Controller, name: str) -> dict[str, Any]:
    document: dict[str, Any] = order(planned, "job", name=name)["job"]
    return document


def make_jobs(planned: Controller, **qpns: int) -> None:
    for name, qpn in qpns.items():
        order(planned, "job-set", job={"name": name, "match": {"qpn": [qpn]}})


@pytest.fixture
def bursts(hosts: Hosts, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """bursts(seconds, [[qpn, packets, first_ms, period_ms], ...]): begins to send."""
    script = tmp_path / "bursts.py"
    script.write_text(_BURSTS)
    started = []

    def begin(seconds: float, jobs: list[list[int]]) -> subprocess.Popen[bytes]:
        left, right = hosts
        process = subprocess.Popen(
            ["ip", "netns", "exec", left.netns, sys.executable, str(script), left.address,
             right.address, str(seconds), json.dumps(jobs)],
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def settle(check: Callable[[], None], timeout_s: float = 40.0) -> None:
    """Until all that a check asserts is so at one time.

    Where the machine stood still, a job was not sent as regularly as it was to be; then it takes
    some more iterations.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            check()
            return
        except AssertionError:
            if time.monotonic() > end_s:
                raise
        time.sleep(0.1)


def test_a_periodic_job_is_predicted_and_gets_a_plan(
    planned: Controller, bursts: Callable[..., subprocess.Popen[bytes]]
) -> None:
    make_jobs(planned, steady=0x101)
    process = bursts(60, [[0x101, 20, 0, 200]])
    wait(lambda: (shown(planned, "steady")["prediction"] or {}).get("is_periodic", False))
    wait(lambda: shown(planned, "steady")["prediction"]["iterations"] >= 12)

    def check() -> None:
        job = shown(planned, "steady")
        found = job["prediction"]
        assert job["policy"] == "laxity" and job["max_slowdown_in_force"] == 1.5
        assert found["is_periodic"] and found["period_ms"] == pytest.approx(200, rel=0.05)
        assert found["expected_bytes"] == 20 * 1024
        assert found["source"] == "dataplane"
        assert found["iteration_ms"]["p50"] == pytest.approx(200, rel=0.05)
        assert -60 < found["next_start_in_ms"] < 210
        assert job["plan"] is not None and job["plan"]["expected_bytes"] == 20 * 1024
        assert job["plan"]["in_force"] and not job["plan"]["pace"]
        assert found["plans_written"] >= 8

    settle(check)
    status = planned.json("status")["planner"]
    assert status["policy"] == "laxity" and status["events"] >= 12
    assert status["plan_latency_us"]["p50"] > 0
    process.kill()
    # Nobody renews it: three periods after its deadline the job is at its default class.
    wait(lambda: not shown(planned, "steady")["plan"]["in_force"], timeout_s=5)
    order(planned, "job-delete", name="steady")


def test_jobs_that_contend_get_classes_one_above_the_other(
    planned: Controller, bursts: Callable[..., subprocess.Popen[bytes]]
) -> None:
    make_jobs(planned, early=0x201, late=0x202)
    bursts(60, [[0x201, 80, 0, 300], [0x202, 80, 10, 300]])
    wait(
        lambda: all(
            (shown(planned, name)["prediction"] or {}).get("is_periodic")
            for name in ("early", "late")
        )
    )

    differ: list[bool] = []
    strict = False

    def looked() -> bool:
        nonlocal strict
        jobs = {entry["name"]: entry["prediction"] for entry in order(planned, "jobs")["jobs"]}
        if all(jobs[name]["phase"] == "sync" for name in ("early", "late")):
            first, second = jobs["early"], jobs["late"]
            if first["class"] is not None and second["class"] is not None:
                differ.append(first["class"] != second["class"])
                for one, other, names in ((first, second, ("early", "late")),
                                          (second, first, ("late", "early"))):  # fmt: skip
                    if other["waits_for"] == [names[0]]:
                        assert one["delays"] == [names[1]] and one["class"] > other["class"]
                        strict = True
        return strict and len(differ) >= 10

    wait(looked)
    # Where a window was late, the two may not meet for once, and have the same class.
    assert sum(differ) > len(differ) / 2, differ
    for name in ("early", "late"):
        order(planned, "job-delete", name=name)


def test_the_policy_changes_at_run_time_and_a_plan_by_hand_wins(
    planned: Controller, bursts: Callable[..., subprocess.Popen[bytes]]
) -> None:
    make_jobs(planned, hand=0x301)
    bursts(60, [[0x301, 10, 0, 150]])
    wait(lambda: shown(planned, "hand")["plan"] is not None)
    answer = planned.json("policy", "off")
    assert answer["policy"] == "off" and "mltcp" in answer["policies"]
    assert shown(planned, "hand")["plan"] is None
    wait(lambda: shown(planned, "hand")["prediction"]["is_periodic"])
    planned.json("policy", "static")
    wait(lambda: shown(planned, "hand")["plan"] is not None)
    wait(lambda: shown(planned, "hand")["prediction"]["class"] == 3)
    planned.run("job", "plan", "hand", "--bytes", "5MB", "--deadline", "3900ms", "--valid", "4s")
    time.sleep(0.4)  # some iterations, each of which would have a plan of its own
    assert shown(planned, "hand")["plan"]["expected_bytes"] == 5_000_000
    wait(lambda: shown(planned, "hand")["plan"]["expected_bytes"] == 10 * 1024)
    wrong = planned.run("policy", "fastest", check=False)
    assert wrong.returncode == 2 and "laxity" in wrong.stderr
    planned.json("policy", "laxity")
    order(planned, "job-delete", name="hand")


def test_a_job_without_a_period_is_said_to_have_none_and_keeps_its_class(
    planned: Controller, bursts: Callable[..., subprocess.Popen[bytes]]
) -> None:
    make_jobs(planned, random=0x401)
    # The first one passes before the flow is known to belong to the job.
    begins_ms = [0, 300, 420, 1000, 1350, 1430, 2300, 2850, 3200]
    bursts(1, [[0x401, 5 + n, begin, 1000] for n, begin in enumerate(begins_ms)]).wait()
    wait(lambda: len(shown(planned, "random")["prediction"]["recent"]) >= 6)
    job = shown(planned, "random")
    assert not job["prediction"]["is_periodic"] and job["prediction"]["why"]
    assert job["prediction"]["period_ms"] is None and job["plan"] is None
    order(planned, "job-delete", name="random")


def iterations(period_s: float) -> Iterator[int]:
    """Numbers of iterations, one a period by the clock: many, should some be late."""
    begin_s = time.monotonic()
    for number in range(100):
        time.sleep(max(0.0, begin_s + number * period_s - time.monotonic()))
        yield number


def predicted(found: dict[str, Any], period_ms: float) -> bool:
    """Whether a prediction is of about this period."""
    return found["is_periodic"] and found["period_ms"] == pytest.approx(period_ms, rel=0.2)


def test_ranks_whose_packets_nobody_sees_are_predicted_from_their_reports(
    planned: Controller,
) -> None:
    order(planned, "job-set", job={"name": "unseen", "match": {"qpn": [0x501]}})
    with JobReporter("unseen", planned.run_dir) as reporter:
        wait(lambda: reporter.class_in_force is not None)
        for iteration in iterations(0.2):
            operation = reporter.begin(iteration, 3_000_000)
            time.sleep(0.06)
            operation.progress(3_000_000)
            operation.end()
            time.sleep(0.05)
            found = shown(planned, "unseen")["prediction"]
            if iteration >= 9 and predicted(found, 200):
                break
    assert found["source"] == "reports" and predicted(found, 200), found
    assert found["expected_bytes"] == pytest.approx(3_000_000, rel=0.01)
    # A rank that ends within an operation does not hold the window open.
    with JobReporter("unseen", planned.run_dir) as reporter:
        wait(lambda: reporter.class_in_force is not None)
        reporter.begin(iteration + 1, 3_000_000)
        wait(lambda: shown(planned, "unseen")["prediction"]["phase"] == "sync")
    wait(lambda: shown(planned, "unseen")["prediction"]["phase"] == "compute")
    order(planned, "job-delete", name="unseen")


def test_collectives_one_after_the_other_are_one_window_where_iterations_are_numbered(
    planned: Controller,
) -> None:
    order(planned, "job-set", job={"name": "serial", "match": {"qpn": [0x601]}})
    with JobReporter("serial", planned.run_dir) as reporter:
        wait(lambda: reporter.class_in_force is not None)
        for iteration in iterations(0.33):
            for _ in range(3):
                operation = reporter.begin(iteration, 1_000_000)
                time.sleep(0.03)
                operation.progress(1_000_000)
                operation.end()
                time.sleep(0.03)
            found = shown(planned, "serial")["prediction"]
            if iteration >= 8 and predicted(found, 330) and found["bursts_per_iteration"] == 1:
                break
    assert predicted(found, 330) and found["bursts_per_iteration"] == 1, found
    assert found["recent"][-1]["bytes"] == pytest.approx(3_000_000, rel=0.01)
    order(planned, "job-delete", name="serial")
