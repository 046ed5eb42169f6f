"""Blocks of one chunk of memory: a binary buddy allocator. Numbers only, no memory.

Why buddies: every block is a power of two that begins at a multiple of itself, so page alignment
comes by itself; a released block finds its other half by one exclusive-or, so everything merges
back into one block once all is released, whatever the order. Rounding up to powers of two wastes
less than half of a block and a quarter on average over sizes spread evenly between two powers.

What size classes would give instead: four classes for each power of two waste an eighth at most.
But memory that one class holds is lost to the others until all of a slab is released, and gradient
buckets that change their size after the first iteration leave such slabs behind. Training leases
few, large blocks, many of them powers of two by design (bucket caps): merging matters more.

External fragmentation cannot be bounded by any allocator that does not move blocks: n blocks at
the wrong places split whatever is left. What merging ensures is that free memory is in the largest
blocks that the live ones permit; tests measure how far that carries.
"""

from __future__ import annotations

from controller.errors import UsageError

# Blocks that are kept as they were released, for each size. Whoever asks for the same size again,
# as training does every iteration, is spared up to 18 splits and as many merges. They are merged
# before any request fails, so they cost no capacity.
_KEPT = 8


class Buddy:
    """Hands out blocks of 0 .. nbytes.

    Not safe for threads: the caller has a lock.

    Parameters
    ----------
    nbytes
        Size of the chunk, a power of two.
    min_block_nbytes
        Smallest block, a power of two.

    Raises
    ------
    UsageError
        A size is no power of two, or the smallest block is larger than the chunk.
    """

    def __init__(self, nbytes: int, min_block_nbytes: int = 4096) -> None:
        for what, value in (("Chunk", nbytes), ("Smallest block", min_block_nbytes)):
            if value < 1 or value & (value - 1):
                raise UsageError(f"{what} of {value} bytes; allowed: a power of two.")
        if min_block_nbytes > nbytes:
            raise UsageError(
                f"The smallest block, {min_block_nbytes} bytes, is larger than the chunk of "
                f"{nbytes}."
            )
        self.nbytes = nbytes
        self.min_block_nbytes = min_block_nbytes
        self.free_nbytes = nbytes
        self._shift = min_block_nbytes.bit_length() - 1
        self._top = nbytes.bit_length() - 1 - self._shift
        # By order (block of min_block_nbytes << order): offsets of free blocks, and a bit for
        # every order that has one. Kept blocks are dicts because these remember their order.
        self._free: list[set[int]] = [set() for _ in range(self._top + 1)]
        self._kept: list[dict[int, None]] = [{} for _ in range(self._top + 1)]
        self._free[self._top].add(0)
        self._mask = 1 << self._top
        self._any_kept = 0
        self._used: dict[int, int] = {}  # offset -> order

    def order_of(self, nbytes: int) -> int:
        """The order of the smallest block that holds `nbytes`; beyond the chunk's when none."""
        return (nbytes - 1 >> self._shift).bit_length() if nbytes > 1 else 0

    def block_nbytes(self, offset: int) -> int:
        """Size of the block in use at `offset`.

        Raises
        ------
        KeyError
            No block in use begins there.
        """
        return self.min_block_nbytes << self._used[offset]

    def allocate(self, nbytes: int) -> int:
        """Take a block.

        Parameters
        ----------
        nbytes
            What it must hold; 0 counts as 1.

        Returns
        -------
        int
            Its offset, a multiple of its size; -1 when there is none.
        """
        order = (nbytes - 1 >> self._shift).bit_length() if nbytes > 1 else 0
        if order > self._top:
            return -1
        kept = self._kept[order]
        if kept:
            offset, _ = kept.popitem()
            self._any_kept -= 1
        else:
            fitting = self._mask >> order
            if not fitting:
                if not self._any_kept:
                    return -1
                self.merge()
                fitting = self._mask >> order
                if not fitting:
                    return -1
            found = order + (fitting & -fitting).bit_length() - 1
            blocks = self._free[found]
            offset = blocks.pop()
            if not blocks:
                self._mask ^= 1 << found
            self._split(offset, found, order)
        self._used[offset] = order
        self.free_nbytes -= self.min_block_nbytes << order
        return offset

    def _split(self, offset: int, found: int, order: int) -> None:
        """Give back the upper halves of a block of order `found`, down to `order`."""
        if found == order:
            return
        free, size = self._free, self.min_block_nbytes << found
        for smaller in range(found - 1, order - 1, -1):
            size >>= 1
            free[smaller].add(offset + size)
        # None of these orders had a free block: the smallest that fitted was taken.
        self._mask |= (1 << found) - (1 << order)

    def allocate_at(self, offset: int, nbytes: int) -> bool:
        """Take the block that allocate() would have made at `offset`, if it is free.

        Parameters
        ----------
        offset
            From an earlier allocate() of the same size.
        nbytes
            What it must hold.

        Returns
        -------
        bool
            False when a part of it is in use, or no such block begins there.
        """
        order = self.order_of(nbytes)
        if order > self._top or offset & ((self.min_block_nbytes << order) - 1):
            return False
        if not 0 <= offset < self.nbytes:
            return False
        if offset in self._kept[order]:
            del self._kept[order][offset]
            self._any_kept -= 1
        elif not self._carve(offset, order):
            if not self._any_kept:
                return False
            # Smaller kept blocks may fill it.
            self.merge()
            if not self._carve(offset, order):
                return False
        self._used[offset] = order
        self.free_nbytes -= self.min_block_nbytes << order
        return True

    def _carve(self, offset: int, order: int) -> bool:
        """Take a block out of the free one that holds it."""
        for found in range(order, self._top + 1):
            start = offset & -(self.min_block_nbytes << found)
            blocks = self._free[found]
            if start in blocks:
                break
        else:
            return False
        blocks.remove(start)
        if not blocks:
            self._mask ^= 1 << found
        size = self.min_block_nbytes << found
        for smaller in range(found - 1, order - 1, -1):
            size >>= 1
            # Keep the half that holds the wanted block, give back the other.
            middle = start + size
            if offset >= middle:
                other, start = start, middle
            else:
                other = middle
            self._free[smaller].add(other)
            self._mask |= 1 << smaller
        return True

    def free(self, offset: int) -> None:
        """Give a block back.

        Raises
        ------
        KeyError
            No block in use begins at `offset`.
        """
        order = self._used.pop(offset)
        self.free_nbytes += self.min_block_nbytes << order
        kept = self._kept[order]
        if len(kept) < _KEPT:
            kept[offset] = None
            self._any_kept += 1
        else:
            self._merge_block(offset, order)

    def _merge_block(self, offset: int, order: int) -> None:
        """Put a block among the free ones, with its other half when that is free, and so on."""
        free, size = self._free, self.min_block_nbytes << order
        while order < self._top:
            other = offset ^ size
            blocks = free[order]
            if other not in blocks:
                break
            blocks.remove(other)
            if not blocks:
                self._mask ^= 1 << order
            offset &= ~size
            size <<= 1
            order += 1
        free[order].add(offset)
        self._mask |= 1 << order

    def merge(self) -> None:
        """Merge the blocks that were kept as they were released."""
        for order, kept in enumerate(self._kept):
            for offset in kept:
                self._merge_block(offset, order)
            kept.clear()
        self._any_kept = 0

    def largest_free_nbytes(self) -> int:
        """The largest block that allocate() would find now; 0 when there is none."""
        self.merge()
        return self.min_block_nbytes << self._mask.bit_length() - 1 if self._mask else 0

    @property
    def in_use(self) -> int:
        """Number of blocks in use."""
        return len(self._used)
