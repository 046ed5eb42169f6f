"""A lease: a piece of registered memory that one user has for a while."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from controller.memory.errors import LeaseError
from controller.memory.fork import fork_error

if TYPE_CHECKING:
    from controller.memory.arena import Arena
    from controller.memory.chunks import Chunk


class Lease:
    """A piece of an arena; made by `Arena.lease`.

    Give it back with `release()` or by leaving ``with``. A lease that is dropped instead is given
    back once no array over it is left, and is reported as leaked (ResourceWarning). Arrays over a
    lease stay valid memory after its release, but the memory may be somebody else's by then:
    `generation` tells.

    Attributes
    ----------
    addr, nbytes
        The range, as work requests name it.
    lkey, rkey
        Keys of its region, for this host's work requests and for the peers'.
    generation
        Grows with every lease of the arena: another lease of the same place has another one.
    key
        As given to `Arena.lease`.
    """

    __slots__ = (
        "__weakref__", "_arena", "_chunk", "_offset", "addr", "generation", "key", "lkey",
        "nbytes", "rkey",
    )  # fmt: skip

    def __init__(
        self,
        arena: Arena,
        chunk: Chunk,
        offset: int,
        nbytes: int,
        generation: int,
        key: Hashable | None,
    ) -> None:
        self._arena = arena
        self._chunk = chunk
        self._offset = offset
        self.addr = chunk.address + offset
        self.nbytes = nbytes
        self.lkey = chunk.lkey
        self.rkey = chunk.rkey
        self.generation = generation
        self.key = key

    def __repr__(self) -> str:
        state = "" if self.is_live else ", released"
        return f"<Lease of {self.nbytes} bytes at {self.addr:#x}, key {self.key!r}{state}>"

    @property
    def is_live(self) -> bool:
        """Whether it was neither released nor taken away by closing the arena."""
        entry = self._chunk.live.get(self._offset)
        return entry is not None and entry[1] == self.generation

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The protocol of numpy; an array made by it keeps the lease alive."""
        self._require_readable()
        return {
            **self._chunk.pages.__array_interface__,
            "shape": (self.nbytes,),
            "data": (self.addr, False),
        }

    def _require_live(self) -> None:
        entry = self._chunk.live.get(self._offset)
        if entry is None or entry[1] != self.generation:
            raise self.stale_error()
        if self._arena.forked:
            raise fork_error(f"Lease {self.key!r}")

    def _require_readable(self) -> None:
        self._require_live()
        pages = self._chunk.pages
        if not pages.host_visible:
            raise LeaseError(
                f"Lease {self.key!r} is memory of kind {pages.kind!r}, which the processor cannot "
                f"reach at {self.addr:#x}: there is no array over it.",
                "Use its address with the device's own library.",
            )

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        """The memory, shape (nbytes,), writable. Made anew each time: keep it in loops.

        Raises
        ------
        LeaseError
            The lease is released, or the memory is a device's own.
        ForkError
            This process is a child of the one that leased it.
        """
        # Not left to numpy: some releases take an error in the protocol for its absence.
        self._require_readable()
        return np.asarray(self)

    def array(self, dtype: npt.DTypeLike, shape: int | Sequence[int]) -> npt.NDArray[Any]:
        """The beginning of the memory as an array.

        Parameters
        ----------
        dtype
            Of numpy.
        shape
            Of the array; it need not fill the lease.

        Raises
        ------
        LeaseError
            The lease is released or too small, or the memory is a device's own.
        ForkError
            This process is a child of the one that leased it.
        """
        kind = np.dtype(dtype)
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        wanted = kind.itemsize * math.prod(dims)
        if wanted > self.nbytes:
            raise LeaseError(
                f"Lease {self.key!r} has {self.nbytes} bytes; {kind} of shape {dims} needs "
                f"{wanted}.",
                "Lease as much as the array needs.",
            )
        return self.view[:wanted].view(kind).reshape(dims)

    def release(self) -> None:
        """Give it back.

        Raises
        ------
        LeaseError
            It was given back before, or the arena was closed.
        ForkError
            This process is a child of the one that leased it.
        """
        if not self._arena.give_back(self._chunk, self._offset, self.generation):
            raise self.stale_error()

    def stale_error(self) -> LeaseError:
        """The error for using it after its release."""
        return LeaseError(
            f"Lease {self.key!r} of {self.nbytes} bytes at {self.addr:#x} (generation "
            f"{self.generation}) is released, or its pool is closed.",
            "Take a new lease; release each one once.",
        )

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._arena.forked:
            # Who released it inside the block has done nothing wrong.
            self._arena.give_back(self._chunk, self._offset, self.generation)

    def __del__(self) -> None:
        # Not weakref.finalize: making one takes as long as all the rest of a lease.
        # Interrupted before its first lines ran, it has no attributes; the arena knows then.
        generation = getattr(self, "generation", None)
        if generation is None:
            return
        entry = self._chunk.live.get(self._offset)
        if entry is None or entry[1] != generation or self._arena.forked:
            return
        self._arena.leaked(self._chunk, self._offset, generation)
        warnings.warn(
            f"a lease of {self.nbytes} bytes (key {self.key!r}) was dropped without release()",
            ResourceWarning,
            source=self,
            stacklevel=2,
        )


class LeasedRange:
    """A part of a lease, with the keys that it was registered with.

    What `RegistrationPool.register` gives for memory that is leased: it goes back with the lease,
    so there is nothing to release here, but who uses it need not know.

    Attributes
    ----------
    address, nbytes
        The range.
    lkey, rkey
        Of its region.
    """

    __slots__ = ("_owner", "address", "lkey", "nbytes", "rkey")

    def __init__(self, address: int, nbytes: int, lkey: int, rkey: int, owner: object) -> None:
        self.address, self.nbytes = address, nbytes
        self.lkey, self.rkey = lkey, rkey
        self._owner: object | None = owner

    def release(self) -> None:
        """No work request uses it any more; the lease stays."""
        self._owner = None

    def __enter__(self) -> LeasedRange:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
