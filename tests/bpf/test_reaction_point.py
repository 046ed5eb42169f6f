"""DCQCN's reaction point in BPF: random histories and long ways against the model, and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.agent import maps
from controller.congestion.dcqcn import PRESETS, Phase, preset
from controller.dataplane import libbpf
from controller.dataplane.layout import Act, Direction, Kind, PhaseNumber, PortFlag
from tests.acting import Acting, START_ns
from tests.hook import PORT, flow_key
from tests.packets import ACK, CNP, V4, WRITE_MIDDLE, Opcode, packet
from tests.reacting import LOCAL_QPN, MS, PEER_QPN, Flow, GAP_ns, S, cut

LINKS_GBIT = (0.1, 1, 25, 40, 100, 400)


def gbit_Bps(gbit: float) -> float:
    return gbit * 1e9 / 8


# ---- random histories ----

# Payloads that the counter is a few or a few hundred packets of.
SIZES = st.sampled_from((0, 4, 256, 1024, 2048))
# From nothing to minutes; each magnitude as likely as any other.
GAPS = st.one_of(
    st.just(0),
    st.integers(0, 11).flatmap(lambda power: st.integers(10**power // 10, 10**power)),
)
EVENTS = st.lists(
    st.tuples(
        GAPS,
        st.sampled_from(("send",) * 6 + ("cnp xdp", "cnp tc", "becn xdp", "becn tc")),
        SIZES,
    ),
    min_size=1,
    max_size=60,
)
FUZZ = settings(
    max_examples=150,
    # The programs are loaded once; every example starts from empty maps.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def play(flow: Flow, events: Sequence[tuple[int, str, int]]) -> None:
    for gap_ns, kind, payload_bytes in events:
        if kind == "send":
            flow.send(gap_ns, payload_bytes)
        else:
            what, _, hook = kind.partition(" ")
            receive = flow.acting.receive_xdp if hook == "xdp" else flow.acting.receive
            flow.notify(gap_ns, receive, what == "cnp")


@FUZZ
@given(
    events=EVENTS,
    name=st.sampled_from(sorted(PRESETS)),
    gbit=st.sampled_from(LINKS_GBIT),
    byte_counter=st.sampled_from((0, 2000, 9000)),
    first_cut_share=st.sampled_from((0, 0, 0.3)),
    prediction=st.booleans(),
    phases=st.booleans(),
    plan=st.none() | st.tuples(st.integers(1, 50_000), st.floats(0, 1.2), st.integers(-S, 20 * S)),
)
def test_random_histories_are_those_of_the_model(
    acting: Acting,
    events: list[tuple[int, str, int]],
    name: str,
    gbit: float,
    byte_counter: int,
    first_cut_share: float,
    prediction: bool,
    phases: bool,
    plan: tuple[int, float, int] | None,
) -> None:
    parameters = preset(name, gbit_Bps(gbit))
    if byte_counter:
        parameters = replace(parameters, byte_counter_bytes=byte_counter)
    if first_cut_share:
        parameters = replace(
            parameters, first_cut_rate_Bps=round(first_cut_share * parameters.link_Bps)
        )
    expected_bytes, share, window_ns = plan or (0, 0.0, 0)
    flow = Flow(
        acting,
        parameters,
        prediction,
        phases,
        expected_bytes,
        share * parameters.link_Bps,
        START_ns + window_ns,
    )
    play(flow, events)


# ---- long ways ----


@pytest.mark.parametrize("gbit", LINKS_GBIT)
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_silence_of_any_length_ends_where_the_model_has_stepped_to(
    acting: Acting, name: str, gbit: float
) -> None:
    parameters = preset(name, gbit_Bps(gbit))
    timer_ns = parameters.timer_ns
    for silence_ns in (
        timer_ns - 1, timer_ns, 5 * timer_ns, 6 * timer_ns, 33 * timer_ns, 1000 * timer_ns,
        1 * S, 9 * S, 60 * S, 1200 * S,
    ):  # fmt: skip
        for cuts in (1, 3, 12):
            flow = Flow(acting, parameters)
            cut(flow, cuts)
            flow.send(silence_ns, 4)
            flow.send(timer_ns, 4)
    assert not flow.model.limited


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_cut_after_a_long_silence_cuts_the_recovered_rate(acting: Acting, name: str) -> None:
    parameters = preset(name, gbit_Bps(100))
    for timers in (3, 40, 200, 3000):
        flow = Flow(acting, parameters)
        cut(flow, 12)
        flow.notify(timers * parameters.timer_ns, acting.receive, cnp=True)
        assert flow.model.counters.cuts == 13


@pytest.mark.parametrize("gbit", LINKS_GBIT)
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_hundreds_of_cuts_end_at_the_minimum_rate(acting: Acting, name: str, gbit: float) -> None:
    flow = Flow(acting, preset(name, gbit_Bps(gbit)))
    cut(flow, 300)
    least = round(flow.parameters.min_rate_Bps)
    assert (flow.state()["rc_Bps"], flow.state()["rt_Bps"]) == (least, least)
    assert acting.acts()[Act.CUT] == 300
    flow.send(60 * S, 4)


@pytest.mark.parametrize("gbit", [0.1, 40, 400])
def test_phases_without_increase_hold_the_target_for_a_minute(acting: Acting, gbit: float) -> None:
    parameters = preset("paper", gbit_Bps(gbit))
    parameters = replace(parameters, phase_steps=replace(parameters.phase_steps, idle=0))
    flow = Flow(acting, parameters, expected_bytes=1000, window_start_ns=START_ns + 1000 * S)
    cut(flow, 4)
    target = int(flow.state()["rt_Bps"])
    flow.send(60 * S, 4)
    assert flow.phase is Phase.IDLE
    assert (flow.state()["rc_Bps"], flow.state()["rt_Bps"]) == (target, target)
    assert flow.state()["limited"]


def many_bytes(acting: Acting) -> Flow:
    """A flow with 201 expiries of the byte counter and none of the timer, far below its link."""
    parameters = replace(
        preset("connectx", gbit_Bps(40)), byte_counter_bytes=314, rate_ai_Bps=1000.0
    )
    flow = Flow(acting, parameters, phases=False)
    cut(flow, 12)
    for _ in range(201):
        flow.send(0, 256)
    assert flow.state()["byte_stage"] == 201
    assert flow.state()["timer_stage"] == 0
    return flow


def test_what_one_packet_leaves_of_a_long_silence_the_next_ones_work_off(acting: Acting) -> None:
    # The timer's stage decides on each hyper step, so there is no closed form here: the link's
    # rate is some 40 steps and a dozen halvings away, of which a packet takes 24.
    flow = many_bytes(acting)
    flow.now_ns += S
    acting.at(flow.now_ns)
    flow.model.advance(flow.now_ns)
    assert not flow.model.limited
    rates = [int(flow.state()["rc_Bps"])]
    while flow.state()["limited"]:
        acting.send(packet(WRITE_MIDDLE, 900, 256, dqpn=PEER_QPN, sport=0xC001))
        rates.append(int(flow.state()["rc_Bps"]))
        # Its bytes are enough for an expiry of their counter: that comes last.
        assert flow.state()["byte_stage"] in (201, 0)
    assert rates == sorted(rates)
    assert 3 <= len(rates) <= 4
    assert rates[-1] == round(flow.parameters.link_Bps)


def test_a_cut_leaves_nothing_of_a_long_silence(acting: Acting) -> None:
    flow = many_bytes(acting)
    flow.notify(S, acting.receive_xdp, cnp=True)
    assert flow.model.rt_Bps == flow.parameters.link_Bps


@pytest.mark.parametrize("gbit", LINKS_GBIT)
def test_the_byte_counter_of_the_paper_counts_every_byte(acting: Acting, gbit: float) -> None:
    flow = Flow(acting, preset("paper", gbit_Bps(gbit)))
    cut(flow, 5)
    frame = packet(WRITE_MIDDLE, 1, 2048, dqpn=PEER_QPN, sport=0xC001)
    repeat = 7 * flow.parameters.byte_counter_bytes // (2 * len(frame))
    libbpf.test_run(acting.egress.fd, frame, repeat=repeat)
    for _ in range(repeat):
        flow.model.sent(flow.now_ns, len(frame))
    flow.increases[PhaseNumber.MIDDLE] += 3
    flow.check()
    assert flow.state()["byte_stage"] == 3


def test_a_released_flow_reports_the_links_rate(acting: Acting) -> None:
    flow = Flow(acting, preset("paper", gbit_Bps(1)))
    link = round(flow.parameters.link_Bps)
    cut(flow, 1)
    assert flow.state()["rc_Bps"] == link / 2
    flow.send(11 * flow.parameters.timer_ns, 4)
    state = flow.state()
    assert (state["limited"], state["rc_Bps"], state["rt_Bps"]) == (0, link, link)
    assert (state["timer_stage"], state["byte_stage"], state["bytes"]) == (0, 0, 0)


# ---- what does not come in order, or is not meant ----


def test_feedback_that_another_cpu_saw_earlier_still_cuts_and_turns_no_clock_back(
    acting: Acting,
) -> None:
    flow = Flow(acting, preset("paper", gbit_Bps(1)))
    cut(flow, 2)
    before = flow.state()
    acting.at(flow.now_ns - 700)
    acting.receive_xdp(packet(CNP, 0, dqpn=LOCAL_QPN, src=V4[1], dst=V4[0]))
    flow.model.notify(flow.now_ns)
    flow.check()
    after = flow.state()
    for clock in ("cut_ns", "alpha_ns", "expiry_ns"):
        assert after[clock] == before[clock]
    acting.send(packet(WRITE_MIDDLE, 2, 4, dqpn=PEER_QPN, sport=0xC001))
    assert flow.state()["rc_Bps"] == after["rc_Bps"]


def test_a_link_that_became_slower_is_the_new_limit(acting: Acting) -> None:
    flow = Flow(acting, preset("paper", gbit_Bps(10)))
    cut(flow, 1)
    slower = preset("paper", gbit_Bps(1))
    maps.write_dcqcn(acting.fds, PORT, slower)
    acting.at(flow.now_ns + slower.timer_ns)
    acting.send(packet(WRITE_MIDDLE, 1, 4, dqpn=PEER_QPN, sport=0xC001))
    state = flow.state()
    assert (state["limited"], state["rc_Bps"]) == (0, round(slower.link_Bps))


def test_packets_depart_at_the_current_rate(acting: Acting) -> None:
    for cuts, payload_bytes in ((1, 2048), (4, 256), (9, 1024)):
        flow = Flow(acting, preset("paper", gbit_Bps(1)))
        acting.port(PortFlag.DCQCN | PortFlag.PACE)
        cut(flow, cuts)
        frames = [packet(WRITE_MIDDLE, n, payload_bytes, dqpn=PEER_QPN) for n in range(1, 9)]
        departures = [acting.send(frame).tstamp for frame in frames]
        gap_ns = len(frames[0]) * S // int(flow.state()["rc_Bps"])
        assert departures == [flow.now_ns + number * gap_ns for number in range(8)]
        assert flow.state()["paced"] == 8
        assert gap_ns == pytest.approx(len(frames[0]) * S / flow.model.rc_Bps, rel=0.01)


def test_an_unlimited_flow_is_not_paced(acting: Acting) -> None:
    Flow(acting, preset("paper", gbit_Bps(1)))
    acting.port(PortFlag.DCQCN | PortFlag.PACE)
    assert acting.send(packet(WRITE_MIDDLE, 1, 4, dqpn=PEER_QPN), tstamp=77).tstamp == 77


@pytest.mark.parametrize("off", ["port", "job", "unmatched"])
def test_without_dcqcn_feedback_and_packets_change_no_state(acting: Acting, off: str) -> None:
    flow = Flow(acting, preset("paper", gbit_Bps(1)))
    if off == "port":
        acting.port(PortFlag.MARK)
    elif off == "job":
        acting.job()
    else:
        maps.unassign(acting.fds, flow_key(PEER_QPN, V4[0], V4[1], Direction.EGRESS))
        maps.begin_epoch(acting.fds)
    acting.send(packet(WRITE_MIDDLE, 1, 4, dqpn=PEER_QPN))
    before = acting.control()
    for receive in (acting.receive_xdp, acting.receive):
        flow.answer(MS, receive, CNP)
        flow.answer(MS, receive, ACK, becn=True)
    acting.send(packet(WRITE_MIDDLE, 2, 4, dqpn=PEER_QPN))
    after = acting.control()
    for name in ("rc_Bps", "alpha_q32", "cut_ns", "expiry_ns", "bytes", "feedback", "limited"):
        assert after[name] == before[name] == 0
    assert Act.CUT not in acting.acts()
    if off == "unmatched":
        assert after == before


@pytest.mark.parametrize("opcode", [CNP, ACK])
def test_feedback_about_no_known_flow_is_counted_and_cuts_nothing(
    acting: Acting, opcode: Opcode
) -> None:
    flow = Flow(acting, preset("paper", gbit_Bps(1)))
    stranger = packet(opcode, 0, dqpn=0x99, src=V4[1], dst=V4[0], becn=opcode is ACK)
    assert acting.receive_xdp(stranger) == 2
    assert acting.receive(stranger).frame == stranger
    counted = acting.xdp.flow(0x99, V4[1], V4[0])
    assert counted["kinds"][Kind.CNP if opcode is CNP else Kind.ACK] == 2
    flow.check()
    assert flow.state()["feedback"] == 0


def test_an_ack_without_becn_is_no_feedback(acting: Acting) -> None:
    flow = Flow(acting, preset("paper", gbit_Bps(1)))
    for receive in (acting.receive_xdp, acting.receive):
        flow.answer(MS, receive, ACK)
    flow.check()
    counted = acting.xdp.flow(LOCAL_QPN, V4[1], V4[0])
    assert counted["kinds"][Kind.ACK] == flow.acks
    assert flow.state()["feedback"] == 0


def test_phases_are_counted_by_the_bytes_of_the_iteration(acting: Acting) -> None:
    parameters = preset("paper", gbit_Bps(1))
    flow = Flow(
        acting,
        parameters,
        expected_bytes=20_000,
        window_start_ns=START_ns + 3 * parameters.timer_ns,
    )
    cut(flow, 6)
    for _ in range(25):
        flow.send(parameters.timer_ns, 1024)
    flow.send(GAP_ns + 1, 4)
    assert all(count > 0 for count in flow.state()["increases"])
