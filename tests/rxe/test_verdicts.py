"""What `controller explain` says of real traffic with one thing wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.hosts import sh
from tests.rxe.verbs import Observed, RxeHost, Switch, assert_equals_rxe, rc_peers

Switched = tuple[Switch, list[RxeHost]]
WRITE = ("ib_write_bw", "-n", "60", "-s", "65536", "-m", "4096", "-u", "18")
PACKETS = 60 * 16
LOSS = {"network_loss", "host_drops", "reordering", "capture_loss", "undecided_gaps"}


@pytest.fixture
def network(switched_hosts: Switched) -> Iterator[Switched]:
    """The switch and its hosts; whole again afterwards."""
    switch, hosts = switched_hosts
    yield switched_hosts
    for host in hosts:
        switch.heal(host)


def explain(observed: Observed, flow: str) -> dict[str, dict[str, Any]]:
    """Verdicts about a flow, by name."""
    answer = observed.controller.json("explain", flow)
    return {entry["verdict"]: entry for entry in answer["verdicts"]}


def test_a_receiver_that_posts_late_is_named_and_the_network_is_not(
    observed_switched: Observed, network: Switched
) -> None:
    _, (client, server, _) = network
    with rc_peers(
        server, client, "--messages", "20", server_arguments=["--late-ms", "15"]
    ) as peers:
        for peer in peers:
            peer.wait(60)
    reading = observed_switched.reading()
    assert_equals_rxe(reading, (client, server))
    sent, received = reading.requests(client, "egress"), reading.requests(server, "ingress")
    rnr_naks = reading.answers(server, "egress")["rnr_naks"]
    assert rnr_naks == reading.rxe[server.netns]["send_rnr_err"] > 0
    assert rnr_naks == reading.answers(client, "ingress")["rnr_naks"]
    assert rnr_naks == reading.rxe[client.netns]["rcvd_rnr_err"]
    # Each RNR NAK has the one packet sent again, and only that.
    assert sent["messages"] == 20
    assert sent["duplicates"] == sent["packets"] - 20 == rnr_naks
    assert received["duplicate_requests"] == reading.rxe[server.netns]["duplicate_request"] == 0
    found = explain(observed_switched, sent["flow"])
    assert found["receiver_limited"]["evidence"]["rnr_naks"] == rnr_naks
    assert not LOSS & found.keys()


def test_sends_in_flight_behind_a_late_receive_are_not_called_loss(
    observed_switched: Observed, network: Switched
) -> None:
    """Behind an RNR NAK rxe refuses the following sends as out of sequence; none was lost."""
    _, (client, server, _) = network
    with rc_peers(
        server, client, "--messages", "20",
        server_arguments=["--late-ms", "15"], client_arguments=["--pipelined"],
    ) as peers:  # fmt: skip
        for peer in peers:
            peer.wait(60)
    reading = observed_switched.reading()
    assert_equals_rxe(reading, (client, server))
    sent, answers = reading.requests(client, "egress"), reading.answers(server, "egress")
    rxe = reading.rxe[server.netns]
    assert answers["rnr_naks"] == rxe["send_rnr_err"] > 0
    assert answers["naks"] == rxe["out_of_seq_request"] > 0
    found = explain(observed_switched, sent["flow"])
    assert "receiver_limited" in found
    assert not LOSS & found.keys(), found


def test_congestion_marks_are_counted_and_named(
    observed_switched: Observed, network: Switched
) -> None:
    switch, (client, server, _) = network
    switch.impair(server, "loss 10% ecn")  # marks what it would drop
    reading = observed_switched.run(
        server, client, *WRITE, client_arguments=["--tclass", "2"],
        server_arguments=["--tclass", "2"],
    )  # fmt: skip
    assert_equals_rxe(reading, (client, server))
    sent, received = reading.requests(client, "egress"), reading.requests(server, "ingress")
    marked = switch.marked(server)
    assert marked > 0
    assert sent["ecn"] == {"not_ect": 0, "ect1": 0, "ect0": PACKETS, "ce": 0}
    assert received["ce"] == received["ecn"]["ce"] == marked
    assert received["ecn"]["ect0"] == PACKETS - marked
    assert received["gap_packets"] == sent["duplicates"] == 0
    found = explain(observed_switched, sent["flow"])
    evidence = found["marked"]["evidence"]
    assert evidence["ce"] == marked
    assert evidence["ce_share_pct"] == pytest.approx(100 * marked / PACKETS, abs=0.01)
    assert found["marked"]["severity"] == "warning"
    assert not (LOSS | {"not_ect"}) & found.keys()


def test_a_traffic_class_on_one_side_only_is_named(
    observed_switched: Observed, network: Switched
) -> None:
    _, (client, server, _) = network
    reading = observed_switched.run(server, client, *WRITE, client_arguments=["--tclass", "106"])
    sent, answers = reading.requests(client, "egress"), reading.answers(client, "ingress")
    assert (sent["dscp"], answers["dscp"]) == ([26], [0])
    found = explain(observed_switched, sent["flow"])
    assert found["one_sided_dscp"]["evidence"]["dscp"] == [26]
    assert found["one_sided_dscp"]["evidence"]["opposite_dscp"] == [0]
    assert not (LOSS | {"not_ect", "dscp_0"}) & found.keys()


def test_the_same_traffic_class_on_both_sides_is_fine(
    observed_switched: Observed, network: Switched
) -> None:
    _, (client, server, _) = network
    reading = observed_switched.run(server, client, *WRITE, "--tclass", "106")
    assert reading.requests(client, "egress")["dscp"] == [26]
    found = explain(observed_switched, reading.requests(client, "egress")["flow"])
    assert found.keys() == {"nothing_wrong"}


def test_packets_without_ecn_in_the_default_class_are_pointed_out(
    observed_switched: Observed, network: Switched
) -> None:
    _, (client, server, _) = network
    reading = observed_switched.run(server, client, *WRITE)
    found = explain(observed_switched, reading.requests(client, "egress")["flow"])
    assert found["not_ect"]["evidence"] == {"not_ect": PACKETS, "ect": 0}
    assert found["dscp_0"]["severity"] == found["not_ect"]["severity"] == "info"
    assert found.keys() == {"not_ect", "dscp_0", "nothing_wrong"}


def test_drops_of_the_senders_own_qdisc_are_not_the_networks(
    observed_switched: Observed, network: Switched
) -> None:
    _, (client, server, _) = network
    sh(f"tc -n {client.netns} qdisc add dev eth0 root handle 1: prio bands 2 "
       f"priomap {'0 ' * 16}")  # fmt: skip
    try:
        sh(f"tc -n {client.netns} qdisc add dev eth0 parent 1:2 netem loss 3%")
        sh(
            f"tc -n {client.netns} filter add dev eth0 parent 1: protocol ip prio 1 u32 "
            "match ip protocol 17 0xff match ip dport 4791 0xffff flowid 1:2"
        )
        # -u 14: 67 ms, to repair what no NAK tells of
        reading = observed_switched.run(server, client, *WRITE, "-u", "14")
        sent = reading.requests(client, "egress")
        found = explain(observed_switched, sent["flow"])
    finally:
        sh(f"tc -n {client.netns} qdisc del dev eth0 root")
    assert sent["duplicates"] > 0
    assert "host_drops" in found and "network_loss" not in found
    evidence = found["host_drops"]["evidence"]
    assert sum(evidence["host_drop_counters"].values()) >= evidence["lost_at_least"] > 0
