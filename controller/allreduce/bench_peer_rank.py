"""One rank of another implementation's AllReduce: in place, float32, sum.

bench_peers.py runs it as a program, its arguments KIND ITERS SIZE...,
with KIND ``gloo`` (torch.distributed) or ``mpi`` (mpi4py). The last line of rank 0 is JSON:
{bytes: microseconds, the average of the slowest rank}.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np


def _measure(run: Callable[[], object], barrier: Callable[[], object], iters: int) -> float:
    """Average of some operations on this rank, in microseconds, after one to warm up."""
    run()
    barrier()
    start_ns = time.perf_counter_ns()
    for _ in range(iters):
        run()
    return (time.perf_counter_ns() - start_ns) / 1e3 / iters


def _gloo(iters: int, sizes: Sequence[int]) -> dict[int, float]:
    torch = importlib.import_module("torch")
    distributed = importlib.import_module("torch.distributed")
    # As many threads as processors in every rank would stand in one another's way.
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    found = {}
    for nbytes in sizes:
        tensor = torch.zeros(nbytes // 4, dtype=torch.float32)
        run = functools.partial(distributed.all_reduce, tensor)
        time_us = torch.tensor([_measure(run, distributed.barrier, iters)])
        distributed.all_reduce(time_us, op=distributed.ReduceOp.MAX)
        found[nbytes] = float(time_us[0])
    distributed.destroy_process_group()
    return found if os.environ["RANK"] == "0" else {}


def _mpi(iters: int, sizes: Sequence[int]) -> dict[int, float]:
    mpi = importlib.import_module("mpi4py.MPI")
    world = mpi.COMM_WORLD
    found = {}
    for nbytes in sizes:
        array = np.zeros(nbytes // 4, np.float32)
        run = functools.partial(world.Allreduce, mpi.IN_PLACE, array)
        time_us = _measure(run, world.Barrier, iters)
        found[nbytes] = float(world.allreduce(time_us, op=mpi.MAX))
    return found if world.rank == 0 else {}


def main() -> None:
    """Measure, and print on rank 0."""
    kind, iters, *sizes = sys.argv[1:]
    found = {"gloo": _gloo, "mpi": _mpi}[kind](int(iters), [int(size) for size in sizes])
    if found:
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
