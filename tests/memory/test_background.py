"""Registration in the background, and ahead of need, on a device that is not there."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest

from controller.errors import UsageError
from controller.memory.background import (
    BackgroundRegistrar,
    Cancelled,
    Job,
    MAX_REST_s,
    Pacer,
    Urgency,
)
from controller.memory.errors import ForkError, PoolError
from controller.memory.policies import make_policy
from controller.memory.prefetch import Prefetcher, acquire_in_background
from controller.memory.region_cache import RegionCache
from controller.memory.stats import PoolStats
from controller.verbs.registration import MemoryRegion, RegistrationError
from tests.memory.watched import (
    PAGE,
    OldestFirst,
    Rig,
    WatchedRegistrar,
    make_rig,
    pages,
)
from tests.waiting import wait


@pytest.fixture
def registrar() -> WatchedRegistrar:
    return WatchedRegistrar()


@pytest.fixture
def background(registrar: WatchedRegistrar):  # type: ignore[no-untyped-def]
    made = BackgroundRegistrar(registrar, step_nbytes=4 * PAGE, busy_share=1.0)
    yield made
    made.close()


def address_of(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def resident_pages(array: np.ndarray) -> int:
    """Pages of the array's mapping that are there, by the kernel's account."""
    wanted = f"{address_of(array):x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(wanted):
            for inner in lines:
                if inner.startswith("Rss:"):
                    return int(inner.split()[1]) * 1024 // PAGE
    raise AssertionError(f"no mapping at {wanted}")


# ---- steps ----


def test_pages_are_there_after_they_are_touched() -> None:
    array = pages(64)
    assert Pacer(16 * PAGE, 1.0).touch(address_of(array), address_of(array) + 64 * PAGE)
    assert resident_pages(array) == 64


def test_touching_keeps_what_is_written() -> None:
    array = pages(4)
    array[:] = 7
    Pacer(PAGE, 1.0).touch(address_of(array), address_of(array) + array.nbytes)
    assert (array == 7).all()


def test_touching_memory_that_is_not_there_fails_quietly() -> None:
    array = pages(4)
    address = address_of(array)
    del array
    assert not Pacer(PAGE, 1.0).touch(address, address + PAGE)


def test_rests_keep_the_share_of_work_within_its_bound() -> None:
    now_ns = 0

    def clock() -> int:
        return now_ns

    def sleep(seconds: float) -> None:
        nonlocal now_ns
        now_ns += round(seconds * 1e9)

    def work() -> None:
        nonlocal now_ns
        now_ns += 1_000_000

    pacer = Pacer(PAGE, 0.25, clock, sleep)
    for _ in range(10):
        pacer.step(work)
    assert now_ns == 40_000_000


@pytest.mark.parametrize(("step_nbytes", "busy_share"), [(0, 0.5), (1, 0.0), (1, 1.1), (1, -1)])
def test_steps_that_cannot_be_are_refused(step_nbytes: int, busy_share: float) -> None:
    with pytest.raises(UsageError, match="allowed"):
        Pacer(step_nbytes, busy_share)


def test_no_rest_is_longer_than_its_bound() -> None:
    now_ns = 0
    rests_s: list[float] = []

    def work() -> None:
        nonlocal now_ns
        now_ns += 60_000_000_000

    Pacer(PAGE, 0.01, lambda: now_ns, rests_s.append).step(work)
    assert rests_s == [MAX_REST_s]


# ---- the thread ----


def test_closing_does_not_wait_for_a_rest(registrar: WatchedRegistrar) -> None:
    registrar.before_register = lambda address, nbytes: time.sleep(0.02)
    background = BackgroundRegistrar(registrar, busy_share=0.002)  # a rest of 10 s
    array = pages(1)
    background.submit(address_of(array), PAGE)
    wait(lambda: len(registrar.came) == 1)
    begin_s = time.monotonic()
    background.close()
    assert time.monotonic() - begin_s < 5


def test_a_thread_that_may_not_be_polite_works_all_the_same(
    registrar: WatchedRegistrar, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    background = BackgroundRegistrar(registrar)
    assert background.run(lambda _: 7).result(5) == 7
    background.close()


def test_a_registration_called_off_during_its_last_part_leaves_nothing(
    registrar: WatchedRegistrar, background: BackgroundRegistrar
) -> None:
    begun, gate = threading.Event(), threading.Event()

    def hold(address: int, nbytes: int) -> None:
        begun.set()
        gate.wait(10)

    registrar.before_register = hold
    array = pages(1)
    job = background.submit(address_of(array), PAGE)
    assert begun.wait(10)
    assert job.cancel()
    gate.set()
    with pytest.raises(Cancelled):
        job.result(10)
    assert len(registrar.came) == 1
    assert not registrar.regions


def test_a_part_that_the_device_keeps_does_not_keep_the_others(
    registrar: WatchedRegistrar, background: BackgroundRegistrar
) -> None:
    array = pages(3)

    def refuse_last(address: int, nbytes: int) -> None:
        if address == address_of(array) + 2 * PAGE:
            raise RegistrationError("fake0 cannot.")

    def keep_first(region: MemoryRegion) -> None:
        if region.address == address_of(array):
            raise RegistrationError("fake0 keeps it.")

    registrar.before_register, registrar.before_deregister = refuse_last, keep_first
    job = background.submit(address_of(array), array.nbytes, region_nbytes=PAGE)
    with pytest.raises(RegistrationError, match="cannot"):
        job.result(10)
    assert registrar.went == [(address_of(array) + PAGE, PAGE)]


def test_a_range_is_touched_and_registered_as_one_region(
    registrar: WatchedRegistrar, background: BackgroundRegistrar
) -> None:
    array = pages(16)
    (region,) = background.submit(address_of(array), array.nbytes).result(10)
    assert (region.address, region.nbytes) == (address_of(array), array.nbytes)
    assert resident_pages(array) == 16


def test_a_large_range_can_be_registered_in_parts_that_cover_it(
    registrar: WatchedRegistrar, background: BackgroundRegistrar
) -> None:
    array = pages(10)
    parts = background.submit(
        address_of(array) + 5, array.nbytes - 5, region_nbytes=4 * PAGE
    ).result(10)
    assert [part.nbytes for part in parts] == [4 * PAGE, 4 * PAGE, 2 * PAGE - 5]
    assert parts[0].address == address_of(array) + 5
    for before, after in itertools.pairwise(parts):
        assert before.address + before.nbytes == after.address


def test_parts_are_given_back_when_one_of_them_fails(
    registrar: WatchedRegistrar, background: BackgroundRegistrar
) -> None:
    array = pages(8)

    def refuse_last(address: int, nbytes: int) -> None:
        if address == address_of(array) + 6 * PAGE:
            raise RegistrationError("fake0 cannot.")

    registrar.before_register = refuse_last
    job = background.submit(address_of(array), array.nbytes, region_nbytes=2 * PAGE)
    with pytest.raises(RegistrationError):
        job.result(10)
    assert len(registrar.came) == 3
    assert not registrar.regions


def test_what_somebody_waits_for_goes_before_what_may_be_needed(
    background: BackgroundRegistrar,
) -> None:
    gate = threading.Event()
    order: list[str] = []
    background.run(lambda _: gate.wait(10))
    first = background.run(lambda _: order.append("prefetch"), Urgency.PREFETCH)
    second = background.run(lambda _: order.append("demand"), Urgency.DEMAND)
    third = background.run(lambda _: order.append("demand again"), Urgency.DEMAND)
    gate.set()
    for job in (first, second, third):
        job.result(10)
    assert order == ["demand", "demand again", "prefetch"]


def test_a_waiting_registration_can_be_cancelled(
    registrar: WatchedRegistrar, background: BackgroundRegistrar
) -> None:
    gate = threading.Event()
    background.run(lambda _: gate.wait(10))
    array = pages(1)
    job = background.submit(address_of(array), PAGE)
    assert job.cancel()
    gate.set()
    with pytest.raises(CancelledError):
        job.result(10)
    background.run(lambda _: None).result(10)
    assert registrar.came == []


def test_a_registration_under_way_stops_at_its_next_step_and_leaves_nothing(
    registrar: WatchedRegistrar, background: BackgroundRegistrar
) -> None:
    array = pages(8)
    begun, gate = threading.Event(), threading.Event()

    def hold(address: int, nbytes: int) -> None:
        begun.set()
        gate.wait(10)

    registrar.before_register = hold
    job = background.submit(address_of(array), array.nbytes, region_nbytes=PAGE)
    assert begun.wait(10)
    assert job.cancel()
    gate.set()
    with pytest.raises(Cancelled):
        job.result(10)
    assert len(registrar.came) == 1
    assert not registrar.regions
    assert not job.cancel()


def test_closing_cancels_what_waits_and_ends_the_thread(registrar: WatchedRegistrar) -> None:
    background = BackgroundRegistrar(registrar)
    begun = threading.Event()

    def work(job: Job[None]) -> None:
        begun.set()
        while True:
            job.check()
            time.sleep(0.001)

    running, waiting = background.run(work), background.run(lambda _: None)
    assert begun.wait(10)
    background.close()
    background.close()
    assert waiting.cancelled()
    with pytest.raises(Cancelled):
        running.result(0)
    with pytest.raises(PoolError, match="closed"):
        background.run(lambda _: None)


def test_the_thread_does_not_preempt_others(background: BackgroundRegistrar) -> None:
    policy = background.run(lambda _: os.sched_getscheduler(0)).result(10)
    assert policy == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_child_process_is_told_that_it_has_no_such_thread(
    background: BackgroundRegistrar,
) -> None:
    child = os.fork()
    if not child:
        try:
            background.run(lambda _: None)
        except ForkError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_ranges_that_cannot_be_are_refused(background: BackgroundRegistrar) -> None:
    with pytest.raises(UsageError, match="allowed: from 1"):
        background.submit(4096, 0)
    with pytest.raises(UsageError, match="allowed: from 1"):
        background.submit(4096, 1, region_nbytes=0)


# ---- into the cache ----


def test_a_buffer_is_registered_without_waiting_for_it(background: BackgroundRegistrar) -> None:
    rig = make_rig()
    array = pages(4)
    job = acquire_in_background(rig.cache, background, array, key="soon")
    with job.result(10) as region:
        assert region.address == address_of(array)
        rig.cache.acquire(array).release()
        assert rig.stats.hits == 1
    assert resident_pages(array) == 4


def test_the_thread_rests_after_a_registration_but_its_result_does_not_wait(
    registrar: WatchedRegistrar, background: BackgroundRegistrar
) -> None:
    now_ns = 0
    resting, gate, rests_s = threading.Event(), threading.Event(), []

    def take_a_second(*_: int) -> None:
        nonlocal now_ns
        now_ns += 1_000_000_000

    def rest(seconds: float) -> None:
        rests_s.append(seconds)
        resting.set()
        assert gate.wait(10)

    cache = RegionCache(
        registrar,
        capacity_bytes=64 * PAGE,
        max_regions=100,
        policy=OldestFirst(),
        stats=PoolStats(),
        clock=lambda: now_ns,
    )
    array = pages(8)
    registrar.before_register = take_a_second
    background.pacer = Pacer(16 * PAGE, 0.25, lambda: now_ns, rest)
    job = acquire_in_background(cache, background, array)
    assert resting.wait(10)
    job.result(0).release()
    gate.set()
    acquire_in_background(cache, background, array).result(10).release()  # a hit
    assert rests_s == [3.0]
    cache.close()


def test_a_buffer_that_is_no_longer_wanted_is_let_go(background: BackgroundRegistrar) -> None:
    rig = make_rig()
    array = pages(1)
    begun, gate = threading.Event(), threading.Event()

    def hold(address: int, nbytes: int) -> None:
        begun.set()
        gate.wait(10)

    rig.registrar.before_register = hold
    job = acquire_in_background(rig.cache, background, array)
    assert begun.wait(10)
    job.cancel()
    gate.set()
    with pytest.raises(Cancelled):
        job.result(10)
    assert rig.cache.invalidate(array) == 1


# ---- ahead of need ----


def evicted(rig: Rig, arrays: list[np.ndarray]) -> None:
    """Use them in order; the cache holds fewer."""
    for array in arrays:
        rig.cache.acquire(array).release()


def prefetches(rig: Rig) -> dict[str, int]:
    counts: dict[str, int] = rig.stats.snapshot()["prefetch"]
    return counts


def test_what_the_policy_expects_is_registered_before_it_is_asked_for(
    background: BackgroundRegistrar,
) -> None:
    rig = make_rig(2)
    a, b, c = arrays = [pages(1) for _ in range(3)]
    Prefetcher(rig.cache, background)
    rig.policy.predicted = [address_of(a)]
    evicted(rig, arrays)
    wait(lambda: prefetches(rig)["issued"] == 1 and len(rig.registrar.came) == 4)
    assert rig.registrar.came[-1] == (address_of(a), PAGE)
    wait(lambda: address_of(a) in rig.policy.resident or rig.cache.candidates(9) == [])
    rig.cache.acquire(a).release()
    assert rig.stats.hits == 1
    assert prefetches(rig) == {"issued": 1, "useful": 1, "wasted": 0}
    del b, c


def test_a_prefetched_region_that_goes_unused_counts_as_wasted() -> None:
    rig = make_rig(1)
    a, b = pages(1), pages(1)
    evicted(rig, [a, b])
    assert rig.cache.prefetch(address_of(a))
    evicted(rig, [b])
    assert prefetches(rig) == {"issued": 1, "useful": 0, "wasted": 1}


def test_only_memory_whose_owner_is_known_to_be_alive_is_prefetched() -> None:
    rig = make_rig(1)
    dead, nobodys, alive, other = (pages(1) for _ in range(4))
    keys = [address_of(array) for array in (dead, nobodys, alive)]
    rig.cache.acquire(dead).release()
    rig.cache.acquire((address_of(nobodys), PAGE)).release()
    evicted(rig, [alive, other])
    del dead
    assert [rig.cache.prefetch(key) for key in keys] == [False, False, True]
    assert keys[0] in rig.policy.forgotten
    assert keys[1] in rig.policy.forgotten


def test_invalidated_memory_is_never_prefetched() -> None:
    rig = make_rig(1)
    a, b = pages(1), pages(1)
    evicted(rig, [a, b])
    assert rig.cache.invalidate(a) == 0
    assert not rig.cache.prefetch(address_of(a))
    rig.cache.candidates(1)
    assert address_of(a) in rig.policy.forgotten


def test_a_prefetch_takes_no_room_from_what_was_prefetched_or_is_in_use() -> None:
    rig = make_rig(2)
    a, b, c, d = (pages(1) for _ in range(4))
    evicted(rig, [a, b, c, d])
    assert rig.cache.prefetch(address_of(a))
    with rig.cache.acquire(d):
        assert not rig.cache.prefetch(address_of(b))
    assert rig.cache.prefetch(address_of(b))
    assert prefetches(rig) == {"issued": 2, "useful": 0, "wasted": 0}


def test_prefetching_raises_the_hit_ratio_of_a_loop_that_is_larger_than_the_cache(
    background: BackgroundRegistrar,
) -> None:
    buffers, room, rounds = 40, 30, 20
    ratios = []
    for ahead in (False, True):
        stats = PoolStats()
        cache = RegionCache(
            WatchedRegistrar(),
            capacity_bytes=room * PAGE,
            max_regions=1000,
            policy=make_policy("heat", room * PAGE, 1000),
            stats=stats,
        )
        if ahead:
            Prefetcher(cache, background)
        arrays = [pages(1) for _ in range(buffers)]
        for _ in range(rounds):
            for array in arrays:
                cache.acquire(array).release()
                background.run(lambda _: None, Urgency.PREFETCH).result(10)  # computing
        ratios.append(stats.hits / stats.gets)
        cache.close()
    assert ratios[1] > ratios[0] + 0.05, ratios


def test_what_is_resident_or_unknown_is_not_prefetched() -> None:
    rig = make_rig(2)
    a = pages(1)
    evicted(rig, [a])
    assert not rig.cache.prefetch(address_of(a))
    assert not rig.cache.prefetch(12345)
    assert not rig.cache.prefetch("name")
    assert prefetches(rig)["issued"] == 0


def test_a_closed_background_does_not_disturb_the_cache(registrar: WatchedRegistrar) -> None:
    rig = make_rig(1)
    background = BackgroundRegistrar(registrar)
    Prefetcher(rig.cache, background)
    background.close()
    evicted(rig, [pages(1), pages(1)])


def test_a_prefetch_depth_below_one_is_refused(background: BackgroundRegistrar) -> None:
    with pytest.raises(UsageError, match="allowed: from 1"):
        Prefetcher(make_rig().cache, background, depth=0)
