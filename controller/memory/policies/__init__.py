"""Which region goes when the pool is full: what every eviction policy offers, and their names.

A policy sees keys and sizes only: no memory, no clock, no threads. The live cache and the replay
of a trace drive the same object, so that a replayed hit ratio says something about the live one.
Time is the number of requests.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Protocol

from controller.errors import UsageError

ONLINE_POLICIES = ("heat", "lru", "lirs", "s3-fifo", "w-tinylfu")
DEFAULT_POLICY = "heat"


class EvictionPolicy(Protocol):
    """What decides which resident region goes, and which absent one is needed soon.

    Calls come from one thread at a time, in the order in which things happened. Hits may be told
    later, in batches, but before the next `on_insert`, `victims` or `prefetch_candidates`. For a
    miss the order is: `on_request`, then `victims` until there is room, `on_remove` for each that
    went, then `on_insert`.
    """

    def on_request(
        self, key: Hashable, nbytes: int, register_us: float = 0.0, stream: Hashable = None
    ) -> None:
        """Somebody asks for a region, resident or not.

        Parameters
        ----------
        key
            The same for the same memory, over evictions too.
        nbytes
            What it takes of the pool; above 0.
        register_us
            Time that registering it took, in µs; 0 when it is not known.
        stream
            Communicator or job whose order of requests may repeat; None for the only one.
        """

    def on_insert(self, key: Hashable, nbytes: int) -> None:
        """The region is resident now, after a request or because it was prefetched."""

    def on_remove(self, key: Hashable, *, forget: bool = False) -> None:
        """The region is no longer resident.

        Parameters
        ----------
        key
            What went, whether or not this policy had named it.
        forget
            True when the memory itself is gone: it is never named for prefetch again, unless it
            is requested again.
        """

    def victims(self) -> Iterator[Hashable]:
        """Resident keys in the order in which they should go.

        The caller skips those in use, takes as many as it needs and drops the iterator before it
        calls anything else here.
        """

    def prefetch_candidates(self, limit: int) -> list[Hashable]:
        """Absent keys that are expected to be needed soon, most urgent first.

        Parameters
        ----------
        limit
            How many at most.

        Returns
        -------
        list
            Empty unless the policy is confident of what comes next.
        """


def make_policy(name: str, capacity_bytes: int, max_regions: int | None = None) -> EvictionPolicy:
    """The policy of that name, for a pool of that size.

    Parameters
    ----------
    name
        One of `ONLINE_POLICIES`.
    capacity_bytes
        What the pool holds at most, in bytes; at least 1.
    max_regions
        How many regions the pool holds at most; None when only bytes count.

    Raises
    ------
    UsageError
        No policy has that name, or a limit is below 1.
    """
    if capacity_bytes < 1 or (max_regions is not None and max_regions < 1):
        raise UsageError(
            f"A pool of {capacity_bytes} bytes and {max_regions} regions holds nothing; "
            "allowed: from 1."
        )
    if name not in ONLINE_POLICIES:
        raise UsageError(
            f"Eviction policy {name!r} does not exist; allowed: {', '.join(ONLINE_POLICIES)}."
        )
    # Here and not above: the shadows are no part of the interface, and they import from here.
    from controller.memory.policies.following import FollowingPolicy
    from controller.memory.policies.lirs import LirsShadow
    from controller.memory.policies.next_use import NextUseShadow
    from controller.memory.policies.s3fifo import S3FifoShadow
    from controller.memory.policies.shadow import LruShadow
    from controller.memory.policies.tinylfu import TinyLfuShadow

    shadows = {
        # LIRS needs no experience, so it leads at first; once the next use is foreseen, that does.
        # The others are for requests that repeat in no order.
        "heat": (LirsShadow, NextUseShadow, LruShadow, S3FifoShadow, TinyLfuShadow),
        "lru": (LruShadow,),
        "lirs": (LirsShadow,),
        "s3-fifo": (S3FifoShadow,),
        "w-tinylfu": (TinyLfuShadow,),
    }[name]
    min_weight = max(1, capacity_bytes // max_regions) if max_regions is not None else 1
    return FollowingPolicy([shadow(capacity_bytes) for shadow in shadows], min_weight)
