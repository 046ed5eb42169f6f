"""What goes wrong between ranks. Each error names the rank it is about."""

from __future__ import annotations

from collections.abc import Sequence

from controller.errors import StellarError


class CollectiveError(StellarError):
    """A communicator that can no longer be used; make a new one.

    Parameters
    ----------
    message, remedy
        As of every StellarError.
    rank
        The rank at fault, or -1.
    status
        Of the work completion that ended the operation (WR_FLUSH_ERR, RETRY_EXC_ERR, ...), or
        empty when none was outstanding.
    """

    def __init__(self, message: str, remedy: str = "", *, rank: int = -1, status: str = "") -> None:
        super().__init__(message, remedy)
        self.rank = rank
        self.status = status
        self.is_known_to_all = False  # the others have heard of it by the control channel


class PeerError(CollectiveError):
    """A peer died, left, or cannot be reached."""


class MismatchError(CollectiveError):
    """Ranks called different collectives, or the same with different arguments."""


class StallError(CollectiveError):
    """Nothing has moved for longer than the communicator's timeout.

    Parameters
    ----------
    message, remedy, rank, status
        As of CollectiveError.
    waiting_for
        Ranks from which something is missing.
    """

    def __init__(
        self,
        message: str,
        remedy: str = "",
        *,
        rank: int = -1,
        status: str = "",
        waiting_for: Sequence[int] = (),
    ) -> None:
        super().__init__(message, remedy, rank=rank, status=status)
        self.waiting_for = tuple(waiting_for)


class ProtocolError(CollectiveError):
    """A peer sent what no rank of this version sends."""


class ClosedError(CollectiveError):
    """The communicator was closed."""
