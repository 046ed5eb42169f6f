"""Records of which something is missing or damaged are refused with the place, never believed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from controller.errors import InputError
from controller.workload.picture import text_picture
from controller.workload.report import make_report
from controller.workload.stored import contest_json, read_contest
from tests.workload.contests import contest

GOOD: dict[str, Any] = json.loads(json.dumps(contest_json(contest())))


def test_records_come_back_as_they_were() -> None:
    assert read_contest(GOOD) == contest()


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Places of all members; of a list the first element only."""
    found = [path] if path else []
    members: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        members = list(value.items())
    elif isinstance(value, list):
        members = list(enumerate(value[:1]))
    for key, member in members:
        found += paths(member, (*path, key))
    return found


def changed(path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> dict[str, Any]:
    document = copy.deepcopy(GOOD)
    holder: Any = document
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    return document


def replaced(value: Any) -> Callable[[Any, Any], None]:
    def change(holder: Any, key: Any) -> None:
        holder[key] = value

    return change


WRONG: tuple[Any, ...] = (
    None, True, "text", -1, 0, 1e300, float("nan"), float("inf"), [], {}, [[]], [None], 2**70,
)  # fmt: skip


@pytest.mark.parametrize("path", paths(GOOD), ids=lambda path: ".".join(map(str, path)))
def test_whatever_is_wrong_is_an_input_error_or_harmless(path: tuple[Any, ...]) -> None:
    def delete(holder: Any, key: Any) -> None:
        del holder[key]

    for change in (delete, *(replaced(value) for value in WRONG)):
        document = changed(path, change)
        try:
            found = read_contest(document)
            report = make_report(found)
        except InputError:
            continue
        json.dumps(report.to_json(), allow_nan=False)
        assert report.to_text()
        assert text_picture(found)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("turns", 0, "records", 0, "job"), "c", r"turns\[0\]\.records\[0\]\.job is 'c'"),
        (("turns", 0, "records", 0, "window_end_ns"), 0, "times are not in order"),
        (("turns", 1, "records", 2, "iteration"), "2", r"iteration is '2'; expected a number"),
        (("turns", 0, "records", 0, "iteration"), 1.5, "expected a whole number"),
        (("turns", 0, "counters"), {}, "incomplete or damaged: 'duplicate_request'"),
        (("turns", 0, "counters", "sent_pkts"), "9", r"sent_pkts is '9'; expected a number"),
        (("turns", 0, "policy"), "crux", "policy is 'crux'; expected one of fair, laxity"),
        (("alone_ns", "a"), [], "no windows of job a alone"),
        (("alone_ns", "a"), [0], r"alone_ns\.a is 0; expected a number above 0"),
        (("traffic", "rate_Bps"), 0, "rate_Bps is 0"),
        (("options", "policies"), "fair", "expected a list"),
    ],
)
def test_the_place_of_a_wrong_value_is_named(
    path: tuple[Any, ...], value: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        read_contest(changed(path, replaced(value)))


def test_records_without_turns_name_what_is_missing() -> None:
    with pytest.raises(InputError, match="Job a has no iteration that counts"):
        make_report(read_contest(changed(("turns",), replaced([]))))
