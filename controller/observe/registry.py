"""Queue pairs of this host: who owns a flow, and which two directions belong together.

An acknowledgement carries the requester's QPN, which its requests do not. The host's
list of queue pairs has both ends, but no addresses, and another host may use the same
QPNs. An *incoming* flow is addressed to a local QPN, unique on its device, so it is the
anchor: it tells the queue pair, the queue pair tells the remote QPN, and both together
name the outgoing flow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from controller.dataplane.layout import FLOW_KEY, Direction
from controller.observe.snapshot import QueuePair

# Types whose two directions are a pair; datagram QPs talk to many.
_CONNECTED = ("RC", "UC", "XRC_INI", "XRC_TGT")


def parse_queue_pairs(port: int, entries: Iterable[Mapping[str, Any]]) -> list[QueuePair]:
    """Entries of ``rdma -j resource show qp`` of one device -> queue pairs.

    Entries without a local QPN (the tool hides some from other users) are left out.
    """
    result = []
    for entry in entries:
        if "lqpn" not in entry:
            continue
        result.append(
            QueuePair(
                port=port,
                device=str(entry.get("ifname", "")),
                local_qpn=int(entry["lqpn"]),
                remote_qpn=int(entry.get("rqpn", 0)),
                type=str(entry.get("type", "")),
                state=str(entry.get("state", "")),
                pid=int(entry.get("pid", 0)),
                command=str(entry.get("comm", "")),
            )
        )
    return result


def pair_entries(keys: np.ndarray, queue_pairs: Iterable[QueuePair]) -> dict[bytes, int]:
    """What to write into the dataplane's pair map.

    Parameters
    ----------
    keys
        Flow keys, dtype FLOW_KEY, shape (n,).
    queue_pairs
        The host's queue pairs.

    Returns
    -------
    dict
        Flow key bytes -> destination QPN of the opposite direction; two entries for each
        incoming flow whose queue pair is known and connected. An outgoing flow that no
        incoming one answers (UC) gets one when a single queue pair can be its sender.
    """
    connected = [qp for qp in queue_pairs if qp.type in _CONNECTED and qp.remote_qpn]
    by_qpn = {(qp.port, qp.local_qpn): qp for qp in connected}
    senders = Counter((qp.port, qp.remote_qpn) for qp in connected)
    by_remote = {(qp.port, qp.remote_qpn): qp for qp in connected}
    result: dict[bytes, int] = {}
    for key in keys[keys["direction"] == Direction.EGRESS]:
        remote = (int(key["port"]), int(key["dqpn"]))
        if senders[remote] == 1:
            result[key.tobytes()] = by_remote[remote].local_qpn
    for key in keys[keys["direction"] == Direction.INGRESS]:
        qp = by_qpn.get((int(key["port"]), int(key["dqpn"])))
        if qp is None:
            continue
        outgoing = np.zeros((), FLOW_KEY)
        outgoing["saddr"], outgoing["daddr"] = key["daddr"], key["saddr"]
        outgoing["dqpn"], outgoing["port"] = qp.remote_qpn, key["port"]
        outgoing["direction"] = Direction.EGRESS
        result[key.tobytes()] = qp.remote_qpn
        result[outgoing.tobytes()] = qp.local_qpn
    return result
