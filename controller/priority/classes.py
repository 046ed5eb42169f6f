"""The eight traffic classes: what each carries in the packet, and what it may use of a link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from controller.congestion.dcqcn import REFERENCE_LINK_Bps
from controller.errors import UsageError
from controller.priority.ranges import check_integer, check_share

CLASSES = 8
MAX_DSCP = 63
# mqprio, prio and pfifo_fast map priorities through 16 entries (TC_PRIO_MAX + 1) and look at the
# low four bits only; a larger skb->priority is a qdisc's class id to HTB.
MAX_PRIORITY = 15
MAX_QUEUE_BYTES = 1 << 31

# ECN of a class that names no thresholds. Zhu et al., "Congestion Control for Large-Scale RDMA
# Deployments", SIGCOMM 2015, section 5: Kmin, Kmax and Pmax at 40 Gb/s links.
# A well-known other choice: Alibaba's, 100 and 400 KB for each 25 Gb/s of the link with Pmax 0.2
# (Li et al., "HPCC", SIGCOMM 2019, section 5.1).
KMIN_BYTES = 5_000
KMAX_BYTES = 200_000
PMAX = 0.01

# Class -> DSCP. 8 is CS1 ("less than best effort"), 0 best effort, 10, 18, 26, 34 AF11 .. AF41,
# of which 26 is what RoCE is usually given; 40 and 48 are CS5 and CS6 (network control).
_DSCPS = (8, 0, 10, 18, 26, 34, 40, 48)
# Every class keeps a share: a starved queue pair retransmits and then dies of its timeout.
# Class 7 carries every flow's ACK, NAK and CNP.
_FLOORS = (0.05,) * 7 + (0.10,)
# Sums of decimal fractions miss 1 by a few bits.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class TrafficClass:
    """One of the eight classes; 0 is the lowest.

    Parameters
    ----------
    number
        0 .. 7.
    dscp
        What its packets carry, 0 .. 63.
    priority
        ``skb->priority`` of its packets, 0 .. 15: what a NIC's or qdisc's priority map reads.
    kmin_bytes, kmax_bytes
        Queue below which nothing is marked, and from which everything is. None (both):
        by link rate, see `thresholds`.
    pmax
        Marking probability just below Kmax, above 0 .. 1.
    floor_share, ceiling_share
        What it is sure of, and what it may reach, as a share of the link rate.

    Raises
    ------
    UsageError
        A value is impossible.
    """

    number: int
    dscp: int
    priority: int
    kmin_bytes: int | None = None
    kmax_bytes: int | None = None
    pmax: float = PMAX
    floor_share: float = 0.05
    ceiling_share: float = 1.0

    def __post_init__(self) -> None:
        check_integer("Class number", self.number, 0, CLASSES - 1)
        name = f"Class {self.number}:"
        check_integer(f"{name} dscp", self.dscp, 0, MAX_DSCP)
        check_integer(f"{name} priority", self.priority, 0, MAX_PRIORITY)
        check_share(f"{name} pmax", self.pmax, zero=False)
        check_share(f"{name} floor", self.floor_share, zero=True)
        check_share(f"{name} ceiling", self.ceiling_share, zero=False)
        if self.floor_share > self.ceiling_share:
            raise UsageError(
                f"{name} floor {self.floor_share} is above ceiling {self.ceiling_share}; "
                "allowed: a floor up to the ceiling."
            )
        if self.kmin_bytes is None and self.kmax_bytes is None:
            return
        if self.kmin_bytes is None or self.kmax_bytes is None:
            given, missing = ("kmax", "kmin") if self.kmin_bytes is None else ("kmin", "kmax")
            raise UsageError(
                f"{name} {given} is given and {missing} is not; allowed: both, or none (by the "
                "link rate)."
            )
        check_integer(f"{name} kmin", self.kmin_bytes, 0, MAX_QUEUE_BYTES)
        check_integer(f"{name} kmax", self.kmax_bytes, 0, MAX_QUEUE_BYTES)
        if self.kmin_bytes > self.kmax_bytes:
            raise UsageError(
                f"{name} kmin {self.kmin_bytes} is above kmax {self.kmax_bytes} bytes; allowed: "
                "kmin up to kmax."
            )

    def to_json(self) -> dict[str, Any]:
        """Members by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> TrafficClass:
        """From `to_json`; a wrong member raises UsageError or TypeError."""
        return cls(**document)


def default_classes() -> tuple[TrafficClass, ...]:
    """The eight classes as they are when nobody changes them."""
    return tuple(
        TrafficClass(number, dscp, number, floor_share=floor)
        for number, (dscp, floor) in enumerate(zip(_DSCPS, _FLOORS, strict=True))
    )


def validate(classes: Sequence[TrafficClass]) -> None:
    """Check what the classes must be together.

    Raises
    ------
    UsageError
        They are not classes 0 .. 7 in order, two have one DSCP, or the floors promise more
        than there is.
    """
    numbers = [entry.number for entry in classes]
    if numbers != list(range(CLASSES)):
        raise UsageError(f"The classes are {numbers}; allowed: 0 .. {CLASSES - 1}, each once.")
    owners: dict[int, int] = {}
    for entry in classes:
        other = owners.setdefault(entry.dscp, entry.number)
        if other != entry.number:
            free = sorted(set(range(MAX_DSCP + 1)) - {each.dscp for each in classes})
            raise UsageError(
                f"Classes {other} and {entry.number} both have dscp {entry.dscp}; allowed: a DSCP "
                f"for each class ({', '.join(map(str, free[:4]))}, ... are free)."
            )
    floors = sum(entry.floor_share for entry in classes)
    if floors > 1 + _ROUNDING:
        listed = ", ".join(f"{entry.floor_share:g}" for entry in classes)
        raise UsageError(
            f"The floors of classes 0 .. {CLASSES - 1} ({listed}) are {floors:.0%} of the link; "
            "allowed: up to 100 % in sum."
        )


def change(classes: Sequence[TrafficClass], number: int, **fields: Any) -> tuple[TrafficClass, ...]:
    """Return the classes with members of one of them replaced.

    Raises
    ------
    UsageError
        There is no such class, or the classes would not be valid.
    """
    check_integer("Class", number, 0, CLASSES - 1)
    result = tuple(
        replace(entry, **fields) if entry.number == number else entry for entry in classes
    )
    validate(result)
    return result


def thresholds(entry: TrafficClass, link_Bps: float) -> tuple[int, int, float]:
    """Kmin, Kmax (bytes) and Pmax of a class on a link.

    Thresholds that the class names hold on any link. The others are the paper's up to its
    40 Gb/s, since a queue of a few packets cannot shrink with the link, and grow with the
    rate above it, so that they stand for the same time.
    """
    if entry.kmin_bytes is not None and entry.kmax_bytes is not None:
        return entry.kmin_bytes, entry.kmax_bytes, entry.pmax
    scale = max(1.0, link_Bps / REFERENCE_LINK_Bps)
    return round(KMIN_BYTES * scale), round(KMAX_BYTES * scale), entry.pmax
