"""Errors of the engine, worded: what happened, during what, which rank, what to do."""

from __future__ import annotations

from controller.allreduce import stall
from controller.allreduce.errors import (
    CollectiveError,
    MismatchError,
    PeerError,
    ProtocolError,
    StallError,
)
from controller.allreduce.star import Departure

_MESSAGE_LIMIT, _STATUS_LIMIT = 1000, 64


_KINDS: dict[str, type[CollectiveError]] = {
    kind.__name__: kind for kind in (MismatchError, PeerError, ProtocolError, StallError)
}


def gone(departure: Departure, during: str, size: int) -> CollectiveError:
    """A rank left, died, or gave up with a reason.

    Parameters
    ----------
    departure
        From the control channel; its reason is another process's.
    during
        Name of the operation in flight, or empty.
    size
        Number of ranks.
    """
    rank, during = departure.rank, _during(during)
    if departure.kind == "left":
        return PeerError(
            f"Rank {rank} has closed its communicator{during}.",
            "All ranks must call the same collectives before they close.",
            rank=rank,
        )
    if departure.kind == "died":
        return PeerError(
            f"Rank {rank} is gone{during}: its control connection ended.",
            "Look at its log; then make a new communicator.",
            rank=rank,
        )
    reason = departure.reason
    about = reason.get("rank")
    is_rank = isinstance(about, int) and not isinstance(about, bool) and 0 <= about < size
    message = str(reason.get("message", "it gave no reason"))[:_MESSAGE_LIMIT]
    return _KINDS.get(str(reason.get("error")), PeerError)(
        f"Rank {rank} gave up{during}: {message}",
        rank=about if is_rank and isinstance(about, int) else rank,
        status=str(reason.get("status", ""))[:_STATUS_LIMIT],
    )


def port_down(device: str, port: int, rank: int, during: str, status: str = "") -> PeerError:
    """The own port went down."""
    return PeerError(
        f"Port {port} of {device} at rank {rank} went down{_during(during)}.",
        "Look at its network interface and cable.",
        rank=rank,
        status=status,
    )


def unreachable(peer: int, rank: int, during: str, status: str) -> PeerError:
    """A work request to a peer ended with an error."""
    return PeerError(
        f"Rank {peer} cannot be reached from rank {rank}{_during(during)}: a work request ended "
        f"with {status}.",
        "Look at that rank and at the network between them.",
        rank=peer,
        status=status,
    )


def broken_protocol(peer: int, what: str) -> ProtocolError:
    """A peer sent what no rank of this version sends."""
    return ProtocolError(
        f"Rank {peer} sent {what}.", "All ranks must run the same version of Stellar.", rank=peer
    )


def disagreement(rank: int, name: str, peer: int, sequence: int, difference: str) -> MismatchError:
    """A peer called something else."""
    return MismatchError(
        f"Rank {rank} called {name}, and rank {peer} something else as its operation {sequence}: "
        f"{difference}.",
        "All ranks must call the same collectives in the same order with the same arguments.",
        rank=peer,
    )


def stalled(still: str, rank: int, timeout_s: float, found: stall.Waits) -> StallError:
    """Nothing has moved for too long.

    Parameters
    ----------
    still
        What has not moved, and for how long.
    rank, timeout_s
        Own rank, and the limit.
    found
        Ranks at fault, from stall.culprits().
    """
    return StallError(
        f"{still} at rank {rank} (timeout {timeout_s:g} s). Waiting for {listed(found)}.",
        "Look at what hangs there, or allow more time.",
        rank=next(iter(found), -1),
        waiting_for=list(found),
    )


def listed(waits: stall.Waits) -> str:
    """What is waited for, for a message."""
    return "; ".join(f"rank {rank}: {text}" for rank, text in waits.items()) or "acknowledgements"


def _during(name: str) -> str:
    return f" during {name}" if name else ""
