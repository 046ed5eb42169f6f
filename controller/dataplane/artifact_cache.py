"""Compiled programs kept on disk between starts, for the eyes and hands of their owner only.

What comes from here runs in the kernel as root, so a file or directory that somebody else
may write is never used; whatever is wrong with the cache, the programs are compiled anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import pwd
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.errors import UsageError

log = logging.getLogger("stellar.bpf_cache")

VARIABLE = "STELLAR_BPF_CACHE"
# The dataplane, its two builds for captures, and a few of whoever develops it.
MAX_ENTRIES = 32
# An artifact has some 200 kB; a larger file is not one of ours.
_MAX_ENTRY_BYTES = 16 << 20
_MAGIC = "stellar-bpf"
_LOCK_FILE = "lock"
_NEW_PREFIX = ".new-"
_ABANDONED_S = 3600.0
# Longer than a compilation on a slow machine: then the one who holds the lock hangs.
_LOCK_LIMIT_S = 30.0
_LOCK_POLL_S = 0.02
KEY_DIGITS = 40
# Hexadecimal digits of a key that choose its byte of the lock file, below 2^63.
_LOCK_DIGITS = 15


def cache_directory() -> Path | None:
    """Where compiled programs are kept: by STELLAR_BPF_CACHE, else below the cache of the user.

    Returns
    -------
    Path or None
        The directory, which need not exist; None if the cache is switched off.

    Raises
    ------
    UsageError
        STELLAR_BPF_CACHE is neither ``off`` nor an absolute path.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "off":
        return None
    if wanted:
        if not Path(wanted).is_absolute():
            raise UsageError(
                f"{VARIABLE} is {wanted!r}; allowed: off, or the absolute path of a directory.",
                "Without it, programs are kept in ~/.cache/stellar/bpf.",
            )
        return Path(wanted)
    # XDG Base Directory Specification: a relative path is to be ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = _home() / ".cache"
    return base / "stellar" / "bpf"


def _home() -> Path:
    """The home of who runs this; under sudo, HOME may still be the caller's."""
    home = os.environ.get("HOME", "")
    with contextlib.suppress(OSError):
        if Path(home).is_absolute() and Path(home).stat().st_uid == os.geteuid():
            return Path(home)
    try:
        return Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:  # a container's user of no name
        return Path("/nonexistent")


class UntrustedError(Exception):
    """Somebody else may have written this; says who and what."""


@dataclass(frozen=True)
class ArtifactCache:
    """An open directory of compiled programs; see `open_cache`.

    Parameters
    ----------
    path
        For messages.
    descriptor
        The open directory: what was checked is what is used, whatever the path means later.
    """

    path: Path
    descriptor: int

    def load(self, key: str) -> dict[str, Any] | None:
        """The document stored under a key, or None: never was, is damaged, is not only ours."""
        try:
            raw = self._read(key)
            magic, digest, body = raw.split(b"\n", 2)
            if magic.decode() != _MAGIC or digest.decode() != hashlib.sha256(body).hexdigest():
                raise ValueError("its checksum is wrong")
            document: dict[str, Any] = json.loads(body)
            if document["key"] != key:
                raise ValueError("it belongs to another key")
        except FileNotFoundError:
            return None
        except UntrustedError as error:
            log.warning("%s is not used: %s; compiling anew", self.path / key, error)
            self.discard(key)
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is damaged (%s); compiling anew", self.path / key, error)
            self.discard(key)
            return None
        with contextlib.suppress(OSError):  # the one longest unused goes first
            os.utime(key, dir_fd=self.descriptor, follow_symlinks=False)
        return document

    def _read(self, key: str) -> bytes:
        # Not to wait for the writer of a pipe that somebody put there.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(key, flags, dir_fd=self.descriptor), "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise UntrustedError("it is no regular file")
            _demand_ours(state)
            return file.read(_MAX_ENTRY_BYTES)

    def discard(self, key: str) -> None:
        """Remove an entry that cannot be used, if that is possible."""
        with contextlib.suppress(OSError):
            os.unlink(key, dir_fd=self.descriptor)

    def store(self, key: str, document: dict[str, Any]) -> None:
        """Keep a document; a full or read-only disk is told of in the log and no more."""
        body = json.dumps(document | {"key": key}).encode()
        content = f"{_MAGIC}\n{hashlib.sha256(body).hexdigest()}\n".encode() + body
        name = f"{_NEW_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(name, flags, 0o600, dir_fd=self.descriptor), "wb") as file:
                file.write(content)
            # No fsync: what a power failure leaves half written has a wrong checksum.
            os.rename(name, key, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
            self._remove_oldest()
        except OSError as error:
            log.info("%s: the compiled programs are not kept: %s", self.path, error.strerror)
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self.descriptor)

    def _remove_oldest(self) -> None:
        ages: dict[str, float] = {}
        with os.scandir(self.descriptor) as listing:
            for entry in listing:
                with contextlib.suppress(FileNotFoundError):  # another process removes them too
                    ages[entry.name] = entry.stat(follow_symlinks=False).st_mtime
        entries = [name for name in ages if len(name) == KEY_DIGITS]
        entries.sort(key=lambda name: ages[name], reverse=True)
        abandoned = [
            name
            for name, time_s in ages.items()
            if name.startswith(_NEW_PREFIX) and time_s < time.time() - _ABANDONED_S
        ]
        for name in entries[MAX_ENTRIES:] + abandoned:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.descriptor)

    @contextlib.contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Let one process at a time compile what belongs to a key; the others find it stored.

        Eight starts at once would otherwise compile the same thing eight times. It is no more
        than that: whoever cannot lock, or waits for one that hangs, compiles too.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(_LOCK_FILE, flags, 0o600, dir_fd=self.descriptor)
        except OSError:
            yield
            return
        try:
            place = int(key[:_LOCK_DIGITS], 16)
            limit_s = time.monotonic() + _LOCK_LIMIT_S
            while not _lock(descriptor, place) and time.monotonic() < limit_s:
                time.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(descriptor)  # unlocks


def _lock(descriptor: int, place: int) -> bool:
    """Whether there is no more to wait for: the lock is ours, or this file system has none."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except (BlockingIOError, PermissionError):  # fcntl(2): EAGAIN or EACCES
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def open_cache(path: Path | None) -> Iterator[ArtifactCache | None]:
    """Open a cache, making its directory if it is missing.

    Parameters
    ----------
    path
        Of its directory, see `cache_directory`.

    Yields
    ------
    ArtifactCache or None
        None if it is switched off, cannot be made or read, or is not its owner's alone; the
        log tells why.
    """
    cache = _open(path) if path else None
    try:
        yield cache
    finally:
        if cache:
            os.close(cache.descriptor)


def _open(path: Path) -> ArtifactCache | None:
    descriptor = -1
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = Path(os.path.realpath(path))
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags)
        _demand_ours(os.fstat(descriptor))
        for ancestor in path.parents:
            _demand_safe(ancestor)
        return ArtifactCache(path, descriptor)
    except UntrustedError as error:
        log.warning("%s is not used: %s; compiling anew", path, error)
    except OSError as error:
        log.info("%s is not used: %s; compiling anew", path, error.strerror)
    if descriptor >= 0:
        os.close(descriptor)
    return None


def _demand_ours(state: os.stat_result) -> None:
    if state.st_uid != os.geteuid():
        raise UntrustedError(f"it belongs to user {state.st_uid}, expected {os.geteuid()}")
    if state.st_mode & 0o022:
        raise UntrustedError(f"others may write it (mode {stat.S_IMODE(state.st_mode):04o})")


def _demand_safe(ancestor: Path) -> None:
    """Nobody else can put another directory in the place of one below `ancestor`."""
    state = ancestor.stat()
    if state.st_uid not in (0, os.geteuid()):
        raise UntrustedError(f"{ancestor} belongs to user {state.st_uid}")
    if state.st_mode & 0o022 and not state.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(state.st_mode)
        raise UntrustedError(f"others may write {ancestor} (mode {mode:04o})")
