"""Loss, reordering and duplication on the way: the observer tells what rxe itself found out.

docs/counters.md has the definitions. Three statements are independent of the observer: the
counters of rxe at both ends, the drops of the switch's qdisc, and how many packets the
messages take without any repetition.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rxe.verbs import (
    Observed,
    Reading,
    RxeHost,
    Switch,
    assert_clean,
    assert_equals_rxe,
    rc_peers,
    running,
)

Switched = tuple[Switch, list[RxeHost]]
MESSAGES = 120
MESSAGE_BYTES = 65536
PACKETS = MESSAGES * MESSAGE_BYTES // 4096
WRITE = ("ib_write_bw", "-n", str(MESSAGES), "-s", str(MESSAGE_BYTES), "-m", "4096")
TIMEOUT_67_MS = "14"  # 4 us * 2^14: what repairs a loss that no NAK tells of


@pytest.fixture
def network(switched_hosts: Switched) -> Iterator[Switched]:
    """The switch and its hosts; whole again afterwards."""
    switch, hosts = switched_hosts
    yield switched_hosts
    for host in hosts:
        switch.heal(host)


def write_impaired(
    observed: Observed,
    switch: Switch,
    server: RxeHost,
    client: RxeHost,
    netem: str,
    folder: Path,
    messages: int = MESSAGES,
    timeout: str = TIMEOUT_67_MS,
) -> Reading:
    """RDMA WRITEs over a network that is whole for the first message only.

    The observer takes the first packet that it sees for the first one of the flow. Were that
    one lost or overtaken, rxe would know better, and the numbers would differ.
    """
    go = folder / "go"
    with rc_peers(
        server, client, "--write", "--messages", str(messages), "--bytes", str(MESSAGE_BYTES),
        "--timeout", timeout, client_arguments=["--pipelined", "--go-file", str(go)],
    ) as (serving, calling):  # fmt: skip
        calling.wait_for("first")
        switch.impair(server, netem)
        go.touch()
        calling.wait(60)
        serving.wait(60)
    return observed.reading()


def check_responder(reading: Reading, receiver: RxeHost) -> dict[str, Any]:
    """The receiver's flow of requests: order exactly as rxe's responder judged it."""
    flow, rxe = reading.requests(receiver, "ingress"), reading.rxe[receiver.netns]
    assert flow["sequence_errors"] == rxe["out_of_seq_request"]
    assert flow["duplicate_requests"] == rxe["duplicate_request"]
    # One NAK for each sequence error, on its way out.
    naks = sum(row["naks_by_code"].get("psn_sequence", 0) for row in reading.of(receiver, "egress"))
    assert naks == rxe["out_of_seq_request"]
    return flow


def check_requester(reading: Reading, sender: RxeHost, packets: int) -> dict[str, Any]:
    """The sender's flow of requests: what exceeds `packets` was sent again."""
    flow, rxe = reading.requests(sender, "egress"), reading.rxe[sender.netns]
    assert flow["packets"] == rxe["sent_pkts"]
    assert flow["duplicates"] == rxe["sent_pkts"] - packets
    assert flow["gap_packets"] == 0  # nothing can be missing where it is sent
    return flow


def verdicts(observed: Observed, flow: str) -> dict[str, dict[str, Any]]:
    """What `controller explain` says of a flow, by verdict."""
    answer = observed.controller.json("explain", flow)
    return {entry["verdict"]: entry for entry in answer["verdicts"]}


@pytest.mark.parametrize("percent", [2, 5])
def test_lost_requests_are_what_rxe_and_the_switch_counted(
    observed_switched: Observed, network: Switched, percent: int, tmp_path: Path
) -> None:
    switch, (client, server, _) = network
    reading = write_impaired(
        observed_switched, switch, server, client, f"loss {percent}%", tmp_path
    )
    dropped = switch.dropped(server)
    assert dropped > 0
    assert_equals_rxe(reading, (client, server))
    sent = check_requester(reading, client, PACKETS)
    received = check_responder(reading, server)
    assert sent["packets"] - received["packets"] == dropped
    assert sent["messages"] == received["messages"] == MESSAGES
    # In the end every packet came once, and what was missing came late.
    assert received["packets"] - received["duplicates"] == PACKETS
    assert 0 < received["gap_packets"] == received["recovered"] <= dropped
    assert received["capture_loss_packets"] == 0
    # Nothing was lost on the way back. rxe counts only those NAKs that acknowledge something.
    naks = reading.answers(client, "ingress")["naks"]
    assert naks == reading.rxe[server.netns]["out_of_seq_request"] > 0
    assert reading.rxe[client.netns]["rcvd_seq_err"] <= naks


def test_a_lossy_flow_is_explained_as_network_loss_and_its_clean_neighbour_is_not(
    observed_switched: Observed, network: Switched
) -> None:
    switch, (client, lossy, clean) = network
    switch.impair(lossy, "loss 3%")
    with (
        running(lossy, client, *WRITE) as one,
        running(clean, client, *WRITE, "-u", "18") as other,
    ):
        for program in (*one, *other):
            program.wait(60)
    reading = observed_switched.reading()
    flows = {row["dst"]: row for row in reading.of(client, "egress")}
    verdict = verdicts(observed_switched, flows[lossy.address]["flow"])["network_loss"]
    assert verdict["severity"] == "error"
    assert (
        verdict["evidence"]["psn_sequence_naks"] == (reading.rxe[lossy.netns]["out_of_seq_request"])
    )
    assert verdict["evidence"]["duplicates"] == flows[lossy.address]["duplicates"]
    assert verdict["evidence"]["host_drops"] == 0
    assert verdict["remedy"]
    found = verdicts(observed_switched, flows[clean.address]["flow"])
    assert "nothing_wrong" in found
    assert not {"network_loss", "host_drops", "capture_loss", "reordering"} & found.keys()


def test_lost_atomic_answers_repeat_the_requests(
    observed_switched: Observed, network: Switched
) -> None:
    """The responder sees the same atomic twice: no gap, no NAK, only the requester's timeout."""
    switch, (client, server, _) = network
    switch.impair(client, "loss 15%")
    reading = observed_switched.run(server, client, "ib_atomic_lat", "-n", "60")
    assert_equals_rxe(reading, (client, server))
    sent = check_requester(reading, client, 60)
    received = check_responder(reading, server)
    assert received["duplicates"] == received["duplicate_requests"] == sent["duplicates"] > 0
    assert received["sequence_errors"] == received["gap_packets"] == 0
    assert received["messages"] == 60
    answered = reading.answers(server, "egress")["packets"]
    assert answered - reading.answers(client, "ingress")["packets"] == switch.dropped(client)
    found = verdicts(observed_switched, sent["flow"])
    assert found["network_loss"]["evidence"]["psn_sequence_naks"] == 0


def test_lost_read_responses_are_asked_for_again(
    observed_switched: Observed, network: Switched
) -> None:
    switch, (client, server, _) = network
    switch.impair(client, "loss 3%")
    reading = observed_switched.run(
        server, client, "ib_read_bw", "-n", "30", "-s", "65536", "-m", "4096"
    )
    assert_equals_rxe(reading, (client, server))
    sent = check_requester(reading, client, 30)
    received = check_responder(reading, server)
    assert received["duplicates"] == received["duplicate_requests"] == sent["duplicates"] > 0
    assert received["messages"] == 30
    responses = reading.answers(client, "ingress")
    assert responses["response_gap_packets"] > 0
    assert reading.answers(server, "egress")["response_gap_packets"] == 0


def test_reordered_requests_are_sequence_errors_but_not_lost(
    observed_switched: Observed, network: Switched, tmp_path: Path
) -> None:
    switch, (client, server, _) = network
    # A go-back-N responder throws away what overtook: few messages, or it takes long.
    reading = write_impaired(
        observed_switched, switch, server, client, "delay 1ms reorder 5%", tmp_path, 40
    )
    assert switch.dropped(server) == 0
    assert_equals_rxe(reading, (client, server))
    sent = check_requester(reading, client, 640)
    received = check_responder(reading, server)
    assert received["packets"] == sent["packets"]
    assert received["sequence_errors"] > 0
    assert received["packets"] - received["duplicates"] == 640
    assert received["gap_packets"] == received["recovered"] > 0
    assert received["messages"] == 40


def test_duplicated_requests_are_duplicates_and_nothing_else(
    observed_switched: Observed, network: Switched, tmp_path: Path
) -> None:
    switch, (client, server, _) = network
    reading = write_impaired(
        observed_switched, switch, server, client, "duplicate 5%", tmp_path, timeout="18"
    )
    assert_equals_rxe(reading, (client, server))
    sent = check_requester(reading, client, PACKETS)
    received = check_responder(reading, server)
    assert sent["duplicates"] == 0
    assert received["duplicates"] == received["packets"] - sent["packets"] > 0
    assert received["duplicate_requests"] == received["duplicates"]
    assert received["gap_packets"] == received["sequence_errors"] == 0
    assert received["messages"] == MESSAGES


def test_lost_packets_of_an_unreliable_connection_stay_lost(
    observed_switched: Observed, network: Switched
) -> None:
    """UC has no NAK: the gaps are all there is, and they are the switch's drops."""
    switch, (client, server, _) = network
    switch.impair(server, "loss 4%")
    reading = observed_switched.run(server, client, *WRITE, "-c", "UC")
    dropped = switch.dropped(server)
    assert_equals_rxe(reading, (client, server))
    sent, received = reading.requests(client, "egress"), reading.requests(server, "ingress")
    assert sent["packets"] == PACKETS and sent["duplicates"] == 0
    assert received["packets"] == PACKETS - dropped
    # A loss in front of the first or behind the last packet that came leaves no gap.
    assert 0 <= dropped - received["gap_packets"] <= 5
    assert received["gap_packets"] > 0
    assert received["recovered"] == received["duplicates"] == received["sequence_errors"] == 0
    # Without acknowledgements nothing tells where the packets are: no verdict of loss.
    found = verdicts(observed_switched, sent["flow"])
    assert "undecided_gaps" in found and "network_loss" not in found


def test_after_all_this_a_clean_run_is_clean(
    observed_switched: Observed, network: Switched
) -> None:
    _, (client, server, _) = network
    reading = observed_switched.run(server, client, *WRITE, "-u", "18")
    assert_equals_rxe(reading, (client, server))
    assert_clean(reading, (client, server))
    found = verdicts(observed_switched, reading.requests(client, "egress")["flow"])
    assert "nothing_wrong" in found
