"""Watches the shaped port of a switch, a few hundred times a second.

A program of its own, run in the switch's namespace: ``python -m tests.rxe.port FILE PERIOD_US
INTERFACE CLASSID [ARRIVAL_INTERFACE ...]``. Each sample is one row of FILE: CLOCK_MONOTONIC in ns;
bytes and packets that the HTB class has sent; its backlog in bytes; its drops; then bytes that
arrived through each arrival interface. Ends at SIGTERM.

Two system calls a sample and one for each arrival interface: tc or pyroute2 would need a whole
processor for it.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

RTM_GETTCLASS, RTM_NEWTCLASS = 42, 40
NLM_F_REQUEST, NLM_F_DUMP, NLMSG_ERROR, NLMSG_DONE = 0x1, 0x300, 2, 3
TCA_STATS2, TCA_STATS_BASIC, TCA_STATS_QUEUE = 7, 1, 3
NLA_TYPE_MASK = 0x3FFF
NLMSGHDR = struct.Struct("=IHHII")
TCMSG = struct.Struct("=BxxxiIII")
BASIC_STATS = struct.Struct("=QI")  # bytes, packets
QUEUE_STATS = struct.Struct("=IIIII")  # qlen, backlog, drops, requeues, overlimits
COLUMNS = ("time_ns", "sent_bytes", "sent_packets", "backlog_bytes", "drops")


def attributes(data: bytes, offset: int, end: int) -> dict[int, tuple[int, int]]:
    """Netlink attributes between two offsets: type -> (start, end) of the content."""
    found = {}
    while offset + 4 <= end:
        length, kind = struct.unpack_from("=HH", data, offset)
        found[kind & NLA_TYPE_MASK] = (offset + 4, offset + length)
        offset += (length + 3) & ~3
    return found


class ClassReader:
    """Reads the counters of one tc class."""

    def __init__(self, interface: str, classid: str) -> None:
        major, minor = (int(part, 16) for part in classid.split(":"))
        self._classid = major << 16 | minor
        self.name = f"class {classid} of {interface}"
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.settimeout(5)
        # A dump of the interface's classes: asked for one alone, the kernel tells all who listen.
        body = TCMSG.pack(0, socket.if_nametoindex(interface), 0, 0, 0)
        size = NLMSGHDR.size + len(body)
        flags = NLM_F_REQUEST | NLM_F_DUMP
        self._request = NLMSGHDR.pack(size, RTM_GETTCLASS, flags, 1, 0) + body

    def read(self) -> tuple[int, int, int, int]:
        """Bytes and packets sent, backlog in bytes, drops."""
        self._socket.send(self._request)
        found = None
        while True:
            data, offset = self._socket.recv(16384), 0
            while offset < len(data):
                length, kind, *_ = NLMSGHDR.unpack_from(data, offset)
                body = offset + NLMSGHDR.size
                if kind == NLMSG_ERROR:
                    (code,) = struct.unpack_from("=i", data, body)
                    raise SystemExit(f"{self.name}: {os.strerror(-code)}")
                if kind == NLMSG_DONE:
                    if found is None:
                        raise SystemExit(f"there is no {self.name}")
                    return found
                if kind == RTM_NEWTCLASS and TCMSG.unpack_from(data, body)[2] == self._classid:
                    found = self._counters(data, body + TCMSG.size, offset + length)
                offset += (length + 3) & ~3

    @staticmethod
    def _counters(data: bytes, start: int, end: int) -> tuple[int, int, int, int]:
        stats = attributes(data, *attributes(data, start, end)[TCA_STATS2])
        sent_bytes, sent_packets = BASIC_STATS.unpack_from(data, stats[TCA_STATS_BASIC][0])
        _, backlog, drops, *_ = QUEUE_STATS.unpack_from(data, stats[TCA_STATS_QUEUE][0])
        return sent_bytes, sent_packets, backlog, drops


def main() -> None:
    """Sample until SIGTERM."""
    path, period_us, interface, classid, *arrivals = sys.argv[1:]
    reader = ClassReader(interface, classid)
    counters = [
        os.open(f"/sys/class/net/{name}/statistics/rx_bytes", os.O_RDONLY) for name in arrivals
    ]
    going = True

    def end(*_: object) -> None:
        nonlocal going
        going = False

    signal.signal(signal.SIGTERM, end)
    row = struct.Struct(f"<{len(COLUMNS) + len(counters)}Q")
    period_s = int(period_us) / 1e6
    with Path(path).open("wb") as file:
        print("sampling", flush=True)
        while going:
            arrived = [int(os.pread(counter, 32, 0)) for counter in counters]
            file.write(row.pack(time.monotonic_ns(), *reader.read(), *arrived))
            time.sleep(period_s)


if __name__ == "__main__":
    main()
