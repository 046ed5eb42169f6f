"""Simple forecasts of the next value of a series, each right for one kind of series."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

from controller.iteration.repeats import RepeatPattern

# In the order of `Experts.forecasts`.
NAMES = (
    "last", "mean", "median", "centre", "drift", "ewma02", "new07", "new05", "new025", "ar1",
    "clock03", "clock06", "clock09", "season", "repeat",
)  # fmt: skip
LAST, MEAN, CENTRE, NEW07, NEW05, NEW025, SEASON, REPEAT = 0, 1, 3, 6, 7, 8, 13, 14

# Values of one level: enough for quartiles, few enough to forget a slow drift.
_WINDOW = 31
_DRIFT_STEP = 0.1
# Share of the last start's error that the next period takes back (MA(1)): starts that keep to a
# clock have 0.9, a jittery clock less.
_CLOCKS = (0.3, 0.6, 0.9)
# Of two values nearer to the shorter: what disturbs an iteration (a straggler, a checkpoint, a
# neighbour on the link) makes it longer, hardly anything makes it shorter. The share was chosen on
# recorded series (Kineto, AICB); on symmetric noise it costs 1 % of the error in the first six.
_OF_TWO = 0.12
_LONGEST_SEASON = 12
_SEASON_STEP = 0.15
# Values of one place in a pattern differ less than by this factor.
_PAUSE = 1.6
_KEPT = 3 * _LONGEST_SEASON + 1


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between neighbours, as `numpy.quantile` has it.

    Parameters
    ----------
    ordered
        One value or more, ascending.
    share
        0 .. 1.
    """
    place = share * (len(ordered) - 1)
    below = int(place)
    value = ordered[below]
    if below + 1 < len(ordered):
        value += (ordered[below + 1] - value) * (place - below)
    return value


class Level:
    """Statistics of the values since the last change of level."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.ewma02 = 0.0
        self.drift = 0.0
        self.deviation = 0.0
        self.clocks = [0.0] * len(_CLOCKS)
        self.offset = 0.0
        self._window: deque[float] = deque()
        self._sorted: list[float] = []
        self._variance = self._covariance = 0.0

    def quantile(self, share: float) -> float:
        """Of the last 31 values, linear between neighbours."""
        return quantile(self._sorted, share)

    @property
    def correlation(self) -> float:
        """Of neighbouring deviations from the level, shrunk towards 0 while few are known."""
        if self._variance <= 0:
            return 0.0
        shrunk = self._variance * (1 + 2 / max(self.count - 1, 1))
        return max(-0.9, min(0.95, self._covariance / shrunk))

    def add(self, value: float, is_new: bool) -> None:
        """Take one more value; `is_new`: it is not the one before repeated."""
        self.count += 1
        count = self.count
        if count == 1:
            self.ewma02 = self.drift = value
        else:
            off = abs(value - self.quantile(0.5))
            self.deviation += (off - self.deviation) * max(1 / (count - 1), 0.05)
            self.ewma02 += 0.2 * (value - self.ewma02)
            self.drift += (value - self.drift) * max(1 / count, _DRIFT_STEP)
        insort(self._sorted, value)
        self._window.append(value)
        if len(self._window) > _WINDOW:
            del self._sorted[bisect_left(self._sorted, self._window.popleft())]
        self.mean += (value - self.mean) / count
        offset = value - self.drift
        bound = 3 * self.deviation
        for place, share in enumerate(_CLOCKS):
            late = offset + share * self.clocks[place] if count > 1 else 0.0
            self.clocks[place] = max(-bound, min(bound, late))
        if count > 1 and is_new:
            self._variance = 0.97 * self._variance + self.offset**2
            self._covariance = 0.97 * self._covariance + self.offset * offset
        self.offset = offset


class Season:
    """The lag at which a series repeats its pattern, and what the pattern has next."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_KEPT)
        # Fading mean distance to the value `lag` before, by lag.
        self._distance = [0.0] * (_LONGEST_SEASON + 1)

    def add(self, value: float) -> None:
        """Take one more value."""
        values = self._values
        known = len(values)
        for lag in range(1, min(_LONGEST_SEASON, known) + 1):
            step = _SEASON_STEP if known > lag + 3 else 0.5
            self._distance[lag] += (abs(value - values[known - lag]) - self._distance[lag]) * step
        values.append(value)

    def forecast(self) -> float | None:
        """Mean of the values 1 .. 3 patterns ago, newest first; None: no pattern."""
        values, known = self._values, len(self._values)
        best, season = self._distance[1], 0
        for lag in range(2, min(_LONGEST_SEASON, known // 2) + 1):
            # A multiple of the pattern's length is as near: only what is clearly nearer is longer.
            if self._distance[lag] < (0.9 if season else 1.0) * best:
                best, season = self._distance[lag], lag
        if not season:
            return None
        parts = [values[known - n * season] for n in range(1, 1 + min(3, known // season))]
        if max(parts) > _PAUSE * min(parts):
            # A pause in one of them is not in the pattern.
            return sorted(parts)[(len(parts) - 1) // 2]
        weights = (0.5, 0.3, 0.2) if len(parts) == 3 else (0.6, 0.4)
        return sum(part * weight for part, weight in zip(parts, weights, strict=True))


def forecasts(
    last: float,
    level: Level,
    fresh: tuple[float, float, float],
    season: float | None,
    repeats: RepeatPattern,
) -> list[float]:
    """What each expert expects next, in the order of `NAMES`.

    Parameters
    ----------
    last
        Newest value.
    fresh
        Averages of values that did not repeat the one before, by weights 0.7, 0.5, 0.25.
    season
        From `Season.forecast`.
    """
    mean, median, drift = level.mean, level.quantile(0.5), level.drift
    if level.count == 2:
        mean = median = drift = level.quantile(_OF_TWO)
    chance = repeats.probability
    if chance >= 0.5:
        repeat = last
    else:
        # Median of: the last value with this chance, else any recent one.
        low, high = (0.5 - chance) / (1 - chance), 0.5 / (1 - chance)
        repeat = min(max(last, level.quantile(low)), level.quantile(high))
    clocks = (drift - share * late for share, late in zip(_CLOCKS, level.clocks, strict=True))
    return [
        last, mean, median, 0.5 * (median + mean), drift, level.ewma02, *fresh,
        drift + level.correlation * level.offset, *clocks,
        drift if season is None else season, repeat,
    ]  # fmt: skip
