"""Two hosts of veth, a controller for them, and a sender of RoCE packets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hosts import Controller, Host, veth_hosts


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts on one veth."""
    with veth_hosts() as pair:
        yield pair


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """One controller of a module, for wrong orders: none of them changes it."""
    instance = Controller(tmp_path_factory.mktemp("running") / "run")
    with veth_hosts() as hosts:
        try:
            instance.start(hosts[0].target)
            yield instance
        finally:
            instance.close()


_SENDER = """
import socket, sys
from scapy.all import IP, UDP
from scapy.contrib.roce import BTH
source, destination, first, count, qpn, size = sys.argv[1:]
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
for psn in range(int(first), int(first) + int(count)):
    packet = IP(src=source, dst=destination, tos=2) / UDP(sport=50000, dport=4791)
    packet /= BTH(opcode=4, psn=psn, dqpn=int(qpn), ackreq=1)
    raw.sendto(bytes(packet / (b"x" * int(size))), (destination, 0))
"""


@pytest.fixture
def send(tmp_path: Path) -> Callable[..., None]:
    """send(sender, receiver, first_psn, count, qpn=17, size=256): RC SEND Only packets."""
    script = tmp_path / "send.py"
    script.write_text(_SENDER)

    def run(
        sender: Host, receiver: Host, first: int, count: int, qpn: int = 17, size: int = 256
    ) -> None:
        sender.sh(
            f"{sys.executable} {script} {sender.address} {receiver.address} "
            f"{first} {count} {qpn} {size}"
        )

    return run
