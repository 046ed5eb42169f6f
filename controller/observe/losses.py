"""Verdicts on the order of requests: lost, dropped by the host, unseen, undecided, reordered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from controller.observe import remedies
from controller.observe.finding import Verdict
from controller.observe.joined import Flow
from controller.observe.snapshot import Snapshot

# When every frame is captured twice (both sides of a mirror, `-i any` on a bridge), half of
# all requests look repeated, without a single NAK. Retransmission never gets near that share
# on a flow of this many requests without a NAK.
CAPTURED_TWICE_SHARE = 0.45
CAPTURED_TWICE_MIN_REQUESTS = 32


def _sequence_naks(flow: Flow) -> int:
    return flow.opposite.naks("psn_sequence") if flow.opposite else 0


def _rnr_naks(flow: Flow) -> int:
    return flow.opposite.count("rnr_naks") if flow.opposite else 0


def _loss_naks(flow: Flow) -> int:
    """Sequence NAKs that receiver-not-ready NAKs do not explain.

    Requests that follow one without a receive are out of sequence too: some responders
    (rxe) NAK them, once for each RNR NAK, although nothing was lost.
    """
    naks = _sequence_naks(flow)
    return naks if flow.count("gap_packets") else max(naks - _rnr_naks(flow), 0)


def _retransmissions(flow: Flow) -> int:
    """Repeated requests that receiver-not-ready NAKs do not explain."""
    duplicates = flow.count("duplicates")
    explained_by_rnr = _rnr_naks(flow) and not _loss_naks(flow) and not flow.count("recovered")
    return 0 if explained_by_rnr else duplicates


def _losses(flow: Flow) -> int:
    """Packets, at the least, that must have been dropped on this flow's way."""
    naks, duplicates = _loss_naks(flow), _retransmissions(flow)
    recovered = flow.count("recovered") if naks or duplicates else 0
    return max(naks, recovered, 1 if duplicates else 0)


def losses_by_port(flows: Mapping[str, Flow]) -> dict[int, int]:
    """Losses of all flows of each port: its drop counters have to cover the sum."""
    needed: dict[int, int] = defaultdict(int)
    for flow in flows.values():
        losses = _losses(flow) if flow.requests else 0
        for number in {port.number for port in flow.ports} if losses else ():
            needed[number] += losses
    return needed


def judge_order(flow: Flow, snapshot: Snapshot, needed: Mapping[int, int]) -> Iterator[Verdict]:
    """Verdicts about one flow of requests.

    Parameters
    ----------
    flow
        The flow, linked with its opposite direction.
    snapshot
        The reading it is of.
    needed
        ``losses_by_port`` of all flows.
    """
    gap_packets, recovered = flow.count("gap_packets"), flow.count("recovered")
    capture_loss = flow.count("capture_loss_packets")
    undecided = max(gap_packets - recovered - capture_loss, 0)
    naks = _sequence_naks(flow)
    repeated = _repeated_twice(flow, snapshot)
    if repeated:
        yield repeated
    elif _losses(flow):
        yield _loss(flow, snapshot, needed, undecided)
    elif recovered:
        yield Verdict(
            flow.name,
            "reordering",
            "warning",
            {
                "reordered_packets": recovered,
                "gap_events": flow.count("gap_events"),
                "requests": flow.requests,
                "psn_sequence_naks": 0,
                "duplicates": 0,
            },
            remedies.REORDERING_CAPTURE if snapshot.is_capture else remedies.REORDERING,
            f"{recovered} of {flow.requests} requests came late, out of order, and were "
            "neither NAKed nor sent again.",
        )
    if capture_loss:
        yield Verdict(
            flow.name,
            "capture_loss",
            "info",
            {
                "capture_loss_packets": capture_loss,
                "gap_packets": gap_packets,
                "requests": flow.requests,
            },
            remedies.CAPTURE_LOSS if snapshot.is_capture else remedies.OBSERVER_LOSS,
            f"{capture_loss} packets were not seen here, but the peer acknowledged them: the "
            "observation missed them, the network did not lose them.",
        )
    responses = flow.opposite.count("response_gap_packets") if flow.opposite else 0
    if responses and flow.count("duplicates"):
        responses = 0  # asked for again: part of the loss above
    if (undecided and not naks) or responses:
        yield Verdict(
            flow.name,
            "undecided_gaps",
            "info",
            {
                "undecided_packets": 0 if naks else undecided,
                "read_response_gap_packets": responses,
                "gap_packets": gap_packets,
                "recovered": recovered,
                "capture_loss_packets": capture_loss,
                "answers_seen": bool(flow.opposite and flow.opposite.answers),
            },
            remedies.UNDECIDED_CAPTURE if snapshot.is_capture else remedies.UNDECIDED,
            f"{(0 if naks else undecided) + responses} packets were not seen, and nothing tells "
            "their fate: no acknowledgement, no NAK, no second transmission.",
        )


def _repeated_twice(flow: Flow, snapshot: Snapshot) -> Verdict | None:
    requests, duplicates = flow.requests, flow.count("duplicates")
    if (
        not snapshot.is_capture
        or requests < CAPTURED_TWICE_MIN_REQUESTS
        or duplicates < CAPTURED_TWICE_SHARE * requests
        or _sequence_naks(flow)
        or _rnr_naks(flow)
    ):
        return None
    return Verdict(
        flow.name,
        "captured_twice",
        "info",
        {"requests": requests, "duplicates": duplicates, "psn_sequence_naks": 0},
        remedies.CAPTURED_TWICE,
        f"{duplicates} of {requests} requests occur twice without a NAK: every frame was "
        "captured at two points, so losses cannot be told.",
    )


def _loss(flow: Flow, snapshot: Snapshot, needed: Mapping[int, int], undecided: int) -> Verdict:
    ports = flow.ports + (flow.opposite.ports if flow.opposite else [])
    drops = {
        f"{port.label} {name}": count
        for port in ports
        for name, count in port.drops.items()
        if count
    }
    explained = any(
        sum(port.drops.values()) >= needed.get(port.number, 0) > 0 for port in flow.ports
    )
    naks, duplicates = _sequence_naks(flow), flow.count("duplicates")
    evidence: dict[str, Any] = {
        "psn_sequence_naks": naks,
        "duplicates": duplicates,
        "recovered": flow.count("recovered"),
        "still_missing": undecided if naks else 0,
        "lost_at_least": _losses(flow),
        "requests": flow.requests,
        # A capture has no drop counters: None, not 0.
        "host_drops": None if snapshot.is_capture else sum(drops.values()),
    }
    what = f"{naks} sequence NAKs, {duplicates} of {flow.requests} requests sent again"
    if explained:
        evidence["host_drop_counters"] = drops
        return Verdict(
            flow.name,
            "host_drops",
            "error",
            evidence,
            remedies.HOST_DROPS,
            f"{what}; this host dropped {sum(drops.values())} packets itself.",
        )
    if snapshot.is_capture:
        tail = "packets were lost on the way (a capture cannot tell whether a host dropped them)."
    elif drops:
        evidence["host_drop_counters"] = drops
        tail = "more than this host's own drops explain."
    else:
        tail = "no drop counter of this host moved: lost in the network or at the peer."
    if not naks and not evidence["recovered"] and flow.came_through:
        return Verdict(
            flow.name,
            "ack_timeout",
            "warning",
            evidence,
            remedies.ACK_TIMEOUT,
            f"{duplicates} of {flow.requests} requests sent again without a NAK, though every "
            "packet of both directions arrived: nothing was lost, the ACK came later than the "
            "queue pair's timeout.",
        )
    if not naks and not evidence["recovered"]:
        return Verdict(
            flow.name,
            "network_loss",
            "warning",
            evidence,
            remedies.TIMEOUT_LOSS,
            f"{duplicates} of {flow.requests} requests sent again without a NAK: the sender's "
            "ACK timeout ran out, as the last packet or its ACK was lost or very late.",
        )
    return Verdict(
        flow.name, "network_loss", "error", evidence, remedies.NETWORK_LOSS, f"{what}; {tail}"
    )
