"""Other implementations on the same hosts: gloo over TCP, and Open MPI with UCX over soft-RoCE.

Each reduces float32 by sum, in place, in the sizes of the plan. One that is not installed, or
does not run, is left out with a note: a comparison is no reason to fail.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from controller.allreduce.bench_plan import BenchPlan
from controller.allreduce.bench_report import BenchReport
from controller.allreduce.reduction import Collective, bus_factor
from controller.allreduce.spawn import die_with_parent, end
from controller.errors import StellarError
from controller.ops.testbed import Testbed

# Enough for an average; some of these take seconds an operation where processors are few.
_MOST_ITERS = 5
_TIMEOUT_S = 180.0
_GLOO_PORT = 29_500
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_OUTPUT_LINES = 3
# rc_verbs: RC queue pairs of the soft-RoCE device, which is the only one in the namespace; UD only
# sets them up. Its check of the destination GID drops every datagram of rxe of Linux 7.3.
_UCX = {
    "UCX_TLS": "rc_verbs,ud_verbs,self",
    "UCX_UD_VERBS_ETH_DGID_CHECK": "n",
    "UCX_LOG_LEVEL": "error",
}
_MCA = {
    "pml": "ucx",
    "osc": "^ucx",
    "btl": "self",
    "oob_tcp_if_include": "eth0",
    "plm_rsh_no_tree_spawn": "1",
    # More ranks than processors: a rank that waits must not keep the others from working.
    "mpi_yield_when_idle": "1",
}


class _PeerError(StellarError):
    """An implementation could not be measured."""


def measure_peers(plan: BenchPlan, bed: Testbed, report: BenchReport) -> BenchReport:
    """Put the other implementations' busbw into a report.

    Parameters
    ----------
    plan
        Its sizes are measured, in at most 5 iterations each.
    bed
        The hosts.
    report
        Ours.

    Returns
    -------
    BenchReport
        With ``peers``, ``peer_results``, and a note for each one that is missing.
    """
    sizes = [nbytes // 4 * 4 for nbytes in plan.sizes if nbytes >= 4]
    if plan.collective != Collective.ALL_REDUCE.value or not sizes:
        return report.with_notes("peers: only all_reduce of 4 bytes and more is compared")
    kinds: dict[str, Callable[[Testbed, list[str]], dict[int, float]]] = {
        "gloo": _gloo,
        "openmpi-ucx": _openmpi,
    }
    found: dict[str, Mapping[int, float]] = {}
    notes = []
    arguments = [str(min(plan.iters, _MOST_ITERS)), *map(str, sizes)]
    factor = bus_factor(Collective.ALL_REDUCE, bed.size)
    for name, measure in kinds.items():
        try:
            times_us = measure(bed, arguments)
        except _PeerError as error:
            notes.append(f"{name} is left out: {error.message}")
            continue
        found[name] = {
            size: round(size / time_us / 1e3 * factor, 6) for size, time_us in times_us.items()
        }
    largest = max(sizes)
    return replace(
        report,
        peers={name: values[largest] for name, values in found.items()},
        peer_results=found,
    ).with_notes(*notes)


def _command(kind: str, arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "controller.allreduce.bench_peer_rank", kind, *arguments]


def _environment() -> dict[str, str]:
    paths = (str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH"))
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
    }


def _times_us(output: str) -> dict[int, float]:
    """The last line of rank 0."""
    try:
        document = json.loads(output.strip().splitlines()[-1])
        return {int(size): float(time_us) for size, time_us in document.items()}
    except (ValueError, IndexError, AttributeError):
        raise _PeerError(f"it printed no result, but: {_tail(output)}") from None


def _tail(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip(" -\n")]
    return " / ".join(lines[-_OUTPUT_LINES:])[:400] or "nothing"


def _gloo(bed: Testbed, arguments: list[str]) -> dict[int, float]:
    if importlib.util.find_spec("torch") is None:
        raise _PeerError("torch is not installed (pip install torch)")
    deadline_s = time.monotonic() + _TIMEOUT_S
    with contextlib.ExitStack() as stack:
        outputs = []
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(lambda: end(processes))
        for host in bed.hosts:
            output = stack.enter_context(tempfile.TemporaryFile())
            outputs.append(output)
            environment = _environment() | {
                "RANK": str(host.rank),
                "WORLD_SIZE": str(bed.size),
                "MASTER_ADDR": bed.hosts[0].address,
                "MASTER_PORT": str(_GLOO_PORT),
                "GLOO_SOCKET_IFNAME": host.interface,
            }
            processes.append(
                subprocess.Popen(
                    host.command(*_command("gloo", arguments)),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd="/",  # where no module of somebody is found first
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            )
        for rank, process in enumerate(processes):
            try:
                status = process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise _PeerError(f"it was not done within {_TIMEOUT_S:g} s") from None
            if status:
                outputs[rank].seek(0)
                text = outputs[rank].read().decode(errors="replace")
                raise _PeerError(f"rank {rank} exited {status}: {_tail(text)}")
        outputs[0].seek(0)
        return _times_us(outputs[0].read().decode(errors="replace"))


def _openmpi(bed: Testbed, arguments: list[str]) -> dict[int, float]:
    if shutil.which("mpirun") is None:
        raise _PeerError("mpirun is not installed (apt-get install openmpi-bin libucx0)")
    if importlib.util.find_spec("mpi4py") is None:
        raise _PeerError("mpi4py is not installed (apt-get install python3-mpi4py)")
    with tempfile.TemporaryDirectory(prefix="stlr-mpi-") as folder:
        agent = _write_agent(bed, Path(folder))
        settings = [
            word
            for name, value in (_MCA | {"plm_rsh_agent": str(agent)}).items()
            for word in ("--mca", name, value)
        ]
        exports = [word for name in (*_UCX, "PYTHONPATH") for word in ("-x", name)]
        command = bed.hosts[0].command(
            "mpirun", "-np", str(bed.size),
            "--host", ",".join(f"{host.address}:1" for host in bed.hosts),
            *settings, *exports, *_command("mpi", arguments),
        )  # fmt: skip
        environment = _environment() | _UCX | {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "TMPDIR": folder,
        }  # fmt: skip
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd="/",  # where no module of somebody is found first
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
            try:
                status = process.wait(_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise _PeerError(f"it was not done within {_TIMEOUT_S:g} s") from None
            finally:
                _end_daemons(bed, process, folder)
            output.seek(0)
            text = output.read().decode(errors="replace")
        if status:
            raise _PeerError(f"mpirun exited {status}: {_tail(text)}")
        return _times_us(text)


def _write_agent(bed: Testbed, folder: Path) -> Path:
    """A program that stands in for ssh: it runs a command in the namespace of an address."""
    cases = "".join(f"{host.address}) netns={host.netns} ;;\n" for host in bed.hosts)
    path = folder / "agent"
    # Daemons of one machine would share a directory of state, and remove it under one another.
    path.write_text(
        f"#!/bin/sh\nhost=$1; shift\ncase $host in\n{cases}*) exit 1 ;;\nesac\n"
        f'TMPDIR={shlex.quote(str(folder))}/$netns; export TMPDIR; mkdir -p "$TMPDIR"\n'
        'exec ip netns exec "$netns" sh -c "$*"\n'
    )
    path.chmod(0o700)
    return path


def _end_daemons(bed: Testbed, process: subprocess.Popen[bytes], folder: str) -> None:
    """End mpirun, and the daemons and ranks that it left in the hosts: they hold the devices.

    They have our folder in their environment; whatever else lives there is not ours.
    """
    end([process])
    for host in bed.hosts:
        listed = subprocess.run(
            ["ip", "netns", "pids", host.netns], capture_output=True, text=True, check=False
        )
        for pid in listed.stdout.split():
            with contextlib.suppress(OSError):
                if os.fsencode(folder) in Path(f"/proc/{pid}/environ").read_bytes():
                    os.kill(int(pid), signal.SIGKILL)
