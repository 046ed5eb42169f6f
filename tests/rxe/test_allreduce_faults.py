"""What ranks get when one of them dies, hangs, disagrees, or cannot be reached."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import sh
from tests.rxe.ranks import ranks, run_ranks
from tests.rxe.verbs import RxeHost, Switch, poll, rxe_switched

TIMEOUT_S = 5.0


@pytest.fixture(scope="module")
def four(rxe_kernel: None) -> Iterator[tuple[Switch, list[RxeHost]]]:
    """Four hosts with soft-RoCE around a switch."""
    with rxe_switched(4) as (switch, hosts):
        switch.keep_order(hosts)
        yield switch, hosts


def left_behind(hosts: Sequence[RxeHost]) -> list[Any]:
    """Queue pairs, memory regions and completion queues of processes, as the kernel lists them."""
    found: list[Any] = []
    for host in hosts:
        for kind in ("qp", "mr", "cq"):
            entries = json.loads(host.sh(f"rdma -j resource show {kind} link {host.device}/1"
                                         if kind == "qp" else
                                         f"rdma -j resource show {kind} dev {host.device}")
                                 or "[]")  # fmt: skip
            found += [entry for entry in entries if entry.get("pid")]
    return found


def test_a_killed_rank_ends_the_others_in_time_twenty_times_and_leaves_nothing(
    four: tuple[Switch, list[RxeHost]],
) -> None:
    """Another rank each time, rank 0 among them, in the middle of operations."""
    hosts = four[1][:3]
    rounds = 20
    arguments = {"rounds": rounds, "timeout_s": TIMEOUT_S, "seed": 4}
    answers = run_ranks(hosts, "killed", arguments, 300)
    for number in range(rounds):
        victim = number % len(hosts)
        for rank, answer in enumerate(row[number] for row in answers):
            if rank == victim:
                assert answer["signal"] == 9
                continue
            assert answer["exit"] == 0, answer
            assert answer["error"] == "PeerError", answer
            assert answer["rank"] == victim, answer
            assert f"Rank {victim}" in answer["message"], answer
            # A dying process takes its regions away before its queue pairs.
            assert answer["status"] in ("WR_FLUSH_ERR", "RETRY_EXC_ERR", "REM_ACCESS_ERR"), answer
            assert answer["noticed_s"] < TIMEOUT_S + 1, answer
            assert answer["again"], "the survivors' new communicator reduces"
    assert left_behind(hosts) == []


def test_ranks_that_call_different_things_all_get_an_error_and_none_hangs(
    four: tuple[Switch, list[RxeHost]],
) -> None:
    whats = ["dtype", "size", "empty", "op", "algorithm", "root", "collective"]
    for answers in run_ranks(four[1], "disagreements", {"whats": whats, "odd": 2}):
        for what, answer in zip(whats, answers, strict=True):
            first = answer["first"]
            assert first["error"] == "MismatchError", (what, first)
            assert "here" in first["message"], (what, first)
            assert first["seconds"] < 10, (what, first)
            assert answer["again"]["error"] == "MismatchError", (what, answer)


def test_a_rank_that_does_not_call_is_named_after_the_timeout(
    four: tuple[Switch, list[RxeHost]],
) -> None:
    answers = run_ranks(four[1], "absence", {"missing": 1, "timeout_s": 2.0})
    for rank, answer in enumerate(answers):
        assert answer["error"] == "StallError", answer
        assert "rank 1: has not called it" in answer["message"]
        if rank != 1:
            assert 2.0 <= answer["seconds"] < 4.5


@pytest.fixture
def looping(
    four: tuple[Switch, list[RxeHost]], tmp_path: Path
) -> Iterator[tuple[list[RxeHost], list[Any]]]:
    """Three ranks that reduce until they fail, all of them running."""
    hosts = four[1][:3]
    arguments = {"flag": f"{tmp_path}/running", "timeout_s": 8.0, "count": 1 << 18}
    with ranks(hosts, "loop_until_failure", arguments) as running:
        flags = [Path(f"{tmp_path}/running{number}") for number in range(3)]
        deadline = time.monotonic() + 60
        while not all(flag.exists() for flag in flags):
            assert time.monotonic() < deadline, [rank.program.output() for rank in running]
            time.sleep(0.05)
        yield hosts, running


def test_a_link_that_goes_down_ends_the_operation_on_all_ranks_with_the_peer_and_status(
    looping: tuple[list[RxeHost], list[Any]],
) -> None:
    hosts, running = looping
    victim = hosts[1]
    begin = time.monotonic()
    try:
        sh(f"ip -n {victim.netns} link set {victim.interface} down")
        answers = [rank.wait(60) for rank in running]
    finally:
        sh(f"ip -n {victim.netns} link set {victim.interface} up")
        poll(lambda: "ACTIVE" in victim.sh(f"rdma link show {victim.device}/1"), "the link is up")
    for answer in answers:
        assert answer["error"] == "PeerError", answer
        assert answer["rank"] == 1, answer
        assert answer["at"] - begin < 9
    assert left_behind(hosts) == []


def test_packets_that_no_longer_arrive_end_it_with_the_queue_pairs_retries(
    four: tuple[Switch, list[RxeHost]], looping: tuple[list[RxeHost], list[Any]]
) -> None:
    switch, (hosts, running) = four[0], looping
    begin = time.monotonic()
    try:
        switch.impair(hosts[2], "loss 100%")
        answers = [rank.wait(60) for rank in running]
    finally:
        switch.heal(hosts[2])
    for answer in answers:
        assert answer["error"] == "PeerError", answer
        assert answer["at"] - begin < 9
    # Whoever sent to it first ran out of retries, and its answers to nobody else arrive.
    assert "RETRY_EXC_ERR" in {answer["status"] for answer in answers}
    assert left_behind(hosts) == []


def test_a_stopped_process_is_a_stall_and_the_others_say_whose(
    looping: tuple[list[RxeHost], list[Any]],
) -> None:
    """The kernel acknowledges for a stopped process, so nothing but the missing data shows it."""
    hosts, running = looping
    # `env` replaced itself by Python.
    os.kill(running[0].program.pid, 19)
    try:
        answers = [rank.wait(60) for rank in running[1:]]
    finally:
        os.kill(running[0].program.pid, 18)
    for answer in answers:
        # Data is missing, or the control channel misses the heartbeat first.
        assert answer["error"] in ("StallError", "PeerError"), answer
        assert answer["rank"] == 0, answer
    running[0].wait(60)
    assert left_behind(hosts) == []
