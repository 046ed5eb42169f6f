"""What people read: rates, durations, cautions; at most 80 columns."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from controller.agent.requirements import require_kernel
from controller.dataplane.interfaces import Interface, cautions
from controller.errors import UnsupportedError
from controller.telemetry.live import flow_rates, rates_table
from controller.telemetry.views import human_bytes, human_duration, status_text


def row(flow: str, packets: int, **others: Any) -> dict[str, Any]:
    zeros = dict.fromkeys(
        ("messages", "duplicates", "gap_packets", "naks", "rnr_naks", "ce", "cnp"), 0
    )
    return {
        "flow": flow, "interface": "eth0", "direction": "egress", "packets": packets,
        "wire_bytes": packets * 1000, "rtt_us": None, "pid": None, "command": None,
    } | zeros | others  # fmt: skip


def test_rates_are_the_difference_of_two_readings() -> None:
    before = [row("a", 100, duplicates=5), row("quiet", 7)]
    after = [row("a", 300, duplicates=9, messages=40), row("quiet", 7), row("new", 50)]
    rates = flow_rates(before, after, 2.0)
    assert [rate["flow"] for rate in rates] == ["a", "new"]
    assert rates[0]["packets_per_s"] == 100
    assert rates[0]["bits_per_s"] == 200 * 1000 * 8 / 2
    assert rates[0]["messages_per_s"] == 20
    assert rates[0]["trouble"] == {"dup": 4}
    assert rates[1]["packets_per_s"] == 25


def test_the_live_table_fits_80_columns() -> None:
    after = [row(f"100.100.100.{n}-100.100.100.100-0xffffff", 10**9, duplicates=10**6, ce=10**6)
             for n in range(100)]  # fmt: skip
    console = Console(width=80, file=None, record=True, force_terminal=False)
    with console.capture() as capture:
        console.print(rates_table(flow_rates([], after, 1.0), 100))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert "and 60 more" in capture.get()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.21, "3.2s"), (59.9, "59.9s"), (61, "1m 1s"), (7300, "2h 1m"), (90000, "1d 1h")],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text


def test_bytes_have_binary_units() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 5 << 20, 3 << 40)] == [
        "0 B", "1023 B", "1.0 KiB", "5.0 MiB", "3.0 TiB",
    ]  # fmt: skip


def interface(kind: str, link_kind: str) -> Interface:
    return Interface("", "eth0", 1, 2, 4200, True, kind, "mlx5_0", (), link_kind)


def test_what_cannot_be_seen_is_said() -> None:
    (bypass,) = cautions(interface("bypass", ""), "native")
    assert "mlx5_0" in bypass and "NOT seen" in bypass
    (veth,) = cautions(interface("software", "veth"), "native")
    assert "qdisc" in veth and "--mode tc" in veth
    assert cautions(interface("software", "veth"), "tc") == []
    assert cautions(interface("forwarded", ""), "native") == []


def test_the_status_fits_80_columns_and_names_what_was_dropped() -> None:
    text = status_text(
        {
            "version": "1", "pid": 1, "uptime_s": 100.0, "resident_bytes": 5 << 20,
            "adopted": True, "flows": 3, "max_flows": 64,
            "interfaces": [
                {
                    "interface": "host:eth0", "kind": "bypass", "mode": "native", "mtu_bytes": 4200,
                    "rdma_device": "mlx5_0",
                    "acts": False, "control": None, "qdisc": None,
                    "cautions": cautions(interface("bypass", ""), "native"),
                    "frames": {
                        "ingress": {"roce": 12, "ip_fragment": 3, "truncated": 10**12,
                                    "unknown_opcode": 10**12},
                        "egress": {},
                    },
                    "drops": {"qdisc_drops": 4, "rx_dropped": 0},
                    "retired_flows": 2, "retired_packets": 9,
                }
            ],
            "jobs": [], "events": [{"time": 0.0, "event": "x" * 30 + " " + "y" * 60}],
        }
    )  # fmt: skip
    assert max(map(len, text.splitlines())) <= 80
    assert "ip fragment 3" in text
    assert "qdisc_drops 4" in text and "rx_dropped" not in text
    assert "no frames" in text


def test_the_status_tells_what_planning_does_and_costs() -> None:
    answer = {
        "version": "1", "pid": 1, "uptime_s": 1.0, "resident_bytes": 5 << 20, "adopted": False,
        "flows": 0, "max_flows": 64, "interfaces": [], "jobs": [], "events": [],
    }  # fmt: skip
    planner = {
        "policy": "laxity", "events": 12345, "plans_written": 12001,
        "plan_latency_us": {"p50": 123.4, "p99": 1834.0}, "cpu_share": 0.0123,
    }  # fmt: skip
    text = status_text(answer | {"planner": planner})
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(text.split()).endswith(
        "policy laxity, iteration events 12,345, plans written 12,001, event to plan p50 123.4 us, "
        "p99 1.834 ms, CPU 1.2%"
    )
    quiet = planner | {"events": 0, "plans_written": 0, "plan_latency_us": None}
    assert "event to plan" not in status_text(answer | {"planner": quiet})
    assert "policy off" in status_text(answer | {"planner": planner | {"policy": "off"}})
    # A controller of an earlier release does not plan.
    assert "policy" not in status_text(answer)


def test_a_kernel_too_old_is_named_with_what_is_needed() -> None:
    with pytest.raises(UnsupportedError, match=r"5\.10.*5\.18"):
        require_kernel("5.10.0-28-amd64")
    require_kernel("5.18.0")
    require_kernel("6.1.0-13-cloud-amd64")
