"""Iterations as the ranks told them, merged to one record an iteration of a job. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from controller.sim.measures import Iteration


def merge(rows: Iterable[Mapping[str, Any]], ranks: int) -> tuple[Iteration, ...]:
    """One record for each iteration that all ranks of its job told.

    A window begins when the last rank has its gradient (one that is early only waits, which is no
    time of the network's), and ends when the last one has the reduction. An iteration begins
    where the one before ended.

    Parameters
    ----------
    rows
        ``job``, ``rank``, ``iteration``, ``compute_begin_ns``, ``window_begin_ns``,
        ``window_end_ns`` of each; CLOCK_MONOTONIC.
    ranks
        Of each job.

    Returns
    -------
    tuple of Iteration
        By job and iteration.
    """
    by_iteration: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_iteration[row["job"], row["iteration"]].append(row)
    result: list[Iteration] = []
    for (job, iteration), told in sorted(by_iteration.items()):
        if len(told) != ranks:
            continue
        begin_ns = min(row["compute_begin_ns"] for row in told)
        if result and (result[-1].job, result[-1].iteration) == (job, iteration - 1):
            begin_ns = result[-1].window_end_ns
        result.append(
            Iteration(
                job,
                iteration,
                begin_ns,
                max(row["window_begin_ns"] for row in told),
                max(row["window_end_ns"] for row in told),
            )
        )
    return tuple(result)


def contended(
    records: Sequence[Iteration], counts: Mapping[str, int], warmup: Mapping[str, int]
) -> tuple[Iteration, ...]:
    """The records that count: after the warm-up, and while all jobs were running.

    Parameters
    ----------
    records
        Of one episode.
    counts
        Job -> iterations that count at most, after its warm-up.
    warmup
        Job -> iterations before.

    Returns
    -------
    tuple of Iteration
        In the order given.
    """
    last_ns: dict[str, float] = {}
    for record in records:
        last_ns[record.job] = max(record.window_end_ns, last_ns.get(record.job, 0))
    all_run_until_ns = min(last_ns.values(), default=0)
    return tuple(
        record
        for record in records
        if warmup[record.job] <= record.iteration < warmup[record.job] + counts[record.job]
        and record.window_end_ns <= all_run_until_ns
    )
