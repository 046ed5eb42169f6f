"""All ranks of a mix as processes: started once, told what to do episode by episode, ended."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from controller.allreduce.report import RUN_DIR_VARIABLE
from controller.allreduce.spawn import Rank, RankError, rank_process
from controller.ops.testbed import BedHost, Testbed
from controller.priority.jobs import DEFAULT_ENV_VARIABLE
from controller.sim.measures import Iteration
from controller.workload.mixes import Mix
from controller.workload.plan import Course, Traffic
from controller.workload.records import merge

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
# Nine interpreters that load numpy and pyverbs on two processors.
_READY_S = 120.0
# The other ranks of a job tell what they know of a failure within this.
_GRACE_S = 2.0
# Ranks read their command and sleep until it begins.
LEAD_NS = 300_000_000


@dataclass
class JobRank(Rank):
    """A rank's process and what it told."""

    job: str = ""

    @property
    def label(self) -> str:
        """For errors."""
        return f"Job {self.job}, rank {self.host.rank} ({self.host.netns})"


class Crew:
    """The ranks of all jobs of a mix on the hosts of a testbed.

    Parameters
    ----------
    mix, traffic
        What they do; `traffic.ranks` is the size of the testbed.
    bed
        With RDMA devices.
    run_dir
        Of the controller, which may come and go.

    Attributes
    ----------
    control_bytes
        Said between all ranks and controllers up to the end of the last episode, both directions.

    Raises
    ------
    RankError
        A rank did not come up.
    """

    def __init__(self, mix: Mix, traffic: Traffic, bed: Testbed, run_dir: Path) -> None:
        self._mix, self._traffic = mix, traffic
        self._episodes = 0
        self._control_bytes: dict[int, int] = {}
        self._stack = contextlib.ExitStack()
        self._ranks: list[JobRank] = []
        with self._stack:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="stlr-"))
            self._selector = self._stack.enter_context(selectors.DefaultSelector())
            for place, job in enumerate(mix.jobs):
                # Readable for this user only, so nobody else can take the place of a rank.
                master = f"unix:{folder}/{place}"
                sizes = traffic.buckets_nbytes(job)
                for host in bed.hosts:
                    options = {
                        "job": job.name, "run_dir": str(run_dir), "traffic": traffic.to_json(),
                        "buckets_nbytes": sizes, "device": host.device, "address": host.address,
                        "place": place + host.rank,
                    }  # fmt: skip
                    started = _started(job.name, host, bed.size, master, options)
                    self._ranks.append(self._stack.enter_context(started))
            for rank in self._ranks:
                assert rank.process.stdout is not None
                os.set_blocking(rank.process.stdout.fileno(), False)
                self._selector.register(rank.process.stdout, selectors.EVENT_READ, rank)
            waiting = {id(rank) for rank in self._ranks}
            for rank, event in self._events(_READY_S, lambda: waiting):
                if event["event"] == "ready":
                    waiting.discard(id(rank))
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def control_bytes(self) -> int:
        """See the class."""
        return sum(self._control_bytes.values())

    def run(
        self,
        courses: Mapping[str, Course],
        progress: Callable[[float], None] = lambda _: None,
        during: Callable[[float], None] = lambda _: None,
    ) -> tuple[Iteration, ...]:
        """Run one episode; jobs that are not named rest.

        Parameters
        ----------
        courses
            Name of a job -> what it does.
        progress
            Called with the share of the iterations that are done, 0 .. 1.
        during
            Called with the same about five times a second while it runs.

        Returns
        -------
        tuple of Iteration
            One for each iteration of each job, merged over its ranks.

        Raises
        ------
        RankError
            A rank failed or stands still.
        """
        number = self._episodes
        self._episodes += 1
        begin_ns = time.monotonic_ns() + LEAD_NS
        active = [rank for rank in self._ranks if rank.job in courses]
        for rank in active:
            course = courses[rank.job]
            command = {
                "episode": number,
                "begin_ns": begin_ns + course.offset_ns,
                "compute_ns": course.compute_ns,
            }
            assert rank.process.stdin is not None
            # A rank that is gone is reported with what it said last.
            with contextlib.suppress(BrokenPipeError):
                rank.process.stdin.write(json.dumps(command).encode() + b"\n")
                rank.process.stdin.flush()
        total = sum(len(courses[rank.job].compute_ns) for rank in active)
        waiting = {id(rank) for rank in active}
        rows: list[dict[str, Any]] = []
        looked_s = 0.0
        for rank, event in self._events(self._patience_s(courses), lambda: waiting, number):
            if event["event"] == "iteration":
                rows.append({**event, "job": rank.job, "rank": rank.host.rank})
                progress(len(rows) / total)
            elif event["event"] == "done":
                waiting.discard(id(rank))
                self._control_bytes[id(rank)] = int(event["control_bytes"])
            if time.monotonic() - looked_s > 0.2:
                looked_s = time.monotonic()
                during(len(rows) / total)
        return merge(rows, self._traffic.ranks)

    def _patience_s(self, courses: Mapping[str, Course]) -> float:
        """How long an episode may take when everything goes one after another, and more."""
        jobs = {job.name: job for job in self._mix.jobs}
        window_s = sum(
            jobs[name].window_ns / 1e9 * len(course.compute_ns) for name, course in courses.items()
        )
        compute_s = max(
            (course.offset_ns + sum(course.compute_ns)) / 1e9 for course in courses.values()
        )
        return 60 + 4 * (window_s + compute_s)

    def _events(
        self, timeout_s: float, waiting: Callable[[], set[int]], episode: int | None = None
    ) -> Iterator[tuple[JobRank, dict[str, Any]]]:
        """What ranks tell until none is waited for; an event of another episode is not told."""
        deadline_s = time.monotonic() + timeout_s
        failed_s: float | None = None
        while waiting():
            for key, _ in self._selector.select(timeout=0.2):
                rank: JobRank = key.data
                data = os.read(key.fd, 1 << 16)
                if not data:
                    self._selector.unregister(key.fileobj)
                    rank.closed = True
                for event in rank.take(data):
                    if event["event"] == "error":
                        rank.error = event
                    elif event.get("episode") == episode:
                        yield rank, event
            now_s = time.monotonic()
            if failed_s is None and any(self._failure(rank) for rank in self._ranks):
                failed_s = now_s
            if failed_s is not None and now_s - failed_s > _GRACE_S:
                raise self._first_failure()
            if now_s > deadline_s:
                slow = next(rank for rank in self._ranks if id(rank) in waiting())
                raise RankError(f"{slow.label} did not get on within {timeout_s:.0f} s.")

    def _failure(self, rank: JobRank) -> RankError | None:
        failure = rank.failure()
        if failure is None and rank.closed and rank.process.poll() == 0:
            return RankError(f"{rank.label} ended before it was told to.")
        return failure

    def _first_failure(self) -> RankError:
        failed = [rank for rank in self._ranks if self._failure(rank)]
        # A rank that died without a word explains what the others say about it.
        first = next((rank for rank in failed if rank.error is None), failed[0])
        failure = self._failure(first)
        assert failure is not None
        return failure


@contextlib.contextmanager
def _started(
    job: str, host: BedHost, size: int, master: str, options: Mapping[str, Any]
) -> Iterator[JobRank]:
    """A rank's process; gone afterwards."""
    environment = os.environ | {
        "RANK": str(host.rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": master,
        # The controller's default rule knows the job's flows by it.
        DEFAULT_ENV_VARIABLE: job,
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH")))
        ),
        # Reductions are small; one thread of numpy's each would only get in the way.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    for name in ("MASTER_PORT", "STELLAR_MASTER_ADDR", "STELLAR_MASTER_PORT", RUN_DIR_VARIABLE):
        environment.pop(name, None)
    command = host.command(sys.executable, "-m", "controller.workload.rank", json.dumps(options))
    with rank_process(command, environment, stdin=subprocess.PIPE) as (process, stderr):
        yield JobRank(host, process, stderr, job=job)
