"""One rank of one job: computes (sleeps), then sends its gradient, again and again.

crew.py runs it as a program: ``python -m controller.workload.rank JSON``. Lines of JSON on its
standard input tell it what to do: {"episode": n, "begin_ns": t, "compute_ns": [...]}; lines on its
standard output tell what happens: {"event": "ready" | "iteration" | "done" | "error", ...}.
Times are CLOCK_MONOTONIC, which all ranks on one kernel share.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from controller.allreduce.environment import Placement
from controller.errors import StellarError
from controller.workload.plan import Traffic

if TYPE_CHECKING:
    from controller.allreduce.communicator import Communicator


class Trainer:
    """The loop of one rank.

    Parameters
    ----------
    comm
        Of the job.
    buckets
        The gradient, in registered memory.
    """

    def __init__(self, comm: Communicator, buckets: Sequence[np.ndarray[Any, Any]]) -> None:
        self._comm = comm
        self._buckets = buckets
        self._done = 0

    def episode(self, number: int, begin_ns: int, compute_ns: Sequence[int]) -> None:
        """Run iterations; tells each of them."""
        _sleep_until(begin_ns)
        for place, length_ns in enumerate(compute_ns):
            compute_begin_ns = time.monotonic_ns()
            _sleep_until(compute_begin_ns + length_ns)
            window_begin_ns = time.monotonic_ns()
            # The controller tells iterations apart by it: it goes on from episode to episode.
            self._comm.iteration = self._done
            for handle in [self._comm.all_reduce(bucket, asynchronous=True)
                           for bucket in self._buckets]:  # fmt: skip
                handle.wait()
            window_end_ns = time.monotonic_ns()
            self._done += 1
            _emit(
                "iteration", episode=number, iteration=place, compute_begin_ns=compute_begin_ns,
                window_begin_ns=window_begin_ns, window_end_ns=window_end_ns,
            )  # fmt: skip
        _emit("done", episode=number, control_bytes=_control_bytes(self._comm))


def _control_bytes(comm: Communicator) -> int:
    """What was said to controllers; the communicator has no public way to its reporter."""
    reporter = comm._reporter
    return reporter.control_bytes if reporter else 0


def _sleep_until(time_ns: int) -> None:
    left_ns = time_ns - time.monotonic_ns()
    if left_ns > 0:
        time.sleep(left_ns / 1e9)


def _emit(event: str, **fields: Any) -> None:
    # One write a line, and at once: the parent shows progress by it.
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def _run(options: dict[str, Any]) -> None:
    # Brings pyverbs along: what is wrong with the arguments shows before.
    from controller.allreduce.communicator import Communicator

    sizes: list[int] = options["buckets_nbytes"]
    with Communicator.create(
        Placement.from_environment(os.environ),
        device=options["device"],
        gid_address=options["address"],
        settings=Traffic.from_json(options["traffic"]).settings(sum(sizes)),
        job=options["job"],
        run_dir=options["run_dir"],
    ) as comm:
        with comm.pool.lease(sum(sizes)) as lease:
            gradient = lease.array(np.float32, sum(sizes) // 4)
            gradient[:] = 0
            ends = np.cumsum([size // 4 for size in sizes])
            trainer = Trainer(comm, np.split(gradient, ends[:-1]))
            _emit("ready")
            for line in sys.stdin:
                command = json.loads(line)
                trainer.episode(command["episode"], command["begin_ns"], command["compute_ns"])
        # Who leaves early would look like a dead peer to those who still work.
        comm.barrier()


def main() -> int:
    """Run one rank for crew.py; return its exit status."""
    options = json.loads(sys.argv[1])
    # Threads of one process that hand over between processors cost milliseconds in a user-mode
    # kernel; launchers bind their ranks, too.
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[options["place"] % len(processors)]})
    try:
        _run(options)
    except StellarError as error:
        _emit(
            "error", kind=type(error).__name__, message=error.message, remedy=error.remedy,
            exit_code=error.exit_code,
        )  # fmt: skip
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
