"""The report of the benchmark: columns, bandwidths by nccl-tests' definitions, JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from controller.allreduce.bench_report import BenchReport, BenchResult, RandomResult
from controller.allreduce.reduction import Collective


def result(nbytes: int = 4 << 20, time_us: float = 1000.0, **changes: Any) -> BenchResult:
    made = BenchResult.of(
        Collective.ALL_REDUCE, 4, nbytes=nbytes, time_us=time_us, count=nbytes // 4,
        dtype="float32", op="sum", root=-1, algorithm="ring", in_place=False, wrong=0,
    )  # fmt: skip
    return replace(made, **changes)


def report(*results: BenchResult, **changes: Any) -> BenchReport:
    facts = {"devices": ["rx0, 10.78.0.1", "rx1, 10.78.0.2"], "algorithm": "auto",
             "chunk_bytes": 131072, "kernel": "7.3.4"}  # fmt: skip
    return BenchReport(4, "all_reduce", results, facts, **changes)


RANDOM = RandomResult(
    operations=10_000, wrong_operations=2, elements=10**12, wrong=3, seed=7, seconds=61.25,
    by_collective={"all_reduce": 2500, "all_gather": 2500, "broadcast": 2500,
                   "reduce_scatter": 2500},
)  # fmt: skip


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        (Collective.ALL_REDUCE, 2, 1.0),
        (Collective.ALL_REDUCE, 3, 4 / 3),
        (Collective.ALL_REDUCE, 8, 1.75),
        (Collective.REDUCE_SCATTER, 4, 0.75),
        (Collective.ALL_GATHER, 4, 0.75),
        (Collective.BROADCAST, 4, 1.0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(
    collective: Collective, ranks: int, factor: float
) -> None:
    # 1 GB in 0.1 s
    made = BenchResult.of(
        collective, ranks, nbytes=10**9, time_us=1e5, count=0, dtype="int8", op="sum", root=-1,
        algorithm="ring", in_place=True, wrong=None,
    )  # fmt: skip
    assert made.algbw_GBps == pytest.approx(10.0)
    assert made.busbw_GBps == pytest.approx(10.0 * factor)


def test_no_bytes_have_no_bandwidth() -> None:
    made = BenchResult.of(
        Collective.ALL_REDUCE, 1, nbytes=0, time_us=0.0, count=0, dtype="int8", op="sum", root=-1,
        algorithm="ring", in_place=True, wrong=0,
    )  # fmt: skip
    assert (made.algbw_GBps, made.busbw_GBps) == (0.0, 0.0)


def test_the_json_document_has_the_promised_keys() -> None:
    document = json.loads(
        json.dumps(
            report(
                result(),
                limit_GBps=0.07,
                peers={"gloo": 0.05},
                peer_results={"gloo": {4 << 20: 0.05}},
            ).to_json()
        )
    )
    assert document["ranks"] == 4
    assert {
        "bytes", "dtype", "op", "algorithm", "time_us", "algbw_GBps", "busbw_GBps", "wrong"
    } <= set(document["results"][0])  # fmt: skip
    assert document["limit_GBps"] == 0.07
    assert document["peers"] == {"gloo": 0.05}
    assert document["peer_results"] == {"gloo": [{"bytes": 4 << 20, "busbw_GBps": 0.05}]}
    assert document["wrong"] == 0


def test_what_was_not_measured_is_null_and_not_zero() -> None:
    document = report(result(wrong=None)).to_json()
    assert document["limit_GBps"] is None
    assert document["wrong"] is None
    assert document["results"][0]["wrong"] is None
    assert document["random"] is None


def test_every_line_fits_80_columns_and_no_column_touches_another() -> None:
    measured = ((8, 0.5), (1 << 20, 99_999.99), (8 << 30, 5e8), (8 << 30, 1e5))
    rows = [result(size, time_us, dtype="bfloat16", op="prod", root=11, count=size)
            for size, time_us in measured]  # fmt: skip
    for row in rows:
        assert len(row.row().split()) == 10, row.row()
    text = report(
        *rows, random=RANDOM, limit_GBps=123.4567, peers={"gloo": 1.0, "openmpi-ucx": 2.0},
        peer_results={"gloo": {8: 101.1}, "openmpi-ucx": {8: 102.2}},
    ).to_text()  # fmt: skip
    assert max(len(line) for line in text.splitlines()) <= 80, text


def test_columns_stand_below_their_names() -> None:
    lines = report(result(), result(in_place=True)).to_text().splitlines()
    head = next(line for line in lines if "algbw" in line)
    row = next(line for line in lines if line.startswith("    4194304"))
    for name, value in (("size", "4194304"), ("count", "1048576"), ("type", "float32"),
                        ("op", "sum"), ("root", "-1"), ("time", "1000.00"), ("algbw", "4.1943"),
                        ("busbw", "6.2915"), ("#wrong", "0")):  # fmt: skip
        assert row.rindex(value) + len(value) == head.index(name) + len(name)


def test_small_bandwidths_of_a_laboratory_are_still_visible() -> None:
    # 64 KiB in 20 ms: 3.3 MB/s
    assert "0.0033" in result(65536, 20_000.0).row()


def test_wrong_elements_are_counted_and_said_loudly() -> None:
    good, bad = report(result()), report(result(wrong=2), result(wrong=1), random=RANDOM)
    assert good.wrong == 0
    assert "# Out of bounds values: 0 OK" in good.to_text()
    assert bad.wrong == 6
    assert "# Out of bounds values: 6 FAILED" in bad.to_text()


def test_without_a_check_the_report_does_not_say_ok() -> None:
    text = report(result(wrong=None)).to_text()
    assert "N/A" in text
    assert "Out of bounds" not in text


def test_the_average_is_that_of_all_results() -> None:
    made = report(result(time_us=1000.0), result(time_us=2000.0))
    assert made.average_busbw_GBps == pytest.approx((6.291456 + 3.145728) / 2)


def test_ranks_devices_algorithm_and_chunk_are_named_above_the_table() -> None:
    head = "\n".join(report(result()).head())
    for text in ("all_reduce", "4 ranks", "auto", "131072", "7.3.4", "rank 1: rx1, 10.78.0.2"):
        assert text in head


def test_sizes_of_each_algorithm_are_told_where_there_were_two() -> None:
    text = report(
        result(1024, algorithm="halving-doubling"), result(4096, algorithm="halving-doubling"),
        result(1 << 20),
    ).to_text()  # fmt: skip
    assert "halving-doubling: 1024 .. 4096 B" in text
    assert "ring: 1048576 B" in text


def test_ours_and_others_stand_beside_the_limit() -> None:
    text = report(
        result(busbw_GBps=0.06), result(busbw_GBps=0.063, in_place=True), limit_GBps=0.07,
        peer_results={"openmpi-ucx": {4 << 20: 0.035}},
    ).with_notes("gloo is left out: torch is not installed").to_text()  # fmt: skip
    # The better of our two.
    assert "    4194304     0.0630 (0.90)     0.0350 (0.50)" in text
    assert "           stellar       openmpi-ucx" in text
    assert "# gloo is left out: torch is not installed" in text


def test_random_operations_report_their_seed() -> None:
    lines = "\n".join(RANDOM.lines())
    assert "10,000 random operations in 61.2 s (seed 7)" in lines
    assert "3 wrong in 2 operations" in lines
