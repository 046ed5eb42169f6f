"""SplitMix64: the numbers behind hashes of paths and chances of flows.

References
----------
Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# The golden ratio's fraction, then variant 13 of Stafford's MurmurHash3 finalisers.
GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31 = (np.uint64(shift) for shift in (30, 27, 31))


def finalised(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Words in the shape of the state; each bit of one depends on every bit of the state's word."""
    state = (state ^ (state >> _30)) * _FIRST
    state = (state ^ (state >> _27)) * _SECOND
    return state ^ (state >> _31)
