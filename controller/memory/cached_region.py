"""What a request to the region cache gives: keys for a buffer, good until they are released."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Any

from controller.memory.errors import PoolError
from controller.memory.export import DEFAULT_TIMEOUT_s, Export, OnRevoke
from controller.memory.fork import fork_error
from controller.memory.region_state import Entry

if TYPE_CHECKING:
    from controller.memory.region_cache import RegionCache


class CachedRegion:
    """A buffer in a registered region, in use until `release()`.

    Attributes
    ----------
    address, nbytes
        The buffer's, as asked for. The keys cover it; the region may be larger.
    lkey, rkey
        For work requests of this host, and of peers; give an rkey away with `export()` only.
    generation
        Of the registration: the keys are the same as long as it is.
    """

    __slots__ = (
        "_cache", "_entry", "_owner", "address", "generation", "lkey", "nbytes", "rkey",
    )  # fmt: skip

    def __init__(
        self, cache: RegionCache, entry: Entry, address: int, nbytes: int, owner: Any
    ) -> None:
        region = entry.registered
        self.address, self.nbytes = address, nbytes
        self.lkey, self.rkey, self.generation = region.lkey, region.rkey, entry.generation
        self._cache = cache
        self._entry: Entry | None = entry
        self._owner = owner

    def release(self) -> None:
        """No work request uses it any more. Twice is an error.

        Raises
        ------
        PoolError
            It was released before.
        ForkError
            This process is a child of the one that acquired it.
        """
        if self._cache.forked:
            raise fork_error(f"The region of the buffer at {self.address:#x}")
        entry, self._entry = self._entry, None
        if entry is None:
            raise PoolError(
                f"The region of the buffer at {self.address:#x} ({self.nbytes} bytes) is released "
                "already.",
                "Release each acquired region once.",
            )
        self._owner = None
        self._cache._release(entry)

    def export(self, on_revoke: OnRevoke, timeout_s: float = DEFAULT_TIMEOUT_s) -> Export:
        """Let a peer have the rkey; the region is not deregistered before it gave it back.

        Parameters
        ----------
        on_revoke
            Called with the export when the region has to go: tells the peer and returns when it
            has answered. Raises when the peer refuses or is gone.
        timeout_s
            How long that may take.

        Raises
        ------
        PoolError
            The region is released.
        ForkError
            This process is a child of the one that acquired it.
        """
        if self._cache.forked:
            raise fork_error(f"The region of the buffer at {self.address:#x}")
        entry = self._entry
        if entry is None:
            raise PoolError(
                f"The region of the buffer at {self.address:#x} is released; its rkey cannot be "
                "exported.",
                "Export before release().",
            )
        return self._cache._export(self, entry, on_revoke, timeout_s)

    def __enter__(self) -> CachedRegion:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._entry is not None and not self._cache.forked:
            self.release()

    def __del__(self) -> None:
        entry = getattr(self, "_entry", None)
        if entry is not None and not self._cache.forked:
            # Collected at any moment, maybe while this thread is in the cache: no lock here.
            self._cache._state.dropped.append(entry)
            self._cache._state.signal.put(True)
            warnings.warn(
                f"A cached region of {self.nbytes} bytes at {self.address:#x} "
                f"({entry.label!r}) was never released",
                ResourceWarning,
                stacklevel=2,
            )
