"""``controller lab congestion``: flows under DCQCN into one port, by simulation."""

from __future__ import annotations

from pathlib import Path

import click

from controller.cli_common import JSON_OPTION
from controller.cli_lab_output import FOLDER, prepare, show


def _degrees(text: str | None) -> tuple[int, ...]:
    from controller.errors import UsageError

    if text is None:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--degrees {text[:80]!r} cannot be read; allowed: numbers and commas, 2,16,255.",
            "Correct it.",
        ) from None


@click.command("congestion")
@click.argument("scenario", default="incast")
@click.option("--degrees", metavar="D,D,...", help="Senders, instead of the scenario's.")
@click.option("--seeds", type=int, metavar="N", help="Instead of the scenario's number.")
@click.option("-o", "--output", type=FOLDER, metavar="FOLDER",
              help="Write report.json and figures there.")  # fmt: skip
@JSON_OPTION
def congestion_command(
    scenario: str, degrees: str | None, seeds: int | None, output: Path | None, as_json: bool
) -> None:
    """Throughput stability, queue and fairness of DCQCN's flows into one port.

    SCENARIO is a built-in one (controller lab list) or a TOML file, see
    docs/simulation.md. Standard DCQCN is simulated beside each of our changes to it, on
    the same seeds.

    \b
      controller lab congestion incast-quick
      controller lab congestion incast --degrees 16,255 --seeds 3
      controller lab congestion steady -o results
    """  # noqa: D301 - \b tells click to keep the lines
    from controller.errors import UsageError
    from controller.lab.congestion_scenario import KIND, load_scenario, run, with_options
    from controller.lab.kinds import find_scenario, runs_any
    from controller.telemetry.progress import progress_bar

    found = find_scenario(scenario)
    if found.kind != KIND:
        raise UsageError(
            f"{found.path}: key kind is {found.kind!r}; allowed here: {KIND!r}.",
            runs_any(scenario),
        )
    loaded = with_options(load_scenario(found.path), _degrees(degrees), seeds)
    prepare(output)
    with progress_bar(loaded.name) as progress:
        report = run(loaded, progress)
    show(report, output, as_json)
