"""What ranks agree about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controller.allreduce import schedule
from controller.allreduce.calls import ALGORITHM_NUMBERS, Call, difference, plan_call
from controller.allreduce.reduction import DType, Op
from controller.allreduce.schedule import Algorithm
from controller.allreduce.wire import Description

OURS = Description(
    sequence=3, collective=Call.ALL_REDUCE, op=Op.SUM, dtype=DType.FLOAT32, algorithm=1,
    compression=0, root=0, size=4, count=100, chunk=16, address=0, rkey=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"collective": Call.BARRIER}, "all_reduce here, barrier there"),
        ({"collective": 77}, "all_reduce here, call 77 there"),
        ({"dtype": DType.INT8}, "dtype float32 here, int8 there"),
        ({"dtype": 200}, "dtype float32 here, 200 there"),
        ({"op": Op.MAX, "count": 7}, "op sum here, max there; count 100 here, 7 there"),
        ({"algorithm": 2}, "algorithm ring here, halving-doubling there"),
        ({"algorithm": 0}, "algorithm ring here, none there"),
        ({"root": 2}, "root 0 here, 2 there"),
        ({"sequence": 4}, "operation 3 here, 4 there"),
    ],
)
def test_a_difference_is_told_in_the_callers_words(change: dict[str, Any], text: str) -> None:
    assert difference(OURS, replace(OURS, **change)) == text


def test_numbers_on_the_wire_stay_what_they_are() -> None:
    assert [call.value for call in Call] == [1, 2, 3, 4, 5, 6]
    assert ALGORITHM_NUMBERS == {None: 0, Algorithm.RING: 1, Algorithm.HALVING_DOUBLING: 2}


@pytest.mark.parametrize("call", list(Call))
def test_a_call_without_elements_still_meets_the_others(call: Call) -> None:
    plan = plan_call(call, Algorithm.RING, 1, 4, 0, 16, 0)
    assert plan == schedule.plan_barrier(1, 4)


def test_each_call_has_its_schedule() -> None:
    ring, arguments = Algorithm.RING, (1, 4, 100, 16)
    assert plan_call(Call.ALL_REDUCE, ring, *arguments, 0) == schedule.plan_all_reduce(
        ring, *arguments
    )
    assert plan_call(Call.REDUCE_SCATTER, ring, *arguments, 0) == schedule.plan_reduce_scatter(
        ring, *arguments
    )
    for call in (Call.ALL_GATHER, Call.TOP_K):
        assert plan_call(call, ring, *arguments, 0) == schedule.plan_all_gather(ring, *arguments)
    assert plan_call(Call.BROADCAST, None, *arguments, 2) == schedule.plan_broadcast(
        1, 4, 2, 100, 16
    )
