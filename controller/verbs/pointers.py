"""The C structures behind pyverbs' objects.

Two things that libibverbs can do and pyverbs cannot need them: registering memory without holding
the interpreter's lock, and waiting for completions with select(). pyverbs has properties for the
pointers, but before some release they hand the bare pointer out as if it were a Python object,
which ends the process. So the pointer is looked for in the object's memory, and taken only when
what it points to agrees with what pyverbs says of the object by other ways. Reading goes through
/proc/self/mem, which answers a wrong address with an error.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any

from controller.errors import UnsupportedError

_HEADER_NBYTES = object.__basicsize__  # reference count and type
# <infiniband/verbs.h>, x86-64 and arm64: struct ibv_context is a pointer to the device and
# struct ibv_context_ops, which is 32 pointers and frozen, then cmd_fd, async_fd and
# num_comp_vectors; struct ibv_pd and struct ibv_comp_channel are a pointer to the context, then the
# handle or descriptor.
_CMD_FD_OFFSET = 8 + 32 * 8
_EVENT_FILE = "anon_inode:[infinibandevent]"


class _Memory:
    """Own memory, read so that a wrong address is an error and not the end."""

    def __enter__(self) -> _Memory:
        self._fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, address: int, layout: str) -> tuple[int, ...] | None:
        size = struct.calcsize(layout)
        try:
            content = os.pread(self._fd, size, address)
        except (OSError, OverflowError):
            return None
        return struct.unpack(layout, content) if len(content) == size else None


def _find(instance: Any, fits: Callable[[_Memory, int], bool], what: str) -> int:
    """The only pointer in an object's memory whose target fits."""
    with _Memory() as memory:
        words = range(_HEADER_NBYTES, type(instance).__basicsize__ - 7, 8)
        found = {
            word[0]
            for offset in words
            if (word := memory.read(id(instance) + offset, "Q")) and fits(memory, word[0])
        }
    if len(found) != 1:
        raise UnsupportedError(
            f"This release of pyverbs keeps its {what} where it cannot be found "
            f"({len(found)} candidates).",
            "Use rdma-core of Debian 12 or 13, or of Ubuntu 24.04.",
        )
    return found.pop()


def _is_event_file(fd: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == _EVENT_FILE  # noqa: PTH115
    except OSError:
        return False


def context_pointer(context: Any) -> int:
    """Address of the ``struct ibv_context`` of a pyverbs Context."""
    fd, vectors = int(context.cmd_fd), int(context.num_comp_vectors)

    def fits(memory: _Memory, address: int) -> bool:
        content = memory.read(address + _CMD_FD_OFFSET, "iii")
        return (
            content is not None
            and (content[0], content[2]) == (fd, vectors)
            and _is_event_file(content[1])
        )

    return _find(context, fits, "context")


def pd_pointer(pd: Any, context: int) -> int:
    """Address of the ``struct ibv_pd`` of a pyverbs PD in the context at that address."""
    expected = (context, int(pd.handle))
    return _find(
        pd, lambda memory, address: memory.read(address, "QI") == expected, "protection domain"
    )


def channel_fd(channel: Any, context: int) -> int:
    """File descriptor of a pyverbs CompChannel in the context at that address."""

    def fits(memory: _Memory, address: int) -> bool:
        content = memory.read(address, "Qi")
        return content is not None and content[0] == context and _is_event_file(content[1])

    pointer = _find(channel, fits, "completion channel")
    with _Memory() as memory:
        content = memory.read(pointer, "Qi")
    assert content is not None
    return content[1]
