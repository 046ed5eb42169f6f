"""The region cache in trouble: refusals, interrupts, calls within calls, forks, silent peers."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

import numpy as np
import pytest

from controller.memory.errors import ForkError, PoolError, PoolExhaustedError
from controller.memory.export import Export
from controller.verbs.registration import MemoryRegion, RegistrationError
from tests.memory.watched import PAGE, Rig, WatchedRegistrar, make_rig, pages
from tests.waiting import wait

T = TypeVar("T")


@pytest.fixture
def rig() -> Rig:
    return make_rig()


def address_of(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def touch(rig: Rig, *buffers: object) -> None:
    """Ask and let go."""
    for buffer in buffers:
        rig.cache.acquire(buffer).release()


def within(timeout_s: float, work: Callable[[], T]) -> T:
    """Do what might hang in a thread of its own; its result, or what it raises."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert not thread.is_alive(), "hangs"
    if errors:
        raise errors[0]
    return results[0]


def went(rig: Rig) -> set[int]:
    return {address for address, _ in rig.registrar.went}


# ---- the device refuses, the user interrupts ----


def keep(rig: Rig, *arrays: np.ndarray) -> None:
    """Let the device refuse to deregister these."""
    kept = {address_of(array) for array in arrays}

    def refuse(region: MemoryRegion) -> None:
        if region.address in kept:
            raise RegistrationError("fake0 keeps the region: busy.")

    rig.registrar.before_deregister = refuse


def interrupt_first_deregistration(rig: Rig) -> None:
    """Ctrl-C while the device is busy: Python sees it when the call has returned."""
    deregister = rig.registrar.deregister

    def interrupted(region: MemoryRegion) -> None:
        rig.registrar.deregister = deregister  # type: ignore[method-assign]
        deregister(region)
        raise KeyboardInterrupt

    rig.registrar.deregister = interrupted  # type: ignore[method-assign]


def test_invalidation_takes_the_other_regions_when_the_device_keeps_one(rig: Rig) -> None:
    array = pages(6)
    touch(rig, *(array[2 * i * PAGE : (2 * i + 1) * PAGE] for i in range(3)))
    keep(rig, array)
    with pytest.raises(RegistrationError, match="busy"):
        rig.cache.invalidate(array)
    assert len(rig.registrar.regions) == 1
    keep(rig)
    assert within(5, lambda: rig.cache.invalidate(array)) == 1
    within(5, lambda: touch(rig, pages(64)))


def test_closing_by_force_takes_the_other_regions_and_can_be_tried_again(rig: Rig) -> None:
    arrays = [pages(1) for _ in range(3)]
    touch(rig, *arrays)
    keep(rig, arrays[0])
    with pytest.raises(RegistrationError, match="busy"):
        rig.cache.close(force=True)
    assert len(rig.registrar.regions) == 1
    keep(rig)
    within(5, lambda: rig.cache.close(force=True))
    assert not rig.registrar.regions


@pytest.mark.parametrize("force", [False, True])
def test_an_interrupted_close_can_be_tried_again(rig: Rig, force: bool) -> None:
    arrays = [pages(1) for _ in range(3)]
    touch(rig, *arrays)
    interrupt_first_deregistration(rig)
    with pytest.raises(KeyboardInterrupt):
        rig.cache.close(force=force)
    within(5, lambda: rig.cache.close(force=force))
    assert not rig.registrar.regions
    assert rig.stats.snapshot()["pinned_nbytes"] == 0


def test_an_interrupted_eviction_blocks_nobody() -> None:
    rig = make_rig(4)
    arrays = [pages(1) for _ in range(4)]
    touch(rig, *arrays)
    interrupt_first_deregistration(rig)
    big = pages(4)
    with pytest.raises(KeyboardInterrupt):
        rig.cache.acquire(big)
    within(5, lambda: touch(rig, big))
    assert went(rig) == {address_of(array) for array in arrays}


def test_an_interrupt_during_a_revocation_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(1)
    array = pages(1)
    with rig.cache.acquire(array) as region:
        region.export(lambda _: None)

    def interrupted(_: Export) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Export, "revoke", interrupted)
        with pytest.raises(KeyboardInterrupt):
            touch(rig, pages(1))
    within(5, lambda: touch(rig, pages(1)))


def test_an_interrupted_sweep_leaves_the_rest_to_the_next(rig: Rig) -> None:
    array = pages(6)
    touch(rig, *(array[2 * i * PAGE : (2 * i + 1) * PAGE] for i in range(3)))
    state = rig.cache._state
    with state.lock:
        for entry in list(state.found):
            state.retire(entry, "merged")
    interrupt_first_deregistration(rig)
    with pytest.raises(KeyboardInterrupt):
        rig.cache._evictor.sweep()
    wait(lambda: not rig.registrar.regions)
    within(5, rig.cache.close)


# ---- calls within calls ----


def under_the_lock(rig: Rig, action: Callable[[], object]) -> None:
    """Miss once, and run an action in its middle, by the garbage collector."""

    class Garbage:
        pass

    original = rig.stats.registration_us
    ran: list[BaseException | None] = []

    def finalize() -> None:
        try:
            action()
        except BaseException as error:
            ran.append(error)
        else:
            ran.append(None)

    def registration_us(nbytes: int) -> float:  # the cache asks while it has its lock
        rig.stats.registration_us = original  # type: ignore[method-assign]
        gc.collect()
        return original(nbytes)

    rig.stats.registration_us = registration_us  # type: ignore[method-assign]
    garbage = Garbage()
    garbage.itself = garbage  # type: ignore[attr-defined]
    weakref.finalize(garbage, finalize)
    gc.disable()
    try:
        del garbage
        within(5, lambda: touch(rig, pages(1)))
    finally:
        gc.enable()
    assert len(ran) == 1
    if ran[0] is not None:
        raise ran[0]


def test_a_finalizer_may_release_a_retired_region_while_its_thread_has_the_lock(rig: Rig) -> None:
    array = pages(8)
    old = rig.cache.acquire(array[: 4 * PAGE])
    touch(rig, array[2 * PAGE : 6 * PAGE])
    assert rig.evictions("merged") == 1
    under_the_lock(rig, old.release)
    wait(lambda: (address_of(array), 4 * PAGE) in rig.registrar.went)


def test_a_finalizer_may_release_a_region_that_another_thread_waits_for(rig: Rig) -> None:
    array = pages(1)
    held = rig.cache.acquire(array)
    results: list[int] = []
    waiting = threading.Thread(target=lambda: results.append(rig.cache.invalidate(array, 10)))
    waiting.start()
    wait(lambda: rig.cache._state.waiting > 0)
    under_the_lock(rig, held.release)
    waiting.join(20)
    assert results == [1]


def test_a_finalizer_may_end_an_export_while_its_thread_has_the_lock(rig: Rig) -> None:
    array = pages(8)
    with rig.cache.acquire(array[: 4 * PAGE]) as region:
        exported = region.export(lambda _: None)
    touch(rig, array[2 * PAGE : 6 * PAGE])
    under_the_lock(rig, exported.close)
    assert exported.ended
    wait(lambda: (address_of(array), 4 * PAGE) in rig.registrar.went)


def test_a_finalizer_under_the_lock_cannot_invalidate_but_the_region_is_found_no_more(
    rig: Rig,
) -> None:
    place = (address_of(array := pages(2)), 2 * PAGE)
    touch(rig, place)
    with pytest.raises(PoolError, match="not deregistered yet"):
        under_the_lock(rig, lambda: rig.cache.invalidate(place))
    misses = rig.stats.misses
    touch(rig, place)
    assert rig.stats.misses == misses + 1
    assert rig.evictions("invalidated") == 1
    wait(lambda: place in rig.registrar.went)
    del array


@pytest.mark.parametrize("call", ["acquire", "covers", "close", "candidates", "prefetch"])
def test_what_would_wait_for_its_own_thread_is_refused(rig: Rig, call: str) -> None:
    array = pages(1)
    calls: dict[str, Callable[[], object]] = {
        "acquire": lambda: rig.cache.acquire(array),
        "covers": lambda: rig.cache.covers(address_of(array), PAGE),
        "close": rig.cache.close,
        "candidates": lambda: rig.cache.candidates(1),
        "prefetch": lambda: rig.cache.prefetch(address_of(array)),
    }
    with pytest.raises(PoolError, match="in the middle of another call"):
        under_the_lock(rig, calls[call])
    touch(rig, array)


def test_a_finalizer_gets_hits_while_its_thread_has_the_lock(rig: Rig) -> None:
    array = pages(1)
    touch(rig, array)
    under_the_lock(rig, lambda: touch(rig, array))
    assert rig.stats.hits == 1


def test_a_signal_handler_may_release_while_its_thread_has_the_lock(rig: Rig) -> None:
    array = pages(8)
    old = rig.cache.acquire(array[: 4 * PAGE])
    touch(rig, array[2 * PAGE : 6 * PAGE])
    before = signal.signal(signal.SIGUSR1, lambda *_: old.release())
    try:
        with rig.cache._lock:
            signal.raise_signal(signal.SIGUSR1)
            assert old._entry is None
    finally:
        signal.signal(signal.SIGUSR1, before)
    wait(lambda: (address_of(array), 4 * PAGE) in rig.registrar.went)


def test_memory_that_is_being_registered_cannot_be_invalidated_by_the_same_thread(
    rig: Rig,
) -> None:
    place = (address_of(array := pages(1)), PAGE)
    refused: list[PoolError] = []

    def invalidate(address: int, nbytes: int) -> None:
        try:
            rig.cache.invalidate(place)
        except PoolError as error:
            refused.append(error)

    rig.registrar.before_register = invalidate
    within(5, lambda: touch(rig, place))
    assert len(refused) == 1
    wait(lambda: not rig.registrar.regions)
    del array


def test_a_miss_while_the_policy_is_asked_is_refused_to_its_own_thread() -> None:
    rig = make_rig(1)
    other = pages(1)
    refused: list[PoolError] = []
    victims = rig.policy.victims

    def ask() -> Iterator[Hashable]:
        try:
            rig.cache.acquire(other)
        except PoolError as error:
            refused.append(error)
        return victims()

    touch(rig, pages(1))
    array = pages(1)
    touch(rig, array)
    rig.policy.victims = ask  # type: ignore[method-assign]
    within(5, lambda: touch(rig, other[:10]))
    assert len(refused) == 1
    del array


# ---- forks ----


def test_a_child_process_is_told_of_everything_that_is_its_parent_s(rig: Rig) -> None:
    array, array2 = pages(1), pages(8)
    held, dropped = rig.cache.acquire(array), rig.cache.acquire(array)
    old = rig.cache.acquire(array2[: 4 * PAGE])  # in retirement: its release needs the lock
    exported = old.export(lambda _: None)
    rig.cache.acquire(array2[2 * PAGE : 6 * PAGE]).release()
    told: list[Callable[[], object]] = [
        held.release,
        old.release,
        exported.close,
        lambda: held.export(lambda _: None),
        lambda: rig.cache.acquire(array),
        lambda: rig.cache.acquire(pages(1)),
        lambda: rig.cache.invalidate(array),
        lambda: rig.cache.invalidate("no buffer"),
        lambda: rig.cache.covers(1, 1),
        lambda: rig.cache.candidates(1),
        lambda: rig.cache.prefetch(1),
        rig.cache.close,
        lambda: rig.cache.close(force=True),
    ]
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with rig.cache._lock:
            locked.set()
            done.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    assert locked.wait(5)
    child = os.fork()
    if not child:
        status = 100
        try:
            signal.alarm(5)  # the lock is held for good
            for index, call in enumerate(told):
                status = index + 1
                try:
                    call()
                except ForkError:
                    continue
                os._exit(status)
            status = 101
            with held, old:
                pass
            status = 102
            del dropped
            gc.collect()
            rig.cache._evictor.sweep()
            status = 0 if len(rig.registrar.regions) == 3 else 103
        finally:
            os._exit(status)
    done.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for region in (held, dropped, old):
        region.release()
    exported.close()
    rig.cache.close()
    assert not rig.registrar.regions


# ---- room ----


def test_a_request_that_cannot_fit_evicts_nothing() -> None:
    rig = make_rig(4)
    idle, used = pages(1), pages(3)
    touch(rig, idle)
    with rig.cache.acquire(used):
        with pytest.raises(PoolExhaustedError, match="not enough"):
            rig.cache.acquire(pages(2))
        assert rig.registrar.went == []
        hits = rig.stats.hits
        touch(rig, idle)
        assert rig.stats.hits == hits + 1


def test_a_prefetch_that_cannot_fit_evicts_nothing() -> None:
    rig = make_rig(4)
    big, idle, used = pages(2), pages(1), pages(3)
    touch(rig, big, idle)
    with rig.cache.acquire(used):
        before = list(rig.registrar.went)
        assert not rig.cache.prefetch(address_of(big))
        assert rig.registrar.went == before


def test_a_union_that_cannot_fit_evicts_no_more_than_the_request_alone() -> None:
    rig = make_rig(8)
    array, used, a, b = pages(4), pages(2), pages(1), pages(1)
    touch(rig, a, b)
    with rig.cache.acquire(used), rig.cache.acquire(array[: 3 * PAGE]):
        touch(rig, array[2 * PAGE :])
        assert went(rig) == {address_of(a)}


def test_a_device_that_has_no_room_gets_it_from_idle_regions() -> None:
    rig = make_rig(64)
    room_nbytes = 4 * PAGE

    def memlock(address: int, nbytes: int) -> None:
        if rig.registrar.live_nbytes + nbytes > room_nbytes:
            raise RegistrationError("fake0 cannot register: cannot allocate memory.")

    rig.registrar.before_register = memlock
    arrays = [pages(1) for _ in range(4)]
    touch(rig, *arrays)
    with rig.cache.acquire(arrays[0]):
        touch(rig, pages(2))
        assert rig.evictions("device") == 2
        assert went(rig) == {address_of(arrays[1]), address_of(arrays[2])}
        with pytest.raises(RegistrationError):
            rig.cache.acquire(pages(5))
    assert rig.stats.snapshot()["pinned_nbytes"] == rig.registrar.live_nbytes


def test_memory_that_cannot_be_registered_costs_no_more_than_its_own_size() -> None:
    rig = make_rig(64)
    arrays = [pages(1) for _ in range(10)]
    touch(rig, *arrays)

    def refuse(address: int, nbytes: int) -> None:
        raise RegistrationError("fake0 cannot: bad address.")

    rig.registrar.before_register = refuse
    with pytest.raises(RegistrationError):
        rig.cache.acquire(pages(3))
    assert rig.evictions("device") == 3


# ---- silent peers ----


def test_a_silent_peer_is_asked_by_one_thread_however_often() -> None:
    rig = make_rig(1)
    answer = threading.Event()
    asked: list[int] = []

    def silent(exported: Export) -> None:
        asked.append(exported.rkey)
        assert answer.wait(20)

    before = set(threading.enumerate())
    with rig.cache.acquire(pages(1)) as region:
        exported = region.export(silent, timeout_s=0.02)
    for _ in range(3):
        with pytest.raises(PoolExhaustedError):
            rig.cache.acquire(pages(1))
    # Not those of an earlier test, whose numbers are the same.
    names = [thread.name for thread in set(threading.enumerate()) - before]
    assert names.count(f"revoke-{exported.rkey:#x}") == 1
    assert len(asked) == 1
    answer.set()
    wait(lambda: exported.ended)
    touch(rig, pages(1))


def test_a_peer_that_refused_is_not_asked_again_while_other_regions_can_go() -> None:
    rig = make_rig(2)
    asked: list[int] = []

    def refuse(exported: Export) -> None:
        asked.append(exported.rkey)
        raise ConnectionError("peer gone")

    with rig.cache.acquire(pages(1), key="shared") as region:
        region.export(refuse)
    touch(rig, *(pages(1) for _ in range(5)))
    assert len(asked) == 1
    with rig.cache.acquire(pages(1)), pytest.raises(PoolExhaustedError):
        rig.cache.acquire(pages(1))
    assert len(asked) == 2  # nothing else was left


def test_a_prefetch_revokes_nothing() -> None:
    rig = make_rig(1)
    a, b = pages(1), pages(1)
    touch(rig, a)
    asked: list[int] = []
    with rig.cache.acquire(b) as region:
        region.export(lambda exported: asked.append(exported.rkey))
    assert not rig.cache.prefetch(address_of(a))
    assert asked == []
    assert len(rig.registrar.regions) == 1


def test_a_registration_reports_the_device_s_time_alone() -> None:
    registrar = WatchedRegistrar()
    rig = make_rig(registrar=registrar)
    array = pages(1)
    begun = threading.Event()

    def slow(address: int, nbytes: int) -> None:
        begun.set()
        time.sleep(0.05)

    registrar.before_register = slow
    spent: list[int] = []

    def wait_for_the_other() -> None:
        assert begun.wait(20)
        touch(rig, array)
        spent.append(rig.cache.registering_ns())

    waiting = threading.Thread(target=wait_for_the_other)
    waiting.start()
    before_ns = rig.cache.registering_ns()
    touch(rig, array)
    assert rig.cache.registering_ns() - before_ns >= 50_000_000
    waiting.join(20)
    assert spent == [0]
