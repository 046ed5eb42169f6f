"""Ranks that are threads and reduce in memory: a communicator to test the benchmark with."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Spoil = Callable[[int, str, Array], None]


class FakeLease:
    def __init__(self, nbytes: int) -> None:
        self._memory = np.zeros(nbytes, np.uint8)

    def array(self, dtype: npt.DTypeLike, shape: int) -> Array:
        wanted = np.dtype(dtype).itemsize * shape
        assert wanted <= self._memory.size
        return self._memory[:wanted].view(dtype)


class FakePool:
    @contextlib.contextmanager
    def lease(self, nbytes: int) -> Iterator[FakeLease]:
        yield FakeLease(nbytes)


class Group:
    """What the threads share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=20)
        self._said: list[Any] = [None] * size

    def all_gather(self, rank: int, what: Any) -> list[Any]:
        self._said[rank] = what
        self._barrier.wait()
        everyone = list(self._said)
        self._barrier.wait()
        return everyone


class FakeCommunicator:
    """Exact collectives; `spoil(rank, name, output)` may then change an output.

    ``calls`` are the names of the operations, in order.
    """

    def __init__(self, group: Group, rank: int, spoil: Spoil | None = None) -> None:
        self.group, self.rank, self.size = group, rank, group.size
        self.pool = FakePool()
        self.calls: list[str] = []
        self._spoil = spoil

    def exchange(self, document: dict[str, Any]) -> list[dict[str, Any]]:
        return self.group.all_gather(self.rank, document)

    def _finish(self, name: str, output: Array, result: Array) -> None:
        output[:] = result
        self.calls.append(name)
        if self._spoil is not None:
            self._spoil(self.rank, name, output)

    def _reduced(self, array: Array, op: str) -> Array:
        wide = np.int64 if array.dtype.kind == "i" else np.float64
        rows = np.stack(self.group.all_gather(self.rank, array.copy())).astype(wide)
        with np.errstate(over="ignore"):
            if op == "avg":
                total = rows.sum(axis=0)
                result = total // self.size if wide is np.int64 else total / self.size
            else:
                result = {"sum": rows.sum, "prod": rows.prod, "min": rows.min, "max": rows.max}[op](
                    axis=0
                )
            return np.asarray(result).astype(array.dtype)

    def all_reduce(
        self,
        array: Array,
        op: str = "sum",
        *,
        out: Array | None = None,
        algorithm: str | None = None,
    ) -> None:
        assert algorithm in ("ring", "halving-doubling")
        output = array if out is None else out
        self._finish("all_reduce", output, self._reduced(array, op))

    def reduce_scatter(
        self, output: Array, input: Array, op: str = "sum", *, algorithm: str | None = None
    ) -> None:
        block = slice(self.rank * output.size, (self.rank + 1) * output.size)
        self._finish("reduce_scatter", output, self._reduced(input, op)[block])

    def all_gather(self, output: Array, input: Array, *, algorithm: str | None = None) -> None:
        blocks = self.group.all_gather(self.rank, input.copy())
        self._finish("all_gather", output, np.concatenate(blocks))

    def broadcast(self, array: Array, root: int = 0) -> None:
        self._finish("broadcast", array, self.group.all_gather(self.rank, array.copy())[root])

    def barrier(self) -> None:
        self.group.all_gather(self.rank, None)


def on_ranks(
    size: int, work: Callable[[FakeCommunicator], Any], spoil: Spoil | None = None
) -> list[Any]:
    """Run `work` on every rank of a group; what it returned, by rank."""
    group = Group(size)
    with ThreadPoolExecutor(size) as threads:
        futures = [
            threads.submit(work, FakeCommunicator(group, rank, spoil)) for rank in range(size)
        ]
        return [future.result(timeout=60) for future in futures]
