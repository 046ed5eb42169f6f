"""libbpf.so.1 by ctypes: maps, programs, test runs, XDP links, ring buffer.

Only calls and types; what they are used for is in the modules above. Every call
raises OSError with the kernel's errno.
"""

from __future__ import annotations

import ctypes as ct
import errno
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from controller.errors import UnsupportedError

# linux/bpf.h
MAP_TYPE_HASH = 1
MAP_TYPE_ARRAY = 2
MAP_TYPE_PERCPU_ARRAY = 6
MAP_TYPE_LRU_HASH = 9
MAP_TYPE_RINGBUF = 27
PROG_TYPE_SCHED_CLS = 3
PROG_TYPE_XDP = 6
BPF_ANY = 0
BPF_F_LOCK = 4
BPF_F_XDP_HAS_FRAGS = 1 << 5
BPF_F_REPLACE = 1 << 2
BPF_F_BEFORE = 1 << 3
BPF_TCX_INGRESS = 46
BPF_TCX_EGRESS = 47
# linux/if_link.h
XDP_FLAGS_UPDATE_IF_NOEXIST = 1 << 0
XDP_FLAGS_SKB_MODE = 1 << 1
XDP_FLAGS_DRV_MODE = 1 << 2
XDP_FLAGS_REPLACE = 1 << 4
XDP_ATTACHED_NONE = 0
XDP_ATTACHED_DRV = 1
XDP_ATTACHED_SKB = 2

_LOG_BYTES = 1 << 20
_MAX_TCX_PROGRAMS = 64  # BPF_MPROG_MAX


class _MapCreateOpts(ct.Structure):
    _fields_ = [
        ("sz", ct.c_size_t),
        ("btf_fd", ct.c_uint32),
        ("btf_key_type_id", ct.c_uint32),
        ("btf_value_type_id", ct.c_uint32),
        ("btf_vmlinux_value_type_id", ct.c_uint32),
        ("inner_map_fd", ct.c_uint32),
        ("map_flags", ct.c_uint32),
        ("map_extra", ct.c_uint64),
        ("numa_node", ct.c_uint32),
        ("map_ifindex", ct.c_uint32),
    ]


class _ProgAttachOpts(ct.Structure):
    _fields_ = [
        ("sz", ct.c_size_t),
        ("flags", ct.c_uint32),
        ("replace_prog_fd", ct.c_int),
    ]


class _ProgLoadOpts(ct.Structure):
    _fields_ = [
        ("sz", ct.c_size_t),
        ("attempts", ct.c_int),
        ("expected_attach_type", ct.c_int),
        ("prog_btf_fd", ct.c_uint32),
        ("prog_flags", ct.c_uint32),
        ("prog_ifindex", ct.c_uint32),
        ("kern_version", ct.c_uint32),
        ("attach_btf_id", ct.c_uint32),
        ("attach_prog_fd", ct.c_uint32),
        ("attach_btf_obj_fd", ct.c_uint32),
        ("fd_array", ct.c_void_p),
        ("func_info", ct.c_void_p),
        ("func_info_cnt", ct.c_uint32),
        ("func_info_rec_size", ct.c_uint32),
        ("line_info", ct.c_void_p),
        ("line_info_cnt", ct.c_uint32),
        ("line_info_rec_size", ct.c_uint32),
        ("log_level", ct.c_uint32),
        ("log_size", ct.c_uint32),
        ("log_buf", ct.c_void_p),
    ]


class _TestRunOpts(ct.Structure):
    _fields_ = [
        ("sz", ct.c_size_t),
        ("data_in", ct.c_void_p),
        ("data_out", ct.c_void_p),
        ("data_size_in", ct.c_uint32),
        ("data_size_out", ct.c_uint32),
        ("ctx_in", ct.c_void_p),
        ("ctx_out", ct.c_void_p),
        ("ctx_size_in", ct.c_uint32),
        ("ctx_size_out", ct.c_uint32),
        ("retval", ct.c_uint32),
        ("repeat", ct.c_int),
        ("duration", ct.c_uint32),
        ("flags", ct.c_uint32),
        ("cpu", ct.c_uint32),
        ("batch_size", ct.c_uint32),
    ]


class _BatchOpts(ct.Structure):
    _fields_ = [("sz", ct.c_size_t), ("elem_flags", ct.c_uint64), ("flags", ct.c_uint64)]


class _XdpAttachOpts(ct.Structure):
    _fields_ = [("sz", ct.c_size_t), ("old_prog_fd", ct.c_int)]


class _XdpQueryOpts(ct.Structure):
    _fields_ = [
        ("sz", ct.c_size_t),
        ("prog_id", ct.c_uint32),
        ("drv_prog_id", ct.c_uint32),
        ("hw_prog_id", ct.c_uint32),
        ("skb_prog_id", ct.c_uint32),
        ("attach_mode", ct.c_uint8),
    ]


class _ProgInfo(ct.Structure):
    _fields_ = [
        ("type", ct.c_uint32),
        ("id", ct.c_uint32),
        ("tag", ct.c_uint8 * 8),
        ("jited_prog_len", ct.c_uint32),
        ("xlated_prog_len", ct.c_uint32),
        ("jited_prog_insns", ct.c_uint64),
        ("xlated_prog_insns", ct.c_uint64),
        ("load_time", ct.c_uint64),
        ("created_by_uid", ct.c_uint32),
        ("nr_map_ids", ct.c_uint32),
        ("map_ids", ct.c_uint64),
        ("name", ct.c_char * 16),
    ]


class _MapInfo(ct.Structure):
    _fields_ = [
        ("type", ct.c_uint32),
        ("id", ct.c_uint32),
        ("key_size", ct.c_uint32),
        ("value_size", ct.c_uint32),
        ("max_entries", ct.c_uint32),
        ("map_flags", ct.c_uint32),
        ("name", ct.c_char * 16),
    ]


_RING_CALLBACK = ct.CFUNCTYPE(ct.c_int, ct.c_void_p, ct.c_void_p, ct.c_size_t)
_PRINT_CALLBACK = ct.CFUNCTYPE(ct.c_int, ct.c_int, ct.c_char_p, ct.c_void_p)
_SILENCE = _PRINT_CALLBACK(lambda _level, _format, _arguments: 0)  # must outlive the library


@dataclass(frozen=True)
class ProgramInfo:
    """What the kernel tells of a loaded program."""

    id: int
    type: int
    name: str
    map_ids: tuple[int, ...]


@dataclass(frozen=True)
class MapInfo:
    """What the kernel tells of a map."""

    id: int
    name: str
    type: int
    key_size: int
    value_size: int
    max_entries: int
    flags: int


@dataclass(frozen=True)
class TestRun:
    """Result of one BPF_PROG_TEST_RUN."""

    retval: int
    data: bytes
    ns_per_run: int
    context: bytes = b""

    __test__ = False  # not a test class, whatever pytest makes of the name


@functools.cache
def library() -> Any:
    """The loaded library, its messages silenced (errors come back as errno and log)."""
    try:
        lib = ct.CDLL("libbpf.so.1", use_errno=True)
    except OSError as error:
        raise UnsupportedError(
            f"libbpf.so.1 cannot be loaded: {error}.", "Install libbpf 1.x (package libbpf1)."
        ) from error
    lib.ring_buffer__new.restype = ct.c_void_p
    lib.ring_buffer__new.argtypes = [ct.c_int, _RING_CALLBACK, ct.c_void_p, ct.c_void_p]
    lib.ring_buffer__consume.argtypes = [ct.c_void_p]
    lib.ring_buffer__epoll_fd.argtypes = [ct.c_void_p]
    lib.ring_buffer__free.argtypes = [ct.c_void_p]
    lib.ring_buffer__free.restype = None
    lib.libbpf_set_print(_SILENCE)
    return lib


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(-result, f"{what}: {os.strerror(-result)}")
    return result


def possible_cpus() -> int:
    """Number of possible CPUs: a per-CPU map has one value for each."""
    return _check(library().libbpf_num_possible_cpus(), "number of CPUs")


def btf_load(blob: bytes) -> int:
    """Load BTF, return its descriptor."""
    buffer = ct.create_string_buffer(blob, len(blob))
    return _check(library().bpf_btf_load(buffer, ct.c_size_t(len(blob)), None), "load BTF")


def map_create(
    map_type: int,
    name: str,
    key_size: int,
    value_size: int,
    max_entries: int,
    flags: int = 0,
    btf: tuple[int, int, int] | None = None,
) -> int:
    """Create a map; `btf` is (descriptor, key type, value type). Returns its descriptor."""
    opts = _MapCreateOpts(sz=ct.sizeof(_MapCreateOpts), map_flags=flags)
    if btf:
        opts.btf_fd, opts.btf_key_type_id, opts.btf_value_type_id = btf
    return _check(
        library().bpf_map_create(
            map_type, name.encode(), key_size, value_size, max_entries, ct.byref(opts)
        ),
        f"create map {name}",
    )


def map_update(fd: int, key: bytes, value: bytes, flags: int = BPF_ANY) -> None:
    """Write one entry."""
    _check(library().bpf_map_update_elem(fd, key, value, ct.c_uint64(flags)), "update map")


def map_lookup(fd: int, key: bytes, value_bytes: int, flags: int = 0) -> bytes | None:
    """Read one entry (all CPUs' values for a per-CPU map), None when there is none."""
    value = ct.create_string_buffer(value_bytes)
    result = library().bpf_map_lookup_elem_flags(fd, key, value, ct.c_uint64(flags))
    if result == -2:  # ENOENT
        return None
    _check(result, "look up in map")
    return value.raw


def map_delete(fd: int, key: bytes) -> bool:
    """Delete one entry; False when there is none."""
    result = library().bpf_map_delete_elem(fd, key)
    if result == -2:  # ENOENT
        return False
    _check(result, "delete from map")
    return True


def map_lookup_and_delete(fd: int, key: bytes, value_bytes: int, flags: int = 0) -> bytes | None:
    """Take one entry out: its last value, or None when there is none."""
    value = ct.create_string_buffer(value_bytes)
    result = library().bpf_map_lookup_and_delete_elem_flags(fd, key, value, ct.c_uint64(flags))
    if result == -2:  # ENOENT
        return None
    _check(result, "take out of map")
    return value.raw


def map_lookup_batch(
    fd: int, token: bytes | None, keys: Any, values: Any, capacity: int, flags: int = 0
) -> tuple[int, bytes | None]:
    """Read up to `capacity` entries of a hash into two writable buffers.

    Returns the number read and the token for the next call (None: the map ends here).
    """
    count = ct.c_uint32(capacity)
    out = ct.create_string_buffer(4)
    opts = _BatchOpts(sz=ct.sizeof(_BatchOpts), elem_flags=flags)
    result = library().bpf_map_lookup_batch(
        fd, token, out, keys, values, ct.byref(count), ct.byref(opts)
    )
    if result == -2:  # ENOENT: the end
        return count.value, None
    _check(result, "read map")
    return count.value, out.raw


def prog_load(prog_type: int, name: str, instructions: bytes, flags: int = 0) -> int:
    """Load a program; on rejection the error carries the verifier's last lines."""
    buffer = ct.create_string_buffer(instructions, len(instructions))
    count = ct.c_size_t(len(instructions) // 8)

    def load(opts: _ProgLoadOpts) -> int:
        return int(
            library().bpf_prog_load(
                prog_type, name.encode(), b"Dual BSD/GPL", buffer, count, ct.byref(opts)
            )
        )

    opts = _ProgLoadOpts(sz=ct.sizeof(_ProgLoadOpts), prog_flags=flags)
    result = load(opts)
    if result < 0:
        log = ct.create_string_buffer(_LOG_BYTES)
        opts.log_level, opts.log_size, opts.log_buf = 1, _LOG_BYTES, ct.addressof(log)
        result = load(opts)
        if result < 0:
            tail = "\n".join(log.value.decode(errors="replace").splitlines()[-15:])
            raise OSError(-result, f"load {name}: {os.strerror(-result)}\n{tail}")
    return result


def prog_fd_by_id(program_id: int) -> int:
    """Descriptor of a loaded program."""
    return _check(library().bpf_prog_get_fd_by_id(program_id), f"program {program_id}")


def map_fd_by_id(map_id: int) -> int:
    """Descriptor of an existing map."""
    return _check(library().bpf_map_get_fd_by_id(map_id), f"map {map_id}")


def prog_info(fd: int) -> ProgramInfo:
    """Name, type and maps of a program."""
    ids = (ct.c_uint32 * 64)()
    info = _ProgInfo(nr_map_ids=64, map_ids=ct.addressof(ids))
    length = ct.c_uint32(ct.sizeof(info))
    _check(library().bpf_obj_get_info_by_fd(fd, ct.byref(info), ct.byref(length)), "program info")
    return ProgramInfo(info.id, info.type, info.name.decode(), tuple(ids[: info.nr_map_ids]))


def map_info(fd: int) -> MapInfo:
    """Name, type and sizes of a map."""
    info = _MapInfo()
    length = ct.c_uint32(ct.sizeof(info))
    _check(library().bpf_obj_get_info_by_fd(fd, ct.byref(info), ct.byref(length)), "map info")
    return MapInfo(
        info.id,
        info.name.decode(),
        info.type,
        info.key_size,
        info.value_size,
        info.max_entries,
        info.map_flags,
    )


def test_run(
    fd: int,
    data: bytes,
    context: bytes | None = None,
    repeat: int = 1,
    data_out_bytes: int | None = None,
) -> TestRun:
    """BPF_PROG_TEST_RUN: run a program on `data`, `repeat` times in the kernel.

    `context` is a struct __sk_buff or xdp_md; as the program left it, it is in the result.
    """
    size_out = len(data) + 64 if data_out_bytes is None else data_out_bytes
    out = ct.create_string_buffer(size_out) if size_out else None
    opts = _TestRunOpts(sz=ct.sizeof(_TestRunOpts), data_size_in=len(data), repeat=repeat)
    opts.data_in = ct.cast(ct.c_char_p(data), ct.c_void_p)
    if out is not None:
        opts.data_out, opts.data_size_out = ct.addressof(out), size_out
    if context is not None:
        opts.ctx_in = ct.cast(ct.c_char_p(context), ct.c_void_p)
        opts.ctx_size_in = len(context)
        context_out = ct.create_string_buffer(len(context))
        opts.ctx_out, opts.ctx_size_out = ct.addressof(context_out), len(context)
    _check(library().bpf_prog_test_run_opts(fd, ct.byref(opts)), "test run")
    return TestRun(
        opts.retval,
        out.raw[: opts.data_size_out] if out else b"",
        opts.duration,
        context_out.raw if context is not None else b"",
    )


test_run.__test__ = False  # type: ignore[attr-defined]


def xdp_attach(ifindex: int, fd: int, flags: int, old_fd: int | None = None) -> None:
    """Attach (fd >= 0) or detach (fd = -1) an XDP program in the thread's namespace."""
    opts = _XdpAttachOpts(sz=ct.sizeof(_XdpAttachOpts), old_prog_fd=old_fd or 0)
    if old_fd is not None:
        flags |= XDP_FLAGS_REPLACE
    _check(library().bpf_xdp_attach(ifindex, fd, flags, ct.byref(opts)), "XDP")


def xdp_query(ifindex: int) -> tuple[int, int]:
    """Program id (0: none) and XDP_ATTACHED_* mode of an interface."""
    opts = _XdpQueryOpts(sz=ct.sizeof(_XdpQueryOpts))
    _check(library().bpf_xdp_query(ifindex, 0, ct.byref(opts)), "XDP query")
    return opts.prog_id or opts.drv_prog_id or opts.skb_prog_id, opts.attach_mode


def tcx_query(ifindex: int, attach_type: int) -> list[int] | None:
    """Program ids at a tcx hook, in order; None where the kernel has no tcx (before 6.6)."""
    ids = (ct.c_uint32 * _MAX_TCX_PROGRAMS)()
    count, flags = ct.c_uint32(_MAX_TCX_PROGRAMS), ct.c_uint32(0)
    # The C name of the first argument is target_fd; in the kernel's union it is the ifindex.
    result = library().bpf_prog_query(
        ifindex, attach_type, 0, ct.byref(flags), ids, ct.byref(count)
    )
    if result in (-errno.EINVAL, -errno.EOPNOTSUPP):
        return None
    if result == -errno.ENOENT:
        return []
    _check(result, "tcx query")
    return list(ids[: count.value])


def tcx_attach(ifindex: int, fd: int, attach_type: int, old_fd: int | None = None) -> None:
    """Attach a program in front of all others at a tcx hook, or in place of `old_fd`."""
    opts = _ProgAttachOpts(sz=ct.sizeof(_ProgAttachOpts), flags=BPF_F_BEFORE)
    if old_fd is not None:
        opts.flags, opts.replace_prog_fd = BPF_F_REPLACE, old_fd
    _check(library().bpf_prog_attach_opts(fd, ifindex, attach_type, ct.byref(opts)), "tcx")


def tcx_detach(ifindex: int, fd: int, attach_type: int) -> None:
    """Take a program off a tcx hook."""
    _check(library().bpf_prog_detach2(fd, ifindex, attach_type), "tcx")


class RingBuffer:
    """Consumer of one ring buffer map; `callback` gets each record's bytes."""

    def __init__(self, map_fd: int, callback: Callable[[bytes], None]) -> None:
        def receive(_context: int, data: int, size: int) -> int:
            callback(ct.string_at(data, size))
            return 0

        self._callback = _RING_CALLBACK(receive)
        self._ring = library().ring_buffer__new(map_fd, self._callback, None, None)
        if not self._ring:
            raise OSError(ct.get_errno(), "ring buffer cannot be opened")

    def fileno(self) -> int:
        """Descriptor that becomes readable when records wait."""
        return int(library().ring_buffer__epoll_fd(self._ring))

    def consume(self) -> int:
        """Deliver all waiting records; returns their number."""
        return _check(library().ring_buffer__consume(self._ring), "ring buffer")

    def close(self) -> None:
        """Release the ring's memory; the map stays."""
        if self._ring:
            library().ring_buffer__free(self._ring)
            self._ring = None
