"""What a contest of policies showed: figures by policy and job, beside those of no controller."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controller.errors import InputError
from controller.sim.measures import (
    Alone,
    Figures,
    Iteration,
    Measures,
    measure,
    percentile,
    relative_change,
)
from controller.units import format_bytes, format_duration, format_rate
from controller.workload.bounds import Bounds, find_bounds
from controller.workload.contest import Contest, Turn
from controller.workload.control import FAIR
from controller.workload.fabric import TROUBLES
from controller.workload.plan import counted
from controller.workload.records import contended

_MS = 1e6
_DUPLICATES = "duplicate_request"


@dataclass(frozen=True)
class Health:
    """What a policy cost beside time.

    Parameters
    ----------
    sent_packets
        Of all hosts, repeated ones as well.
    troubles
        rxe's counters of what was sent again or broke, where not 0.
    control_share
        Bytes between ranks and controllers for each byte of gradients that the jobs sent.
    agent_cpu_share
        Of one processor, on average.
    """

    sent_packets: int
    troubles: Mapping[str, int]
    control_share: float
    agent_cpu_share: float

    @property
    def resent_share(self) -> float:
        """Requests that arrived again, for each packet sent."""
        return self.troubles.get(_DUPLICATES, 0) / max(1, self.sent_packets)

    def to_json(self) -> dict[str, Any]:
        """For reports."""
        return {
            "sent_packets": self.sent_packets,
            "resent_share": round(self.resent_share, 6),
            "troubles": dict(self.troubles),
            "control_share": round(self.control_share, 8),
            "agent_cpu_share": round(self.agent_cpu_share, 5),
        }


@dataclass(frozen=True)
class Verdict:
    """One policy.

    Parameters
    ----------
    policy
        Its name.
    iterations
        That count: the same ones of every policy.
    measures
        Of them.
    change
        Against `fair`, over all: member of `Figures` -> relative change; None: `fair` was not run.
    job_changes
        The same of each job.
    health
        Of all its turns.
    """

    policy: str
    iterations: tuple[Iteration, ...]
    measures: Measures
    change: Mapping[str, float] | None
    job_changes: Mapping[str, Mapping[str, float]]
    health: Health

    def to_json(self) -> dict[str, Any]:
        """For reports; times in ms."""
        return {
            **_figures_json(self.measures.over_all, self.iterations),
            "worst_job": self.measures.worst_job,
            "worst_slowdown": round(self.measures.jobs[self.measures.worst_job].slowdown, 4),
            "vs_fair": _rounded(self.change),
            "jobs": {
                name: {
                    **_figures_json(figures, _of(self.iterations, name)),
                    "vs_fair": _rounded(self.job_changes.get(name)),
                }
                for name, figures in self.measures.jobs.items()
            },
            "health": self.health.to_json(),
        }


@dataclass(frozen=True)
class Report:
    """All policies of a contest.

    Parameters
    ----------
    contest
        What it is made of.
    alone
        Job -> what it needs when nobody disturbs it.
    verdicts
        In the order of the options.
    bounds
        What any policy could gain; None: `fair` was not run.
    """

    contest: Contest
    alone: Mapping[str, Alone]
    verdicts: tuple[Verdict, ...]
    bounds: Bounds | None

    def to_json(self) -> dict[str, Any]:
        """The stable document of ``--json``."""
        contest = self.contest
        options = contest.options
        return {
            "mix": contest.mix.to_json(),
            "ranks": contest.traffic.ranks,
            "rate_bps": contest.traffic.rate_Bps * 8,
            "chunk_bytes": contest.traffic.chunk_nbytes,
            "rounds": options.rounds,
            "iterations": options.iterations,
            "warmup": options.warmup,
            "seed": options.seed,
            "kernel": contest.kernel,
            "alone": {
                job.name: {
                    "window_ms": _ms(self.alone[job.name].window_ns),
                    "window_planned_ms": _ms(job.window_ns),
                    "iteration_ms": _ms(self.alone[job.name].iteration_ns),
                    "bytes": contest.traffic.sent_nbytes(job),
                }
                for job in contest.mix.jobs
            },
            "policies": {verdict.policy: verdict.to_json() for verdict in self.verdicts},
            "oracle": self.bounds.to_json() if self.bounds else None,
        }

    def to_text(self) -> str:
        """For people, 80 columns."""
        lines = self._head()
        lines += [
            "",
            f"{'':24}{'AllReduce, ms':>20}{'iteration, ms':>18}   against fair",
            f"{'policy':9}{'job':11}{'n':>4}{'mean':>9}{'slow10%':>11}{'p50':>9}{'p99':>9}"
            f"{'mean':>9}{'slow10%':>9}",
        ]
        for verdict in self.verdicts:
            rows = [("all", verdict.measures.over_all, verdict.change)]
            rows += [
                (name, figures, verdict.job_changes.get(name))
                for name, figures in sorted(verdict.measures.jobs.items())
            ]
            for place, (name, figures, change) in enumerate(rows):
                label = verdict.policy if place == 0 else ""
                lines.append(_row(label, name, figures, change))
        if self.bounds is not None:
            for label, gained in (
                ("oracle", self.bounds.found),
                ("isolated", self.bounds.isolated),
            ):
                lines.append(f"{label:53}" + _change(gained))
        lines += ["", *self._health()]
        return "\n".join(lines)

    def _head(self) -> list[str]:
        contest = self.contest
        traffic = contest.traffic
        lines = [
            f"Mix {contest.mix.name}: {len(contest.mix.jobs)} jobs x {traffic.ranks} ranks, "
            f"{format_rate(traffic.rate_Bps)} a host, jitter {100 * contest.mix.jitter:g} %; "
            f"{contest.options.rounds} rounds",
            "",
            f"{'job':13}{'model':12}{'period':>9}{'bytes':>11}{'window alone':>15}{'planned':>10}",
        ]
        for job in contest.mix.jobs:
            lines.append(
                f"{job.name[:12]:13}{job.model:12}{format_duration(job.period_ns):>9}"
                f"{format_bytes(traffic.sent_nbytes(job)):>11}"
                f"{self.alone[job.name].window_ns / _MS:>12.0f} ms"
                f"{job.window_ns / _MS:>7.0f} ms"
            )
        return lines

    def _health(self) -> list[str]:
        lines = [f"{'policy':9}{'worst job':24}{'resent':>9}{'control bytes':>15}{'agent':>9}"]
        for verdict in self.verdicts:
            worst = verdict.measures.worst_job
            slowdown = verdict.measures.jobs[worst].slowdown
            health = verdict.health
            lines.append(
                f"{verdict.policy:9}{f'{worst[:14]} x {slowdown:.2f}':24}"
                f"{100 * health.resent_share:>7.2f} %{100 * health.control_share:>13.3f} %"
                f"{100 * health.agent_cpu_share:>7.1f} %"
            )
        return lines


def make_report(contest: Contest) -> Report:
    """Measure a contest.

    Raises
    ------
    InputError
        A policy has no iteration that counts and that all policies have.
    """
    alone = {
        job.name: _alone(job.compute_ns, contest.alone_ns[job.name]) for job in contest.mix.jobs
    }
    by_policy = {policy: _counting(contest, policy) for policy in contest.options.policies}
    # The same compute times went into these, so that chance falls on all policies alike.
    common = set.intersection(*(set(records) for records in by_policy.values()))
    missing = {job.name for job in contest.mix.jobs} - {job for _, job, _ in common}
    if missing:
        raise InputError(
            f"Job {min(missing)} has no iteration that counts under every policy.",
            "Run more iterations, or fewer of warm-up.",
        )
    rows = {
        policy: tuple(record for key, record in records.items() if key in common)
        for policy, records in by_policy.items()
    }
    measured = {policy: measure(records, alone) for policy, records in rows.items()}
    fair = measured.get(FAIR)
    verdicts = tuple(
        Verdict(
            policy,
            rows[policy],
            measures,
            relative_change(fair.over_all, measures.over_all) if fair else None,
            {
                name: relative_change(fair.jobs[name], figures)
                for name, figures in measures.jobs.items()
            }
            if fair
            else {},
            _health_of(contest, [turn for turn in contest.turns if turn.policy == policy]),
        )
        for policy, measures in measured.items()
    )
    fair_turns = [turn for turn in contest.turns if turn.policy == FAIR]
    bounds = find_bounds(fair_turns, common, alone, fair.over_all) if fair else None
    return Report(contest, alone, verdicts, bounds)


def _counting(contest: Contest, policy: str) -> dict[tuple[int, str, int], Iteration]:
    """Round, job and iteration -> record, of those that count."""
    mix, options = contest.mix, contest.options
    counts = {job.name: counted(mix, job, options.iterations) for job in mix.jobs}
    warmup = {job.name: counted(mix, job, options.warmup) for job in mix.jobs}
    return {
        (turn.round, record.job, record.iteration): record
        for turn in contest.turns
        if turn.policy == policy
        for record in contended(turn.records, counts, warmup)
    }


def _alone(compute_ns: int, windows_ns: Sequence[float]) -> Alone:
    # The median: on a machine that does other things as well, a window may take any time.
    window_ns = statistics.median(windows_ns)
    return Alone(window_ns, compute_ns + window_ns)


def _health_of(contest: Contest, turns: Sequence[Turn]) -> Health:
    total = {name: sum(turn.counters[name] for turn in turns) for name in turns[0].counters}
    sent = {job.name: contest.traffic.sent_nbytes(job) for job in contest.mix.jobs}
    job_bytes = sum(
        sent[record.job] * contest.traffic.ranks for turn in turns for record in turn.records
    )
    wall_s = sum(turn.wall_s for turn in turns)
    return Health(
        sent_packets=total["sent_pkts"],
        troubles={name: total[name] for name in TROUBLES if total[name]},
        control_share=sum(turn.control_bytes for turn in turns) / max(1, job_bytes),
        agent_cpu_share=sum(turn.agent_cpu_s for turn in turns) / max(1e-9, wall_s),
    )


def _of(iterations: Sequence[Iteration], name: str) -> list[Iteration]:
    return [record for record in iterations if record.job == name]


def _figures_json(figures: Figures, iterations: Sequence[Iteration]) -> dict[str, Any]:
    windows = [record.window_ns for record in iterations]
    return {
        "iterations": figures.iterations,
        "allreduce_ms": {
            "mean": _ms(figures.allreduce_mean_ns),
            "slowest10": _ms(figures.allreduce_slowest_ns),
            "p99": _ms(percentile(windows, 0.99)),
        },
        "iteration_ms": {
            "mean": _ms(figures.iteration_mean_ns),
            "p50": _ms(figures.iteration_p50_ns),
            "p99": _ms(figures.iteration_p99_ns),
        },
        "slowdown": round(figures.slowdown, 4),
    }


def _row(policy: str, name: str, figures: Figures, change: Mapping[str, float] | None) -> str:
    text = (
        f"{policy[:8]:9}{name[:10]:11}{figures.iterations:>4}"
        f"{figures.allreduce_mean_ns / _MS:>9.0f}{figures.allreduce_slowest_ns / _MS:>11.0f}"
        f"{figures.iteration_p50_ns / _MS:>9.0f}{figures.iteration_p99_ns / _MS:>9.0f}"
    )
    return text if change is None else text + _change(change)


def _change(change: Mapping[str, float]) -> str:
    mean, slowest = change["allreduce_mean_ns"], change["allreduce_slowest_ns"]
    return f"{100 * mean:>+7.0f} %{100 * slowest:>+7.0f} %"


def _rounded(change: Mapping[str, float] | None) -> dict[str, float] | None:
    if change is None:
        return None
    return {name.removesuffix("_ns"): round(value, 4) for name, value in change.items()}


def _ms(time_ns: float) -> float:
    return round(time_ns / _MS, 3)
