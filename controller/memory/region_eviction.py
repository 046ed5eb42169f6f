"""Regions go: to make room, because they are out of use, or because their memory does.

Whoever calls holds no lock. A region that a peer may write to is revoked first; a peer that does
not answer keeps it, and another one goes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence

from controller.memory.errors import PoolExhaustedError
from controller.memory.fork import watch_fork
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
        self.forked = False
        watch_fork(self)

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
            What could go is out of use by too little; nothing of it goes then.
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
            kept, error = self.expel_all(victims, reason, forget=False)
            if error is not None:
                _LOG.warning("pool %s: %s", self._name, error)
            refused.update(kept)
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
                    f"{state.max_regions} regions are registered, and what is out of use is not "
                    f"enough; in use: {users or 'by registrations under way'}.",
                    "Release regions after their last work request, or give the cache more room.",
                )

    def make_way(self, nbytes: int) -> bool:
        """Deregister idle regions of so much in all, or what there is, whatever the limits say.

        The device may run out before the cache does (RLIMIT_MEMLOCK below its capacity).

        Returns
        -------
        bool
            Whether anything went.
        """
        victims = self._choose(nbytes, 0, set(), urgent=True, partly=True)
        kept, error = self.expel_all(victims, "device", forget=False)
        if error is not None:
            _LOG.warning("pool %s: %s", self._name, error)
        return len(kept) < len(victims)

    def _choose(
        self,
        too_many_bytes: int,
        too_many_regions: int,
        refused: set[Entry],
        urgent: bool,
        partly: bool = False,
    ) -> list[Entry]:
        """Mark as leaving what has to go for so much room.

        If there is not enough, that is nothing; or, with `partly`, what there is.
        """
        state = self._state
        chosen: list[Entry] = []
        reluctant: list[Entry] = []

        sum_nbytes = 0

        def is_enough() -> bool:
            return sum_nbytes >= too_many_bytes and len(chosen) >= too_many_regions

        def take(entry: Entry | None, at_any_price: bool = False) -> None:
            nonlocal sum_nbytes
            if entry is None or entry.references or entry.leaving or entry in refused:
                return
            # What nobody waits for must not wait for a peer, nor take from its like.
            if not urgent and (entry.prefetched or entry.exports):
                return
            if not at_any_price and any(export.failed_lately for export in entry.exports):
                reluctant.append(entry)
                return
            state.mark_leaving(entry)
            chosen.append(entry)
            sum_nbytes += entry.pinned_nbytes

        # All of it with the policy's lock: two threads that each mark a part, and give it back as
        # it is not enough, would both find nothing.
        with state.busy(), self._log.policy() as policy:
            is_done = False
            try:
                with state.lock:
                    # Exported, else they were gone: useless to this host, so they go first.
                    for entry in list(state.retired):
                        if not is_enough():
                            take(entry)
                if not is_enough():
                    for key in policy.victims():
                        with state.lock:
                            take(state.at(key))
                        if is_enough():
                            break
                with state.lock:
                    for entry in reluctant:
                        if not is_enough():
                            take(entry, at_any_price=True)
                is_done = partly or is_enough()
            finally:
                if not is_done:
                    with state.lock:
                        for entry in chosen:
                            state.stay(entry)
                    chosen = []
        return chosen

    def expel_all(
        self, entries: Sequence[Entry], reason: str, forget: bool, force: bool = False
    ) -> tuple[list[Entry], RegistrationError | None]:
        """Revoke and deregister regions that are marked as leaving, each whatever the others do.

        Parameters
        ----------
        entries
            None of them is marked any more in the end, whatever happens.
        reason, forget
            As for `expel`.
        force
            Whoever uses them.

        Returns
        -------
        list of Entry, RegistrationError or None
            Those that are registered still, and the device's first refusal.
        """
        kept: list[Entry] = []
        first_error: RegistrationError | None = None
        done = 0
        try:
            for entry in entries:
                try:
                    went = self.force(entry, reason) if force else self.expel(entry, reason, forget)
                except RegistrationError as error:
                    first_error = first_error or error
                    went = False
                if not went:
                    kept.append(entry)
                done += 1
        finally:
            if done < len(entries):  # interrupted
                with self._state.lock:
                    for entry in entries[done:]:
                        if entry.leaving:
                            if entry.hidden:
                                self._state.retired.add(entry)
                            self._state.stay(entry)
                self._state.signal.put(True)
        return kept, first_error

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
        revoked = self._revoke(entry)  # interrupted, it is still marked: see expel_all
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

    def force(self, entry: Entry, reason: str) -> bool:
        """Deregister a region that is marked as leaving, whoever uses it; True.

        Raises
        ------
        RegistrationError
            As for `expel`.
        """
        with self._state.lock:
            self._state.hide(entry, reason)
        self._deregister(entry)
        return True

    def sweep(self) -> None:
        """Deregister what went out of use, and what died; log what the device keeps."""
        if self.forked:
            return
        state = self._state
        if state.holds_lock():  # a call within a call
            state.signal.put(True)
            return
        with state.lock:
            state.settle()
        while state.doomed:
            try:
                # One by one: if this thread is interrupted, the next one finds the others.
                entry = state.doomed.pop()
            except IndexError:  # another thread has taken the last
                return
            try:
                self._deregister(entry)
            except RegistrationError as error:
                _LOG.warning("pool %s: %s", self._name, error)
            except BaseException:
                if entry.leaving and entry.mr is not None:  # not even begun
                    state.doomed.append(entry)
                state.signal.put(True)
                raise

    def _deregister(self, entry: Entry) -> None:
        state = self._state
        # A ghost is the same object: it must have no region before it can come back.
        region, entry.mr = entry.mr, None
        assert region is not None
        try:
            self._registrar.deregister(region)
        except Exception:
            with state.lock:
                entry.mr = region
                state.ghosts.pop(entry.start, None)
                state.retired.add(entry)
                state.leaving -= 1
                entry.leaving = False
                state.notify()
            raise
        except BaseException:  # Ctrl-C, which is seen when the call into the device has returned
            self._gone(entry)
            raise
        self._gone(entry)

    def _gone(self, entry: Entry) -> None:
        with self._state.lock:
            self._state.gone(entry)
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
