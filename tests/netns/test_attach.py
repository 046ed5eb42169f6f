"""Attach, detach, replace, crash: the network is as before, and no counter is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Controller, Host, sh

Hosts = tuple[Host, Host]
Send = Callable[..., None]


def flow(document: Any, direction: str, qpn: int = 17) -> dict[str, Any]:
    rows = [r for r in document["flows"] if r["direction"] == direction and r["dqpn"] == qpn]
    assert len(rows) == 1, document
    return rows[0]


def test_every_packet_is_counted_on_both_sides(
    hosts: Hosts, controller: Controller, send: Send
) -> None:
    a, b = hosts
    controller.start(a.target, b.target)
    send(a, b, 0, 500)
    document = controller.json("flows")
    for direction, host in (("egress", a), ("ingress", b)):
        row = flow(document, direction)
        assert row["interface"] == host.target
        assert (row["src"], row["dst"]) == (a.address, b.address)
        assert row["packets"] == row["messages"] == 500
        assert row["payload_bytes"] == 500 * 256
        # Ethernet 14, IPv4 20, UDP 8, BTH 12, ICRC 4
        assert row["wire_bytes"] == 500 * (256 + 58)
        assert row["gap_packets"] == row["duplicates"] == 0
        assert row["ecn"]["ect0"] == 500
    status = controller.json("status")
    assert status["resident_bytes"] <= 80 * 1024 * 1024
    frames = {entry["interface"]: entry["frames"] for entry in status["interfaces"]}
    assert frames[a.target]["egress"]["roce"] == 500
    assert frames[b.target]["ingress"]["roce"] == 500


@pytest.mark.parametrize("mode", ["native", "generic", "tc"])
def test_stop_restores_what_was_before(
    hosts: Hosts, controller: Controller, send: Send, mode: str
) -> None:
    a, b = hosts
    before = [host.network_state() for host in hosts]
    controller.start(a.target, b.target, extra=("--mode", mode))
    entry = controller.json("status")["interfaces"][0]
    assert entry["mode"] == mode
    send(a, b, 0, 10)
    assert flow(controller.json("flows"), "ingress")["packets"] == 10
    assert controller.json("stop") == {"was_running": True, "detached": [a.target, b.target]}
    assert [host.network_state() for host in hosts] == before
    assert not list(controller.run_dir.glob("state*")) + list(controller.run_dir.glob("*.sock"))
    # and once more
    assert controller.json("stop") == {"was_running": False, "detached": []}


def test_a_killed_controller_is_adopted_without_losing_a_packet(
    hosts: Hosts, controller: Controller, send: Send
) -> None:
    a, b = hosts
    before = [host.network_state() for host in hosts]
    pid = controller.start(a.target, b.target)
    send(a, b, 0, 100)
    controller.kill(pid)
    send(a, b, 100, 100)  # nobody is there: the programs go on counting
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, a, b, 200, 400, pause_s=0.006)
        controller.start()  # names no interface: what is there is adopted
        sending.result(30)
    status = controller.json("status")
    assert status["adopted"]
    assert [entry["interface"] for entry in status["interfaces"]] == [a.target, b.target]
    document = controller.json("flows")
    for direction in ("egress", "ingress"):
        row = flow(document, direction)
        assert row["packets"] == 600
        assert row["gap_packets"] == row["duplicates"] == 0
    controller.run("stop")
    assert [host.network_state() for host in hosts] == before


def test_stop_cleans_up_after_a_crash(hosts: Hosts, controller: Controller) -> None:
    before = [host.network_state() for host in hosts]
    pid = controller.start(hosts[0].target, hosts[1].target)
    assert [host.network_state() for host in hosts] != before
    controller.kill(pid)
    answer = controller.json("stop")
    assert answer == {"was_running": False, "detached": [hosts[0].target, hosts[1].target]}
    assert [host.network_state() for host in hosts] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_detaches_everything(
    hosts: Hosts, controller: Controller, number: signal.Signals
) -> None:
    before = hosts[0].network_state()
    pid = controller.start(hosts[0].target)
    os.kill(pid, number)
    for _ in range(400):
        if hosts[0].network_state() == before:
            break
        time.sleep(0.05)
    assert hosts[0].network_state() == before


def test_interfaces_come_and_go_at_run_time(
    hosts: Hosts, controller: Controller, send: Send
) -> None:
    a, b = hosts
    controller.start(a.target)
    before = b.network_state()  # now: XDP on one end of a veth lowers the other's max_mtu
    controller.run("attach", b.target)
    send(a, b, 0, 50)
    assert {row["direction"] for row in controller.json("flows")["flows"]} == {"egress", "ingress"}
    controller.run("detach", b.target)
    assert b.network_state() == before
    assert {row["direction"] for row in controller.json("flows")["flows"]} == {"egress"}
    again = controller.run("detach", b.target, check=False)
    assert again.returncode == 2
    assert "not attached" in again.stderr and a.target in again.stderr


def test_a_vanished_interface_is_reported_and_the_rest_goes_on(
    hosts: Hosts, controller: Controller, send: Send
) -> None:
    a, b = hosts
    sh(f"ip -n {a.netns} link add spare0 type veth peer name spare1")
    controller.start(f"{a.netns}:spare0", a.target, b.target)
    send(a, b, 0, 20)
    sh(f"ip -n {a.netns} link del spare0")
    for _ in range(50):
        status = controller.json("status")
        if len(status["interfaces"]) == 2:
            break
        time.sleep(0.1)
    assert [entry["interface"] for entry in status["interfaces"]] == [a.target, b.target]
    assert any("spare0 vanished" in event["event"] for event in status["events"])
    send(a, b, 20, 20)
    assert flow(controller.json("flows"), "egress")["packets"] == 40


def test_a_moved_interface_is_freed_where_it_is_now(hosts: Hosts, controller: Controller) -> None:
    """The kernel leaves XDP and tcx programs on an interface that changes its namespace."""
    a, b = hosts
    controller.start(a.target)
    sh(f"ip -n {a.netns} link set eth0 netns {b.netns} name moved")
    for _ in range(50):
        if "moved to" in controller.run("status").stdout:
            break
        time.sleep(0.1)
    assert f"moved to {b.netns}:moved" in " ".join(controller.run("status").stdout.split())
    assert "xdp" not in b.sh("ip link show dev moved")
    controller.run("attach", f"{b.netns}:moved")


def test_a_new_interface_does_not_inherit_flows(
    hosts: Hosts, controller: Controller, send: Send
) -> None:
    """Of one that vanished while no controller ran, and had the same port number."""
    a, b = hosts
    sh(f"ip -n {a.netns} link add other type veth peer name spare")
    pid = controller.start(a.target, f"{a.netns}:other")
    send(a, b, 0, 10)
    controller.kill(pid)
    sh(f"ip -n {a.netns} link del eth0")
    controller.start(f"{a.netns}:other", f"{a.netns}:spare")
    status = controller.json("status")
    assert status["adopted"]
    assert [entry["port"] for entry in status["interfaces"]] == [1, 0]
    assert status["flows"] == 0


def test_a_deleted_namespace_is_let_go(hosts: Hosts, controller: Controller) -> None:
    a, b = hosts
    controller.start(a.target, b.target)
    sh(f"ip netns del {b.netns}")
    for _ in range(50):
        status = controller.json("status")
        if not status["interfaces"]:
            break
        time.sleep(0.1)
    # Deleting one namespace takes the veth's other end with it.
    assert status["interfaces"] == []
    assert controller.json("stop")["was_running"]


def test_a_clsact_of_others_and_their_filters_stay(
    hosts: Hosts, controller: Controller, send: Send
) -> None:
    a, b = hosts
    sh(f"ip netns exec {a.netns} tc qdisc add dev eth0 clsact")
    sh(
        f"ip netns exec {a.netns} tc filter add dev eth0 egress pref 1 protocol all "
        "u32 match u32 0 0 action ok",
        check=False,
    )
    before = a.network_state()
    result = controller.run("start", "--detach", "-i", a.target, check=False)
    if result.returncode == 0:
        send(a, b, 0, 30)
        assert flow(controller.json("flows"), "egress")["packets"] == 30
        controller.run("stop")
    else:
        assert "filter" in result.stderr
    assert a.network_state() == before


def test_no_clsact_is_created_where_the_kernel_has_tcx(
    hosts: Hosts, controller: Controller
) -> None:
    """To add or delete a clsact the kernel drops what the interface sends meanwhile."""
    a, _ = hosts
    before = a.sh("tc qdisc show dev eth0")
    controller.start(a.target)
    assert a.sh("tc qdisc show dev eth0") == before


def test_a_kernel_without_tcx_is_served_by_a_clsact(
    hosts: Hosts, controller: Controller, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STELLAR_TC", "clsact")
    a, b = hosts
    before = a.network_state()
    controller.start(a.target)
    assert "stellar_te" in a.sh("tc filter show dev eth0 egress")
    send(a, b, 0, 30)
    assert flow(controller.json("flows"), "egress")["packets"] == 30
    controller.run("stop")
    assert a.network_state() == before


def test_a_controller_with_tcx_takes_over_from_one_with_a_clsact(
    hosts: Hosts, controller: Controller, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kernel upgrade of a cluster's image: no packet is counted twice."""
    a, b = hosts
    before = a.network_state()
    with monkeypatch.context() as patch:
        patch.setenv("STELLAR_TC", "clsact")
        controller.kill(controller.start(a.target))
    controller.start(a.target)
    assert "stellar" not in a.sh("tc filter show dev eth0 egress")
    send(a, b, 0, 30)
    assert flow(controller.json("flows"), "egress")["packets"] == 30
    controller.run("stop")
    assert a.network_state() == before


def test_a_filter_added_to_our_clsact_keeps_it_alive(
    hosts: Hosts, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STELLAR_TC", "clsact")
    a, _ = hosts
    controller.start(a.target)
    a.sh("tc filter add dev eth0 ingress pref 7 protocol ip u32 match u32 0 0 classid 1:1")
    controller.run("stop")
    filters = a.sh("tc filter show dev eth0 ingress")
    assert "pref 7" in filters
    assert "stellar" not in filters + a.sh("tc filter show dev eth0 egress")
    assert "xdp" not in a.sh("ip link show dev eth0")


def test_two_controllers_do_not_share_a_run_directory(hosts: Hosts, controller: Controller) -> None:
    controller.start(hosts[0].target)
    second = controller.run("start", "-i", hosts[1].target, check=False)
    assert second.returncode == 5
    assert "runs already" in second.stderr and "controller attach" in second.stderr
    assert controller.json("status")["interfaces"][0]["interface"] == hosts[0].target


def test_two_controllers_do_not_share_an_interface(
    hosts: Hosts, controller: Controller, tmp_path: Path
) -> None:
    a, b = hosts
    controller.start(a.target)
    second = Controller(tmp_path / "second")
    for mode in ("native", "tc"):
        result = second.run("start", "--detach", "-i", a.target, "--mode", mode, check=False)
        assert result.returncode == 5
        assert "another controller" in result.stderr
    second.start(b.target)
    assert second.run("attach", a.target, check=False).returncode == 5
    second.run("stop")
    assert "xdp" in a.sh("ip link show dev eth0")


@pytest.mark.parametrize("cache", ["", "off"])
def test_a_signal_during_start_leaves_nothing(
    hosts: Hosts, controller: Controller, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    """With the cache it comes while it attaches, or just after; without, while it compiles."""
    monkeypatch.setenv("STELLAR_BPF_CACHE", cache)
    a, _ = hosts
    before = a.network_state()
    for number in (signal.SIGTERM, signal.SIGINT):
        for delay_s in (0.7, 1.2) if cache else (0.6, 0.9):
            process = subprocess.Popen(
                [sys.executable, "-m", "controller", "--run-dir", str(controller.run_dir),
                 "start", "-i", a.target],
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
            time.sleep(delay_s)
            process.send_signal(number)
            process.wait(60)
            assert a.network_state() == before
            assert not (controller.run_dir / "state.json").exists()


def test_a_directory_of_others_is_not_closed_to_them(hosts: Hosts, controller: Controller) -> None:
    controller.run_dir.mkdir()
    controller.run_dir.chmod(0o1777)
    (controller.run_dir / "somebody's").touch()
    result = controller.run("start", "--detach", "-i", hosts[0].target, check=False)
    assert result.returncode == 2
    assert "open to others" in result.stderr
    assert controller.run_dir.stat().st_mode & 0o7777 == 0o1777


def test_the_run_directory_is_for_its_owner_only(hosts: Hosts, controller: Controller) -> None:
    controller.start(hosts[0].target)
    assert controller.run_dir.stat().st_mode & 0o777 == 0o700
    for path in controller.run_dir.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


def test_the_foreground_controller_tells_systemd_when_it_is_ready(
    hosts: Hosts, controller: Controller, tmp_path: Path
) -> None:
    import socket

    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(path))
        server.settimeout(30)
        process = subprocess.Popen(
            [sys.executable, "-m", "controller", "--run-dir", str(controller.run_dir),
             "start", "-i", hosts[0].target],
            env=os.environ | {"NOTIFY_SOCKET": str(path)},
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert server.recv(100) == b"READY=1"
        assert json.loads(controller.run("status", "--json").stdout)["pid"] == process.pid
        process.terminate()
        assert server.recv(100) == b"STOPPING=1"
        assert process.wait(30) == 0
