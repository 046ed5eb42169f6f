"""An arena: memory registered once and leased in microseconds.

One for each device and NUMA node. Memory comes in chunks (chunks.py), and who has which part of
them is in places.py. Here: preparing and ending, threads, those who wait, and what users are told.
"""

from __future__ import annotations

import itertools
import logging
import operator
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Literal

from controller.errors import StellarError, UsageError
from controller.memory.chunks import (
    MAX_CHUNK_NBYTES,
    Chunk,
    ChunkMaker,
    chunk_size,
)
from controller.memory.errors import LeaseError, PoolError, PoolExhaustedError
from controller.memory.fork import fork_error, watch_fork
from controller.memory.lease import Lease
from controller.memory.limits import Limits
from controller.memory.pages import PageSource, report_pages
from controller.memory.places import Places
from controller.memory.quick_lock import QuickLock
from controller.memory.stats import PoolStats
from controller.units import format_bytes

if TYPE_CHECKING:
    from controller.verbs.registration import Registrar

_LOG = logging.getLogger(__name__)

# A leaked lease is noticed by whoever waits for memory within this time.
_WAIT_STEP_S = 0.05


class Arena:
    """Registered memory to lease from; safe for threads.

    Parameters
    ----------
    registrar
        Of the device.
    capacity_nbytes
        Rounded up to whole chunks.
    chunk_nbytes
        Power of two, from a page to 2 GiB; also the largest lease. None: see `chunk_size`.
    numa_node
        Where the memory has to lie. None: near the device, where the machine tells.
    pages
        As for `AnonymousPages`.
    prepare
        ``now``: everything is registered when the constructor returns. ``background``: by a
        thread; leases work as soon as the first chunk is there.
    source
        Gives the memory instead of `AnonymousPages`.
    stats
        Counts; None: counters of its own.
    name
        In messages and in `controller pool status`.
    limits
        Of process and machine; None: looked up.

    Raises
    ------
    UsageError
        A size is not allowed.
    PoolError
        A limit does not suffice, or memory or the device ran out on the way: nothing is kept.
    """

    def __init__(
        self,
        registrar: Registrar,
        capacity_nbytes: int,
        *,
        chunk_nbytes: int | None = None,
        numa_node: int | None = None,
        pages: str = "auto",
        prepare: Literal["now", "background"] = "now",
        source: PageSource | None = None,
        stats: PoolStats | None = None,
        name: str = "arena",
        limits: Limits | None = None,
    ) -> None:
        if capacity_nbytes < 1:
            raise UsageError(f"A pool of {capacity_nbytes} bytes holds nothing; allowed: from 1.")
        if prepare not in ("now", "background"):
            raise UsageError(f"prepare is {prepare!r}; allowed: 'now', 'background'.")
        self.name = name
        self.stats = stats or PoolStats()
        self._maker = ChunkMaker(
            registrar,
            chunk_nbytes
            if chunk_nbytes is not None
            else chunk_size(
                capacity_nbytes, registrar.limits.max_mr_nbytes, pages if source is None else "base"
            ),
            numa_node=numa_node,
            pages=pages,
            source=source,
            stats=self.stats,
            name=name,
        )
        self.chunk_nbytes = self._maker.chunk_nbytes
        self.numa_node = self._maker.numa_node
        self.forked = False
        self._lock = QuickLock()
        # For those who wait; taken before the other one, never while holding that. Reentrant, as
        # a finalizer may release a lease while its thread is in here.
        self._changing = threading.RLock()  # left by itself: Condition.__exit__ can be interrupted
        self._changed = threading.Condition(self._changing)
        self._waiting = 0
        self._places = Places()
        self._generations = itertools.count(1)
        # What finalizers and signal handlers left to do: they may run at any place, with the lock
        # held or not. Blocks to give back, and generations whose lease() was interrupted.
        self._late: deque[tuple[Chunk, int, int, bool] | int] = deque()
        self._wanted_chunks = 0
        self._failure: StellarError | None = None
        self._closed = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        count = -(-capacity_nbytes // self.chunk_nbytes)
        self._maker.check(count, limits)
        watch_fork(self)
        end = weakref.finalize(self, _tell_if_dropped, self._places, self.name, os.getpid())
        end.atexit = False  # the kernel takes everything back with the process
        self._wanted_chunks = count
        if prepare == "background":
            self._thread = threading.Thread(
                target=self._prepare_in_background, args=(count,), name="pool", daemon=True
            )
            self._thread.start()
        else:
            self._places.set_chunks(self._maker.make_all(count))

    # ---- making and ending ----

    def _prepare_in_background(self, count: int) -> None:
        for done in range(count):
            if self._stop.is_set():
                return
            try:
                chunk = self._maker.make()
            except StellarError as error:
                self._fail(self._maker.midway(done, count, error))
                return
            except Exception as error:
                self._fail(self._maker.midway(done, count, StellarError(f"{error!r}.")))
                return
            with self._lock:
                self._places.set_chunks([*self._places.chunks, chunk])
            self._notify()

    def _fail(self, failure: StellarError) -> None:
        """Keep no chunk but those that somebody leases from; these go at the end."""
        with self._lock:
            self._failure = failure
            chunks = self._places.chunks
            idle = [chunk for chunk in chunks if not chunk.live]
            self._places.set_chunks([chunk for chunk in chunks if chunk.live])
        self._notify()
        for chunk in idle:
            try:
                self._maker.drop(chunk)
            except StellarError as error:
                _LOG.warning("%s: %s", self.name, error)
                with self._lock:  # for close() to try again
                    self._places.set_chunks([*self._places.chunks, chunk])

    def grow(self, nbytes: int) -> None:
        """Register more: `nbytes`, rounded up to whole chunks. Leases go on meanwhile.

        Raises
        ------
        PoolError
            As for the constructor, or the arena was closed meanwhile; what was there stays.
        """
        self._require_open()
        if nbytes < 0:
            raise UsageError(f"A pool cannot grow by {nbytes} bytes; allowed: from 0.")
        count = -(-nbytes // self.chunk_nbytes)
        self._maker.check(count, None)
        made = self._maker.make_all(count)
        with self._lock:
            usable = not self._closed and self._failure is None
            if usable:
                self._wanted_chunks += count
                self._places.set_chunks(self._places.chunks + made)
        if not usable:
            self._maker.drop_all(made)
            self._require_usable()
        self._notify()

    @property
    def ready(self) -> bool:
        """Whether all chunks are there."""
        return len(self._places.chunks) >= self._wanted_chunks and not self._closed

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until all chunks are there.

        Parameters
        ----------
        timeout_s
            None: as long as it takes.

        Returns
        -------
        bool
            False when the time is over.

        Raises
        ------
        PoolError
            Preparing failed, or the arena was closed.
        """
        with self._changing:
            done = self._changed.wait_for(
                lambda: self.ready or self._failure is not None or self._closed, timeout_s
            )
            if not self.ready:
                self._require_usable()
        return done

    def close(self, *, force: bool = False) -> None:
        """Deregister everything; twice does no harm.

        The memory goes when no array refers to it any more.

        Parameters
        ----------
        force
            Also when leases are out: these are worth nothing afterwards.

        Raises
        ------
        LeaseError
            Leases are out; names their keys. Nothing was changed.
        RegistrationError
            The device keeps a region: the others are gone, and this one is tried again next time.
        PoolError
            Called by what interrupted this thread within the arena.
        """
        if self.forked:
            return
        self._require_outside()
        with self._lock:
            self._collect_late()
            holders = self._places.holders()
            if holders and not force:
                raise LeaseError(
                    f"{self.name} cannot be closed: leases are out ({holders}).",
                    "Release them, or close with force=True.",
                )
            self._closed = True
            self._stop.set()
        self._notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            chunks = self._places.chunks
            for chunk in chunks:
                self.stats.leases_out -= len(chunk.live)
                chunk.live.clear()
        errors = []
        for chunk in chunks:
            with self._lock:
                if chunk not in self._places.chunks:
                    continue  # another thread closes, too
                self._places.set_chunks([c for c in self._places.chunks if c is not chunk])
            try:
                self._maker.drop(chunk)
            except BaseException as error:
                with self._lock:
                    self._places.set_chunks([*self._places.chunks, chunk])
                if not isinstance(error, StellarError):
                    raise
                errors.append(error)
        if errors:
            raise errors[0]

    def _notify(self) -> None:
        """Wake those who wait for memory or for the end of preparation; without the lock."""
        with self._changing:
            self._changed.notify_all()

    def _require_open(self) -> None:
        if self.forked:
            raise fork_error(self.name)
        self._require_usable()

    def _require_usable(self) -> None:
        if self._closed:
            raise PoolError(f"{self.name} is closed.", "Make another one.")
        if self._failure is not None:
            # One object for all: what it gathered on its way through others is not this call's.
            raise self._failure.with_traceback(None)

    def _require_outside(self) -> None:
        """Refuse to enter where this thread already is: the books are not in order there."""
        if self._lock.held_by_this_thread():
            raise PoolError(
                f"{self.name} was asked by a finalizer or a signal handler that interrupted it.",
                "Only release leases there; do everything else elsewhere.",
            )

    # ---- leases ----

    def lease(self, nbytes: int, key: Hashable | None = None, *, timeout_s: float = 0.0) -> Lease:
        """Take a piece of registered memory.

        Parameters
        ----------
        nbytes
            0 is allowed, and takes the smallest block.
        key
            The same key and size get the same place again while it is free: warm caches, and
            addresses that peers know already. It names the lease in messages, too.
        timeout_s
            Time to wait for others to release when nothing is free. A large request may wait
            while small ones come and go.

        Raises
        ------
        PoolExhaustedError
            Nothing that large is free; names who has it. Or it is larger than a chunk.
        PoolError, ForkError
            The arena is closed, could not be prepared, or belongs to the parent process; or this
            was called by what interrupted this thread within the arena.
        """
        if self.forked:
            raise fork_error(self.name)
        nbytes = operator.index(nbytes)
        if nbytes < 0:
            raise UsageError(f"A lease of {nbytes} bytes; allowed: from 0.")
        if self._lock.held_by_this_thread():
            self._require_outside()
        generation = next(self._generations)
        try:
            with self._lock:
                if self._late:
                    self._collect_late()
                if self._closed or self._failure is not None:
                    self._require_usable()
                place = self._take(nbytes, key, generation)
            if place is None:
                place = self._wait_and_take(nbytes, key, generation, timeout_s)
            if key is not None and self.stats.recorder is not None:
                # Without a key there is nothing that could be asked for again.
                self.stats.recorder.add(key, nbytes, self.stats.registration_us(nbytes))
            return Lease(self, place[0], place[1], nbytes, generation, key)
        except StellarError:
            raise
        except BaseException:  # Ctrl-C, anywhere in there
            self._late.append(generation)
            raise

    def _take(self, nbytes: int, key: Hashable | None, generation: int) -> tuple[Chunk, int] | None:
        """Lease a block; under the lock."""
        place = self._places.take(nbytes, key)
        if place is None:
            return None
        chunk, offset, is_home = place
        chunk.live[offset] = (nbytes, generation, key)
        stats = self.stats
        stats.leases += 1
        stats.leases_out += 1
        stats.lease_key_hits += is_home
        return chunk, offset

    def _wait_and_take(
        self, nbytes: int, key: Hashable | None, generation: int, timeout_s: float
    ) -> tuple[Chunk, int]:
        if nbytes > self.chunk_nbytes:
            raise PoolExhaustedError(
                f"A lease of {nbytes} bytes is larger than a chunk of {self.name} (chunk_nbytes = "
                f"{self.chunk_nbytes}).",
                "Take several leases, or make the pool with a larger chunk_nbytes (up to "
                f"{MAX_CHUNK_NBYTES}).",
            )
        started_ns = time.monotonic_ns()
        deadline_ns = started_ns + round(timeout_s * 1e9)
        with self._changing:
            self._waiting += 1
            try:
                while True:
                    with self._lock:
                        self._collect_late()
                        self._require_usable()
                        place = self._take(nbytes, key, generation)
                        if place is not None:
                            return place
                        left_ns = deadline_ns - time.monotonic_ns()
                        if left_ns <= 0:
                            raise self._exhausted(nbytes, timeout_s)
                    self._changed.wait(min(left_ns / 1e9, _WAIT_STEP_S))
            finally:
                self._waiting -= 1
                self.stats.lease_wait_ns += time.monotonic_ns() - started_ns

    def _exhausted(self, nbytes: int, timeout_s: float) -> PoolExhaustedError:
        waited = f" within {timeout_s:g} s" if timeout_s > 0 else ""
        places = self._places
        preparing = (
            "" if self.ready
            else f"{len(places.chunks)} of {self._wanted_chunks} chunks are prepared; "
        )  # fmt: skip
        return PoolExhaustedError(
            f"{self.name} has no free block for {nbytes} bytes{waited}: {preparing}"
            f"{format_bytes(places.leased_nbytes())} of "
            f"{format_bytes(len(places.chunks) * self.chunk_nbytes)} are leased, the largest free "
            f"block has {format_bytes(places.largest_free_nbytes())}. Held by: "
            f"{places.holders() or 'nobody'}.",
            "Release leases, wait for them (timeout_s), or make the pool larger.",
        )

    def give_back(self, chunk: Chunk, offset: int, generation: int) -> bool:
        """Release the lease of that generation; False when it is not out. For `Lease`."""
        if self.forked:
            raise fork_error(self.name)
        if self._lock.held_by_this_thread():
            return self._give_back_late(chunk, offset, generation)
        try:
            with self._lock:
                entry = chunk.live.get(offset)
                if entry is None or entry[1] != generation:
                    return False
                self._give_back(chunk, offset)
        except BaseException:
            self._late.append(generation)
            raise
        if self._waiting:
            self._notify()
        return True

    def _give_back(self, chunk: Chunk, offset: int) -> None:
        del chunk.live[offset]
        chunk.buddy.free(offset)
        self.stats.leases_out -= 1

    def _give_back_late(self, chunk: Chunk, offset: int, generation: int) -> bool:
        """Release a lease from within a section of the lock: when the next one begins."""
        entry = chunk.live.get(offset)
        if entry is None or entry[1] != generation:
            return False
        # Released from now on; in the same place, as what was interrupted may be looking through.
        chunk.live[offset] = (entry[0], -generation, entry[2])
        self._late.append((chunk, offset, -generation, False))
        return True

    def leaked(self, chunk: Chunk, offset: int, generation: int) -> None:
        """Note a lease that was dropped; for its finalizer, which must not take the lock."""
        self._late.append((chunk, offset, generation, True))

    def _collect_late(self) -> None:
        """Do what could not be done where it was found; under the lock."""
        while self._late:
            late = self._late[0]  # until it is done: this may be interrupted, too
            if isinstance(late, int):
                self._mend(late)
            else:
                chunk, offset, generation, leaked = late
                entry = chunk.live.get(offset)
                if entry is not None and entry[1] == generation:
                    self.stats.leases_leaked += leaked
                    self._give_back(chunk, offset)
            self._late.popleft()

    def _mend(self, generation: int) -> None:
        """Put the books in order after an interrupt somewhere in lease() or release().

        Parameters
        ----------
        generation
            Of the lease that nobody has.
        """
        for chunk in self._places.chunks:
            for offset, entry in list(chunk.live.items()):
                if entry[1] == generation:
                    del chunk.live[offset]
            chunk.rebuild()
        self.stats.leases_out = sum(len(chunk.live) for chunk in self._places.chunks)

    # ---- questions ----

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Keys for a range of memory, when it lies in one live lease.

        Parameters
        ----------
        address, nbytes
            Of a numpy array, say: ``array.ctypes.data``, ``array.nbytes``.

        Returns
        -------
        (lkey, rkey) or None
            None: it lies elsewhere, or not within one lease.
        """
        found = self._places.at(address)
        if found is None or self.forked:
            return None
        chunk, start, (leased_nbytes, generation, _) = found
        if generation < 0:  # about to be given back
            return None
        if address - chunk.address - start + nbytes > leased_nbytes:
            return None
        return chunk.lkey, chunk.rkey

    def check(self, address: int, generation: int) -> None:
        """Check that an address lies in the lease of that generation.

        Raises
        ------
        LeaseError
            That lease is released; says who has the place now.
        """
        found = self._places.at(address)
        if found is not None and found[2][1] == generation:
            return
        now = "nobody" if found is None else f"key {found[2][2]!r}, generation {found[2][1]}"
        raise LeaseError(
            f"{address:#x} is not in a lease of generation {generation} any more; it is held by "
            f"{now}.",
            "Hold the lease until all work requests on it are complete.",
        )

    def describe(self, *, with_pages: bool = False) -> dict[str, Any]:
        """What the arena is and how full, units in the names.

        Parameters
        ----------
        with_pages
            Also what kinds of pages and which NUMA nodes the memory has, which takes the kernel
            some milliseconds to tell.
        """
        if self.forked:
            raise fork_error(self.name)
        self._require_outside()
        with self._lock:
            self._collect_late()
            chunks = list(self._places.chunks)
            result: dict[str, Any] = {
                "chunk_nbytes": self.chunk_nbytes,
                "chunks": len(chunks),
                "chunks_wanted": self._wanted_chunks,
                "capacity_nbytes": len(chunks) * self.chunk_nbytes,
                "leased_nbytes": self._places.leased_nbytes(),
                "pages": sorted({chunk.pages.kind for chunk in chunks}),
                "numa_node": self.numa_node,
            }
        if with_pages:
            result |= report_pages([chunk.pages for chunk in chunks]).to_json()
        return result


def _tell_if_dropped(places: Places, name: str, pid: int) -> None:
    """Warn that an arena, which nobody can reach any more, leaves its chunks registered.

    They are not deregistered here: the device may have been dropped with the pool, and libibverbs
    looks into its memory.
    """
    if places.chunks and os.getpid() == pid:
        warnings.warn(
            f"{name} was dropped without close(): {len(places.chunks)} regions of "
            f"{places.chunks[0].nbytes} bytes stay registered until the process ends",
            ResourceWarning,
            stacklevel=2,
        )
