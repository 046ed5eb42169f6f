"""Typed access to the dataplane's maps."""

from __future__ import annotations

import ctypes as ct
import errno
import struct
import time
from collections.abc import Mapping

import numpy as np

from controller.dataplane import layout, libbpf
from controller.dataplane.layout import Direction, PairState, Reason

# Entries a system call: 3 MB of buffers, and few calls for tens of thousands of flows.
_BATCH = 4096
# One tick at the slowest usual rate (HZ=100); a hundred of them mean that memory is short.
_REFILL_S = 0.01
_ALLOCATION_RETRIES = 100


def read_flows(fd: int) -> tuple[np.ndarray, np.ndarray]:
    """Read the whole flow table.

    Returns
    -------
    keys, stats
        Arrays of dtype ``layout.FLOW_KEY`` and ``layout.FLOW_STATS``, both of shape (n,).
        Each entry is copied under its lock, so its counters belong together.
    """
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    token: bytes | None = None
    capacity = _BATCH
    while True:
        keys = np.empty(capacity, layout.FLOW_KEY)
        stats = np.empty(capacity, layout.FLOW_STATS)
        try:
            count, token = libbpf.map_lookup_batch(
                fd,
                token,
                keys.ctypes.data_as(ct.c_void_p),
                stats.ctypes.data_as(ct.c_void_p),
                capacity,
                libbpf.BPF_F_LOCK,
            )
        except OSError as error:
            if error.errno != 28:  # ENOSPC: one hash bucket holds more than `capacity`
                raise
            capacity *= 2
            continue
        parts.append((keys[:count], stats[:count]))
        if token is None:
            break
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def take_flow(fd: int, key: np.void) -> np.void | None:
    """Delete one flow and return its last counters; None when it is gone already."""
    raw = libbpf.map_lookup_and_delete(
        fd, key.tobytes(), layout.FLOW_STATS.itemsize, libbpf.BPF_F_LOCK
    )
    return None if raw is None else np.frombuffer(raw, layout.FLOW_STATS)[0]


def read_reasons(fd: int, port: int, direction: Direction) -> dict[Reason, int]:
    """Frames of one interface and direction by what became of them, zeros left out."""
    result = {}
    cpus = libbpf.possible_cpus()
    for reason in Reason:
        index = (port * 2 + direction) * len(Reason) + reason
        raw = libbpf.map_lookup(fd, struct.pack("<I", index), 8 * cpus)
        total = sum(struct.unpack(f"<{cpus}Q", raw)) if raw else 0
        if total:
            result[reason] = total
    return result


def clear_reasons(fd: int, port: int) -> None:
    """Set a port's frame counters to zero, before another interface gets its number."""
    zeros = bytes(8 * libbpf.possible_cpus())
    for index in range(port * 2 * len(Reason), (port + 1) * 2 * len(Reason)):
        libbpf.map_update(fd, struct.pack("<I", index), zeros)


def write_pairs(fd: int, pairs: Mapping[bytes, int]) -> None:
    """Tell the dataplane queue pairs: flow key -> destination QPN of the opposite way."""
    for key, peer_qpn in pairs.items():
        value = struct.pack("<II", peer_qpn, PairState.REGISTRY)
        for _ in range(_ALLOCATION_RETRIES):
            try:
                libbpf.map_update(fd, key, value)
                break
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                # The map is not preallocated: the kernel keeps a few free elements and
                # refills them in an interrupt, on some kernels with the next timer tick only.
                time.sleep(_REFILL_S)
        else:
            libbpf.map_update(fd, key, value)
