"""Hosts made of network namespaces around a bridge, each with a soft-RoCE device.

What ``--spawn N`` runs on: one namespace a rank with one veth and one rxe device, one more for
the bridge that joins them. Everything is named after the process that made it, and goes with it;
what a killed process left behind is removed by the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from controller.dataplane.netns import list_netns
from controller.dataplane.shim import kernel_version
from controller.errors import ConflictError, PrivilegeError, StellarError, UnsupportedError
from controller.ops.doctor_machine import RXE_NAMESPACES
from controller.ops.testbed_tools import (
    LAB_REMEDY,
    ending_by_signal,
    fails,
    run_supported,
    run_tool,
    try_tool,
    wait_until,
)

# The smallest round MTU that holds a path MTU of 4096 and its headers.
MTU_BYTES = 4200
MAX_HOSTS = 64

_NETWORK = int(IPv4Address("10.78.0.0"))
_PREFIX_LENGTH = 24
# rxe keeps so many packets of a queue pair in flight; a shaped port must hold those of several,
# as every drop costs a timeout.
_WINDOW_PACKETS = 64
_QUEUED_WINDOWS = 8
# An HTB class may send so much at once: less, and late timers cost throughput.
_BURST_S = 0.003
_GIDS_READ = 16

_numbers = itertools.count()
_NAME = re.compile(r"stlr(?P<pid>[1-9]\d*)-\d+(?:s|r\d+)")


@dataclass(frozen=True)
class BedHost:
    """A namespace with one interface, and the soft-RoCE device on it.

    Parameters
    ----------
    rank
        From 0.
    netns, interface, address
        Where it lives and how it is reached (IPv4).
    port
        The bridge's end of its link, in the namespace of the bridge.
    device, gid_index
        RDMA device ("" in a network without RDMA), and the index of the RoCE v2 GID of
        `address`.
    """

    rank: int
    netns: str
    interface: str
    address: str
    port: str
    device: str = ""
    gid_index: int = -1

    def command(self, *words: str) -> list[str]:
        """A command line that runs `words` there; ``ip`` replaces itself by it."""
        return ["ip", "netns", "exec", self.netns, *words]


@dataclass(frozen=True)
class Testbed:
    """Hosts around one bridge.

    Parameters
    ----------
    bridge_netns
        Namespace of the bridge and its ports.
    hosts
        By rank.
    mtu_bytes
        Of every interface.
    rate_Bps
        What each port of the bridge sends towards its host at most; None: unshaped.
    """

    bridge_netns: str
    hosts: tuple[BedHost, ...]
    mtu_bytes: int
    rate_Bps: int | None = None

    @property
    def size(self) -> int:
        """Number of hosts."""
        return len(self.hosts)


@contextlib.contextmanager
def testbed(
    count: int, *, mtu_bytes: int = MTU_BYTES, rate_Bps: int | None = None
) -> Iterator[Testbed]:
    """`count` hosts with soft-RoCE around a bridge; all of it gone afterwards.

    Also after Ctrl-C, SIGTERM and SIGHUP, which end the ``with`` block like an exception.

    Parameters
    ----------
    count
        Hosts, 1 .. 64.
    mtu_bytes
        Of every interface. 4200 gives a path MTU of 4096.
    rate_Bps
        Bytes a second (Ethernet frames) towards each host; None: as fast as it goes.

    Raises
    ------
    PrivilegeError
        Not root.
    UnsupportedError
        The kernel has no soft-RoCE, or only in its first namespace.
    ConflictError
        RDMA devices are shared between namespaces and other namespaces are in the way of
        changing that.
    StellarError
        A command failed; its message is in the error.
    """
    check_kernel()
    with ending_by_signal(), contextlib.ExitStack() as stack:
        remove_leftovers()
        stack.enter_context(_exclusive_devices())
        bed = stack.enter_context(network(count, mtu_bytes=mtu_bytes, rate_Bps=rate_Bps))
        yield stack.enter_context(_soft_roce(bed))


@contextlib.contextmanager
def network(
    count: int, *, mtu_bytes: int = MTU_BYTES, rate_Bps: int | None = None
) -> Iterator[Testbed]:
    """The hosts of testbed() without their RDMA devices; any kernel can do it."""
    if os.geteuid():
        raise PrivilegeError("Network namespaces need root.", "Run as root (sudo).")
    if not 1 <= count <= MAX_HOSTS:
        raise ValueError(f"{count} hosts; expected 1 .. {MAX_HOSTS}")
    tag = f"stlr{os.getpid()}-{next(_numbers)}"
    bridge = f"{tag}s"
    hosts = tuple(
        BedHost(
            rank,
            f"{tag}r{rank}",
            "eth0",
            str(IPv4Address(_NETWORK + rank + 1)),
            f"port{rank}",
        )
        for rank in range(count)
    )
    bed = Testbed(bridge, hosts, mtu_bytes, rate_Bps)
    with _deleting([bridge, *(host.netns for host in hosts)]):
        _make_links(bed)
        _keep_order(bed)
        wait_until(lambda: _ports_forward(bed), "the ports of the bridge forward")
        yield bed


def check_kernel() -> None:
    """Refuse what cannot work, with the reason.

    Raises
    ------
    PrivilegeError
        Not root.
    UnsupportedError
        The kernel has no soft-RoCE, or only in its first namespace.
    """
    if os.geteuid():
        raise PrivilegeError("Network namespaces and soft-RoCE need root.", "Run as root (sudo).")
    release = os.uname().release
    if kernel_version(release) < RXE_NAMESPACES:
        wanted = ".".join(map(str, RXE_NAMESPACES))
        raise UnsupportedError(
            f"This kernel is {release}; soft-RoCE across network namespaces needs {wanted}.",
            LAB_REMEDY,
        )


# ---- what a killed run left behind ----


def remove_leftovers() -> list[str]:
    """Remove the namespaces and devices of runs whose process is gone.

    Recognised by name and process id. A namespace in which a process still lives is left
    alone, whoever that is.

    Returns
    -------
    list of str
        The names that were removed.
    """
    stale = [name for name in list_netns() if _is_leftover(name) and not _inhabited(name)]
    for name in stale:
        _delete_devices(name)
        try_tool(["ip", "netns", "del", name])
    # One that was killed between making a device and moving it left it in this namespace.
    devices = [name for name in _rdma_devices("") if _is_leftover(name)]
    for device in devices:
        try_tool(["rdma", "link", "delete", device])
    return [*stale, *devices]


def _is_leftover(name: str) -> bool:
    found = _NAME.fullmatch(name)
    return found is not None and not Path("/proc", found["pid"]).exists()


def _inhabited(netns: str) -> bool:
    return bool(try_tool(["ip", "netns", "pids", netns]).split())


# ---- links ----


def _make_links(bed: Testbed) -> None:
    mtu = bed.mtu_bytes
    names = [bed.bridge_netns, *(host.netns for host in bed.hosts)]
    _ip([f"netns add {name}" for name in names])
    bridge = [
        "link add br0 type bridge mcast_snooping 0",
        f"link set br0 mtu {mtu} up",
    ]
    for host in bed.hosts:
        _ip(
            [
                f"link add {host.interface} netns {host.netns} mtu {mtu} type veth "
                f"peer name {host.port} netns {bed.bridge_netns} mtu {mtu}"
            ]
        )
        bridge.append(f"link set {host.port} master br0 up")
        _ip(
            [
                f"addr add {host.address}/{_PREFIX_LENGTH} dev {host.interface}",
                "link set lo up",
                f"link set {host.interface} up",
            ],
            host.netns,
        )
    _ip(bridge, bed.bridge_netns)
    if bed.rate_Bps is not None:
        _shape(bed, bed.rate_Bps)


def _shape(bed: Testbed, rate_Bps: int) -> None:
    burst = max(4 * bed.mtu_bytes, int(rate_Bps * _BURST_S))
    limit = _QUEUED_WINDOWS * _WINDOW_PACKETS * bed.mtu_bytes
    lines = []
    for host in bed.hosts:
        lines += [
            f"qdisc add dev {host.port} root handle 1: htb default 1",
            f"class add dev {host.port} parent 1: classid 1:1 htb rate {rate_Bps}bps "
            f"burst {burst} cburst {burst}",
            f"qdisc add dev {host.port} parent 1:1 handle 2: bfifo limit {limit}",
        ]
    run_tool(["tc", "-n", bed.bridge_netns, "-batch", "-"], lines)


def _keep_order(bed: Testbed) -> None:
    """Let one processor, chosen by the flow's hash, receive all packets of a flow.

    A veth puts a packet on the receive queue of the processor that sent it, and a queue pair's
    packets leave from any: two processors would deliver them out of order, which rxe answers
    with a NAK. Receive packet steering ends that. Both ends of every link, as ACKs travel too.
    """
    mask = f"{(1 << (os.cpu_count() or 1)) - 1:x}"
    if len(mask) > 8:  # the kernel wants groups of 32 bits
        head = len(mask) % 8
        groups = [mask[i : i + 8] for i in range(head, len(mask), 8)]
        mask = ",".join([mask[:head], *groups] if head else groups)
    script = 'for file in /sys/class/net/*/queues/rx-*/rps_cpus; do echo "$0" >"$file"; done'
    for netns in (bed.bridge_netns, *(host.netns for host in bed.hosts)):
        run_tool(["ip", "netns", "exec", netns, "sh", "-c", script, mask])


def _ports_forward(bed: Testbed) -> bool:
    text = run_tool(["bridge", "-n", bed.bridge_netns, "-j", "link", "show"])
    states = {entry["ifname"]: entry["state"] for entry in json.loads(text or "[]")}
    return all(states.get(host.port) == "forwarding" for host in bed.hosts)


@contextlib.contextmanager
def _deleting(names: Sequence[str]) -> Iterator[None]:
    """Delete these namespaces afterwards, those that were not made excepted."""
    try:
        yield
    finally:
        for name in names:
            try_tool(["ip", "netns", "del", name])


# ---- soft-RoCE ----


@contextlib.contextmanager
def _exclusive_devices() -> Iterator[None]:
    """An RDMA device belongs to one namespace meanwhile; the mode before is put back."""
    words = run_supported(["rdma", "system"], "has no RDMA core").split()
    mode = words[words.index("netns") + 1] if "netns" in words[:-1] else "unknown"
    if mode == "exclusive":
        yield
        return
    try:
        run_tool(["rdma", "system", "set", "netns", "exclusive"])
    except StellarError as error:
        others = ", ".join(list_netns()) or "of containers"
        raise ConflictError(
            f"RDMA devices are shared between namespaces (mode {mode}), and the kernel changes "
            f"that only while there is no other namespace; there are: {others}.",
            "Set it after boot, before namespaces are made: rdma system set netns exclusive. Or: "
            "scripts/lab run -- controller ...",
        ) from error
    try:
        yield
    finally:
        # The namespaces go a moment after their deletion.
        with contextlib.suppress(StellarError):
            wait_until(
                lambda: not fails(["rdma", "system", "set", "netns", mode]),
                f"the mode of RDMA devices is {mode} again",
                timeout_s=2.0,
            )


@contextlib.contextmanager
def _soft_roce(bed: Testbed) -> Iterator[Testbed]:
    """A device on each host; deleted before the namespaces are.

    The other order leaves the device behind: it would hold the deleted interface.
    """
    try:
        for host in bed.hosts:
            # Named like the namespace: the next run knows it by that.
            add = ["rdma", "link", "add", host.netns, "type", "rxe", "netdev", host.interface]
            run_supported(host.command(*add), "cannot make a soft-RoCE device (module rdma_rxe)")
            # It is born in the first namespace, wherever the command ran.
            run_tool(["rdma", "dev", "set", host.netns, "netns", host.netns])
        hosts = []
        for host in bed.hosts:
            with_device = replace(host, device=host.netns)
            index = wait_until(
                lambda host=with_device: find_gid(host),  # type: ignore[misc]
                f"{host.netns} has a GID for {host.address}",
            )
            hosts.append(replace(with_device, gid_index=index - 1))
        yield replace(bed, hosts=tuple(hosts))
    finally:
        for host in bed.hosts:
            _delete_devices(host.netns)
            # Where it was made, if it was never moved.
            if host.netns in _rdma_devices(""):
                try_tool(["rdma", "link", "delete", host.netns])


def find_gid(host: BedHost) -> int:
    """Index of the RoCE v2 GID of the host's address, plus one; 0: there is none yet.

    By type and address: the kernel orders the table as addresses come.
    """
    port = f"/sys/class/infiniband/{host.device}/ports/1"
    # An unused entry has no type to read, which is no error here.
    script = (
        'i=0; while [ $i -lt "$1" ]; do echo "$i $(cat "$0/gids/$i") '
        '$(cat "$0/gid_attrs/types/$i" 2>&1)"; i=$((i + 1)); done'
    )
    wanted = IPv6Address(f"::ffff:{host.address}")
    for line in try_tool(host.command("sh", "-c", script, port, str(_GIDS_READ))).splitlines():
        index, gid, kind = (line.split(maxsplit=2) + [""] * 3)[:3]
        if kind == "RoCE v2" and IPv6Address(gid) == wanted:
            return int(index) + 1
    return 0


def _rdma_devices(netns: str) -> list[str]:
    prefix = ["ip", "netns", "exec", netns] if netns else []
    try:
        entries = json.loads(try_tool([*prefix, "rdma", "-j", "dev"]) or "[]")
        return [str(entry["ifname"]) for entry in entries]
    except (ValueError, KeyError, TypeError):
        return []


def _delete_devices(netns: str) -> None:
    for device in _rdma_devices(netns):
        if _NAME.fullmatch(device):
            try_tool(["ip", "netns", "exec", netns, "rdma", "link", "delete", device])


def _ip(lines: Sequence[str], netns: str = "") -> None:
    place = ["-n", netns] if netns else []
    run_tool(["ip", *place, "-batch", "-"], lines)
