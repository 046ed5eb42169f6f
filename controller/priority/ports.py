"""What is done on an interface: from configuration and what the interface is, to settings."""

from __future__ import annotations

from dataclasses import dataclass

from controller.errors import UsageError
from controller.units import format_rate

# A slot of the marker's window (16 of them: 1 ms), as the design has it for fast links.
SLOT_ns = 62_500
# A slot shorter than one packet's time on the link says nothing: the largest RoCE packet.
_PACKET_BYTES = 4200
_NS_PER_S = 10**9


@dataclass(frozen=True)
class PortFacts:
    """What an interface is.

    Parameters
    ----------
    kind
        ``software``, ``forwarded`` or ``bypass``.
    speed_Bps
        Of the NIC; 0: none known (virtual devices).
    tree_rate_Bps
        Of the HTB tree that `controller qdisc setup` built; 0: there is none.
    has_fq
        fq stands on every way out, so that departure times are kept.
    """

    kind: str
    speed_Bps: int = 0
    tree_rate_Bps: int = 0
    has_fq: bool = False


@dataclass(frozen=True)
class PortWishes:
    """What the configuration says; None: by what the interface is. See `InterfaceConfig`.

    ``dcqcn``: some job is governed by DCQCN; ``paced_jobs``: some job or plan has a rate to hold.
    """

    rate_Bps: int | None = None
    mark: str | None = None
    echo: str | None = None
    pace: bool | None = None
    classify: str | None = None
    dcqcn: bool = False
    paced_jobs: bool = False


@dataclass(frozen=True)
class PortPlan:
    """What is done on an interface, and what of the wishes is not, in words."""

    link_Bps: int
    mark: str
    echo: str
    dcqcn: bool
    pace: bool
    by_dscp: bool
    consume_cnp: bool
    missing: tuple[str, ...]


def plan_port(facts: PortFacts, wishes: PortWishes) -> PortPlan:
    """Decide what is done on an interface.

    Defaults: a forwarder takes the class from the packet's DSCP and, with DCQCN, marks; an
    interface with soft-RoCE takes it from the job and, with DCQCN, echoes marks and reacts to
    echoes. Nothing acts on the packets of a hardware RNIC: they never come by.
    """
    link_Bps = wishes.rate_Bps or facts.tree_rate_Bps or facts.speed_Bps
    if facts.kind == "bypass":
        return PortPlan(link_Bps, "off", "off", False, False, False, False, _BYPASS)
    software = facts.kind == "software"
    missing = []
    mark = wishes.mark or ("window" if wishes.dcqcn and not software else "off")
    dcqcn = wishes.dcqcn and software
    if not link_Bps:
        unknown = [name for name, on in (("marking", mark != "off"), ("DCQCN", dcqcn)) if on]
        if unknown:
            missing.append(
                f"{' and '.join(unknown)}: the link's rate is not known; give [[interface]] rate, "
                "or run controller qdisc setup"
            )
        mark, dcqcn = "off", False
    elif facts.speed_Bps and link_Bps > facts.speed_Bps:
        raise UsageError(
            f"Rate {format_rate(link_Bps)} is above the NIC's speed, "
            f"{format_rate(facts.speed_Bps)}.",
            "Correct rate in its [[interface]], or leave it out.",
        )
    echo = wishes.echo or ("becn" if wishes.dcqcn and software else "off")
    wanted = wishes.pace if wishes.pace is not None else wishes.paced_jobs or dcqcn
    if wanted and not facts.has_fq:
        missing.append(
            "pacing: no fq at this egress keeps departure times; run controller qdisc setup (on a "
            "kernel with sch_fq), or make fq its root qdisc"
        )
    if wishes.pace is False and wishes.paced_jobs:
        missing.append("pacing: a job has a rate, but pace is off in this [[interface]]")
    if facts.tree_rate_Bps and link_Bps > facts.tree_rate_Bps:
        missing.append(
            f"rate: {format_rate(link_Bps)} is configured, but the HTB tree carries "
            f"{format_rate(facts.tree_rate_Bps)} only"
        )
    return PortPlan(
        link_Bps=link_Bps,
        mark=mark,
        echo=echo,
        dcqcn=dcqcn,
        pace=facts.has_fq and wishes.pace is not False,
        by_dscp=wishes.classify == "dscp" or (wishes.classify is None and not software),
        consume_cnp=software and (dcqcn or echo != "off"),
        missing=tuple(missing),
    )


_BYPASS = (
    "everything: RDMA packets of a hardware RNIC never pass the kernel. Classes take effect by "
    "the traffic class of each queue pair (DSCP * 4): NCCL_IB_TC, UCX_IB_TRAFFIC_CLASS, perftest "
    "--tclass",
)


def slot_ns_of(link_Bps: int) -> int:
    """Slot of the marker's window for a link: 62.5 us, or one packet's time if that is longer."""
    return max(SLOT_ns, _PACKET_BYTES * _NS_PER_S // link_Bps) if link_Bps else SLOT_ns
