"""Mixes of jobs that share a link: named by their periods and communication shares."""

from __future__ import annotations

from collections.abc import Sequence

from controller.errors import UsageError
from controller.priority.policy import DEFAULT_MAX_SLOWDOWN
from controller.sim.jobs import SimJob


def even_iterations(jobs: Sequence[SimJob], link_Bps: float, least: int) -> dict[str, int]:
    """Iterations of each job so that all end at about the same time.

    Jobs with the same number would end one after the other, and the last would be measured
    with the link to itself.

    Parameters
    ----------
    jobs
        At least one.
    link_Bps
        Payload rate of the link.
    least
        Of the job with the longest period.
    """
    longest = max(job.period_ns(link_Bps) for job in jobs)
    return {job.name: round(least * longest / job.period_ns(link_Bps)) for job in jobs}


def mix(
    periods_ns: Sequence[float],
    shares: Sequence[float],
    link_Bps: float,
    *,
    jitter: float = 0.0,
    offsets_ns: Sequence[float] = (),
    classes: Sequence[int] = (),
    max_slowdown: float = DEFAULT_MAX_SLOWDOWN,
) -> tuple[SimJob, ...]:
    """Jobs ``a``, ``b``, ... from what they are when nobody disturbs them.

    Parameters
    ----------
    periods_ns
        Iteration time of each job alone.
    shares
        Part of it that is communication, above 0 .. 1.
    link_Bps
        Payload rate of the link.
    jitter
        Of all compute times.
    offsets_ns
        Begin of each job's first compute phase; by default all begin together.
    classes
        Class of each job's configuration; by default the first job's is the highest.
    max_slowdown
        Of all jobs.

    Raises
    ------
    UsageError
        The numbers of periods, shares, offsets and classes differ, or a value is impossible.
    """
    count = len(periods_ns)
    offsets = tuple(offsets_ns) or (0.0,) * count
    numbers = tuple(classes) or tuple(max(0, 5 - 2 * place) for place in range(count))
    for what, values in (("shares", shares), ("offsets", offsets), ("classes", numbers)):
        if len(values) != count:
            raise UsageError(f"There are {len(values)} {what} for {count} periods.")
    for share in shares:
        if not 0 < share <= 1:
            raise UsageError(f"Communication share is {share!r}; allowed: above 0 .. 1.")
    return tuple(
        SimJob(
            name=chr(ord("a") + place),
            compute_ns=period * (1 - share),
            window_bytes=max(1, round(period * share * link_Bps / 1e9)),
            jitter=jitter,
            offset_ns=offset,
            traffic_class=number,
            max_slowdown=max_slowdown,
        )
        for place, (period, share, offset, number) in enumerate(
            zip(periods_ns, shares, offsets, numbers, strict=True)
        )
    )
