"""A communicator: ranks that reduce, gather, broadcast and meet over RC queue pairs.

>>> with Communicator.create() as comm:                      # doctest: +SKIP
...     lease = comm.pool.lease(1 << 20)
...     gradients = lease.array("float32", 1 << 18)
...     comm.all_reduce(gradients, op="avg")

All ranks call the same operations in the same order. An operation may be started
(``asynchronous=True``) and waited for later; several may be in flight.
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from controller.allreduce import schedule
from controller.allreduce.buffers import Array, Buffer, Source, flat
from controller.allreduce.calls import ALGORITHM_NUMBERS, Call, difference, plan_call
from controller.allreduce.compression import Cast, Compression, TopK
from controller.allreduce.control_channel import ControlChannel, TlsFiles
from controller.allreduce.engine import Engine
from controller.allreduce.environment import Placement
from controller.allreduce.errors import ClosedError, MismatchError, PeerError
from controller.allreduce.operation import Handle, Operation, Work
from controller.allreduce.reduction import DType, Op, finish, reduce_into
from controller.allreduce.report import JobReporter
from controller.allreduce.schedule import Algorithm
from controller.allreduce.settings import Settings
from controller.allreduce.wire import MAX_MESSAGES, Description
from controller.allreduce.wiring import Wiring, wire
from controller.errors import StellarError, UsageError
from controller.memory import PoolConfig, RegistrationPool
from controller.priority.ranges import check_integer
from controller.verbs.device import Device

CLOSE_TIMEOUT_S = 10.0


class Communicator:
    """Ranks that know one another. Made by create().

    Parameters
    ----------
    device, channel, pool, settings
        What it works with.
    owned
        Closed with it, in this order.
    reporter
        Tells the local controller, or None.
    """

    def __init__(
        self,
        device: Device,
        channel: ControlChannel,
        pool: RegistrationPool,
        settings: Settings,
        owned: contextlib.ExitStack,
        reporter: JobReporter | None,
    ) -> None:
        self.rank, self.size = channel.rank, channel.size
        self.pool, self.device, self.settings = pool, device, settings
        self._source = Source(pool, device.registrar, settings.staged_nbytes)
        self.algorithm: Algorithm | None = None  # by size
        self._iteration = 0
        self._channel = channel
        self._owned = owned
        self._reporter = reporter
        self._reports: dict[int, Any] = {}
        self._class = min(settings.classes)
        self._calling = threading.Lock()
        self._sequence = 0
        self._closed = False
        ring = {(self.rank - 1) % self.size, (self.rank + 1) % self.size}
        self._neighbours = frozenset(ring - {self.rank})
        self._wiring: Wiring | None = None
        self._engine: Engine | None = None
        if self.size > 1:
            self._wiring = wiring = wire(device, channel, pool, settings)
            try:
                self._engine = Engine(
                    device,
                    wiring.completions,
                    wiring.links,
                    rank=self.rank,
                    size=self.size,
                    describe=difference,
                    class_in_force=self.class_in_force,
                    abort=channel.abort,
                    timeout_s=settings.timeout_s,
                    on_progress=self._report if reporter else None,
                )
            except BaseException:
                wiring.close()
                raise
            channel.set_callback(self._engine.depart)

    @classmethod
    def create(
        cls,
        placement: Placement | None = None,
        *,
        device: str | Device | None = None,
        gid_address: str | None = None,
        pool: RegistrationPool | None = None,
        job: str | None = None,
        run_dir: str | None = None,
        tls: TlsFiles | None = None,
        insecure: bool = False,
        group: str = "world",
        settings: Settings | None = None,
    ) -> Communicator:
        """Join the other ranks. All of them must call this.

        Parameters
        ----------
        placement
            Which rank this is and where rank 0 listens; by default from the environment
            (torchrun, Open MPI, Slurm).
        device
            RDMA device, by default the first usable one of this network namespace.
        gid_address
            IP address to speak from, where the device has several.
        pool
            Of the same open device; by default one of `settings.pool_nbytes` is made.
        job, run_dir
            Tell the controller of this host about this job's operations, and use the class that
            it gives. Nothing changes where none runs.
        tls, insecure, group
            As for ControlChannel.join().
        settings
            The same on all ranks, but for `record`.

        Raises
        ------
        StellarError
            Says what is missing, or which rank does not fit.
        """
        settings = settings or Settings()
        placement = placement or Placement.from_environment(os.environ)
        if pool is not None and not isinstance(device, Device):
            raise UsageError(
                "A pool is registered with one open device.", "Pass that Device as `device`, too."
            )
        if pool is not None and settings.record is not None:
            raise UsageError(
                "Settings.record is for the communicator's own pool, and another one is given.",
                "Set PoolConfig.record of that one.",
            )
        with contextlib.ExitStack() as stack:
            if not isinstance(device, Device):
                device = Device(device, gid_address=gid_address)
                stack.callback(device.close)
            if pool is None:
                pool = RegistrationPool(
                    device.registrar,
                    PoolConfig(
                        capacity_nbytes=settings.pool_nbytes,
                        record=None if settings.record is None else Path(settings.record),
                        name=f"allreduce-{group}"[:64],
                    ),
                )
                # Also with leases out: after an error nobody has had the time to release them.
                stack.callback(pool.close, force=True)
            channel = ControlChannel.join(
                placement,
                timeout_s=settings.join_timeout_s,
                tls=tls,
                insecure=insecure,
                group=group,
            )
            stack.callback(channel.close)
            reporter = None
            if job is not None:
                reporter = JobReporter(
                    job, run_dir, rank=channel.rank, size=channel.size, communicator=group[:64]
                )
                stack.callback(reporter.close)
            try:
                communicator = cls(device, channel, pool, settings, stack, reporter)
            except StellarError as error:
                channel.abort({"message": str(error), "rank": channel.rank})
                raise
            communicator._owned = stack.pop_all()
        return communicator

    @property
    def iteration(self) -> int:
        """Training iteration that operations belong to, for the controller; set it."""
        return self._iteration

    @iteration.setter
    def iteration(self, number: int) -> None:
        check_integer("Iteration", number, 0, (1 << 63) - 1)
        self._iteration = number

    # ---- classes ----

    def class_in_force(self) -> int:
        """Class of the next message: the controller's while it gives one, else set_class()'s."""
        wanted = self._reporter.class_in_force if self._reporter else None
        return self._class if wanted is None else self.settings.nearest_class(wanted)

    def set_class(self, number: int) -> None:
        """Choose the class for messages from now on, also of operations in flight.

        Raises
        ------
        UsageError
            There is no queue pair for it.
        """
        if number not in self.settings.classes:
            raise UsageError(
                f"Class {number} has no queue pairs; there are {self.settings.classes}.",
                "Name all classes in the settings when the communicator is made.",
            )
        self._class = number

    # ---- operations ----

    def all_reduce(
        self,
        array: Array,
        op: str | Op = "sum",
        *,
        out: Array | None = None,
        algorithm: str | Algorithm | None = None,
        compression: Compression | None = None,
        key: Hashable = None,
        asynchronous: bool = False,
    ) -> Handle:
        """Reduce an array over all ranks; every rank gets the same bits.

        Parameters
        ----------
        array
            Any shape, contiguous. Changed in place unless `out` is given; untouched then.
            No byte is copied when it lies in a lease of the pool.
        op
            sum, avg, min, max, prod.
        out
            Of the same shape and type.
        algorithm
            "ring" or "halving-doubling"; by default by size.
        compression
            Send less: see compression.py. The result is not exact then.
        key
            Names the array from one iteration to the next, for a compression that keeps a
            residual of each.
        asynchronous
            Return at once; the arrays belong to the operation until the handle is done.

        Returns
        -------
        Handle
            Complete, unless asynchronous.

        Raises
        ------
        UsageError
            An argument is impossible on this rank.
        CollectiveError
            It failed, on all ranks; the communicator can no longer be used.
        """
        op = _op(op)
        source = flat("array", array, writable=out is None)
        target = source if out is None else flat("out", out)
        _same(source, target)
        dtype = DType.of(source.dtype)
        if compression is not None:
            return self._compressed(source, target, op, algorithm, compression, key, asynchronous)
        chosen = self._algorithm(algorithm, source.nbytes)
        return self._run(
            Call.ALL_REDUCE, source.size, dtype, op, chosen,
            lambda: self._copied(source, target), asynchronous,
        )  # fmt: skip

    def reduce_scatter(
        self,
        output: Array,
        input: Array,
        op: str | Op = "sum",
        *,
        algorithm: str | Algorithm | None = None,
        asynchronous: bool = False,
    ) -> Handle:
        """Reduce an array over all ranks; rank r gets the r-th of `size` equal blocks.

        Parameters
        ----------
        output
            A block. When it is this rank's block of `input`, that array is worked in and its
            other blocks are undefined afterwards; otherwise `input` stays as it is.
        input
            `size` times as many elements.
        op, algorithm, asynchronous
            As for all_reduce().
        """
        op = _op(op)
        target, whole = flat("output", output), flat("input", input, writable=False)
        self._blocks("output", target, "input", whole)
        dtype = DType.of(target.dtype)
        mine = slice(self.rank * target.size, (self.rank + 1) * target.size)
        in_place = _address(whole[mine]) == _address(target) and bool(target.size)

        def prepare() -> Buffer:
            if in_place:
                return self._source.working(whole)
            copy = self._source.scratch(whole.dtype, whole.size, key="allreduce/scatter")
            copy.array[:] = whole

            def store() -> None:
                target[:] = copy.array[mine]

            return Buffer(copy.array, copy.memory, store, copy.release)

        chosen = self._algorithm(algorithm, whole.nbytes)
        return self._run(
            Call.REDUCE_SCATTER, target.size, dtype, op, chosen, prepare, asynchronous, final=mine
        )

    def all_gather(
        self,
        output: Array,
        input: Array,
        *,
        algorithm: str | Algorithm | None = None,
        asynchronous: bool = False,
    ) -> Handle:
        """Collect the arrays of all ranks, in rank order.

        Parameters
        ----------
        output
            `size` times as many elements as `input`.
        input
            May be this rank's block of `output`.
        algorithm, asynchronous
            As for all_reduce().
        """
        whole, part = flat("output", output), flat("input", input, writable=False)
        self._blocks("input", part, "output", whole)
        dtype = DType.of(part.dtype)
        chosen = self._algorithm(algorithm, whole.nbytes)
        return self._run(
            Call.ALL_GATHER, part.size, dtype, Op.SUM, chosen,
            lambda: self._gathering(whole, part), asynchronous,
        )  # fmt: skip

    def broadcast(self, array: Array, root: int = 0, *, asynchronous: bool = False) -> Handle:
        """Give all ranks the array of one.

        Parameters
        ----------
        array
            Read at the root, written elsewhere.
        root
            Its rank.
        asynchronous
            As for all_reduce().
        """
        if isinstance(root, bool) or not hasattr(root, "__index__") or not 0 <= root < self.size:
            raise UsageError(f"root is {root}; expected a rank below {self.size}.")
        root = operator.index(root)
        target = flat("array", array, writable=self.rank != root)
        return self._run(
            Call.BROADCAST, target.size, DType.of(target.dtype), Op.SUM, None,
            lambda: self._source.working(target, is_result=self.rank != root),
            asynchronous, root=root,
        )  # fmt: skip

    def barrier(self, *, asynchronous: bool = False) -> Handle:
        """Wait until all ranks have called this."""
        return self._run(
            Call.BARRIER, 0, DType.INT8, Op.SUM, None,
            lambda: Buffer(np.empty(0, np.int8), None), asynchronous,
        )  # fmt: skip

    def exchange(self, document: dict[str, Any], timeout_s: float = 30.0) -> list[dict[str, Any]]:
        """Small documents of all ranks, over the control channel and not over RDMA.

        For setting up and for results: it costs milliseconds and goes through rank 0.

        Parameters
        ----------
        document
            For JSON, up to 1 MiB.
        timeout_s
            Of this exchange.

        Returns
        -------
        list
            One document a rank.
        """
        return self._gather("exchange", document, timeout_s)

    def _gather(
        self, purpose: str, document: dict[str, Any], timeout_s: float
    ) -> list[dict[str, Any]]:
        """Gather documents that all ranks send for one purpose."""
        answers = self._channel.all_gather({"for": purpose, "document": document}, timeout_s)
        for rank, answer in enumerate(answers):
            if answer.get("for") != purpose:
                raise MismatchError(
                    f"Rank {self.rank} called {purpose}, and rank {rank} "
                    f"{str(answer.get('for'))[:40]}.",
                    "All ranks must call the same things in the same order.",
                    rank=rank,
                )
        return [dict(answer["document"]) for answer in answers]

    # ---- how they run ----

    def _run(
        self,
        collective: Call,
        count: int,
        dtype: DType,
        op: Op,
        algorithm: Algorithm | None,
        prepare: Callable[[], Buffer],
        asynchronous: bool,
        *,
        root: int = 0,
        final: slice = slice(None),
        compression: int = 0,
        ratio: float = 1.0,
        store: Callable[[Array], None] | None = None,
    ) -> Handle:
        """Start one operation.

        `final` is the part of the working buffer that the reduction completes at this rank;
        `store` takes the complete buffer in place of the Buffer's own store().
        """
        self._check_usable()
        itemsize = dtype.numpy.itemsize
        chunk = self.settings.chunk_nbytes // itemsize
        plan = plan_call(collective, algorithm, self.rank, self.size, count, chunk, root)
        if len(plan.sends) >= MAX_MESSAGES or len(plan.receives) >= MAX_MESSAGES:
            raise UsageError(
                f"{count} elements are more than {MAX_MESSAGES} messages of {chunk}.",
                "Use a larger chunk_nbytes.",
            )
        buffer = prepare()

        def end() -> None:
            finish(op, dtype, buffer.array[final], self.size)
            if store is not None:
                store(buffer.array)
            buffer.store()

        def reduce(accumulator: Array, incoming: Array) -> None:
            reduce_into(op, dtype, accumulator, incoming)

        work = Work(buffer.array, buffer.memory, reduce, end, buffer.release)
        name = collective.label + (
            f" of {count} {dtype.label}" if collective != Call.BARRIER else ""
        )
        memory = buffer.memory
        agree_with = self._neighbours | {send.peer for send in plan.sends}
        agree_with |= {receive.peer for receive in plan.receives}
        with self._calling:
            description = Description(
                sequence=self._sequence,
                collective=collective,
                op=int(op),
                dtype=int(dtype),
                algorithm=ALGORITHM_NUMBERS[algorithm],
                compression=compression,
                root=root,
                size=self.size,
                count=count,
                chunk=chunk,
                address=memory.address if memory else 0,
                rkey=memory.rkey if memory else 0,
            )
            operation = Operation(name, description, plan, work, agree_with)
            operation.compression_ratio = ratio
            operation.iteration = self.iteration
            if self._engine is None:
                operation.end()
            else:
                self._submit(self._engine, operation)
        handle = Handle(operation)
        if not asynchronous:
            handle.wait()
        return handle

    def _submit(self, engine: Engine, operation: Operation) -> None:
        """Hand an operation over; whatever interrupts this leaves numbers and memory in order."""
        try:
            engine.reserve()
            try:
                self._sequence += 1
                engine.submit(operation)
            except BaseException:
                if not operation.is_submitted:
                    self._sequence -= 1
                    engine.unreserve()
                raise
        except BaseException:
            if not operation.is_submitted and operation.work.release is not None:
                operation.work.release()
            raise

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("The communicator is closed.")
        if self._engine is not None and self._engine.error is not None:
            raise self._engine.error.with_traceback(None)

    def _copied(self, source: Array, target: Array) -> Buffer:
        """A buffer that begins as `source` and ends in `target`."""
        if target is not source and _address(target) != _address(source):
            target[:] = source
        return self._source.working(target)

    def _gathering(self, whole: Array, part: Array) -> Buffer:
        """A buffer that begins with `part` in this rank's block and ends in `whole`."""
        block = whole[self.rank * part.size : (self.rank + 1) * part.size]
        if _address(block) != _address(part):
            block[:] = part
        return self._source.working(whole)

    def _compressed(
        self,
        source: Array,
        target: Array,
        op: Op,
        algorithm: str | Algorithm | None,
        compression: Compression,
        key: Hashable,
        asynchronous: bool,
    ) -> Handle:
        if not isinstance(compression, (Cast, TopK)):
            raise UsageError(f"compression is {compression!r}; expected Cast(...) or TopK(...).")
        if op not in (Op.SUM, Op.AVG):
            raise UsageError(
                f"{compression} works with sum and avg, not with {op.label}.",
                "Leave the compression out.",
            )
        ratio = compression.traffic_ratio(source.size, DType.of(source.dtype), self.size)
        if isinstance(compression, Cast):
            cast = compression

            def shorten() -> Buffer:
                short = self._source.scratch(cast.dtype.numpy, source.size)
                cast.compress(source, short.array)
                return short

            chosen = self._algorithm(algorithm, cast.wire_nbytes(source.size, cast.dtype))
            return self._run(
                Call.ALL_REDUCE, source.size, cast.dtype, op, chosen, shorten, asynchronous,
                compression=cast.wire_id, ratio=ratio,
                store=lambda wire: cast.restore(wire, target),
            )  # fmt: skip
        top = compression
        nbytes = top.wire_nbytes(source.size, DType.of(source.dtype))

        def select() -> Buffer:
            all_of_them = self._source.scratch(np.dtype(np.int8), nbytes * self.size)
            mine = all_of_them.array[self.rank * nbytes : (self.rank + 1) * nbytes]
            top.compress(source, key, mine)
            return all_of_them

        def combine(selections: Array) -> None:
            top.decompress_sum(np.split(selections, self.size), target)
            finish(op, DType.of(target.dtype), target, self.size)

        return self._run(
            Call.TOP_K, nbytes, DType.INT8, Op.SUM, self._algorithm(algorithm, nbytes * self.size),
            select, asynchronous, compression=top.wire_id, ratio=ratio, store=combine,
        )  # fmt: skip

    def _algorithm(self, wanted: str | Algorithm | None, nbytes: int) -> Algorithm:
        if wanted is None or wanted == "auto":
            wanted = self.algorithm
        if wanted is None:
            return schedule.choose_algorithm(self.size, nbytes)
        try:
            return Algorithm(wanted)
        except ValueError:
            names = ", ".join(entry.value for entry in Algorithm)
            raise UsageError(f"algorithm is {wanted!r}; expected {names} or auto.") from None

    def _blocks(self, small_name: str, small: Array, large_name: str, large: Array) -> None:
        if small.dtype != large.dtype or small.size * self.size != large.size:
            raise UsageError(
                f"{large_name} has {large.size} {large.dtype} and {small_name} {small.size} "
                f"{small.dtype}; expected {self.size} times as many of the same type."
            )

    # ---- reports ----

    def _report(self, operation: Operation, event: str) -> None:
        """Tell the reporter; called by the engine's thread, so nothing here waits."""
        assert self._reporter is not None
        if event == "begin":
            total = operation.itemsize * sum(s.stop - s.start for s in operation.plan.sends)
            self._reports[operation.sequence] = self._reporter.begin(
                operation.iteration, total, operation.compression_ratio
            )
        elif event == "progress":
            self._reports[operation.sequence].progress(operation.sent_nbytes)
        else:
            report = self._reports.pop(operation.sequence, None)
            if report is not None:
                report.progress(operation.sent_nbytes)
                report.end()

    # ---- ending ----

    def close(self) -> None:
        """Leave. Waits up to 10 s for the other ranks to close, too.

        Otherwise the last messages of those that are behind would be lost. Safe to call twice,
        and after a failure.
        """
        self._close(wait=True)

    def _close(self, *, wait: bool) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as stack:
            stack.callback(self._owned.close)
            if self._engine is None or self._wiring is None:
                return
            stack.callback(self._wiring.close)
            stack.callback(self._engine.close)
            if wait and self._engine.error is None:
                # One that is gone, or does not close: then the queue pairs have had time at least.
                with contextlib.suppress(StellarError, OSError, TimeoutError):
                    self._gather("close", {}, CLOSE_TIMEOUT_S)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not self._closed and self.size > 1:
            # The others would wait for what this rank no longer does.
            self._channel.abort(
                {
                    "error": PeerError.__name__,
                    "message": f"{type(error).__name__} in its program: {error}"[:500],
                    "rank": self.rank,
                }
            )
        self._close(wait=error is None)


def _address(array: Array) -> int:
    return int(array.ctypes.data)


def _op(op: str | Op) -> Op:
    return op if isinstance(op, Op) else Op.parse(op)


def _same(source: Array, target: Array) -> None:
    if source.dtype != target.dtype or source.size != target.size:
        raise UsageError(
            f"array has {source.size} {source.dtype}, out has {target.size} {target.dtype}; "
            "expected the same."
        )
