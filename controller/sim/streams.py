"""Random streams of jobs: each has its own, so that what one draws changes no other."""

from __future__ import annotations

import zlib

import numpy as np

# What tells streams of one seed and name apart; that of compute times has no such number.
ERRORS, BEGINS = 1, 2


def stream(seed: int, name: str, *purpose: int) -> np.random.Generator:
    """The stream of a seed, a name and a purpose, from its beginning.

    Parameters
    ----------
    seed
        From 0.
    name
        Of a job.
    purpose
        Nothing: compute times; else `ERRORS` or `BEGINS`.
    """
    return np.random.default_rng((seed, zlib.crc32(name.encode()), *purpose))
