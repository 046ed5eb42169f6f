"""How many windows make up one iteration: k bursts between two long silences, or sizes in turn."""

from __future__ import annotations

import itertools
from collections import deque

LONGEST = 16
# Where all windows have the same bytes, or none are told, a long silence after each k-th may be
# accumulation or an evaluation every k iterations. Accumulation in more than 8 parts, or a silence
# of more than 8 usual ones, is rarer than that.
_LONGEST_UNSIZED, _LONGEST_SILENCE = 8, 8.0
_STEP = 0.15
# Windows differ in this share at least before a pattern of several is looked for: what differs
# less is jitter.
_LEAST_VARIETY = 0.1
# A pattern: windows k apart are this much more alike than others. Of random gaps (exponential, 400
# series) the best lag has less than 0.51 (8 gaps) or 0.62 (60) of the usual distance in 1 %.
_ALIKE, _ALIKE_FEW = 0.45, 0.3
_ALIKE_ENOUGH_ROUNDS = 3
# An older pattern stays until windows k apart differ as much as most others.
_STAYS = 0.7


def _distance(one: tuple[float, int | None], other: tuple[float, int | None]) -> float:
    """0 (alike) .. 1 between two windows, by the time to the next one and their bytes."""
    gap, size = one
    other_gap, other_size = other
    apart = 1 - gap / other_gap if gap < other_gap else 1 - other_gap / gap
    if size == other_size or size is None or other_size is None:
        return apart
    return max(apart, abs(size - other_size) / max(size, other_size))


class BurstPattern:
    """Finds k from windows as they come. 15 comparisons a window, no history beyond 32."""

    def __init__(self) -> None:
        self.bursts = 1
        # Number (from 0) of a window that is the first of its iteration, modulo `bursts`.
        self.first = 0
        self._seen: deque[tuple[float, int | None]] = deque(maxlen=2 * LONGEST)
        self._apart = [0.0] * (LONGEST + 1)
        self._count = 0

    def add(self, to_next: float, size: int | None) -> bool:
        """Take a window that is complete.

        Parameters
        ----------
        to_next
            From its begin to the next one's, above zero.
        size
            Bytes; None: not told.

        Returns
        -------
        bool
            Whether `bursts` or `first` is another than before.
        """
        seen, new = self._seen, (float(to_next), size)
        apart = self._apart
        for lag, older in enumerate(itertools.islice(reversed(seen), LONGEST), 1):
            step = max(_STEP, 1 / (self._count - lag + 1))
            apart[lag] += (_distance(new, older) - apart[lag]) * step
        seen.append(new)
        self._count += 1
        bursts = self._best()
        if bursts == self.bursts:
            return False
        self.bursts = bursts
        self.first = self._find_first() if bursts > 1 else 0
        return True

    def _best(self) -> int:
        lags = min(LONGEST, self._count - 1)
        if lags < 3:
            return self.bursts
        # After a change of level far windows differ, neighbours do not: that is no pattern.
        usual = min(self._apart[1], sum(self._apart[1 : lags + 1]) / lags)
        if self.bursts > 1 and self._apart[self.bursts] < _STAYS * usual:
            return self.bursts
        if usual < _LEAST_VARIETY:
            return 1
        for lag in range(2, min(LONGEST, self._count // 2) + 1):
            enough = self._count >= _ALIKE_ENOUGH_ROUNDS * lag
            bound = _ALIKE if enough else _ALIKE_FEW
            if self._apart[lag] < bound * usual and self._repeats(lag, bound):
                return lag
        return 1

    def _repeats(self, lag: int, bound: float) -> bool:
        """Whether the newest windows differ among themselves as those `lag` before did.

        A pause makes one window differ from all others: its likeness at some lags is not a pattern.
        """
        newest = list(self._seen)[-2 * lag :]
        if len(newest) < 2 * lag:
            return False
        older, newer = newest[:lag], newest[lag:]
        sizes = {size for _, size in newer}
        if len(sizes) == 1:
            # Silences alone: what is longer or rarer than in accumulation is a pause.
            gaps = sorted(gap for gap, _ in newer)
            if lag > _LONGEST_UNSIZED or gaps[-1] > _LONGEST_SILENCE * gaps[len(gaps) // 2]:
                return False
        apart = sum(map(_distance, older, newer))
        variety = sum(map(_distance, newer, newer[1:] + newer[:1]))
        return apart < bound * variety

    def _find_first(self) -> int:
        """The window after the longest silence."""
        recent = list(self._seen)[-self.bursts :]
        longest = max(range(self.bursts), key=lambda place: recent[place][0])
        return (self._count - self.bursts + longest + 1) % self.bursts
