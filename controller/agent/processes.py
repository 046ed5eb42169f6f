"""What /proc tells about a process: the facts that job rules match on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from controller.priority.rules import ProcessFacts

# Bounds for what a process can make as large as it likes (MAX_ARG_STRLEN is 128 KiB).
_MAX_ENVIRON_BYTES = 256 * 1024
_MAX_FILE_BYTES = 64 * 1024


def read_process(pid: int, proc: Path = Path("/proc")) -> ProcessFacts | None:
    """Facts about a process; None when it is gone or may not be read.

    Parameters
    ----------
    pid
        Its number, as this process sees it.
    proc
        Where procfs is mounted.
    """
    try:
        with _directory(proc / str(pid)) as directory:
            return ProcessFacts(
                pid=pid,
                uid=_real_uid(_read(directory, "status", _MAX_FILE_BYTES)),
                command=_text(_read(directory, "comm", _MAX_FILE_BYTES)).rstrip("\n"),
                argv0=_text(_read(directory, "cmdline", _MAX_FILE_BYTES).partition(b"\0")[0]),
                cgroup=_cgroup(_text(_read(directory, "cgroup", _MAX_FILE_BYTES))),
                environment=_environment(_read(directory, "environ", _MAX_ENVIRON_BYTES)),
            )
    except (OSError, ValueError):
        return None


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    """Descriptor of /proc/PID: it stays with the process, also when its number is used again."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _read(directory: int, name: str, limit: int) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    with os.fdopen(fd, "rb") as file:
        return file.read(limit)


def _text(raw: bytes) -> str:
    return os.fsdecode(raw)


def _real_uid(status: bytes) -> int:
    for line in status.splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[1])
    raise ValueError("no Uid in status")


def _cgroup(text: str) -> str:
    """Path in the unified hierarchy; where that is not in use, in systemd's of version 1."""
    paths = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths[number if number == "0" else controllers] = path
    unified, systemd = paths.get("0", ""), paths.get("name=systemd", "")
    # A hybrid system has both, and everything may be in the root of the unified one.
    return systemd if unified in ("", "/") and systemd else unified


def _environment(raw: bytes) -> dict[str, str]:
    """Variables; the last one is left out when the reading ended within it."""
    *complete, rest = raw.split(b"\0")
    if rest and len(raw) < _MAX_ENVIRON_BYTES:
        complete.append(rest)  # a process may overwrite its environment without a closing zero
    result: dict[str, str] = {}
    for entry in complete:
        name, separator, value = _text(entry).partition("=")
        if separator:
            result.setdefault(name, value)  # getenv finds the first one
    return result
