"""Traffic classes: what is allowed, alone and together, and which thresholds hold on a link."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.errors import UsageError
from controller.priority.classes import (
    TrafficClass,
    change,
    default_classes,
    thresholds,
    validate,
)

GBIT_Bps = 125_000_000


def test_the_default_classes_are_valid_and_leave_more_than_half_of_the_link_free() -> None:
    classes = default_classes()
    validate(classes)
    assert [entry.dscp for entry in classes] == [8, 0, 10, 18, 26, 34, 40, 48]
    assert [entry.priority for entry in classes] == list(range(8))
    assert all(entry.floor_share > 0 for entry in classes)
    assert sum(entry.floor_share for entry in classes) == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dscp": 64}, ["Class 2", "dscp is 64", "0 .. 63"]),
        ({"dscp": -1}, ["dscp is -1", "0 .. 63"]),
        ({"dscp": True}, ["dscp is True", "0 .. 63"]),
        ({"priority": 16}, ["priority is 16", "0 .. 15"]),
        ({"priority": "high"}, ["priority is 'high'"]),
        ({"pmax": 0}, ["pmax is 0", "above 0 .. 1"]),
        ({"pmax": 1.01}, ["pmax is 1.01"]),
        ({"pmax": math.nan}, ["pmax is nan"]),
        ({"ceiling_share": 0}, ["ceiling is 0", "above 0 .. 1"]),
        ({"ceiling_share": 1.5}, ["ceiling is 1.5"]),
        ({"floor_share": -0.1}, ["floor is -0.1", "0 .. 1"]),
        ({"floor_share": 0.5, "ceiling_share": 0.4}, ["floor 0.5", "above ceiling 0.4"]),
        ({"kmin_bytes": 5}, ["kmin is given and kmax is not"]),
        ({"kmax_bytes": 5}, ["kmax is given and kmin is not"]),
        ({"kmin_bytes": 6, "kmax_bytes": 5}, ["kmin 6 is above kmax 5"]),
        ({"kmin_bytes": 0, "kmax_bytes": (1 << 31) + 1}, ["kmax is 2147483649"]),
        ({"dscp": 26}, ["Classes 2 and 4", "dscp 26", "1, 2, 3, 4"]),
        ({"floor_share": 0.7}, ["110% of the link", "0.7", "100 %"]),
    ],
)
def test_a_wrong_change_is_refused_with_what_is_allowed(
    fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        change(default_classes(), 2, **fields)
    for word in words:
        assert word in caught.value.message


def test_a_change_changes_one_class_and_not_the_classes_it_was_given() -> None:
    before = default_classes()
    after = change(before, 5, dscp=1, kmin_bytes=0, kmax_bytes=0, pmax=1.0)
    assert after[5] == replace(before[5], dscp=1, kmin_bytes=0, kmax_bytes=0, pmax=1.0)
    assert [after[i] for i in range(8) if i != 5] == [before[i] for i in range(8) if i != 5]
    assert before == default_classes()


@pytest.mark.parametrize("number", [-1, 8, None, "3"])
def test_a_class_that_does_not_exist_cannot_be_changed(number: Any) -> None:
    with pytest.raises(UsageError, match=r"0 \.\. 7"):
        change(default_classes(), number, dscp=1)


def test_the_eight_classes_are_each_there_once() -> None:
    classes = default_classes()
    for wrong in (classes[:7], classes[1:], (*classes[:7], replace(classes[0], dscp=5))):
        with pytest.raises(UsageError, match=r"allowed: 0 \.\. 7, each once"):
            validate(wrong)


def test_floors_of_exactly_the_whole_link_are_allowed() -> None:
    validate([replace(entry, floor_share=0.125) for entry in default_classes()])
    # Ten decimal tenths are not 1 in binary.
    floors = (0.1,) * 6 + (0.3, 0.1)
    validate([replace(e, floor_share=f) for e, f in zip(default_classes(), floors, strict=True)])


@pytest.mark.parametrize(
    ("link_Bps", "expected"),
    [
        (100e6 / 8, (5_000, 200_000, 0.01)),
        (25 * GBIT_Bps, (5_000, 200_000, 0.01)),
        (40 * GBIT_Bps, (5_000, 200_000, 0.01)),
        (100 * GBIT_Bps, (12_500, 500_000, 0.01)),
        (400 * GBIT_Bps, (50_000, 2_000_000, 0.01)),
    ],
)
def test_thresholds_are_the_papers_up_to_40_gbit_and_grow_with_the_link_above(
    link_Bps: float, expected: tuple[int, int, float]
) -> None:
    assert thresholds(default_classes()[3], link_Bps) == expected


def test_thresholds_that_a_class_names_hold_on_any_link() -> None:
    entry = replace(default_classes()[3], kmin_bytes=1, kmax_bytes=2, pmax=0.2)
    assert thresholds(entry, 1000) == thresholds(entry, 400 * GBIT_Bps) == (1, 2, 0.2)


@given(st.lists(st.integers(0, 63), min_size=8, max_size=8))
def test_classes_are_valid_exactly_when_their_dscps_differ(dscps: list[int]) -> None:
    classes = [replace(e, dscp=d) for e, d in zip(default_classes(), dscps, strict=True)]
    if len(set(dscps)) == 8:
        validate(classes)
    else:
        with pytest.raises(UsageError, match="both have dscp"):
            validate(classes)


def test_classes_survive_the_state_file() -> None:
    classes = change(default_classes(), 0, kmin_bytes=10, kmax_bytes=20, ceiling_share=0.5)
    text = json.dumps([entry.to_json() for entry in classes])
    assert tuple(TrafficClass.from_json(entry) for entry in json.loads(text)) == classes
