"""Counters of a pool, and the trace of its requests.

Counters of the hot path are plain attributes, each written under one lock only: the arena's or the
cache's. What is rare (a registration takes microseconds to seconds) takes a lock of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from collections.abc import Hashable
from pathlib import Path
from typing import Any, TextIO

from controller.errors import UsageError
from controller.memory.fork import watch_fork

_LOG = logging.getLogger(__name__)

# Lines kept before they are written: a write every some thousand requests costs nothing.
_BUFFERED_LINES = 4096
_MAX_KEY_CHARACTERS = 256


class PoolStats:
    """Counters of one pool; all only grow, but for what is there now.

    Attributes
    ----------
    gets, hits, misses
        Requests to the cache: all, with a covering region, and those that had to register.
        Written under the cache's lock.
    leases, lease_key_hits, leases_out, lease_wait_ns
        Leases given, those whose key got its block again, those not released yet, and the time
        that lease() waited for memory. Written under the arena's locks.
    leases_leaked
        Leases that were dropped without being released. Under the arena's lock.
    recorder
        Takes every request when traces are recorded; else None.
    """

    def __init__(self, recorder: TraceRecorder | None = None) -> None:
        self.gets = self.hits = self.misses = 0
        self.leases = self.lease_key_hits = self.leases_out = self.leases_leaked = 0
        self.lease_wait_ns = 0
        self.recorder = recorder
        # Reentrant, as the recorder's: a finalizer that runs in here may lease.
        self._lock = threading.RLock()
        self._registrations = self._deregistrations = 0
        self._registration_ns = self._registration_max_ns = self._registered_nbytes = 0
        self._pinned_nbytes = self._pinned_peak_nbytes = self._regions = 0
        self._evictions: dict[str, int] = {}
        self._prefetch = {"issued": 0, "useful": 0, "wasted": 0}
        self._revocations = {"answered": 0, "failed": 0}

    def registered(self, nbytes: int, elapsed_ns: int) -> None:
        """A region of `nbytes` was registered within `elapsed_ns`."""
        with self._lock:
            self._registrations += 1
            self._regions += 1
            self._registration_ns += elapsed_ns
            self._registered_nbytes += nbytes
            self._registration_max_ns = max(self._registration_max_ns, elapsed_ns)
            self._pinned_nbytes += nbytes
            self._pinned_peak_nbytes = max(self._pinned_peak_nbytes, self._pinned_nbytes)

    def deregistered(self, nbytes: int) -> None:
        """A region of `nbytes` was given back."""
        with self._lock:
            self._deregistrations += 1
            self._regions -= 1
            self._pinned_nbytes -= nbytes

    def evicted(self, reason: str) -> None:
        """A region left the cache because of `reason`."""
        with self._lock:
            self._evictions[reason] = self._evictions.get(reason, 0) + 1

    def prefetched(self, outcome: str) -> None:
        """A prefetch was ``issued``, was ``useful`` (asked for in time) or ``wasted``."""
        with self._lock:
            self._prefetch[outcome] += 1

    def revoked(self, outcome: str) -> None:
        """A peer ``answered`` that it dropped an rkey, or that ``failed``."""
        with self._lock:
            self._revocations[outcome] += 1

    def registration_us(self, nbytes: int) -> float:
        """What registering so much would take, by the mean of what was registered; in µs."""
        with self._lock:
            total = self._registered_nbytes
            return self._registration_ns / 1000 * nbytes / total if total else 0.0

    def snapshot(self) -> dict[str, Any]:
        """All counters by name, units in the names.

        Returns
        -------
        dict
            `gets`, `hits` and `misses` count leases, too: a lease is a hit, as its memory was
            registered before.
        """
        with self._lock:
            return {
                "gets": self.gets + self.leases,
                "hits": self.hits + self.leases,
                "misses": self.misses,
                "leases": self.leases,
                "lease_key_hits": self.lease_key_hits,
                "leases_out": self.leases_out,
                "leases_leaked": self.leases_leaked,
                "lease_wait_us": self.lease_wait_ns / 1000,
                "registrations": self._registrations,
                "deregistrations": self._deregistrations,
                "registration_us": self._registration_ns / 1000,
                "registration_max_us": self._registration_max_ns / 1000,
                "regions": self._regions,
                "pinned_nbytes": self._pinned_nbytes,
                "pinned_peak_nbytes": self._pinned_peak_nbytes,
                "evictions": dict(self._evictions),
                "prefetch": dict(self._prefetch),
                "revocations": dict(self._revocations),
            }


def _key_text(key: Hashable) -> str:
    """A key as one CSV field without quotes."""
    text = str(key)[:_MAX_KEY_CHARACTERS]
    return "".join(c if c.isprintable() and c not in ',"' else "_" for c in text) or "_"


class TraceRecorder:
    """Writes ``key,bytes,register_us``, one request a line, as `controller pool replay` reads it.

    A full disk ends the trace, and nothing else: who leases for a training step must not fail by
    it. The log says so.

    Parameters
    ----------
    path
        Created, or replaced.

    Raises
    ------
    UsageError
        The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file: TextIO | None = path.open("w", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"Trace {path} cannot be written: {error.strerror}.", "Name another file to record."
            ) from None
        self._path = path
        self._lines: list[tuple[Hashable, int, float]] = []
        self._lock = threading.RLock()
        self.forked = False
        watch_fork(self)
        atexit.register(self.close)

    def add(self, key: Hashable, nbytes: int, register_us: float) -> None:
        """A request.

        Parameters
        ----------
        key
            The same for the same memory; its text is written, without commas and quotes.
        nbytes
            Its size; an empty request is left out.
        register_us
            Time that registering it takes, whether or not it had to be done.
        """
        if nbytes <= 0 or self._file is None:
            return
        with self._lock:
            self._lines.append((key, nbytes, register_us))
            if len(self._lines) >= _BUFFERED_LINES:
                self._write()

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        file = self._file
        if file is None:
            return
        try:
            file.writelines(f"{_key_text(key)},{nbytes},{us:.3f}\n" for key, nbytes, us in lines)
            # What a child inherited in the file's buffer it would write once more.
            file.flush()
        except OSError as error:
            self._file = None
            _LOG.warning("trace %s ends here: %s", self._path, error.strerror)
            with contextlib.suppress(OSError):  # it tries to write what is left
                file.close()

    def close(self) -> None:
        """Write the rest and close the file. Twice does no harm."""
        if self.forked:
            return
        with self._lock:
            self._write()
            file, self._file = self._file, None
            if file is not None:
                with contextlib.suppress(OSError):  # all of it is written: a late word of NFS
                    file.close()
        atexit.unregister(self.close)
