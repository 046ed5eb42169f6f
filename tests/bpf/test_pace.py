"""Departure times: on the job's clock and the flow's, up to the horizon, and for data only."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.agent import maps
from controller.dataplane import layout, libbpf
from controller.dataplane.layout import Act, Direction, JobFlag, PortFlag
from controller.dataplane.loader import TC_EGRESS
from controller.priority.jobs import JobPlan
from tests.acting import JOB, SLOT, Acting, LINK_Bps, START_ns
from tests.hook import TC_ACT_UNSPEC, Hook, flow_key
from tests.packets import (
    ACK,
    BY_NAME,
    CNP,
    NAK_SYNDROME,
    OPCODES,
    READ_FIRST,
    READ_MIDDLE,
    READ_ONLY,
    SEND_ONLY,
    V6,
    Opcode,
    packet,
    roce,
)

S, MS = 1_000_000_000, 1_000_000
TC_ACT_SHOT = 2
HORIZON_ns = 100 * MS
ATOMIC_ACK = BY_NAME["RC_ATOMIC_ACKNOWLEDGE"]
UC_SEND_ONLY, UD_SEND_ONLY = BY_NAME["UC_SEND_ONLY"], BY_NAME["UD_SEND_ONLY"]
OTHER_PORT = 4
UNTOUCHED = 777  # tstamp of a packet before, below any time of these tests
FRAME = packet(SEND_ONLY, 0, 1024)
# Everything is expected inside the window of a plan that holds for ever.
PLAN = JobPlan("train", 1 << 30, 1, 1 << 60, 1 << 60, 1_000_000, 0, pace=True)


def cost_ns(frame: bytes, rate_Bps: int) -> int:
    return len(frame) * S // max(rate_Bps, 1000)


@pytest.fixture
def flow(acting: Acting) -> Acting:
    """A flow of a job without a rate, on a port that paces."""
    acting.port(PortFlag.PACE | PortFlag.DCQCN, horizon_ns=HORIZON_ns)
    acting.job(JobFlag.DCQCN)
    acting.assign()
    return acting


def limit_flow(acting: Acting, rate_Bps: int, slot: int = SLOT, job: int = JOB) -> None:
    """As if the reaction point had cut a flow to this rate; no expiry is due."""
    record = np.zeros((), layout.FLOW_CONTROL)
    record["job"], record["class"], record["limited"] = job, layout.CLASS_UNSET, 1
    record["rc_Bps"] = record["rt_Bps"] = rate_Bps
    record["expiry_ns"] = 1 << 62
    libbpf.map_update(acting.fds["controls"], struct.pack("<I", slot), record.tobytes())
    constants = np.zeros((), layout.DCQCN_CONTROL)
    constants["link_Bps"], constants["byte_counter"] = LINK_Bps, 1 << 62
    libbpf.map_update(acting.fds["dcqcn_controls"], struct.pack("<I", 3), constants.tobytes())


# ---- one flow ----


@pytest.mark.parametrize("rate_Bps", [1000, 7_777_777, 12_500_000, LINK_Bps, 1 << 40])
@pytest.mark.parametrize("clock", ["job", "plan", "flow"])
def test_packets_depart_one_transmission_time_apart(
    rate_Bps: int, clock: str, flow: Acting
) -> None:
    flow.port(PortFlag.PACE | PortFlag.DCQCN, horizon_ns=1000 * S)
    if clock == "job":
        flow.job(pace_Bps=rate_Bps)
    elif clock == "plan":
        flow.job(pace_Bps=rate_Bps // 2)
        maps.write_plan(flow.fds, JOB, replace(PLAN, rate_Bps=rate_Bps))
    else:
        limit_flow(flow, rate_Bps)
    departure = START_ns
    for psn, size in enumerate((1024, 2048, 0, 1, 1024, 256)):
        frame = packet(SEND_ONLY, psn, size)
        sent = flow.send(frame, tstamp=UNTOUCHED)
        assert (sent.verdict, sent.tstamp) == (TC_ACT_UNSPEC, departure)
        departure += cost_ns(frame, rate_Bps)
    assert flow.control()["paced"] == flow.acts()[Act.PACED] == 6
    assert flow.control()["beyond_horizon"] == flow.acts()[Act.BEYOND_HORIZON] == 0


@pytest.mark.parametrize("clock", ["job", "flow"])
def test_after_a_pause_a_packet_departs_now_and_saves_nothing_up(clock: str, flow: Acting) -> None:
    rate = 1_000_000
    if clock == "job":
        flow.job(pace_Bps=rate)
    else:
        limit_flow(flow, rate)
    for now in (START_ns, START_ns + S, START_ns + 5 * S):
        flow.at(now)
        departures = [flow.send(FRAME).tstamp for _ in range(3)]
        assert departures == [now + number * cost_ns(FRAME, rate) for number in range(3)]
    # Just when the last one is through, and a nanosecond earlier.
    end = START_ns + 5 * S + 3 * cost_ns(FRAME, rate)
    flow.at(end - 1)
    assert flow.send(FRAME).tstamp == end
    flow.at(end + cost_ns(FRAME, rate))
    assert flow.send(FRAME).tstamp == end + cost_ns(FRAME, rate)


def test_a_rate_below_the_least_is_the_least(flow: Acting) -> None:
    flow.port(PortFlag.PACE, horizon_ns=1000 * S)
    flow.job(pace_Bps=1)
    departures = [flow.send(FRAME).tstamp for _ in range(3)]
    assert departures == [START_ns + number * len(FRAME) * MS for number in range(3)]


@pytest.mark.parametrize(
    "frame",
    [
        roce(SEND_ONLY, b"data", vlans=(5,)),
        roce(SEND_ONLY, b"data", vlans=(5, 6), options=10),
        roce(SEND_ONLY, b"data", src=V6[0], dst=V6[1]),
        roce(SEND_ONLY),
    ],
)
def test_a_packet_is_charged_with_its_length_on_the_wire(frame: bytes, flow: Acting) -> None:
    flow.job(pace_Bps=1_000_000)
    if frame[12:14] == b"\x86\xdd":
        flow.assign(src=V6[0], dst=V6[1])
    # What pads a frame to Ethernet's 60 bytes is no part of the packet.
    assert flow.send(frame.ljust(60, b"\0")).tstamp == START_ns
    assert flow.send(frame).tstamp == START_ns + cost_ns(frame, 1_000_000)


def test_without_a_rate_or_without_fq_no_departure_is_set(flow: Acting) -> None:
    assert flow.send(FRAME, tstamp=UNTOUCHED).tstamp == UNTOUCHED
    flow.port(PortFlag.DCQCN)
    flow.job(JobFlag.DCQCN, pace_Bps=1000)
    maps.write_plan(flow.fds, JOB, PLAN)
    limit_flow(flow, 1000)
    for opcode in (SEND_ONLY, UD_SEND_ONLY, READ_ONLY, ACK):
        for _ in range(3):
            assert flow.send(packet(opcode, 0), tstamp=UNTOUCHED).tstamp == UNTOUCHED
    assert flow.acts()[Act.PACED] == flow.control()["paced"] == 0


def test_the_reaction_point_paces_only_where_it_is_switched_on(flow: Acting) -> None:
    limit_flow(flow, 1_000_000)
    switched: list[tuple[PortFlag, JobFlag]] = [
        (PortFlag.PACE, JobFlag.DCQCN),
        (PortFlag.PACE | PortFlag.DCQCN, JobFlag.SET_ECT),
    ]
    for port, job in switched:
        flow.port(port, horizon_ns=HORIZON_ns)
        flow.job(job)
        assert flow.send(FRAME, tstamp=UNTOUCHED).tstamp == UNTOUCHED


def test_a_plan_without_a_rate_leaves_that_of_the_job(flow: Acting) -> None:
    flow.job(pace_Bps=1_000_000)
    maps.write_plan(flow.fds, JOB, replace(PLAN, rate_Bps=5_000_000, pace=False))
    assert [flow.send(FRAME).tstamp for _ in range(2)][1] == START_ns + cost_ns(FRAME, 1_000_000)


# ---- several flows ----


@pytest.fixture
def other_port(acting: Acting) -> Iterator[Hook]:
    """tc egress of another port of the same host."""
    hook = Hook(acting.dataplane, TC_EGRESS, acting.egress.packet_dtype, OTHER_PORT, acts=True)
    yield hook
    hook.close()


def test_the_flows_of_a_job_share_its_rate(flow: Acting) -> None:
    rate = 10_000_000
    flow.job(pace_Bps=rate)
    flow.assign(dqpn=0x12, slot=SLOT + 1)
    flow.assign(dqpn=0x13, slot=SLOT + 2, job=JOB + 1)
    flow.job(job=JOB + 1, pace_Bps=rate // 2)
    departure = START_ns
    for number in range(20):
        frame = packet(SEND_ONLY, number, 512 * (1 + number % 3), dqpn=0x11 + number % 2)
        assert flow.send(frame).tstamp == departure
        departure += cost_ns(frame, rate)
    other = packet(SEND_ONLY, 0, 100, dqpn=0x13)
    assert flow.send(other).tstamp == START_ns
    assert flow.send(other).tstamp == START_ns + cost_ns(other, rate // 2)


def test_the_rate_of_a_job_holds_on_each_port_for_itself(flow: Acting, other_port: Hook) -> None:
    flow.job(pace_Bps=1_000_000)
    record = np.zeros((), layout.PORT_CONTROL)
    record["flags"], record["horizon_ns"] = int(PortFlag.PACE), HORIZON_ns
    key = struct.pack("<I", OTHER_PORT)
    libbpf.map_update(flow.fds["port_controls"], key, record.tobytes())
    maps.write_control(flow.fds, SLOT + 1, JOB)
    maps.assign(flow.fds, flow_key(0x11, direction=Direction.EGRESS, port=OTHER_PORT), SLOT + 1)
    maps.begin_epoch(flow.fds)
    for number in range(3):
        expected = START_ns + number * cost_ns(FRAME, 1_000_000)
        assert flow.send(FRAME).tstamp == expected
        assert flow.run_program(other_port.fd, FRAME).tstamp == expected
    maps.clear_port(flow.fds, OTHER_PORT)


@pytest.mark.parametrize(("job_Bps", "flow_Bps"), [(8_000_000, 1_000_000), (1_000_000, 8_000_000)])
def test_of_the_clocks_of_job_and_flow_the_later_one_holds(
    job_Bps: int, flow_Bps: int, flow: Acting
) -> None:
    flow.job(JobFlag.DCQCN, pace_Bps=job_Bps)
    limit_flow(flow, flow_Bps)
    step = cost_ns(FRAME, min(job_Bps, flow_Bps))
    assert [flow.send(FRAME).tstamp for _ in range(5)] == [START_ns + n * step for n in range(5)]


@dataclass
class Edt:
    """The rule of departures on one clock, on numbers."""

    next_ns: int = 0

    def depart(self, now_ns: int, frame: bytes, rate_Bps: int) -> int:
        if self.next_ns > now_ns + HORIZON_ns:
            return self.next_ns
        departure = max(self.next_ns, now_ns)
        self.next_ns = departure + cost_ns(frame, rate_Bps)
        return departure


@dataclass
class Clocks:
    """A job's clock and one for each of its flows."""

    job: Edt = field(default_factory=Edt)
    flows: tuple[Edt, ...] = field(default_factory=lambda: (Edt(), Edt()))


@settings(max_examples=100, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(
    job_Bps=st.just(0) | st.integers(1000, 1 << 36),
    flow_rates=st.tuples(*[st.just(0) | st.integers(1000, LINK_Bps)] * 2),
    steps=st.lists(
        st.tuples(st.integers(0, 200 * MS) | st.integers(0, 1000), st.integers(0, 1),
                  st.sampled_from((0, 4, 256, 2048))),
        min_size=1, max_size=25,
    ),
)  # fmt: skip
def test_any_sequence_departs_as_the_rule_on_numbers_says(
    job_Bps: int, flow_rates: tuple[int, int], steps: list[tuple[int, int, int]], acting: Acting
) -> None:
    acting.reset()
    acting.port(PortFlag.PACE | PortFlag.DCQCN, horizon_ns=HORIZON_ns)
    acting.job(JobFlag.DCQCN, pace_Bps=job_Bps)
    for number, rate in enumerate(flow_rates):
        acting.assign(dqpn=0x11 + number, slot=SLOT + number)
        if rate:
            limit_flow(acting, rate, SLOT + number)
    now, clocks, beyond, paced = START_ns, Clocks(), 0, 0
    for psn, (pause_ns, number, size) in enumerate(steps):
        now += pause_ns
        acting.at(now)
        frame = packet(SEND_ONLY, psn, size, dqpn=0x11 + number)
        expected = []
        if job_Bps:
            expected.append(clocks.job.depart(now, frame, job_Bps))
        if flow_rates[number]:
            expected.append(clocks.flows[number].depart(now, frame, flow_rates[number]))
        departure = max(expected, default=UNTOUCHED)
        paced += bool(expected)
        beyond += departure > now + HORIZON_ns
        sent = acting.send(frame, tstamp=UNTOUCHED)
        assert sent.tstamp == min(departure, now + HORIZON_ns)
        assert sent.verdict == TC_ACT_UNSPEC
    assert acting.acts()[Act.PACED] == paced
    assert acting.acts()[Act.BEYOND_HORIZON] == beyond
    controls = [acting.control(SLOT + number) for number in range(2)]
    assert sum(int(each["paced"]) for each in controls) == paced
    assert sum(int(each["beyond_horizon"]) for each in controls) == beyond


# ---- the horizon ----


def fill_to_horizon(acting: Acting, frame: bytes) -> int:
    """Send until the clock is beyond the horizon; returns what the clock then is."""
    departure = START_ns
    while departure <= START_ns + HORIZON_ns:
        assert acting.send(frame).tstamp == departure
        departure += cost_ns(frame, 100_000)
    return departure


@pytest.mark.parametrize("clock", ["job", "flow"])
def test_beyond_the_horizon_packets_depart_at_it_and_are_charged_nothing(
    clock: str, flow: Acting
) -> None:
    if clock == "job":
        flow.job(pace_Bps=100_000)
    else:
        limit_flow(flow, 100_000)
    after = fill_to_horizon(flow, FRAME)
    for number in range(1, 6):
        sent = flow.send(FRAME)
        assert (sent.verdict, sent.tstamp) == (TC_ACT_UNSPEC, START_ns + HORIZON_ns)
        assert flow.control()["beyond_horizon"] == flow.acts()[Act.BEYOND_HORIZON] == number
    # Exactly at the horizon is within it.
    flow.at(after - HORIZON_ns)
    assert flow.send(FRAME).tstamp == after
    assert flow.acts()[Act.BEYOND_HORIZON] == 5


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("opcode", [each for each in OPCODES if each.name.endswith("SEND_ONLY")],
                         ids=lambda opcode: opcode.name)  # fmt: skip
def test_beyond_the_horizon_unreliable_packets_are_dropped_if_asked(
    opcode: Opcode, asked: bool, flow: Acting
) -> None:
    drop = PortFlag.DROP_BEYOND if asked else PortFlag(0)
    flow.port(PortFlag.PACE | drop, horizon_ns=HORIZON_ns)
    flow.job(pace_Bps=100_000)
    frame = packet(opcode, 0, 1024)
    fill_to_horizon(flow, frame)
    dropped = asked and opcode in (UC_SEND_ONLY, UD_SEND_ONLY)
    assert flow.send(frame).verdict == (TC_ACT_SHOT if dropped else TC_ACT_UNSPEC)
    assert flow.acts()[Act.BEYOND_HORIZON] == 1


# ---- answers ----

ANSWERS = {
    "ACK": packet(ACK, 0),
    "NAK": packet(ACK, 0, syndrome=NAK_SYNDROME),
    "atomic ACK": packet(ATOMIC_ACK, 0),
    "CNP": packet(CNP, 0),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_never_paced(name: str, flow: Acting) -> None:
    flow.job(JobFlag.DCQCN, pace_Bps=100_000)
    limit_flow(flow, 100_000)
    fill_to_horizon(flow, FRAME)
    before, paced = flow.control(), flow.acts()[Act.PACED]
    for _ in range(3):
        sent = flow.send(ANSWERS[name], tstamp=UNTOUCHED)
        assert (sent.verdict, sent.tstamp) == (TC_ACT_UNSPEC, UNTOUCHED)
    assert flow.acts()[Act.PACED] == paced
    assert flow.control()["departure_ns"] == before["departure_ns"]


@pytest.mark.parametrize("clock", ["job", "flow"])
@pytest.mark.parametrize("name", ANSWERS)
def test_beside_read_responses_answers_depart_behind_them_and_take_nothing(
    name: str, clock: str, flow: Acting
) -> None:
    rate = 1_000_000
    if clock == "job":
        flow.job(pace_Bps=rate)
    else:
        limit_flow(flow, rate)
    response = packet(READ_FIRST, 0, 1024)
    step = cost_ns(response, rate)
    assert flow.send(response).tstamp == START_ns
    assert flow.send(packet(READ_MIDDLE, 1, 1024)).tstamp == START_ns + step
    middle = cost_ns(packet(READ_MIDDLE, 1, 1024), rate)
    behind = UNTOUCHED if name == "CNP" else START_ns + step + middle
    for _ in range(3):
        assert flow.send(ANSWERS[name], tstamp=UNTOUCHED).tstamp == behind
    assert flow.send(packet(READ_MIDDLE, 2, 1024)).tstamp == START_ns + step + middle
    assert flow.acts()[Act.PACED] == 3
    # Nothing waits any more.
    flow.at(START_ns + step + 2 * middle)
    assert flow.send(ANSWERS[name], tstamp=UNTOUCHED).tstamp == UNTOUCHED
    flow.port(PortFlag.DCQCN)
    flow.at(START_ns)
    assert flow.send(ANSWERS[name], tstamp=UNTOUCHED).tstamp == UNTOUCHED


def test_an_answer_behind_read_responses_keeps_to_the_horizon(flow: Acting) -> None:
    flow.job(pace_Bps=100_000)
    fill_to_horizon(flow, packet(READ_ONLY, 0, 1024))
    assert flow.send(ANSWERS["ACK"]).tstamp == START_ns + HORIZON_ns
