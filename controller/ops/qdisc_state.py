"""The egress queues of an interface as the kernel has them, read by netlink.

By netlink because tc 6.1 prints HTB classes as text even when asked for JSON, and leaves
counters out that are zero.
"""

from __future__ import annotations

import os
import struct
from dataclasses import asdict, dataclass
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from controller.dataplane.interfaces import Interface
from controller.dataplane.netns import in_netns
from controller.errors import StellarError
from controller.ops.qdisc_tree import (
    CLASS_MINOR,
    CLASSES,
    HANDLE,
    MAJOR,
    OTHER_MINOR,
    ROOT_MINOR,
    QueueMap,
)

_TC_H_ROOT = 0xFFFFFFFF
_INGRESS_KINDS = ("ingress", "clsact")
_OUR_KINDS = ("htb", "mqprio")
_HTB_MINORS = (*range(CLASS_MINOR, CLASS_MINOR + CLASSES), OTHER_MINOR)
# struct tc_fq_qd_stats (linux/pkt_sched.h): flows_plimit, horizon_drops, horizon_caps.
_FQ_FLOWS_PLIMIT, _FQ_HORIZON_DROPS, _FQ_HORIZON_CAPS = 32, 88, 96
# struct tc_mqprio_qopt: num_tc, map, hw, count, offset.
_MQPRIO = struct.Struct("=B16sB16H16H")


@dataclass(frozen=True)
class ClassState:
    """One class of our HTB tree; ``number`` is None for other traffic."""

    number: int | None
    classid: str
    floor_Bps: int
    ceiling_Bps: int
    prio: int
    leaf_kind: str
    sent_bytes: int
    sent_packets: int
    drops: int
    backlog_bytes: int
    backlog_packets: int

    @property
    def name(self) -> str:
        """``class 3`` or ``other``."""
        return "other" if self.number is None else f"class {self.number}"


@dataclass(frozen=True)
class QdiscState:
    """What stands at the egress of an interface.

    Parameters
    ----------
    root_kind, root_handle
        The root qdisc; handle ``0:`` is the kernel's default, ``57e1:`` may be ours.
    kind
        ``htb`` or ``mqprio`` when it is ours, else "".
    complete
        Ours, and nothing is missing (a `setup` that died half way leaves gaps).
    rate_Bps
        Of our HTB tree, else 0.
    has_fq
        fq stands somewhere at the egress, ours or the user's: a departure time is kept there.
    all_fq
        It stands on every way out.
    horizon_drops, horizon_caps
        Packets whose departure time fq refused, or pulled to its horizon: neither may
        happen, since the dataplane clamps at a nearer horizon.
    flow_limit_drops
        Packets that fq refused because their flow had too many queued.
    drops
        Packets that the root and all below it refused.
    classes
        Of our HTB tree, 0 .. 7 and other.
    queue_map, hardware
        Of our mqprio, and whether the driver took it over.
    """

    interface: str
    root_kind: str
    root_handle: str
    kind: str = ""
    complete: bool = False
    rate_Bps: int = 0
    has_fq: bool = False
    all_fq: bool = False
    horizon_drops: int = 0
    horizon_caps: int = 0
    flow_limit_drops: int = 0
    drops: int = 0
    classes: tuple[ClassState, ...] = ()
    queue_map: QueueMap | None = None
    hardware: bool = False

    @property
    def ours(self) -> bool:
        """Whether the root qdisc is one of `controller qdisc setup`."""
        return bool(self.kind)

    @property
    def is_default(self) -> bool:
        """Whether the root qdisc is the kernel's own choice."""
        return self.root_handle == "0:"

    def to_json(self) -> dict[str, Any]:
        """Members by name, with `ours`."""
        return {"ours": self.ours, **asdict(self)}


def _dump(info: Interface) -> tuple[list[Any], list[Any]]:
    """Qdiscs and classes of an interface."""

    def look() -> tuple[list[Any], list[Any]]:
        with IPRoute() as ipr:
            qdiscs = list(ipr.get_qdiscs(index=info.ifindex))
            return qdiscs, list(ipr.get_classes(index=info.ifindex))

    try:
        return in_netns(info.netns, look)
    except NetlinkError as error:
        raise StellarError(
            f"The kernel refused to tell about {info.label}: {os.strerror(error.code)}.",
            "It may just have been deleted.",
        ) from error


def _queue(entry: Any) -> dict[str, int]:
    """Sent, dropped and waiting, of a qdisc or class."""
    result = dict.fromkeys(("bytes", "packets", "drops", "backlog", "qlen"), 0)
    stats = entry.get_attr("TCA_STATS2")
    for name in ("TCA_STATS_BASIC", "TCA_STATS_QUEUE"):
        part = stats.get_attr(name) if stats else None
        result.update({key: int(part[key]) for key in result if part and key in part})
    return result


def _raw(text: Any) -> bytes:
    """Bytes of an attribute that pyroute2 does not decode ("01:02:...")."""
    return bytes.fromhex(text.replace(":", "")) if isinstance(text, str) else b""


def _fq_counter(qdisc: Any, offset: int) -> int:
    stats = qdisc.get_attr("TCA_STATS2")
    raw = _raw(stats.get_attr("TCA_STATS_APP")) if stats else b""
    # Kernels before 5.8 know no horizon and end before it.
    return int.from_bytes(raw[offset : offset + 8], "little") if len(raw) >= offset + 8 else 0


def _handle(number: int) -> str:
    return f"{number >> 16:x}:"


def read_state(info: Interface) -> QdiscState:
    """The egress queues of an interface as they are now."""
    qdiscs, classes = _dump(info)
    egress = [each for each in qdiscs if each.get_attr("TCA_KIND") not in _INGRESS_KINDS]
    root = next((each for each in egress if each["parent"] == _TC_H_ROOT), None)
    if root is None:  # an interface that is down may have none
        return QdiscState(info.label, "none", "0:")
    root_kind, root_handle = root.get_attr("TCA_KIND"), _handle(root["handle"])
    kind = root_kind if root_handle == HANDLE and root_kind in _OUR_KINDS else ""
    ours: tuple[ClassState, ...] = ()
    rate_Bps, queue_map, hardware, complete = 0, None, False, False
    parents = {each["parent"] >> 16 for each in egress if each is not root}
    leaves = [each for each in egress if not each["handle"] or each["handle"] >> 16 not in parents]
    if len(leaves) > 1:  # a default root (mq) has handle 0: and is no leaf
        leaves = [each for each in leaves if each is not root]
    kinds = [each.get_attr("TCA_KIND") for each in leaves]
    if kind == "htb":
        leaf_kinds = {each["parent"]: each.get_attr("TCA_KIND") for each in egress}
        found = {each["handle"] & 0xFFFF: each for each in classes}
        ours = tuple(
            _class_state(minor, found[minor], leaf_kinds) for minor in _HTB_MINORS if minor in found
        )
        if ROOT_MINOR in found:
            rate_Bps = _rate(found[ROOT_MINOR], "rate")
        complete = bool(rate_Bps) and len(ours) == len(_HTB_MINORS)
        complete = complete and all(each.leaf_kind for each in ours)
    elif kind == "mqprio":
        queue_map, hardware = _queue_map(_raw(root.get_attr("TCA_OPTIONS")))
        complete = queue_map is not None
    # A leaf class without a qdisc of its own has a pfifo that is not listed.
    bare = [each for each in classes if _is_leaf(each) and each["handle"] not in
            {below["parent"] for below in egress}]  # fmt: skip
    fqs = [each for each in egress if each.get_attr("TCA_KIND") == "fq"]
    return QdiscState(
        interface=info.label,
        root_kind=root_kind,
        root_handle=root_handle,
        kind=kind,
        complete=complete,
        rate_Bps=rate_Bps,
        has_fq=bool(fqs),
        all_fq=bool(kinds) and not bare and all(each == "fq" for each in kinds),
        horizon_drops=sum(_fq_counter(each, _FQ_HORIZON_DROPS) for each in fqs),
        horizon_caps=sum(_fq_counter(each, _FQ_HORIZON_CAPS) for each in fqs),
        flow_limit_drops=sum(_fq_counter(each, _FQ_FLOWS_PLIMIT) for each in fqs),
        drops=_queue(root)["drops"],
        classes=ours,
        queue_map=queue_map,
        hardware=hardware,
    )


def _is_leaf(entry: Any) -> bool:
    """Whether a class is an HTB class that sends, rather than one that others hang on."""
    options = entry.get_attr("TCA_OPTIONS")
    if entry.get_attr("TCA_KIND") != "htb" or options is None:
        return False
    return int(options.get_attr("TCA_HTB_PARMS")["level"]) == 0


def _rate(entry: Any, what: str) -> int:
    """``rate`` or ``ceil`` of an HTB class; beyond 32 bits the kernel sends it apart."""
    options = entry.get_attr("TCA_OPTIONS")
    wide = options.get_attr(f"TCA_HTB_{what.upper()}64")
    return int(wide if wide is not None else options.get_attr("TCA_HTB_PARMS")[what])


def _class_state(minor: int, entry: Any, leaf_kinds: dict[int, str]) -> ClassState:
    queue = _queue(entry)
    return ClassState(
        number=None if minor == OTHER_MINOR else minor - CLASS_MINOR,
        classid=f"{MAJOR:x}:{minor:x}",
        floor_Bps=_rate(entry, "rate"),
        ceiling_Bps=_rate(entry, "ceil"),
        prio=int(entry.get_attr("TCA_OPTIONS").get_attr("TCA_HTB_PARMS")["prio"]),
        leaf_kind=leaf_kinds.get(entry["handle"], ""),
        sent_bytes=queue["bytes"],
        sent_packets=queue["packets"],
        drops=queue["drops"],
        backlog_bytes=queue["backlog"],
        backlog_packets=queue["qlen"],
    )


def _queue_map(raw: bytes) -> tuple[QueueMap | None, bool]:
    """The map of an mqprio with eight classes, and whether the driver took it over."""
    if len(raw) < _MQPRIO.size:
        return None, False
    count_tc, mapping, hardware, *queues = _MQPRIO.unpack_from(raw)
    if count_tc != CLASSES:
        return None, bool(hardware)
    ranges = tuple(zip(queues[:CLASSES], queues[16 : 16 + CLASSES], strict=True))
    return QueueMap(tuple(mapping), ranges), bool(hardware)
