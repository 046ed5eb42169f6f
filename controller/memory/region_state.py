"""What the region cache knows: regions by address, who uses them, and what is on its way in or out.

All of it is guarded by one lock; nothing here calls the device, the policy or a peer. Only hits do
without the lock: Python 3.11 reads the clock whenever it takes one, which is a system call where
the kernel has no vDSO (15 µs in the lab kernel, five times the hit). A hit adds itself to the
entry's users and looks afterwards whether the entry is `hidden` or `leaving`; who hides an entry or
lets it leave says so first and looks for users afterwards. Single operations of deques, lists and
attributes are atomic in CPython, so at least one of the two sees the other.

A finalizer that the garbage collector runs, or a signal handler, may come to the cache while its
own thread has the lock. What it lets go is put into `later` then, and what would have to wait is
refused: the thread cannot wait for itself.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from controller.memory.export import Export
from controller.memory.policy_log import PolicyLog
from controller.memory.region_map import RegionMap, page_range
from controller.memory.stats import PoolStats
from controller.verbs.registration import MemoryRegion

# Evicted regions that may be registered again before somebody asks: each some hundred bytes.
_MAX_GHOSTS = 16384


class Entry:
    """One region: registered, or evicted while its memory lives on (a ghost).

    Attributes
    ----------
    start, end
        The bytes that requests find; the policy's key is `start`.
    label
        What messages call it.
    users
        One element for each handle out; a deque for its atomic append and pop.
    hidden
        Requests do not find it any more.
    owners
        The objects whose memory it is, weakly, by id.
    ownerless
        Somebody named some of its memory by address only: nobody can know whether it is alive.
    orphaned
        An owner has died.
    leaving
        A thread is about to deregister it.
    prefetched
        Registered ahead of need, and not asked for since.
    """

    __slots__ = (
        "end", "exports", "generation", "hidden", "label", "leaving", "mr", "orphaned",
        "ownerless", "owners", "pinned_nbytes", "prefetched", "register_us", "start", "users",
    )  # fmt: skip

    def __init__(self, start: int, end: int, label: Hashable) -> None:
        self.start, self.end, self.label = start, end, label
        first, behind = page_range(start, end)
        self.pinned_nbytes = behind - first
        self.mr: MemoryRegion | None = None
        self.generation = 0
        self.register_us = 0.0
        self.users: deque[None] = deque()
        self.exports: list[Export] = []
        self.owners: dict[int, weakref.ref[Any]] = {}
        self.ownerless = self.orphaned = False
        self.hidden = self.leaving = self.prefetched = False

    @property
    def registered(self) -> MemoryRegion:
        """The device's region; only of an entry that is no ghost."""
        assert self.mr is not None
        return self.mr

    @property
    def references(self) -> int:
        """Handles out."""
        return len(self.users)

    @property
    def is_alive(self) -> bool:
        """Whether its memory is known to be; takes hold of no owner, so is good under the lock."""
        return bool(self.owners) and not self.ownerless and not self.orphaned

    def living_owners(self) -> list[Any] | None:
        """Its owners, alive as long as the list is; None when one is dead or not known.

        Not under the lock: whoever drops the list may be the last to hold one.
        """
        living = [reference() for reference in list(self.owners.values())]
        unknown = self.ownerless or not living or any(owner is None for owner in living)
        return None if unknown else living


class CacheState:
    """The cache's books.

    Parameters
    ----------
    capacity_bytes, max_regions
        Limits of `pinned_nbytes` and `regions`.
    log
        Where the policy will read what happened.
    stats
        Counts why regions went.

    Attributes
    ----------
    lock
        Of all of this; methods below are called with it.
    waiting
        Threads that wait for releases; set before they look for users, as releases take no lock.
    pinned_nbytes, regions
        What is registered or has room reserved.
    found
        Regions that requests find.
    retired
        Regions that nobody finds any more and somebody still uses.
    doomed
        Retired regions that nobody uses any more, `leaving`, for the next thread to deregister.
    pending
        Ranges being registered.
    leaving
        Number of entries that some thread is about to deregister.
    dead
        Entries whose owner died, and ranges whose memory is going; hits stop until it is settled.
    later
        What calls within calls have left to do.
    signal
        Wakes whoever must look after deaths: finalizers may put into it anywhere.
    """

    def __init__(
        self, capacity_bytes: int, max_regions: int, log: PolicyLog, stats: PoolStats
    ) -> None:
        self.capacity_bytes, self.max_regions = capacity_bytes, max_regions
        # Reentrant, as such a lock knows its holder: that is what nested calls are told apart by.
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self.pinned_nbytes = self.regions = self.leaving = 0
        self.found: RegionMap[Entry] = RegionMap()
        self.retired: set[Entry] = set()
        self.ghosts: dict[int, Entry] = {}
        self.pending: list[tuple[int, int]] = []
        self.doomed: list[Entry] = []
        self.generation = 0
        self.closed = False
        self.waiting = 0
        # Finalizers run anywhere, this lock or another held: they append, and the next caller
        # reads. A hit looks here first, so it never finds the memory of something that died.
        self.dead: deque[Entry | tuple[int, int]] = deque()
        self.dropped: deque[Entry] = deque()
        self.later: deque[Callable[[], object]] = deque()
        self.signal: SimpleQueue[bool] = SimpleQueue()
        self._busy: set[int] = set()
        self._log, self._stats = log, stats

    # ---- calls within calls ----

    def holds_lock(self) -> bool:
        """Whether the calling thread has the lock: its call came in the middle of another one."""
        try:
            self._changed.notify(0)
        except RuntimeError:  # not its holder
            return False
        return True

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The calling thread does what others of its own calls must not wait for."""
        thread = threading.get_ident()
        if thread in self._busy:
            yield
            return
        try:
            self._busy.add(thread)
            yield
        finally:
            self._busy.discard(thread)

    def is_in_call(self) -> bool:
        """Whether the calling thread is within `busy`."""
        return threading.get_ident() in self._busy

    def is_busy(self) -> bool:
        """Whether it is, or has the lock."""
        return self.is_in_call() or self.holds_lock()

    def defer(self, action: Callable[[], object]) -> None:
        """Do something under the lock, when the calling thread has let go of it."""
        self.later.append(action)
        self.signal.put(True)

    # ---- waiting ----

    def wait(self, timeout_s: float | None = None) -> None:
        """Until something left, arrived, or is no longer in use; or for no reason."""
        self._changed.wait(timeout_s)

    @contextmanager
    def expecting_releases(self) -> Iterator[None]:
        """Let every release notify, from before the caller looks for users."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    def notify(self) -> None:
        """Something did."""
        self._changed.notify_all()

    # ---- finding ----

    def at(self, key: Hashable) -> Entry | None:
        """The region whose policy key this is."""
        if not isinstance(key, int):
            return None
        entry = self.found.covering(key, key + 1)
        return entry if entry is not None and entry.start == key else None

    def registered(self) -> list[Entry]:
        """Every region that is registered and not on its way out."""
        return [entry for entry in (*self.found, *self.retired) if not entry.leaving]

    def touching(self, start: int, end: int) -> list[Entry]:
        """Registered regions that share a byte with a range, those in retirement, too."""
        retired = [e for e in self.retired if e.start < end and start < e.end]
        return [*self.found.overlapping(start, end), *retired]

    def is_pending(self, start: int, end: int) -> bool:
        """Whether something in a range is being registered."""
        return any(first < end and start < behind for first, behind in self.pending)

    # ---- room ----

    def excess(self, nbytes: int) -> tuple[int, int]:
        """Bytes and regions too many if so much were added; at most 0 when it fits."""
        return (
            self.pinned_nbytes + nbytes - self.capacity_bytes,
            self.regions + 1 - self.max_regions,
        )

    def reserve(self, nbytes: int) -> None:
        """Count a region that is going to be registered."""
        self.pinned_nbytes += nbytes
        self.regions += 1

    def give_back(self, nbytes: int) -> None:
        """Count a region that is not registered any more, or never was."""
        self.pinned_nbytes -= nbytes
        self.regions -= 1
        self.notify()

    # ---- coming and going ----

    def watch(self, entry: Entry, owner: Any) -> None:
        """Tie an entry to the life of an object whose memory is in it."""
        if owner is None:
            entry.ownerless = True
            return
        dead, signal = self.dead, self.signal

        def died(_: weakref.ref[Any]) -> None:
            entry.orphaned = True
            dead.append(entry)
            signal.put(True)

        try:
            entry.owners[id(owner)] = weakref.ref(owner, died)
        except TypeError:  # a bytearray cannot be watched
            entry.ownerless = True

    def install(self, entry: Entry) -> None:
        """Let requests find a region; its range must be free."""
        self.generation += 1
        entry.generation = self.generation
        self.ghosts.pop(entry.start, None)
        self.found.insert(entry.start, entry.end, entry)
        self._log.inserted(entry.start, entry.pinned_nbytes)

    def mark_leaving(self, entry: Entry) -> None:
        """The calling thread is going to deregister it."""
        entry.leaving = True
        self.leaving += 1

    def stay(self, entry: Entry) -> None:
        """It is not deregistered after all."""
        entry.leaving = False
        self.leaving -= 1
        self.doom(entry)
        self.notify()

    def gone(self, entry: Entry) -> None:
        """It is deregistered."""
        entry.leaving = False
        self.leaving -= 1
        self.retired.discard(entry)
        self.give_back(entry.pinned_nbytes)

    def hide(self, entry: Entry, reason: str, forget: bool = True) -> None:
        """Let requests not find a region any more; nothing if they don't already.

        Parameters
        ----------
        entry
            Still registered.
        reason
            Why it goes, to count it by.
        forget
            Whether its memory goes, too. If not, it may come back by itself.
        """
        if self.at(entry.start) is not entry:
            return
        entry.hidden = True
        self.found.remove(entry.start)
        self._stats.evicted(reason)
        if entry.prefetched:
            entry.prefetched = False
            self._stats.prefetched("wasted")
        forget = forget or not entry.is_alive
        self._log.removed(entry.start, forget)
        if not forget:
            self.ghosts[entry.start] = entry
            if len(self.ghosts) > _MAX_GHOSTS:
                oldest = next(iter(self.ghosts))
                del self.ghosts[oldest]
                self._log.removed(oldest, True)

    def retire(self, entry: Entry, reason: str) -> None:
        """Hide a region, and have it deregistered as soon as nobody uses it."""
        self.hide(entry, reason)
        self.retired.add(entry)
        self.doom(entry)

    def doom(self, entry: Entry) -> None:
        """Put a region up for deregistration if it is retired and nobody uses it."""
        in_use = entry.references or entry.exports or entry.leaving
        if entry in self.retired and not in_use:
            self.mark_leaving(entry)
            self.doomed.append(entry)

    def forget_ghosts(self, start: int, end: int) -> None:
        """The memory in a range is going."""
        for entry in [e for e in self.ghosts.values() if e.start < end and start < e.end]:
            del self.ghosts[entry.start]
            self._log.removed(entry.start, True)

    def withdraw(self, start: int, end: int) -> None:
        """The memory in a range is going, whoever uses it: let nobody else find it."""
        self.forget_ghosts(start, end)
        for entry in self.found.overlapping(start, end):
            self.retire(entry, "invalidated")

    def settle(self) -> None:
        """Act on what finalizers have left: handles dropped, owners dead."""
        while self.later:
            self.later.popleft()()
        while self.dropped:
            self.release(self.dropped.popleft())
        while self.dead:
            entry = self.dead[0]  # hits without the lock must see it until it is hidden
            if isinstance(entry, tuple):
                self.withdraw(*entry)
            elif self.ghosts.get(entry.start) is entry:
                del self.ghosts[entry.start]
                self._log.removed(entry.start, True)
            elif self.at(entry.start) is entry:
                self.retire(entry, "owner_died")
            self.dead.popleft()

    def release(self, entry: Entry) -> None:
        """One handle less."""
        entry.users.pop()
        self.let_go(entry)

    def let_go(self, entry: Entry) -> None:
        """Act on a handle less, if anybody minds."""
        if not entry.references:
            self.doom(entry)
            self.notify()
