"""The buddy allocator, beside a plain model of what memory is taken."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.errors import UsageError
from controller.memory.buddy import Buddy

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# What to do with a chunk of 64 blocks: take so many bytes, or give the n-th block back, or ask
# again for the place that the n-th had.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 70 * 4096)),
        st.tuples(st.just("give"), st.integers(0, 1000)),
        st.tuples(st.just("again"), st.integers(0, 1000)),
    ),
    max_size=120,
)


def fits_somewhere(used: dict[int, int], nbytes: int, size: int) -> bool:
    """Whether a block of `size` at a multiple of it meets nothing in use."""
    return any(
        all(start + size <= other or other + taken <= start for other, taken in used.items())
        for start in range(0, nbytes, size)
    )


@settings(max_examples=300)
@given(STEPS)
def test_blocks_are_aligned_never_overlap_are_found_whenever_there_is_one_and_all_merge_back(
    steps: list[tuple[str, int]],
) -> None:
    chunk = 64 * 4096
    buddy = Buddy(chunk, 4096)
    used: dict[int, int] = {}  # offset -> size
    past: list[tuple[int, int]] = []
    for step, number in steps:
        if step == "give":
            if used:
                offset = sorted(used)[number % len(used)]
                buddy.free(offset)
                past.append((offset, used.pop(offset)))
            continue
        if step == "take":
            nbytes = number
            size = max(4096, 1 << (nbytes - 1).bit_length() if nbytes > 1 else 1)
            offset = buddy.allocate(nbytes)
            assert (offset >= 0) == (size <= chunk and fits_somewhere(used, chunk, size))
            if offset < 0:
                continue
        else:
            if not past:
                continue
            offset, size = past[number % len(past)]
            is_free = all(
                offset + size <= other or other + taken <= offset for other, taken in used.items()
            )
            assert buddy.allocate_at(offset, size) == is_free
            if not is_free:
                continue
        assert offset % size == 0 and offset >= 0 and offset + size <= chunk
        assert all(offset + size <= o or o + taken <= offset for o, taken in used.items())
        used[offset] = size
        assert buddy.block_nbytes(offset) == size
        assert buddy.free_nbytes == chunk - sum(used.values())
        assert buddy.in_use == len(used)
    for offset in used:
        buddy.free(offset)
    assert buddy.free_nbytes == buddy.largest_free_nbytes() == chunk
    assert buddy.allocate(chunk) == 0


def test_a_block_is_given_back_once() -> None:
    buddy = Buddy(MIB)
    offset = buddy.allocate(1)
    buddy.free(offset)
    with pytest.raises(KeyError):
        buddy.free(offset)
    with pytest.raises(KeyError):
        buddy.free(offset + 1)


def test_nothing_fits_beyond_the_chunk_and_no_place_is_outside() -> None:
    buddy = Buddy(MIB)
    assert buddy.allocate(MIB + 1) == -1
    assert not buddy.allocate_at(0, MIB + 1)
    assert not buddy.allocate_at(MIB, 4096)
    assert not buddy.allocate_at(-4096, 4096)
    assert not buddy.allocate_at(4096, 8192), "no block of 8 KiB begins at 4 KiB"
    assert buddy.largest_free_nbytes() == MIB


@pytest.mark.parametrize(("nbytes", "smallest"), [(3, 1), (0, 1), (8, 3), (4, 8), (-4, 1)])
def test_sizes_that_are_no_powers_of_two_are_refused(nbytes: int, smallest: int) -> None:
    with pytest.raises(UsageError):
        Buddy(nbytes, smallest)


def test_rounding_wastes_less_than_half_and_a_quarter_on_average() -> None:
    """Of sizes spread evenly between two powers of two, as said in the module's text."""
    buddy = Buddy(64 * MIB)
    generator = random.Random(1)
    asked = taken = 0
    for _ in range(3000):
        nbytes = generator.randint(MIB + 1, 2 * MIB)
        offset = buddy.allocate(nbytes)
        block = buddy.block_nbytes(offset)
        assert nbytes * 2 > block
        asked, taken = asked + nbytes, taken + block
        buddy.free(offset)
    assert 1 - asked / taken == pytest.approx(0.25, abs=0.01)


def least_fill_at_first_failure(seed: int, rounds: int) -> float:
    """Share of the chunk in use when a request that fits into what is free fails, at worst."""
    generator = random.Random(seed)
    buddy, live = Buddy(GIB), list[int]()
    least = 1.0
    for _ in range(rounds):
        nbytes = min(64 * MIB, int(4 * KIB * 2 ** generator.expovariate(0.2)))
        offset = buddy.allocate(nbytes)
        if offset >= 0:
            live.append(offset)
        else:
            size = buddy.min_block_nbytes << buddy.order_of(nbytes)
            if buddy.free_nbytes >= size:
                least = min(least, 1 - buddy.free_nbytes / GIB)
        # Releases at random places, about as many bytes as come in once it is nearly full.
        while live and (offset < 0 or generator.random() < 0.45):
            index = generator.randrange(len(live))
            live[index], live[-1] = live[-1], live[index]
            buddy.free(live.pop())
            if offset < 0 and generator.random() < 0.3:
                break
    return least


def test_random_sizes_find_a_block_until_most_of_the_chunk_is_in_use() -> None:
    """Fragmentation, measured: sizes of 4 KiB .. 64 MiB, released in random order."""
    assert min(least_fill_at_first_failure(seed, 6000) for seed in range(5)) > 0.6
