"""``controller trace import|show``: what traces of training communication hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from controller.cli_common import JSON_OPTION, print_json, refuse_options

if TYPE_CHECKING:
    from controller.iteration.series import Trace

_FILE = click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
_FORMAT_OPTION = click.option(
    "--format", "format_name", metavar="NAME",
    help="Do not guess: kineto, chakra, nccl, straggler, minibatch, aicb or csv.",
)  # fmt: skip
_FORCE_OPTION = click.option("--force", is_flag=True, help="Overwrite the output file.")


def _read(file: Path, format_name: str | None) -> Trace:
    from controller.iteration.traces import read_trace
    from controller.telemetry.progress import progress_bar

    with progress_bar(f"reading {file.name}") as progress:
        return read_trace(file, format_name, progress)


@click.group("trace")
def trace_group() -> None:
    """Traces of training communication: what they hold, as table, picture or CSV."""


@trace_group.command("import")
@_FILE
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="OUT.csv",
              help="Write it as CSV that predict and trace show read.")  # fmt: skip
@click.option("--windows", "as_windows", is_flag=True,
              help="Write sync windows instead of collectives.")  # fmt: skip
@_FORMAT_OPTION
@_FORCE_OPTION
@JSON_OPTION
@click.pass_context
def trace_import(
    ctx: click.Context,
    file: Path,
    output: Path | None,
    as_windows: bool,
    format_name: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Read FILE and say what it holds: collectives, bytes, iterations, sync windows.

    FILE is a PyTorch profiler trace, a Chakra execution trace (JSON), an NCCL log or nccl-tests
    table, or CSV (straggler, PAI mini-batch, AICB, start_us,bytes); plain or gzip; - is stdin.
    """
    from controller.files import check_writable, write_text
    from controller.iteration.traces.output import trace_csv
    from controller.iteration.traces.summary import summarize, sync_windows
    from controller.telemetry.trace_views import summary_text

    if output is None:
        refuse_options(ctx, "without -o nothing is written", "as_windows", "force")
    else:
        check_writable(output, force)
    trace = _read(file, format_name)
    windows = sync_windows(trace)
    summary = summarize(trace, windows)
    written = 0
    if output is not None:
        text, written = trace_csv(trace, windows, as_windows, str(file))
        write_text(output, text, force)
    if as_json:
        print_json(summary.to_json() | {"output": str(output) if output else None})
        return
    click.echo(summary_text(summary))
    if output is not None:
        click.echo(f"\n{written} rows written to {output}")


@trace_group.command("show")
@_FILE
@click.option("--svg", type=click.Path(path_type=Path), metavar="OUT.svg",
              help="Also write the timeline as a picture.")  # fmt: skip
@click.option("--iterations", "most", type=click.IntRange(min=1), default=20, show_default=True,
              help="Show the first N iterations.")  # fmt: skip
@_FORMAT_OPTION
@_FORCE_OPTION
@JSON_OPTION
@click.pass_context
def trace_show(
    ctx: click.Context,
    file: Path,
    svg: Path | None,
    most: int,
    format_name: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Show the iterations of FILE: a table, and a timeline of sync windows and compute phases."""
    from controller.files import check_writable, write_text
    from controller.iteration.traces import has_times, require_times
    from controller.iteration.traces.summary import (
        iteration_rows,
        summarize,
        sync_windows,
        timeline_rows,
    )
    from controller.telemetry.timeline import svg_timeline, text_timeline
    from controller.telemetry.trace_views import iterations_text, summary_text

    if svg is None:
        refuse_options(ctx, "without --svg nothing is written", "force")
    else:
        check_writable(svg, force)
    trace = _read(file, format_name)
    if svg is not None:
        require_times(trace, str(file))
    windows = sync_windows(trace)
    rows = iteration_rows(trace, windows)
    summary = summarize(trace, windows)
    # One more than shown: the last one's period is known then.
    shown = timeline_rows(trace, windows[: most + 1])[:most]
    if svg is not None:
        write_text(svg, svg_timeline(shown, f"Sync windows of {file.name}"), force)
    if as_json:
        print_json(
            summary.to_json()
            | {"shown": [row.to_json(number) for number, row in enumerate(rows[:most])]}
        )
        return
    click.echo(summary_text(summary, with_groups=not rows))
    if rows:
        click.echo("\n" + iterations_text(rows[:most]))
        if len(rows) > most:
            click.echo(f"{len(rows) - most} more iterations; --iterations {len(rows)} shows all")
        click.echo("\n" + text_timeline(shown))
    elif has_times(trace):
        click.echo("\nno sync window was found in these collectives")
    if svg is not None:
        click.echo(f"\npicture written to {svg}")
