from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from controller.errors import UsageError
from controller.sim.cluster.collectives import stages
from controller.sim.cluster.jobs import ALGORITHMS, Bucket, ClusterJob
from controller.sim.cluster.placement import place
from controller.sim.cluster.sharing import Fabric, allocate, max_min
from controller.sim.cluster.topology import LeafSpine
from controller.sim.link import allocate_Bps

FLOOR = 0.05


def instance(seed, jobs_below=9, links_below=8):
    """Usage (links, jobs), capacity, classes, weights and caps of a random network."""
    draw = np.random.default_rng(seed)
    jobs, links = int(draw.integers(2, jobs_below)), int(draw.integers(1, links_below))
    flows = draw.integers(1, 5, (links, jobs)) * (draw.random((links, jobs)) < 0.5)
    # Every job uses a link.
    flows[draw.integers(links, size=jobs), np.arange(jobs)] += 1
    caps = np.where(draw.random(jobs) < 0.3, draw.uniform(1, 40, jobs), math.inf)
    return (
        flows.astype(float),
        draw.uniform(50, 150, links),
        draw.integers(0, 4, jobs),
        draw.uniform(0.5, 3, jobs),
        caps,
    )


def usage_of(flows):
    return [(np.flatnonzero(column), column[column > 0]) for column in flows.T]


def linear_max_min(flows, capacity, weights, caps):
    """Max-min by linear programs: raise the least rate, hold those that it depends on, repeat."""
    jobs = len(weights)
    held = np.where(caps <= 0, 0.0, np.nan)
    while np.isnan(held).any():
        free = np.flatnonzero(np.isnan(held))
        # Unknowns: all rates, then the level t of which each free job has its weight.
        level = np.zeros((len(free), jobs + 1))
        level[np.arange(len(free)), free] = -1
        level[:, -1] = weights[free]
        known = ~np.isnan(held)
        found = linprog(
            [0] * jobs + [-1],
            A_ub=np.vstack((np.column_stack((flows, np.zeros(len(flows)))), level)),
            b_ub=[*capacity, *[0] * len(free)],
            bounds=[
                (value, value) if fixed else (0, None if math.isinf(cap) else cap)
                for fixed, value, cap in zip(known, held, caps, strict=True)
            ]
            + [(0, None)],
        )
        assert found.status == 0
        # A price on "at least the level": the level is all that this job can have.
        price = found.ineqlin.marginals[len(flows) :]
        held[free[price < -1e-9]] = weights[free[price < -1e-9]] * found.x[-1]
    return held


def linear_strict(flows, capacity, classes, weights, caps, kept=None):
    """From the highest class down, each on what those above use and those below have kept."""
    kept = np.zeros(len(weights)) if kept is None else kept
    rates = np.zeros(len(weights))
    for number in sorted(set(classes.tolist()), reverse=True):
        own, below = classes == number, classes < number
        left = capacity - flows[:, ~own] @ np.where(below, kept, rates)[~own]
        rates[own] = linear_max_min(flows[:, own], np.maximum(left, 0), weights[own], caps[own])
    return rates


@pytest.mark.parametrize("seed", range(50))
def test_max_min_rates_are_those_of_the_linear_programs(seed):
    flows, capacity, _, weights, caps = instance(seed)
    expected = linear_max_min(flows, capacity, weights, caps)
    rates = max_min(usage_of(flows), capacity, weights, caps)
    np.testing.assert_allclose(rates, expected, rtol=1e-7)


@pytest.mark.parametrize("seed", range(50))
def test_strict_priority_is_that_of_linear_programs_class_by_class(seed):
    flows, capacity, classes, weights, caps = instance(seed)
    expected = linear_strict(flows, capacity, classes, weights, caps)
    rates = allocate(usage_of(flows), capacity, classes, weights, caps)
    np.testing.assert_allclose(rates, expected, rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize("seed", range(30))
def test_floors_are_kept_for_a_class_where_it_meets_another(seed):
    flows, capacity, classes, weights, caps = instance(seed)
    kept = np.zeros(len(caps))
    # What each can send alone; links that all of it together do not fill hold nobody.
    most = np.minimum(caps, np.min(capacity[:, None] / np.maximum(flows, 1e-9), axis=0))
    fillable = flows @ most > capacity
    for number in set(classes.tolist()):
        own = classes == number
        meets = (flows[:, own].sum(1) > 0) & (flows[:, ~own].sum(1) > 0)
        floors = np.where(meets & fillable, FLOOR, 1) * capacity
        kept[own] = linear_max_min(flows[:, own], floors, weights[own], caps[own])
    expected = linear_strict(flows, capacity, classes, weights, caps, kept)
    left = capacity - flows @ expected
    full = left < 1e-7 * capacity
    grows = (expected < caps * (1 - 1e-7)) & (flows[full].sum(0) == 0)
    if grows.any():
        expected[grows] += linear_strict(
            flows[:, grows], left, classes[grows], weights[grows], (caps - expected)[grows]
        )
    rates = allocate(usage_of(flows), capacity, classes, weights, caps, FLOOR)
    np.testing.assert_allclose(rates, expected, rtol=1e-6, atol=1e-6)


@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.one_of(st.just(math.inf), st.floats(0.01, 200))),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from((0.0, FLOOR, 0.125)),
)
def test_on_one_link_it_is_what_the_simulator_of_one_link_does(jobs, floor_share):
    classes, caps = zip(*jobs, strict=True)
    one = (np.zeros(1, np.int64), np.ones(1))
    rates = allocate([one] * len(jobs), [100.0], classes, None, caps, floor_share)
    np.testing.assert_allclose(
        rates, allocate_Bps(100, floor_share, classes, caps), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("floor_share", [0, FLOOR])
@pytest.mark.parametrize("seed", range(40))
def test_no_link_is_overrun_and_no_job_could_have_more(seed, floor_share):
    flows, capacity, classes, weights, caps = instance(seed + 1000, 60, 40)
    rates = allocate(usage_of(flows), capacity, classes, weights, caps, floor_share)
    load = flows @ rates
    assert (load <= capacity * (1 + 1e-9)).all()
    assert (rates <= caps * (1 + 1e-9)).all()
    full = load >= capacity * (1 - 1e-6)
    assert (flows[full].sum(0)[rates < caps * (1 - 1e-6)] > 0).all()


def test_a_ring_over_a_slow_link_leaves_its_other_links_to_others():
    # Link 0 is slow; job a crosses both, job b the fast one only.
    usage = [(np.array([0, 1]), np.ones(2)), (np.array([1]), np.ones(1))]
    assert max_min(usage, [10.0, 100.0]).tolist() == [10.0, 90.0]


def test_a_job_with_more_flows_on_a_link_gets_more_of_it():
    usage = [(np.array([0]), np.array([3.0])), (np.array([0]), np.array([1.0]))]
    assert max_min(usage, [100.0]).tolist() == [25.0, 25.0]


def test_rates_on_a_full_link_are_as_the_weights():
    usage = [(np.array([0]), np.ones(1))] * 2
    assert max_min(usage, [100.0], [1.0, 3.0]).tolist() == [25.0, 75.0]


def test_what_a_class_keeps_and_cannot_use_goes_back_to_the_classes_above():
    # b and c are of the low class. b keeps 5 of link 0 and 5 of link 1 is c's floor, but b is held
    # at 0.5 by its cap: a gets the rest of link 0.
    one, both = (np.array([0]), np.ones(1)), (np.array([0, 1]), np.ones(2))
    rates = allocate([one, both, one], [100.0, 1.0], [6, 1, 1], None, None, FLOOR)
    assert rates == pytest.approx([95, 1, 4])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("how", ["packed", "spread", "random"])
def test_a_fabric_shares_as_the_links_one_by_one(how, algorithm):
    network = LeafSpine(8, 16, 4, 12.5e9, 12.5e9)
    fabric = Fabric(network)
    draw = np.random.default_rng(5)
    ways = []
    for number, nics in enumerate(place([13, 16, 20, 7, 40, 32], network, how, seed=3)):
        job = ClusterJob(f"job{number}", nics, 1, 1, (Bucket(1, 1),), algorithm)
        steps = stages(job, network, 1e6)
        ways.append([(fabric.register(job.name, s.links, s.flows), s) for s in steps])
    for _ in range(20):
        active = [jobs[draw.integers(len(jobs))] for jobs in ways if draw.random() < 0.7]
        if not active:
            continue
        classes = draw.integers(0, 4, len(active))
        weights = draw.uniform(0.5, 2, len(active))
        rates = fabric.allocate(
            [number for number, _ in active], classes, weights, None, floor_share=FLOOR
        )
        usage = [(step.links, step.flows) for _, step in active]
        dense = allocate(usage, network.capacity_Bps, classes, weights, None, FLOOR)
        np.testing.assert_allclose(rates, dense, rtol=1e-12)
        load = np.zeros(network.links)
        for (links, flows), rate in zip(usage, rates, strict=True):
            load[links] += flows * rate
        assert (load <= network.capacity_Bps * (1 + 1e-9)).all()


def test_alone_a_job_has_what_its_busiest_link_gives_each_of_its_flows():
    fabric = Fabric(LeafSpine(2, 2, 1, 10.0, 30.0))
    number = fabric.register("a", np.array([0, 4]), np.array([1.0, 6.0]))
    assert fabric.allocate([number], [3]).tolist() == [5.0]


def test_a_usage_that_is_known_keeps_its_number_and_new_ones_count_from_then_on():
    fabric = Fabric(LeafSpine(2, 2, 1, 10.0, 10.0))
    first = fabric.register("a", np.array([0, 4]), np.ones(2))
    assert fabric.allocate([first], [3]).tolist() == [10.0]
    assert fabric.register("a", np.array([0, 4]), np.ones(2)) == first
    second = fabric.register("b", np.array([1, 4]), np.ones(2))
    assert fabric.allocate([first, second], [3, 3]).tolist() == [5.0, 5.0]


def test_nobody_active_gets_nothing():
    assert Fabric(LeafSpine(1, 2, 0, 10.0, 10.0)).allocate([], []).size == 0


def test_impossible_allocations_are_refused():
    one = (np.array([0]), np.ones(1))
    with pytest.raises(UsageError, match=r"class is not of 0 .. 7"):
        allocate([one], [10.0], [8])
    with pytest.raises(UsageError, match="so that 8 floors fit"):
        allocate([one], [10.0], [0], floor_share=0.2)
    with pytest.raises(UsageError, match="weight"):
        allocate([one], [10.0], [0], [0.0])
    with pytest.raises(UsageError, match="cap"):
        allocate([one], [10.0], [0], None, [math.nan])
    with pytest.raises(UsageError, match="it has no rate"):
        allocate([(np.zeros(0, np.int64), np.zeros(0))], [10.0], [0])
    with pytest.raises(UsageError, match="number of links"):
        allocate([(np.array([0]), np.ones(2))], [10.0], [0])
    with pytest.raises(UsageError, match=r"not of 0 .. 0"):
        allocate([(np.array([1]), np.ones(1))], [10.0], [0])
    with pytest.raises(UsageError, match="no flow crosses"):
        allocate([(np.array([0]), np.zeros(1))], [10.0], [0])
    with pytest.raises(UsageError, match="capacity"):
        allocate([one], [math.inf], [0])
    with pytest.raises(UsageError, match=r"not as many as usages \(1\)"):
        allocate([one], [10.0], [0, 0])
