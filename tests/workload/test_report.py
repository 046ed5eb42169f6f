"""Reports of a contest whose figures are known."""

from __future__ import annotations

import dataclasses
import json

import pytest

from controller.errors import InputError
from controller.workload.contest import Contest
from controller.workload.report import make_report
from tests.workload.contests import ITERATIONS, MIX, ROUNDS, contest, turn


def test_figures_are_those_of_the_iterations_that_count() -> None:
    document = make_report(contest()).to_json()
    for policy, (a_ms, b_ms) in {"fair": (300, 200), "laxity": (200, 150)}.items():
        found = document["policies"][policy]
        n = {name: found["jobs"][name]["iterations"] for name in "ab"}
        assert n == {"a": ROUNDS * ITERATIONS, "b": ROUNDS * ITERATIONS}
        # One in each round took 400 ms longer.
        for name, window_ms in (("a", a_ms), ("b", b_ms)):
            job = found["jobs"][name]
            assert job["allreduce_ms"]["mean"] == pytest.approx(
                window_ms + 400 * ROUNDS / n[name], abs=1e-3
            )
            assert job["allreduce_ms"]["slowest10"] == window_ms + 400
            assert job["allreduce_ms"]["p99"] == window_ms + 400
            compute_ms = 300 if name == "a" else 400
            assert job["iteration_ms"]["p50"] == compute_ms + window_ms
            assert job["iteration_ms"]["p99"] == compute_ms + window_ms + 400
        total = n["a"] + n["b"]
        assert found["iterations"] == total
        assert found["allreduce_ms"]["mean"] == pytest.approx(
            (n["a"] * a_ms + n["b"] * b_ms + 800 * ROUNDS) / total, abs=1e-3
        )


def test_changes_are_against_fair() -> None:
    policies = make_report(contest(slow_ms=0)).to_json()["policies"]
    assert set(policies["fair"]["vs_fair"].values()) == {0.0}
    change = policies["laxity"]["jobs"]["a"]["vs_fair"]
    assert change["allreduce_mean"] == pytest.approx(200 / 300 - 1, abs=1e-4)
    assert change["iteration_mean"] == pytest.approx(500 / 600 - 1, abs=1e-4)
    assert policies["laxity"]["worst_job"] == "b"
    assert policies["laxity"]["worst_slowdown"] == pytest.approx(550 / 500, abs=1e-4)


def test_health_counts_what_was_sent_again_and_what_control_cost() -> None:
    made = contest()
    health = {v.policy: v.health for v in make_report(made).verdicts}
    assert health["fair"].to_json() == {
        "sent_packets": 2000, "resent_share": 0.0, "troubles": {}, "control_share": 0.0,
        "agent_cpu_share": 0.0,
    }  # fmt: skip
    assert health["laxity"].resent_share == 10 / 2000
    assert health["laxity"].troubles == {"duplicate_request": 10}
    assert health["laxity"].agent_cpu_share == 0.05
    turns = [each for each in made.turns if each.policy == "laxity"]
    payload = sum(
        3 * made.traffic.sent_nbytes(job) * sum(r.job == job.name for t in turns for r in t.records)
        for job in MIX.jobs
    )
    assert health["laxity"].control_share == pytest.approx(6000 / payload)


def test_only_iterations_that_every_policy_has_are_compared() -> None:
    made = contest(slow_ms=0)
    # One of laxity's turns ended early.
    short = dataclasses.replace(
        made.turns[1], records=tuple(r for r in made.turns[1].records if r.iteration < 8)
    )
    report = make_report(dataclasses.replace(made, turns=(made.turns[0], short, *made.turns[2:])))
    counts = [
        {name: figures.iterations for name, figures in verdict.measures.jobs.items()}
        for verdict in report.verdicts
    ]
    assert counts[0] == counts[1]
    # Of iterations 2 .. 7; a ends first then, and the last one of b ran alone.
    assert counts[0] == {"a": ITERATIONS + 6, "b": ITERATIONS + 5}


def test_bounds_are_those_of_windows_that_nobody_disturbs() -> None:
    report = make_report(contest(slow_ms=0))
    assert report.bounds is not None
    # Alone the windows take 200 and 100 ms, under `fair` 300 and 200: 250 on average.
    assert report.bounds.isolated["allreduce_mean_ns"] == pytest.approx(150 / 250 - 1)
    assert report.bounds.isolated["allreduce_slowest_ns"] == pytest.approx(200 / 300 - 1)
    # Periods are equal and the windows fit beside one another: an oracle gets near.
    found = report.bounds.found["allreduce_mean_ns"]
    assert -0.4 - 1e-9 <= found < -0.3
    assert report.to_json()["oracle"]["found"]["allreduce_mean"] == pytest.approx(found, abs=1e-4)


def test_nothing_to_compare_is_an_error_that_names_the_job() -> None:
    made = contest()
    broken = tuple(
        dataclasses.replace(each, records=tuple(r for r in each.records if r.job == "a"))
        for each in made.turns
    )
    with pytest.raises(InputError, match="Job b has no iteration that counts"):
        make_report(dataclasses.replace(made, turns=broken))


def without_fair() -> Contest:
    made = contest()
    options = dataclasses.replace(made.options, policies=("laxity",), rounds=1)
    return dataclasses.replace(
        made, options=options, turns=(turn(0, "laxity", {"a": 200, "b": 150}),)
    )


def test_without_fair_there_are_figures_and_no_changes() -> None:
    report = make_report(without_fair())
    assert report.to_json()["policies"]["laxity"]["vs_fair"] is None
    assert report.to_json()["oracle"] is None
    assert "+" not in report.to_text()


def test_the_text_fits_80_columns_and_shows_each_policy_and_job() -> None:
    long = contest()
    text = make_report(long).to_text()
    assert max(map(len, text.splitlines())) <= 80
    lines = text.splitlines()
    assert sum(line.startswith(("fair", "laxity")) for line in lines) == 4
    assert any(line.startswith("fair     all") and "+0 %" in line for line in lines)
    assert any(line.startswith("oracle") and " %" in line for line in lines)
    json.dumps(make_report(long).to_json())
