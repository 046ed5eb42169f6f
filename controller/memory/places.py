"""Who has which part of an arena's chunks. No threads, no device: the arena has the lock."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable

from controller.memory.chunks import MIN_BLOCK_NBYTES, Chunk, Entry
from controller.units import format_bytes

# Keys whose last place is remembered: some thousand buckets of some jobs, a few MB at most.
_MAX_HOMES = 1 << 15
_NAMED_HOLDERS = 6


class Places:
    """Chunks, the blocks taken of them, and where each key was last.

    Attributes
    ----------
    chunks
        In the order of registration: they are filled from the first on.
    """

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self._by_address: tuple[list[int], list[Chunk]] = ([], [])  # replaced, never changed
        self._homes: dict[Hashable, tuple[Chunk, int, int]] = {}

    def set_chunks(self, chunks: list[Chunk]) -> None:
        """Have these chunks from now on."""
        if not set(self.chunks) <= set(chunks):
            self._homes.clear()
        self.chunks = chunks
        ordered = sorted(chunks, key=lambda chunk: chunk.address)
        self._by_address = ([chunk.address for chunk in ordered], ordered)

    def take(self, nbytes: int, key: Hashable | None) -> tuple[Chunk, int, bool] | None:
        """Take a block.

        Parameters
        ----------
        nbytes
            What it must hold.
        key
            Gets the block that it had, when that is free and as large.

        Returns
        -------
        (chunk, offset, had) or None
            `had`: the key has the same block again. None: nothing that large is free.
        """
        if key is None:
            for chunk in self.chunks:
                offset = chunk.buddy.allocate(nbytes)
                if offset >= 0:
                    return chunk, offset, False
            return None
        home = self._homes.get(key)
        if home is not None:
            chunk, offset, order = home
            if chunk.buddy.order_of(nbytes) == order and chunk.buddy.allocate_at(offset, nbytes):
                return chunk, offset, True
        for chunk in self.chunks:
            offset = chunk.buddy.allocate(nbytes)
            if offset >= 0:
                if home is None and len(self._homes) >= _MAX_HOMES:
                    del self._homes[next(iter(self._homes))]
                self._homes[key] = (chunk, offset, chunk.buddy.order_of(nbytes))
                return chunk, offset, False
        return None

    def at(self, address: int) -> tuple[Chunk, int, Entry] | None:
        """The lease that an address lies in: its chunk, its offset there, and its entry.

        Needs no lock: look-ups in a dict are atomic.
        """
        starts, chunks = self._by_address
        index = bisect_right(starts, address) - 1
        if index < 0:
            return None
        chunk = chunks[index]
        offset = address - chunk.address
        if offset >= chunk.nbytes:
            return None
        live = chunk.live
        # A block begins at a multiple of its size: taking one bit after the other off the
        # offset visits every place where the one that holds this address can begin.
        start = offset & -MIN_BLOCK_NBYTES
        while True:
            entry = live.get(start)
            if entry is not None:
                inside = offset < start + entry[0] or offset == start
                return (chunk, start, entry) if inside else None
            if not start:
                return None
            start &= start - 1

    def leased_nbytes(self) -> int:
        """Bytes in blocks that are taken."""
        return sum(chunk.nbytes - chunk.buddy.free_nbytes for chunk in self.chunks)

    def largest_free_nbytes(self) -> int:
        """The largest block that could be taken."""
        return max((chunk.buddy.largest_free_nbytes() for chunk in self.chunks), default=0)

    def holders(self) -> str:
        """Keys of the leases that are out, largest first; "" when none is."""
        sizes: dict[Hashable | None, int] = {}
        for chunk in self.chunks:
            for nbytes, _, key in chunk.live.values():
                sizes[key] = sizes.get(key, 0) + nbytes
        ordered = sorted(sizes.items(), key=lambda item: -item[1])
        texts = [
            f"{'no key' if key is None else repr(key)[:60]} {format_bytes(nbytes)}"
            for key, nbytes in ordered[:_NAMED_HOLDERS]
        ]
        if len(ordered) > _NAMED_HOLDERS:
            texts.append(f"and {len(ordered) - _NAMED_HOLDERS} more keys")
        return ", ".join(texts)
