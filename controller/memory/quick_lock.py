"""A lock for sections of some microseconds, cheaper than threading.Lock where clocks are slow.

CPython 3.11 reads the monotonic clock whenever it takes a threading.Lock, free or not. Where that
is a system call (user-mode Linux and some virtual machines: 20 us) two locks take longer than all
the rest of a lease. Taking the only element of a list is atomic as well, and asks nobody.
"""

from __future__ import annotations

import time
from types import TracebackType

# Found taken, the lock is held by a thread that was interrupted within its few microseconds.
_PAUSE_S = 20e-6


class QuickLock:
    """Mutual exclusion between threads, by ``with``; not reentrant, not fair.

    Nobody is woken: a thread that finds it taken sleeps and looks again. Hold it for microseconds
    only, and never while waiting for anything.
    """

    __slots__ = ("_give", "_take")

    def __init__(self) -> None:
        tokens: list[None] = [None]
        self._take = tokens.pop
        self._give = tokens.append

    def __enter__(self) -> None:
        try:
            self._take()
        except IndexError:
            self._wait()

    def _wait(self) -> None:
        while True:
            time.sleep(_PAUSE_S)
            try:
                return self._take()
            except IndexError:
                continue

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._give(None)
