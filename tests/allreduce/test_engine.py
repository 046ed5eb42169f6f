"""The engine on queue pairs in memory: every plan, adverse orders, peers that break the rules."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from controller.allreduce import schedule, wire
from controller.allreduce.engine import Engine
from controller.allreduce.errors import (
    ClosedError,
    CollectiveError,
    MismatchError,
    PeerError,
    ProtocolError,
    StallError,
)
from controller.allreduce.link import CONTROL, Link, Range, memory_needed
from controller.allreduce.operation import Handle, Operation, Work
from controller.allreduce.schedule import Algorithm, Plan
from controller.allreduce.wire import Description
from controller.verbs.queue_pair import Timing
from tests.allreduce import fabric as fabrics
from tests.allreduce.fabric import Fabric

CHUNK_NBYTES = 4096
EMPTY = np.empty(0, np.uint8)
CLASSES = {0: 0, 5: 160}
RING = Algorithm.RING


class Group:
    """Engines of all ranks in one process."""

    def __init__(self, size: int, *, tokens: int = 4, timeout_s: float = 60, seed: int = 1) -> None:
        self.size, self.tokens = size, tokens
        self.fabric = Fabric(seed)
        self.classes = [0] * size
        self.sequences = itertools.count()
        self.links: list[dict[int, Link]] = []
        self.completions = [fabrics.Completions() for _ in range(size)]
        self.devices = [fabrics.Device(self.fabric) for _ in range(size)]
        self.aborts: list[tuple[int, dict[str, Any]]] = []
        self.kept: list[np.ndarray] = []
        nbytes = memory_needed(tokens, CHUNK_NBYTES, len(CLASSES))
        for rank in range(size):
            links = {}
            for peer in schedule.peers(rank, size):
                memory, view = self.registered(nbytes)
                links[peer] = Link(
                    self.devices[rank], self.completions[rank], peer, CLASSES, 224, tokens,
                    CHUNK_NBYTES, memory, view,
                )  # type: ignore[arg-type] # fmt: skip
            self.links.append(links)
        for rank, peers in enumerate(self.links):
            for peer, link in peers.items():
                link.connect(self.links[peer][rank].to_json(), Timing())
        self.engines = [
            Engine(
                self.devices[rank],
                self.completions[rank],
                list(self.links[rank].values()),
                rank=rank,
                size=size,
                describe=lambda ours, theirs: f"{ours.count} here, {theirs.count} there",
                class_in_force=lambda rank=rank: self.classes[rank],
                abort=lambda reason, rank=rank: self.abort(rank, reason),
                timeout_s=timeout_s,
            )  # type: ignore[arg-type,misc]
            for rank in range(size)
        ]

    def registered(self, nbytes: int) -> tuple[Range, np.ndarray]:
        view = np.zeros(max(1, nbytes), np.uint8)
        self.kept.append(view)
        address = view.ctypes.data
        key = self.fabric.memory.register(address, nbytes)
        return Range(address, nbytes, key, key), view

    def abort(self, rank: int, reason: dict[str, Any]) -> None:
        """As the control channel does: all others hear of it."""
        self.aborts.append((rank, reason))
        for other, engine in enumerate(self.engines):
            if other != rank:
                engine.depart(SimpleNamespace(rank=rank, kind="abort", reason=reason))

    def operation(
        self, rank: int, plan: Plan, array: np.ndarray, sequence: int, **changes: Any
    ) -> Operation:
        if array.nbytes:
            address = array.ctypes.data
            key = self.fabric.memory.register(address, array.nbytes)
            memory: Range | None = Range(address, array.nbytes, key, key)
        else:
            memory = None

        def add(accumulator: np.ndarray, incoming: np.ndarray) -> None:
            np.add(accumulator, incoming, out=accumulator)

        fields = {
            "sequence": sequence, "collective": 1, "op": 0, "dtype": 2, "algorithm": 1,
            "compression": 0, "root": 0, "size": self.size, "count": array.size, "chunk": 16,
            "address": memory.address if memory else 0, "rkey": memory.rkey if memory else 0,
        } | changes  # fmt: skip
        ring = {(rank - 1) % self.size, (rank + 1) % self.size} - {rank}
        peers = {message.peer for message in (*plan.sends, *plan.receives)}
        return Operation(
            "test", Description(**fields), plan, Work(array, memory, add), frozenset(ring | peers)
        )

    def start(
        self, rank: int, plan: Plan, array: np.ndarray, sequence: int, **changes: Any
    ) -> Handle:
        operation = self.operation(rank, plan, array, sequence, **changes)
        self.engines[rank].reserve()
        self.engines[rank].submit(operation)
        return Handle(operation)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.fabric.close()
        for completions in self.completions:
            completions.close()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    fabrics.use(monkeypatch)
    made: list[Group] = []

    def make(size: int, **options: Any) -> Group:
        made.append(Group(size, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("algorithm", list(Algorithm))
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 8])
def test_all_reduce_is_right_for_any_number_of_ranks_and_as_few_as_two_tokens(
    group: Any, size: int, algorithm: Algorithm
) -> None:
    ranks = group(size, tokens=2, seed=size)
    for sequence, count in enumerate((1, 7, 1000, 3001)):
        arrays = [np.arange(count, dtype=np.int64) * (rank + 1) for rank in range(size)]
        handles = [
            ranks.start(
                rank, schedule.plan_all_reduce(algorithm, rank, size, count, 64), arrays[rank],
                sequence,
            )
            for rank in range(size)
        ]  # fmt: skip
        for handle in handles:
            handle.wait(20)
        want = np.arange(count, dtype=np.int64) * (size * (size + 1) // 2)
        for array in arrays:
            np.testing.assert_array_equal(array, want)
        assert all(handle.progress.fraction == 1.0 for handle in handles)
    assert ranks.fabric.problems == []


def test_thirty_operations_in_flight_started_at_different_times_all_end_right(group: Any) -> None:
    size, operations, count = 4, 30, 700
    ranks = group(size, tokens=2)
    arrays = [
        [np.full(count, rank + k, np.int64) for k in range(operations)] for rank in range(size)
    ]
    results: list[list[Handle]] = [[] for _ in range(size)]

    def run(rank: int) -> None:
        for k in range(operations):
            algorithm = list(Algorithm)[k % 2]
            plan = schedule.plan_all_reduce(algorithm, rank, size, count, 64)
            results[rank].append(ranks.start(rank, plan, arrays[rank][k], k))
            time.sleep(0.002 * rank)
            if k == 10 and rank == 2:
                results[rank][0].wait(20)  # others are ahead by ten and more

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(size):
        for k in reversed(range(operations)):
            results[rank][k].wait(20)
            np.testing.assert_array_equal(arrays[rank][k], sum(range(size)) + size * k)
    assert ranks.fabric.problems == []


def test_a_rank_may_run_ahead_of_one_that_only_receives(group: Any) -> None:
    """A broadcast's root needs no answer: nothing but tokens holds it back."""
    ranks = group(2, tokens=4)
    count, operations = 10, 200
    out = [np.zeros(count, np.int64) for _ in range(operations)]
    done = []

    def root() -> None:
        for k in range(operations):
            plan = schedule.plan_broadcast(0, 2, 0, count, 64)
            ranks.start(0, plan, np.full(count, k), k).wait(20)
        done.append(True)

    thread = threading.Thread(target=root)
    thread.start()
    time.sleep(0.05)
    for k in range(operations):
        plan = schedule.plan_broadcast(1, 2, 0, count, 64)
        ranks.start(1, plan, out[k], k).wait(20)
        np.testing.assert_array_equal(out[k], k)
    thread.join(20)
    assert done
    assert ranks.fabric.problems == []


def test_messages_take_the_class_in_force_when_they_leave(group: Any) -> None:
    ranks = group(2)
    arrays = [np.ones(5000, np.int64) for _ in range(2)]
    for sequence, number in enumerate((0, 5)):
        ranks.classes = [number, number]
        before = {
            n: ranks.links[0][1].queue_pairs[n].posted for n in (CONTROL, *CLASSES)
        }  # fmt: skip
        plans = [schedule.plan_all_reduce(RING, rank, 2, 5000, 512) for rank in range(2)]
        handles = [ranks.start(rank, plans[rank], arrays[rank], sequence) for rank in range(2)]
        for handle in handles:
            handle.wait(20)
        moved = {n: ranks.links[0][1].queue_pairs[n].posted - count for n, count in before.items()}
        other = 5 - number
        assert moved[number] == len(plans[0].sends)
        assert moved[other] == 0
        assert moved[CONTROL] >= 1
    pairs = ranks.links[0][1].queue_pairs
    assert [pairs[n].traffic_class for n in (CONTROL, 0, 5)] == [224, 0, 160]


def test_a_class_that_changes_all_the_time_breaks_nothing(group: Any) -> None:
    ranks = group(3, tokens=3, seed=9)
    stop = threading.Event()

    def change() -> None:
        for number in itertools.cycle((0, 5)):
            ranks.classes = [number] * 3
            if stop.wait(0.0002):
                return

    thread = threading.Thread(target=change)
    thread.start()
    for sequence in range(10):
        arrays = [np.arange(4000, dtype=np.int64) for _ in range(3)]
        handles = [
            ranks.start(
                rank, schedule.plan_all_reduce(RING, rank, 3, 4000, 100), arrays[rank], sequence
            )
            for rank in range(3)
        ]
        for handle in handles:
            handle.wait(20)
        for array in arrays:
            np.testing.assert_array_equal(array, 3 * np.arange(4000))
    stop.set()
    thread.join()
    assert ranks.fabric.problems == []


def barrier(ranks: Group, rank: int, sequence: int, **changes: Any) -> Handle:
    plan = schedule.plan_barrier(rank, ranks.size)
    return ranks.start(rank, plan, EMPTY, sequence, **changes)


def error_of(handle: Handle, kind: type[CollectiveError]) -> CollectiveError:
    with pytest.raises(kind) as caught:
        handle.wait(20)
    return caught.value


def test_ranks_that_disagree_all_get_an_error_that_says_about_what(group: Any) -> None:
    ranks = group(4)
    errors: dict[int, CollectiveError] = {}

    def body(ranks: Group, rank: int) -> None:
        with pytest.raises(MismatchError) as caught:
            barrier(ranks, rank, 0, count=5 + (rank == 2)).wait(20)
        errors[rank] = caught.value

    together(ranks, body)
    for error in errors.values():
        assert "5 here, 6 there" in str(error) or "6 here, 5 there" in str(error)
    with pytest.raises(MismatchError):
        barrier(ranks, 0, 1)


def test_a_rank_that_does_not_call_is_named_by_the_others_when_their_time_is_over(
    group: Any,
) -> None:
    ranks = group(3, timeout_s=0.5)
    begin = time.monotonic()
    handles = [barrier(ranks, rank, 0) for rank in (0, 2)]
    for handle in handles:
        error = error_of(handle, StallError)
        assert error.rank == 1
        assert "rank 1: has not called it" in str(error)
    assert 0.5 <= time.monotonic() - begin < 10


def test_wait_with_a_timeout_leaves_the_operation_running(group: Any) -> None:
    ranks = group(2)
    first = barrier(ranks, 0, 0)
    with pytest.raises(TimeoutError, match="it goes on"):
        first.wait(0.05)
    assert not first.test()
    second = barrier(ranks, 1, 0)
    first.wait(20)
    second.wait(20)
    assert first.test()


def test_a_work_request_that_fails_names_its_peer_and_status_on_all_ranks(group: Any) -> None:
    ranks = group(3)
    handles = [barrier(ranks, rank, 0) for rank in (0, 2)]
    ranks.links[0][1].queue_pairs[0].fail()
    for handle in handles:
        error = error_of(handle, PeerError)
        assert error.rank == 1
        assert error.status == "WR_FLUSH_ERR"


def test_a_port_that_goes_down_ends_the_operation(group: Any) -> None:
    ranks = group(2)
    ranks.devices[0].active = False
    handle = barrier(ranks, 0, 0)
    error = error_of(handle, PeerError)
    assert "went down" in str(error)
    assert error.rank == 0


@pytest.mark.parametrize(("kind", "text"), [("died", "is gone"), ("left", "has closed")])
def test_a_rank_that_is_gone_ends_what_needs_it(group: Any, kind: str, text: str) -> None:
    ranks = group(3)
    handle = barrier(ranks, 0, 0)
    ranks.engines[0].depart(SimpleNamespace(rank=1, kind=kind, reason={}))
    error = error_of(handle, PeerError)
    assert text in str(error)
    assert error.rank == 1


def test_a_rank_that_left_after_its_last_operation_disturbs_nobody_who_does_not_need_it(
    group: Any,
) -> None:
    ranks = group(2)
    handles = [barrier(ranks, rank, 0) for rank in range(2)]
    for handle in handles:
        handle.wait(20)
    ranks.engines[0].depart(SimpleNamespace(rank=1, kind="left", reason={}))
    time.sleep(0.05)
    assert ranks.engines[0].error is None
    error_of(barrier(ranks, 0, 1), PeerError)


def test_closing_fails_what_is_in_flight_and_refuses_what_comes_later(group: Any) -> None:
    ranks = group(2)
    handle = barrier(ranks, 0, 0)
    ranks.engines[0].close()
    error_of(handle, ClosedError)
    with pytest.raises(ClosedError):
        barrier(ranks, 0, 1)
    assert ranks.aborts == []


def test_buffers_are_released_only_after_no_peer_can_write_into_them(group: Any) -> None:
    ranks = group(2)
    array = np.zeros(1000, np.int64)
    plan = schedule.plan_all_reduce(RING, 0, 2, 1000, 64)
    operation = ranks.operation(0, plan, array, 0)
    broken: list[bool] = []
    pairs = list(ranks.links[0][1].queue_pairs.values())
    work = operation.work
    operation.work = Work(
        work.array, work.memory, work.reduce, None,
        lambda: broken.extend(pair.broken for pair in pairs),
    )  # fmt: skip
    ranks.engines[0].reserve()
    ranks.engines[0].submit(operation)
    ranks.engines[0].depart(SimpleNamespace(rank=1, kind="died", reason={}))
    error_of(Handle(operation), PeerError)
    assert broken == [True] * 3


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("garbage", "a control message"),
        ("credits", "credits 0x1 that it does not owe"),
        ("wild credits", "credits 0x80000000"),
        ("future", "a description of operation 100000"),
        ("token", "with token 31"),
        ("index", "message 77 of test"),
        ("length", "24 bytes in message 0"),
    ],
)
def test_a_peer_that_breaks_the_protocol_ends_the_communicator_with_its_name(
    group: Any, what: str, text: str
) -> None:
    ranks = group(2)
    link = ranks.links[1][0]  # of rank 1, towards rank 0
    description = ranks.operation(1, schedule.plan_barrier(1, 2), EMPTY, 0).description
    source, _ = ranks.registered(4096)

    def data(token: int, index: int, nbytes: int) -> None:
        link.send_control(description.pack())
        link.post_data(
            0, 0, (source.address, nbytes, source.lkey), link.remote_slot(0),
            wire.pack_immediate(token, 0, index),
        )  # fmt: skip

    handle = barrier(ranks, 0, 0)
    if what == "garbage":
        link.send_control(b"\xff" * 40)
    elif what == "credits":
        link.send_control(wire.pack_credits(1 << 0))
    elif what == "wild credits":
        link.send_control(wire.pack_credits(1 << 31))
    elif what == "future":
        future = ranks.operation(1, schedule.plan_barrier(1, 2), EMPTY, 100_000).description
        link.send_control(future.pack())
    elif what == "token":
        data(31, 0, 0)
    elif what == "index":
        data(0, 77, 0)
    else:
        data(0, 0, 24)
    error = error_of(handle, ProtocolError)
    assert text in str(error)
    assert error.rank == 1


def test_the_rank_that_hangs_is_named_by_all_and_not_the_one_next_to_it(group: Any) -> None:
    """In a ring of five everybody waits for a neighbour; only one of them waits for nobody."""
    ranks = group(5, timeout_s=1.5)
    arrays = [np.ones(1000, np.int64) for _ in range(5)]
    handles = [
        ranks.start(rank, schedule.plan_all_reduce(RING, rank, 5, 1000, 64), arrays[rank], 0)
        for rank in range(5)
        if rank != 3
    ]
    for handle in handles:
        error = error_of(handle, StallError)
        assert error.rank == 3, str(error)
        assert error.waiting_for == (3,)  # type: ignore[attr-defined]
        assert "rank 3: has not called it" in str(error)


def together(ranks: Group, body: Any) -> None:
    """Run a program of one thread a rank; it gets the group and its rank."""
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            body(ranks, rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not failures, failures
    assert ranks.fabric.problems == []


def test_many_short_operations_may_pass_a_long_one(group: Any) -> None:
    """A hundred others complete while the oldest still runs: no message is taken for another's."""

    def body(ranks: Group, rank: int) -> None:
        large = np.full(16 * 20_000, rank, np.int32)
        plan = schedule.plan_broadcast(rank, 2, 0, large.size, 16)
        handle = ranks.start(rank, plan, large, 0)
        for number in range(1, 100):
            small = np.full(4, number * (1 + rank), np.int32)
            plan = schedule.plan_broadcast(rank, 2, 1, 4, 16)
            ranks.start(rank, plan, small, number, root=1).wait(60)
            assert (small == 2 * number).all()
        handle.wait(60)
        assert not large.any()

    together(group(2, tokens=8), body)


def test_a_rank_that_comes_late_to_many_broadcasts_breaks_nothing(group: Any) -> None:
    def body(ranks: Group, rank: int) -> None:
        if rank == 3:
            time.sleep(1.0)
        arrays = [np.full(48, number * (rank == 0), np.int32) for number in range(120)]
        handles = [
            ranks.start(rank, schedule.plan_broadcast(rank, 4, 0, 48, 16), array, number)
            for number, array in enumerate(arrays)
        ]
        for number, handle in enumerate(handles):
            handle.wait(30)
            assert (arrays[number] == number).all()

    together(group(4, tokens=8), body)


def test_later_operations_leave_a_token_to_the_oldest(group: Any) -> None:
    """What they send may wait at the peer for a rank that waits for the oldest."""

    def body(ranks: Group, rank: int) -> None:
        if rank == 3:
            time.sleep(0.3)
        large = np.ones(16 * 8 * 4, np.int32)
        handles = [
            ranks.start(rank, schedule.plan_all_reduce(RING, rank, 4, large.size, 16), large, 0)
        ]
        if rank == 3:
            handles[0].wait(30)
        smalls = [np.ones(16, np.int32) for _ in range(12)]
        for number, small in enumerate(smalls, start=1):
            plan = schedule.plan_reduce_scatter(Algorithm.HALVING_DOUBLING, rank, 4, 4, 16)
            handles.append(ranks.start(rank, plan, small, number, count=4))
        for handle in handles:
            handle.wait(30)
        assert (large == 4).all()
        assert all((small[4 * rank : 4 * rank + 4] == 4).all() for small in smalls)

    together(group(4, tokens=8), body)


def test_a_release_that_fails_leaves_nobody_waiting(group: Any) -> None:
    ranks = group(2)
    plan = schedule.plan_barrier(0, 2)
    operation = ranks.operation(0, plan, EMPTY, 0)

    def refuse() -> None:
        raise ValueError("the pool is closed")

    operation.work = Work(EMPTY, None, None, None, refuse)
    ranks.engines[0].reserve()
    ranks.engines[0].submit(operation)
    barrier(ranks, 1, 0).wait(20)
    Handle(operation).wait(20)


def test_a_result_that_cannot_be_used_ends_the_operation_with_the_reason(group: Any) -> None:
    ranks = group(2)
    operation = ranks.operation(0, schedule.plan_barrier(0, 2), EMPTY, 0)

    def refuse() -> None:
        raise ValueError("indices are not rising")

    operation.work = Work(EMPTY, None, None, refuse)
    ranks.engines[0].reserve()
    ranks.engines[0].submit(operation)
    barrier(ranks, 1, 0)
    error = error_of(Handle(operation), CollectiveError)
    assert "indices are not rising" in str(error)
    with pytest.raises(CollectiveError, match="indices are not rising"):
        barrier(ranks, 0, 1).wait(20)


def test_who_waits_for_room_hears_of_a_failure(group: Any) -> None:
    ranks = group(2)
    for number in range(wire.max_in_flight(2)):
        barrier(ranks, 0, number)
    heard: list[BaseException] = []

    def wait() -> None:
        try:
            ranks.engines[0].reserve()
        except CollectiveError as error:
            heard.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert not heard
    ranks.engines[0].depart(SimpleNamespace(rank=1, kind="died", reason={}))
    for thread in threads:
        thread.join(20)
    assert [type(error) for error in heard] == [PeerError] * 3
