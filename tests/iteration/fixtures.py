"""Small traces of every format, made by the shape of real ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

# Buckets of ResNet-50 under DDP with 25 MB buckets: 102,228,128 bytes in all, as recorded in
# facebookresearch/HolisticTraceAnalysis tests/data/nccl_parser_config (MIT).
RESNET50_ELEMENTS = (2_049_000, 7_875_584, 6_563_840, 6_637_568, 2_431_040)
RESNET50_BYTES = 4 * sum(RESNET50_ELEMENTS)


def write(path: Path, content: str | bytes, packed: bool = False) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if packed else data)
    return path


def kineto_events(
    steps: int = 3,
    period_us: float = 1000.0,
    elements: tuple[int, ...] = RESNET50_ELEMENTS,
    told: str = "kernel",
) -> list[dict[str, Any]]:
    """Profiler events of DDP steps.

    Parameters
    ----------
    told
        Where the operation stands: "kernel" (arguments of the kernel), "params" (those of
        record_param_comms around the launch), "annotation" (only nccl:all_reduce with its
        dimensions), "name" (only the kernel's name).
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": "aten::add",
            "pid": 7,
            "tid": 7,
            "ts": 90.25,
            "dur": 1,
        },
    ]
    correlation = 100
    for step in range(steps):
        begin = 100.0 + step * period_us
        events.append(
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step + 5}",
             "pid": 7, "tid": 7, "ts": begin, "dur": period_us}
        )  # fmt: skip
        for bucket, count in enumerate(elements):
            correlation += 1
            launch = begin + 300 + 20 * bucket
            message = {
                "Collective name": "allreduce", "In msg nelems": count, "Out msg nelems": count,
                "dtype": "Float", "Group size": 2, "Process Group Name": "0",
            }  # fmt: skip
            events += [
                {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 7, "tid": 8,
                 "ts": launch - 5, "dur": 12, "args": message if told == "params" else {}},
                {"ph": "X", "cat": "user_annotation", "name": "nccl:all_reduce", "pid": 7, "tid": 8,
                 "ts": launch - 3, "dur": 8,
                 "args": {"Input Dims": [[count]], "Input type": ["float"]}
                 if told == "annotation" else {}},
                {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "pid": 7,
                 "tid": 8, "ts": launch, "dur": 3, "args": {"correlation": correlation}},
                {"ph": "X", "cat": "kernel",
                 "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)"
                 if told in ("kernel", "name") else "ncclDevKernel_Generic(ncclDevKernelArgs)",
                 "pid": 0, "tid": 40, "ts": begin + 500 + 40.5 * bucket, "dur": 30.125,
                 "args": {"device": 0, "stream": 40, "correlation": correlation,
                          **(message if told == "kernel" else {})}},
            ]  # fmt: skip
    return events


def kineto_json(events: list[dict[str, Any]] | None = None) -> str:
    document = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "a GPU"}],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2},
        "traceEvents": kineto_events() if events is None else events,
        "displayTimeUnit": "ms",
    }
    return json.dumps(document)


def host_trace_json(with_attributes: bool = False) -> str:
    """Three nodes for each of an all-to-all and an all-reduce, in the order they end."""

    def attributes(name: str, elements: int) -> list[dict[str, Any]]:
        return [
            {"name": "collective_name", "type": "string", "value": name},
            {"name": "in_msg_nelems", "type": "uint64", "value": elements},
            {"name": "dtype", "type": "string", "value": "BFloat16"},
            {"name": "pg_name", "type": "string", "value": "3"},
            {"name": "pg_size", "type": "uint64", "value": 16},
        ]

    def node(number: int, name: str, elements: int, attrs: list[dict[str, Any]]) -> dict[str, Any]:
        described = {"inputs": [], "input_shapes": [[elements]], "input_types": ["Tensor(float)"]}
        return {"id": number, "name": name, "attrs": attrs, **described}

    nodes = []
    for number, name, elements in ((30, "allreduce", 394_241), (10, "all_to_all", 6_144)):
        told = attributes(name, elements) if with_attributes else []
        nodes += [
            node(number + 2, f"nccl:{name}", elements, []),
            node(number + 1, "record_param_comms", elements, told),
            node(number, f"c10d::{name}_", elements, []),
        ]
    nodes.append(node(50, "record_param_comms", 0, attributes("wait", 0) if told else []))
    nodes.append(node(51, "aten::add", 4, []))
    return json.dumps({"schema": "1.0.1", "pid": 1, "nodes": nodes})


def protobuf_as_json(timed: bool) -> str:
    """What chakra_jsonizer prints: objects one behind the other, 64-bit numbers as text."""
    objects: list[dict[str, Any]] = [{"version": "0.0.4"}]
    for number in range(4):
        node: dict[str, Any] = {
            "id": str(number), "name": "a collective", "type": "COMM_COLL_NODE",
            "durationMicros": "250",
            "attr": [{"name": "is_cpu_op", "boolVal": False},
                     {"name": "comm_type", "int64Val": "7"},
                     {"name": "comm_size", "int64Val": str(1000 + number)},
                     {"name": "pg_name", "stringVal": "1"}],
        }  # fmt: skip
        if timed:
            node["startTimeMicros"] = str(5_000_000 + 1_000 * number)
        objects += [{"id": str(100 + number), "name": "mm", "type": "COMP_NODE"}, node]
    return "".join(json.dumps(one, indent=2) for one in objects)


def nccl_line(
    number: int, stamp: str = "", rank: int = 0, op: str = "AllReduce", count: int = 7_382_228
) -> str:
    return (
        f"{stamp}node{rank}:615:18953 [{rank}] NCCL INFO {op}: opCount {number:x} "
        f"sendbuff 0x78d056200000 recvbuff 0x78d056200000 count {count} datatype 7 op 0 root 0 "
        "comm 0x78cfda045840 [nranks=128] stream 0x78d07125e5e0\n"
    )


def nccl_tests_table() -> str:
    return """\
# nThread 1 nGpus 8 minBytes 8388608 maxBytes 1073741824 step: 2(factor) warmup iters: 5
# Using devices
#  Rank  0 Group  0 Pid  37300 on   node1 device  0 [0000:05:00] a GPU
#                                                              out-of-place
#       size         count      type   redop    root     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)
     8388608       2097152     float     sum      -1    91.10   92.08  161.14      0
  1073741824     268435456     float     sum      -1    20079   53.48   93.58      0
# Out of bounds values : 0 OK
# Collective test concluded: all_reduce_perf
"""


def straggler_csv(lengths_s: tuple[float, ...] = (2.0, 2.5, 2.25), gap: int = 1) -> str:
    """Two data-parallel ranks of two stages; the window is 80 % to 95 % of the step."""
    lines = ["dp_rank,stage,rank,step,optype,start_ts,duration,seq_id,mb_id"]
    for index, length_s in enumerate(lengths_s):
        for dp_rank in range(2):
            for stage in range(2):
                head = f"{dp_rank},{stage},{2 * stage + dp_rank},{7 + gap * index}"
                begin_s = (0.8 + 0.05 * dp_rank + 0.01 * stage) * length_s
                end_s = 0.95 * length_s
                lines += [
                    f"{head},params-all-gather,0.01,0.02,0,-1",
                    f"{head},forward-compute,0.05,0.1,0,0",
                    f"{head},forward-send,0.15,0.001,0,-1",
                    f"{head},grads-reduce-scatter,{begin_s:.6f},{end_s - begin_s:.6f},0,-1",
                    f"{head},optimizer,{end_s:.6f},{0.05 * length_s:.6f},0,-1",
                ]
    return "\n".join(lines) + "\n"


def minibatch_csv() -> str:
    """Two workers, three mini-batches of 500, 530 and 510 units; worker 1 has no third one."""
    return """\
,worker,gpu,time,batch_time_norm
0,0,25,1,476
1,1,25,1,500
2,0,25,11,530
3,1,25,11,528
4,0,25,21,510
"""


def aicb_csv(measured: bool = True, first_line: str = "") -> str:
    """A set-up and three iterations of 400, 410 and 420 ms, each with 20 ms of optimizer step."""
    lines = [
        "comm_type,comm_group,comm_group_size,msg_size,stage,dst,src,additional,_elapsed_time,"
        "algbw,busbw,count"
    ]
    if first_line:
        lines.insert(0, first_line)

    def row(op: str, group: str, size: int, stage: str, elapsed_ms: float) -> str:
        time = f"{elapsed_ms}" if measured else "None"
        return f"CommType.{op},{group},4,{size},{stage},None,None,,{time},0.0,0.0,1"

    dp, tp = "CommGroup.dp_group", "CommGroup.tp_group"
    lines += [row("all_reduce", dp, 8, "init.model_setup", 33), row("epoch_end", "None", 0, "", 50)]
    for length_ms in (400, 410, 420):
        lines += [
            row("all_gather", tp, 1 << 24, "forward.MoE", 10),
            row("reduce_scatter", dp, 1 << 30, "step", 12),
            row("all_gather", dp, 1 << 29, "step", 8),
            row("all_reduce", tp, 4, "step.check_for_nan", 1),
            row("epoch_end", "None", 0, "", length_ms),
        ]
    return "\n".join(lines) + "\n"
