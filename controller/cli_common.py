"""What the command groups share: the --json option, and the way to the running controller."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from controller.agent.state import RunDirectory

JSON_OPTION = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON (a stable interface)."
)


def print_json(document: Any) -> None:
    """Print a document as `--json` does."""
    click.echo(json.dumps(document, indent=2))


def run_directory(ctx: click.Context) -> RunDirectory:
    """The run directory that `--run-dir` names."""
    from controller.agent.state import RunDirectory

    return RunDirectory(ctx.obj)


def ask(ctx: click.Context, command: str, **arguments: Any) -> dict[str, Any]:
    """What the running controller answers."""
    from controller.agent import client

    return client.ask(run_directory(ctx), command, **arguments)
