"""Whether a series is about to repeat its last value exactly.

Logged iteration times often do: a value is written twice when the log is sampled faster than it is
made, in a pattern of its own. Where a repeat comes next, the last value is the best prediction;
where a new value comes, it is not.
"""

from __future__ import annotations

from collections import deque

# Values as near as this are the same: half the last digit of a double through a few sums.
_SAME = 1e-9
# Counts fade, so that a changed pattern is learnt within some tens of values.
_FADE = 0.97
_AGREEMENT_STEP = 0.04
# Lags at which a pattern of repeats is looked for; one longer than this was not seen in any trace.
_LONGEST_LAG = 16
# A lag counts from this agreement on: with repeats at random (150 values, 300 series) the best of
# 15 lags has 0.62 in the median and reaches this in 6 %.
_AGREEMENT = 0.68
# Below this share of repeats there is no pattern worth the search.
_RARE = 0.1
# Repeats matter when a fourth of new values are repeated; fewer are chance in rounded data.
_COMMON = 0.25
_RUNS = 3


class RepeatPattern:
    """Probability that the next value equals the last, from the pattern of repeats so far."""

    def __init__(self) -> None:
        self.run = 1
        self._flags: deque[bool] = deque(maxlen=2 * _LONGEST_LAG + 2)
        self._share = 0.0
        self._agreement = [0.5] * (_LONGEST_LAG + 1)
        # [repeats, values] by length of the run so far, and by what the pattern had at its lag.
        self._by_run = [[0.8, 2.0] for _ in range(_RUNS)]
        self._by_pattern: dict[tuple[bool, bool, bool], list[float]] = {}
        self._key: tuple[bool, bool, bool] | None = None
        self._fresh = [0.0, 0.0]

    def add(self, last: float, value: float) -> bool:
        """Count one more value; True: it repeats the last."""
        same = abs(value - last) <= _SAME * abs(value)
        row = self._by_run[min(self.run, _RUNS) - 1]
        row[0] = _FADE * row[0] + same
        row[1] = _FADE * row[1] + 1
        if self.run == 1:
            self._fresh[0] = _FADE * self._fresh[0] + same
            self._fresh[1] = _FADE * self._fresh[1] + 1
        if self._key is not None:
            row = self._by_pattern.setdefault(self._key, [self._guess(self._key), 1.0])
            row[0] = _FADE * row[0] + same
            row[1] = _FADE * row[1] + 1
        self._share += 0.06 * (same - self._share)
        self.run = self.run + 1 if same else 1
        self._find_lag(same)
        return same

    def _find_lag(self, same: bool) -> None:
        flags = self._flags
        flags.append(same)
        self._key = None
        if self._share < _RARE:
            return
        newest = len(flags) - 1
        best, lag = _AGREEMENT, 0
        for candidate in range(2, min(_LONGEST_LAG, newest) + 1):
            agreement = self._agreement[candidate]
            agreement += _AGREEMENT_STEP * ((same == flags[newest - candidate]) - agreement)
            self._agreement[candidate] = agreement
            # A multiple of the pattern's length agrees as well; the shortest is the pattern.
            if agreement > best + 0.01:
                best, lag = agreement, candidate
        if lag and newest + 1 >= 2 * lag:
            self._key = (same, flags[newest + 1 - lag], flags[newest + 1 - 2 * lag])

    @staticmethod
    def _guess(key: tuple[bool, bool, bool]) -> float:
        """Before a pattern's entry was seen: what the pattern had one and two lags ago."""
        return 0.1 + 0.5 * key[1] + 0.3 * key[2]

    @property
    def matters(self) -> bool:
        """Whether values repeat often enough to be told apart."""
        repeats, values = self._fresh
        return repeats > 0.5 and repeats >= _COMMON * values

    @property
    def probability(self) -> float:
        """That the next value is the last one again, 0 .. 1."""
        if self._key is not None:
            row = self._by_pattern.get(self._key)
            return row[0] / row[1] if row is not None else self._guess(self._key)
        repeats, values = self._by_run[min(self.run, _RUNS) - 1]
        return repeats / values
