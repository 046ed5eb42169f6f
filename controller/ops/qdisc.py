"""Set the classes' queues of an interface up, change them, take them away, read them.

Ours is a root qdisc with handle 57e1: of kind htb or mqprio; any other root that somebody
set is left alone.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from controller.dataplane.interfaces import Interface, inspect
from controller.dataplane.netns import in_netns
from controller.errors import (
    ConflictError,
    PrivilegeError,
    StellarError,
    UnsupportedError,
    UsageError,
)
from controller.ops import qdisc_tree
from controller.ops.qdisc_state import QdiscState, read_state
from controller.ops.qdisc_tree import (
    CLASSES,
    DEFAULT_QP_TIMEOUT,
    HANDLE,
    QueueMap,
    Share,
    Tree,
    plan_queues,
    plan_tree,
    tree_commands,
)
from controller.units import format_rate

KINDS = ("htb", "mqprio")
_TOOL_TIMEOUT_S = 30
_CLONE_NEWNET = 0x40000000
_MBIT_Bps = 125_000
_UNKNOWN_KIND = "kind is unknown"  # as the kernel says it


class Class(Share, Protocol):
    """A class as `setup` needs it; `controller.priority.classes.TrafficClass` is one."""

    @property
    def dscp(self) -> int:
        """What its packets carry."""

    @property
    def priority(self) -> int:
        """``skb->priority`` of its packets."""


@dataclass(frozen=True)
class Setup:
    """What `setup` did.

    ``action`` is ``added`` (the kernel's default was there), ``changed`` (ours, in place) or
    ``replaced`` (ours of another kind or map, with a gap). ``tree`` is None for mqprio.
    ``hardware``: the driver took the mqprio map over.
    """

    interface: str
    kind: str
    action: str
    leaf_kind: str
    tree: Tree | None
    hardware: bool
    warnings: tuple[str, ...]
    advice: tuple[str, ...]


def read(netns: str, interface: str) -> QdiscState:
    """The egress queues of an interface as they are.

    Raises
    ------
    UsageError
        There is no such namespace or interface.
    """
    return read_state(inspect(netns, interface))


def setup(
    netns: str,
    interface: str,
    classes: Sequence[Class],
    rate_Bps: int | None = None,
    kind: str = "htb",
    qp_timeout: int = DEFAULT_QP_TIMEOUT,
    raisable: Collection[int] = range(CLASSES),
) -> Setup:
    """Build the queues of the classes, or change those of ours that are there.

    Parameters
    ----------
    netns, interface
        Namespace ("": this one) and name.
    classes
        All eight.
    rate_Bps
        Rate of the link, for ``htb`` only: mqprio leaves rates to the NIC.
    kind
        ``htb``, or ``mqprio`` for a NIC with eight transmit queues or more.
    qp_timeout, raisable
        See `qdisc_tree.plan_tree`.

    Raises
    ------
    UsageError
        Impossible rate, shares or interface.
    UnsupportedError
        A hardware RNIC's interface; a kernel without this qdisc; too few queues.
    ConflictError
        Somebody else set a root qdisc.
    """
    info = inspect(netns, interface)
    if info.kind == "bypass":
        raise UnsupportedError(
            f"{info.label} belongs to the hardware RNIC {info.rdma_device}: its RDMA packets never "
            "pass a qdisc of the kernel, so none here could enforce a class.",
            "Give each queue pair the traffic class of its class (DSCP * 4): NCCL_IB_TC, "
            "UCX_IB_TRAFFIC_CLASS, perftest --tclass; map DSCPs to the NIC's queues with mlnx_qos "
            "or dcb.",
        )
    state = read_state(info)
    if not state.ours and not state.is_default:
        raise ConflictError(
            f"{info.label} has a root qdisc that is not ours: {state.root_kind} "
            f"{state.root_handle}; expected the kernel's default.",
            f"If it may go: {_tc(netns)} qdisc del dev {interface} root",
        )
    if not has_qdisc(kind):  # before anything of an older setup is taken away
        raise UnsupportedError(
            f"This kernel has no qdisc {kind}.",
            f"modprobe sch_{kind}, or take a kernel with CONFIG_NET_SCH_{kind.upper()}.",
        )
    if kind == "htb":
        if rate_Bps is None:
            raise UsageError(
                "HTB needs the rate of the link.", "Give --rate, a little below the link's own."
            )
        _check_rate(info, rate_Bps)
        tree = plan_tree(classes, rate_Bps, info.mtu_bytes, qp_timeout, raisable)
        return _setup_htb(info, state, tree)
    if rate_Bps is not None:
        raise UsageError(
            "mqprio maps classes to the NIC's queues and shapes nothing: it takes no rate.",
            "Leave --rate out, or use --kind htb.",
        )
    return _setup_mqprio(info, state, classes)


def clear(netns: str, interface: str) -> bool:
    """Delete our root qdisc; the kernel puts its default back. Whether ours was there.

    Raises
    ------
    UsageError
        There is no such namespace or interface.
    """
    info = inspect(netns, interface)
    if not read_state(info).ours:
        return False
    _run_tc(netns, [f"qdisc del dev {interface} root handle {HANDLE}"])
    return True


def _check_rate(info: Interface, rate_Bps: int) -> None:
    if rate_Bps <= 0:
        raise UsageError("Rate 0 would stop the interface.", "Example: --rate 25gbit")
    text = _sysfs(info, "cat /sys/class/net/$0/speed").strip()
    speed_Bps = int(text) * _MBIT_Bps if text.lstrip("-").isdigit() else 0
    if 0 < speed_Bps < rate_Bps:
        raise UsageError(
            f"Rate {format_rate(rate_Bps)} is above the speed of {info.label}, "
            f"{format_rate(speed_Bps)}.",
            "Give at most that: above it the queue builds in the NIC, where no class counts.",
        )


def _setup_htb(info: Interface, state: QdiscState, tree: Tree) -> Setup:
    leaf_kind = "fq" if has_qdisc("fq") else "pfifo"
    in_place = state.ours and state.kind == "htb"
    lines = tree_commands(tree, info.name, leaf_kind, with_root=not in_place)
    action = _apply(info, state, lines, in_place)
    warnings = list(tree.warnings)
    if leaf_kind == "pfifo":
        warnings.append(
            "this kernel has no fq (modprobe sch_fq, CONFIG_NET_SCH_FQ): the classes' queues are "
            f"pfifo of {qdisc_tree.LEAF_LIMIT_PACKETS} packets, and nothing can be paced here"
        )
    return Setup(info.label, "htb", action, leaf_kind, tree, False, tuple(warnings), ())


def _setup_mqprio(info: Interface, state: QdiscState, classes: Sequence[Class]) -> Setup:
    queues = len(_sysfs(info, "ls -d /sys/class/net/$0/queues/tx-*").split())
    if queues < CLASSES:
        raise UnsupportedError(
            f"{info.label} has {queues} transmit queues; mqprio needs {CLASSES}, one a class.",
            f"ethtool -L {info.name} combined {CLASSES} (or more), or use --kind htb.",
        )
    ordered = sorted(classes, key=lambda entry: entry.number)
    wanted = plan_queues([entry.priority for entry in ordered], queues)
    in_place = state.ours and _is_mapped(state, wanted)
    hardware = False
    if in_place:
        action, hardware = "changed", state.hardware
    else:
        try:
            action = _apply(info, state, wanted.commands(info.name, hardware=True), False)
            hardware = True
        except StellarError:  # the driver takes no map
            lines = wanted.commands(info.name, hardware=False)
            action = _apply(info, read_state(info), lines, False)
            action = "replaced" if state.ours else action
    leaf_kind = "fq" if has_qdisc("fq") else ""
    warnings = []
    if leaf_kind:
        _run_tc(info.netns, wanted.leaf_commands(info.name))
    else:
        warnings.append(
            "this kernel has no fq (modprobe sch_fq, CONFIG_NET_SCH_FQ): the queues keep the "
            "kernel's default qdisc, and nothing can be paced here"
        )
    if not hardware:
        warnings.append(
            "the driver takes no queue map over (hw 0): the kernel sorts packets into queues, and "
            "the device serves its queues as it always did, without priority among them"
        )
    return Setup(
        info.label, "mqprio", action, leaf_kind, None, hardware, tuple(warnings),
        _dcb_advice(info.name, ordered),
    )  # fmt: skip


def _is_mapped(state: QdiscState, wanted: QueueMap) -> bool:
    """Whether our mqprio maps as wanted; a driver may have chosen the queues itself."""
    found = state.queue_map
    if found is None or found.priority_to_class != wanted.priority_to_class:
        return False
    return state.hardware or found.queues == wanted.queues


def _dcb_advice(interface: str, classes: Sequence[Class]) -> tuple[str, ...]:
    """Commands for a NIC with DCB; Stellar does not run them."""
    mapping = " ".join(f"{entry.dscp}:{entry.priority}" for entry in classes)
    percents = [round(100 * entry.floor_share) for entry in classes]
    # What the floors leave goes to the highest class; ETS wants 100 in sum.
    percents[-1] += 100 - sum(percents)
    shares = " ".join(f"{number}:{percent}" for number, percent in enumerate(percents))
    return (
        f"dcb app add dev {interface} dscp-prio {mapping}",
        f"dcb ets set dev {interface} "
        f"prio-tc {' '.join(f'{entry.priority}:{entry.number}' for entry in classes)}",
        f"dcb ets set dev {interface} tc-tsa all:ets tc-bw {shares}",
    )


def _apply(info: Interface, state: QdiscState, lines: list[str], in_place: bool) -> str:
    """Run the commands; what a failure leaves half built on a fresh root is taken away."""
    if not in_place and state.ours:
        lines = [f"qdisc del dev {info.name} root handle {HANDLE}", *lines]
    try:
        _run_tc(info.netns, lines)
    except StellarError:
        if not in_place and read_state(info).ours:
            _run_tc(info.netns, [f"qdisc del dev {info.name} root handle {HANDLE}"])
        raise
    if in_place:
        return "changed"
    return "replaced" if state.ours else "added"


# ---- tools ----


def _tc(netns: str) -> str:
    return f"tc -n {netns}" if netns else "tc"


def _run(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, check=False,
            timeout=_TOOL_TIMEOUT_S,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise UnsupportedError(
            f"The tool {command[0]!r} is not installed.", "apt-get install iproute2"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise StellarError(
            f"{' '.join(command)} did not end within {_TOOL_TIMEOUT_S} s.",
            "Look at dmesg: the kernel's network lock may be held.",
        ) from error


def _run_tc(netns: str, lines: Sequence[str]) -> None:
    """Run lines of tc in one process; stop at the first that fails, and explain it."""
    batch = "".join(f"{line}\n" for line in lines)
    result = in_netns(netns, lambda: _run(["tc", "-batch", "-"], batch))
    if not result.returncode:
        return
    reasons, failed = [], ""
    for line in result.stderr.splitlines():
        place = line.rpartition(":")[2]
        if line.startswith("Command failed") and place.isdigit() and int(place) <= len(lines):
            failed = lines[int(place) - 1]
        elif not line.startswith("Warning:"):
            reasons.append(line.removeprefix("Error: ").removeprefix("RTNETLINK answers: "))
    reason = " ".join(reasons).strip().rstrip(".") or f"exit status {result.returncode}"
    if "not permitted" in reason:
        raise PrivilegeError(f"The kernel lets nobody but root set qdiscs: {reason}.", "Use sudo.")
    raise StellarError(
        f"tc refused `{failed}`: {reason}.",
        "`controller qdisc show` tells what is there, `controller qdisc clear` restores the "
        "kernel's default.",
    )


def _sysfs(info: Interface, script: str) -> str:
    """What a line of shell prints with the interface as $0 and its namespace's /sys.

    sysfs shows the interfaces of the namespace in which it was mounted, hence `ip netns
    exec`, which mounts it anew. Unreadable (the speed of an interface that is down): "".
    """
    prefix = ["ip", "netns", "exec", info.netns] if info.netns else []
    return _run([*prefix, "sh", "-c", script, info.name]).stdout


def has_qdisc(kind: str) -> bool:
    """Whether the kernel has this qdisc: tried in a network namespace that ends with the try.

    Raises
    ------
    PrivilegeError
        No namespace may be made.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    failures: list[BaseException] = []
    answer: list[bool] = []

    def attempt() -> None:
        try:
            if libc.unshare(_CLONE_NEWNET):
                code = ctypes.get_errno()
                raise PrivilegeError(
                    f"No network namespace to try qdiscs in: {os.strerror(code)}.", "Use sudo."
                )
            # One that is there may still refuse `lo`.
            errors = _run(["tc", "qdisc", "add", "dev", "lo", "root", kind]).stderr
            answer.append(_UNKNOWN_KIND not in errors)
        except BaseException as error:  # handed to the caller's thread below
            failures.append(error)

    thread = threading.Thread(target=attempt, name="qdisc-probe")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return answer[0]
