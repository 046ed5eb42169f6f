"""Sync windows in a stream of collectives: which synchronise gradients, which belong together."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from controller.iteration.bursts import BurstPattern
from controller.iteration.periodicity import irregularity
from controller.iteration.series import Collective, SyncWindow

# Gradients are summed by these; others only where a trace has neither.
_GRADIENT_OPS = ("all_reduce", "reduce_scatter")
_NEVER = ("barrier", "broadcast")
# Silences on both sides of a threshold differ by this factor at least; jitter does not reach it.
_LEAST_JUMP = 2.5
_CANDIDATES = 6
# One silence this many times the others ends an iteration for sure.
_CLEAR_END = 3.0
# Streams of less than this share of the largest one's bytes carry no gradients.
_LARGE_SHARE = 0.01
# Bursty: this share of the silence lies in the longest fifth of the silences, or in the longest
# half where operations are few. In generated jobs evenly spread operations have 0.24 and 0.54,
# buckets of gradients 0.72 and 0.84.
_IN_FIFTH, _IN_HALF, _MORE = 0.5, 0.68, 4
_PAUSE = 20.0
# A threshold is as good as another where its windows are as regular up to this factor, or vary
# no more than periods of jobs do.
_CLEARLY = 0.6
_REGULAR_ENOUGH = 0.12
# An operation alone is a window where silence around it is so much longer than it is.
_ALONE = 8.0


@dataclass(frozen=True)
class WindowPlan:
    """How to cut one job's collectives into windows.

    Parameters
    ----------
    op, communicator
        The stream that carries gradients.
    gap_ns
        A longer silence ends a window.
    bursts
        So many windows by that gap make up one iteration.
    """

    op: str
    communicator: str
    gap_ns: float
    bursts: int = 1


def _stream(collectives: Sequence[Collective]) -> tuple[str, str]:
    """(op, communicator) that carries the gradients: large and in bursts."""
    for allowed in (_GRADIENT_OPS, None):
        streams: dict[tuple[str, str], list[Collective]] = defaultdict(list)
        for one in collectives:
            if one.op not in _NEVER and (allowed is None or one.op in allowed):
                streams[one.op, one.communicator].append(one)
        if streams:
            return _largest_bursty(streams)
    return ("", "")


def _largest_bursty(streams: dict[tuple[str, str], list[Collective]]) -> tuple[str, str]:
    moved = {key: _moved_bytes(stream) for key, stream in streams.items()}
    largest = max(moved.values())
    large = [key for key in streams if moved[key] >= _LARGE_SHARE * largest]
    fewest = min(len(streams[key]) for key in large)
    bursty = [key for key in large if _is_bursty(streams[key], fewest)]
    if bursty:
        return max(bursty, key=lambda key: moved[key])
    # One operation per iteration is even, too; but there are fewer of them than of the others.
    return min(large, key=lambda key: (len(streams[key]), -moved[key]))


def _moved_bytes(stream: Sequence[Collective]) -> float:
    """Payload of a stream; number of operations where bytes are not told."""
    sizes = [one.bytes for one in stream if one.bytes is not None]
    return float(sum(sizes)) if sizes else float(len(stream))


def _is_bursty(stream: Sequence[Collective], fewest: int) -> bool:
    """Whether silence comes in few long pieces, as between the gradients of two iterations."""
    silences = sorted(_silences(stream), reverse=True)
    if len(silences) < 2:
        return True
    # Pauses of a run are rare and long; they make nothing bursty.
    bound = _PAUSE * max(statistics.median(silences), 1)
    clipped = [min(silence, bound) for silence in silences]
    total = sum(clipped) or 1
    few, half = -(-len(clipped) // 5), -(-len(clipped) // 2)
    if sum(clipped[:few]) > _IN_FIFTH * total:
        return True
    return len(stream) <= _MORE * fewest and sum(clipped[:half]) > _IN_HALF * total


def _silences(stream: Sequence[Collective]) -> list[int]:
    """From the latest end so far to each next begin, ns; 0 where they overlap."""
    result, end_ns = [], stream[0].end_ns
    for one in stream[1:]:
        result.append(max(0, one.start_ns - end_ns))
        end_ns = max(end_ns, one.end_ns)
    return result


def _cut(stream: Iterable[Collective], gap_ns: float) -> list[SyncWindow]:
    windows: list[SyncWindow] = []
    cutter = _Cutter(gap_ns)
    for one in stream:
        done = cutter.add(one)
        if done is not None:
            windows.append(done)
    last = cutter.flush()
    return [*windows, last] if last is not None else windows


class _Cutter:
    """Collects the collectives of one window until the gap is exceeded."""

    def __init__(self, gap_ns: float) -> None:
        self.gap_ns = gap_ns
        self._open: list[Collective] = []
        self._end_ns = 0

    def add(self, one: Collective) -> SyncWindow | None:
        done = None
        if self._open and one.start_ns - self._end_ns > self.gap_ns:
            done = self.flush()
        self._end_ns = max(self._end_ns, one.end_ns) if self._open else one.end_ns
        self._open.append(one)
        return done

    def flush(self) -> SyncWindow | None:
        if not self._open:
            return None
        window = _window(self._open)
        self._open = []
        return window


def _window(parts: Sequence[Collective]) -> SyncWindow:
    sizes = [part.bytes for part in parts if part.bytes is not None]
    return SyncWindow(
        parts[0].start_ns,
        max(part.end_ns for part in parts),
        sum(sizes) if sizes else None,
    )


def _join(windows: Sequence[SyncWindow]) -> SyncWindow:
    sizes = [window.bytes for window in windows if window.bytes is not None]
    return SyncWindow(
        windows[0].start_ns,
        max(window.end_ns for window in windows),
        sum(sizes) if sizes else None,
    )


def _unrest(windows: Sequence[SyncWindow]) -> float:
    """How irregular windows are, by their begins and their bytes; inf: too few to tell."""
    if len(windows) < 3:
        return math.inf
    starts = [window.start_ns for window in windows]
    periods = [later - earlier for earlier, later in itertools.pairwise(starts)]
    result = irregularity(periods, len(periods) // 5)
    sizes = [window.bytes for window in windows if window.bytes]
    if len(sizes) == len(windows):
        result += irregularity([float(size) for size in sizes], len(sizes) // 5)
    return result


def _gap_ns(stream: Sequence[Collective]) -> float:
    """The silence that ends a window: between two clusters of silences, where windows are regular.

    Where no threshold separates them, every operation is a window of its own.
    """
    silences = sorted(gap for gap in _silences(stream) if gap > 0)
    jumps = [
        (high / low, math.sqrt(low * high))
        for low, high in itertools.pairwise(silences)
        if high > _LEAST_JUMP * low
    ]
    thresholds = sorted(gap for _, gap in sorted(jumps)[-_CANDIDATES:])
    lengths = [one.end_ns - one.start_ns for one in stream]
    alone = bool(silences) and statistics.median(silences) >= _ALONE * statistics.median(lengths)
    if alone or not thresholds:
        thresholds = [0.0, *thresholds]
    unrest = {gap: _unrest(_cut(stream, gap)) for gap in thresholds}
    bound = max(min(unrest.values()) / _CLEARLY, _REGULAR_ENOUGH)
    # The lowest that serves: regular pauses for evaluation make regular windows, too, of several
    # iterations each.
    return next((gap for gap in thresholds if unrest[gap] <= bound), thresholds[0])


def _bursts(windows: Sequence[SyncWindow]) -> int:
    pattern = BurstPattern()
    for window, following in itertools.pairwise(windows):
        pattern.add(max(1, following.start_ns - window.start_ns), window.bytes)
    return pattern.bursts


def learn(collectives: Sequence[Collective]) -> WindowPlan | None:
    """How to cut these collectives into windows; None: none of them carries gradients.

    Parameters
    ----------
    collectives
        Of one rank, in order of begin.
    """
    op, communicator = _stream(collectives)
    if not op:
        return None
    stream = [one for one in collectives if (one.op, one.communicator) == (op, communicator)]
    gap_ns = _gap_ns(stream)
    # Where silences separate windows, several of them in turn are pauses, not parts of one.
    bursts = 1 if gap_ns else _bursts(_cut(stream, gap_ns))
    return WindowPlan(op, communicator, gap_ns, bursts)


def find_windows(
    collectives: Sequence[Collective], plan: WindowPlan | None = None
) -> tuple[SyncWindow, ...]:
    """Sync windows of one job, one per iteration.

    Parameters
    ----------
    collectives
        Of one rank, in order of begin; ops and communicators of all kinds.
    plan
        From `learn`; None: from these collectives.

    Returns
    -------
    tuple of SyncWindow
        In order; empty where no collective carries gradients. The last one ends with the trace.
    """
    plan = plan or learn(collectives)
    if plan is None:
        return ()
    detector = WindowDetector(plan)
    windows = [detector.add(one) for one in collectives]
    last = detector.flush()
    found = [window for window in (*windows, last) if window is not None]
    if plan.bursts == 1:
        return tuple(found)
    first = _first_of_iteration(found, plan.bursts)
    return tuple(
        _join(found[place : place + plan.bursts])
        for place in range(first, len(found) - plan.bursts + 1, plan.bursts)
    )


def _first_of_iteration(windows: Sequence[SyncWindow], bursts: int) -> int:
    """The window after the longest silence, where one is clearly the longest; else the first."""
    pauses = [later.start_ns - earlier.end_ns for earlier, later in itertools.pairwise(windows)]
    usual = [statistics.median(pauses[place::bursts] or [0]) for place in range(bursts)]
    order = sorted(range(bursts), key=lambda place: usual[place])
    if usual[order[-1]] < _CLEAR_END * usual[order[-2]]:
        return 0
    return (order[-1] + 1) % bursts


class WindowDetector:
    """Cuts collectives into windows as they come.

    Parameters
    ----------
    plan
        How to cut; windows are those of `find_windows` before bursts are joined.

    Examples
    --------
    >>> detector = WindowDetector(WindowPlan("all_reduce", "", gap_ns=50.0))
    >>> starts = (0, 20, 200, 220, 400)
    >>> done = [detector.add(Collective(ns, ns + 10, 1, "all_reduce")) for ns in starts]
    >>> [window.start_ns for window in done if window]
    [0, 200]
    """

    def __init__(self, plan: WindowPlan) -> None:
        self._stream = (plan.op, plan.communicator)
        self._cutter = _Cutter(plan.gap_ns)

    def add(self, collective: Collective) -> SyncWindow | None:
        """Take one more collective, in order of begin.

        Returns
        -------
        SyncWindow or None
            The window before, which is over since the gap is exceeded.
        """
        if (collective.op, collective.communicator) != self._stream:
            return None
        return self._cutter.add(collective)

    def flush(self) -> SyncWindow | None:
        """The window still open, at the end of a trace; None: there is none."""
        return self._cutter.flush()
