"""Patched TIMELY: its rule on single delays, and its published fixed point on one link."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from controller.congestion.timely_flows import TimelyFlows, TimelyParameters
from controller.errors import UsageError
from controller.sim.congestion.feedback import RttFeedback
from controller.sim.congestion.links import Link
from controller.sim.congestion.network import Network

# CoNEXT 2016, section 4: C 10 Gbit/s, delta 10 Mbit/s, T_low 50 us, beta 0.008.
PAPER = TimelyParameters()
LINK = PAPER.link_Bps


def after(*delays_us: float) -> float:
    """Rate of a flow at LINK / 4 after delays that come 30 us apart."""
    flows = TimelyFlows(PAPER, 1, LINK / 4)
    for number, delay_us in enumerate(delays_us, 1):
        flows.advance(number * 30_000)
        flows.measured(np.array([0]), np.array([delay_us * 1_000]))
    return float(flows.rates_Bps[0])


def test_below_t_low_the_rate_grows_by_a_step() -> None:
    assert after(40) == pytest.approx(LINK / 4 + PAPER.delta_Bps)
    assert after(40, 10) == pytest.approx(LINK / 4 + 2 * PAPER.delta_Bps)


def test_above_t_high_it_falls_by_how_far_above() -> None:
    assert after(1000) == pytest.approx(LINK / 4 * (1 - 0.008 * 0.5))


def test_between_the_gradient_weighs_growth_and_fall() -> None:
    # No gradient: half of both. error = (75 - 50) / 50.
    level = PAPER.delta_Bps / 2 + LINK / 4 * (1 - 0.008 * 0.5 * 0.5)
    assert after(75) == pytest.approx(level)
    # The second is 10 us more: gradient 0.875 * 10 / 20 is above 1/4, all weight on the fall.
    assert after(75, 85) == pytest.approx(level * (1 - 0.008 * 0.7))
    # 10 us less: all weight on growth.
    assert after(75, 65) == pytest.approx(level + PAPER.delta_Bps)


def test_a_delay_too_soon_after_an_update_is_left_out() -> None:
    flows = TimelyFlows(PAPER, 1, LINK / 4)
    for now_ns in (30_000, 40_000, 49_999, 50_000):
        flows.advance(now_ns)
        flows.measured(np.array([0]), np.array([10_000.0]))
    assert flows.updates[0] == 2


def test_two_flows_reach_equal_rates_and_the_published_queue() -> None:
    flows = TimelyFlows(PAPER, 2)
    network = Network(
        RttFeedback(flows, 4_000, 4_000),
        [replace(Link.by_rate(LINK), pause_bytes=1e7).unmarked()],
        np.array([0]),
        np.array([0, 0]),
        step_ns=4_000,
        packet_bytes=1_000,
    )
    # Differences fall by e in 2 Seg / delta = 25.6 ms (the paper's convergence of two flows).
    flows.set_rates(np.array([0, 1]), np.array([0.6, 0.4]) * LINK)
    queue = []
    for step in range(20_000):
        network.step()
        if step >= 15_000:
            queue.append(network.links.queue_bytes[0])
    share = flows.rates_Bps / flows.rates_Bps.sum()
    assert share == pytest.approx([0.5, 0.5], abs=0.02)
    # q* = N delta q' / (beta C) + q', with q' = C T_low = 62.5 KB: 78.1 KB.
    low_bytes = LINK * 50e-6
    fixed = low_bytes * (1 + 2 * PAPER.delta_Bps / (0.008 * LINK))
    assert np.mean(queue) == pytest.approx(fixed, rel=0.05)
    assert np.std(queue) < 0.1 * fixed


@pytest.mark.parametrize(
    ("key", "value"), [("beta", 0.0), ("alpha", 1.5), ("low_ns", 500_000), ("delta_Bps", 1e12)]
)
def test_impossible_constants_are_named(key: str, value: float) -> None:
    with pytest.raises(UsageError, match=key):
        replace(PAPER, **{key: value})
