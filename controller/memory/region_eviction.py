"""Regions go: to make room, because they are out of use, or because their memory does.

Whoever calls holds no lock. A region that a peer may write to is revoked first; a peer that does
not answer keeps it, and another one goes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from controller.memory.errors import PoolExhaustedError
from controller.memory.policy_log import PolicyLog
from controller.memory.region_state import CacheState, Entry
from controller.memory.stats import PoolStats
from controller.verbs.registration import Registrar, RegistrationError

_LOG = logging.getLogger(__name__)
_NAMED_HOLDERS = 5


def holders_text(entries: Iterable[Entry]) -> str:
    """Who uses these regions: the largest few by name, the others by number."""
    users = sorted(
        (entry for entry in entries if entry.references or entry.exports),
        key=lambda entry: -entry.pinned_nbytes,
    )
    named = [
        f"{entry.label} ({entry.pinned_nbytes} bytes, {entry.references} in use"
        + (f", {len(entry.exports)} exported)" if entry.exports else ")")
        for entry in users[:_NAMED_HOLDERS]
    ]
    more = len(users) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


class Evictor:
    """Deregisters what has to go.

    Parameters
    ----------
    state
        The cache's books.
    log
        Knows the policy.
    registrar, stats
        The cache's.
    name
        The pool's, in messages.
    """

    def __init__(
        self,
        state: CacheState,
        log: PolicyLog,
        registrar: Registrar,
        stats: PoolStats,
        name: str,
    ) -> None:
        self._state, self._log = state, log
        self._registrar, self._stats = registrar, stats
        self._name = name

    def reserve(self, nbytes: int, urgent: bool = True) -> None:
        """Make room for a region of whole pages, and reserve it.

        Parameters
        ----------
        nbytes
            Its size.
        urgent
            Somebody waits for it. If not, what came ahead of need and was not used yet stays.

        Raises
        ------
        PoolExhaustedError
            Nothing that could go is out of use.
        """
        state = self._state
        refused: set[Entry] = set()
        while True:
            self.sweep()
            with state.lock:
                too_many_bytes, too_many_regions = state.excess(nbytes)
                if too_many_bytes <= 0 and too_many_regions <= 0:
                    state.reserve(nbytes)
                    return
            victims = self._choose(too_many_bytes, too_many_regions, refused, urgent)
            reason = "bytes" if too_many_bytes > 0 else "regions"
            for victim in victims:
                try:
                    went = self.expel(victim, reason, forget=False)
                except RegistrationError as error:
                    _LOG.warning("pool %s: %s", self._name, error)
                    went = False
                if not went:
                    refused.add(victim)
            if victims:
                continue
            with state.lock:
                if state.leaving:  # another thread makes room, maybe enough
                    state.wait()
                    continue
                users = holders_text(state.registered())
                raise PoolExhaustedError(
                    f"Pool {self._name!r} has no room for a region of {nbytes} bytes: "
                    f"{state.pinned_nbytes} of {state.capacity_bytes} bytes and {state.regions} of "
                    f"{state.max_regions} regions are registered, and all of them are in use by "
                    f"{users or 'registrations under way'}.",
                    "Release regions after their last work request, or give the cache more room.",
                )

    def _choose(
        self, too_many_bytes: int, too_many_regions: int, refused: set[Entry], urgent: bool
    ) -> list[Entry]:
        """Mark as leaving what has to go for so much room, or what there is of it."""
        state = self._state
        chosen: list[Entry] = []

        def take(entry: Entry | None) -> None:
            nonlocal too_many_bytes
            if entry is None or entry.references or entry.leaving or entry in refused:
                return
            if entry.prefetched and not urgent:
                return
            state.mark_leaving(entry)
            chosen.append(entry)
            too_many_bytes -= entry.pinned_nbytes

        def is_enough() -> bool:
            return too_many_bytes <= 0 and len(chosen) >= too_many_regions

        with state.lock:
            # Exported, else they were gone: useless to this host, so they go first.
            for entry in list(state.retired):
                if not is_enough():
                    take(entry)
        if is_enough():
            return chosen
        with self._log.policy() as policy:
            for key in policy.victims():
                with state.lock:
                    take(state.at(key))
                if is_enough():
                    break
        return chosen

    def expel(self, entry: Entry, reason: str, forget: bool) -> bool:
        """Revoke and deregister a region that is marked as leaving.

        Returns
        -------
        bool
            False when a peer keeps its rkey, or somebody asked for the region meanwhile: it stays.

        Raises
        ------
        RegistrationError
            The device keeps it; it is out of reach, and counted, and tried again later.
        """
        state = self._state
        revoked = self._revoke(entry)
        with state.lock:
            if not revoked or entry.references or entry.exports:
                state.stay(entry)
                stays = True
            else:
                state.hide(entry, reason, forget)
                stays = False
        if stays:
            self.sweep()  # its memory may have died meanwhile
            return False
        self._deregister(entry)
        return True

    def _revoke(self, entry: Entry) -> bool:
        """Ask every peer that holds its rkey; False when one of them keeps it."""
        for export in list(entry.exports):
            problem = export.revoke()
            self._stats.revoked("failed" if problem else "answered")
            if problem:
                _LOG.warning(
                    "pool %s: a peer keeps the rkey %#x of %s: %s",
                    self._name, export.rkey, entry.label, problem,
                )  # fmt: skip
                return False
        return True

    def force(self, entry: Entry, reason: str) -> None:
        """Deregister a region that is marked as leaving, whoever uses it."""
        with self._state.lock:
            self._state.hide(entry, reason)
        self._deregister(entry)

    def sweep(self) -> None:
        """Deregister what went out of use, and what died; log what the device keeps."""
        state = self._state
        with state.lock:
            state.settle()
            doomed, state.doomed = state.doomed, []
        for entry in doomed:
            try:
                self._deregister(entry)
            except RegistrationError as error:
                _LOG.warning("pool %s: %s", self._name, error)

    def _deregister(self, entry: Entry) -> None:
        state = self._state
        # A ghost is the same object: it must have no region before it can come back.
        region, entry.mr = entry.mr, None
        assert region is not None
        try:
            self._registrar.deregister(region)
        except RegistrationError:
            with state.lock:
                entry.mr = region
                state.ghosts.pop(entry.start, None)
                state.retired.add(entry)
                state.leaving -= 1
                entry.leaving = False
                state.notify()
            raise
        with state.lock:
            state.gone(entry)
        self._stats.deregistered(entry.pinned_nbytes)


def watch_deaths(evictor: Evictor, state: CacheState, name: str) -> threading.Thread:
    """Start a thread that sweeps when an owner dies or a handle is dropped.

    It ends when False is put into ``state.signal``.
    """

    def run() -> None:
        while state.signal.get():
            evictor.sweep()

    thread = threading.Thread(target=run, name=f"cache-{name}", daemon=True)
    thread.start()
    return thread
