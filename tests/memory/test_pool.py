"""The registration pool as a whole: configuration, both sources of keys, traces, the end."""

from __future__ import annotations

import csv
import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.errors import UsageError
from controller.memory import (
    CachedRegion,
    ForkError,
    LeasedRange,
    LeaseError,
    PoolConfig,
    PoolError,
    RegionInUseError,
    RegistrationError,
    RegistrationPool,
    pool_background,
)
from controller.memory import pool as pool_module
from controller.memory.background import Urgency
from controller.memory.stats import PoolStats, TraceRecorder
from tests import waiting
from tests.memory.fakes import GIB, MIB, FakeRegistrar
from tests.memory.watched import PAGE, pages


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STELLAR_RUN_DIR", str(tmp_path / "run"))


@pytest.fixture
def registrar() -> FakeRegistrar:
    return FakeRegistrar()


def pool_of(registrar: FakeRegistrar, **changes: Any) -> RegistrationPool:
    arguments: dict[str, Any] = {
        "capacity_nbytes": 2 * MIB, "chunk_nbytes": MIB, "cache_nbytes": 16 * MIB, "policy": "lru",
    }  # fmt: skip
    return RegistrationPool(registrar, PoolConfig(**(arguments | changes)))


@pytest.mark.parametrize(
    "changes",
    [{"capacity_nbytes": -1}, {"cache_nbytes": -1}, {"cache_regions": 0}, {"policy": "fifo"},
     {"prefetch_depth": -1}, {"prefetch_depth": 65}, {"background_busy_share": 0.0},
     {"background_busy_share": 1.1}, {"background_busy_share": float("nan")}, {"name": ""},
     {"name": "x" * 65}, {"name": "a\nb"},
     {"capacity_nbytes": 0, "cache_nbytes": 0}],
)  # fmt: skip
def test_configurations_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        PoolConfig(**({"capacity_nbytes": GIB} | changes))


def test_a_buffer_gets_keys_whether_it_is_leased_or_its_owners_own(
    registrar: FakeRegistrar,
) -> None:
    with pool_of(registrar) as pool:
        own = np.ones(50_000, np.uint8)
        with pool.lease(100_000) as lease, pool.register(own) as region:
            part = lease.array(np.float32, 100)[50:]
            with pool.register(part) as leased:
                assert isinstance(leased, LeasedRange)
                assert (leased.lkey, leased.rkey) == (lease.lkey, lease.rkey)
                assert leased.address == lease.addr + 200 and leased.nbytes == 200
            assert lease.is_live
            covering = registrar.regions[region.lkey]
            assert covering.address <= own.ctypes.data
            assert own.ctypes.data + own.nbytes <= covering.address + covering.nbytes
            assert pool.find(lease.addr, 100_000) == (lease.lkey, lease.rkey)
            assert pool.find(own.ctypes.data, 1) is None
        stats = pool.stats()
        assert (stats["gets"], stats["hits"], stats["misses"]) == (2, 1, 1)
        assert stats["registrations"] == 3 and stats["leases"] == 1
    assert not registrar.regions


def test_a_leased_range_keeps_the_lease_from_being_dropped(registrar: FakeRegistrar) -> None:
    with pool_of(registrar) as pool:
        held = pool.register(pool.lease(100).view)
        gc.collect()
        assert pool.describe()["leased_nbytes"] == 4096
        with pytest.warns(ResourceWarning):
            held.release()
            gc.collect()
        assert pool.describe()["leased_nbytes"] == 0


def test_memory_is_invalidated_before_its_owner_frees_it(registrar: FakeRegistrar) -> None:
    with pool_of(registrar, capacity_nbytes=0) as pool:
        own = np.ones(50_000, np.uint8)
        pool.register(own).release()
        assert len(registrar.regions) == 1
        assert pool.invalidate(own) == 1
        assert not registrar.regions


def test_a_pool_may_be_leases_only_or_cache_only(registrar: FakeRegistrar) -> None:
    with pool_of(registrar, cache_nbytes=0) as pool:
        with pytest.raises(UsageError, match="cache_nbytes is 0"):
            pool.register(np.ones(10))
        with pytest.raises(UsageError, match="cache_nbytes is 0"):
            pool.invalidate(np.ones(10))
    with pool_of(registrar, capacity_nbytes=0) as pool:
        assert pool.ready and pool.wait_ready(0)
        assert pool.find(4096, 1) is None
        with pytest.raises(UsageError, match="capacity_nbytes is 0"):
            pool.lease(1)


def test_closing_is_refused_while_anything_is_in_use_and_forced_all_the_same(
    registrar: FakeRegistrar,
) -> None:
    pool = pool_of(registrar)
    lease = pool.lease(10, "bucket")
    with pytest.raises(LeaseError, match="'bucket'"):
        pool.close()
    assert lease.is_live
    lease.release()
    region = pool.register(np.ones(5000, np.uint8), "weights")
    with pytest.raises(RegionInUseError, match="weights"):
        pool.close()
    region.release()
    pool.close()
    pool.close()
    assert not registrar.regions
    pool = pool_of(registrar)
    lease = pool.lease(10)
    pool.close(force=True)
    assert not registrar.regions and not lease.is_live


def test_a_region_that_the_device_keeps_does_not_keep_the_rest_of_the_pool_open(
    registrar: FakeRegistrar, tmp_path: Path
) -> None:
    pool = pool_of(registrar, record=tmp_path / "trace.csv", name="kept")
    pool.register(np.ones(5000, np.uint8), "weights").release()
    pool.lease(100, "bucket").release()
    registrar.kept = {1}
    with pytest.raises(RegistrationError, match="keeps"):
        pool.close()
    assert list(registrar.regions) == [1]
    assert not list((tmp_path / "run").glob("pools/*.json"))
    assert (tmp_path / "trace.csv").read_text().count("\n") == 2
    registrar.kept = set()
    pool.close()
    assert not registrar.regions


def test_a_view_of_a_released_lease_is_not_registered_as_memory_of_somebody_else(
    registrar: FakeRegistrar,
) -> None:
    with pool_of(registrar) as pool:
        lease = pool.lease(5000, "a")
        view = lease.view[100:200]
        lease.release()
        for ask in (pool.register, pool.register_async):
            with pytest.raises(LeaseError, match=r"'a'.*released"):
                ask(view)
        with pool.lease(5000, "a") as other:
            assert other.addr == lease.addr
            with pytest.raises(LeaseError, match=r"'a'.*generation 1"):
                pool.register(view)
            pool.register(other.view).release()
        assert pool.stats()["gets"] == pool.stats()["leases"] == 2, "none of them in the cache"


@pytest.mark.parametrize("capacity_nbytes", [0, 2 * MIB])
def test_a_pool_that_is_dropped_without_close_is_warned_about(
    registrar: FakeRegistrar, capacity_nbytes: int
) -> None:
    own = np.ones(5000, np.uint8)
    with pytest.warns(ResourceWarning, match=r"'lost' was dropped without close\(\)"):
        pool = pool_of(registrar, capacity_nbytes=capacity_nbytes, name="lost", prefetch_depth=0)
        pool.register(own).release()
        del pool
        gc.collect()


def test_a_pool_that_is_closed_is_not_warned_about(
    registrar: FakeRegistrar, recwarn: pytest.WarningsRecorder
) -> None:
    pool = pool_of(registrar)
    pool.register(np.ones(5000, np.uint8)).release()
    pool.close()
    del pool
    gc.collect()
    assert not [each for each in recwarn if "without close" in str(each.message)]


def test_an_error_inside_the_with_block_is_what_comes_out_and_nothing_stays_registered(
    registrar: FakeRegistrar,
) -> None:
    with pytest.raises(ZeroDivisionError), pool_of(registrar) as pool:
        lease = pool.lease(10)
        raise ZeroDivisionError
    assert not registrar.regions and not lease.is_live


def test_a_pool_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    registrar = FakeRegistrar(fails_at=1)
    with pytest.raises(PoolError, match=r"Pool 'pool' came to .*1 of 2 chunks"):
        pool_of(registrar, record=tmp_path / "trace.csv")
    assert not registrar.regions
    assert not list((tmp_path / "run").glob("pools/*"))


def test_a_pool_prepares_itself_in_the_background(registrar: FakeRegistrar) -> None:
    gate = threading.Event()
    registrar.gate = gate
    with pool_of(registrar, prepare="background") as pool:
        assert not pool.ready
        gate.set()
        assert pool.wait_ready(10) and pool.ready
        pool.lease(MIB).release()


def test_a_forked_child_is_told_whatever_it_asks_for(registrar: FakeRegistrar) -> None:
    own = np.ones(5000, np.uint8)
    with pool_of(registrar) as pool:
        pool.register(own).release()
        pid = os.fork()
        if pid == 0:
            told = 0
            for ask in (lambda: pool.lease(1), lambda: pool.register(own)):
                try:
                    ask()
                except ForkError:
                    told += 1
            os._exit(0 if told == 2 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# ---- in the background ----


def threads_of(name: str) -> list[threading.Thread]:
    """Threads that register in the background for the pool of that name."""
    return [each for each in threading.enumerate() if each.name == f"registrar-{name}"]


def test_a_pool_has_no_thread_that_registers_before_it_has_work_for_one(
    registrar: FakeRegistrar,
) -> None:
    own = np.ones(5000, np.uint8)
    with pool_of(registrar, name="leases") as pool:
        pool.lease(100).release()
        assert not threads_of("leases")
        pool.register(own).release()
        assert len(threads_of("leases")) == 1
    assert not threads_of("leases")
    with pool_of(registrar, name="without", prefetch_depth=0) as pool:
        pool.register(own).release()
        assert not threads_of("without")
        pool.register_async(own).result(10).release()
        assert len(threads_of("without")) == 1
    assert not threads_of("without")
    assert not registrar.regions


def test_a_buffer_is_registered_while_its_owner_goes_on(registrar: FakeRegistrar) -> None:
    own = np.ones(50_000, np.uint8)
    with pool_of(registrar) as pool:
        registrar.gate = threading.Event()
        future = pool.register_async(own, "weights", "job")
        assert not future.done()
        registrar.gate.set()
        with future.result(10) as region:
            assert isinstance(region, CachedRegion)
            assert region.address == own.ctypes.data and region.lkey in registrar.regions
        with pool.register_async(own).result(10) as again:
            assert again.lkey == region.lkey
        stats = pool.stats()
        assert (stats["hits"], stats["misses"]) == (1, 1)


def test_what_is_leased_is_registered_at_once_and_what_cannot_be_is_refused_at_once(
    registrar: FakeRegistrar,
) -> None:
    with pool_of(registrar, cache_nbytes=0) as pool, pool.lease(1000) as lease:
        future = pool.register_async(lease.view[:10])
        assert future.done() and isinstance(future.result(), LeasedRange)
        assert future.result().lkey == lease.lkey
        with pytest.raises(UsageError, match="cache_nbytes is 0"):
            pool.register_async(np.ones(10))
    with pool_of(registrar) as pool, pytest.raises(UsageError, match="holes"):
        pool.register_async(np.ones(10)[::2])


def test_what_the_device_refuses_is_the_futures_exception(registrar: FakeRegistrar) -> None:
    with pool_of(registrar, capacity_nbytes=0) as pool:
        registrar.fails_at = 0
        with pytest.raises(RegistrationError, match="no room"):
            pool.register_async(np.ones(5000, np.uint8)).result(10)


def test_a_cancelled_registration_leaves_nothing_in_use(registrar: FakeRegistrar) -> None:
    with pool_of(registrar, capacity_nbytes=0) as pool:
        registrar.gate = threading.Event()
        first = pool.register_async(np.ones(5000, np.uint8))
        second = pool.register_async(np.ones(5000, np.uint8))
        waiting.wait(first.running)
        assert second.cancel() and first.cancel()
        registrar.gate.set()
        with pytest.raises(PoolError, match="cancelled"):
            first.result(10)
        with pytest.raises(CancelledError):
            second.result(10)
        assert pool.stats()["registrations"] == 1
    assert not registrar.regions


def test_closing_waits_for_the_registration_under_way_and_calls_off_the_others(
    registrar: FakeRegistrar,
) -> None:
    pool = pool_of(registrar, name="closing")
    registrar.gate = threading.Event()
    futures: list[Future[Any]] = [pool.register_async(np.ones(5000, np.uint8)) for _ in range(3)]
    waiting.wait(futures[0].running)
    closing = threading.Thread(target=pool.close)
    closing.start()
    # Those that wait are told at once, however long the device takes.
    assert wait(futures[1:], 10).not_done == set()
    assert closing.is_alive() and not futures[0].done()
    registrar.gate.set()
    closing.join(10)
    assert not closing.is_alive()
    assert isinstance(futures[0].exception(10), PoolError)
    assert all(future.cancelled() for future in futures[1:])
    assert not registrar.regions and not threads_of("closing")
    with pytest.raises(PoolError, match="closed"):
        pool.register_async(np.ones(5000, np.uint8))
    pool.close()


def test_a_pool_that_could_not_be_closed_registers_in_the_background_as_before(
    registrar: FakeRegistrar,
) -> None:
    pool = pool_of(registrar, name="stays")
    own = np.ones(5000, np.uint8)
    held = pool.register_async(own, "weights").result(10)
    with pytest.raises(RegionInUseError, match="weights"):
        pool.close()
    pool.register_async(np.ones(5000, np.uint8)).result(10).release()
    assert len(threads_of("stays")) == 1
    held.release()
    pool.close()
    assert not registrar.regions and not threads_of("stays")


def test_a_region_in_a_future_is_held_until_it_is_released_or_dropped(
    registrar: FakeRegistrar,
) -> None:
    pool = pool_of(registrar, capacity_nbytes=0)
    future = pool.register_async(np.ones(5000, np.uint8), "forgotten")
    waiting.wait(future.done)
    with pytest.raises(RegionInUseError, match="forgotten"):
        pool.close()
    with pytest.warns(ResourceWarning, match="never released"):
        del future
        gc.collect()
    pool.close()
    assert not registrar.regions


def test_a_pool_that_is_dropped_takes_its_thread_with_it(registrar: FakeRegistrar) -> None:
    pool = pool_of(registrar, name="dropped")
    pool.register_async(np.ones(5000, np.uint8)).result(10).release()
    assert threads_of("dropped")
    del pool
    gc.collect()
    waiting.wait(lambda: not threads_of("dropped"))


def test_a_child_is_told_that_it_cannot_register_in_the_background(
    registrar: FakeRegistrar,
) -> None:
    own = np.ones(5000, np.uint8)
    for used_before in (False, True):
        with pool_of(registrar) as pool:
            if used_before:
                pool.register_async(own).result(10).release()
            pid = os.fork()
            if pid == 0:
                try:
                    pool.register_async(own)
                except ForkError:
                    os._exit(0)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def loop_over_more_than_the_cache_holds(pool: RegistrationPool, rounds: int) -> None:
    """Use one buffer after the other, with time between for what is done in the background."""
    buffers = [pages(16) for _ in range(20)]
    for _ in range(rounds):
        for buffer in buffers:
            pool.register(buffer, stream="job").release()
            thread = pool._background._thread if pool._background is not None else None
            if thread is not None:  # it does one thing after the other
                thread.run(lambda _: None, Urgency.PREFETCH).result(10)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_loop_is_prefetched_and_counted_where_that_is_on(
    registrar: FakeRegistrar, depth: int
) -> None:
    with pool_of(
        registrar, capacity_nbytes=0, cache_nbytes=15 * 16 * PAGE, policy="heat",
        prefetch_depth=depth, background_busy_share=1.0,
    ) as pool:  # fmt: skip
        loop_over_more_than_the_cache_holds(pool, 30)
        described = pool.describe()
    prefetch = described["stats"]["prefetch"]
    assert described["prefetch_depth"] == depth
    assert (prefetch["issued"] > 0) == (prefetch["useful"] > 0) == bool(depth), prefetch
    assert prefetch["useful"] + prefetch["wasted"] <= prefetch["issued"]


def test_a_machine_without_threads_to_spare_does_without_prefetch(
    registrar: FakeRegistrar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pool_of(registrar, capacity_nbytes=0) as pool:

        def refuse(*_: object, **__: object) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(pool_background, "BackgroundRegistrar", refuse)
        for _ in range(2):
            pool.register(np.ones(5000, np.uint8)).release()
        assert len([r for r in caplog.records if "does not prefetch" in r.message]) == 1


def test_pools_are_imported_without_verbs() -> None:
    code = "import sys, controller.memory; sys.exit('pyverbs' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- traces ----


def test_recorded_requests_are_a_trace_of_keys_bytes_and_times(
    registrar: FakeRegistrar, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    own = np.ones(8192, np.uint8)
    with pool_of(registrar, record=trace) as pool:
        for _ in range(2):
            pool.lease(5000, "job/bucket 1").release()
            pool.register(own, 'odd, "key"\n').release()
        pool.lease(5000).release()  # nothing that could be asked for again
        pool.lease(0, "empty").release()
    rows = list(csv.reader(trace.read_text().splitlines()))
    assert [row[0] for row in rows] == ["job/bucket 1", "odd_ _key__"] * 2
    assert rows[0][1] == "5000" and int(rows[1][1]) >= 8192
    assert all(float(row[2]) >= 0 for row in rows)


def test_a_recorder_writes_long_before_it_is_closed_and_all_of_it_then(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "trace.csv")
    for number in range(10_000):
        recorder.add(number, 1, 0.5)
    assert (tmp_path / "trace.csv").read_text().count("\n") >= 8000
    recorder.close()
    recorder.close()
    recorder.add("late", 1, 0.5)
    recorder.close()
    lines = (tmp_path / "trace.csv").read_text().splitlines()
    assert lines[:2] == ["0,1,0.500", "1,1,0.500"] and len(lines) == 10_000


def test_a_child_writes_nothing_into_its_parents_trace(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "trace.csv")
    recorder.add("a", 1, 1)
    pid = os.fork()
    if pid == 0:
        recorder.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert (tmp_path / "trace.csv").read_text() == ""
    recorder.close()
    assert (tmp_path / "trace.csv").read_text() == "a,1,1.000\n"


def test_a_full_disk_ends_the_trace_and_not_the_training(
    registrar: FakeRegistrar, caplog: pytest.LogCaptureFixture
) -> None:
    with pool_of(registrar, record=Path("/dev/full")) as pool:
        for number in range(3 * 4096):
            pool.lease(100, number).release()
        pool.register(np.ones(5000, np.uint8)).release()
        assert pool.stats()["leases_out"] == 0
    told = [record.message for record in caplog.records if "trace" in record.message]
    assert told == ["trace /dev/full ends here: No space left on device"]
    assert not registrar.regions


def test_a_trace_that_cannot_be_written_is_refused_with_its_name(
    registrar: FakeRegistrar, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"missing/trace\.csv cannot be written"):
        pool_of(registrar, record=tmp_path / "missing" / "trace.csv")
    assert not registrar.registered


def test_a_pool_whose_last_part_cannot_be_made_leaves_nothing(
    registrar: FakeRegistrar, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(pool_module, "StatusFile", refuse)
    with pytest.raises(MemoryError):
        pool_of(registrar)
    assert registrar.registered == 2 and not registrar.regions


# ---- counters ----


def test_counters_add_up() -> None:
    stats = PoolStats()
    stats.registered(MIB, 2_000_000)
    stats.registered(MIB, 4_000_000)
    stats.deregistered(MIB)
    stats.evicted("bytes")
    stats.evicted("bytes")
    stats.prefetched("issued")
    stats.revoked("failed")
    shot = stats.snapshot()
    assert shot["registrations"] == 2 and shot["deregistrations"] == 1 and shot["regions"] == 1
    assert shot["registration_us"] == 6000 and shot["registration_max_us"] == 4000
    assert shot["pinned_nbytes"] == MIB and shot["pinned_peak_nbytes"] == 2 * MIB
    assert shot["evictions"] == {"bytes": 2} and shot["prefetch"]["issued"] == 1
    assert shot["revocations"] == {"answered": 0, "failed": 1}
    assert stats.registration_us(MIB // 2) == pytest.approx(1500)
    assert PoolStats().registration_us(5) == 0
