"""The controller comes and goes while queue pairs work: they do not notice, it misses nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Controller, sh
from tests.rxe.verbs import (
    PATIENT,
    Observed,
    Program,
    RxeHost,
    assert_clean,
    assert_equals_rxe,
    poll,
    rc_peers,
    running,
    rxe_pair,
)

Hosts = tuple[RxeHost, RxeHost]
MESSAGES = 1500  # about two seconds of work


@pytest.fixture(scope="module")
def hosts(rxe_kernel: None) -> Iterator[Hosts]:
    """Two hosts of these tests' own: controllers come and go here."""
    with rxe_pair() as pair:
        yield pair


def moved(host: RxeHost, before: dict[str, int], packets: int) -> Callable[[], bool]:
    """Whether `host` has sent so many RDMA packets since `before`."""
    return lambda: host.counters()["sent_pkts"] - before["sent_pkts"] >= packets


def rows_of(controller: Controller) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = controller.json("flows")["flows"]
    return rows


@contextmanager
def long_write(
    hosts: Hosts, messages: int = MESSAGES
) -> Iterator[tuple[Program, Program, dict[str, int]]]:
    """An ib_write_bw in the middle of its work: server, client, the client's counters before."""
    client, server = hosts
    before = client.counters()
    tool = ("ib_write_bw", "-n", str(messages), "-s", "65536", "-m", "4096", *PATIENT)
    with running(server, client, *tool) as (serving, calling):
        poll(moved(client, before, 100), "the first packets are sent", 30)
        yield serving, calling, before


def test_flows_belong_to_the_processes_that_own_their_queue_pairs(
    observed: Observed, rxe_hosts: Hosts
) -> None:
    client, server = rxe_hosts
    with long_write(rxe_hosts) as (serving, calling, _):
        listed = {host: host.queue_pairs() for host in rxe_hosts}
        qpns = {entry["lqpn"] for entries in listed.values() for entry in entries}

        def rows_now() -> list[dict[str, Any]]:
            return [row for row in rows_of(observed.controller) if row["dqpn"] in qpns]

        poll(
            lambda: {row["pair"] for row in rows_now()} == {"registry"},
            "all flows are paired by the registry",
        )
        rows = rows_now()
        calling.wait(60)
        serving.wait(60)
    assert len(rows) == 4  # requests and answers, at two hosts
    for row in rows:
        host, program = (
            (client, calling) if row["interface"] == client.target else (server, serving)
        )
        assert (row["pid"], row["command"]) == (program.pid, "ib_write_bw")
        (queue_pair,) = listed[host]
        assert queue_pair["pid"] == program.pid
        local, remote = queue_pair["lqpn"], queue_pair["rqpn"]
        expected = (remote, local) if row["direction"] == "egress" else (local, remote)
        assert (row["dqpn"], row["peer_qpn"]) == expected
    # Who owned a finished flow is still told: that is when people look.
    time.sleep(1.5)  # more than a period of the agent's own looking
    assert {row["pid"] for row in rows_now()} == {calling.pid, serving.pid}
    observed.reading()


def test_a_killed_controller_is_picked_up_without_losing_a_packet(
    hosts: Hosts, controller: Controller
) -> None:
    client, server = hosts
    networks = [host.network_state() for host in hosts]
    first = controller.start(client.target, server.target)
    observed = Observed(hosts, controller)
    with long_write(hosts) as (serving, calling, before):
        controller.kill(first)
        count = client.counters()["sent_pkts"] - before["sent_pkts"]
        poll(moved(client, before, count + 500), "packets flow without a controller", 30)
        assert calling.process.poll() is None, "the tool should still be at work"
        second = controller.start(client.target, server.target)
        assert second != first
        calling.wait(60)
        serving.wait(60)
    reading = observed.reading()
    assert_equals_rxe(reading, hosts)
    assert_clean(reading, hosts)
    assert reading.requests(client, "egress")["packets"] == MESSAGES * 16
    assert reading.requests(server, "ingress")["messages"] == MESSAGES
    events = [entry["event"] for entry in controller.json("status")["events"]]
    assert any("adopted" in event for event in events)
    controller.run("stop")
    assert [host.network_state() for host in hosts] == networks


def test_attaching_and_stopping_under_traffic_leave_the_queue_pair_alone(
    hosts: Hosts, controller: Controller, tmp_path: Path
) -> None:
    client, server = hosts
    networks = [host.network_state() for host in hosts]
    controller.start(server.target)
    before = client.counters()
    end = tmp_path / "end"
    with rc_peers(
        server, client, "--write", "--bytes", "65536",
        client_arguments=["--pipelined", "--until-file", str(end)],
    ) as (serving, calling):  # fmt: skip
        poll(moved(client, before, 100), "the first packets are sent", 30)
        controller.run("attach", client.target)
        poll(lambda: len(rows_of(controller)) == 4, "both hosts see both directions")
        controller.run("stop")
        assert [host.network_state() for host in hosts] == networks
        count = client.counters()["sent_pkts"] - before["sent_pkts"]
        poll(moved(client, before, count + 1000), "packets flow on", 30)
        end.touch()
        assert calling.wait(60).endswith("done\n")
        assert serving.wait(60).endswith("done\n")
    after = client.counters()
    # veth drops what is in its ring when its XDP program goes: RC may have to repeat that.
    # A local send error is fatal for a queue pair of soft-RoCE.
    for name in ("retry_exceeded_err", "send_err"):
        assert after[name] == before[name]


def test_an_interface_deleted_under_traffic_is_let_go_and_the_other_one_stays(
    hosts: Hosts, controller: Controller
) -> None:
    with rxe_pair() as victims:
        client, server = hosts
        controller.start(*(host.target for host in (*victims, *hosts)))
        with long_write(victims):
            sh(f"ip -n {victims[0].netns} link del eth0")
            labels = [host.target for host in hosts]
            poll(
                lambda: [e["interface"] for e in controller.json("status")["interfaces"]] == labels,
                "only the living interfaces are attached",
            )
        events = [entry["event"] for entry in controller.json("status")["events"]]
        for host in victims:
            assert any(f"{host.target} vanished" in event for event in events)
    observed = Observed(hosts, controller)
    reading = observed.run(server, client, "ib_write_bw", "-n", "50", "-s", "65536", *PATIENT)
    assert_equals_rxe(reading, hosts)
    assert_clean(reading, hosts)
    assert reading.requests(client, "egress")["messages"] == 50


def test_queue_pairs_with_equal_psns_are_paired_right_and_timed(
    observed: Observed, rxe_hosts: Hosts
) -> None:
    """As NCCL's: several queue pairs between two hosts, all of them starting with PSN 0."""
    client, server = rxe_hosts
    with rc_peers(
        server, client, "--qps", "4", "--psn", "0", "--messages", "150",
        client_arguments=["--pause-ms", "5"],
    ) as (serving, calling):  # fmt: skip
        texts = [calling.wait(60), serving.wait(60)]
    at_client, at_server = (json.loads(text.splitlines()[0]) for text in texts)
    reading = observed.reading()
    assert_equals_rxe(reading, rxe_hosts)
    assert_clean(reading, rxe_hosts)
    assert len(reading.rows) == 16
    for host, pairs in ((client, at_client), (server, at_server)):
        local_of = {remote: local for local, remote in pairs}
        remote_of = dict(map(tuple, pairs))
        for row in reading.of(host, "egress"):
            assert (row["pair"], row["peer_qpn"]) == ("registry", local_of[row["dqpn"]])
        for row in reading.of(host, "ingress"):
            assert (row["pair"], row["peer_qpn"]) == ("registry", remote_of[row["dqpn"]])
    for row in reading.of(client, "egress"):
        assert row["messages"] == 150
        # The first ones pass before the registry is read: those have no certain ACK.
        assert 50 <= row["rtt_us"]["samples"] <= 150
        assert 0 < row["rtt_us"]["min"] <= row["rtt_us"]["p50"] <= row["rtt_us"]["max"]


def write_with_eight_queue_pairs(observed: Observed) -> None:
    """More packets in flight than the 256 of a veth's XDP ring: all must arrive.

    When the ring is full, a veth without a qdisc (the other end's!) drops, and soft-RoCE
    takes that for a local error that kills the queue pair.
    """
    client, server = observed.hosts
    tool = ("ib_write_bw", "-q", "8", "-n", "150", "-s", "65536", "-m", "4096", *PATIENT)
    reading = observed.run(server, client, *tool)
    assert_equals_rxe(reading, observed.hosts)
    assert reading.rxe[client.netns]["send_err"] == 0
    assert [flow["messages"] for flow in reading.of(client, "egress")] == [150] * 8


def test_eight_queue_pairs_survive_native_xdp_when_the_veths_have_a_qdisc(
    observed: Observed, rxe_hosts: Hosts
) -> None:
    for host in rxe_hosts:
        sh(f"tc -n {host.netns} qdisc add dev eth0 root pfifo limit 2000")
    try:
        write_with_eight_queue_pairs(observed)
    finally:
        for host in rxe_hosts:
            sh(f"tc -n {host.netns} qdisc del dev eth0 root")


def test_eight_queue_pairs_survive_the_tc_hook_without_a_qdisc(
    hosts: Hosts, controller: Controller
) -> None:
    controller.start(*(host.target for host in hosts), extra=("--mode", "tc"))
    write_with_eight_queue_pairs(Observed(hosts, controller))
