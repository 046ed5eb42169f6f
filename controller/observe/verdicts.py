"""What the counters mean: Snapshot -> verdicts, each with evidence and a remedy.

Pure functions. A verdict says no more than its numbers carry: a packet that nobody saw
is not lost when it was acknowledged, and undecided when nothing tells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from controller.observe import remedies
from controller.observe.finding import SEVERITIES, Verdict
from controller.observe.joined import Flow, Row, join
from controller.observe.losses import judge_order, losses_by_port
from controller.observe.snapshot import Snapshot, flow_rows

__all__ = ["Verdict", "judge"]

# DCQCN holds queues at a few marks in ten thousand packets (Kmin/Kmax of 100/400 KB at
# 100 Gbit/s); one packet in a hundred means that the queue stands above Kmin most of the time.
MARKED_WARNING_SHARE = 0.01
# Fewer flows than this between two hosts say nothing about how ECMP spreads them.
ENTROPY_MIN_FLOWS = 4
# So many flows or more to a source port: a switch's hash can use a quarter of the paths at
# most. Drivers that spread give nearly every queue pair a port of its own.
ENTROPY_FLOWS_PER_PORT = 4
# Choices that cost nothing by themselves: a flow may be fine all the same.
_HINTS = {"dscp_0", "not_ect"}


def judge(snapshot: Snapshot, rows: Sequence[Row] | None = None) -> list[Verdict]:
    """All verdicts, worst first; flows in the order of the snapshot within a severity.

    Parameters
    ----------
    snapshot
        The reading.
    rows
        ``flow_rows(snapshot)``, where the caller has it already.
    """
    flows = join(snapshot, flow_rows(snapshot) if rows is None else rows)
    needed = losses_by_port(flows)
    verdicts: list[Verdict] = []
    for flow in flows.values():
        found = list(_judge_flow(flow, snapshot, needed))
        names = {verdict.verdict for verdict in found}
        if flow.requests and names <= _HINTS and not _dscp_differs(flow):
            found.append(_nothing_wrong(flow))
        verdicts += found
    verdicts += _low_entropy(flows)
    verdicts.sort(key=lambda verdict: SEVERITIES.index(verdict.severity))
    return verdicts


def _judge_flow(flow: Flow, snapshot: Snapshot, needed: Mapping[int, int]) -> Iterator[Verdict]:
    opposite = flow.opposite
    if flow.requests:
        yield from judge_order(flow, snapshot, needed)
        yield from _answers(flow, opposite, flow.name)
    elif opposite is None or not opposite.requests:
        # Answers to requests that nobody saw, or that could not be paired with them.
        yield from _orphan_naks(flow)
        yield from _answers(None, flow, flow.name)
    if flow.data:
        yield from _marks(flow, opposite)
        yield from _class(flow)
    elif opposite is None or not opposite.data:
        yield from _orphan_echoes(flow)


# ---- answers: RNR, remote errors; congestion marks ----


def _orphan_naks(answers: Flow) -> Iterator[Verdict]:
    naks = answers.naks("psn_sequence")
    if naks:
        yield Verdict(
            answers.name,
            "network_loss",
            "error",
            {"psn_sequence_naks": naks, "requests": None, "host_drops": None},
            remedies.NETWORK_LOSS,
            f"{naks} sequence NAKs answer requests that were not seen here: packets of the "
            "opposite direction were lost.",
        )


def _answers(flow: Flow | None, answers: Flow | None, name: str) -> Iterator[Verdict]:
    if answers is None:
        return
    rnr = answers.count("rnr_naks")
    if rnr:
        yield Verdict(
            name,
            "receiver_limited",
            "warning",
            {
                "rnr_naks": rnr,
                "psn_sequence_naks": answers.naks("psn_sequence"),
                "messages": flow.count("messages") if flow else None,
                "duplicates": flow.count("duplicates") if flow else None,
            },
            remedies.RECEIVER_LIMITED,
            f"{rnr} RNR NAKs: the receiver had no receive request posted; not the network.",
        )
    codes = {code: answers.naks(code) for code in remedies.REMOTE_ERROR if answers.naks(code)}
    if codes:
        named = ", ".join(f"{count} {code.replace('_', ' ')}" for code, count in codes.items())
        yield Verdict(
            name,
            "remote_error",
            "error",
            {"naks_by_code": codes, "requests": flow.requests if flow else None},
            " ".join(remedies.REMOTE_ERROR[code] for code in codes),
            f"The peer refused requests ({named}): the queue pair is in error now; not the "
            "network.",
        )


def _echoes(answers: Flow | None) -> tuple[int, int]:
    """CNPs, and BECN on other packets (a CNP has BECN set itself)."""
    if answers is None:
        return 0, 0
    cnps = answers.count("cnp")
    return cnps, max(answers.count("becn") - cnps, 0)


def _marks(flow: Flow, answers: Flow | None) -> Iterator[Verdict]:
    ce, fecn, packets = flow.ecn("ce"), flow.count("fecn"), flow.count("packets")
    cnps, becn = _echoes(answers)
    if not (ce or fecn or cnps or becn):
        return
    share = max(ce, fecn, cnps + becn) / packets
    yield Verdict(
        flow.name,
        "marked",
        "warning" if share >= MARKED_WARNING_SHARE else "info",
        {
            "ce": ce,
            "ce_share_pct": round(100 * ce / packets, 3),
            "fecn": fecn,
            "cnp": cnps,
            "becn": becn,
            "packets": packets,
        },
        remedies.MARKED,
        f"Congestion: {ce} of {packets} packets are CE-marked; {cnps} CNPs and {becn} BECN "
        "echoes told the sender to slow down.",
    )


def _orphan_echoes(answers: Flow) -> Iterator[Verdict]:
    cnps, becn = _echoes(answers)
    if cnps or becn:
        yield Verdict(
            answers.name,
            "marked",
            "warning",
            {"ce": None, "cnp": cnps, "becn": becn, "packets": None},
            remedies.MARKED,
            f"Congestion: {cnps} CNPs and {becn} BECN echoes told {answers.dst} to slow down; "
            "the data they answer was not seen here, or could not be paired.",
        )


# ---- traffic class and paths ----


def _dscp_differs(flow: Flow) -> bool:
    opposite = flow.opposite
    if opposite is None or not (opposite.requests or opposite.answers):
        return False  # CNPs alone have a class of their own
    return not set(flow.dscp) & set(opposite.dscp)


def _class(flow: Flow) -> Iterator[Verdict]:
    opposite = flow.opposite
    if opposite and _is_first(flow, opposite) and _dscp_differs(flow):
        ours, theirs = flow.dscp, opposite.dscp
        yield Verdict(
            flow.name,
            "one_sided_dscp",
            "warning",
            {"dscp": ours, "opposite_dscp": theirs, "opposite_flow": opposite.name},
            remedies.ONE_SIDED_DSCP,
            f"DSCP {_numbers(ours)} from {flow.src}, but {_numbers(theirs)} back from "
            f"{flow.dst}: the two ends are configured differently.",
        )
    if not flow.count("payload_bytes"):
        return
    if flow.dscp == [0]:
        yield Verdict(
            flow.name,
            "dscp_0",
            "info",
            {"dscp": [0], "packets": flow.count("packets")},
            remedies.DSCP_0,
            "DSCP 0: the data travels in the default class, beside everything else.",
        )
    if not flow.ecn("ect1", "ect0", "ce"):
        yield Verdict(
            flow.name,
            "not_ect",
            "info",
            {"not_ect": flow.ecn("not_ect"), "ect": 0},
            remedies.NOT_ECT,
            "No packet is ECN-capable: switches drop where they could mark, and DCQCN gets no "
            "signal.",
        )


def _is_first(flow: Flow, opposite: Flow) -> bool:
    """Whether a finding about the pair goes to `flow`: one of the two gets it."""
    if not opposite.data:
        return True
    return (flow.src, flow.dst, flow.dqpn) < (opposite.src, opposite.dst, opposite.dqpn)


def _low_entropy(flows: Mapping[str, Flow]) -> Iterator[Verdict]:
    by_hosts: dict[tuple[str, str], list[Flow]] = defaultdict(list)
    for flow in flows.values():
        if flow.requests and flow.count("payload_bytes"):
            by_hosts[flow.src, flow.dst].append(flow)
    for (src, dst), group in by_hosts.items():
        ports = sorted({int(flow.rows[0]["sport"]) for flow in group})
        if len(group) < ENTROPY_MIN_FLOWS or len(group) < ENTROPY_FLOWS_PER_PORT * len(ports):
            continue
        yield Verdict(
            f"{src}-{dst}",
            "low_entropy",
            "warning",
            {"flows": len(group), "source_ports": len(ports), "ports": ports[:8]},
            remedies.LOW_ENTROPY,
            f"{len(group)} flows from {src} to {dst} use {len(ports)} UDP source "
            f"port{'s' if len(ports) > 1 else ''}: ECMP can put them on {len(ports)} "
            f"path{'s' if len(ports) > 1 else ''} at most.",
        )


def _nothing_wrong(flow: Flow) -> Verdict:
    answers = flow.opposite.answers if flow.opposite else 0
    seen = "" if answers else " Its answers were not seen, so NAKs and CNPs could not be."
    return Verdict(
        flow.name,
        "nothing_wrong",
        "ok",
        {
            "requests": flow.requests,
            "messages": flow.count("messages"),
            "answers": answers,
            "gap_packets": 0,
            "duplicates": 0,
            "naks": 0,
            "ce": 0,
        },
        remedies.NOTHING_WRONG,
        f"No loss, no NAK, no congestion mark in {flow.requests} request packets: not the network."
        + seen,
    )


def _numbers(values: Sequence[int]) -> str:
    return "/".join(map(str, values))
