"""What the ranks of tests.rxe.ranks do. Each returns something for JSON."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from controller.allreduce.communicator import Communicator
from controller.allreduce.compression import Cast, TopK
from controller.allreduce.environment import Master, Placement
from controller.allreduce.errors import CollectiveError
from controller.allreduce.reduction import DType
from controller.allreduce.settings import Settings

OPS = ("sum", "avg", "min", "max", "prod")
ALGORITHMS = ("ring", "halving-doubling")


def contribution(rank: int, count: int, dtype: DType, seed: int) -> np.ndarray:
    """What a rank puts in: small whole numbers, whose sums and products of eight are exact."""
    generator = np.random.default_rng((seed, rank, count))
    values = generator.integers(-2, 3, count)
    return values.astype(np.float32).astype(dtype.numpy) if count else np.empty(0, dtype.numpy)


def expected(op: str, dtype: DType, parts: list[np.ndarray]) -> np.ndarray:
    """The reduction by numpy in wide types: exact for these contributions."""
    wide = np.stack([part.astype(np.float64) for part in parts])
    size = len(parts)
    result = {
        "sum": wide.sum, "avg": wide.sum, "min": wide.min, "max": wide.max, "prod": wide.prod,
    }[op](axis=0)  # fmt: skip
    if op == "avg":
        if dtype.numpy.kind == "i":
            return np.trunc(result / size).astype(dtype.numpy)
        # Rounded once, from an exact sum.
        narrow = result.astype(np.float32 if dtype.numpy.itemsize == 2 else dtype.numpy)
        return (narrow / narrow.dtype.type(size)).astype(dtype.numpy)
    return result.astype(dtype.numpy)


def digest(array: np.ndarray) -> str:
    """Of all bits."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def combinations(counts: list[int], every: bool) -> list[tuple[str, str, DType, int]]:
    """Algorithm, op, type and count of operations: all there are, or 35 that hold every pair.

    Of the 35, each type meets each op, and algorithm and count go round with both, so that any
    two values of any two of the four meet at least once. For five counts.
    """
    if every:
        return list(itertools.product(ALGORITHMS, OPS, DType, counts))
    return [
        (ALGORITHMS[(i + j) % 2], op, dtype, counts[(i + j) % 5])
        for i, dtype in enumerate(DType)
        for j, op in enumerate(OPS)
    ]


def combined(counts: list[int], seed: int, every: bool) -> dict[str, Any]:
    """Each combination in and out of place; 70 operations in flight at once."""
    wrong, operations, digests = [], 0, []
    rows = combinations(counts, every)
    with Communicator.create(settings=Settings(pool_nbytes=32 << 20, chunk_nbytes=8192)) as comm:
        for first in range(0, len(rows), 35):
            started = []
            for algorithm, op, dtype, count in rows[first : first + 35]:
                parts = [contribution(rank, count, dtype, seed) for rank in range(comm.size)]
                mine = parts[comm.rank].copy()
                out = np.empty_like(mine)
                keep = {"algorithm": algorithm, "asynchronous": True}
                handles = [comm.all_reduce(parts[comm.rank], op, out=out, **keep)]
                handles.append(comm.all_reduce(mine, op, **keep))
                started.append((algorithm, op, dtype, count, parts, mine, out, handles))
            for algorithm, op, dtype, count, parts, mine, out, handles in started:
                for handle in handles:
                    handle.wait(120)
                name, want = [algorithm, op, dtype.label, count], expected(op, dtype, parts)
                untouched = contribution(comm.rank, count, dtype, seed)
                if not np.array_equal(parts[comm.rank], untouched):
                    wrong.append([*name, "input", 0])
                for place, result in (("out", out), ("in place", mine)):
                    bad = int(np.count_nonzero(result != want))
                    if bad:
                        wrong.append([*name, place, bad])
                operations += 2
                digests += [digest(mine), digest(out)]
    return {"wrong": wrong, "operations": operations, "digest": digest(np.array(digests))}


def collectives(counts: list[int], seed: int) -> dict[str, Any]:
    """reduce_scatter, all_gather, broadcast and barrier, in and out of place."""
    wrong = []

    def compare(name: str, got: np.ndarray, want: np.ndarray) -> None:
        if not np.array_equal(got, want):
            wrong.append([name, str(got.dtype), got.size, int(np.count_nonzero(got != want))])

    with Communicator.create(settings=Settings(pool_nbytes=32 << 20, chunk_nbytes=8192)) as comm:
        rank, size = comm.rank, comm.size
        for algorithm, dtype, count in itertools.product(
            ALGORITHMS, (DType.FLOAT32, DType.INT8, DType.BFLOAT16), counts
        ):
            parts = [contribution(each, count * size, dtype, seed) for each in range(size)]
            mine = slice(rank * count, (rank + 1) * count)
            for op in ("sum", "avg", "max"):
                want = expected(op, dtype, parts)[mine]
                source, out = parts[rank].copy(), np.empty(count, dtype.numpy)
                comm.reduce_scatter(out, source, op, algorithm=algorithm)
                compare(f"reduce_scatter {op} {algorithm}", out, want)
                compare("reduce_scatter input", source, parts[rank])
                comm.reduce_scatter(source[mine], source, op, algorithm=algorithm)
                compare(f"reduce_scatter {op} {algorithm} in place", source[mine], want)
            blocks = [contribution(each, count, dtype, seed + 1) for each in range(size)]
            gathered = np.empty(count * size, dtype.numpy)
            comm.all_gather(gathered, blocks[rank], algorithm=algorithm)
            compare(f"all_gather {algorithm}", gathered, np.concatenate(blocks))
            gathered[:] = 0
            gathered[mine] = blocks[rank]
            comm.all_gather(gathered, gathered[mine], algorithm=algorithm)
            compare(f"all_gather {algorithm} in place", gathered, np.concatenate(blocks))
            for root in range(size):
                array = blocks[rank].copy()
                comm.broadcast(array, root)
                compare(f"broadcast from {root}", array, blocks[root])
        entered = time.monotonic_ns()
        if rank == size - 1:
            time.sleep(0.3)
            entered = time.monotonic_ns()
        comm.barrier()
        left = time.monotonic_ns()
    return {"wrong": wrong, "entered_ns": entered, "left_ns": left}


def random_operations(operations: int, seed: int, in_flight: int) -> dict[str, Any]:
    """Operations of random kind, size, type and algorithm, some in flight at a time."""
    generator = np.random.default_rng(seed)  # the same choices on all ranks
    wrong, done, elements = [], 0, 0
    dtypes = list(DType)
    with Communicator.create(settings=Settings(pool_nbytes=64 << 20)) as comm:
        rank, size = comm.rank, comm.size
        arena = comm.pool.lease(16 << 20)
        while done < operations:
            started = []
            offset = 0
            for _ in range(min(in_flight, operations - done)):
                count = int(2 ** generator.uniform(0, 15.5)) - 1
                dtype = dtypes[generator.integers(len(dtypes))]
                op = OPS[generator.integers(len(OPS))]
                algorithm = (*ALGORITHMS, None)[generator.integers(3)]
                kind = ("all_reduce", "all_reduce", "all_gather", "broadcast", "reduce_scatter")[
                    generator.integers(5)
                ]
                root, in_lease = int(generator.integers(size)), bool(generator.integers(2))
                number = done + len(started)
                parts = [contribution(each, count, dtype, seed + number) for each in range(size)]
                array = parts[rank].copy()
                if in_lease and offset + array.nbytes <= arena.nbytes:
                    leased = arena.view[offset : offset + array.nbytes].view(dtype.numpy)
                    leased[:] = array
                    array = leased
                    offset += -(-array.nbytes // 64) * 64
                if kind == "all_reduce":
                    handle = comm.all_reduce(array, op, algorithm=algorithm, asynchronous=True)
                    want = expected(op, dtype, parts)
                elif kind == "broadcast":
                    handle = comm.broadcast(array, root, asynchronous=True)
                    want = parts[root]
                elif kind == "all_gather":
                    source, array = array, np.empty(count * size, dtype.numpy)
                    handle = comm.all_gather(array, source, algorithm=algorithm, asynchronous=True)
                    want = np.concatenate(parts)
                else:
                    cut = count // size
                    source, array = array[: cut * size], np.empty(cut, dtype.numpy)
                    handle = comm.reduce_scatter(
                        array, source, op, algorithm=algorithm, asynchronous=True
                    )
                    want = expected(op, dtype, parts)[rank * cut : (rank + 1) * cut]
                started.append((handle, array, want, kind))
                elements += count
            order = generator.permutation(len(started))
            for position in order:
                handle, array, want, kind = started[position]
                handle.wait(60)
                if not np.array_equal(array, want):
                    wrong.append([kind, str(array.dtype), array.size])
            done += len(started)
        arena.release()
    return {"wrong": wrong, "operations": done, "elements": elements}


def failure(call: Any) -> dict[str, Any]:
    """How a call fails, and after how long."""
    begin = time.monotonic()
    try:
        call()
    except CollectiveError as error:
        return {
            "error": type(error).__name__,
            "message": str(error),
            "rank": error.rank,
            "status": error.status,
            "seconds": time.monotonic() - begin,
            "at": time.monotonic(),
        }
    return {"error": None, "seconds": time.monotonic() - begin}


def disagreements(whats: list[str], odd: int) -> list[dict[str, Any]]:
    """One rank calls something else than the others; a new communicator for each thing."""
    placement = Placement.from_environment(os.environ)
    return [
        _disagreement(replace(placement, master=Master(path=f"{placement.master.path}.{what}")),
                      what, odd)
        for what in whats
    ]  # fmt: skip


def _disagreement(placement: Placement, what: str, odd: int) -> dict[str, Any]:
    settings = Settings(pool_nbytes=16 << 20, timeout_s=20)
    with Communicator.create(placement, settings=settings) as comm:
        array = np.ones(50_000, np.float32)
        is_odd = comm.rank == odd

        def call() -> None:
            if what == "dtype":
                comm.all_reduce(array.view(np.int32) if is_odd else array)
            elif what == "size":
                comm.all_reduce(array[:-1] if is_odd else array)
            elif what == "empty":
                comm.all_reduce(array[:0] if is_odd else array)
            elif what == "op":
                comm.all_reduce(array, "max" if is_odd else "sum")
            elif what == "algorithm":
                comm.all_reduce(array, algorithm="ring" if is_odd else "halving-doubling")
            elif what == "root":
                comm.broadcast(array, 1 if is_odd else 0)
            elif what == "collective":
                comm.barrier() if is_odd else comm.all_reduce(array)
            else:
                raise ValueError(what)

        # A rank that is slow hears of it in the operation before.
        first = failure(lambda: (comm.all_reduce(array), call()))
        return {"first": first, "again": failure(comm.barrier)}


def absence(missing: int, timeout_s: float) -> dict[str, Any]:
    """One rank does not call at all until the others have given up."""
    settings = Settings(pool_nbytes=16 << 20, timeout_s=timeout_s)
    with Communicator.create(settings=settings) as comm:
        array = np.ones(50_000, np.float32)
        comm.all_reduce(array)
        if comm.rank == missing:
            time.sleep(timeout_s + 2)
        return failure(lambda: comm.all_reduce(array))


def loop_until_failure(flag: str, timeout_s: float, count: int) -> dict[str, Any]:
    """all_reduce until it fails; a file says that all are running."""
    settings = Settings(
        pool_nbytes=64 << 20, timeout_s=timeout_s, queue_pair_timeout=14, queue_pair_retries=6
    )
    with Communicator.create(settings=settings) as comm:
        lease = comm.pool.lease(4 * count)
        array = lease.array(np.float32, count)
        array[:] = 0
        rounds = 0

        def call() -> None:
            nonlocal rounds
            while rounds < 1_000_000:
                comm.all_reduce(array)
                rounds += 1
                if rounds == 3:
                    Path(f"{flag}{comm.rank}").touch()

        result = failure(call)
        # The lease is still out, as it is when an error leaves the caller's block.
        return {**result, "rounds": rounds}


def killed(rounds: int, timeout_s: float, seed: int) -> list[dict[str, Any]]:
    """In each round one rank, another each time, is killed in the middle of an operation.

    Each round is a child of its own. What the survivors do then: note the error, build a new
    communicator among them, and reduce.
    """
    placement = Placement.from_environment(os.environ)
    results = []
    for number in range(rounds):
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reader)
            try:
                answer = _round(placement, number, timeout_s, seed)
                os.write(writer, json.dumps(answer).encode())
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader, "rb") as stream:
            answer = stream.read()
        _, status = os.waitpid(pid, 0)
        victim = number % placement.size == placement.rank
        results.append(
            {
                "victim": victim,
                "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
                "exit": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
                **(json.loads(answer) if answer else {}),
            }
        )
    return results


def _round(placement: Placement, number: int, timeout_s: float, seed: int) -> dict[str, Any]:
    path = placement.master.path
    settings = Settings(pool_nbytes=16 << 20, timeout_s=timeout_s, join_timeout_s=30)
    first = replace(placement, master=Master(path=f"{path}.{number}"))
    victim = number % placement.size
    with Communicator.create(first, settings=settings) as comm:
        array = np.ones(1 << 18, np.float32)
        comm.all_reduce(array)
        delay = np.random.default_rng((seed, number)).uniform(0.02, 0.2)
        if comm.rank == victim:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        killed_at = time.monotonic() + delay

        def call() -> None:
            while True:
                comm.all_reduce(array)

        error = failure(call)
        noticed_s = time.monotonic() - killed_at
    survivors = [rank for rank in range(placement.size) if rank != victim]
    place = survivors.index(placement.rank)
    again = replace(
        placement,
        rank=place,
        local_rank=place,
        size=len(survivors),
        master=Master(path=f"{path}.{number}b"),
    )
    with Communicator.create(again, settings=settings) as comm:
        array = np.full(1000, placement.rank, np.int32)
        comm.all_reduce(array)
    good = bool((array == sum(survivors)).all())
    return {**error, "noticed_s": noticed_s, "victim_rank": victim, "again": good}


def classes(seconds: float) -> dict[str, Any]:
    """Operations while the class changes all the time."""
    settings = Settings(pool_nbytes=32 << 20, classes=(0, 3, 6), chunk_nbytes=16384)
    wrong = operations = 0
    with Communicator.create(settings=settings) as comm:
        numbers = {
            link.peer: {number: pair.number for number, pair in link.queue_pairs.items()}
            for link in comm._wiring.links  # type: ignore[union-attr]
        }
        stop = threading.Event()

        def change() -> None:
            for number in itertools.cycle((0, 3, 6)):
                comm.set_class(number)
                if stop.wait(0.003):
                    return

        thread = threading.Thread(target=change)
        thread.start()
        end = time.monotonic() + seconds
        more = np.ones(1, np.int32)
        while more[0]:
            array = np.arange(200_000, dtype=np.int32)
            comm.all_reduce(array)
            wrong += int(np.count_nonzero(array != comm.size * np.arange(200_000)))
            operations += 1
            more[0] = time.monotonic() < end
            comm.all_reduce(more, "min")
        stop.set()
        thread.join()
    return {"wrong": wrong, "operations": operations, "queue_pairs": numbers}


def classed_by_controller(job: str, run_dir: str, class_then: int) -> dict[str, Any]:
    """Reduce in the class that the controller gives, then in another one."""
    settings = Settings(pool_nbytes=32 << 20, classes=(0, 6))
    wrong, seen = 0, []
    with Communicator.create(settings=settings, job=job, run_dir=run_dir) as comm:
        assert comm._wiring is not None
        queue_pairs = {
            number: pair.number for number, pair in comm._wiring.links[0].queue_pairs.items()
        }
        for number in (6, class_then):
            if number == class_then and comm.rank == 0:
                subprocess.run(
                    [sys.executable, "-m", "controller", "--run-dir", run_dir, "job", "set", job,
                     "--class", str(number)],
                    check=True, capture_output=True,
                )  # fmt: skip
            deadline = time.monotonic() + 20
            while comm.class_in_force() != number and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(comm.class_in_force())
            comm.barrier()
            for _ in range(3):
                array = np.arange(100_000, dtype=np.float32)
                comm.all_reduce(array)
                wrong += int(np.count_nonzero(array != comm.size * np.arange(100_000)))
            comm.barrier()
    return {"wrong": wrong, "classes_seen": seen, "queue_pairs": queue_pairs}


def compressed(count: int) -> dict[str, Any]:
    """Sums of what fits float16 exactly, and top-k with error feedback over some steps."""
    with Communicator.create(settings=Settings(pool_nbytes=32 << 20)) as comm:
        parts = [contribution(each, count, DType.FLOAT32, 5) for each in range(comm.size)]
        exact = expected("sum", DType.FLOAT32, parts)
        cast, ratios, results = True, {}, []
        for dtype in ("float16", "bfloat16"):
            compression = Cast(dtype)
            array = parts[comm.rank].copy()
            comm.all_reduce(array, compression=compression)
            cast = cast and np.array_equal(array, exact)
            ratios[dtype] = compression.ratio
            out = np.empty_like(array)
            comm.all_reduce(parts[comm.rank], "avg", out=out, compression=compression)
            results += [array, out]
        top, steps = TopK(0.02), 5
        generator = np.random.default_rng((7, comm.rank))
        given, received = np.zeros(count), np.zeros(count)
        for _ in range(steps):
            gradient = generator.normal(size=count).astype(np.float32)
            given += gradient
            comm.all_reduce(gradient, compression=top, key="layer")
            received += gradient
            results.append(gradient)
        ratios["top_k"] = top.ratio
        # What all gave, less what is left at all, is what was received.
        left = top.residual("layer")
        assert left is not None
        comm.all_reduce(given)
        comm.all_reduce(left)
        error = float(np.abs(given - left - received).max())
    return {
        "cast_exact": bool(cast),
        "topk_error": error,
        "ratios": ratios,
        "digest": digest(np.concatenate(results)),
    }
