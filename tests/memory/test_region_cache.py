"""The region cache on a device that is not there: hits, merges, limits, evictions, owners."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from controller.errors import UsageError
from controller.memory.errors import ForkError, PoolError, PoolExhaustedError, RegionInUseError
from controller.memory.export import Export
from controller.memory.region_cache import CachedRegion, RegionCache
from controller.verbs.registration import MemoryRegion, RegistrationError
from tests.memory.watched import PAGE, Rig, WatchedRegistrar, make_rig, pages
from tests.waiting import wait


@pytest.fixture
def rig() -> Rig:
    return make_rig()


def address_of(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def touch(cache: RegionCache, buffer: object, key: object = None) -> int:
    """Ask and let go; return the generation."""
    with cache.acquire(buffer, key) as region:
        return region.generation


# ---- hits and misses ----


def test_the_second_request_for_a_buffer_is_a_hit_with_the_same_keys(rig: Rig) -> None:
    array = pages(3)
    first, second = rig.cache.acquire(array), rig.cache.acquire(array[5:100])
    assert (first.lkey, first.rkey, first.generation) == (
        second.lkey, second.rkey, second.generation,
    )  # fmt: skip
    assert (first.address, first.nbytes) == (address_of(array), 3 * PAGE)
    assert (second.address, second.nbytes) == (address_of(array) + 5, 95)
    assert rig.registrar.registered == 1
    assert (rig.stats.gets, rig.stats.hits, rig.stats.misses) == (2, 1, 1)
    first.release()
    second.release()


def test_whole_pages_are_registered(rig: Rig) -> None:
    array = pages(4)
    touch(rig.cache, array[PAGE - 1 : 2 * PAGE + 1])
    assert rig.registrar.came == [(address_of(array), 3 * PAGE)]


def test_neighbours_that_meet_in_a_page_stay_two_regions(rig: Rig) -> None:
    array = pages(2)
    middle = PAGE + 100
    touch(rig.cache, array[:middle])
    touch(rig.cache, array[middle:])
    assert rig.evictions("merged") == 0
    assert len(rig.registrar.regions) == 2
    touch(rig.cache, array[:10])
    assert rig.stats.hits == 1


def test_overlapping_requests_become_one_region_that_covers_both(rig: Rig) -> None:
    array = pages(10)
    touch(rig.cache, array[: 4 * PAGE])
    touch(rig.cache, array[3 * PAGE : 8 * PAGE])
    assert rig.evictions("merged") == 1
    assert [region.nbytes for region in rig.registrar.regions.values()] == [8 * PAGE]
    touch(rig.cache, array[: 8 * PAGE])
    assert rig.stats.hits == 1


def test_a_region_in_use_that_is_merged_lives_until_its_last_user_lets_go(rig: Rig) -> None:
    array = pages(10)
    old = rig.cache.acquire(array[: 4 * PAGE])
    new = rig.cache.acquire(array[2 * PAGE : 6 * PAGE])
    assert old.rkey in {region.rkey for region in rig.registrar.regions.values()}
    assert old.rkey != new.rkey
    assert touch(rig.cache, array[:PAGE]) == new.generation
    old.release()
    assert {region.rkey for region in rig.registrar.regions.values()} == {new.rkey}
    new.release()
    assert len(rig.registrar.regions) == 1


def test_a_union_above_the_limits_is_not_made(rig: Rig) -> None:
    rig = make_rig(registrar=WatchedRegistrar(max_mr_nbytes=5 * PAGE))
    array = pages(10)
    touch(rig.cache, array[: 4 * PAGE])
    touch(rig.cache, array[3 * PAGE : 8 * PAGE])
    assert [region.nbytes for region in rig.registrar.regions.values()] == [5 * PAGE]


def test_a_union_with_memory_that_went_without_notice_falls_back_to_the_request(rig: Rig) -> None:
    base = address_of(array := pages(8))

    def refuse(address: int, nbytes: int) -> None:
        if nbytes > 4 * PAGE:
            raise RegistrationError("fake0 cannot: bad address.")

    touch(rig.cache, (base, 3 * PAGE))
    rig.registrar.before_register = refuse
    with rig.cache.acquire((base + 2 * PAGE, 4 * PAGE)) as region:
        assert rig.registrar.came[-1] == (base + 2 * PAGE, 4 * PAGE)
        assert touch(rig.cache, (base + 2 * PAGE, PAGE)) == region.generation
    assert rig.registrar.live_nbytes == 4 * PAGE
    del array


def test_a_failed_registration_leaves_nothing_behind(rig: Rig) -> None:
    array = pages(2)

    def refuse(address: int, nbytes: int) -> None:
        raise RegistrationError("fake0 cannot.")

    rig.registrar.before_register = refuse
    for _ in range(3):
        with pytest.raises(RegistrationError):
            rig.cache.acquire(array)
    rig.registrar.before_register = lambda address, nbytes: None
    big = pages(64)
    touch(rig.cache, big)  # all the room is there
    assert rig.stats.snapshot()["pinned_nbytes"] == 64 * PAGE


@pytest.mark.parametrize(
    ("buffer", "text"),
    [
        (np.zeros(0), "empty"),
        (np.zeros((4, 4))[:, 1], "holes"),
        (b"abc", "read-only"),
        ((0, 10), "cannot be"),
        ((4096, 0), "cannot be"),
        (((1 << 64) - 10, 11), "cannot be"),
        ((1, 2, 3), "allowed: .address, nbytes."),
        (("a", 1), "allowed: .address, nbytes."),
        (None, "no buffer"),
        ("text", "no buffer"),
    ],
)
def test_what_is_no_buffer_is_refused_with_its_reason(rig: Rig, buffer: object, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        rig.cache.acquire(buffer)
    assert rig.stats.gets == 0


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros((8, 8), order="F"),
        np.zeros((8, 8))[2:4],
        np.zeros(4, "M8[s]"),  # no buffer protocol, like bfloat16
        bytearray(100),
        memoryview(bytearray(100)),
        mmap.mmap(-1, 100),
    ],
    ids=lambda each: type(each).__name__,
)
def test_every_writable_contiguous_buffer_is_taken_as_a_whole(rig: Rig, buffer: object) -> None:
    array = np.asarray(buffer) if not isinstance(buffer, np.ndarray) else buffer
    with rig.cache.acquire(buffer) as region:
        assert (region.address, region.nbytes) == (address_of(array), array.nbytes)


def test_a_buffer_larger_than_the_cache_or_the_device_is_refused_with_the_limit() -> None:
    rig = make_rig(4, registrar=WatchedRegistrar(max_mr_nbytes=2 * PAGE))
    with pytest.raises(UsageError, match=f"holds {4 * PAGE}"):
        rig.cache.acquire(pages(5))
    with pytest.raises(UsageError, match=f"more than fake0 registers at once .{2 * PAGE}"):
        rig.cache.acquire(pages(3))


# ---- eviction ----


def test_the_cap_on_bytes_holds_at_every_moment() -> None:
    rig = make_rig(10)
    arrays = [pages(count) for count in (3, 3, 3, 5, 1, 9, 2)]

    def check(address: int, nbytes: int) -> None:
        assert rig.registrar.live_nbytes + nbytes <= 10 * PAGE

    rig.registrar.before_register = check
    for array in arrays * 3:
        touch(rig.cache, array)
    assert rig.evictions("bytes") > 0
    assert rig.stats.snapshot()["pinned_peak_nbytes"] <= 10 * PAGE


def test_the_cap_on_regions_holds_and_is_counted_by_its_own_reason() -> None:
    rig = make_rig(64, max_regions=3)
    for array in (arrays := [pages(1) for _ in range(5)]):
        touch(rig.cache, array)
    assert len(rig.registrar.regions) == 3
    assert rig.evictions("regions") == 2
    assert rig.evictions("bytes") == 0
    del arrays


def test_the_device_s_own_limit_of_regions_counts() -> None:
    rig = make_rig(64, max_regions=100, registrar=WatchedRegistrar(max_mr=2))
    arrays = [pages(1) for _ in range(4)]
    for array in arrays:
        touch(rig.cache, array)
    assert len(rig.registrar.regions) == 2


def test_what_the_policy_names_first_goes_first_unless_it_is_in_use() -> None:
    rig = make_rig(3)
    a, b, c, d = (pages(1) for _ in range(4))
    with rig.cache.acquire(a):
        touch(rig.cache, b)
        touch(rig.cache, c)
        touch(rig.cache, d)
        assert rig.registrar.went == [(address_of(b), PAGE)]


def test_hits_reach_the_policy_before_it_is_asked_for_a_victim() -> None:
    rig = make_rig(2)
    a, b, c = (pages(1) for _ in range(3))
    for array in (a, b, a, c):
        touch(rig.cache, array)
    assert rig.registrar.went == [(address_of(b), PAGE)]
    assert [kind for kind, _ in rig.policy.told[:6]] == [
        "request", "insert", "request", "insert", "request", "request",
    ]  # fmt: skip


def test_the_policy_hears_of_hits_in_the_end_even_without_a_miss(rig: Rig) -> None:
    array = pages(1)
    for _ in range(3000):
        touch(rig.cache, array)
    assert len(rig.policy.told) > 1900


def test_the_stream_of_a_request_reaches_the_policy(rig: Rig) -> None:
    array = pages(1)
    rig.cache.acquire(array, stream="job3").release()
    rig.cache.candidates(1)
    assert rig.policy.streams == ["job3"]


def test_a_cache_full_of_regions_in_use_says_who_uses_them() -> None:
    rig = make_rig(4)
    held = [rig.cache.acquire(pages(2), key=f"bucket{i}") for i in range(2)]
    with pytest.raises(PoolExhaustedError, match=r"bucket. \(8192 bytes, 1 in use\), bucket."):
        rig.cache.acquire(pages(1))
    held[0].release()
    touch(rig.cache, pages(1))
    held[1].release()


def test_a_region_that_the_device_keeps_counts_and_another_one_goes() -> None:
    rig = make_rig(2)
    a, b, c = (pages(1) for _ in range(3))

    def refuse(region: MemoryRegion) -> None:
        if region.address == address_of(a):
            raise RegistrationError("fake0 keeps the region: busy.")

    touch(rig.cache, a)
    touch(rig.cache, b)
    rig.registrar.before_deregister = refuse
    touch(rig.cache, c)
    assert rig.registrar.went == [(address_of(b), PAGE)]
    assert rig.registrar.live_nbytes == 2 * PAGE
    rig.registrar.before_deregister = lambda region: None
    touch(rig.cache, b)
    rig.cache.close()
    assert not rig.registrar.regions


# ---- handles ----


def test_releasing_twice_is_an_error_that_names_the_buffer(rig: Rig) -> None:
    region = rig.cache.acquire(pages(1))
    region.release()
    with pytest.raises(PoolError, match=f"{region.address:#x}.*released already"):
        region.release()


def test_a_handle_that_is_dropped_is_given_back_with_a_warning(rig: Rig) -> None:
    rig = make_rig(1)
    array = pages(1)
    region = rig.cache.acquire(array, key="bucket7")
    with pytest.warns(ResourceWarning, match="bucket7"):
        del region
        gc.collect()
    touch(rig.cache, pages(1))
    assert rig.registrar.went[0] == (address_of(array), PAGE)


def test_an_owner_lives_as_long_as_its_region_is_in_use(rig: Rig) -> None:
    region = rig.cache.acquire(pages(2)[10:])
    gc.collect()
    assert rig.evictions("owner_died") == 0
    region.release()
    wait(lambda: not rig.registrar.regions)
    assert rig.evictions("owner_died") == 1


# ---- memory that goes ----


def test_a_region_goes_when_its_owner_dies(rig: Rig) -> None:
    array = pages(2)
    view = array[10:20].view(np.int16)
    touch(rig.cache, view)
    del array
    assert rig.registrar.regions
    del view
    gc.collect()
    wait(lambda: not rig.registrar.regions)
    assert rig.evictions("owner_died") == 1


def test_new_memory_at_an_old_address_is_never_a_hit() -> None:
    rig = make_rig(1000)
    seen: set[int] = set()
    again = 0
    for _ in range(200):
        array = np.zeros(1 << 20, np.uint8)  # the allocator gives the same address again and again
        misses = rig.stats.misses
        touch(rig.cache, array)
        assert rig.stats.misses == misses + 1
        again += address_of(array) in seen
        seen.add(address_of(array))
        del array
    assert again > 100
    wait(lambda: not rig.registrar.regions)


def test_a_merged_region_goes_when_the_owner_of_either_part_dies(rig: Rig) -> None:
    memory = pages(8)

    def window(first_page: int, count: int) -> np.ndarray:
        kind = ctypes.c_char * (count * PAGE)
        return np.frombuffer(kind.from_address(address_of(memory) + first_page * PAGE), np.uint8)

    first, second = window(0, 4), window(2, 4)
    touch(rig.cache, first)
    touch(rig.cache, second)
    assert rig.evictions("merged") == 1
    del first
    wait(lambda: not rig.registrar.regions)
    touch(rig.cache, second)
    assert rig.stats.misses == 3


def test_invalidation_before_free_takes_every_region_in_the_range(rig: Rig) -> None:
    array = pages(8)
    for start in (0, 2, 4):
        touch(rig.cache, array[start * PAGE : (start + 1) * PAGE])
    assert rig.cache.invalidate(array[: 3 * PAGE]) == 2
    assert rig.evictions("invalidated") == 2
    assert len(rig.registrar.regions) == 1
    assert rig.cache.invalidate(array) == 1
    assert rig.cache.invalidate(array) == 0


def test_invalidation_of_a_region_in_use_is_refused_and_names_it(rig: Rig) -> None:
    array = pages(1)
    region = rig.cache.acquire(array, key="bucket7")
    with pytest.raises(RegionInUseError, match=r"bucket7 .*1 in use"):
        rig.cache.invalidate(array)
    assert touch(rig.cache, array) == region.generation
    region.release()
    assert rig.cache.invalidate(array) == 1


def test_invalidation_waits_for_work_requests_in_flight(rig: Rig) -> None:
    array = pages(1)
    region = rig.cache.acquire(array)
    timer = threading.Timer(0.05, region.release)
    timer.start()
    assert rig.cache.invalidate(array, timeout_s=10) == 1
    timer.join()


def test_invalidation_sees_regions_in_retirement(rig: Rig) -> None:
    array = pages(8)
    old = rig.cache.acquire(array[: 4 * PAGE], key="old")
    touch(rig.cache, array[2 * PAGE : 6 * PAGE])
    with pytest.raises(RegionInUseError, match="old"):
        rig.cache.invalidate(array)
    old.release()
    assert rig.cache.invalidate(array) == 1


# ---- rkeys in the hands of peers ----


def export(
    rig: Rig, array: np.ndarray, on_revoke: Callable[[Export], object], **how: float
) -> Export:
    with rig.cache.acquire(array, key="shared") as region:
        return region.export(on_revoke, **how)


def test_a_peer_is_told_and_answers_before_its_region_goes() -> None:
    rig = make_rig(1)
    order: list[str] = []
    rig.registrar.before_deregister = lambda region: order.append("deregister")
    array = pages(1)
    exported = export(rig, array, lambda _: order.append("revoke"))
    touch(rig.cache, pages(1))
    assert order[:2] == ["revoke", "deregister"]
    assert exported.ended
    assert rig.stats.snapshot()["revocations"] == {"answered": 1, "failed": 0}


def test_a_peer_that_refuses_keeps_its_region_and_another_one_goes() -> None:
    rig = make_rig(2)
    a, b, c = (pages(1) for _ in range(3))

    def refuse(_: Export) -> None:
        raise ConnectionError("peer gone")

    exported = export(rig, a, refuse)
    touch(rig.cache, b)
    touch(rig.cache, c)
    assert rig.registrar.went == [(address_of(b), PAGE)]
    assert not exported.ended
    assert rig.stats.snapshot()["revocations"] == {"answered": 0, "failed": 1}
    with pytest.raises(RegionInUseError, match="1 exported"):
        rig.cache.invalidate(a)
    exported.close()
    assert rig.cache.invalidate(a) == 1


def test_a_peer_that_does_not_answer_in_time_keeps_its_region() -> None:
    rig = make_rig(1)
    answer = threading.Event()
    exported = export(rig, pages(1), lambda _: answer.wait(10), timeout_s=0.05)
    with pytest.raises(PoolExhaustedError, match="shared"):
        rig.cache.acquire(pages(1))
    answer.set()
    wait(lambda: exported.ended)
    touch(rig.cache, pages(1))


def test_a_request_during_the_revocation_keeps_the_region() -> None:
    rig = make_rig(1)
    array = pages(1)
    held: list[CachedRegion] = []
    export(rig, array, lambda _: held.append(rig.cache.acquire(array)))
    with pytest.raises(PoolExhaustedError):
        rig.cache.acquire(pages(1))
    assert not rig.registrar.went
    held[0].release()


def test_the_owner_of_exported_memory_lives_until_the_peer_is_done(rig: Rig) -> None:
    exported = export(rig, pages(1), lambda _: None)
    gc.collect()
    assert rig.registrar.regions
    exported.close()
    exported.close()
    gc.collect()
    wait(lambda: not rig.registrar.regions)


def test_a_merged_region_that_a_peer_holds_goes_when_the_peer_is_done(rig: Rig) -> None:
    array = pages(8)
    exported = export(rig, array[: 4 * PAGE], lambda _: None)
    touch(rig.cache, array[2 * PAGE : 6 * PAGE])
    assert len(rig.registrar.regions) == 2
    exported.close()
    assert [region.nbytes for region in rig.registrar.regions.values()] == [6 * PAGE]


def test_a_released_region_cannot_be_exported(rig: Rig) -> None:
    region = rig.cache.acquire(pages(1))
    region.release()
    with pytest.raises(PoolError, match="released"):
        region.export(lambda _: None)


def test_a_revocation_needs_a_bound(rig: Rig) -> None:
    with rig.cache.acquire(pages(1)) as region, pytest.raises(UsageError, match="above 0"):
        region.export(lambda _: None, timeout_s=0)


# ---- the end ----


def test_closing_deregisters_everything_and_ends_the_cache(rig: Rig) -> None:
    arrays = [pages(1) for _ in range(3)]
    for array in arrays:
        touch(rig.cache, array)
    rig.cache.close()
    rig.cache.close()
    assert not rig.registrar.regions
    assert rig.evictions("closed") == 3
    with pytest.raises(PoolError, match="closed"):
        rig.cache.acquire(arrays[0])


def test_closing_is_refused_while_a_region_is_in_use_unless_forced(rig: Rig) -> None:
    region = rig.cache.acquire(pages(1), key="bucket7")
    with pytest.raises(RegionInUseError, match="bucket7"):
        rig.cache.close()
    touch(rig.cache, pages(1))
    rig.cache.close(force=True)
    assert not rig.registrar.regions
    region.release()


def test_closing_is_refused_while_a_peer_keeps_an_rkey(rig: Rig) -> None:
    answer = threading.Event()
    array = pages(1)
    exported = export(rig, array, lambda _: answer.wait(10), timeout_s=0.01)
    with pytest.raises(RegionInUseError, match="peers"):
        rig.cache.close()
    answer.set()
    wait(lambda: exported.ended)
    rig.cache.close()


def test_a_child_process_is_told_that_the_cache_is_its_parent_s(rig: Rig) -> None:
    array = pages(1)
    touch(rig.cache, array)
    child = os.fork()
    if not child:
        status = 1
        try:
            rig.cache.acquire(array)
        except ForkError:
            try:
                rig.cache.close()
            except ForkError:
                status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    touch(rig.cache, array)


# ---- threads ----


def test_hits_go_on_while_another_thread_registers(rig: Rig) -> None:
    small, large = pages(1), pages(8)
    touch(rig.cache, small)
    gate = threading.Event()
    rig.registrar.before_register = lambda address, nbytes: gate.wait(10)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(touch, rig.cache, large)
        wait(lambda: rig.stats.misses == 2)
        touch(rig.cache, small)
        assert not slow.done()
        gate.set()
        slow.result(10)


def test_threads_that_want_the_same_range_register_it_once(rig: Rig) -> None:
    array = pages(8)
    rig.registrar.before_register = lambda address, nbytes: time.sleep(0.02)
    with ThreadPoolExecutor(8) as pool:
        generations = set(pool.map(lambda _: touch(rig.cache, array), range(8)))
    assert len(generations) == 1
    assert rig.registrar.registered == 1
    assert (rig.stats.misses, rig.stats.hits) == (1, 7)


def test_invalidation_waits_for_a_registration_under_way(rig: Rig) -> None:
    array = pages(2)
    gate = threading.Event()
    rig.registrar.before_register = lambda address, nbytes: gate.wait(10)
    with ThreadPoolExecutor(2) as pool:
        registering = pool.submit(touch, rig.cache, array)
        wait(lambda: rig.stats.misses == 1)
        invalidating = pool.submit(rig.cache.invalidate, array, 10.0)
        time.sleep(0.02)
        assert not invalidating.done()
        gate.set()
        assert invalidating.result(10) == 1
        registering.result(10)
    assert not rig.registrar.regions


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_do_everything_at_once_leave_the_books_in_order(seed: int) -> None:
    rig = make_rig(24, max_regions=9)
    arrays = [pages(8) for _ in range(6)]
    problems: list[BaseException] = []

    def check(address: int, nbytes: int) -> None:
        assert rig.registrar.live_nbytes + nbytes <= 24 * PAGE
        time.sleep(0.0002)

    rig.registrar.before_register = check

    def work(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        try:
            for _ in range(150):
                array = rng.choice(arrays)
                first = rng.randrange(8)
                part = array[first * PAGE : rng.randint(first + 1, 8) * PAGE]
                what = rng.random()
                try:
                    if what < 0.75:
                        with rig.cache.acquire(part) as region:
                            live = rig.registrar.regions[region.lkey]
                            assert live.address <= region.address
                            assert region.address + region.nbytes <= live.address + live.nbytes
                            if what < 0.1:
                                region.export(lambda _: time.sleep(0.001))
                    elif what < 0.9:
                        rig.cache.invalidate(part, timeout_s=0.001)
                    else:
                        touch(rig.cache, pages(2))
                except (PoolExhaustedError, RegionInUseError):
                    pass
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads meet everywhere
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    finally:
        sys.setswitchinterval(interval_s)
    assert problems == []
    rig.cache.close()
    assert not rig.registrar.regions
    snapshot = rig.stats.snapshot()
    assert snapshot["pinned_nbytes"] == snapshot["regions"] == 0
    assert snapshot["registrations"] == snapshot["deregistrations"] == len(rig.registrar.came)
    assert snapshot["hits"] + snapshot["misses"] == snapshot["gets"]
    rig.cache.candidates(1)  # whoever asks the policy has told it everything before
    assert not rig.policy.resident
