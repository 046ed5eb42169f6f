"""Doctor: everything between the C sources and a program on an interface."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from pathlib import Path

from controller.ops.check import (
    AS_ROOT,
    FAIL,
    INFO,
    OK,
    WARN,
    Check,
    import_error,
    is_root,
    read_line,
)

_NEEDS_ROOT = "needs root to tell"
# Step of a probe that was stopped because it took too long.
SLOW = "slow"


def jit() -> Check:
    """Whether BPF runs as machine code."""
    value = read_line("/proc/sys/net/core/bpf_jit_enable")
    reason = "Interpreted BPF costs several times as much for each packet."
    if not value:
        if Path("/proc/sys/net/core").is_dir() and is_root():
            return Check(
                "jit", WARN, "this kernel has no BPF JIT", reason,
                "Use a kernel with CONFIG_BPF_JIT.",
            )  # fmt: skip
        return Check("jit", INFO, _NEEDS_ROOT, reason, AS_ROOT)
    if value == "0":
        return Check("jit", WARN, "off", reason, "sysctl net.core.bpf_jit_enable=1")
    return Check("jit", OK, "on", reason)


def bcc() -> Check:
    """BCC's Python module, imported in another process."""
    version, error = import_error("import bcc; print(bcc.__version__)")
    reason = "BCC compiles the programs for the running kernel."
    if error:
        return Check(
            "bcc", FAIL, error, reason,
            "apt-get install python3-bpfcc; a virtual environment needs --system-site-packages.",
        )  # fmt: skip
    return Check("bcc", OK, version, reason)


def libbpf() -> Check:
    """Check the C library libbpf, version 1.x."""
    reason = "Maps, programs and XDP go through libbpf 1.x."
    try:
        library = ctypes.CDLL("libbpf.so.1")
    except OSError as error:
        return Check("libbpf", FAIL, str(error), reason, "apt-get install libbpf1")
    library.libbpf_version_string.restype = ctypes.c_char_p
    return Check("libbpf", OK, library.libbpf_version_string().decode().lstrip("v"), reason)


def headers() -> Check:
    """Check the C library's kernel headers."""
    reason = "The programs include UAPI headers, which come with the C library's development files."
    wanted = (
        (Path("/usr/include/linux/pkt_cls.h"),),
        (
            Path(f"/usr/include/{platform.machine()}-linux-gnu/asm/types.h"),
            Path("/usr/include/asm/types.h"),
        ),
    )
    for places in wanted:
        if not any(path.exists() for path in places):
            return Check(
                "headers", FAIL, f"{places[0]} is missing", reason,
                "apt-get install linux-libc-dev",
            )  # fmt: skip
    return Check("headers", OK, "UAPI headers in /usr/include", reason)


def programs(steps: Mapping[str, str]) -> list[Check]:
    """From the steps of the ``programs`` probe."""
    table = (
        ("compile", "compile", "compiles", "The programs are compiled at each start."),
        (
            "maps", "maps", "spin-lock hash, ring buffer, per-CPU and LRU maps",
            "Flow counters are guarded by BPF spin locks; events travel by ring buffer.",
        ),
        ("programs", "load", "XDP and tc programs pass the verifier", "Nothing is seen otherwise."),
    )  # fmt: skip
    remedies = {
        "compile": "Mend the lines bcc and headers above.",
        "maps": "Use a kernel from 5.18 on with CONFIG_BPF_SYSCALL.",
        "programs": "Please report it with the message.",
    }
    result = []
    for name, step, good, reason in table:
        answer = _step(steps, step)
        if answer == "":
            result.append(Check(name, OK, good, reason))
        elif not is_root():
            result.append(Check(name, INFO, _NEEDS_ROOT, reason, AS_ROOT))
        elif SLOW in steps:
            found = f"not known: {steps[SLOW]}"
            result.append(Check(name, WARN, found, reason, "Just try: controller start."))
        else:
            found = (answer or "not tried: the step before failed").splitlines()[0]
            result.append(Check(name, FAIL, found, reason, remedies[name]))
    return result


def network(steps: Mapping[str, str]) -> list[Check]:
    """From the steps of the ``network`` probe."""
    table = (
        (
            "namespaces", "namespace", "can be made", WARN,
            "The local lab and the tests put each host into a network namespace.",
            "Run outside the container, or give it CAP_SYS_ADMIN.",
        ),
        (
            "veth", "veth", "works", WARN, "Local hosts are joined by veth pairs.",
            "Use a kernel with CONFIG_VETH.",
        ),
        (
            "clsact", "clsact", "works", FAIL, "Before tcx (6.6) tc programs need it.",
            "Use a kernel with CONFIG_NET_SCH_INGRESS and CONFIG_NET_CLS_BPF; install iproute2.",
        ),
        (
            "native XDP", "xdp", "works on veth, several buffers included", WARN,
            "Ingress is seen at XDP; without it tc is used, at a higher cost per packet.",
            "Use a kernel from 5.18 on, or observe with --mode tc.",
        ),
        (
            "fq", "fq", "works", WARN, "Pacing by departure time needs the fq qdisc.",
            "modprobe sch_fq, or a kernel with CONFIG_NET_SCH_FQ; else classes need HTB.",
        ),
        (
            "HTB", "htb", "works", WARN, "Shapes links and serves classes without fq.",
            "modprobe sch_htb, or a kernel with CONFIG_NET_SCH_HTB.",
        ),
        (
            "netem", "netem", "works", INFO, "Only the lab uses it, for delay and loss.",
            "modprobe sch_netem, or use the lab kernel, which has it.",
        ),
    )  # fmt: skip
    result = []
    for name, step, good, status, reason, remedy in table:
        answer = _step(steps, step)
        if answer == "":
            result.append(Check(name, OK, good, reason))
        elif not is_root():
            result.append(Check(name, INFO, _NEEDS_ROOT, reason, AS_ROOT))
        elif SLOW in steps:
            result.append(Check(name, WARN, f"not known: {steps[SLOW]}", reason, remedy))
        else:
            found = answer or "not tried: the step before failed"
            result.append(Check(name, status, found, reason, remedy))
    return result


def _step(steps: Mapping[str, str], name: str) -> str | None:
    """Return a step's answer: "" when it worked; None when it was not tried."""
    return steps.get(name, steps.get(""))
