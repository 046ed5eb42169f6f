"""One line of the doctor, and the few ways to find something out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

OK, WARN, FAIL, INFO = "ok", "warn", "fail", "info"
TOOL_TIMEOUT_S = 3.0
AS_ROOT = "Run `controller doctor` as root."


@dataclass(frozen=True)
class Check:
    """What was found out about one thing.

    Parameters
    ----------
    name
        Stable name of the check.
    status
        ``ok``, ``warn`` (something is missing that part of Stellar wants), ``fail``
        (nothing works without it) or ``info`` (a fact, or not to be told).
    found
        What is there.
    reason
        What it is wanted for.
    remedy
        What to do when it is missing; empty when nothing has to be done.
    """

    name: str
    status: str
    found: str
    reason: str
    remedy: str = ""


def failed_check(name: str, error: BaseException) -> Check:
    """Return the line of a check that broke itself."""
    return Check(
        name,
        WARN,
        f"could not be found out: {str(error) or type(error).__name__}",
        "The check itself failed; the other lines hold.",
        "Please report it with this message.",
    )


def read_line(path: str) -> str:
    """Read a one-line file; empty when it is not there or not for this user."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def run_tool(command: Sequence[str]) -> tuple[int, str, str]:
    """Exit status, output and error output of a tool; 127 when it is not installed."""
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=TOOL_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        return 127, "", f"{command[0]} is not installed"
    except PermissionError:
        return 126, "", f"{command[0]} may not be run"
    except subprocess.TimeoutExpired:
        return 124, "", f"{command[0]} gave no answer within {TOOL_TIMEOUT_S:.0f} s"
    return result.returncode, result.stdout.strip(), result.stderr.strip()


def import_error(statement: str) -> tuple[str, str]:
    """Run an import in a process of its own: (what it prints, "" or why it failed).

    Not in this one: BCC brings LLVM along, pyverbs the RDMA drivers.
    """
    code, output, errors = run_tool([sys.executable, "-c", statement])
    if code == 0:
        return output, ""
    lines = errors.splitlines()
    return "", lines[-1] if lines else f"exit status {code}"


def is_root() -> bool:
    """Whether this process may look everywhere."""
    return os.geteuid() == 0
