"""One peer: its queue pairs, the tokens to send to it, and the slots it sends into.

There is one queue pair for control messages and one for each class in use. Whatever has been
posted on a queue pair stays in its class; the next message may take another.

A token is the right to have one data message outstanding at the peer: it stands for a posted
receive and, where the peer must reduce, for a slot of memory. So a slow peer is never overrun, and
no receiver-not-ready NAK is ever needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pyverbs.wr import SGE, RecvWR, SendWR

from controller.allreduce.wire import CONTROL_NBYTES, MAX_IN_FLIGHT
from controller.errors import InputError
from controller.verbs.completions import CompletionQueue
from controller.verbs.device import Device
from controller.verbs.enums import verbs
from controller.verbs.queue_pair import Endpoint, QueuePair, Timing

CONTROL = -1  # in place of a class
# Work requests beyond the tokens whose completions have not been polled yet.
_SLACK = 8

# Kinds of work request, in the upper bits of its wr_id; what the lower ones mean stands beside.
RECEIVE, DATA, CONTROL_SENT = 0, 1, 2  # a receive's place; operation and message; a place
_KIND_SHIFT = 56


def wr_id(kind: int, rest: int) -> int:
    """Identifier of a work request."""
    return kind << _KIND_SHIFT | rest


def split_wr_id(value: int) -> tuple[int, int]:
    """Kind and the rest."""
    return value >> _KIND_SHIFT, value & ((1 << _KIND_SHIFT) - 1)


@dataclass(frozen=True)
class Range:
    """Registered memory.

    Parameters
    ----------
    address, nbytes
        Where, and how much.
    lkey, rkey
        Its keys.
    """

    address: int
    nbytes: int
    lkey: int
    rkey: int

    def part(self, offset: int, nbytes: int) -> Range:
        """A part of it."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} of {self.nbytes}")
        return Range(self.address + offset, nbytes, self.lkey, self.rkey)


def memory_needed(tokens: int, chunk_nbytes: int, classes: int) -> int:
    """Bytes of registered memory that a link takes: slots, and places of control messages."""
    depth = _receive_depth(tokens)
    return tokens * chunk_nbytes + CONTROL_NBYTES * (depth * (classes + 1) + _sent_places(tokens))


def completions_needed(tokens: int, classes: int) -> int:
    """Completions that a link may have outstanding at once: what fail() flushes."""
    depth = _receive_depth(tokens)
    return depth * (classes + 1) + 2 * tokens * classes + _sent_places(tokens)


def _receive_depth(tokens: int) -> int:
    # On a data queue pair: one per token. On the control one: as many credits, which answer one
    # data message or more, and the descriptions of all operations in flight. One depth for both.
    return tokens + MAX_IN_FLIGHT + _SLACK


def _sent_places(tokens: int) -> int:
    return _receive_depth(tokens)


class Link:
    """A connected peer.

    Parameters
    ----------
    device, completions
        What the queue pairs use.
    peer
        Its rank.
    classes
        Class -> traffic class byte.
    tokens, chunk_nbytes
        Slots, and bytes of each.
    control_traffic_class
        Traffic class byte of control messages.
    memory
        At least memory_needed() bytes.
    view
        The same memory as bytes.
    """

    def __init__(
        self,
        device: Device,
        completions: CompletionQueue,
        peer: int,
        classes: Mapping[int, int],
        control_traffic_class: int,
        tokens: int,
        chunk_nbytes: int,
        memory: Range,
        view: npt.NDArray[np.uint8],
    ) -> None:
        self.peer = peer
        self._view = view
        self.tokens = tokens
        self.chunk_nbytes = chunk_nbytes
        self.slots = memory.part(0, tokens * chunk_nbytes)
        self._places = memory.part(self.slots.nbytes, memory.nbytes - self.slots.nbytes)
        self._traffic_classes = {CONTROL: control_traffic_class, **classes}
        depth = _receive_depth(tokens)
        self.depth = depth
        self.queue_pairs: dict[int, QueuePair] = {}
        try:
            for traffic_class in self._traffic_classes:
                self.queue_pairs[traffic_class] = QueuePair(
                    device, completions, 2 * tokens + MAX_IN_FLIGHT + _SLACK, depth
                )
        except BaseException:
            self.close()
            raise
        self._numbers = list(self.queue_pairs)
        self._sent_base = depth * len(self._numbers)
        # Made once: making a pyverbs object takes longer than posting it.
        self._receives = [
            RecvWR(
                wr_id=wr_id(RECEIVE, index),
                num_sge=1,
                sg=[SGE(self._place(index), CONTROL_NBYTES, self._places.lkey)],
            )
            for index in range(self._sent_base)
        ]
        self._free_places = list(range(_sent_places(tokens)))
        self._waiting_control: list[bytes] = []
        # Tokens for the peer's slots that we may use now.
        self.free_tokens = list(range(tokens - 1, -1, -1))
        self.owed = 0  # tokens of the peer that we have finished with, as a mask
        self.owed_count = 0
        self._remote_address = self._remote_rkey = 0
        self.was_full = False
        self.outstanding = dict.fromkeys(self._numbers, 0)

    # ---- setting up ----

    def to_json(self) -> dict[str, Any]:
        """What the peer must know."""
        return {
            "queue_pairs": {
                str(number): pair.endpoint.to_json() for number, pair in self.queue_pairs.items()
            },
            "slots": {"address": self.slots.address, "rkey": self.slots.rkey},
        }

    def connect(self, document: Mapping[str, Any], timing: Timing) -> None:
        """Bring all queue pairs to RTS and post all receives.

        Raises
        ------
        InputError
            What the peer sent is not possible.
        """
        whose = f"Rank {self.peer}"
        pairs, slots = document.get("queue_pairs"), document.get("slots")
        if not isinstance(pairs, Mapping) or set(pairs) != {str(n) for n in self._numbers}:
            raise InputError(f"{whose} has not sent a queue pair for each class.")
        if not isinstance(slots, Mapping):
            raise InputError(f"{whose} has not sent where its slots are.")
        self._remote_address = _number(slots, "address", 1 << 64, whose)
        self._remote_rkey = _number(slots, "rkey", 1 << 32, whose)
        for place, (number, pair) in enumerate(self.queue_pairs.items()):
            remote = Endpoint.from_json(pairs[str(number)], whose)
            # Receives before RTR: a message can come as soon as the peer is ready.
            pair.connect(remote, self._traffic_classes[number], timing)
            for index in range(self.depth):
                self._post_receive(number, place * self.depth + index)

    def _place(self, index: int) -> int:
        return self._places.address + index * CONTROL_NBYTES

    def _post_receive(self, number: int, index: int) -> None:
        self.queue_pairs[number].qp.post_recv(self._receives[index])

    # ---- receiving ----

    def take_message(self, rest: int, nbytes: int) -> bytes:
        """Copy a control message out of its place."""
        return ctypes.string_at(self._place(rest), min(nbytes, CONTROL_NBYTES))

    def repost(self, rest: int) -> None:
        """Post a receive again once its message was taken."""
        self._post_receive(self._numbers[rest // self.depth], rest)

    def slot_view(self, token: int, nbytes: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """The message of a token that is to be reduced."""
        start = token * self.chunk_nbytes
        return self._view[start : start + nbytes].view(dtype)

    def owe(self, token: int) -> None:
        """Note that the peer may have a token back."""
        self.owed |= 1 << token
        self.owed_count += 1

    def is_owed(self, token: int) -> bool:
        """Whether the peer uses a token that it does not have."""
        return bool(self.owed >> token & 1)

    def give_back(self, mask: int) -> bool:
        """Take the tokens that the peer gives back.

        Returns
        -------
        bool
            False if it gives what it does not have.
        """
        if mask >> self.tokens:
            return False
        for token in range(self.tokens):
            if mask >> token & 1:
                if token in self.free_tokens:
                    return False
                self.free_tokens.append(token)
        return True

    # ---- sending ----

    def can_send(self, number: int) -> bool:
        """Whether a data message may be posted on this class's queue pair now."""
        if self.outstanding[number] >= 2 * self.tokens:
            self.was_full = True  # the next completion makes room
            return False
        return bool(self.free_tokens)

    def post_data(
        self,
        number: int,
        request: int,
        source: tuple[int, int, int],
        remote: tuple[int, int],
        immediate: int,
    ) -> None:
        """Post a data message.

        Parameters
        ----------
        number
            Class.
        request
            Rest of the wr_id.
        source
            Address, bytes and lkey; 0 bytes for a message without payload.
        remote
            Address and rkey.
        immediate
            See wire.py.
        """
        address, nbytes, lkey = source
        work = SendWR(
            wr_id=wr_id(DATA, request),
            opcode=verbs.IBV_WR_RDMA_WRITE_WITH_IMM,
            num_sge=1,
            sg=[SGE(address, nbytes, lkey)],
            imm_data=immediate,
        )
        if not nbytes:
            # An entry of length 0 means 2 GiB to some NICs; pyverbs makes no request without one.
            work.num_sge = 0
        work.set_wr_rdma(remote[1], remote[0])
        self.queue_pairs[number].qp.post_send(work)
        self.outstanding[number] += 1

    def remote_slot(self, token: int) -> tuple[int, int]:
        """Address and rkey of the peer's slot of a token."""
        return self._remote_address + token * self.chunk_nbytes, self._remote_rkey

    def send_control(self, message: bytes) -> None:
        """Send a control message, or keep it until one before it has been sent."""
        if not self._free_places:
            self._waiting_control.append(message)
            return
        place = self._free_places.pop()
        address = self._place(self._sent_base + place)
        ctypes.memmove(address, message, len(message))
        work = SendWR(
            wr_id=wr_id(CONTROL_SENT, place),
            opcode=verbs.IBV_WR_SEND,
            num_sge=1,
            sg=[SGE(address, len(message), self._places.lkey)],
        )
        self.queue_pairs[CONTROL].qp.post_send(work)

    def control_sent(self, place: int) -> None:
        """Note that a control message has arrived."""
        self._free_places.append(place)
        if self._waiting_control:
            self.send_control(self._waiting_control.pop(0))

    # ---- ending ----

    def fail(self) -> None:
        """Put all queue pairs into error."""
        for pair in self.queue_pairs.values():
            pair.fail()

    def close(self) -> None:
        """Destroy the queue pairs."""
        for pair in self.queue_pairs.values():
            pair.close()
        self.queue_pairs.clear()


def numbers_of(links: Sequence[Link]) -> dict[int, tuple[Link, int]]:
    """QPN -> link and class."""
    return {
        pair.number: (link, number) for link in links for number, pair in link.queue_pairs.items()
    }


def _number(document: Mapping[str, Any], key: str, limit: int, whose: str) -> int:
    value = document.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise InputError(f"{whose} sent {key} = {value!r}; expected a number below {limit}.")
    return value
