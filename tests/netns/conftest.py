"""Two hosts of veth, a controller for them, and a sender of RoCE packets."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest
from scapy.contrib.roce import BTH
from scapy.layers.inet import IP, UDP

from controller.dataplane.netns import in_netns
from tests.hosts import Controller, Host, veth_hosts
from tests.packets import icrc


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


# Not to overrun the ring of a veth (256) when its reader has to wait for a processor.
_BURST_PACKETS, _BURST_PAUSE_S = 64, 0.001


def _datagrams(
    sender: Host, receiver: Host, first: int, count: int, qpn: int, size: int
) -> Iterator[bytes]:
    """RC SEND Only messages, one packet each, from the IP header to the ICRC."""
    packet = IP(src=sender.address, dst=receiver.address, tos=2) / UDP(sport=50000, chksum=0)
    packet /= BTH(opcode=4, dqpn=qpn, ackreq=1) / (b"x" * size)
    before_icrc = bytearray(bytes(packet)[:-4])
    for psn in range(first, first + count):
        before_icrc[37:40] = psn.to_bytes(3, "big")  # behind IP, UDP and nine bytes of the BTH
        yield bytes(before_icrc) + icrc(before_icrc)


@pytest.fixture
def send() -> Callable[..., None]:
    """send(sender, receiver, first_psn, count, qpn=17, size=256, pause_s=0): RC SEND Only packets.

    Returns when all have left; with a pause after each, it takes that long.
    """

    def run(
        sender: Host,
        receiver: Host,
        first: int,
        count: int,
        qpn: int = 17,
        size: int = 256,
        pause_s: float = 0.0,
    ) -> None:
        def work() -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
                datagrams = _datagrams(sender, receiver, first, count, qpn, size)
                for number, datagram in enumerate(datagrams, start=1):
                    raw.sendto(datagram, (receiver.address, 0))
                    if pause_s or not number % _BURST_PACKETS:
                        time.sleep(pause_s or _BURST_PAUSE_S)

        in_netns(sender.netns, work)

    return run
