"""The ``controller`` command. No logic here: arguments in, reports out.

Exit status: 0 done; 1 failed; 2 wrong usage or configuration; 3 privilege missing;
4 not supported by this machine; 5 somebody else is in the way; 6 no controller runs;
7 unreadable input.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from controller import __version__
from controller.cli_allreduce import bench_allreduce
from controller.cli_common import JSON_OPTION, ask, print_json, run_directory
from controller.cli_control import class_group, job, policy_command
from controller.cli_lab import lab_group
from controller.cli_pool import pool_group
from controller.cli_predict import predict_command
from controller.cli_priority import bench_priority
from controller.cli_qdisc import qdisc
from controller.cli_trace import trace_group
from controller.errors import InputError, StellarError

# What a write to a full or broken disk gives.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _Group(click.Group):
    """Turns StellarError into one paragraph on stderr and its exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except StellarError as error:
            click.echo(f"Error: {error.message}", err=True)
            if error.remedy:
                click.echo(f"  {error.remedy}", err=True)
            ctx.exit(error.exit_code)
        except BrokenPipeError:
            # `controller flows | head`: the reader has had enough
            sys.stderr.close()
            ctx.exit(0)


@click.group(cls=_Group, epilog="Exit status: see docs/reference.md. Start with: doctor.")
@click.version_option(__version__, prog_name="controller")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="STELLAR_RUN_DIR",
    default="/run/stellar",
    show_default=True,
    help="Directory of state and control socket; one for each controller.",
)
@click.pass_context
def cli(ctx: click.Context, run_dir: Path) -> None:
    """Stellar: see and steer the RoCEv2 traffic of AI training jobs on this host.

    \b
    First steps:
      controller doctor                   what this machine can do
      sudo controller start -i eth0       attach (NETNS:IF for a namespace)
      sudo controller flows               what the flows do
      sudo controller explain FLOW        what is wrong with one of them
      controller analyze FILE.pcap        the same for a capture
      sudo controller qdisc setup eth0 --rate 25gbit    queues for the classes
      sudo controller job set NAME --match src=10.0.0.0/8    steer a job
      sudo controller bench allreduce --spawn 4              AllReduce over verbs
    """  # noqa: D301 - \b tells click to keep the lines
    ctx.obj = run_dir


# ---- life of a controller ----


def _with_targets(configured: tuple[Any, ...], added: tuple[Any, ...]) -> tuple[Any, ...]:
    """The configured interfaces, and those of -i; one that is in both keeps its table."""
    known = {(entry.netns, entry.name) for entry in configured}
    return configured + tuple(e for e in added if (e.netns, e.name) not in known)


@cli.command()
@click.option("-i", "--interface", "targets", multiple=True, metavar="[NETNS:]IF",
              help="Interface to attach to; repeat for several.")  # fmt: skip
@click.option("--mode", type=click.Choice(["native", "generic", "tc"]), default="native",
              show_default=True,
              help="Ingress hook: XDP in the driver, XDP generic, or tc.")  # fmt: skip
@click.option("--config", "config_path", type=click.Path(path_type=Path),
              help="TOML file; -i adds interfaces that it does not name.")  # fmt: skip
@click.option("--detach", is_flag=True, help="Go to the background once everything is attached.")
@click.option("--ready-fd", type=int, hidden=True)
@click.pass_context
def start(
    ctx: click.Context,
    targets: tuple[str, ...],
    mode: str,
    config_path: Path | None,
    detach: bool,
    ready_fd: int | None,
) -> None:
    """Attach to interfaces and observe until stopped.

    A controller that died is picked up where it was: its flows, counters and
    attachments are adopted. Ctrl-C, SIGTERM or `controller stop` detach everything.
    """
    from controller.agent.launch import run_detached, run_foreground
    from controller.config import Config, InterfaceConfig, load_config

    config = load_config(config_path) if config_path else Config()
    added = tuple(InterfaceConfig.parse(target, mode) for target in targets)
    config = replace(config, interfaces=_with_targets(config.interfaces, added))
    if detach:
        arguments = [f"--mode={mode}"]
        arguments += [f"--interface={target}" for target in targets]
        if config_path:
            arguments.append(f"--config={config_path.resolve()}")
        pid = run_detached(run_directory(ctx), arguments)
        click.echo(f"controller runs (pid {pid}); next: controller status, flows, top")
        return
    run_foreground(run_directory(ctx), config, ready_fd)


@cli.command()
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, 86400), default=30.0,
              show_default=True, help="Seconds to wait for the end.")  # fmt: skip
@JSON_OPTION
@click.pass_context
def stop(ctx: click.Context, timeout_s: float, as_json: bool) -> None:
    """Detach everything of ours and end the controller.

    Works after a crash, too, and twice in a row; touches nothing of others.
    """
    from controller.agent import ending

    was_running, labels = ending.end(run_directory(ctx), timeout_s)
    if as_json:
        print_json({"was_running": was_running, "detached": labels})
    elif was_running:
        click.echo(f"stopped; detached from {', '.join(labels) or 'nothing'}")
    elif labels:
        click.echo(f"no controller ran; cleaned up {', '.join(labels)}")
    else:
        click.echo("no controller ran; nothing of ours is attached")


@cli.command()
@JSON_OPTION
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """Show the controller, its interfaces and what they saw."""
    from controller.telemetry.views import status_text

    answer = ask(ctx, "status")
    if as_json:
        print_json(answer)
    else:
        click.echo(status_text(answer))


@cli.command()
@click.argument("interface", metavar="[NETNS:]IF")
@click.option("--mode", type=click.Choice(["native", "generic", "tc"]), default="native",
              show_default=True)  # fmt: skip
@JSON_OPTION
@click.pass_context
def attach(ctx: click.Context, interface: str, mode: str, as_json: bool) -> None:
    """Add an interface to the running controller."""
    answer = ask(ctx, "attach", interface=interface, mode=mode)
    if as_json:
        print_json(answer)
    else:
        entry = answer["attached"]
        click.echo(f"attached to {entry['interface']} ({entry['kind']}, {entry['mode']})")


@cli.command()
@click.argument("interface", metavar="[NETNS:]IF")
@JSON_OPTION
@click.pass_context
def detach(ctx: click.Context, interface: str, as_json: bool) -> None:
    """Take an interface off the running controller."""
    answer = ask(ctx, "detach", interface=interface)
    if as_json:
        print_json(answer)
    else:
        click.echo(f"detached from {answer['detached']}")


# ---- reports ----


@cli.command()
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.option("--interval", "interval_s", type=click.FloatRange(0.1, 86400), default=1.0,
              show_default=True, help="Seconds between two refreshes.")  # fmt: skip
@click.option("--wide", is_flag=True, help="More columns than fit 80 characters.")
@JSON_OPTION
@click.pass_context
def flows(ctx: click.Context, watch: bool, interval_s: float, wide: bool, as_json: bool) -> None:
    """List the flows: who sends what to whom, and what went wrong on the way."""
    from controller.agent import client
    from controller.observe.snapshot import busiest_first, flow_rows

    run = run_directory(ctx)
    with contextlib.suppress(KeyboardInterrupt):  # the way to end --watch
        while True:
            rows = flow_rows(busiest_first(client.take_snapshot(run)))
            if as_json:
                click.echo(json.dumps({"flows": rows}, indent=None if watch else 2))
            else:
                from controller.observe.report import KIND_LEGEND, flows_table

                if watch:
                    click.clear()
                click.echo(flows_table(rows, wide=wide))
                if rows:
                    click.echo(f"\n{KIND_LEGEND}")
            if not watch:
                return
            time.sleep(interval_s)


@cli.command()
@click.option("--interval", "interval_s", type=click.FloatRange(0.1, 86400), default=1.0,
              show_default=True, help="Seconds between two refreshes.")  # fmt: skip
@click.option("--count", type=click.IntRange(min=1), help="End after so many refreshes.")
@JSON_OPTION
@click.pass_context
def top(ctx: click.Context, interval_s: float, count: int | None, as_json: bool) -> None:
    """Live view: where each job is in its iteration, and the busiest flows.

    Ends with Ctrl-C or q.
    """
    from controller.agent import client
    from controller.telemetry.live import run_top

    run = run_directory(ctx)
    run_top(
        lambda: client.take_snapshot(run),
        interval_s,
        count,
        as_json,
        lambda: client.ask(run, "jobs")["jobs"],
    )


@cli.command()
@click.argument("name", metavar="JOB|FLOW")
@JSON_OPTION
@click.pass_context
def explain(ctx: click.Context, name: str, as_json: bool) -> None:
    """Explain a job's iterations and class, or say what is wrong with a flow.

    JOB is a name that `job list` prints: its period, next sync window, laxity and class, who
    delays whom, and what is uncertain. FLOW is a name that `flows` prints, the beginning of one,
    or a QPN: verdicts with evidence and remedy.
    """
    from controller.agent import client
    from controller.observe.explain import Explanation, flows_named
    from controller.observe.explain import explain as explain_flow
    from controller.telemetry.job_explanation import JobExplanation, explain_job

    status = ask(ctx, "status")
    jobs = [entry["name"] for entry in status["jobs"]]
    snapshot = client.take_snapshot(run_directory(ctx))
    explanation: Explanation | JobExplanation
    if name in jobs:
        job = ask(ctx, "job", name=name)["job"]
        classes = ask(ctx, "classes")["classes"]
        also_flows = flows_named(snapshot, name)
        explanation = explain_job(job, status["interfaces"], classes, also_flows, status["jobs"])
    else:
        explanation = explain_flow(snapshot, name, jobs)
    if as_json:
        print_json(explanation.to_json())
    else:
        click.echo(explanation.to_text())


@cli.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--wide", is_flag=True, help="More columns than fit 80 characters.")
@JSON_OPTION
def analyze(file: Path, wide: bool, as_json: bool) -> None:
    """Replay a capture (pcap, pcapng, .gz) through the same BPF programs.

    Needs root for BPF_PROG_TEST_RUN, but no RDMA and no attachment.
    """
    from controller.observe.analyze import analyze_file
    from controller.telemetry.progress import progress_bar

    if not file.exists():
        raise InputError(f"There is no file {file}.", "Name a pcap or pcapng file.")
    with progress_bar(f"reading {file.name}") as progress:
        analysis = analyze_file(file, progress)
    if as_json:
        print_json(analysis.to_json())
    else:
        click.echo(analysis.to_text(wide=wide))


@cli.command()
@JSON_OPTION
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Tell what this machine can and cannot do, why, and the remedy."""
    from controller.ops.doctor import run_doctor

    report = run_doctor()
    if as_json:
        print_json(report.to_json())
    else:
        click.echo(report.to_text())
    ctx.exit(report.exit_code)


@cli.group()
def bench() -> None:
    """Measure, with the yardstick in the same run."""


@bench.command("dataplane")
@click.option("--repeat", type=click.IntRange(min=1000), default=200_000, show_default=True,
              help="Packets in each measurement.")  # fmt: skip
@JSON_OPTION
def bench_dataplane_command(repeat: int, as_json: bool) -> None:
    """Nanoseconds per packet of the BPF programs, beside trivial ones."""
    from controller.dataplane.bench import bench_dataplane
    from controller.telemetry.progress import progress_bar

    with progress_bar("measuring") as progress:
        report = bench_dataplane(progress=progress, repeat=repeat)
    if as_json:
        print_json(report.to_json())
    else:
        click.echo(report.to_text())


@bench.command("flows")
@click.option("--flows", type=click.IntRange(min=64, max=500_000), default=10_000,
              show_default=True, help="Entries of the flow table.")  # fmt: skip
@JSON_OPTION
def bench_flows_command(flows: int, as_json: bool) -> None:
    """Milliseconds to read and show a large flow table."""
    from controller.observe.bench import bench_flows

    result = bench_flows(flows)
    if as_json:
        print_json(result.to_json())
    else:
        click.echo(result.to_text())


bench.add_command(bench_allreduce)
bench.add_command(bench_priority)
cli.add_command(class_group, "class")
cli.add_command(lab_group)
cli.add_command(pool_group)
cli.add_command(predict_command)
cli.add_command(trace_group)
cli.add_command(job)
cli.add_command(policy_command)
cli.add_command(qdisc)


def main() -> None:
    """Entry point of the console script."""
    try:
        cli(prog_name="controller")
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        # `controller flows > /full/disk/file`; here --help is told, too.
        click.echo(f"Error: The output cannot be written: {error.strerror}.", err=True)
        click.echo("  Make room, or write it elsewhere.", err=True)
        # What is left of it would fail once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
