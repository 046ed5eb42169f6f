"""The end of a controller, asked for from outside: alive, dead, or gone without cleaning up."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from controller.agent.control import request
from controller.agent.requirements import require_privileges
from controller.agent.state import RunDirectory, State
from controller.dataplane import attach as hooks
from controller.dataplane import interfaces
from controller.errors import ConflictError, NotRunningError, StellarError


def clean_up(run: RunDirectory, progress: Callable[[str], None] = lambda _: None) -> list[str]:
    """Detach what a dead controller left; returns the interfaces it was taken off.

    Raises
    ------
    ConflictError
        A controller is alive in this run directory.
    """
    require_privileges()
    if not run.path.is_dir():
        return []
    run.lock()
    try:
        state = run.read_state() or State()
        cleaned = []
        for attachment in state.attachments:
            if interfaces.still_there(attachment.netns, attachment.netns_inode, attachment.ifindex):
                progress(attachment.label)
                hooks.detach(attachment)
                cleaned.append(attachment.label)
            elif place := hooks.detach_moved(attachment, state.map_ids.values()):
                cleaned.append(place)
        run.remove_state()
        return cleaned
    finally:
        run.unlock()


def end(run: RunDirectory, timeout_s: float) -> tuple[bool, list[str]]:
    """End the controller of a run directory, or clean up after a dead one.

    Returns
    -------
    tuple
        Whether one ran, and the interfaces that it was taken off.

    Raises
    ------
    ConflictError
        One is alive there, but answers nothing within `timeout_s`.
    StellarError
        It did not end within `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            left_s = max(0.1, deadline_s - time.monotonic())
            answer, _ = request(run.socket_path, "stop", timeout_s=left_s)
            break
        except NotRunningError:
            try:
                return False, clean_up(run)
            except ConflictError:  # it is starting, or ending already
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(0.1)
    if not wait_for_end(int(answer["pid"]), deadline_s - time.monotonic()):
        raise StellarError(
            f"The controller (pid {answer['pid']}) did not end within {timeout_s:g} s.",
            f"Its log may tell why: {run.log_path}. Then: kill -9, and stop again.",
        )
    return True, list(answer["detaching"])


def wait_for_end(pid: int, timeout_s: float) -> bool:
    """Wait until a process has ended; False after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ready, _, _ = select.select([pidfd], [], [], max(0.0, deadline_s - time.monotonic()))
        return bool(ready)
    finally:
        os.close(pidfd)
