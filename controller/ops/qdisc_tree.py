"""What `controller qdisc setup` builds, as numbers and tc commands; no I/O.

The HTB tree::

    57e1:        htb, default 57e1:2
      57e1:1     the link: rate = ceiling = R
        57e1:10 .. 57e1:17   class 0 .. 7: rate = floor, ceiling, prio 7 - class
        57e1:2   everything that no job matches
                 leaves: fq where the kernel has it, else pfifo

A packet whose ``skb->priority`` is one of these class ids goes to that class without any filter.
Floors are served first; what they leave goes to the highest class that wants it, up to its
ceiling.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from controller.errors import UsageError
from controller.units import format_bytes, format_duration, format_rate

MAJOR = 0x57E1
HANDLE = f"{MAJOR:x}:"
ROOT_MINOR = 0x1
OTHER_MINOR = 0x2
CLASS_MINOR = 0x10
CLASSES = 8
# Handles of the leaf qdiscs: one for each kind, since a qdisc cannot change its kind in place.
_LEAF_MAJOR = {"fq": 0x5710, "pfifo": 0x5720}
_OTHER_LEAF = 0xF
QUEUE_LEAF_MAJOR = 0x5800

# A window of an rxe queue pair: RXE_MAX_UNACKED_PSNS (drivers/infiniband/sw/rxe/rxe_param.h)
# packets of the path MTU.
WINDOW_PACKETS = 128
_PATH_MTUS_BYTES = (4096, 2048, 1024, 512, 256)
# IPv6 40, UDP 8, BTH 12, RETH 16, ICRC 4: what the first packet of a WRITE carries.
_IP_TO_ICRC_BYTES = 80
_ETHERNET_BYTES = 18  # with one VLAN tag
# InfiniBand: a QP waits at least 4.096 us * 2^attribute for an acknowledgement. 14 is the default
# of perftest and ibv_rc_pingpong.
DEFAULT_QP_TIMEOUT = 14
MAX_QP_TIMEOUT = 31
_QP_TIMEOUT_UNIT_NS = 4096
# Half the timeout for the window's drain; the other half for the way and the peer.
_DRAIN_SHARE = 0.5

MIN_RATE_Bps = 125_000
MAX_RATE_Bps = 125_000_000_000
OTHER_SHARE = 0.05
# HTB knows no class without a rate. 1000 bytes/s keeps a class's burst below the 274 s that fit
# into 32 bits of HTB's 64 ns ticks.
_MIN_SHARE = 0.001
_MIN_CLASS_Bps = 1000
# Sums of shares such as 0.1 miss 1 by their last bit.
_EPSILON = 1e-9

# Tokens for so long, and two frames at least: a timer that is late by less loses no rate.
_BURST_NS = 50_000
# What a class may send in its turn among classes of equal prio (class 1 and "other" have one):
# more than a frame, and below the 200000 from which the kernel warns.
_QUANTUM_FRAMES = 2
_QUANTUM_MAX_BYTES = 200_000

# A packet that a qdisc refuses makes rxe repeat a window or fail the queue pair. What rxe can have
# in flight is bounded by the windows, so the queue is sized to hold them: 16 queue pairs in one
# flow of fq (it knows flows by a hash of addresses and ports), 128 in one leaf. fq's own defaults,
# 100 packets a flow, hold less than one window.
FLOW_LIMIT_PACKETS = 16 * WINDOW_PACKETS
LEAF_LIMIT_PACKETS = 128 * WINDOW_PACKETS
# Kernel sockets' packets are "orphans" for fq: more hash values, fewer queue pairs in one flow.
_ORPHAN_MASK = 65535
# A departure time further away is pulled to it (horizon_cap), not dropped (fq's default). The
# dataplane clamps at a nearer horizon of its own; this one catches what went wrong. 10 s is far
# beyond one window at 10 Mbit/s (0.43 s), and a packet held for longer is of no use to its QP.
_HORIZON_MS = 10_000


class Share(Protocol):
    """What a class may use of the link; `controller.priority.classes.TrafficClass` is one."""

    @property
    def number(self) -> int:
        """0 .. 7."""

    @property
    def floor_share(self) -> float:
        """Share of the link that it is sure of, 0 .. 1."""

    @property
    def ceiling_share(self) -> float:
        """Share of the link that it can have at most, 0 .. 1."""


@dataclass(frozen=True)
class Leaf:
    """One class of the tree. ``number`` is None for other traffic."""

    number: int | None
    minor: int
    prio: int
    floor_Bps: int
    ceiling_Bps: int
    raised: bool = False

    @property
    def name(self) -> str:
        """``class 3`` or ``other``."""
        return "other" if self.number is None else f"class {self.number}"

    @property
    def classid(self) -> str:
        """As tc writes it."""
        return f"{MAJOR:x}:{self.minor:x}"


@dataclass(frozen=True)
class Tree:
    """The tree for one link; `leaves` from class 0 to 7, then other traffic."""

    rate_Bps: int
    mtu_bytes: int
    qp_timeout: int
    leaves: tuple[Leaf, ...]
    warnings: tuple[str, ...] = ()

    def drain_ns(self, leaf: Leaf) -> int:
        """How long one QP window takes through a class that gets its floor only."""
        return round(window_bytes(self.mtu_bytes) * 1e9 / leaf.floor_Bps)

    def is_safe(self, leaf: Leaf) -> bool:
        """Whether that is within half of the QP timeout."""
        return self.drain_ns(leaf) <= _DRAIN_SHARE * timeout_ns(self.qp_timeout)


def classid(number: int) -> int:
    """``skb->priority`` that puts a packet into class `number` of the tree."""
    return MAJOR << 16 | CLASS_MINOR + number


def window_bytes(mtu_bytes: int) -> int:
    """Bytes on the wire of one rxe window, with the largest path MTU that the link's MTU holds."""
    for path_mtu in _PATH_MTUS_BYTES:
        if path_mtu + _IP_TO_ICRC_BYTES <= mtu_bytes:
            return WINDOW_PACKETS * (path_mtu + _IP_TO_ICRC_BYTES + _ETHERNET_BYTES)
    return WINDOW_PACKETS * (mtu_bytes + _ETHERNET_BYTES)


def timeout_ns(attribute: int) -> int:
    """The shortest time that a QP with this timeout attribute waits."""
    return _QP_TIMEOUT_UNIT_NS << attribute


def safe_timeout(drain_ns: int) -> int:
    """The smallest timeout attribute of which `drain_ns` is at most half."""
    attribute = 1
    while drain_ns > _DRAIN_SHARE * timeout_ns(attribute) and attribute < MAX_QP_TIMEOUT:
        attribute += 1
    return attribute


def plan_tree(
    classes: Sequence[Share],
    rate_Bps: int,
    mtu_bytes: int,
    qp_timeout: int = DEFAULT_QP_TIMEOUT,
    raisable: Collection[int] = range(CLASSES),
) -> Tree:
    """The tree for classes on a link.

    Parameters
    ----------
    classes
        All eight, in any order.
    rate_Bps
        What the link carries, Ethernet frames without FCS (as the kernel counts).
    mtu_bytes
        Of the interface.
    qp_timeout
        The queue pairs' timeout attribute: a window must drain within half of it.
    raisable
        Classes whose floor may become larger where that takes a larger one: those whose
        floor nobody chose. The lowest comes first, since it waits for all others.

    Raises
    ------
    UsageError
        Impossible shares, rate or attribute.
    """
    if not MIN_RATE_Bps <= rate_Bps <= MAX_RATE_Bps:
        raise UsageError(
            f"Rate {format_rate(rate_Bps)} cannot be shaped; allowed: "
            f"{format_rate(MIN_RATE_Bps)} .. {format_rate(MAX_RATE_Bps)}."
        )
    if not 1 <= qp_timeout <= MAX_QP_TIMEOUT:
        raise UsageError(
            f"QP timeout attribute {qp_timeout} is impossible; allowed: 1 .. {MAX_QP_TIMEOUT}."
        )
    ordered = sorted(classes, key=lambda share: share.number)
    if [share.number for share in ordered] != list(range(CLASSES)):
        numbers = ", ".join(str(share.number) for share in ordered)
        raise UsageError(f"Classes {numbers} were given; allowed: 0 .. 7, each once.")
    warnings: list[str] = []
    smallest_Bps = max(_MIN_CLASS_Bps, round(rate_Bps * _MIN_SHARE))
    floors_Bps = _floors(ordered, rate_Bps, smallest_Bps, warnings)
    needed_Bps = -int(-window_bytes(mtu_bytes) * 1e9 // (_DRAIN_SHARE * timeout_ns(qp_timeout)))
    leaves = []
    for share, floor_Bps in zip(ordered, floors_Bps[:-1], strict=True):
        leaves.append(
            Leaf(
                share.number,
                CLASS_MINOR + share.number,
                CLASSES - 1 - share.number,
                floor_Bps,
                max(floor_Bps, round(rate_Bps * share.ceiling_share)),
            )
        )
    # Other traffic takes what is left of the link's rate together with class 1 (best effort).
    leaves.append(Leaf(None, OTHER_MINOR, CLASSES - 2, floors_Bps[-1], rate_Bps))
    spare_Bps = rate_Bps - sum(leaf.floor_Bps for leaf in leaves)
    for place, leaf in enumerate(leaves):
        missing_Bps = needed_Bps - leaf.floor_Bps
        may_rise = leaf.number is None or leaf.number in raisable
        if may_rise and 0 < missing_Bps <= spare_Bps and needed_Bps <= leaf.ceiling_Bps:
            leaves[place] = replace(leaf, floor_Bps=needed_Bps, raised=True)
            spare_Bps -= missing_Bps
    tree = Tree(rate_Bps, mtu_bytes, qp_timeout, tuple(leaves))
    warnings += _drain_warnings(tree)
    return replace(tree, warnings=tuple(warnings))


def _floors(
    ordered: Sequence[Share], rate_Bps: int, smallest_Bps: int, warnings: list[str]
) -> list[int]:
    """Floors of the eight classes and of other traffic; their sum is at most the rate."""
    for share in ordered:
        if not 0 <= share.floor_share <= share.ceiling_share <= 1 or share.ceiling_share == 0:
            raise UsageError(
                f"Class {share.number} has floor {share.floor_share:g} and ceiling "
                f"{share.ceiling_share:g}; allowed: 0 <= floor <= ceiling <= 1, ceiling above 0."
            )
    total = sum(share.floor_share for share in ordered)
    if total > 1 + _EPSILON:
        raise UsageError(
            f"The floors of the classes add up to {100 * total:.4g} % of the link; "
            "allowed: at most 100 %.",
            "Lower some (`controller class set`, or floor of a [[class]]).",
        )
    floors = [max(smallest_Bps, int(rate_Bps * share.floor_share)) for share in ordered]
    floors.append(max(smallest_Bps, int(rate_Bps * min(OTHER_SHARE, 1 - total))))
    excess = sum(floors) - rate_Bps
    if excess > 0:
        # Other traffic (and a class with floor 0) needs a little all the same.
        largest = max(range(CLASSES), key=lambda number: floors[number])
        floors[largest] -= excess
        warnings.append(
            f"the floors leave nothing for traffic that no job matches (ARP, TCP, ...): it and "
            f"classes of floor 0 get {format_rate(smallest_Bps)} each, taken from class {largest}"
        )
    return floors


def _drain_warnings(tree: Tree) -> list[str]:
    unsafe = [leaf for leaf in tree.leaves if not tree.is_safe(leaf)]
    if not unsafe:
        return []
    slowest = max(unsafe, key=tree.drain_ns)
    drain_ns = tree.drain_ns(slowest)
    attribute = safe_timeout(drain_ns)
    numbers = [str(leaf.number) for leaf in unsafe if leaf.number is not None]
    names = f"class{'es' if len(numbers) > 1 else ''} {', '.join(numbers)}" if numbers else ""
    if len(numbers) < len(unsafe):
        names += " and other" if numbers else "other"
    return [
        f"{names}: at its floor, {slowest.name} ({format_rate(slowest.floor_Bps)}) takes "
        f"{format_duration(drain_ns)} for the window of one queue pair "
        f"({format_bytes(window_bytes(tree.mtu_bytes))}), more than half of the QP timeout "
        f"({format_duration(timeout_ns(tree.qp_timeout))}, attribute {tree.qp_timeout}). While "
        "higher classes fill the link, such queue pairs retransmit and can die. Give them a "
        f"timeout attribute of {attribute} or more (perftest -u {attribute}, "
        f"NCCL_IB_TIMEOUT={attribute}), a larger floor, or a faster link"
    ]


# ---- tc commands ----


def fq_options() -> str:
    """Options of every fq of ours, for `tc`."""
    return (
        f"fq limit {LEAF_LIMIT_PACKETS} flow_limit {FLOW_LIMIT_PACKETS} "
        f"orphan_mask {_ORPHAN_MASK} horizon {_HORIZON_MS}ms horizon_cap"
    )


def leaf_options(leaf_kind: str) -> str:
    """Options of a leaf of this kind (``fq``, ``pfifo``), for `tc`."""
    return fq_options() if leaf_kind == "fq" else f"pfifo limit {LEAF_LIMIT_PACKETS}"


def tree_commands(tree: Tree, interface: str, leaf_kind: str, with_root: bool) -> list[str]:
    """Lines for ``tc -batch`` that build the tree, or change the one that is there.

    Each class and leaf is replaced by its own number, which changes it in place: packets in
    it stay. The root cannot be changed; without `with_root` it is taken to be there.
    """
    frame_bytes = tree.mtu_bytes + _ETHERNET_BYTES
    quantum = min(_QUANTUM_MAX_BYTES, _QUANTUM_FRAMES * frame_bytes)

    def burst(rate_Bps: int) -> int:
        return max(2 * frame_bytes, rate_Bps * _BURST_NS // 1_000_000_000)

    def htb(minor: int, parent: str, floor_Bps: int, ceiling_Bps: int, prio: str) -> str:
        return (
            f"class replace dev {interface} parent {parent} classid {MAJOR:x}:{minor:x} htb "
            f"rate {floor_Bps}bps ceil {ceiling_Bps}bps burst {burst(floor_Bps)} "
            f"cburst {burst(ceiling_Bps)} mtu {frame_bytes} quantum {quantum}{prio}"
        )

    lines = []
    if with_root:
        lines.append(f"qdisc add dev {interface} root handle {HANDLE} htb default {OTHER_MINOR:x}")
    lines.append(htb(ROOT_MINOR, HANDLE, tree.rate_Bps, tree.rate_Bps, ""))
    parent = f"{MAJOR:x}:{ROOT_MINOR:x}"
    for leaf in tree.leaves:
        lines.append(
            htb(leaf.minor, parent, leaf.floor_Bps, leaf.ceiling_Bps, f" prio {leaf.prio}")
        )
        number = _OTHER_LEAF if leaf.number is None else leaf.number
        lines.append(
            f"qdisc replace dev {interface} parent {leaf.classid} "
            f"handle {_LEAF_MAJOR[leaf_kind] + number:x}: {leaf_options(leaf_kind)}"
        )
    return lines


@dataclass(frozen=True)
class QueueMap:
    """mqprio: ``skb->priority`` -> traffic class -> hardware queues."""

    priority_to_class: tuple[int, ...]
    queues: tuple[tuple[int, int], ...]  # of each class: how many, and the first

    def commands(self, interface: str, hardware: bool) -> list[str]:
        """The line that puts it there; `hardware`: the driver takes it over."""
        return [
            f"qdisc add dev {interface} root handle {HANDLE} mqprio num_tc {CLASSES} "
            f"map {' '.join(map(str, self.priority_to_class))} "
            f"queues {' '.join(f'{count}@{first}' for count, first in self.queues)} "
            f"hw {int(hardware)}"
        ]

    def leaf_commands(self, interface: str) -> list[str]:
        """Lines that put fq on each queue, or change it in place."""
        used = sum(count for count, _ in self.queues)
        return [
            f"qdisc replace dev {interface} parent {MAJOR:x}:{queue + 1:x} "
            f"handle {QUEUE_LEAF_MAJOR + queue:x}: {fq_options()}"
            for queue in range(used)
        ]


_PRIORITIES = 16
_BEST_EFFORT = 1


def plan_queues(priorities: Sequence[int], queues: int) -> QueueMap:
    """The map for eight classes and a NIC's transmit queues.

    Parameters
    ----------
    priorities
        ``skb->priority`` of class 0 .. 7, each 0 .. 15 and its own.
    queues
        Transmit queues, 8 or more; they are spread evenly, class 0 first.

    Raises
    ------
    UsageError
        Two classes share a priority.
    """
    mapped: dict[int, int] = {}
    for number, priority in enumerate(priorities):
        if priority in mapped:
            raise UsageError(
                f"Class {mapped[priority]} and class {number} both have priority {priority}; "
                "mqprio tells classes apart by it.",
                "Give each class a priority of its own (0 .. 15).",
            )
        mapped[priority] = number
    # Priorities of no class: with the best effort.
    priority_to_class = tuple(mapped.get(p, _BEST_EFFORT) for p in range(_PRIORITIES))
    each, more = divmod(queues, CLASSES)
    ranges, first = [], 0
    for number in range(CLASSES):
        count = each + (number < more)
        ranges.append((count, first))
        first += count
    return QueueMap(priority_to_class, tuple(ranges))
