"""`controller bench flows`: how long reading and showing a large flow table takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from controller.dataplane import libbpf, tables
from controller.dataplane.bench import build_frame
from controller.dataplane.compile import compile_programs
from controller.dataplane.layout import Direction
from controller.dataplane.loader import SOURCES, XDP_INGRESS, Dataplane
from controller.errors import StellarError
from controller.observe.report import flows_table
from controller.observe.snapshot import Port, Snapshot, busiest_first, flow_rows, pack_address

_T = TypeVar("_T")


@dataclass(frozen=True)
class FlowsBench:
    """Median times of one reading, in ms."""

    flows: int
    rounds: int
    read_ms: float
    rows_ms: float
    show_ms: float

    @property
    def total_ms(self) -> float:
        """Reading the table, making rows of it and the text of all of them."""
        return self.read_ms + self.rows_ms + self.show_ms

    def to_json(self) -> dict[str, Any]:
        """Members by name, with the total."""
        return {
            "flows": self.flows,
            "rounds": self.rounds,
            "read_ms": round(self.read_ms, 2),
            "rows_ms": round(self.rows_ms, 2),
            "show_ms": round(self.show_ms, 2),
            "total_ms": round(self.total_ms, 2),
        }

    def to_text(self) -> str:
        """One line."""
        return (
            f"{self.flows} flows: read {self.read_ms:.1f} ms, rows {self.rows_ms:.1f} ms, "
            f"text {self.show_ms:.1f} ms, together {self.total_ms:.1f} ms "
            f"(median of {self.rounds})"
        )


def bench_flows(flows: int, rounds: int = 7) -> FlowsBench:
    """Fill a flow table of our own (nothing is attached) and read it as `flows` does.

    Parameters
    ----------
    flows
        Entries to make, by running the observer on one packet each.
    rounds
        Readings; medians are reported.
    """
    functions = (XDP_INGRESS,)
    artifact = compile_programs(
        SOURCES, functions, {"STELLAR_BENCH_FLOWS": str(flows), "STELLAR_ALLOW_CUT": "1"}
    )
    dataplane = Dataplane(artifact, max_flows=max(flows, 64))
    try:
        program = dataplane.load(XDP_INGRESS, 0)
        frame = build_frame(pack_address("10.0.0.1"), pack_address("10.0.0.2"), "data4k")
        libbpf.test_run(program, frame, repeat=2 * flows, data_out_bytes=0)

        def read() -> Snapshot:
            keys, stats = tables.read_flows(dataplane.map_fds["flows"])
            frames = {
                (0, d): tables.read_reasons(dataplane.map_fds["reasons"], 0, d) for d in Direction
            }
            return Snapshot(time.monotonic_ns(), {0: Port(0, "bench")}, keys, stats, frames)

        times: list[tuple[float, float, float]] = []
        for _ in range(rounds):
            read_ms, snapshot = _timed_ms(read)
            if len(snapshot.keys) != flows:
                raise StellarError(f"{len(snapshot.keys)} flows in the table, expected {flows}.")
            rows_ms, rows = _timed_ms(partial(_rows, snapshot))
            show_ms, _ = _timed_ms(partial(flows_table, rows))
            times.append((read_ms, rows_ms, show_ms))
    finally:
        dataplane.close()
    return FlowsBench(
        flows, rounds, *(statistics.median(column) for column in zip(*times, strict=True))
    )


def _rows(snapshot: Snapshot) -> list[dict[str, Any]]:
    return flow_rows(busiest_first(snapshot))


def _timed_ms(work: Callable[[], _T]) -> tuple[float, _T]:
    start_ns = time.perf_counter_ns()
    result = work()
    return (time.perf_counter_ns() - start_ns) / 1e6, result
