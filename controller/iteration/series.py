"""What a trace or an observer says of one job: collectives, and the sync windows they make up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One communication operation on one rank.

    Parameters
    ----------
    start_ns, end_ns
        On the trace's own clock; equal where a duration is not known.
    bytes
        Payload of the operation (size of the buffer); None: not told.
    op
        all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, send_recv, barrier, unknown.
    communicator
        What tells communicators of one job apart (process group, size); "": one, or not told.
    iteration
        Training iteration by the trace's own count; None: not told. For reports, never an input
        of prediction.
    """

    start_ns: int
    end_ns: int
    bytes: int | None = None
    op: str = "unknown"
    communicator: str = ""
    iteration: int | None = None


@dataclass(frozen=True)
class SyncWindow:
    """The burst of collectives that synchronises the gradients of one iteration.

    Parameters
    ----------
    start_ns, end_ns
        First begin and last end.
    bytes
        Sum of the payloads; None: not told.
    """

    start_ns: int
    end_ns: int
    bytes: int | None = None


@dataclass(frozen=True)
class Trace:
    """What was read from one file.

    Parameters
    ----------
    source
        Format: kineto, chakra, nccl-tests, straggler, minibatch, aicb, csv.
    collectives
        In order of begin; empty where the file has windows only.
    windows
        Sync windows as the file itself gives them (one row each); empty where they have to be
        found in `collectives`.
    notes
        What a reader should know: what was left out, what times are relative to.
    """

    source: str
    collectives: tuple[Collective, ...] = ()
    windows: tuple[SyncWindow, ...] = ()
    notes: tuple[str, ...] = ()
