"""``controller bench priority``: real AllReduce jobs on shared links, policies compared."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from controller.cli_common import JSON_OPTION, print_json, refuse_options

_DEFAULT_MIX = "two-equal"
_STEPS = 1000  # of the progress bar


def _show_mixes(as_json: bool) -> None:
    from controller.units import format_duration
    from controller.workload.mixes import MIXES

    if as_json:
        print_json([mix.to_json() for mix in MIXES.values()])
        return
    for mix in MIXES.values():
        click.echo(
            f"{mix.name}: load {100 * mix.load:.0f} %, jitter {100 * mix.jitter:g} %, "
            f"start {mix.start}"
        )
        for job in mix.jobs:
            click.echo(
                f"  {job.name:14}{job.model:12}period {format_duration(job.period_ns):9}"
                f"communication {100 * job.share:.0f} %"
            )


@click.command("priority")
@click.option("-m", "--mix", "mix_name", metavar="NAME|FILE", default=_DEFAULT_MIX,
              show_default=True, help="Jobs that share the links: a built-in mix, or a TOML "
                                      "file.")  # fmt: skip
@click.option("-p", "--policies", metavar="P,P,...",
              help="fair: no controller.  [fair,static,mltcp,laxity]")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1, 10_000), default=3, show_default=True,
              help="Turns of each policy.")  # fmt: skip
@click.option("-n", "--iterations", type=click.IntRange(1, 1_000_000), default=20,
              show_default=True, help="Of the slowest job in each turn.")  # fmt: skip
@click.option("-w", "--warmup", type=click.IntRange(1, 1_000_000), default=8, show_default=True,
              help="Iterations before them, which do not count.")  # fmt: skip
@click.option("--rate", default="12mbit", show_default=True, metavar="R",
              help="Of every host's link.")  # fmt: skip
@click.option("--ranks", type=click.IntRange(2, 16), default=3, show_default=True,
              help="Of each job, one a host.")  # fmt: skip
@click.option("--chunk", metavar="SIZE", default="16K", show_default=True,
              help="Bytes of a message at most: a class changes between messages.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=1, show_default=True,
              help="Of jitter and of the jobs' offsets.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path),
              metavar="FILE", help="Write the records of all iterations, as JSON.")  # fmt: skip
@click.option("--from", "source", type=click.Path(path_type=Path), metavar="FILE",
              help="Report records that -o wrote, and run nothing.")  # fmt: skip
@click.option("--list", "as_list", is_flag=True, help="Show the built-in mixes.")
@JSON_OPTION
@click.pass_context
def bench_priority(
    ctx: click.Context,
    mix_name: str,
    policies: str | None,
    rounds: int,
    iterations: int,
    warmup: int,
    rate: str,
    ranks: int,
    chunk: str,
    seed: int,
    output: Path | None,
    source: Path | None,
    as_list: bool,
    as_json: bool,
) -> None:
    """What a policy gains for training jobs that share links.

    Builds hosts of network namespaces and soft-RoCE, each with the queues of `qdisc
    setup`, and runs the jobs on them: each computes (sleeps), then reduces its gradient
    with controller.allreduce. Policies take turns, with the same compute times.
    Needs root and a kernel with soft-RoCE for namespaces.

    \b
      controller bench priority
      controller bench priority -m three-equal -p fair,laxity --rounds 5
      controller bench priority -m my-jobs.toml --rate 40mbit -o records.json

    With --run-dir before `bench`, `top` and `explain` show the jobs meanwhile.
    """  # noqa: D301 - \b tells click to keep the lines
    others = {parameter.name or "" for parameter in ctx.command.params}
    if as_list:
        refuse_options(ctx, "--list runs nothing", *(others - {"as_list", "as_json"}))
        _show_mixes(as_json)
        return
    if source is not None:
        kept = {"source", "output", "as_json"}
        refuse_options(ctx, "--from reports what was run", *(others - kept))
    from controller.files import check_writable
    from controller.telemetry.progress import progress_bar
    from controller.workload.contest import DEFAULT_POLICIES, Options
    from controller.workload.mixes import find_mix
    from controller.workload.picture import text_picture
    from controller.workload.report import make_report
    from controller.workload.runner import (
        compare,
        make_traffic,
        read_records,
        write_records,
    )

    if output is not None:
        check_writable(output, force=True)
    if source is not None:
        contest = read_records(source)
    else:
        mix = find_mix(mix_name)
        names = tuple(policies.split(",")) if policies is not None else DEFAULT_POLICIES
        options = Options(names, rounds, iterations, warmup, seed)
        traffic = make_traffic(rate, ranks, chunk)
        with progress_bar(mix.name) as progress:
            contest = compare(
                mix, traffic, options, lambda share: progress(round(share * _STEPS), _STEPS),
                run_dir=_named_run_directory(ctx),
            )  # fmt: skip
    if output is not None:
        write_records(output, contest)
    report = make_report(contest)
    if as_json:
        print_json(report.to_json())
    else:
        click.echo(f"{report.to_text()}\n\n{text_picture(contest)}")


def _named_run_directory(ctx: click.Context) -> Path | None:
    """The run directory that somebody named; the default one is a controller's that runs."""
    root = ctx.find_root()
    is_default = root.get_parameter_source("run_dir") is ParameterSource.DEFAULT
    return None if is_default else Path(root.obj)
