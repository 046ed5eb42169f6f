"""Verdicts from made-up counters: every rule with a case for it and the nearest one against it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from controller.dataplane import layout
from controller.dataplane.layout import Direction, Kind, NakCode, PairState, Transport
from controller.errors import UsageError
from controller.observe.explain import explain
from controller.observe.finding import SEVERITIES
from controller.observe.report import flows_table, human, verdicts_text
from controller.observe.snapshot import (
    Port,
    QueuePair,
    Snapshot,
    flow_rows,
    pack_address,
    rtt_percentile_ns,
    rtt_percentiles_ns,
)
from controller.observe.verdicts import Verdict, judge

A, B = "10.0.0.1", "10.0.0.2"
FLOW, BACK = f"{A}-{B}-0x000011", f"{B}-{A}-0x000021"


def flow(
    src: str = A,
    dst: str = B,
    dqpn: int = 0x11,
    *,
    peer: int | None = 0x21,
    port: int = 0,
    direction: Direction = Direction.INGRESS,
    transport: Transport = Transport.RC,
    kinds: Mapping[str, int] | None = None,
    naks: Mapping[str, int] | None = None,
    ecn: tuple[int, int, int, int] | None = None,
    dscp: tuple[int, ...] = (26,),
    **counters: int,
) -> tuple[np.ndarray, np.ndarray]:
    """One row of the flow table: 100 WRITE packets with ECT(0) unless told otherwise."""
    key, stats = np.zeros((), layout.FLOW_KEY), np.zeros((), layout.FLOW_STATS)
    key["saddr"] = np.frombuffer(pack_address(src), np.uint8)
    key["daddr"] = np.frombuffer(pack_address(dst), np.uint8)
    key["dqpn"], key["port"], key["direction"] = dqpn, port, direction
    kinds = {"write": 100} if kinds is None else kinds
    for name, count in kinds.items():
        stats["kinds"][Kind[name.upper()]] = count
    for name, count in (naks or {}).items():
        stats["naks"][NakCode[name.upper()]] = count
    packets = sum(kinds.values())
    stats["packets"], stats["transport"] = packets, transport
    if set(kinds) & {"send", "write", "read_response"}:
        stats["payload_bytes"] = 1024 * packets
    stats["ecn"] = (0, 0, packets, 0) if ecn is None else ecn
    stats["dscp_seen"] = sum(1 << value for value in dscp)
    stats["sport"] = 0xC000 + dqpn
    if peer is not None:
        stats["peer_qpn"], stats["pair_state"] = peer, PairState.INFERRED
    for name, value in counters.items():
        stats[name] = value
    return key, stats


def answers(**arguments: Any) -> tuple[np.ndarray, np.ndarray]:
    """The opposite direction of `flow()`: ACKs only."""
    ends: dict[str, Any] = {"src": B, "dst": A, "dqpn": 0x21, "peer": 0x11}
    return flow(**ends | {"kinds": {"ack": 50}} | arguments)


def snapshot(
    *flows: tuple[np.ndarray, np.ndarray],
    drops: Mapping[str, int] | None = None,
    is_capture: bool = False,
    ports: Mapping[int, Port] | None = None,
    queue_pairs: tuple[QueuePair, ...] = (),
) -> Snapshot:
    """A reading of these flows; `drops` are port 0's."""
    return Snapshot(
        taken_ns=0,
        ports=ports or {0: Port(0, "eth0", drops=drops or {})},
        keys=np.array([key for key, _ in flows], layout.FLOW_KEY),
        stats=np.array([stats for _, stats in flows], layout.FLOW_STATS),
        frames={},
        queue_pairs=queue_pairs,
        is_capture=is_capture,
    )


def names(reading: Snapshot) -> Counter[str]:
    """Verdicts and how often each was given."""
    return Counter(verdict.verdict for verdict in judge(reading))


def only(reading: Snapshot, name: str) -> Verdict:
    """The one verdict of this name."""
    (verdict,) = (verdict for verdict in judge(reading) if verdict.verdict == name)
    return verdict


def test_a_clean_flow_has_nothing_wrong() -> None:
    verdict = only(snapshot(flow(), answers()), "nothing_wrong")
    assert (verdict.flow, verdict.severity) == (FLOW, "ok")
    assert verdict.evidence["requests"] == 100
    assert verdict.evidence["answers"] == 50
    assert names(snapshot(flow(), answers())) == {"nothing_wrong": 1}


def test_a_clean_flow_whose_answers_were_not_seen_says_so() -> None:
    verdict = only(snapshot(flow(peer=None)), "nothing_wrong")
    assert "not seen" in verdict.summary


def test_both_directions_of_a_pair_that_carry_data_are_judged() -> None:
    reading = snapshot(flow(), answers(kinds={"ack": 50, "write": 100}, payload_bytes=1))
    assert names(reading) == {"nothing_wrong": 2}


def test_a_nak_and_a_retransmission_without_host_drops_are_network_loss() -> None:
    reading = snapshot(
        flow(duplicates=7), answers(kinds={"ack": 50, "nak": 2}, naks={"psn_sequence": 2})
    )
    verdict = only(reading, "network_loss")
    assert (verdict.flow, verdict.severity) == (FLOW, "error")
    assert verdict.evidence["psn_sequence_naks"] == 2
    assert verdict.evidence["duplicates"] == 7
    assert verdict.evidence["host_drops"] == 0
    assert "no drop counter of this host moved" in verdict.summary
    assert names(reading) == {"network_loss": 1}


def test_a_gap_that_was_filled_and_naked_is_network_loss() -> None:
    reading = snapshot(
        flow(gap_packets=3, recovered=3, duplicates=4),
        answers(kinds={"ack": 50, "nak": 1}, naks={"psn_sequence": 1}),
    )
    assert only(reading, "network_loss").evidence["lost_at_least"] == 3
    assert names(reading) == {"network_loss": 1}


def test_retransmission_without_a_nak_is_a_timeout_and_only_a_warning() -> None:
    reading = snapshot(flow(duplicates=1), answers())
    verdict = only(reading, "network_loss")
    assert verdict.severity == "warning"
    assert "ACK timeout" in verdict.summary
    assert names(reading) == {"network_loss": 1}


def test_repetition_of_what_arrived_at_both_ends_is_a_late_ack_and_no_loss() -> None:
    """Sender and receiver are observed, and every packet of both directions came through."""
    out, into = Direction.EGRESS, Direction.INGRESS
    ports = {0: Port(0, "eth0"), 1: Port(1, "eth1")}
    both_ends = [
        flow(port=0, direction=out, duplicates=4),
        flow(port=1, direction=into, duplicates=4),
        answers(port=1, direction=out),
        answers(port=0, direction=into),
    ]
    verdict = only(snapshot(*both_ends, ports=ports), "ack_timeout")
    assert verdict.severity == "warning"
    assert "nothing was lost" in verdict.summary and "NCCL_IB_TIMEOUT" in verdict.remedy
    assert names(snapshot(*both_ends, ports=ports)) == {"ack_timeout": 1}
    # One ACK less at the sender: it may have been that one which was waited for.
    both_ends[3] = answers(port=0, direction=into, kinds={"ack": 49})
    assert names(snapshot(*both_ends, ports=ports)) == {"network_loss": 1}


def test_losses_that_the_hosts_drop_counters_cover_are_host_drops() -> None:
    flows = flow(duplicates=7), answers(kinds={"ack": 50, "nak": 2}, naks={"psn_sequence": 2})
    reading = snapshot(*flows, drops={"qdisc": 2, "rx_errors": 0})
    verdict = only(reading, "host_drops")
    assert verdict.evidence["host_drops"] == 2
    assert verdict.evidence["host_drop_counters"] == {"eth0 qdisc": 2}
    assert names(reading) == {"host_drops": 1}


def test_fewer_host_drops_than_losses_leave_network_loss() -> None:
    reading = snapshot(
        flow(duplicates=7),
        answers(kinds={"ack": 50, "nak": 3}, naks={"psn_sequence": 3}),
        drops={"qdisc": 2},
    )
    verdict = only(reading, "network_loss")
    assert verdict.evidence["host_drops"] == 2
    assert "more than this host's own drops explain" in verdict.summary


def test_one_drop_does_not_excuse_the_losses_of_two_flows() -> None:
    nak = {"kinds": {"ack": 50, "nak": 1}, "naks": {"psn_sequence": 1}}
    flows = (
        flow(duplicates=1),
        answers(**nak),
        flow(dqpn=0x12, peer=0x22, duplicates=1),
        answers(dqpn=0x22, peer=0x12, **nak),
    )
    assert names(snapshot(*flows, drops={"qdisc": 1})) == {"network_loss": 2}
    assert names(snapshot(*flows, drops={"qdisc": 2})) == {"host_drops": 2}


def test_drops_of_another_interface_do_not_excuse_a_loss() -> None:
    reading = snapshot(
        flow(duplicates=1),
        answers(kinds={"ack": 50, "nak": 1}, naks={"psn_sequence": 1}),
        ports={0: Port(0, "eth0"), 1: Port(1, "eth1", drops={"qdisc": 1000})},
    )
    assert names(reading) == {"network_loss": 1}


def test_a_capture_has_no_drop_counters_to_explain_a_loss() -> None:
    reading = snapshot(
        flow(duplicates=1),
        answers(kinds={"ack": 50, "nak": 1}, naks={"psn_sequence": 1}),
        is_capture=True,
    )
    assert only(reading, "network_loss").evidence["host_drops"] is None


def test_naks_whose_requests_were_not_seen_are_still_network_loss() -> None:
    reading = snapshot(answers(peer=None, kinds={"nak": 2}, naks={"psn_sequence": 2}))
    verdict = only(reading, "network_loss")
    assert verdict.flow == BACK
    assert verdict.evidence["requests"] is None


def test_acknowledged_gaps_are_capture_loss_and_never_network_loss() -> None:
    reading = snapshot(flow(gap_packets=40, capture_loss_packets=40), answers(), is_capture=True)
    verdict = only(reading, "capture_loss")
    assert verdict.evidence["capture_loss_packets"] == 40
    assert names(reading) == {"capture_loss": 1}


def test_gaps_without_a_witness_are_undecided_and_never_network_loss() -> None:
    reading = snapshot(flow(gap_packets=40, capture_loss_packets=10), answers(), is_capture=True)
    verdict = only(reading, "undecided_gaps")
    assert verdict.evidence["undecided_packets"] == 30
    assert names(reading) == {"capture_loss": 1, "undecided_gaps": 1}


def test_gaps_of_an_unreliable_connection_are_undecided() -> None:
    reading = snapshot(flow(peer=None, transport=Transport.UC, gap_packets=5))
    assert names(reading) == {"undecided_gaps": 1}
    assert only(reading, "undecided_gaps").evidence["answers_seen"] is False


def test_missing_read_responses_are_undecided_unless_asked_for_again() -> None:
    responses = {"kinds": {"read_response": 50}, "response_gap_packets": 4}
    reading = snapshot(flow(kinds={"read_request": 10}), answers(**responses))
    assert only(reading, "undecided_gaps").evidence["read_response_gap_packets"] == 4
    again = snapshot(flow(kinds={"read_request": 11}, duplicates=1), answers(**responses))
    assert names(again) == {"network_loss": 1}


def test_late_packets_without_nak_and_repetition_are_reordering() -> None:
    reading = snapshot(flow(gap_packets=5, gap_events=5, recovered=5), answers())
    verdict = only(reading, "reordering")
    assert verdict.evidence["reordered_packets"] == 5
    assert names(reading) == {"reordering": 1}
    captured = snapshot(flow(gap_packets=5, recovered=5), answers(), is_capture=True)
    assert "capture itself" in only(captured, "reordering").remedy


def test_rnr_naks_are_the_receivers_limit_and_explain_the_repetitions() -> None:
    reading = snapshot(flow(duplicates=12), answers(kinds={"ack": 50, "nak": 3}, rnr_naks=3))
    verdict = only(reading, "receiver_limited")
    assert (verdict.flow, verdict.evidence["rnr_naks"]) == (FLOW, 3)
    assert verdict.evidence["duplicates"] == 12
    assert names(reading) == {"receiver_limited": 1}


def test_sequence_naks_beyond_the_rnr_naks_are_not_hidden_by_these() -> None:
    reading = snapshot(
        flow(duplicates=12),
        answers(kinds={"ack": 50, "nak": 4}, rnr_naks=3, naks={"psn_sequence": 4}),
    )
    assert names(reading) == {"receiver_limited": 1, "network_loss": 1}
    # A gap is a loss, however few the NAKs are.
    reading = snapshot(
        flow(duplicates=12, gap_packets=1, recovered=1),
        answers(kinds={"ack": 50, "nak": 4}, rnr_naks=3, naks={"psn_sequence": 1}),
    )
    assert names(reading) == {"receiver_limited": 1, "network_loss": 1}


def test_requests_refused_behind_an_rnr_nak_are_not_loss() -> None:
    """rxe: each RNR NAK makes the next request in flight out of sequence, too."""
    reading = snapshot(
        flow(duplicates=12),
        answers(kinds={"ack": 50, "nak": 6}, rnr_naks=3, naks={"psn_sequence": 3}),
    )
    assert only(reading, "receiver_limited").evidence["psn_sequence_naks"] == 3
    assert names(reading) == {"receiver_limited": 1}


@pytest.mark.parametrize("code", ["invalid_request", "remote_access", "remote_operation"])
def test_a_refused_request_is_a_remote_error(code: str) -> None:
    reading = snapshot(flow(), answers(kinds={"ack": 50, "nak": 1}, naks={code: 1}))
    verdict = only(reading, "remote_error")
    assert verdict.evidence["naks_by_code"] == {code: 1}
    assert code.replace("_", " ") in verdict.remedy.lower()
    assert names(reading) == {"remote_error": 1}


def test_ce_marks_are_congestion_by_their_share() -> None:
    strong = only(snapshot(flow(ecn=(0, 0, 98, 2)), answers()), "marked")
    assert (strong.severity, strong.evidence["ce_share_pct"]) == ("warning", 2.0)
    many = {"write": 100_000}
    weak = only(snapshot(flow(kinds=many, ecn=(0, 0, 99_990, 10)), answers()), "marked")
    assert (weak.severity, weak.evidence["ce_share_pct"]) == ("info", 0.01)


def test_cnps_of_the_opposite_direction_are_this_flows_marks() -> None:
    reading = snapshot(flow(), answers(kinds={"ack": 50, "cnp": 3}, becn=5))
    verdict = only(reading, "marked")
    assert verdict.flow == FLOW
    # Each CNP has BECN set as well.
    assert (verdict.evidence["cnp"], verdict.evidence["becn"]) == (3, 2)
    assert names(reading) == {"marked": 1}


def test_a_cnp_alone_tells_of_congestion_at_its_receiver() -> None:
    reading = snapshot(answers(peer=None, kinds={"cnp": 1}, becn=1, transport=Transport.CNP))
    verdict = only(reading, "marked")
    assert verdict.flow == BACK
    assert A in verdict.summary
    assert names(reading) == {"marked": 1}


def test_marks_on_read_responses_belong_to_the_responses() -> None:
    reading = snapshot(
        flow(kinds={"read_request": 10, "cnp": 1}, becn=1),
        answers(kinds={"read_response": 100}, ecn=(0, 0, 90, 10)),
    )
    verdict = only(reading, "marked")
    assert (verdict.flow, verdict.evidence["ce"], verdict.evidence["cnp"]) == (BACK, 10, 1)


def test_different_dscps_of_the_two_directions_are_one_sided() -> None:
    reading = snapshot(flow(), answers(dscp=(0,)))
    verdict = only(reading, "one_sided_dscp")
    assert (verdict.evidence["dscp"], verdict.evidence["opposite_dscp"]) == ([26], [0])
    assert names(reading) == {"one_sided_dscp": 1}


def test_a_pair_with_data_both_ways_has_one_verdict_on_its_dscps() -> None:
    both = answers(kinds={"ack": 50, "write": 100}, dscp=(0,), payload_bytes=1)
    assert names(snapshot(flow(), both)) == {"one_sided_dscp": 1, "dscp_0": 1}


def test_cnps_in_a_class_of_their_own_are_not_one_sided() -> None:
    alone = snapshot(flow(), answers(kinds={"cnp": 1}, becn=1, dscp=(48,)))
    assert names(alone) == {"marked": 1}
    beside_acks = snapshot(flow(), answers(kinds={"ack": 9, "cnp": 1}, becn=1, dscp=(26, 48)))
    assert names(beside_acks) == {"marked": 1}


def test_the_default_class_is_a_hint_beside_nothing_wrong() -> None:
    reading = snapshot(flow(dscp=(0,)), answers(dscp=(0,)))
    assert only(reading, "dscp_0").severity == "info"
    assert names(reading) == {"dscp_0": 1, "nothing_wrong": 1}
    assert "dscp_0" not in names(snapshot(flow(dscp=(0, 26)), answers(dscp=(0,))))


def test_a_flow_without_any_ect_packet_is_not_ect() -> None:
    reading = snapshot(flow(ecn=(100, 0, 0, 0)), answers())
    assert only(reading, "not_ect").evidence["not_ect"] == 100
    assert "not_ect" not in names(snapshot(flow(ecn=(60, 0, 40, 0)), answers()))
    assert "not_ect" not in names(snapshot(flow(ecn=(0, 0, 0, 100)), answers()))


def test_many_flows_on_few_source_ports_have_low_entropy() -> None:
    flows = [flow(dqpn=0x10 + n, peer=None, sport=0xC000 + n // 4) for n in range(8)]
    verdict = only(snapshot(*flows), "low_entropy")
    assert verdict.flow == f"{A}-{B}"
    assert (verdict.evidence["flows"], verdict.evidence["source_ports"]) == (8, 2)
    assert verdict.evidence["ports"] == [0xC000, 0xC001]


@pytest.mark.parametrize(
    ("count", "flows_per_port"), [(3, 3), (8, 3)], ids=["three flows", "a port for three flows"]
)
def test_few_flows_or_enough_ports_are_no_low_entropy(count: int, flows_per_port: int) -> None:
    flows = [
        flow(dqpn=0x10 + n, peer=None, sport=0xC000 + n // flows_per_port) for n in range(count)
    ]
    assert names(snapshot(*flows)) == {"nothing_wrong": count}


def test_a_capture_of_every_frame_twice_is_no_loss() -> None:
    twice = flow(kinds={"write": 200}, duplicates=100)
    assert names(snapshot(twice, answers(), is_capture=True)) == {"captured_twice": 1}
    # Live, or with a NAK, or on a handful of packets, repetition is retransmission.
    assert names(snapshot(twice, answers())) == {"network_loss": 1}
    nak = answers(kinds={"ack": 50, "nak": 1}, naks={"psn_sequence": 1})
    assert names(snapshot(twice, nak, is_capture=True)) == {"network_loss": 1}
    few = flow(kinds={"write": 2}, duplicates=1)
    assert names(snapshot(few, answers(), is_capture=True)) == {"network_loss": 1}


def test_datagrams_are_not_judged() -> None:
    reading = snapshot(flow(peer=None, transport=Transport.UD, kinds={"send": 9}))
    assert not judge(reading)


def test_two_observation_points_of_a_flow_give_one_verdict() -> None:
    ports = {0: Port(0, "veth0", netns="a"), 1: Port(1, "veth1", netns="b")}
    nak = {"kinds": {"ack": 50, "nak": 2}, "naks": {"psn_sequence": 2}}
    reading = snapshot(
        flow(direction=Direction.EGRESS, duplicates=9),  # before the loss
        flow(port=1, gap_packets=2, recovered=2, duplicates=5),  # behind it
        answers(**nak),
        answers(port=1, direction=Direction.EGRESS, **nak),
        ports=ports,
    )
    verdict = only(reading, "network_loss")
    assert verdict.evidence["psn_sequence_naks"] == 2
    assert (verdict.evidence["duplicates"], verdict.evidence["recovered"]) == (9, 2)


def test_a_pair_known_from_one_direction_only_is_joined() -> None:
    reading = snapshot(
        flow(duplicates=1, peer=None),
        answers(kinds={"ack": 50, "nak": 1}, naks={"psn_sequence": 1}),
    )
    assert only(reading, "network_loss").flow == FLOW


def test_verdicts_come_worst_first() -> None:
    reading = snapshot(
        flow(dscp=(0,), ecn=(0, 0, 50, 50)),
        answers(kinds={"ack": 50, "nak": 1}, naks={"remote_access": 1}, dscp=(0,)),
        flow(dqpn=0x12, peer=None),
    )
    severities = [SEVERITIES.index(verdict.severity) for verdict in judge(reading)]
    assert severities == sorted(severities)
    assert len(set(severities)) == 4


# ---- explain ----


def many() -> Snapshot:
    """Two pairs, one of them with a loss, and a QPN that two hosts use."""
    nak = {"kinds": {"ack": 50, "nak": 1}, "naks": {"psn_sequence": 1}}
    return snapshot(
        flow(duplicates=3),
        answers(**nak),
        flow(dst="10.0.0.20", dqpn=0x11, peer=None),
        flow(dst="10.0.0.20", dqpn=0x1B, peer=None),
        queue_pairs=(QueuePair(0, "rxe0", 0x11, 0x21, "RC", "RTS", 4242, "train.py"),),
    )


@pytest.mark.parametrize(
    "query", [FLOW, f"  {FLOW} ", f"{A}-{B}-", BACK, f"{B}", "0x21", "33", "0X000021"]
)
def test_explain_finds_a_flow_by_name_prefix_or_qpn(query: str) -> None:
    explanation = explain(many(), query)
    assert {explanation.flow, explanation.opposite} == {FLOW, BACK}
    assert [verdict.verdict for verdict in explanation.verdicts] == ["network_loss"]
    document = json.loads(json.dumps(explanation.to_json()))
    assert document["verdicts"][0]["evidence"]["psn_sequence_naks"] == 1


def test_explain_tells_the_owner_and_fits_the_screen() -> None:
    text = explain(many(), FLOW).to_text()
    assert "train.py (pid 4242)" in text
    assert "network_loss" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("query", ["0x11", "17", A, "10.0.0"])
def test_an_ambiguous_query_lists_its_candidates(query: str) -> None:
    with pytest.raises(UsageError, match="matches") as raised:
        explain(many(), query)
    assert FLOW in str(raised.value)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("query", ["192.168.0.1", "0x99", "nonsense", "", "-1", "0xzz"])
def test_an_unknown_query_lists_what_there_is(query: str) -> None:
    with pytest.raises(UsageError, match="No flow matches") as raised:
        explain(many(), query)
    assert FLOW in str(raised.value)


def test_explaining_an_empty_reading_is_an_error() -> None:
    with pytest.raises(UsageError, match="at all"):
        explain(snapshot(), "0x11")


# ---- text ----


def test_equal_verdicts_are_shown_together_and_fit_the_screen() -> None:
    reading = snapshot(*(flow(dqpn=0x10 + n, peer=None, gap_packets=n + 1) for n in range(9)))
    verdicts = judge(reading)
    text = verdicts_text(verdicts)
    assert "INFO: undecided_gaps (9 flows)" in text
    assert text.splitlines()[1].strip() == f"{A}-{B}-0x000018"  # the one with most packets
    assert "... and 5 more" in text
    assert max(map(len, text.splitlines())) <= 80
    assert verdicts_text(verdicts, wide=True).count(f"{A}-{B}-") == 9


def test_the_flows_table_fits_the_screen_with_the_longest_names() -> None:
    ends: dict[str, Any] = {
        "src": "2001:db8:1111:2222:3333:4444:5555:6666",
        "dst": "2001:db8:aaaa::1",
    }
    reading = snapshot(
        flow(src="192.168.111.222", dst="192.168.111.223", peer=None, packets=10**12), flow(**ends)
    )
    table = flows_table(flow_rows(reading))
    assert max(map(len, table.splitlines())) <= 80
    for title in ("PKTS", "BYTE", "GAPS", "DUP", "NAK", "RNR", "CE"):
        assert title in table.splitlines()[0].split()
    assert "192.168.111.222-192.168.111.223-0x000011" in table
    wide = flows_table(flow_rows(reading), wide=True)
    assert f"{ends['src']}-{ends['dst']}-0x000011" in wide
    assert "PID/COMMAND" in wide


def test_counts_take_four_characters() -> None:
    values = [0, 999, 1000, 9949, 9950, 99_999, 999_499, 999_500, 10**9, 2**64 - 1]
    assert [human(value) for value in values[:8]] == [
        "0", "999", "1.0k", "9.9k", "10k", "100k", "999k", "1.0M",
    ]  # fmt: skip
    assert all(len(human(value)) <= 4 for value in values)


def test_percentiles_of_many_histograms_are_those_of_each() -> None:
    rng = np.random.default_rng(7)
    histograms = rng.integers(0, 4, (50, layout.RTT_BUCKETS)) * rng.integers(0, 2, (50, 1))
    together = rtt_percentiles_ns(histograms, (1, 50, 99, 100))
    bounds = layout.rtt_bucket_bounds_ns()
    for index, histogram in enumerate(histograms):
        for row, percent in zip(together, (1, 50, 99, 100), strict=True):
            assert row[index] == rtt_percentile_ns(histogram, percent)
            # By definition: the samples in order, the one at this rank, its bucket.
            samples = np.repeat(np.arange(layout.RTT_BUCKETS), histogram)
            if not len(samples):
                assert row[index] == 0
                continue
            bucket = samples[max(int(np.ceil(percent / 100 * len(samples))) - 1, 0)]
            assert row[index] >= bounds[bucket]
            if bucket + 1 < layout.RTT_BUCKETS:
                assert row[index] <= bounds[bucket + 1]
