"""Long flows: equal shares, a full link, and a queue that settles or swings by the delay."""

from __future__ import annotations

import pytest

from controller.congestion.timely_flows import TimelyParameters
from controller.errors import UsageError
from controller.sim.congestion.steady import (
    SteadyCase,
    SteadyConditions,
    SteadyOutcome,
    simulate_steady,
)
from controller.sim.congestion.steady_experiment import SWING_LEFT

NEAR, FAR = SteadyCase(10, 1_000), SteadyCase(10, 50_000)
FEW, LINE_RATE = SteadyCase(2, 1_000), SteadyCase(2, 1_000, start=2.0)


@pytest.fixture(scope="module")
def outcomes() -> dict[SteadyCase, SteadyOutcome]:
    cases = [NEAR, FAR, FEW, LINE_RATE]
    conditions = SteadyConditions(seconds=0.05, warmup_s=0.03, step_ns=2_000)
    return dict(zip(cases, simulate_steady(cases, conditions), strict=True))


def test_the_queue_of_ten_flows_swings_more_at_50_us_than_at_1_us(
    outcomes: dict[SteadyCase, SteadyOutcome],
) -> None:
    near, far = outcomes[NEAR], outcomes[FAR]
    # `packet_steady` with the same constants, held echoes: 79 and 49 KB.
    assert near.queue_mean_bytes == pytest.approx(79_000, rel=0.35)
    assert far.queue_mean_bytes == pytest.approx(49_000, rel=0.35)
    assert near.empty < far.empty / 2
    assert near.utilisation > 0.98
    # CoNEXT 2016 calls this unstable (phase margin -6.58 degrees).
    assert far.oscillation.correlation > max(SWING_LEFT, near.oscillation.correlation)
    assert far.empty > 0.1
    assert 300 < far.oscillation.dominant_hz < 800


def test_where_echoes_are_forgotten_the_queue_settles_higher_up() -> None:
    (outcome,) = simulate_steady(
        [NEAR], SteadyConditions(seconds=0.05, warmup_s=0.03, step_ns=2_000, echo_holds=False)
    )
    # The fluid model's fixed point is 122.6 KB; single flows and whole packets lie above it.
    assert 100_000 < outcome.queue_mean_bytes < 190_000
    assert outcome.empty < 0.01
    assert outcome.utilisation == pytest.approx(1, abs=0.005)
    assert outcome.oscillation.correlation < 0.5


def test_flows_have_equal_shares_in_the_long_run(
    outcomes: dict[SteadyCase, SteadyOutcome],
) -> None:
    for outcome in outcomes.values():
        assert outcome.jain > 0.98
        # What the fluid model leaves out does not happen.
        assert outcome.hyper == 0


def test_a_start_at_line_rate_is_forgotten(outcomes: dict[SteadyCase, SteadyOutcome]) -> None:
    fair, line = outcomes[FEW], outcomes[LINE_RATE]
    assert line.queue_mean_bytes == pytest.approx(fair.queue_mean_bytes, rel=0.35)
    assert line.utilisation > 0.97


def test_ten_flows_under_timely_have_the_published_queue() -> None:
    parameters = TimelyParameters()
    (outcome,) = simulate_steady(
        [SteadyCase(10, 1_000)],
        SteadyConditions(parameters, seconds=0.1, warmup_s=0.1, step_ns=2_000),
    )
    # q* = q' + N delta q' / (beta C), q' = C T_low (CoNEXT 2016, equation 28): 140.6 KB.
    low_bytes = parameters.link_Bps * 50e-6
    fixed = low_bytes * (1 + 10 * parameters.delta_Bps / (0.008 * parameters.link_Bps))
    assert outcome.queue_mean_bytes == pytest.approx(fixed, rel=0.1)
    assert outcome.utilisation > 0.99
    assert outcome.jain > 0.98


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="without flows"):
        simulate_steady([], SteadyConditions())
    with pytest.raises(UsageError, match="whole steps"):
        SteadyConditions(step_ns=3_000)
    with pytest.raises(UsageError, match="above 0"):
        SteadyConditions(seconds=0)
