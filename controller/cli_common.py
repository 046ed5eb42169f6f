"""What the command groups share: the --json option, and the way to the running controller."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from controller.errors import UsageError

if TYPE_CHECKING:
    from controller.agent.state import RunDirectory

JSON_OPTION = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON (a stable interface)."
)


def print_json(document: Any) -> None:
    """Print a document as `--json` does."""
    # NaN and infinity are no JSON: what reads it would stumble.
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def refuse_options(ctx: click.Context, reason: str, *names: str) -> None:
    """Refuse options that would be ignored.

    Parameters
    ----------
    ctx
        Of the command.
    reason
        Why they have no effect, as in "without -o nothing is written".
    names
        Of the command's parameters; those that were given are refused.

    Raises
    ------
    UsageError
        One of them was given.
    """
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is ParameterSource.COMMANDLINE:
            raise UsageError(f"{parameter.opts[-1]} has no effect here: {reason}.", "Leave it out.")


def run_directory(ctx: click.Context) -> RunDirectory:
    """The run directory that `--run-dir` names."""
    from controller.agent.state import RunDirectory

    return RunDirectory(ctx.obj)


def ask(ctx: click.Context, command: str, **arguments: Any) -> dict[str, Any]:
    """What the running controller answers."""
    from controller.agent import client

    return client.ask(run_directory(ctx), command, **arguments)
