"""What a process and a kernel need before anything is loaded or attached."""

from __future__ import annotations

import os

from controller.dataplane.shim import kernel_version
from controller.errors import PrivilegeError, UnsupportedError

MIN_KERNEL = (5, 18)


def require_privileges() -> None:
    """Raise PrivilegeError unless this process may load and attach programs."""
    if os.geteuid() != 0:
        raise PrivilegeError(
            f"The controller runs as uid {os.geteuid()}; attaching BPF programs needs root.",
            "Use sudo. (`controller analyze` and `controller doctor` tell more.)",
        )


def require_kernel(release: str | None = None) -> None:
    """Raise UnsupportedError on a kernel that cannot run the programs.

    Ring buffer 5.8, coarse clock 5.11, multi-buffer XDP 5.18. Default: the running one.
    """
    found = kernel_version(release)
    if found < MIN_KERNEL:
        raise UnsupportedError(
            f"This kernel is {found[0]}.{found[1]}; {MIN_KERNEL[0]}.{MIN_KERNEL[1]} or newer is "
            "needed (multi-buffer XDP).",
            "Use a newer kernel. `controller analyze` needs one, too; in the lab kernel all "
            "works: scripts/lab run -- COMMAND.",
        )
