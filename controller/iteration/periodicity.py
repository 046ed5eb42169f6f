"""Whether a series of durations is periodic, with an error rate that is known for each length."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Durations judged: the newest ones, so that a job that settles down is seen to.
JUDGED = 24
# Largest irregularity that counts as periodic, by number of durations from 2 on. Monte Carlo over
# 200,000 random series per length and family (exponential, uniform on 0 .. 2 m, lognormal with
# sigma 0.5 and 1): the smallest quantile of the four at 0.6 % (fewer than 5 durations) or 0.3 %,
# so that both tables together accept under 0.6 % of random series of one length. A predictor asks
# again after each period and holds on to its verdict, so it says "periodic" more often: uniform
# series in 1.2 % at the worst length, the others in 0.2 % (docs/results.md, "Prediction"). Capped
# at 0.2 (all) and 0.16 (trimmed), since a job with 20 % jitter has 0.16.
_ALL = (
    0.0027, 0.0245, 0.0579, 0.0681, 0.0914, 0.1073, 0.1232, 0.1346, 0.1508, 0.1583, 0.1684, 0.1752,
    0.1847, 0.1894, 0.1963, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2,
)  # fmt: skip
# Without the largest fifth: pauses for evaluation and checkpoints.
_TRIMMED = (
    0.0027, 0.0245, 0.0579, 0.0278, 0.0483, 0.0645, 0.0819, 0.0942, 0.08, 0.0922, 0.1033, 0.1129,
    0.1227, 0.1084, 0.1176, 0.1241, 0.1316, 0.1383, 0.1275, 0.1336, 0.1398, 0.1449, 0.1501,
)  # fmt: skip
_TRIM = 5
# Where bytes repeat exactly and the windows' lengths agree, bounds are this much wider: that is
# believed to be a job that trains. Random gaps between windows of equal bytes and equal lengths are
# therefore called periodic more often, uniform ones in 6.7 % after four periods and in 1 % of all
# verdicts (docs/results.md, "Prediction").
_EVIDENCE = 2.5
# Collectives cut at random places have windows of random bytes; equal silences between them can
# make their begins as regular as a job with 10 % jitter.
_DOUBT = 0.2
# What was periodic stays so up to here: jitter alone must not make the verdict flap.
_STAYS = 0.25
_LENGTHS_AGREE = 0.25


@dataclass(frozen=True)
class Verdict:
    """Whether durations are periodic.

    Parameters
    ----------
    is_periodic
        The verdict.
    confidence
        0 .. 1: 0.5 at the bound, more the farther inside and the more durations are known.
    irregularity
        Mean distance of the durations from their median, as a share of it; nan: too few.
    why
        What speaks for or against, in words.
    """

    is_periodic: bool
    confidence: float
    irregularity: float
    why: str


def irregularity(durations: Sequence[float], dropped: int = 0) -> float:
    """Mean distance from the median as a share of it.

    Parameters
    ----------
    durations
        At least one, shape (n,), any unit.
    dropped
        So many of the largest distances are left out.

    Returns
    -------
    float
        0 for equal durations; inf where the median is 0.
    """
    middle = statistics.median(durations)
    if middle <= 0:
        return math.inf
    return _mean_of_least(_distances(durations, middle), dropped) / middle


def _distances(durations: Sequence[float], middle: float) -> list[float]:
    return sorted([abs(duration - middle) for duration in durations])


def _mean_of_least(distances: Sequence[float], dropped: int) -> float:
    kept = distances[: len(distances) - dropped]
    return math.fsum(kept) / len(kept)


def lengths_agree(lengths: Sequence[float]) -> bool:
    """Whether windows are of one length within a quarter: evidence beside exact bytes."""
    return len(lengths) >= 2 and min(lengths) > 0 and irregularity(lengths) <= _LENGTHS_AGREE / 2


def comparable(starts: Sequence[int], bursts: int) -> tuple[list[float], int]:
    """Times between begins in a form that can be judged where several bursts make an iteration.

    Parameters
    ----------
    starts
        Begins in order, shape (n,), ns.
    bursts
        Per iteration.

    Returns
    -------
    tuple of list and int
        For one burst, the n - 1 times. For more, each by the usual time of its place among the
        bursts; and how many are free to differ: one round goes into the usual times, another into
        the choice of `bursts`, which was made because it fits.
    """
    gaps = [float(later - earlier) for earlier, later in itertools.pairwise(starts)]
    if bursts == 1:
        return gaps, len(gaps)
    usual = [statistics.median(gaps[place::bursts] or [1.0]) for place in range(bursts)]
    shares = [gap / usual[number % bursts] for number, gap in enumerate(gaps)]
    return shares, max(0, len(gaps) - 2 * (bursts - 1))


def judge(
    durations: Sequence[float],
    has_evidence: bool = False,
    was: bool = False,
    has_doubt: bool = False,
    independent: int | None = None,
    widened: float = 1.0,
) -> Verdict:
    """Tell whether these durations, oldest first, are those of a periodic job.

    Parameters
    ----------
    durations
        From one begin to the next, shape (n,), any unit; the newest 24 are judged.
    has_evidence
        Bytes repeat exactly and lengths of windows agree, which chance has to explain as well.
    was
        The verdict so far.
    has_doubt
        Bytes differ much from iteration to iteration: periods must be more alike then.
    independent
        So many of the durations are free to differ; None: all. Less where they were divided by
        medians of their own; with less than 2 there is nothing to judge.
    widened
        Bounds are this much wider, where something else speaks for a period that chance has to
        explain as well.

    Returns
    -------
    Verdict
        ``is_periodic`` is wrong for less than 0.6 % of random series of one length, without
        `has_evidence`, `was` and `widened`; see docs/results.md for those of a predictor.
    """
    judged = durations[-JUDGED:]
    count = len(judged)
    free = count if independent is None else min(count, independent)
    if free < 2:
        # What was divided by medians of its own agrees with itself.
        return Verdict(False, 0.0, math.nan, f"{max(0, free)} periods are known, 2 are needed")
    place = free - 2
    bound, bound_trimmed = _ALL[place], _TRIMMED[place]
    factor = _EVIDENCE if has_evidence else widened
    if factor > 1:
        bound = min(factor * bound, max(_ALL[-1], bound))
        bound_trimmed = min(factor * bound_trimmed, max(_TRIMMED[-1], bound_trimmed))
    if has_doubt:
        bound, bound_trimmed = _DOUBT * bound, _DOUBT * bound_trimmed
    middle = statistics.median(judged)
    whole = trimmed = math.inf
    if middle > 0:
        distances = _distances(judged, middle)
        whole = _mean_of_least(distances, 0) / middle
        trimmed = _mean_of_least(distances, count // _TRIM) / middle
    ratio = min(whole / bound, trimmed / bound_trimmed)
    is_periodic = ratio < 1 or (was and trimmed < _STAYS and not has_doubt)
    known = 1 - 1 / count
    confidence = (1 / (1 + ratio)) * (0.5 + 0.5 * known) if math.isfinite(ratio) else 0.0
    extra = ", bytes repeat exactly" if has_evidence else ""
    if ratio < 1:
        why = f"{count} periods differ by {whole:.2%} on average{extra}"
    elif is_periodic:
        why = f"{count} periods differ by {whole:.1%} on average, but were regular before"
    else:
        why = (
            f"{count} periods differ by {whole:.1%} on average; by chance {bound:.1%} would be "
            f"reached, too{', bytes differ as well' if has_doubt else ''}"
        )
    return Verdict(is_periodic, min(1.0, confidence), whole, why)
