"""Many reaction points as arrays, beside one flow and one event after the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from controller.congestion.dcqcn import PRESETS, DcqcnParameters, preset
from controller.congestion.flows import DcqcnFlows
from controller.congestion.reaction_point import ReactionPoint
from controller.errors import UsageError

PAPER = PRESETS["paper"]
LINK = PAPER.link_Bps
ALL = np.arange(4)


def positions(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def played_beside_the_yardstick(
    parameters: DcqcnParameters, seed: int, step_ns: int, told: float = 0.3, steps: int = 250
) -> tuple[DcqcnFlows, list[ReactionPoint]]:
    """The same random notifications, bytes, windows and multipliers to both, compared always."""
    random, flows = np.random.default_rng(seed), 12
    many = DcqcnFlows(parameters, (3, flows // 3))
    singles = [ReactionPoint(parameters) for _ in range(flows)]
    now_ns = 0
    for _ in range(steps):
        # Pauses let timers expire several times in one step.
        now_ns += step_ns * int(random.choice([1, 1, 1, 1, 40]))
        many.advance(now_ns)
        for single in singles:
            single.advance(now_ns)
        sending = np.flatnonzero(random.random(flows) < 0.6)
        # Above the byte counter of ConnectX (32,767 bytes) only now and then.
        nbytes = np.floor(random.exponential(parameters.byte_counter_bytes / 4, sending.size))
        nbytes = np.minimum(nbytes, parameters.byte_counter_bytes)
        many.sent(sending, nbytes)
        for flow, amount in zip(sending, nbytes, strict=True):
            singles[flow].sent(now_ns, int(amount))
        cut = np.flatnonzero(random.random(flows) < random.choice([told / 30, told]))
        many.notify(cut)
        for flow in cut:
            singles[flow].notify(now_ns)
        if random.random() < 0.05:
            begun = np.flatnonzero(random.random(flows) < 0.5)
            rates = random.choice([0.0, 0.1, 0.5, 1.2], begun.size) * parameters.link_Bps
            many.begin_window(begun, rates)
            for flow, rate_Bps in zip(begun, rates, strict=True):
                singles[flow].begin_window(now_ns, float(rate_Bps))
        if random.random() < 0.1:
            factors = random.choice([0.0, 0.25, 1.0, 2.0], flows)
            many.multipliers[:] = factors.reshape(many.multipliers.shape)
            for single, factor in zip(singles, factors, strict=True):
                single.phase_multiplier = float(factor)
        for name, theirs in (
            ("rc_Bps", many.rates_Bps), ("rt_Bps", many.targets_Bps), ("alpha", many.alphas()),
            ("limited", many.limited), ("timer_stage", many.timer_stages),
            ("byte_stage", many.byte_stages),
        ):  # fmt: skip
            ours = np.array([getattr(single, name) for single in singles])
            np.testing.assert_allclose(theirs.ravel(), ours, rtol=1e-9, atol=1e-15, err_msg=name)
    return many, singles


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("step_ns", [1_000, 5_000, 7_300])
def test_many_flows_do_what_each_would_do_alone(name: str, step_ns: int) -> None:
    for seed in range(2):
        many, singles = played_beside_the_yardstick(PRESETS[name], seed, step_ns)
        cuts = [single.counters.cuts for single in singles]
        assert many.cuts.ravel().tolist() == cuts
        assert sum(cuts) > 100
        hyper = [single.counters.hyper for single in singles]
        assert many.hyper_increases.ravel().tolist() == hyper


@pytest.mark.parametrize("link_Bps", [12.5e6, 12.5e9, 50e9])
def test_scaled_presets_agree_as_well(link_Bps: float) -> None:
    for name in PRESETS:
        played_beside_the_yardstick(preset(name, link_Bps), 1, 1_000, steps=100)


def test_a_first_cut_to_a_set_rate_agrees() -> None:
    many, _ = played_beside_the_yardstick(
        replace(PAPER, first_cut_rate_Bps=LINK / 8, decrease_interval_ns=4_000), 5, 1_000
    )
    assert many.cuts.sum() > 100


def test_hyper_increase_is_reached_and_agrees() -> None:
    often = replace(PAPER, byte_counter_bytes=20_000)
    many, _ = played_beside_the_yardstick(often, 7, 5_000, told=0.03)
    assert many.hyper_increases.sum() > 0


def test_bytes_of_several_counters_make_several_increases() -> None:
    flows = DcqcnFlows(PAPER, 4)
    flows.advance(1_000)
    flows.notify(ALL)
    flows.sent(positions(2), np.array([3.5 * PAPER.byte_counter_bytes]))
    assert flows.byte_stages.tolist() == [0, 0, 3, 0]
    assert flows.rates_Bps[2] == pytest.approx(LINK * (1 - 0.5 / 8))


def test_a_flow_that_nobody_told_of_congestion_stays_at_line_rate() -> None:
    flows = DcqcnFlows(PAPER, 4)
    flows.sent(ALL, np.full(4, 5e7))
    flows.advance(10**9)
    assert (flows.rates_Bps == LINK).all()
    assert not flows.limited.any()


def test_alpha_falls_to_nothing_in_a_long_silence_without_steps() -> None:
    flows = DcqcnFlows(PRESETS["connectx"], 4)
    flows.advance(1_000)
    flows.notify(ALL)
    flows.advance(3600 * 10**9)
    assert (flows.alphas() == 0).all()


def test_a_prediction_is_the_floor_of_the_target_in_a_cut() -> None:
    flows = DcqcnFlows(PAPER, 4)
    flows.advance(1_000)
    flows.begin_window(positions(1), np.array([LINK / 4]))
    flows.notify(positions(0, 1))
    flows.notify(positions(0, 1))
    assert flows.rates_Bps[1] == pytest.approx(LINK / 16)
    assert flows.targets_Bps[:2] == pytest.approx([LINK / 2, LINK / 4])


def test_a_reset_flow_is_a_new_one() -> None:
    flows = DcqcnFlows(PAPER, 4)
    flows.advance(1_000)
    flows.notify(ALL)
    flows.advance(100_000)
    flows.reset(positions(0, 3))
    assert flows.rates_Bps[0] == LINK > flows.rates_Bps[1]
    assert flows.alphas()[3] == PAPER.initial_alpha > flows.alphas()[1]
    flows.advance(10**9)
    assert flows.limited[1] or flows.rates_Bps[1] == LINK
    assert flows.cuts.tolist() == [0, 1, 1, 0]


def test_rates_are_set_within_what_is_possible() -> None:
    flows = DcqcnFlows(PAPER, 4)
    flows.set_rates(ALL, np.array([1.0, LINK / 3, 2 * LINK, LINK]))
    assert flows.rates_Bps.tolist() == [PAPER.min_rate_Bps, LINK / 3, LINK, LINK]
    assert flows.limited.tolist() == [True, True, False, False]
    with pytest.raises(UsageError, match="above 0"):
        flows.set_rates(positions(0), np.array([0.0]))


def test_time_does_not_go_back() -> None:
    flows = DcqcnFlows(PAPER, 4)
    flows.advance(1_000)
    with pytest.raises(ValueError, match="went back"):
        flows.advance(999)
