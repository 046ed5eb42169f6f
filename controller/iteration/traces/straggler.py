"""Step traces of all ranks of an LLM training (ByteDance-Seed/StragglerAnalysis)."""

from __future__ import annotations

import collections
import statistics
from dataclasses import dataclass, field

from controller.iteration.series import Collective, SyncWindow, Trace
from controller.iteration.traces.names import canonical_op
from controller.iteration.traces.source import TraceSource
from controller.iteration.traces.tables import MAX_TIME_NS, NS_PER_S, rows_of

COLUMNS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration")
_SYNC = "grads-reduce-scatter"
_MAX_INDEX = 10**9


@dataclass
class _Operation:
    """One collective of one pipeline stage: all its ranks."""

    # An early rank waits for the last one; the network has work from then on.
    last_begin_ns: int = 0
    end_ns: int = 0


@dataclass
class _Step:
    length_ns: int = 0
    sync_begin_ns: int | None = None
    sync_end_ns: int = 0
    operations: dict[tuple[str, int, int], _Operation] = field(
        default_factory=lambda: collections.defaultdict(_Operation)
    )


def read_straggler(source: TraceSource) -> Trace:
    """Sync windows and collectives of all ranks on one clock.

    Parameters
    ----------
    source
        CSV ``dp_rank,stage,rank,step,optype,start_ts,duration,...``; times in seconds from the
        begin of the step.

    Returns
    -------
    Trace
        One window per step: from the first rank's begin of the reduce-scatter of gradients to
        the last rank's end. A step lasts until the last rank has ended; steps follow one another
        without a gap, also where the file left some out. Collectives are those of a stage: from
        the begin of its last rank on. Sends between stages are counted in a note only.

    Raises
    ------
    InputError
        A row that cannot be read, or no reduce-scatter of gradients at all.
    """
    steps: dict[int, _Step] = collections.defaultdict(_Step)
    ranks: set[tuple[int, int]] = set()
    sends = 0
    for row in rows_of(source, COLUMNS):
        step = steps[row.count("step", _MAX_INDEX)]
        stage = row.count("stage", _MAX_INDEX)
        ranks.add((row.count("dp_rank", _MAX_INDEX), stage))
        begin_ns = row.duration_ns("start_ts", NS_PER_S)
        end_ns = begin_ns + row.duration_ns("duration", NS_PER_S)
        step.length_ns = max(step.length_ns, end_ns)
        kind = row["optype"]
        sends += kind.endswith("-send")
        if canonical_op(kind) == "unknown":
            continue
        number = row.optional_count("seq_id", _MAX_INDEX) or 0
        operation = step.operations[kind, stage, number]
        operation.last_begin_ns = max(operation.last_begin_ns, begin_ns)
        operation.end_ns = max(operation.end_ns, end_ns)
        if kind == _SYNC:
            first_ns = step.sync_begin_ns
            step.sync_begin_ns = begin_ns if first_ns is None else min(first_ns, begin_ns)
            step.sync_end_ns = max(step.sync_end_ns, end_ns)
    if all(step.sync_begin_ns is None for step in steps.values()):
        raise source.error(f"has {len(steps)} steps, but no row with optype {_SYNC}.")
    return _assemble(source, steps, len(ranks), sends)


def _assemble(source: TraceSource, steps: dict[int, _Step], ranks: int, sends: int) -> Trace:
    windows: list[SyncWindow] = []
    collectives: list[Collective] = []
    begin_ns = 0
    for number, step in sorted(steps.items()):
        if step.sync_begin_ns is not None:
            windows.append(SyncWindow(begin_ns + step.sync_begin_ns, begin_ns + step.sync_end_ns))
        collectives += [
            Collective(
                begin_ns + operation.last_begin_ns,
                begin_ns + operation.end_ns,
                None,
                canonical_op(kind),
                f"{kind.removesuffix('-' + canonical_op(kind).replace('_', '-'))} stage {stage}",
                number,
            )
            for (kind, stage, _), operation in step.operations.items()
        ]
        begin_ns += step.length_ns
        if begin_ns > MAX_TIME_NS:
            raise source.error("has steps of more than 30 years in all.")
    collectives.sort(key=lambda collective: collective.start_ns)
    numbers = sorted(steps)
    left_out = numbers[-1] - numbers[0] + 1 - len(numbers)
    lengths_s = [step.length_ns / NS_PER_S for step in steps.values()]
    spread_s = statistics.stdev(lengths_s) if len(lengths_s) > 1 else 0.0
    notes = [
        f"{ranks} ranks, {len(steps)} steps of {statistics.fmean(lengths_s):.6g} s "
        f"+- {spread_s:.3g} s",
        "a window lasts from the first rank's reduce-scatter of gradients to the last one's end",
    ]
    if left_out:
        notes.append(
            f"{left_out} steps between the first and the last are not in the file; those that "
            "are follow one another on this clock"
        )
    if sends:
        notes.append(f"{sends} sends between pipeline stages are left out")
    return Trace("straggler", tuple(collectives), tuple(windows), tuple(notes))
