import numpy as np
import pytest
from scipy.special import lambertw

from controller.congestion.linear import (
    DelayedSystem,
    DelayTerm,
    crossovers,
    first_critical_delay_s,
    phase_margin_deg,
    rightmost_root,
    unstable_roots,
)


def feedback(gain_per_s, delay_s, width_s=0.0):
    """``x' = -k x(t - d)``, or of the mean over a span."""
    return DelayedSystem(
        np.zeros((1, 1)), (DelayTerm(np.array([[-gain_per_s]]), delay_s, width_s),)
    )


def test_pure_delayed_feedback_is_critical_at_half_pi():
    # x' = -k x(t - d) oscillates for ever at k d = pi/2, with frequency k.
    k = 3000.0
    system = feedback(k, 0.0)
    assert first_critical_delay_s(system) * k == pytest.approx(np.pi / 2, rel=1e-9)
    assert crossovers(system)[0].frequency == pytest.approx(k, rel=1e-9)
    for share, unstable in ((0.99, 0), (1.01, 2)):
        later = system.later(share * np.pi / 2 / k)
        assert (rightmost_root(later).real > 0) == bool(unstable)
        assert unstable_roots(later) == unstable


@pytest.mark.parametrize("product", [0.2, 0.5, 1.2, 2.0, 7.0])
def test_the_rightmost_root_is_that_of_lamberts_function(product):
    delay_s = 50e-6
    root = rightmost_root(feedback(product / delay_s, delay_s))
    # s = W_0(-k d) / d (Corless et al., Adv. Comput. Math. 5, 1996).
    expected = complex(lambertw(-product)) / delay_s
    assert root.real == pytest.approx(expected.real, rel=1e-7)
    assert abs(root.imag) == pytest.approx(abs(expected.imag), rel=1e-7, abs=1e-3)


def test_feedback_of_a_mean_is_critical_at_half_pi_squared():
    # x' = -k mean of x over w: s = j pi / w is a root where k w = pi^2 / 2.
    width_s = 1e-3
    for share, unstable in ((0.99, 0), (1.01, 2)):
        system = feedback(share * np.pi**2 / 2 / width_s, 0.0, width_s)
        root = rightmost_root(system)
        assert (root.real > 0) == bool(unstable)
        assert abs(root.imag) * width_s == pytest.approx(np.pi, rel=0.01)
        assert unstable_roots(system) == unstable


def test_a_gain_that_never_is_one_has_no_margin():
    # x' = -2 x - x(t - d): the gain is below 1 at all frequencies.
    system = DelayedSystem(np.array([[-2.0]]), (DelayTerm(np.array([[-1.0]]), 0.0),))
    assert phase_margin_deg(system) is None
    assert first_critical_delay_s(system) is None
    assert rightmost_root(system.later(100.0)).real < 0


def test_roots_of_two_systems_with_several_delays_agree_with_the_argument_principle():
    rng = np.random.default_rng(7)
    seen = set()
    for _ in range(30):
        present = rng.normal(size=(3, 3)) * 1000 - 1500 * np.eye(3)
        terms = tuple(
            DelayTerm(rng.normal(size=(3, 3)) * 900, delay, width)
            for delay, width in ((0.0, 0.0), (2e-4, 0.0), (1e-4, 5e-4))
        )
        system = DelayedSystem(present, terms)
        count = unstable_roots(system)
        assert (rightmost_root(system).real > 0) == (count > 0)
        seen.add(count > 0)
    assert seen == {True, False}
