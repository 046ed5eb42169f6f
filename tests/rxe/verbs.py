"""Hosts with soft-RoCE, a switch between them, and the tools that make real verbs traffic."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pyroute2 import IPRoute

from controller.agent.client import take_snapshot
from controller.agent.state import RunDirectory
from controller.dataplane.netns import in_netns
from controller.observe.snapshot import flow_rows, pack_address
from tests.hosts import Controller, Host, sh, veth_hosts

RXE_MTU_BYTES = 4200  # the smallest round MTU that holds a path MTU of 4096 and its headers
# 4 us * 2^18 = 1 s: on two busy cores the tools' default of 67 ms makes a QP retransmit
# although nothing was lost, and these tests compare exact numbers.
PATIENT = ("-u", "18")
SHAPED_CLASSID = "1:1"  # of a port given a rate by Switch.shape()

_numbers = itertools.count()
_tcp_ports = itertools.count(20000)
_gid_indices: dict[tuple[str, str], int] = {}


@dataclass(frozen=True)
class RxeHost(Host):
    """A host with one soft-RoCE device on its interface."""

    device: str = ""
    address6: str = ""

    def counters(self) -> dict[str, int]:
        """Counters of the RDMA device, by the kernel's names."""
        entries = json.loads(self.sh(f"rdma -j statistic show link {self.device}/1"))
        return {name: int(value) for name, value in entries[0].items() if isinstance(value, int)}

    def queue_pairs(self) -> list[dict[str, Any]]:
        """Queue pairs of the device, without the two of management."""
        entries = json.loads(self.sh(f"rdma -j resource show qp link {self.device}/1"))
        return [entry for entry in entries if entry["lqpn"] > 1]

    def gid_index(self, address: str) -> int:
        """Index of the RoCE v2 GID of `address`.

        By type and address, never by number: the kernel orders the table as addresses come.
        """
        wanted = pack_address(address)

        def look() -> str | None:
            for line in self.sh(f"ibv_devinfo -v -d {self.device}").splitlines():
                found = re.match(r"\s*GID\[\s*(\d+)\]:\s*([0-9a-f:.]+), RoCE v2", line)
                if found and pack_address(found[2]) == wanted:
                    return found[1]
            return None

        key = (self.device, address)
        if key not in _gid_indices:
            # An address becomes a GID a moment after it is added.
            _gid_indices[key] = int(poll(look, f"{self.device} has a GID for {address}"))
        return _gid_indices[key]


@contextlib.contextmanager
def soft_roce(hosts: Sequence[Host]) -> Iterator[list[RxeHost]]:
    """An rxe device on each host; deleted before the namespaces are.

    The other order leaves the device behind: it would hold the deleted interface.
    """
    devices: list[tuple[Host, str]] = []
    try:
        result = []
        for host in hosts:
            device = f"rx{os.getpid() % 100000}n{next(_numbers)}"
            host.sh(f"rdma link add {device} type rxe netdev {host.interface}")
            devices.append((host, device))
            # The device is born in the first namespace, wherever the command ran.
            sh(f"rdma dev set {device} netns {host.netns}")
            address6 = address6_of(host)
            result.append(RxeHost(host.netns, host.interface, host.address, device, address6))
        yield result
    finally:
        for host, device in reversed(devices):
            host.sh(f"rdma link delete {device}", check=False)
            sh(f"rdma link delete {device}", check=False)


def address6_of(host: Host) -> str:
    """The host's global IPv6 address, added by add_address6()."""
    entries = json.loads(host.sh(f"ip -j -6 addr show dev {host.interface} scope global"))
    for entry in entries:
        for info in entry.get("addr_info", ()):
            return str(info["local"])
    return ""


def add_address6(host: Host) -> None:
    """A global IPv6 address that ends like the IPv4 one."""
    suffix = host.address.rsplit(".", 1)[1]
    sh(f"ip -n {host.netns} addr add fd00:77::{suffix}/64 dev {host.interface} nodad")


@contextlib.contextmanager
def rxe_pair() -> Iterator[tuple[RxeHost, RxeHost]]:
    """Two hosts with soft-RoCE on one veth."""
    with veth_hosts(RXE_MTU_BYTES) as pair:
        for host in pair:
            add_address6(host)
        with soft_roce(pair) as hosts:
            yield hosts[0], hosts[1]


@dataclass(frozen=True)
class Switch:
    """A bridge in a namespace of its own; one port a host."""

    netns: str
    ports: Mapping[str, str]  # netns of the host -> port

    def port_to(self, host: Host) -> str:
        """The port that leads to this host."""
        return self.ports[host.netns]

    def impair(self, towards: Host, netem: str) -> None:
        """Put a netem qdisc in the way of RoCEv2 over IPv4 towards a host; of nothing else.

        The tools' TCP connections stay whole, and every drop is one of RoCEv2.
        """
        self.heal(towards)
        port = self.port_to(towards)
        tc = f"tc -n {self.netns}"
        sh(f"{tc} qdisc add dev {port} root handle 1: prio bands 2 priomap {'0 ' * 16}")
        sh(f"{tc} qdisc add dev {port} parent 1:2 handle 2: netem limit 10000 {netem}")
        sh(
            f"{tc} filter add dev {port} parent 1: protocol ip prio 1 u32 "
            "match ip protocol 17 0xff match ip dport 4791 0xffff flowid 1:2"
        )

    def heal(self, towards: Host) -> None:
        """Take the netem qdisc away."""
        port = self.port_to(towards)
        sh(f"tc -n {self.netns} qdisc del dev {port} root", check=False)

    def dropped(self, towards: Host) -> int:
        """RoCEv2 packets that the port's netem qdisc has dropped since it was put there."""
        text = sh(f"tc -n {self.netns} -s -j qdisc show dev {self.port_to(towards)}")
        return sum(int(entry["drops"]) for entry in json.loads(text) if entry["kind"] == "netem")

    def marked(self, towards: Host) -> int:
        """RoCEv2 packets that the port's netem qdisc has marked CE ("loss P% ecn")."""
        port = self.port_to(towards)

        def look() -> int:
            with IPRoute() as ipr:
                (index,) = ipr.link_lookup(ifname=port)
                for qdisc in ipr.get_qdiscs(index=index):
                    if qdisc.get_attr("TCA_KIND") != "netem":
                        continue
                    stats = qdisc.get_attr("TCA_STATS2")
                    own = stats.get_attr("TCA_STATS_APP")
                    if own is None:  # before 7.3 netem counts a mark as a drop
                        return int(stats.get_attr("TCA_STATS_QUEUE")["drops"])
                    # struct tc_netem_xstats: delayed, dropped, corrupted, duplicated,
                    # reordered, ecn_marked, allocation_errors
                    raw = bytes.fromhex(own.replace(":", ""))
                    return int(struct.unpack("<7Q", raw[:56])[5])
            raise AssertionError(f"no netem on {port}")

        return in_netns(self.netns, look)

    def shape(self, towards: Host, rate_bit: int, limit_bytes: int, burst_bytes: int) -> None:
        """Give the port towards a host a rate and a queue that overflows at `limit_bytes`.

        All of it is one HTB class, `SHAPED_CLASSID`, with a bfifo below it. The rate counts
        Ethernet frames without FCS, as the kernel does.
        """
        self.heal(towards)
        port = self.port_to(towards)
        tc = f"tc -n {self.netns}"
        sh(f"{tc} qdisc add dev {port} root handle 1: htb default 1")
        sh(
            f"{tc} class add dev {port} parent 1: classid {SHAPED_CLASSID} htb "
            f"rate {rate_bit}bit burst {burst_bytes} cburst {burst_bytes}"
        )
        sh(f"{tc} qdisc add dev {port} parent {SHAPED_CLASSID} handle 2: bfifo limit {limit_bytes}")

    def keep_order(self, hosts: Sequence[Host]) -> None:
        """Let one processor, chosen by the flow's hash, receive all packets of a flow.

        A veth puts a packet on the receive queue of the processor that sent it. A queue pair's
        packets leave from any (its work item moves, a qdisc runs where its timer fires), so
        two processors would deliver them out of order, which rxe answers with a NAK. Receive
        packet steering ends that; both ends of every link, as ACKs travel too.
        """
        mask = f"{(1 << (os.cpu_count() or 1)) - 1:x}"
        ends = [(self.netns, port) for port in self.ports.values()]
        for netns, interface in [*ends, *((host.netns, host.interface) for host in hosts)]:
            path = f"/sys/class/net/{interface}/queues/rx-0/rps_cpus"
            sh(f"ip netns exec {netns} sh -c 'echo {mask} > {path}'")


@contextlib.contextmanager
def rxe_switched(count: int) -> Iterator[tuple[Switch, list[RxeHost]]]:
    """`count` hosts with soft-RoCE around one switch: what happens there is outside of them."""
    tag = f"st{os.getpid() % 100000}-{next(_numbers)}"
    switch, names = f"{tag}s", [f"{tag}{chr(ord('a') + i)}" for i in range(count)]
    try:
        for name in (switch, *names):
            sh(f"ip netns add {name}")
        sh(f"ip -n {switch} link add br0 type bridge mcast_snooping 0")
        sh(f"ip -n {switch} link set br0 mtu {RXE_MTU_BYTES} up")
        hosts, ports = [], {}
        for index, name in enumerate(names, start=1):
            port = f"port{index}"
            sh(
                f"ip link add eth0 netns {name} mtu {RXE_MTU_BYTES} type veth "
                f"peer name {port} netns {switch} mtu {RXE_MTU_BYTES}"
            )
            sh(f"ip -n {switch} link set {port} master br0 up")
            host = Host(name, "eth0", f"10.78.0.{index}")
            sh(f"ip -n {name} addr add {host.address}/24 dev eth0")
            sh(f"ip -n {name} link set lo up")
            sh(f"ip -n {name} link set eth0 up")
            add_address6(host)
            hosts.append(host)
            ports[name] = port
        for port in ports.values():
            poll(
                lambda port=port: "forwarding" in sh(f"bridge -n {switch} link show dev {port}"),
                f"{port} of the switch forwards",
            )
        with soft_roce(hosts) as with_rxe:
            yield Switch(switch, ports), with_rxe
    finally:
        for name in (*names, switch):
            sh(f"ip netns del {name}", check=False)


# ---- programs ----


class Program:
    """A process in a host's namespace; what it prints goes to files.

    Its process id is the tool's own: ``ip netns exec`` replaces itself.
    """

    def __init__(self, host: Host | Switch, command: Sequence[str]) -> None:
        self.command = list(command)
        # Closed with the process, in close().
        self._stdout = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", host.netns, *command],
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
        )
        self.pid = self.process.pid

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._stdout.close()
        self._stderr.close()

    def output(self) -> str:
        """What it printed so far, errors last."""
        texts = []
        for file in (self._stdout, self._stderr):
            # The child shares the file's offset: read without moving it.
            size = os.fstat(file.fileno()).st_size
            texts.append(os.pread(file.fileno(), size, 0).decode(errors="replace"))
        return "".join(texts)

    def wait(self, timeout_s: float) -> str:
        """Wait for its success; return what it printed."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.command} still ran after {timeout_s:g} s:\n{self.output()}"
            ) from None
        assert status == 0, f"{self.command} exited {status}:\n{self.output()}"
        return self.output()

    def wait_listening(self, port: int, timeout_s: float = 20) -> None:
        """Wait until a TCP socket of its namespace listens on `port`."""
        wanted = f":{port:04X} "
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"{self.command} ended:\n{self.output()}"
            for table in ("tcp", "tcp6"):
                with contextlib.suppress(OSError):
                    for line in Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines():
                        fields = line.split()
                        if (fields[1] + " ").endswith(wanted) and fields[3] == "0A":
                            return
            time.sleep(0.02)
        raise AssertionError(f"{self.command} does not listen on {port}:\n{self.output()}")

    def wait_for(self, text: str, timeout_s: float = 20) -> None:
        """Wait until it has printed `text`."""
        poll(lambda: text in self.output(), f"{self.command} prints {text!r}", timeout_s)


def poll(condition: Callable[[], Any], what: str, timeout_s: float = 10) -> Any:
    """Wait until `condition` returns something true, and return it."""
    deadline = time.monotonic() + timeout_s
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.02)


def tool_command(
    host: RxeHost, tool: str, port: int, gid: int, arguments: Sequence[str]
) -> list[str]:
    """A command line of perftest or of the ibv_*_pingpong examples."""
    common = ["-d", host.device, "-p", str(port)]
    if tool.startswith("ibv_"):
        return [tool, *common, "-g", str(gid), *arguments]
    # -F: no warning about CPU frequency scaling
    return [tool, *common, "-x", str(gid), "-F", *arguments]


@contextlib.contextmanager
def running(
    server: RxeHost,
    client: RxeHost,
    tool: str,
    *arguments: str,
    server_arguments: Sequence[str] = (),
    client_arguments: Sequence[str] = (),
    family: int = 4,
    addresses: tuple[str, str] | None = None,
) -> Iterator[tuple[Program, Program]]:
    """A server and a client of one tool, both started; killed at the end if still there.

    Parameters
    ----------
    family
        4 or 6: of the GIDs. The tools find each other by IPv4 all the same.
    addresses
        Of server and client, where the host's own are not meant (a VLAN).
    """
    port = next(_tcp_ports)
    if addresses is None:
        addresses = (
            (server.address, client.address) if family == 4 else (server.address6, client.address6)
        )
    gids = [
        host.gid_index(address) for host, address in zip((server, client), addresses, strict=True)
    ]
    first = tool_command(server, tool, port, gids[0], [*arguments, *server_arguments])
    second = tool_command(client, tool, port, gids[1], [*arguments, *client_arguments])
    with Program(server, first) as serving:
        serving.wait_listening(port)
        with Program(client, [*second, server.address]) as calling:
            yield serving, calling


def run_tool(
    server: RxeHost,
    client: RxeHost,
    tool: str,
    *arguments: str,
    timeout_s: float = 60,
    **options: Any,
) -> str:
    """Run a server and a client of one tool to their end; return what the client printed."""
    with running(server, client, tool, *arguments, **options) as (serving, calling):
        output = calling.wait(timeout_s)
        serving.wait(timeout_s)
    return output


@contextlib.contextmanager
def rc_peers(
    server: RxeHost,
    client: RxeHost,
    *arguments: str,
    server_arguments: Sequence[str] = (),
    client_arguments: Sequence[str] = (),
) -> Iterator[tuple[Program, Program]]:
    """The two sides of rc_peer.py (server receives, client sends), both started."""
    script = str(Path(__file__).with_name("rc_peer.py"))
    port = next(_tcp_ports)

    def command(host: RxeHost) -> list[str]:
        gid = host.gid_index(host.address)
        return [sys.executable, script, host.device, str(gid), str(port), *arguments]

    with Program(server, [*command(server), *server_arguments]) as serving:
        serving.wait_listening(port)
        connect = ["--connect", server.address]
        with Program(client, [*command(client), *connect, *client_arguments]) as calling:
            yield serving, calling


# ---- observer and rxe side by side ----

_COUNTED = (
    "packets", "wire_bytes", "payload_bytes", "messages", "gap_packets", "gap_events",
    "capture_loss_packets", "recovered", "duplicates", "sequence_errors", "duplicate_requests",
    "psn_resyncs", "response_gap_packets", "response_duplicates", "rnr_naks", "naks", "becn",
    "ce", "cnp", "vlan_packets",
)  # fmt: skip
# In front of the IP header: rxe counts from there on.
ETHERNET_BYTES = 14
VLAN_TAG_BYTES = 4


@dataclass(frozen=True)
class Reading:
    """What a measurement added to the observer's and to rxe's counters.

    ``rows`` are rows of ``controller flows --json``, their counters reduced by what they
    were before; rows that did not move are left out.
    """

    rows: list[dict[str, Any]]
    rxe: Mapping[str, Mapping[str, int]]  # netns -> counter -> increase

    def of(self, host: RxeHost, direction: str) -> list[dict[str, Any]]:
        """The rows of one host and direction (``ingress``, ``egress``)."""
        return [
            row
            for row in self.rows
            if row["interface"] == host.target and row["direction"] == direction
        ]

    def total(self, host: RxeHost, direction: str, key: str) -> int:
        """Sum of a counter over a host's flows of one direction."""
        return sum(int(row[key]) for row in self.of(host, direction))

    def ip_bytes(self, host: RxeHost, direction: str) -> int:
        """Bytes from the IP header to the ICRC, which is what rxe counts."""
        return sum(
            row["wire_bytes"]
            - ETHERNET_BYTES * row["packets"]
            - VLAN_TAG_BYTES * row["vlan_packets"]
            for row in self.of(host, direction)
        )

    def requests(self, host: RxeHost, direction: str) -> dict[str, Any]:
        """The one flow of requests of a host and direction."""
        found = [row for row in self.of(host, direction) if row["messages"]]
        assert len(found) == 1, found
        return found[0]

    def answers(self, host: RxeHost, direction: str) -> dict[str, Any]:
        """The one flow of pure answers of a host and direction."""
        found = [row for row in self.of(host, direction) if not row["messages"]]
        assert len(found) == 1, found
        return found[0]


class Observed:
    """Hosts with a controller on all of them.

    Parameters
    ----------
    hosts
        Where the controller runs.
    controller
        Started already.
    """

    def __init__(self, hosts: Sequence[RxeHost], controller: Controller) -> None:
        self.hosts = list(hosts)
        self.controller = controller
        self._before = self._read()

    def _read(self) -> tuple[dict[tuple[str, str, str], dict[str, Any]], dict[str, dict[str, int]]]:
        # What `controller flows --json` prints, without a second for starting Python.
        rows = flow_rows(take_snapshot(RunDirectory(self.controller.run_dir)))
        by_key = {(row["interface"], row["direction"], row["flow"]): row for row in rows}
        return by_key, {host.netns: host.counters() for host in self.hosts}

    def settle(self) -> None:
        """Wait until no RDMA packet has moved for a moment."""
        previous: list[dict[str, int]] = []

        def is_quiet() -> bool:
            nonlocal previous
            last, previous = previous, [host.counters() for host in self.hosts]
            return last == previous

        poll(is_quiet, "the hosts' RDMA counters stand still")

    def reading(self) -> Reading:
        """What was added since the last reading (or since the start)."""
        self.settle()
        before_rows, before_rxe = self._before
        self._before = after_rows, after_rxe = self._read()
        changed = []
        for key, row in after_rows.items():
            old = before_rows.get(key)
            if old is None:
                changed.append(row)
            elif row["packets"] != old["packets"]:
                changed.append(row | {name: row[name] - old[name] for name in _COUNTED})
        rxe = {
            netns: {name: value - before_rxe[netns].get(name, 0) for name, value in new.items()}
            for netns, new in after_rxe.items()
        }
        return Reading(changed, rxe)

    def run(
        self, server: RxeHost, client: RxeHost, tool: str, *arguments: str, **options: Any
    ) -> Reading:
        """Run one tool to its end and read what it added."""
        run_tool(server, client, tool, *arguments, **options)
        return self.reading()


def assert_equals_rxe(reading: Reading, hosts: Sequence[RxeHost]) -> None:
    """Packets and bytes, both directions, every host: the observer's are rxe's."""
    for host in hosts:
        counters = reading.rxe[host.netns]
        for direction, prefix in (("egress", "sent"), ("ingress", "rcvd")):
            observed = (
                reading.total(host, direction, "packets"),
                reading.ip_bytes(host, direction),
            )
            counted = counters[f"{prefix}_pkts"], counters[f"{prefix}_bytes"]
            assert observed == counted, (host.netns, direction, reading.rows, counters)


def assert_clean(reading: Reading, hosts: Sequence[RxeHost]) -> None:
    """Nothing lost, repeated or refused: neither for the observer nor for rxe."""
    for host in hosts:
        counters = reading.rxe[host.netns]
        for name in (
            "duplicate_request", "out_of_seq_request", "rcvd_seq_err", "rcvd_rnr_err",
            "send_rnr_err", "retry_exceeded_err", "completer_retry_err", "send_err",
        ):  # fmt: skip
            assert counters[name] == 0, (name, counters)
    for row in reading.rows:
        for name in (
            "gap_packets", "duplicates", "recovered", "sequence_errors", "duplicate_requests",
            "capture_loss_packets", "psn_resyncs", "response_gap_packets", "response_duplicates",
            "naks", "rnr_naks", "ce", "cnp", "becn",
        ):  # fmt: skip
            assert row[name] == 0, (name, row)
