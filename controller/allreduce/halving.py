"""Recursive halving and doubling among any number of ranks: who is whose partner, and for what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from controller.allreduce.plan import PlanBuilder


def distances_among(members: int) -> list[int]:
    """Distances between partners among a power of two of members, rising."""
    return [1 << power for power in range(members.bit_length() - 1)]


class Fold:
    """Makes any number of ranks a power of two of members.

    The first ranks are taken in pairs, as many pairs as there are ranks too many. The odd one of a
    pair is a member for both; the even one hands over what it has and gets the result.

    Parameters
    ----------
    rank, size
        This rank, of 0 .. `size` - 1.

    Attributes
    ----------
    members
        Number of members.
    member
        Number of this member; None for the rank that is absent from the exchange.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self.members = 1 << (size.bit_length() - 1)
        self._pairs = size - self.members
        self._paired = rank < 2 * self._pairs
        self.member: int | None = None
        if not self._paired:
            self.member = rank - self._pairs
        elif rank % 2:
            self.member = rank // 2

    def rank_of(self, member: int) -> int:
        """Rank of a member."""
        return 2 * member + 1 if member < self._pairs else member + self._pairs

    def bounds(self, count: int) -> list[int]:
        """Bounds of each member's blocks, `count` elements a rank, a pair's side by side."""
        return [count * (member + min(member, self._pairs)) for member in range(self.members + 1)]

    def block_of_absent(self, count: int) -> tuple[int, int]:
        """Elements of the block of the pair's even rank; empty in no pair."""
        even = self._rank // 2 * 2
        return (even * count, (even + 1) * count) if self._paired else (0, 0)

    def partners(self) -> Iterator[int]:
        """Ranks that this one exchanges messages with."""
        if self._paired:
            yield self._rank ^ 1
        if self.member is not None:
            for distance in distances_among(self.members):
                yield self.rank_of(self.member ^ distance)

    def reduce_in(self, builder: PlanBuilder, start: int, stop: int) -> None:
        """Reduce the even rank's elements into the odd one's."""
        self._in(builder, start, stop, reduce=True)

    def copy_in(self, builder: PlanBuilder, start: int, stop: int) -> None:
        """Copy the even rank's elements to the odd one."""
        self._in(builder, start, stop, reduce=False)

    def copy_out(self, builder: PlanBuilder, *ranges: tuple[int, int]) -> None:
        """Copy elements of the odd rank to the even one."""
        for start, stop in ranges if self._paired else ():
            if self.member is None:
                builder.receive(self._rank + 1, start, stop, reduce=False)
            else:
                builder.send(self._rank - 1, start, stop, direct=True)

    def _in(self, builder: PlanBuilder, start: int, stop: int, *, reduce: bool) -> None:
        if self._paired and self.member is None:
            builder.send(self._rank + 1, start, stop, direct=not reduce)
        elif self._paired:
            builder.receive(self._rank - 1, start, stop, reduce=reduce)


class Halving:
    """Partners halve what they are responsible for, step by step, down to one part each; and back.

    Parameters
    ----------
    fold
        The members; this rank is one.
    distances
        Distance to the partner in each step of the halving.
    bounds
        Bounds of the parts, one for each member.
    """

    def __init__(self, fold: Fold, distances: Sequence[int], bounds: Sequence[int]) -> None:
        member = fold.member
        if member is None:
            raise ValueError("a rank that is absent from the exchange has no parts")
        # Partner, range that stays, range that becomes the partner's.
        self._steps: list[tuple[int, tuple[int, int], tuple[int, int]]] = []
        low, high = 0, fold.members
        for distance in distances:
            middle = (low + high) // 2
            lower = (bounds[low], bounds[middle])
            upper = (bounds[middle], bounds[high])
            partner = fold.rank_of(member ^ distance)
            if member & distance:
                self._steps.append((partner, upper, lower))
                low = middle
            else:
                self._steps.append((partner, lower, upper))
                high = middle

    def reduce(self, builder: PlanBuilder) -> None:
        """Each step: the partner gets its range to reduce, this rank its own."""
        for partner, own, other in self._steps:
            builder.send(partner, *other, direct=False)
            builder.receive(partner, *own, reduce=True)

    def gather(self, builder: PlanBuilder) -> None:
        """The same steps backward, with results."""
        for partner, own, other in reversed(self._steps):
            builder.send(partner, *own, direct=True)
            builder.receive(partner, *other, reduce=False)
