"""DCQCN's fluid model linearised at its fixed point: exactly, and as it was published."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from controller.congestion.delay_equations import Array
from controller.congestion.fixed_point import FixedPoint, approximate_share, fixed_point
from controller.congestion.fluid import DcqcnLoop, LoopConstants, constants, drift, signals
from controller.congestion.linear import DelayedSystem, DelayTerm

# Variables, in this order: queue in parts of Kmax - Kmin, alpha, Rt and Rc in parts of the fair
# share.
QUEUE, ALPHA, TARGET, RATE = range(4)
_STEP = 1e-30


@dataclass(frozen=True)
class Jacobian:
    """Derivatives of the right sides: of the present, and of one loop delay ago.

    Shapes (4, 4): rows and columns are queue, alpha, target, rate. The column of the queue stands
    for the queue (or its average) that marks follow.
    """

    present: Array
    past: Array


def _at(loop: DcqcnLoop) -> tuple[LoopConstants, FixedPoint]:
    return constants([loop]), fixed_point([loop])


def exact_jacobian(loop: DcqcnLoop) -> Jacobian:
    """Derivatives at the exact fixed point, to machine precision.

    By complex steps: the right sides are analytic, so the imaginary part of their value beside
    the axis is the derivative (Squire and Trapp, SIAM Review 40(1), 1998).

    Where p* is above Pmax these are the derivatives on the marking line's continuation, which no
    queue reaches (see `FixedPoint.exists`).
    """
    of, rest = _at(loop)
    variables = [rest.alpha, rest.target_Bps, rest.rate_Bps, rest.share, rest.rate_Bps]
    scales = [np.ones((1, 1)), of.share_Bps, of.share_Bps, of.pmax, of.share_Bps]
    present, past = np.zeros((4, 4)), np.zeros((4, 4))
    columns = [
        (present, ALPHA),
        (present, TARGET),
        (present, RATE),
        (past, QUEUE),
        (past, RATE),
    ]
    outputs = (1.0, float(of.share_Bps[0, 0]), float(of.share_Bps[0, 0]))
    for index, (matrix, column) in enumerate(columns):
        shifted = [np.asarray(value, dtype=complex) for value in variables]
        shifted[index] = shifted[index] + 1j * _STEP * scales[index]
        slopes = drift(shifted[0], shifted[1], shifted[2], shifted[3], shifted[4], of)
        for row, (slope, scale) in enumerate(zip(slopes, outputs, strict=True), start=ALPHA):
            matrix[row, column] = slope[0, 0].imag / _STEP / scale
    present[QUEUE, RATE] = of.link_Bps[0, 0] / (of.kmax_bytes - of.kmin_bytes)[0, 0]
    return Jacobian(present, past)


def published_jacobian(loop: DcqcnLoop, share: float | None = None) -> Jacobian:
    """Derivatives as the published phase margins have them.

    CoNEXT 2016, appendix A gives the row of Rc; those of Rt and alpha follow from the authors'
    data. They are not the model's own derivatives, in five points:

    * p* is the approximation for small p.
    * Exponentials of equations 3 to 5 are cut after the first power of p, increases after the
      second. With the paper's constants and ten flows F T Rc p is 0.8: additions to Rt then fall
      with marks three times faster than the model's.
    * How fast Rc recovers towards Rt depends on what Rc is now. Here it depends on what Rc was
      one delay ago, which turns a damping into a delayed one.
    * The row of Rt has the increase by R_AI follow the rate twice, now and one delay ago.
    * Alpha follows every packet with gain g, instead of every tau', and the share of marked
      packets, instead of the chance of a mark in tau'.

    Parameters
    ----------
    loop
        The setting. Window, floor and phase are no part of the method.
    share
        p* to use; None: the published approximation.

    Raises
    ------
    ArithmeticError
        The approximation of p* is not below 1.
    """
    of = constants([loop])
    p = float(approximate_share(of)[0, 0]) if share is None else share
    if not 0 < p < 1:
        raise ArithmeticError(f"the approximation of p* is {p:.3g}, which is no probability")
    felt = signals(np.full((1, 1), p), of.share_Bps, of)
    packet = float(of.packet_bytes[0, 0])
    rate = float(of.share_Bps[0, 0]) / packet
    step = float(of.step_Bps[0, 0]) / packet / rate  # in parts of the fair share
    gain, steps = float(of.g[0, 0]), float(of.recovery_steps[0, 0])
    # Chance of a mark in tau', and Rt from its own equation, both without approximation.
    alpha = float(-np.expm1(of.alpha_s[0, 0] * rate * np.log1p(-p)))
    target = 1 + float((of.cut_s * felt.additions_per_s / felt.cut)[0, 0]) * step
    events = packet / float(of.byte_counter_bytes[0, 0]) + 1 / (float(of.timer_s[0, 0]) * rate)
    half = 0.5 + events / 4
    falls = 1 + 2 * steps + events / 2
    slope = float(of.pmax[0, 0])  # marks for a queue grown by Kmax - Kmin
    present, past = np.zeros((4, 4)), np.zeros((4, 4))
    present[QUEUE, RATE] = of.link_Bps[0, 0] / (of.kmax_bytes - of.kmin_bytes)[0, 0]
    present[ALPHA, ALPHA] = -gain * rate
    past[ALPHA, QUEUE] = gain * rate * slope
    present[TARGET, TARGET] = -p * rate
    present[TARGET, RATE] = p * rate + events * step * rate
    past[TARGET, RATE] = rate * (p - p * target + events * step - falls * step * p)
    past[TARGET, QUEUE] = rate * slope * (1 - target - falls * step)
    present[RATE, ALPHA] = -p * rate / 2
    present[RATE, TARGET] = rate * (events / 2 - half * p)
    present[RATE, RATE] = rate * (-p * alpha / 2 + (events / 2 - half * p) * (target - 1))
    past[RATE, RATE] = rate * (-p * alpha / 2 - events / 2 + half * p)
    past[RATE, QUEUE] = rate * slope * (-alpha / 2 - half * (target - 1))
    return Jacobian(present, past)


def common_mode(jacobian: Jacobian, loop: DcqcnLoop) -> DelayedSystem:
    """All flows alike, with the queue: the mode that the published margins are about.

    The system has the loop's window, but no loop delay: `DelayedSystem.later` adds it.
    """
    of = constants([loop])
    now, width = float(of.now_weight[0, 0]), float(of.window_s[0, 0])
    if not width:
        return DelayedSystem(jacobian.present, (DelayTerm(jacobian.past, 0.0),))
    queue = np.zeros_like(jacobian.past)
    queue[:, QUEUE] = jacobian.past[:, QUEUE]
    moment = DelayTerm(jacobian.past - (1 - now) * queue, 0.0)
    return DelayedSystem(jacobian.present, (moment, DelayTerm((1 - now) * queue, 0.0, width)))


def difference_mode(jacobian: Jacobian) -> DelayedSystem:
    """What one flow has more than another: the queue does not see it (N - 1 equal modes)."""
    return DelayedSystem(
        jacobian.present[ALPHA:, ALPHA:], (DelayTerm(jacobian.past[ALPHA:, ALPHA:], 0.0),)
    )


def exact_modes(loop: DcqcnLoop) -> tuple[DelayedSystem, ...]:
    """Both modes at the exact fixed point, without the loop delay; one flow has one."""
    jacobian = exact_jacobian(loop)
    both = (common_mode(jacobian, loop), difference_mode(jacobian))
    return both[: min(loop.flows, 2)]
