"""Linear systems with delays: characteristic function, loop gain, margins, roots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy.optimize

from controller.congestion.delay_equations import Array

# Frequencies searched for crossovers, rad/s: periods from 6 s to 0.6 us, 1,250 a decade.
_FREQUENCIES = np.logspace(0, 7, 8751)
# 15 x 4 variables: OpenBLAS starts no threads for so small a matrix (with threads a busy machine
# takes ten times as long); polishing gives the digits that so few nodes lack.
_NODES = 14
_CANDIDATES, _POLISHES = 4, 6
# The winding number's contour: a step must turn the determinant by less than this.
_LARGEST_TURN = np.pi / 3
_MOST_POINTS = 1 << 20


@dataclass(frozen=True)
class DelayTerm:
    """Influence of the past: ``matrix`` times the mean state over a span that ends `delay_s` ago.

    `width_s` is the span's length; 0: the state of that moment.
    """

    matrix: Array
    delay_s: float
    width_s: float = 0.0


@dataclass(frozen=True)
class DelayedSystem:
    """``x'(t) = present x(t) + sum of terms``; `present` has shape (n, n)."""

    present: Array
    terms: tuple[DelayTerm, ...]

    def later(self, delay_s: float) -> DelayedSystem:
        """The same system with all of its past by `delay_s` longer ago."""
        return replace(
            self, terms=tuple(replace(t, delay_s=t.delay_s + delay_s) for t in self.terms)
        )

    @property
    def longest_s(self) -> float:
        """How far the past reaches."""
        return max((term.delay_s + term.width_s for term in self.terms), default=0.0)


def _transform(term: DelayTerm, s: Array) -> Array:
    """Laplace transform of a term's kernel."""
    lag: Array = np.exp(-s * term.delay_s)
    if not term.width_s:
        return lag
    span = np.asarray(s * term.width_s, dtype=complex)
    small = np.abs(span) < 1e-6
    safe = np.where(small, 1.0, span)
    mean: Array = np.where(small, 1 - span / 2, -np.expm1(-safe) / safe)
    return lag * mean


def characteristic(system: DelayedSystem, s: Array) -> Array:
    """Determinant of ``s - present - sum of terms' transforms``; its zeros are the roots.

    Parameters
    ----------
    system
        The system.
    s
        Complex frequencies in 1/s, shape (points,).

    Returns
    -------
    array
        Complex, shape (points,).
    """
    s = np.asarray(s, dtype=complex)
    matrix = s[:, None, None] * np.eye(len(system.present)) - system.present
    for term in system.terms:
        matrix = matrix - _transform(term, s)[:, None, None] * term.matrix
    determinant: Array = np.linalg.det(matrix)
    return determinant


def loop_gain(system: DelayedSystem, frequency: Array) -> Array:
    """Gain of the loop that all of the past closes: ``1 + gain = 0`` at a root.

    Parameters
    ----------
    system
        Its terms all carry the past of one signal, so that one loop is there to be cut.
    frequency
        In rad/s, shape (points,).
    """
    s = 1j * np.asarray(frequency)
    gain: Array = characteristic(system, s) / characteristic(replace(system, terms=()), s) - 1
    return gain


@dataclass(frozen=True)
class Crossover:
    """A frequency at which the loop's gain is 1, and what phase is left there to -180 degrees."""

    frequency: float
    margin_deg: float


def crossovers(system: DelayedSystem) -> list[Crossover]:
    """All gain crossovers between 1 and 10^7 rad/s, margins between -180 and 180 degrees."""

    def log_gain(log_frequency: float) -> float:
        return float(np.log(np.abs(loop_gain(system, np.exp([log_frequency]))[0])))

    # Far above the loop's own frequencies nothing is left of the gain in 16 digits.
    with np.errstate(divide="ignore"):
        sizes = np.log(np.abs(loop_gain(system, _FREQUENCIES)))
    found = []
    for index in np.nonzero(sizes[1:] * sizes[:-1] < 0)[0]:
        low, high = np.log(_FREQUENCIES[index : index + 2])
        frequency = float(np.exp(scipy.optimize.brentq(log_gain, low, high, xtol=1e-14)))
        phase = np.angle(-loop_gain(system, np.array([frequency]))[0])
        found.append(Crossover(frequency, float(np.degrees(phase))))
    return found


def phase_margin_deg(system: DelayedSystem) -> float | None:
    """Phase margin: of several crossovers, the one nearest to 0; None: the gain never is 1."""
    return min((c.margin_deg for c in crossovers(system)), key=abs, default=None)


def first_critical_delay_s(system: DelayedSystem) -> float | None:
    """Smallest delay, on top of those in the system, that brings a root to the imaginary axis.

    Where the gain is 1 at frequency w, a further delay of (phase margin in rad, from 0 to 2 pi)
    / w closes the loop with -1. None: no delay does.
    """
    delays = [np.radians(c.margin_deg % 360) / c.frequency for c in crossovers(system)]
    return float(min(delays)) if delays else None


def _barycentric(nodes: Array, at: Array) -> Array:
    """Rows that interpolate values on Chebyshev `nodes` (second kind, on -1 .. 1) at points."""
    weights = (-1.0) ** np.arange(len(nodes))
    weights[[0, -1]] /= 2
    distance = at[:, None] - nodes
    exact = distance == 0
    shares = weights / np.where(exact, 1.0, distance)
    rows: Array = shares / shares.sum(axis=1, keepdims=True)
    hit = exact.any(axis=1)
    rows[hit] = exact[hit]
    return rows


def _differentiation(nodes: Array) -> Array:
    """Chebyshev differentiation matrix (Trefethen, Spectral Methods in MATLAB, chapter 6)."""
    count = len(nodes)
    scale = (-1.0) ** np.arange(count)
    scale[[0, -1]] *= 2
    distance = nodes[:, None] - nodes + np.eye(count)
    matrix = scale[:, None] / scale / distance
    difference: Array = matrix - np.diag(matrix.sum(axis=1))
    return difference


def rightmost_root(system: DelayedSystem, nodes: int = _NODES) -> complex:
    """The root with the largest real part, in 1/s: stable where that is below 0.

    Collocation of the infinitesimal generator on Chebyshev nodes over the past (Breda, Maset,
    Vermiglio, SIAM J. Sci. Comput. 27(2), 2005); spans by quadrature of the interpolant.

    Parameters
    ----------
    system
        The system.
    nodes
        Intervals between nodes. More are needed where a root times the past's reach is above 10.
    """
    size, reach = len(system.present), system.longest_s
    if not reach:
        roots = np.linalg.eigvals(system.present + sum(term.matrix for term in system.terms))
    else:
        points = np.cos(np.pi * np.arange(nodes + 1) / nodes)
        generator = np.kron(_differentiation(points) * (2 / reach), np.eye(size))
        generator[:size] = 0
        generator[:size, :size] = system.present
        roots_at, weights = np.polynomial.legendre.leggauss(nodes)
        for term in system.terms:
            if term.width_s:
                times = -term.delay_s - term.width_s * (1 - roots_at) / 2
                row = (weights / 2) @ _barycentric(points, 1 + 2 * times / reach)
            else:
                row = _barycentric(points, np.array([1 - 2 * term.delay_s / reach]))[0]
            generator[:size] += np.kron(row, term.matrix)
        roots = np.linalg.eigvals(generator)
    first = sorted(roots, key=lambda root: (-root.real, -root.imag))[:_CANDIDATES]
    return max((_polished(system, root) for root in first), key=lambda r: (r.real, abs(r.imag)))


def _polished(system: DelayedSystem, root: complex) -> complex:
    """Newton's method on the determinant, from a root that is nearly right."""
    now = complex(root)
    for _ in range(_POLISHES):
        step = 1e-6 * (abs(now) + 1)
        values = characteristic(system, np.array([now, now + step, now - step]))
        slope = (values[1] - values[2]) / (2 * step)
        if slope == 0:
            break
        now -= complex(values[0] / slope)
    # Else this was no root, but one of the many far left that collocation cannot resolve.
    return now if abs(now - root) <= 0.05 * (abs(root) + 1) else complex(root)


def unstable_roots(system: DelayedSystem) -> int:
    """Roots right of the imaginary axis, by the argument principle: a check on `rightmost_root`.

    Raises
    ------
    ArithmeticError
        A root is too near to the axis to tell its side.
    """
    bound = np.abs(system.present).sum() + sum(np.abs(t.matrix).sum() for t in system.terms)
    radius = 1.01 * float(bound)
    # Half of the contour (the other is its mirror image): an arc up to the axis, the axis down.
    # Roots are far below the bound, so the axis is walked in equal ratios.
    arc = radius * np.exp(1j * np.linspace(0, np.pi / 2, 257))
    axis = 1j * np.append(np.geomspace(radius, radius * 1e-12, 4097), 0)
    path = np.concatenate([arc, axis[1:]])
    values = characteristic(system, path)
    while len(path) < _MOST_POINTS:
        turns = np.angle(values[1:] / values[:-1])
        wide = np.nonzero(np.abs(turns) > _LARGEST_TURN)[0]
        if not len(wide):
            return round(float(turns.sum()) / np.pi)
        between = (path[wide] + path[wide + 1]) / 2
        values = np.insert(values, wide + 1, characteristic(system, between))
        path = np.insert(path, wide + 1, between)
        if (between == path[wide]).any():
            break
    raise ArithmeticError("a root is too near to the imaginary axis to tell its side")


def rightmost_of(systems: Sequence[DelayedSystem], nodes: int = _NODES) -> complex:
    """The rightmost root of several independent systems."""
    return max(
        (rightmost_root(system, nodes) for system in systems),
        key=lambda root: (root.real, root.imag),
    )
