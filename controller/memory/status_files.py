"""What pools of other processes do: each keeps a small JSON file up to date; readers trust none.

A pool is a library in somebody's training process. It needs no controller, and none has to know
it: it writes a file of its own, once a second, and whoever asks reads the files that are there. A
file outlives a process that was killed, so it names the process with its start time.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from controller.memory.fork import watch_fork

_log = logging.getLogger(__name__)

INTERVAL_S = 1.0
SCHEMA = 1
_DEFAULT_RUN_DIR = Path("/run/stellar")
_FILE_NAME = re.compile(r"[1-9][0-9]{0,9}-[0-9]{1,6}\.json", re.ASCII)
_MAX_FILE_BYTES = 64 << 10
_MAX_FILES = 4096
_MAX_TEXT = 200
_LARGEST = 2**63 - 1
_numbers = itertools.count()


def own_directory() -> Path | None:
    """Where this process publishes its pools; None when it has no place for that.

    In the controller's run directory (``STELLAR_RUN_DIR``, else /run/stellar) when it is ours or
    we are root, else in ``XDG_RUNTIME_DIR``.
    """
    named = os.environ.get("STELLAR_RUN_DIR")
    if named:
        return Path(named) / "pools"
    if os.geteuid() == 0:
        return _DEFAULT_RUN_DIR / "pools"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "stellar" / "pools" if runtime else None


def readable_directories(run_dir: Path) -> list[Path]:
    """Where to look for pools: that run directory's, our own, and as root everybody's."""
    found = [run_dir / "pools"]
    own = own_directory()
    if own is not None and own not in found:
        found.append(own)
    if os.geteuid() == 0:
        found += sorted(Path("/run/user").glob("*/stellar/pools"))
    return found


def _may_own(uid: int, pid: int) -> bool:
    """Whether a file of that owner can be about that process: root's, or its own user's.

    By its status, not by the owner of its directory: that is root once it has capabilities.
    """
    if uid == 0:
        return True
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    # proc(5): real, effective, saved and file system user.
    found = re.search(r"^Uid:\s+(.*)$", text, re.MULTILINE)
    return found is not None and str(uid) in found[1].split()


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is none of that number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        # proc(5): field 22. The second field, a name in parentheses, may hold anything.
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


# ---- writing ----


def _own_name() -> str:
    """Of this process; empty where the kernel does not tell."""
    try:
        return Path("/proc/self/comm").read_text(errors="replace").strip()[:_MAX_TEXT]
    except OSError:
        return ""


class StatusFile:
    """The file of one pool, rewritten every second by a thread and removed at the end.

    Nothing breaks where it cannot be written: a line goes to the log at level DEBUG.

    Parameters
    ----------
    describe
        What to write, as `read_pools` expects it; None when the pool is gone.
    directory
        Where; None: see `own_directory`.
    """

    def __init__(
        self, describe: Callable[[], Mapping[str, Any] | None], directory: Path | None = None
    ) -> None:
        self.forked = False
        self._describe = describe
        self._directory = directory or own_directory()
        self._name = f"{os.getpid()}-{next(_numbers)}"
        self._process = {
            "schema": SCHEMA,
            "pid": os.getpid(),
            "start_ticks": start_ticks(os.getpid()) or 0,
            "command": _own_name(),
        }
        self._complained = False
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        watch_fork(self)
        if self._directory is None:
            _log.debug("pool status is not published: no XDG_RUNTIME_DIR, and not root")
            return
        self._write()
        atexit.register(self.close)
        thread = threading.Thread(target=self._run, name="pool-status", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            self._complain(error)
            self._remove()
            return
        self._thread = thread

    @property
    def path(self) -> Path | None:
        """The file; None when there is no place for one."""
        return None if self._directory is None else self._directory / f"{self._name}.json"

    def _run(self) -> None:
        while not self._end.wait(INTERVAL_S):
            if not self._write():
                break
        self._remove()

    def _remove(self) -> None:
        if self.path is not None:
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:
                _log.debug("pool status %s stays: %s", self.path, error)
        atexit.unregister(self.close)

    def _complain(self, error: Exception) -> None:
        """Once: the next second would say the same."""
        if not self._complained:
            self._complained = True
            _log.debug("pool status is not published: %s", error)

    def _write(self) -> bool:
        """Replace the file in one step; False when the pool is gone."""
        assert self._directory is not None
        temporary = self._directory / f".{self._name}.new"
        try:
            described = self._describe()
            if described is None:
                return False
            document = {**self._process, "updated_s": time.time(), **described}
            self._make_directory(self._directory)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(temporary, flags, 0o600), "w") as file:
                json.dump(document, file)
            temporary.replace(self._directory / f"{self._name}.json")
        except Exception as error:  # whatever it is: a pool works without its status
            self._complain(error)
        return True

    @staticmethod
    def _make_directory(directory: Path) -> None:
        """For its owner only, as the controller makes its run directory."""
        for each in (directory.parent, directory):
            each.mkdir(mode=0o700, exist_ok=True)
        # Not followed: others may make links where the parent is open to them.
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise PermissionError(f"{directory} is no directory")
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{directory} belongs to somebody else")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{directory} can be written by others")

    def close(self) -> None:
        """Remove the file. Twice does no harm."""
        if self.forked:
            return
        self._end.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


# ---- reading ----

_COUNTERS = (
    "gets", "hits", "misses", "leases", "lease_key_hits", "leases_out", "leases_leaked",
    "lease_wait_us", "registrations", "deregistrations", "registration_us",
    "registration_max_us", "regions", "pinned_nbytes", "pinned_peak_nbytes",
)  # fmt: skip
_TABLES = ("evictions", "prefetch", "revocations")


class _Malformed(ValueError):
    """Not the file of a pool."""


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise _Malformed("text")
    # It goes to a terminal.
    return "".join(character if character.isprintable() else "?" for character in value)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        raise _Malformed("count")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
        raise _Malformed("number")
    return value


def _node(value: Any) -> int | None:
    return None if value is None else _count(value)


def _table(value: Any) -> dict[str, int]:
    if not isinstance(value, dict) or len(value) > 64:
        raise _Malformed("table")
    return {_text(name): _count(number) for name, number in value.items()}


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or len(value) > 64:
        raise _Malformed("list")
    return [_text(each) for each in value]


def _nodes(value: Any) -> list[int]:
    if not isinstance(value, list) or len(value) > 1024:
        raise _Malformed("list")
    # -1: not told
    return [each if each == -1 else _count(each) for each in value]


_MEMBERS: Mapping[str, Callable[[Any], Any]] = {
    "pid": _count, "start_ticks": _count, "command": _text, "updated_s": _number, "name": _text,
    "device": _text, "policy": _text, "fork": _text, "numa_node": _node, "chunk_nbytes": _count,
    "chunks": _count, "chunks_wanted": _count, "capacity_nbytes": _count, "leased_nbytes": _count,
    "cache_nbytes": _count, "cache_regions": _count, "prefetch_depth": _count, "pages": _texts,
    "present_nbytes": _table, "numa_nodes": _nodes,
}  # fmt: skip


def _checked(document: Any) -> dict[str, Any]:
    """The known members of a status document.

    Raises
    ------
    ValueError
        A member is missing, of another type, or out of bounds.
    """
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise _Malformed("schema")
    result = {name: check(document.get(name)) for name, check in _MEMBERS.items()}
    stats = document.get("stats")
    if not isinstance(stats, dict):
        raise _Malformed("stats")
    counters: dict[str, Any] = {name: _number(stats.get(name)) for name in _COUNTERS}
    result["stats"] = counters | {name: _table(stats.get(name)) for name in _TABLES}
    return result


def _read(path: Path) -> tuple[dict[str, Any], int]:
    """A file's document and owner.

    Raises
    ------
    OSError, ValueError
        It is gone, no plain file, too large, or malformed.
    """
    # A pipe in its place must not hold us up.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
            raise _Malformed("file")
        text = file.read(_MAX_FILE_BYTES + 1)
    try:
        return _checked(json.loads(text)), status.st_uid
    except RecursionError:
        raise _Malformed("depth") from None


def read_pools(directories: Iterable[Path]) -> list[dict[str, Any]]:
    """The pools of all processes that run now.

    Files of processes that are gone are left out, and removed when they are ours. Those that one
    user wrote about a process of another are left out, too.

    Parameters
    ----------
    directories
        See `readable_directories`; those that do not exist are passed over.

    Returns
    -------
    list of dict
        Checked documents, ordered by process and pool.
    """
    pools: list[dict[str, Any]] = []
    for directory in directories:
        try:
            names = sorted(path.name for path in itertools.islice(directory.iterdir(), _MAX_FILES))
        except OSError:
            continue
        for path in (directory / name for name in names if _FILE_NAME.fullmatch(name)):
            try:
                document, uid = _read(path)
            except (OSError, ValueError) as error:
                _log.debug("%s is no status of a pool: %s", path, error)
                continue
            if path.name.partition("-")[0] != str(document["pid"]):
                continue
            if start_ticks(document["pid"]) != document["start_ticks"]:
                if uid == os.geteuid():
                    path.unlink(missing_ok=True)
                continue
            if not _may_own(uid, document["pid"]):
                _log.debug("%s is about a process of somebody else", path)
                continue
            pools.append(document)
    return sorted(pools, key=lambda pool: (pool["pid"], pool["name"]))
