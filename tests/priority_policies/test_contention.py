from __future__ import annotations

import pytest

from controller.errors import UsageError
from controller.priority.contention import Contention, SharedLink, numbers_in, one_link
from tests.priority_policies.views import LINK_Bps, idle

#  a - b - c    d - e    f
LINKS = [
    SharedLink(4.0, ("a", "b")),
    SharedLink(2.0, ("c", "b")),
    SharedLink(3.0, ("b", "a")),
    SharedLink(1.0, ("d", "e")),
    SharedLink(0.5, ("f",)),
]


@pytest.fixture
def graph() -> Contention:
    return Contention(LINKS, "abcdef")


def test_jobs_meet_where_they_share_a_link(graph):
    assert graph.meets("a", "b") and graph.meets("b", "a")
    assert not graph.meets("a", "c")
    assert not graph.meets("a", "a")
    assert graph.neighbours("b") == {"a", "c"}
    assert graph.neighbours("f") == frozenset()


def test_a_component_is_named_in_the_order_of_the_jobs(graph):
    assert [graph.component(name) for name in "cbe"] == [("a", "b", "c")] * 2 + [("d", "e")]
    assert graph.component("f") == ("f",)
    assert Contention(LINKS, "fedcba").component("a") == ("c", "b", "a")


def test_of_links_with_the_same_jobs_the_smallest_stays_and_single_jobs_share_none(graph):
    assert graph.links == (
        SharedLink(3.0, ("b", "a")),
        SharedLink(2.0, ("c", "b")),
        SharedLink(1.0, ("d", "e")),
    )
    assert [numbers_in(mask) for mask in graph.link_masks] == [[0, 1], [1, 2], [3, 4]]


def test_a_jobs_link_is_the_smallest_that_it_shares(graph):
    assert [graph.link_Bps(name) for name in "abcdf"] == [3.0, 2.0, 2.0, 1.0, 0.0]
    assert [graph.links_of(name) for name in "abf"] == [[0], [0, 1], []]


def test_links_and_jobs_are_found_by_component(graph):
    views = [idle(name, 0, 10) for name in "eabd"]
    found = graph.by_component(views)
    assert [(numbers_in(mask), [job.name for job in jobs]) for mask, jobs in found] == [
        ([3, 4], ["e", "d"]),
        ([0, 1, 2], ["a", "b"]),
    ]
    assert [graph.links_within(mask) for mask, _ in found] == [[2], [0, 1]]
    assert graph.links_within(graph.component_mask("f")) == []


def test_jobs_of_one_link_all_meet():
    graph = one_link(("a", "b", "c"), LINK_Bps)
    assert all(graph.neighbours(name) == set("abc") - {name} for name in "abc")
    assert graph is one_link(("a", "b", "c"), LINK_Bps)


@pytest.mark.parametrize(
    ("links", "jobs", "message"),
    [
        ([], "aba", "a, b, a; allowed: each name once"),
        ([SharedLink(1.0, ("a", "x"))], "ab", "Job x is not known; known: a, b"),
        ([SharedLink(1.0, ("a", "b", "a"))], "ab", "Job a is twice on one link"),
        ([SharedLink(-1.0, ("a", "b"))], "ab", r"a, b has a capacity of -1.0 bytes/s; allowed"),
        ([SharedLink(float("nan"), ("a", "b"))], "ab", "capacity of nan"),
        ([SharedLink(float("inf"), ("a", "b"))], "ab", "capacity of inf"),
    ],
)
def test_impossible_links_are_refused(links, jobs, message):
    with pytest.raises(UsageError, match=message):
        Contention(links, jobs)


def test_a_job_that_is_not_known_is_refused(graph):
    with pytest.raises(UsageError, match="Job x is not known"):
        graph.neighbours("x")
