"""The benchmark on fake ranks: it counts exactly what is wrong, and measures what it says."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from controller.allreduce import bench as bench_module
from controller.allreduce.bench import Bench
from controller.allreduce.bench_pattern import Pattern
from controller.allreduce.bench_plan import BenchPlan, make_plan, parse_size, plan_sizes
from controller.allreduce.bench_rank import run_rank
from controller.allreduce.bench_report import BenchResult
from controller.allreduce.communicator import Communicator
from controller.allreduce.environment import Placement
from controller.allreduce.reduction import Collective, DType, Op
from controller.allreduce.settings import Settings
from controller.errors import UsageError
from tests.allreduce.fake_ranks import FakeCommunicator, on_ranks

COLLECTIVES = [known.value for known in Collective]
SIZES = (1, 2, 3, 8, 17)


def nothing(_done: int, _total: int) -> None:
    """No progress is shown."""


def measure(plan: BenchPlan) -> Any:
    def work(comm: FakeCommunicator) -> list[BenchResult]:
        return list(Bench(comm, plan, comm.exchange, nothing).results())

    return work


def options(**changes: Any) -> dict[str, Any]:
    """Arguments of make_plan() as the command line gives them when nothing is said."""
    plain = dict.fromkeys(
        ("collective", "min_bytes", "max_bytes", "factor", "step_bytes", "dtype", "op", "chunk")
    )
    return plain | {"algorithm": "auto", "random": 0} | changes


# ---- inputs and results ----


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("op", list(Op))
def test_any_order_of_reduction_gives_exactly_the_expected_result(
    op: Op, dtype: DType, size: int
) -> None:
    pattern = Pattern(op.label, dtype.numpy, size, seed=3, period=997)
    rows = []
    for rank in range(size):
        row = np.empty(997, dtype.numpy)
        pattern.fill(row, rank)
        rows.append(row)
    ufunc = {Op.SUM: np.add, Op.AVG: np.add, Op.PROD: np.multiply, Op.MIN: np.minimum,
             Op.MAX: np.maximum}[op]  # fmt: skip
    for order in (range(size), reversed(range(size)), np.random.default_rng(1).permutation(size)):
        result: npt.NDArray[Any] | None = None
        for rank in order:
            result = rows[rank].copy() if result is None else ufunc(result, rows[rank])
            assert result.dtype == dtype.numpy
        assert result is not None
        if op is Op.AVG:
            # With the division of the type itself.
            result = (result // size if dtype.numpy.kind == "i" else result / size).astype(
                dtype.numpy
            )
        assert pattern.count_wrong_result(result) == 0


@pytest.mark.parametrize("dtype", list(DType))
def test_ranks_have_different_inputs_and_a_shift_changes_them(dtype: DType) -> None:
    pattern = Pattern("sum", dtype.numpy, 3)
    first, second, shifted = (np.empty(5000, dtype.numpy) for _ in range(3))
    pattern.fill(first, 0)
    pattern.fill(second, 1)
    pattern.fill(shifted, 0, shift=1)
    assert np.count_nonzero(first != second) > 4000
    assert np.array_equal(first[1:], shifted[:-1])
    assert pattern.count_wrong_input(first, 0) == 0
    assert pattern.count_wrong_input(first, 1) > 4000


def test_a_nan_an_infinity_and_one_lost_bit_are_wrong() -> None:
    pattern = Pattern("max", np.dtype(np.float32), 2)
    array = np.empty(200_000, np.float32)
    pattern.fill(array, 0)
    array[5], array[70_000] = np.nan, np.inf
    array[150_000:150_001].view(np.uint32)[:] ^= 1
    assert pattern.count_wrong_input(array, 0) == 3


def test_elements_moved_by_a_power_of_two_are_wrong() -> None:
    pattern = Pattern("sum", np.dtype(np.int32), 2)
    array = np.empty(1 << 20, np.int32)
    pattern.fill(array, 0)
    for power in range(20):
        assert pattern.count_wrong_input(np.roll(array, 1 << power), 0) > 1 << 18


# ---- measuring ----


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_right_communicator_has_no_wrong_element(collective: str, size: int) -> None:
    plan = make_plan(
        **options(
            collective=collective, dtype="all", op="all", min_bytes="0", max_bytes="200", factor=8
        ),
        iters=1,
        warmup_iters=0,
    )
    results = on_ranks(size, measure(plan))
    assert all(rank == results[0] for rank in results)
    assert results[0]
    assert [result.wrong for result in results[0]] == [0] * len(results[0])
    assert {result.dtype for result in results[0]} == {dtype.label for dtype in DType}


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_spoilt_element_of_one_rank_counts_as_one(collective: str) -> None:
    def spoil(rank: int, _name: str, output: npt.NDArray[Any]) -> None:
        if rank == 1 and output.size:
            output[-1] += 1

    plan = BenchPlan(collective=collective, iters=1, warmup_iters=0, sizes=(6000,),
                     ops=("sum",) if "reduce" in collective else ("none",))  # fmt: skip
    results = on_ranks(3, measure(plan), spoil)[0]
    assert [result.wrong for result in results] == [1] * len(results)


def test_an_output_that_is_never_written_is_wrong_everywhere() -> None:
    class Idle(FakeCommunicator):
        def all_reduce(self, *_: Any, **__: Any) -> None:
            """Do nothing."""

    def work(comm: FakeCommunicator) -> list[BenchResult]:
        idle = Idle(comm.group, comm.rank)
        plan = BenchPlan(sizes=(4000,), iters=1)
        return list(Bench(idle, plan, comm.exchange, nothing).results())

    out_of_place, _ = on_ranks(2, work)[0]
    assert out_of_place.wrong == 2 * 1000


def test_an_input_changed_out_of_place_is_wrong() -> None:
    class Careless(FakeCommunicator):
        def all_reduce(self, array: Any, *rest: Any, out: Any = None, **options: Any) -> None:
            super().all_reduce(array, *rest, out=out, **options)
            if out is not None:
                array[:] = out

    def work(comm: FakeCommunicator) -> list[BenchResult]:
        careless = Careless(comm.group, comm.rank)
        plan = BenchPlan(sizes=(4000,), iters=1)
        return list(Bench(careless, plan, comm.exchange, nothing).results())

    out_of_place, in_place = on_ranks(2, work)[0]
    assert (out_of_place.wrong or 0) > 1900
    assert in_place.wrong == 0


def test_without_a_check_nothing_is_claimed_about_elements() -> None:
    results = on_ranks(2, measure(BenchPlan(checks=0, iters=1)))[0]
    assert {result.wrong for result in results} == {None}


def test_the_time_is_the_slowest_ranks_and_leaves_warmups_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clock(threading.local):
        """Of a rank: stands still but where the rank says that it works."""

        now_ns = 0

    clock = Clock()
    monkeypatch.setattr(bench_module, "time", SimpleNamespace(perf_counter_ns=lambda: clock.now_ns))

    class Slow(FakeCommunicator):
        def all_reduce(self, *arguments: Any, **options: Any) -> None:
            super().all_reduce(*arguments, **options)
            first = len(self.calls) == 1
            clock.now_ns += 300_000_000 if first else 20_000_000 if self.rank == 1 else 1_000_000

    def work(comm: FakeCommunicator) -> list[BenchResult]:
        slow = Slow(comm.group, comm.rank)
        plan = BenchPlan(sizes=(64,), iters=5, warmup_iters=1)
        return list(Bench(slow, plan, comm.exchange, nothing).results())

    ranks = on_ranks(2, work)
    assert ranks[0] == ranks[1]
    assert [result.time_us for result in ranks[0]] == [20_000] * 2


def test_the_number_of_operations_is_warmup_iterations_and_checks() -> None:
    def work(comm: FakeCommunicator) -> list[str]:
        plan = BenchPlan(sizes=(64,), iters=7, warmup_iters=2, checks=3)
        list(Bench(comm, plan, comm.exchange, nothing).results())
        return comm.calls

    assert on_ranks(2, work)[0] == ["all_reduce"] * 2 * (7 + 2 + 3)


def test_progress_reaches_its_total_exactly() -> None:
    def work(comm: FakeCommunicator) -> list[tuple[int, int]]:
        told: list[tuple[int, int]] = []
        plan = BenchPlan(sizes=(64, 4096), iters=3)
        list(Bench(comm, plan, comm.exchange, lambda *now: told.append(now)).results())
        return told

    told = on_ranks(2, work)[0]
    done = [each for each, _ in told]
    assert done == sorted(done)
    assert told[-1][0] == told[-1][1]


def test_a_root_outside_the_group_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--root is 2; allowed: 0 \.\. 1"):
        on_ranks(2, measure(BenchPlan(collective="broadcast", ops=("none",), root=2)))


# ---- random operations ----


def random_plan(count: int, **changes: Any) -> BenchPlan:
    return make_plan(**options(random=count, **changes))


def test_random_operations_are_the_same_on_all_ranks_and_all_right() -> None:
    def work(comm: FakeCommunicator) -> Any:
        outcome = Bench(comm, random_plan(300), comm.exchange, nothing).random()
        return outcome, comm.calls

    ranks = on_ranks(3, work)
    assert all(calls == ranks[0][1] for _, calls in ranks)
    outcome = ranks[0][0]
    assert (outcome.operations, outcome.wrong, outcome.wrong_operations) == (300, 0, 0)
    assert set(outcome.by_collective) == set(COLLECTIVES)
    assert outcome.elements > 0


def test_random_operations_report_how_many_of_them_were_wrong() -> None:
    spoilt = {"count": 0}

    def spoil(rank: int, name: str, output: npt.NDArray[Any]) -> None:
        if rank == 2 and name == "reduce_scatter" and output.size:
            spoilt["count"] += 1
            output[0] += 1

    def work(comm: FakeCommunicator) -> Any:
        return Bench(comm, random_plan(200), comm.exchange, nothing).random()

    outcome = on_ranks(3, work, spoil)[0]
    assert outcome.wrong == outcome.wrong_operations == spoilt["count"] > 10


# ---- the command line's texts ----


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8", 8), ("1M", 1 << 20), ("16m", 16 << 20), ("1.5K", 1536), ("2G", 2 << 30),
     ("64KiB", 65536), ("5MB", 5_000_000), ("0", 0)],
)  # fmt: skip
def test_sizes_are_read_as_nccl_tests_write_them(text: str, nbytes: int) -> None:
    assert parse_size(text, "--minbytes") == nbytes


@pytest.mark.parametrize("text", ["", "M", "-1", "1MM", "1 parsec", "99999999999999999999G", "1e6"])
def test_a_size_that_cannot_be_read_names_option_and_forms(text: str) -> None:
    with pytest.raises(UsageError, match="--maxbytes"):
        parse_size(text, "--maxbytes")


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ((None, None, None, None), (1 << 20, 4 << 20, 16 << 20)),
        ((8, 64, 2, None), (8, 16, 32, 64)),
        ((0, 3, 2, None), (0, 1, 2)),
        ((1, 6, 1.5, None), (1, 2, 3, 4, 6)),
        ((10, 30, None, 10), (10, 20, 30)),
        ((10, 29, None, 10), (10, 20)),
        ((64 << 20, None, None, None), (64 << 20,)),
        ((None, 4096, None, None), (4096,)),
    ],
)
def test_sizes_go_from_the_smallest_to_the_largest(arguments: Any, sizes: tuple[int, ...]) -> None:
    assert plan_sizes(*arguments) == sizes


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((8, 4, 2, None), "above --maxbytes"),
        ((1, 8, 2, 4), "exclude each other"),
        ((1, 8, 1, None), "expected more than 1"),
        ((1, 8, float("nan"), None), "expected more than 1"),
        ((1, 8, None, 0), "must be above 0"),
        ((0, 1 << 30, None, 1), "more than 10,000 sizes"),
    ],
)
def test_sizes_that_contradict_one_another_are_refused(arguments: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        plan_sizes(*arguments)


def test_a_plan_survives_the_command_line_of_a_rank() -> None:
    plan = make_plan(**options(dtype="all", op="all", chunk="64K"), iters=3, timeout_s=1.5)
    assert BenchPlan.from_text(plan.to_text()) == plan
    assert plan.settings().chunk_nbytes == 65536
    assert plan.settings().timeout_s == 1.5


def test_a_trace_is_kept_by_the_first_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Asked(Exception):
        pass

    def create(placement: Placement, *, settings: Settings, **_: object) -> None:
        asked.append((placement.rank, settings.record))
        raise Asked

    plan = make_plan(**options(), record="/somewhere/trace.csv")
    assert BenchPlan.from_text(plan.to_text()) == plan
    monkeypatch.setattr(Communicator, "create", create)
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "unix:/x"}.items():
        monkeypatch.setenv(name, value)
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(Asked):
            run_rank(plan)
    assert asked == [(0, "/somewhere/trace.csv"), (1, None)]


def test_names_of_nccl_tests_stand_for_our_types() -> None:
    assert make_plan(**options(dtype="half")).dtypes == ("float16",)
    assert make_plan(**options(dtype="double")).dtypes == ("float64",)
    assert make_plan(**options(dtype="bfloat16")).dtypes == (np.dtype(ml_dtypes.bfloat16).name,)
    with pytest.raises(UsageError, match="uint8"):
        make_plan(**options(dtype="uint8"))
    with pytest.raises(UsageError, match="mean"):
        make_plan(**options(op="mean"))


def test_random_operations_exclude_a_smallest_size() -> None:
    with pytest.raises(UsageError, match="--random takes sizes from 0"):
        make_plan(**options(random=5, min_bytes="8"))
