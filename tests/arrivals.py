"""When the kernel received packets, by its own clock: whoever reads may have to wait for a CPU."""

from __future__ import annotations

import socket
import struct

# asm-generic/socket.h; Python names neither.
_SO_RCVBUFFORCE, _SO_TIMESTAMPNS = 33, 35


def udp_listener(address: str, port: int, timeout_s: float) -> socket.socket:
    """A socket that tells arrival times; `timeout_s` is of each read."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    # Nobody reads before all are sent: the default holds a hundred packets.
    sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 24)
    sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    sock.bind((address, port))
    sock.settimeout(timeout_s)
    return sock


def arrival_s(sock: socket.socket, nbytes: int) -> float:
    """When the next packet, of so many bytes at most, came; whenever it is read."""
    _, ((_, _, data),), *_ = sock.recvmsg(nbytes, 64)
    seconds, nanoseconds = struct.unpack("=qq", data)
    return float(seconds + nanoseconds / 1e9)
