"""What docs/results.md says of policies and planning follows from the figures, not from hope."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

_PATH = Path(__file__).resolve().parents[2] / "scripts/iteration_tables.py"
_SPEC = importlib.util.spec_from_file_location("iteration_tables", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
tables = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tables)


def planning(agent_p99_us: float, yardstick_p99_us: float) -> dict[str, Any]:
    return {
        "plan_latency_us": {"p50": 400, "p99": agent_p99_us},
        "yardstick_us": {"best": 300, "p50": 350, "p99": yardstick_p99_us},
        "target_p99_us": 1000, "realtime": True, "jobs": 8, "iterations_per_s": 10.0,
        "seconds": 20.0, "policy": "laxity", "kernel": "k", "processors": 2, "load_average": 1.0,
        "control_to_job_bytes": 0.001, "control_to_job_bytes_resnet50": 1e-6, "cpu_share": 0.1,
        "cpu_share_idle": 0.01, "cpu_us_per_event": 900, "plans": 20, "events": 10,
        "control_bytes_per_iteration": 200, "window_bytes": 131072,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("agent_us", "yardstick_us", "is_explained"),
    [(2000, 1600, True), (2000, 1599, False), (2000, 2500, True), (900, 900, False)],
)
def test_the_machine_is_blamed_only_where_the_yardstick_misses_by_about_as_much(
    agent_us: float, yardstick_us: float, is_explained: bool
) -> None:
    text = tables.planning_section(planning(agent_us, yardstick_us))
    assert ("this machine" in text) == is_explained
    assert ("**missed**" in text) == (agent_us > 1000)


def entry(rounds: int, rate_bps: int) -> dict[str, Any]:
    return {
        "ranks": 3, "rate_bps": rate_bps, "chunk_bytes": 16384, "rounds": rounds,
        "iterations": 30, "warmup": 8, "kernel": "7.3.4",
    }  # fmt: skip


def test_mixes_that_were_run_in_another_way_stand_on_a_line_of_their_own() -> None:
    mixes = {
        "one": entry(2, 12_000_000),
        "two": entry(3, 12_500_000),
        "three": entry(2, 12_000_000),
    }
    alike, other = tables.priority_settings({"mixes": mixes}).splitlines()
    assert alike.startswith("* one, three: 3 ranks a job, 12 Mbit/s")
    assert "2 rounds of 30 iterations of the slowest job after 8" in alike
    assert other.startswith("* two: 3 ranks a job, 12.5 Mbit/s")
    assert "3 rounds" in other


def test_nothing_measured_is_said_so() -> None:
    assert tables.priority_section({"mixes": {}}).startswith("Not measured yet")
