"""Random numbers that depend on who draws them and when, not on who else draws.

So a flow meets the same chances alone, beside other replicates, and under another variant.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controller.congestion.flows import FloatArray
from controller.sim.splitmix import GAMMA, finalised

Keys = NDArray[np.uint64]

# A float has 53 bits of the 64.
_SPARE = np.uint64(11)
_UNIT = 2.0**-53


def keys(seed: int, count: int) -> Keys:
    """Keys of flows 0 .. `count` - 1 of one replicate, shape (count,).

    Parameters
    ----------
    seed
        0 or more; replicates with the same seed draw the same numbers.
    """
    numbers = np.arange(1, count + 1, dtype=np.uint64)
    start = finalised(np.array([seed], dtype=np.uint64) + GAMMA)
    return finalised(start + numbers * GAMMA)


def uniform(keys: Keys, turn: int) -> FloatArray:
    """One number in 0 .. 1 (without 1) of each key, shape (n,), for a turn from 0."""
    offset = np.array([turn + 1], dtype=np.uint64) * GAMMA
    result: FloatArray = (finalised(keys + offset) >> _SPARE).astype(np.float64) * _UNIT
    return result
