"""When the next sync window of a job begins, how long it is and how many bytes it moves."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from controller.iteration.bursts import BurstPattern
from controller.iteration.forecast import Forecaster
from controller.iteration.periodicity import JUDGED, Verdict, comparable, judge, lengths_agree

# Weight of "end of the window plus compute time" against "begin plus period" before either has
# been tried: the compute phase begins when the gradients are there, so the end says more. Both
# learn (Hedge on errors in units of the usual one), and losses fade.
_FROM_END = 0.93
_RATE, _FADE, _LOSS_CAP = 1.0, 0.95, 4.0
_RECENT = 5
_ERRORS = 20
_ERROR_SHARE = 0.95
# Before errors are known the next start is expected within this share of the period.
_FIRST_SPREAD = 0.1
_CHANGED_WITHIN = 5
_REBUILT = 3
# Bytes within this share are the same payload: control packets and repeats are counted in.
_SAME_BYTES = 0.005
# Bytes as evidence for a period where few are known; against it where they vary by this share.
_FEW = 6
_SIZES_VARY = 0.25
# Compute phases are judged where bytes have repeated in so many windows, and while few are known
# with wider bounds: that bytes repeat is evidence, too.
_REPEATED = 3
_BY_COMPUTE = 1.5
# A verdict is held on to once it rests on so many windows; fewer may be alike by chance.
_SETTLED = 8


@dataclass(frozen=True)
class Prediction:
    """Of the next sync window, from all that was told so far.

    Parameters
    ----------
    is_periodic
        Whether there is anything to predict; all numbers are best guesses where not.
    why
        What speaks for or against, in words.
    confidence
        0 .. 1.
    period_ns
        Of a whole iteration, all its bursts; 0: not known yet.
    window_ns, bytes
        Length and payload of the next window; 0 and None: not known.
    next_start_ns
        On the caller's clock; 0: not known yet.
    spread_ns
        The start comes within so much of ``next_start_ns`` in 95 % of cases.
    compute_ns
        From the end of a window to the begin of the next; 0: not known.
    iterations
        Seen so far, begun ones included.
    bursts_per_iteration
        k windows make up one iteration (gradient accumulation).
    position
        Which of them comes next: 0 follows the longest silence.
    anomalies
        Pauses seen (evaluation, checkpoint): long silences after which the old period went on.
    changed
        Another period began within the last 5 iterations.
    """

    is_periodic: bool
    why: str
    confidence: float
    period_ns: int
    window_ns: int
    bytes: int | None
    next_start_ns: int
    spread_ns: int
    compute_ns: int
    iterations: int
    bursts_per_iteration: int
    position: int
    anomalies: int
    changed: bool


@dataclass
class _Window:
    start_ns: int
    end_ns: int | None = None
    bytes: int | None = None


class _Position:
    """What is known of one burst of the iteration: the time from it to the next, and its size."""

    def __init__(self) -> None:
        self.period = Forecaster()
        self.compute = Forecaster()
        self.windows: deque[int] = deque(maxlen=_RECENT)
        self.sizes: deque[int] = deque(maxlen=_RECENT)
        self._losses = [0.0, 0.0]
        self._scale = 0.0

    def add(self, window: _Window, next_start_ns: int) -> None:
        """A window, and when the one after it began."""
        period_ns = float(max(next_start_ns - window.start_ns, 1))
        end_ns = window.end_ns
        if end_ns is not None and end_ns > window.start_ns:
            length_ns = end_ns - window.start_ns
            if self.compute.count:
                self._judge(
                    abs(self.period.next - period_ns),
                    abs(length_ns + self.compute.next - period_ns),
                )
            self.compute.add(float(max(next_start_ns - end_ns, 1)))
        self.period.add(period_ns)

    def _judge(self, error_begin: float, error_end: float) -> None:
        both = (error_begin + error_end) / 2
        self._scale = self._scale + 0.2 * (both - self._scale) if self._scale else both
        if self._scale <= 0:
            return
        begin, end = (
            _FADE * old + min(_LOSS_CAP, error / self._scale)
            for old, error in zip(self._losses, (error_begin, error_end), strict=True)
        )
        least = min(begin, end)
        self._losses = [begin - least, end - least]

    def to_next_ns(self, length_ns: float | None) -> float:
        """From the window's begin to the next begin; `length_ns`: of the window, where known."""
        from_begin = self.period.next
        if length_ns is None or not self.compute.count:
            return from_begin
        begin, end = (
            prior * math.exp(-_RATE * loss)
            for prior, loss in zip((1 - _FROM_END, _FROM_END), self._losses, strict=True)
        )
        from_end = length_ns + self.compute.next
        return from_begin + (from_end - from_begin) * end / (begin + end)

    @property
    def window_ns(self) -> float:
        """Usual length."""
        return statistics.median(self.windows) if self.windows else 0.0

    @property
    def bytes(self) -> int | None:
        """Payload that comes next: the one that repeats, else the median."""
        sizes = self.sizes
        if not sizes:
            return None
        if len(sizes) > 1 and sizes[-1] == sizes[-2]:
            return sizes[-1]
        if len(sizes) > 2 and sizes[-2] == sizes[-3] and sizes[-1] > sizes[-2] // 2:
            # A payload that was fixed and is another now stays so (layers thawed, another model
            # part); what is much smaller is a loss or a check that will not come again.
            return sizes[-1]
        size, times = Counter(reversed(sizes)).most_common(1)[0]
        return size if times > 1 else round(statistics.median(sizes))


class Predictor:
    """Predicts the sync windows of one job from their begins and ends. Knows no clock.

    Examples
    --------
    Live: the dataplane tells when a window begins, and of the one before when its last packet
    went and what it moved. So `end` comes late, right before the next `begin`:

    >>> predictor = Predictor()
    >>> for n in range(5):
    ...     start_ns = n * 100_000_000
    ...     if n:
    ...         predictor.end(start_ns - 70_000_000, 4_000_000)
    ...     predictor.begin(start_ns)
    >>> prediction = predictor.predict()
    >>> prediction.is_periodic, prediction.next_start_ns, prediction.bytes
    (True, 500000000, 4000000)

    Where the end is known at once (our engine), call `end` then, and `predict` again.
    """

    def __init__(self) -> None:
        self._windows: deque[_Window] = deque(maxlen=2 * JUDGED)
        self._begun = 0
        self._pattern = BurstPattern()
        self._positions = [_Position()]
        self._errors: deque[float] = deque(maxlen=_ERRORS)
        self._was_periodic = False
        self._changes = self._pauses = 0
        self._changed_at = -_CHANGED_WITHIN * 2
        # Number of the first window of the newest level.
        self._level_from = 0

    @property
    def changes(self) -> int:
        """Changes of the period noticed so far."""
        return self._changes

    def begin(self, start_ns: int) -> None:
        """A window begins.

        Parameters
        ----------
        start_ns
            On the caller's clock. One that is not after the last begin is taken for the same
            window told again, and ignored.
        """
        windows = self._windows
        if windows and start_ns <= windows[-1].start_ns:
            return
        if windows:
            self._close(windows[-1], start_ns)
        windows.append(_Window(start_ns))
        self._begun += 1

    def end(self, end_ns: int, bytes: int | None) -> None:
        """The window that began last is over.

        Parameters
        ----------
        end_ns
            Time of its last packet.
        bytes
            Payload it moved; None: not told.
        """
        if not self._windows or self._windows[-1].end_ns is not None:
            return
        window = self._windows[-1]
        window.end_ns = max(end_ns, window.start_ns)
        window.bytes = bytes
        position = self._positions[(self._begun - 1 - self._first) % len(self._positions)]
        position.windows.append(window.end_ns - window.start_ns)
        if bytes is not None:
            position.sizes.append(bytes)

    @property
    def _first(self) -> int:
        return self._pattern.first

    def _close(self, window: _Window, next_start_ns: int) -> None:
        """The iteration from `window` to the next begin is complete: learn from it."""
        position = self._positions[(self._begun - 1 - self._first) % len(self._positions)]
        length_ns = None if window.end_ns is None else window.end_ns - window.start_ns
        if position.period.count:
            expected_ns = window.start_ns + position.to_next_ns(length_ns or None)
            self._errors.append(abs(next_start_ns - expected_ns))
        position.add(window, next_start_ns)
        if self._pattern.add(next_start_ns - window.start_ns, window.bytes):
            self._rebuild(next_start_ns)
        changes = max(position.period.changes for position in self._positions)
        if changes > self._changes:
            self._changes, self._changed_at = changes, self._iterations
            # The first of the two periods that showed it has begun then; the next window follows.
            self._level_from = self._begun - 2 * len(self._positions)
        self._pauses = sum(position.period.pauses for position in self._positions)

    def _rebuild(self, next_start_ns: int) -> None:
        """The number of bursts per iteration changed: learn the newest windows anew by position."""
        bursts = self._pattern.bursts
        self._positions = [_Position() for _ in range(bursts)]
        self._changes = self._pauses = 0
        kept = list(self._windows)[-_REBUILT * bursts :]
        for number, window in enumerate(kept, self._begun - len(kept)):
            position = self._positions[(number - self._first) % bursts]
            following = number - self._begun + len(kept) + 1
            after_ns = kept[following].start_ns if following < len(kept) else next_start_ns
            position.add(window, after_ns)
            if window.end_ns is not None:
                position.windows.append(window.end_ns - window.start_ns)
                if window.bytes is not None:
                    position.sizes.append(window.bytes)

    @property
    def _iterations(self) -> int:
        return -(-self._begun // len(self._positions))

    def _evidence(self, bursts: int) -> bool:
        """Bytes repeat exactly from iteration to iteration, and so do lengths about."""
        told = [window for window in self._windows if window.end_ns is not None][-JUDGED:]
        sizes = [window.bytes for window in told]
        return (
            len(told) > 2 * bursts - 1
            and self._repeats(sizes, bursts)
            and all(
                lengths_agree(
                    [
                        window.end_ns - window.start_ns
                        for window in told[place::bursts]
                        if window.end_ns
                    ]
                )
                for place in range(bursts)
            )
        )

    def _by_compute(self, bursts: int) -> Verdict | None:
        """The verdict by compute phases alone, of a job whose windows others stretch; None: none.

        Jobs that contend for a link have windows, and so periods, of any length, but each computes
        as long as ever, and moves the same bytes.
        """
        if bursts > 1:
            return None
        silences: list[float] = []
        newest: int | None = None
        # From the newest backwards, as long as bytes repeat: what was seen before the job's flows
        # were all known, or while two windows ran into one, says nothing.
        for window, later in itertools.pairwise(reversed([*self._windows])):
            end_ns, size = later.end_ns, later.bytes
            if end_ns is None or size is None or end_ns <= later.start_ns:
                break
            newest = size if newest is None else newest
            if abs(size - newest) > _SAME_BYTES * newest:
                break
            silences.append(float(window.start_ns - end_ns))
        if len(silences) < _REPEATED:
            return None
        silences.reverse()
        few = len(silences) < _SETTLED
        verdict = judge(silences[-JUDGED:], widened=_BY_COMPUTE if few else 1.0)
        if not verdict.is_periodic:
            return None
        return replace(verdict, why=f"compute phases: {verdict.why}")

    @staticmethod
    def _repeats(sizes: Sequence[int | None], bursts: int) -> bool:
        """Whether bytes are those of `bursts` windows before, each time."""
        known = [size for size in sizes if size is not None]
        return len(known) == len(sizes) and all(
            abs(new - old) <= _SAME_BYTES * old
            for new, old in zip(known[bursts:], known, strict=False)
        )

    def _sizes_vary(self, bursts: int) -> bool:
        """Bytes differ much from iteration to iteration: what is cut at random does, no job."""
        sizes = [window.bytes for window in self._windows if window.bytes][-JUDGED:]
        if len(sizes) < _FEW + bursts or min(sizes) == max(sizes):
            return False
        pairs = zip(sizes, sizes[bursts:], strict=False)
        varied = [abs(new - old) / max(new, old) for old, new in pairs]
        return math.fsum(varied) > _SIZES_VARY * len(varied)

    def predict(self) -> Prediction:
        """Of the next window."""
        bursts = len(self._positions)
        starts = [window.start_ns for window in self._windows]
        if self._was_periodic:
            # A job that took another period is regular in that. What was never regular is judged
            # as a whole: in random series a few neighbours agree now and then.
            starts = starts[-max(3, self._begun - self._level_from) :]
        periods, independent = comparable(starts, bursts)
        verdict = judge(
            periods,
            independent < _FEW and self._evidence(bursts),
            self._was_periodic and self._begun > _SETTLED,
            self._sizes_vary(bursts),
            independent,
        )
        self._was_periodic = verdict.is_periodic
        if not verdict.is_periodic:
            verdict = self._by_compute(bursts) or verdict
        following = (self._begun - self._first) % bursts
        expected = self._positions[following]
        period_ns = math.fsum(
            0.0 if math.isnan(position.period.next) else position.period.next
            for position in self._positions
        )
        start_ns = compute_ns = 0.0
        if self._windows:
            window = self._windows[-1]
            current = self._positions[(following - 1) % bursts]
            if current.period.count:
                known = window.end_ns is not None and window.end_ns > window.start_ns
                length = window.end_ns - window.start_ns if known and window.end_ns else None
                start_ns = window.start_ns + current.to_next_ns(length)
            if current.compute.count:
                compute_ns = current.compute.next
        errors = sorted(self._errors)
        if len(errors) > 2:
            spread_ns = errors[min(len(errors) - 1, math.ceil(_ERROR_SHARE * len(errors)) - 1)]
        else:
            spread_ns = _FIRST_SPREAD * period_ns
        return Prediction(
            is_periodic=verdict.is_periodic,
            why=verdict.why,
            confidence=verdict.confidence,
            period_ns=round(period_ns),
            window_ns=round(expected.window_ns),
            bytes=expected.bytes,
            next_start_ns=round(start_ns),
            spread_ns=round(spread_ns),
            compute_ns=round(compute_ns),
            iterations=self._iterations,
            bursts_per_iteration=bursts,
            position=following,
            anomalies=self._pauses,
            changed=self._iterations - self._changed_at < _CHANGED_WITHIN,
        )
