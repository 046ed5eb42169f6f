"""``controller pool``: registration pools of the processes of this host, and their traces."""

from __future__ import annotations

import click

from controller.cli_common import JSON_OPTION, print_json, run_directory
from controller.cli_pool_replay import pool_replay


@click.group("pool")
def pool_group() -> None:
    """Registration pools: what they hold, and how eviction policies would do."""


@pool_group.command("status")
@JSON_OPTION
@click.pass_context
def pool_status(ctx: click.Context, as_json: bool) -> None:
    """Show the pools of all running processes; as root, those of every user.

    Needs no controller: each process tells by itself what its pools do.
    """
    from controller.memory.status_files import read_pools, readable_directories
    from controller.telemetry.pool_views import pools_text

    pools = read_pools(readable_directories(run_directory(ctx).path))
    if as_json:
        print_json({"pools": pools})
    else:
        click.echo(pools_text(pools))


pool_group.add_command(pool_replay)
