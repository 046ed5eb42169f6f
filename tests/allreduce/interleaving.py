"""Runs the plans of all ranks in a random order of events, as badly as the network may."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from controller.allreduce.schedule import Plan, Receive, Send

Array = npt.NDArray[Any]
Reduce = Callable[[Array, Array], None]


class Stuck(Exception):
    """Nothing can happen any more, and not everything has happened."""


class Hazard(Exception):
    """Elements were overwritten that somebody was still to read or to reduce."""


@dataclass(eq=False)
class _Message:
    send: Send
    payload: Array | None = None
    landed: bool = False


class _Rank:
    def __init__(self, plan: Plan, buffer: Array) -> None:
        self.plan, self.buffer = plan, buffer
        self.begun = False
        self.posted = 0
        self.applied: set[int] = set()
        self.unread = dict.fromkeys(plan.sends)
        self.to_post: dict[int, deque[Send]] = {}
        for send in plan.sends:
            self.to_post.setdefault(send.peer, deque()).append(send)
        self.numbers = {(each.peer, each.index): n for n, each in enumerate(plan.receives)}

        @cache
        def closure(receive: int) -> frozenset[int]:
            needs = plan.receives[receive].needs
            return frozenset({receive}).union(*(closure(need) for need in needs))

        self.closure = closure

    @property
    def done(self) -> bool:
        return self.begun and not self.unread and len(self.applied) == len(self.plan.receives)

    def check_change(self, number: int) -> None:
        """Raise Hazard if elements are still to be read as they are before this receive."""
        receive = self.plan.receives[number]
        for send in self.unread:
            if not _overlap(send, receive):
                continue
            if not any(number in self.closure(need) for need in send.needs):
                raise Hazard(f"{send} has not been read before {receive}")
        if not self.applied.issuperset(receive.needs):
            raise Hazard(f"{receive} comes before what it needs")


def _overlap(one: Send | Receive, other: Send | Receive) -> bool:
    return one.start < other.stop and other.start < one.stop


class Network:
    """All ranks and the messages between them.

    A sender's buffer is read at any time from posting to delivery; a message that is not reduced
    lands at any time from then on; each pair delivers in order.

    Parameters
    ----------
    plans
        One for each rank.
    buffers
        Working buffer of each rank.
    reduce
        Changes its first argument.
    seed
        Of the order of events.
    slots
        Messages to reduce that a pair may have on the way.
    strict
        A rank posts in program order only, even where another peer's message could leave.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        buffers: Sequence[Array],
        reduce: Reduce,
        *,
        seed: int,
        slots: int = 2,
        strict: bool = False,
    ) -> None:
        self._random = random.Random(seed)
        self._ranks = [_Rank(*each) for each in zip(plans, buffers, strict=True)]
        self._reduce, self._slots, self._strict = reduce, slots, strict
        self._wire: dict[tuple[int, int], deque[_Message]] = {}
        self._arrived: dict[tuple[int, int], deque[_Message]] = {}
        for number, rank in enumerate(self._ranks):
            for peer in rank.to_post:
                self._wire[number, peer] = deque()
                self._arrived[number, peer] = deque()
        self.done_before_all_began = False

    def run(self) -> None:
        """Until all ranks are done.

        Raises
        ------
        Stuck
            They never will be.
        """
        stages = (self._post, self._read, self._land, self._deliver, self._apply)
        steps: list[Callable[[], bool]] = []
        steps += [partial(self._begin, rank) for rank in self._ranks]
        steps += [partial(stage, *pair) for pair in self._wire for stage in stages]
        # Some things are slow in a run, others fast; whatever happens does so in bursts.
        chance = self._random.random
        often = [self._random.choice((0.2, 0.6, 1.0)) for _ in steps]
        order = list(range(len(steps)))
        while not all(rank.done for rank in self._ranks):
            if chance() < 0.3:
                self._random.shuffle(order)
            happened = False
            for number in order:
                if chance() < often[number] and steps[number]():
                    happened = True
                    more = chance()
                    while chance() < more and steps[number]():
                        pass
            if not happened and not any(step() for step in steps):
                raise Stuck([rank.plan for rank in self._ranks if not rank.done])
            if any(rank.done for rank in self._ranks):
                self.done_before_all_began |= not all(rank.begun for rank in self._ranks)

    def _begin(self, rank: _Rank) -> bool:
        if rank.begun:
            return False
        rank.begun = True
        return True

    def _post(self, source: int, target: int) -> bool:
        rank, queue = self._ranks[source], self._ranks[source].to_post[target]
        if not rank.begun or not queue or not rank.applied.issuperset(queue[0].needs):
            return False
        send = queue[0]
        if self._strict and send is not rank.plan.sends[rank.posted]:
            return False
        if send.direct:
            if not self._ranks[target].begun:
                return False
        else:
            pair = (source, target)
            on_the_way = (*self._wire[pair], *self._arrived[pair])
            if sum(not each.send.direct for each in on_the_way) >= self._slots:
                return False
        queue.popleft()
        rank.posted += 1
        self._wire[source, target].append(_Message(send))
        return True

    def _read(self, source: int, target: int) -> bool:
        for message in self._wire[source, target]:
            if message.payload is None:
                rank, send = self._ranks[source], message.send
                message.payload = rank.buffer[send.start : send.stop].copy()
                del rank.unread[send]
                return True
        return False

    def _land(self, source: int, target: int) -> bool:
        for message in self._wire[source, target]:
            if message.payload is None:
                return False
            if not message.landed:
                message.landed = True
                send, rank = message.send, self._ranks[target]
                if send.direct:
                    rank.check_change(rank.numbers[source, send.index])
                    rank.buffer[send.start : send.stop] = message.payload
                return True
        return False

    def _deliver(self, source: int, target: int) -> bool:
        wire = self._wire[source, target]
        if not wire or not wire[0].landed:
            return False
        self._arrived[source, target].append(wire.popleft())
        return True

    def _apply(self, source: int, target: int) -> bool:
        arrived, rank = self._arrived[source, target], self._ranks[target]
        for message in arrived:
            send = message.send
            number = rank.numbers[source, send.index]
            receive = rank.plan.receives[number]
            if not rank.begun or not rank.applied.issuperset(receive.needs):
                continue
            if receive.reduce:
                rank.check_change(number)
                self._reduce(rank.buffer[receive.start : receive.stop], _payload(message))
            rank.applied.add(number)
            arrived.remove(message)
            return True
        return False


def _payload(message: _Message) -> Array:
    assert message.payload is not None
    return message.payload


def add(accumulator: Array, incoming: Array) -> None:
    np.add(accumulator, incoming, out=accumulator)
