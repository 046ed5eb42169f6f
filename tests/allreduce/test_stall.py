"""Who is at fault when operations stand still."""

from __future__ import annotations

from typing import Any

import pytest

from controller.allreduce.stall import culprits, from_json, to_json

DATA, CALL = "2 of its 8 messages are missing", "has not called it"


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_at_fault_is_whom_others_wait_for_and_who_does_not_wait(rank: int) -> None:
    assert culprits({0: {3: DATA}, 1: {0: DATA}, 2: {1: DATA}}, rank, 4) == {3: DATA}


def test_a_missing_call_says_more_than_missing_data() -> None:
    assert culprits({0: {3: CALL}, 2: {3: DATA}}, 2, 4) == {3: CALL}


def test_who_has_not_called_is_at_fault_although_it_answers() -> None:
    assert culprits({0: {2: DATA}, 1: {}, 2: {1: CALL}}, 0, 3) == {1: CALL}


def test_several_may_be_at_fault() -> None:
    assert culprits({0: {3: CALL, 1: DATA}, 1: {2: DATA}}, 1, 4) == {2: DATA, 3: CALL}


def test_in_a_circle_all_that_is_waited_for_is_named() -> None:
    assert culprits({0: {1: DATA}, 1: {0: DATA}}, 0, 2) == {0: DATA, 1: DATA}
    assert culprits({0: {}}, 0, 2) == {}


def test_rank_0_is_at_fault_when_it_relays_no_report() -> None:
    assert list(culprits({2: {1: DATA}}, 2, 3)) == [0]
    assert culprits({2: {0: CALL}}, 2, 3) == {0: CALL}
    assert culprits({1: {0: DATA}}, 1, 2) == {0: DATA}


def test_a_report_is_read_as_it_was_written() -> None:
    assert from_json(to_json({3: DATA, 0: CALL}), 4) == {3: DATA, 0: CALL}


@pytest.mark.parametrize(
    "document", [None, 7, [], {"4": DATA}, {"-1": DATA}, {"x": DATA}, {"1": 5}, {1: DATA},
                 {"9" * 100: DATA}, {"²": DATA}],
)  # fmt: skip
def test_what_is_no_report_of_this_group_is_left_out(document: Any) -> None:
    assert from_json(document, 4) == {}


def test_a_text_is_cut() -> None:
    assert len(from_json({"1": "x" * 10_000}, 4)[1]) == 200
