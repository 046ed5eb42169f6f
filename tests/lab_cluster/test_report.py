"""The report: figures over seeds as JSON, as a table, as pictures."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from controller.errors import UsageError
from controller.lab import drawing
from controller.lab.kinds import load_cluster
from controller.lab.report import ClusterReport
from controller.lab.run import with_options
from controller.lab.tasks import QUANTILES, Run, with_best_known
from controller.sim.intervals import estimate

MEANS = {"fair": [100.0, 110.0, 120.0], "laxity": [80.0, 99.0, 90.0], "oracle": [70.0, 75.0, 80.0]}
KEYS = (
    "allreduce_ms.mean", "allreduce_ms.slowest10", "allreduce_ms.p99", "allreduce_slowdown.mean",
    "allreduce_slowdown.slowest10", "iteration_ms.mean", "iteration_ms.p50", "iteration_ms.p99",
    "iteration_slowdown.mean", "worst_slowdown", "utilisation",
)  # fmt: skip


def run(scenario, policy, seed, value):
    fabric = scenario.network.fabric
    spread = np.linspace(0.5, 2, len(QUANTILES))
    use = np.linspace(0, value / 200, fabric.links)
    return Run(
        policy=policy,
        seed=seed,
        figures={key: value * (number + 1) for number, key in enumerate(KEYS)},
        bound={"allreduce_ms.mean": 50.0, "iteration_ms.mean": 60.0},
        job_slowdown={"bert": 1.1 * seed, "resnet-1": 1.2, "resnet-2": 1.0},
        allreduce_ms=value * spread,
        iteration_ms=2 * value * spread,
        link_use=use,
        link_load=use,
        windows=(("resnet-1", 0.0, value / 2), ("bert", 10.0, value)),
        events=7,
        decisions=3,
        order="first come" if policy == "oracle" else "",
        order_gains={"first come": (-0.1 * seed, 0.2), "laxity": (0.0, 0.1)},
    )


@pytest.fixture
def report():
    scenario = with_options(load_cluster("quick"), tuple(MEANS), 3)
    runs = [
        run(scenario, policy, seed + 1, value)
        for policy, values in MEANS.items()
        for seed, value in enumerate(values)
    ]
    # Processes end in any order.
    return ClusterReport(scenario, tuple(runs[::-1]))


def test_json_has_the_promised_keys(report):
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert {"scenario", "policies", "seeds", "ci95", "links", "oracle", "bound"} <= set(document)
    assert document["seeds"] == 3
    fair = document["policies"]["fair"]
    assert fair["allreduce_ms"] == pytest.approx({"mean": 110, "slowest10": 220, "p99": 330})
    assert set(fair["iteration_ms"]) == {"mean", "p50", "p99"}
    assert fair["worst_slowdown"] == pytest.approx(110 * 10)
    assert fair["utilisation"] == pytest.approx(110 * 11)
    assert fair["worst_job"] == "bert" and fair["job_slowdown"]["bert"] == pytest.approx(2.2)
    assert fair["vs_fair"] is None
    assert document["oracle"]["orders"] == dict.fromkeys("123", "first come")
    gain = document["oracle"]["vs_fair"]["first come"]["allreduce_ms"]
    assert gain == pytest.approx({"mean": -0.2, "slowest10": 0.2})
    assert document["bound"] == {"allreduce_ms": {"mean": 50}, "iteration_ms": {"mean": 60}}


def test_half_widths_are_those_of_the_seeds(report):
    widths = report.to_json()["ci95"]
    assert set(widths) == set(MEANS) and set(widths["fair"]) == set(KEYS)
    for policy, values in MEANS.items():
        expected = estimate(values).half_width
        assert widths[policy]["allreduce_ms.mean"] == pytest.approx(expected, rel=1e-5)


def test_changes_are_taken_seed_by_seed(report):
    change = report.to_json()["policies"]["laxity"]["vs_fair"]
    expected = estimate([-0.2, -0.1, -0.25])
    assert change["allreduce_ms"]["mean"] == pytest.approx(expected.mean, rel=1e-5)
    assert change["ci95"]["allreduce_ms.mean"] == pytest.approx(expected.half_width, rel=1e-5)


def test_without_fair_nothing_is_compared(report):
    scenario = replace(report.scenario, policies=("laxity", "oracle"))
    other = ClusterReport(scenario, tuple(run for run in report.runs if run.policy != "fair"))
    assert other.to_json()["policies"]["laxity"]["vs_fair"] is None
    assert "Change against fair" not in other.text()


def test_of_one_seed_no_confidence_is_told(report):
    one = ClusterReport(
        replace(report.scenario, seeds=1), tuple(run for run in report.runs if run.seed == 1)
    )
    assert set(one.to_json()["ci95"]["fair"].values()) == {None}
    assert "±" not in one.text()


def test_hottest_links_are_named_with_what_each_policy_carried(report):
    links = report.to_json()["links"]
    first = links["hottest"][0]
    assert first["link"] == "nic 7 down" and first["load"] == pytest.approx(0.5)
    assert first["utilisation"] == pytest.approx({"fair": 0.5, "laxity": 0.4, "oracle": 0.35})
    assert set(links["load"]) == {"nics", "uplinks"}
    # The last link is a NIC's; uplinks are those in the middle.
    assert links["load"]["uplinks"]["hottest"] < links["load"]["nics"]["hottest"]


def test_the_text_fits_a_terminal_and_tells_both_tables(report):
    lines = report.text().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[:2] for line in lines if line.startswith("laxity")] == [
        ["laxity", "89.67"],
        ["laxity", "-18"],
    ]
    assert "oracle: best of what is known on each seed (first come)" in lines


def test_large_changes_keep_their_distance(report):
    wild = [
        replace(each, figures=dict.fromkeys(KEYS, 97.3**each.seed))
        if each.policy == "laxity"
        else each
        for each in report.runs
    ]
    text = ClusterReport(report.scenario, tuple(wild)).text()
    row = [line for line in text.splitlines() if line.startswith("laxity")][1]
    # No two run into each other.
    assert len(re.findall(r"(?<= )[+-]\d+ ±\d+(?= |$)", row)) == 6


@pytest.mark.parametrize("value", [123456789.0, 999999999.6, 1e9, 12345678901.2])
def test_times_of_days_keep_their_distance_within_the_line(report, value):
    figures = {**dict.fromkeys(KEYS, value), "utilisation": 1.0}
    long = [replace(each, figures=figures) for each in report.runs]
    lines = ClusterReport(report.scenario, tuple(long)).text().splitlines()
    row = next(line for line in lines if line.startswith("laxity"))
    assert len(row.split()) == 8 and len(row) <= 80
    assert float(row.split()[1]) == pytest.approx(value, rel=1e-3)


def test_a_change_that_is_rounded_to_nothing_has_no_minus(report):
    fair = {run.seed: run.figures for run in report.runs if run.policy == "fair"}
    almost = [
        replace(each, figures={key: value * 0.9999 for key, value in fair[each.seed].items()})
        if each.policy == "laxity"
        else each
        for each in report.runs
    ]
    text = ClusterReport(report.scenario, tuple(almost)).text()
    assert "+0.0 ±0.0" in text and "-0.0" not in text


def test_what_dcqcn_ignores_is_told(report):
    conditions = replace(report.scenario.conditions, sharing="dcqcn")
    under = ClusterReport(replace(report.scenario, conditions=conditions), report.runs)
    ignored = under.to_json()["scenario"]["conditions"]["ignored"]
    assert ignored == ["classes", "floor_share", "shares"]
    told = "DCQCN: classes, floors and shares do nothing; weights scale increases"
    assert told in under.text() and told not in report.text()
    assert report.to_json()["scenario"]["conditions"]["ignored"] == []


def test_the_worst_slowdown_is_of_each_seed_and_the_worst_job_of_all(report):
    # Of the seeds 1, 2 and 3 the worst are resnet-1 (1.2), bert (2.2) and bert (3.3).
    runs = [
        replace(each, figures={**each.figures, "worst_slowdown": max(each.job_slowdown.values())})
        for each in report.runs
    ]
    fair = ClusterReport(report.scenario, tuple(runs)).to_json()["policies"]["fair"]
    assert fair["worst_slowdown"] == pytest.approx((1.2 + 2.2 + 3.3) / 3, rel=1e-5)
    assert fair["worst_job"] == "bert" and fair["job_slowdown"]["bert"] == pytest.approx(2.2)


def test_pictures_are_the_same_each_time(report, tmp_path):
    first = report.figures(tmp_path / "one")
    assert [path.name for path in first] == ["timeline.svg", "cdf.svg", "links.svg"]
    for path in first:
        assert path.read_bytes().startswith(b"<?xml")
        assert b"dc:date" not in path.read_bytes()
    second = report.figures(tmp_path / "two")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_pictures_of_one_switch_show_its_nics(tmp_path):
    scenario = with_options(load_cluster("lab-two-equal"), ["laxity"], 1)
    report = ClusterReport(scenario, (run(scenario, "laxity", 1, 100.0),))
    assert len(report.figures(tmp_path)) == 3


def test_without_matplotlib_the_remedy_is_told(report, tmp_path, monkeypatch):
    monkeypatch.setattr(drawing.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match="Figures need matplotlib") as caught:
        report.figures(tmp_path)
    assert "pip install" in caught.value.remedy


def test_no_policy_is_better_than_the_oracle_on_any_seed():
    scenario = with_options(load_cluster("quick"), ("fair", "laxity", "crux", "oracle"), 2)
    values = {
        1: {"fair": 100.0, "laxity": 70.0, "crux": 130.0, "oracle": 90.0},
        2: {"fair": 100.0, "laxity": 95.0, "crux": 99.0, "oracle": 80.0},
    }
    runs = [
        run(scenario, policy, seed, value)
        for seed, each in values.items()
        for policy, value in each.items()
    ]
    chosen = {each.seed: each for each in with_best_known(runs) if each.policy == "oracle"}
    assert (chosen[1].order, chosen[1].figures) == ("laxity", runs[1].figures)
    assert (chosen[2].order, chosen[2].figures) == ("first come", runs[7].figures)
    # What its own rules gain is still told.
    assert chosen[1].order_gains == runs[3].order_gains
    assert [each for each in with_best_known(runs) if each.policy != "oracle"] == [
        each for each in runs if each.policy != "oracle"
    ]


def test_without_fair_there_is_nothing_to_choose_the_oracle_by():
    scenario = with_options(load_cluster("quick"), ("laxity", "oracle"), 1)
    runs = (run(scenario, "laxity", 1, 70.0), run(scenario, "oracle", 1, 90.0))
    assert with_best_known(runs) == runs
