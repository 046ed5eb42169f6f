"""Registration beside the transfers: a thread that touches pages and registers them.

The call into the device (ibv_reg_mr by ctypes) leaves Python's lock free, so the process goes on
posting and polling. What is left is the kernel's side: pinning fresh memory makes it zero every
page, in one go, on one core. So pages are touched before, in steps (MADV_POPULATE_WRITE, which
leaves Python's lock free, too), with a rest after each, and a large range can be registered as
several regions with rests between them. The thread is polite to the kernel's scheduler as well: see
`be_polite`.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from enum import IntEnum
from functools import partial
from typing import Any, TypeVar

from controller.errors import UsageError
from controller.memory.errors import PoolError
from controller.memory.fork import fork_error, watch_fork
from controller.memory.pages import touch_range
from controller.memory.region_map import page_range
from controller.verbs.registration import MemoryRegion, Registrar, RegistrationError

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

# At the 2 to 10 GB/s at which kernels clear pages, 1 to 4 ms.
DEFAULT_STEP_nbytes = 8 << 20
# For a host with cores to spare. Where the transfer needs all of them (two cores for both of its
# ends), it keeps its rate only beside a tenth: scripts/bench-registration.
DEFAULT_BUSY_SHARE = 0.5
# However long a step took: somebody may wait for the next one.
MAX_REST_s = 5.0


class Urgency(IntEnum):
    """What goes first."""

    DEMAND = 0
    PREFETCH = 1


class Cancelled(PoolError):
    """A registration in the background was called off."""


def be_polite() -> None:
    """Let the calling thread give way to threads that wake up.

    SCHED_BATCH: it does not preempt a thread that polls or posts, and keeps its share of the
    processor. A lower share (SCHED_IDLE, nice 19) would be wrong: this thread takes Python's lock
    between its calls, and one that has the lock and no processor stops all the others.

    Some sandboxes forbid it; the thread works all the same then.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Job(Future[T]):
    """A future whose `cancel` reaches work that has begun, at its next step."""

    def __init__(self) -> None:
        super().__init__()
        self._stop = False

    def cancel(self) -> bool:
        """Call it off; True unless it has ended already."""
        self._stop = True
        return super().cancel() or not self.done()

    def check(self) -> None:
        """Raise Cancelled if it was called off."""
        if self._stop:
            raise Cancelled("The registration was cancelled.")


class Pacer:
    """Works in steps, and rests after each so that it is busy for a share of the time.

    Parameters
    ----------
    step_nbytes
        Size of a step.
    busy_share
        In (0, 1]; 1 never rests. Rests are no longer than `MAX_REST_s`.
    clock
        Time in ns.
    sleep
        Rests for so many seconds.
    """

    def __init__(
        self,
        step_nbytes: int,
        busy_share: float,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if step_nbytes < 1:
            raise UsageError(f"Registration step is {step_nbytes} bytes; allowed: from 1.")
        if not 0 < busy_share <= 1:
            raise UsageError(f"Busy share is {busy_share!r}; allowed: above 0, up to 1.")
        self.step_nbytes = step_nbytes
        self._rest_per_work = 1 / busy_share - 1
        self._clock, self._sleep = clock, sleep

    def step(self, work: Callable[[], T]) -> T:
        """Work, then rest in proportion."""
        begin_ns = self._clock()
        result = work()
        self.rest(self.rest_s(self._clock() - begin_ns))
        return result

    def rest_s(self, work_ns: int) -> float:
        """The time in seconds to rest for so much work, at once or later."""
        return min(work_ns * self._rest_per_work / 1e9, MAX_REST_s)

    def rest(self, rest_s: float) -> None:
        """Do nothing for so long."""
        if rest_s > 0:
            self._sleep(rest_s)

    def touch(self, start: int, end: int, check: Callable[[], None] = lambda: None) -> bool:
        """Make the kernel provide all pages of a range, step by step.

        Parameters
        ----------
        start, end
            The range; its pages are writable.
        check
            Called before each step; what it raises ends the work.

        Returns
        -------
        bool
            False when the kernel cannot, or will not touch this memory; nothing is lost then: the
            registration does it, or tells why not.
        """
        first, behind = page_range(start, end)
        for begin in range(first, behind, self.step_nbytes):
            check()
            nbytes = min(self.step_nbytes, behind - begin)
            try:
                if not self.step(partial(touch_range, begin, nbytes)):
                    return False
            except PoolError:
                return False
        return True


class BackgroundRegistrar:
    """Registers in a thread of its own, the urgent first.

    Parameters
    ----------
    registrar
        Registers and deregisters.
    step_nbytes
        Pages are touched, and large ranges registered in parts, in steps of about so much.
    busy_share
        Share of the time that the thread works at most while it has more than one step to do;
        the call that registers a region is one step however large.
    name
        Of the thread.
    """

    def __init__(
        self,
        registrar: Registrar,
        *,
        step_nbytes: int = DEFAULT_STEP_nbytes,
        busy_share: float = DEFAULT_BUSY_SHARE,
        name: str = "registrar",
    ) -> None:
        self._closing = threading.Event()
        self.pacer = Pacer(step_nbytes, busy_share, sleep=self._closing.wait)
        self.forked = False
        self._registrar = registrar
        self._name = name
        self._changed = threading.Condition()
        self._queue: list[tuple[int, int, Job[Any], Callable[[Job[Any]], Any]]] = []
        self._order = itertools.count()
        self._current: Job[Any] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        watch_fork(self)

    def submit(
        self,
        address: int,
        nbytes: int,
        *,
        region_nbytes: int | None = None,
        urgency: Urgency = Urgency.DEMAND,
        owner: Any = None,
    ) -> Job[list[MemoryRegion]]:
        """Register a range.

        Parameters
        ----------
        address, nbytes
            The range; its pages are touched first.
        region_nbytes
            Register it as several regions of so much each (the last may be smaller), with rests
            between them: one call for all of it would keep a core for as long as it takes. None for
            one region.
        urgency
            What goes first when more is waiting.
        owner
            Kept alive until it is done.

        Returns
        -------
        Job
            Its result are the regions by address; they are the caller's to deregister. If one of
            them fails, or it is cancelled, none is left.
        """
        if nbytes < 1 or (region_nbytes is not None and region_nbytes < 1):
            raise UsageError(
                f"A range of {nbytes} bytes cannot be registered in regions of {region_nbytes}; "
                "allowed: from 1."
            )
        part_nbytes = region_nbytes or nbytes

        def register(job: Job[Any]) -> list[MemoryRegion]:
            keep_alive = owner  # noqa: F841
            end = address + nbytes
            regions: list[MemoryRegion] = []
            try:
                for start in range(address, end, part_nbytes):
                    behind = min(start + part_nbytes, end)
                    self.pacer.touch(start, behind, job.check)
                    job.check()
                    pages = page_range(start, behind) if region_nbytes is None else (start, behind)
                    nbytes_each = pages[1] - pages[0]
                    regions.append(
                        self.pacer.step(partial(self._registrar.register, pages[0], nbytes_each))
                    )
                job.check()  # called off during the last one: nobody will take them
            except BaseException:
                for region in regions:
                    try:
                        self._registrar.deregister(region)
                    except RegistrationError as error:
                        _LOG.warning("%s: %s", self._name, error)
                raise
            return regions

        return self.run(register, urgency)

    def run(self, work: Callable[[Job[T]], T], urgency: Urgency = Urgency.DEMAND) -> Job[T]:
        """Let the thread do something.

        Parameters
        ----------
        work
            Called with its own job, whose `check` it may call between steps.
        urgency
            What goes first when more is waiting; in order among equals.

        Raises
        ------
        PoolError
            It is closed.
        ForkError
            In a child process, which has no such thread.
        """
        if self.forked:
            raise fork_error(f"Thread {self._name!r}")
        job: Job[T] = Job()
        with self._changed:
            if self._closed:
                raise PoolError(f"Thread {self._name!r} is closed.", "Make a new one.")
            heapq.heappush(self._queue, (urgency, next(self._order), job, work))
            self._changed.notify()
        return job

    def close(self, *, wait: bool = True) -> None:
        """Cancel what waits and what runs. Twice does no harm.

        Parameters
        ----------
        wait
            Return when the thread has ended, which is when the call into the device that it is in
            has.
        """
        if self.forked:
            return  # the child has no such thread, and its lock may be held for good
        self._closing.set()  # whoever closes does not wait for a rest
        with self._changed:
            self._closed = True
            waiting, self._queue = self._queue, []
            current = self._current
            self._changed.notify()
        for *_, job, _ in waiting:
            job.cancel()
            job.set_running_or_notify_cancel()  # tells those who wait for several futures
        if current is not None:
            current.cancel()
        if wait and self._thread is not threading.current_thread():
            self._thread.join()

    def _next(self) -> tuple[Job[Any], Callable[[Job[Any]], Any]] | None:
        with self._changed:
            self._current = None
            while not self._queue:
                if self._closed:
                    return None
                self._changed.wait()
            *_, job, work = heapq.heappop(self._queue)
            self._current = job
            return job, work

    def _work(self) -> None:
        be_polite()
        while (following := self._next()) is not None:
            self._do(*following)
            del following

    @staticmethod
    def _do(job: Job[Any], work: Callable[[Job[Any]], Any]) -> None:
        """In a frame of its own: nothing may keep a result alive while the thread waits."""
        if not job.set_running_or_notify_cancel():
            return
        try:
            result = work(job)
        except BaseException as error:
            job.set_exception(error)
        else:
            job.set_result(result)
