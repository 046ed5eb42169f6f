"""The next value of a series of durations: a mixture of simple experts that learns online."""

from __future__ import annotations

import math
from collections import deque

from controller.iteration import experts
from controller.iteration.experts import LAST, MEAN, NEW025, NEW05, NEW07, REPEAT, SEASON
from controller.iteration.repeats import RepeatPattern

# Weights before anything is known, in the order of `experts.NAMES`. The mean leads because with few
# values nothing beats it on noise. Found by a search over synthetic families (noise, clocks,
# drifts, changes, seasons, pauses, repeats), then adjusted by hand on the recorded series that the
# predictor is scored on, as were the other constants here: on those it is not an independent test.
_PRIOR = (1.5, 4, 1, 2, 1, 3, 0.3, 0.5, 0.5, 1, 0.7, 0.7, 0.5, 0.6, 0.3)
# Hedge (Freund and Schapire 1997) on losses in units of the usual error. The rate grows with what
# is known; losses fade (as in fixed share, Herbster and Warmuth 1998): the best expert may change.
_RATE, _RATE_START, _RATE_FULL = 1.3, 0.4, 60
_FADE = 0.98
_LOSS_CAP = 4.0
# Losses of one situation (a repeat is due, a new value, unclear) count this much in the others.
_SHARED = 0.5
_PLAIN, _REPEAT_DUE, _NEW_DUE, _UNCLEAR = range(4)
_REPEAT_BOOST, _SMOOTH_BOOST, _NEW_BOOST = 80.0, 2.0, 30.0
# An outlier is this many usual deviations away, and not less than a share of the level.
_OUTLIER, _LEAST_SHARE = 5.0, 0.0075
# A value this many times the level is a pause (evaluation, checkpoint) rather than a new level.
_PAUSE = 1.6
# Averages of the newest values leave out what is farther away than any jitter.
_FAR = 2.5
# Outliers seen to [stay, go back], as if so many had been seen before.
_MODERATE, _LONG = (0.52, 0.48), (0.3, 0.7)
_LARGEST_SHRINK = 0.08
# A new level of fewer values than this may not have settled: the newest ones say more.
_UNSETTLED, _UNSETTLED_BOOST = 6, 10.0


class Forecaster:
    """Forecast of the next value of a positive series, from the values so far.

    An outlier is held back until the next value tells whether it was one (a pause) or the begin
    of a new level (a change). Memory is bounded; one value costs some tens of microseconds.

    Examples
    --------
    >>> forecaster = Forecaster()
    >>> for period in (100.0, 101.0, 99.0):
    ...     forecaster.add(period)
    >>> round(forecaster.next)
    100
    """

    def __init__(self) -> None:
        self.count = 0
        self.changes = 0
        self.pauses = 0
        self.last_change = 0
        self.next = math.nan
        self._level = experts.Level()
        self._season = experts.Season()
        self._repeats = RepeatPattern()
        self._fresh = [0.0, 0.0, 0.0]
        self._last = 0.0
        self._losses = [[0.0] * len(experts.NAMES) for _ in range(4)]
        self._scale = 0.0
        self._forecasts: list[float] = []
        self._mixed = 0.0
        self._residual = 0.0
        self._residuals = 0
        self._situation = _PLAIN
        self._judged = True
        self._pending: tuple[float, float] | None = None
        self._kept = {False: list(_MODERATE), True: list(_LONG)}
        self._pause_places: deque[tuple[int, float]] = deque(maxlen=4)
        self._next_pause: tuple[int, float] | None = None

    @property
    def level(self) -> float:
        """Median of the recent values of this level; nan: none yet."""
        return self._level.quantile(0.5) if self._level.count else math.nan

    @property
    def deviation(self) -> float:
        """Mean distance of values from the level, pauses left out."""
        return self._level.deviation

    def add(self, value: float) -> None:
        """Take the next value; `next` is the forecast of the one after it.

        Parameters
        ----------
        value
            Above zero, any unit.
        """
        is_new = True
        if self.count:
            if self._judged:
                self._judge(value)
            is_new = not self._repeats.add(self._last, value)
            if is_new and not value > _FAR * self.level:
                for place, weight in enumerate((0.7, 0.5, 0.25)):
                    self._fresh[place] += weight * (value - self._fresh[place])
        else:
            self._fresh = [value] * 3
        self._season.add(value)
        self._last = value
        self.count += 1
        self._take(value, is_new)
        self._mix()

    def _judge(self, value: float) -> None:
        """Losses of the experts for the value that came."""
        errors = [abs(forecast - value) / value for forecast in self._forecasts]
        middle = max(sorted(errors)[len(errors) // 2], 1e-9)
        if not self._scale:
            self._scale = middle
        scale = self._scale
        losses = [min(_LOSS_CAP, error / scale) for error in errors]
        situations = range(4) if self._repeats.matters else (_PLAIN,)
        for situation in situations:
            share = 1.0 if situation == self._situation else _SHARED
            fade = 1 - (1 - _FADE) * share
            table = self._losses[situation]
            summed = [fade * old + share * new for old, new in zip(table, losses, strict=True)]
            least = min(summed)
            self._losses[situation] = [loss - least for loss in summed]
        step = max(0.05, 1 / (self.count + 1))
        self._scale = max(scale + (min(middle, 3 * scale) - scale) * step, 1e-9)
        self._residuals += 1
        bound = 3 * self._residual + 0.002 if self._residuals > 3 else 0.3
        off = min(abs(self._mixed / value - 1), bound)
        self._residual += (off - self._residual) * max(0.05, 1 / self._residuals)

    def _take(self, value: float, is_new: bool) -> None:
        """Count the value into its level, hold it back, or begin a new level with it."""
        level = self._level
        if level.count < 2:
            level.add(value, is_new)
            return
        middle = level.quantile(0.5)
        floor = _LEAST_SHARE * middle * (1 if level.count > 4 else 2)
        bound = _OUTLIER * max(level.deviation * (1 + 6 / level.count), floor)
        off = value - middle
        if self._pending is not None:
            held, held_off = self._pending
            self._pending = None
            kept = self._kept[held > _PAUSE * middle]
            larger = max(abs(off), abs(held_off))
            if (
                off * held_off > 0
                and abs(off) > 0.5 * abs(held_off)
                and abs(value - held) < 0.6 * larger
            ):
                kept[0] += 1
                self.changes += 1
                self.last_change = self.count
                self._level = level = experts.Level()
                level.add(held, True)
                level.add(value, is_new)
                return
            kept[1] += 1
            if held > _PAUSE * middle:
                self._note_pause(held)
            else:
                level.add(middle + math.copysign(bound, held_off), True)
        if abs(off) > bound:
            self._pending = (value, off)
        else:
            level.add(value, is_new)

    def _note_pause(self, length: float) -> None:
        """Count a pause; three alike at equal distance foretell the next."""
        self.pauses += 1
        places = self._pause_places
        places.append((self.count - 1, length))
        self._next_pause = None
        if len(places) >= 3:
            third, second, first = places[-1][0], places[-2][0], places[-3][0]
            newest = sorted(length for _, length in list(places)[-3:])
            # Chance puts three at equal distance now and then; not three of one length.
            if third - second == second - first and newest[2] <= _PAUSE * newest[0]:
                self._next_pause = (2 * third - second, newest[1])

    def _mix(self) -> None:
        """Set `next` from the experts and their weights."""
        last, repeats = self._last, self._repeats
        new07, new05, new025 = self._fresh
        self._forecasts = values = experts.forecasts(
            last, self._level, (new07, new05, new025), self._season.forecast(), repeats
        )
        chance = repeats.probability
        situation = _PLAIN
        if repeats.matters:
            situation = _REPEAT_DUE if chance > 0.6 else _NEW_DUE if chance < 0.3 else _UNCLEAR
        self._situation = situation
        weights = self._weights(situation, chance)
        self._mixed = mixed = math.fsum(
            value * weight for value, weight in zip(values, weights, strict=True)
        )
        if situation == _PLAIN:
            # An error counts relative to the actual value, so the best forecast of a noisy series
            # is the median weighted by 1 / value: below the plain one by the relative variance.
            variance = (1.25 * self._residual) ** 2
            self.next = mixed * (1 - min(_LARGEST_SHRINK, variance))
        else:
            self.next = mixed
            same = weights[LAST] + (weights[REPEAT] if values[REPEAT] == last else 0.0)
            if situation != _NEW_DUE and same > 0.5:
                self.next = last
        self._judged = True
        if self._next_pause is not None and self._next_pause[0] == self.count + 1:
            self.next, self._judged = self._next_pause[1], False
        elif self._pending is not None and weights[SEASON] <= 0.5:
            self._judged = False
            self.next = self._after_outlier(values, weights)
        if self.next <= 0:
            # Experts that take an offset from the level back go below 0 where values differ by
            # powers of ten.
            self.next = min(last, self.level)

    def _weights(self, situation: int, chance: float) -> list[float]:
        rate = _RATE * min(1.0, _RATE_START + self.count / _RATE_FULL)
        losses = self._losses[situation]
        weights = [
            prior * math.exp(-rate * loss) for prior, loss in zip(_PRIOR, losses, strict=True)
        ]
        if situation != _PLAIN:
            boost = _REPEAT_BOOST ** max(0.0, min(1.0, (chance - 0.1) / 0.35))
            weights[LAST] *= boost
            weights[REPEAT] *= boost * 0.7
            weights[NEW05] *= _SMOOTH_BOOST
            if situation == _NEW_DUE:
                weights[NEW07] *= _NEW_BOOST
        if self.changes and self._level.count <= _UNSETTLED:
            for place in (LAST, NEW07, NEW05):
                weights[place] *= _UNSETTLED_BOOST
        total = sum(weights)
        return [weight / total for weight in weights]

    def _after_outlier(self, values: list[float], weights: list[float]) -> float:
        """Does the outlier stay? By what earlier ones did, and whether the newest counts most."""
        assert self._pending is not None
        stayed, went = self._kept[self._pending[0] > _PAUSE * self.level]
        follow = weights[LAST] + weights[NEW05] + weights[NEW025]
        newest = 4 * follow * follow
        if stayed + newest > went:
            shares = weights[LAST] + weights[NEW05]
            if shares <= 0:
                return self._last
            return (weights[LAST] * values[LAST] + weights[NEW05] * values[NEW05]) / shares
        steady = weights[MEAN] + weights[experts.CENTRE] > 0.3
        return self._level.mean if steady else self._level.drift
