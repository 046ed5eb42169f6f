"""A stand-in for the kernel headers that BCC wants.

BCC compiles against a kernel build tree. The programs in ``bpf/`` include UAPI headers
only, and those come with the C library, so a directory with a dozen small headers is
enough: no kernel headers package, the same on every kernel.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from controller.errors import UnsupportedError

# What helpers.h of BCC and the UAPI headers look for in a kernel tree.
_HEADERS = {
    "include/linux/kconfig.h": "#pragma once\n#define CONFIG_BPF_SYSCALL 1\n",
    "include/linux/types.h": (
        "#pragma once\n"
        "#include <uapi/linux/types.h>\n"
        "typedef __u8 u8; typedef __u16 u16; typedef __u32 u32; typedef __u64 u64;\n"
        "typedef __s8 s8; typedef __s16 s16; typedef __s32 s32; typedef __s64 s64;\n"
        "typedef _Bool bool;\n"
        "typedef __SIZE_TYPE__ size_t;\n"
        "typedef __UINTPTR_TYPE__ uintptr_t;\n"
        "#ifndef __always_inline\n"
        "#define __always_inline inline __attribute__((always_inline))\n"
        "#endif\n"
        "#ifndef __packed\n"
        "#define __packed __attribute__((packed))\n"
        "#endif\n"
    ),
    "include/linux/log2.h": "#pragma once\n",
    "include/linux/compiler.h": "#pragma once\n",
    "include/asm/page.h": "#pragma once\n#define PAGE_SIZE 4096\n",
    "include/linux/version.h": (
        "#pragma once\n"
        "#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + (c))\n"
        "#define LINUX_VERSION_CODE KERNEL_VERSION({major}, {minor}, 0)\n"
    ),
    "include/generated/autoconf.h": "#pragma once\n",
}

# BCC includes its own, usually newer, copy of bpf.h first; the system's would define
# everything twice. All other `uapi/linux/X` are links to the system's.
_UAPI_BPF_H = "#pragma once\n#include <bcc/bpf.h>\n"


def kernel_version(release: str | None = None) -> tuple[int, int]:
    """Major and minor number of a kernel release string (default: the running one)."""
    major, minor = (release or platform.release()).split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def _architecture_include() -> Path:
    """Directory that holds the machine's ``asm/types.h`` (Debian: multiarch path)."""
    candidates = [
        Path("/usr/include") / f"{platform.machine()}-linux-gnu",
        Path("/usr/include"),
    ]
    for candidate in candidates:
        if (candidate / "asm" / "types.h").exists():
            return candidate
    raise UnsupportedError(
        f"asm/types.h is in none of {', '.join(map(str, candidates))}.",
        "Install the C library's kernel headers (package linux-libc-dev).",
    )


@contextmanager
def kernel_source() -> Iterator[Path]:
    """A temporary directory to serve as ``BCC_KERNEL_SOURCE``."""
    major, minor = kernel_version()
    uapi = _architecture_include()
    with tempfile.TemporaryDirectory(prefix="stellar-shim-") as name:
        root = Path(name)
        for path, text in _HEADERS.items():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.replace("{major}", str(major)).replace("{minor}", str(minor)))
        uapi_linux = root / "include/uapi/linux"
        uapi_linux.mkdir(parents=True)
        for header in Path("/usr/include/linux").iterdir():
            if header.name != "bpf.h":
                (uapi_linux / header.name).symlink_to(header)
        (uapi_linux / "bpf.h").write_text(_UAPI_BPF_H)
        (root / "include/uapi/asm-generic").symlink_to("/usr/include/asm-generic")
        (root / "include/uapi/asm").symlink_to(uapi / "asm")
        yield root
