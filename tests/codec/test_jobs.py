"""Jobs, their rules and plans."""

from __future__ import annotations

import ipaddress
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.errors import UsageError
from controller.priority.jobs import (
    MAX_JOBS,
    FlowFacts,
    Job,
    JobMatch,
    JobPlan,
    ProcessFacts,
    check_jobs,
    check_rate,
    match_job,
    needs_process,
)

PROCESS = ProcessFacts(
    pid=4711,
    uid=1000,
    command="python3",
    argv0="/opt/venv/bin/torchrun",
    cgroup="/system.slice/train.service/worker-3",
    environment={"STELLAR_JOB": "llama", "RANK": "7", "EMPTY": ""},
)
FLOW = FlowFacts(
    ipaddress.ip_address("10.0.1.1"), ipaddress.ip_address("10.0.2.1"), 0x22, 0x11, PROCESS
)
FLOW_V6 = replace(
    FLOW, source=ipaddress.ip_address("fd00:1::1"), destination=ipaddress.ip_address("fd00:2::1")
)
FORWARDED = replace(FLOW, local_qpn=None, process=None)


def matches(document: dict[str, Any], facts: FlowFacts = FLOW) -> bool:
    return match_job([Job("any", JobMatch.parse(document))], facts) is not None


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"src": "10.0.1.0/24"}, True),
        ({"src": "10.0.1.1"}, True),
        ({"src": "10.0.2.0/24"}, False),
        ({"src": ["10.9.0.0/16", "10.0.1.0/24"]}, True),
        ({"src": "0.0.0.0/0"}, True),
        ({"src": "::/0"}, False),
        ({"src": "::ffff:10.0.1.0/120"}, True),
        ({"dst": "10.0.2.1/32"}, True),
        ({"dst": "10.0.1.1/32"}, False),
        ({"address": "10.0.2.0/24"}, True),
        ({"address": "10.0.1.0/24"}, True),
        ({"address": "10.0.3.0/24"}, False),
        ({"qpn": 0x11}, True),
        ({"qpn": "0x22"}, True),
        ({"qpn": [0x33, 0x44]}, False),
        ({"pid": 4711}, True),
        ({"pid": [1, 4712]}, False),
        ({"uid": 1000}, True),
        ({"uid": 0}, False),
        ({"command": "python3"}, True),
        ({"command": "torchrun"}, True),
        ({"command": "torch*"}, True),
        ({"command": "/opt/venv/bin/torchrun"}, False),
        ({"command": "Python3"}, False),
        ({"command": ["ib_write_bw", "python?"]}, True),
        ({"cgroup": "/system.slice/train.service"}, True),
        ({"cgroup": "/system.slice/train.service/"}, True),
        ({"cgroup": "/system.slice/train.service/worker-3"}, True),
        ({"cgroup": "/system.slice/train"}, False),
        ({"cgroup": "/"}, True),
        ({"cgroup": "*/worker-?"}, True),
        ({"cgroup": "/system.slice/*.service"}, False),
        ({"env": "llama"}, True),
        ({"env": "l*a"}, True),
        ({"env": "opt"}, False),
        ({"env": "RANK=7"}, True),
        ({"env": "RANK=[0-6]"}, False),
        ({"env": "EMPTY="}, True),
        ({"env": "MISSING=*"}, False),
        ({"env": ["opt", "RANK=*"]}, True),
        # All criteria have to hold.
        ({"src": "10.0.1.0/24", "qpn": 0x11, "uid": 1000, "command": "python3"}, True),
        ({"src": "10.0.1.0/24", "qpn": 0x11, "uid": 1001, "command": "python3"}, False),
        ({"src": "10.0.1.0/24", "dst": "10.0.3.0/24"}, False),
    ],
)
def test_a_rule_matches_what_it_says(document: dict[str, Any], expected: bool) -> None:
    assert matches(document) is expected


def test_a_rule_by_ipv6_prefix_does_not_match_ipv4() -> None:
    assert matches({"address": "fd00:2::/32"}, FLOW_V6)
    assert not matches({"address": "fd00:2::/32"}, FLOW)
    assert not matches({"address": "10.0.0.0/8"}, FLOW_V6)


def test_a_v4_mapped_address_is_the_ipv4_address() -> None:
    facts = replace(FLOW, source=ipaddress.ip_address("::ffff:10.0.1.1"))
    assert matches({"src": "10.0.1.1"}, facts)


@pytest.mark.parametrize(
    "document",
    [{"pid": 4711}, {"uid": 0}, {"command": "*"}, {"cgroup": "*"}, {"env": "RANK=*"}, {}],
)
def test_a_rule_about_a_process_does_not_match_a_flow_without_one(document: dict[str, Any]) -> None:
    assert needs_process(Job("x", JobMatch.parse(document)))
    assert not matches(document, FORWARDED)


@pytest.mark.parametrize(
    "document", [{"src": "10.0.1.1"}, {"dst": "10.0.2.1"}, {"address": "10.0.2.1"}, {"qpn": 0x22}]
)
def test_a_rule_about_addresses_and_queue_pairs_needs_no_process(document: dict[str, Any]) -> None:
    assert not needs_process(Job("x", JobMatch.parse(document)))
    assert matches(document, FORWARDED)


def test_a_job_without_criteria_is_found_by_its_name_in_the_environment() -> None:
    jobs = [Job("opt"), Job("llama")]
    assert match_job(jobs, FLOW) is jobs[1]
    elsewhere = replace(FLOW, process=replace(PROCESS, environment={"MY_JOB": "opt"}))
    assert match_job(jobs, elsewhere) is None
    assert match_job(jobs, elsewhere, env_variable="MY_JOB") is jobs[0]
    assert match_job([Job("x", JobMatch.parse({"env": "o*"}))], elsewhere, "MY_JOB") is not None


def test_the_first_job_that_matches_wins() -> None:
    narrow = Job("narrow", JobMatch.parse({"qpn": 0x11}))
    wide = Job("wide", JobMatch.parse({"address": "10.0.0.0/8"}))
    assert match_job([narrow, wide], FLOW) is narrow
    assert match_job([wide, narrow], FLOW) is wide
    assert match_job([narrow, wide], replace(FLOW, dqpn=1, local_qpn=2)) is wide
    assert match_job([], FLOW) is None


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"source": "10.0.0.1"}, ["match.source", "unknown", "src, dst, address"]),
        ({"src": "10.0.0.1/24"}, ["match.src", "10.0.0.1/24", "host bits", "10.0.0.0/24"]),
        ({"src": "host1"}, ["match.src", "'host1'"]),
        ({"dst": 7}, ["match.dst", "7"]),
        ({"address": []}, ["match.address", "empty"]),
        ({"qpn": 1 << 24}, ["match.qpn", "0 .. 16777215"]),
        ({"qpn": "eleven"}, ["match.qpn", "'eleven'"]),
        ({"qpn": True}, ["match.qpn", "True"]),
        ({"pid": 0}, ["match.pid", "1 .. "]),
        ({"uid": -1}, ["match.uid", "-1"]),
        ({"command": ""}, ["match.command", "''"]),
        ({"command": 5}, ["match.command", "5"]),
        ({"cgroup": "train.service"}, ["match.cgroup", "train.service", "/system.slice"]),
        ({"env": "=x"}, ["match.env", "'=x'", "NAME=PATTERN"]),
        ({"env": ["a", 3]}, ["match.env", "3"]),
    ],
)
def test_a_wrong_criterion_is_named_with_what_is_allowed(
    document: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        JobMatch.parse(document)
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("", {}, ["Job name is ''"]),
        ("a" * 32, {}, ["1 .. 31"]),
        ("a b", {}, ["'a b'"]),
        ("a\n", {}, ["Job name"]),
        ("é", {}, ["Job name"]),
        ("x", {"traffic_class": 8}, ["Job x: class is 8", "0 .. 7"]),
        ("x", {"traffic_class": 7}, ["class is 7", "0 .. 6", "class_ceiling"]),
        ("x", {"class_floor": 4}, ["class is 3", "4 .. 6"]),
        ("x", {"class_floor": 5, "class_ceiling": 4}, ["class_floor 5", "above class_ceiling 4"]),
        ("x", {"rate_Bps": -1}, ["rate in bytes/s is -1"]),
        ("x", {"rate_Bps": 999}, ["rate in bytes/s is 999", "1000 .. "]),
        ("x", {"rate_Bps": False}, ["rate in bytes/s is False"]),
        ("x", {"set_ect": 1}, ["set_ect is 1"]),
        ("x", {"dcqcn": "yes"}, ["dcqcn is 'yes'"]),
    ],
)
def test_an_impossible_job_is_refused(name: str, fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        Job(name, **fields)
    for word in words:
        assert word in caught.value.message


def test_two_jobs_of_one_name_and_too_many_jobs_are_refused() -> None:
    jobs = [Job(f"job-{number}") for number in range(MAX_JOBS)]
    check_jobs(jobs)
    with pytest.raises(UsageError, match="job-3 stands twice"):
        check_jobs([*jobs[:5], Job("job-3", traffic_class=5)])
    with pytest.raises(UsageError, match="more than 255 jobs"):
        check_jobs([*jobs, Job("one-more")])


def test_a_rate_above_the_link_is_refused() -> None:
    check_rate("Job x: rate", 12_500_000, 12_500_000)
    for rate_Bps in (0, 12_500_001):
        with pytest.raises(UsageError, match=r"Job x: rate is .*100 Mbit/s, the link's rate"):
            check_rate("Job x: rate", rate_Bps, 12_500_000)


def test_jobs_survive_the_state_file() -> None:
    match = JobMatch.parse(
        {"src": ["10.0.0.0/8", "fd00::/8"], "qpn": "0x11", "env": "RANK=*", "cgroup": "/a"}
    )
    jobs = [Job("a"), Job("b", match, 7, 2, 7, True, 12_500_000, False)]
    text = json.dumps([job.to_json() for job in jobs])
    assert [Job.from_json(entry) for entry in json.loads(text)] == jobs


_PREFIXES = st.one_of(
    st.builds(
        lambda number, length: ipaddress.ip_network((number, length), strict=False),
        st.integers(0, (1 << 32) - 1),
        st.integers(0, 32),
    ),
    st.builds(
        lambda number, length: ipaddress.ip_network((number | 1 << 127, length), strict=False),
        st.integers(0, (1 << 127) - 1),
        st.integers(0, 128),
    ),
)


@given(st.lists(_PREFIXES, max_size=4), st.lists(st.integers(0, (1 << 24) - 1), max_size=4))
def test_a_rule_reads_back_what_it_wrote(prefixes: list[Any], qpns: list[int]) -> None:
    match = JobMatch(src=tuple(prefixes), qpn=tuple(qpns), command=("a*", "b"))
    assert JobMatch.from_json(json.loads(json.dumps(match.to_json()))) == match


# ---- plans ----

PLAN = JobPlan("train", 1 << 20, 1_000, 2_000, 3_000, 12_500_000, 500)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"job": "no such name"}, ["Job name"]),
        ({"expected_bytes": 0}, ["expected_bytes is 0", "1 .. "]),
        ({"expected_bytes": (1 << 42) + 1}, ["expected_bytes"]),
        ({"expected_bytes": 1.5}, ["expected_bytes is 1.5"]),
        ({"window_start_ns": -1}, ["window_start_ns is -1"]),
        ({"deadline_ns": 1_000}, ["deadline_ns is 1000", "not after window_start_ns 1000"]),
        ({"deadline_ns": 1 << 62}, ["deadline_ns"]),
        ({"valid_until_ns": 999}, ["valid_until_ns is 999", "not after"]),
        ({"rate_Bps": -5}, ["rate in bytes/s is -5"]),
        ({"rate_Bps": 0, "pace": True}, ["pace is set and the rate is 0"]),
        ({"gap_ns": -1}, ["gap_ns is -1"]),
        ({"class_floor": 8}, ["class_floor is 8", "0 .. 7"]),
        ({"class_floor": 4, "class_ceiling": 3}, ["class_floor 4", "class_ceiling 3"]),
        ({"compression_ratio": 0}, ["compression_ratio is 0", "above 0 .. 1"]),
        ({"compression_ratio": math.nan}, ["compression_ratio is nan"]),
        ({"pace": 1}, ["pace is 1"]),
    ],
)
def test_a_plan_with_impossible_numbers_is_refused(
    fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        replace(PLAN, **fields)
    for word in words:
        assert word in caught.value.message


def test_a_plan_is_in_force_until_it_expires() -> None:
    assert PLAN.in_force(0)
    assert PLAN.in_force(2_999)
    assert not PLAN.in_force(3_000)


def test_compression_shrinks_what_goes_on_the_wire() -> None:
    assert PLAN.wire_bytes == 1 << 20
    assert replace(PLAN, compression_ratio=0.25).wire_bytes == 1 << 18
    assert replace(PLAN, expected_bytes=1, compression_ratio=0.01).wire_bytes == 1


def test_a_plan_survives_the_control_socket() -> None:
    plan = replace(PLAN, compression_ratio=0.5, pace=True, class_floor=1, class_ceiling=7)
    assert JobPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
