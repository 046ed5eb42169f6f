"""A job whose rule matches nothing is told of: once, after a minute, with its rule."""

from __future__ import annotations

import time

import pytest

from controller.agent.steering import UNMATCHED_WARNING_S, JobState, Steering
from controller.config import Config
from controller.errors import UsageError
from controller.priority.jobs import Job, JobMatch


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def steering(notes: list[str]) -> Steering:
    """A job set a minute ago, and one that was set just now."""
    result = Steering(Config(), {}, notes.append)
    old = time.monotonic() - UNMATCHED_WARNING_S
    result.jobs["old"] = JobState(Job("old", JobMatch.parse({"command": "tarin*"})), 1, old)
    result.jobs["named"] = JobState(Job("named"), 2, old)
    result.jobs["new"] = JobState(Job("new"), 3, time.monotonic())
    return result


def test_the_warning_comes_once_and_names_the_rule(steering: Steering, notes: list[str]) -> None:
    steering.watch()
    steering.watch()
    assert len(notes) == 2
    assert "job old" in notes[0] and "command tarin*" in notes[0]
    assert "job named" in notes[1] and "STELLAR_JOB=named" in notes[1]


def test_a_job_that_ever_had_a_flow_is_not_warned_of(steering: Steering, notes: list[str]) -> None:
    for state in steering.jobs.values():
        state.was_matched = True
    steering.watch()
    assert notes == []


def test_an_unknown_job_names_those_that_are(steering: Steering) -> None:
    with pytest.raises(UsageError, match="named, new, old"):
        steering.find("nobody")
