"""NUMA: memory near the device, and where it came to lie. Without libnuma."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path

from controller.errors import UnsupportedError, UsageError

_NODES = Path("/sys/devices/system/node")
# linux/mempolicy.h
_MPOL_BIND = 2
_MPOL_F_NODE = 1 << 0
_MPOL_F_ADDR = 1 << 1
_MAX_NODES = 1024
_SYSCALLS = {  # machine: mbind, get_mempolicy (neither is in the C library)
    "x86_64": (237, 239),
    "aarch64": (235, 236),
}


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    return library


def online_nodes() -> list[int]:
    """NUMA nodes with memory; empty when the kernel knows no NUMA."""
    try:
        text = (_NODES / "has_memory").read_text().strip()
    except OSError:
        return []
    nodes: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first:
            nodes += range(int(first), int(last or first) + 1)
    return nodes


def _syscall_number(which: int) -> int | None:
    numbers = _SYSCALLS.get(platform.machine())
    return numbers[which] if numbers else None


def bind_to_node(address: int, nbytes: int, node: int) -> None:
    """Let the pages of a mapping come from one NUMA node only.

    Raises
    ------
    UsageError
        The node has no memory, or does not exist.
    UnsupportedError
        The kernel knows no NUMA, or this machine's system call is not known here.
    """
    nodes = online_nodes()
    number = _syscall_number(0)
    if not nodes or number is None:
        raise UnsupportedError(
            f"Memory cannot be bound to NUMA node {node}: "
            + ("the kernel knows no NUMA." if not nodes else f"not on {platform.machine()}."),
            "Leave numa_node out; where the memory lies is up to the kernel.",
        )
    if node not in nodes:
        raise UsageError(f"NUMA node {node} has no memory; allowed: {', '.join(map(str, nodes))}.")
    words = (ctypes.c_ulong * (_MAX_NODES // 64))()
    words[node // 64] = 1 << node % 64
    failed = _libc().syscall(
        ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_BIND), words, ctypes.c_ulong(_MAX_NODES), ctypes.c_uint(0),
    )  # fmt: skip
    if failed:
        code = ctypes.get_errno()
        raise UnsupportedError(
            f"Memory cannot be bound to NUMA node {node}: {os.strerror(code)}.",
            "Leave numa_node out, or allow mbind to this process (containers: CAP_SYS_NICE).",
        )


def node_of(address: int) -> int:
    """NUMA node of the page at `address`, which must be there; -1 when the kernel tells none."""
    number = _syscall_number(1)
    if number is None or not online_nodes():
        return -1
    node = ctypes.c_int(-1)
    failed = _libc().syscall(
        ctypes.c_long(number), ctypes.byref(node), None, ctypes.c_ulong(0),
        ctypes.c_void_p(address), ctypes.c_ulong(_MPOL_F_NODE | _MPOL_F_ADDR),
    )  # fmt: skip
    return -1 if failed else node.value
