"""Each format of traces: what is read of it, and that its content alone tells what it is."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from controller.errors import InputError
from controller.iteration.series import Trace
from controller.iteration.traces import has_times, read_trace, require_times
from tests.iteration import fixtures


def read(tmp_path: Path, content: str | bytes, packed: bool = False) -> Trace:
    # A name that says something else than the content.
    return read_trace(fixtures.write(tmp_path / "trace.png", content, packed))


@pytest.mark.parametrize("told", ["kernel", "params", "annotation"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_profiler_trace_gives_operation_bytes_and_step_of_each_kernel(
    tmp_path: Path, told: str, packed: bool
) -> None:
    trace = read(tmp_path, fixtures.kineto_json(fixtures.kineto_events(told=told)), packed)
    assert trace.source == "kineto"
    assert {one.op for one in trace.collectives} == {"all_reduce"}
    assert [one.bytes for one in trace.collectives] == 3 * [
        4 * elements for elements in fixtures.RESNET50_ELEMENTS
    ]
    assert [one.iteration for one in trace.collectives] == [5] * 5 + [6] * 5 + [7] * 5
    # Kernels begin 500 us after the step, one every 40.5 us, and take 30.125 us.
    assert trace.collectives[6].start_ns == 1_540_500
    assert trace.collectives[6].end_ns == 1_570_625
    expected = "" if told == "annotation" else "pg0 x2"
    assert {one.communicator for one in trace.collectives} == {expected}


def test_a_kernel_without_launch_has_its_name_only(tmp_path: Path) -> None:
    events = fixtures.kineto_events(steps=1, told="name")
    events = [event for event in events if event.get("cat") not in ("cpu_op", "user_annotation")]
    trace = read(tmp_path, json.dumps(events))
    assert {(one.op, one.bytes) for one in trace.collectives} == {("all_reduce", None)}
    assert any("bytes unknown" in note for note in trace.notes)


def test_times_of_a_profiler_trace_are_exact_at_the_age_of_the_epoch(tmp_path: Path) -> None:
    # 1.7e15 us in a double has steps of 0.25 us.
    text = fixtures.kineto_json(fixtures.kineto_events(steps=2, elements=(10,)))
    text = text.replace('"ts": 600.0', '"ts": 1711964646000000.123')
    text = text.replace('"ts": 1600.0', '"ts": 1711964646000001.125')
    first, second = read(tmp_path, text).collectives
    assert second.start_ns - first.start_ns == 1_002


def test_a_coalesced_list_of_tensors_counts_whole(tmp_path: Path) -> None:
    events = fixtures.kineto_events(steps=1, elements=(1,), told="annotation")
    annotation = next(event for event in events if event["name"] == "nccl:all_reduce")
    annotation["args"] = {
        "Input Dims": [[[8, 4], [2]], []],
        "Input type": ["GenericList[Tensor(c10::Half),Tensor(c10::Half)]", "Scalar"],
    }
    assert [one.bytes for one in read(tmp_path, json.dumps(events)).collectives] == [68]


def test_of_several_gpus_the_busiest_is_read(tmp_path: Path) -> None:
    events = fixtures.kineto_events(steps=1)
    other = next(event for event in events if event.get("cat") == "kernel")
    other["args"]["device"] = 1
    trace = read(tmp_path, json.dumps(events))
    assert len(trace.collectives) == len(fixtures.RESNET50_ELEMENTS) - 1
    assert "only GPU 0 of 2 is read" in trace.notes


@pytest.mark.parametrize(("with_attributes", "size"), [(False, 4), (True, 2)])
def test_an_execution_trace_gives_each_collective_once_in_order(
    tmp_path: Path, with_attributes: bool, size: int
) -> None:
    trace = read(tmp_path, fixtures.host_trace_json(with_attributes))
    assert trace.source == "chakra"
    assert [(one.op, one.bytes) for one in trace.collectives] == [
        ("all_to_all", size * 6_144),
        ("all_reduce", size * 394_241),
    ]
    assert {one.communicator for one in trace.collectives} == {"pg3 x16" if with_attributes else ""}


def test_a_graph_for_the_feeder_gives_its_kernels_and_not_their_calls(tmp_path: Path) -> None:
    kernel = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)"
    nodes = [
        {"Id": 1, "Name": "aten::mm(0)", "NodeType": 4, "runtime": 9, "is_cpu_op": True},
        {"Id": 2, "Name": "c10d::allreduce_(0)", "NodeType": 7, "runtime": 5, "is_cpu_op": True},
        {"Id": 3, "Name": kernel, "NodeType": 7, "runtime": 5572, "is_cpu_op": False},
    ]
    trace = read(tmp_path, json.dumps({"workload_graph": nodes}))
    assert [(one.op, one.end_ns) for one in trace.collectives] == [("all_reduce", 5_572_000)]
    assert any("how many bytes" in note for note in trace.notes)


@pytest.mark.parametrize("timed", [False, True])
def test_protobuf_as_json_is_read_with_its_times_where_it_has_them(
    tmp_path: Path, timed: bool
) -> None:
    trace = read(tmp_path, fixtures.protobuf_as_json(timed))
    assert [one.bytes for one in trace.collectives] == [1000, 1001, 1002, 1003]
    assert {one.op for one in trace.collectives} == {"reduce_scatter"}
    assert has_times(trace) is timed
    starts_us = [one.start_ns // 1000 for one in trace.collectives]
    assert starts_us == ([0, 1000, 2000, 3000] if timed else [0, 0, 0, 0])


def test_a_trace_without_times_says_so_and_is_refused_where_times_are_needed(
    tmp_path: Path,
) -> None:
    trace = read(tmp_path, fixtures.host_trace_json())
    assert not has_times(trace)
    assert any("not say when" in note for note in trace.notes)
    with pytest.raises(InputError, match=r"x\.json \(chakra\) says which .* not when"):
        require_times(trace, "x.json")


def stamped_log(stamp: str, steps: int = 4) -> str:
    """Two ranks; rank 0 makes one call more. `stamp` has %s for the seconds."""
    lines = ["node0:615:615 [0] NCCL INFO Bootstrap : Using eth0\n"]
    for step in range(steps):
        lines += [
            fixtures.nccl_line(2 * step, stamp % f"{step:02d}", 0),
            fixtures.nccl_line(2 * step, stamp % f"{step:02d}", 1),
        ]
    return "".join([*lines, fixtures.nccl_line(99, stamp % "50", 0, "ReduceScatter", 10)])


@pytest.mark.parametrize(
    "stamp",
    [
        "[2024-05-22 17:15:%s] ",
        "[2024-05-22 17:15:%s.250000] ",
        "2024-05-22T17:15:%s.250Z ",
        "17:15:%s,250 ",
        "17163982%s.250 ",
        "[1,0]<stdout>:[2024-05-22 17:15:%s] ",
    ],
)
def test_a_log_gives_the_calls_of_one_process_with_their_time_stamps(
    tmp_path: Path, stamp: str
) -> None:
    trace = read(tmp_path, stamped_log(stamp))
    assert trace.source == "nccl-log"
    assert [one.start_ns // 10**9 for one in trace.collectives] == [0, 1, 2, 3, 50]
    assert [one.bytes for one in trace.collectives] == 4 * [4 * 7_382_228] + [128 * 4 * 10]
    assert trace.collectives[0].communicator == "0x78cfda045840 x128"
    assert "calls of node0:615 GPU 0, one of 2" in trace.notes
    coarse = ".25" not in stamp and ",25" not in stamp
    assert any("too coarse" in note for note in trace.notes) is coarse


@pytest.mark.parametrize(
    ("op", "name", "size"),
    [
        ("AllGather", "all_gather", 40),
        ("ReduceScatter", "reduce_scatter", 128 * 40),
        ("AlltoAll", "all_to_all", 128 * 40),
        ("Send", "send_recv", 40),
        ("Reduce", "unknown", 40),
    ],
)
def test_bytes_of_a_logged_call_are_the_input_of_the_rank(
    tmp_path: Path, op: str, name: str, size: int
) -> None:
    (call,) = read(tmp_path, fixtures.nccl_line(1, op=op, count=10)).collectives
    assert (call.op, call.bytes) == (name, size)


def test_a_log_is_known_where_much_else_comes_first(tmp_path: Path) -> None:
    before = "".join(f"epoch 0, loss 1.{number}\n" for number in range(10_000)).encode()
    log = fixtures.nccl_line(1, "17:15:01 ") + fixtures.nccl_line(2, "17:15:02 ")
    trace = read(tmp_path, before + b"50 %\xff\x80\n" + log.encode())
    assert [one.start_ns for one in trace.collectives] == [0, 10**9]


def test_a_log_without_time_stamps_gives_the_order_only(tmp_path: Path) -> None:
    trace = read(tmp_path, "".join(fixtures.nccl_line(number) for number in range(3)))
    assert len(trace.collectives) == 3
    assert not has_times(trace)


def test_a_clock_without_date_goes_on_after_midnight(tmp_path: Path) -> None:
    stamps = ("23:59:59.5 ", "00:00:00.5 ", "00:00:01.5 ")
    lines = [fixtures.nccl_line(number, stamp) for number, stamp in enumerate(stamps)]
    trace = read(tmp_path, "".join(lines))
    assert [one.start_ns // 10**9 for one in trace.collectives] == [0, 1, 2]


def test_a_table_of_nccl_tests_gives_sizes_and_durations(tmp_path: Path) -> None:
    trace = read(tmp_path, fixtures.nccl_tests_table())
    assert trace.source == "nccl-tests"
    assert [(one.bytes, one.end_ns, one.op) for one in trace.collectives] == [
        (8_388_608, 91_100, "all_reduce"),
        (1_073_741_824, 20_079_000, "all_reduce"),
    ]
    assert not has_times(trace)


def test_a_step_trace_gives_one_window_per_step_on_one_clock(tmp_path: Path) -> None:
    trace = read(tmp_path, fixtures.straggler_csv(), packed=True)
    assert trace.source == "straggler"
    # First rank at 80 % of its step, last rank until 95 %; steps of 2, 2.5 and 2.25 s.
    assert [window.start_ns / 1e9 for window in trace.windows] == [1.6, 4.0, 6.3]
    assert [window.end_ns / 1e9 for window in trace.windows] == [1.9, 4.375, 6.6375]
    # The last data-parallel rank of stage 0 begins at 85 %.
    scatter = [one for one in trace.collectives if one.communicator == "grads stage 0"]
    assert [one.start_ns / 1e9 for one in scatter] == [1.7, 4.125, 6.4125]
    assert [one.iteration for one in scatter] == [7, 8, 9]
    assert trace.notes[0] == "4 ranks, 3 steps of 2.25 s +- 0.25 s"


def test_steps_that_were_left_out_are_told(tmp_path: Path) -> None:
    trace = read(tmp_path, fixtures.straggler_csv(gap=3))
    assert any(note.startswith("4 steps between") for note in trace.notes)


def test_mini_batches_give_the_period_of_the_slowest_worker(tmp_path: Path) -> None:
    trace = read(tmp_path, fixtures.minibatch_csv())
    assert trace.source == "minibatch"
    assert [window.start_ns // 10**6 for window in trace.windows] == [0, 500, 1030, 1540]
    assert any("normalised" in note for note in trace.notes)


def test_a_measured_workload_gives_the_data_parallel_step_of_each_iteration(
    tmp_path: Path,
) -> None:
    trace = read(tmp_path, fixtures.aicb_csv())
    assert trace.source == "aicb"
    starts_ms = [window.start_ns // 10**6 for window in trace.windows]
    # The step ends 1 ms before its iteration and takes 20 ms; set-up takes 50 ms.
    assert starts_ms == [50 + 400 - 21, 450 + 410 - 21, 860 + 420 - 21]
    assert {window.bytes for window in trace.windows} == {(1 << 30) + (1 << 29)}
    assert statistics.fmean(w.end_ns - w.start_ns for w in trace.windows) == 20e6


@pytest.mark.parametrize("first_line", ["", "[rank0 ~ rank127]"])
def test_a_planned_workload_gives_the_order_only(tmp_path: Path, first_line: str) -> None:
    trace = read(tmp_path, fixtures.aicb_csv(measured=False, first_line=first_line))
    assert len(trace.collectives) == 13
    assert not has_times(trace)
