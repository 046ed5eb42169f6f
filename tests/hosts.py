"""Hosts made of network namespaces and veth, and the controller as a user runs it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_numbers = itertools.count()


def sh(command: str, check: bool = True) -> str:
    """Run a shell command, return what it printed."""
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    if check and result.returncode:
        raise AssertionError(f"{command!r} failed: {result.stderr}")
    return result.stdout


@dataclass(frozen=True)
class Host:
    """A namespace with one interface."""

    netns: str
    interface: str
    address: str

    @property
    def target(self) -> str:
        return f"{self.netns}:{self.interface}"

    def sh(self, command: str, check: bool = True) -> str:
        return sh(f"ip netns exec {self.netns} {command}", check)

    def network_state(self) -> tuple[Any, Any, str, str]:
        """Everything that attaching may change, without what counts up by itself."""
        links = json.loads(self.sh("ip -j -d link show"))
        qdiscs = json.loads(self.sh("tc -j qdisc show"))
        filters = "".join(
            self.sh(f"tc filter show dev {self.interface} {hook}", check=False)
            for hook in ("ingress", "egress")
        )
        return links, qdiscs, filters, self.sh("ip -j addr show")


@contextlib.contextmanager
def veth_hosts(mtu_bytes: int = 4200) -> Iterator[tuple[Host, Host]]:
    """Two hosts on one veth, with addresses and the MTU that rxe wants for 4096 bytes."""
    number = next(_numbers)
    names = [f"st{os.getpid() % 100000}-{number}{side}" for side in "ab"]
    try:
        for name in names:
            sh(f"ip netns add {name}")
        sh(
            f"ip link add eth0 netns {names[0]} mtu {mtu_bytes} type veth "
            f"peer name eth0 netns {names[1]} mtu {mtu_bytes}"
        )
        result = []
        for index, name in enumerate(names, start=1):
            host = Host(name, "eth0", f"10.77.0.{index}")
            # No duplicate address detection: it changes the addresses' state later.
            host.sh("sysctl -qw net.ipv6.conf.eth0.accept_dad=0", check=False)
            sh(f"ip -n {name} addr add {host.address}/24 dev eth0")
            sh(f"ip -n {name} link set eth0 up")
            sh(f"ip -n {name} link set lo up")
            result.append(host)
        for host in result:
            for _ in range(200):
                text = host.sh("ip addr show dev eth0")
                if "tentative" not in text and "state UP" in text:
                    break
                time.sleep(0.1)
        yield result[0], result[1]
    finally:
        for name in names:
            sh(f"ip netns del {name}", check=False)


class Controller:
    """The real command, run as a user would."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._started: list[int] = []

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            [sys.executable, "-m", "controller", "--run-dir", str(self.run_dir), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        if check and result.returncode:
            raise AssertionError(f"controller {arguments} exited {result.returncode}:\n"
                                 f"{result.stdout}{result.stderr}")  # fmt: skip
        return result

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json").stdout)

    def start(self, *targets: str, extra: tuple[str, ...] = ()) -> int:
        """Start in the background; returns the process id."""
        interfaces = [part for target in targets for part in ("-i", target)]
        text = self.run("start", "--detach", *interfaces, *extra).stdout
        found = re.search(r"\(pid (\d+)\)", text)
        assert found, text
        pid = int(found[1])
        self._started.append(pid)
        return pid

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        for _ in range(500):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            # It may be reaped between the opening of its file and the reading of it.
            except (FileNotFoundError, ProcessLookupError):
                return
            if "\nState:\tZ" in status:
                return
            subprocess.run(["sleep", "0.02"], check=True)
        raise AssertionError(f"process {pid} did not die")

    def close(self) -> None:
        # After a stop in order there is nothing left of it.
        if list(self.run_dir.glob("state*")) + list(self.run_dir.glob("*.sock")):
            self.run("stop", check=False)
        for pid in self._started:
            # By then its number may be another process's.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if str(self.run_dir) in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
