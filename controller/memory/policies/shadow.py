"""A simulated cache of keys and weights: what a policy would hold if it ruled alone.

Every policy here is one of these. The pool's real content follows a shadow (following.py); several
shadows beside each other are how `heat` finds out which policy suits the requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Iterator


class Shadow(ABC):
    """What one policy holds of a pool of `capacity` bytes.

    Attributes
    ----------
    capacity
        In bytes.
    weights
        Bytes of each key that is held.
    used
        Their sum; at most `capacity`.
    dropped
        Keys that left since somebody last cleared this list, oldest first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.weights: dict[Hashable, int] = {}
        self.used = 0
        self.dropped: list[Hashable] = []

    def request(
        self, key: Hashable, weight: int, register_us: float = 0.0, stream: Hashable = None
    ) -> bool:
        """Take note of a request.

        Parameters
        ----------
        key
            What is asked for.
        weight
            Its bytes. A key that grew is not held: it has to be registered again.
        register_us, stream
            See `EvictionPolicy.on_request`; most policies have no use for them.

        Returns
        -------
        bool
            True when it was held.
        """
        held = self.weights.get(key)
        if held is not None:
            if weight <= held:
                self._hit(key)
                return True
            self._leave(key)
            self._drop(key)
        if weight <= self.capacity:
            self.weights[key] = weight
            self.used += weight
            self._miss(key, weight)
        return False

    def forget(self, key: Hashable) -> None:
        """The key's memory is gone, or is another now: nothing is known of it."""
        if key in self.weights:
            self._leave(key)
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
        self.used -= self.weights.pop(key)
        self.dropped.append(key)

    @abstractmethod
    def _hit(self, key: Hashable) -> None:
        """A key that is held is asked for."""

    @abstractmethod
    def _miss(self, key: Hashable, weight: int) -> None:
        """Make room for a key that is already counted in `weights` and `used`."""

    @abstractmethod
    def _leave(self, key: Hashable) -> None:
        """Take a held key out of the order of eviction, without a trace."""

    @abstractmethod
    def coldest(self) -> Iterator[Hashable]:
        """Keys held, in the order in which they would go if no more were asked for."""


class LruShadow(Shadow):
    """Least recently used goes first."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[Hashable, None] = OrderedDict()

    def _hit(self, key: Hashable) -> None:
        self._order.move_to_end(key)

    def _miss(self, key: Hashable, weight: int) -> None:
        while self.used > self.capacity:
            self._drop(self._order.popitem(last=False)[0])
        self._order[key] = None

    def _leave(self, key: Hashable) -> None:
        del self._order[key]

    def coldest(self) -> Iterator[Hashable]:
        """Keys held, least recently used first."""
        return iter(self._order)
