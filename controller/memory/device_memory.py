"""Memory that a device reaches through a dmabuf: a GPU's, or the host's in the same clothes.

An arena takes its pages from a source here, and registers them through a registrar that knows it:

    source = CudaMemory(0)
    require_dmabuf(device.registrar, source)
    arena = Arena(DmaBufRegistrar(device.registrar, source), ..., source=source)

udmabuf makes dmabufs of ordinary memory: the same path where there is no GPU. The CUDA source
follows the documentation of cuda-python 13; it has not run on a GPU.
"""

from __future__ import annotations

import fcntl
import importlib
import mmap
import os
import struct
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from controller.errors import PrivilegeError, UnsupportedError, UsageError
from controller.memory.errors import PoolError
from controller.memory.pages import PAGE_NBYTES, Pages, map_nbytes
from controller.verbs.registration import (
    DeviceLimits,
    MemoryRegion,
    Registrar,
    RegistrationError,
)

_UDMABUF = Path("/dev/udmabuf")
_UDMABUF_LIMIT = Path("/sys/module/udmabuf/parameters/size_limit_mb")
# <linux/udmabuf.h>: _IOW('u', 0x42, struct udmabuf_create {memfd, flags, offset, size}).
_UDMABUF_CREATE = 0x40187542
_UDMABUF_FLAGS_CLOEXEC = 1
# <linux/fcntl.h>; a dmabuf's pages must not go while it lives.
_F_ADD_SEALS = 1033
_F_SEAL_SHRINK = 2


class DmaBufPages(Pages):
    """Memory with a dmabuf that begins where it begins.

    Parameters
    ----------
    fd
        The dmabuf; closed when nothing refers to this object any more.
    address, nbytes
        Whole pages; what work requests call them by.
    kind
        ``udmabuf`` or ``cuda``.
    free
        Called with the address when nothing refers to the memory any more; without it, it is
        unmapped.
    host_visible
        Whether the processor reads and writes it at `address`, too.
    """

    def __init__(
        self,
        fd: int,
        address: int,
        nbytes: int,
        kind: str,
        *,
        free: Callable[[int], object] | None = None,
        host_visible: bool = True,
    ) -> None:
        super().__init__(address, nbytes, kind)
        self.fd = fd
        self.host_visible = host_visible
        self._free = free

    def __del__(self) -> None:
        os.close(self.fd)  # in a child, its own copy
        if self._free is None:
            super().__del__()
        elif not self.forked:
            self._free(self.address)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The protocol of numpy, for memory that the processor can reach."""
        if not self.host_visible:
            raise UnsupportedError(
                f"Memory of kind {self.kind!r} has no array of numpy: the processor cannot reach "
                f"it at {self.address:#x}.",
                "Use the address with the device's own library.",
            )
        return super().__array_interface__


class DmaBufSource(ABC):
    """Where an arena's dmabufs come from; a page source that knows what it gave."""

    def __init__(self) -> None:
        self._given: weakref.WeakSet[DmaBufPages] = weakref.WeakSet()

    def allocate(self, nbytes: int) -> DmaBufPages:
        """Memory with a dmabuf, not necessarily there yet.

        Parameters
        ----------
        nbytes
            Whole pages.
        """
        if nbytes < 1 or nbytes % PAGE_NBYTES:
            raise UsageError(
                f"A dmabuf of {nbytes} bytes cannot be; allowed: multiples of {PAGE_NBYTES}."
            )
        pages = self._make(nbytes)
        self._given.add(pages)
        return pages

    def touch(self, pages: Pages) -> None:  # noqa: B027 - for every kind alike
        """Nothing to do: a dmabuf's pages are there."""

    def holding(self, address: int, nbytes: int) -> DmaBufPages | None:
        """The memory that all of a range lies in."""
        for pages in list(self._given):
            if pages.address <= address and address + nbytes <= pages.address + pages.nbytes:
                return pages
        return None

    @abstractmethod
    def _make(self, nbytes: int) -> DmaBufPages:
        """Allocate, and get the dmabuf."""


class DmaBufRegistrar:
    """Registers memory of a source by its dmabufs, so that an arena need not know of them.

    Parameters
    ----------
    registrar
        Of the RDMA device.
    source
        Whose memory; nothing else can be registered.
    """

    def __init__(self, registrar: Registrar, source: DmaBufSource) -> None:
        self._registrar, self._source = registrar, source

    @property
    def limits(self) -> DeviceLimits:
        """What the device can register."""
        return self._registrar.limits

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        """Register a range that lies in one dmabuf of the source.

        Raises
        ------
        RegistrationError
            It does not, or the device refuses.
        UnsupportedError
            The device registers no dmabufs.
        """
        pages = self._source.holding(address, nbytes)
        if pages is None:
            raise RegistrationError(
                f"{nbytes} bytes at {address:#x} lie in no dmabuf of this pool.",
                "Register memory that its page source has given.",
            )
        return self.register_dmabuf(pages.fd, address - pages.address, nbytes, address)

    def register_dmabuf(self, fd: int, offset: int, nbytes: int, address: int) -> MemoryRegion:
        """Register a part of any dmabuf."""
        return self._registrar.register_dmabuf(fd, offset, nbytes, address)

    def deregister(self, region: MemoryRegion) -> None:
        """Give a region back."""
        self._registrar.deregister(region)


def require_dmabuf(registrar: Registrar, source: DmaBufSource) -> None:
    """Try whether a device registers the dmabufs of a source; no flag of verbs tells.

    Raises
    ------
    UnsupportedError
        It does not: names the device and its reason.
    """
    pages = source.allocate(PAGE_NBYTES)
    try:
        region = registrar.register_dmabuf(pages.fd, 0, PAGE_NBYTES, pages.address)
    except RegistrationError as error:
        raise UnsupportedError(
            f"dmabuf memory regions of kind {pages.kind!r} are not supported by "
            f"{registrar.limits.device}: it refused one page. {error.message}",
            "Use memory of the host, or a device whose driver imports dmabufs.",
        ) from error
    registrar.deregister(region)


class Udmabuf(DmaBufSource):
    """dmabufs of the host's own memory."""

    def _make(self, nbytes: int) -> DmaBufPages:
        memory = os.memfd_create("stellar-udmabuf", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memory, nbytes)
            fcntl.fcntl(memory, _F_ADD_SEALS, _F_SEAL_SHRINK)
            fd = _create_udmabuf(memory, nbytes)
            try:
                address = map_nbytes(nbytes, mmap.MAP_SHARED, fd=memory)
            except OSError as error:
                os.close(fd)
                raise PoolError(
                    f"{nbytes} bytes of a memfd cannot be mapped: {error.strerror}."
                ) from None
        finally:
            os.close(memory)
        return DmaBufPages(fd, address, nbytes, "udmabuf")


def _create_udmabuf(memory: int, nbytes: int) -> int:
    try:
        device = os.open(_UDMABUF, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UnsupportedError(
            f"This kernel has no {_UDMABUF}.", "Load the module udmabuf (CONFIG_UDMABUF)."
        ) from None
    except PermissionError:
        raise PrivilegeError(
            f"{_UDMABUF} may not be opened.", "Join its group (often kvm), or run as root."
        ) from None
    request = bytearray(struct.pack("=IIQQ", memory, _UDMABUF_FLAGS_CLOEXEC, 0, nbytes))
    try:
        return int(fcntl.ioctl(device, _UDMABUF_CREATE, request, True))
    except OSError as error:
        raise PoolError(
            f"udmabuf makes no dmabuf of {nbytes} bytes: {error.strerror}.",
            f"Its limit is in {_UDMABUF_LIMIT}, in MiB; use smaller chunks.",
        ) from None
    finally:
        os.close(device)


class CudaMemory(DmaBufSource):
    """Memory of an NVIDIA GPU, by cuda-python.

    Parameters
    ----------
    ordinal
        Of the GPU, as CUDA counts them.

    Raises
    ------
    UnsupportedError
        cuda-python or the driver is missing, or the GPU gives no dmabufs.
    PoolError
        The driver refuses: there is no such GPU.
    """

    def __init__(self, ordinal: int = 0) -> None:
        super().__init__()
        self._driver = _cuda_driver()
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", ordinal)
        attribute = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
        if not self._call("cuDeviceGetAttribute", attribute, self._device):
            raise UnsupportedError(
                f"GPU {ordinal} gives no dmabufs.",
                "Use NVIDIA's open kernel modules, release 515 or later.",
            )
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        # A source dies after its memory, which refers to it.
        weakref.finalize(self, self._driver.cuDevicePrimaryCtxRelease, self._device)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call the driver; its results without the status."""
        try:
            status, *results = getattr(self._driver, name)(*arguments)
        except Exception as error:  # the library itself is loaded by the first call
            raise UnsupportedError(
                f"CUDA's driver cannot be used: {error}", "Install NVIDIA's driver."
            ) from error
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise PoolError(f"{name} of CUDA's driver failed: {status.name}.")
        return results[0] if results else None

    @contextmanager
    def _current(self) -> Any:
        """Let this thread's calls mean our GPU, and leave its context as it was."""
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def _make(self, nbytes: int) -> DmaBufPages:
        driver = self._driver
        kind = driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        with self._current():
            # A dmabuf is of whole pages of the host; CUDA aligns to less.
            allocated = self._call("cuMemAlloc", nbytes + PAGE_NBYTES)
            address = -(-int(allocated) // PAGE_NBYTES) * PAGE_NBYTES
            try:
                fd = self._call(
                    "cuMemGetHandleForAddressRange", driver.CUdeviceptr(address), nbytes, kind, 0
                )
            except PoolError:
                self._call("cuMemFree", allocated)
                raise

        def free(_: int) -> None:
            with self._current():
                self._call("cuMemFree", allocated)

        return DmaBufPages(int(fd), address, nbytes, "cuda", free=free, host_visible=False)


def _cuda_driver() -> Any:
    """cuda-python's driver module, which moved in release 12.8."""
    for name in ("cuda.bindings.driver", "cuda.cuda"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise UnsupportedError(
        "Memory of a GPU needs cuda-python, which is not installed.",
        "pip install cuda-python (of the driver's CUDA version).",
    )
