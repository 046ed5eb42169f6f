"""The testbed's network: hosts around a bridge that exist no longer than their process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.dataplane.netns import list_netns
from controller.errors import ConflictError, PrivilegeError, StellarError, UnsupportedError
from controller.ops import testbed as testbed_module
from controller.ops import testbed_tools
from controller.ops.testbed import BedHost, check_kernel, network, remove_leftovers
from tests.hosts import sh

# Not by their own names, which pytest would take for tests.
Bed = testbed_module.Testbed
build = testbed_module.testbed


def ours(pid: int) -> list[str]:
    return [name for name in list_netns() if name.startswith(f"stlr{pid}-")]


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with network(3, mtu_bytes=3000, rate_Bps=1_250_000) as made:
        yield made


# ---- what is built ----


def test_every_host_reaches_every_other_with_packets_of_the_full_mtu(bed: Bed) -> None:
    # A UDP datagram that fills the MTU and may not be cut, answered by the other side.
    answer = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
        "s.bind(('', 9)); print('up', flush=True); d, a = s.recvfrom(4096); s.sendto(d, a)"
    )
    ask = (
        "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
        "s.setsockopt(socket.IPPROTO_IP, 10, 2); s.settimeout(20); "
        "s.sendto(b'x' * 2972, (sys.argv[1], 9)); assert len(s.recv(4096)) == 2972"
    )
    for source in bed.hosts:
        for target in bed.hosts:
            if source is target:
                continue
            with subprocess.Popen(
                target.command(sys.executable, "-c", answer), stdout=subprocess.PIPE
            ) as server:
                assert server.stdout is not None
                assert server.stdout.readline() == b"up\n"
                subprocess.run(
                    source.command(sys.executable, "-c", ask, target.address), check=True
                )
                assert server.wait(20) == 0


def test_ranks_addresses_and_ports_are_all_different(bed: Bed) -> None:
    assert [host.rank for host in bed.hosts] == [0, 1, 2]
    for values in (
        {host.netns for host in bed.hosts} | {bed.bridge_netns},
        {host.address for host in bed.hosts} | {""},
        {host.port for host in bed.hosts} | {""},
    ):
        assert len(values) == 4


def test_ports_towards_the_hosts_are_shaped_to_the_rate(bed: Bed) -> None:
    for host in bed.hosts:
        text = sh(f"tc -n {bed.bridge_netns} class show dev {host.port}")
        assert "rate 10Mbit" in text
        queue = sh(f"tc -n {bed.bridge_netns} qdisc show dev {host.port}")
        found = re.search(r"bfifo .*limit (\d+)(b|Kb)", queue)
        assert found
        limit = int(found[1]) * (1024 if found[2] == "Kb" else 1)
        # The window of one queue pair of rxe, at least.
        assert limit >= 64 * bed.mtu_bytes


def test_packets_of_a_flow_are_received_by_one_processor(bed: Bed) -> None:
    for netns in (bed.bridge_netns, *(host.netns for host in bed.hosts)):
        masks = sh(f"ip netns exec {netns} sh -c 'cat /sys/class/net/*/queues/rx-*/rps_cpus'")
        usable = [int(mask.replace(",", ""), 16) for mask in masks.split()]
        assert usable
        assert set(usable) == {(1 << (os.cpu_count() or 1)) - 1}


def test_a_network_without_a_rate_has_no_queues() -> None:
    with network(1) as bed:
        assert "htb" not in sh(f"tc -n {bed.bridge_netns} qdisc show dev port0")
        (link,) = json.loads(sh(f"ip -n {bed.hosts[0].netns} -j link show dev eth0"))
        assert link["mtu"] == 4200


def test_two_networks_of_one_process_live_side_by_side() -> None:
    with network(1) as first, network(2) as second:
        names = {first.bridge_netns, second.bridge_netns}
        names |= {host.netns for host in (*first.hosts, *second.hosts)}
        assert len(names) == 5
        assert names <= set(list_netns())
    assert not names & set(list_netns())


def test_an_impossible_number_of_hosts_is_refused_before_anything_is_made() -> None:
    before = ours(os.getpid())
    for count in (0, 65):
        with pytest.raises(ValueError, match=r"expected 1 \.\. 64"), network(count):
            pass
    assert ours(os.getpid()) == before


# ---- how it ends ----


def test_nothing_is_left_after_an_error_while_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_bed: Bed) -> None:
        raise StellarError("not today")

    monkeypatch.setattr(testbed_module, "_keep_order", fail)
    before = ours(os.getpid())
    with pytest.raises(StellarError, match="not today"), network(2):
        pass
    assert ours(os.getpid()) == before


_HOLDER = """
import sys, time
from controller.ops.testbed import network
from controller.ops.testbed_tools import ending_by_signal
with ending_by_signal(), network(2):
    print("up", flush=True)
    time.sleep(600)
"""


def _heed_signals() -> None:
    """Tests may run in the background of a shell or under nohup, where these are ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def holder() -> subprocess.Popen[bytes]:
    """A process with a network of two hosts, which exists already."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdout=subprocess.PIPE, preexec_fn=_heed_signals
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    assert len(ours(process.pid)) == 3
    return process


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_a_signal_removes_everything_even_if_it_comes_twice(number: int, status: int) -> None:
    for _ in range(10):
        with holder() as process:
            process.send_signal(number)
            time.sleep(0.005)
            process.send_signal(number)
            found = process.wait(90)
        assert ours(process.pid) == []
        if found == status:
            break
        # On a busy machine the second one may come when all is done, and ends what is left.
        assert found == -number
    assert found == status


def test_the_next_run_removes_what_a_killed_one_left_and_nothing_else() -> None:
    with holder() as living, holder() as killed:
        mine = f"stlr-mine{os.getpid()}"
        sh(f"ip netns add {mine}")
        try:
            killed.kill()
            killed.wait()
            remove_leftovers()
            assert ours(killed.pid) == []
            assert len(ours(living.pid)) == 3
            assert mine in list_netns()
        finally:
            sh(f"ip netns del {mine}")
            living.terminate()
            living.wait(90)


def test_a_leftover_in_which_somebody_lives_is_left_alone() -> None:
    with holder() as killed:
        netns = ours(killed.pid)[0]
        with subprocess.Popen(["ip", "netns", "exec", netns, "sleep", "600"]) as guest:
            try:
                while netns not in sh(f"ip netns identify {guest.pid}", check=False):
                    time.sleep(0.02)
                killed.kill()
                killed.wait()
                remove_leftovers()
                assert ours(killed.pid) == [netns]
            finally:
                guest.kill()
                guest.wait()
        remove_leftovers()
        assert ours(killed.pid) == []


def test_signals_mean_afterwards_what_they_meant_before() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with testbed_tools.ending_by_signal():
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# ---- what is refused ----


def test_an_old_kernel_is_refused_with_its_version_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Old:
        release = "6.12.3-amd64"

    monkeypatch.setattr(os, "uname", lambda: Old)
    with pytest.raises(UnsupportedError) as caught:
        check_kernel()
    assert "6.12.3-amd64" in caught.value.message
    assert "7.1" in caught.value.message
    assert "scripts/lab run --" in caught.value.remedy


def test_a_user_who_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PrivilegeError, match="need root"), build(2):
        pass
    with pytest.raises(PrivilegeError, match="need root"), network(2):
        pass


def tool(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose tools come before the machine's, on a kernel that is new enough."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(testbed_module, "check_kernel", lambda: None)
    return tmp_path


def test_a_kernel_without_rdma_is_refused_with_what_the_tool_said(rdma: Path) -> None:
    tool(rdma, "rdma", "echo 'Failed to open NETLINK_RDMA socket' >&2; exit 1")
    before = ours(os.getpid())
    with pytest.raises(UnsupportedError, match=r"no RDMA core.*NETLINK_RDMA"), build(2):
        pass
    assert ours(os.getpid()) == before


def test_a_kernel_without_rxe_is_refused_and_the_hosts_are_removed(rdma: Path) -> None:
    tool(rdma, "rdma", 'case "$*" in system) echo netns exclusive;; *link*add*) '
                       "echo 'error: Invalid argument' >&2; exit 1;; esac")  # fmt: skip
    before = ours(os.getpid())
    with pytest.raises(UnsupportedError, match=r"soft-RoCE device.*Invalid argument"), build(2):
        pass
    assert ours(os.getpid()) == before


def test_shared_devices_that_cannot_be_made_exclusive_are_a_conflict(rdma: Path) -> None:
    tool(rdma, "rdma", 'case "$*" in system) echo netns shared copy-on-fork on;; *set*) '
                       "echo 'error: Device or resource busy' >&2; exit 1;; esac")  # fmt: skip
    with network(1) as other, pytest.raises(ConflictError) as caught, build(2):
        pass
    assert "mode shared" in caught.value.message
    assert other.hosts[0].netns in caught.value.message
    assert "rdma system set netns exclusive" in caught.value.remedy


def test_the_mode_of_devices_is_put_back_even_after_a_failure(rdma: Path) -> None:
    log = rdma / "log"
    tool(rdma, "rdma", f'echo "$*" >>{log}; case "$*" in system) echo netns shared;; *link*add*) '
                       "exit 1;; esac")  # fmt: skip
    with pytest.raises(UnsupportedError), build(1):
        pass
    modes = [line for line in log.read_text().splitlines() if line.startswith("system set")]
    assert modes == ["system set netns exclusive", "system set netns shared"]


def test_a_gid_is_found_by_type_and_address(tmp_path: Path, rdma: Path) -> None:
    # `ip netns exec NS sh -c SCRIPT PORT COUNT`, with sysfs somewhere else.
    tool(rdma, "ip", f'shift 3; exec sh -c "$3" "{tmp_path}/port" "$5"')
    table = {
        0: ("fe80:0000:0000:0000:0000:0000:0000:0001", "RoCE v2"),
        1: ("0000:0000:0000:0000:0000:ffff:0a4e:0001", "IB/RoCE v1"),
        2: ("0000:0000:0000:0000:0000:ffff:0a4e:0002", "RoCE v2"),
        3: ("0000:0000:0000:0000:0000:ffff:0a4e:0001", "RoCE v2"),
    }
    for folder in ("gids", "gid_attrs/types"):
        (tmp_path / "port" / folder).mkdir(parents=True)
    for index, (gid, kind) in table.items():
        (tmp_path / f"port/gids/{index}").write_text(gid + "\n")
        (tmp_path / f"port/gid_attrs/types/{index}").write_text(kind + "\n")
    host = BedHost(0, "anywhere", "eth0", "10.78.0.1", "port0", device="rx")
    assert testbed_module.find_gid(host) == 3 + 1
    (tmp_path / "port/gids/3").unlink()
    assert testbed_module.find_gid(host) == 0
