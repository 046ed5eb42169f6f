"""Two hosts in one process, a stream of RDMA WRITEs between them, and what registration does to it.

The process that posts and polls is the one that registers: whatever keeps Python's lock, or a core,
shows in the stream's rate.
"""

from __future__ import annotations

import contextlib
import mmap
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from pyverbs.wr import SGE, SendWR

from controller.dataplane.netns import in_netns
from controller.memory.background import BackgroundRegistrar, Pacer
from controller.memory.region_cache import RegionCache
from controller.verbs.completions import CompletionQueue
from controller.verbs.device import Device
from controller.verbs.enums import verbs
from controller.verbs.queue_pair import QueuePair, Timing
from controller.verbs.registration import MemoryRegion, Registrar
from tests.rxe.verbs import RxeHost

KIB, MIB = 1 << 10, 1 << 20
MESSAGE_nbytes = 64 * KIB
# Twice what rxe has unacknowledged (128 packets of 4 KiB), so that it never waits for Python.
DEPTH = 2 * 128 * 4 * KIB // MESSAGE_nbytes
PATIENT = Timing(timeout=18)  # 1 s: a guest that stands still is no loss


class Memory:
    """Anonymous memory of base pages, untouched."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
        self.array = np.frombuffer(self._mapping, np.uint8)
        self.address = int(self.array.ctypes.data)

    def touch(self) -> Memory:
        """Let all pages be there."""
        assert Pacer(64 * MIB, 1.0).touch(self.address, self.address + self.nbytes)
        return self

    def close(self) -> None:
        """Unmap; no array over it may be left."""
        del self.array
        self._mapping.close()


@contextlib.contextmanager
def open_devices(hosts: tuple[RxeHost, RxeHost]) -> Iterator[tuple[Device, Device]]:
    """The devices of both hosts, in this process."""
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(in_netns(host.netns, lambda host=host: Device(host.device)))
            for host in hosts
        ]
        yield opened[0], opened[1]


class WriteStream:
    """A thread that writes from one device to the other until it is closed."""

    def __init__(self, devices: tuple[Device, Device]) -> None:
        self._memories = [Memory(MESSAGE_nbytes).touch() for _ in devices]
        self._regions = [
            device.registrar.register(memory.address, memory.nbytes)
            for device, memory in zip(devices, self._memories, strict=True)
        ]
        self._devices = devices
        self._queues = [CompletionQueue(device, DEPTH + 1) for device in devices]
        self._pairs = [
            QueuePair(device, queue, DEPTH, 1)
            for device, queue in zip(devices, self._queues, strict=True)
        ]
        first, second = self._pairs
        first.connect(second.endpoint, 0, PATIENT)
        second.connect(first.endpoint, 0, PATIENT)
        self.problem: BaseException | None = None
        self._marks: list[tuple[float, int]] = []
        self._stop = False
        self._thread = threading.Thread(target=self._guarded, name="write-stream")
        self._thread.start()

    def __enter__(self) -> WriteStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()
        for pair in self._pairs:
            pair.close()
        for queue in self._queues:
            queue.close()
        for device, region, memory in zip(
            self._devices, self._regions, self._memories, strict=True
        ):
            device.registrar.deregister(region)
            memory.close()

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.problem = error

    def _run(self) -> None:
        queue, pair = self._queues[0], self._pairs[0]
        source, target = self._regions
        poller = select.poll()
        poller.register(queue.fd, select.POLLIN)
        posted = complete = 0
        while not (self._stop and posted == complete):
            while not self._stop and posted - complete < DEPTH:
                sge = SGE(source.address, MESSAGE_nbytes, source.lkey)
                request = SendWR(opcode=verbs.IBV_WR_RDMA_WRITE, num_sge=1, sg=[sge])
                request.set_wr_rdma(target.rkey, target.address)
                pair.qp.post_send(request)
                posted += 1
            completions = queue.poll(DEPTH)
            if not completions:
                queue.arm()
                completions = queue.poll(DEPTH)
                if not completions:
                    poller.poll(1000)
                    queue.take_events()
                    continue
            for completion in completions:
                assert completion.status == verbs.IBV_WC_SUCCESS, completion.status
            complete += len(completions)
            self._marks.append((time.monotonic(), complete * MESSAGE_nbytes))

    def mean_rate_Bps(self, windows: Sequence[tuple[float, float]]) -> float:
        """What was complete in all of these times, by their sum.

        Parameters
        ----------
        windows
            Begin and end, in seconds of the monotonic clock. Between completions, what was complete
            is interpolated.
        """
        assert self.problem is None, self.problem
        times_s, sent = (np.array(column, float) for column in zip(*self._marks, strict=True))
        ends_s = np.array(windows)
        at_ends = np.interp(ends_s.ravel(), times_s, sent).reshape(ends_s.shape)
        return float(np.sum(at_ends[:, 1] - at_ends[:, 0]) / np.sum(ends_s[:, 1] - ends_s[:, 0]))


# ---- measuring ----

# What is registered in one go between two looks at the undisturbed rate, and by one call.
SLICE_nbytes = 16 * MIB
PART_nbytes = 4 * MIB
# A tenth of one core. The hosts of these tests have two for both ends of the transfer, so what
# registration takes, the transfer loses; a host with a core to spare can afford more.
BUSY_SHARE = 0.1
MIN_WINDOW_s = 0.1


def kept_while_registering(
    stream: WriteStream,
    registrar: Registrar,
    memory: Memory,
    busy_share: float = BUSY_SHARE,
    part_nbytes: int = PART_nbytes,
    slice_nbytes: int = SLICE_nbytes,
) -> float:
    """Share of its rate that a stream keeps while a range is registered in the background.

    The range is registered in slices, and after each the stream has as long for itself: what else
    happens on the machine falls on both alike.

    Parameters
    ----------
    stream
        Running.
    registrar
        Of a device of the same process.
    memory
        Nothing of it is registered afterwards.
    busy_share, part_nbytes, slice_nbytes
        Of the thread's time, what one call registers, and a slice.
    """
    background = BackgroundRegistrar(registrar, step_nbytes=MIB, busy_share=busy_share)
    regions: list[MemoryRegion] = []
    registering: list[tuple[float, float]] = []
    alone: list[tuple[float, float]] = []
    for start in range(memory.address, memory.address + memory.nbytes, slice_nbytes):
        nbytes = min(slice_nbytes, memory.address + memory.nbytes - start)
        begin_s = time.monotonic()
        regions += background.submit(start, nbytes, region_nbytes=part_nbytes).result()
        end_s = time.monotonic()
        time.sleep(max(MIN_WINDOW_s, end_s - begin_s))
        registering.append((begin_s, end_s))
        alone.append((end_s, time.monotonic()))
    background.close()
    time.sleep(MIN_WINDOW_s)  # completions of the last window
    kept = stream.mean_rate_Bps(registering) / stream.mean_rate_Bps(alone)
    for region in regions:
        registrar.deregister(region)
    return kept


def standstill(register: Callable[[], Callable[[], object]]) -> float:
    """Longest time that another thread of Python stood still, as a share of a registration.

    Parameters
    ----------
    register
        Registers, and returns what undoes it.
    """
    ticks_s: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks_s.append(time.monotonic())
            time.sleep(0.0005)

    ticker = threading.Thread(target=tick)
    ticker.start()
    time.sleep(0.05)
    begin_s = time.monotonic()
    undo = register()
    end_s = time.monotonic()
    stop.set()
    ticker.join()
    undo()
    inside_s = [begin_s, *(at for at in ticks_s if begin_s < at < end_s), end_s]
    return float(np.max(np.diff(inside_s))) / (end_s - begin_s)


def register_time_us(registrar: Registrar, memory: Memory) -> float:
    """How long one registration takes; it is undone."""
    regions: list[MemoryRegion] = []
    elapsed_us = timed_us(lambda: regions.append(registrar.register(memory.address, memory.nbytes)))
    registrar.deregister(regions[0])
    return elapsed_us


def hit_times_us(cache: RegionCache, array: np.ndarray, count: int) -> list[float]:
    """How long so many hits take, each with its release; less the least that the clock takes.

    In the lab kernel reading the clock is a system call, and takes longer than the hit.
    """
    cache.acquire(array).release()
    clock_us = min(timed_us(lambda: None) for _ in range(count))
    return [timed_us(lambda: cache.acquire(array).release()) - clock_us for _ in range(count)]


def hits_time_us(cache: RegionCache, array: np.ndarray, count: int) -> float:
    """How long so many hits take together, each with its release."""
    cache.acquire(array).release()

    def hits() -> None:
        for _ in range(count):
            cache.acquire(array).release()

    return timed_us(hits)


def timed_us(work: Callable[[], object]) -> float:
    """How long a call takes."""
    begin_ns = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - begin_ns) / 1e3
