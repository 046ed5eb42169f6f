"""Classes, echo and reaction on real verbs traffic; and what a crash does to it: nothing."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Controller
from tests.rxe.verbs import (
    PATIENT,
    Program,
    RxeHost,
    Switch,
    poll,
    rc_peers,
    running,
    rxe_switched,
)

Bed = tuple[Switch, list[RxeHost]]
MTU = ("-s", "65536", "-m", "4096")
# Errors that a starved or broken queue pair shows, by rxe's names.
TROUBLE = (
    "duplicate_request", "out_of_seq_request", "rcvd_seq_err", "completer_retry_err",
    "retry_exceeded_err", "send_err",
)  # fmt: skip


@pytest.fixture(scope="module")
def bed(rxe_kernel: None) -> Iterator[Bed]:
    """Three hosts around a switch, each flow's packets received on one CPU."""
    with rxe_switched(3) as (switch, hosts):
        switch.keep_order(hosts)
        yield switch, hosts


def start(controller: Controller, tmp_path: Path, config: str, *hosts: RxeHost) -> int:
    path = tmp_path / "stellar.toml"
    path.write_text(config)
    targets = [host.target for host in hosts]
    return controller.start(*targets, extra=("--config", str(path), "--mode", "tc"))


def increase(before: dict[str, int], host: RxeHost) -> dict[str, int]:
    """What rxe's trouble counters have gained."""
    now = host.counters()
    return {name: now[name] - before[name] for name in TROUBLE if now[name] != before[name]}


def job(controller: Controller, name: str) -> dict[str, Any]:
    document: dict[str, Any] = controller.json("job", "show", name)["job"]
    return document


def flows_of(controller: Controller, host: RxeHost, direction: str) -> list[dict[str, Any]]:
    rows = controller.json("flows")["flows"]
    return [r for r in rows if (r["interface"], r["direction"]) == (host.target, direction)]


@contextlib.contextmanager
def write(
    monkeypatch: pytest.MonkeyPatch,
    server: RxeHost,
    client: RxeHost,
    job_name: str,
    *more: str,
    tool: str = "ib_write_bw",
) -> Iterator[tuple[Program, Program]]:
    """A perftest whose processes carry STELLAR_JOB; `more` are arguments of both sides."""
    monkeypatch.setenv("STELLAR_JOB", job_name)
    with running(server, client, tool, *MTU, *more) as programs:
        monkeypatch.delenv("STELLAR_JOB")
        yield programs


def test_a_job_is_known_by_the_environment_of_its_processes_at_both_ends(
    bed: Bed, controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (client, _, server) = bed
    start(controller, tmp_path, '[[job]]\nname = "train"\nclass = 5\n', client, server)
    with (
        write(monkeypatch, server, client, "train", "-D", "16", *PATIENT) as named,
        write(monkeypatch, server, client, "someone-else", "-D", "16", *PATIENT) as others,
    ):
        poll(lambda: len(job(controller, "train")["flows"]) == 2, "data and ACKs are found", 20)
        # At the receiver: the class of the data of one, the other as its application sent it.
        poll(
            lambda: sorted(
                max(row["dscp"]) for row in flows_of(controller, server, "ingress") if row["dscp"]
            )
            == [0, 34],
            "DSCPs of both flows at the receiver", 20,
        )  # fmt: skip
        for programs in (named, others):
            for program in programs:
                program.wait(60)
    # ACKs of the job ride the top class; the others' carry what they were given.
    acks = flows_of(controller, client, "ingress")
    assert sorted(max(row["dscp"]) for row in acks) == [0, 48]


TWO_CLASSES = """
[[job]]
name = "high"
class = 6
[[job]]
name = "low"
class = 1
"""
LINK_Mbit = 40
SHARES = {"high": 0.75, "low": 0.25}


def test_of_two_flows_the_high_one_gets_its_ceiling_and_the_low_one_its_floor(
    bed: Bed, controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (client, _, server) = bed
    # Events: two tools that poll without a pause would take both CPUs from rxe and the qdisc.
    blocking = ("-e", *PATIENT)
    messages = {name: str(int(14 * s * LINK_Mbit * 1e6 / 8 / 65536)) for name, s in SHARES.items()}
    others = [part for number in (0, 2, 3, 4, 5, 7) for part in ("--floor", f"{number}=1%")]
    controller.run(
        "qdisc", "setup", client.target, "--rate", f"{LINK_Mbit}mbit", "--qp-timeout", "18",
        "--floor", "1=25%", "--floor", "6=5%", "--ceiling", "6=75%", *others,
    )  # fmt: skip
    try:
        start(controller, tmp_path, TWO_CLASSES, client, server)

        def sent() -> dict[str, int]:
            classes = controller.json("qdisc", "show", client.target)["classes"]
            by_number = {entry["number"]: entry["sent_bytes"] for entry in classes}
            return {"high": by_number[6], "low": by_number[1]}

        with (
            write(
                monkeypatch,
                server,
                client,
                "low",
                "-n",
                messages["low"],
                *blocking,
                tool="ib_send_bw",
            ) as low,
            write(
                monkeypatch,
                server,
                client,
                "high",
                "-n",
                messages["high"],
                *blocking,
                tool="ib_send_bw",
            ) as high,
        ):
            poll(lambda: min(sent().values()) > 1_000_000, "both flows are in their class", 20)
            # A flow is classed some packets after its first: those behind may overtake these.
            before = {host: host.counters() for host in (client, server)}
            first, began = sent(), time.monotonic()
            time.sleep(5)
            last, seconds = sent(), time.monotonic() - began
            for program in (*low, *high):
                program.wait(90)  # a queue pair that died would end its tool with an error
        share = {
            name: (last[name] - first[name]) * 8 / seconds / (LINK_Mbit * 1e6) for name in SHARES
        }
        shares = ", ".join(f"{name} {value:.3f}" for name, value in share.items())
        print(f"shares of {LINK_Mbit} Mbit/s: {shares}")  # pytest -rP
        # HTB gives no time back that late timers of the lab kernel lose: 0.67 to 0.75 were seen.
        assert share["high"] == pytest.approx(SHARES["high"], abs=0.1)
        assert share["low"] == pytest.approx(SHARES["low"], abs=0.05)
        assert increase(before[client], client) == {}
        assert increase(before[server], server) == {}
    finally:
        controller.close()
        controller.run("qdisc", "clear", client.target)


REACTION = """
[[interface]]
name = "{client}"
rate = "100mbit"
mark = "{mark}"
[[interface]]
name = "{server}"
rate = "100mbit"
echo = "{echo}"
[[class]]
number = 3
kmin = "10KB"
kmax = "60KB"
pmax = 0.2
[[job]]
name = "train"
set_ect = true
[job.match]
command = ["ib_write_bw", "python*"]
[dcqcn]
preset = "paper"
timer = "5ms"
alpha_update = "5ms"
echo_interval = "2ms"
rate_ai = "1mbit"
rate_hai = "5mbit"
"""


@pytest.mark.parametrize("echo", ["becn", "cnp"])
def test_marks_come_back_as_echoes_and_cut_the_rate(
    bed: Bed, controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, echo: str
) -> None:
    _, (client, _, server) = bed
    client.sh("tc qdisc replace dev eth0 root fq limit 16384 flow_limit 2048")
    try:
        config = REACTION.format(
            client=client.target, server=server.target, mark="window", echo=echo
        )
        start(controller, tmp_path, config, client, server)
        before = {host: host.counters() for host in (client, server)}
        with write(monkeypatch, server, client, "train", "-D", "6", *PATIENT) as programs:
            for program in programs:
                program.wait(60)
        status = {e["interface"]: e["control"] for e in controller.json("status")["interfaces"]}
        sender, receiver = status[client.target]["acts"], status[server.target]["acts"]
        marked = sender["marked"]
        assert marked > 20
        # Each observer's own count: every mark arrived, every echo came back.
        (data,) = [r for r in flows_of(controller, server, "ingress") if r["payload_bytes"]]
        assert data["ce"] == marked
        echoes = receiver[f"echo_{echo}"]
        assert 0 < echoes <= marked
        (answers,) = flows_of(controller, client, "ingress")
        assert answers["cnp" if echo == "cnp" else "becn"] == echoes
        (flow,) = [f for f in job(controller, "train")["flows"] if f["feedback"]]
        assert flow["feedback"] == echoes
        assert flow["cuts"] == sender["cut"] > 0
        # Unpaced it would go several times as fast as the link that it was told of.
        assert data["payload_bytes"] * 8 / 6 < 110e6
        if echo == "cnp":
            assert sender["cnp_consumed"] == echoes  # none of them reached rxe
        assert increase(before[client], client) == {}
        assert increase(before[server], server) == {}
    finally:
        controller.close()
        client.sh("tc qdisc del dev eth0 root")


KILLS = 7  # some five seconds each


def test_killing_the_controller_at_random_moments_harms_no_queue_pair(
    bed: Bed, controller: Controller, tmp_path: Path
) -> None:
    _, (client, _, server) = bed
    client.sh("tc qdisc replace dev eth0 root fq limit 16384 flow_limit 2048")
    try:
        networks = [host.network_state() for host in (client, server)]
        config = REACTION.format(
            client=client.target, server=server.target, mark="window", echo="becn"
        )
        pid = start(controller, tmp_path, config, client, server)
        before = {host: host.counters() for host in (client, server)}
        moments = random.Random(20260703)
        enough = tmp_path / "enough"
        endless = ("--pipelined", "--until-file", str(enough))
        with rc_peers(
            server, client, "--write", "--messages", "64", "--bytes", "65536",
            client_arguments=endless,
        ) as programs:  # fmt: skip
            programs[1].wait_for("first")
            for _ in range(KILLS):
                time.sleep(moments.uniform(0.05, 1.0))
                controller.kill(pid)
                time.sleep(moments.uniform(0.0, 0.5))
                pid = start(controller, tmp_path, config, client, server)
            # A queue pair that dies ends it with the status of its completion.
            assert programs[1].process.poll() is None, programs[1].output()
            enough.touch()
            for program in programs:
                program.wait(60)
        # Adopted each time: nothing was missed, nothing lost, and the state went on.
        (data,) = [r for r in flows_of(controller, server, "ingress") if r["payload_bytes"]]
        assert data["packets"] == server.counters()["rcvd_pkts"] - before[server]["rcvd_pkts"]
        assert data["gap_packets"] == data["duplicates"] == 0
        assert increase(before[client], client) == {}
        assert increase(before[server], server) == {}
        assert job(controller, "train")["flows"]
        controller.run("stop")
        assert [host.network_state() for host in (client, server)] == networks
    finally:
        controller.close()
        client.sh("tc qdisc del dev eth0 root")
