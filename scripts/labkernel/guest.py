"""One boot of the lab kernel: its process, its memory, its serial line and its console log."""

import contextlib
import ctypes
import os
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

from labkernel import LabError
from labkernel.spec import PR_SET_PDEATHSIG, SYSTEM_PATH, RunSpec


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as 512M or 4G."""
    found = re.fullmatch(r"(\d+)([MG])", text)
    if not found:
        raise LabError(
            f"--mem is {text!r}; expected a whole number with M or G, such as 512M or 4G"
        )
    size = int(found[1]) << {"M": 20, "G": 30}[found[2]]
    if size < 256 << 20:
        raise LabError(f"--mem is {text}; the lab kernel needs at least 256M")
    return size


def memory_folder(size_bytes: int) -> Path:
    """Return where the guest's memory can live as a file, on a RAM file system if there is one."""
    found = []
    for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        try:
            info = os.statvfs(folder)
        except OSError as error:
            found.append(f"{folder}: {error.strerror}")
            continue
        free = info.f_bavail * info.f_frsize
        if info.f_flag & os.ST_NOEXEC:
            found.append(f"{folder}: mounted noexec")
        elif free < size_bytes:
            found.append(f"{folder}: {free >> 20} MiB free")
        else:
            return folder
    raise LabError(
        f"the lab kernel keeps its memory ({size_bytes >> 20} MiB) in a file, and no folder has "
        f"room for it ({'; '.join(found)}); free space there, set TMPDIR, or give a smaller --mem"
    )


class Guest:
    """One boot of the lab kernel: an ordinary process, its serial line and its console log."""

    def __init__(self, kernel: Path, spec: RunSpec) -> None:
        self.spec = spec
        memory = memory_folder(parse_bytes(spec.memory))
        self.folder = Path(tempfile.mkdtemp(prefix="stellar-lab-"))
        self.console = self.folder / "console.log"
        # The kernel's command line splits at blanks; the link's path has none.
        init = self.folder / "init"
        init.symlink_to(Path(__file__).resolve().parents[1] / "lab-init")
        self.line, theirs = socket.socketpair()
        arguments = [
            "seccomp=on",  # SMP needs it
            f"ncpus={spec.cpus}",
            f"mem={spec.memory}",
            f"uml_dir={self.folder}/",
            "root=/dev/root",
            "rootfstype=hostfs",
            "rootflags=/",
            "ro",
            f"init={init}",
            "con=null",
            "con0=null,fd:1",
            "ssl=null",
            f"ssl0=fd:{theirs.fileno()}",
            "panic=-1",
        ]
        with self.console.open("wb") as log, theirs:
            try:
                self.process = subprocess.Popen(
                    [kernel, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    env={"PATH": SYSTEM_PATH, "TMPDIR": str(memory)},
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            except OSError as error:
                self.remove()
                raise LabError(
                    f"cannot start {kernel}: {error.strerror}; remove its folder and run "
                    "scripts/lab build"
                ) from error
        self.line.setblocking(False)
        self.pidfd = os.pidfd_open(self.process.pid)

    def end(self, patience_s: float) -> None:
        """Wait for the guest to power off; then kill whatever is left of it.

        The kernel's process is reaped last: until then its group's id cannot be another's.
        """
        select.select([self.pidfd], [], [], patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.line.close()
        os.close(self.pidfd)

    def console_text(self) -> str:
        """Return what the kernel printed."""
        return self.console.read_text(errors="replace").replace("\r", "")

    def remove(self) -> None:
        """Delete the files of this boot."""
        shutil.rmtree(self.folder, ignore_errors=True)


def die_with_parent() -> None:
    """Prepare the kernel's process: no core files, and no life without this one."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
