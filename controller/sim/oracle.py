"""What could be gained on a mix by somebody who knows every compute time in advance.

Two figures: every window undisturbed, which no schedule can beat and most cannot reach; and the
best schedule that a beam search finds, which is possible but not proven to be the best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller.errors import UsageError
from controller.sim.jobs import Iteration
from controller.sim.measures import Alone, Measures, measure, slowest_mean

# Schedules that are kept at each step of the search. On six mixes of two and three jobs (one
# seed each), what 24 and 96 found differed by at most one per cent of the base.
BEAM = 96
# Windows longer than the shortest are cut into pieces of about its length, up to this many, so
# that a short one may go in between.
MAX_PIECES = 6
# Weights of the tail against the mean that are tried; the best schedule for both is taken.
_TAIL_WEIGHTS = (0.0, 0.3, 1.0)
_SLOWEST = 10  # the slowest tenth: an excess above the tail's begin counts tenfold


@dataclass(frozen=True)
class OracleJob:
    """What the oracle knows of one job.

    Parameters
    ----------
    name
        Of the job.
    begin_ns
        When its first compute phase begins.
    compute_ns
        Of each iteration.
    window_ns
        Length of its window alone.
    """

    name: str
    begin_ns: float
    compute_ns: Sequence[float]
    window_ns: float


@dataclass(frozen=True)
class Gain:
    """What could be gained, as shares of the base (-0.4: 40 % lower).

    Parameters
    ----------
    isolated_mean, isolated_slowest
        Mean window and mean of the slowest 10 %, when every window is undisturbed: a bound.
    found_mean, found_slowest
        Of the best schedule found, by the sum of both: no bound, a policy may do better in one.
    found
        Its figures.
    iterations
        Its iterations.
    """

    isolated_mean: float
    isolated_slowest: float
    found_mean: float
    found_slowest: float
    found: Measures
    iterations: tuple[Iteration, ...]


def known_jobs(iterations: Sequence[Iteration], alone: Mapping[str, Alone]) -> list[OracleJob]:
    """Jobs with the compute times that a run shows, simulated or real.

    Parameters
    ----------
    iterations
        Of the run, without holes.
    alone
        Of each job.
    """
    by_job: dict[str, list[Iteration]] = {}
    for each in sorted(iterations, key=lambda row: row.window_begin_ns):
        by_job.setdefault(each.job, []).append(each)
    return [
        OracleJob(
            name,
            rows[0].compute_begin_ns,
            [row.window_begin_ns - row.compute_begin_ns for row in rows],
            alone[name].window_ns,
        )
        for name, rows in by_job.items()
    ]


def gain(base: Sequence[Iteration], alone: Mapping[str, Alone], beam: int = BEAM) -> Gain:
    """What could have been gained on a run.

    Parameters
    ----------
    base
        The run, usually under `fair`; its compute times are what the oracle knows.
    alone
        Of each job.
    beam
        Schedules kept at each step of the search.

    Raises
    ------
    UsageError
        `beam` is below 1.
    InputError
        There is no iteration, or one is of a job that `alone` does not name.
    """
    if beam < 1:
        raise UsageError(f"Beam of the oracle's search is {beam}; allowed: from 1.")
    before = measure(base, alone).over_all
    lone = [alone[each.job].window_ns for each in base]
    jobs = known_jobs(base, alone)
    best: tuple[float, tuple[Iteration, ...]] | None = None
    for weight in _TAIL_WEIGHTS:
        tail_ns = 0.75 * before.allreduce_slowest_ns
        rows = search(jobs, weight, tail_ns, beam)
        windows = [each.window_ns for each in rows]
        score = (
            sum(windows) / len(windows) / before.allreduce_mean_ns
            + slowest_mean(windows) / before.allreduce_slowest_ns
        )
        if best is None or score < best[0]:
            best = (score, rows)
    assert best is not None
    after = measure(best[1], alone)
    return Gain(
        isolated_mean=sum(lone) / len(lone) / before.allreduce_mean_ns - 1,
        isolated_slowest=slowest_mean(lone) / before.allreduce_slowest_ns - 1,
        found_mean=after.over_all.allreduce_mean_ns / before.allreduce_mean_ns - 1,
        found_slowest=after.over_all.allreduce_slowest_ns / before.allreduce_slowest_ns - 1,
        found=after,
        iterations=best[1],
    )


@dataclass(frozen=True)
class _Piece:
    """What was put on the link last, and the piece before it."""

    job: int
    end_ns: float
    before: _Piece | None


@dataclass(frozen=True)
class _Partial:
    """A schedule up to some piece.

    `cost` is of windows that have ended, `estimate` that and what open ones have waited. Of each
    job: pieces `served`, when the next one can begin (`ready_ns`), when its window began.
    """

    estimate: float
    cost: float
    free_ns: float
    served: tuple[int, ...]
    ready_ns: tuple[float, ...]
    begun_ns: tuple[float, ...]
    last: _Piece | None


def search(
    jobs: Sequence[OracleJob], tail_weight: float, tail_ns: float, beam: int
) -> tuple[Iteration, ...]:
    """Order the windows of all jobs on one link, at full rate, one at a time.

    A beam search over the number of pieces served. The link may stay idle to wait for a job.

    Parameters
    ----------
    jobs
        With their compute times.
    tail_weight, tail_ns
        A window costs its excess over the window alone, and what it is longer than `tail_ns`
        tenfold, times the weight.
    beam
        Schedules kept at each step.

    Returns
    -------
    tuple of Iteration
        In the order in which the windows end.
    """
    task = _Task(jobs, tail_weight, tail_ns)
    first = tuple(job.begin_ns + job.compute_ns[0] for job in jobs)
    partials = [_Partial(0.0, 0.0, 0.0, (0,) * len(jobs), first, first, None)]
    for _ in range(sum(task.goals)):
        grown: dict[tuple[object, ...], _Partial] = {}
        for partial in partials:
            for longer in task.extend(partial):
                # Schedules that agree to a nanosecond have one future.
                key = (longer.served, round(longer.free_ns), *map(round, longer.ready_ns))
                known = grown.get(key)
                if known is None or longer.estimate < known.estimate:
                    grown[key] = longer
        partials = sorted(grown.values(), key=lambda each: each.estimate)[:beam]
    return _iterations(jobs, task.pieces, partials[0].last)


class _Task:
    """The jobs cut into pieces, and what a schedule of them costs."""

    def __init__(self, jobs: Sequence[OracleJob], tail_weight: float, tail_ns: float) -> None:
        shortest_ns = min(job.window_ns for job in jobs)
        self.jobs = jobs
        self.slope = tail_weight * _SLOWEST
        self.tail_ns = tail_ns
        self.pieces = [min(MAX_PIECES, max(1, round(job.window_ns / shortest_ns))) for job in jobs]
        self.piece_ns = [
            job.window_ns / count for job, count in zip(jobs, self.pieces, strict=True)
        ]
        self.goals = [
            len(job.compute_ns) * count for job, count in zip(jobs, self.pieces, strict=True)
        ]

    def extend(self, partial: _Partial) -> list[_Partial]:
        """Put one more piece on the link, in every way that can be the best."""
        starts = {
            job: max(partial.free_ns, partial.ready_ns[job])
            for job in range(len(self.jobs))
            if partial.served[job] < self.goals[job]
        }
        # A piece that would end before another begins can go in front of it.
        latest_ns = min(start + self.piece_ns[job] for job, start in starts.items())
        return [
            self._serve(partial, job, start) for job, start in starts.items() if start < latest_ns
        ]

    def _serve(self, partial: _Partial, job: int, start_ns: float) -> _Partial:
        end_ns = start_ns + self.piece_ns[job]
        count = partial.served[job] + 1
        ready_ns, begun_ns = list(partial.ready_ns), list(partial.begun_ns)
        ready_ns[job] = end_ns
        cost = partial.cost
        if count % self.pieces[job] == 0:
            window_ns = end_ns - begun_ns[job]
            cost += window_ns - self.jobs[job].window_ns
            cost += self.slope * max(0.0, window_ns - self.tail_ns)
            if count < self.goals[job]:
                ready_ns[job] += self.jobs[job].compute_ns[count // self.pieces[job]]
            begun_ns[job] = ready_ns[job]
        served = (*partial.served[:job], count, *partial.served[job + 1 :])
        estimate = cost
        for other, begin_ns in enumerate(begun_ns):
            if served[other] < self.goals[other] and begin_ns < end_ns:
                done_ns = served[other] % self.pieces[other] * self.piece_ns[other]
                excess_ns = end_ns - begin_ns - done_ns
                window_ns = excess_ns + self.jobs[other].window_ns
                estimate += excess_ns + self.slope * max(0.0, window_ns - self.tail_ns)
        last = _Piece(job, end_ns, partial.last)
        return _Partial(estimate, cost, end_ns, served, tuple(ready_ns), tuple(begun_ns), last)


def _iterations(
    jobs: Sequence[OracleJob], pieces: Sequence[int], last: _Piece | None
) -> tuple[Iteration, ...]:
    """The iterations of a schedule, from its last piece backwards."""
    ends: list[list[float]] = [[] for _ in jobs]
    while last is not None:
        ends[last.job].append(last.end_ns)
        last = last.before
    rows = []
    for job, count, backwards in zip(jobs, pieces, ends, strict=True):
        before_ns = job.begin_ns
        for iteration, end_ns in enumerate(backwards[::-1][count - 1 :: count]):
            begin_ns = before_ns + job.compute_ns[iteration]
            rows.append(Iteration(job.name, iteration, before_ns, begin_ns, end_ns))
            before_ns = end_ns
    return tuple(sorted(rows, key=lambda row: row.window_end_ns))
