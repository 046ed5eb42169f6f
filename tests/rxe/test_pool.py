"""The registration pool on a real device: peers reach leases, limits are device and kernel ones."""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pyverbs.wr import SGE, SendWR

from controller.dataplane.netns import in_netns
from controller.memory import Arena, Export, Lease, PoolConfig, PoolError, RegistrationPool
from controller.memory.chunks import DEFAULT_CHUNK_NBYTES
from controller.memory.limits import fork_support, gather_limits
from controller.memory.pages import Pages, map_nbytes
from controller.verbs.completions import CompletionQueue
from controller.verbs.device import Device
from controller.verbs.enums import verbs
from controller.verbs.queue_pair import QueuePair, Timing
from tests.memory.fakes import GIB, MAP_FIXED, MAP_NORESERVE, MIB, RepeatedPages
from tests.rxe.verbs import Program, RxeHost, sh

ROOT = Path(__file__).resolve().parents[2]
PATIENT = Timing(timeout=18)  # 1 s: a guest that stands still is no loss


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STELLAR_RUN_DIR", str(tmp_path / "run"))


@pytest.fixture(scope="module")
def devices(rxe_hosts: tuple[RxeHost, RxeHost]) -> Iterator[tuple[Device, Device]]:
    """The devices of both hosts, in this process."""
    first, second = (
        in_netns(host.netns, lambda host=host: Device(host.device)) for host in rxe_hosts
    )
    yield first, second
    second.close()
    first.close()


class Link:
    """A connected queue pair from the first device to the second."""

    def __init__(self, devices: tuple[Device, Device]) -> None:
        self._queues = [CompletionQueue(device, 16) for device in devices]
        self._pairs = [
            QueuePair(device, queue, 4, 4)
            for device, queue in zip(devices, self._queues, strict=True)
        ]
        for pair, other in zip(self._pairs, self._pairs[::-1], strict=True):
            pair.connect(other.endpoint, 0, PATIENT)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        for pair in self._pairs:
            pair.close()
        for queue in self._queues:
            queue.close()

    def write(self, local: tuple[int, int], remote: tuple[int, int], nbytes: int) -> int:
        """RDMA WRITE from (address, lkey) to (address, rkey); the status of its completion."""
        sge = SGE(local[0], nbytes, local[1])
        request = SendWR(opcode=verbs.IBV_WR_RDMA_WRITE, num_sge=1, sg=[sge])
        request.set_wr_rdma(remote[1], remote[0])
        self._pairs[0].qp.post_send(request)
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            completions = self._queues[0].poll(1)
            if completions:
                return int(completions[0].status)
            time.sleep(0.0005)
        raise AssertionError("no completion within 30 s")


@pytest.fixture
def link(devices: tuple[Device, Device]) -> Iterator[Link]:
    with Link(devices) as connected:
        yield connected


@pytest.fixture
def page(devices: tuple[Device, Device]) -> Iterator[Lease]:
    """A page of the host that writes."""
    arena = Arena(devices[0].registrar, MIB, chunk_nbytes=MIB)
    with arena.lease(4096) as lease:
        yield lease
    arena.close()


def regions_of(host: RxeHost) -> int:
    """Memory regions of the host's device, as the kernel counts them."""
    text = host.sh(f"rdma resource show {host.device}")
    return int(text.split(" mr ")[1].split()[0])


def test_peers_write_from_lease_to_lease_both_ways(
    devices: tuple[Device, Device], link: Link, rxe_hosts: tuple[RxeHost, RxeHost]
) -> None:
    before = [regions_of(host) for host in rxe_hosts]
    config = PoolConfig(capacity_nbytes=16 * MIB, chunk_nbytes=8 * MIB, cache_nbytes=0)
    with (
        RegistrationPool(devices[0].registrar, config) as here,
        RegistrationPool(devices[1].registrar, config) as there,
        Link(devices[::-1]) as back,
    ):
        assert [regions_of(host) for host in rxe_hosts] == [count + 2 for count in before]
        for nbytes in (1, 4096, 1_000_003, 8 * MIB):
            with here.lease(nbytes) as mine, there.lease(nbytes) as theirs:
                pattern = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
                mine.view[:] = pattern
                theirs.view[:] = 0
                local, remote = (mine.addr, mine.lkey), (theirs.addr, theirs.rkey)
                assert link.write(local, remote, nbytes) == verbs.IBV_WC_SUCCESS
                assert np.array_equal(theirs.view, pattern)
                theirs.view[:] ^= 0xFF
                local, remote = (theirs.addr, theirs.lkey), (mine.addr, mine.rkey)
                assert back.write(local, remote, nbytes) == verbs.IBV_WC_SUCCESS
                assert np.array_equal(mine.view, pattern ^ 0xFF)
    assert [regions_of(host) for host in rxe_hosts] == before


def test_a_part_of_a_lease_is_used_with_the_keys_that_its_address_is_found_by(
    devices: tuple[Device, Device], link: Link
) -> None:
    config = PoolConfig(capacity_nbytes=4 * MIB, chunk_nbytes=MIB, cache_nbytes=0)
    with (
        RegistrationPool(devices[0].registrar, config) as here,
        RegistrationPool(devices[1].registrar, config) as there,
        here.lease(MIB) as mine,
        there.lease(MIB) as theirs,
    ):
        part = theirs.array(np.float32, 1000)[500:600]
        keys = there.find(part.ctypes.data, part.nbytes)
        assert keys is not None
        source = mine.array(np.float32, 100)
        source[:] = np.arange(100)
        theirs.view[:] = 0
        status = link.write((mine.addr, mine.lkey), (part.ctypes.data, keys[1]), part.nbytes)
        assert status == verbs.IBV_WC_SUCCESS
        assert np.array_equal(part, np.arange(100, dtype=np.float32))
        whole = theirs.array(np.float32, 1000)
        assert not whole[:500].any() and not whole[600:].any()


def test_a_large_pool_comes_in_chunks_that_the_device_has_a_table_for(
    devices: tuple[Device, Device], link: Link, page: Lease
) -> None:
    with RepeatedPages() as source:
        arena = Arena(devices[1].registrar, GIB, source=source)
        assert arena.describe()["chunks"] == GIB // DEFAULT_CHUNK_NBYTES == 2
        with arena.lease(DEFAULT_CHUNK_NBYTES) as lease:
            target = lease.addr + lease.nbytes - 4096
            page.view[:] = 7
            assert link.write((page.addr, page.lkey), (target, lease.rkey), 4096) == 0
            assert np.all(lease.view[-4096:] == 7)
        arena.close()


def test_a_buffer_of_another_owner_is_registered_in_the_background_and_written_to(
    devices: tuple[Device, Device], link: Link, page: Lease, rxe_hosts: tuple[RxeHost, RxeHost]
) -> None:
    before = regions_of(rxe_hosts[1])
    own = np.zeros(8 * MIB, np.uint8)
    with RegistrationPool(devices[1].registrar, PoolConfig(capacity_nbytes=0)) as pool:
        with pool.register_async(own).result(60) as region:
            page.view[:] = 7
            status = link.write((page.addr, page.lkey), (region.address, region.rkey), 4096)
            assert status == verbs.IBV_WC_SUCCESS
        assert np.all(own[:4096] == 7) and not own[4096:].any()
        # The pool goes at once: whatever became of these, nothing of them stays.
        others = [np.zeros(8 * MIB, np.uint8) for _ in range(4)]
        futures = [pool.register_async(each) for each in others]
        pool.close(force=True)
    assert regions_of(rxe_hosts[1]) == before
    for future in futures:
        assert future.done()
        if not future.cancelled() and future.exception() is None:
            future.result().release()


def test_a_peer_is_told_before_the_region_that_it_writes_to_is_evicted_and_cannot_write_after(
    devices: tuple[Device, Device], link: Link, page: Lease
) -> None:
    config = PoolConfig(
        capacity_nbytes=0, cache_nbytes=MIB, cache_regions=16, policy="lru", prefetch_depth=0
    )
    nbytes = 512 << 10
    first, second, third = (np.zeros(nbytes, np.uint8) for _ in range(3))
    local = page.addr, page.lkey
    told: list[tuple[int, int]] = []
    with RegistrationPool(devices[1].registrar, config) as pool:
        with pool.register(first, "exported") as region:

            def on_revoke(export: Export) -> None:
                # The peer's last word: what it has under way still arrives.
                page.view[:] = 2
                told.append((export.rkey, link.write(local, (export.address, export.rkey), 4096)))

            export = region.export(on_revoke, timeout_s=60)
        remote = export.address, export.rkey
        page.view[:] = 1
        assert link.write(local, remote, 4096) == verbs.IBV_WC_SUCCESS
        assert np.all(first[:4096] == 1) and not told
        # Pages at both ends: only one of them fits beside it, so that it has to go.
        pool.register(second).release()
        with pool.register(third):
            assert told == [(export.rkey, verbs.IBV_WC_SUCCESS)] and export.ended
            assert np.all(first[:4096] == 2)
            page.view[:] = 3
            assert link.write(local, remote, 4096) == verbs.IBV_WC_REM_ACCESS_ERR
            assert np.all(first[:4096] == 2)
        assert pool.stats()["revocations"] == {"answered": 1, "failed": 0}


class FarApartPages:
    """Chunks a GiB of addresses apart, as large ones would be, with memory for small ones only."""

    def __init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        # Addresses only, kept to the end of the process: chunks come to lie in them.
        self._next = map_nbytes(8 * GIB, flags)

    def allocate(self, nbytes: int) -> Pages:
        address, self._next = self._next, self._next + GIB
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        assert map_nbytes(nbytes, flags | MAP_FIXED, address) == address
        return Pages(address, nbytes, "base")

    def touch(self, pages: Pages) -> None:
        """There once the device pins it."""


def test_leases_beyond_2_and_4_gib_of_an_arena_are_reached_by_the_peer(
    devices: tuple[Device, Device], link: Link, page: Lease
) -> None:
    local = page.addr, page.lkey
    source = FarApartPages()
    arena = Arena(devices[1].registrar, 6 * MIB, chunk_nbytes=MIB, source=source)
    leases = sorted((arena.lease(MIB, n) for n in range(6)), key=lambda each: each.addr)
    assert leases[-1].addr - leases[0].addr > 4 * GIB
    for number, lease in enumerate(leases):
        keys = arena.find(lease.addr + 8192, 4096)
        assert keys is not None
        page.view[:] = number + 1
        assert link.write(local, (lease.addr + 8192, keys[1]), 4096) == verbs.IBV_WC_SUCCESS
    for number, lease in enumerate(leases):
        assert np.all(lease.view[8192:12288] == number + 1)
        assert not lease.view[:8192].any() and not lease.view[12288:].any()
        lease.release()
    arena.close()


def test_a_peers_write_beyond_the_end_of_a_chunk_reaches_nothing(
    devices: tuple[Device, Device], link: Link, page: Lease
) -> None:
    arena = Arena(devices[1].registrar, MIB, chunk_nbytes=MIB)
    with arena.lease(MIB) as last:
        page.view[:] = 1
        status = link.write((page.addr, page.lkey), (last.addr + MIB - 2048, last.rkey), 4096)
        assert status == verbs.IBV_WC_REM_ACCESS_ERR, "its second half is outside"
        assert not last.view.any()
    arena.close()


def test_a_peers_write_to_what_was_deregistered_fails_with_a_remote_access_error(
    devices: tuple[Device, Device], link: Link, page: Lease
) -> None:
    arena = Arena(devices[1].registrar, MIB, chunk_nbytes=MIB)
    lease = arena.lease(4096)
    view = lease.view
    view[:] = 1
    page.view[:] = 2
    local, remote = (page.addr, page.lkey), (lease.addr, lease.rkey)
    assert link.write(local, remote, 4096) == verbs.IBV_WC_SUCCESS
    assert np.all(view == 2)
    page.view[:] = 3
    arena.close(force=True)
    assert link.write(local, remote, 4096) == verbs.IBV_WC_REM_ACCESS_ERR
    assert np.all(view == 2)


def test_a_child_process_does_not_disturb_what_the_device_sees(
    devices: tuple[Device, Device], link: Link
) -> None:
    """After fork() the parent writes: the device must see that, not a copied page's old content."""
    assert fork_support() in ("enabled", "unneeded", "disabled")
    arenas = [Arena(device.registrar, MIB, chunk_nbytes=MIB) for device in devices]
    mine, theirs = (arena.lease(MIB) for arena in arenas)
    mine.view[:] = 1
    theirs.view[:] = 0
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reader, 1)
        os._exit(0)
    try:
        mine.view[:] = 2
        theirs.view[:] = 9
        assert link.write((mine.addr, mine.lkey), (theirs.addr, theirs.rkey), MIB) == 0
        assert np.all(theirs.view == 2)
    finally:
        os.write(writer, b"x")
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)
    for lease, arena in zip((mine, theirs), arenas, strict=True):
        lease.release()
        arena.close()


def test_the_devices_number_of_regions_limits_an_arena(devices: tuple[Device, Device]) -> None:
    most = devices[0].limits.max_mr
    assert most > 0
    with pytest.raises(PoolError, match=f"takes {most} memory regions; {most + 1} are needed"):
        Arena(devices[0].registrar, (most + 1) * 4096, chunk_nbytes=4096)


UNPRIVILEGED = """
import resource, sys
from dataclasses import replace
from controller.memory import Arena, PoolError
from controller.memory.limits import gather_limits
from controller.verbs.device import Device
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
device = Device(sys.argv[1])
limits = gather_limits()
assert not limits.may_exceed_memlock, "still has CAP_IPC_LOCK"
for given in (None, replace(limits, memlock_nbytes=None)):
    try:
        Arena(device.registrar, 4 << 20, chunk_nbytes=1 << 19, limits=given)
    except PoolError as error:
        print(error)
arena = Arena(device.registrar, 1 << 19, chunk_nbytes=1 << 19)
print("pinned", gather_limits().pinned_nbytes)
arena.close()
device.close()
"""


def test_a_process_that_may_not_lock_memory_is_told_before_and_by_the_kernel(
    rxe_hosts: tuple[RxeHost, RxeHost],
) -> None:
    host = rxe_hosts[0]
    before = regions_of(host)
    command = ["env", f"PYTHONPATH={ROOT}", "setpriv", "--bounding-set=-ipc_lock"]
    with Program(host, [*command, sys.executable, "-c", UNPRIVILEGED, host.device]) as child:
        foreseen, refused, pinned = child.wait(60).splitlines()[:3]
    assert "RLIMIT_MEMLOCK lets this process pin 1048576 bytes" in foreseen, foreseen
    assert "ulimit -l unlimited" in foreseen
    # Without the look ahead the kernel refuses the third half MiB, and the first two go back.
    assert "(2 of 8 chunks)" in refused and "RLIMIT_MEMLOCK is 1048576 bytes" in refused, refused
    assert int(pinned.split()[1]) >= 1 << 19
    assert regions_of(host) == before


def test_pinned_memory_is_seen_where_the_kernel_counts_it(devices: tuple[Device, Device]) -> None:
    before = gather_limits().pinned_nbytes
    arena = Arena(devices[0].registrar, 8 * MIB, chunk_nbytes=4 * MIB)
    assert gather_limits().pinned_nbytes >= before + 8 * MIB
    arena.close()
    assert gather_limits().pinned_nbytes == before


def test_a_lease_takes_a_hundredth_of_the_registration_of_8_mib_or_less(
    devices: tuple[Device, Device],
) -> None:
    """Its release included. By twenties: a guest's clock takes longer to read than a lease."""
    registrar = devices[0].registrar
    arena = Arena(registrar, 64 * MIB, chunk_nbytes=64 * MIB)
    lease_ns, register_ns = [], []
    with arena.lease(8 * MIB) as memory:
        for _ in range(40):
            started = time.perf_counter_ns()
            region = registrar.register(memory.addr, 8 * MIB)
            register_ns.append(time.perf_counter_ns() - started)
            registrar.deregister(region)
            started = time.perf_counter_ns()
            for _ in range(20):
                arena.lease(8 * MIB, "bucket").release()
            lease_ns.append((time.perf_counter_ns() - started) / 20)
    arena.close()
    lease, register = statistics.median(lease_ns), statistics.median(register_ns)
    print(f"lease and release {lease:.0f} ns; ibv_reg_mr of 8 MiB {register:.0f} ns")
    assert register >= 100 * lease, (lease, register)


def test_nothing_of_a_killed_process_stays_registered(
    rxe_hosts: tuple[RxeHost, RxeHost],
) -> None:
    host = rxe_hosts[0]
    before = regions_of(host)
    code = (
        "import sys, time\n"
        "from controller.memory import PoolConfig, RegistrationPool\n"
        "from controller.verbs.device import Device\n"
        "device = Device(sys.argv[1])\n"
        "config = PoolConfig(4 << 20, cache_nbytes=0)\n"
        "pool = RegistrationPool(device.registrar, config)\n"
        "lease = pool.lease(1000)\n"
        "print('made', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-c", code, host.device]
    with Program(host, command) as child:
        child.wait_for("made")
        assert regions_of(host) > before
        child.process.kill()
        child.process.wait()
    deadline_s = time.monotonic() + 10
    while regions_of(host) != before and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert regions_of(host) == before
    assert sh(f"ip netns pids {host.netns}").split() == []
