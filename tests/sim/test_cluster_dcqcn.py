from __future__ import annotations

import numpy as np
import pytest

from controller.errors import UsageError
from controller.sim.cluster.course import Course
from controller.sim.cluster.dcqcn import DcqcnNetwork, STEP_ns, ring_paths
from controller.sim.cluster.jobs import Bucket, ClusterJob
from controller.sim.cluster.outcome import ClusterConditions
from controller.sim.cluster.topology import LeafSpine
from tests.sim.cluster_mixes import MS, random_cluster, run, windows_ms

LINK_Bps = 12.5e9
TOPOLOGY = LeafSpine(2, 2, 1, LINK_Bps, LINK_Bps)
DCQCN = ClusterConditions(sharing="dcqcn")


def job(name, nics, compute_ms=2, window_ms=2, **more):
    nbytes = round(window_ms * LINK_Bps / 1000)
    return ClusterJob(name, nics, 0.0, compute_ms * MS, (Bucket(1.0, nbytes),), **more)


def test_a_job_alone_sends_at_the_rate_of_its_links():
    outcome = run([job("a", (0, 2))], topology=TOPOLOGY, conditions=DCQCN)
    # A step begins with the next interval, and is over at the end of one.
    interval_ms = 4 * STEP_ns / 1e6
    for window in windows_ms(outcome, "a"):
        assert 2 <= window <= 2 + 2 * interval_ms
    assert outcome.carried_bytes["a"] == pytest.approx(2 * 3 * 0.002 * LINK_Bps)


def test_jobs_that_meet_share_a_link_about_equally():
    jobs = [job(name, nics, 1, 5) for name, nics in (("a", (0, 2)), ("b", (1, 3)))]
    outcome = run(jobs, iterations=4, topology=TOPOLOGY, conditions=DCQCN)
    # Twice the window when rates are equal and the link is full. Flows that begin together at the
    # full rate are cut below their parts first, and need some ms to come back.
    for name in "ab":
        assert 9 < float(np.mean(windows_ms(outcome, name))) < 13
    carried = sum(outcome.carried_bytes.values())
    for links in (slice(0, 4), slice(-4, None)):
        assert outcome.link_bytes[links].sum() == pytest.approx(carried)
    most = TOPOLOGY.capacity_Bps * outcome.end_ns / 1e9
    assert (outcome.link_bytes <= most * 1.001).all()


def test_weights_of_increases_favour_a_job():
    network = DcqcnNetwork([job("a", (0, 2)), job("b", (1, 3))], TOPOLOGY)
    network.weigh(0, 8.0)
    for number in range(2):
        network.load(number, 1e9)
    moved = np.zeros(2)
    for _ in range(1000):
        moved += [network.advance()[number] for number in range(2)]
    assert moved[0] > 1.5 * moved[1]
    assert moved.sum() > 0.75 * LINK_Bps * 1000 * network.interval_ns / 1e9


def test_the_same_seed_gives_the_same_and_another_does_not():
    jobs = [job("a", (0, 2)), job("b", (1, 3))]

    def rows(seed):
        return run(jobs, topology=TOPOLOGY, conditions=DCQCN, seed=seed).iterations

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)


@pytest.mark.parametrize("qps", [1, 3])
def test_flows_have_the_paths_that_their_collectives_are_counted_on(qps):
    topology, jobs = random_cluster(5)
    for each in jobs:
        paths = ring_paths(each, topology, qps, key=9)
        links, counts = np.unique(paths[paths >= 0], return_counts=True)
        stage = Course(each, topology, qps, key=9).steps[0].stage
        assert links.tolist() == stage.links.tolist()
        assert counts.tolist() == stage.flows.tolist()
        # What is missing is at the end.
        assert (np.diff((paths < 0).astype(int), axis=1) >= 0).all()


def test_other_collectives_than_rings_are_refused():
    with pytest.raises(UsageError, match="Job a: algorithm is 'halving-doubling'"):
        run([job("a", (0, 2), algorithm="halving-doubling")], topology=TOPOLOGY, conditions=DCQCN)


def test_jobs_without_traffic_need_no_network():
    outcome = run([job("a", (0,))], topology=TOPOLOGY, conditions=DCQCN)
    assert outcome.end_ns == pytest.approx(3 * 2 * MS)
