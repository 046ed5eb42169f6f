"""Heat: when each key is expected next, by the gaps between its uses; the furthest goes first.

A loop, a sweep forward and backward, or several such jobs beside each other ask for each key at
gaps that repeat. The gap expected is the usual one of the key, or the one that came 1, 2, .. uses
ago, whichever has been right lately in its stream. A key whose gaps repeat in no way is worth what
its mean gap says. What was expected and did not come is worth less and less, so that a job that
ended or waits does not keep its memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from math import log2

from controller.memory.policies.shadow import Shadow

# Gaps remembered of a key. Four micro-batches and an optimizer step repeat every five uses.
_GAPS = 6
# A gap was foreseen when it is within an eighth.
_FORESEEN = 0.125
# The record of each way to foresee is kept on every fourth use, to save time, over 200 uses.
_RECORD_EVERY = 4
_RECORD_WEIGHT = 0.02
# How much better another way has to be before it is taken: below, ways that tie would alternate.
_BETTER = 0.05
# A key is erratic when its usual error is above this share of the gap expected. A gap drawn
# evenly (a loop in random order) has a third, a loop disturbed by others a few percent.
_ERRATIC = 0.25
# An erratic key stays until it is overdue by this many mean gaps: 98 % of exponential gaps are
# shorter.
_PATIENCE = 4.0
# A key that has just been registered has to be this much hotter than one that was there: among
# equals the pool's content stays, which saves registrations.
_NEWCOMER = 1.25
# Weight of one use in the mean gap and the usual error of a key.
_MEAN_WEIGHT = 0.2
_ERROR_WEIGHT = 0.25
# Weight of one event in what is known of a stream: its typical gap, how often a new key comes back.
_STREAM_WEIGHT = 0.02
# A share of the gap, and uses, that every expectation may be late by.
_SLACK_SHARE = 0.02
_SLACK_USES = 2
# Keys no longer held whose gaps are remembered: this many, and this many for each one held.
_GHOSTS = 4096
_GHOSTS_PER_KEY = 4
# Each stream has its own clock. Further ones share the last.
_MAX_STREAMS = 16
# ibv_reg_mr where nobody measured it: its fixed part, and 0.05 us per KiB for pinning pages.
_FIXED_us = 30.0
_BYTES_PER_us = 20_480.0
# No registration is faster than a function call; what a trace says below is a slip.
_LEAST_us = 0.01
# Prefetch only while the stream's way to foresee is right this often.
_CONFIDENT = 0.9
# A new key's next use while nothing at all has come back yet.
_NEVER = 1 << 40


class _Stream:
    """One clock, what is known of its keys in general, and the order in which they should go."""

    __slots__ = (
        "coming",
        "expiries",
        "groups",
        "last_total",
        "now",
        "record",
        "step",
        "typical_gap",
        "way",
    )

    def __init__(self, total: int) -> None:
        self.now = 0
        self.last_total = total
        # Requests of all streams for each of this one.
        self.step = 1.0
        self.typical_gap = 0.0
        # How often each way to foresee was right: the usual gap, then the one 1, 2, .. uses ago.
        self.record = [0.0] * (_GAPS + 1)
        self.way = 0
        self.expiries: list[tuple[float, int, Hashable]] = []
        # Next uses of regular keys, soonest first; only kept once somebody prefetches.
        self.coming: list[tuple[float, int, Hashable]] | None = None
        # (log2 of bytes per us of registration, erratic) -> keys, furthest next use first.
        self.groups: dict[tuple[int, bool], list[tuple[float, int, Hashable]]] = {}


class _Use:
    """What is known of one key. Times are on its stream's clock."""

    __slots__ = (
        "due",
        "error",
        "gaps",
        "group",
        "last",
        "log_gap",
        "overdue",
        "stamp",
        "stream",
        "usual",
    )

    def __init__(self, stream: _Stream) -> None:
        self.stream = stream
        self.last = 0
        self.gaps: list[int] = []
        self.usual = 0
        self.log_gap = 0.0
        self.error = 0.0
        # Time of the next use; of an erratic key the gap expected, however long ago the last was.
        self.due = 0.0
        self.overdue = False
        self.group = (0, False)
        # Entries in heaps that bear another stamp are void.
        self.stamp = 0


class NextUseShadow(Shadow):
    """Evicts the key whose next use is furthest, in requests x bytes per us of registration."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._total = 0
        self._streams: dict[Hashable, _Stream] = {}
        self._stream = _Stream(0)
        self._uses: dict[Hashable, _Use] = {}
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._stamp = 0
        self._register_us = 0.0
        # Share of new keys that were asked for again.
        self._comes_back = 0.5
        self._order: list[Hashable] = []
        self._order_total = -1

    @property
    def typical_gap(self) -> float:
        """Requests between two uses of a key, as usual in the stream that asked last."""
        return self._stream.typical_gap * self._stream.step

    def request(
        self, key: Hashable, weight: int, register_us: float = 0.0, stream: Hashable = None
    ) -> bool:
        """See `Shadow.request`."""
        current = self._streams.get(stream)
        if current is None:
            current = self._open_stream(stream)
        self._stream = current
        self._register_us = register_us
        self._total += 1
        current.now += 1
        share = max(_STREAM_WEIGHT, 1 / current.now)
        current.step += (self._total - current.last_total - current.step) * share
        current.last_total = self._total
        return super().request(key, weight)

    def forget(self, key: Hashable) -> None:
        """See `Shadow.forget`."""
        super().forget(key)
        self._uses.pop(key, None)
        self._ghosts.pop(key, None)

    def coldest(self) -> Iterator[Hashable]:
        """Keys held, furthest next use first; the order is up to an eighth of the keys old."""
        if not 0 <= self._total - self._order_total <= len(self.weights) >> 3:
            self._order = sorted(self.weights, key=self._rank, reverse=True)
            self._order_total = self._total
        yield from (key for key in self._order if key in self.weights)
        ranked = set(self._order)
        yield from [key for key in self.weights if key not in ranked]

    def coming(self, within: int) -> list[Hashable]:
        """Keys whose next use is expected within so many requests of their stream, soonest first.

        Empty while what is expected in the stream that asked last does not come.
        """
        stream = self._stream
        if stream.coming is None:
            stream.coming = [
                (use.due, use.stamp, key)
                for key, use in self._uses.items()
                if use.stream is stream and use.gaps and not use.group[1]
            ]
            heapify(stream.coming)
        if stream.record[stream.way] < _CONFIDENT:
            return []
        heap = stream.coming
        found: list[tuple[float, int, Hashable]] = []
        while heap and heap[0][0] <= stream.now + within:
            entry = heappop(heap)
            use = self._uses.get(entry[2])
            if use is not None and use.stamp == entry[1] and not use.overdue:
                found.append(entry)
        for entry in found:
            heappush(heap, entry)
        return [key for due, _stamp, key in found if due > stream.now]

    # ---- what Shadow asks for ----

    def _hit(self, key: Hashable) -> None:
        self._note(key, self.weights[key], held=True)

    def _miss(self, key: Hashable, weight: int) -> None:
        self._ghosts.pop(key, None)
        # What is being asked for takes no part in the choice of what goes.
        del self.weights[key]
        while self.used > self.capacity:
            self._evict()
        self.weights[key] = weight
        self._note(key, weight, held=False)

    def _leave(self, key: Hashable) -> None:
        """Nothing: entries of keys that are not held are void, and its gaps are still true."""

    # ---- expectation ----

    def _note(self, key: Hashable, weight: int, held: bool) -> None:
        """Take note of a use, and expect the next."""
        use = self._uses.get(key)
        if use is None:
            stream = self._stream
            use = self._uses[key] = _Use(stream)
            # It may be one of those that never come back: behind all that are known to.
            horizon = 2 * stream.typical_gap if stream.typical_gap else _NEVER
            use.due = stream.now + horizon / max(self._comes_back, 0.05)
            expiry = use.due + _SLACK_USES
            erratic = False
        else:
            # A key that several streams ask for keeps the clock of the first.
            stream = use.stream
            gap = max(1, stream.now - use.last)
            self._learn(stream, use, gap)
            expected = self._expected(stream, use)
            erratic = len(use.gaps) > 1 and use.error > _ERRATIC * expected
            if erratic:
                use.due = 2.0**use.log_gap * (1.0 if held else _NEWCOMER)
                expiry = stream.now + _PATIENCE * use.due
            else:
                use.due = stream.now + expected
                expiry = use.due + 2 * use.error + _SLACK_SHARE * expected + _SLACK_USES
        use.overdue = False
        use.last = stream.now
        register_us = (
            max(self._register_us, _LEAST_us)
            if self._register_us
            else (_FIXED_us + weight / _BYTES_PER_us)
        )
        use.group = (round(log2(weight / register_us)), erratic)
        self._enter(stream, use, key, expiry)
        if stream.coming is not None and use.gaps and not erratic:
            heappush(stream.coming, (use.due, use.stamp, key))
        if stream.expiries[0][0] < self._stream.now:
            self._expire(stream)

    def _learn(self, stream: _Stream, use: _Use, gap: int) -> None:
        """Compare what was foreseen with the gap that came, and remember it."""
        gaps = use.gaps
        if gaps:
            if not self._total % _RECORD_EVERY:
                self._judge(stream, use, gap)
            foreseen = self._expected(stream, use)
            # A gap that is far off says no more than one that is off by what was expected.
            error = min(abs(gap - foreseen), foreseen)
            use.error += (error - use.error) * _ERROR_WEIGHT
            use.log_gap += (log2(gap) - use.log_gap) * _MEAN_WEIGHT
            if len(gaps) == _GAPS:
                del gaps[0]
        else:
            self._comes_back += (1 - self._comes_back) * _STREAM_WEIGHT
            use.log_gap = log2(gap)
        if stream.typical_gap:
            stream.typical_gap += (gap - stream.typical_gap) * _STREAM_WEIGHT
        else:
            stream.typical_gap = gap
        gaps.append(gap)
        # The median: one long gap, while the job had to wait, changes nothing.
        use.usual = sorted(gaps)[len(gaps) >> 1]

    @staticmethod
    def _judge(stream: _Stream, use: _Use, gap: int) -> None:
        """Take the way to foresee that has been right most often."""
        gaps = use.gaps
        record = stream.record
        tolerance = gap * _FORESEEN + 1
        right = -tolerance <= use.usual - gap <= tolerance
        record[0] += (right - record[0]) * _RECORD_WEIGHT
        for way in range(1, len(gaps) + 1):
            right = -tolerance <= gaps[-way] - gap <= tolerance
            record[way] += (right - record[way]) * _RECORD_WEIGHT
        best = max(record)
        if record[stream.way] < best - _BETTER:
            stream.way = record.index(best)

    @staticmethod
    def _expected(stream: _Stream, use: _Use) -> int:
        way = stream.way
        return use.gaps[-way] if 0 < way <= len(use.gaps) else use.usual

    def _expire(self, stream: _Stream) -> None:
        """Keys that were expected and did not come: as far away as their last use is long ago.

        Each time the wait doubles: among such keys the least recently used goes first.
        """
        now = stream.now
        heap = stream.expiries
        while heap and heap[0][0] < now:
            _expiry, stamp, key = heappop(heap)
            use = self._uses.get(key)
            if use is None or use.stamp != stamp or key not in self.weights:
                continue
            use.overdue = True
            if not use.gaps:
                self._comes_back -= self._comes_back * _STREAM_WEIGHT
            age = now - use.last
            use.due = age if use.group[1] else now + age
            self._enter(stream, use, key, now + age)

    # ---- order ----

    def _enter(self, stream: _Stream, use: _Use, key: Hashable, expiry: float) -> None:
        self._stamp += 1
        use.stamp = self._stamp
        heap = stream.groups.setdefault(use.group, [])
        # Of keys that are equally far, the newest goes.
        heappush(heap, (-use.due, -use.stamp, key))
        heappush(stream.expiries, (expiry, use.stamp, key))
        if len(stream.expiries) > 4 * len(self._uses) + 64:
            self._compact(stream)

    def _compact(self, stream: _Stream) -> None:
        """Void entries go, before they outnumber the keys."""

        def valid(key: Hashable, stamp: int) -> bool:
            return key in self.weights and self._uses[key].stamp == stamp

        stream.expiries = [entry for entry in stream.expiries if valid(entry[2], entry[1])]
        heapify(stream.expiries)
        for group, heap in list(stream.groups.items()):
            kept = [entry for entry in heap if valid(entry[2], -entry[1])]
            heapify(kept)
            if kept:
                stream.groups[group] = kept
            else:
                del stream.groups[group]
        if stream.coming is not None:
            stream.coming = [
                entry
                for entry in stream.coming
                if entry[2] in self._uses and self._uses[entry[2]].stamp == entry[1]
            ]
            heapify(stream.coming)

    def _rank(self, key: Hashable) -> float:
        use = self._uses[key]
        return self._distance(use.stream, use.group, use.due)

    def _distance(self, stream: _Stream, group: tuple[int, bool], due: float) -> float:
        """Requests until the next use, x bytes per us of registration that it would cost."""
        size, erratic = group
        until = due if erratic else due - stream.now
        # A stream that is silent may be so again for as long.
        idle = self._total - stream.last_total
        return (idle + until * stream.step) * 2.0**size

    def _evict(self) -> None:
        furthest = None
        rank = 0.0
        for stream in self._streams.values():
            for group, heap in stream.groups.items():
                while heap:
                    due, stamp, key = heap[0]
                    if key in self.weights and self._uses[key].stamp == -stamp:
                        distance = self._distance(stream, group, -due)
                        if furthest is None or distance > rank:
                            furthest, rank = heap, distance
                        break
                    heappop(heap)
        assert furthest is not None  # every key held has a valid entry
        key = heappop(furthest)[2]
        self._drop(key)
        self._ghosts[key] = None
        while len(self._ghosts) > _GHOSTS + _GHOSTS_PER_KEY * len(self.weights):
            forgotten = self._ghosts.popitem(last=False)[0]
            if not self._uses.pop(forgotten).gaps:
                self._comes_back -= self._comes_back * _STREAM_WEIGHT

    def _open_stream(self, name: Hashable) -> _Stream:
        if len(self._streams) < _MAX_STREAMS:
            stream = _Stream(self._total)
        else:
            stream = next(reversed(self._streams.values()))
        self._streams[name] = stream
        return stream
