"""Delay differential equations in fixed steps, many settings at once along a leading axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class History:
    """What a system remembers of its last states, in a ring; linear between two steps.

    Parameters
    ----------
    step_s
        Time between two entries.
    longest_s
        Longest lag that will be asked for.
    past
        Values, shape (settings, columns), at a time of at most 0 s.
    """

    def __init__(self, step_s: float, longest_s: float, past: Callable[[float], Array]) -> None:
        self.step_s = step_s
        self._length = math.ceil(longest_s / step_s) + 3
        first = past(0.0)
        self._ring = np.empty((self._length, *first.shape))
        for entry in range(self._length):
            self._ring[entry] = past((entry - self._length + 1) * step_s)
        self._newest = self._length - 1
        self._settings = np.arange(first.shape[0])

    def push(self, values: Array) -> None:
        """Remember the values of one step later."""
        self._newest = (self._newest + 1) % self._length
        self._ring[self._newest] = values

    def replace(self, values: Array) -> None:
        """Correct the newest values."""
        self._ring[self._newest] = values

    def look(self, lag_s: Array) -> Look:
        """Prepare for looking back by the same lags again and again."""
        back = lag_s / self.step_s
        whole = np.floor(back).astype(np.intp)
        return Look(whole, back - whole)

    def rows(self, look: Look) -> Array:
        """All columns, shape (settings, columns), one lag per setting (shape (settings,)) ago."""
        entry = (self._newest - look.steps) % self._length
        newer, older = self._ring[entry, self._settings], self._ring[entry - 1, self._settings]
        between: Array = newer + look.share[:, None] * (older - newer)
        return between

    def column(self, look: Look, column: int) -> Array:
        """One column at several lags: shape (settings, lags), as that of the lags."""
        entry = (self._newest - look.steps) % self._length
        settings = self._settings[:, None]
        newer, older = (
            self._ring[entry, settings, column],
            self._ring[entry - 1, settings, column],
        )
        between: Array = newer + look.share * (older - newer)
        return between


class Look(NamedTuple):
    """A lag as whole steps and the share of one more."""

    steps: Array
    share: Array


class DelaySystem(Protocol):
    """A system of delay differential equations; states have shape (settings, variables)."""

    @property
    def longest_lag_s(self) -> float:
        """No lag is longer."""

    def past(self, time_s: float) -> Array:
        """What is remembered of a time of at most 0 s, shape (settings, columns)."""

    def memory(self, state: Array) -> Array:
        """The columns of a state that are remembered."""

    def derivative(self, state: Array, history: History) -> Array:
        """Change of the state in one second; lags count from the state's time."""

    def limited(self, state: Array) -> Array:
        """The state within its physical limits (no queue below 0)."""


def integrate(
    system: DelaySystem, start: Array, duration_s: float, step_s: float, samples: int
) -> tuple[Array, Array]:
    """Integrate by Heun's method: second order, past values linear between two steps.

    Right sides of congestion control have jumps (an empty queue, Kmax), where a method of a higher
    order has no more accuracy than this one.

    Parameters
    ----------
    system
        The equations.
    start
        State at 0 s, shape (settings, variables).
    duration_s, step_s
        Length of the run and of a step.
    samples
        States to return, evenly spread from 0 s to the end; at most one a step.

    Returns
    -------
    tuple of arrays
        Times in s, shape (samples,), and states, shape (samples, settings, variables).

    Raises
    ------
    ValueError
        A step or duration that is not above 0.
    """
    if not (step_s > 0 and duration_s >= step_s):
        raise ValueError(f"step {step_s} s and duration {duration_s} s: 0 < step <= duration")
    steps = round(duration_s / step_s)
    wanted = np.unique(np.linspace(0, steps, max(2, min(samples, steps + 1))).round().astype(int))
    history = History(step_s, system.longest_lag_s + step_s, system.past)
    state = system.limited(np.array(start, dtype=float))
    history.replace(system.memory(state))
    states = np.empty((len(wanted), *state.shape))
    states[0], found = state, 1
    for step in range(1, steps + 1):
        slope = system.derivative(state, history)
        guess = system.limited(state + step_s * slope)
        # A lag below one step is looked up between the state and this guess.
        history.push(system.memory(guess))
        ahead = system.derivative(guess, history)
        state = system.limited(state + (step_s / 2) * (slope + ahead))
        history.replace(system.memory(state))
        if step == wanted[found]:
            states[found] = state
            found += 1
    return wanted * step_s, states
