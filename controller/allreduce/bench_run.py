"""The two ways to run the benchmark: as one rank of a group, or all ranks in a testbed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from controller.allreduce.bench_limit import measure_limit
from controller.allreduce.bench_peers import measure_peers
from controller.allreduce.bench_plan import BenchPlan
from controller.allreduce.bench_rank import run_rank
from controller.allreduce.bench_report import BenchReport
from controller.allreduce.environment import Placement
from controller.allreduce.spawn import run_spawned
from controller.errors import UsageError
from controller.ops.testbed import testbed
from controller.units import parse_rate_Bps


def bench_here(
    plan: BenchPlan,
    needs_spawn: Mapping[str, Any],
    echo: Callable[[str], None],
    quiet: bool,
) -> tuple[BenchReport, bool]:
    """Be one rank of the group that the environment tells; rank 0 prints as results come.

    Parameters
    ----------
    plan
        What to measure.
    needs_spawn
        Options that mean something in a testbed only, with their values.
    echo
        Prints a line.
    quiet
        Print nothing.

    Returns
    -------
    tuple of BenchReport and bool
        The report, and whether this is rank 0.

    Raises
    ------
    UsageError
        One of these options was given, or the environment tells no group.
    StellarError
        What the communicator raises.
    """
    for option, value in needs_spawn.items():
        if value:
            raise UsageError(f"{option} needs --spawn N: it is done on the hosts that this builds.")
    try:
        Placement.from_environment(os.environ)
    except UsageError as error:
        raise UsageError(
            error.message, f"{error.remedy} Or give all ranks a host here: --spawn N."
        ) from None
    printer = _Printer(echo, quiet)
    rank, report = run_rank(plan, on_head=printer.head, on_result=printer.result)
    printer.foot(report)
    return report, rank == 0


class _Printer:
    """Prints on rank 0, and only there."""

    def __init__(self, echo: Callable[[str], None], quiet: bool) -> None:
        self._echo = echo
        self._quiet = quiet

    def head(self, rank: int, report: BenchReport) -> None:
        self._quiet |= rank != 0
        self._print(report.head())

    def result(self, result: Any) -> None:
        self._print([result.row()])

    def foot(self, report: BenchReport) -> None:
        self._print(report.foot())

    def _print(self, lines: list[str]) -> None:
        if not self._quiet:
            for line in lines:
                self._echo(line)


def bench_spawned(
    plan: BenchPlan,
    count: int,
    mtu_bytes: int,
    rate: str | None,
    peers: bool,
    progress: Callable[[int, int], None],
) -> BenchReport:
    """Build hosts, run a rank on each, remove the hosts.

    Parameters
    ----------
    plan
        What to measure.
    count
        Ranks.
    mtu_bytes, rate
        Of the hosts' links; None: unshaped.
    peers
        Whether to measure ib_write_bw and other implementations in the same hosts, before.
    progress
        Called with what is done and what is to do.

    Raises
    ------
    StellarError
        The testbed cannot be built, or a rank failed.
    """
    plan.check_root(count)
    rate_Bps = None if rate is None else parse_rate_Bps(rate, "--rate")
    if rate_Bps == 0:
        raise UsageError("--rate 0 would stop the links.", "Leave it out for links without one.")
    if peers and count < 2:
        raise UsageError("--peers needs two ranks at least.")
    with testbed(count, mtu_bytes=mtu_bytes, rate_Bps=rate_Bps) as bed:
        report = run_spawned(plan, bed, progress)
        if not peers:
            return report
        links = measure_limit(bed)
        report = replace(
            report,
            limit_GBps=round(sum(links) / len(links), 6),
            facts={**report.facts, "limit_links_GBps": [round(link, 6) for link in links]},
        )
        return measure_peers(plan, bed, report)
