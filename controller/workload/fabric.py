"""The hosts that the jobs share: a testbed whose every egress has the classes' queues.

They are there under every policy, also without a controller, so that policies differ in the
order of packets only.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping

from controller.errors import StellarError
from controller.ops.qdisc import setup
from controller.ops.qdisc_tree import HANDLE, ROOT_MINOR, Tree
from controller.ops.testbed import BedHost, Testbed, testbed
from controller.ops.testbed_tools import run_tool
from controller.priority.classes import default_classes
from controller.workload.plan import Traffic

# rxe's counters of what went wrong and was sent again, or ended a queue pair; duplicates are
# counted where they arrive, out-of-sequence ones as well.
TROUBLES = (
    "duplicate_request", "out_of_seq_request", "rcvd_seq_err", "completer_retry_err",
    "retry_exceeded_err", "send_err", "rcvd_rnr_err",
)  # fmt: skip
_SENT = "sent_pkts"
# What a turn of a contest is told with.
COUNTERS = (*TROUBLES, _SENT)
_ETHERNET_BYTES = 18  # with one VLAN tag, as in qdisc_tree
# What a class may send at once after a late timer: the burst of the testbed's own shaped ports.
_BURST_S = 0.003


@contextlib.contextmanager
def shared_hosts(traffic: Traffic) -> Iterator[Testbed]:
    """Hosts with soft-RoCE around a bridge, each with its egress shaped and in classes.

    Parameters
    ----------
    traffic
        How many, and at which rate. The bridge is not shaped: what contends is the egress,
        where a host decides.

    Raises
    ------
    StellarError
        What testbed() and qdisc.setup() raise.
    """
    with testbed(traffic.ranks) as bed:
        for host in bed.hosts:
            done = setup(
                host.netns, host.interface, default_classes(), traffic.rate_Bps,
                qp_timeout=traffic.queue_pair_timeout,
            )  # fmt: skip
            assert done.tree is not None
            run_tool(
                ["tc", "-n", host.netns, "-batch", "-"], patient_bursts(done.tree, host.interface)
            )
        yield bed


def patient_bursts(tree: Tree, interface: str) -> list[str]:
    """Lines for ``tc -batch`` that let the classes of a tree make up for late timers.

    Those of a user-mode kernel are late by milliseconds, and with the small bursts of `qdisc
    setup` HTB gives nothing back of it: a third of the rate was lost at 50 Mbit/s. Rates,
    ceilings and order stay.
    """
    frame_bytes = tree.mtu_bytes + _ETHERNET_BYTES
    quantum = 2 * frame_bytes

    def burst(rate_Bps: int) -> int:
        return max(2 * frame_bytes, round(rate_Bps * _BURST_S))

    def line(parent: str, classid: str, rate_Bps: int, ceiling_Bps: int, prio: str) -> str:
        return (
            f"class change dev {interface} parent {parent} classid {classid} htb "
            f"rate {rate_Bps}bps ceil {ceiling_Bps}bps burst {burst(rate_Bps)} "
            f"cburst {burst(ceiling_Bps)} mtu {frame_bytes} quantum {quantum}{prio}"
        )

    root = f"{HANDLE}{ROOT_MINOR:x}"
    return [
        line(HANDLE, root, tree.rate_Bps, tree.rate_Bps, ""),
        *(
            line(root, leaf.classid, leaf.floor_Bps, leaf.ceiling_Bps, f" prio {leaf.prio}")
            for leaf in tree.leaves
        ),
    ]


def target(host: BedHost) -> str:
    """The host's interface as ``controller start`` names it."""
    return f"{host.netns}:{host.interface}"


def read_counters(bed: Testbed) -> dict[str, int]:
    """Counters of rxe, summed over the hosts: `TROUBLES` and packets sent.

    Raises
    ------
    StellarError
        The tool rdma does not show them.
    """
    total = dict.fromkeys(COUNTERS, 0)
    for host in bed.hosts:
        words = ("rdma", "-j", "statistic", "show", "link", f"{host.device}/1")
        text = run_tool(host.command(*words))
        try:
            (entry,) = json.loads(text)
            for name in total:
                total[name] += int(entry[name])
        except (ValueError, KeyError, TypeError) as error:
            raise StellarError(
                f"rdma shows no counters of {host.device}: {text[:200]!r}.",
                "Look at: rdma statistic show link",
            ) from error
    return total


def increase(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """What each counter gained."""
    return {name: after[name] - before[name] for name in before}
