"""Chakra execution traces as JSON: what ran in which order, mostly without saying when.

Three forms exist: the host trace that PyTorch's ExecutionTraceObserver writes (``nodes``), the
graph for the ASTRA-sim feeder (``workload_graph``), and what ``chakra_jsonizer`` makes of the
protobuf form (one JSON object behind the other).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from controller.iteration.series import Collective, Trace
from controller.iteration.traces.names import (
    MAX_BYTES,
    canonical_op,
    payload_bytes,
    tensors_bytes,
)
from controller.iteration.traces.source import MAX_ROWS, TraceSource

# NodeType and CollectiveCommType of Chakra's et_def.proto.
_NODE_TYPES = {
    5: "send_recv", "COMM_SEND_NODE": "send_recv", 6: "send_recv", "COMM_RECV_NODE": "send_recv",
    7: "unknown", "COMM_COLL_NODE": "unknown",
}  # fmt: skip
_COMM_TYPES = {
    0: "all_reduce", 2: "all_gather", 5: "broadcast", 6: "all_to_all", 7: "reduce_scatter",
    8: "reduce_scatter", 9: "barrier",
}  # fmt: skip
_MAX_TIME_US = 2**63 // 1000
_NS_PER_US = 1_000

NO_TIMES = "the file does not say when the collectives ran, only in which order"


class _Node(NamedTuple):
    order: int
    on_host: bool
    # How closely it describes the operation; of one operation the host trace has three nodes.
    rank: int
    op: str
    bytes: int | None
    communicator: str
    start_us: int
    duration_us: int


def read_chakra(source: TraceSource, prefix: str) -> Trace:
    """Collectives of one rank from an execution trace.

    Parameters
    ----------
    source
        JSON in one of the three forms.
    prefix
        Where the nodes are: ``nodes.item``, ``workload_graph.item``, or "" when each value of the
        file is a node.

    Returns
    -------
    Trace
        Where the file has no times, all collectives begin at 0 and `controller.iteration.traces
        .has_times` is false; they stand in the order of their numbers.

    Raises
    ------
    InputError
        Not JSON, cut, or no communication in it.
    """
    read = _host_node if prefix.startswith("nodes") else _graph_node
    nodes: list[_Node] = []
    count = 0
    for value in source.json_values(prefix, multiple_values=not prefix):
        count += 1
        node = read(value, count) if isinstance(value, Mapping) else None
        if node is not None:
            nodes.append(node)
        if len(nodes) > MAX_ROWS:
            raise source.error(f"holds more than {MAX_ROWS} collectives.", "Record fewer steps.")
    if not nodes:
        raise source.error(
            f"has {count} nodes of an execution trace, none of them a collective.",
            "Record a rank that communicates.",
        )
    # The kernel, where the trace has it, rather than the call that launched it.
    if not all(node.on_host for node in nodes):
        nodes = [node for node in nodes if not node.on_host]
    best = max(node.rank for node in nodes)
    nodes = [node for node in nodes if node.rank == best]
    timed = all(node.start_us > 0 for node in nodes)
    nodes.sort(key=lambda node: (node.start_us if timed else 0, node.order))
    begin_us = nodes[0].start_us if timed else 0
    collectives = tuple(
        Collective(
            start_ns := (node.start_us - begin_us if timed else 0) * _NS_PER_US,
            start_ns + node.duration_us * _NS_PER_US,
            node.bytes,
            node.op,
            node.communicator,
        )
        for node in nodes
    )
    notes = [] if timed else [NO_TIMES]
    if all(node.bytes is None for node in nodes):
        notes.append("the file does not say how many bytes they moved")
    return Trace("chakra", collectives, notes=tuple(notes))


def _host_node(node: Mapping[str, Any], count: int) -> _Node | None:
    """A node of PyTorch's host trace (schema 1.0.1 to 1.1.1)."""
    name = node.get("name")
    if not isinstance(name, str):
        return None
    attributes = dict(_attributes(node.get("attrs")))
    told = attributes.get("collective_name")
    if name == "record_param_comms" and isinstance(told, str) and told:
        op, rank = canonical_op(told), 2
        # It also records waiting and the making of a communicator.
        if op == "unknown" and told.lower() in ("wait", "init"):
            return None
    elif name.startswith("nccl:"):
        op, rank = canonical_op(name), 1
    elif name.startswith("c10d::"):
        op, rank = canonical_op(name), 0
        if op == "unknown":
            return None
    else:
        return None
    inputs = node.get("inputs")
    shapes, types = (
        (inputs.get("shapes"), inputs.get("types"))
        if isinstance(inputs, Mapping)
        else (node.get("input_shapes"), node.get("input_types"))
    )
    size = payload_bytes(attributes.get("in_msg_nelems"), attributes.get("dtype"))
    if size is None:
        size = tensors_bytes(shapes, types)
    group, ranks = attributes.get("pg_name"), attributes.get("pg_size")
    communicator = f"pg{group}" if isinstance(group, str) and group else ""
    if isinstance(ranks, int) and ranks > 0:
        communicator = f"{communicator} x{ranks}".strip()
    order = node.get("id")
    # Numbers are given at the begin of an operation, lines are written at its end.
    order = order if isinstance(order, int) else count
    return _Node(order, True, rank, op, size, communicator[:80], 0, 0)


def _graph_node(node: Mapping[str, Any], count: int) -> _Node | None:
    """A node of the feeder's graph, or of the protobuf form as JSON."""
    kind = node.get("NodeType", node.get("type"))
    op = _NODE_TYPES.get(kind) if isinstance(kind, int | str) else None
    if op is None:
        return None
    attributes = dict(node)
    attributes.update(_attributes(node.get("attr")))
    comm_type = _whole(attributes.get("comm_type"))
    name = attributes.get("Name", attributes.get("name"))
    if op == "unknown" and comm_type is not None:
        op = _COMM_TYPES.get(comm_type, "unknown")
    if op == "unknown" and isinstance(name, str):
        op = canonical_op(name)
    group = attributes.get("pg_name")
    start_us = _whole(attributes.get("startTimeMicros"), _MAX_TIME_US)
    duration_us = _whole(attributes.get("durationMicros"), _MAX_TIME_US)
    if duration_us is None:
        duration_us = _whole(attributes.get("runtime"), _MAX_TIME_US)
    return _Node(
        count,
        attributes.get("is_cpu_op") is True,
        0,
        op,
        _whole(attributes.get("comm_size")),
        f"pg{group}"[:80] if isinstance(group, str) and group else "",
        start_us or 0,
        duration_us or 0,
    )


def _attributes(attributes: object) -> Iterator[tuple[str, Any]]:
    """Name and value of each attribute: ``value`` in host traces, ``int64Val`` etc. in Chakra."""
    if not isinstance(attributes, list):
        return
    for attribute in attributes:
        if not isinstance(attribute, Mapping) or not isinstance(attribute.get("name"), str):
            continue
        for key, value in attribute.items():
            if key == "value" or key.endswith("Val"):
                yield attribute["name"], value


def _whole(value: object, maximum: int = MAX_BYTES) -> int | None:
    """A number that JSON may hold as text, as it does 64-bit ones of protobuf."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= maximum:
        return None
    return value
