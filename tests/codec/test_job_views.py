"""What people and scripts are told of jobs: `top`, `explain JOB`, and a line in other views."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from controller.agent import client
from controller.cli import cli
from controller.dataplane import layout
from controller.errors import UsageError
from controller.observe.explain import explain, flows_named
from controller.observe.snapshot import Snapshot
from controller.priority.classes import default_classes
from controller.telemetry.control_views import job_text, jobs_text
from controller.telemetry.job_explanation import JobExplanation, explain_job
from controller.telemetry.job_views import (
    bar,
    duration_ms,
    job_row,
    names_text,
    outlook_lines,
    recent_windows,
    short_ms,
    worst_first,
)
from controller.telemetry.live import jobs_table, run_top, windows_picture

Json = dict[str, Any]
LONGEST_NAME = "a-job-whose-name-has-31-letters"
CLASSES = [entry.to_json() for entry in default_classes()]
SOFTWARE = {"interface": "h:eth0", "kind": "software", "control": {"by_dscp": False}}
BRIDGE = {"interface": "sw:br0", "kind": "forwarded", "control": {"by_dscp": True}}
HARDWARE = {"interface": "eth1", "kind": "bypass", "control": None}
FLOW = {
    "flow": "10.0.0.1-10.0.0.2-0x000011", "interface": "h:eth0", "class": 5, "packets": 9,
    "marked": 0, "cuts": 0, "rate_limited": False, "rate_bps": None,
}  # fmt: skip
REPORT = {
    "pid": 7, "job": "train", "rank": 0, "size": 3, "communicator": "world", "iteration": 512,
    "phase": "progress", "expected_bytes": 1000, "sent_bytes": 10, "iteration_bytes": 10,
    "compression_ratio": 1.0, "class": 5, "heard_ms_ago": 1.0,
}  # fmt: skip


def prediction(**changes: Any) -> Json:
    """One of a job in its compute phase, period 102 ms."""
    return {
        "is_periodic": True, "why": "", "confidence": 0.93, "source": "dataplane",
        "iterations": 33, "bursts_per_iteration": 2, "period_ms": 102.31, "window_ms": 42.2,
        "compute_ms": 60.1, "expected_bytes": 4_200_000, "spread_ms": 1.2,
        "next_start_in_ms": 31.2, "phase": "compute", "progress": None, "window_open_ms": None,
        "deadline_in_ms": 124.5, "laxity_ms": 82.3, "alone_bps": 800_000_000, "class": 5,
        "class_floor": 4, "class_ceiling": 6, "share": 0.0,
        "assignment": "its deadline is the earliest", "waits_for": [], "delays": ["bert"],
        "class_history": [
            {"ago_ms": 2100.0, "class_floor": 4, "class_ceiling": 6, "why": "earliest deadline"},
            {"ago_ms": 30.0, "class_floor": 2, "class_ceiling": 2, "why": "bert goes first"},
        ],
        "iteration_ms": {"p50": 101.2, "p99": 140.9, "mean": 108.0},
        "window_ms_seen": {"p50": 41.0, "p99": 66.0, "mean": 44.0}, "slowdown": 1.08,
        "recent": [{"start_ago_ms": 71.0 + 102 * back, "window_ms": 42.0, "bytes": 4_200_000,
                    "period_ms": 102.0} for back in range(10, -1, -1)],
        "plans_written": 33, "plan_latency_us": {"p50": 120.0, "p99": 700.0},
    } | changes  # fmt: skip


def syncing(**changes: Any) -> Json:
    """One of a job in its sync window that is late."""
    late = {
        "phase": "sync", "progress": 0.5, "window_open_ms": 21.0, "next_start_in_ms": -21.0,
        "deadline_in_ms": -5.0, "laxity_ms": -12.0, "waits_for": ["resnet", "bert"],
        "delays": [], "slowdown": 1.61,
    }  # fmt: skip
    return prediction(**late | changes)


def job(name: str = "train", predicted: Json | None = None, **changes: Any) -> Json:
    """A document of the request `job`."""
    return {
        "name": name, "match": {}, "traffic_class": 3, "class_floor": 0, "class_ceiling": 6,
        "set_ect": False, "rate_Bps": 0, "dcqcn": None, "gap_ns": 0, "number": 1,
        "rule": f"env STELLAR_JOB={name}", "dcqcn_in_force": False, "gap_in_force_ns": 20_000_000,
        "matched": True, "iteration": 34, "iteration_bytes": 1000, "iteration_started_ms_ago": 12.0,
        "last_iteration": None, "last_packet_ms_ago": 1.0, "plan": None, "flows": [FLOW],
        "reports": [], "policy": "laxity", "max_slowdown": 0.0,
        "max_slowdown_in_force": 1.5, "prediction": predicted,
    } | changes  # fmt: skip


def summary(name: str = "train", predicted: Json | None = None, **changes: Any) -> Json:
    """A document of the request `jobs`: its flows are counted."""
    return job(name, predicted, flows=1, packets=9, marked=0, cuts=0) | changes


NOTHING = {name: None for name in prediction()}  # noqa: C420 - a type that fits `Json`
ODD = prediction(
    is_periodic=False, why="its periods differ by 80 %", confidence=0.1, iterations=2,
    period_ms=None, next_start_in_ms=None, phase="unknown", laxity_ms=None, deadline_in_ms=None,
    slowdown=None, iteration_ms=None, alone_bps=None, **{"class": None},
)  # fmt: skip
PREDICTIONS: Mapping[str, Json | None] = {
    "compute": prediction(), "sync": syncing(), "odd": ODD, "nothing": NOTHING, "none": None,
}  # fmt: skip


def printed(table: Any, width: int = 80) -> list[str]:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


# ---- one cell ----


def test_a_bar_grows_in_eighths_of_a_character() -> None:
    assert bar(0.0, 4) == "░░░░"
    assert bar(0.5, 4) == "██░░"
    assert bar(1.0, 4) == "████"
    assert bar(1 / 32, 4) == "▏░░░"
    assert bar(31 / 32, 4) == "███▉"
    assert (bar(-3.0, 4), bar(7.0, 4)) == ("░░░░", "████")


def test_short_times_have_five_characters_at_most_and_keep_their_sign() -> None:
    shown = {
        None: "-", 0.0: "0.00", 9.994: "9.99", 9.996: "10.0", 99.96: "100", 1234.4: "1234",
        9999.6: "10s", 75_000.0: "75s", 3.7e6: "62m", 9e8: "250h", -12.0: "-12.0", -0.04: "-0.0",
        -9999.0: "-9999",
    }  # fmt: skip
    assert {value: short_ms(value) for value in shown} == shown
    sizes = (10 ** (exponent / 16) for exponent in range(-64, 320))
    assert all(len(short_ms(sign * size)) <= 5 for size in sizes for sign in (1, -1))


def test_durations_keep_their_sign_and_choose_a_unit() -> None:
    assert [duration_ms(value) for value in (0.0, 0.25, -12.5, 2100.0)] == [
        "0 ms", "250 us", "-12.5 ms", "2.1 s",
    ]  # fmt: skip


def test_many_names_are_counted() -> None:
    assert names_text(["a", "b"]) == "a, b"
    assert names_text(list("abcdef")) == "a, b, c, d and 2 more"


# ---- top ----


def test_a_row_repeats_the_prediction_and_is_ready_for_json() -> None:
    row = job_row(summary("train", syncing()))
    assert json.loads(json.dumps(row)) == row
    assert (row["job"], row["policy"], row["flows"], row["iteration"]) == ("train", "laxity", 1, 34)
    assert (row["phase"], row["progress"], row["laxity_ms"]) == ("sync", 0.5, -12.0)
    assert row["iteration_ms"] == {"p50": 101.2, "p99": 140.9, "mean": 108.0}
    assert row["waits_for"] == ["resnet", "bert"] and row["max_slowdown"] == 1.5


def test_a_row_without_a_prediction_has_the_same_keys_and_no_values() -> None:
    row = job_row(summary("train", None, policy="off"))
    assert row.keys() == job_row(summary("train", prediction())).keys()
    assert row["policy"] is None and row["phase"] is None and row["waits_for"] == []


def test_iterations_are_counted_by_the_ranks_where_these_report() -> None:
    reports = [REPORT, REPORT | {"rank": 1, "iteration": 511}]
    told = summary("train", prediction(source="reports"), reports=reports)
    assert job_row(told)["iteration"] == 512
    assert job_row(told | {"prediction": prediction()})["iteration"] == 34


def test_the_table_of_jobs_shows_progress_laxity_class_times_and_who_it_waits_for() -> None:
    lines = printed(jobs_table([job_row(job("train", syncing())), job_row(job("b", prediction()))]))
    assert lines[0].startswith("2 jobs, 1 in the sync window; policy laxity")
    assert lines[2].split() == [
        "train", "34", "sync", "█████░░░░░", "-12.0", "5", "101/141", "1.61", "resnet,bert",
    ]  # fmt: skip
    assert lines[3].split() == [
        "b", "34", "compute", "in", "31.2", "ms", "82.3", "5", "101/141", "1.08", "-",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"next_start_in_ms": -3.4}, "late 3.40 ms"),
        ({"next_start_in_ms": 75_000.0}, "in 75s"),
        ({"next_start_in_ms": None}, " - "),
        ({"next_start_in_ms": None, "is_periodic": False}, "irregular"),
        ({"phase": "sync", "window_open_ms": 21.0}, "for 21 ms"),
        ({"class": None}, " 4-6 "),
    ],
)
def test_the_table_tells_what_is_known_where_it_is_not_all(changes: Json, shown: str) -> None:
    assert shown in printed(jobs_table([job_row(job("train", prediction(**changes)))]))[2]


def test_a_hundred_jobs_with_the_longest_names_fit_80_columns() -> None:
    slow = {"iteration_ms": {"p50": 123456.0, "p99": 1e9, "mean": 1.0}, "slowdown": 99.123,
            "waits_for": [LONGEST_NAME] * 3, "laxity_ms": -123456.0}  # fmt: skip
    rows = [job_row(job(LONGEST_NAME, syncing(**slow), iteration=10**6)) for _ in range(100)]
    lines = printed(jobs_table(rows))
    assert max(map(len, lines)) <= 80
    assert "and 60 more" in lines[-1]
    assert "123s/278h" in lines[2].replace("…", "") and "99.12" in lines[2]
    assert LONGEST_NAME in printed(jobs_table(rows, width=140), 140)[2]


def test_the_slowest_jobs_are_shown_in_their_order_where_there_is_no_room_for_all() -> None:
    slowdowns = [1.0, 3.0, None, 2.0, 2.0]
    laxities = [5.0, 5.0, 5.0, None, -1.0]
    rows = [
        job_row(job(str(index), prediction(slowdown=slowdown, laxity_ms=laxity)))
        for index, (slowdown, laxity) in enumerate(zip(slowdowns, laxities, strict=True))
    ]
    assert [row["job"] for row in worst_first(rows, 2)] == ["1", "4"]
    assert [row["job"] for row in worst_first(rows, 3)] == ["1", "3", "4"]
    assert worst_first(rows, 5) == rows
    assert worst_first(rows, 0) == []


def test_recent_windows_of_several_jobs_share_an_axis_of_six_periods_that_ends_now() -> None:
    slow = prediction(period_ms=200.0, recent=[
        {"start_ago_ms": 150.0, "window_ms": 50.0, "bytes": 1, "period_ms": 200.0},
    ], window_open_ms=20.0)  # fmt: skip
    ended = prediction(recent=[
        {"start_ago_ms": 90_000.0, "window_ms": 50.0, "bytes": 1, "period_ms": 102.0},
    ])  # fmt: skip
    jobs = [job("a", prediction()), job("b", slow), job("ended", ended), job("none", None)]
    rows, span_ns = recent_windows(jobs)
    assert span_ns == (-1_200_000_000, 0)
    assert [name for name, _ in rows] == ["a", "b"]
    assert rows[0][1][-1] == (-71_000_000, -29_000_000, "sync")
    assert rows[1][1] == [(-150_000_000, -100_000_000, "sync"), (-20_000_000, 0, "sync")]


def test_windows_without_a_period_are_all_shown() -> None:
    windows = [{"start_ago_ms": 900.0, "window_ms": 5.0, "bytes": 1, "period_ms": None}]
    rows, span_ns = recent_windows([job("odd", ODD | {"recent": windows})])
    assert span_ns == (-900_000_000, 0) and len(rows) == 1
    assert recent_windows([job("none", None)])[0] == []


def test_the_picture_of_windows_fits_the_width_and_is_absent_without_any() -> None:
    jobs = [job(LONGEST_NAME, prediction()), job("b", syncing())]
    picture = windows_picture(jobs, 80)
    lines = printed(picture)
    assert lines[1] == "sync windows of the last 613.9 ms"
    assert [lines[2].split()[0][:10], lines[3].split()[0]] == [LONGEST_NAME[:10], "b"]
    assert all(line.count("█") > 10 for line in lines[2:4])
    assert max(map(len, lines)) <= 80
    assert windows_picture([job("none", None)], 80) is None


def empty_snapshot() -> Snapshot:
    return Snapshot(
        taken_ns=0, ports={}, keys=np.zeros(0, layout.FLOW_KEY),
        stats=np.zeros(0, layout.FLOW_STATS), frames={},
    )  # fmt: skip


def test_json_lines_of_top_carry_the_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [summary("train", syncing()), summary("off", None)]
    run_top(empty_snapshot, 0.001, 2, True, lambda: jobs)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 2
    assert lines[1]["jobs"] == [job_row(entry) for entry in jobs]
    run_top(empty_snapshot, 0.001, 1, True)
    assert json.loads(capsys.readouterr().out).keys() == {"seconds", "flows"}


def test_top_into_a_pipe_prints_jobs_above_flows_and_no_control_codes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_top(empty_snapshot, 0.001, 1, False, lambda: [summary("train", syncing())])
    out = capsys.readouterr().out
    order = ("1 job, 1 in the sync window", "sync windows of the last", "0 of 0 flows active")
    places = [out.index(text) for text in order]
    assert places == sorted(places)
    assert "\x1b" not in out
    run_top(empty_snapshot, 0.001, 1, False, lambda: [])
    assert "job" not in capsys.readouterr().out


def on_terminal(action: Callable[[], None], keys: bytes, rows: int = 24) -> str:
    """What `action` writes to a terminal of 80 columns where `keys` are typed later."""
    pid, fd = pty.fork()
    if pid == 0:
        # The child of a test must never come back into pytest.
        try:
            sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
            os.environ["TERM"] = "xterm"
            os.environ.pop("NO_COLOR", None)
            termios.tcsetwinsize(0, (rows, 80))
            # A test run in the background of a shell has inherited that Ctrl-C is ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            action()
            sys.stdout.flush()
            os._exit(0)
        finally:
            os._exit(1)
    written = b""
    typed = False
    deadline_s = time.monotonic() + 30
    while True:
        ready, _, _ = select.select([fd], [], [], 10)
        if not ready or time.monotonic() > deadline_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"it did not end; it wrote {written[-2000:]!r}")
        try:
            part = os.read(fd, 65536)
        except OSError:  # the other end is closed: how Linux tells the end of a terminal
            break
        if not part:
            break
        written += part
        if not typed and written.count(b"in the sync window") >= 3:
            os.write(fd, keys)
            typed = True
    os.close(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return written.decode()


def test_on_a_terminal_top_is_redrawn_in_place_within_its_height_until_q() -> None:
    jobs = [summary(f"job-{number}", syncing()) for number in range(100)]
    out = on_terminal(lambda: run_top(empty_snapshot, 0.05, None, False, lambda: jobs), b"xq")
    assert out.count("100 jobs, 100 in the sync window") >= 3
    # Lines are overwritten one by one; a cleared screen would flicker.
    assert "\x1b[2J" not in out and "\x1b[1A" in out
    last = out[out.rindex("100 jobs") :]
    assert last.count("\n") < 24
    assert "more, less slow" in last and "flows active" in last


def test_a_terminal_with_room_shows_the_picture_of_the_windows_too() -> None:
    jobs = [summary(f"job-{number}", syncing()) for number in range(3)]
    out = on_terminal(lambda: run_top(empty_snapshot, 0.05, None, False, lambda: jobs), b"q", 24)
    last = out[out.rindex("3 jobs") :]
    assert "sync windows of the last" in last
    assert last.count("\n") < 24


def test_ctrl_c_ends_top() -> None:
    jobs = [summary("train", syncing())]
    out = on_terminal(lambda: run_top(empty_snapshot, 0.05, None, False, lambda: jobs), b"\x03")
    assert "Traceback" not in out
    assert out.rstrip().endswith("\x1b[?25h")  # the cursor is back


# ---- a line or two in other views ----


def test_the_outlook_is_two_lines_at_most() -> None:
    assert outlook_lines(job("train", prediction())) == [
        "laxity: period 102.3 ms, 4.2 MB, next window in 31.2 ms",
        "class 5 (4 .. 6), laxity 82.3 ms, slowdown 1.08",
    ]
    assert outlook_lines(job("train", syncing())) == [
        "laxity: period 102.3 ms, 4.2 MB, in its sync window since 21 ms (50% sent)",
        "class 5 (4 .. 6), laxity -12 ms, slowdown 1.61, waits for resnet, bert",
    ]


def test_the_outlook_says_why_there_is_none() -> None:
    assert outlook_lines(job("train", ODD)) == [
        "laxity: not periodic: its periods differ by 80 %", "class 4 .. 6",
    ]  # fmt: skip
    assert outlook_lines(job("train", None)) == ["laxity: nothing was seen of its iterations yet"]
    assert outlook_lines(job("train", None, policy="off")) == []
    # What a controller of an earlier release answers.
    old = {
        name: value
        for name, value in job().items()
        if name not in ("policy", "prediction", "max_slowdown_in_force")
    }
    assert outlook_lines(old) == []


def test_without_a_policy_what_is_predicted_is_still_told() -> None:
    (first, *_) = outlook_lines(job("train", prediction(), policy="off"))
    assert first.startswith("no policy: period 102.3 ms")


@pytest.mark.parametrize("kind", PREDICTIONS)
def test_job_list_and_job_show_have_the_outlook_and_fit_80_columns(kind: str) -> None:
    predicted = PREDICTIONS[kind]
    listed = jobs_text([summary(LONGEST_NAME, predicted)])
    shown = job_text(job(LONGEST_NAME, predicted))
    for text in (listed, shown):
        assert max(map(len, text.splitlines())) <= 80
        assert f"  {outlook_lines(job(LONGEST_NAME, predicted))[0][:40]}" in text


# ---- explain ----


def explained(
    predicted: Json | None, interfaces: Sequence[Json] = (SOFTWARE,), **changes: Any
) -> JobExplanation:
    return explain_job(job("train", predicted, **changes), interfaces, CLASSES)


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_explain_tells_period_phase_next_window_deadline_laxity_and_class() -> None:
    text = one_line(explained(prediction()).to_text())
    for fact in (
        "Job train: env STELLAR_JOB=train",
        "policy laxity, bound 1.5 x its undisturbed iteration, iteration 34",
        "33 seen by its packets",
        "period 102.3 ms ± 1.2 ms, compute 60.1 ms, sync window 42.2 ms in 2 bursts, 4.2 MB",
        "phase compute, next window in 31.2 ms",
        "deadline in 124.5 ms, laxity 82.3 ms, alone it reaches 800 Mbit/s",
        "iterations p50 101.2 ms, p99 140.9 ms, mean 108 ms",
        "class 5 (4 .. 6); the job's own: 3 without a plan, 0 .. 6 with one",
        "why: its deadline is the earliest",
        "in its packets now: 5",
    ):
        assert fact in text


def test_explain_tells_who_delays_whom() -> None:
    assert "waits for nobody bert waits for it" in one_line(explained(prediction()).to_text())
    text = one_line(explained(syncing()).to_text())
    assert "waits for resnet, bert nobody waits for it" in text
    assert "deadline passed 5 ms ago, laxity -12 ms" in text
    assert "phase sync since 21 ms ██████████░░░░░░░░░░ 50%" in text
    both = one_line(explained(prediction(delays=["a", "b"])).to_text())
    assert "a, b wait for it" in both
    alone = one_line(explained(prediction(delays=[])).to_text())
    assert "waits for nobody, and nobody waits for it" in alone


def test_explain_tells_the_classes_it_had_and_why() -> None:
    text = explained(prediction()).to_text()
    assert "  2.1 s ago: class 4 .. 6: earliest deadline" in text
    assert "  30 ms ago: class 2: bert goes first" in text


def test_explain_draws_the_last_sync_windows() -> None:
    text = explained(prediction()).to_text()
    lines = text.splitlines()
    title = lines.index("Sync windows of the last 613.9 ms")
    # Six periods of 102.31 ms hold six windows of 42 ms each.
    assert lines[title + 1].split()[0] == "train" and len(lines[title + 1].split()) == 7
    assert "Sync windows" not in explained(prediction(recent=[])).to_text()


def test_the_jobs_that_delay_it_or_wait_for_it_are_drawn_below() -> None:
    others = [job(name, prediction()) for name in ("train", "bert", "resnet", "stranger")]
    waiting = job("train", syncing(waits_for=["resnet"], delays=["bert"]))
    text = explain_job(waiting, [SOFTWARE], CLASSES, others=others).to_text()
    drawn = [line.split()[0] for line in text.splitlines() if line.count("█") > 12]
    assert drawn == ["train", "bert", "resnet"]


def test_pacing_is_told() -> None:
    assert "paced to 25% of the link" in one_line(explained(prediction(share=0.25)).to_text())


@pytest.mark.parametrize(
    ("predicted", "changes", "reason"),
    [
        (ODD, {}, "Not periodic: its periods differ by 80 %. No next window is predicted."),
        (ODD, {}, "Iterations seen so far: 2; 3 are needed."),
        (ODD, {}, "The rate that it reaches alone is not known"),
        (prediction(confidence=0.3, why="few samples"), {}, "confidence 30%: few samples."),
        (prediction(spread_ms=30.0), {}, "scatters by 30 ms, 29% of it"),
        (prediction(next_start_in_ms=-40.0), {}, "next window is 40 ms overdue"),
        (prediction(slowdown=1.7), {}, "slower than its bound: 1.70 x"),
        (prediction(), {}, "told apart by pauses between packets"),
        (None, {}, "Nothing was seen of its iterations yet."),
        (None, {"policy": "off"}, "The policy is off"),
        (None, {"flows": [], "matched": False}, "It never had a flow here"),
        (prediction(), {"flows": []}, "It has no flows at present"),
    ],
)
def test_what_is_uncertain_is_said(predicted: Json | None, changes: Json, reason: str) -> None:
    explanation = explained(predicted, **changes)
    assert reason in " ".join(explanation.uncertain)
    assert reason in one_line(explanation.to_text())


def test_a_job_that_is_well_known_has_nothing_uncertain() -> None:
    explanation = explained(prediction(source="reports"), reports=[REPORT])
    assert explanation.uncertain == ()
    assert "uncertain" not in explanation.to_text()


def test_an_open_window_is_not_called_overdue() -> None:
    assert "overdue" not in explained(syncing()).to_text()


def test_a_forwarder_that_classifies_by_dscp_is_named() -> None:
    flow = FLOW | {"interface": "sw:br0"}
    explanation = explained(prediction(), [SOFTWARE, BRIDGE], flows=[flow])
    assert explanation.interfaces == (("sw:br0", "forwarded"),)
    assert any("On sw:br0 the class is taken from" in reason for reason in explanation.uncertain)
    assert not any("sw:br0" in reason for reason in explained(prediction()).uncertain)


def test_a_job_over_a_hardware_nic_is_advised_its_traffic_class() -> None:
    flow = FLOW | {"interface": "eth1"}
    advice = explained(prediction(), [SOFTWARE, HARDWARE], flows=[flow], traffic_class=4).advice
    assert advice is not None and advice.is_needed
    # The traffic class byte is the DSCP and two ECN bits; class 4 has DSCP 26 by default.
    assert advice.environment == {"NCCL_IB_TC": 104, "UCX_IB_TRAFFIC_CLASS": 104}
    assert "eth1 (bypass" in advice.why


def test_advice_is_given_before_any_flow_is_seen_and_not_needed_where_packets_are_rewritten() -> (
    None
):
    unseen = explained(None, [SOFTWARE], flows=[]).advice
    assert unseen is not None and unseen.is_needed
    assert unseen.environment["NCCL_IB_TC"] == 18 << 2
    seen = explained(prediction(), [SOFTWARE, HARDWARE])
    assert seen.advice is not None and not seen.advice.is_needed
    assert "nothing is to be done" in one_line(seen.to_text())
    assert "NCCL_IB_TC=72" in seen.to_text()


def test_ranks_that_report_choose_their_class_and_need_no_advice() -> None:
    explanation = explained(prediction(source="reports"), [HARDWARE], reports=[REPORT])
    assert explanation.advice is None
    assert "on the queue pair of its class" in one_line(explanation.to_text())


@pytest.mark.parametrize("kind", PREDICTIONS)
@pytest.mark.parametrize("interface", [SOFTWARE, BRIDGE, HARDWARE], ids=lambda each: each["kind"])
def test_explanations_fit_80_columns_and_are_json(kind: str, interface: Json) -> None:
    predicted = PREDICTIONS[kind]
    long = job(LONGEST_NAME, predicted, flows=[FLOW | {"interface": interface["interface"]}] * 12)
    explanation = explain_job(long, [interface], CLASSES, [f"{'f' * 36}-{'a' * 36}-0x0000ff"])
    assert max(map(len, explanation.to_text().splitlines())) <= 80
    document = explanation.to_json()
    assert json.loads(json.dumps(document)) == document
    assert document["job"]["name"] == LONGEST_NAME
    assert document["also_flows"] and document["uncertain"] is not None


@pytest.mark.parametrize("name", prediction())
def test_any_member_of_a_prediction_may_be_unknown(name: str) -> None:
    for predicted in (prediction(**{name: None}), syncing(**{name: None})):
        document = job("train", predicted)
        assert explain_job(document, [SOFTWARE], CLASSES).to_text().startswith("Job train")
        assert len(printed(jobs_table([job_row(document)]))) == 3
        assert outlook_lines(document)[0].startswith("laxity: ")


# ---- a name that may be a job's or a flow's ----


def one_flow() -> Snapshot:
    keys = np.zeros(1, layout.FLOW_KEY)
    for member, last in (("saddr", 1), ("daddr", 2)):
        keys[member] = np.frombuffer(bytes(10) + b"\xff\xff" + bytes([10, 0, 0, last]), np.uint8)
    keys["dqpn"], keys["direction"] = 17, layout.Direction.EGRESS
    return Snapshot(
        taken_ns=0, ports={}, keys=keys, stats=np.zeros(1, layout.FLOW_STATS), frames={}
    )


def test_flows_that_a_name_could_mean_are_found() -> None:
    snapshot = one_flow()
    (name,) = flows_named(snapshot, "10.0.0.1")
    assert name.startswith("10.0.0.1-10.0.0.2-")
    assert flows_named(snapshot, "17") == [name] == flows_named(snapshot, name)
    assert flows_named(snapshot, "train") == [] == flows_named(snapshot, "10.0.0.2")


def test_a_name_that_is_neither_lists_flows_and_jobs() -> None:
    with pytest.raises(UsageError, match=r"No flow or job matches 'tran'") as raised:
        explain(one_flow(), "tran", ["train", "bert"])
    assert "10.0.0.1-10.0.0.2" in str(raised.value) and "  train\n  bert" in str(raised.value)
    with pytest.raises(UsageError, match="at all") as raised:
        explain(empty_snapshot(), "tran", ["train"])
    assert "  train" in str(raised.value)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running controller with a job `train`, a job `17` and a flow to QPN 17."""
    jobs = {name: job(name, prediction()) for name in ("train", "17")}
    answers = {
        "status": lambda _: {"jobs": list(jobs.values()), "interfaces": [SOFTWARE]},
        "job": lambda arguments: {"job": jobs[arguments["name"]]},
        "classes": lambda _: {"classes": CLASSES},
    }
    monkeypatch.setattr(
        client, "ask", lambda _run, command, **arguments: answers[command](arguments)
    )
    monkeypatch.setattr(client, "take_snapshot", lambda _run: one_flow())


def test_explain_takes_a_job_by_its_name(answered: None) -> None:
    result = CliRunner().invoke(cli, ["explain", "train"])
    assert result.exit_code == 0 and result.output.startswith("Job train: ")
    assert "could also mean" not in result.output
    document = json.loads(CliRunner().invoke(cli, ["explain", "train", "--json"]).output)
    assert document["job"]["prediction"]["period_ms"] == 102.31
    assert document["advice"]["environment"]["NCCL_IB_TC"] == 72


def test_explain_prefers_the_job_and_hints_at_the_flow(answered: None) -> None:
    output = one_line(CliRunner().invoke(cli, ["explain", "17"]).output)
    assert output.startswith("Job 17: ")
    assert "17 could also mean the flow 10.0.0.1-10.0.0.2-" in output
    assert CliRunner().invoke(cli, ["explain", "0x11"]).output.startswith("Flow 10.0.0.1")


def test_explain_of_neither_lists_both_and_is_wrong_usage(answered: None) -> None:
    result = CliRunner().invoke(cli, ["explain", "tran"])
    assert result.exit_code == 2
    assert "No flow or job matches 'tran'" in result.output and "  train" in result.output
