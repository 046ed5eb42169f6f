"""A region whose rkey a peer holds, and how it is taken back.

A peer that writes to a region after its deregistration breaks its queue pair, and one that writes
after the memory was given to something else would corrupt it. So the peer is told first, and has
to answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from controller.errors import UsageError
from controller.memory.fork import fork_error, watch_fork

DEFAULT_TIMEOUT_s = 5.0
# A peer that failed is left alone for so many of its timeouts while other regions can go: at worst
# evictions wait for it a tenth of the time.
_REST_timeouts = 10

# Called with the export; returns when the peer has answered that it uses the rkey no more, and
# raises when it refuses or cannot be reached.
OnRevoke = Callable[["Export"], object]


class Export:
    """An rkey in a peer's hands, until `close()` or until it is revoked.

    Parameters
    ----------
    address, nbytes, rkey, generation
        What the peer was given; an rkey is the same as long as the generation is.
    on_revoke
        Tells the peer and waits for its answer. Runs in a thread of its own, without any lock of
        the pool; it may call the pool.
    timeout_s
        How long it may take; a peer that has not answered by then keeps its rkey and the region
        stays registered.
    owners
        Kept alive while the peer may write.
    on_close
        Called once, when the export ends in whatever way.
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        rkey: int,
        generation: int,
        on_revoke: OnRevoke,
        timeout_s: float,
        owners: tuple[Any, ...],
        on_close: Callable[[Export], None],
    ) -> None:
        if not 0 < timeout_s < threading.TIMEOUT_MAX:
            raise UsageError(f"Revocation timeout is {timeout_s!r} s; allowed: above 0.")
        self.address, self.nbytes, self.rkey = address, nbytes, rkey
        self.generation = generation
        self.timeout_s = timeout_s
        self._on_revoke = on_revoke
        self._on_close = on_close
        self._owners = owners
        self._asking: threading.Thread | None = None
        self._problem = ""
        self._rests_until_s = 0.0
        self._ended = False
        # Taken by who ends it. No lock: a finalizer may close it while its thread is at that.
        self._end: list[None] = [None]
        self.forked = False
        watch_fork(self)

    @property
    def ended(self) -> bool:
        """Whether the peer has no rkey any more."""
        return self._ended

    def close(self) -> None:
        """The peer has said by itself that it is done. Twice does no harm.

        Raises
        ------
        ForkError
            This process is a child of the one that exported it.
        """
        if self.forked:
            raise fork_error(f"The export of rkey {self.rkey:#x}")
        try:
            self._end.pop()
        except IndexError:
            return
        self._ended = True
        self._owners = ()
        self._on_close(self)

    @property
    def failed_lately(self) -> bool:
        """Whether the peer refused or was silent some time ago, and would be again."""
        return not self._ended and time.monotonic() < self._rests_until_s

    def revoke(self) -> str:
        """Ask the peer for the rkey; wait for its answer, `timeout_s` at most.

        If it has been asked before and has not answered yet, that answer is waited for.

        Returns
        -------
        str
            Empty when the peer has answered; else why the rkey is still out there. An answer that
            comes too late ends the export all the same.
        """
        if self._ended:
            return ""
        asking = self._asking
        if asking is None or not asking.is_alive():
            # No callback can be bounded from within its own thread.
            asking = threading.Thread(target=self._ask, name=f"revoke-{self.rkey:#x}", daemon=True)
            self._problem = ""
            self._asking = asking
            asking.start()
        asking.join(self.timeout_s)
        if self.ended:
            return ""
        self._rests_until_s = time.monotonic() + _REST_timeouts * self.timeout_s
        return self._problem or f"no answer within {self.timeout_s:g} s"

    def _ask(self) -> None:
        try:
            self._on_revoke(self)
        except Exception as error:
            self._problem = f"{type(error).__name__}: {error}"
        else:
            self.close()
