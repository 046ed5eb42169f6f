"""Stability of one loop: the published margin, the exact linearisation, and why they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from controller.congestion.convergence import convergence_s, without_formula
from controller.congestion.fixed_point import approximate_share, fixed_point, line_queue_bytes
from controller.congestion.fluid import DcqcnLoop, constants
from controller.congestion.linear import (
    DelayedSystem,
    first_critical_delay_s,
    phase_margin_deg,
    rightmost_of,
)
from controller.congestion.linear_dcqcn import (
    ALPHA,
    RATE,
    TARGET,
    Jacobian,
    common_mode,
    exact_jacobian,
    exact_modes,
    published_jacobian,
)
from controller.congestion.timely import (
    PUBLISHED_WEIGHT_SLOPE,
    TimelyLoop,
    difference_mode,
    fixed_queue_bytes,
    has_fixed_point,
    linearised,
    timely_convergence_s,
)

_NS = 1e-9
_US_PER_S = 1e6
# No network's control loop is slower than this.
LONGEST_DELAY_US = 10_000.0


@dataclass(frozen=True)
class Published:
    """What the published method says.

    `share`, `queue_bytes`: its fixed point (TIMELY has no share); `margin_deg`: None where its
    gain never is 1, or its p* no probability; `stable`: the margin is above 0 and the delay below
    the critical one, for margins are known up to whole turns only (None: no margin);
    `convergence_s`: None where the formula says nothing, and `no_convergence` says why.
    """

    share: float | None
    queue_bytes: float
    margin_deg: float | None
    critical_delay_us: float | None
    convergence_s: float | None
    stable: bool | None = None
    no_convergence: str = ""


@dataclass(frozen=True)
class Exact:
    """What the exact linearisation says about small disturbances.

    Attributes
    ----------
    share
        Share of packets marked at the fixed point; None: there is none, or no marks (TIMELY).
    queue_bytes
        None where there is no fixed point.
    missing
        Why there is no fixed point; empty where there is one.
    stable
        All roots are left of the imaginary axis. False without a fixed point.
    critical_delay_us
        Smallest loop delay at which a root is on the axis; 0: unstable without any delay; None:
        none up to `LONGEST_DELAY_US`, or no fixed point.
    margin_deg
        Phase margin of the exact loop gain at this delay.
    rightmost
        The rightmost root, in 1/s; None without a fixed point, and at delays above
        `LONGEST_DELAY_US`: of that many roots side by side collocation tells the sign only.
    """

    share: float | None
    queue_bytes: float | None
    missing: str
    stable: bool
    critical_delay_us: float | None
    margin_deg: float | None
    rightmost: complex | None


@dataclass(frozen=True)
class Stability:
    """Both views of one loop."""

    published: Published
    exact: Exact


@dataclass(frozen=True)
class MarginStep:
    """Phase margin after one more of the published approximations is replaced by the exact.

    `alone_deg` is the margin where this is the only one that is replaced.
    """

    what: str
    margin_deg: float | None
    alone_deg: float | None


def critical_delay_us(modes: Sequence[DelayedSystem]) -> float | None:
    """Smallest loop delay up to 10 ms that brings a root of some mode to the imaginary axis.

    Parameters
    ----------
    modes
        Independent systems without the loop delay.

    Returns
    -------
    float or None
        In us; 0: unstable without any delay; None: there is none.
    """
    if rightmost_of(modes).real >= 0:
        return 0.0
    delays = [delay for mode in modes if (delay := first_critical_delay_s(mode)) is not None]
    first_us = min(delays, default=float("inf")) * _US_PER_S
    return first_us if first_us <= LONGEST_DELAY_US else None


def _exact(
    modes: Sequence[DelayedSystem], delay_s: float, share: float | None, queue_bytes: float
) -> Exact:
    delayed = [mode.later(delay_s) for mode in modes]
    rightmost = rightmost_of(delayed)
    return Exact(
        share=share,
        queue_bytes=queue_bytes,
        missing="",
        stable=rightmost.real < 0,
        critical_delay_us=critical_delay_us(modes),
        margin_deg=phase_margin_deg(delayed[0]),
        rightmost=rightmost if delay_s * _US_PER_S <= LONGEST_DELAY_US else None,
    )


def _published_verdict(
    margin_deg: float | None, critical_us: float | None, delay_us: float
) -> bool | None:
    if margin_deg is None:
        return None
    return margin_deg > 0 and (critical_us is None or delay_us < critical_us)


def dcqcn_stability(loop: DcqcnLoop) -> Stability:
    """Stability of DCQCN's fixed point.

    The published method (CoNEXT 2016) knows no window, floor of Rt or empty queue; of `loop` it
    uses the rest.
    """
    of, delay_s = constants([loop]), loop.delay_ns * _NS
    approximation = approximate_share(of)
    margin = critical_us = None
    if approximation < 1:
        system = common_mode(published_jacobian(loop), _without_window(loop))
        margin = phase_margin_deg(system.later(delay_s))
        critical_us = critical_delay_us([system])
    no_convergence = without_formula(loop)
    published = Published(
        share=float(approximation[0, 0]),
        queue_bytes=float(line_queue_bytes(approximation, of)[0, 0]),
        margin_deg=margin,
        critical_delay_us=critical_us,
        convergence_s=None if no_convergence else convergence_s(loop),
        stable=_published_verdict(margin, critical_us, delay_s * _US_PER_S),
        no_convergence=no_convergence,
    )
    rest = fixed_point([loop])
    share, queue = float(rest.share[0, 0]), float(rest.queue_bytes[0, 0])
    if not rest.exists[0, 0]:
        missing = (
            f"p* = {share:.4g} is above Pmax = {loop.pmax:g}: up to Kmax no queue gives as many "
            "marks, above it all packets are marked"
        )
        return Stability(published, Exact(None, None, missing, False, None, None, None))
    return Stability(published, _exact(exact_modes(loop), delay_s, share, queue))


def _without_window(loop: DcqcnLoop) -> DcqcnLoop:
    return replace(loop, window_ns=0.0)


def timely_stability(loop: TimelyLoop) -> Stability:
    """Stability of patched TIMELY's fixed point; the loop delay that counts is propagation."""
    delay_s, queue = loop.delay_ns * _NS, fixed_queue_bytes(loop)
    published_system = linearised(loop, PUBLISHED_WEIGHT_SLOPE)
    margin = phase_margin_deg(published_system.later(delay_s))
    critical_us = critical_delay_us([published_system])
    convergence = timely_convergence_s(loop)
    published = Published(
        share=None,
        queue_bytes=queue,
        margin_deg=margin,
        critical_delay_us=critical_us,
        convergence_s=convergence,
        stable=_published_verdict(margin, critical_us, delay_s * _US_PER_S),
        no_convergence="" if convergence else "one flow has nothing to converge to",
    )
    if not has_fixed_point(loop):
        missing = (
            f"the queue would rest at {queue / 1e3:.4g} kB, above C T_high, where rates only fall"
        )
        return Stability(published, Exact(None, None, missing, False, None, None, None))
    modes = [linearised(loop), *([difference_mode(loop)] if loop.flows > 1 else [])]
    return Stability(published, _exact(modes, delay_s, None, queue))


def margin_ladder(loop: DcqcnLoop) -> list[MarginStep]:
    """From DCQCN's published phase margin to the exact one, in four corrections.

    Each replaces one approximation of the published linearisation by the model's own derivative:
    first the fixed point, then the rows of alpha, Rt and Rc.

    Raises
    ------
    ArithmeticError
        The approximation of p* is not below 1.
    """
    loop = _without_window(loop)
    share = float(fixed_point([loop]).share[0, 0])
    published, exact = published_jacobian(loop), exact_jacobian(loop)
    at_exact_point = published_jacobian(loop, share)

    def margin(base: Jacobian, rows: Sequence[int]) -> float | None:
        present, past = base.present.copy(), base.past.copy()
        for row in rows:
            present[row], past[row] = exact.present[row], exact.past[row]
        system = common_mode(Jacobian(present, past), loop)
        return phase_margin_deg(system.later(loop.delay_ns * _NS))

    steps = [MarginStep("published", margin(published, []), margin(published, []))]
    steps.append(MarginStep("p* solved, not approximated", *[margin(at_exact_point, [])] * 2))
    corrected: list[int] = []
    for row, what in (
        (ALPHA, "alpha with its own period tau'"),
        (TARGET, "increases of Rt as in the model"),
        (RATE, "cuts and recovery of Rc as in the model"),
    ):
        corrected.append(row)
        steps.append(MarginStep(what, margin(at_exact_point, corrected), margin(published, [row])))
    return steps
