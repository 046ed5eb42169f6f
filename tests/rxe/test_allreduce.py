"""The AllReduce engine on real queue pairs: every op, type and algorithm against numpy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from controller.agent.client import take_snapshot
from controller.agent.state import RunDirectory
from controller.allreduce.reduction import DType
from controller.observe.snapshot import flow_rows
from tests.hosts import Controller
from tests.rxe.ranks import run_ranks
from tests.rxe.scenarios import ALGORITHMS, OPS, combinations
from tests.rxe.verbs import RxeHost, Switch, poll, rxe_switched

# 0 and 1 elements, fewer than ranks, a chunk of 8192 bytes less one, exactly, and more, and sizes
# that no number of ranks divides.
COUNTS = [0, 1, 3, 2047, 6007]


@pytest.fixture(scope="module")
def eight(rxe_kernel: None) -> Iterator[tuple[Switch, list[RxeHost]]]:
    """Eight hosts with soft-RoCE around a switch."""
    with rxe_switched(8) as (switch, hosts):
        switch.keep_order(hosts)
        yield switch, hosts


def test_the_combinations_for_other_numbers_of_ranks_hold_every_pair() -> None:
    rows = combinations(COUNTS, every=False)
    for one, other in itertools.combinations(range(4), 2):
        values = [ALGORITHMS, OPS, DType, COUNTS]
        pairs = set(itertools.product(values[one], values[other]))
        assert {(row[one], row[other]) for row in rows} == pairs


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_every_op_type_and_algorithm_equals_numpy_and_all_ranks_have_the_same_bits(
    eight: tuple[Switch, list[RxeHost]], size: int
) -> None:
    """Every combination on three ranks; every pair on others: they add no code but the schedule."""
    arguments = {"counts": COUNTS, "seed": size, "every": size == 3}
    answers = run_ranks(eight[1][:size], "combined", arguments, 240)
    for answer in answers:
        assert answer["wrong"] == []
        assert answer["operations"] == 2 * len(combinations(COUNTS, size == 3))
    assert len({answer["digest"] for answer in answers}) == 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_reduce_scatter_all_gather_and_broadcast_equal_numpy_and_a_barrier_holds(
    eight: tuple[Switch, list[RxeHost]], size: int
) -> None:
    answers = run_ranks(eight[1][:size], "collectives", {"counts": [0, 1, 1001, 5000], "seed": 3})
    for answer in answers:
        assert answer["wrong"] == []
    last_in = max(answer["entered_ns"] for answer in answers)
    assert all(answer["left_ns"] > last_in for answer in answers)


def test_a_thousand_operations_of_random_size_ten_in_flight_have_no_wrong_element(
    eight: tuple[Switch, list[RxeHost]],
) -> None:
    # More of them: `controller bench allreduce --random`.
    arguments = {"operations": 1000, "seed": 11, "in_flight": 10}
    for answer in run_ranks(eight[1][:3], "random_operations", arguments, 300):
        assert answer["wrong"] == []
        assert answer["operations"] == 1000


def test_compressed_sums_are_the_same_on_all_ranks_and_tell_their_ratio(
    eight: tuple[Switch, list[RxeHost]],
) -> None:
    answers = run_ranks(eight[1][:3], "compressed", {"count": 50_000})
    for answer in answers:
        assert answer["cast_exact"]
        assert answer["topk_error"] < 1e-5
        assert answer["ratios"]["float16"] == 0.5
        assert 0 < answer["ratios"]["top_k"] < 0.1
    assert len({answer["digest"] for answer in answers}) == 1


def test_messages_leave_on_the_queue_pair_of_the_class_that_the_controller_gives(
    eight: tuple[Switch, list[RxeHost]], controller: Controller
) -> None:
    """The controller says which class; what the observer sees is what left each queue pair."""
    hosts = eight[1][:2]
    path = controller.run_dir.parent / "controller.toml"
    # No flow matches the rule: the kernel path leaves them alone, the verbs path must do it.
    path.write_text('[[job]]\nname = "train"\nclass = 6\nmatch = {qpn = 16777214}\n')
    controller.start(*(host.target for host in hosts), extra=("--config", str(path)))
    arguments = {"job": "train", "run_dir": str(controller.run_dir), "class_then": 0}
    answers = run_ranks(hosts, "classed_by_controller", arguments)
    dscps = {0: 8, 6: 40}
    rows = {
        (row["interface"], row["dqpn"]): row
        for row in flow_rows(take_snapshot(RunDirectory(controller.run_dir)))
        if row["direction"] == "ingress"
    }
    for answer, host in zip(answers, hosts, strict=True):
        assert answer["wrong"] == 0
        assert answer["classes_seen"] == [6, 0]
        for number, dscp in dscps.items():
            row = rows[host.target, answer["queue_pairs"][str(number)]]
            assert row["dscp"] in (dscp, [dscp]), row
            assert row["payload_bytes"] > 100_000
    # The rank is gone from the controller's list once it has closed.
    poll(
        lambda: not controller.json("job", "show", "train")["job"]["reports"],
        "the controller forgets a rank that has closed",
    )
