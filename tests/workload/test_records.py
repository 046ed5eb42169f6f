"""Ranks' reports become one record an iteration; only contended ones count."""

from __future__ import annotations

from typing import Any

from controller.sim.measures import Iteration
from controller.workload.records import contended, merge


def row(job: str, rank: int, iteration: int, compute: int, begin: int, end: int) -> dict[str, Any]:
    return {
        "job": job, "rank": rank, "iteration": iteration, "compute_begin_ns": compute,
        "window_begin_ns": begin, "window_end_ns": end,
    }  # fmt: skip


def test_a_window_begins_with_the_last_rank_and_ends_with_the_last() -> None:
    rows = [row("a", 0, 0, 0, 100, 190), row("a", 1, 0, 5, 120, 200), row("a", 2, 0, 3, 110, 195)]
    assert merge(rows, 3) == (Iteration("a", 0, 0, 120, 200),)


def test_an_iteration_begins_where_the_one_before_ended() -> None:
    rows = [row("a", rank, number, 1000 * number + rank, 1000 * number + 500, 1000 * number + 900)
            for number in range(3) for rank in range(2)]  # fmt: skip
    records = merge(reversed(rows), 2)
    assert [record.compute_begin_ns for record in records] == [0, 900, 1900]
    assert [record.duration_ns for record in records] == [900, 1000, 1000]


def test_an_iteration_that_a_rank_did_not_tell_is_left_out_and_so_is_what_follows_from_it() -> None:
    rows = [row("a", 0, 0, 0, 10, 20), row("a", 1, 0, 0, 10, 20), row("a", 0, 1, 20, 30, 40)]
    rows += [row("a", rank, 2, 41, 50, 60) for rank in range(2)]
    records = merge(rows, 2)
    assert [record.iteration for record in records] == [0, 2]
    assert records[1].compute_begin_ns == 41


def test_jobs_are_kept_apart() -> None:
    rows = [row("b", 0, 0, 0, 1, 2), row("a", 0, 0, 5, 6, 9), row("b", 0, 1, 2, 3, 4)]
    assert [(r.job, r.iteration, r.window_ns) for r in merge(rows, 1)] == [
        ("a", 0, 3), ("b", 0, 1), ("b", 1, 1),
    ]  # fmt: skip


def test_warm_up_and_what_ran_without_company_do_not_count() -> None:
    records = [Iteration("a", n, 100 * n, 100 * n + 50, 100 * n + 100) for n in range(10)]
    records += [Iteration("b", n, 200 * n, 200 * n + 50, 200 * n + 200) for n in range(4)]
    counting = contended(records, {"a": 100, "b": 100}, {"a": 2, "b": 1})
    # b ends at 800; a's iterations 8 and 9 end later.
    assert [r.iteration for r in counting if r.job == "a"] == [2, 3, 4, 5, 6, 7]
    assert [r.iteration for r in counting if r.job == "b"] == [1, 2, 3]


def test_no_more_count_than_were_asked_for() -> None:
    records = [Iteration("a", n, 100 * n, 100 * n + 50, 100 * n + 100) for n in range(10)]
    counting = contended(records, {"a": 3}, {"a": 2})
    assert [record.iteration for record in counting] == [2, 3, 4]
    assert contended([], {}, {}) == ()
