"""What the benchmark's program `full` works with, and whether it did: one job that owns each flow.

Everything is on: class from a plan's laxity, marker, echo, DCQCN and departure times at two
rates. Numbers are chosen so that every packet takes the long way through each of them.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping

import numpy as np

from controller.dataplane import layout, libbpf, tables
from controller.dataplane.layout import Act, DcqcnFlag, Direction, JobFlag, PortFlag

_JOB = 1
_PORT = 0
_S = 10**9
_LINK_Bps = 5 * 10**9
# Every other repetition comes before its flow may send, so departures lie ahead.
_RATE_Bps = 10**9
_CLASS = 3
# Not what the packets carry, so that DSCP is rewritten in each of them.
_DSCPS = (8, 1, 10, 18, 26, 34, 40, 48)
_FLAGS = PortFlag.MARK | PortFlag.ECHO_BECN | PortFlag.DCQCN | PortFlag.PACE


def _write(fd: int, index: int, record: np.ndarray) -> None:
    libbpf.map_update(fd, struct.pack("<I", index), record.tobytes())


def _record(dtype: np.dtype, **members: object) -> np.ndarray:
    record = np.zeros((), dtype)
    for name, value in members.items():
        record[name] = value
    return record


def _q24_per_ns(rate_Bps: int) -> int:
    return (rate_Bps << 24) // _S


class BenchControl:
    """The job of the benchmark in the maps of one dataplane.

    Parameters
    ----------
    fds
        Descriptors of the maps by name.
    flows
        Flows of the benchmark. Beyond the number of slots they share them.
    """

    def __init__(self, fds: Mapping[str, int], flows: int) -> None:
        self._fds = fds
        self._slots = min(flows, layout.MAX_CONTROLS - 1)
        now_ns = time.monotonic_ns()
        self._write_port()
        self._write_job(now_ns)
        # Only zeros for the phases' factors: the rate stays where it is, or DCQCN would free
        # the flows while they are measured. Its events come all the same.
        dcqcn = _record(
            layout.DCQCN_CONTROL,
            link_Bps=_LINK_Bps,
            min_rate_Bps=_LINK_Bps // 1000,
            rate_ai_Bps=_LINK_Bps // 1000,
            rate_hai_Bps=_LINK_Bps // 100,
            timer_ns=55_000,
            byte_counter=10**7,
            alpha_update_ns=55_000,
            initial_alpha_q32=1 << 32,
            g_q32=1 << 24,
            max_decrease_q24=1 << 23,
            fast_recovery_steps=5,
            flags=DcqcnFlag.PREDICTION | DcqcnFlag.PHASES,
            begin_q8=26,
            end_q8=230,
        )
        _write(fds["dcqcn_controls"], _PORT, dcqcn)
        control = _record(
            layout.FLOW_CONTROL,
            job=_JOB,
            **{"class": layout.CLASS_UNSET},
            limited=1,
            rc_Bps=_RATE_Bps,
            rt_Bps=_RATE_Bps,
            expiry_ns=now_ns,
        )
        for slot in range(1, self._slots + 1):
            _write(fds["controls"], slot, control)

    def _write_port(self) -> None:
        drain_q24 = _q24_per_ns(_LINK_Bps)
        port = _record(
            layout.PORT_CONTROL,
            flags=int(_FLAGS),
            link_Bps=_LINK_Bps,
            drain_q24=drain_q24,
            slot_ns=62_500,
            # No departure lies beyond, as long as a run may take.
            horizon_ns=1 << 60,
            echo_interval_ns=50_000,
        )
        _write(self._fds["port_controls"], _PORT, port)
        for number, dscp in enumerate(_DSCPS):
            settings = _record(
                layout.CLASS_CONTROL,
                priority=number,
                kmin_bytes=5_000,
                kmax_bytes=200_000,
                pmax_q32=(1 << 32) // 100,
                drain_q24=drain_q24,
                dscp=dscp,
            )
            _write(self._fds["class_controls"], _PORT * layout.CLASSES + number, settings)

    def _write_job(self, now_ns: int) -> None:
        job = _record(
            layout.JOB_SETTINGS,
            flags=int(JobFlag.DCQCN),
            class_default=_CLASS,
            class_ceiling=6,
            gap_ns=1000 * _S,  # all is one iteration
        )
        _write(self._fds["jobs"], _JOB, job)
        plan = _record(
            layout.JOB_PLAN,
            expected_bytes=1 << 42,
            window_start_ns=now_ns,
            deadline_ns=now_ns + 10_000 * _S,
            valid_until_ns=now_ns + 10_000 * _S,
            rate_Bps=_RATE_Bps,
            pace_Bps=_RATE_Bps,
            class_floor=_CLASS,
            class_ceiling=6,
        )
        _write(self._fds["plans"], _JOB * 2, plan)
        falling = np.arange(layout.CLASSES - 1, 0, -1) * (_S // 10)
        laxity = _record(
            layout.LAXITY_CONTROL,
            raise_ns=falling,
            lower_ns=falling + _S // 100,
        )
        _write(self._fds["laxity_controls"], 0, laxity)

    def take_flows(self, first_qpn: int) -> None:
        """Give every outgoing flow of the table a slot.

        Straight into the flow, where the programs keep what they have looked up: the map of
        assignments holds fewer flows than are measured, and is not looked at on this path.
        """
        keys, stats = tables.read_flows(self._fds["flows"])
        for key, flow in zip(keys, stats, strict=True):
            if key["direction"] == Direction.EGRESS:
                flow["slot"] = 1 + (int(key["dqpn"]) - first_qpn) % self._slots
                libbpf.map_update(self._fds["flows"], key.tobytes(), flow.tobytes())

    def work_done(self) -> dict[str, int]:
        """What was done since the beginning, by name."""
        controls = np.concatenate(
            [self._read("controls", slot, layout.FLOW_CONTROL) for slot in self._used_slots()]
        )
        marker = self._read("markers", _PORT * layout.MARKERS_PER_PORT + layout.CLASSES,
                            layout.MARKER)[0]  # fmt: skip
        progress = self._read("progress", _JOB, layout.JOB_PROGRESS)[0]
        return {
            "packets of the job": int(controls["packets"].sum()),
            "packets of its class": int(controls["class_packets"][:, _CLASS].sum()),
            "paced packets": int(controls["paced"].sum()),
            "packets beyond the horizon": int(controls["beyond_horizon"].sum()),
            "slots that DCQCN limits": int((controls["limited"] == 1).sum()),
            "bytes in the marker": int(marker["arrived"]),
            "payload of the iteration": int(progress["bytes"]),
            "classed packets": self._act(Act.CLASSED),
            "rewritten packets": self._act(Act.REWRITTEN),
            "echoes": self._act(Act.ECHO_BECN),
            "cuts": self._act(Act.CUT),
        }

    def _used_slots(self) -> range:
        return range(1, self._slots + 1)

    @property
    def slots(self) -> int:
        """Slots that the flows share."""
        return self._slots

    def _read(self, name: str, index: int, dtype: np.dtype) -> np.ndarray:
        raw = libbpf.map_lookup(
            self._fds[name], struct.pack("<I", index), dtype.itemsize, libbpf.BPF_F_LOCK
        )
        assert raw is not None  # an array
        return np.frombuffer(raw, dtype)

    def _act(self, act: Act) -> int:
        cpus = libbpf.possible_cpus()
        index = struct.pack("<I", _PORT * len(Act) + act)
        raw = libbpf.map_lookup(self._fds["acts"], index, 8 * cpus)
        return sum(struct.unpack(f"<{cpus}Q", raw)) if raw else 0
