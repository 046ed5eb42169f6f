"""Every kind of verbs traffic: the observer counts exactly what rxe counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts import sh
from tests.rxe.verbs import (
    PATIENT,
    Observed,
    Reading,
    RxeHost,
    assert_clean,
    assert_equals_rxe,
)

Hosts = tuple[RxeHost, RxeHost]


def check(reading: Reading, hosts: Hosts) -> None:
    assert_equals_rxe(reading, hosts)
    assert_clean(reading, hosts)
    # One wire between them: what one side sent, the other side got.
    a, b = hosts
    for sender, receiver in ((a, b), (b, a)):
        for key in ("packets", "payload_bytes", "messages"):
            assert reading.total(sender, "egress", key) == reading.total(receiver, "ingress", key)


@pytest.mark.parametrize("mtu", [1024, 4096])
def test_ib_write_bw(observed: Observed, rxe_hosts: Hosts, mtu: int) -> None:
    client, server = rxe_hosts
    reading = observed.run(
        server, client, "ib_write_bw", "-n", "100", "-s", "65536", "-m", str(mtu), *PATIENT
    )
    check(reading, rxe_hosts)
    flow = reading.requests(client, "egress")
    assert flow["messages"] == 100
    assert flow["kinds"] == {"write": 100 * 65536 // mtu} and flow["packets"] == 6553600 // mtu
    assert flow["payload_bytes"] == 100 * 65536
    assert flow["path_mtu"] == flow["max_payload"] == mtu
    assert flow["transport"] == "RC"
    assert set(reading.answers(server, "egress")["kinds"]) == {"ack"}


def test_ib_send_bw(observed: Observed, rxe_hosts: Hosts) -> None:
    client, server = rxe_hosts
    reading = observed.run(server, client, "ib_send_bw", "-n", "200", "-s", "10000", *PATIENT)
    check(reading, rxe_hosts)
    flow = reading.requests(server, "ingress")
    assert flow["messages"] == 200
    assert flow["kinds"] == {"send": 600}  # 4096 + 4096 + 1808
    assert flow["payload_bytes"] == 200 * 10000


def test_ib_read_bw(observed: Observed, rxe_hosts: Hosts) -> None:
    client, server = rxe_hosts
    reading = observed.run(server, client, "ib_read_bw", "-n", "100", "-s", "65536", *PATIENT)
    check(reading, rxe_hosts)
    requests, responses = reading.requests(client, "egress"), reading.answers(client, "ingress")
    assert requests["messages"] == 100
    assert requests["kinds"] == {"read_request": 100}
    assert responses["kinds"] == {"read_response": 1600}
    assert responses["payload_bytes"] == 100 * 65536


@pytest.mark.parametrize("tool", ["ib_atomic_bw", "ib_atomic_lat"])
@pytest.mark.parametrize("kind", ["FETCH_AND_ADD", "CMP_AND_SWAP"])
def test_atomics(observed: Observed, rxe_hosts: Hosts, tool: str, kind: str) -> None:
    client, server = rxe_hosts
    reading = observed.run(server, client, tool, "-A", kind, "-n", "100", *PATIENT)
    check(reading, rxe_hosts)
    requests, answers = reading.requests(client, "egress"), reading.answers(client, "ingress")
    assert requests["messages"] == 100
    assert requests["kinds"] == {"atomic": 100}
    assert answers["kinds"] == {"atomic_ack": 100}
    assert requests["payload_bytes"] == answers["payload_bytes"] == 0


@pytest.mark.parametrize("tool", ["ib_write_lat", "ib_send_lat"])
def test_latency_tools_that_play_ping_pong(observed: Observed, rxe_hosts: Hosts, tool: str) -> None:
    client, server = rxe_hosts
    reading = observed.run(server, client, tool, "-n", "200", "-s", "512", *PATIENT)
    check(reading, rxe_hosts)
    for sender in (client, server):
        flow = reading.requests(sender, "egress")
        assert flow["messages"] == 200 and flow["payload_bytes"] == 200 * 512


def test_ib_read_lat(observed: Observed, rxe_hosts: Hosts) -> None:
    client, server = rxe_hosts
    reading = observed.run(server, client, "ib_read_lat", "-n", "100", "-s", "512", *PATIENT)
    check(reading, rxe_hosts)
    assert reading.requests(client, "egress")["messages"] == 100
    assert reading.answers(client, "ingress")["kinds"] == {"read_response": 100}


def test_unreliable_datagrams(observed: Observed, rxe_hosts: Hosts) -> None:
    client, server = rxe_hosts
    reading = observed.run(server, client, "ib_send_bw", "-c", "UD", "-n", "200", "-s", "2048")
    check(reading, rxe_hosts)
    flow = reading.requests(client, "egress")
    assert flow["transport"] == "UD"
    assert flow["messages"] == flow["packets"] == 200
    assert flow["source_qpn"] is not None
    assert reading.of(server, "egress") == []  # nobody acknowledges a datagram


@pytest.mark.parametrize(
    ("tool", "kind"), [("ib_send_bw", "send"), ("ib_write_bw", "write")], ids=["send", "write"]
)
def test_unreliable_connections(observed: Observed, rxe_hosts: Hosts, tool: str, kind: str) -> None:
    client, server = rxe_hosts
    reading = observed.run(server, client, tool, "-c", "UC", "-n", "100", "-s", "16384")
    check(reading, rxe_hosts)
    flow = reading.requests(client, "egress")
    assert flow["transport"] == "UC"
    assert flow["messages"] == 100 and flow["kinds"] == {kind: 400}
    assert reading.of(server, "egress") == []


@pytest.mark.parametrize(
    ("tool", "transport"),
    [("ibv_rc_pingpong", "RC"), ("ibv_uc_pingpong", "UC"), ("ibv_ud_pingpong", "UD")],
)
def test_pingpong_examples(observed: Observed, rxe_hosts: Hosts, tool: str, transport: str) -> None:
    client, server = rxe_hosts
    reading = observed.run(server, client, tool, "-n", "100", "-s", "1024")
    assert_equals_rxe(reading, rxe_hosts)
    for sender, receiver in ((client, server), (server, client)):
        flow = reading.requests(sender, "egress")
        # Their timeout is fixed, 67 ms: on a busy machine a queue pair repeats for no reason.
        repeated = reading.requests(receiver, "ingress")["duplicate_requests"]
        assert repeated == reading.rxe[receiver.netns]["duplicate_request"]
        assert flow["duplicates"] == repeated
        assert flow["transport"] == transport
        assert flow["messages"] == 100 and flow["kinds"]["send"] == 100 + repeated
        assert flow["payload_bytes"] == (100 + repeated) * 1024
        assert flow["gap_packets"] == flow["naks"] == 0


def test_ipv6(observed: Observed, rxe_hosts: Hosts) -> None:
    client, server = rxe_hosts
    reading = observed.run(
        server, client, "ib_write_bw", "-n", "100", "-s", "65536", *PATIENT, family=6
    )
    check(reading, rxe_hosts)
    flow = reading.requests(server, "ingress")
    assert (flow["src"], flow["dst"]) == (client.address6, server.address6)
    assert flow["messages"] == 100 and flow["packets"] == 1600


def test_both_directions_at_once(observed: Observed, rxe_hosts: Hosts) -> None:
    client, server = rxe_hosts
    reading = observed.run(
        server, client, "ib_write_bw", "-b", "-n", "100", "-s", "32768", *PATIENT
    )
    check(reading, rxe_hosts)
    for sender in (client, server):
        flow = reading.requests(sender, "egress")
        assert flow["messages"] == 100
        assert flow["kinds"]["write"] == 800
        assert flow["kinds"]["ack"] >= 1  # requests and acknowledgements share the flow


def test_several_queue_pairs(observed: Observed, rxe_hosts: Hosts) -> None:
    client, server = rxe_hosts
    reading = observed.run(
        # -t 8: 128 packets in flight at most, half of what a veth's XDP ring holds
        server,
        client,
        "ib_write_bw",
        "-q",
        "4",
        "-n",
        "50",
        "-s",
        "16384",
        "-t",
        "8",
        *PATIENT,
    )
    check(reading, rxe_hosts)
    flows = reading.of(client, "egress")
    assert len({flow["dqpn"] for flow in flows}) == 4
    assert [flow["messages"] for flow in flows] == [50] * 4
    assert [flow["packets"] for flow in flows] == [200] * 4


def test_messages_of_odd_sizes(observed: Observed, rxe_hosts: Hosts) -> None:
    """Padding is no payload: 4097 bytes are two packets, the second one of a single byte."""
    client, server = rxe_hosts
    reading = observed.run(server, client, "ib_send_bw", "-n", "100", "-s", "4097", *PATIENT)
    check(reading, rxe_hosts)
    flow = reading.requests(server, "ingress")
    assert flow["payload_bytes"] == 100 * 4097
    assert flow["messages"] == 100 and flow["packets"] == 200


@pytest.fixture
def vlan(rxe_hosts: Hosts) -> Iterator[tuple[str, str]]:
    """Addresses of two VLAN devices on top of the hosts' interfaces; rxe stays on these."""
    addresses = ("10.77.100.1", "10.77.100.2")
    for host, address in zip(rxe_hosts, addresses, strict=True):
        sh(f"ip -n {host.netns} link add link eth0 name eth0.100 type vlan id 100")
        sh(f"ip -n {host.netns} addr add {address}/24 dev eth0.100")
        sh(f"ip -n {host.netns} link set eth0.100 up")
    yield addresses
    for host in rxe_hosts:
        sh(f"ip -n {host.netns} link del eth0.100")


def test_a_vlan_device(observed: Observed, rxe_hosts: Hosts, vlan: tuple[str, str]) -> None:
    client, server = rxe_hosts
    reading = observed.run(
        server, client, "ib_write_bw", "-n", "100", "-s", "65536", "-m", "4096", *PATIENT,
        addresses=(vlan[1], vlan[0]),
    )  # fmt: skip
    check(reading, rxe_hosts)
    flow = reading.requests(client, "egress")
    assert (flow["src"], flow["dst"]) == vlan
    assert flow["messages"] == 100
    assert flow["vlan_packets"] == flow["packets"] == 1600
    # veth keeps the tag beside the frame, where XDP cannot see it.
    assert reading.requests(server, "ingress")["vlan_packets"] == 0
