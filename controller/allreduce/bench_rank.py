"""One rank of ``controller bench allreduce``.

spawn.py runs it as a program: ``python -m controller.allreduce.bench_rank PLAN [DEVICE ADDRESS]``.
Lines of JSON on its standard output tell what happens: {"event": "facts" | "progress" | "result" |
"random" | "done" | "error", ...}. Rank 0 alone tells results and progress.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from controller.allreduce.bench import Bench, Exchange, Progress
from controller.allreduce.bench_plan import BenchPlan
from controller.allreduce.bench_report import BenchReport, BenchResult
from controller.allreduce.environment import Placement, TlsFiles
from controller.errors import StellarError

if TYPE_CHECKING:
    from controller.allreduce.communicator import Communicator

_PROGRESS_PERIOD_S = 0.2


def run_rank(
    plan: BenchPlan,
    *,
    device: str | None = None,
    gid_address: str | None = None,
    on_head: Callable[[int, BenchReport], None] = lambda _rank, _report: None,
    on_result: Callable[[BenchResult], None] = lambda _: None,
    progress: Progress = lambda _done, _total: None,
) -> tuple[int, BenchReport]:
    """Join the group that the environment tells and run the plan there.

    Parameters
    ----------
    plan
        What to measure; the same on all ranks.
    device, gid_address
        RDMA device and address to speak from; the communicator's choice without.
    on_head
        Called with the rank and a report without results, once the group is complete.
    on_result, progress
        Called on every rank.

    Returns
    -------
    tuple of int and BenchReport
        The rank, and what was measured, the same on all ranks.

    Raises
    ------
    StellarError
        What the communicator raises.
    """
    # Brings pyverbs along: not before the arguments are known to be right.
    from controller.allreduce.communicator import Communicator

    placement = Placement.from_environment(os.environ)
    record = plan.record if placement.rank == 0 else None
    with Communicator.create(
        placement,
        device=device,
        gid_address=gid_address,
        tls=TlsFiles.from_environment(os.environ),
        settings=replace(plan.settings(), record=record),
    ) as comm:
        facts = _facts(comm, plan)
        head = BenchReport(comm.size, plan.collective, facts=facts)
        on_head(comm.rank, head)
        bench = Bench(comm, plan, _exchange(comm, plan), progress)
        if plan.random:
            outcome = bench.random()
            report = BenchReport(comm.size, plan.collective, facts=facts, random=outcome)
        else:
            results = []
            for result in bench.results():
                on_result(result)
                results.append(result)
            report = BenchReport(comm.size, plan.collective, tuple(results), facts)
        # Who leaves early would look like a dead peer to those who still work.
        comm.barrier()
        return comm.rank, report


def _exchange(comm: Communicator, plan: BenchPlan) -> Exchange:
    """What ranks tell one another about results: not by the collectives that are being checked."""
    return lambda document: comm.exchange(document, plan.timeout_s)


def _facts(comm: Communicator, plan: BenchPlan) -> dict[str, Any]:
    device = comm.device
    everyone = _exchange(comm, plan)({"device": f"{device.name}, {device.gid.address}"})
    return {
        "devices": [str(one["device"]) for one in everyone],
        "algorithm": plan.algorithm,
        "chunk_bytes": comm.settings.chunk_nbytes,
        "kernel": os.uname().release,
        "iters": plan.iters,
        "warmup_iters": plan.warmup_iters,
        "checks": plan.checks,
    }


# ---- as a program ----


def _emit(event: str, **fields: Any) -> None:
    # One write a line, and at once: the parent shows progress by it.
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def _bind(rank: int) -> None:
    """Keep this rank on one processor, in turns, as launchers do.

    Its threads hand over to one another all the time; between processors that costs more, and in
    a user-mode kernel milliseconds.
    """
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[rank % len(processors)]})


def main() -> int:
    """Run one rank for spawn.py; return its exit status."""
    plan = BenchPlan.from_text(sys.argv[1])
    device, address = (sys.argv[2:4] + [""] * 2)[:2]
    tells = os.environ.get("RANK") == "0"
    _bind(int(os.environ.get("RANK", "0")))
    last_s = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= _PROGRESS_PERIOD_S:
            last_s = now_s
            _emit("progress", done=done, total=total)

    def facts(_rank: int, head: BenchReport) -> None:
        _emit("facts", facts=dict(head.facts))

    def result(found: BenchResult) -> None:
        _emit("result", result=asdict(found))

    try:
        _, report = run_rank(
            plan,
            device=device or None,
            gid_address=address or None,
            on_head=facts if tells else _ignore,
            on_result=result if tells else _ignore,
            progress=progress if tells else _ignore,
        )
        if tells and report.random is not None:
            _emit("random", random=asdict(report.random))
        _emit("done")
    except StellarError as error:
        _emit(
            "error", kind=type(error).__name__, message=error.message, remedy=error.remedy,
            exit_code=error.exit_code,
        )  # fmt: skip
        return error.exit_code
    return 0


def _ignore(*_: object) -> None:
    """Ranks other than 0 tell only how they ended."""


if __name__ == "__main__":
    sys.exit(main())
