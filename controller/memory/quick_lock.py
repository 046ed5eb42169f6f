"""A lock for sections of some microseconds, cheaper than threading.Lock where clocks are slow.

CPython 3.11 reads the monotonic clock whenever it takes a threading.Lock, free or not. Where that
is a system call (user-mode Linux and some virtual machines: 20 us) two locks take longer than all
the rest of a lease. A POSIX semaphore is taken by one atomic operation, and asks nobody.

Taking and giving must both be single calls of C: a signal's handler (Ctrl-C) runs between any two
steps of a function of Python, and what it raises there would leave the lock held for good.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

try:
    from _multiprocessing import SemLock  # type: ignore[import-not-found]
except ImportError:  # a build without semaphores
    SemLock = None

# Kinds of the C module: 0 is a mutex that knows its holder.
_MUTEX = 0
_NAMES_TRIED = 8


class QuickLock:
    """Mutual exclusion between threads, by ``with``; not fair.

    Finalizers and signal handlers run inside sections of their own thread. What they may call must
    ask `held_by_this_thread()` first, and put its work off or refuse: entering is not refused to
    the holder, so that it cannot hang.

    Where the system has no semaphores to give (no /dev/shm), a threading.RLock does the same and
    reads the clock.
    """

    # ``with`` finds these on the class, as slots, and so the lock's own functions in the instance.
    __slots__ = ("__enter__", "__exit__", "_is_mine")

    if TYPE_CHECKING:

        def __enter__(self) -> object: ...
        def __exit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            trace: TracebackType | None,
        ) -> None: ...

    def __init__(self) -> None:
        lock: Any = _semaphore()
        if lock is not None:
            self._is_mine: Callable[[], bool] = lock._is_mine
        else:
            lock = threading.RLock()
            self._is_mine = lock._is_owned
        self.__enter__ = lock.__enter__  # type: ignore[method-assign]
        self.__exit__ = lock.__exit__  # type: ignore[method-assign]

    def held_by_this_thread(self) -> bool:
        """Whether the calling thread is inside, be it in a function that this one interrupted."""
        return self._is_mine()


def _semaphore() -> Any:
    """One that has no name any more, so that it ends with the last reference; None: none to be had.

    It is shared with forked children, which must not touch it: what guards a pool is asked for
    ``forked`` first.
    """
    if SemLock is None:
        return None
    for _ in range(_NAMES_TRIED):
        try:
            return SemLock(_MUTEX, 1, 1, f"/stlr-{os.getpid()}-{secrets.token_hex(6)}", True)
        except FileExistsError:
            continue
        except OSError:
            return None
    return None
