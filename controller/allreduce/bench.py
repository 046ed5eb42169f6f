"""Measure and check collectives: what every rank of ``controller bench allreduce`` does."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from controller.allreduce.bench_pattern import PERIOD, SHORT_PERIOD, Pattern
from controller.allreduce.bench_plan import ALL, BenchPlan
from controller.allreduce.bench_report import BenchResult, RandomResult
from controller.allreduce.reduction import Collective, DType, Op
from controller.allreduce.schedule import Algorithm, choose_algorithm

Array = npt.NDArray[Any]
# What each rank says about one thing, by rank; all ranks must ask in the same order.
Exchange = Callable[[dict[str, Any]], list[dict[str, Any]]]
Progress = Callable[[int, int], None]

# Put into every byte of the output before a checked operation: of the elements that it then does
# not write, at most one in 256 (int8) happens to be right.
_UNWRITTEN = 0xA5
# Progress is told in bytes; an operation costs as much as so many, however small it is.
_OPERATION_BYTES = 1 << 16


class Lease(Protocol):
    """A piece of registered memory."""

    def array(self, dtype: npt.DTypeLike, shape: int) -> Array:
        """It, as an array."""


class Pool(Protocol):
    """Where registered memory comes from."""

    def lease(self, nbytes: int) -> AbstractContextManager[Lease]:
        """A piece of it."""


class Collectives(Protocol):
    """The part of a communicator that is measured."""

    rank: int
    size: int

    @property
    def pool(self) -> Pool:
        """Its registration pool."""

    def all_reduce(
        self, array: Array, op: str = ..., *, out: Array | None = ..., algorithm: str | None = ...
    ) -> Any:
        """In place without `out`."""

    def reduce_scatter(
        self, output: Array, input: Array, op: str = ..., *, algorithm: str | None = ...
    ) -> Any:
        """Every rank gets its block of the reduction."""

    def all_gather(self, output: Array, input: Array, *, algorithm: str | None = ...) -> Any:
        """Every rank gets the blocks of all."""

    def broadcast(self, array: Array, root: int = ...) -> Any:
        """Every rank gets the root's."""

    def barrier(self) -> Any:
        """Wait for all ranks."""


@dataclass(frozen=True)
class Case:
    """One collective with its arguments; the same on all ranks.

    Parameters
    ----------
    collective, op, dtype
        `op` is None where nothing is reduced.
    count
        Elements of one rank's part: the whole buffer for all_reduce and broadcast.
    in_place
        Whether input and output are the same memory.
    algorithm
        ``ring``, ``halving-doubling``, or ``broadcast`` for that.
    root
        Of a broadcast.
    """

    collective: Collective
    op: Op | None
    dtype: DType
    count: int
    in_place: bool
    algorithm: str
    root: int = 0

    def lengths(self, size: int) -> tuple[int, int]:
        """Elements of input and output."""
        if self.collective is Collective.REDUCE_SCATTER:
            return self.count * size, self.count
        if self.collective is Collective.ALL_GATHER:
            return self.count, self.count * size
        return self.count, self.count

    def nbytes(self, size: int) -> int:
        """Bytes of the larger of input and output."""
        return max(self.lengths(size)) * self.dtype.numpy.itemsize


@dataclass(frozen=True)
class Buffers:
    """Input and output of a case on one rank; parts of one array when in place."""

    input: Array
    output: Array

    @classmethod
    def of(cls, case: Case, rank: int, size: int, first: Array, second: Array) -> Buffers:
        """Take them from two arrays that are long enough."""
        given, gained = case.lengths(size)
        if not case.in_place:
            return cls(first[:given], second[:gained])
        whole = first[: max(given, gained)]
        block = slice(rank * case.count, (rank + 1) * case.count)
        if case.collective is Collective.REDUCE_SCATTER:
            return cls(whole, whole[block])
        if case.collective is Collective.ALL_GATHER:
            return cls(whole[block], whole)
        return cls(whole, whole)


def run_case(comm: Collectives, case: Case, buffers: Buffers) -> None:
    """Run the collective once."""
    op = case.op.label if case.op is not None else ""
    if case.collective is Collective.ALL_REDUCE:
        out = None if case.in_place else buffers.output
        comm.all_reduce(buffers.input, op, out=out, algorithm=case.algorithm)
    elif case.collective is Collective.REDUCE_SCATTER:
        comm.reduce_scatter(buffers.output, buffers.input, op, algorithm=case.algorithm)
    elif case.collective is Collective.ALL_GATHER:
        comm.all_gather(buffers.output, buffers.input, algorithm=case.algorithm)
    else:
        comm.broadcast(buffers.output, case.root)


def check_case(
    comm: Collectives, case: Case, buffers: Buffers, pattern: Pattern, shift: int
) -> int:
    """Run the collective on known input; elements of this rank that are wrong afterwards.

    Out of place, the input must still be what it was.
    """
    rank = comm.rank
    buffers.output.view(np.uint8)[:] = _UNWRITTEN
    if case.collective is not Collective.BROADCAST or rank == case.root:
        pattern.fill(buffers.input, rank, shift)
    run_case(comm, case, buffers)
    count, output = case.count, buffers.output
    if case.collective is Collective.ALL_GATHER:
        wrong = sum(
            pattern.count_wrong_input(output[peer * count : (peer + 1) * count], peer, shift)
            for peer in range(comm.size)
        )
    elif case.collective is Collective.BROADCAST:
        wrong = pattern.count_wrong_input(output, case.root, shift)
    else:
        first = rank * count if case.collective is Collective.REDUCE_SCATTER else 0
        wrong = pattern.count_wrong_result(output, shift, first)
    if not case.in_place:
        wrong += pattern.count_wrong_input(buffers.input, rank, shift)
    return wrong


class Bench:
    """Runs a plan on one rank; all ranks do the same.

    Parameters
    ----------
    comm
        The communicator.
    plan
        What to measure.
    exchange
        Tells all ranks' results to all, by another way than what is being checked.
    progress
        Called with bytes moved and to move.
    """

    def __init__(
        self, comm: Collectives, plan: BenchPlan, exchange: Exchange, progress: Progress
    ) -> None:
        plan.check_root(comm.size)
        self._comm = comm
        self._plan = plan
        self._exchange = exchange
        self._progress = progress
        self._patterns: dict[tuple[str, DType, int], Pattern] = {}
        self._done_bytes = 0
        self._total_bytes = 1

    def results(self) -> Iterator[BenchResult]:
        """Measure every case of the plan, the sizes from small to large."""
        cases = list(self._cases())
        rounds = self._plan.warmup_iters + self._plan.iters + self._plan.checks
        self._total_bytes = rounds * sum(self._weight(case) for case in cases)
        # Both hold the larger of input and output.
        largest = max(case.nbytes(self._comm.size) for case in cases)
        pool = self._comm.pool
        with pool.lease(largest) as first, pool.lease(largest) as second:
            for case in cases:
                yield self._measure(case, self._buffers(case, first, second))

    def _cases(self) -> Iterator[Case]:
        plan = self._plan
        collective = Collective(plan.collective)
        # A broadcast has one buffer.
        placements = (True,) if collective is Collective.BROADCAST else (False, True)
        for op_name in plan.ops:
            op = None if op_name == "none" else Op.parse(op_name)
            for name in plan.dtypes:
                dtype = DType.parse(name)
                for nbytes in plan.sizes:
                    count = nbytes // dtype.numpy.itemsize
                    if collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
                        count //= self._comm.size
                    algorithm = self._algorithm(collective, nbytes)
                    for in_place in placements:
                        yield Case(collective, op, dtype, count, in_place, algorithm, plan.root)

    def _algorithm(self, collective: Collective, nbytes: int) -> str:
        if collective is Collective.BROADCAST:
            return "broadcast"
        if self._plan.algorithm != "auto":
            return self._plan.algorithm
        return choose_algorithm(self._comm.size, nbytes).value

    def _buffers(self, case: Case, first: Lease, second: Lease) -> Buffers:
        size, dtype = self._comm.size, case.dtype.numpy
        count = max(case.lengths(size))
        return Buffers.of(
            case, self._comm.rank, size, first.array(dtype, count), second.array(dtype, count)
        )

    def _measure(self, case: Case, buffers: Buffers) -> BenchResult:
        plan, comm = self._plan, self._comm
        # Zeros stay zeros under every operation, however often the result is reduced again.
        buffers.input.fill(0)
        buffers.output.fill(0)
        for _ in range(plan.warmup_iters):
            self._run(case, buffers)
        comm.barrier()
        start_ns = time.perf_counter_ns()
        for _ in range(plan.iters):
            self._run(case, buffers)
        time_us = (time.perf_counter_ns() - start_ns) / 1e3 / plan.iters
        wrong = 0
        for number in range(plan.checks):
            pattern = self._pattern(case, PERIOD)
            wrong += check_case(comm, case, buffers, pattern, plan.seed + number)
            self._tell(case)
        everyone = self._exchange({"time_us": time_us, "wrong": wrong})
        return BenchResult.of(
            case.collective,
            comm.size,
            nbytes=case.nbytes(comm.size),
            count=case.count,
            dtype=case.dtype.label,
            op=case.op.label if case.op is not None else "none",
            root=case.root if case.collective is Collective.BROADCAST else -1,
            algorithm=case.algorithm,
            in_place=case.in_place,
            time_us=max(float(one["time_us"]) for one in everyone),
            wrong=sum(int(one["wrong"]) for one in everyone) if plan.checks else None,
        )

    def _run(self, case: Case, buffers: Buffers) -> None:
        run_case(self._comm, case, buffers)
        self._tell(case)

    def _weight(self, case: Case) -> int:
        return case.nbytes(self._comm.size) + _OPERATION_BYTES

    def _tell(self, case: Case) -> None:
        self._done_bytes += self._weight(case)
        self._progress(self._done_bytes, self._total_bytes)

    def _pattern(self, case: Case, period: int) -> Pattern:
        # Where nothing is reduced, any input will do: that of "max" uses the whole range.
        op = case.op.label if case.op is not None else Op.MAX.label
        key = (op, case.dtype, period)
        if key not in self._patterns:
            self._patterns[key] = Pattern(
                op, case.dtype.numpy, self._comm.size, self._plan.seed, period
            )
        return self._patterns[key]

    def random(self) -> RandomResult:
        """Check many operations of random collective, size, type, operation and placement.

        Half of them work on leases of the pool, half on memory of their own.
        """
        comm, plan = self._comm, self._plan
        generator = np.random.default_rng(plan.seed)
        kinds: Counter[str] = Counter()
        wrong = np.zeros(plan.random, np.int64)
        elements = 0
        start_s = time.monotonic()
        # A reduce-scatter's block may be rounded up to one element of each rank.
        largest = plan.max_bytes + 8 * comm.size
        with comm.pool.lease(largest) as first, comm.pool.lease(largest) as second:
            for number in range(plan.random):
                case = self._random_case(generator)
                leased = bool(generator.integers(2))
                kinds[case.collective.value] += 1
                if leased:
                    buffers = self._buffers(case, first, second)
                else:
                    count = max(case.lengths(comm.size))
                    fresh = [np.empty(count, case.dtype.numpy) for _ in range(2)]
                    buffers = Buffers.of(case, comm.rank, comm.size, *fresh)
                pattern = self._pattern(case, SHORT_PERIOD)
                wrong[number] = check_case(comm, case, buffers, pattern, number)
                elements += buffers.output.size
                self._progress(number + 1, plan.random)
        # Which operations were wrong on any rank: a list as long as there were wrong ones.
        mine = {"elements": elements, "wrong": int(wrong.sum()),
                "operations": np.flatnonzero(wrong)[:_OPERATION_BYTES].tolist()}  # fmt: skip
        everyone = self._exchange(mine)
        return RandomResult(
            operations=plan.random,
            wrong_operations=len({number for one in everyone for number in one["operations"]}),
            elements=sum(int(one["elements"]) for one in everyone),
            wrong=sum(int(one["wrong"]) for one in everyone),
            seed=plan.seed,
            seconds=round(time.monotonic() - start_s, 3),
            by_collective=dict(kinds),
        )

    def _random_case(self, generator: np.random.Generator) -> Case:
        """The next case; every rank draws the same one."""
        plan, size = self._plan, self._comm.size

        def one_of(values: list[Any]) -> Any:
            return values[int(generator.integers(len(values)))]

        collectives = [Collective(plan.collective)] if plan.collective != ALL else list(Collective)
        collective = one_of(collectives)
        dtype = one_of([DType.parse(name) for name in plan.dtypes])
        reduces = collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
        ops = [Op.parse(name) for name in plan.ops if name != "none"]
        # Small ones as often as large ones; 0 and 1 element among them.
        largest = max(1, plan.max_bytes // dtype.numpy.itemsize)
        count = int(np.exp(generator.uniform(0, np.log(largest + 1))) - generator.integers(2))
        count = min(max(count, 0), largest)
        if collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
            count //= size
        algorithm = plan.algorithm
        if algorithm == "auto":
            algorithm = one_of([known.value for known in Algorithm])
        return Case(
            collective=collective,
            op=one_of(ops) if reduces else None,
            dtype=dtype,
            count=count,
            in_place=collective is Collective.BROADCAST or bool(generator.integers(2)),
            algorithm=algorithm,
            root=int(generator.integers(size)),
        )
