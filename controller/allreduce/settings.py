"""How a communicator works: what all ranks must have in common, and what is each rank's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from controller.allreduce.wire import MAX_TOKENS
from controller.errors import UsageError
from controller.priority.classes import CLASSES, MAX_DSCP, default_classes
from controller.priority.ranges import check_integer
from controller.verbs.queue_pair import Timing

KIB = 1 << 10
MIB = 1 << 20
PAGE_NBYTES = 4096


@dataclass(frozen=True)
class Settings:
    """Of a communicator.

    Parameters
    ----------
    chunk_nbytes
        Bytes of a message at most. Smaller ones pipeline better, larger ones cost less each.
    tokens
        Messages that may be outstanding to each peer, 2 .. 32; so many slots of `chunk_nbytes`
        it keeps for us.
    classes
        Classes with a queue pair to each peer, 0 (lowest) .. 7.
    traffic_classes
        Class -> traffic class byte, where it is not that of the built-in classes. Class 7 is that
        of control messages.
    timeout_s
        An operation that does not move for so long fails, on all ranks.
    join_timeout_s
        How long the ranks wait for one another at the beginning.
    queue_pair_timeout, queue_pair_retries
        4.096 us x 2^timeout for each try; then the peer counts as unreachable. Soft-RoCE takes
        7 retries for "for ever".
    staged_nbytes
        Buffers that are not registered are copied through the pool up to this size, and
        registered in place beyond it.
    pool_nbytes
        Capacity of the pool that is made when none is given.
    record
        File that takes a trace of that pool's requests, for `controller pool replay`; this rank's
        own. None: no trace.
    """

    chunk_nbytes: int = 128 * KIB
    tokens: int = 8
    classes: tuple[int, ...] = (1,)
    traffic_classes: Mapping[int, int] = field(default_factory=dict)
    timeout_s: float = 30.0
    join_timeout_s: float = 60.0
    queue_pair_timeout: int = 17
    queue_pair_retries: int = 6
    staged_nbytes: int = 256 * KIB
    pool_nbytes: int = 256 * MIB
    record: str | None = None

    def __post_init__(self) -> None:
        check_integer("chunk_nbytes", self.chunk_nbytes, PAGE_NBYTES, 64 * MIB)
        if self.chunk_nbytes % PAGE_NBYTES:
            raise UsageError(
                f"chunk_nbytes is {self.chunk_nbytes}; expected a multiple of {PAGE_NBYTES}."
            )
        check_integer("tokens", self.tokens, 2, MAX_TOKENS)
        check_integer("queue_pair_timeout", self.queue_pair_timeout, 1, 31)
        check_integer("queue_pair_retries", self.queue_pair_retries, 0, 7)
        check_integer("staged_nbytes", self.staged_nbytes, 0, 1 << 40)
        check_integer("pool_nbytes", self.pool_nbytes, MIB, 1 << 44)
        if not self.classes or len(set(self.classes)) != len(self.classes):
            raise UsageError(f"classes are {self.classes}; expected one or more, each once.")
        for number in self.classes:
            check_integer("A class", number, 0, CLASSES - 1)
        for number, value in self.traffic_classes.items():
            check_integer("A class", number, 0, CLASSES - 1)
            check_integer(f"Traffic class of class {number}", value, 0, MAX_DSCP << 2)
            if value & 3:
                raise UsageError(
                    f"Traffic class of class {number} is {value}; expected a DSCP << 2, as the low "
                    "two bits are ECN's."
                )
        for name in ("timeout_s", "join_timeout_s"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and value > 0 and math.isfinite(value)):
                raise UsageError(f"{name} is {value}; expected seconds above 0.")

    def traffic_class(self, number: int) -> int:
        """Traffic class byte of a class."""
        value = self.traffic_classes.get(number)
        return default_classes()[number].dscp << 2 if value is None else value

    @property
    def timing(self) -> Timing:
        """Of the queue pairs."""
        return Timing(self.queue_pair_timeout, self.queue_pair_retries)

    def common(self) -> dict[str, Any]:
        """What must be the same on all ranks, for JSON."""
        return {
            "chunk_nbytes": self.chunk_nbytes,
            "tokens": self.tokens,
            "classes": sorted(self.classes),
        }

    def nearest_class(self, wanted: int) -> int:
        """The class to use for one that may have no queue pair: the next lower, else the lowest."""
        return max((n for n in self.classes if n <= wanted), default=min(self.classes))
