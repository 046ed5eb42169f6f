from dataclasses import replace

import numpy as np
import pytest

from controller.congestion.dcqcn import PRESETS
from controller.congestion.fixed_point import approximate_share, fixed_point
from controller.congestion.fluid import DcqcnLoop, constants, drift
from controller.congestion.linear import rightmost_root, unstable_roots
from controller.congestion.linear_dcqcn import exact_jacobian, exact_modes
from controller.congestion.stability import (
    critical_delay_us,
    dcqcn_stability,
    margin_ladder,
    timely_stability,
)
from controller.congestion.stability_map import stability_map
from controller.congestion.timely import TimelyLoop

from .settings import paper_loop

CONNECTX = DcqcnLoop(8, 20e3, PRESETS["connectx"])
LOOPS = {
    "paper": paper_loop(10),
    "one flow": paper_loop(1),
    "100 Gb/s": paper_loop(30, link_Gbps=100),
    "connectx": CONNECTX,
    "phase": replace(paper_loop(10), phase_multiplier=2.0),
    "floor": replace(paper_loop(4), predicted_Bps=1.5e9),
}


@pytest.mark.parametrize("name", LOOPS)
def test_nothing_moves_at_the_fixed_point(name):
    loop = LOOPS[name]
    rest = fixed_point([loop])
    slopes = drift(
        rest.alpha, rest.target_Bps, rest.rate_Bps, rest.share, rest.rate_Bps, constants([loop])
    )
    # In parts of the variable, per second; the loop's own times are below 1 ms.
    for slope, scale in zip(slopes, (rest.alpha, rest.rate_Bps, rest.rate_Bps), strict=True):
        assert abs((slope / scale).item()) < 1e-6


def test_ten_flows_rest_at_the_queue_that_was_found_independently():
    rest = fixed_point([paper_loop(10)])
    assert rest.queue_bytes.item() == pytest.approx(122.6e3, rel=1e-3)


def test_from_fifteen_flows_on_no_linear_fixed_point_exists():
    loops = [paper_loop(flows) for flows in range(1, 31)]
    assert list(fixed_point(loops).exists[:, 0]) == [flows < 15 for flows in range(1, 31)]
    result = dcqcn_stability(paper_loop(15, 50)).exact
    assert result.queue_bytes is None and not result.stable
    assert "above Pmax" in result.missing


def test_the_approximation_is_that_of_the_paper_and_meets_the_solution_where_marks_are_few():
    rare = paper_loop(2, r_ai_Mbps=0.01)
    share = approximate_share(constants([rare])).item()
    # cbrt(R_AI N^2 / (tau' C^2) (1/B + N/(T C))^2), rates in packets of 1000 bytes a second.
    packets, tau_s = 5e6, 55e-6
    formula = (
        (0.01e6 / 8e3) * 4 / (tau_s * packets**2) * (1 / 1e4 + 2 / (tau_s * packets)) ** 2
    ) ** (1 / 3)
    assert share == pytest.approx(formula, rel=1e-12)
    assert fixed_point([rare]).share.item() == pytest.approx(share, rel=0.02)
    many = paper_loop(10)
    assert approximate_share(constants([many])) > 1.25 * fixed_point([many]).share


@pytest.mark.parametrize("name", LOOPS)
def test_the_exact_derivatives_are_those_of_finite_differences(name):
    loop = LOOPS[name]
    of, rest = constants([loop]), fixed_point([loop])
    point = [rest.alpha, rest.target_Bps, rest.rate_Bps, rest.share, rest.rate_Bps]
    share_Bps = loop.share_Bps
    scales = [1.0, share_Bps, share_Bps, loop.pmax, share_Bps]
    jacobian = exact_jacobian(loop)
    columns = [jacobian.present[1:, column] for column in (1, 2, 3)]
    columns += [jacobian.past[1:, column] for column in (0, 3)]
    for index, (column, scale) in enumerate(zip(columns, scales, strict=True)):
        sides = []
        for sign in (1, -1):
            shifted = [np.array(value) for value in point]
            shifted[index] = shifted[index] + sign * 1e-5 * scale * point[3] / loop.pmax
            sides.append([s.item() for s in drift(*shifted, of)])
        width = 2e-5 * point[3].item() / loop.pmax
        found = (np.array(sides[0]) - sides[1]) / width / [1.0, share_Bps, share_Bps]
        assert found == pytest.approx(column, rel=1e-4, abs=1e-3 * np.abs(column).max())


def test_ten_flows_at_50_us_are_stable_and_at_65_us_are_not():
    at_50 = dcqcn_stability(paper_loop(10, 50))
    # The published method calls both of them unstable, from 21 us on.
    assert at_50.published.margin_deg == pytest.approx(-6.58, abs=0.1)
    assert at_50.published.critical_delay_us == pytest.approx(20.8, abs=0.1)
    assert at_50.exact.stable and at_50.exact.margin_deg > 0
    assert at_50.exact.critical_delay_us == pytest.approx(62.47, abs=0.01)
    assert not dcqcn_stability(paper_loop(10, 65)).exact.stable


@pytest.mark.parametrize("name", LOOPS)
def test_roots_reach_the_axis_at_the_critical_delay(name):
    modes = exact_modes(LOOPS[name])
    critical_us = critical_delay_us(modes)
    if critical_us == 0:
        assert max(unstable_roots(mode) for mode in modes) > 0
        return
    for factor, stable in ((0.98, True), (1.02, False)):
        later = [mode.later(critical_us * factor * 1e-6) for mode in modes]
        assert (max(rightmost_root(mode).real for mode in later) < 0) == stable
        assert (sum(unstable_roots(mode) for mode in later) == 0) == stable


def test_the_ladder_goes_from_the_published_margin_to_the_exact_one():
    loop = paper_loop(10, 50)
    steps, result = margin_ladder(loop), dcqcn_stability(loop)
    assert steps[0].margin_deg == result.published.margin_deg
    assert steps[-1].margin_deg == pytest.approx(result.exact.margin_deg, rel=1e-9)
    # What turns the verdict is the row of Rt: increases were cut after the first power of
    # marks, where F T Rc p is 0.8 and not small.
    alone = {step.what: step.alone_deg for step in steps}
    assert [what for what, margin in alone.items() if margin > 0] == [
        "increases of Rt as in the model"
    ]


def test_timely_with_the_papers_own_slope_is_stable_below_twenty_flows_only():
    few, many = timely_stability(TimelyLoop(2)), timely_stability(TimelyLoop(20))
    assert few.published.margin_deg < 0 < few.exact.margin_deg and few.exact.stable
    assert many.published.margin_deg > 0 > many.exact.margin_deg and not many.exact.stable


def test_a_timely_queue_above_its_high_threshold_is_no_fixed_point():
    exact = timely_stability(TimelyLoop(90)).exact
    assert "C T_high" in exact.missing and exact.queue_bytes is None and not exact.stable


def test_a_window_brings_the_critical_delay_forward():
    # A short window is as good as a delay by its mean lag, (15/16)^2 / 2 of the window.
    critical = [critical_delay_us(exact_modes(paper_loop(10, window_us=w))) for w in (0, 50, 100)]
    assert critical[0] - critical[1] == pytest.approx(0.44 * 50, rel=0.01)
    assert critical[0] - critical[2] == pytest.approx(0.44 * 100, rel=0.01)
    # Ours, 16 x 62.5 us, is too long for the paper's constants at 40 Gb/s, at any delay.
    assert critical_delay_us(exact_modes(paper_loop(10, window_us=1000))) == 0


def test_the_map_says_what_single_loops_say():
    calls = []
    found = stability_map(
        paper_loop(1), [1, 10, 20], [0, 50, 100], [0, 1000], lambda *done: calls.append(done)
    )
    assert calls[-1] == (6, 6)
    assert found.stable.shape == (2, 3, 3)
    assert list(found.exists) == [True, True, False]
    assert not found.stable[:, 2].any() and not found.stable[1, 1].any()
    for row, window_us in enumerate((0, 1000)):
        for column, flows in enumerate((1, 10)):
            for index, delay_us in enumerate((0, 50, 100)):
                exact = dcqcn_stability(paper_loop(flows, delay_us, window_us=window_us)).exact
                assert found.stable[row, column, index] == exact.stable
                assert found.rightmost_per_s[row, column, index] == pytest.approx(
                    exact.rightmost.real, rel=1e-6
                )
            assert found.critical_delay_us[row, column] == exact.critical_delay_us
