"""`controller pool status`: pools show themselves, and files of others are not trusted."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from controller.cli_pool import pool_group
from controller.memory import PoolConfig, RegistrationPool
from controller.memory import status_files as module
from controller.memory.status_files import (
    StatusFile,
    own_directory,
    read_pools,
    readable_directories,
    start_ticks,
)
from controller.telemetry.pool_views import pools_text
from tests.memory.fakes import MIB, FakeRegistrar
from tests.waiting import wait


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's pools publish themselves."""
    path = tmp_path / "run"
    monkeypatch.setenv("STELLAR_RUN_DIR", str(path))
    return path


def small_pool(**changes: Any) -> RegistrationPool:
    arguments: dict[str, Any] = {"capacity_nbytes": MIB, "cache_nbytes": 0, "name": "gradients"}
    return RegistrationPool(FakeRegistrar(), PoolConfig(**(arguments | changes)))


def run(run_dir: Path, *arguments: str) -> str:
    result = CliRunner().invoke(pool_group, ["status", *arguments], obj=run_dir)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_pool_shows_itself_from_its_making_to_its_end(run_dir: Path) -> None:
    with small_pool() as pool, pool.lease(300_000, "bucket"):
        (file,) = (run_dir / "pools").iterdir()
        assert file.name.startswith(f"{os.getpid()}-")
        assert file.stat().st_mode & 0o777 == 0o600
        assert (run_dir / "pools").stat().st_mode & 0o777 == 0o700
        # Written every second: the lease shows up by itself.
        wait(lambda: read_pools([run_dir / "pools"])[0]["stats"]["leases_out"] == 1)
        (shown,) = json.loads(run(run_dir, "--json"))["pools"]
        assert shown["name"] == "gradients" and shown["pid"] == os.getpid()
        assert shown["device"] == "fake0" and shown["capacity_nbytes"] == MIB
        assert shown["leased_nbytes"] == 512 << 10
        assert sum(shown["present_nbytes"].values()) == MIB
        assert shown["stats"]["pinned_nbytes"] == MIB
        pool.arena.close(force=True)
    assert not list((run_dir / "pools").iterdir())
    assert run(run_dir).startswith("no pools")


def test_the_table_is_at_most_80_columns_wide_and_tells_what_matters(run_dir: Path) -> None:
    with small_pool(name="a pool with a name of sixty-four characters, which is the limit") as pool:
        pool.lease(4096, "k").release()
        document = pool.describe() | {"pid": 4194304, "device": "mlx5_bond_0_with_a_long_name"}
        huge = json.loads(json.dumps(document))
        huge["cache_nbytes"], huge["cache_regions"], huge["policy"] = 1 << 40, 99_999_999, "heat"
        huge["stats"]["evictions"] = dict.fromkeys(("bytes", "regions", "owner_died"), 10**12)
        huge["stats"] |= {"gets": 10**15, "hits": 10**15, "leases": 10**15, "registrations": 10**9}
        huge["stats"]["revocations"]["failed"] = 3
        text = pools_text([document, huge])
    assert max(len(line) for line in text.splitlines()) <= 80, text
    for part in (
        "4194304", "100.0%", "evicted: bytes 1,000,000,000,000", "when asked to: 3", "leases: 1,",
        "chunks: 1, 1.049 MB each",
    ):  # fmt: skip
        assert part in " ".join(text.split()), text


def test_a_forked_child_neither_rewrites_nor_removes_its_parents_file(run_dir: Path) -> None:
    with small_pool() as pool:
        (file,) = (run_dir / "pools").iterdir()
        pid = os.fork()
        if pid == 0:
            pool.close(force=True)
            os._exit(0 if file.exists() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert file.exists()


def test_the_file_of_a_killed_process_is_passed_over_and_removed(run_dir: Path) -> None:
    code = (
        "import sys, time\n"
        "from tests.memory.fakes import FakeRegistrar, MIB\n"
        "from controller.memory import PoolConfig, RegistrationPool\n"
        "pool = RegistrationPool(FakeRegistrar(), PoolConfig(MIB, cache_nbytes=0, name='other'))\n"
        "print('made', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"made\n"
        (shown,) = read_pools([run_dir / "pools"])
        assert shown["pid"] == process.pid and shown["name"] == "other"
        process.send_signal(signal.SIGKILL)
    assert list((run_dir / "pools").iterdir())
    assert read_pools([run_dir / "pools"]) == []
    assert not list((run_dir / "pools").glob("*.json"))


def test_a_process_that_ends_without_closing_its_pool_leaves_no_file(run_dir: Path) -> None:
    code = (
        "from tests.memory.fakes import FakeRegistrar, MIB\n"
        "from controller.memory import PoolConfig, RegistrationPool\n"
        "pool = RegistrationPool(FakeRegistrar(), PoolConfig(MIB, cache_nbytes=0))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert (run_dir / "pools").is_dir() and not list((run_dir / "pools").iterdir())


def valid(run_dir: Path) -> dict[str, Any]:
    """The document of a pool of this process."""
    with small_pool():
        (file,) = (run_dir / "pools").glob("*.json")
        return dict(json.loads(file.read_text()))


def test_a_number_of_a_process_that_is_used_again_is_not_taken_for_the_pool(run_dir: Path) -> None:
    document = valid(run_dir)
    file = run_dir / "pools" / f"{os.getpid()}-0.json"
    file.write_text(json.dumps(document))
    assert len(read_pools([run_dir / "pools"])) == 1
    file.write_text(json.dumps(document | {"start_ticks": document["start_ticks"] - 1}))
    assert read_pools([run_dir / "pools"]) == []
    assert not file.exists()


MALFORMED: list[Callable[[dict[str, Any]], Any]] = [
    lambda _: [],
    lambda _: None,
    lambda document: document | {"schema": 2},
    lambda document: document | {"pid": -1},
    lambda document: document | {"pid": 1},
    lambda document: document | {"pid": True},
    lambda document: document | {"name": "x" * 1000},
    lambda document: document | {"name": 5},
    lambda document: document | {"capacity_nbytes": 1.5},
    lambda document: document | {"capacity_nbytes": 1 << 70},
    lambda document: document | {"updated_s": float("nan")},
    lambda document: document | {"pages": "4k"},
    lambda document: document | {"numa_nodes": [-2]},
    lambda document: document | {"stats": None},
    lambda document: document | {"stats": {**document["stats"], "gets": "many"}},
    lambda document: document | {"stats": {**document["stats"], "evictions": {"bytes": -1}}},
    lambda document: document | {"stats": {**document["stats"], "evictions": [1]}},
    lambda document: {key: value for key, value in document.items() if key != "device"},
    lambda document: document | {"padding": "x" * (70 << 10)},
]


@pytest.mark.parametrize("spoil", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_file_is_passed_over_and_left_alone(
    run_dir: Path, spoil: Callable[[dict[str, Any]], Any]
) -> None:
    document = valid(run_dir)
    good = run_dir / "pools" / f"{os.getpid()}-1.json"
    good.write_text(json.dumps(document))
    bad = run_dir / "pools" / f"{os.getpid()}-0.json"
    bad.write_text(json.dumps(spoil(document)))
    assert len(read_pools([run_dir / "pools"])) == 1
    assert bad.exists()


def test_what_is_no_plain_file_of_a_pool_does_not_hold_the_reader_up(run_dir: Path) -> None:
    document = json.dumps(valid(run_dir))
    pools = run_dir / "pools"
    (pools / "elsewhere").write_text(document)
    (pools / f"{os.getpid()}-0.json").symlink_to(pools / "elsewhere")
    os.mkfifo(pools / f"{os.getpid()}-1.json")
    (pools / f"{os.getpid()}-2.json").mkdir()
    (pools / f"{os.getpid()}-3.json").write_bytes(b"\xff\x00")
    (pools / f"{os.getpid()}-4.json").write_text("[" * 60_000)
    (pools / f"{os.getpid()}-5.json").write_text("")
    (pools / "0-1.json").write_text(document)
    (pools / "notes.txt").write_text(document)
    assert read_pools([pools, run_dir / "missing"]) == []
    assert len(list(pools.iterdir())) == 9


def test_names_with_control_characters_do_not_reach_the_terminal(run_dir: Path) -> None:
    document = valid(run_dir) | {"name": "\x1b[2Jred\n", "command": "a\tb"}
    (run_dir / "pools" / f"{os.getpid()}-0.json").write_text(json.dumps(document))
    (shown,) = read_pools([run_dir / "pools"])
    assert shown["name"] == "?[2Jred?" and shown["command"] == "a?b"
    assert "\x1b" not in run(run_dir)


def test_a_pool_works_where_its_status_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STELLAR_RUN_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    with caplog.at_level(logging.DEBUG, module.__name__), small_pool() as pool:
        pool.lease(1).release()
        wait(lambda: "not published" in caplog.text)
        time.sleep(0.1)  # tried again, and not logged again
    assert len([record for record in caplog.records if "not published" in record.message]) == 1


def test_a_pool_works_where_its_status_cannot_even_be_described(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise ZeroDivisionError("no status")

    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    with caplog.at_level(logging.DEBUG, module.__name__):
        status = StatusFile(refuse, run_dir / "pools")
        wait(lambda: "no status" in caplog.text)
        time.sleep(0.1)  # tried again, and not logged again
        status.close()
    assert len([record for record in caplog.records if "no status" in record.message]) == 1


def test_a_pool_without_a_thread_for_its_status_publishes_none(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(module.threading.Thread, "start", refuse)
        status = StatusFile(lambda: {"name": "x"}, run_dir / "pools")
    assert not list((run_dir / "pools").iterdir())
    status.close()


@pytest.mark.parametrize("trap", ["link", "group", "others"])
def test_nothing_is_written_where_others_could_have_put_a_link_or_a_file(
    run_dir: Path, tmp_path: Path, trap: str
) -> None:
    run_dir.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    pools = run_dir / "pools"
    if trap == "link":
        pools.symlink_to(elsewhere)
    else:
        pools.mkdir()
        pools.chmod(0o770 if trap == "group" else 0o707)
    with small_pool() as pool:
        pool.lease(1).release()
        assert not list(pools.iterdir()) and not list(elsewhere.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_file_of_another_user_than_the_process_is_passed_over(run_dir: Path) -> None:
    document = valid(run_dir)
    file = run_dir / "pools" / f"{os.getpid()}-0.json"
    file.write_text(json.dumps(document))
    file.chmod(0o644)
    assert len(read_pools([run_dir / "pools"])) == 1
    os.chown(file, 12345, -1)
    assert read_pools([run_dir / "pools"]) == []
    assert file.exists()


def test_root_may_tell_of_every_process_and_a_user_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert module._may_own(os.geteuid(), os.getpid()) and module._may_own(0, os.getpid())
    assert not module._may_own(12345, os.getpid())
    assert not module._may_own(12345, 1 << 30)


def test_a_directory_that_is_removed_comes_back(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    with small_pool():
        (file,) = (run_dir / "pools").glob("*.json")
        wait(lambda: not list((run_dir / "pools").glob(".*.new")))
        file.unlink()
        wait(file.exists)


def test_a_status_of_a_pool_that_is_gone_goes_with_it(run_dir: Path) -> None:
    alive = [True]
    status = StatusFile(lambda: {"name": "x"} if alive else None, run_dir / "pools")
    assert status.path is not None and status.path.exists()
    alive.clear()
    wait(lambda: not status.path.exists())
    status.close()


def test_where_a_pool_publishes_depends_on_who_runs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert own_directory() == tmp_path / "run" / "pools"
    monkeypatch.delenv("STELLAR_RUN_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert own_directory() == Path("/run/user/1000/stellar/pools")
    assert readable_directories(tmp_path) == [
        tmp_path / "pools", Path("/run/user/1000/stellar/pools"),
    ]  # fmt: skip
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert own_directory() is None
    assert readable_directories(tmp_path) == [tmp_path / "pools"]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert own_directory() == Path("/run/stellar/pools")
    assert readable_directories(Path("/run/stellar"))[0] == Path("/run/stellar/pools")


def test_a_process_is_known_by_its_start_time() -> None:
    ticks = start_ticks(os.getpid())
    assert ticks is not None and ticks > 0 and ticks == start_ticks(os.getpid())
    assert start_ticks(1 << 30) is None
