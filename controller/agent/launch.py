"""Run the agent in the foreground, or start it in the background and wait until it is up."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from controller import errors
from controller.agent.agent import Agent
from controller.agent.requirements import require_privileges
from controller.agent.state import RunDirectory
from controller.config import Config
from controller.errors import StellarError

_START_TIMEOUT_S = 60.0


def run_foreground(run: RunDirectory, config: Config, ready_fd: int | None = None) -> None:
    """Run until stopped. `ready_fd` gets one JSON line: up, or why not."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr, force=True
    )
    try:
        agent = Agent(run, config)
        agent.start()
    except StellarError as error:
        if ready_fd is not None:
            _tell(
                ready_fd,
                {
                    "error": error.message,
                    "remedy": error.remedy,
                    "type": type(error).__name__,
                },
            )
        raise
    if ready_fd is not None:
        _tell(ready_fd, {"pid": os.getpid()})
        os.close(ready_fd)
    agent.run()


def _tell(fd: int, document: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # nobody waits any more
        os.write(fd, json.dumps(document).encode() + b"\n")


def run_detached(run: RunDirectory, arguments: Sequence[str]) -> int:
    """Start ``controller start ARGUMENTS`` in the background; returns its process id.

    Raises
    ------
    StellarError
        What the agent reports when it cannot start.
    """
    require_privileges()
    run.create()
    read_fd, write_fd = os.pipe()
    log_fd = os.open(run.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "controller"),
                f"--run-dir={run.path.resolve()}",
                *("start", *arguments),
                f"--ready-fd={write_fd}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            pass_fds=(write_fd,),
            start_new_session=True,
        )
    finally:
        os.close(write_fd)
        os.close(log_fd)
    try:
        ready, _, _ = select.select([read_fd], [], [], _START_TIMEOUT_S)
        line = os.read(read_fd, 65536) if ready else b""
    except KeyboardInterrupt:
        process.terminate()
        raise
    finally:
        os.close(read_fd)
    if not line:
        process.terminate()
        raise StellarError(
            "The controller did not come up"
            + (f" within {_START_TIMEOUT_S:.0f} s." if not ready else "."),
            f"Its log is {run.log_path}.",
        )
    answer = json.loads(line)
    if "error" in answer:
        process.wait()
        kind = getattr(errors, str(answer["type"]), StellarError)
        raise kind(answer["error"], answer["remedy"])
    return int(answer["pid"])
