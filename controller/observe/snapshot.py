"""One reading of everything that was observed, live or from a capture.

All reports (``flows``, ``top``, ``explain``, ``analyze``) are functions of a Snapshot.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from controller.dataplane import layout
from controller.dataplane.layout import Direction, Kind, NakCode, PairState, Reason, Transport

ECN_NAMES = ("not_ect", "ect1", "ect0", "ce")
_DIRECTIONS = {int(direction): direction.name.lower() for direction in Direction}
_TRANSPORTS = {int(transport): transport.name for transport in Transport}
_PAIR_STATES = {int(state): state.name.lower() for state in PairState}


@dataclass(frozen=True)
class Port:
    """One attached interface, or the capture.

    ``drops`` are the counters of the host itself that can explain a missing packet
    (name -> packets since attaching): interface, qdisc and RDMA device.
    """

    number: int
    interface: str
    netns: str = ""
    kind: str = "capture"
    mode: str = ""
    rdma_device: str = ""
    addresses: tuple[str, ...] = ()
    drops: Mapping[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """``netns:interface``, or the interface alone in the first namespace."""
        return f"{self.netns}:{self.interface}" if self.netns else self.interface


@dataclass(frozen=True)
class QueuePair:
    """A queue pair of this host, from ``rdma resource show qp``."""

    port: int
    device: str
    local_qpn: int
    remote_qpn: int
    type: str
    state: str
    pid: int
    command: str


@dataclass(frozen=True)
class Snapshot:
    """Flows of all ports at one moment.

    Parameters
    ----------
    taken_ns
        CLOCK_MONOTONIC of the reading; for a capture the time of its last frame.
    keys, stats
        Arrays of dtype FLOW_KEY and FLOW_STATS, shape (flows,).
    frames
        (port, direction) -> reason -> frames.
    """

    taken_ns: int
    ports: Mapping[int, Port]
    keys: np.ndarray
    stats: np.ndarray
    frames: Mapping[tuple[int, Direction], Mapping[Reason, int]]
    queue_pairs: Sequence[QueuePair] = ()
    is_capture: bool = False


def format_address(raw: bytes) -> str:
    """Text of a 16-byte address; v4-mapped ones as IPv4."""
    if raw[:12] == b"\0" * 10 + b"\xff\xff":
        return f"{raw[12]}.{raw[13]}.{raw[14]}.{raw[15]}"
    return str(ipaddress.IPv6Address(raw))


def pack_address(text: str) -> bytes:
    """The 16 bytes of an address as a flow key holds them."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv4Address):
        return b"\0" * 10 + b"\xff\xff" + address.packed
    return address.packed


def flow_name(source: str, destination: str, dqpn: int) -> str:
    """How a flow is called everywhere: ``SOURCE-DESTINATION-QPN``, the QPN in hex."""
    return f"{source}-{destination}-0x{dqpn:06x}"


def busiest_first(snapshot: Snapshot) -> Snapshot:
    """Sort by the bytes of a flow; what saw one flow stays together, its sender first."""
    keys, stats = snapshot.keys, snapshot.stats
    if not len(keys):
        return snapshot
    # A flow's name: the key without port and direction, its last four bytes.
    raw = np.ascontiguousarray(keys).view(np.uint8).reshape(len(keys), -1)
    names = np.ascontiguousarray(raw[:, :-4]).view(f"V{raw.shape[1] - 4}").ravel()
    _, flow = np.unique(names, return_inverse=True)
    most = np.zeros(len(keys), np.int64)
    np.maximum.at(most, flow, stats["wire_bytes"].astype(np.int64))
    order = np.lexsort((keys["direction"] == Direction.INGRESS, flow, -most[flow]))
    return replace(snapshot, keys=keys[order], stats=stats[order])


def rtt_percentile_ns(histogram: np.ndarray, percent: float) -> float:
    """A percentile from one RTT histogram, shape (RTT_BUCKETS,), in ns; see below."""
    return float(rtt_percentiles_ns(histogram[np.newaxis], [percent])[0, 0])


def rtt_percentiles_ns(histograms: np.ndarray, percents: Sequence[float]) -> np.ndarray:
    """Percentiles from each of many RTT histograms, interpolated within a bucket, in ns.

    Parameters
    ----------
    histograms
        Counts, shape (n, RTT_BUCKETS).
    percents
        0 .. 100 each.

    Returns
    -------
    np.ndarray
        Shape (percents, n), 0.0 where a histogram is empty. Buckets are half an octave wide,
        so the error is below 50 % (typically far less, as counts are spread over the bucket).
    """
    bounds = np.append(layout.rtt_bucket_bounds_ns(), 1 << (layout.RTT_FIRST_LOG2 + 24))
    counts = np.ascontiguousarray(histograms).astype(np.int64)
    cumulative = np.cumsum(counts, axis=1)
    total = cumulative[:, -1]
    flows = np.arange(len(counts))
    result = np.zeros((len(percents), len(counts)))
    for index, percent in enumerate(percents):
        rank = percent / 100 * total
        # The first bucket that reaches the rank.
        bucket = (cumulative < rank[:, np.newaxis]).argmin(axis=1)
        inside = counts[flows, bucket]
        before = cumulative[flows, bucket] - inside
        share = (rank - before) / np.maximum(inside, 1)
        value = bounds[bucket] + share * (bounds[bucket + 1] - bounds[bucket])
        result[index] = np.where(total > 0, value, 0.0)
    return result


_SCALARS = (
    "packets",
    "wire_bytes",
    "payload_bytes",
    "messages",
    "gap_packets",
    "gap_events",
    "capture_loss_packets",
    "recovered",
    "duplicates",
    "sequence_errors",
    "duplicate_requests",
    "psn_resyncs",
    "response_gap_packets",
    "response_duplicates",
    "rnr_naks",
    "fecn",
    "becn",
    "ack_requests",
    "cut_packets",
    "vlan_packets",
    "sport",
    "sport_changes",
    "first_ns",
    "last_ns",
    "max_payload",
)


def flow_rows(snapshot: Snapshot) -> list[dict[str, Any]]:
    """One JSON-ready row a flow, port and direction; the keys of ``flows --json``.

    Column by column, not flow by flow: tens of thousands of rows stay cheap.
    """
    keys, stats = snapshot.keys, snapshot.stats
    owners = {(qp.port, qp.local_qpn): qp for qp in snapshot.queue_pairs}
    labels = {number: port.label for number, port in snapshot.ports.items()}
    sources, destinations = _addresses(keys["saddr"]), _addresses(keys["daddr"])
    qpns, ports = keys["dqpn"].tolist(), keys["port"].tolist()
    directions = keys["direction"].tolist()
    pair_states, peers = stats["pair_state"].tolist(), stats["peer_qpn"].tolist()
    if snapshot.is_capture:
        sides = ["seen"] * len(keys)
    else:
        sides = [_DIRECTIONS[direction] for direction in directions]
    local_ends: list[QueuePair | None] = [None] * len(keys)
    if owners:
        # The local end: an incoming flow is addressed to it, an outgoing one is paired.
        local_ends = [
            owners.get((port, qpn if direction == Direction.INGRESS else peer))
            for port, qpn, direction, peer in zip(ports, qpns, directions, peers, strict=True)
        ]
    columns: dict[str, Sequence[Any]] = {
        "flow": [flow_name(*ends) for ends in zip(sources, destinations, qpns, strict=True)],
        "src": sources,
        "dst": destinations,
        "dqpn": qpns,
        "interface": [labels.get(port) or f"port {port}" for port in ports],
        "direction": sides,
        "transport": [_TRANSPORTS.get(t, str(t)) for t in stats["transport"].tolist()],
    }
    columns.update((name, stats[name].tolist()) for name in _SCALARS)
    columns["ce"] = stats["ecn"][:, 3].tolist()
    columns["cnp"] = stats["kinds"][:, Kind.CNP].tolist()
    columns["naks"] = stats["naks"].sum(axis=1).tolist()
    columns["dscp"] = _dscps(stats["dscp_seen"])
    columns["ecn"] = [
        dict(zip(ECN_NAMES, codepoints, strict=True)) for codepoints in stats["ecn"].tolist()
    ]
    columns["kinds"] = _nonzero(stats["kinds"], [kind.name.lower() for kind in Kind])
    columns["naks_by_code"] = _nonzero(stats["naks"], [code.name.lower() for code in NakCode])
    columns["path_mtu"] = [1 << log2 if log2 else None for log2 in stats["pmtu_log2"].tolist()]
    columns["peer_qpn"] = [
        peer if state else None for peer, state in zip(peers, pair_states, strict=True)
    ]
    columns["pair"] = [_PAIR_STATES[state] for state in pair_states]
    columns["source_qpn"] = [qpn or None for qpn in stats["source_qpn"].tolist()]
    columns["rtt_us"] = _rtts(stats)
    columns["pid"] = [owner.pid if owner else None for owner in local_ends]
    columns["command"] = [owner.command if owner else None for owner in local_ends]
    names = tuple(columns)
    return [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _addresses(column: np.ndarray) -> list[str]:
    raw = column.tobytes()
    cache: dict[bytes, str] = {}
    result = []
    for start in range(0, len(raw), 16):
        address = raw[start : start + 16]
        text = cache.get(address)
        if text is None:
            text = cache[address] = format_address(address)
        result.append(text)
    return result


def _rtts(stats: np.ndarray) -> list[dict[str, Any] | None]:
    """Round trips in us of each flow, None where none was measured."""
    result: list[Any] = [None] * len(stats)
    measured = np.flatnonzero(stats["rtt_count"])
    if not len(measured):
        return result
    counts = stats["rtt_count"][measured]
    columns = (
        stats["rtt_min_ns"][measured],
        stats["rtt_sum_ns"][measured] / counts,
        # A bucket's ends may lie outside what was really measured.
        *np.clip(
            rtt_percentiles_ns(stats["rtt_hist"][measured], (50, 99)),
            stats["rtt_min_ns"][measured],
            stats["rtt_max_ns"][measured],
        ),
        stats["rtt_max_ns"][measured],
    )
    rounded = [np.round(column / 1e3, 1).tolist() for column in columns]
    for index, count, low, mean, p50, p99, high in zip(
        measured.tolist(), counts.tolist(), *rounded, strict=True
    ):
        result[index] = {
            "samples": count, "min": low, "mean": mean, "p50": p50, "p99": p99, "max": high,
            "histogram": [],
        }  # fmt: skip
    bounds_us = (layout.rtt_bucket_bounds_ns() / 1e3).tolist()
    histograms = stats["rtt_hist"][measured]
    places, buckets = np.nonzero(histograms)
    for index, bucket, samples in zip(
        measured[places].tolist(), buckets.tolist(), histograms[places, buckets].tolist(),
        strict=True,
    ):  # fmt: skip
        result[index]["histogram"].append([bounds_us[bucket], samples])
    return result


def _dscps(column: np.ndarray) -> list[list[int]]:
    """The DSCPs in each mask; few different masks occur."""
    masks, inverse = np.unique(column, return_inverse=True)
    lists = [[bit for bit in range(64) if mask >> bit & 1] for mask in masks.tolist()]
    return [list(lists[index]) for index in inverse.tolist()]


def _nonzero(column: np.ndarray, names: Sequence[str]) -> list[dict[str, int]]:
    """Name -> count of each row of an array of counters, zeros left out."""
    result: list[dict[str, int]] = [{} for _ in range(len(column))]
    rows, places = np.nonzero(column)
    for row, place, value in zip(
        rows.tolist(), places.tolist(), column[rows, places].tolist(), strict=True
    ):
        result[row][names[place]] = value
    return result
