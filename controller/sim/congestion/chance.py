"""Random numbers that depend on who draws them and when, not on who else draws.

So a flow meets the same chances alone, beside other replicates, and under another variant.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controller.congestion.flows import FloatArray

Keys = NDArray[np.uint64]

# SplitMix64: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _11 = (np.uint64(shift) for shift in (30, 27, 31, 11))
_UNIT = 2.0**-53


def _mixed(values: Keys) -> Keys:
    values = (values ^ (values >> _30)) * _MIX1
    values = (values ^ (values >> _27)) * _MIX2
    return values ^ (values >> _31)


def keys(seed: int, count: int) -> Keys:
    """Keys of flows 0 .. `count` - 1 of one replicate, shape (count,).

    Parameters
    ----------
    seed
        0 or more; replicates with the same seed draw the same numbers.
    """
    numbers = np.arange(1, count + 1, dtype=np.uint64)
    start = _mixed(np.array([seed], dtype=np.uint64) + _GAMMA)
    return _mixed(start + numbers * _GAMMA)


def uniform(keys: Keys, turn: int) -> FloatArray:
    """One number in 0 .. 1 (without 1) of each key, shape (n,), for a turn from 0."""
    offset = np.array([turn + 1], dtype=np.uint64) * _GAMMA
    result: FloatArray = (_mixed(keys + offset) >> _11).astype(np.float64) * _UNIT
    return result
