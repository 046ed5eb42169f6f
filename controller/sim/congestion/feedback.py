"""What comes back to the senders, and when: notifications of marks, or measured delays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from controller.congestion.flows import DcqcnFlows, FloatArray, IntArray, NEVER_ns
from controller.congestion.timely_flows import TimelyFlows
from controller.errors import UsageError
from controller.sim.congestion import chance
from controller.sim.congestion.chance import Keys

DelaysOf = Callable[[], FloatArray]


class Feedback(Protocol):
    """Flows under a rate control, and the way of its signals back to them."""

    rates_Bps: FloatArray

    def advance(self, now_ns: int) -> None:
        """Let what is due by now happen: timers, and signals that arrive."""

    def sent(
        self, flows: IntArray, nbytes: FloatArray, unmarked: FloatArray, delays_ns: DelaysOf
    ) -> None:
        """Take what left its sender now.

        Parameters
        ----------
        flows
            Positions, each once, shape (n,).
        nbytes
            Bytes on the wire, shape (n,).
        unmarked
            Probability that none of the flow's packets is marked, shape (n,).
        delays_ns
            Gives the queueing delay on each flow's path, shape (n,).
        """

    def reset(self, flows: IntArray) -> None:
        """Make these flows new ones; signals under way to them are lost."""


class _Ring:
    """Signals under way, each a flow and a value, by the step in which they arrive."""

    def __init__(self, step_ns: int, longest_ns: int) -> None:
        self._step_ns = step_ns
        self._longest = max(1, round(longest_ns / step_ns))
        self._slots: list[list[tuple[IntArray, FloatArray]]] = [
            [] for _ in range(self._longest + 1)
        ]
        self._head = 0

    def advance(self) -> list[tuple[IntArray, FloatArray]]:
        """Go one step on; returns what arrives in it."""
        self._head = (self._head + 1) % len(self._slots)
        due, self._slots[self._head] = self._slots[self._head], []
        return due

    def send(self, delays_ns: IntArray | FloatArray, flows: IntArray, values: FloatArray) -> None:
        """Put signals on their way, shape (n,); delays count in whole steps, at least one."""
        steps = np.clip(np.rint(delays_ns / self._step_ns), 1, self._longest).astype(np.int64)
        first = int(steps[0])
        if (steps == first).all():
            self._slots[(self._head + first) % len(self._slots)].append((flows, values))
            return
        for step in np.unique(steps).tolist():
            now = steps == step
            slot = self._slots[(self._head + step) % len(self._slots)]
            slot.append((flows[now], values[now]))

    def drop(self, flows: IntArray) -> None:
        """Lose what is under way to these flows."""
        for slot in self._slots:
            for number, (whom, values) in enumerate(slot):
                kept = ~np.isin(whom, flows)
                slot[number] = (whom[kept], values[kept])


class CnpFeedback:
    """DCQCN: the receiver answers marked packets by CNPs, at most one an interval and flow.

    A mark that comes too soon after a CNP is told at the end of the interval, as the live receiver
    does (`echo_due` in `bpf/hand_over.h`), or is forgotten. Marks are set as packets leave the
    queue (so switches do; CoNEXT 2016, section 5.2), hence the signal's delay has no part that
    grows with the queue.

    Parameters
    ----------
    flows
        Reaction points.
    keys
        Of the flows' random numbers, shape (flows,), see `controller.sim.congestion.chance`.
    delay_ns
        From a mark to the reaction to it: of all flows, or of each, shape (flows,).
    step_ns
        Of the simulation.
    echo_holds
        False: a mark within the interval is forgotten, as hardware may do.

    Attributes
    ----------
    notifications
        CNPs sent to each flow, shape (flows,).
    """

    def __init__(
        self,
        flows: DcqcnFlows,
        keys: Keys,
        delay_ns: int | IntArray,
        step_ns: int,
        echo_holds: bool = True,
    ) -> None:
        delays_ns: IntArray = np.broadcast_to(np.asarray(delay_ns, dtype=np.int64), keys.shape)
        if delays_ns.min() < 0:
            raise UsageError(f"A feedback delay of {delays_ns.min()} ns; allowed: from 0.")
        self.flows = flows
        self.rates_Bps = flows.rates_Bps.reshape(-1)
        if keys.shape != self.rates_Bps.shape:
            raise UsageError(f"{keys.size} keys for {self.rates_Bps.size} flows.")
        self._keys, self._delays_ns = keys, delays_ns
        self._turn = 0
        self._ring = _Ring(step_ns, int(delays_ns.max()))
        self._last_ns: IntArray = np.full(keys.size, -NEVER_ns, dtype=np.int64)
        self._echo_holds = echo_holds
        self._is_pending: NDArray[np.bool_] = np.zeros(keys.size, dtype=bool)
        # Who got a CNP in each of the last steps, an interval long: only their interval ends now.
        steps = max(1, -(-flows.parameters.echo_interval_ns // step_ns))
        self._told: list[list[IntArray]] = [[] for _ in range(steps)]
        self.notifications: IntArray = np.zeros(keys.size, dtype=np.int64)

    def advance(self, now_ns: int) -> None:
        """See `Feedback.advance`."""
        self._turn += 1
        self.flows.advance(now_ns)
        for flows, _ in self._ring.advance():
            self.flows.notify(flows)
        slot = self._turn % len(self._told)
        ended, self._told[slot] = self._told[slot], []
        for flows in ended:
            # A flow that was reset since may be in a later interval by now.
            self._notify(flows[self._is_pending[flows] & self._is_free(flows)])

    def _is_free(self, flows: IntArray) -> NDArray[np.bool_]:
        """Whether each flow's last CNP is an interval ago."""
        since_ns = self.flows.now_ns - self._last_ns[flows]
        result: NDArray[np.bool_] = since_ns >= self.flows.parameters.echo_interval_ns
        return result

    def _notify(self, flows: IntArray) -> None:
        if not flows.size:
            return
        self._last_ns[flows] = self.flows.now_ns
        self._is_pending[flows] = False
        self.notifications[flows] += 1
        self._told[self._turn % len(self._told)].append(flows)
        self._ring.send(self._delays_ns[flows], flows, np.zeros(flows.size))

    def sent(
        self, flows: IntArray, nbytes: FloatArray, unmarked: FloatArray, delays_ns: DelaysOf
    ) -> None:
        """See `Feedback.sent`."""
        self.flows.sent(flows, nbytes)
        risky = (unmarked < 1).nonzero()[0]
        if not risky.size:
            return
        flows, unmarked = flows[risky], unmarked[risky]
        flows = flows[chance.uniform(self._keys[flows], self._turn) >= unmarked]
        is_free = self._is_free(flows)
        if self._echo_holds:
            self._is_pending[flows[~is_free]] = True
        self._notify(flows[is_free])

    def reset(self, flows: IntArray) -> None:
        """See `Feedback.reset`."""
        self.flows.reset(flows)
        self._ring.drop(flows)
        self._last_ns[flows] = -NEVER_ns
        self._is_pending[flows] = False
        self.notifications[flows] = 0


class RttFeedback:
    """TIMELY: a delay is measured for each segment, and comes back later by itself.

    Parameters
    ----------
    flows
        Rate controls.
    delay_ns
        Propagation there and back: of all flows, or of each, shape (flows,).
    step_ns
        Of the simulation.
    longest_ns
        A delay is not taken for longer than this: what is under way has its place in a ring.
    """

    def __init__(
        self,
        flows: TimelyFlows,
        delay_ns: int | IntArray,
        step_ns: int,
        longest_ns: int = 20_000_000,
    ) -> None:
        self.flows = flows
        self.rates_Bps = flows.rates_Bps.reshape(-1)
        self._delays_ns: IntArray = np.broadcast_to(
            np.asarray(delay_ns, dtype=np.int64), self.rates_Bps.shape
        )
        for bound_ns in (int(self._delays_ns.min()), int(self._delays_ns.max())):
            if not 0 <= bound_ns <= longest_ns:
                raise UsageError(f"A feedback delay of {bound_ns} ns; allowed: 0 .. {longest_ns}.")
        self._ring = _Ring(step_ns, longest_ns)

    def advance(self, now_ns: int) -> None:
        """See `Feedback.advance`."""
        self.flows.advance(now_ns)
        for flows, delays_ns in self._ring.advance():
            self.flows.measured(flows, delays_ns)

    def sent(
        self, flows: IntArray, nbytes: FloatArray, unmarked: FloatArray, delays_ns: DelaysOf
    ) -> None:
        """See `Feedback.sent`."""
        done = self.flows.sent(flows, nbytes)
        if not done.size:
            return
        met_ns = delays_ns()[np.isin(flows, done)]
        self._ring.send(met_ns + self._delays_ns[done], done, met_ns)

    def reset(self, flows: IntArray) -> None:
        """See `Feedback.reset`."""
        self.flows.reset(flows)
        self._ring.drop(flows)
