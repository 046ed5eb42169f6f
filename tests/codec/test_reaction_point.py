"""DCQCN's reaction point: closed forms, properties over random events, dilation of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.congestion.dcqcn import PRESETS, DcqcnParameters, preset, scaled
from controller.congestion.reaction_point import RELEASE_SHARE, ReactionCounters, ReactionPoint

PAPER = PRESETS["paper"]
LINK, TIMER, F = PAPER.link_Bps, PAPER.timer_ns, PAPER.fast_recovery_steps
B, R_AI, R_HAI = PAPER.byte_counter_bytes, PAPER.rate_ai_Bps, PAPER.rate_hai_Bps
T0 = 1_000_000  # when the first notification comes


def cut(parameters: DcqcnParameters = PAPER, times: int = 1) -> ReactionPoint:
    """A flow whose last of `times` cuts, one nanosecond apart, was at T0."""
    flow = ReactionPoint(replace(parameters, decrease_interval_ns=0))
    for number in range(times):
        assert flow.notify(T0 - times + 1 + number)
    return flow


def test_before_the_first_notification_a_flow_is_unlimited() -> None:
    flow = ReactionPoint(PAPER)
    flow.sent(10 * TIMER, 3 * B)
    flow.advance(10**9)
    assert (flow.rc_Bps, flow.rt_Bps, flow.alpha, flow.limited) == (LINK, LINK, 1, False)
    assert (flow.timer_stage, flow.byte_stage) == (0, 0)
    assert flow.counters == ReactionCounters()


def test_the_first_notification_halves_the_rate() -> None:
    flow = cut()
    assert (flow.rc_Bps, flow.rt_Bps, flow.limited) == (LINK / 2, LINK, True)
    assert flow.alpha == 1  # (1 - g) 1 + g


def test_a_cut_takes_half_of_alpha_off_and_then_raises_alpha() -> None:
    flow = cut(replace(PAPER, initial_alpha=0.25))
    assert flow.rc_Bps == pytest.approx(LINK * (1 - 0.125))
    assert flow.alpha == pytest.approx(0.25 * 255 / 256 + 1 / 256)


def test_alpha_decays_by_one_minus_g_for_each_whole_update_period() -> None:
    for periods in (0, 1, 2, 17, 300):
        start = cut().alpha
        for extra_ns in (0, PAPER.alpha_update_ns - 1):
            flow = cut()
            flow.advance(T0 + periods * PAPER.alpha_update_ns + extra_ns)
            assert flow.alpha == pytest.approx(start * (1 - PAPER.g) ** periods, rel=1e-12)


def test_a_cut_restarts_the_alpha_timer() -> None:
    flow = cut()
    again = T0 + PAPER.alpha_update_ns - 1
    flow.notify(again)
    alpha = flow.alpha
    flow.advance(again + PAPER.alpha_update_ns - 1)
    assert flow.alpha == alpha
    flow.advance(again + PAPER.alpha_update_ns)
    assert flow.alpha == pytest.approx(alpha * (1 - PAPER.g))


def test_long_silence_takes_alpha_to_nothing_and_the_next_cut_hardly_cuts() -> None:
    flow = cut(preset("connectx", LINK))
    flow.advance(T0 + 3600 * 10**9)  # 3.6e9 periods: must not be stepped through
    assert flow.alpha == 0
    flow.notify(T0 + 3600 * 10**9)
    assert (flow.rc_Bps, flow.limited) == (LINK, False)
    assert flow.alpha == pytest.approx(5 / 1024)
    assert flow.counters.cuts == 2


def test_a_cut_by_less_than_the_release_margin_leaves_the_flow_unlimited() -> None:
    for alpha, limited in ((1.9 / 2897, False), (2.1 / 2897, True)):
        flow = cut(replace(PAPER, initial_alpha=alpha))
        assert flow.limited == limited
        assert flow.rc_Bps == (pytest.approx(LINK * (1 - alpha / 2)) if limited else LINK)
        assert flow.counters.released == 0


def test_fast_recovery_halves_the_distance_to_the_target_with_each_expiry() -> None:
    for expiries in range(F + 1):
        flow = cut()
        flow.advance(T0 + expiries * TIMER)
        assert flow.rc_Bps == pytest.approx(LINK - (LINK - LINK / 2) / 2**expiries)
        assert (flow.rt_Bps, flow.timer_stage) == (LINK, expiries)
        assert flow.counters.fast_recovery == expiries


def test_a_timer_expires_at_its_nanosecond_and_not_before() -> None:
    flow = cut()
    flow.advance(T0 + TIMER - 1)
    assert flow.timer_stage == 0
    flow.advance(T0 + TIMER)
    assert flow.timer_stage == 1


def test_after_f_expiries_the_target_grows_by_one_additive_step_each() -> None:
    flow = cut(times=5)  # far below the link
    target, rate = flow.rt_Bps, flow.rc_Bps
    flow.advance(T0 + F * TIMER)
    assert flow.rt_Bps == target
    for _ in range(F):
        rate = (target + rate) / 2
    for expiry in range(F + 1, 4 * F + 1):
        flow.advance(T0 + expiry * TIMER)
        target += R_AI
        rate = (target + rate) / 2
        assert flow.rt_Bps == pytest.approx(target)
        assert flow.rc_Bps == pytest.approx(rate)
    assert flow.counters.additive == 3 * F
    assert flow.counters.hyper == 0


def test_additive_increase_settles_at_one_step_behind_the_target() -> None:
    flow = cut(times=6)
    flow.advance(T0 + 60 * TIMER)
    assert flow.rt_Bps - flow.rc_Bps == pytest.approx(R_AI, rel=1e-6)


def test_hyper_increase_needs_both_counters_beyond_f_and_grows_with_the_lesser() -> None:
    flow = cut(times=8)
    flow.advance(T0 + (F + 3) * TIMER)  # T = F + 3: additive as long as BC lags
    now = T0 + (F + 3) * TIMER
    for events in range(1, F + 1):
        before = flow.rt_Bps
        flow.sent(now, B)
        assert flow.byte_stage == events
        assert flow.rt_Bps == pytest.approx(before + R_AI)
    for step in (1, 2, 3):  # BC = F + step
        before = flow.rt_Bps
        flow.sent(now, B)
        assert flow.rt_Bps == pytest.approx(before + step * R_HAI)
    before = flow.rt_Bps
    flow.sent(now, B)  # BC = F + 4, T still F + 3
    assert flow.rt_Bps == pytest.approx(before + 3 * R_HAI)
    assert flow.counters.hyper == 4


def test_bytes_recover_as_the_timer_does() -> None:
    by_bytes, by_time = cut(), cut()
    for event in range(1, 3 * F):
        by_bytes.sent(T0, B)
        by_time.advance(T0 + event * TIMER)
        assert (by_bytes.rc_Bps, by_bytes.rt_Bps) == (by_time.rc_Bps, by_time.rt_Bps)


def test_bytes_are_counted_exactly_and_one_event_a_call() -> None:
    flow = cut()
    flow.sent(T0, B - 1)
    assert flow.byte_stage == 0
    flow.sent(T0, 1)
    assert flow.byte_stage == 1
    flow.sent(T0, 3 * B)
    assert flow.byte_stage == 2
    flow.sent(T0, 0)
    flow.sent(T0, 0)
    flow.sent(T0, 0)
    assert flow.byte_stage == 4


def test_timer_expiries_come_before_the_bytes_of_the_same_moment() -> None:
    flow = cut(replace(PAPER, fast_recovery_steps=2), times=4)
    target = flow.rt_Bps
    flow.advance(T0 + 2 * TIMER)
    # T = 3 adds, then BC = 1 adds. Bytes first, T = 2 and BC = 1 would have been a recovery.
    flow.sent(T0 + 3 * TIMER, B)
    assert flow.rt_Bps == pytest.approx(target + 2 * R_AI)


def test_a_cut_resets_stages_bytes_and_the_timer() -> None:
    flow = cut(times=3)
    flow.sent(T0 + 2 * TIMER, B + B // 2)
    assert (flow.timer_stage, flow.byte_stage) == (2, 1)
    again = T0 + 2 * TIMER + TIMER // 2
    rate = flow.rc_Bps
    flow.notify(again)
    assert (flow.timer_stage, flow.byte_stage, flow.rt_Bps) == (0, 0, rate)
    flow.sent(again + TIMER - 1, B // 2)
    assert (flow.timer_stage, flow.byte_stage) == (0, 0)
    flow.advance(again + TIMER)
    assert flow.timer_stage == 1


def test_within_the_decrease_interval_a_notification_changes_nothing_but_its_count() -> None:
    parameters = preset("connectx", LINK)
    flow, silent = ReactionPoint(parameters), ReactionPoint(parameters)
    assert flow.notify(T0)
    assert silent.notify(T0)
    too_soon = T0 + parameters.decrease_interval_ns - 1
    assert not flow.notify(too_soon)
    silent.advance(too_soon)
    assert (flow.rc_Bps, flow.rt_Bps, flow.alpha) == (silent.rc_Bps, silent.rt_Bps, silent.alpha)
    assert flow.notify(T0 + parameters.decrease_interval_ns)
    assert (flow.counters.cuts, flow.counters.suppressed) == (2, 1)


def test_a_cut_leaves_the_minimum_share_and_the_minimum_rate() -> None:
    flow = cut(replace(PAPER, min_decrease_factor=0.8))
    assert flow.rc_Bps == pytest.approx(0.8 * LINK)
    for _ in range(100):
        flow.notify(T0)
    assert flow.rc_Bps == PAPER.min_rate_Bps


def test_a_first_cut_rate_is_set_for_both_rates_of_an_unlimited_flow_only() -> None:
    flow = cut(replace(PAPER, first_cut_rate_Bps=0.3 * LINK))
    assert (flow.rc_Bps, flow.rt_Bps) == (0.3 * LINK, 0.3 * LINK)
    flow.notify(T0 + 1)
    assert (flow.rc_Bps, flow.rt_Bps) == (0.15 * LINK, 0.3 * LINK)


def test_near_line_rate_the_flow_is_released_until_the_next_notification() -> None:
    flow = cut()
    # 1/2 + 1/4 + ...: after 10 expiries 1/2048 of the link is missing (the target is the link).
    flow.advance(T0 + 10 * TIMER)
    assert flow.rc_Bps == pytest.approx(LINK * (1 - 2**-11))
    assert flow.limited
    flow.advance(T0 + 11 * TIMER)
    assert (flow.rc_Bps, flow.rt_Bps, flow.limited) == (LINK, LINK, False)
    assert (flow.timer_stage, flow.counters.released) == (0, 1)
    flow.sent(T0 + 50 * TIMER, 5 * B)
    assert (flow.timer_stage, flow.byte_stage) == (0, 0)
    flow.notify(T0 + 100 * TIMER)
    alpha = (1 - PAPER.g) ** 100  # decayed all the while, although the flow was free
    assert flow.rc_Bps == pytest.approx(LINK * (1 - alpha / 2))
    assert flow.alpha == pytest.approx(alpha * (1 - PAPER.g) + PAPER.g)


def test_a_window_starts_at_the_predicted_rate_and_keeps_alpha() -> None:
    flow = cut(times=3)
    flow.sent(T0 + TIMER, B)
    alpha = flow.alpha
    flow.begin_window(T0 + TIMER, 0.2 * LINK)
    assert (flow.rc_Bps, flow.rt_Bps, flow.alpha) == (0.2 * LINK, 0.2 * LINK, alpha)
    assert (flow.timer_stage, flow.byte_stage, flow.counters.windows) == (0, 0, 1)
    flow.advance(T0 + (2 + F) * TIMER)  # the first step beyond fast recovery
    assert flow.rt_Bps == pytest.approx(0.2 * LINK + R_AI)


def test_a_window_limits_a_flow_that_was_free_and_frees_one_predicted_at_line_rate() -> None:
    flow = ReactionPoint(PAPER)
    flow.begin_window(T0, 0.5 * LINK)
    assert (flow.rc_Bps, flow.limited) == (0.5 * LINK, True)
    flow.begin_window(T0, 2 * LINK)
    assert (flow.rc_Bps, flow.rt_Bps, flow.limited) == (LINK, LINK, False)
    assert flow.counters.released == 0


def test_a_prediction_beyond_the_link_or_below_the_minimum_counts_as_these() -> None:
    flow = ReactionPoint(PAPER)
    flow.begin_window(T0, 2 * LINK)
    flow.notify(T0)
    assert (flow.rc_Bps, flow.rt_Bps) == (LINK / 2, LINK)
    flow.begin_window(T0, PAPER.min_rate_Bps / 2)
    assert (flow.rc_Bps, flow.rt_Bps) == (PAPER.min_rate_Bps, PAPER.min_rate_Bps)


def test_the_prediction_is_a_floor_of_the_target_but_not_of_the_rate() -> None:
    flow = ReactionPoint(PAPER)
    flow.begin_window(T0, 0.5 * LINK)
    for expected in (0.25, 0.125):
        flow.notify(T0)
        assert flow.rc_Bps == pytest.approx(expected * LINK)
        assert flow.rt_Bps == 0.5 * LINK
    assert flow.counters.floored == 1  # the first cut's own target was the prediction
    flow.advance(T0 + TIMER)
    assert flow.rc_Bps == pytest.approx((0.5 + 0.125) / 2 * LINK)


def test_a_window_without_prediction_changes_no_rate_and_ends_the_floor() -> None:
    flow = ReactionPoint(PAPER)
    flow.begin_window(T0, 0.5 * LINK)
    flow.notify(T0)
    flow.begin_window(T0, 0)
    assert flow.rc_Bps == 0.25 * LINK
    flow.notify(T0)
    assert (flow.rt_Bps, flow.counters.windows) == (0.25 * LINK, 1)


def test_the_phase_multiplies_additive_and_hyper_steps() -> None:
    flow = cut(times=9)
    flow.phase_multiplier = 0.5
    flow.advance(T0 + F * TIMER)
    before = flow.rt_Bps
    flow.advance(T0 + (F + 1) * TIMER)
    assert flow.rt_Bps == pytest.approx(before + 0.5 * R_AI)
    flow.phase_multiplier = 2
    flow.advance(T0 + (F + 2) * TIMER)
    assert flow.rt_Bps == pytest.approx(before + 2.5 * R_AI)
    for _ in range(F):
        flow.sent(T0 + (F + 2) * TIMER, B)
    before = flow.rt_Bps
    flow.sent(T0 + (F + 2) * TIMER, B)
    assert flow.rt_Bps == pytest.approx(before + 2 * R_HAI)


def test_time_that_goes_back_is_an_error() -> None:
    flow = cut()
    with pytest.raises(ValueError, match="time went back from 1000000 to 999999 ns"):
        flow.advance(T0 - 1)


# Random histories: (time since the event before, kind, amount).
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 400_000), st.just("notify"), st.just(0)),
        st.tuples(st.integers(0, 40_000), st.just("sent"), st.integers(1, 3 * B)),
        st.tuples(st.integers(0, 3_000_000), st.just("advance"), st.just(0)),
        st.tuples(st.integers(0, 400_000), st.just("window"), st.integers(0, 1000)),
    ),
    max_size=60,
)
Event = tuple[int, str, int]


def play(flow: ReactionPoint, events: Sequence[Event], stretch: int = 1) -> list[tuple[float, ...]]:
    """Rc/C, Rt/C and alpha after each event; times are multiplied by `stretch`."""
    now = 0
    seen: list[tuple[float, ...]] = []
    link = flow.parameters.link_Bps
    for gap_ns, kind, amount in events:
        now += gap_ns * stretch
        if kind == "notify":
            flow.notify(now)
        elif kind == "sent":
            flow.sent(now, amount)
        elif kind == "window":
            flow.begin_window(now, amount / 900 * link)
        else:
            flow.advance(now)
        seen.append((flow.rc_Bps / link, flow.rt_Bps / link, flow.alpha))
    return seen


@given(EVENTS, st.sampled_from(sorted(PRESETS)))
def test_rates_stay_between_minimum_target_and_link(events: list[Event], name: str) -> None:
    parameters = PRESETS[name]
    flow = ReactionPoint(parameters)
    for rc, rt, alpha in play(flow, events):
        assert parameters.min_rate_Bps / LINK <= rc <= rt <= 1
        assert 0 <= alpha <= 1
        # Free flows, and only they, are at line rate; none is left between there and the link.
        assert rc == 1 or rc < RELEASE_SHARE
    assert flow.limited == (flow.rc_Bps < LINK)


@given(EVENTS, st.lists(st.integers(1, 300_000), min_size=1, max_size=40))
def test_without_marks_rates_never_fall_and_alpha_never_rises(
    events: list[Event], gaps_ns: list[int]
) -> None:
    flow = ReactionPoint(PAPER)
    play(flow, events)
    now = sum(gap_ns for gap_ns, _, _ in events)
    before = (flow.rc_Bps, flow.rt_Bps, -flow.alpha)
    for gap_ns in gaps_ns:
        now += gap_ns
        flow.sent(now, B // 3)
        after = (flow.rc_Bps, flow.rt_Bps, -flow.alpha)
        assert all(new >= old for new, old in zip(after, before, strict=True))
        before = after
    flow.advance(now + 2 * round(LINK / R_AI) * TIMER)
    assert flow.rc_Bps == LINK


@given(EVENTS, st.sampled_from(sorted(PRESETS)))
def test_a_link_400_times_slower_runs_the_same_curves_400_times_slower(
    events: list[Event], name: str
) -> None:
    fast = play(ReactionPoint(PRESETS[name]), events)
    # Without the floor that a preset's minimum has on slow links.
    parameters = replace(preset(name, LINK / 400), min_rate_Bps=PRESETS[name].min_rate_Bps / 400)
    slow = play(ReactionPoint(parameters), events, stretch=400)
    for one, other in zip(fast, slow, strict=True):
        assert one == pytest.approx(other, rel=1e-9)


@given(EVENTS)
def test_a_link_4_times_faster_runs_the_same_curves_with_4_times_the_bytes(
    events: list[Event],
) -> None:
    base = play(ReactionPoint(PAPER), events)
    more = [(gap, kind, 4 * n if kind == "sent" else n) for gap, kind, n in events]
    fast = play(ReactionPoint(scaled(PAPER, 4 * LINK)), more)
    for one, other in zip(base, fast, strict=True):
        assert one == pytest.approx(other, rel=1e-9)


@given(EVENTS)
def test_looking_more_often_changes_nothing(events: list[Event]) -> None:
    finer: list[Event] = []
    for gap_ns, kind, amount in events:
        finer += [(gap_ns // 3, "advance", 0), (gap_ns - gap_ns // 3, kind, amount)]
    assert play(ReactionPoint(PAPER), events) == play(ReactionPoint(PAPER), finer)[1::2]
