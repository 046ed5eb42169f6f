"""Where reports of ``controller lab`` go: the terminal, and a folder for JSON and figures."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from controller.cli_common import print_json

if TYPE_CHECKING:
    from controller.lab.kinds import Report

REPORT = "report.json"


class _Folder(click.Path):
    """A folder's path; an empty one, as of a variable that is not set, is not taken for here."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        from controller.errors import UsageError

        if not str(value):
            raise UsageError("-o names no folder: it is empty.", "Name one; . is this one.")
        return super().convert(value, param, ctx)


FOLDER = _Folder(path_type=Path)


def prepare(output: Path | None) -> None:
    """Complain before long work about what would fail after it.

    Raises
    ------
    UsageError
        Figures cannot be drawn, or the folder cannot be made or written to.
    """
    from controller.errors import UsageError
    from controller.files import check_writable
    from controller.lab.drawing import require_matplotlib

    if output is None:
        return
    require_matplotlib()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{str(output)[:200]} is no folder that can be made: {reason}.", "Name another one."
        ) from None
    check_writable(output / REPORT, force=True)


def show(report: Report, output: Path | None, as_json: bool) -> None:
    """Write the files where a folder is named, and print the report."""
    from controller.files import write_text

    paths: list[Path] = []
    document = report.to_json()
    if output is not None:
        path = output / REPORT
        write_text(path, json.dumps(document, indent=2, allow_nan=False) + "\n", force=True)
        paths = [path, *report.figures(output)]
    if as_json:
        print_json(document)
        return
    click.echo(report.text())
    if paths:
        click.echo(f"\nwritten to {output}: {', '.join(path.name for path in paths)}")
