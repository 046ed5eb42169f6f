"""Which of several simulated caches the pool follows: the one that would have served best lately.

Changing costs: the pool lacks what the new leader holds, and each such key is a miss. So a
challenger has to be ahead by what the change costs. Where leads alternate (forward and backward
pass, two jobs taking turns), each change makes the next one dearer for a while.

References
----------
A. Borodin, N. Linial, M. Saks: An Optimal On-Line Algorithm for Metrical Task Systems. JACM 39(4),
1992: move when the regret reaches the distance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# A lead of fewer hits is chance.
_MIN_LEAD = 8.0
# Each change doubles what the next has to gain, forgotten over two windows.
_CAUTION = 2.0
_CAUTION_WINDOWS = 2.0
# What the lead of the favourite has to be, of what others need.
_FAVOUR = 0.5
# A change has to come back within two windows at the lead of the last one.
_PAYS_OFF = 0.5
# Hits are remembered over a window: that many pools of requests, or 4 times the usual gap between
# two uses of a key where that is longer. Shorter ones see half an iteration.
_MIN_POOLS = 12
_MAX_POOLS = 24
_GAPS_PER_WINDOW = 4
# How often `adapt` is to be called, in requests.
ADAPT_EVERY = 256


class Election:
    """Counts the hits of candidates 0, 1, .. and says who leads. The first leads at the start.

    Parameters
    ----------
    candidates
        How many there are.
    favourite
        The candidate that half the lead is enough for: what it has learned makes it better still.
    """

    def __init__(self, candidates: int, favourite: int | None = None) -> None:
        self._favourite = favourite
        self.leader = 0
        self.changes = 0
        self._hits = [0.0] * candidates
        # Hits ahead of the leader since they were last level.
        self._lead = [0.0] * candidates
        self._needed = [_MIN_LEAD] * candidates
        # A hit counts more the later it is: the same as older ones counting less.
        self._gain = 1.0
        self._growth = 1.001
        self._caution = 1.0

    def vote(self, hits: Sequence[bool], missing: Callable[[int], int]) -> bool:
        """Count one request.

        Parameters
        ----------
        hits
            For each candidate, whether it held the key.
        missing
            Gives the number of keys that a candidate holds and the pool does not.

        Returns
        -------
        bool
            True when the leader is another one now.
        """
        self._gain *= self._growth
        leads = hits[self.leader]
        look = False
        for number, hit in enumerate(hits):
            if hit:
                self._hits[number] += self._gain
                if not leads:
                    self._lead[number] += 1.0
                    look = look or self._lead[number] > self._needed[number]
            elif leads and self._lead[number]:
                self._lead[number] -= 1.0
                if not self._lead[number]:
                    self._needed[number] = _MIN_LEAD
        return look and self._elect(missing)

    def adapt(self, regions: int, typical_gap: float) -> None:
        """Set how long hits are remembered.

        Parameters
        ----------
        regions
            How many the pool holds.
        typical_gap
            Requests between two uses of a key.
        """
        pool = regions + 16
        window = min(max(_GAPS_PER_WINDOW * typical_gap, _MIN_POOLS * pool), _MAX_POOLS * pool)
        self._growth = 1 + 1 / window
        self._caution = max(
            1.0, self._caution * (1 - min(1.0, ADAPT_EVERY / (_CAUTION_WINDOWS * window)))
        )
        # Far from where floats end, also after the most requests between two calls.
        if self._gain > 1e100:
            self._hits = [hits / self._gain for hits in self._hits]
            self._gain = 1.0

    def _price(self, number: int) -> float:
        """Hits to be ahead by for each key that the pool lacks."""
        return self._caution * (_FAVOUR if number == self._favourite else 1.0)

    def _elect(self, missing: Callable[[int], int]) -> bool:
        order = sorted(range(len(self._hits)), key=self._hits.__getitem__, reverse=True)
        for number in order:
            # Ahead now and over the whole window: a lead at one end of an iteration is none.
            if self._hits[number] <= self._hits[self.leader]:
                return False
            if self._lead[number] <= self._needed[number]:
                continue
            needed = max(_MIN_LEAD, self._price(number) * missing(number))
            self._needed[number] = needed
            ahead = (self._hits[number] - self._hits[self.leader]) / self._gain
            if self._lead[number] > needed and ahead > _PAYS_OFF * needed:
                self.leader = number
                self.changes += 1
                self._caution *= _CAUTION
                self._lead = [0.0] * len(self._hits)
                self._needed = [_MIN_LEAD] * len(self._hits)
                return True
        return False
