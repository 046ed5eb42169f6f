"""Doctor: privileges, kernel, CPU, memory, and tools that stand for themselves."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path

from controller.dataplane.shim import kernel_version
from controller.ops.check import FAIL, INFO, OK, WARN, Check, read_line, run_tool

# linux/capability.h
_CAP_NET_ADMIN, _CAP_SYS_ADMIN, _CAP_PERFMON, _CAP_BPF = 12, 21, 38, 39
_RING_BUFFER = (5, 8)
_XDP_MULTI_BUFFER = (5, 18)
# rxe was bound to the first network namespace before.
RXE_NAMESPACES = (7, 1)


def _effective_capabilities() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def privileges() -> Check:
    """Root or the capabilities that stand for it."""
    effective = _effective_capabilities()

    def has(*numbers: int) -> bool:
        return any(effective >> number & 1 for number in numbers)

    wanted = {
        "CAP_NET_ADMIN": has(_CAP_NET_ADMIN),
        "CAP_BPF": has(_CAP_BPF, _CAP_SYS_ADMIN),
        "CAP_PERFMON": has(_CAP_PERFMON, _CAP_SYS_ADMIN),
    }
    missing = [name for name, there in wanted.items() if not there]
    user = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"
    reason = "Loading BPF takes CAP_BPF and CAP_PERFMON, attaching it CAP_NET_ADMIN."
    if missing:
        return Check(
            "privileges", FAIL, f"{user} without {', '.join(missing)}", reason,
            "Run as root: sudo controller ...",
        )  # fmt: skip
    if not has(_CAP_SYS_ADMIN):
        return Check(
            "privileges", WARN, f"{user} without CAP_SYS_ADMIN",
            "Network namespaces cannot be entered without it.",
            "Run as root, or name only interfaces of this namespace.",
        )  # fmt: skip
    return Check("privileges", OK, f"{user} with {', '.join(wanted)}, CAP_SYS_ADMIN", reason)


def kernel() -> Check:
    """Kernel version against what needs a certain one."""
    release = platform.release()
    version = kernel_version(release)
    reason = (
        "BPF ring buffers need 5.8, XDP for packets above one page 5.18, "
        "soft-RoCE in several namespaces 7.1."
    )
    if version < _RING_BUFFER:
        return Check(
            "kernel", FAIL, f"{release}, older than 5.8", reason, "Boot a kernel from 5.18 on."
        )
    if version < _XDP_MULTI_BUFFER:
        return Check(
            "kernel", WARN, f"{release}, older than 5.18", reason,
            "Boot a kernel from 5.18 on, or observe with --mode tc.",
        )  # fmt: skip
    if version < RXE_NAMESPACES:
        return Check("kernel", OK, f"{release} (soft-RoCE: first namespace only)", reason)
    return Check("kernel", OK, release, reason)


def cpus() -> Check:
    """CPUs this process may use."""
    usable, total = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{usable} of {total} usable" if usable < total else f"{total}"
    reason = "Ranks spin on completions only while there are CPUs to spare."
    return Check("cpu", INFO if total < 4 else OK, found, reason)


def clock() -> Check:
    """Clock source: every packet reads it."""
    name = read_line("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    reason = "Every packet reads the clock once; slow sources (hpet, acpi_pm) cost microseconds."
    if not name:
        return Check("clock", INFO, "no clock source in /sys", reason)
    if name in ("hpet", "acpi_pm", "jiffies", "refined-jiffies"):
        return Check(
            "clock", WARN, name, reason,
            "See the kernel log for why tsc was dropped; boot with tsc=reliable if it is sound.",
        )  # fmt: skip
    return Check("clock", OK, name, reason)


def memlock() -> Check:
    """Locked memory: RDMA registrations count against it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    reason = "Registered memory is locked memory; only root is not bound by the limit."
    if soft == resource.RLIM_INFINITY:
        return Check("memlock", OK, "unlimited", reason)
    found = f"{soft // 1024:,} KiB"
    if os.geteuid() == 0:
        return Check("memlock", OK, f"{found}, not binding for root", reason)
    return Check(
        "memlock", WARN, found, reason,
        "ulimit -l unlimited, or LimitMEMLOCK=infinity in the service's unit.",
    )  # fmt: skip


def huge_pages() -> Check:
    """Huge pages for buffers of the memory pool."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) if value.split() else 0
    total, free = fields.get("HugePages_Total", 0), fields.get("HugePages_Free", 0)
    size_kib = fields.get("Hugepagesize", 0)
    reason = "Buffers in huge pages register faster; without them normal pages are used."
    if total:
        return Check("huge pages", OK, f"{free} of {total} free, {size_kib} KiB each", reason)
    return Check(
        "huge pages", INFO, f"none reserved ({size_kib} KiB each)", reason,
        "sysctl vm.nr_hugepages=512, if registration time matters.",
    )  # fmt: skip


def tshark() -> Check:
    """Check for tshark, a second opinion on captures."""
    code, output, _ = run_tool(["tshark", "--version"])
    reason = "Only to look at captures by hand and to cross-check; `analyze` does without."
    if code:
        return Check("tshark", INFO, "not installed", reason, "apt-get install tshark")
    words = output.splitlines()[0].split()
    version = next((word.rstrip(".") for word in words if word[:1].isdigit()), "found")
    return Check("tshark", OK, version, reason)
