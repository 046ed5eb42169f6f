"""``controller pool replay``: what a trace of requests comes to under an eviction policy."""

from __future__ import annotations

from pathlib import Path

import click

from controller.cli_common import JSON_OPTION, print_json


@click.command("replay")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--policy", default="heat", show_default=True,
              help="heat, lru, lirs, s3-fifo, w-tinylfu, belady (knows the future), or "
                   "all.")  # fmt: skip
@click.option("--capacity-bytes", "capacity", required=True, metavar="SIZE",
              help="What the pool holds: 8589934592, 8GiB, ...")  # fmt: skip
@click.option("--prefetch", is_flag=True, help="Also fetch what the policy expects next.")
@JSON_OPTION
def pool_replay(file: Path, policy: str, capacity: str, prefetch: bool, as_json: bool) -> None:
    """Replay FILE (CSV key,bytes[,register_us], one request a line).

    In a key such as job3/bucket7 the part before the last / names the stream whose order of
    requests may repeat.
    """
    from controller.memory.replay import ALL_POLICIES, replay_file, results_text
    from controller.telemetry.progress import progress_bar
    from controller.units import parse_bytes

    capacity_bytes = parse_bytes(capacity, "--capacity-bytes")
    with progress_bar(f"replaying {file.name}") as progress:
        results = replay_file(file, policy, capacity_bytes, prefetch, progress)
    if not as_json:
        click.echo(results_text(results))
    elif policy == ALL_POLICIES:
        print_json({"policies": [result.to_json() for result in results]})
    else:
        print_json(results[0].to_json())
