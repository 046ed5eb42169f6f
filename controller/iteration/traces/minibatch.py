"""Mini-batch times of the workers of a job (Alibaba PAI, cluster-trace-gpu-v2020)."""

from __future__ import annotations

import collections

from controller.iteration.series import SyncWindow, Trace
from controller.iteration.traces.source import TraceSource
from controller.iteration.traces.tables import NS_PER_MS, rows_of

COLUMNS = ("worker", "time", "batch_time_norm")
_MAX_INDEX = 10**12


def read_minibatch(source: TraceSource) -> Trace:
    """Moments of synchronisation from mini-batch times.

    Parameters
    ----------
    source
        CSV ``worker,gpu,time,batch_time_norm``: rows with the same ``time`` are one mini-batch on
        several workers.

    Returns
    -------
    Trace
        Windows without length, one after each mini-batch and one before the first: the period
        between two is the mini-batch time of the slowest worker. Times of the file are
        normalised; one unit is taken for 1 ms.

    Raises
    ------
    InputError
        A row that cannot be read, no row, or a mini-batch that takes no time.
    """
    slowest_ns: dict[int, int] = collections.defaultdict(int)
    workers: collections.Counter[str] = collections.Counter()
    for row in rows_of(source, COLUMNS):
        batch = row.count("time", _MAX_INDEX)
        duration_ns = row.duration_ns("batch_time_norm", NS_PER_MS)
        slowest_ns[batch] = max(slowest_ns[batch], duration_ns)
        workers[row["worker"]] += 1
    if not slowest_ns:
        raise source.error("names the columns of mini-batch times, but has no row.")
    now_ns = 0
    windows = [SyncWindow(0, 0)]
    for batch, duration_ns in sorted(slowest_ns.items()):
        if not duration_ns:
            raise source.error(f"mini-batch at time {batch} takes no time on any worker.")
        now_ns += duration_ns
        windows.append(SyncWindow(now_ns, now_ns))
    notes = [
        f"{len(workers)} workers, {len(slowest_ns)} mini-batches; the slowest worker counts",
        "times in the file are normalised: 1 unit is shown as 1 ms",
    ]
    if len(set(workers.values())) > 1:
        fewest, most = min(workers.values()), max(workers.values())
        notes.append(f"not every worker has each mini-batch ({fewest} to {most} rows)")
    return Trace("minibatch", windows=tuple(windows), notes=tuple(notes))
