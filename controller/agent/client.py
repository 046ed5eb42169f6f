"""The other end of the control socket: what the CLI asks the agent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from controller.agent.control import request
from controller.agent.state import RunDirectory
from controller.dataplane import tables
from controller.dataplane.layout import Direction, Reason
from controller.observe.snapshot import Port, QueuePair, Snapshot


def ask(run: RunDirectory, command: str, **arguments: Any) -> dict[str, Any]:
    """One request whose answer has no descriptors."""
    answer, fds = request(run.socket_path, command, arguments)
    for fd in fds:
        os.close(fd)
    return answer


def port_of(document: Mapping[str, Any]) -> Port:
    """An interface entry of `status` or `snapshot` -> Port."""
    return Port(
        number=document["port"],
        interface=document["name"],
        netns=document["netns"],
        kind=document["kind"],
        mode=document["mode"],
        rdma_device=document["rdma_device"],
        addresses=tuple(document["addresses"]),
        drops=document["drops"],
    )


def take_snapshot(run: RunDirectory) -> Snapshot:
    """Read the flow table of a running controller.

    The agent passes the table's descriptor; the table is read here, so that the agent's
    loop is not held up by a large one.
    """
    answer, fds = request(run.socket_path, "snapshot")
    try:
        keys, stats = tables.read_flows(fds[0])
    finally:
        for fd in fds:
            os.close(fd)
    frames = {
        (entry["port"], direction): {
            Reason[reason.upper()]: count
            for reason, count in entry["frames"][direction.name.lower()].items()
        }
        for entry in answer["interfaces"]
        for direction in Direction
    }
    return Snapshot(
        taken_ns=answer["taken_ns"],
        ports={entry["port"]: port_of(entry) for entry in answer["interfaces"]},
        keys=keys,
        stats=stats,
        frames=frames,
        queue_pairs=[QueuePair(**entry) for entry in answer["queue_pairs"]],
    )
