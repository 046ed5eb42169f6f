"""Work inside a network namespace without leaving one's own.

``setns`` changes the calling thread only, so each piece of work gets a thread that ends
afterwards. Nothing is kept open in between: a socket left in a namespace would keep it
alive after its owner deleted it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from controller.errors import PrivilegeError, UsageError

NETNS_DIRECTORY = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_T = TypeVar("_T")
_libc = ctypes.CDLL(None, use_errno=True)


def list_netns() -> list[str]:
    """Names of the namespaces that ``ip netns`` knows."""
    if not NETNS_DIRECTORY.is_dir():
        return []
    return sorted(path.name for path in NETNS_DIRECTORY.iterdir())


def netns_inode(name: str) -> int:
    """Identity of a namespace ("": this process's own); 0 when it does not exist."""
    path = NETNS_DIRECTORY / name if name else Path("/proc/self/ns/net")
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


def in_netns(name: str, work: Callable[[], _T]) -> _T:
    """Run `work` in namespace `name` ("": this one) and return what it returns.

    Child processes that `work` starts live in that namespace as well.

    Raises
    ------
    UsageError
        There is no such namespace.
    PrivilegeError
        It may not be entered.
    """
    if not name:
        return work()
    try:
        fd = os.open(NETNS_DIRECTORY / name, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        known = ", ".join(list_netns()) or "none"
        raise UsageError(
            f"There is no network namespace {name!r}; there are: {known}.",
            f"Create it (ip netns add {name}) or correct the name.",
        ) from error
    result: list[_T] = []
    failure: list[BaseException] = []

    def enter() -> None:
        try:
            if _libc.setns(fd, _CLONE_NEWNET):
                code = ctypes.get_errno()
                raise PrivilegeError(
                    f"Network namespace {name!r} cannot be entered: {os.strerror(code)}.",
                    "Run as root (CAP_SYS_ADMIN).",
                )
            result.append(work())
        except BaseException as error:  # handed to the caller's thread below
            failure.append(error)

    try:
        thread = threading.Thread(target=enter, name=f"netns-{name}")
        thread.start()
        thread.join()
    finally:
        os.close(fd)
    if failure:
        raise failure[0]
    return result[0]
