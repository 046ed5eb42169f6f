from __future__ import annotations

import pytest

from controller.priority.policies.crux import demand_of
from controller.sim.cluster.course import Course
from controller.sim.cluster.job_run import JobRun
from controller.sim.cluster.jobs import Bucket, ClusterJob
from controller.sim.cluster.topology import LeafSpine
from tests.sim.cluster_mixes import (
    IDEAL,
    MS,
    ONE_SWITCH,
    LINK_Bps,
    run,
    two_rank_job,
    windows_ms,
)


def test_a_share_is_of_the_link_that_is_shared_not_of_what_a_job_could_have():
    # An uplink twice as fast as a NIC has room for both jobs, each paced to half of it.
    topology = LeafSpine(2, 2, 1, LINK_Bps, 2 * LINK_Bps)
    jobs = [two_rank_job(name, 10, 100, nics) for name, nics in (("a", (0, 2)), ("b", (1, 3)))]
    for policy in ("fair", "mltcp"):
        outcome = run(jobs, policy, 3, topology=topology)
        assert windows_ms(outcome, "a") == pytest.approx([100] * 3)


def test_crux_is_told_how_long_traffic_takes_not_how_long_buckets_wait_for_the_backward_pass():
    # 10 ms of traffic in a window of 96 ms: half of it is ready at a tenth of the backward pass.
    half = round(0.005 * LINK_Bps)
    overlapping = ClusterJob("a", (0, 1), 0.0, 101 * MS, (Bucket(0.1, half), Bucket(1.0, half)))
    course = Course(overlapping, ONE_SWITCH, 1, 0)
    view = JobRun(course, IDEAL, 0).view(0.0)
    assert view.traffic_ns == pytest.approx(10 * MS, rel=1e-6)
    assert view.ideal_window_ns == pytest.approx(95.9 * MS, rel=1e-6)
    demand = demand_of(view)
    assert demand.communication_s == pytest.approx(0.010, rel=0.02)
    assert demand.compute_s == pytest.approx(0.096, rel=0.02)
    plain = JobRun(Course(two_rank_job("b", 10, 100), ONE_SWITCH, 1, 0), IDEAL, 0).view(0.0)
    assert plain.traffic_ns == 0
