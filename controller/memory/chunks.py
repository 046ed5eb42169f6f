"""Chunks of an arena: each one mapping and one memory region, made or refused as a whole.

Chunks are powers of two of at most 2 GiB, as lengths of work requests, and of pyverbs' SGE, have 32
bits; addresses have 64 everywhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

from controller.errors import StellarError, UsageError
from controller.memory.buddy import Buddy
from controller.memory.errors import PoolError
from controller.memory.limits import Limits, check_limits, gather_limits
from controller.memory.numa import online_nodes
from controller.memory.pages import (
    HUGE_1GIB_NBYTES,
    HUGE_2MIB_NBYTES,
    PAGE_NBYTES,
    AnonymousPages,
    Pages,
    PageSource,
    free_huge_pages,
)
from controller.memory.stats import PoolStats
from controller.units import format_bytes

if TYPE_CHECKING:
    from controller.verbs.registration import MemoryRegion, Registrar

_LOG = logging.getLogger(__name__)

# soft-RoCE needs 16 bytes a page in one piece of the kernel's memory: 2 MiB for this, which a
# kernel finds after months of work, too; 4 MiB for 1 GiB, and that is the most it can give.
DEFAULT_CHUNK_NBYTES = 512 << 20
MAX_CHUNK_NBYTES = 1 << 31
# What a lease is rounded up to at least; also the page size of most machines.
MIN_BLOCK_NBYTES = 4096


# Of a lease: bytes that were asked for, generation, key.
Entry = tuple[int, int, Hashable | None]


class Chunk:
    """One mapping, one region, and who has which part of it.

    Attributes
    ----------
    live
        Leases by offset of their blocks.
    """

    __slots__ = ("address", "buddy", "live", "lkey", "nbytes", "pages", "region", "rkey")

    def __init__(self, pages: Pages, region: MemoryRegion) -> None:
        self.pages = pages
        self.region = region
        self.address = pages.address
        self.nbytes = pages.nbytes
        self.lkey = region.lkey
        self.rkey = region.rkey
        self.buddy = Buddy(pages.nbytes, min(MIN_BLOCK_NBYTES, pages.nbytes))
        self.live: dict[int, Entry] = {}

    def rebuild(self) -> None:
        """Make the allocator anew from `live`: it was interrupted, and may be inconsistent."""
        buddy = Buddy(self.nbytes, self.buddy.min_block_nbytes)
        for offset, (nbytes, _, _) in self.live.items():
            buddy.allocate_at(offset, nbytes)
        self.buddy = buddy


def chunk_size(capacity_nbytes: int, max_mr_nbytes: int, pages: str = "base") -> int:
    """The chunk size that fits a capacity, when none is given: a power of two.

    512 MiB, or what the device takes if that is less; for a smaller capacity, the largest power of
    two within it. Where pages of 1 GiB are to be had, one of these.

    Parameters
    ----------
    capacity_nbytes, pages
        As for `Arena`.
    max_mr_nbytes
        Of the device.
    """
    best = DEFAULT_CHUNK_NBYTES
    if pages == "1GiB" or (pages == "auto" and free_huge_pages(HUGE_1GIB_NBYTES)):
        best = HUGE_1GIB_NBYTES
    most = min(best, capacity_nbytes, max_mr_nbytes)
    return max(PAGE_NBYTES, 1 << most.bit_length() - 1)


def choose_node(asked: int | None, of_device: int) -> int | None:
    """The NUMA node to bind memory to; None when there is nothing to choose.

    Parameters
    ----------
    asked
        By the user; None: near the device.
    of_device
        -1 when the machine does not say.
    """
    if asked is not None:
        return asked
    nodes = online_nodes()
    return of_device if len(nodes) > 1 and of_device in nodes else None


class ChunkMaker:
    """Makes and drops the chunks of one arena.

    Parameters
    ----------
    registrar, chunk_nbytes, numa_node, pages, source, stats, name
        As for `Arena`.

    Raises
    ------
    UsageError
        The chunk size is not allowed.
    """

    def __init__(
        self,
        registrar: Registrar,
        chunk_nbytes: int,
        *,
        numa_node: int | None,
        pages: str,
        source: PageSource | None,
        stats: PoolStats,
        name: str,
    ) -> None:
        power_of_two = chunk_nbytes > 0 and not chunk_nbytes & (chunk_nbytes - 1)
        if not power_of_two or not PAGE_NBYTES <= chunk_nbytes <= MAX_CHUNK_NBYTES:
            raise UsageError(
                f"chunk_nbytes is {chunk_nbytes}; allowed: powers of two, {PAGE_NBYTES} .. "
                f"{MAX_CHUNK_NBYTES} (work requests have lengths of 32 bits)."
            )
        self.chunk_nbytes = chunk_nbytes
        self.numa_node = choose_node(numa_node, registrar.limits.numa_node)
        self._registrar = registrar
        self._source = source or AnonymousPages(pages, self.numa_node)
        self._may_be_huge = source is None
        self._stats = stats
        self._name = name

    def check(self, count: int, limits: Limits | None) -> None:
        """Refuse what cannot be pinned, before anything is.

        Raises
        ------
        PoolError
            Names every limit that does not suffice for `count` chunks.
        """
        reserved_nbytes = 0
        for page_nbytes in (HUGE_2MIB_NBYTES, HUGE_1GIB_NBYTES):
            if self._may_be_huge and not self.chunk_nbytes % page_nbytes:
                reserved_nbytes += free_huge_pages(page_nbytes) * page_nbytes
        problems = check_limits(
            count * self.chunk_nbytes,
            count,
            self._registrar.limits,
            limits or gather_limits(),
            reserved_nbytes=reserved_nbytes,
        )
        if problems:
            raise PoolError(
                f"{self._name} cannot register {format_bytes(count * self.chunk_nbytes)} in "
                f"{count} chunks. " + " ".join(problem.message for problem in problems),
                " ".join(problem.remedy for problem in problems),
            )

    def make(self) -> Chunk:
        """One chunk: mapped, touched, registered."""
        pages = self._source.allocate(self.chunk_nbytes)
        self._source.touch(pages)
        started_ns = time.perf_counter_ns()
        region = self._registrar.register(pages.address, pages.nbytes)
        self._stats.registered(pages.nbytes, time.perf_counter_ns() - started_ns)
        return Chunk(pages, region)

    def make_all(self, count: int) -> list[Chunk]:
        """`count` chunks, or none.

        Raises
        ------
        PoolError
            Memory or the device ran out; says how far it came.
        """
        made: list[Chunk] = []
        try:
            for _ in range(count):
                made.append(self.make())
        except BaseException as error:
            self.drop_all(made)
            if isinstance(error, StellarError):
                raise self.midway(len(made), count, error) from error
            raise
        return made

    def drop(self, chunk: Chunk) -> None:
        """Deregister it; its memory goes with the last array over it."""
        self._registrar.deregister(chunk.region)
        self._stats.deregistered(chunk.nbytes)

    def drop_all(self, chunks: Iterable[Chunk]) -> None:
        """Drop what nobody got to know; what the device keeps goes to the log."""
        for chunk in chunks:
            try:
                self.drop(chunk)
            except StellarError as error:
                _LOG.warning("%s: %s", self._name, error)

    def midway(self, done: int, count: int, error: StellarError) -> PoolError:
        """The error for `count` chunks of which `done` could be made."""
        return PoolError(
            f"{self._name} came to {format_bytes(done * self.chunk_nbytes)} of "
            f"{format_bytes(count * self.chunk_nbytes)} ({done} of {count} chunks), and gave them "
            f"back. {error.message}",
            error.remedy,
        )
