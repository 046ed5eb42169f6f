from __future__ import annotations

import numpy as np
import pytest

from controller.allreduce.schedule import Algorithm, plan_all_reduce
from controller.errors import UsageError
from controller.sim.cluster.collectives import stages
from controller.sim.cluster.jobs import ALGORITHMS, Bucket, ClusterJob
from controller.sim.cluster.topology import LeafSpine

SWITCH = LeafSpine(1, 32, 0, 1.0, 1.0)
HALVES = LeafSpine(2, 16, 4, 1.0, 1.0)


def job(nics, algorithm="ring", name="job"):
    return ClusterJob(name, tuple(nics), 1, 1, (Bucket(1, 1),), algorithm)


def bytes_on_links(network, steps):
    carried = np.zeros(network.links)
    for step in steps:
        carried[step.links] += step.flows * step.nbytes
    return carried


def test_each_edge_of_a_ring_carries_its_part_of_the_bucket():
    (step,) = stages(job((4, 0, 9)), SWITCH, 300)
    assert step.nbytes == 400
    names = {SWITCH.link_name(link) for link in step.links.tolist()}
    assert names == {f"nic {nic} {way}" for nic in (0, 4, 9) for way in ("up", "down")}
    assert step.flows.tolist() == [1] * 6


def test_halving_doubling_halves_and_doubles():
    steps = stages(job(range(8), "halving-doubling"), SWITCH, 800)
    assert [step.nbytes for step in steps] == [400, 200, 100, 100, 200, 400]


def test_its_largest_parts_go_to_the_nearest_ranks():
    # 8 ranks, 4 at each leaf: only the smallest parts cross, once each way in each half.
    ranks = [*range(4), *range(16, 20)]
    carried = bytes_on_links(HALVES, stages(job(ranks, "halving-doubling"), HALVES, 800))
    ups = [link for link in range(HALVES.links) if HALVES.kind_of(link) == "leaf_up"]
    assert carried[ups].sum() == 8 * 2 * 100


def test_ranks_too_many_hand_over_their_bucket_and_get_the_result():
    steps = stages(job(range(6), "halving-doubling"), SWITCH, 800)
    assert [step.nbytes for step in steps] == [800, 400, 200, 200, 400, 800]
    assert [len(step.links) for step in steps] == [4, 8, 8, 8, 8, 4]
    first = {SWITCH.link_name(link) for link in steps[0].links.tolist()}
    assert first == {"nic 0 up", "nic 1 down", "nic 2 up", "nic 3 down"}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8, 11, 16])
def test_ranks_send_to_each_other_what_the_engine_sends(ranks, algorithm):
    count = ranks * 16
    plans = [
        plan_all_reduce(Algorithm(algorithm), rank, ranks, count, count) for rank in range(ranks)
    ]
    draw = np.random.default_rng(ranks)
    for _ in range(8):
        # Leaves drawn at random: what crosses tells who sends how much to whom.
        nics = draw.permutation(HALVES.nics)[:ranks].tolist()
        carried = bytes_on_links(HALVES, stages(job(nics, algorithm), HALVES, count))
        expected = np.zeros(HALVES.links)
        crossing = 0
        for rank, plan in enumerate(plans):
            for send in plan.sends:
                nbytes = send.stop - send.start
                expected[nics[rank]] += nbytes
                expected[HALVES.path(nics[rank], nics[send.peer], 0)[-1]] += nbytes
                if HALVES.leaf_of(nics[rank]) != HALVES.leaf_of(nics[send.peer]):
                    crossing += nbytes
        edges = [link for link in range(HALVES.links) if HALVES.kind_of(link).startswith("nic")]
        np.testing.assert_allclose(carried[edges], expected[edges])
        for kind in ("leaf_up", "leaf_down"):
            core = [link for link in range(HALVES.links) if HALVES.kind_of(link) == kind]
            assert carried[core].sum() == pytest.approx(crossing)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_more_queue_pairs_carry_the_same_bytes_over_more_paths(algorithm):
    ranks = [*range(0, 4), *range(16, 20)]
    one = stages(job(ranks, algorithm), HALVES, 1000)
    four = stages(job(ranks, algorithm), HALVES, 1000, qps_per_peer=4)
    assert [step.nbytes for step in four] == [step.nbytes / 4 for step in one]
    first, split = bytes_on_links(HALVES, one), bytes_on_links(HALVES, four)
    assert first.sum() == pytest.approx(split.sum())
    np.testing.assert_allclose(first[:32], split[:32])
    assert (split > 0).sum() > (first > 0).sum()


def test_paths_depend_on_the_job_and_the_draw_and_on_nothing_else():
    ranks = [0, 16, 1, 17, 2, 18]
    first, again = stages(job(ranks), HALVES, 10)[0], stages(job(ranks), HALVES, 20)[0]
    assert first.links is again.links
    others = [stages(job(ranks, name=f"job{number}"), HALVES, 10)[0] for number in range(4)]
    others += [stages(job(ranks), HALVES, 10, key=number)[0] for number in range(1, 5)]
    ways = {(*other.links.tolist(), *other.flows.tolist()) for other in (first, *others)}
    assert len(ways) > 5


def test_partners_use_the_same_paths_on_the_way_back():
    steps = stages(job([*range(4), *range(16, 20)], "halving-doubling"), HALVES, 800)
    for step, back in zip(steps[:3], steps[:2:-1], strict=True):
        assert step.links is back.links
        assert step.flows is back.flows


def test_one_rank_sends_nothing():
    assert stages(job([3]), SWITCH, 100) == ()


def test_a_ring_of_two_thousand_nics_has_its_bytes():
    network = LeafSpine(128, 32, 32, 1.0, 1.0)
    for algorithm in ALGORITHMS:
        steps = stages(job(range(2048), algorithm), network, 1 << 30)
        carried = bytes_on_links(network, steps)
        np.testing.assert_allclose(carried[:2048], 2 * 2047 / 2048 * (1 << 30))


def test_impossible_numbers_are_refused():
    with pytest.raises(UsageError, match="queue pairs is 0"):
        stages(job([0, 1]), SWITCH, 10, qps_per_peer=0)
    with pytest.raises(UsageError, match="Bucket has 0 bytes"):
        stages(job([0, 1]), SWITCH, 0)
    with pytest.raises(UsageError, match=r"NIC is 32; allowed: 0 .. 31"):
        stages(job([0, 32]), SWITCH, 10)
