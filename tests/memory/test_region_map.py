"""Ranges of addresses, beside a model that looks at every byte."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.memory.region_map import RegionMap, page_range

SPACE = 64
ranges = st.tuples(st.integers(0, SPACE - 1), st.integers(1, 16)).map(
    lambda pair: (pair[0], min(SPACE, pair[0] + pair[1]))
)


@settings(max_examples=150)
@given(
    inserted=st.lists(ranges, max_size=30),
    removed=st.lists(st.integers(0, SPACE), max_size=10),
    asked=st.lists(ranges, min_size=1, max_size=20),
)
def test_the_map_finds_what_a_search_of_all_ranges_finds(
    inserted: list[tuple[int, int]], removed: list[int], asked: list[tuple[int, int]]
) -> None:
    region_map: RegionMap[tuple[int, int]] = RegionMap()
    model: set[tuple[int, int]] = set()
    for start, end in inserted:
        if any(first < end and start < behind for first, behind in model):
            with pytest.raises(ValueError, match="overlaps"):
                region_map.insert(start, end, (start, end))
        else:
            region_map.insert(start, end, (start, end))
            model.add((start, end))
    for start in removed:
        matching = [each for each in model if each[0] == start]
        if matching:
            assert region_map.remove(start) == matching[0]
            model.remove(matching[0])
        else:
            with pytest.raises(KeyError):
                region_map.remove(start)
    assert list(region_map) == sorted(model)
    assert len(region_map) == len(model)
    for start, end in asked:
        covering = [each for each in model if each[0] <= start and end <= each[1]]
        assert region_map.covering(start, end) == (covering[0] if covering else None)
        overlapping = [each for each in sorted(model) if each[0] < end and start < each[1]]
        assert region_map.overlapping(start, end) == overlapping


def test_ranges_that_touch_do_not_overlap() -> None:
    region_map: RegionMap[str] = RegionMap()
    region_map.insert(10, 20, "middle")
    region_map.insert(20, 30, "above")
    region_map.insert(0, 10, "below")
    assert region_map.overlapping(10, 20) == ["middle"]
    assert region_map.covering(9, 11) is None


def test_an_empty_range_shares_nothing_and_cannot_be_inserted() -> None:
    region_map: RegionMap[str] = RegionMap()
    region_map.insert(10, 20, "a")
    assert region_map.overlapping(15, 15) == []
    with pytest.raises(ValueError, match="empty"):
        region_map.insert(30, 30, "b")


def test_addresses_of_64_bits_are_told_apart() -> None:
    region_map: RegionMap[int] = RegionMap()
    top = 1 << 64
    for index in range(4):
        region_map.insert(top - (index + 1) * 4096, top - index * 4096, index)
    assert region_map.covering(top - 1, top) == 0
    assert region_map.covering(top - 8193, top - 8192) == 2


@given(st.integers(0, 1 << 64), st.integers(0, 1 << 40), st.sampled_from([4096, 1 << 21, 1 << 30]))
def test_a_page_range_is_the_smallest_of_whole_pages(start: int, nbytes: int, page: int) -> None:
    first, behind = page_range(start, start + nbytes, page)
    assert first % page == 0
    assert behind % page == 0
    assert start - page < first <= start
    assert start + nbytes <= behind < start + nbytes + page
