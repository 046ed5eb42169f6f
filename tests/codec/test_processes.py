"""Facts about processes from /proc: a living one, a dead one, and what is hard to read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.agent.processes import read_process


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has set its own name and waits to be ended."""
    code = "open('/proc/self/comm', 'w').write('trainer'); print(); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"STELLAR_JOB": "llama", "WITH": "a=b=c"},
    )
    assert process.stdout
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_a_living_process_is_read(child: subprocess.Popen[bytes]) -> None:
    facts = read_process(child.pid)
    assert facts is not None
    assert (facts.pid, facts.uid) == (child.pid, os.getuid())
    assert facts.command == "trainer"
    assert facts.argv0 == sys.executable
    assert facts.cgroup.startswith("/")
    assert facts.environment["STELLAR_JOB"] == "llama"
    assert facts.environment["WITH"] == "a=b=c"


def test_a_process_that_is_gone_has_no_facts(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    assert read_process(child.pid) is None


@pytest.mark.parametrize("pid", [0, -1, 1 << 30])
def test_a_number_that_no_process_has_has_no_facts(pid: int) -> None:
    assert read_process(pid) is None


def proc_entry(tmp_path: Path, **files: bytes) -> Path:
    directory = tmp_path / "17"
    directory.mkdir()
    contents = {
        "status": b"Name:\tx\nUid:\t1000\t0\t0\t0\n",
        "comm": b"x\n",
        "cmdline": b"/usr/bin/x\0-v\0",
        "cgroup": b"0::/a\n",
        "environ": b"A=1\0",
    }
    for name, content in (contents | files).items():
        (directory / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"0::/user.slice/x.scope\n", "/user.slice/x.scope"),
        (b"12:memory:/m\n1:name=systemd:/s\n0::/\n", "/s"),
        (b"1:name=systemd:/s\n0::/u\n", "/u"),
        (b"0::/\n", "/"),
        (b"5:cpu,cpuacct:/only\n", ""),
        (b"0::/with:colon\n", "/with:colon"),
    ],
)
def test_the_control_group_is_the_unified_one_or_systemds(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    facts = read_process(17, proc_entry(tmp_path, cgroup=content))
    assert facts is not None and facts.cgroup == expected


def test_a_huge_environment_is_read_in_part_without_a_cut_variable(tmp_path: Path) -> None:
    whole = b"FIRST=1\0" + b"".join(b"V%06d=%s\0" % (n, b"x" * 100) for n in range(5000))
    facts = read_process(17, proc_entry(tmp_path, environ=whole))
    assert facts is not None
    assert facts.environment["FIRST"] == "1"
    assert 2000 < len(facts.environment) < 5000
    assert {len(value) for name, value in facts.environment.items() if name != "FIRST"} == {100}


def test_odd_environments_are_read_as_getenv_would(tmp_path: Path) -> None:
    facts = read_process(17, proc_entry(tmp_path, environ=b"A=1\0A=2\0junk\0B=\xff\0\0\0C=3"))
    assert facts is not None
    assert facts.environment == {"A": "1", "B": os.fsdecode(b"\xff"), "C": "3"}


def test_the_real_user_counts_and_a_kernel_thread_has_no_first_argument(tmp_path: Path) -> None:
    facts = read_process(17, proc_entry(tmp_path, cmdline=b"", environ=b""))
    assert facts is not None
    assert (facts.uid, facts.argv0, facts.environment) == (1000, "", {})


def test_a_process_that_cannot_be_read_completely_has_no_facts(tmp_path: Path) -> None:
    proc = proc_entry(tmp_path, status=b"Name:\tx\n")
    assert read_process(17, proc) is None
    (proc / "17" / "environ").unlink()
    assert read_process(17, proc) is None
