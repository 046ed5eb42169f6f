"""Collectives of a training as AICB (aliyun/aicb) measures or plans them."""

from __future__ import annotations

from dataclasses import dataclass, field

from controller.iteration.series import Collective, SyncWindow, Trace
from controller.iteration.traces.chakra import NO_TIMES
from controller.iteration.traces.names import canonical_op
from controller.iteration.traces.source import TraceSource
from controller.iteration.traces.tables import MAX_TIME_NS, NS_PER_MS, Row, rows_of

COLUMNS = ("comm_type", "comm_group", "msg_size", "stage", "_elapsed_time")
_END = "epoch_end"
_COMPUTATION = "computation"
# The optimizer step, where data-parallel ranks exchange gradients and parameters.
_STEP = "step"
_DATA_PARALLEL = "dp_"


@dataclass
class _Measured:
    op: str
    bytes: int
    communicator: str
    stage: str
    duration_ns: int | None


@dataclass
class _Iteration:
    collectives: list[_Measured] = field(default_factory=list)
    length_ns: int | None = None


def read_aicb(source: TraceSource, skip_lines: int = 0) -> Trace:
    """Iterations of a workload file.

    Parameters
    ----------
    source
        CSV ``comm_type,comm_group,comm_group_size,msg_size,stage,...,_elapsed_time,...``;
        ``epoch_end`` rows close an iteration and hold its length in ms.
    skip_lines
        1 when a line such as ``[rank0 ~ rank127]`` stands before the names.

    Returns
    -------
    Trace
        Of a measured run: durations and lengths are measured, begins are not. The collectives of
        an iteration are laid back to back so that the last one ends with the iteration, as the
        optimizer step does; the window is the data-parallel part of that step. Of a plan without
        times: collectives only, `has_times` is false.

    Raises
    ------
    InputError
        A row that cannot be read, or no collective.
    """
    iterations = [_Iteration()]
    for row in rows_of(source, COLUMNS, skip_lines):
        kind = row["comm_type"].rpartition(".")[2]
        if kind == _END:
            iterations[-1].length_ns = _elapsed_ns(row)
            iterations.append(_Iteration())
        elif kind != _COMPUTATION:
            group = row["comm_group"].rpartition(".")[2]
            iterations[-1].collectives.append(
                _Measured(
                    canonical_op(kind), row.count("msg_size"), group, row["stage"], _elapsed_ns(row)
                )
            )
    # What follows the last end was not finished.
    finished = [one for one in iterations if one.collectives]
    if not finished:
        raise source.error("names the columns of an AICB workload, but has no collective.")
    timed = [one for one in finished if one.length_ns is not None]
    if not timed or any(c.duration_ns is None for one in timed for c in one.collectives):
        collectives = [
            Collective(0, 0, c.bytes, c.op, c.communicator, number)
            for number, one in enumerate(finished)
            for c in one.collectives
        ]
        return Trace("aicb", tuple(collectives), notes=(f"a planned workload: {NO_TIMES}",))
    return _measured(source, timed)


def _elapsed_ns(row: Row) -> int | None:
    return (
        None
        if row["_elapsed_time"] in ("None", "")
        else row.duration_ns("_elapsed_time", NS_PER_MS)
    )


def _measured(source: TraceSource, iterations: list[_Iteration]) -> Trace:
    collectives: list[Collective] = []
    windows: list[SyncWindow] = []
    end_ns = 0
    for number, one in enumerate(iterations):
        busy_ns = sum(c.duration_ns or 0 for c in one.collectives)
        # Some run at the same time; then the iteration begins with the first of the row.
        end_ns += max(one.length_ns or 0, busy_ns)
        if end_ns > MAX_TIME_NS:
            raise source.error("has iterations of more than 30 years in all.")
        now_ns = end_ns - busy_ns
        step: list[Collective] = []
        for c in one.collectives:
            placed = Collective(
                now_ns, now_ns + (c.duration_ns or 0), c.bytes, c.op, c.communicator, number
            )
            now_ns = placed.end_ns
            collectives.append(placed)
            if c.stage.startswith(_STEP) and c.communicator.startswith(_DATA_PARALLEL):
                step.append(placed)
        if step:
            payload = sum(c.bytes or 0 for c in step)
            windows.append(SyncWindow(step[0].start_ns, step[-1].end_ns, payload))
    notes = [
        f"{len(iterations)} iterations with set-up and warm-up; begins are not measured: "
        "collectives are laid back to back up to the end of their iteration",
    ]
    if windows:
        notes.append("a window is the data-parallel exchange of the optimizer step")
    return Trace("aicb", tuple(collectives), tuple(windows), tuple(notes))
