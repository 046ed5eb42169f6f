"""The benchmark measures every program and counts every packet. No timing is asserted."""

from __future__ import annotations

import json
import struct

import pytest

from controller.dataplane import bench, layout
from controller.dataplane.bench_control import BenchControl
from controller.dataplane.bench_report import HOOKS, PACKETS, PROGRAMS, BenchReport
from controller.errors import InputError, StellarError

REPEAT = 600
ROUNDS = 2
FLOWS = (1, 100)


@pytest.fixture(scope="module")
def report() -> BenchReport:
    return bench.bench_dataplane(repeat=REPEAT, flows=FLOWS, rounds=ROUNDS)


def test_every_program_is_measured_at_every_hook(report: BenchReport) -> None:
    found = {(r.hook, r.packet, r.flows, r.program) for r in report.results}
    expected = {
        (hook, packet, flows, program)
        for hook in HOOKS
        for packet in PACKETS
        for flows in FLOWS
        for program in PROGRAMS
    }
    assert found == expected
    assert len(report.results) == len(expected)


def test_the_flow_table_gained_every_measured_packet(report: BenchReport) -> None:
    for result in report.results:
        expected = REPEAT * ROUNDS if result.program in ("observe", "full") else None
        assert result.counted_packets == expected, result


def test_lengths_tell_which_frames_are_cut(report: BenchReport) -> None:
    for result in report.results:
        if result.packet == "ack":
            assert result.wire_bytes == result.frame_bytes == 14 + 20 + 8 + 12 + 4 + 4
        else:
            assert result.wire_bytes == 14 + 20 + 8 + 12 + 16 + 4096 + 4
            assert (result.frame_bytes < result.wire_bytes) == result.hook.startswith("tc")


def test_json_has_the_documented_keys(report: BenchReport) -> None:
    document = json.loads(json.dumps(report.to_json()))
    keys = {"hook", "program", "packet", "flows", "ns_per_packet", "ns_median"}
    assert all(keys <= set(row) for row in document["results"])
    ratios = {(r["hook"], r["packet"], r["flows"]) for r in document["ratio_observe_to_lookup"]}
    assert len(ratios) == len(HOOKS) * len(PACKETS) * len(FLOWS)
    full = {(r["hook"], r["packet"], r["flows"]) for r in document["ratio_full_to_observe"]}
    assert full == ratios
    assert (document["ratio_limit_one_flow"], document["ratio_limit_full_egress"]) == (2.5, 2.0)
    assert {"cpu", "kernel", "bpf_jit"} <= set(document["machine"])


def test_text_fits_80_columns_and_shows_each_scenario(report: BenchReport) -> None:
    lines = report.to_text().splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line.startswith(HOOKS)]
    assert len(rows) == len(HOOKS) * len(PACKETS) * len(FLOWS)


def test_progress_ends_at_its_total() -> None:
    calls: list[tuple[int, int]] = []
    bench.bench_dataplane(
        progress=lambda done, total: calls.append((done, total)),
        repeat=10,
        flows=(1,),
        packets=("ack",),
        rounds=1,
    )
    assert [done for done, _ in calls] == list(range(len(HOOKS) + 1))
    assert calls[-1] == (len(HOOKS), len(HOOKS))


def test_packets_that_are_not_counted_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    original = bench.build_frame

    def other_port(*arguments: object, **options: object) -> bytes:
        frame = bytearray(original(*arguments, **options))  # type: ignore[arg-type]
        struct.pack_into(">H", frame, 36, 53)
        return bytes(frame)

    monkeypatch.setattr(bench, "build_frame", other_port)
    with pytest.raises(StellarError, match="0 flows, expected 1"):
        bench.bench_dataplane(repeat=10, flows=(1,), packets=("data4k",), rounds=1)


@pytest.mark.parametrize(
    "options", [{"repeat": 0}, {"rounds": 0}, {"flows": (0,)}, {"packets": ("jumbo",)}]
)
def test_impossible_arguments_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InputError):
        bench.bench_dataplane(**options)  # type: ignore[arg-type]


def test_a_full_run_that_did_not_act_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BenchControl, "take_flows", lambda *_: None)
    with pytest.raises(StellarError, match=r"full at tc_egress .* 0 packets of the job"):
        bench.bench_dataplane(repeat=10, flows=(1,), packets=("data4k",), rounds=1)


def test_more_flows_than_slots_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MAX_CONTROLS", 4)
    report = bench.bench_dataplane(repeat=100, flows=(10,), packets=("data4k",), rounds=1)
    assert [r.counted_packets for r in report.results if r.program == "full"] == [100] * 3
