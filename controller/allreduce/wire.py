"""What ranks send one another through the queue pairs, byte by byte.

Data messages are RDMA WRITEs with immediate data, which says where they belong; control messages
are SENDs on a queue pair of their own, so that no data is in front of them.

Immediate data: token (5 bits), operation modulo 2048 (11 bits), index of the message in its
operation (16 bits). A token is the right to one message; it names the slot as well.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_TOKEN_BITS, _SEQUENCE_BITS, _INDEX_BITS = 5, 11, 16
MAX_TOKENS = 1 << _TOKEN_BITS
MAX_OPERATIONS = 1 << _SEQUENCE_BITS  # numbers that immediate data tells apart
MAX_MESSAGES = 1 << _INDEX_BITS
MAX_IN_FLIGHT = 31
MAX_COUNT = 1 << 48
CONTROL_NBYTES = 128  # every control message fits

_MAGIC = 0x57E11A72
_VERSION = 1
_DESCRIBE, _CREDIT = 1, 2
# magic, version, kind of message
_HEAD = struct.Struct("<IHH")
# sequence, collective, op, dtype, algorithm, compression, 3 of padding, root, size, count, chunk,
# address, rkey
_DESCRIPTION = struct.Struct("<QBBBBB3xIIQQQI")
_CREDITS = struct.Struct("<Q")


class WireError(ValueError):
    """A message that no rank of this version sends."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a rank is about to do: the peer compares it with its own, and writes to `address`.

    Parameters
    ----------
    sequence
        Number of the operation on this communicator, from 0.
    collective, op, dtype, algorithm, compression
        Wire numbers.
    root, size
        Root rank (0 where there is none) and number of ranks.
    count
        Elements, as the plan counts them.
    chunk
        Elements a message at most.
    address, rkey
        Of the working buffer; not compared.
    """

    sequence: int
    collective: int
    op: int
    dtype: int
    algorithm: int
    compression: int
    root: int
    size: int
    count: int
    chunk: int
    address: int
    rkey: int

    def agreement(self) -> tuple[int, ...]:
        """What must be the same on all ranks."""
        return (
            self.sequence, self.collective, self.op, self.dtype, self.algorithm, self.compression,
            self.root, self.size, self.count, self.chunk,
        )  # fmt: skip

    def pack(self) -> bytes:
        """As it travels."""
        return _HEAD.pack(_MAGIC, _VERSION, _DESCRIBE) + _DESCRIPTION.pack(
            self.sequence, self.collective, self.op, self.dtype, self.algorithm, self.compression,
            self.root, self.size, self.count, self.chunk, self.address, self.rkey,
        )  # fmt: skip


def pack_credits(tokens: int) -> bytes:
    """Tokens given back, as a bit mask."""
    return _HEAD.pack(_MAGIC, _VERSION, _CREDIT) + _CREDITS.pack(tokens)


def unpack(message: bytes) -> Description | int:
    """A description, or a bit mask of tokens.

    Raises
    ------
    WireError
        It is neither.
    """
    if len(message) < _HEAD.size:
        raise WireError(f"a control message of {len(message)} bytes")
    magic, version, kind = _HEAD.unpack_from(message)
    if magic != _MAGIC or version != _VERSION:
        raise WireError(f"a control message of magic {magic:#x} and version {version}")
    body = message[_HEAD.size :]
    if kind == _DESCRIBE and len(body) == _DESCRIPTION.size:
        description = Description(*_DESCRIPTION.unpack(body))
        if description.count > MAX_COUNT or not 1 <= description.chunk <= MAX_COUNT:
            raise WireError(f"a description of {description.count} elements")
        return description
    if kind == _CREDIT and len(body) == _CREDITS.size:
        return int(_CREDITS.unpack(body)[0])
    raise WireError(f"a control message of kind {kind} with {len(body)} bytes")


def max_in_flight(size: int) -> int:
    """Operations that a rank may have begun and not ended, counted from the oldest of them.

    An operation ends only when both ring neighbours have begun it. So two ranks that are d hops
    apart are at most d times so many operations apart, and a message of an operation that has not
    begun here is never mistaken for one of another.

    Parameters
    ----------
    size
        Number of ranks; the way round a ring is at most half of it.
    """
    return max(1, min(MAX_IN_FLIGHT, MAX_OPERATIONS // (size // 2 + 2)))


def pack_immediate(token: int, sequence: int, index: int) -> int:
    """Immediate data of a data message."""
    low = sequence % MAX_OPERATIONS
    return token << (_SEQUENCE_BITS + _INDEX_BITS) | low << _INDEX_BITS | index


def unpack_immediate(value: int) -> tuple[int, int, int]:
    """Token, operation modulo MAX_OPERATIONS, and index."""
    return (
        value >> (_SEQUENCE_BITS + _INDEX_BITS),
        value >> _INDEX_BITS & (MAX_OPERATIONS - 1),
        value & (MAX_MESSAGES - 1),
    )
