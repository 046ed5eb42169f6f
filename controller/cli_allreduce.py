"""``controller bench allreduce``: collectives measured and checked, by the flags of nccl-tests."""

from __future__ import annotations

from typing import Any

import click

from controller.cli_common import JSON_OPTION, print_json

_COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
_ALGORITHMS = ("auto", "ring", "halving-doubling")


@click.command("allreduce")
@click.option("-b", "--minbytes", "min_bytes", metavar="SIZE", help="Smallest size.  [1M]")
@click.option("-e", "--maxbytes", "max_bytes", metavar="SIZE", help="Largest size.  [16M]")
@click.option("-f", "--stepfactor", "factor", type=float, help="Factor between sizes.  [4]")
@click.option("-i", "--stepbytes", "step_bytes", metavar="SIZE",
              help="Difference between sizes, in place of a factor.")  # fmt: skip
@click.option("-n", "--iters", type=click.IntRange(1, 1_000_000), default=20, show_default=True,
              help="Measured operations of each kind.")  # fmt: skip
@click.option("-w", "--warmup_iters", "warmup_iters", type=click.IntRange(0, 1_000_000), default=1,
              show_default=True, help="Operations before them.")  # fmt: skip
@click.option("-c", "--check", "checks", type=click.IntRange(0, 1_000_000), default=1,
              show_default=True, help="Checked operations of each kind; 0: none.")  # fmt: skip
@click.option("-o", "--op", metavar="OP", help="sum, prod, min, max, avg, all.  [sum]")
@click.option("-d", "--datatype", "dtype", metavar="TYPE",
              help="int8, int32, int64, float16 (half), bfloat16, float32 (float), float64 "
                   "(double), all.  [float32]")  # fmt: skip
@click.option("-r", "--root", type=click.IntRange(0), default=0, show_default=True,
              help="Of a broadcast.")  # fmt: skip
@click.option("--collective", type=click.Choice(_COLLECTIVES), help="[all_reduce]")
@click.option("--algorithm", type=click.Choice(_ALGORITHMS), default="auto", show_default=True)
@click.option("--chunk", metavar="SIZE", help="Bytes of a message at most.")
@click.option("--random", type=click.IntRange(0, 10_000_000), default=0, metavar="N",
              help="Check N operations of random kind and size, up to -e [1M], instead of "
                   "measuring. -o, -d and --collective narrow the choice.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True,
              help="Of the inputs, and of --random.")  # fmt: skip
@click.option("--spawn", type=click.IntRange(1, 64), metavar="N",
              help="Build N hosts of network namespaces and soft-RoCE, run a rank on each, and "
                   "remove them. Needs root.")  # fmt: skip
@click.option("--mtu", "mtu_bytes", type=click.IntRange(576, 65_535), default=4200,
              show_default=True, help="Of the spawned hosts' interfaces.")  # fmt: skip
@click.option("--rate", metavar="R", help="Of the spawned hosts' links: 100mbit.  [unlimited]")
@click.option("--peers", is_flag=True,
              help="Measure ib_write_bw in the same ring, and other implementations that are "
                   "installed, on the spawned hosts as well.")  # fmt: skip
@click.option("--record", type=click.Path(dir_okay=False, writable=True, resolve_path=True),
              metavar="FILE", help="Rank 0 writes a trace of its requests to the pool, for "
                                   "controller pool replay; --random makes many.")  # fmt: skip
@click.option("--timeout", "timeout_s", type=click.FloatRange(0.1, 86400), default=30.0,
              show_default=True, help="Seconds after which an operation that does not move "
                                      "fails.")  # fmt: skip
@JSON_OPTION
@click.pass_context
def bench_allreduce(
    ctx: click.Context,
    /,
    spawn: int | None,
    mtu_bytes: int,
    rate: str | None,
    peers: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Time and bandwidth of AllReduce, and whether every element is right.

    Without --spawn this is one rank of a group that the environment tells (torchrun, srun,
    mpirun); rank 0 prints. Fails when an element is wrong.

    Inputs are integers that every type holds exactly, so the allowed error is 0. The time is
    that of the slowest rank; busbw is as nccl-tests define it.

    \b
      controller bench allreduce --spawn 3
      controller bench allreduce --spawn 4 -b 8 -e 16M -f 2 --peers
      controller bench allreduce --spawn 3 --random 10000
      torchrun --nproc-per-node 2 --no-python controller bench allreduce
    """  # noqa: D301 - \b tells click to keep the lines
    from controller.allreduce.bench_plan import make_plan
    from controller.allreduce.bench_run import bench_here, bench_spawned
    from controller.telemetry.progress import progress_bar

    plan = make_plan(**options)
    if spawn is None:
        report, is_first = bench_here(plan, {"--rate": rate, "--peers": peers}, click.echo, as_json)
    else:
        with progress_bar(f"{spawn} ranks") as progress:
            report = bench_spawned(plan, spawn, mtu_bytes, rate, peers, progress)
        is_first = True
        if not as_json:
            click.echo(report.to_text())
    if is_first and as_json:
        print_json(report.to_json())
    if report.wrong:
        ctx.exit(1)
