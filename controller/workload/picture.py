"""Sync windows of the jobs under a policy, side by side: where they overlap, they contend."""

from __future__ import annotations

from collections.abc import Mapping

from controller.sim.measures import Iteration
from controller.telemetry.timeline import text_timeline
from controller.workload.contest import Contest, Turn

# Windows after the warm-up, as many iterations of the slowest job.
SHOWN_ITERATIONS = 8
_TEXT_ITERATIONS = 4


def shown_windows(
    contest: Contest, turn: Turn, iterations: int = SHOWN_ITERATIONS
) -> Mapping[str, list[tuple[float, float]]]:
    """Job -> (begin, end) in ns of its sync windows, from the end of the warm-up.

    Parameters
    ----------
    iterations
        Of the job with the longest period.
    """
    slowest = max(contest.mix.jobs, key=lambda job: job.period_ns).name
    ends = [record.window_end_ns for record in turn.records if record.job == slowest]
    if not ends:  # what its ranks told was not complete
        return {job.name: [] for job in contest.mix.jobs}
    begin_ns = ends[min(contest.options.warmup, len(ends)) - 1]
    end_ns = begin_ns + iterations * contest.mix.longest_ns

    def is_shown(record: Iteration) -> bool:
        return begin_ns <= record.window_begin_ns and record.window_end_ns <= end_ns

    return {
        job.name: [
            (record.window_begin_ns - begin_ns, record.window_end_ns - begin_ns)
            for record in turn.records
            if record.job == job.name and is_shown(record)
        ]
        for job in contest.mix.jobs
    }


def text_picture(contest: Contest, width: int = 80) -> str:
    """The first turn of the first and of the last policy, as text.

    Parameters
    ----------
    width
        Columns.
    """
    policies = contest.options.policies
    parts = []
    span_ns = (0, round(_TEXT_ITERATIONS * contest.mix.longest_ns))
    for policy in dict.fromkeys((policies[0], policies[-1])):
        turn = next(turn for turn in contest.turns if turn.policy == policy)
        windows = shown_windows(contest, turn, _TEXT_ITERATIONS)
        rows = [
            (job, [(round(begin), round(end), "sync") for begin, end in found])
            for job, found in windows.items()
        ]
        name = f"{policy} (no controller)" if policy == "fair" else policy
        parts.append(f"sync windows under {name}\n{text_timeline(rows, width, span_ns)}")
    return "\n\n".join(parts)
