"""Leases of an arena: what they give, and what happens when users do not behave."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.errors import UsageError
from controller.memory import chunks
from controller.memory.arena import Arena
from controller.memory.chunks import chunk_size
from controller.memory.errors import ForkError, LeaseError, PoolError, PoolExhaustedError
from controller.memory.lease import Lease
from controller.verbs.registration import RegistrationError
from tests.memory.alarms import alarms
from tests.memory.fakes import GIB, MIB, ROOMY, FakeRegistrar, RepeatedPages
from tests.waiting import wait


@pytest.fixture
def registrar() -> FakeRegistrar:
    return FakeRegistrar()


@pytest.fixture
def arena(registrar: FakeRegistrar) -> Arena:
    """Four chunks of 1 MiB."""
    return Arena(registrar, 4 * MIB, chunk_nbytes=MIB)


# ---- what a lease gives ----


def test_a_lease_is_writable_memory_within_a_registered_region(
    arena: Arena, registrar: FakeRegistrar
) -> None:
    with arena.lease(100_000) as lease:
        view = lease.view
        view[:] = 7
        assert view.nbytes == lease.nbytes == 100_000 and view.ctypes.data == lease.addr
        region = registrar.regions[lease.lkey]
        assert region.rkey == lease.rkey
        assert region.address <= lease.addr
        assert lease.addr + lease.nbytes <= region.address + region.nbytes
        floats = lease.array(np.float32, (250, 100))
        assert floats.shape == (250, 100) and floats.ctypes.data == lease.addr
        floats[:] = 1.5
        assert lease.view[:4].view(np.float32)[0] == 1.5
        assert lease.array("i8", 3).shape == (3,)
        with pytest.raises(LeaseError, match="needs 100004"):
            lease.array(np.float32, 25_001)


def test_an_empty_lease_is_a_lease_with_a_place_of_its_own(arena: Arena) -> None:
    with arena.lease(0) as first, arena.lease(0) as second:
        assert first.nbytes == 0 and first.view.shape == (0,)
        assert first.addr != second.addr
        assert arena.find(first.addr, 0) == (first.lkey, first.rkey)
        assert arena.find(first.addr, 1) is None


def test_the_same_key_gets_the_same_place_again_while_it_is_free(arena: Arena) -> None:
    first = arena.lease(300_000, "bucket 0")
    address = first.addr
    first.release()
    others = [arena.lease(4096) for _ in range(3)]
    for other in others:
        other.release()
    with arena.lease(300_000, "bucket 0") as again:
        assert again.addr == address
        assert arena.stats.lease_key_hits == 1
        with arena.lease(300_000, "bucket 0") as twice:
            assert twice.addr != address
        # The place that it had last is the one it gets again.
        with arena.lease(300_000, "bucket 0") as last:
            assert last.addr == twice.addr
    assert arena.stats.snapshot()["hits"] == arena.stats.snapshot()["leases"] == 7


def test_a_key_that_asks_for_another_size_gets_another_place_and_keeps_that(arena: Arena) -> None:
    arena.lease(4096, "k").release()
    with arena.lease(8192, "k") as larger:
        address = larger.addr
    with arena.lease(8000, "k") as again:
        assert again.addr == address


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 300_000), st.integers(0, 6)), min_size=1, max_size=60))
def test_live_leases_never_share_a_byte_and_are_found_by_every_address_in_them(
    steps: list[tuple[int, int]],
) -> None:
    arena = Arena(FakeRegistrar(), 2 * MIB, chunk_nbytes=MIB)
    live: list[Lease] = []
    for nbytes, number in steps:
        if number > 3 and live:
            live.pop(nbytes % len(live)).release()
            continue
        try:
            live.append(arena.lease(nbytes, number or None))
        except PoolExhaustedError:
            continue
        ordered = sorted((lease.addr, lease.nbytes) for lease in live)
        ends = [address + size for address, size in ordered]
        assert all(end <= start for end, (start, _) in zip(ends, ordered[1:], strict=False))
    for lease in live:
        keys = lease.lkey, lease.rkey
        assert arena.find(lease.addr, lease.nbytes) == keys
        assert arena.find(lease.addr, lease.nbytes + 1) is None
        if lease.nbytes:
            middle = lease.addr + lease.nbytes // 2
            assert arena.find(middle, lease.addr + lease.nbytes - middle) == keys
            assert arena.find(lease.addr + lease.nbytes - 1, 2) is None
            arena.check(middle, lease.generation)
    for lease in live:
        lease.release()
        assert arena.find(lease.addr, 1) is None
    assert arena.describe()["leased_nbytes"] == 0
    arena.close()


def test_addresses_beyond_4_gib_are_leased_found_and_written() -> None:
    """Six chunks of 1 GiB of addresses; offsets pass 2 and 4 GiB."""
    registrar = FakeRegistrar()
    with RepeatedPages(4 * MIB) as source:
        arena = Arena(registrar, 6 * GIB, chunk_nbytes=GIB, source=source, limits=ROOMY)
        leases = [arena.lease(GIB, number) for number in range(6)]
        addresses = sorted(lease.addr for lease in leases)
        assert addresses[-1] - addresses[0] > 4 * GIB
        for lease in leases:
            view = lease.view
            assert view.nbytes == GIB
            view[-1] = lease.key
            assert view[-1] == lease.key
            assert arena.find(lease.addr + GIB - 1, 1) == (lease.lkey, lease.rkey)
            assert arena.find(lease.addr + GIB - 1, 2) is None, "one region each"
        arena.close(force=True)


def test_a_chunk_of_2_gib_has_one_region_with_offsets_beyond_31_bits() -> None:
    with RepeatedPages(4 * MIB) as source:
        arena = Arena(FakeRegistrar(), 2 * GIB, chunk_nbytes=2 * GIB, source=source, limits=ROOMY)
        with arena.lease(2 * GIB) as lease:
            lease.view[2 * GIB - 1] = 9
            assert arena.find(lease.addr + 2 * GIB - 1, 1) is not None


# ---- users who do not behave ----


def test_a_released_lease_cannot_be_used_or_released_again(arena: Arena) -> None:
    lease = arena.lease(10, "gradients")
    lease.release()
    for use in (
        lambda: lease.view,
        lambda: lease.array(np.uint8, 1),
        lease.release,
        lambda: np.asarray(lease),
    ):
        with pytest.raises(LeaseError, match=r"'gradients'.*generation 1.*released"):
            use()
    assert not lease.is_live


def test_a_lease_released_inside_its_with_block_is_no_error(arena: Arena) -> None:
    with arena.lease(10) as lease:
        lease.release()
    assert arena.stats.leases_out == 0


def test_a_later_lease_of_the_same_place_does_not_revive_an_earlier_one(arena: Arena) -> None:
    old = arena.lease(5000, "a")
    old.release()
    new = arena.lease(5000, "a")
    assert new.addr == old.addr and new.generation > old.generation
    with pytest.raises(LeaseError):
        old.release()
    with pytest.raises(LeaseError, match="held by key 'a', generation 2"):
        arena.check(old.addr, old.generation)
    arena.check(new.addr, new.generation)
    new.release()
    with pytest.raises(LeaseError, match="held by nobody"):
        arena.check(new.addr, new.generation)


def test_a_dropped_lease_comes_back_is_counted_and_warned_about(arena: Arena) -> None:
    with pytest.warns(ResourceWarning, match="key 'lost'"):
        lease = arena.lease(MIB, "lost")
        del lease
        gc.collect()
    assert arena.describe()["leased_nbytes"] == 0
    assert arena.stats.leases_leaked == 1 and arena.stats.leases_out == 0


def test_an_array_over_a_dropped_lease_keeps_its_memory(arena: Arena) -> None:
    view = arena.lease(MIB, "still used").view
    gc.collect()
    assert arena.describe()["leased_nbytes"] == MIB
    view[:] = 1
    with pytest.warns(ResourceWarning, match="still used"):
        del view
        gc.collect()
    assert arena.describe()["leased_nbytes"] == 0


def test_an_array_outlives_the_closed_arena_without_a_crash(arena: Arena) -> None:
    lease = arena.lease(MIB)
    view = lease.view
    lease.release()
    arena.close()
    del lease, arena
    gc.collect()
    view[:] = 3
    assert int(view.sum()) == 3 * MIB


@pytest.mark.parametrize("nbytes", [-1, -(1 << 40)])
def test_negative_sizes_are_refused(arena: Arena, nbytes: int) -> None:
    with pytest.raises(UsageError, match="allowed: from 0"):
        arena.lease(nbytes)


def test_a_lease_larger_than_a_chunk_is_refused_with_the_chunk_size(arena: Arena) -> None:
    with pytest.raises(PoolExhaustedError, match=r"larger than a chunk.*chunk_nbytes = 1048576"):
        arena.lease(MIB + 1, timeout_s=5)


def test_an_exhausted_arena_names_who_has_what(arena: Arena) -> None:
    held = [arena.lease(MIB, f"bucket {number}") for number in range(3)] + [arena.lease(600_000)]
    with pytest.raises(PoolExhaustedError) as caught:
        arena.lease(10_000_000 // 16)
    text = str(caught.value)
    assert "'bucket 0' 1.049 MB" in text and "no key 600 kB" in text
    assert "4.194 MB of 4.194 MB are leased" in text
    for lease in held:
        lease.release()


def test_waiting_for_memory_ends_when_somebody_releases_and_when_the_time_is_over(
    arena: Arena,
) -> None:
    held = [arena.lease(MIB, number) for number in range(4)]
    started_s = time.monotonic()
    with pytest.raises(PoolExhaustedError, match=r"within 0\.1 s"):
        arena.lease(MIB, timeout_s=0.1)
    assert 0.1 <= time.monotonic() - started_s < 5
    timer = threading.Timer(0.05, held[2].release)
    timer.start()
    with arena.lease(MIB, timeout_s=10) as late:
        assert late.addr == held[2].addr
    timer.join()
    assert arena.stats.snapshot()["lease_wait_us"] > 100_000


def test_a_waiter_gets_what_another_thread_leaks(arena: Arena) -> None:
    held = [arena.lease(MIB, number) for number in range(4)]
    timer = threading.Timer(0.05, held.pop)
    with pytest.warns(ResourceWarning):
        timer.start()
        arena.lease(MIB, timeout_s=10).release()
        timer.join()
    for lease in held:
        lease.release()


def test_threads_that_lease_and_release_at_random_leave_nothing_behind(arena: Arena) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        generator = np.random.default_rng(seed)
        try:
            for step in range(300):
                nbytes = int(generator.integers(1, 100_000))
                with arena.lease(nbytes, step % 5 or None, timeout_s=10) as lease:
                    view = lease.view
                    view[:] = seed
                    assert np.all(view == seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert arena.describe()["leased_nbytes"] == arena.stats.leases_out == 0
    assert arena.stats.leases == 1200


# ---- life of an arena ----


def test_capacity_is_rounded_up_to_chunks_and_all_of_them_are_registered(
    registrar: FakeRegistrar,
) -> None:
    arena = Arena(registrar, 5 * MIB // 2, chunk_nbytes=MIB)
    assert arena.ready and arena.describe()["capacity_nbytes"] == 3 * MIB
    assert len(registrar.regions) == 3
    assert arena.stats.snapshot()["pinned_nbytes"] == 3 * MIB
    arena.close()
    arena.close()
    assert not registrar.regions
    stats = arena.stats.snapshot()
    assert stats["pinned_nbytes"] == 0 and stats["pinned_peak_nbytes"] == 3 * MIB
    assert stats["registrations"] == stats["deregistrations"] == 3
    with pytest.raises(PoolError, match="closed"):
        arena.lease(1)
    with pytest.raises(PoolError, match="closed"):
        arena.wait_ready(1)


@pytest.mark.parametrize(
    ("capacity_nbytes", "max_mr_nbytes", "expected"),
    [(16 * GIB, 1 << 62, 512 * MIB), (16_000_000_000, 1 << 62, 512 * MIB),
     (100 * MIB, 1 << 62, 64 * MIB), (16 * GIB, 300 * MIB, 256 * MIB), (1, 1 << 62, 4096)],
)  # fmt: skip
def test_the_chunk_size_follows_capacity_and_device(
    capacity_nbytes: int, max_mr_nbytes: int, expected: int
) -> None:
    assert chunk_size(capacity_nbytes, max_mr_nbytes) == expected


@pytest.mark.parametrize("free", [0, 3])
def test_chunks_are_as_large_as_the_largest_pages_that_there_are(
    monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    monkeypatch.setattr(chunks, "free_huge_pages", lambda page_nbytes: free)
    auto = chunk_size(16 * GIB, 1 << 62, "auto")
    assert auto == (GIB if free else 512 * MIB)
    assert chunk_size(16 * GIB, 1 << 62, "1GiB") == GIB
    assert chunk_size(16 * GIB, 1 << 62, "2MiB") == 512 * MIB
    assert chunk_size(100 * MIB, 1 << 62, "auto") == 64 * MIB


@pytest.mark.parametrize(
    "arguments",
    [{"capacity_nbytes": 0}, {"chunk_nbytes": 3 * MIB}, {"chunk_nbytes": 4 * GIB},
     {"chunk_nbytes": 0}, {"chunk_nbytes": 512}, {"chunk_nbytes": -4096}, {"pages": "3MiB"},
     {"prepare": "later"}],
)  # fmt: skip
def test_sizes_and_kinds_that_do_not_exist_are_refused(
    registrar: FakeRegistrar, arguments: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="allowed"):
        Arena(registrar, **({"capacity_nbytes": MIB} | arguments))
    assert not registrar.registered


def test_an_arena_that_cannot_be_completed_keeps_nothing_and_says_how_far_it_came() -> None:
    registrar = FakeRegistrar(fails_at=3)
    with pytest.raises(PoolError, match=r"3\.146 MB of 8\.389 MB \(3 of 8 chunks\).*no room"):
        Arena(registrar, 8 * MIB, chunk_nbytes=MIB)
    assert registrar.registered == 3 and not registrar.regions


def test_limits_are_checked_before_anything_is_registered(registrar: FakeRegistrar) -> None:
    tight = replace(ROOMY, memlock_nbytes=MIB, max_map_count=103)
    with pytest.raises(PoolError, match=r"RLIMIT_MEMLOCK.*max_map_count"):
        Arena(registrar, 4 * MIB, chunk_nbytes=MIB, limits=tight)
    assert not registrar.registered


def test_an_arena_in_preparation_gives_leases_from_the_first_chunk_on() -> None:
    gate = threading.Event()
    registrar = FakeRegistrar(gate=gate)
    arena = Arena(registrar, 3 * MIB, chunk_nbytes=MIB, prepare="background")
    assert not arena.ready and not arena.wait_ready(0.01)
    with pytest.raises(PoolExhaustedError, match="0 of 3 chunks are prepared"):
        arena.lease(10)
    threading.Timer(0.02, gate.set).start()
    lease = arena.lease(10, timeout_s=10)
    assert arena.wait_ready(10) and arena.ready
    assert arena.describe()["chunks"] == 3
    lease.release()
    arena.close()
    assert not registrar.regions


def test_preparation_that_fails_keeps_only_what_is_leased_and_tells_everybody() -> None:
    gate = threading.Event()
    registrar = FakeRegistrar(gate=gate, fails_at=2)
    gate.set()
    arena = Arena(registrar, MIB, chunk_nbytes=MIB, prepare="background")
    assert arena.wait_ready(10)
    lease = arena.lease(10)
    arena.close(force=True)
    assert not lease.is_live

    registrar = FakeRegistrar(gate=gate, fails_at=2)
    arena = Arena(registrar, 3 * MIB, chunk_nbytes=MIB, prepare="background")
    with pytest.raises(PoolError, match="2 of 3 chunks"):
        arena.wait_ready(10)
    wait(lambda: not registrar.regions)
    with pytest.raises(PoolError, match="2 of 3 chunks"):
        arena.lease(10, timeout_s=1)
    arena.close()


def test_closing_ends_preparation(registrar: FakeRegistrar) -> None:
    gate = threading.Event()
    registrar.gate = gate
    arena = Arena(registrar, 1000 * MIB, chunk_nbytes=MIB, prepare="background", limits=ROOMY)
    threading.Timer(0.05, gate.set).start()
    arena.close()
    assert registrar.registered < 1000 and not registrar.regions


def test_an_arena_grows_when_told_to_or_stays_as_it_is(registrar: FakeRegistrar) -> None:
    arena = Arena(registrar, MIB, chunk_nbytes=MIB)
    lease = arena.lease(MIB, "first")
    arena.grow(2 * MIB)
    assert arena.ready and arena.describe()["capacity_nbytes"] == 3 * MIB
    with arena.lease(MIB, "second") as second:
        assert arena.find(second.addr, MIB) == (second.lkey, second.rkey)
    registrar.fails_at = registrar.registered + 1
    with pytest.raises(PoolError, match="1 of 2 chunks"):
        arena.grow(2 * MIB)
    assert len(registrar.regions) == 3 and arena.ready and lease.is_live
    lease.release()
    arena.close()


def test_closing_is_refused_while_leases_are_out_and_names_them(
    arena: Arena, registrar: FakeRegistrar
) -> None:
    lease = arena.lease(5000, "weights")
    with pytest.raises(LeaseError, match=r"leases are out \('weights' 5 kB\)"):
        arena.close()
    assert lease.is_live and len(registrar.regions) == 4
    view = lease.view
    arena.close(force=True)
    assert not registrar.regions and not lease.is_live
    assert arena.stats.leases_out == 0
    view[0] = 1  # the memory is still there
    with pytest.raises(LeaseError, match="closed"):
        lease.release()


def test_a_chunk_that_the_device_keeps_does_not_keep_the_others_and_goes_at_the_next_close(
    arena: Arena, registrar: FakeRegistrar
) -> None:
    registrar.kept = {2}
    with pytest.raises(RegistrationError, match="keeps"):
        arena.close()
    assert list(registrar.regions) == [2]
    with pytest.raises(PoolError, match="closed"):
        arena.lease(1)
    registrar.kept = set()
    arena.close()
    assert not registrar.regions
    assert arena.stats.snapshot()["pinned_nbytes"] == 0


def test_an_interrupted_close_can_be_repeated(
    arena: Arena, registrar: FakeRegistrar, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(registrar, "deregister", interrupt)
        arena.close()
    arena.close()
    assert not registrar.regions


def test_what_is_registered_while_the_arena_is_closed_goes_at_once(
    arena: Arena, registrar: FakeRegistrar
) -> None:
    registrar.gate = threading.Event()
    outcome: list[BaseException] = []

    def grow() -> None:
        try:
            arena.grow(2 * MIB)
        except PoolError as error:
            outcome.append(error)

    thread = threading.Thread(target=grow)
    thread.start()
    time.sleep(0.05)
    arena.close()
    registrar.gate.set()
    thread.join(10)
    assert "closed" in str(outcome[0])
    assert not registrar.regions and not arena.describe()["chunks"]


def test_an_error_that_is_told_again_and_again_does_not_grow() -> None:
    arena = Arena(FakeRegistrar(fails_at=0), MIB, chunk_nbytes=MIB, prepare="background")
    lengths = []
    for _ in range(5):
        with pytest.raises(PoolError, match="0 of 1 chunks") as caught:
            arena.lease(1, timeout_s=10)
        lengths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert lengths[1] == lengths[4]


def test_an_arena_that_is_dropped_without_close_is_warned_about(registrar: FakeRegistrar) -> None:
    with pytest.warns(ResourceWarning, match=r"lost was dropped without close\(\): 3 regions"):
        arena = Arena(registrar, 3 * MIB, chunk_nbytes=MIB, name="lost")
        del arena
        gc.collect()


# ---- finalizers and signals ----


def in_time(work: Callable[[], Any]) -> None:
    """Run it in a thread; fail, not hang, when it does not come back."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it waits for itself"
    if errors:
        raise errors[0]


class Garbage:
    """Found by the collector only, as it refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_a_finalizer_that_the_collector_runs_within_the_arena_may_release(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    lease = arena.lease(MIB, "finalized")
    weakref.finalize(Garbage(), lease.release)
    take = arena._places.take

    def collect_and_take(nbytes: int, key: Any) -> Any:
        gc.collect()
        return take(nbytes, key)

    monkeypatch.setattr(arena._places, "take", collect_and_take)
    in_time(lambda: arena.lease(MIB).release())
    assert not lease.is_live
    with pytest.raises(LeaseError, match="released"):
        lease.release()
    assert arena.find(lease.addr, 1) is None
    assert arena.describe()["leased_nbytes"] == arena.stats.leases_out == 0
    assert arena.stats.leases_leaked == 0


def test_a_finalizer_may_release_while_its_thread_waits_or_wakes_others(arena: Arena) -> None:
    lease = arena.lease(MIB)
    arena._waiting += 1

    def release() -> None:
        with arena._changing:
            lease.release()

    in_time(release)
    assert arena.stats.leases_out == 0


def test_what_cannot_be_done_within_the_arena_is_refused_there(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        with arena._lock:
            for ask in (lambda: arena.lease(1), arena.describe, arena.close):
                with pytest.raises(PoolError, match="finalizer or a signal"):
                    ask()

    in_time(work)
    arena.lease(1).release()


@pytest.mark.filterwarnings("ignore:a lease of:ResourceWarning")
def test_a_signal_that_raises_anywhere_in_lease_or_release_loses_nothing(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C does: at any step of it, hundreds of times."""

    def lease_and_release() -> None:
        first = arena.lease(5000, "a")
        arena.lease(70_000, "b").release()
        first.release()

    # pytest's takes so long that the next alarm finds it.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    with alarms() as interrupt:
        for round_ in range(600):
            interrupt(lease_and_release, 30e-6 + round_ % 50 * 1e-6)
    assert arena.describe()["leased_nbytes"] == arena.stats.leases_out == 0
    whole = []
    in_time(lambda: whole.extend(arena.lease(MIB) for _ in range(4)))
    assert len({lease.addr for lease in whole}) == 4
    for lease in whole:
        lease.release()
    arena.close()


# ---- fork ----


def in_child(work: Callable[[], None]) -> int:
    """Exit status of a forked child: 0 when `work` raised ForkError."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
        except ForkError:
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_is_told_that_the_pool_is_not_its_own(arena: Arena) -> None:
    lease = arena.lease(4096, "k")
    lease.view[:] = 5
    assert in_child(lambda: arena.lease(1).release()) == 0
    assert in_child(lambda: lease.view.fill(0)) == 0
    assert in_child(lease.release) == 0
    assert in_child(lambda: arena.grow(1)) == 0
    assert in_child(lambda: arena.describe().clear()) == 0
    # The parent's is untouched, its lease as well.
    assert lease.view[0] == 5
    lease.release()
    arena.lease(4096).release()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_that_drops_the_pool_unmaps_nothing_of_its_own(arena: Arena) -> None:
    """The child has no mapping at the pool's place; whatever comes to lie there must stay."""
    holder = [arena.lease(MIB)]
    address = holder[0].addr

    def drop() -> None:
        mine = np.zeros(64 * MIB, np.uint8)
        mine[:] = 1
        holder.clear()
        arena.close(force=True)
        gc.collect()
        assert int(mine.sum()) == 64 * MIB
        raise ForkError("reached")

    assert in_child(drop) == 0
    assert holder[0].addr == address
    holder[0].view[:] = 2
    holder[0].release()
