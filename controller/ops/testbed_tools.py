"""The testbed's ways to run tools, to wait, and to end when a signal comes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from controller.errors import StellarError, UnsupportedError

LAB_REMEDY = "Use the lab kernel: scripts/lab run -- controller ..."
_TOOL_TIMEOUT_S = 60.0
_SETTLE_TIMEOUT_S = 20.0
_POLL_S = 0.02


def run_tool(command: Sequence[str], lines: Sequence[str] = ()) -> str:
    """Run a tool, `lines` on its input; return what it printed."""
    try:
        result = subprocess.run(
            command,
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            check=False,
            timeout=_TOOL_TIMEOUT_S,
            # Ctrl-C is ours to handle: it must not stop a command in the middle.
            start_new_session=True,
        )
    except FileNotFoundError:
        raise UnsupportedError(
            f"{command[0]} is not installed.", "apt-get install iproute2"
        ) from None
    except subprocess.TimeoutExpired:
        raise StellarError(
            f"{' '.join(command)} gave no answer within {_TOOL_TIMEOUT_S:.0f} s."
        ) from None
    if result.returncode:
        said = "; ".join(line.strip() for line in result.stderr.splitlines() if line.strip())
        raise StellarError(f"{' '.join(command)} failed: {said or result.returncode}.")
    return result.stdout


def run_supported(command: Sequence[str], lacking: str) -> str:
    """Run a tool whose failure means that this kernel cannot do it."""
    try:
        return run_tool(command)
    except UnsupportedError:
        raise
    except StellarError as error:
        raise UnsupportedError(
            f"Kernel {os.uname().release} {lacking}: {error.message}",
            f"Install the kernel's extra modules. {LAB_REMEDY}",
        ) from error


def try_tool(command: Sequence[str]) -> str:
    """Run a tool whose failure means that there is nothing to do."""
    try:
        return run_tool(command)
    except StellarError:
        return ""


def fails(command: Sequence[str]) -> bool:
    """Whether a tool fails."""
    try:
        run_tool(command)
    except StellarError:
        return True
    return False


def wait_until(look: Callable[[], int], what: str, timeout_s: float = _SETTLE_TIMEOUT_S) -> int:
    """Wait until `look` gives something true, and return it."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := look()):
        if time.monotonic() > deadline_s:
            raise StellarError(f"Not within {timeout_s:g} s: {what}.")
        time.sleep(_POLL_S)
    return found


@contextlib.contextmanager
def ending_by_signal() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block like an exception, and nothing ends it twice.

    A second signal would stop the cleaning up that the first one has started. Only the main
    thread can do this; in any other, signals stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def end(number: int, _frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number, handler in before.items():
            # nohup, and a shell's background jobs, have set them to be ignored.
            if handler not in (signal.SIG_IGN, None):
                signal.signal(number, end)
        yield
    finally:
        for number, handler in before.items():
            # None: set by somebody's C code, so it was not changed either.
            if handler is not None:
                signal.signal(number, handler)
