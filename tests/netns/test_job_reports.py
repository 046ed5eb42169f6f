"""A rank reports to a real controller: it is shown, and answered with the job's class."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from controller.agent import job_reports
from controller.agent.client import ask
from controller.agent.job_reports import JobReports, class_now, mean_ratio
from controller.agent.state import RunDirectory
from controller.allreduce.report import JobReporter
from controller.errors import ConflictError, UsageError
from controller.priority.jobs import Job, JobPlan, JobReport
from controller.telemetry.control_views import job_text, jobs_text
from tests.hosts import Controller, Host, veth_hosts
from tests.waiting import wait

Hosts = tuple[Host, Host]

# A rank of its own process. Root may report, and with a uid given it is not root any more.
_RANK = """
import os, sys, time
from controller.allreduce.report import JobReporter
run_dir, job, uid = sys.argv[1:]
if uid != "0":
    os.setgid(int(uid))
    os.setuid(int(uid))
with JobReporter(job, run_dir) as reporter:
    operation = reporter.begin(1, 1000, 1.0)
    # An answer comes at once, mostly. Who should get none is watched for a second.
    end_s = time.monotonic() + (20 if uid == "0" else 1)
    while reporter.class_in_force is None and time.monotonic() < end_s:
        time.sleep(0.05)
    print(reporter.class_in_force, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with veth_hosts() as pair:
        yield pair


@pytest.fixture(scope="module")
def steered(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """One controller of the module; each test has jobs of its own."""
    instance = Controller(tmp_path_factory.mktemp("reports") / "run")
    # A forwarder's packets have their class by DSCP, unless it is asked for the job's.
    config = instance.run_dir.parent / "stellar.toml"
    config.write_text(f'[[interface]]\nname = "{hosts[0].target}"\nclassify = "job"\n')
    try:
        instance.start(extra=("--config", str(config)))
        yield instance
    finally:
        instance.close()


# The commands start a Python each; what they send and get is asked for directly, mostly.


def order(steered: Controller, command: str, **arguments: Any) -> dict[str, Any]:
    return ask(RunDirectory(steered.run_dir), command, **arguments)


def make_job(steered: Controller, name: str, **members: Any) -> None:
    order(steered, "job-set", job={"name": name, "match": {"qpn": [0xABCDEF]}} | members)


def shown(steered: Controller, name: str) -> dict[str, Any]:
    document: dict[str, Any] = order(steered, "job", name=name)["job"]
    return document


def reported_only(steered: Controller) -> list[dict[str, Any]]:
    documents: list[dict[str, Any]] = order(steered, "jobs")["reported_only"]
    return documents


def make_plan(name: str, expected_bytes: int, seconds: float, rate_Bps: int) -> JobPlan:
    now_ns = time.monotonic_ns()
    end_ns = now_ns + round(seconds * 10**9)
    return JobPlan(name, expected_bytes, now_ns, end_ns, end_ns, rate_Bps, 0)


def wait_for_class(reporter: JobReporter, number: int) -> None:
    wait(lambda: reporter.class_in_force == number)


def test_a_report_is_shown_and_answered_with_the_jobs_class(steered: Controller) -> None:
    make_job(steered, "train", traffic_class=4)
    with JobReporter("train", steered.run_dir, rank=2, size=3, communicator="world") as reporter:
        operation = reporter.begin(17, 48_000_000, 0.5)
        operation.progress(12_000_000)
        wait(lambda: reporter.class_in_force == 4)
        assert reporter.traffic_class == 26 << 2
        assert reporter.in_force is not None and reporter.in_force.plan_valid_until_ns is None
        wait(lambda: shown(steered, "train")["reports"][0]["phase"] == "progress")
        (report,) = shown(steered, "train")["reports"]
        heard_ms = report.pop("heard_ms_ago")
        assert 0 <= heard_ms < 2000
        assert report == {
            "pid": os.getpid(),
            "job": "train", "rank": 2, "size": 3, "communicator": "world", "iteration": 17,
            "phase": "progress", "expected_bytes": 48_000_000, "sent_bytes": 12_000_000,
            "iteration_bytes": 12_000_000, "compression_ratio": 0.5, "class": 4,
        }  # fmt: skip
        listed = {entry["name"]: entry for entry in steered.json("job", "list")["jobs"]}
        assert listed["train"]["reports"][0]["rank"] == 2
        text = steered.run("job", "show", "train").stdout
        assert "rank 2 of 3" in text and "12 MB of 48 MB" in text
        assert max(map(len, text.splitlines())) <= 80
        operation.end()
        wait(lambda: shown(steered, "train")["reports"][0]["phase"] in ("end", "idle"))
    wait(lambda: shown(steered, "train")["reports"] == [])


def test_the_answer_follows_what_is_set_meanwhile(steered: Controller) -> None:
    make_job(steered, "follow", traffic_class=2)
    with JobReporter("follow", steered.run_dir) as reporter:
        wait(lambda: reporter.class_in_force == 2)
        operation = reporter.begin(1, 1000, 1.0)
        late_s = []
        for number in (5, 4, 5, 4, 5):
            make_job(steered, "follow", traffic_class=number)
            set_s = time.monotonic()
            wait_for_class(reporter, number)
            late_s.append(time.monotonic() - set_s)
            if number == 5 and min(late_s) < 0.5:
                break
        # With its next report, not after a second as one that is idle.
        assert min(late_s) < 0.5, late_s
        assert reporter.traffic_class == 34 << 2
        order(steered, "class-set", number=5, changes={"dscp": 35})
        wait(lambda: reporter.traffic_class == 35 << 2)
        order(steered, "class-set", number=5, changes={"dscp": 34})
        operation.end()
        order(steered, "job-delete", name="follow")
        wait(lambda: reporter.in_force is None)  # told when idle, too
        wait(lambda: [entry["name"] for entry in reported_only(steered)] == ["follow"])


def test_a_plan_by_hand_gives_the_class_and_no_report_changes_it(steered: Controller) -> None:
    make_job(steered, "hand", traffic_class=1, class_ceiling=5)
    with JobReporter("hand", steered.run_dir) as reporter:
        operation = reporter.begin(1, 5_000_000, 0.25)
        wait(lambda: reporter.class_in_force == 1)
        # 8 s of work in 5 s: no laxity.
        steered.run("job", "plan", "hand", "--bytes", "100MB", "--deadline", "5s",
                    "--rate", "100mbit", "--valid", "5s")  # fmt: skip
        wait(lambda: reporter.class_in_force == 5)
        plan = shown(steered, "hand")["plan"]
        assert plan["in_force"] and plan["expected_bytes"] == 100_000_000
        assert plan["compression_ratio"] == 1.0
        assert reporter.in_force is not None
        assert reporter.in_force.plan_valid_until_ns == plan["valid_until_ns"]
        wait(lambda: reporter.class_in_force == 1)
        assert time.monotonic_ns() >= plan["valid_until_ns"]
        assert reporter.in_force.plan_valid_until_ns is None
        operation.end()


def test_where_no_packet_of_the_job_is_seen_the_reported_bytes_count(steered: Controller) -> None:
    make_job(steered, "bypass")
    with JobReporter("bypass", steered.run_dir) as reporter:
        first, second = reporter.begin(1, 50_000_000, 1.0), reporter.begin(1, 50_000_000, 1.0)
        plan = make_plan("bypass", 100_000_000, 10, 10_000_000)
        order(steered, "job-plan", plan=plan.to_json())
        wait(lambda: reporter.class_in_force == 6)  # 10 s of work
        first.progress(50_000_000)
        first.end()
        second.progress(40_000_000)
        wait(lambda: reporter.class_in_force == 0)  # 1 s of work
        reporter.begin(2, 1000, 1.0)  # of the next iteration nothing is sent
        wait(lambda: reporter.class_in_force == 6)


def test_where_packets_are_seen_the_answer_is_the_class_that_they_get(
    steered: Controller, hosts: Hosts, send: Callable[..., None]
) -> None:
    a, b = hosts
    rule = {"dst": [b.address], "qpn": [23]}
    order(steered, "job-set", job={"name": "seen", "match": rule, "gap_ns": 60 * 10**9})
    send(a, b, 0, 1, qpn=23, size=1024)
    wait(lambda: bool(shown(steered, "seen")["flows"]))
    with JobReporter("seen", steered.run_dir) as reporter:
        operation = reporter.begin(1, 60 << 10, 1.0)
        operation.progress(60 << 10)  # of which not a packet was seen
        # 60 s of work in 40.
        plan = make_plan("seen", 60 << 10, 40, 1 << 10)
        order(steered, "job-plan", plan=plan.to_json())
        wait(lambda: reporter.class_in_force == 6)
        send(a, b, 1, 40, qpn=23, size=1024)  # 20 s are left, a second each
        wait(lambda: reporter.class_in_force == 0)
        (flow,) = shown(steered, "seen")["flows"]
        assert flow["class"] == 0
        assert flow["class_packets"][6] > 0
        order(steered, "job-set", job={"name": "seen", "gap_ns": 10**9})
        time.sleep(1.1)  # a new iteration: its first message will have all its bytes before it
        wait(lambda: reporter.class_in_force == 6)
        send(a, b, 41, 1, qpn=23, size=1024)
        assert shown(steered, "seen")["flows"][0]["class"] == 6
        operation.end()
    order(steered, "job-delete", name="seen")


def test_a_plan_without_a_ratio_takes_the_reported_one(steered: Controller) -> None:
    make_job(steered, "ratio")
    run_dir = steered.run_dir
    plan = make_plan("ratio", 1_000_000_000, 100, 10_000_000)  # 100 s of work
    document = plan.to_json() | {"compression_ratio": None}
    assert order(steered, "job-plan", plan=document)["plan"]["compression_ratio"] == 1.0
    with JobReporter("ratio", run_dir) as one, JobReporter("ratio", run_dir) as other:
        wait(lambda: one.class_in_force == 6)
        one.begin(1, 1_000_000, 0.5)
        wait(lambda: shown(steered, "ratio")["plan"]["compression_ratio"] == 0.5)
        wait(lambda: one.class_in_force == 0)  # 50 s of work, not 100
        other.begin(1, 1_000_000, 0.25)
        wait(lambda: shown(steered, "ratio")["plan"]["compression_ratio"] == pytest.approx(1 / 3))
        # A new one begins with what is reported.
        answer = order(steered, "job-plan", plan=document)
        assert answer["plan"]["compression_ratio"] == pytest.approx(1 / 3)
        order(steered, "job-plan", plan=plan.to_json())
        time.sleep(0.2)
        assert shown(steered, "ratio")["plan"]["compression_ratio"] == 1.0


def test_a_job_that_nobody_configured_is_kept_and_named(steered: Controller) -> None:
    with JobReporter("stranger", steered.run_dir) as reporter:
        wait(lambda: reporter.messages > 0)
        assert reporter.in_force is None
        # Of an earlier test one may be going still.
        wait(lambda: [entry["name"] for entry in reported_only(steered)] == ["stranger"])
        (entry,) = reported_only(steered)
        assert entry["reports"][0]["class"] is None
        events = " ".join(event["event"] for event in order(steered, "status")["events"])
        assert "job stranger is reported by pid" in events
        make_job(steered, "stranger")
        wait(lambda: reporter.class_in_force == 3)
        assert reported_only(steered) == []


@contextmanager
def rank(steered: Controller, job: str, uid: int = 0) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _RANK, str(steered.run_dir), job, str(uid)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_rank_that_is_killed_or_stands_still_is_dropped(steered: Controller) -> None:
    make_job(steered, "killed")
    with rank(steered, "killed") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "3\n"
        assert [entry["pid"] for entry in shown(steered, "killed")["reports"]] == [process.pid]
        process.kill()
        wait(lambda: shown(steered, "killed")["reports"] == [])
    with rank(steered, "killed") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "3\n"
        process.send_signal(signal.SIGSTOP)
        assert len(shown(steered, "killed")["reports"]) == 1
        wait(
            lambda: shown(steered, "killed")["reports"] == [],
            timeout_s=job_reports.REPORT_SILENCE_S + 20,
        )


def test_a_process_of_another_user_cannot_report_and_notices_nothing(steered: Controller) -> None:
    make_job(steered, "foreign")
    with rank(steered, "foreign", uid=65534) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "None\n"
        assert shown(steered, "foreign")["reports"] == []
        assert process.poll() is None


def test_a_rank_reports_to_the_controller_that_comes_after_a_killed_one(
    hosts: Hosts, controller: Controller
) -> None:
    host = hosts[1]  # the first one is another controller's
    pid = controller.start(host.target)
    make_job(controller, "train", traffic_class=2)
    with JobReporter("train", controller.run_dir) as reporter:
        operation = reporter.begin(5, 1000, 1.0)
        wait(lambda: reporter.class_in_force == 2)
        controller.kill(pid)
        wait(lambda: reporter.in_force is None)
        controller.start(host.target)
        wait(lambda: reporter.class_in_force == 2)
        assert shown(controller, "train")["reports"][0]["iteration"] == 5
        controller.run("stop")
        wait(lambda: reporter.in_force is None)
        operation.end()


GOOD = JobReport("raw", 0, 2, "world", 1, "progress", 10, 5, 5, 0.5).to_json()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"job": "two words"}, "two words"),
        ({"rank": 2}, "rank is 2; allowed: 0 .. 1"),
        ({"size": 0}, "size is 0"),
        ({"size": 1 << 30}, "size is"),
        ({"communicator": "x" * 65}, "communicator"),
        ({"communicator": 5}, "communicator is 5"),
        ({"iteration": -1}, "iteration is -1"),
        ({"iteration": True}, "iteration is True"),
        ({"phase": "over"}, "idle, begin, progress, end"),
        ({"phase": ["idle"]}, "phase"),
        ({"expected_bytes": (1 << 42) + 1}, "expected_bytes"),
        ({"sent_bytes": "5"}, "sent_bytes"),
        ({"iteration_bytes": 1.5}, "iteration_bytes"),
        ({"compression_ratio": 0}, "compression_ratio"),
        ({"compression_ratio": float("nan")}, "compression_ratio"),
        ({"deadline_ns": 5}, "not understood"),
    ],
    ids=str,
)
def test_a_report_that_cannot_be_is_refused_and_kept_nowhere(
    steered: Controller, changes: dict[str, Any], words: str
) -> None:
    answers = raw_exchange(steered, GOOD, GOOD | changes)
    assert answers[0] == {
        "class": None,
        "traffic_class": None,
        "plan_valid_until_ns": None,
        "packets_seen": False,
    }
    assert words in answers[1]["error"]
    wait(lambda: reported_only(steered) == [])


def raw_exchange(steered: Controller, *documents: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers to one conversation's reports."""
    answers = []
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rb") as lines:
        connection.settimeout(20)
        connection.connect(str(steered.run_dir / "control.sock"))
        for document in documents:
            request = {"command": "job-report", "arguments": document}
            connection.sendall(json.dumps(request).encode() + b"\n")
            answers.append(json.loads(lines.readline()))
    return answers


# ---- what needs no controller ----


def test_reporters_are_counted_and_the_last_one_too_many_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_reports, "MAX_REPORTERS", 2)
    reports = JobReports()
    first = reports.open(1)
    reports.open(2)
    with pytest.raises(ConflictError, match="2 processes report"):
        reports.open(3)
    reports.close(first)
    reports.close(first)
    reports.open(3)
    assert reports.of_job("raw") == [] and reports.strangers([]) == []


def test_the_ratio_of_a_job_is_of_all_its_ranks_bytes() -> None:
    def of(expected: int, ratio: float) -> JobReport:
        return JobReport("x", 0, 1, "", 0, "begin", expected, 0, 0, ratio)

    assert mean_ratio([]) is None
    assert mean_ratio([of(0, 0.5)]) is None
    assert mean_ratio([of(100, 0.5)]) == 0.5
    # 100 of 200 and 300 of 300.
    assert mean_ratio([of(100, 0.5), of(300, 1.0), of(0, 0.1)]) == 400 / 500


PLAN = JobPlan("x", 100 << 20, 1, 10**9, 2 * 10**9, 1 << 30, 0, class_floor=1, class_ceiling=6)


@pytest.mark.parametrize(
    ("job", "now_ms", "done_MiB", "current", "wanted"),
    [
        (Job("x"), 100, 0, None, 1),  # 802 ms to spare: 0 by laxity, the plan's floor
        (Job("x"), 600, 0, None, 1),  # 302 ms
        (Job("x"), 800, 0, None, 2),  # 102 ms
        (Job("x"), 805, 0, None, 3),  # 97 ms
        (Job("x"), 800, 50, None, 2),  # 151 ms
        (Job("x"), 895, 0, None, 6),  # 7 ms: class 6 begins below 10
        (Job("x"), 995, 100, None, 6),  # 5 ms, and the plan's ceiling
        (Job("x", class_ceiling=4), 995, 0, None, 4),
        (Job("x", class_floor=3), 100, 0, None, 3),
        (Job("x"), 790, 0, 3, 3),  # 112 ms: 2, but 3 is left above 112.5 only
        (Job("x"), 780, 0, 3, 2),
        (Job("x", traffic_class=5), 2000, 0, 1, 5),  # the plan is over
    ],
)
def test_the_class_is_by_laxity_within_the_plans_and_the_jobs_limits(
    job: Job, now_ms: int, done_MiB: int, current: int | None, wanted: int
) -> None:
    assert class_now(job, PLAN, now_ms * 10**6, done_MiB << 20, current) == wanted


def test_without_a_plan_the_class_is_the_jobs_own() -> None:
    assert class_now(Job("x", traffic_class=2), None, 5, 0, 6) == 2


def test_a_report_survives_its_way_and_a_stranger_member_does_not() -> None:
    report = JobReport.from_json(GOOD)
    assert JobReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    with pytest.raises(TypeError):
        JobReport.from_json(GOOD | {"priority": 7})
    with pytest.raises(UsageError):
        JobReport.from_json(GOOD | {"rank": -1})


def test_names_that_are_only_reported_are_listed_and_many_ranks_cut_short() -> None:
    strangers = [{"name": f"stranger-{n}", "reports": [{}] * n} for n in range(1, 9)]
    text = jobs_text([], strangers)
    assert "no jobs" in text and "stranger-8 (8)" in text
    assert max(map(len, text.splitlines())) <= 80
    report = GOOD | {"pid": 4194304, "class": None, "heard_ms_ago": 1.0, "size": 1 << 20}
    job = Job("x").to_json() | {
        "rule": "env x", "dcqcn_in_force": False, "gap_in_force_ns": 5, "matched": True,
        "iteration": 1, "iteration_bytes": 0, "last_iteration": None, "plan": None, "flows": [],
        "reports": [report] * 10,
    }  # fmt: skip
    text = job_text(job)
    assert text.count("(pid 4194304) reports iteration 1, progress") == 8
    assert "and 2 more ranks report" in text
    assert max(map(len, text.splitlines())) <= 80
