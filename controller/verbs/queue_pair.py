"""RC queue pairs: made, connected to a peer whose parameters were checked, put into error."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

from controller.errors import InputError
from controller.verbs.completions import CompletionQueue
from controller.verbs.device import Device, DeviceError, address_of_gid
from controller.verbs.enums import verbs

HOP_LIMIT = 64  # pyverbs' own default, 1, ends at the first router
RETRY_FOREVER = 7
# IBTA vol. 1, table 46: 0.64 ms. Receives are always posted ahead, so it hardly matters.
MIN_RNR_TIMER = 12
_24_BITS = (1 << 24) - 1


@dataclass(frozen=True)
class Timing:
    """How long a queue pair tries.

    Parameters
    ----------
    timeout
        Of one try: 4.096 us x 2^timeout.
    retries
        Tries after the first; 0 .. 7. Soft-RoCE takes 7 for "for ever".
    """

    timeout: int = 17
    retries: int = 6


@dataclass(frozen=True)
class Endpoint:
    """What the peer must know of a queue pair.

    Parameters
    ----------
    qpn, psn
        Number and first PSN; 24 bits.
    gid
        RoCE v2 GID, as text.
    mtu_bytes
        Active MTU of the port.
    """

    qpn: int
    psn: int
    gid: str
    mtu_bytes: int

    def to_json(self) -> dict[str, Any]:
        """As it travels."""
        return {
            "qpn": self.qpn, "psn": self.psn, "gid": self.gid, "mtu_bytes": self.mtu_bytes,
        }  # fmt: skip

    @classmethod
    def from_json(cls, document: Mapping[str, Any], whose: str) -> Endpoint:
        """Check what a peer sent.

        Raises
        ------
        InputError
            Names the peer, the parameter and what is allowed.
        """

        def number(key: str, least: int, most: int) -> int:
            value = document.get(key)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise InputError(
                    f"{whose} sent {key} = {value!r}; expected a number of {least} .. {most}."
                )
            return value

        gid = document.get("gid")
        try:
            if not isinstance(gid, str):
                raise ValueError
            address = address_of_gid(gid)
            if address.is_unspecified or address.is_multicast:
                raise ValueError
        except ValueError:
            raise InputError(f"{whose} sent gid = {gid!r}; expected a unicast GID.") from None
        mtu_bytes = number("mtu_bytes", 256, 4096)
        if mtu_bytes & (mtu_bytes - 1):
            raise InputError(f"{whose} sent mtu_bytes = {mtu_bytes}; expected a power of two.")
        return cls(number("qpn", 2, _24_BITS), number("psn", 0, _24_BITS), gid, mtu_bytes)


class QueuePair:
    """An RC queue pair, every send of which is signaled.

    Parameters
    ----------
    device, completions
        What it uses.
    send_depth, receive_depth
        Work requests that may be outstanding.
    """

    def __init__(
        self,
        device: Device,
        completions: CompletionQueue,
        send_depth: int,
        receive_depth: int,
    ) -> None:
        if max(send_depth, receive_depth) > device.max_qp_wr:
            raise DeviceError(
                f"{device.name} takes {device.max_qp_wr} work requests a queue, "
                f"{max(send_depth, receive_depth)} are needed.",
                "Use fewer slots.",
            )
        cap = QPCap(
            max_send_wr=send_depth, max_recv_wr=receive_depth, max_send_sge=1, max_recv_sge=1
        )
        init = QPInitAttr(
            qp_type=verbs.IBV_QPT_RC, scq=completions.cq, rcq=completions.cq, cap=cap, sq_sig_all=1
        )
        self._device = device
        try:
            self.qp = QP(device.pd, init)
        except PyverbsError as error:
            raise DeviceError(
                f"{device.name} makes no more queue pairs: {error}",
                f"It allows {device.max_qp} in all; use fewer peers or classes.",
            ) from None
        self.endpoint = Endpoint(
            int(self.qp.qp_num), secrets.randbits(24), device.gid.gid, device.mtu_bytes
        )

    @property
    def number(self) -> int:
        """Its QPN."""
        return self.endpoint.qpn

    def connect(self, remote: Endpoint, traffic_class: int, timing: Timing) -> None:
        """Bring it to RTS.

        Parameters
        ----------
        remote
            Of the peer's queue pair.
        traffic_class
            The byte of the IP header: DSCP << 2. ECN bits are the NIC's.
        timing
            Timeout and retries.
        """
        device = self._device
        route = GlobalRoute(
            dgid=GID(remote.gid),
            sgid_index=device.gid.index,
            hop_limit=HOP_LIMIT,
            traffic_class=traffic_class,
        )
        attributes = QPAttr(port_num=device.port)
        attributes.qp_access_flags = (
            verbs.IBV_ACCESS_LOCAL_WRITE
            | verbs.IBV_ACCESS_REMOTE_WRITE
            | verbs.IBV_ACCESS_REMOTE_READ
        )
        attributes.dest_qp_num = remote.qpn
        attributes.path_mtu = device.path_mtu(remote.mtu_bytes)
        attributes.rq_psn, attributes.sq_psn = remote.psn, self.endpoint.psn
        attributes.min_rnr_timer = MIN_RNR_TIMER
        attributes.timeout, attributes.retry_cnt = timing.timeout, timing.retries
        attributes.rnr_retry = RETRY_FOREVER
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1  # none: a READ never ends
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=device.port)
        try:
            self.qp.to_rts(attributes)
        except PyverbsError as error:
            raise DeviceError(
                f"{device.name} cannot connect a queue pair to {address_of_gid(remote.gid)}: "
                f"{error}",
                "Check that the address can be reached from this device's interface.",
            ) from None

    def fail(self) -> None:
        """Put it into the error state: its work requests end with WR_FLUSH_ERR."""
        with contextlib.suppress(PyverbsError):
            self.qp.modify(QPAttr(qp_state=verbs.IBV_QPS_ERR), verbs.IBV_QP_STATE)

    def close(self) -> None:
        """Destroy it: nothing reaches memory through it any more."""
        self.qp.close()
