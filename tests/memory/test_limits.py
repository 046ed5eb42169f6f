"""Limits: each one that does not suffice is named, with what was found and what to do."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from controller.memory import limits as module
from controller.memory.limits import check_limits, fork_support, gather_limits
from controller.verbs.registration import DeviceLimits
from tests.memory.fakes import GIB, MIB, ROOMY

DEVICE = DeviceLimits("fake0", max_mr=100, max_mr_nbytes=4 * GIB)


def test_nothing_is_wrong_where_everything_suffices() -> None:
    assert check_limits(16 * GIB, 16, DEVICE, ROOMY) == []


@pytest.mark.parametrize(
    ("change", "limit", "found"),
    [
        ({"memlock_nbytes": 8 * MIB}, "memlock", r"8388608 bytes, 0 of which.*17179869184 are"),
        ({"memlock_nbytes": 17 * GIB, "pinned_nbytes": 2 * GIB}, "memlock", "2147483648 of which"),
        ({"map_count": 65_500}, "max_map_count", r"65530; with 16 regions.* 65548 mappings"),
        ({"available_nbytes": 16 * GIB}, "memory", r"17\.18 GB of memory .* 17\.18 GB are needed"),
    ],
)  # fmt: skip
def test_a_limit_of_process_or_machine_that_is_too_low_is_named(
    change: dict[str, int], limit: str, found: str
) -> None:
    problems = check_limits(16 * GIB, 16, DEVICE, replace(ROOMY, **change))
    assert [problem.limit for problem in problems] == [limit]
    assert re.search(found, problems[0].message), problems[0].message
    assert problems[0].remedy


def test_the_device_limits_count_and_size_of_regions() -> None:
    (count,) = check_limits(101 * MIB, 101, DEVICE, ROOMY)
    assert count.limit == "max_mr" and "takes 100 memory regions; 101" in count.message
    (size,) = check_limits(16 * GIB, 2, DEVICE, ROOMY)
    assert size.limit == "max_mr_size" and "4294967296 bytes; 8589934592" in size.message


def test_the_capability_lifts_memlock_and_nothing_else() -> None:
    limits = replace(ROOMY, memlock_nbytes=0, may_exceed_memlock=True, available_nbytes=0)
    assert [problem.limit for problem in check_limits(GIB, 1, DEVICE, limits)] == ["memory"]


def test_free_huge_pages_count_as_memory() -> None:
    limits = replace(ROOMY, available_nbytes=100 * MIB)
    assert check_limits(GIB, 1, DEVICE, limits)
    assert not check_limits(GIB, 1, DEVICE, limits, reserved_nbytes=GIB)


def test_all_problems_are_reported_at_once() -> None:
    limits = replace(ROOMY, memlock_nbytes=0, map_count=65_530, available_nbytes=0)
    device = DeviceLimits("fake0", 1, MIB)
    assert {problem.limit for problem in check_limits(GIB, 2, device, limits)} == {
        "memlock", "max_map_count", "max_mr", "max_mr_size", "memory",
    }  # fmt: skip


def test_what_is_gathered_is_what_the_system_says() -> None:
    limits = gather_limits()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert limits.memlock_nbytes == (None if soft == resource.RLIM_INFINITY else soft)
    assert limits.max_map_count == int(Path("/proc/sys/vm/max_map_count").read_text())
    assert 10 < limits.map_count < limits.max_map_count
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < limits.available_nbytes <= pages


@pytest.mark.usefixtures("root")  # it lowers its limit and drops its capabilities
def test_a_process_without_the_capability_has_the_limit_that_was_set() -> None:
    code = (
        "import os, resource\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "from controller.memory.limits import gather_limits\n"
        "limits = gather_limits()\n"
        "print(limits.memlock_nbytes, limits.may_exceed_memlock)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=30
    ).stdout
    assert output.split() == ["1048576", "False"]


def test_limits_of_a_control_group_and_those_above_it_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "job" / "task"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("5\n")
    (tmp_path / "job" / "memory.max").write_text(f"{10 * MIB}\n")
    (tmp_path / "job" / "memory.current").write_text(f"{4 * MIB}\n")
    membership = tmp_path / "cgroup"
    membership.write_text("1:cpu:/elsewhere\n0::/job/task\n")
    monkeypatch.setattr(module, "_GROUPS", tmp_path)
    monkeypatch.setattr(module, "_MEMBERSHIP", membership)
    assert gather_limits().available_nbytes == 6 * MIB
    (inner / "memory.max").write_text(f"{MIB}\n")
    assert gather_limits().available_nbytes == MIB - 5
    (inner / "memory.current").write_text(f"{2 * MIB}\n")
    assert gather_limits().available_nbytes == 0
    membership.write_text("1:cpu:/elsewhere\n")
    assert gather_limits().available_nbytes > 10 * MIB


def test_fork_support_is_what_libibverbs_tells_or_unknown() -> None:
    assert fork_support() in ("enabled", "disabled", "unneeded", "unknown")
