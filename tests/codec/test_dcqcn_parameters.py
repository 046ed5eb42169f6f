"""DCQCN parameters: presets against their sources, scaling, phases, prediction, refusals."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.congestion.dcqcn import (
    PRESETS,
    DcqcnParameters,
    LEAST_RATE_Bps,
    Phase,
    PhaseIncrease,
    REFERENCE_LINK_Bps,
    predicted_rate_Bps,
    preset,
    scaled,
)
from controller.errors import UsageError

PAPER, CONNECTX = PRESETS["paper"], PRESETS["connectx"]
RATES = ("rate_ai_Bps", "rate_hai_Bps", "min_rate_Bps", "first_cut_rate_Bps", "link_Bps")
TIMES = ("alpha_update_ns", "decrease_interval_ns", "timer_ns", "echo_interval_ns")


def gbit_Bps(gbit: float) -> float:
    return gbit * 1e9 / 8


def mbit(rate_Bps: float) -> float:
    return rate_Bps * 8 / 1e6


def test_paper_preset_has_the_constants_of_the_paper() -> None:
    assert pytest.approx(1 / 256) == PAPER.g
    assert (PAPER.alpha_update_ns, PAPER.timer_ns, PAPER.echo_interval_ns) == (
        55_000,
        55_000,
        50_000,
    )
    assert PAPER.byte_counter_bytes == 10_000_000
    assert PAPER.fast_recovery_steps == 5
    assert mbit(PAPER.rate_ai_Bps) == 40
    assert (PAPER.initial_alpha, PAPER.first_cut_rate_Bps) == (1, 0)
    assert mbit(PAPER.link_Bps) == 40_000


def test_connectx_preset_has_the_defaults_of_the_adapter() -> None:
    assert 1 - CONNECTX.g == pytest.approx(1019 / 1024)
    assert CONNECTX.initial_alpha == pytest.approx(1023 / 1024)
    assert (CONNECTX.alpha_update_ns, CONNECTX.decrease_interval_ns) == (1_000, 4_000)
    assert (CONNECTX.timer_ns, CONNECTX.byte_counter_bytes) == (300_000, 32_767)
    assert CONNECTX.fast_recovery_steps == 1
    assert mbit(CONNECTX.rate_ai_Bps) == 5
    assert mbit(CONNECTX.rate_hai_Bps) == 50
    assert mbit(CONNECTX.min_rate_Bps) == 1
    assert CONNECTX.min_decrease_factor == 0.5


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_at_the_reference_link_is_the_preset_itself(name: str) -> None:
    assert preset(name, REFERENCE_LINK_Bps) == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_above_the_reference_rates_and_bytes_follow_the_link_and_times_stay(name: str) -> None:
    base, fast = asdict(PRESETS[name]), asdict(preset(name, gbit_Bps(100)))
    for key in RATES:
        assert fast[key] == pytest.approx(2.5 * base[key])
    assert fast["byte_counter_bytes"] == round(2.5 * base["byte_counter_bytes"])
    for key in TIMES:
        assert fast[key] == base[key]


@pytest.mark.parametrize("name", PRESETS)
def test_below_the_reference_rates_follow_the_link_times_stretch_and_bytes_stay(name: str) -> None:
    base, slow = asdict(PRESETS[name]), asdict(preset(name, gbit_Bps(0.1)))
    for key in RATES:
        least = LEAST_RATE_Bps if key == "min_rate_Bps" else 0
        assert slow[key] == pytest.approx(max(base[key] / 400, least))
    assert slow["byte_counter_bytes"] == base["byte_counter_bytes"]
    for key in TIMES:
        assert slow[key] == 400 * base[key]


@pytest.mark.parametrize("name", PRESETS)
def test_numbers_without_unit_are_the_same_at_every_link_rate(name: str) -> None:
    for gbit in (0.01, 1, 25, 400):
        other, base = preset(name, gbit_Bps(gbit)), PRESETS[name]
        for key in ("g", "fast_recovery_steps", "min_decrease_factor", "initial_alpha"):
            assert getattr(other, key) == getattr(base, key)
        assert other.phase_steps == base.phase_steps


@given(st.floats(0.01, 800), st.floats(0.01, 800), st.sampled_from(sorted(PRESETS)))
def test_scaling_twice_is_scaling_once(first: float, second: float, name: str) -> None:
    # A minimum that no link here is too slow for.
    base = replace(PRESETS[name], min_rate_Bps=gbit_Bps(40) / 2, first_cut_rate_Bps=gbit_Bps(30))
    twice = asdict(scaled(scaled(base, gbit_Bps(first)), gbit_Bps(second)))
    once = asdict(scaled(base, gbit_Bps(second)))
    for key in (*RATES, *TIMES, "byte_counter_bytes"):
        # Nanoseconds (1000 and more of them) and bytes are rounded to whole ones in between.
        assert twice[key] == pytest.approx(once[key], rel=1e-12 if key in RATES else 1e-3)


def test_the_minimum_rate_lets_a_packet_go_within_the_qp_timeout_of_67_ms() -> None:
    packet_bytes = 14 + 20 + 8 + 12 + 16 + 4096 + 4  # RoCEv2 over IPv4: a WRITE's first
    for name in PRESETS:
        for gbit in (0.01, 0.1, 0.5, 1, 10, 25, 40, 400):
            rate_Bps = preset(name, gbit_Bps(gbit)).min_rate_Bps
            assert packet_bytes / rate_Bps < 4.096e-6 * 2**14
    assert preset("paper", gbit_Bps(0.1)).min_rate_Bps == pytest.approx(62_585, abs=1)
    # 40 Mb/s at 40 Gb/s: above the floor from 0.5 Gb/s on
    assert preset("paper", gbit_Bps(0.6)).min_rate_Bps == pytest.approx(gbit_Bps(0.6) / 1000)


def test_the_minimum_rate_is_never_above_the_link_nor_the_first_cut_below_the_minimum() -> None:
    slow = scaled(replace(PAPER, first_cut_rate_Bps=PAPER.min_rate_Bps), 1000.0)
    assert (slow.min_rate_Bps, slow.first_cut_rate_Bps, slow.link_Bps) == (1000, 1000, 1000)
    mid = scaled(replace(PAPER, first_cut_rate_Bps=PAPER.min_rate_Bps), gbit_Bps(0.1))
    assert mid.first_cut_rate_Bps == mid.min_rate_Bps == LEAST_RATE_Bps
    assert scaled(PAPER, 1000.0).first_cut_rate_Bps == 0


def test_scaling_keeps_what_was_changed_in_a_preset() -> None:
    changed = replace(PAPER, g=0.5, timer_ns=10_000, phase_steps=PhaseIncrease(idle=0))
    slow = scaled(changed, REFERENCE_LINK_Bps / 4)
    assert (slow.g, slow.timer_ns, slow.phase_steps.idle) == (0.5, 40_000, 0)


BAD_VALUES: list[tuple[str, Any, str]] = [
    ("g", 0, "2^-16 (0.0000153) .. 1"),
    ("g", 2**-17, "2^-16 (0.0000153) .. 1"),
    ("g", 1.01, "2^-16 (0.0000153) .. 1"),
    ("g", float("nan"), "2^-16 (0.0000153) .. 1"),
    ("initial_alpha", 0, "above 0, at most 1"),
    ("initial_alpha", 2, "above 0, at most 1"),
    ("min_decrease_factor", 1, "above 0, below 1"),
    ("min_decrease_factor", 0, "above 0, below 1"),
    ("alpha_update_ns", 0, "a whole number from 1"),
    ("timer_ns", 0, "a whole number from 1"),
    ("timer_ns", 1.5, "a whole number from 1"),
    ("timer_ns", True, "a whole number from 1"),
    ("decrease_interval_ns", -1, "a whole number from 0"),
    ("echo_interval_ns", -1, "a whole number from 0"),
    ("byte_counter_bytes", 0, "a whole number from 1"),
    ("fast_recovery_steps", 0, "a whole number from 1"),
    ("fast_recovery_steps", 32, "1 .. 31"),
    ("rate_ai_Bps", 0, "above 0 bytes/s, at most the link's 5e+09"),
    ("rate_ai_Bps", 6e9, "above 0 bytes/s, at most the link's 5e+09"),
    ("rate_hai_Bps", 1, "rate_ai_Bps (5e+06) or more"),
    ("rate_hai_Bps", 6e9, "above 0 bytes/s, at most the link's 5e+09"),
    ("min_rate_Bps", 0, "above 0 bytes/s, at most the link's 5e+09"),
    ("min_rate_Bps", float("inf"), "above 0 bytes/s, at most the link's 5e+09"),
    ("first_cut_rate_Bps", -1, "0 (cut from line rate) or 5e+06"),
    ("first_cut_rate_Bps", 6e9, "0 (cut from line rate) or 5e+06"),
    ("first_cut_rate_Bps", 1, "0 (cut from line rate) or 5e+06"),
    ("link_Bps", 0, "above 0 bytes/s"),
    ("link_Bps", "40gbit", "above 0 bytes/s"),
]


@pytest.mark.parametrize(("key", "value", "allowed"), BAD_VALUES)
def test_an_error_names_key_value_and_what_is_allowed(key: str, value: Any, allowed: str) -> None:
    with pytest.raises(UsageError) as caught:
        replace(PAPER, **{key: value})
    assert f"key {key} is {value!r}; allowed: {allowed}" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"g": 1},
        {"g": 2**-16},
        {"initial_alpha": 1},
        {"decrease_interval_ns": 0},
        {"echo_interval_ns": 0},
        {"fast_recovery_steps": 31},
        {"min_rate_Bps": 5e9},
        {"rate_ai_Bps": 5e9, "rate_hai_Bps": 5e9},
        {"first_cut_rate_Bps": 5e9},
        {"first_cut_rate_Bps": 5e6},
    ],
)
def test_the_ends_of_each_range_are_allowed(changes: dict[str, Any]) -> None:
    changed: DcqcnParameters = replace(PAPER, **changes)
    assert all(getattr(changed, key) == value for key, value in changes.items())


@pytest.mark.parametrize("link_Bps", [0, -1, float("nan"), float("inf")])
def test_scaling_to_no_link_rate_is_refused(link_Bps: float) -> None:
    with pytest.raises(UsageError, match="link_Bps"):
        scaled(PAPER, link_Bps)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="'cubic'; allowed: paper, connectx"):
        preset("cubic", gbit_Bps(40))


def test_phases_follow_the_share_of_expected_bytes() -> None:
    steps = PhaseIncrease()
    by_bytes = {sent: steps.phase(sent, 1000) for sent in (0, 99, 100, 899, 900, 1000, 5000)}
    assert by_bytes == {
        0: Phase.BEGIN,
        99: Phase.BEGIN,
        100: Phase.MIDDLE,
        899: Phase.MIDDLE,
        900: Phase.END,
        1000: Phase.END,
        5000: Phase.END,
    }
    assert steps.phase(0, 1000, in_window=False) is Phase.IDLE
    assert steps.phase(500, 0) is Phase.MIDDLE


def test_each_phase_has_its_own_multiplier_and_the_middle_is_plain_dcqcn() -> None:
    assert [PhaseIncrease().multiplier(phase) for phase in Phase] == [0.25, 2, 1, 0.5]
    other = PhaseIncrease(1, 2, 3, 4, begin_share=0.5, end_share=0.5)
    assert [other.multiplier(phase) for phase in Phase] == [1, 2, 3, 4]
    assert [other.phase(sent, 10) for sent in (4, 5)] == [Phase.BEGIN, Phase.END]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"idle": -0.1}, "phase_steps.idle is -0.1; allowed: 0 .. 16"),
        ({"begin": 17}, "phase_steps.begin is 17; allowed: 0 .. 16"),
        ({"middle": "1"}, "phase_steps.middle is '1'"),
        ({"end": float("nan")}, "phase_steps.end is nan"),
        ({"begin_share": 1.1}, "phase_steps.begin_share is 1.1; allowed: 0 .. 1"),
        ({"end_share": 0.05}, "phase_steps.end_share is 0.05; allowed: begin_share .. 1"),
    ],
)
def test_phase_steps_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        PhaseIncrease(**changes)
    assert message in str(caught.value)


def test_predicted_rate_finishes_the_compressed_bytes_of_all_flows_with_the_window() -> None:
    # 100 MB, halved, over 4 flows in 20 ms: 12.5 MB each.
    rate_Bps = predicted_rate_Bps(100e6, 0.5, 20_000_000, 4)
    assert rate_Bps == pytest.approx(625e6)
    assert rate_Bps * 0.020 * 4 == pytest.approx(100e6 * 0.5)


@pytest.mark.parametrize("key", ["expected_bytes", "compression_ratio", "window_ns", "flows"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_what_cannot_be_a_prediction_is_refused(key: str, value: float) -> None:
    good: dict[str, Any] = {
        "expected_bytes": 1e6,
        "compression_ratio": 1,
        "window_ns": 1_000_000,
        "flows": 1,
    }
    with pytest.raises(UsageError, match=f"{key} is {value!r}; allowed: above 0"):
        predicted_rate_Bps(**good | {key: value})
