"""How long flows of different rates take to become equal, by the published formulas."""

from __future__ import annotations

import math

import scipy.optimize

from controller.congestion.fluid import DcqcnLoop

_NS = 1e-9
# Rates that differ by less than this part of the fair share count as equal (CoNEXT 2016).
EQUAL_SHARE = 0.1


def cycle_alpha(loop: DcqcnLoop) -> tuple[float, float]:
    """Alpha and length of DCQCN's steady cycle of one cut and then additions only.

    CoNEXT 2016, appendix B, in units of tau': one cycle takes
    ``dT = 2 + (t/2 + C / (2 N R_AI)) alpha``, of which t is the time until the queue has
    grown to Kmax: ``t = (-1 + sqrt(1 + 8 Kmax / (N R_AI tau'))) / 2``. Alpha is what a cycle leaves
    of it: ``(1-g)^(dT-1) ((1-g) alpha + g)``. The appendix prints the exponent dT in one place and
    dT - 1 in another; the published times are those of dT - 1.

    Returns
    -------
    tuple of float
        Alpha, and the cycle's length in s.
    """
    law = loop.parameters
    step = law.rate_ai_Bps * loop.phase_multiplier
    unit_s = law.alpha_update_ns * _NS
    growing = (-1 + math.sqrt(1 + 8 * loop.kmax_bytes / (loop.flows * step * unit_s))) / 2
    per_alpha = growing / 2 + law.link_Bps / (2 * loop.flows * step)

    def left(alpha: float) -> float:
        keeps = (1 - law.g) ** (1 + per_alpha * alpha)
        return float(keeps * ((1 - law.g) * alpha + law.g) - alpha)

    alpha = float(scipy.optimize.brentq(left, 0.0, 1.0, xtol=1e-15))
    return alpha, (2 + per_alpha * alpha) * unit_s


def without_formula(loop: DcqcnLoop) -> str:
    """Why the published formula says nothing about a loop; empty: it does."""
    law = loop.parameters
    if loop.flows == 1:
        return "one flow has nothing to converge to"
    if law.timer_ns != law.alpha_update_ns:
        return (
            f"the formula is for increases as often as updates of alpha, not each "
            f"{law.timer_ns / 1e3:g} and {law.alpha_update_ns / 1e3:g} us"
        )
    return ""


def convergence_s(loop: DcqcnLoop) -> float:
    """Time until the rates of flows differ by less than 10 % of the fair share.

    An upper bound for a difference that begins as large as the link: alpha is taken as small as
    it gets, and marks as beginning at Kmax only. Needs no fixed point and knows no delay. Of
    loops that `without_formula` names it means nothing.
    """
    alpha, cycle_s = cycle_alpha(loop)
    return cycle_s * math.log(EQUAL_SHARE / loop.flows) / math.log1p(-alpha / 2)
