"""The scenarios that come with the package."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from controller.lab.build import build
from controller.lab.kinds import CLUSTER, builtins, load_cluster
from controller.sim.cluster.course import Course
from controller.sim.cluster.jobs import RING
from controller.workload.mixes import MIXES
from tests.lab_cluster.files import load

DOCS = Path(__file__).resolve().parents[2] / "docs/simulation.md"
NAMES = [found.name for found in builtins().values() if found.kind == CLUSTER]
MIXES_256 = ("steady-equal", "mixed-models", "many-small", "few-large", "bursty")


@pytest.mark.parametrize("name", NAMES)
def test_a_built_in_scenario_can_be_built(name):
    scenario = load_cluster(name)
    setup = build(scenario, 1)
    assert len(setup.jobs) == scenario.job_count
    assert set(setup.until) == {job.name for job in setup.jobs}


@pytest.mark.parametrize("name", MIXES_256)
def test_mixes_of_256_nics_are_full_and_leave_room_on_every_link(name):
    scenario = load_cluster(name)
    fabric = scenario.network.fabric
    assert (fabric.leaves, fabric.nics_per_leaf, scenario.seeds >= 10) == (16, 16, True)
    assert sum(spec.nics * spec.count for spec in scenario.jobs) == 256
    for seed in (1, 2):
        core = build(scenario, seed).link_load[fabric.nics : -fabric.nics]
        # Jobs contend, and no link is asked for more than it has.
        assert 0.25 < np.mean(core) < 0.6
        assert 0.6 < np.max(core) < 1.0


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("lab-")])
def test_lab_scenarios_are_the_mixes_that_run_on_soft_roce(name):
    scenario, mix = load_cluster(name), MIXES[name.removeprefix("lab-")]
    fabric = scenario.network.fabric
    assert (fabric.nics, fabric.nic_Bps, scenario.network.share_nics) == (3, 1.5e6, True)
    assert scenario.start == mix.start
    assert [spec.name for spec in scenario.jobs] == [job.name for job in mix.jobs]
    for placed, spec, job in zip(build(scenario, 1).jobs, scenario.jobs, mix.jobs, strict=True):
        alone = Course(placed, fabric).undisturbed([1.0])
        assert spec.jitter == mix.jitter and placed.algorithm == RING
        assert alone.window_ns[0] == pytest.approx(job.window_ns, rel=1e-4)
        assert alone.duration_ns[0] == pytest.approx(job.period_ns, rel=1e-4)
        assert placed.traffic_class == job.traffic_class
        assert placed.max_slowdown == job.max_slowdown


def test_the_manual_names_every_built_in_cluster_scenario():
    text = DOCS.read_text()
    assert [name for name in NAMES if f"`{name}`" not in text] == []


def test_the_example_of_the_manual_can_be_built(tmp_path):
    (example,) = re.findall(r"```toml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    setup = build(load(tmp_path, example), 1)
    assert [job.name for job in setup.jobs] == ["bert-1", "bert-2", "bert-3", "mine"]
