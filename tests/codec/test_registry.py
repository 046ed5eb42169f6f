"""Queue pair lists -> pairs of flow directions."""

from __future__ import annotations

import numpy as np

from controller.dataplane.layout import FLOW_KEY, Direction
from controller.observe.registry import pair_entries, parse_queue_pairs
from controller.observe.snapshot import QueuePair, pack_address

LOCAL, PEER_B, PEER_C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


def key(src: str, dst: str, dqpn: int, direction: Direction, port: int = 1) -> np.void:
    result = np.zeros((), FLOW_KEY)
    result["saddr"] = np.frombuffer(pack_address(src), np.uint8)
    result["daddr"] = np.frombuffer(pack_address(dst), np.uint8)
    result["dqpn"], result["port"], result["direction"] = dqpn, port, direction
    return result


def keys(*entries: np.void) -> np.ndarray:
    return np.stack(entries) if entries else np.zeros(0, FLOW_KEY)


def qp(local: int, remote: int, kind: str = "RC", port: int = 1) -> QueuePair:
    return QueuePair(port, "rxe0", local, remote, kind, "RTS", 100 + local, "train")


def test_an_incoming_flow_names_its_queue_pair_and_so_the_outgoing_one() -> None:
    incoming = key(PEER_B, LOCAL, 0x11, Direction.INGRESS)
    outgoing = key(LOCAL, PEER_B, 0x22, Direction.EGRESS)
    assert pair_entries(keys(incoming), [qp(0x11, 0x22)]) == {
        incoming.tobytes(): 0x22,
        outgoing.tobytes(): 0x11,
    }


def test_two_peers_with_one_queue_pair_number_are_told_apart() -> None:
    """Fresh hosts number their queue pairs alike: 0x11 at B and 0x11 at C."""
    from_b = key(PEER_B, LOCAL, 0x11, Direction.INGRESS)
    from_c = key(PEER_C, LOCAL, 0x12, Direction.INGRESS)
    to_b = key(LOCAL, PEER_B, 0x11, Direction.EGRESS)
    to_c = key(LOCAL, PEER_C, 0x11, Direction.EGRESS)
    entries = pair_entries(keys(from_b, from_c, to_b, to_c), [qp(0x11, 0x11), qp(0x12, 0x11)])
    assert entries == {
        from_b.tobytes(): 0x11,
        from_c.tobytes(): 0x11,
        to_b.tobytes(): 0x11,
        to_c.tobytes(): 0x12,
    }


def test_an_outgoing_flow_alone_pairs_only_when_one_queue_pair_can_send_it() -> None:
    outgoing = key(LOCAL, PEER_B, 0x22, Direction.EGRESS)
    assert pair_entries(keys(outgoing), [qp(0x11, 0x22, "UC")]) == {outgoing.tobytes(): 0x11}
    assert pair_entries(keys(outgoing), [qp(0x11, 0x22), qp(0x12, 0x22)]) == {}


def test_datagram_queue_pairs_and_other_ports_pair_nothing() -> None:
    incoming = key(PEER_B, LOCAL, 0x11, Direction.INGRESS)
    assert pair_entries(keys(incoming), [qp(0x11, 0x22, "UD"), qp(0x11, 0x22, port=2)]) == {}
    assert pair_entries(keys(), [qp(0x11, 0x22)]) == {}


def test_the_list_of_the_rdma_tool_is_read_as_iproute2_prints_it() -> None:
    # As `rdma -j resource show qp` of iproute2 6.1 printed it in the lab kernel.
    entries = [
        {"ifindex": 0, "ifname": "rxe0", "port": 1, "lqpn": 1, "type": "GSI", "state": "RTS",
         "sq-psn": 0, "comm": "ib_core"},
        {"ifindex": 0, "ifname": "rxe0", "port": 1, "lqpn": 17, "rqpn": 18, "type": "RC",
         "state": "RTS", "rq-psn": 1, "sq-psn": 2, "path-mig-state": "MIGRATED", "pid": 123,
         "comm": "ib_write_bw"},
        {"ifindex": 0, "ifname": "rxe0", "port": 1, "type": "RC", "state": "RESET"},
    ]  # fmt: skip
    general, connected = parse_queue_pairs(4, entries)
    assert (general.local_qpn, general.remote_qpn, general.pid) == (1, 0, 0)
    assert connected == QueuePair(4, "rxe0", 17, 18, "RC", "RTS", 123, "ib_write_bw")
