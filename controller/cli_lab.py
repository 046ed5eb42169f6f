"""``controller lab``: models and simulators, checked against published numbers."""

from __future__ import annotations

import click

from controller.cli_lab_cluster import cluster_command, list_command, run_command
from controller.cli_lab_congestion import congestion_command
from controller.cli_lab_stability import stability_command


@click.group("lab")
def lab_group() -> None:
    """Models and simulators: what this machine cannot measure.

    They need no privileges and no network; see docs/simulation.md.
    """


lab_group.add_command(stability_command)
lab_group.add_command(congestion_command)
lab_group.add_command(cluster_command)
lab_group.add_command(run_command)
lab_group.add_command(list_command)
