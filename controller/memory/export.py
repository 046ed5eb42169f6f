"""A region whose rkey a peer holds, and how it is taken back.

A peer that writes to a region after its deregistration breaks its queue pair, and one that writes
after the memory was given to something else would corrupt it. So the peer is told first, and has
to answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from controller.errors import UsageError

DEFAULT_TIMEOUT_s = 5.0

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
        self._lock = threading.Lock()
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the peer has no rkey any more."""
        return self._ended

    def close(self) -> None:
        """The peer has said by itself that it is done. Twice does no harm."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._owners = ()
        self._on_close(self)

    def revoke(self) -> str:
        """Ask the peer for the rkey; wait for its answer, `timeout_s` at most.

        Returns
        -------
        str
            Empty when the peer has answered; else why the rkey is still out there. An answer that
            comes too late ends the export all the same.
        """
        if self._ended:
            return ""
        problems: list[str] = []

        def ask() -> None:
            try:
                self._on_revoke(self)
            except Exception as error:
                problems.append(f"{type(error).__name__}: {error}")
            else:
                self.close()

        # No callback can be bounded from within its own thread.
        asking = threading.Thread(target=ask, name=f"revoke-{self.rkey:#x}", daemon=True)
        asking.start()
        asking.join(self.timeout_s)
        if problems:
            return problems[0]
        return "" if self._ended else f"no answer within {self.timeout_s:g} s"
