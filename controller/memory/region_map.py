"""Ranges of addresses that do not overlap, found by what they cover.

Three parallel lists, sorted by address, searched by bisection. Inserting moves the tail of the
lists (800 kB of pointers at 100,000 ranges: some 20 µs), which disappears beside the registration
that it goes with; looking up is two orders of magnitude more frequent and takes a third of a
microsecond. A sorted container made of blocks (sortedcontainers) inserts faster and looks up
several times slower, as its bisection is Python: the wrong side of that bargain.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

PAGE_nbytes = mmap.PAGESIZE

T = TypeVar("T")


def page_range(start: int, end: int, page_nbytes: int = PAGE_nbytes) -> tuple[int, int]:
    """The whole pages that hold a range: start rounded down, end rounded up.

    Parameters
    ----------
    start, end
        First address, and the first one behind.
    page_nbytes
        A power of two.
    """
    return start & -page_nbytes, (end + page_nbytes - 1) & -page_nbytes


class RegionMap(Generic[T]):
    """Values by address range.

    Ranges are half open; two of them never share a byte.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._values: list[T] = []

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[T]:
        """The values, by address."""
        return iter(self._values)

    def covering(self, start: int, end: int) -> T | None:
        """The value whose range holds all of [start, end); None when there is none."""
        index = bisect_right(self._starts, start) - 1
        if index >= 0 and end <= self._ends[index]:
            return self._values[index]
        return None

    def overlapping(self, start: int, end: int) -> list[T]:
        """The values whose ranges share a byte with [start, end), by address.

        Ranges that only touch it do not count, and an empty range shares nothing.
        """
        if start >= end:
            return []
        # As ranges do not overlap, their ends are sorted like their starts.
        return self._values[bisect_right(self._ends, start) : bisect_left(self._starts, end)]

    def insert(self, start: int, end: int, value: T) -> None:
        """Add a range.

        Raises
        ------
        ValueError
            The range is empty, or shares a byte with one that is there.
        """
        index = bisect_left(self._starts, start)
        if start >= end:
            raise ValueError(f"range {start:#x} .. {end:#x} is empty")
        if (index and self._ends[index - 1] > start) or (
            index < len(self._starts) and self._starts[index] < end
        ):
            raise ValueError(f"range {start:#x} .. {end:#x} overlaps one that is there")
        self._starts.insert(index, start)
        self._ends.insert(index, end)
        self._values.insert(index, value)

    def remove(self, start: int) -> T:
        """Take out the range that begins at `start`; return its value.

        Raises
        ------
        KeyError
            No range begins there.
        """
        index = bisect_left(self._starts, start)
        if index == len(self._starts) or self._starts[index] != start:
            raise KeyError(start)
        del self._starts[index], self._ends[index]
        return self._values.pop(index)
