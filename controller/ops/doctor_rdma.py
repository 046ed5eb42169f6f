"""Doctor: RDMA core, soft-RoCE, interfaces, verbs, and the lab kernel."""

from __future__ import annotations

import gzip
import json
import os
import platform
import shutil
import socket
from pathlib import Path

from controller.dataplane.interfaces import rdma_links
from controller.dataplane.shim import kernel_version
from controller.ops.check import (
    INFO,
    OK,
    WARN,
    Check,
    import_error,
    read_line,
    run_tool,
)
from controller.ops.doctor_machine import RXE_NAMESPACES

_ARPHRD_ETHER = "1"
_SHOWN_INTERFACES = 6
_LAB_REMEDY = "Use the lab kernel: scripts/lab run -- COMMAND."
_PERFTEST = ("ib_write_bw", "ib_write_lat", "ib_read_bw", "ib_send_bw")


def rdma_core() -> Check:
    """Ask the kernel's RDMA core by netlink."""
    code, output, errors = run_tool(["rdma", "-j", "dev"])
    reason = "Queue pairs are read from the RDMA core by the `rdma` tool."
    if code == 127:
        return Check("rdma core", WARN, errors, reason, "apt-get install iproute2")
    if "NETLINK_RDMA" in errors or code:
        why = "no RDMA in this kernel" if "NETLINK_RDMA" in errors else errors
        remedy = f"modprobe ib_core, or a kernel with CONFIG_INFINIBAND. {_LAB_REMEDY}"
        return Check("rdma core", WARN, why, reason, remedy)
    devices = [device.get("ifname", "?") for device in json.loads(output or "[]")]
    there = ", ".join(devices) if devices else "none in this namespace"
    return Check("rdma core", OK, f"answers; devices: {there}", reason)


def _kernel_option(option: str) -> str:
    """``y``, ``m``, ``n``, or "" when the kernel's configuration cannot be read."""
    release = platform.release()
    text = ""
    try:
        with gzip.open("/proc/config.gz", "rt") as file:
            text = file.read()
    except OSError:
        text = read_line(f"/boot/config-{release}")
    if not text:
        return ""
    for line in text.splitlines():
        if line.startswith(f"{option}="):
            return line.partition("=")[2]
    return "n"


def rxe() -> Check:
    """Soft-RoCE: loaded, built in, or a module to load."""
    reason = "Soft-RoCE gives RDMA without hardware; across namespaces from kernel 7.1 on."
    reach = "" if kernel_version() >= RXE_NAMESPACES else ", first namespace only"
    option = _kernel_option("CONFIG_RDMA_RXE")
    if Path("/sys/module/rdma_rxe").exists() or option == "y":
        return Check("rxe", OK, f"soft-RoCE is there{reach}", reason)
    if option == "m" or run_tool(["modinfo", "rdma_rxe"])[0] == 0:
        if run_tool(["modinfo", "rdma_rxe"])[0] == 0:
            return Check("rxe", OK, f"soft-RoCE module to be loaded{reach}", reason)
        return Check(
            "rxe", WARN, "configured as a module that is not installed", reason,
            f"Install the kernel's extra modules package. {_LAB_REMEDY}",
        )  # fmt: skip
    return Check(
        "rxe", WARN, "no soft-RoCE (rdma_rxe) in this kernel", reason,
        f"A kernel with CONFIG_RDMA_RXE. {_LAB_REMEDY}",
    )  # fmt: skip


def rdma_netns() -> Check:
    """Whether RDMA devices are shared between namespaces or belong to one."""
    code, output, _ = run_tool(["rdma", "system"])
    reason = "Hosts in namespaces need the exclusive mode; it is set while none is in use."
    if code or not output:
        return Check("rdma netns", INFO, "no RDMA core to ask", reason, _LAB_REMEDY)
    words = output.split()
    mode = words[words.index("netns") + 1] if "netns" in words[:-1] else output
    if mode == "exclusive":
        return Check("rdma netns", OK, mode, reason)
    return Check(
        "rdma netns", INFO, mode, reason,
        "rdma system set netns exclusive, before namespaces are made.",
    )  # fmt: skip


def interfaces() -> Check:
    """Tell what kind of traffic each Ethernet interface of this namespace shows."""
    reason = (
        "software: soft-RoCE, every packet is seen. forwarded: RoCE that crosses the "
        "interface is seen. bypass: a hardware NIC's packets are not, its counters are."
    )
    links = {link.netdev: link for link in rdma_links("")}
    shown = []
    for _, name in socket.if_nameindex():
        link = links.get(name)
        if link:
            kind = "software" if link.is_virtual else "bypass"
            shown.append(f"{name} {kind} ({link.device}, {_driver(link.device)})")
        elif read_line(f"/sys/class/net/{name}/type") == _ARPHRD_ETHER:
            shown.append(f"{name} forwarded")
    more = len(shown) - _SHOWN_INTERFACES
    found = ", ".join(shown[:_SHOWN_INTERFACES]) + (f" and {more} more" if more > 0 else "")
    return Check("interfaces", INFO, found or "no Ethernet interface here", reason)


def _driver(device: str) -> str:
    """Kernel driver of an RDMA device; soft ones have no bus device to ask."""
    driver = Path(f"/sys/class/infiniband/{device}/device/driver")
    if driver.exists():
        return driver.resolve().name
    return "rdma_rxe" if device.startswith("rxe") else "software driver"


def pyverbs() -> Check:
    """pyverbs, imported in another process."""
    reason = "The AllReduce engine and the memory pool use verbs through pyverbs."
    _, error = import_error("import pyverbs.device")
    if error:
        return Check(
            "pyverbs", WARN, error, reason,
            "apt-get install python3-pyverbs; a virtual environment needs --system-site-packages.",
        )  # fmt: skip
    return Check("pyverbs", OK, "imports", reason)


def perftest() -> Check:
    """Check for perftest, the yardsticks of RDMA."""
    missing = [tool for tool in _PERFTEST if not shutil.which(tool)]
    reason = "Bandwidth is always shown beside ib_write_bw on the same path."
    if missing:
        found = f"without {', '.join(missing)}"
        return Check("perftest", INFO, found, reason, "apt-get install perftest")
    return Check("perftest", OK, ", ".join(_PERFTEST), reason)


def lab_kernel() -> Check:
    """Look for a cached lab kernel."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stellar" / "lab"
    reason = "Runs real RDMA traffic where the machine's kernel has none."
    try:
        found = [path.parent.name for path in base.glob("*/linux") if path.is_file()]
    except PermissionError:
        found = []
    if not found:
        return Check(
            "lab kernel", INFO, f"none in {base}", reason,
            "scripts/lab build makes it, once (minutes).",
        )  # fmt: skip
    return Check("lab kernel", OK, ", ".join(sorted(found)), reason)
