"""What an interface is, and where Stellar can act on it.

``software``   a soft-RoCE (rxe) device is bound to it: every packet passes tc and XDP.
``forwarded``  no RDMA device is bound to it: RoCE packets are seen when they cross it.
``bypass``     a hardware RNIC is bound to it: its packets never reach tc or XDP.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from controller.dataplane.netns import in_netns, netns_inode
from controller.errors import StellarError, UsageError

_T = TypeVar("_T")

_ARPHRD_ETHER = 1
_ARPHRD_LOOPBACK = 772
_TOOL_TIMEOUT_S = 10
# Kinds whose IFLA_LINK is the interface below (a veth's is its other end).
_ON_TOP = ("vlan", "macvlan", "ipvlan")
_TC_H_ROOT = 0xFFFFFFFF
_MBIT_Bps = 125_000


# What can be done on each kind of interface; said at every start and in `status`.
ABILITIES = {
    "software": "soft-RoCE: every packet is seen and can be acted on",
    "forwarded": "no RDMA device here: crossing packets are seen and can be acted on",
    "bypass": "hardware RNIC: its packets are NOT seen; classes only by each queue pair's "
    "traffic class",
}


@dataclass(frozen=True)
class Interface:
    """An interface as it is now."""

    netns: str
    name: str
    netns_inode: int
    ifindex: int
    mtu_bytes: int
    is_up: bool
    kind: str
    rdma_device: str
    addresses: tuple[str, ...]
    link_kind: str = ""
    speed_Bps: int = 0

    @property
    def label(self) -> str:
        """``netns:interface``, or the interface alone in the first namespace."""
        return f"{self.netns}:{self.name}" if self.netns else self.name


@dataclass(frozen=True)
class RdmaLink:
    """An RDMA port bound to a netdev, in the namespace where it was asked for."""

    device: str
    netdev: str
    is_virtual: bool


def _tool_json(command: Sequence[str]) -> list[dict[str, Any]]:
    """Output of an iproute2 tool; an empty list where it or its kernel side is missing."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TOOL_TIMEOUT_S
        )
        return list(json.loads(result.stdout)) if result.returncode == 0 else []
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError):
        return []


def rdma_links(netns: str) -> list[RdmaLink]:
    """RDMA ports of a namespace that are bound to a netdev."""
    links = in_netns(netns, lambda: _tool_json(["rdma", "-j", "link", "show"]))
    return [
        RdmaLink(link["ifname"], link["netdev"], _is_virtual(netns, link["ifname"]))
        for link in links
        if link.get("netdev")
    ]


def _is_virtual(netns: str, device: str) -> bool:
    """Whether an RDMA device has no hardware behind it (rxe, siw).

    sysfs shows the devices of the namespace in which it was mounted, hence the child
    process: ``ip netns exec`` mounts it anew.
    """
    prefix = ["ip", "netns", "exec", netns] if netns else []
    try:
        result = subprocess.run(
            [*prefix, "readlink", "-f", f"/sys/class/infiniband/{device}"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TOOL_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "/devices/virtual/" in result.stdout


def _hardware_device(netns: str, interface: str) -> str:
    """RDMA device of an interface's hardware by sysfs, where the `rdma` tool is missing.

    Only in the first namespace: sysfs shows the interfaces of the one it was mounted in.
    """
    folder = Path("/sys/class/net") / interface / "device/infiniband"
    if netns or not folder.is_dir():
        return ""
    return next((path.name for path in sorted(folder.iterdir())), "")


def _speed_Bps(netns: str, interface: str) -> int:
    """Link rate of a NIC by sysfs; 0 where it says none.

    Only in the first namespace, as sysfs shows the interfaces of the one it was mounted in.
    """
    try:
        text = "" if netns else (Path("/sys/class/net") / interface / "speed").read_text()
        return max(0, int(text or 0)) * _MBIT_Bps
    except (OSError, ValueError):  # a device without a link, or one that is down
        return 0


def rdma_queue_pairs(netns: str, device: str) -> list[dict[str, Any]]:
    """Queue pairs of one device as ``rdma resource show qp`` lists them."""
    pairs = in_netns(netns, lambda: _tool_json(["rdma", "-j", "resource", "show", "qp"]))
    return [pair for pair in pairs if pair.get("ifname") == device]


def rdma_counters(netns: str, device: str) -> dict[str, int]:
    """Hardware counters of one device (``rdma statistic``), name -> value."""
    ports = in_netns(netns, lambda: _tool_json(["rdma", "-j", "statistic", "show"]))
    counters: dict[str, int] = {}
    for port in ports:
        if port.get("ifname") == device:
            counters.update({k: v for k, v in port.items() if k not in ("ifname", "port")})
    return counters


def _ask_kernel(netns: str, what: str, look: Callable[[], _T]) -> _T:
    """Run netlink requests in a namespace; their failures become a StellarError."""
    try:
        return in_netns(netns, look)
    except NetlinkError as error:
        raise StellarError(
            f"The kernel refused to tell about {what}: {os.strerror(error.code)}.",
            "It may just have been deleted.",
        ) from error


def inspect(netns: str, name: str) -> Interface:
    """Look an interface up.

    Raises
    ------
    UsageError
        No such namespace or interface, or not an Ethernet one.
    """

    def look() -> tuple[int, int, bool, int, tuple[str, ...], str, str]:
        with IPRoute() as ipr:
            links = {link.get_attr("IFLA_IFNAME"): link for link in ipr.get_links()}
            link = links.get(name)
            if link is None:
                place = f"namespace {netns!r}" if netns else "this namespace"
                raise UsageError(
                    f"There is no interface {name!r} in {place}; "
                    f"there are: {', '.join(sorted(links))}.",
                    "Correct the name, or name the namespace: -i NETNS:IF.",
                )
            names = {link["index"]: name for name, link in links.items()}
            info = link.get_attr("IFLA_LINKINFO")
            link_kind = info.get_attr("IFLA_INFO_KIND") if info else ""
            addresses = tuple(
                str(address.get_attr("IFA_ADDRESS"))
                for address in ipr.get_addr(index=link["index"])
            )
            return (
                link["index"],
                int(link.get_attr("IFLA_MTU")),
                bool(link["flags"] & 1),
                link["ifi_type"],
                addresses,
                link_kind,
                names.get(link.get_attr("IFLA_LINK"), "") if link_kind in _ON_TOP else "",
            )

    label = f"{netns}:{name}" if netns else name
    ifindex, mtu_bytes, is_up, link_type, addresses, link_kind, lower = _ask_kernel(
        netns, label, look
    )
    if link_type not in (_ARPHRD_ETHER, _ARPHRD_LOOPBACK):
        raise UsageError(
            f"Interface {label} has link type {link_type}, not Ethernet (1).",
            "RoCEv2 is read behind an Ethernet header; name the Ethernet interface below it.",
        )
    # A VLAN or macvlan of an RDMA port carries that port's packets.
    bound = [link for link in rdma_links(netns) if link.netdev in (name, lower)]
    if not bound and (hardware := _hardware_device(netns, lower or name)):
        kind, device = "bypass", hardware
    elif not bound:
        kind, device = "forwarded", ""
    else:
        kind, device = ("software" if bound[0].is_virtual else "bypass"), bound[0].device
    return Interface(
        netns=netns,
        name=name,
        netns_inode=netns_inode(netns),
        ifindex=ifindex,
        mtu_bytes=mtu_bytes,
        is_up=is_up,
        kind=kind,
        rdma_device=device,
        addresses=addresses,
        link_kind=link_kind,
        # What a virtual device says (veth: 10 Gbit/s) is no rate of anything.
        speed_Bps=0 if link_kind else _speed_Bps(netns, name),
    )


def cautions(interface: Interface, mode: str) -> list[str]:
    """What a user should know about observing this interface in this mode."""
    result = []
    if interface.kind == "bypass":
        result.append(
            f"belongs to the hardware RNIC {interface.rdma_device}: its RDMA packets bypass the "
            "kernel and are NOT seen here; mirror the port and use `controller analyze`"
        )
    if interface.link_kind == "veth" and mode == "native":
        # veth_xmit() of Linux; seen to kill rxe queue pairs, see docs/counters.md.
        result.append(
            "native XDP lets the veth's other end queue 256 packets only and drops more, unless "
            "that end has a qdisc (pfifo, fq): for many queue pairs give it one, or use --mode tc"
        )
    return result


def still_there(netns: str, inode: int, ifindex: int) -> bool:
    """Whether the interface with this index lives on in the same namespace."""
    if netns_inode(netns) != inode:
        return False

    def look() -> bool:
        return any(index == ifindex for index, _ in socket.if_nameindex())

    try:
        return in_netns(netns, look)
    except UsageError:  # deleted between the two looks
        return False


def drop_counters(netns: str, interface: str, rdma_device: str) -> dict[str, int]:
    """Counters of this host that can explain a missing packet, name -> packets."""

    def look() -> dict[str, int]:
        result: dict[str, int] = {}
        with IPRoute() as ipr:
            for link in ipr.get_links(ifname=interface):
                stats = link.get_attr("IFLA_STATS64") or {}
                for field in ("rx_dropped", "tx_dropped", "rx_errors", "tx_errors",
                              "rx_over_errors", "rx_missed_errors"):  # fmt: skip
                    result[field] = int(stats.get(field, 0))
                dropped = 0
                for qdisc in ipr.get_qdiscs(index=link["index"]):
                    # The root's count has the drops of its children in it.
                    if qdisc["parent"] != _TC_H_ROOT:
                        continue
                    queue = qdisc.get_attr("TCA_STATS2")
                    queue = queue.get_attr("TCA_STATS_QUEUE") if queue else None
                    dropped += int(queue["drops"]) if queue else 0
                result["qdisc_drops"] = dropped
        return result

    counters = _ask_kernel(netns, interface, look)
    if rdma_device:
        device = rdma_counters(netns, rdma_device)
        counters["rdma_send_err"] = int(device.get("send_err", 0))
    return counters
