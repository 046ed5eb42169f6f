"""Laxity -> class: less time to spare, higher class, and no flapping."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.errors import UsageError
from controller.priority.jobs import JobPlan
from controller.priority.laxity import (
    DEFAULT_HYSTERESIS,
    DEFAULT_THRESHOLDS_ns,
    check_thresholds,
    class_of,
    laxity_ns,
    lowering_ns,
)

MS = 1_000_000
S = 1000 * MS
# A GiB within a second at a GiB/s: all of it is needed.
PLAN = JobPlan("train", 1 << 30, 5 * S, 6 * S, 9 * S, 1 << 30, 0)

LAXITIES = st.integers(-2 * S, 2 * S)
CLASSES = st.integers(0, 7)
HYSTERESES = st.integers(0, 256).map(lambda steps: steps / 256)
THRESHOLDS = st.lists(st.integers(1_000, S), min_size=7, max_size=7, unique=True).map(
    lambda values: tuple(sorted(values, reverse=True))
)


def test_laxity_is_the_time_that_is_left_over() -> None:
    assert laxity_ns(PLAN, 5 * S, 0) == 0
    assert laxity_ns(PLAN, 4 * S, 0) == S
    assert laxity_ns(PLAN, 5 * S, 1 << 29) == S // 2
    assert laxity_ns(PLAN, 7 * S, 0) == -2 * S
    # Nothing is left to send, or more went than was expected.
    assert laxity_ns(PLAN, 5 * S, 1 << 30) == laxity_ns(PLAN, 5 * S, 1 << 31) == S
    assert laxity_ns(replace(PLAN, compression_ratio=0.5), 5 * S, 0) == S // 2
    # A rate that nobody knows.
    assert laxity_ns(replace(PLAN, rate_Bps=0), 5 * S, 0) == S


@given(
    st.integers(1, 1 << 42),
    st.integers(1 << 20, 1 << 40),
    st.integers(0, 1 << 43),
    st.integers(0, 1 << 61),
)
def test_laxity_is_within_a_thousandth_of_the_exact_time_and_fits_64_bits(
    expected_bytes: int, rate_Bps: int, done: int, now_ns: int
) -> None:
    plan = replace(PLAN, expected_bytes=expected_bytes, rate_Bps=rate_Bps)
    needed_ns = max(0, expected_bytes - done) * S / rate_Bps
    found_ns = plan.deadline_ns - now_ns - laxity_ns(plan, now_ns, done)
    kib_ns = 1024 * S / rate_Bps
    assert found_ns == pytest.approx(needed_ns, rel=1e-3, abs=kib_ns + 1)
    assert -(1 << 63) <= laxity_ns(plan, now_ns, done) < 1 << 63


@pytest.mark.parametrize(
    ("laxity_ms", "expected"),
    [(900, 0), (500, 0), (499, 1), (200, 1), (199, 2), (99, 3), (49, 4), (19, 5), (9, 6), (5, 6),
     (4, 7), (0, 7), (-5, 7)],
)  # fmt: skip
def test_the_default_thresholds_in_ms(laxity_ms: int, expected: int) -> None:
    assert class_of(laxity_ms * MS, DEFAULT_THRESHOLDS_ns, 0) == expected


def test_a_class_is_left_downward_an_eighth_above_its_threshold() -> None:
    assert lowering_ns(DEFAULT_THRESHOLDS_ns, DEFAULT_HYSTERESIS)[3] == pytest.approx(
        56.25 * MS, abs=256
    )
    assert class_of(50 * MS, DEFAULT_THRESHOLDS_ns, 4) == 4
    assert class_of(56 * MS, DEFAULT_THRESHOLDS_ns, 4) == 4
    assert class_of(57 * MS, DEFAULT_THRESHOLDS_ns, 4) == 3
    # Straight down, and up, over several classes.
    assert class_of(900 * MS, DEFAULT_THRESHOLDS_ns, 7) == 0
    assert class_of(105 * MS, DEFAULT_THRESHOLDS_ns, 7) == 3
    assert class_of(1 * MS, DEFAULT_THRESHOLDS_ns, 0) == 7


def test_floor_and_ceiling_hold() -> None:
    assert class_of(-S, DEFAULT_THRESHOLDS_ns, 0, ceiling=6) == 6
    assert class_of(S, DEFAULT_THRESHOLDS_ns, 5, floor=2) == 2


@given(LAXITIES, THRESHOLDS, CLASSES, HYSTERESES, CLASSES, CLASSES)
def test_the_class_is_one_of_the_count_and_the_count_with_the_band(
    laxity: int, thresholds: tuple[int, ...], current: int, hysteresis: float, a: int, b: int
) -> None:
    """The other way to say it, which the dataplane uses: a band on the thresholds at and below."""
    check_thresholds(thresholds, hysteresis)
    floor, ceiling = sorted((a, b))
    counted = sum(
        laxity < (band if current > number else plain)
        for number, (plain, band) in enumerate(
            zip(thresholds, lowering_ns(thresholds, hysteresis), strict=True)
        )
    )
    expected = min(max(counted, floor), ceiling)
    assert class_of(laxity, thresholds, current, hysteresis, floor, ceiling) == expected


@given(st.lists(LAXITIES, min_size=2, max_size=20), THRESHOLDS, CLASSES, HYSTERESES)
def test_less_laxity_never_means_a_lower_class(
    laxities: list[int], thresholds: tuple[int, ...], current: int, hysteresis: float
) -> None:
    classes = [class_of(each, thresholds, current, hysteresis) for each in sorted(laxities)]
    assert all(more >= less for more, less in pairwise(classes))


@given(st.data(), THRESHOLDS, CLASSES, HYSTERESES)
def test_inside_the_band_of_its_class_a_flow_does_not_flap(
    data: st.DataObject, thresholds: tuple[int, ...], start: int, hysteresis: float
) -> None:
    """Once a flow has risen to a class, laxities up to that class's band keep it there."""
    number = data.draw(st.integers(0, 6))
    low = thresholds[number + 1] if number < 6 else -S
    high = lowering_ns(thresholds, hysteresis)[number] - 1
    risen = class_of(thresholds[number] - 1, thresholds, start, hysteresis)
    assert risen >= number + 1
    current = risen
    for laxity in data.draw(st.lists(st.integers(low, high), max_size=30)):
        current = class_of(laxity, thresholds, current, hysteresis)
        assert number + 1 <= current <= risen


@given(LAXITIES, THRESHOLDS, CLASSES, HYSTERESES)
def test_the_same_laxity_again_changes_nothing(
    laxity: int, thresholds: tuple[int, ...], current: int, hysteresis: float
) -> None:
    first = class_of(laxity, thresholds, current, hysteresis)
    assert class_of(laxity, thresholds, first, hysteresis) == first


@pytest.mark.parametrize(
    ("thresholds_ms", "hysteresis", "words"),
    [
        ((5, 4, 3, 2, 1), 0.1, ["has 5 thresholds", "7"]),
        ((7, 6, 5, 4, 3, 2, 0), 0.1, ["class 7", "is 0"]),
        ((7, 6, 5, 4, 3, 2, 2), 0.1, ["class 7 is 2000000 ns", "not below class 6's 2000000"]),
        ((7, 8, 5, 4, 3, 2, 1), 0.1, ["class 2 is 8000000 ns"]),
        ((7, 6, 5, 4, 3, 2, 1), 1.1, ["hysteresis is 1.1", "0 .. 1"]),
        ((7, 6, 5, 4, 3, 2, 1), math.nan, ["hysteresis is nan"]),
    ],
)
def test_thresholds_that_cannot_work_are_refused(
    thresholds_ms: tuple[int, ...], hysteresis: float, words: list[str]
) -> None:
    check_thresholds(DEFAULT_THRESHOLDS_ns, DEFAULT_HYSTERESIS)
    with pytest.raises(UsageError) as caught:
        check_thresholds([value * MS for value in thresholds_ms], hysteresis)
    for word in words:
        assert word in caught.value.message
