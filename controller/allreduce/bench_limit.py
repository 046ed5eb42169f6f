"""The yardstick of busbw: concurrent ``ib_write_bw`` in the ring pattern of the ranks.

Each host writes to the next one, all at once, as the steps of a ring AllReduce do. What one link
then carries is what busbw is held against.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from controller.allreduce.spawn import die_with_parent, end
from controller.errors import StellarError, UnsupportedError
from controller.ops.testbed import BedHost, Testbed

MESSAGE_BYTES = 65_536  # perftest's default
SECONDS = 5
# perftest leaves out so much at both ends; the starts of the tools differ by less.
_MARGIN_S = 1
# 4 us * 2^18 = 1 s: with more tools than processors, the default of 67 ms makes queue pairs
# repeat what was not lost.
_QP_TIMEOUT = 18
_TIMEOUT_S = 60.0
_START_S = 20.0
_ports = itertools.count(20_100)
_ROW = re.compile(rf"^\s*{MESSAGE_BYTES}\s+(?P<iterations>\d+)\s+[\d.]+\s+[\d.]+\s", re.MULTILINE)


def measure_limit(bed: Testbed, seconds: int = SECONDS) -> tuple[float, ...]:
    """Run ``ib_write_bw`` from every host to the next one, all at once.

    It polls; perftest cannot wait for the completions of a WRITE by events.

    Parameters
    ----------
    bed
        Two hosts at least.
    seconds
        3 and more: one at each end is left out.

    Returns
    -------
    tuple of float, shape (hosts,)
        Goodput of each link, in GB/s.

    Raises
    ------
    UnsupportedError
        There is no ``ib_write_bw``.
    StellarError
        It failed, or printed no result.
    """
    if bed.size < 2:
        raise StellarError("A ring of ib_write_bw needs two hosts.", "Take --spawn 2 or more.")
    if shutil.which("ib_write_bw") is None:
        raise UnsupportedError("ib_write_bw is not installed.", "apt-get install perftest")
    with contextlib.ExitStack() as stack:
        ports = [next(_ports) for _ in bed.hosts]
        targets = [bed.hosts[(host.rank + 1) % bed.size] for host in bed.hosts]
        servers = []
        for host, port in zip(targets, ports, strict=True):
            server = stack.enter_context(_tool(host, port, seconds))
            server.wait_listening(port)
            servers.append(server)
        clients = [
            stack.enter_context(_tool(host, port, seconds, target.address))
            for host, port, target in zip(bed.hosts, ports, targets, strict=True)
        ]
        found = tuple(_bandwidth(client, seconds) for client in clients)
        for server in servers:
            server.finish()
    return found


def _bandwidth(client: Tool, seconds: int) -> float:
    """GB/s, from the messages that a client counted.

    The bandwidth that it prints is 0 where it could not find out the rate of the processor's clock,
    as on a busy machine; the interval in which it counts is timed by the kernel.
    """
    row = _ROW.search(client.finish())
    if row is None:
        raise StellarError(
            f"ib_write_bw on {client.host.netns} printed no result:\n{client.output()}"
        )
    return int(row["iterations"]) * MESSAGE_BYTES / (seconds - 2 * _MARGIN_S) / 1e9


@dataclass(frozen=True)
class Tool:
    """A running program of perftest."""

    host: BedHost
    process: subprocess.Popen[bytes]
    printed: IO[bytes]

    def output(self) -> str:
        """What it printed so far."""
        self.printed.seek(0)
        return self.printed.read().decode(errors="replace")

    def finish(self) -> str:
        """Wait for its success; return what it printed."""
        try:
            status = self.process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise StellarError(
                f"ib_write_bw on {self.host.netns} still ran after {_TIMEOUT_S:g} s:\n"
                f"{self.output()}"
            ) from None
        if status:
            raise StellarError(
                f"ib_write_bw on {self.host.netns} exited {status}:\n{self.output()}"
            )
        return self.output()

    def wait_listening(self, port: int) -> None:
        """Wait until a TCP socket of its namespace listens on `port`."""
        wanted = f":{port:04X}"
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            for table in ("tcp", "tcp6"):
                with contextlib.suppress(OSError):
                    lines = Path(f"/proc/{self.process.pid}/net/{table}").read_text().splitlines()
                    for _, local, _, state, *_ in (line.split() for line in lines[1:]):
                        if local.endswith(wanted) and state == "0A":
                            return
            time.sleep(0.02)
        raise StellarError(
            f"ib_write_bw on {self.host.netns} does not listen on {port}:\n{self.output()}"
        )


@contextlib.contextmanager
def _tool(host: BedHost, port: int, seconds: int, server: str = "") -> Iterator[Tool]:
    command = host.command(
        "ib_write_bw", "-d", host.device, "-x", str(host.gid_index), "-p", str(port),
        "-s", str(MESSAGE_BYTES), "-D", str(seconds), "-f", str(_MARGIN_S),
        "-u", str(_QP_TIMEOUT), "-F", *([server] if server else []),
    )  # fmt: skip
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            yield Tool(host, process, printed)
        finally:
            end([process])
