"""The ranks of a benchmark: what they tell is gathered, and the failure of one ends all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controller.allreduce import spawn
from controller.allreduce.bench_plan import BenchPlan
from controller.allreduce.bench_report import BenchReport
from controller.allreduce.spawn import RankError, run_spawned
from controller.errors import UsageError
from controller.ops import testbed as testbed_module

RESULT = (
    '{"event": "result", "result": {"bytes": 8, "count": 2, "dtype": "float32", "op": "sum", '
    '"root": -1, "algorithm": "ring", "in_place": true, "time_us": 5.0, "algbw_GBps": 0.1, '
    '"busbw_GBps": 0.2, "wrong": 0}}'
)
DONE = """echo '{"event": "done"}'"""
Ranks = Callable[..., BenchReport]


@pytest.fixture(scope="module")
def bed() -> Iterator[testbed_module.Testbed]:
    with testbed_module.network(3) as made:
        yield made


@pytest.fixture
def ranks(bed: testbed_module.Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Run three shell scripts in place of ranks."""

    def run(*scripts: str, progress: Callable[[int, int], None] = lambda *_: None) -> BenchReport:
        program = tmp_path / "python"
        cases = "\n".join(f"{rank})\n{script}\n;;" for rank, script in enumerate(scripts))
        program.write_text(f'#!/bin/sh\ncase "$RANK" in\n{cases}\nesac\n')
        program.chmod(0o755)
        monkeypatch.setattr(spawn.sys, "executable", str(program))
        return run_spawned(BenchPlan(), bed, progress)

    return run


def living(bed: testbed_module.Testbed) -> list[str]:
    """Processes that are still in the hosts."""
    return [
        pid for host in bed.hosts for pid in os.popen(f"ip netns pids {host.netns}").read().split()
    ]


def test_what_rank_0_tells_is_gathered_and_other_output_skipped(ranks: Ranks) -> None:
    told: list[tuple[int, int]] = []
    first = f"""
        echo 'a library says hello'
        echo '{{"event": "facts", "facts": {{"algorithm": "ring"}}}}'
        echo '{{"event": "progress", "done": 1, "total": 2}}'
        echo '{RESULT}'
        echo '[1, 2]'
        {DONE}"""
    report = ranks(first, DONE, DONE, progress=lambda *now: told.append(now))
    assert told == [(1, 2)]
    assert [result.bytes for result in report.results] == [8]
    assert report.facts["algorithm"] == "ring"
    assert report.ranks == 3


def test_every_rank_knows_its_place_and_where_to_meet(ranks: Ranks, tmp_path: Path) -> None:
    script = f'echo "$RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $5" >"{tmp_path}/$RANK"; {DONE}'
    ranks(script, script, script)
    lines = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [line[:3] for line in lines] == [[str(rank), "3", "0"] for rank in range(3)]
    (master,) = {line[3] for line in lines}
    assert master.startswith("unix:/")
    assert not Path(master.removeprefix("unix:")).parent.exists()


def test_an_error_of_one_rank_is_shown_with_its_remedy_and_ends_the_others(
    ranks: Ranks, bed: testbed_module.Testbed
) -> None:
    error = """echo '{"event": "error", "kind": "X", "message": "No device.", "remedy": "Buy one.",
        "exit_code": 4}' | tr -d '\\n'; echo; exit 4"""
    start_s = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks("sleep 60", error, "sleep 60")
    assert "Rank 1" in caught.value.message
    assert "No device." in caught.value.message
    assert caught.value.remedy == "Buy one."
    assert caught.value.exit_code == 4
    assert time.monotonic() - start_s < 30
    assert living(bed) == []


def test_the_rank_that_died_is_named_and_not_those_that_complain_about_it(ranks: Ranks) -> None:
    complaint = """sleep 0.3; echo '{"event": "error", "message": "Rank 2 died."}'; exit 1"""
    with pytest.raises(RankError, match=r"Rank 2 .* was ended by SIGKILL"):
        ranks(complaint, complaint, "kill -9 $$")


def test_a_crash_shows_the_end_of_what_the_rank_wrote(ranks: Ranks) -> None:
    crash = "for i in $(seq 100); do echo line $i >&2; done; exit 3"
    with pytest.raises(RankError) as caught:
        ranks(DONE, crash, DONE)
    assert "Rank 1" in caught.value.message
    assert "exited 3" in caught.value.message
    assert "line 100" in caught.value.message
    assert "line 50\n" not in caught.value.message


def test_a_rank_that_ends_without_saying_that_it_is_done_has_failed(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"Rank 2 .* exited 0"):
        ranks(DONE, DONE, "true")


def test_a_rank_that_does_not_end_after_its_last_word_is_ended(
    ranks: Ranks, bed: testbed_module.Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawn, "_END_S", 0.5)
    with pytest.raises(RankError, match=r"Rank 0 .*did not end"):
        ranks(f"{DONE}; exec >&-; sleep 60", DONE, DONE)
    assert living(bed) == []


def test_a_rank_that_leaves_a_process_behind_does_not_hold_up_the_end(
    ranks: Ranks, tmp_path: Path
) -> None:
    stays = f"sleep 60 & echo $! >{tmp_path}/stays"
    start_s = time.monotonic()
    for script, outcome in (
        (DONE, contextlib.nullcontext()),
        ("exit 5", pytest.raises(RankError, match=r"Rank 1 .* exited 5")),
    ):
        with outcome:
            ranks(DONE, f"{stays}; {script}", DONE)
        os.kill(int((tmp_path / "stays").read_text()), signal.SIGKILL)
    assert time.monotonic() - start_s < 30


def test_an_endless_line_is_not_kept(ranks: Ranks) -> None:
    endless = f"head -c 5000000 /dev/zero; echo; {DONE}"
    assert ranks(endless, DONE, DONE).ranks == 3


def test_real_ranks_without_a_device_say_that_there_is_none(bed: testbed_module.Testbed) -> None:
    with pytest.raises(RankError, match=r"Rank \d") as caught:
        run_spawned(BenchPlan(), bed)
    assert "device" in caught.value.message
    assert living(bed) == []


def test_a_root_that_is_no_rank_is_refused_before_any_rank_is_started(
    bed: testbed_module.Testbed,
) -> None:
    with pytest.raises(UsageError, match="--root is 3"):
        run_spawned(BenchPlan(collective="broadcast", ops=("none",), root=3), bed)
