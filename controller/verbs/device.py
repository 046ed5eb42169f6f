"""An RDMA device in use: the context, its protection domain, the port and the GID to speak from."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from pyverbs.device import Context, get_device_list
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError

from controller.errors import StellarError, UnsupportedError, UsageError
from controller.verbs.enums import verbs
from controller.verbs.pointers import context_pointer, pd_pointer
from controller.verbs.registration import DeviceLimits, VerbsRegistrar, numa_node_of

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class DeviceError(StellarError):
    """A device, port or GID that cannot be used."""


@dataclass(frozen=True)
class Gid:
    """An entry of a port's GID table.

    Parameters
    ----------
    index
        In the table. The kernel orders it as addresses come: never choose by number.
    gid
        Text of 16 bytes, as pyverbs writes it.
    address
        The IP address that it stands for.
    """

    index: int
    gid: str
    address: Address

    @property
    def family(self) -> int:
        """4 or 6."""
        return self.address.version


def address_of_gid(gid: str) -> Address:
    """The IP address of a RoCE GID; an IPv4 address travels as a mapped one."""
    address = ipaddress.IPv6Address(gid)
    return address.ipv4_mapped or address


def choose_gid(
    gids: Iterable[Gid], *, address: str | None = None, family: int | None = None
) -> Gid | None:
    """The GID to speak from.

    Routable ones before link-local ones, IPv4 before IPv6, then by index.

    Parameters
    ----------
    gids
        RoCE v2 entries of one port.
    address
        Only the one of this IP address.
    family
        Only 4, or only 6.
    """
    wanted = None if address is None else ipaddress.ip_address(address)
    fitting = [
        gid
        for gid in gids
        if (wanted is None or gid.address == wanted) and family in (None, gid.family)
    ]
    return min(
        fitting, key=lambda gid: (gid.address.is_link_local, gid.family, gid.index), default=None
    )


class Device:
    """An open device, one port of it, and one GID.

    Parameters
    ----------
    name
        RDMA device; without it, the first one with a usable port in this network namespace.
    port
        Physical port.
    gid_address, family
        As for choose_gid().

    Raises
    ------
    DeviceError
        No such device, its port is down, or it has no such GID. Says what is there.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        port: int = 1,
        gid_address: str | None = None,
        family: int | None = None,
    ) -> None:
        self.port = port
        self.name, self.context = self._open(name, port)
        try:
            state = self.context.query_port(port)
            if state.state != verbs.IBV_PORT_ACTIVE:
                raise DeviceError(
                    f"Port {port} of {self.name} is not active.",
                    "Set its network interface up (ip link set IF up).",
                )
            self.mtu_bytes = 128 << int(state.active_mtu)  # enum ibv_mtu: 1 is 256
            gids = self._gids()
            chosen = choose_gid(gids, address=gid_address, family=family)
            if chosen is None:
                have = ", ".join(str(gid.address) for gid in gids) or "none"
                wish = gid_address or ("" if family is None else f"of IPv{family}")
                raise DeviceError(
                    f"{self.name} port {port} has no RoCE v2 GID {wish}".rstrip()
                    + f"; it has {have}.",
                    "Add the address to its network interface, or name one of these.",
                )
            self.gid = chosen
            attributes = self.context.query_device()
            self.limits = DeviceLimits(
                self.name,
                int(attributes.max_mr),
                int(attributes.max_mr_size),
                numa_node_of(self.name),
            )
            self.max_qp = int(attributes.max_qp)
            self.max_qp_wr = int(attributes.max_qp_wr)
            self.max_cqe = int(attributes.max_cqe)
            self.pd = PD(self.context)
            self.context_pointer = context_pointer(self.context)
            pd = pd_pointer(self.pd, self.context_pointer)
        except BaseException:
            self.context.close()
            raise
        self.registrar = VerbsRegistrar(pd, self.limits)

    @staticmethod
    def _open(name: str | None, port: int) -> tuple[str, Any]:
        try:
            names = sorted(device.name.decode() for device in get_device_list())
        except PyverbsError:  # the kernel has no RDMA at all
            names = []
        if not names:
            raise DeviceError(
                "There is no RDMA device in this network namespace.",
                "Soft-RoCE: rdma link add NAME type rxe netdev IF.",
            )
        if name is not None and name not in names:
            raise DeviceError(
                f"There is no RDMA device {name!r} in this network namespace; "
                f"there is {', '.join(names)}."
            )
        reasons = []
        for candidate in names if name is None else [name]:
            try:
                context = Context(name=candidate)
            except PyverbsError as error:
                reasons.append(f"{candidate}: {error}")
                continue
            if name is not None:
                return candidate, context
            try:
                if context.query_port(port).state == verbs.IBV_PORT_ACTIVE:
                    return candidate, context
                reasons.append(f"{candidate}: port {port} is not active")
            except PyverbsError as error:
                reasons.append(f"{candidate}: {error}")
            context.close()
        raise DeviceError(f"No RDMA device can be used ({'; '.join(reasons)}).")

    def _gids(self) -> list[Gid]:
        """RoCE v2 entries of the port."""
        count = int(self.context.query_port(self.port).gid_tbl_len)
        try:
            table = self.context.query_gid_table(max(1, count))
        except PyverbsError as error:
            raise UnsupportedError(
                f"The GID table of {self.name} cannot be read ({error})."
            ) from None
        return [
            Gid(int(entry.gid_index), entry.gid_str(), address_of_gid(entry.gid_str()))
            for entry in table
            if entry.port_num == self.port and entry.gid_type == verbs.IBV_GID_TYPE_ROCE_V2
        ]

    def is_active(self) -> bool:
        """Whether the port is up now."""
        try:
            return bool(self.context.query_port(self.port).state == verbs.IBV_PORT_ACTIVE)
        except PyverbsError:
            return False

    def path_mtu(self, *others_bytes: int) -> int:
        """The enum value of the smallest MTU of both ends.

        Parameters
        ----------
        others_bytes
            The peers' active MTUs; 256 .. 4096, powers of two.

        Raises
        ------
        UsageError
            One of them is no MTU.
        """
        for value in others_bytes:
            if value not in (256, 512, 1024, 2048, 4096):
                raise UsageError(f"{value} is not an RDMA path MTU (256 .. 4096).")
        smallest = min((self.mtu_bytes, *others_bytes))
        return smallest.bit_length() - 8

    def close(self) -> None:
        """Close the device; everything made of it must be closed before."""
        self.pd.close()
        self.context.close()

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
