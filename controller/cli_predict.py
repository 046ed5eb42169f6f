"""``controller predict``: how well the next sync window of a trace is predicted."""

from __future__ import annotations

from pathlib import Path

import click

from controller.cli_common import JSON_OPTION, print_json


@click.command("predict")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True))
@click.option("--list", "with_rows", is_flag=True, help="Also list every scored prediction.")
@JSON_OPTION
def predict_command(file: Path, with_rows: bool, as_json: bool) -> None:
    """Score the predictor on FILE: every sync window from those before it.

    FILE is a trace that "trace import" reads, or CSV start_us,bytes (one sync window a
    line); - is standard input. Beside ours stand the errors of predicting the next
    period as the last one, as the mean so far, and as EWMA 0.2.
    """
    from controller.iteration.score import score
    from controller.iteration.score_text import rows_json, score_text
    from controller.iteration.traces import read_trace, require_times
    from controller.telemetry.progress import progress_bar

    with progress_bar(f"reading {file.name}") as progress:
        trace = read_trace(file, progress=progress)
    require_times(trace, str(file))
    with progress_bar(f"scoring {file.name}") as progress:
        result = score(trace, progress)
    if not as_json:
        click.echo(score_text(result, trace.source, with_rows))
        return
    document = result.to_json()
    if with_rows:
        document["predictions"] = rows_json(result)
    print_json(document)
