"""Real CNPs on a real interface: what leaves in front of an ACK."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scapy.contrib.roce import BTH
from scapy.layers.l2 import Ether
from scapy.utils import wrpcap

from controller.agent import maps
from controller.agent.maps import ClassSettings, JobSettings, PortSettings
from controller.dataplane import attach, interfaces, layout, libbpf, tables
from controller.dataplane.attachment import Attachment
from controller.dataplane.compile import Artifact, compile_programs
from controller.dataplane.layout import Act, Direction, Kind, PortFlag
from controller.dataplane.loader import Dataplane
from controller.dataplane.netns import in_netns
from tests.acting import DSCPS
from tests.hook import MAX_FLOWS, PORT, flow_key
from tests.hosts import Host
from tests.packets import ACK, CNP, SEND_ONLY, V4, V6, icrc, roce

JOB, SLOT = 7, 5
OUR_QPN, PEER_QPN = 0x22, 0x11
CE = 3
TOP_TOS = DSCPS[7] << 2
TAG = 5  # in push_tag.c, too
ETH_P_ALL = 3
# linux/if_packet.h
SOL_PACKET, PACKET_AUXDATA = 263, 8
TP_STATUS_VLAN_VALID = 1 << 4


class Wire:
    """An end of a veth, by AF_PACKET: frames go in and out whole."""

    def __init__(self, netns: str, interface: str) -> None:
        def connect() -> socket.socket:
            result = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
            result.bind((interface, 0))
            return result

        self._socket = in_netns(netns, connect)
        self._socket.setsockopt(SOL_PACKET, PACKET_AUXDATA, 1)
        self._socket.settimeout(20)

    def close(self) -> None:
        self._socket.close()

    def send(self, frame: bytes) -> None:
        self._socket.send(frame)

    def receive(self) -> bytes:
        """The next RoCE frame, as it was on the wire: the kernel takes the tag out of it."""
        while True:
            data, (auxiliary,), _, address = self._socket.recvmsg(4096, 256)
            if address[2] == socket.PACKET_OUTGOING:
                continue
            status, _, _, _, _, tci, tpid = struct.unpack_from("<IIIHHHH", auxiliary[2])
            if status & TP_STATUS_VLAN_VALID:
                data = data[:12] + struct.pack(">HH", tpid, tci) + data[12:]
            if BTH in Ether(data):
                return data


@dataclass
class Receiver:
    """A host whose ACKs tell of marks by CNPs, and the wire to its peer."""

    host: Host
    peer: Host
    dataplane: Dataplane
    here: Wire
    there: Wire

    @property
    def fds(self) -> dict[str, int]:
        return self.dataplane.map_fds

    def expect_flow(self, ours: str, theirs: str) -> None:
        """What the agent writes for an outgoing flow of a job."""
        key = flow_key(PEER_QPN, ours, theirs, Direction.EGRESS)
        tables.write_pairs(self.fds["pairs"], {key: OUR_QPN})
        maps.assign(self.fds, key, SLOT)
        maps.begin_epoch(self.fds)

    def marked_data(self, ours: str, theirs: str) -> None:
        """Marked data from the peer has come when this returns."""
        self.there.send(roce(SEND_ONLY, bytes(64), src=theirs, dst=ours, dqpn=OUR_QPN, tos=CE))
        self.here.receive()

    def sent(self, ours: str, theirs: str, kind: Kind) -> int:
        """Packets of a kind in the outgoing flow, as it was observed."""
        key = flow_key(PEER_QPN, ours, theirs, Direction.EGRESS)
        raw = libbpf.map_lookup(
            self.fds["flows"], key, layout.FLOW_STATS.itemsize, libbpf.BPF_F_LOCK
        )
        assert raw is not None
        return int(np.frombuffer(raw, layout.FLOW_STATS)[0]["kinds"][kind])

    def push_tags(self) -> None:
        """From now on every frame leaves with a tag beside it, given in front of our program."""
        source = str(Path(__file__).with_name("push_tag.c"))
        program = compile_programs([source], ["push_tag"]).programs["push_tag"]
        fd = libbpf.prog_load(libbpf.PROG_TYPE_SCHED_CLS, "push_tag", program.instructions)

        def work() -> None:
            ifindex = socket.if_nametoindex(self.host.interface)
            libbpf.tcx_attach(ifindex, fd, libbpf.BPF_TCX_EGRESS)

        in_netns(self.host.netns, work)
        os.close(fd)

    def acts(self) -> dict[Act, int]:
        return maps.read_acts(self.fds, PORT)


@pytest.fixture
def receiver(hosts: tuple[Host, Host], artifact: Artifact) -> Iterator[Receiver]:
    a, b = hosts
    dataplane = Dataplane(artifact, max_flows=MAX_FLOWS)
    fds = dataplane.map_fds
    maps.write_crc32_table(fds)
    classes = [ClassSettings(dscp, n, 0, 0, 0, 1) for n, dscp in enumerate(DSCPS)]
    maps.write_classes(fds, PORT, classes)
    maps.write_job(fds, JOB, JobSettings())
    maps.write_control(fds, SLOT, JOB)
    maps.write_port(fds, PORT, PortSettings(PortFlag.ECHO_CNP))
    found = interfaces.inspect(a.netns, a.interface)
    attachment = Attachment(
        PORT, a.netns, found.netns_inode, a.interface, found.ifindex, "tc", False, acts=True
    )
    attach.attach(dataplane, attachment)
    here, there = (Wire(host.netns, host.interface) for host in hosts)
    try:
        yield Receiver(a, b, dataplane, here, there)
    finally:
        here.close()
        there.close()
        attach.detach(attachment)
        dataplane.close()


def ack(ours: str, theirs: str, becn: bool = False, **arguments: Any) -> bytes:
    return roce(
        ACK, src=ours, dst=theirs, dqpn=PEER_QPN, psn=3, tos=TOP_TOS, becn=becn, **arguments
    )


def cnp(ours: str, theirs: str, **arguments: Any) -> bytes:
    """As scapy builds it, with its ICRC."""
    return roce(CNP, src=ours, dst=theirs, dqpn=PEER_QPN, tos=TOP_TOS, becn=True, **arguments)


def tshark_fields(path: Path, frames: list[bytes], *fields: str) -> list[list[str]]:
    """What tshark makes of frames, one row each; it must find nothing to complain about."""
    wrpcap(str(path), [Ether(frame) for frame in frames])
    command = ["tshark", "-r", str(path), "-n", "-d", "udp.port==4791,infiniband"]
    # RoCEv2 over IPv6 without a UDP checksum is as it should be.
    command += ["-o", "udp.ignore_ipv6_zero_checksum:TRUE", "-T", "fields"]
    for field in ("_ws.malformed", "_ws.expert.severity", *fields):
        command += ["-e", field]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split("\t") for line in output.splitlines()]
    assert all(row[:2] == ["", ""] for row in rows), output
    return [row[2:] for row in rows]


@pytest.mark.parametrize(("ours", "theirs"), [V4, V6], ids=["ipv4", "ipv6"])
def test_a_cnp_leaves_in_front_of_the_ack(
    receiver: Receiver, tmp_path: Path, ours: str, theirs: str
) -> None:
    receiver.expect_flow(ours, theirs)
    receiver.marked_data(ours, theirs)
    receiver.here.send(ack(ours, theirs))
    first, second = receiver.there.receive(), receiver.there.receive()
    assert first == cnp(ours, theirs)
    assert second == ack(ours, theirs)
    assert receiver.acts() == {Act.CLASSED: 2, Act.ECHO_CNP: 1}

    # Two more opinions on the CNP: zlib's CRC over the specified bytes, and tshark's headers
    # (it verifies no ICRC).
    assert icrc(first[14:-4]) == first[-4:]
    rows = tshark_fields(
        tmp_path / "cnp.pcap", [first, second],
        "frame.protocols", "infiniband.bth.opcode", "infiniband.bth.destqp",
        "infiniband.bth.psn", "infiniband.bth.padcnt", "ip.dsfield.dscp", "ipv6.tclass.dscp",
    )  # fmt: skip
    network = "ip" if ours == V4[0] else "ipv6"
    protocols = f"eth:ethertype:{network}:udp:infiniband"
    dscp = [str(DSCPS[7]), ""] if network == "ip" else ["", str(DSCPS[7])]
    assert rows == [
        [protocols, "129", "0x000011", "0", "0", *dscp],
        [protocols, "17", "0x000011", "3", "0", *dscp],
    ]

    # The observer saw it leave; and there is one a mark.
    assert receiver.sent(ours, theirs, Kind.CNP) == 1
    receiver.here.send(ack(ours, theirs))
    assert receiver.there.receive() == ack(ours, theirs)
    assert receiver.sent(ours, theirs, Kind.CNP) == 1
    assert receiver.sent(ours, theirs, Kind.ACK) == 2


@pytest.mark.parametrize("beside", [False, True], ids=["in-the-frame", "beside-it"])
def test_a_cnp_has_the_tag_of_its_ack(receiver: Receiver, beside: bool) -> None:
    """Whether the tag is in the frame already, or travels beside it to the device."""
    ours, theirs = V4
    receiver.expect_flow(ours, theirs)
    receiver.marked_data(ours, theirs)
    if beside:
        receiver.push_tags()
    receiver.here.send(ack(ours, theirs, vlans=() if beside else (TAG,)))
    assert receiver.there.receive() == cnp(ours, theirs, vlans=(TAG,))
    assert receiver.there.receive() == ack(ours, theirs, vlans=(TAG,))
    assert receiver.acts()[Act.ECHO_CNP] == 1


@pytest.mark.parametrize(
    ("options", "trailer"), [(1, b""), (5, b""), (0, bytes(4))], ids=["one", "five", "padding"]
)
def test_with_ip_options_or_padding_the_ack_tells(
    receiver: Receiver, options: int, trailer: bytes
) -> None:
    ours, theirs = V4
    receiver.expect_flow(ours, theirs)
    receiver.marked_data(ours, theirs)
    receiver.here.send(ack(ours, theirs, options=options) + trailer)
    assert receiver.there.receive() == ack(ours, theirs, becn=True, options=options) + trailer
    assert receiver.acts() == {Act.CLASSED: 1, Act.ECHO_FAILED: 1, Act.ECHO_BECN: 1}


def test_a_queue_that_refuses_the_cnp_makes_the_ack_tell(receiver: Receiver) -> None:
    ours, theirs = V4
    receiver.expect_flow(ours, theirs)
    receiver.marked_data(ours, theirs)
    # Too short for a CNP, long enough for an ACK.
    assert len(ack(ours, theirs)) < 70 < len(cnp(ours, theirs))
    receiver.host.sh("tc qdisc add dev eth0 root bfifo limit 70")
    receiver.here.send(ack(ours, theirs))
    assert receiver.there.receive() == ack(ours, theirs, becn=True)
    # The CNP was given its class before the queue refused it.
    assert receiver.acts() == {Act.CLASSED: 2, Act.ECHO_FAILED: 1, Act.ECHO_BECN: 1}
