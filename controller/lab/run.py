"""Runs policies and seeds of a scenario, several at a time, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import resource_tracker

from controller.errors import StellarError
from controller.lab.report import ClusterReport
from controller.lab.scenario import ClusterScenario
from controller.lab.tasks import Run, Task, simulate, with_best_known
from controller.sim.progress import Progress

# Steps of the progress for each task: a long one shows that it moves.
_STEPS = 1000


def usable_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def run_cluster(
    scenario: ClusterScenario,
    progress: Progress = lambda _done, _total: None,
    processes: int | None = None,
) -> ClusterReport:
    """Simulate all policies of a scenario on all seeds.

    Parameters
    ----------
    scenario
        What to compare.
    progress
        Called now and then.
    processes
        At once; None: as many as there are processors. The result does not depend on it.

    Raises
    ------
    UsageError
        A job never gets through, or does not fit the network.
    StellarError
        A process was killed.
    """
    tasks = [
        Task(scenario, policy, seed)
        for seed in range(scenario.first_seed, scenario.first_seed + scenario.seeds)
        for policy in scenario.policies
    ]
    at_once = min(processes or usable_processors(), len(tasks))
    runs = _here(tasks, progress) if at_once == 1 else _in_processes(tasks, at_once, progress)
    return ClusterReport(scenario, with_best_known(runs))


def with_options(
    scenario: ClusterScenario,
    policies: Sequence[str] = (),
    seeds: int | None = None,
    iterations: int | None = None,
) -> ClusterScenario:
    """A scenario with what a command line says instead of its own.

    Raises
    ------
    UsageError
        A policy is unknown or named twice, or a number is out of range.
    """
    return replace(
        scenario,
        policies=tuple(policies) or scenario.policies,
        seeds=scenario.seeds if seeds is None else seeds,
        iterations=scenario.iterations if iterations is None else iterations,
    )


def _here(tasks: Sequence[Task], progress: Progress) -> list[Run]:
    runs: list[Run] = []
    total = len(tasks) * _STEPS

    def told(done: int, wanted: int) -> None:
        progress(len(runs) * _STEPS + done * _STEPS // max(1, wanted), total)

    for task in tasks:
        runs.append(simulate(task, told))
        told(0, 1)
    return runs


def _in_processes(tasks: Sequence[Task], at_once: int, progress: Progress) -> list[Run]:
    # Not fork: a child would have the threads of the progress bar without their locks' owners.
    context = multiprocessing.get_context("spawn")
    before = set(multiprocessing.active_children())
    # Whoever starts it unblocks SIGINT: not while it has to wait.
    resource_tracker.ensure_running()
    executor = ProcessPoolExecutor(at_once, context, initializer=_begin_worker)
    try:
        with _interrupts_wait():
            # The pool starts its workers here.
            futures = [executor.submit(simulate, task) for task in tasks]
        pending: set[Future[Run]] = set(futures)
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
            progress(len(tasks) - len(pending), len(tasks))
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise StellarError(
            "A process that simulated was killed, perhaps for lack of memory.",
            "Use fewer --processes, or fewer jobs or iterations.",
        ) from None
    finally:
        # After Ctrl-C or an error nobody wants what the others are at.
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
            child.join()
        # The pool's thread ends soon without them. Where it is about to when Python ends, Python
        # may want to wake it by a pipe that it has closed, and tells of that with a traceback.
        executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C comes after the block.

    Within it a worker that is half started would end with a traceback: it waits for the rest of
    what the parent sends it. A worker that is started here never hears of Ctrl-C: it inherits the
    mask. For the parent that is not enough, as the signal then goes to another thread, one of the
    linear algebra library's say, and Python tells the main thread all the same.
    """
    came: list[int] = []
    # Other threads may not set it, and are not interrupted.
    handler = signal.getsignal(signal.SIGINT) if _is_main_thread() else None
    if handler is not None:
        signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _begin_worker() -> None:
    # Ctrl-C in a terminal reaches all; the parent ends the workers, without a traceback of each.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    # The parent was killed; the pool's own threads would wait for work from it for ever.
    os._exit(1)
