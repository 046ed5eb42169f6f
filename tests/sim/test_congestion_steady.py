"""Long flows: equal shares, a full link, and a queue that settles or swings by the delay."""

from __future__ import annotations

import pytest

from controller.errors import UsageError
from controller.sim.congestion.steady import (
    SteadyCase,
    SteadyConditions,
    SteadyOutcome,
    simulate_steady,
)

NEAR, FAR = SteadyCase(10, 1_000), SteadyCase(10, 50_000)
FEW, LINE_RATE = SteadyCase(2, 1_000), SteadyCase(2, 1_000, start=2.0)


@pytest.fixture(scope="module")
def outcomes() -> dict[SteadyCase, SteadyOutcome]:
    cases = [NEAR, FAR, FEW, LINE_RATE]
    conditions = SteadyConditions(seconds=0.05, warmup_s=0.03, step_ns=2_000)
    return dict(zip(cases, simulate_steady(cases, conditions), strict=True))


def test_the_queue_of_ten_flows_settles_at_1_us_and_swings_at_50_us(
    outcomes: dict[SteadyCase, SteadyOutcome],
) -> None:
    near, far = outcomes[NEAR], outcomes[FAR]
    # The fluid model's fixed point is 122.6 KB; single flows and whole packets lie above it.
    assert 100_000 < near.queue_mean_bytes < 190_000
    assert near.empty < 0.01
    assert near.utilisation == pytest.approx(1, abs=0.005)
    assert near.oscillation.correlation < 0.6
    # CoNEXT 2016 calls this unstable (phase margin -6.58 degrees).
    assert far.oscillation.correlation > 0.7
    assert far.empty > 0.1
    assert far.queue_std_bytes > 1.5 * near.queue_std_bytes
    assert 300 < far.oscillation.dominant_hz < 800


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


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="without flows"):
        simulate_steady([], SteadyConditions())
    with pytest.raises(UsageError, match="whole steps"):
        SteadyConditions(step_ns=3_000)
    with pytest.raises(UsageError, match="above 0"):
        SteadyConditions(seconds=0)
