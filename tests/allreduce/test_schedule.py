"""Schedules: right for any number of ranks and order of events, with the bytes of the theory."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.allreduce.schedule import (
    Algorithm,
    Plan,
    choose_algorithm,
    peers,
    plan_all_gather,
    plan_all_reduce,
    plan_barrier,
    plan_broadcast,
    plan_reduce_scatter,
)
from controller.errors import UsageError
from tests.allreduce.interleaving import Hazard, Network, Stuck, add

Array = npt.NDArray[Any]
PlanReduction = Callable[[Algorithm, int, int, int, int], Plan]

SIZES = range(1, 18)
REDUCTIONS = [plan_all_reduce, plan_reduce_scatter, plan_all_gather]

algorithms = pytest.mark.parametrize("algorithm", Algorithm, ids=lambda each: each.value)
sizes = pytest.mark.parametrize("size", SIZES)


def numbers(size: int, count: int, seed: int) -> list[Array]:
    """Integers whose sums are exact, so that each missing or doubled one shows."""
    generator = np.random.default_rng(seed)
    return [generator.integers(-(1 << 40), 1 << 40, count) for _ in range(size)]


def run(plans: Sequence[Plan], buffers: Sequence[Array], seed: int) -> Network:
    choice = random.Random(seed)
    network = Network(
        plans,
        buffers,
        add,
        seed=seed,
        slots=choice.choice((1, 2, 3)),
        strict=choice.random() < 0.3,
    )
    network.run()
    return network


def all_reduce(algorithm: Algorithm, size: int, count: int, chunk: int, seed: int) -> None:
    plans = [plan_all_reduce(algorithm, rank, size, count, chunk) for rank in range(size)]
    buffers = numbers(size, count, seed)
    expected = np.sum(buffers, axis=0)
    run(plans, buffers, seed)
    for buffer in buffers:
        np.testing.assert_array_equal(buffer, expected)


def reduce_scatter(algorithm: Algorithm, size: int, count: int, chunk: int, seed: int) -> None:
    count = -(-count // size)
    plans = [plan_reduce_scatter(algorithm, rank, size, count, chunk) for rank in range(size)]
    buffers = numbers(size, size * count, seed)
    expected = np.sum(buffers, axis=0)
    run(plans, buffers, seed)
    for rank, buffer in enumerate(buffers):
        block = slice(rank * count, (rank + 1) * count)
        np.testing.assert_array_equal(buffer[block], expected[block])


def all_gather(algorithm: Algorithm, size: int, count: int, chunk: int, seed: int) -> None:
    count = -(-count // size)
    plans = [plan_all_gather(algorithm, rank, size, count, chunk) for rank in range(size)]
    expected = numbers(1, size * count, seed)[0]
    buffers = [np.full(size * count, -1) for _ in range(size)]
    for rank, buffer in enumerate(buffers):
        block = slice(rank * count, (rank + 1) * count)
        buffer[block] = expected[block]
    run(plans, buffers, seed)
    for buffer in buffers:
        np.testing.assert_array_equal(buffer, expected)


COLLECTIVES = pytest.mark.parametrize(
    "collective", [all_reduce, reduce_scatter, all_gather], ids=lambda each: each.__name__
)


@COLLECTIVES
@algorithms
@sizes
def test_any_order_of_events_gives_the_result_of_numpy(
    collective: Callable[..., None], algorithm: Algorithm, size: int
) -> None:
    for count in sorted({0, 1, size - 1, size, size + 1}):
        collective(algorithm, size, count, 1 << 20, seed=size + count)
    collective(algorithm, size, 67, max(1, 40 // size), seed=size)


@COLLECTIVES
@settings(max_examples=20)
@given(
    algorithm=st.sampled_from(Algorithm),
    size=st.integers(1, 17),
    count=st.integers(0, 60),
    chunk=st.integers(1, 80),
    seed=st.integers(0, 1 << 30),
)
def test_any_numbers_and_any_order_of_events_give_the_result_of_numpy(
    collective: Callable[..., None],
    algorithm: Algorithm,
    size: int,
    count: int,
    chunk: int,
    seed: int,
) -> None:
    collective(algorithm, size, count, chunk, seed)


@algorithms
@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 13])
def test_floats_have_the_same_bits_on_all_ranks_and_in_all_orders_of_events(
    algorithm: Algorithm, size: int
) -> None:
    generator = np.random.default_rng(size)
    given = [generator.normal(size=101).astype(np.float32) for _ in range(size)]
    plans = [plan_all_reduce(algorithm, rank, size, 101, 11) for rank in range(size)]
    results = set()
    for seed in range(5):
        buffers = [each.copy() for each in given]
        run(plans, buffers, seed)
        results |= {buffer.tobytes() for buffer in buffers}
    assert len(results) == 1


@sizes
def test_a_broadcast_from_any_root_reaches_all_ranks(size: int) -> None:
    for root in {0, 1 % size, size // 2, size - 1}:
        for count, chunk in ((0, 5), (17, 20), (9, 3), (60, 4)):
            plans = [plan_broadcast(rank, size, root, count, chunk) for rank in range(size)]
            buffers = numbers(size, count, root)
            expected = buffers[root].copy()
            run(plans, buffers, seed=root)
            for buffer in buffers:
                np.testing.assert_array_equal(buffer, expected)


def test_a_broadcast_of_one_message_takes_a_tree_and_of_many_a_chain() -> None:
    few = [plan_broadcast(rank, 16, 3, 100, 100) for rank in range(16)]
    many = [plan_broadcast(rank, 16, 3, 10_000, 100) for rank in range(16)]
    assert len({send.peer for send in few[3].sends}) == 4
    assert {send.peer for send in many[3].sends} == {4}
    assert max(len({send.peer for send in plan.sends}) for plan in many) == 1
    # The last of the chain passes nothing on.
    assert not many[2].sends


@sizes
def test_no_rank_leaves_a_barrier_before_all_have_entered(size: int) -> None:
    plans = [plan_barrier(rank, size) for rank in range(size)]
    for seed in range(5):
        buffers = [np.zeros(0) for _ in range(size)]
        assert not run(plans, buffers, seed).done_before_all_began


def test_the_simulated_network_finds_a_rank_that_leaves_too_early() -> None:
    # One step of the barrier alone: only the neighbour is known to have entered.
    first = [
        Plan(plan.sends[:1], plan.receives[:1])
        for plan in (plan_barrier(rank, 8) for rank in range(8))
    ]
    assert any(run(first, [np.zeros(0)] * 8, seed).done_before_all_began for seed in range(50))


def _without_waits(plan: Plan) -> Plan:
    return Plan(
        tuple(replace(send, needs=()) for send in plan.sends),
        tuple(replace(receive, needs=()) for receive in plan.receives),
    )


@algorithms
def test_the_simulated_network_finds_a_plan_that_does_not_wait(algorithm: Algorithm) -> None:
    failures = 0
    for seed in range(20):
        plans = [_without_waits(plan_all_reduce(algorithm, rank, 4, 40, 3)) for rank in range(4)]
        buffers = numbers(4, 40, seed)
        expected = np.sum(buffers, axis=0)
        try:
            Network(plans, buffers, add, seed=seed).run()
        except Hazard:
            failures += 1
        else:
            failures += any((buffer != expected).any() for buffer in buffers)
    assert failures == 20


def test_the_simulated_network_finds_ranks_that_wait_in_a_circle() -> None:
    plans = [plan_barrier(rank, 4) for rank in range(4)]
    last = len(plans[0].receives) - 1
    circle = [
        replace(plan, sends=tuple(replace(send, needs=(last,)) for send in plan.sends))
        for plan in plans
    ]
    with pytest.raises(Stuck):
        Network(circle, [np.zeros(0)] * 4, add, seed=0).run()


def every_plan(size: int, count: int, chunk: int) -> list[list[Plan]]:
    ranks = range(size)
    found = [
        [make(algorithm, rank, size, count, chunk) for rank in ranks]
        for make in REDUCTIONS
        for algorithm in Algorithm
    ]
    found.append([plan_barrier(rank, size) for rank in ranks])
    for root in ranks:
        found.append([plan_broadcast(rank, size, root, count, chunk) for rank in ranks])
    return found


@sizes
def test_the_kth_message_to_a_peer_is_its_kth_from_this_rank(size: int) -> None:
    for plans in every_plan(size, 23, 4):
        sent = sorted(
            (rank, send.peer, send.index, send.start, send.stop, send.direct)
            for rank, plan in enumerate(plans)
            for send in plan.sends
        )
        received = sorted(
            (each.peer, rank, each.index, each.start, each.stop, not each.reduce)
            for rank, plan in enumerate(plans)
            for each in plan.receives
        )
        assert sent == received
        for plan in plans:
            for messages in (plan.sends, plan.receives):
                for peer in {each.peer for each in messages}:
                    indices = [each.index for each in messages if each.peer == peer]
                    assert indices == list(range(len(indices)))


@sizes
def test_no_message_is_longer_than_a_chunk_or_outside_the_buffer(size: int) -> None:
    for plans in every_plan(size, 23, 4):
        for plan in plans:
            for send in plan.sends:
                assert 0 <= send.start <= send.stop <= size * 23
                assert send.stop - send.start <= 4


@sizes
def test_a_rank_only_talks_to_its_peers(size: int) -> None:
    for plans in every_plan(size, 23, 4):
        for rank, plan in enumerate(plans):
            used = {each.peer for each in (*plan.sends, *plan.receives)}
            assert used <= set(peers(rank, size))


def test_peers_are_mutual_and_few() -> None:
    for size in range(1, 140):
        known = [set(peers(rank, size)) for rank in range(size)]
        for rank, found in enumerate(known):
            assert rank not in found
            assert all(rank in known[peer] for peer in found)
            assert len(found) <= 3 * (size - 1).bit_length() + 1


def elements_sent(plan: Plan) -> int:
    return sum(send.stop - send.start for send in plan.sends)


@sizes
def test_a_ring_sends_two_times_n_minus_1_of_n_shares_at_every_rank(size: int) -> None:
    count = 10 * size
    for rank in range(size):
        plan = plan_all_reduce(Algorithm.RING, rank, size, count, 5)
        assert elements_sent(plan) == 2 * (size - 1) * count // size
        assert len(plan.sends) == 2 * (size - 1) * 2
        for make in (plan_reduce_scatter, plan_all_gather):
            assert elements_sent(make(Algorithm.RING, rank, size, 10, 5)) == (size - 1) * 10


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32])
def test_halving_doubling_sends_as_much_as_a_ring_in_twice_log2_n_messages(size: int) -> None:
    count = 10 * size
    for rank in range(size):
        plan = plan_all_reduce(Algorithm.HALVING_DOUBLING, rank, size, count, count)
        assert elements_sent(plan) == 2 * (size - 1) * count // size
        assert len(plan.sends) == 2 * (size.bit_length() - 1)
        for make in (plan_reduce_scatter, plan_all_gather):
            plan = make(Algorithm.HALVING_DOUBLING, rank, size, 10, count)
            assert elements_sent(plan) == (size - 1) * 10
            assert len(plan.sends) == size.bit_length() - 1


@pytest.mark.parametrize("size", [3, 5, 6, 7, 9, 13])
def test_ranks_beyond_a_power_of_two_cost_one_message_each_way(size: int) -> None:
    members = 1 << (size.bit_length() - 1)
    count = 8 * members
    for rank in range(size):
        plan = plan_all_reduce(Algorithm.HALVING_DOUBLING, rank, size, count, count)
        exchange = 2 * (members - 1) * count // members
        if rank >= 2 * (size - members):
            assert elements_sent(plan) == exchange
        elif rank % 2:
            assert elements_sent(plan) == exchange + count
            assert len(plan.sends) == 2 * (members.bit_length() - 1) + 1
        else:
            assert [elements_sent(plan), len(plan.sends), len(plan.receives)] == [count, 1, 1]


@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_ring_passes_each_chunk_on_as_soon_as_it_has_it(size: int) -> None:
    plan = plan_all_reduce(Algorithm.RING, 1, size, 1000 * size, 100)
    first = [send for send in plan.sends if not send.needs]
    assert len(first) == 10
    for send in plan.sends[10:]:
        (need,) = send.needs
        receive = plan.receives[need]
        assert (receive.start, receive.stop) == (send.start, send.stop)


@algorithms
def test_an_element_is_reduced_from_size_minus_1_messages_in_all(algorithm: Algorithm) -> None:
    for size in SIZES:
        reduced = np.zeros(50, int)
        for rank in range(size):
            for receive in plan_all_reduce(algorithm, rank, size, 50, 7).receives:
                reduced[receive.start : receive.stop] += receive.reduce
        np.testing.assert_array_equal(reduced, size - 1)


def test_one_rank_has_nothing_to_do() -> None:
    for plans in every_plan(1, 100, 7):
        assert plans == [Plan((), ())]


def test_small_operations_of_many_ranks_are_halved_and_large_ones_go_round() -> None:
    assert choose_algorithm(8, 1024) is Algorithm.HALVING_DOUBLING
    assert choose_algorithm(7, 1024) is Algorithm.HALVING_DOUBLING
    assert choose_algorithm(8, 64 << 20) is Algorithm.RING
    assert choose_algorithm(7, 64 << 20) is Algorithm.RING
    for nbytes in (0, 1024, 64 << 20):
        # A fold costs two ranks more than the ring's third has to do.
        assert choose_algorithm(3, nbytes) is Algorithm.RING
        assert choose_algorithm(2, nbytes) is Algorithm.RING
        assert choose_algorithm(1, nbytes) is Algorithm.RING


def test_numbers_out_of_range_are_refused_by_name() -> None:
    ring = Algorithm.RING
    for make in REDUCTIONS:
        with pytest.raises(UsageError, match="Rank is 4; allowed: 0 "):
            make(ring, 4, 4, 10, 1)
        with pytest.raises(UsageError, match="Chunk is 0"):
            make(ring, 0, 4, 10, 0)
        with pytest.raises(UsageError, match="elements is -1"):
            make(ring, 0, 4, -1, 1)
        with pytest.raises(UsageError, match="ranks is 0"):
            make(ring, 0, 0, 1, 1)
    with pytest.raises(UsageError, match="Root is 5"):
        plan_broadcast(0, 5, 5, 10, 1)
    with pytest.raises(UsageError, match="Rank is -1"):
        peers(-1, 3)
    with pytest.raises(UsageError, match="Rank is 3"):
        plan_barrier(3, 3)
