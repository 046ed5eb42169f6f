"""The controller of an episode: none for ``fair``, else one with a policy, started and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from controller.agent.state import RunDirectory
from controller.errors import ConflictError, InputError, PrivilegeError, StellarError
from controller.ops.testbed import Testbed
from controller.priority.jobs import DEFAULT_CLASS
from controller.workload.fabric import target
from controller.workload.mixes import Mix
from controller.workload.plan import Traffic, gap_ns

# Nobody decides: no controller runs, and every flow gets its part of the queue.
FAIR = "fair"
STATIC = "static"
_STOP_S = 30.0
_LOG_LINES = 15


@dataclass(frozen=True)
class Running:
    """A controller that runs."""

    pid: int
    run: RunDirectory

    def cpu_s(self) -> float:
        """Processor time that it has used, or 0 when it is gone."""
        try:
            return parse_cpu_s(Path(f"/proc/{self.pid}/stat").read_text())
        except FileNotFoundError:
            return 0.0


def parse_cpu_s(stat: str) -> float:
    """User and system time in seconds, of a line of /proc/PID/stat (proc(5)).

    Raises
    ------
    InputError
        It is something else.
    """
    try:
        # The second field is the name in brackets, which may hold anything.
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (IndexError, ValueError) as error:
        raise InputError(f"{stat[:80]!r} is no line of /proc/PID/stat.") from error


def config_text(mix: Mix, traffic: Traffic, bed: Testbed, policy: str) -> str:
    """Configuration of the controller for a policy, as TOML.

    Jobs are known by their processes' environment, and nothing of their iterations is told but the
    silence that ends one: what a policy needs it has to find out. Under ``static`` each job has
    the class of the mix, else the default one.
    """
    lines = ["[priority]", f"policy = {json.dumps(policy)}"]
    for host in bed.hosts:
        lines += [
            "[[interface]]",
            f"name = {json.dumps(target(host))}",
            # Ingress is only observed here; XDP on a veth costs a copy of each packet.
            'mode = "tc"',
            f'rate = "{traffic.rate_Bps}bps"',
        ]
    for job in mix.jobs:
        number = job.traffic_class if policy == STATIC else DEFAULT_CLASS
        lines += [
            "[[job]]",
            f"name = {json.dumps(job.name)}",
            f"class = {number}",
            f"max_slowdown = {float(job.max_slowdown)}",
            f'gap = "{gap_ns(mix, job)}ns"',
        ]
    return "\n".join(lines) + "\n"


def _log_tail(run: RunDirectory) -> str:
    try:
        lines = run.log_path.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-_LOG_LINES:])


def refuse_other(run_dir: Path) -> None:
    """Leave alone a run directory that another controller has, or has left.

    Parameters
    ----------
    run_dir
        Where controllers of a contest are to run.

    Raises
    ------
    ConflictError
        A controller runs there, starts or ends; or one died there and has left its attachments,
        which a new one would adopt.
    PrivilegeError
        The directory is another user's.
    """
    run = RunDirectory(run_dir)
    _refuse_running(run)
    if run.state_path.exists():
        raise ConflictError(
            f"A controller died in {run_dir}, and what it attached may still be there.",
            f"Clean up first: controller --run-dir {run_dir} stop",
        )


def _refuse_running(run: RunDirectory) -> None:
    if not run.path.is_dir():
        return
    try:
        run.lock()
    except ConflictError as error:
        raise ConflictError(
            f"A controller runs already in {run.path}; the controllers of this comparison would "
            "take its place.",
            f"Name another directory with --run-dir, or end it: controller --run-dir {run.path} "
            "stop",
        ) from error
    except OSError as error:
        raise PrivilegeError(
            f"Run directory {run.path} cannot be used: {error.strerror}.",
            "Run as root, or name another directory with --run-dir.",
        ) from error
    run.unlock()


@contextlib.contextmanager
def controlled(
    mix: Mix, traffic: Traffic, bed: Testbed, policy: str, run_dir: Path
) -> Iterator[Running | None]:
    """A controller with this policy on all hosts; None for ``fair``. Stopped afterwards.

    Only the one that is started here is ever stopped.

    Raises
    ------
    ConflictError
        Another controller runs in `run_dir`.
    StellarError
        It cannot start; what it reports.
    """
    if policy == FAIR:
        yield None
        return
    # The agent brings much along that a report of records does not need.
    from controller.agent.launch import run_detached

    run = RunDirectory(run_dir)
    _refuse_running(run)
    run.create()
    config = run.path / "contest.toml"
    config.write_text(config_text(mix, traffic, bed, policy))
    try:
        try:
            pid = run_detached(run, [f"--config={config}"])
        except ConflictError:
            raise  # somebody else's has begun there in this moment
        except BaseException as error:
            # It did not come up in time, or was interrupted: nothing of it may stay attached.
            _clean_up(run)
            if not isinstance(error, StellarError):
                raise
            # Its log goes with the run directory.
            said = _log_tail(run)
            raise StellarError(f"{error.message}\n{said}" if said else error.message) from error
        try:
            yield Running(pid, run)
        finally:
            _end(run, pid)
    finally:
        config.unlink(missing_ok=True)


def _end(run: RunDirectory, pid: int) -> None:
    """End the controller with this process id, also one that was killed."""
    from controller.agent import ending

    # Who locks the directory writes its process id there: after a kill it may be another's.
    with contextlib.suppress(OSError):
        if (run.path / "lock").read_text().strip() != str(pid):
            return
    ending.end(run, _STOP_S)


def _clean_up(run: RunDirectory) -> None:
    """Detach what a controller left that ends, or has ended, by itself."""
    from controller.agent import ending

    deadline_s = time.monotonic() + _STOP_S
    while True:
        try:
            ending.clean_up(run)
            return
        except ConflictError:
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(0.1)
