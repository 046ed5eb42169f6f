"""``controller bench allreduce`` as a user runs it: on hosts that it builds and removes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.allreduce.bench_limit import measure_limit
from controller.dataplane.netns import list_netns
from controller.ops import testbed as testbed_module
from tests.hosts import sh

KEYS = {"bytes", "dtype", "op", "algorithm", "time_us", "algbw_GBps", "busbw_GBps", "wrong"}
COMMAND = [sys.executable, "-m", "controller", "bench", "allreduce"]
LIMIT_S = 240.0


def left_over() -> list[str]:
    """Hosts and RDMA devices of a testbed that are still there."""
    devices = [str(entry["ifname"]) for entry in json.loads(sh("rdma -j dev") or "[]")]
    return [name for name in (*list_netns(), *devices) if name.startswith("stlr")]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Whatever a test does, no host, device or rank outlives it."""
    yield
    assert left_over() == []
    assert rank_pids() == []


def bench(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert result.returncode == status, result.stdout + result.stderr
    return result


def bench_json(*arguments: str) -> Any:
    return json.loads(bench(*arguments, "--json").stdout)


@contextlib.contextmanager
def long_bench(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A benchmark that goes on for minutes, and the processes of its ranks, all at work."""
    command = [*COMMAND, "--spawn", "3", "-b", "1M", "-e", "1M", "-n", "10000", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            deadline_s = time.monotonic() + 60
            ranks: list[int] = []
            while len(ranks) < 3 or not all(qps(pid) for pid in ranks):
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline_s, f"ranks {ranks} do not get to work"
                time.sleep(0.1)
                ranks = rank_pids()
            time.sleep(1.0)
            yield process, ranks
        finally:
            process.terminate()


def rank_pids() -> list[int]:
    """Processes of ranks, also those whose parent is gone."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"\0controller.allreduce.bench_rank\0" in path.read_bytes():
                found.append(int(path.parent.name))
    return sorted(found)


def qps(pid: int) -> int:
    """Queue pairs of a process that are ready to send."""
    netns = sh(f"ip netns identify {pid}", check=False).strip()
    text = sh(f"ip netns exec {netns} rdma -j res show qp pid {pid}", check=False) if netns else ""
    return sum(1 for entry in json.loads(text or "[]") if entry.get("state") == "RTS")


def test_every_operation_and_type_is_exact_and_a_row_of_its_own() -> None:
    """Of the collectives with and without an operation; the others are test_allreduce.py's."""
    for collective in ("all_reduce", "broadcast"):
        document = bench_json(
            "--spawn", "2", "--collective", collective, "-o", "all", "-d", "all",
            "-b", "30000", "-e", "30000", "-n", "1", "-w", "0",
        )  # fmt: skip
        assert document["ranks"] == 2
        assert document["wrong"] == 0
        assert all(set(row) >= KEYS and row["wrong"] == 0 for row in document["results"])
        assert {row["dtype"] for row in document["results"]} == {
            "int8", "int32", "int64", "float16", "float32", "float64", "bfloat16"
        }  # fmt: skip
        if "reduce" in collective:
            assert {row["op"] for row in document["results"]} == {
                "sum", "prod", "max", "min", "avg"
            }  # fmt: skip


def test_random_operations_are_all_right() -> None:
    document = bench_json("--spawn", "3", "--random", "100", "-e", "100K", "--seed", "5")
    assert document["random"]["operations"] == 100
    assert document["random"]["wrong"] == 0
    assert document["random"]["elements"] > 100_000
    assert len(document["random"]["by_collective"]) == 4


def test_the_text_has_the_columns_of_nccl_tests_in_80_characters() -> None:
    text = bench("--spawn", "2", "-b", "64K", "-e", "1M", "-f", "16", "-n", "2").stdout
    assert max(len(line) for line in text.splitlines()) <= 80
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    assert [(row[0], row[5], row[9]) for row in rows] == [
        ("65536", "out", "0"), ("65536", "in", "0"), ("1048576", "out", "0"), ("1048576", "in", "0")
    ]  # fmt: skip
    assert "# Out of bounds values: 0 OK" in text


def test_links_of_a_rate_hold_busbw_to_it() -> None:
    document = bench_json("--spawn", "3", "--rate", "16mbit", "-b", "256K", "-e", "256K", "-n", "4")
    # 2 MB/s, 2 % of which are headers; what a port may send at once makes short runs faster.
    for row in document["results"]:
        assert 0.5 < row["busbw_GBps"] / 0.002 < 1.1


def test_ranks_started_by_hand_find_one_another_and_only_the_first_prints(tmp_path: Path) -> None:
    with testbed_module.testbed(2) as bed:
        processes = []
        for host in bed.hosts:
            environment = os.environ | {
                "RANK": str(host.rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0",
                "MASTER_ADDR": f"unix:{tmp_path}/meet",
            }  # fmt: skip
            command = host.command(*COMMAND, "-b", "4K", "-e", "4K", "-n", "2", "--json")
            processes.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            )
        outputs = [process.communicate(timeout=60)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
    assert [row["wrong"] for row in json.loads(outputs[0])["results"]] == [0, 0]
    assert outputs[1] == ""


def test_the_ring_of_ib_write_bw_gives_the_goodput_of_every_link() -> None:
    with testbed_module.testbed(3, rate_Bps=2_000_000) as bed:
        links = measure_limit(bed)
        assert len(links) == 3
        for link in links:
            # What a port may send at once makes a short run faster than its rate.
            assert 0.6 < link / 0.002 < 1.1


def test_peers_are_measured_beside_ours_or_left_out_with_the_reason() -> None:
    document = bench_json("--spawn", "3", "-b", "1M", "-e", "1M", "-n", "3", "--peers")
    assert document["limit_GBps"] > 0
    left_out = " ".join(document["notes"])
    for name in ("gloo", "openmpi-ucx"):
        assert document["peers"].get(name, 0) > 0 or name in left_out


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_all_and_is_named(victim: int) -> None:
    with long_bench("--timeout", "5") as (process, ranks):
        by_rank = {
            int(netns.rpartition("r")[2]): pid
            for pid in ranks
            if (netns := sh(f"ip netns identify {pid}").strip())
        }
        os.kill(by_rank[victim], signal.SIGKILL)
        start_s = time.monotonic()
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 1
        assert f"Rank {victim}" in errors
        assert "SIGKILL" in errors
        # 5 s to notice, 2 s for the others' own words, and the removal of the hosts.
        assert time.monotonic() - start_s < 15


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_ranks_and_removes_hosts(number: int) -> None:
    with long_bench() as (process, _):
        process.send_signal(number)
        process.communicate(timeout=30)
        assert process.returncode != 0


def test_what_a_killed_benchmark_left_is_removed_by_the_next_one() -> None:
    with long_bench() as (process, ranks):
        process.kill()
        process.wait()
        # Its ranks end with it, although nobody is left to end them.
        deadline_s = time.monotonic() + 5
        while rank_pids():
            assert time.monotonic() < deadline_s, f"of {ranks}, {rank_pids()} live on"
            time.sleep(0.05)
        assert left_over()
    assert bench_json("--spawn", "2", "-b", "4K", "-e", "4K", "-n", "1")["wrong"] == 0


def test_a_mistake_costs_no_testbed_and_says_what_to_do() -> None:
    start_s = time.monotonic()
    result = bench("--spawn", "2", "--collective", "broadcast", "--root", "2", status=2)
    assert "--root is 2; allowed: 0 .. 1" in result.stderr
    result = bench("--peers", status=2)
    assert "--peers needs --spawn" in result.stderr
    result = bench("--spawn", "2", "--rate", "fast", status=2)
    assert "--rate 'fast' cannot be read" in result.stderr
    assert time.monotonic() - start_s < 15
