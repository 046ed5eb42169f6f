from dataclasses import fields, replace

import numpy as np
import pytest

from controller.congestion.delay_equations import integrate
from controller.congestion.fixed_point import fixed_point, start_near
from controller.congestion.fluid import (
    DcqcnLoop,
    FluidStart,
    constants,
    line_rate_start,
    mark_share,
    signals,
    simulate_dcqcn,
)
from controller.congestion.linear import rightmost_root
from controller.congestion.linear_dcqcn import exact_modes
from controller.congestion.marking import mark_probability
from controller.congestion.timely import TimelyLoop, fixed_queue_bytes, simulate_timely
from controller.errors import UsageError

from .settings import paper_loop


class Feedback:
    """``x' = -k x(t - d)`` with x = 1 before, for several (k, d)."""

    def __init__(self, gains, delays):
        self.gains, self.delays = np.array(gains)[:, None], np.array(delays)
        self.longest_lag_s = max(delays)

    def past(self, time_s):
        return np.ones((len(self.delays), 1))

    def memory(self, state):
        return state

    def derivative(self, state, history):
        return -self.gains * history.rows(history.look(self.delays))

    def limited(self, state):
        return state


def by_steps(gain, delay, time):
    """Closed form of the same: a polynomial on each interval of one delay."""
    total, power = 0.0, 0
    while time - (power - 1) * delay >= 0:
        total += (-gain) ** power * (time - (power - 1) * delay) ** power / _factorial(power)
        power += 1
    return total


def _factorial(number):
    return float(np.prod(np.arange(1, number + 1)))


def test_the_integrator_meets_a_closed_form_with_second_order():
    gains, delays = [1.0, 1.4, 0.6], [1.0, 0.937, 1.5]
    system = Feedback(gains, delays)
    errors = []
    for step_s in (0.02, 0.01):
        times, states = integrate(system, np.ones((3, 1)), 6.0, step_s, 61)
        exact = [[by_steps(k, d, t) for k, d in zip(gains, delays, strict=True)] for t in times]
        errors.append(np.abs(states[:, :, 0] - exact).max())
    assert len(times) == 61 and times[-1] == pytest.approx(6.0)
    assert errors[1] < 1e-4
    assert errors[0] / errors[1] > 3


def test_without_a_delay_the_integrator_solves_ordinary_equations():
    times, states = integrate(Feedback([2.0], [0.0]), np.ones((1, 1)), 1.0, 1e-3, 11)
    assert states[:, 0, 0] == pytest.approx(np.exp(-2 * times), abs=1e-6)


def test_a_step_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match="0 < step <= duration"):
        integrate(Feedback([1.0], [1.0]), np.ones((1, 1)), 0.1, 0.2, 3)


def test_marks_of_arrays_are_those_of_the_marker():
    of = constants([paper_loop(1)])
    queues = np.array([0.0, 5e3, 5001.0, 1e5, 2e5, 200_001.0, 1e9])
    single = [mark_probability(queue, 5e3, 2e5, 0.01) for queue in queues]
    assert mark_share(queues[None, :], of)[0] == pytest.approx(single, rel=1e-12)


@pytest.mark.parametrize("share", [1e-4, 0.003, 0.02])
def test_signals_are_the_papers_terms(share):
    # CoNEXT 2016, a to e of equation 11, in packets of 1000 bytes.
    loop = paper_loop(10)
    felt = signals(np.full((1, 1), share), np.full((1, 1), loop.share_Bps), constants([loop]))
    rate, counter, steps, timer_s = loop.share_Bps / 1000, 1e4, 5, 55e-6
    by_timer = timer_s * rate
    a = 1 - (1 - share) ** (50e-6 * rate)
    b = share / ((1 - share) ** -counter - 1)
    c = b * (1 - share) ** (steps * counter)
    d = share / ((1 - share) ** -by_timer - 1)
    e = d * (1 - share) ** (steps * by_timer)
    assert felt.cut.item() == pytest.approx(a, rel=1e-9)
    assert felt.congested.item() == pytest.approx(1 - (1 - share) ** (55e-6 * rate), rel=1e-9)
    assert felt.recoveries_per_s.item() == pytest.approx((b + d) * rate, rel=1e-9)
    assert felt.additions_per_s.item() == pytest.approx((c + e) * rate, rel=1e-9)


def test_signals_without_and_with_all_marks_are_the_limits():
    loop = paper_loop(10)
    of, rate = constants([loop]), np.full((1, 1), loop.share_Bps)
    none, all_marked = (
        signals(np.full((1, 1), 2.0**-52), rate, of),
        signals(np.full((1, 1), 1 - 2.0**-52), rate, of),
    )
    events = loop.share_Bps / 10e6 + 1 / 55e-6
    assert none.recoveries_per_s.item() == pytest.approx(events, rel=1e-6)
    assert none.additions_per_s.item() == pytest.approx(events, rel=1e-6)
    assert none.cut.item() < 1e-12
    assert all_marked.cut.item() == pytest.approx(1)
    assert all_marked.recoveries_per_s.item() == pytest.approx(0, abs=1e-6)


def test_ten_flows_at_50_us_rest_or_cycle_by_where_they_start():
    # From line rate the queue comes to rest, where the published margin is -6.58 degrees. But
    # once it passed Kmax, above which every packet is marked, it cycles for ever.
    loops = [paper_loop(10, 50)] * 2
    line, far = line_rate_start(loops[:1]), start_near(loops[:1], 1.7)
    start = FluidStart(
        *(np.concatenate([getattr(line, f.name), getattr(far, f.name)]) for f in fields(line))
    )
    series = simulate_dcqcn(loops, 0.12, start=start, step_s=1e-5, samples=2000)
    rests, cycles = series.queue_bytes[-500:].T
    assert rests == pytest.approx(122.6e3, rel=5e-3)
    assert series.rate_Bps[-1, 0] == pytest.approx(np.full(10, 5e8), rel=5e-3)
    assert cycles.min() == 0 and cycles.max() > 200e3


def test_disturbances_grow_and_die_out_as_the_roots_say():
    loops = [paper_loop(10, 45), paper_loop(10, 100), paper_loop(10, 50, window_us=250)]
    series = simulate_dcqcn(
        loops, 0.02, start=start_near(loops, 1 + 1e-4), step_s=5e-6, samples=4000
    )
    rest = fixed_point(loops).queue_bytes[:, 0]
    for index, loop in enumerate(loops):
        root = rightmost_root(exact_modes(loop)[0].later(loop.delay_ns * 1e-9))
        away = np.abs(series.queue_bytes[:, index] - rest[index])
        peaks = np.nonzero((away[1:-1] > away[:-2]) & (away[1:-1] >= away[2:]))[0] + 1
        # The first swings hold other modes, too; large ones leave the line.
        peaks = peaks[(series.time_s[peaks] > 5e-3) & (away[peaks] < 2e4)]
        rate, _ = np.polyfit(series.time_s[peaks], np.log(away[peaks]), 1)
        assert rate == pytest.approx(root.real, rel=0.03, abs=3)
        spacing_s = np.diff(series.time_s[peaks]).mean()
        assert np.pi / spacing_s == pytest.approx(abs(root.imag), rel=0.01)


def test_settings_side_by_side_do_not_touch_each_other():
    loops = [paper_loop(2, 20), paper_loop(5, 40, window_us=100), paper_loop(9, 0)]
    together = simulate_dcqcn(loops, 5e-4, samples=20)
    for index, loop in enumerate(loops):
        alone = simulate_dcqcn([loop], 5e-4, samples=20)
        assert together.queue_bytes[:, index] == pytest.approx(alone.queue_bytes[:, 0], rel=1e-9)
        assert not together.rate_Bps[:, index, loop.flows :].any()


def test_a_predicted_floor_and_a_larger_step_raise_the_queue_as_the_fixed_point_says():
    plain = paper_loop(4, 10)
    loops = [
        plain,
        replace(plain, predicted_Bps=1.5 * plain.share_Bps),
        replace(plain, phase_multiplier=2.0),
    ]
    start = start_near(loops, 0.95)
    series = simulate_dcqcn(loops, 0.06, start=start, step_s=1e-5, samples=50)
    queues = fixed_point(loops).queue_bytes[:, 0]
    exists = fixed_point(loops).exists[:, 0]
    assert queues[1] > queues[0] and queues[2] > queues[0]
    for index in np.nonzero(exists)[0]:
        assert series.queue_bytes[-1, index] == pytest.approx(queues[index], rel=0.01)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("flows", 0),
        ("delay_ns", -1.0),
        ("delay_ns", float("nan")),
        ("kmax_bytes", 100.0),
        ("pmax", 0.0),
        ("window_ns", -5.0),
        ("phase_multiplier", 0.0),
        ("predicted_Bps", 1e12),
    ],
)
def test_a_loop_out_of_range_is_refused_by_name(key, value):
    with pytest.raises(UsageError, match=key):
        replace(DcqcnLoop(2), **{key: value})


def test_timely_settles_at_its_fixed_point_where_the_exact_roots_say_so():
    loop = TimelyLoop(2)
    rates = loop.share_Bps * np.array([1.1, 0.9])
    _, queue, found = simulate_timely(
        loop, 0.12, rates_Bps=rates, queue_bytes=70e3, step_s=2e-5, samples=100
    )
    assert queue[-1] == pytest.approx(fixed_queue_bytes(loop), rel=1e-3)
    assert np.ptp(found[-1]) < 0.1 * np.ptp(rates)


def test_thirty_timely_flows_cycle():
    loop = TimelyLoop(30)
    start = fixed_queue_bytes(loop)
    _, queue, _ = simulate_timely(loop, 0.03, queue_bytes=start * 0.9, step_s=1e-5, samples=500)
    # The published margin at this point is +22 degrees.
    assert np.ptp(queue[-100:]) > 0.1 * start


def test_a_timely_loop_out_of_range_is_refused_by_name():
    with pytest.raises(UsageError, match="high_ns"):
        TimelyLoop(2, high_ns=10.0)
