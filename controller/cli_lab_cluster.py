"""``controller lab cluster``, ``run`` and ``list``: scenarios of the simulators."""

from __future__ import annotations

import textwrap
from pathlib import Path

import click

from controller.cli_common import JSON_OPTION, print_json, refuse_options
from controller.cli_lab_output import FOLDER, REPORT, prepare, show

_WIDTH, _KIND_WIDTH = 80, 12

_PROCESSES = click.option(
    "--processes", type=click.IntRange(1, 1024), metavar="N",
    help="Simulations at once.  [one a processor]",
)  # fmt: skip


@click.command("cluster")
@click.argument("scenario")
@click.option("-p", "--policy", "policies", multiple=True, metavar="P",
              help="Only this one, or several of them: P,P or -p P -p P.")  # fmt: skip
@click.option("--seeds", type=int, metavar="N", help="Instead of the scenario's number.")
@click.option("-n", "--iterations", type=int, metavar="N",
              help="Of the slowest job, instead of the scenario's number.")  # fmt: skip
@_PROCESSES
@click.option("-o", "--output", type=FOLDER, metavar="FOLDER",
              help=f"Write {REPORT} and figures there.")  # fmt: skip
@JSON_OPTION
def cluster_command(
    scenario: str,
    policies: tuple[str, ...],
    seeds: int | None,
    iterations: int | None,
    processes: int | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """What each policy makes of the jobs of a cluster, by simulation.

    SCENARIO is a built-in one (controller lab list) or a TOML file, see
    docs/simulation.md. A seed draws where jobs are, when they begin and how long they
    compute; every policy meets the same.

    \b
      controller lab cluster quick
      controller lab cluster mixed-models --seeds 3 -p fair,laxity
      controller lab cluster my-cluster.toml -o results --json
    """  # noqa: D301 - \b tells click to keep the lines
    from controller.lab.kinds import load_cluster
    from controller.lab.run import run_cluster, with_options
    from controller.telemetry.progress import progress_bar

    named = [name.strip() for entry in policies for name in entry.split(",")]
    loaded = with_options(load_cluster(scenario), named, seeds, iterations)
    prepare(output)
    with progress_bar(loaded.name) as progress:
        report = run_cluster(loaded, progress, processes)
    show(report, output, as_json)


@click.command("run")
@click.argument("scenario")
@_PROCESSES
@click.option("-o", "--output", type=FOLDER, metavar="FOLDER", required=True,
              help=f"Where {REPORT} and figures go.")  # fmt: skip
@JSON_OPTION
@click.pass_context
def run_command(
    ctx: click.Context, scenario: str, processes: int | None, output: Path, as_json: bool
) -> None:
    """Run a scenario of any kind: table, JSON and figures.

    SCENARIO is a built-in one (controller lab list) or a TOML file, see
    docs/simulation.md.

    \b
      controller lab run mixed-models -o results
    """  # noqa: D301 - \b tells click to keep the lines
    from controller.lab.kinds import CLUSTER, find_scenario, run_scenario
    from controller.telemetry.progress import progress_bar

    found = find_scenario(scenario)
    if found.kind != CLUSTER:
        refuse_options(ctx, f"a {found.kind} scenario runs in one process", "processes")
    prepare(output)
    with progress_bar(found.name) as progress:
        report = run_scenario(found, progress, processes)
    show(report, output, as_json)


@click.command("list")
@JSON_OPTION
def list_command(as_json: bool) -> None:
    """The built-in scenarios."""
    from controller.lab.kinds import builtins

    found = builtins().values()
    if as_json:
        print_json([{"name": one.name, "kind": one.kind, "about": one.about} for one in found])
        return
    width = max(len(one.name) for one in found) + 2
    for one in found:
        about = textwrap.shorten(one.about, _WIDTH - width - _KIND_WIDTH, placeholder=" ...")
        click.echo(f"{one.name:{width}}{one.kind:{_KIND_WIDTH}}{about}".rstrip())
