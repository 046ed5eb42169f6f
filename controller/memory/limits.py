"""What stands in the way of pinning memory, looked up before it is tried.

ibv_reg_mr says ENOMEM for a low RLIMIT_MEMLOCK, for a full machine and for too many regions alike,
and the kernel kills a process that fills a full machine instead of refusing. So the limits are
read first, and each that does not suffice is named with its remedy.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from controller.units import format_bytes

_CAP_IPC_LOCK = 14  # linux/capability.h
# madvise() and fork protection of libibverbs may split a mapping at both ends.
_MAPS_OF_A_REGION = 3
# Left for everybody else when memory is compared with what is available.
_SPARE_NBYTES = 64 << 20
_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


class DeviceLimits(Protocol):
    """What is asked of a device: as controller.verbs.registration.DeviceLimits has it."""

    @property
    def device(self) -> str:
        """Its name."""

    @property
    def max_mr(self) -> int:
        """Number of regions that it takes."""

    @property
    def max_mr_nbytes(self) -> int:
        """Size of a region that it takes."""


@dataclass(frozen=True)
class Problem:
    """A limit that does not suffice.

    Parameters
    ----------
    limit
        Its name: ``memlock``, ``max_map_count``, ``max_mr``, ``max_mr_size``, ``memory``.
    message
        What was found and what is needed.
    remedy
        What to do about it.
    """

    limit: str
    message: str
    remedy: str


@dataclass(frozen=True)
class Limits:
    """What this process may pin, at one moment.

    Parameters
    ----------
    memlock_nbytes
        RLIMIT_MEMLOCK, soft; None: unlimited.
    may_exceed_memlock
        The process has CAP_IPC_LOCK where the kernel asks for it.
    pinned_nbytes
        Pinned by the process already; counts against RLIMIT_MEMLOCK.
    max_map_count, map_count
        Mappings that a process may have, and that this one has.
    available_nbytes
        Memory that can be had without swapping, within the control group's limit.
    """

    memlock_nbytes: int | None
    may_exceed_memlock: bool
    pinned_nbytes: int
    max_map_count: int
    map_count: int
    available_nbytes: int


def _status() -> Mapping[str, str]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _kib(text: str) -> int:
    return int(text.split()[0]) << 10


def _group_left_nbytes() -> int | None:
    """What the control groups of this process (version 2) leave to it; None: no limit."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return None
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None:
        return None
    group = _GROUPS / path.lstrip("/")
    left: int | None = None
    # A limit of any group above holds, too.
    for directory in (group, *group.parents):
        try:
            most = (directory / "memory.max").read_text().strip()
            used = int((directory / "memory.current").read_text())
        except (OSError, ValueError):
            most, used = "max", 0
        if most != "max":
            mine = max(0, int(most) - used)
            left = mine if left is None else min(left, mine)
        if directory == _GROUPS:
            break
    return left


def gather_limits() -> Limits:
    """Read the limits of this process and machine."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = _status()
    # The kernel asks for the capability in the first user namespace; root of another one has not.
    first_namespace = Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
    capable = bool(int(status["CapEff"], 16) >> _CAP_IPC_LOCK & 1)
    meminfo = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    available_nbytes = _kib(meminfo["MemAvailable"])
    group_nbytes = _group_left_nbytes()
    if group_nbytes is not None:
        available_nbytes = min(available_nbytes, group_nbytes)
    with Path("/proc/self/maps").open("rb") as maps:
        map_count = sum(1 for _ in maps)
    return Limits(
        memlock_nbytes=None if soft == resource.RLIM_INFINITY else soft,
        may_exceed_memlock=capable and first_namespace,
        pinned_nbytes=_kib(status.get("VmPin", "0")),
        max_map_count=int(Path("/proc/sys/vm/max_map_count").read_text()),
        map_count=map_count,
        available_nbytes=available_nbytes,
    )


def check_limits(
    need_nbytes: int,
    regions: int,
    device: DeviceLimits,
    limits: Limits,
    *,
    reserved_nbytes: int = 0,
) -> list[Problem]:
    """Compare what is wanted with the limits.

    Parameters
    ----------
    need_nbytes
        To be pinned, in all.
    regions
        Memory regions that it comes in, of equal size.
    device
        What the device takes.
    limits
        Of the process and machine.
    reserved_nbytes
        Free huge pages that the memory may come from; they do not count as available.

    Returns
    -------
    list
        Empty when nothing speaks against it.
    """
    problems = []
    if limits.memlock_nbytes is not None and not limits.may_exceed_memlock:
        left = max(0, limits.memlock_nbytes - limits.pinned_nbytes)
        if need_nbytes > left:
            problems.append(
                Problem(
                    "memlock",
                    f"RLIMIT_MEMLOCK lets this process pin {limits.memlock_nbytes} bytes, "
                    f"{limits.pinned_nbytes} of which it has used; {need_nbytes} are needed.",
                    "Raise it (ulimit -l unlimited; LimitMEMLOCK=infinity; /etc/security/"
                    "limits.conf), or grant CAP_IPC_LOCK in the first user namespace.",
                )
            )
    maps = limits.map_count + _MAPS_OF_A_REGION * regions
    if maps > limits.max_map_count:
        problems.append(
            Problem(
                "max_map_count",
                f"vm.max_map_count is {limits.max_map_count}; with {regions} regions this process "
                f"may come to {maps} mappings.",
                f"Use larger chunks, or sysctl vm.max_map_count={2 * maps}.",
            )
        )
    if regions > device.max_mr:
        problems.append(
            Problem(
                "max_mr",
                f"{device.device} takes {device.max_mr} memory regions; {regions} are needed.",
                "Use larger chunks or a smaller pool.",
            )
        )
    each_nbytes = -(-need_nbytes // regions) if regions else 0
    if each_nbytes > device.max_mr_nbytes:
        problems.append(
            Problem(
                "max_mr_size",
                f"{device.device} takes memory regions of {device.max_mr_nbytes} bytes; "
                f"{each_nbytes} are needed in one.",
                "Use smaller chunks.",
            )
        )
    have_nbytes = limits.available_nbytes + reserved_nbytes - _SPARE_NBYTES
    if need_nbytes > have_nbytes:
        problems.append(
            Problem(
                "memory",
                f"{format_bytes(limits.available_nbytes)} of memory can be had here, and "
                f"{format_bytes(reserved_nbytes)} of huge pages; {format_bytes(need_nbytes)} are "
                "needed.",
                "Use a smaller pool, or give the machine or the control group more memory.",
            )
        )
    return problems


def fork_support() -> str:
    """What libibverbs does for fork(): ``enabled``, ``disabled``, ``unneeded``, or ``unknown``.

    ``unneeded``: the kernel copies pinned pages at fork. Pools are safe in any case (their memory
    is not inherited); this is about memory that others own and register.
    """
    try:
        from pyverbs import fork
    except ImportError:
        return "unknown"
    # enum ibv_fork_status
    names = {0: "disabled", 1: "enabled", 2: "unneeded"}
    return names.get(int(fork.is_fork_initialized()), "unknown")
