"""Start the ranks of a benchmark in a testbed, follow them, and end all of them when one fails."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from controller.allreduce.bench_plan import BenchPlan
from controller.allreduce.bench_report import BenchReport, BenchResult, RandomResult
from controller.errors import StellarError
from controller.ops.testbed import BedHost, Testbed

# After the first failure, the others get so long to tell theirs.
_GRACE_S = 2.0
# After its last word, a rank gets so long to end.
_END_S = 20.0
_MAX_LINE_BYTES = 1 << 20
_STDERR_LINES = 15
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class RankError(StellarError):
    """A rank failed.

    Parameters
    ----------
    message, remedy
        As of every StellarError.
    exit_code
        Of the rank's error.
    """

    def __init__(self, message: str, remedy: str = "", exit_code: int = 1) -> None:
        super().__init__(message, remedy)
        self.exit_code = exit_code


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however that ends.

    For ``preexec_fn``: it survives the exec of ``ip netns exec``, too.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Rank:
    """A rank's process and what it told.

    Parameters
    ----------
    host
        Where it runs.
    process
        It; its standard output carries events.
    stderr
        File with what it wrote there.
    """

    host: BedHost
    process: subprocess.Popen[bytes]
    stderr: IO[bytes]
    pending: bytearray = field(default_factory=bytearray)
    error: dict[str, Any] | None = None
    done: bool = False
    closed: bool = False
    exited_s: float | None = None

    def take(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The events of what was read."""
        self.pending += data
        while (end := self.pending.find(b"\n")) >= 0:
            line = bytes(self.pending[:end])
            del self.pending[: end + 1]
            try:
                event = json.loads(line)
            except ValueError:
                continue  # a library printed something
            if isinstance(event, dict) and "event" in event:
                yield event
        if len(self.pending) > _MAX_LINE_BYTES:
            self.pending.clear()

    def is_silent(self, now_s: float) -> bool:
        """Whether it ended a while ago and something it started keeps its output open."""
        if self.exited_s is None and self.process.poll() is not None:
            self.exited_s = now_s
        return self.exited_s is not None and now_s - self.exited_s > _GRACE_S

    @property
    def label(self) -> str:
        """For errors."""
        return f"Rank {self.host.rank} ({self.host.netns})"

    def failure(self) -> RankError | None:
        """What went wrong with it; None: nothing, or not yet."""
        if self.error is not None:
            return RankError(
                f"{self.label}: {self.error['message']}",
                str(self.error.get("remedy", "")),
                int(self.error.get("exit_code", 1)),
            )
        status = self.process.poll()
        # What it said last may still be on its way.
        if status is None or not self.closed or (status == 0 and self.done):
            return None
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited {status}"
        said = self._stderr_tail()
        return RankError(f"{self.label} {how}" + (f":\n{said}" if said else "."))

    def _stderr_tail(self) -> str:
        self.stderr.seek(0)
        text = self.stderr.read().decode(errors="replace")
        return "\n".join(text.strip().splitlines()[-_STDERR_LINES:])


def run_spawned(
    plan: BenchPlan, bed: Testbed, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> BenchReport:
    """Run a plan with one rank on each host of a testbed.

    Parameters
    ----------
    plan
        What to measure.
    bed
        With RDMA devices.
    progress
        Called with bytes (or operations) done and to do.

    Raises
    ------
    RankError
        A rank failed; the first one that did, or the one that died without a word.
    """
    plan.check_root(bed.size)
    gathered = _Gathered(progress)
    with tempfile.TemporaryDirectory(prefix="stlr-") as folder, contextlib.ExitStack() as stack:
        # Readable for this user only, so nobody else can take the place of a rank.
        master = f"unix:{folder}/rendezvous"
        ranks = [stack.enter_context(_started(plan, bed, host, master)) for host in bed.hosts]
        _follow(ranks, gathered)
    facts = gathered.facts | {"mtu_bytes": bed.mtu_bytes, "rate_Bps": bed.rate_Bps}
    return BenchReport(bed.size, plan.collective, tuple(gathered.results), facts, gathered.random)


@dataclass
class _Gathered:
    """What rank 0 told."""

    progress: Callable[[int, int], None]
    facts: dict[str, Any] = field(default_factory=dict)
    results: list[BenchResult] = field(default_factory=list)
    random: RandomResult | None = None

    def take(self, event: dict[str, Any]) -> None:
        """Keep an event."""
        match event["event"]:
            case "facts":
                self.facts = event["facts"]
            case "progress":
                self.progress(event["done"], event["total"])
            case "result":
                self.results.append(BenchResult(**event["result"]))
            case "random":
                self.random = RandomResult(**event["random"])


@contextlib.contextmanager
def _started(plan: BenchPlan, bed: Testbed, host: BedHost, master: str) -> Iterator[Rank]:
    """A rank's process; gone afterwards."""
    environment = os.environ | {
        "RANK": str(host.rank),
        "WORLD_SIZE": str(bed.size),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": master,
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH")))
        ),
    }
    for name in ("MASTER_PORT", "STELLAR_MASTER_ADDR", "STELLAR_MASTER_PORT"):
        environment.pop(name, None)
    command = host.command(
        sys.executable, "-m", "controller.allreduce.bench_rank", plan.to_text(), host.device,
        host.address,
    )  # fmt: skip
    with rank_process(command, environment, stdin=subprocess.DEVNULL) as (process, stderr):
        yield Rank(host, process, stderr)


@contextlib.contextmanager
def rank_process(
    command: Sequence[str], environment: Mapping[str, str], stdin: int
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """A process of a rank and what it writes to standard error; gone afterwards.

    Parameters
    ----------
    stdin
        As for subprocess.Popen.
    """
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            cwd="/",  # where no module of somebody is found first
            # Ctrl-C is ours to handle.
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            yield process, stderr
        finally:
            end([process])
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes and what they started, and wait: their devices can then be deleted.

    Each must lead a session of its own.
    """
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def _follow(ranks: Sequence[Rank], gathered: _Gathered) -> None:
    """Read events until all ranks have ended well, or one has not."""
    failed_s: float | None = None
    first: Rank | None = None
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            assert rank.process.stdout is not None
            os.set_blocking(rank.process.stdout.fileno(), False)
            selector.register(rank.process.stdout, selectors.EVENT_READ, rank)
        while selector.get_map():
            for key, _ in selector.select(timeout=0.2):
                rank = key.data
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                    rank.closed = True
                for event in rank.take(data):
                    rank.done |= event["event"] == "done"
                    if event["event"] == "error":
                        rank.error = event
                    elif rank.host.rank == 0:
                        gathered.take(event)
            for key in list(selector.get_map().values()):
                if key.data.is_silent(time.monotonic()):
                    selector.unregister(key.fileobj)
                    key.data.closed = True
            if first is None:
                first = next((rank for rank in ranks if rank.failure() is not None), None)
                failed_s = time.monotonic() if first is not None else None
            if failed_s is not None and time.monotonic() - failed_s > _GRACE_S:
                break
    if first is None:
        _await_ends(ranks)
        first = next((rank for rank in ranks if rank.failure() is not None), None)
    if first is None:
        return
    # A rank that died without a word explains what the others say about it.
    silent = next((r for r in ranks if r.error is None and r.failure() is not None), first)
    failure = silent.failure()
    assert failure is not None
    raise failure


def _await_ends(ranks: Sequence[Rank]) -> None:
    deadline_s = time.monotonic() + _END_S
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, deadline_s - time.monotonic()))
        if rank.process.poll() is None:
            raise RankError(f"{rank.label} did not end within {_END_S:g} s of its last word.")
