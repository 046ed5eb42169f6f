"""Flows joined for judgement: all observation points of a flow, and its opposite direction.

A flow that several interfaces see (two namespaces of one host, a bridge's two ports) has
a row each, but one fate: of each counter the largest holds, since a point upstream of a
loss cannot see the gap and a point downstream cannot see the first transmission.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from controller.observe.snapshot import Port, Snapshot

Row = Mapping[str, Any]
_REQUESTS = ("send", "write", "read_request", "atomic")
_ANSWERS = ("ack", "nak", "read_response", "atomic_ack")
# QP 1 and other datagram queue pairs: no acknowledgements, no PSN order to judge.
_ORDERED = ("RC", "UC", "XRC")


@dataclass
class Flow:
    """One flow, joined.

    ``rows`` are those of ``flow_rows``, one an interface and direction; ``ports`` the
    interfaces; ``opposite`` the flow that carries the answers, None when it is unknown or
    was not seen.
    """

    name: str
    src: str
    dst: str
    dqpn: int
    rows: list[Row] = field(default_factory=list)
    ports: list[Port] = field(default_factory=list)
    opposite: Flow | None = None

    def count(self, key: str) -> int:
        """The largest value of a counter among the observation points."""
        return max(int(row[key]) for row in self.rows)

    def kind(self, *names: str) -> int:
        """Packets of these kinds."""
        return self._largest("kinds", names)

    def ecn(self, *names: str) -> int:
        """Packets with these ECN codepoints."""
        return self._largest("ecn", names)

    def naks(self, *codes: str) -> int:
        """NAKs of these codes."""
        return self._largest("naks_by_code", codes)

    def _largest(self, group: str, names: Iterable[str]) -> int:
        return max(sum(int(row[group].get(name, 0)) for name in names) for row in self.rows)

    @property
    def requests(self) -> int:
        """Request packets of a connected transport."""
        return self.kind(*_REQUESTS) if self.is_ordered else 0

    @property
    def data(self) -> int:
        """Packets of a connected transport that may carry data this way."""
        return self.kind(*_REQUESTS, "read_response") if self.is_ordered else 0

    @property
    def answers(self) -> int:
        """Packets that answer requests of the opposite direction."""
        return self.kind(*_ANSWERS)

    @property
    def is_ordered(self) -> bool:
        """Whether the transport numbers its packets by queue pair."""
        return any(row["transport"] in _ORDERED for row in self.rows)

    @property
    def came_through(self) -> bool:
        """Whether both ends are observed and every packet of both directions arrived."""
        return self.opposite is not None and all(
            len(sent := flow.counts_at("egress")) == 1 and sent == flow.counts_at("ingress")
            for flow in (self, self.opposite)
        )

    def counts_at(self, direction: str) -> list[int]:
        """Packets at each observation point of this direction."""
        return [int(row["packets"]) for row in self.rows if row["direction"] == direction]

    @property
    def dscp(self) -> list[int]:
        """All DSCPs seen."""
        return sorted({dscp for row in self.rows for dscp in row["dscp"]})


def join(snapshot: Snapshot, rows: Sequence[Row]) -> dict[str, Flow]:
    """Flows by name, in the order of `rows`, each linked with its opposite direction.

    Parameters
    ----------
    snapshot
        The reading.
    rows
        ``flow_rows(snapshot)``.
    """
    flows: dict[str, Flow] = {}
    for row, port in zip(rows, snapshot.keys["port"].tolist(), strict=True):
        name = row["flow"]
        flow = flows.get(name)
        if flow is None:
            flow = flows[name] = Flow(name, row["src"], row["dst"], row["dqpn"])
        flow.rows.append(row)
        if port in snapshot.ports:
            flow.ports.append(snapshot.ports[port])
    _link(flows.values())
    return flows


def _link(flows: Iterable[Flow]) -> None:
    by_ends = {(flow.src, flow.dst, flow.dqpn): flow for flow in flows}
    for flow in by_ends.values():
        for row in flow.rows:
            if row["peer_qpn"] is None:
                continue
            opposite = by_ends.get((flow.dst, flow.src, row["peer_qpn"]))
            if opposite is not None:
                flow.opposite = opposite
                # One direction may know the pair before the other one does.
                if opposite.opposite is None:
                    opposite.opposite = flow
                break
