"""What `scripts/lab run` is asked to run, on whichever kernel."""

import fcntl
import json
import os
import re
import signal
import struct
import termios
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
GRACE_S = 5.0  # from SIGTERM to SIGKILL when the time limit has passed
PR_SET_PDEATHSIG = 1
# In the guest these are fresh and empty; a folder below one of them must be mounted by itself.
HIDDEN = (Path("/run"), Path("/dev/shm"))
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class RunSpec:
    """What to run, and with what."""

    command: list[str]
    results: Path
    env: dict[str, str]
    timeout_s: float | None = None
    memory: str = "4G"
    cpus: int = 2
    terminal: bool = False
    cwd: Path = field(default_factory=Path.cwd)

    def start_message(self) -> bytes:
        """Return the payload of the START frame."""
        folders: list[tuple[str, bool]] = [(str(self.results), True)]
        for path in (self.cwd, Path(__file__).resolve().parents[2]):
            if any(path.is_relative_to(hidden) for hidden in HIDDEN):
                folders.insert(0, (str(path), False))
        message: dict[str, Any] = {
            "command": self.command,
            "env": self.env,
            "cwd": str(self.cwd),
            "folders": folders,
            "cpu_mhz": host_cpu_mhz(),
            "terminal": window_size() if self.terminal else 0,
        }
        return json.dumps(message).encode()


def command_env(kind: str, results: Path, extra: dict[str, str]) -> dict[str, str]:
    """Return the environment of the command: the caller's, with system directories in PATH."""
    env = dict(os.environ)
    path = env.get("PATH", "").split(":")
    env["PATH"] = ":".join([*filter(None, path), *(set_minus(SYSTEM_PATH.split(":"), path))])
    env |= {"STELLAR_LAB": kind, "STELLAR_RESULTS": str(results)}
    return env | extra


def set_minus(items: list[str], without: list[str]) -> list[str]:
    """Return `items` that are not in `without`, in order."""
    return [item for item in items if item not in without]


def host_cpu_mhz() -> str:
    """Return the host's clock rate; 1000 where the host does not tell."""
    found = re.search(r"^cpu MHz\s*:\s*([\d.]+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else "1000.000"


def window_size() -> int:
    """Return the terminal's size as rows << 16 | columns."""
    rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))
    return (rows or 24) << 16 | (columns or 80)
