"""What a controller knows of one job's iterations: from events of its windows to a policy's view.

Fed by the dataplane (a window begins; what the one before came to), and by the job's ranks where
they report. Pure: every time comes from the caller, all of one clock.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from controller.iteration.predictor import Prediction, Predictor

# Windows kept for reports (p99 of iterations) and for what the job can reach.
_KEPT = 256
# Of the newest ones: nearly the best rate is what the job reaches alone (the very best may be a
# sender that stood still and then sent all at once), and the mean of the last few periods is how
# it fares now.
_RATE_WINDOWS = 32
_RATE_QUANTILE = 0.9
_RECENT_WINDOWS = 8
# A window of fewer bytes than this share of what is expected tells nothing about the rate.
_RATE_BYTES_SHARE = 0.5
# A silence shorter than this share of the usual one is a pause within the window: a rank that
# waits for a starved neighbour is silent, too.
_GAP_SHARE = 0.4
_WAITING_GAP_SHARE = 0.8
# Repeated packets are not counted, sizes waver by a header: so much of the bytes is all of them.
_COMPLETE_SHARE = 0.995
_ALMOST_SHARE = 0.9
# More than that is a window of another size, of which the end is not known.
_BEYOND_SHARE = 1.02
# Bytes within this share of what was expected are no news.
_SAME_SHARE = 0.01
# A report older than this says nothing about now: ranks report every 50 ms while they work.
_REPORT_HOLDS_NS = 1_500_000_000
_REPORT_EARLY_NS = 50_000_000


@dataclass(frozen=True)
class PastWindow:
    """A sync window that is over.

    Parameters
    ----------
    start_ns, end_ns
        Its first and last packet.
    bytes
        Payload on the wire of this host.
    period_ns
        From its begin to the begin of the next.
    """

    start_ns: int
    end_ns: int
    bytes: int
    period_ns: int

    @property
    def window_ns(self) -> int:
        """How long it was."""
        return self.end_ns - self.start_ns

    @property
    def silence_ns(self) -> int:
        """From its end to the begin of the next."""
        return self.period_ns - self.window_ns


@dataclass(frozen=True)
class Quantiles:
    """Of a series, in the unit of what it was made from."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles | None:
        """None: there are no values."""
        if not values:
            return None
        ordered = sorted(values)
        nearest = ordered[math.ceil(0.99 * len(ordered)) - 1]
        return cls(statistics.fmean(values), statistics.median(ordered), nearest)


class JobTracker:
    """Iterations of one job.

    Examples
    --------
    >>> tracker = JobTracker()
    >>> for n in range(6):
    ...     began = n * 100_000_000
    ...     tracker.began(began)
    ...     _ = tracker.learn(began - 70_000_000, 1 << 20) if n else tracker.learn()
    >>> tracker.prediction.is_periodic
    True
    """

    def __init__(self) -> None:
        self._predictor = Predictor()
        self._windows: deque[PastWindow] = deque(maxlen=_KEPT)
        self._previous_ns = 0
        self._end: tuple[int, int] | None = None
        self._is_over = self._is_closed = False
        self._reported_open: bool | None = None
        self._reported_bytes = 0
        self._reported_ns = 0
        # Of the newest windows, renewed with each: reading them must cost nothing.
        self._best_Bps = 0.0
        self._least_silence_ns: int | None = None
        self._recent: tuple[float, float, float] | None = None
        self.start_ns = 0
        # Of the open window, made before it began; and of the next, made when it had.
        self.current: Prediction = self._predictor.predict()
        self.prediction: Prediction = self.current

    # ---- events ----

    def began(self, start_ns: int) -> None:
        """A window begins. Costs nothing; `learn` does the rest when there is time."""
        self._previous_ns = self.start_ns
        self.current = self.prediction
        self.start_ns = start_ns
        self._is_over = self._is_closed = False

    def learn(self, end_ns: int | None = None, sent_bytes: int | None = None) -> bool:
        """Learn from the window before the one that began last.

        Parameters
        ----------
        end_ns, sent_bytes
            Its last packet, and payload on the wire; None: not seen, or told by `ended`.

        Returns
        -------
        bool
            Whether `current` has become another one by it.
        """
        changed = False
        if end_ns is not None and sent_bytes is not None and self._previous_ns:
            self._predictor.end(end_ns, sent_bytes)
            self._end = end_ns, sent_bytes
            expected = self.current.bytes or 0
            if abs(sent_bytes - expected) > _SAME_SHARE * expected:
                self.current = self._predictor.predict()
                changed = True
        if self._end is not None and self._previous_ns:
            self._keep(*self._end)
        self._predictor.begin(self.start_ns)
        self.prediction = self._predictor.predict()
        self._end = None
        return changed

    def ended(self, end_ns: int, sent_bytes: int) -> None:
        """The window that began last is over, and it is known before the next begins."""
        if not self.start_ns or self._is_over:
            return
        self._is_over = True
        self._end = max(end_ns, self.start_ns), sent_bytes
        self._predictor.end(*self._end)
        self.prediction = self._predictor.predict()

    def _keep(self, end_ns: int, sent_bytes: int) -> None:
        period_ns = self.start_ns - self._previous_ns
        if period_ns > 0:
            end_ns = min(max(end_ns, self._previous_ns), self.start_ns)
            self._windows.append(PastWindow(self._previous_ns, end_ns, sent_bytes, period_ns))
            self._sum_up()

    def reported(self, now_ns: int, is_open: bool, expected_bytes: int) -> bool:
        """Take what the job's ranks say of the iteration that they are in.

        Parameters
        ----------
        is_open
            Whether an operation of any rank runs.
        expected_bytes
            Payload on the wire, of all ranks here: sent before, and of the operations that run.

        Returns
        -------
        bool
            Whether a window has opened or closed by it.
        """
        changed = is_open != self._reported_open
        self._reported_open, self._reported_ns = is_open, now_ns
        self._reported_bytes = expected_bytes
        return changed

    def _sum_up(self) -> None:
        newest = list(itertools.islice(reversed(self._windows), _RATE_WINDOWS))
        least = _RATE_BYTES_SHARE * (self.current.bytes or 0)
        rates = sorted(
            w.bytes * 1e9 / w.window_ns for w in newest if w.window_ns > 0 and w.bytes >= least
        )
        self._best_Bps = rates[int(_RATE_QUANTILE * (len(rates) - 1))] if rates else 0.0
        recent = newest[:_RECENT_WINDOWS]
        if len(recent) > 1:
            self._least_silence_ns = min(window.silence_ns for window in recent)
            self._recent = (
                statistics.fmean(window.period_ns for window in recent),
                statistics.fmean(window.silence_ns for window in recent),
                statistics.fmean(window.bytes for window in recent),
            )

    # ---- what is known ----

    @property
    def past(self) -> tuple[PastWindow, ...]:
        """Windows that are over, oldest first."""
        return tuple(self._windows)

    @property
    def is_predicted(self) -> bool:
        """Whether there is a prediction to rank by."""
        return self.prediction.is_periodic

    def _has_report(self, now_ns: int) -> bool:
        if self._reported_open is None or now_ns - self._reported_ns >= _REPORT_HOLDS_NS:
            return False
        # A rank may tell that it begins a moment before its first packet leaves.
        early_ns = _REPORT_EARLY_NS if self._reported_open else 0
        return self._reported_ns + early_ns >= self.start_ns

    def expected_bytes(self, now_ns: int) -> int:
        """Of the open window, or of the next: what history says, or ranks where they know more."""
        predicted = max(0, round(self.current.bytes or 0))
        if self._has_report(now_ns) and self._reported_open:
            return max(predicted, self._reported_bytes)
        return predicted

    def is_open(self, now_ns: int, done_bytes: int, last_ns: int, gap_ns: int) -> bool:
        """Whether the job's sync window is open.

        Parameters
        ----------
        done_bytes, last_ns
            Sent in it so far, and the last packet: what the dataplane counts.
        gap_ns
            Silence that ends it.
        """
        if not self.start_ns or self._is_over:
            return False
        expected = self.expected_bytes(now_ns) if self.is_predicted else 0
        if self._is_closed and done_bytes <= _BEYOND_SHARE * expected:
            return False
        told_open = self._reported_open if self._has_report(now_ns) else None
        # Ranks that reduce one bucket after the other stop for a moment between two.
        almost = done_bytes >= _ALMOST_SHARE * expected
        if expected and (
            _COMPLETE_SHARE * expected <= done_bytes <= _BEYOND_SHARE * expected
            or (told_open is False and almost)
        ):
            # For good: a rank's report that was under way must not open it again.
            self._is_closed = True
            return False
        return last_ns + gap_ns >= now_ns if told_open is None else told_open

    def alone_Bps(self, limit_Bps: float) -> float:
        """Payload rate that the job reaches when nobody disturbs it: the best of late.

        Parameters
        ----------
        limit_Bps
            What its links carry; 0: not known.
        """
        best = self._best_Bps or limit_Bps
        return min(best, limit_Bps) if limit_Bps else best

    def gap_ns(self, default_ns: int, waits: bool = False) -> int:
        """Silence that should end a window: longer than its pauses, shorter than the compute phase.

        Parameters
        ----------
        default_ns
            By the link's rate, or as configured; never less than this.
        waits
            Whether others go first: it may then be silent for long without being over.
        """
        if self._least_silence_ns is None or not self.is_predicted:
            return default_ns
        share = _WAITING_GAP_SHARE if waits else _GAP_SHARE
        return max(default_ns, int(share * self._least_silence_ns))

    def slowdown(self, alone_Bps: float) -> float:
        """Mean of the last iterations over what they would take undisturbed; 1.0: not known."""
        if self._recent is None or not alone_Bps or not self.is_predicted:
            return 1.0
        period_ns, silence_ns, sent_bytes = self._recent
        ideal_ns = silence_ns + sent_bytes / alone_Bps * 1e9
        return period_ns / ideal_ns if ideal_ns else 1.0

    def iteration_ns(self) -> Quantiles | None:
        """Of whole iterations; pauses for evaluation or checkpoints are among them."""
        periods = [window.period_ns for window in self._windows]
        bursts = max(1, self.prediction.bursts_per_iteration)
        first = len(periods) % bursts
        return Quantiles.of(
            [sum(periods[i : i + bursts]) for i in range(first, len(periods), bursts)]
        )

    def window_ns(self) -> Quantiles | None:
        """Of the lengths of the windows."""
        return Quantiles.of([window.window_ns for window in self._windows])
