"""The registration pool as a whole: configuration, both sources of keys, traces, the end."""

from __future__ import annotations

import csv
import gc
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.errors import UsageError
from controller.memory import (
    ForkError,
    LeasedRange,
    LeaseError,
    PoolConfig,
    PoolError,
    RegionInUseError,
    RegistrationPool,
)
from controller.memory.stats import PoolStats, TraceRecorder
from tests.memory.fakes import GIB, MIB, FakeRegistrar


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
     {"name": ""}, {"name": "x" * 65}, {"name": "a\nb"},
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


def test_a_trace_that_cannot_be_written_is_refused_with_its_name(
    registrar: FakeRegistrar, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"missing/trace\.csv cannot be written"):
        pool_of(registrar, record=tmp_path / "missing" / "trace.csv")
    assert not registrar.registered


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
