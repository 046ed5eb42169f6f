"""Programs that act, on a clock that the test sets: what comes out of a packet, and what stays."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass

import numpy as np

from controller.agent import maps
from controller.agent.maps import ClassSettings, JobSettings, PortSettings
from controller.dataplane import layout, libbpf
from controller.dataplane.layout import Act, Direction, JobFlag, PortFlag
from controller.dataplane.loader import TC_EGRESS, TC_INGRESS, XDP_INGRESS, Dataplane
from tests.hook import PORT, Hook, clear, flow_key
from tests.packets import V4

# Fixed at 1 Gbit/s, so that tests can name times: 1 KB is 8 us.
LINK_Bps = 125_000_000
DSCPS = (8, 0, 10, 18, 26, 34, 40, 48)
START_ns = 10**12
JOB = 7
SLOT = 5

# struct __sk_buff of linux/bpf.h
_SKB_BYTES = 192
_SKB_PRIORITY = 32
_SKB_TSTAMP = 152


@dataclass(frozen=True)
class Sent:
    """What a tc program made of a packet."""

    verdict: int
    frame: bytes
    priority: int
    tstamp: int


class Acting:
    """The three programs on one port that acts, with the maps behind them.

    Each look at the clock sees the time that was set last (``at``), until ``step_ns`` moves it.
    """

    def __init__(self, dataplane: Dataplane, packet_dtype: np.dtype) -> None:
        self.dataplane = dataplane
        self.egress = Hook(dataplane, TC_EGRESS, packet_dtype, acts=True)
        self.tc_ingress = Hook(dataplane, TC_INGRESS, packet_dtype, acts=True)
        self.xdp = Hook(dataplane, XDP_INGRESS, packet_dtype, acts=True)
        maps.write_crc32_table(self.fds)

    def close(self) -> None:
        """Unload the programs."""
        for hook in (self.egress, self.tc_ingress, self.xdp):
            hook.close()

    @property
    def fds(self) -> dict[str, int]:
        """Descriptors by map name."""
        return self.dataplane.map_fds

    def reset(self) -> None:
        """Nothing is configured, nothing was seen, the clock is at START_ns."""
        clear(self.dataplane)
        for slot in range(16):
            maps.write_control(self.fds, slot, 0)
        for job in range(16):
            maps.write_plan(self.fds, job, None)
            maps.write_job(self.fds, job, JobSettings())
            maps.clear_progress(self.fds, job)
        maps.clear_port(self.fds, PORT)
        maps.write_laxity(self.fds, [0] * 7, [0] * 7, drained=False)
        self.classes()
        self.at(START_ns)

    # ---- configuration ----

    def at(self, now_ns: int, step_ns: int = 0) -> None:
        """Set the clock."""
        value = struct.pack("<QQ", now_ns, step_ns)
        libbpf.map_update(self.fds["test_clock"], bytes(4), value)

    def port(self, flags: PortFlag = PortFlag(0), **settings: int | float) -> None:  # noqa: B008
        """Configure the port."""
        maps.write_port(
            self.fds,
            PORT,
            PortSettings(flags=flags, link_Bps=LINK_Bps, **settings),  # type: ignore[arg-type]
        )

    def classes(
        self, kmin_bytes: int = 5000, kmax_bytes: int = 200_000, pmax: float = 0.01
    ) -> None:
        """The eight classes of the port; priority is 8 + class, to tell it from others."""
        maps.write_classes(
            self.fds,
            PORT,
            [
                ClassSettings(dscp, 8 + number, kmin_bytes, kmax_bytes, pmax, LINK_Bps * 0.95)
                for number, dscp in enumerate(DSCPS)
            ],
        )
        maps.write_dscp_classes(self.fds, DSCPS)

    def job(
        self,
        flags: JobFlag = JobFlag(0),  # noqa: B008
        job: int = JOB,
        **settings: int,
    ) -> None:
        """Configure a job."""
        maps.write_job(self.fds, job, JobSettings(flags=flags, **settings))

    def assign(
        self,
        dqpn: int = 0x11,
        src: str = V4[0],
        dst: str = V4[1],
        slot: int = SLOT,
        job: int = JOB,
    ) -> None:
        """Give an outgoing flow to a job."""
        maps.write_control(self.fds, slot, job)
        maps.assign(self.fds, flow_key(dqpn, src, dst, Direction.EGRESS), slot)
        maps.begin_epoch(self.fds)

    # ---- packets ----

    def send(self, frame: bytes, priority: int = 0, tstamp: int = 0) -> Sent:
        """One frame through tc egress."""
        return self._run(self.egress, frame, priority, tstamp)

    def receive(self, frame: bytes) -> Sent:
        """One frame through tc ingress."""
        return self._run(self.tc_ingress, frame, 0, 0)

    def receive_xdp(self, frame: bytes) -> int:
        """Verdict of XDP ingress on one frame."""
        return libbpf.test_run(self.xdp.fd, frame).retval

    def _run(self, hook: Hook, frame: bytes, priority: int, tstamp: int) -> Sent:
        return self.run_program(hook.fd, frame, priority, tstamp)

    @staticmethod
    def run_program(fd: int, frame: bytes, priority: int = 0, tstamp: int = 0) -> Sent:
        """One frame through a tc program."""
        context = bytearray(_SKB_BYTES)
        struct.pack_into("<I", context, _SKB_PRIORITY, priority)
        struct.pack_into("<Q", context, _SKB_TSTAMP, tstamp)
        result = libbpf.test_run(fd, frame, bytes(context))
        return Sent(
            result.retval,
            result.data,
            struct.unpack_from("<I", result.context, _SKB_PRIORITY)[0],
            struct.unpack_from("<Q", result.context, _SKB_TSTAMP)[0],
        )

    # ---- what stays ----

    def acts(self) -> Counter[Act]:
        """What was done on the port so far."""
        return Counter(maps.read_acts(self.fds, PORT))

    def control(self, slot: int = SLOT) -> np.void:
        """State of a flow, dtype FLOW_CONTROL."""
        return maps.read_control(self.fds, slot)

    def progress(self, job: int = JOB) -> np.void:
        """How far a job is, dtype JOB_PROGRESS."""
        return maps.read_progress(self.fds, job)

    def marker(self, number: int = layout.CLASSES) -> np.void:
        """A virtual queue of the port, dtype MARKER."""
        return maps.read_marker(self.fds, PORT, number)
