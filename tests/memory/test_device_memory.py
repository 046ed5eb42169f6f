"""Memory with dmabufs: the kernel's udmabuf where it is there, CUDA's driver as its documentation
says, and devices that take such memory or don't.
"""

from __future__ import annotations

import enum
import gc
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from controller.errors import StellarError, UnsupportedError, UsageError
from controller.memory import Arena, Lease, LeaseError, device_memory
from controller.memory.device_memory import (
    CudaMemory,
    DmaBufPages,
    DmaBufRegistrar,
    DmaBufSource,
    Udmabuf,
    require_dmabuf,
)
from controller.memory.errors import PoolError
from controller.verbs.registration import MemoryRegion, RegistrationError
from tests.memory.fakes import FakeRegistrar
from tests.memory.watched import PAGE, WatchedRegistrar


class FakeSource(DmaBufSource):
    """Addresses without memory; a file instead of a dmabuf."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self._next = 1 << 40

    def _make(self, nbytes: int) -> DmaBufPages:
        address, self._next = self._next, self._next + nbytes
        fd = os.memfd_create("fake")
        return DmaBufPages(fd, address, nbytes, "cuda", free=self.freed.append, host_visible=False)


class DmaBufDevice(FakeRegistrar):
    """Keeps what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int, int, int]] = []

    def register_dmabuf(self, fd: int, offset: int, nbytes: int, address: int) -> MemoryRegion:
        self.asked.append((fd, offset, nbytes, address))
        return super().register_dmabuf(fd, offset, nbytes, address)


def test_a_range_is_registered_by_its_dmabuf_and_its_offset_in_it() -> None:
    source, device = FakeSource(), DmaBufDevice()
    registrar = DmaBufRegistrar(device, source)
    first, second = source.allocate(4 * PAGE), source.allocate(4 * PAGE)
    registrar.register(first.address, 4 * PAGE)
    region = registrar.register(second.address + PAGE, 2 * PAGE)
    assert device.asked == [
        (first.fd, 0, 4 * PAGE, first.address),
        (second.fd, PAGE, 2 * PAGE, second.address + PAGE),
    ]
    assert region.address == second.address + PAGE
    assert registrar.limits == device.limits
    registrar.deregister(region)
    assert len(device.regions) == 1


def test_memory_of_nobody_s_dmabuf_is_refused() -> None:
    source = FakeSource()
    registrar = DmaBufRegistrar(DmaBufDevice(), source)
    pages = source.allocate(PAGE)
    with pytest.raises(RegistrationError, match="in no dmabuf"):
        registrar.register(pages.address, 2 * PAGE)
    with pytest.raises(RegistrationError, match="in no dmabuf"):
        registrar.register(pages.address - PAGE, PAGE)


def test_memory_and_dmabuf_go_with_the_last_reference() -> None:
    source = FakeSource()
    pages = source.allocate(PAGE)
    fd, address = pages.fd, pages.address
    del pages
    gc.collect()
    assert source.freed == [address]
    assert source.holding(address, 1) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_memory_that_the_processor_cannot_reach_has_no_array() -> None:
    pages = FakeSource().allocate(PAGE)
    with pytest.raises(UnsupportedError, match="'cuda' has no array"):
        np.asarray(pages)


@pytest.mark.parametrize(
    "use",
    [lambda lease: lease.view, lambda lease: lease.array(np.float32, 10), np.asarray,
     lambda lease: lease.__array_interface__],
)  # fmt: skip
def test_a_lease_of_memory_that_the_processor_cannot_reach_has_keys_and_no_array(
    use: Callable[[Lease], object],
) -> None:
    source = FakeSource()
    registrar = DmaBufRegistrar(DmaBufDevice(), source)
    arena = Arena(registrar, 4 * PAGE, chunk_nbytes=4 * PAGE, source=source)
    with arena.lease(PAGE, "weights") as lease:
        assert arena.find(lease.addr, PAGE) == (lease.lkey, lease.rkey)
        with pytest.raises(LeaseError, match="'weights' is memory of kind 'cuda', which the proc"):
            use(lease)
    arena.close()


@pytest.mark.parametrize("nbytes", [0, -PAGE, PAGE + 1])
def test_dmabufs_are_of_whole_pages(nbytes: int) -> None:
    with pytest.raises(UsageError, match=f"multiples of {PAGE}"):
        FakeSource().allocate(nbytes)


def test_a_device_that_takes_dmabufs_passes_the_trial_and_keeps_nothing() -> None:
    device = DmaBufDevice()
    require_dmabuf(device, FakeSource())
    assert len(device.asked) == 1
    assert not device.regions


def test_a_device_that_has_no_dmabufs_is_named() -> None:
    with pytest.raises(UnsupportedError, match="not supported by fake0"):
        require_dmabuf(WatchedRegistrar(), FakeSource())


def test_a_device_that_refuses_one_page_is_named_with_its_reason() -> None:
    class Refusing(FakeRegistrar):
        def register_dmabuf(self, fd: int, offset: int, nbytes: int, address: int) -> MemoryRegion:
            raise RegistrationError("fake0 cannot register: Invalid argument.")

    with pytest.raises(UnsupportedError, match=r"not supported by fake0.*Invalid argument"):
        require_dmabuf(Refusing(), FakeSource())


# ---- udmabuf ----


def test_udmabuf_gives_memory_or_says_what_is_missing() -> None:
    source = Udmabuf()
    try:
        pages = source.allocate(4 * PAGE)
    except StellarError as error:
        assert not os.access("/dev/udmabuf", os.R_OK | os.W_OK), error
        assert "/dev/udmabuf" in error.message
        assert error.remedy
        return
    array = np.asarray(pages)
    array[:] = 7
    assert source.holding(pages.address + PAGE, PAGE) is pages
    assert str(Path(f"/proc/self/fd/{pages.fd}").readlink()).startswith("/dmabuf")


def test_a_kernel_without_udmabuf_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_memory, "_UDMABUF", tmp_path / "udmabuf")
    with pytest.raises(UnsupportedError, match="udmabuf") as caught:
        Udmabuf().allocate(PAGE)
    assert "CONFIG_UDMABUF" in caught.value.remedy


def test_what_udmabuf_refuses_is_told_with_its_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "udmabuf").write_bytes(b"")  # a file that knows no ioctl
    monkeypatch.setattr(device_memory, "_UDMABUF", tmp_path / "udmabuf")
    with pytest.raises(PoolError, match="makes no dmabuf of 4096 bytes") as caught:
        Udmabuf().allocate(PAGE)
    assert "size_limit_mb" in caught.value.remedy


# ---- CUDA ----


class FakeCuda(types.ModuleType):
    """cuda.bindings.driver as far as it is used: every call returns (status, results...)."""

    class CUresult(enum.IntEnum):
        CUDA_SUCCESS = 0
        CUDA_ERROR_OUT_OF_MEMORY = 2
        CUDA_ERROR_INVALID_DEVICE = 101
        CUDA_ERROR_NOT_SUPPORTED = 801

    class CUdevice_attribute(enum.IntEnum):
        CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124

    class CUmemRangeHandleType(enum.IntEnum):
        CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1

    class CUdeviceptr:
        def __init__(self, value: int) -> None:
            self.value = value

        def __int__(self) -> int:
            return self.value

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self.failing: dict[str, FakeCuda.CUresult] = {}
        self.supported = 1
        self.unloadable = False

    def __getattr__(self, name: str) -> object:
        if not name.startswith("cu") or name[2:3].islower():
            raise AttributeError(name)

        def call(*arguments: object) -> tuple[object, ...]:
            if self.unloadable:
                raise RuntimeError("libcuda.so.1 not found")
            self.calls.append((name, arguments))
            status = self.failing.get(name, self.CUresult.CUDA_SUCCESS)
            results: dict[str, tuple[object, ...]] = {
                "cuDeviceGet": ("device",),
                "cuDeviceGetAttribute": (self.supported,),
                "cuDevicePrimaryCtxRetain": ("context",),
                "cuCtxPopCurrent": ("context",),
                "cuMemAlloc": (self.CUdeviceptr(0x7F00_0000_0200),),
            }
            if name == "cuMemGetHandleForAddressRange" and not status:
                return status, os.memfd_create("fake-dmabuf")
            return status, *results.get(name, ())

        return call

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    module = FakeCuda()
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", module)
    return module


def test_cuda_memory_is_allocated_in_its_context_and_exported_by_whole_pages(
    cuda: FakeCuda,
) -> None:
    source = CudaMemory(3)
    pages = source.allocate(16 * PAGE)
    assert cuda.calls[:4] == [
        ("cuInit", (0,)),
        ("cuDeviceGet", (3,)),
        ("cuDeviceGetAttribute", (124, "device")),
        ("cuDevicePrimaryCtxRetain", ("device",)),
    ]
    assert cuda.names[4:] == [
        "cuCtxPushCurrent", "cuMemAlloc", "cuMemGetHandleForAddressRange", "cuCtxPopCurrent",
    ]  # fmt: skip
    assert dict(cuda.calls)["cuMemAlloc"] == (17 * PAGE,)
    address, nbytes, kind, flags = dict(cuda.calls)["cuMemGetHandleForAddressRange"]
    assert int(address) == pages.address == 0x7F00_0000_1000  # type: ignore[call-overload]
    assert (nbytes, kind, flags) == (16 * PAGE, 1, 0)
    cuda.calls.clear()
    del pages
    gc.collect()
    assert cuda.names == ["cuCtxPushCurrent", "cuMemFree", "cuCtxPopCurrent"]
    (freed,) = dict(cuda.calls)["cuMemFree"]
    assert int(freed) == 0x7F00_0000_0200  # type: ignore[call-overload]
    cuda.calls.clear()
    del source
    gc.collect()
    assert cuda.calls == [("cuDevicePrimaryCtxRelease", ("device",))]


def test_cuda_memory_without_a_dmabuf_is_freed_at_once(cuda: FakeCuda) -> None:
    source = CudaMemory()
    cuda.failing["cuMemGetHandleForAddressRange"] = cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED
    with pytest.raises(PoolError, match=r"ForAddressRange.*CUDA_ERROR_NOT_SUPPORTED"):
        source.allocate(PAGE)
    assert cuda.names[-2:] == ["cuMemFree", "cuCtxPopCurrent"]


def test_a_full_gpu_is_an_error_that_leaves_the_context_as_it_was(cuda: FakeCuda) -> None:
    source = CudaMemory()
    cuda.failing["cuMemAlloc"] = cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(PoolError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        source.allocate(PAGE)
    assert cuda.names[-1] == "cuCtxPopCurrent"


def test_a_gpu_that_is_not_there_is_an_error_with_cuda_s_name_for_it(cuda: FakeCuda) -> None:
    cuda.failing["cuDeviceGet"] = cuda.CUresult.CUDA_ERROR_INVALID_DEVICE
    with pytest.raises(PoolError, match=r"cuDeviceGet.*CUDA_ERROR_INVALID_DEVICE"):
        CudaMemory(9)


def test_a_gpu_without_dmabufs_is_refused_with_what_to_install(cuda: FakeCuda) -> None:
    cuda.supported = 0
    with pytest.raises(UnsupportedError, match="GPU 2 gives no dmabufs") as caught:
        CudaMemory(2)
    assert "open kernel modules" in caught.value.remedy
    assert "cuDevicePrimaryCtxRetain" not in cuda.names


def test_a_machine_without_the_driver_is_told_so(cuda: FakeCuda) -> None:
    cuda.unloadable = True
    with pytest.raises(UnsupportedError, match=r"cannot be used: libcuda.so.1 not found"):
        CudaMemory()


def test_without_cuda_python_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver", "cuda.cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match="cuda-python") as caught:
        CudaMemory()
    assert "pip install cuda-python" in caught.value.remedy
