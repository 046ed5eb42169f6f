"""Messages between ranks, byte by byte."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.allreduce import wire
from controller.allreduce.wire import Description, WireError

DESCRIPTION = Description(
    sequence=70, collective=1, op=0, dtype=7, algorithm=1, compression=0, root=2, size=4,
    count=1 << 40, chunk=32768, address=0x7F0012345000, rkey=0xDEADBEEF,
)  # fmt: skip


@given(st.integers(0, wire.MAX_TOKENS - 1), st.integers(0, 1 << 40),
       st.integers(0, wire.MAX_MESSAGES - 1))  # fmt: skip
def test_immediate_data_keeps_its_three_parts_in_32_bits(
    token: int, sequence: int, index: int
) -> None:
    value = wire.pack_immediate(token, sequence, index)
    assert 0 <= value < 1 << 32
    assert wire.unpack_immediate(value) == (token, sequence % wire.MAX_OPERATIONS, index)


@pytest.mark.parametrize("size", [2, 3, 8, 64, 100, 512, 1000])
def test_ranks_on_opposite_sides_of_a_ring_cannot_mistake_an_operation(size: int) -> None:
    assert wire.max_in_flight(size) * (size // 2) < wire.MAX_OPERATIONS
    assert wire.max_in_flight(2) == wire.MAX_IN_FLIGHT


def test_a_description_is_read_as_it_was_written() -> None:
    message = DESCRIPTION.pack()
    assert len(message) <= wire.CONTROL_NBYTES
    assert wire.unpack(message) == DESCRIPTION


def test_where_the_buffer_lies_needs_no_agreement_and_all_else_does() -> None:
    elsewhere = replace(DESCRIPTION, address=1, rkey=2)
    assert elsewhere.agreement() == DESCRIPTION.agreement()
    for key in ("sequence", "collective", "op", "dtype", "algorithm", "compression", "root",
                "size", "count", "chunk"):  # fmt: skip
        other = replace(DESCRIPTION, **{key: getattr(DESCRIPTION, key) + 1})
        assert other.agreement() != DESCRIPTION.agreement(), key


@given(st.integers(0, (1 << 32) - 1))
def test_credits_are_read_as_they_were_written(tokens: int) -> None:
    assert wire.unpack(wire.pack_credits(tokens)) == tokens


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\0" * 8,
        b"\xff" * wire.CONTROL_NBYTES,
        DESCRIPTION.pack()[:-1],
        DESCRIPTION.pack() + b"\0",
        wire.pack_credits(1)[:-1],
        replace(DESCRIPTION, count=wire.MAX_COUNT + 1).pack(),
        replace(DESCRIPTION, chunk=0).pack(),
        b"\x72" + wire.pack_credits(1)[1:4] + b"\x02\x00" + wire.pack_credits(1)[6:],
    ],
)
def test_anything_else_is_refused(message: bytes) -> None:
    with pytest.raises(WireError):
        wire.unpack(message)


@given(st.binary(max_size=wire.CONTROL_NBYTES))
def test_random_bytes_are_refused_or_read_and_never_break_the_reader(message: bytes) -> None:
    with contextlib.suppress(WireError):
        wire.unpack(message)
