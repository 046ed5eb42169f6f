"""Which kernel a command runs on, and running it on the machine's own."""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import FrameType

from labkernel import EXIT_TIMEOUT, OLDEST_KERNEL, say
from labkernel.spec import FORWARDED, GRACE_S, PR_SET_PDEATHSIG, RunSpec


def native_obstacle() -> str | None:
    """Return why this machine's own kernel cannot run rxe across namespaces; None if it can."""
    if os.environ.get("STELLAR_LAB") == "uml":
        return None  # already inside
    release = os.uname().release
    found = re.match(r"(\d+)\.(\d+)", release)
    if not found or (int(found[1]), int(found[2])) < OLDEST_KERNEL:
        wanted = ".".join(map(str, OLDEST_KERNEL))
        return f"this kernel is {release}; rxe across namespaces needs {wanted} or newer"
    if os.geteuid() != 0:
        return "rxe and namespaces need root"
    if not Path("/sys/module/rdma_rxe").exists():
        modprobe = shutil.which("modprobe", path="/usr/sbin:/sbin")
        probe = [modprobe, "--dry-run", "--quiet", "rdma_rxe"] if modprobe else ["false"]
        if subprocess.run(probe).returncode:
            return f"kernel {release} has no loadable module rdma_rxe"
    return None


def run(spec: RunSpec) -> int:
    """Run `spec` on this kernel, with the manners of the lab; return the exit status."""
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # signals that came before the command was there to take them

    def forward(signal_number: int, _frame: FrameType | None) -> None:
        if process is None:
            early.append(signal_number)
        else:
            end_group(process, signal_number)

    # On a terminal the command shares our group: the terminal signals it without us.
    handler = signal.SIG_IGN if spec.terminal else forward
    previous = {number: signal.signal(number, handler) for number in FORWARDED}
    try:
        process = subprocess.Popen(
            spec.command,
            cwd=spec.cwd,
            env=spec.env,
            start_new_session=not spec.terminal,
            preexec_fn=lambda: prepare(spec.terminal),
        )
        for number in early:
            end_group(process, number)
        return wait(process, spec)
    except OSError as error:
        say(f"cannot run {error.filename or spec.command[0]}: {error.strerror}")
        return 127 if isinstance(error, FileNotFoundError) else 126
    finally:
        for caught, old in previous.items():
            signal.signal(caught, old)


def prepare(terminal: bool) -> None:
    """Prepare the command's process: it ends with us, and takes a terminal's signals itself."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if terminal:
        for number in FORWARDED:
            signal.signal(number, signal.SIG_DFL)


def wait(process: subprocess.Popen[bytes], spec: RunSpec) -> int:
    """Wait for the command; enforce its time limit."""
    try:
        code = process.wait(spec.timeout_s)
    except subprocess.TimeoutExpired:
        end_group(process, signal.SIGTERM)
        give_up = time.monotonic() + GRACE_S
        while process.poll() is None and time.monotonic() < give_up:
            time.sleep(0.05)
        end_group(process, signal.SIGKILL)
        process.wait()
        say(f"the command ran longer than its {spec.timeout_s:g} s and was ended")
        return EXIT_TIMEOUT
    return code if code >= 0 else 128 - code


def end_group(process: subprocess.Popen[bytes], signal_number: int) -> None:
    """Signal the command and everything in its process group."""
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal_number)
