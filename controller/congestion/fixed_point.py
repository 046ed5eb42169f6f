"""Where DCQCN's fluid model rests: exactly, and by the published approximation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controller.congestion.delay_equations import Array
from controller.congestion.fluid import DcqcnLoop, FluidStart, LoopConstants, constants, signals

_LOWEST_SHARE, _HIGHEST_SHARE = 1e-15, 1 - 1e-12
# Halvings of the logarithm's range (35) until 1e-16 of it is left.
_HALVINGS = 60


@dataclass(frozen=True)
class FixedPoint:
    """Rest points of several loops, arrays of shape (settings, 1).

    Attributes
    ----------
    share
        Share of packets marked, p*.
    queue_bytes
        Where the marking line reaches that share. Above Kmax the line has ended: see `exists`.
    alpha, target_Bps, rate_Bps
        Of each flow.
    exists
        Whether p* is at most Pmax. If not, no queue gives that share: it would have to be between
        Pmax (at Kmax) and 1 (just above).
    """

    share: Array
    queue_bytes: Array
    alpha: Array
    target_Bps: Array
    rate_Bps: Array
    exists: Array


def line_queue_bytes(share: Array, of: LoopConstants) -> Array:
    """Queue at which the (endless) marking line reaches a share of marks."""
    queue: Array = share / of.pmax * (of.kmax_bytes - of.kmin_bytes) + of.kmin_bytes
    return queue


def fixed_point(loops: Sequence[DcqcnLoop]) -> FixedPoint:
    """Solve for the rest points of the fluid model.

    All flows have the fair share. Rt follows from its equation, then p* from that of Rc (CoNEXT
    2016, theorem 1: what cuts take grows with p, what increases give falls, so there is one).

    Raises
    ------
    UsageError
        A loop is out of range (see `DcqcnLoop`).
    """
    of = constants(loops)
    rate = of.share_Bps

    def target(share: Array) -> Array:
        felt = signals(share, rate, of)
        added = of.cut_s * of.step_Bps * felt.additions_per_s / felt.cut
        reached: Array = np.maximum(rate, of.floor_Bps) + added
        return reached

    def surplus(share: Array) -> Array:
        felt = signals(share, rate, of)
        cuts = rate * felt.congested * felt.cut / of.cut_s
        above: Array = cuts - (target(share) - rate) * felt.recoveries_per_s
        return above

    low = np.full_like(rate, np.log(_LOWEST_SHARE))
    high = np.full_like(rate, np.log(_HIGHEST_SHARE))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        too_much = surplus(np.exp(middle)) > 0
        low, high = np.where(too_much, low, middle), np.where(too_much, middle, high)
    share = np.exp((low + high) / 2)
    return FixedPoint(
        share=share,
        queue_bytes=line_queue_bytes(share, of),
        alpha=signals(share, rate, of).congested,
        target_Bps=target(share),
        rate_Bps=rate,
        exists=share <= of.pmax,
    )


def approximate_share(of: LoopConstants) -> Array:
    """The published approximation of p*, for a p* near 0.

    CoNEXT 2016, equation 14: ``cbrt(R_AI N^2 / (tau' C^2) (1/B + N / (T C))^2)``, rates and sizes
    in packets. It knows neither window nor floor. Nothing bounds it by 1.
    """
    packet = of.packet_bytes
    rate, step = of.share_Bps / packet, of.step_Bps / packet
    counters = packet / of.byte_counter_bytes + 1 / (of.timer_s * rate)
    share: Array = np.cbrt(step / (of.alpha_s * rate**2) * counters**2)
    return share


def start_near(
    loops: Sequence[DcqcnLoop], queue_factor: float = 1.0, rate_factors: Array | None = None
) -> FluidStart:
    """A start beside the fixed point.

    Parameters
    ----------
    loops
        The settings.
    queue_factor
        Of the fixed point's queue; where there is no fixed point, of Kmax.
    rate_factors
        Of the fair share, shape (settings, flows); None: all 1.
    """
    of, rest = constants(loops), fixed_point(loops)
    shape = (len(loops), max(loop.flows for loop in loops))
    queue = np.minimum(rest.queue_bytes, of.kmax_bytes) * queue_factor
    ones = np.ones(shape)
    rate = rest.rate_Bps * (ones if rate_factors is None else rate_factors)
    return FluidStart(queue[:, 0], rate, rest.target_Bps * ones, rest.alpha * ones)
