"""Sockets at which ranks meet: addresses, listeners, and who may be on the other side.

Plain connections stay on the host: loopback, or a Unix socket whose other side the kernel names.
Between hosts both sides prove by TLS that one authority knows them, unless that is given up
explicitly.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import ssl
import stat
import struct
import warnings
from pathlib import Path
from typing import Any

from controller.allreduce.environment import Master, TlsFiles
from controller.errors import ConflictError, PrivilegeError, UsageError

# (family, address as connect() and bind() want it)
Target = tuple[socket.AddressFamily, Any]

_UCRED = struct.Struct("3i")


class InsecureRendezvousWarning(RuntimeWarning):
    """Ranks meet over a network without TLS."""


async def resolve(master: Master) -> list[Target]:
    """The addresses behind a master.

    Raises
    ------
    OSError
        The name is not known (yet).
    """
    if master.path:
        return [(socket.AF_UNIX, master.path)]
    flags = 0
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(master.address)
        flags = socket.AI_NUMERICHOST
    if flags:
        # No name server is asked, so no thread has to wait for one.
        found = socket.getaddrinfo(
            master.address, master.port, type=socket.SOCK_STREAM, flags=flags
        )
    else:
        found = await asyncio.get_running_loop().getaddrinfo(
            master.address, master.port, type=socket.SOCK_STREAM
        )
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def tls_context(
    master: Master, targets: list[Target], tls: TlsFiles | None, insecure: bool, *, server: bool
) -> ssl.SSLContext | None:
    """What the connections are to be wrapped in; None: nothing.

    Raises
    ------
    UsageError
        An address of a network, and neither TLS nor `insecure`; or TLS files that cannot be used.
    """
    if master.path:
        return None
    if tls is not None:
        return _context(tls, server=server)
    if all(_is_loopback(target) for target in targets):
        return None
    if not insecure:
        raise UsageError(
            f"Master {master} is not on loopback, and ranks would meet there without "
            "authentication.",
            "Either give TLS files to all ranks (STELLAR_TLS_CA, STELLAR_TLS_CERT and "
            "STELLAR_TLS_KEY, or tls=TlsFiles(...)), or, on a network where nobody else can send, "
            "set STELLAR_INSECURE_RENDEZVOUS=1 (insecure=True).",
        )
    # The default filter shows a warning once for each place it comes from.
    warnings.warn(
        f"INSECURE: ranks meet at {master} without TLS; whoever reaches that address can join or "
        "stop the group, and learns the remote keys of its memory.",
        InsecureRendezvousWarning,
        stacklevel=1,
    )
    return None


def _is_loopback(target: Target) -> bool:
    _, address = target
    # The zone of a link-local address follows a percent sign.
    return ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback


def _context(tls: TlsFiles, *, server: bool) -> ssl.SSLContext:
    try:
        status = Path(tls.key).stat()
    except OSError as error:
        raise UsageError(f"TLS key {tls.key} cannot be read: {error.strerror}.") from error
    # Root's keys are often handed to a service by group (Debian's ssl-cert, Kubernetes).
    forbidden = 0o027 if status.st_uid == 0 else 0o077
    if stat.S_IMODE(status.st_mode) & forbidden:
        raise UsageError(
            f"TLS key {tls.key} has mode {stat.S_IMODE(status.st_mode):04o}: others may read it; "
            "expected 0600.",
            f"chmod 600 {tls.key}; if others have read it, make a new one.",
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Certificates name a member of the group, not the address that it has today.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(tls.ca)
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"TLS files {tls.ca}, {tls.certificate}, {tls.key} cannot be used: {error}.",
            "Expected: the authority's certificate, this rank's certificate signed by it, and its "
            "key without a passphrase, all PEM.",
        ) from error
    return context


class Listener:
    """The sockets at which rank 0 listens.

    Parameters
    ----------
    master
        Where.
    targets
        What `resolve` made of it.
    backlog
        Connections that may wait to be accepted.

    Raises
    ------
    ConflictError
        Somebody listens there already.
    UsageError
        This host cannot listen there.
    """

    def __init__(self, master: Master, targets: list[Target], backlog: int) -> None:
        self._inode: tuple[int, int] | None = None
        self._path = master.path
        self.sockets: list[socket.socket] = []
        failure: OSError | None = None
        try:
            if master.path:
                self.sockets.append(self._listen_unix(master, backlog))
                return
            for family, address in targets:
                try:
                    self.sockets.append(_listen_tcp(family, address, backlog))
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        raise _taken(master) from error
                    failure = error  # such as ::1 of localhost where there is no IPv6
        except BaseException:
            self.close()
            raise
        if not self.sockets:
            raise UsageError(
                f"Rank 0 cannot listen on {master}: {failure.strerror if failure else 'no address'}"
                ".",
                "MASTER_ADDR must be an address of the host that rank 0 runs on.",
            ) from failure

    def __str__(self) -> str:
        return ", ".join(_text(each.getsockname()) for each in self.sockets)

    def _listen_unix(self, master: Master, backlog: int) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            # The socket's own mode becomes the path's: there is no moment with a wider one, and
            # the process's umask stays.
            os.fchmod(listener.fileno(), 0o600)
            _remove_stale(master)
            listener.bind(master.path)
            status = os.lstat(master.path)
            self._inode = (status.st_dev, status.st_ino)
            listener.listen(backlog)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                raise _taken(master) from error
            raise UsageError(
                f"Rank 0 cannot listen on {master}: {error.strerror}.",
                "Its directory must exist and be writable.",
            ) from error
        except BaseException:
            listener.close()
            raise
        return listener

    def close(self) -> None:
        """Stop listening; the path goes too, if it is still this listener's."""
        for each in self.sockets:
            each.close()
        self.sockets.clear()
        if self._inode is not None:
            with contextlib.suppress(OSError):
                status = os.lstat(self._path)
                if (status.st_dev, status.st_ino) == self._inode:
                    Path(self._path).unlink()
            self._inode = None


def _listen_tcp(family: int, address: Any, backlog: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        # Connections of the group before this one may still be in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(master: Master) -> None:
    """Remove the socket that a killed rank 0 left at the path."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(master.path).st_mode):
            raise ConflictError(
                f"{master.path} exists and is no socket.", "Give MASTER_ADDR another path."
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(master.path)
            except ConnectionRefusedError:
                Path(master.path).unlink()
                return
            except BlockingIOError:
                pass  # somebody's backlog is full
        raise _taken(master)


def _taken(master: Master) -> ConflictError:
    return ConflictError(
        f"Another process listens on {master} already.",
        "If it is a rank 0 of another group, wait until that group is complete or give this one "
        "another place (STELLAR_MASTER_PORT, STELLAR_MASTER_ADDR).",
    )


def check_user(stream: socket.socket) -> None:
    """Refuse the other side of a Unix socket unless it is our user's, or root's.

    Raises
    ------
    PrivilegeError
        It is somebody else's.
    """
    raw = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    if uid not in (0, os.geteuid()):
        raise PrivilegeError(
            f"Process {pid} at the other side of the Unix socket is user {uid}'s; expected user "
            f"{os.geteuid()}'s.",
            "Run all ranks as one user.",
        )


def tune(stream: socket.socket, vanished_s: float) -> None:
    """Let the kernel end a TCP connection whose host has been gone for `vanished_s`.

    It is the kernel that acknowledges, so a process that is busy or stopped is not mistaken for a
    host that is gone. TCP_USER_TIMEOUT counts for what was sent (heartbeats), keepalive when
    nothing was (RFC 5482; tcp(7)).
    """
    if stream.family == socket.AF_UNIX:
        return
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(vanished_s * 1000)))
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval_s = max(1, int(vanished_s / 4))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def peer_name(stream: socket.socket) -> str:
    """The other side, for people."""
    if stream.family == socket.AF_UNIX:
        raw = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return f"process {_UCRED.unpack(raw)[0]}"
    return _text(stream.getpeername())


def _text(address: Any) -> str:
    if isinstance(address, tuple):
        return str(Master(str(address[0]), int(address[1])))
    return str(address)
