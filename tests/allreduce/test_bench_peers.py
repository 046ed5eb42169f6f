"""The yardsticks of the benchmark: what is read from tools, and what is said without them."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from controller.allreduce import bench_limit, bench_peers
from controller.allreduce.bench_limit import Tool, measure_limit
from controller.allreduce.bench_peers import measure_peers
from controller.allreduce.bench_plan import BenchPlan
from controller.allreduce.bench_report import BenchReport
from controller.errors import StellarError, UnsupportedError
from controller.ops import testbed as testbed_module

HOSTS = tuple(
    testbed_module.BedHost(rank, f"ns{rank}", "eth0", f"10.78.0.{rank + 1}", f"port{rank}")
    for rank in range(2)
)
BED = testbed_module.Testbed("switch", HOSTS, 4200)
REPORT = BenchReport(2, "all_reduce")


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)


def test_implementations_that_are_missing_are_left_out_with_the_remedy(
    nothing_installed: None,
) -> None:
    report = measure_peers(BenchPlan(), BED, REPORT)
    assert report.peers == {}
    gloo, openmpi = report.notes
    assert "gloo is left out: torch is not installed (pip install torch)" in gloo
    assert "openmpi-ucx is left out: mpirun is not installed (apt-get install" in openmpi


def test_without_ib_write_bw_there_is_no_limit(nothing_installed: None) -> None:
    with pytest.raises(UnsupportedError, match="ib_write_bw is not installed"):
        measure_limit(BED)


def test_one_host_is_no_ring() -> None:
    with pytest.raises(StellarError, match="two hosts"):
        measure_limit(testbed_module.Testbed("switch", HOSTS[:1], 4200))


def test_busbw_of_others_follows_from_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def gloo(_bed: Any, arguments: list[str]) -> dict[int, float]:
        asked.append(arguments)
        return {1000: 1.0, 4_000_000: 2e3}

    def openmpi(_bed: Any, _arguments: list[str]) -> dict[int, float]:
        raise bench_peers._PeerError("no luck")

    monkeypatch.setattr(bench_peers, "_gloo", gloo)
    monkeypatch.setattr(bench_peers, "_openmpi", openmpi)
    bed = testbed_module.Testbed("switch", HOSTS * 2, 4200)
    report = measure_peers(BenchPlan(sizes=(2, 1003, 4_000_000), iters=100), bed, REPORT)
    # Whole elements of four bytes, and no more iterations than an average needs.
    assert asked == [["5", "1000", "4000000"]]
    # 4 ranks: busbw is 1.5 times bytes over time.
    assert report.peer_results == {"gloo": {1000: 1.5, 4_000_000: 3.0}}
    assert report.peers == {"gloo": 3.0}
    assert report.notes == ("openmpi-ucx is left out: no luck",)


def test_other_collectives_are_not_compared() -> None:
    report = measure_peers(BenchPlan(collective="broadcast", ops=("none",)), BED, REPORT)
    assert report.peers == {}
    assert "only all_reduce" in report.notes[0]


@pytest.mark.parametrize("output", ["", "Segmentation fault", '{"a": 1}', '["x"]', "7"])
def test_output_without_a_result_is_quoted(output: str) -> None:
    with pytest.raises(bench_peers._PeerError, match="printed no result") as caught:
        bench_peers._times_us(output)
    assert output in caught.value.message


# ---- ib_write_bw ----

PRINTED = """\
Correlation coefficient r^2: 0.71476 < 0.9
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      700              0.00               0.00               0.000000
"""


@pytest.fixture
def client() -> Iterator[Any]:
    """A tool that printed a text and ended with a status."""
    with tempfile.TemporaryFile() as printed:

        def make(text: str, status: int = 0) -> Tool:
            printed.write(text.encode())
            process = subprocess.Popen(["sh", "-c", f"exit {status}"])
            return Tool(HOSTS[0], process, printed)

        yield make


def test_goodput_is_that_of_the_messages_counted_between_the_margins(client: Any) -> None:
    # 700 messages of 64 KiB in 5 - 2 s, also where the tool could not tell a bandwidth.
    assert bench_limit._bandwidth(client(PRINTED), 5) == pytest.approx(700 * 65536 / 3 / 1e9)


def test_a_tool_that_failed_or_printed_nothing_is_quoted(client: Any) -> None:
    with pytest.raises(StellarError, match=r"ns0 exited 1:\nUnable to init"):
        bench_limit._bandwidth(client("Unable to init", 1), 5)


def test_a_tool_without_a_result_is_quoted(client: Any) -> None:
    with pytest.raises(StellarError, match="printed no result:\n hello"):
        bench_limit._bandwidth(client(" hello"), 5)
