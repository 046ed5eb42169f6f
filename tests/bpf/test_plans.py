"""Plans and progress: laxity -> class as the policy on numbers has it, and how far a job is."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.agent import maps
from controller.dataplane import layout, libbpf
from controller.dataplane.layout import Act, PortFlag
from controller.priority.jobs import JobPlan
from controller.priority.laxity import (
    DEFAULT_HYSTERESIS,
    DEFAULT_THRESHOLDS_ns,
    class_of,
    laxity_ns,
    lowering_ns,
)
from tests.acting import DSCPS, JOB, Acting, START_ns
from tests.packets import (
    ACK,
    BY_NAME,
    CNP,
    SEND_ONLY,
    V4,
    packet,
)

MS, S = 1_000_000, 1_000_000_000
UD_SEND_ONLY = BY_NAME["UD_SEND_ONLY"]
OTHER_JOB, OTHER_SLOT, OTHER_PORT = 9, 6, 4
# A GiB at a GiB/s, all of it to go: laxity is what is left of the deadline after a second.
PLAN = JobPlan("train", 1 << 30, START_ns, START_ns + 2 * S, START_ns + 60 * S, 1 << 30, 0, 0, 7)
PROPERTY = settings(
    max_examples=200,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
CLASSES = st.integers(0, 7)
HYSTERESES = st.integers(0, 256).map(lambda steps: steps / 256)
THRESHOLDS = st.lists(st.integers(1_000, S), min_size=7, max_size=7, unique=True).map(
    lambda values: tuple(sorted(values, reverse=True))
)


def write_policy(
    acting: Acting,
    thresholds_ns: tuple[int, ...] = DEFAULT_THRESHOLDS_ns,
    hysteresis: float = DEFAULT_HYSTERESIS,
) -> None:
    lower = lowering_ns(thresholds_ns, hysteresis)
    maps.write_laxity(acting.fds, thresholds_ns, lower, drained=False)


def write_bytes_done(acting: Acting, count: int) -> None:
    """As if the job had sent so much in this iteration."""
    record = np.zeros((), layout.JOB_PROGRESS)
    record["last_ns"], record["bytes"] = START_ns, count
    libbpf.map_update(acting.fds["progress"], struct.pack("<I", JOB), record.tobytes())


@pytest.fixture
def flow(acting: Acting) -> Acting:
    """A flow of a job in class 3 that may get any class."""
    acting.port()
    acting.job(class_default=3, class_ceiling=7)
    acting.assign()
    write_policy(acting)
    return acting


class Sender:
    """Sends one-packet messages of 4 bytes, numbered."""

    def __init__(self, acting: Acting) -> None:
        self.acting = acting
        self.psn = 0

    def send(self, now_ns: int, **arguments: Any) -> int:
        """Class of a packet sent now."""
        self.acting.at(now_ns)
        sent = self.acting.send(packet(SEND_ONLY, self.psn, 4, **arguments))
        self.psn += 1
        return DSCPS.index(sent.frame[15] >> 2)


# ---- laxity -> class ----


@PROPERTY
@given(
    data=st.data(),
    thresholds=THRESHOLDS,
    hysteresis=HYSTERESES,
    current=st.none() | CLASSES,
    limits=st.tuples(CLASSES, CLASSES).map(sorted),
    expected_bytes=st.integers(1, 1 << 42),
    ratio=st.sampled_from((1.0, 0.25, 1 / 3)),
    done=st.integers(0, 1 << 43),
    rate_Bps=st.just(0) | st.integers(1000, 1 << 40),
)
def test_the_class_is_that_of_the_policy_on_numbers(
    data: st.DataObject,
    thresholds: tuple[int, ...],
    hysteresis: float,
    current: int | None,
    limits: list[int],
    expected_bytes: int,
    ratio: float,
    done: int,
    rate_Bps: int,
    acting: Acting,
) -> None:
    acting.reset()
    acting.port()
    acting.assign()
    write_policy(acting, thresholds, hysteresis)
    sender = Sender(acting)
    if current is not None:
        acting.job(class_default=current, class_ceiling=7)
        assert sender.send(START_ns) == current
    acting.job(class_default=3, class_ceiling=7)
    now = START_ns + data.draw(st.integers(1, S))
    # Where it matters: close to a threshold, or to where a class is left.
    edges = (*thresholds, *lowering_ns(thresholds, hysteresis), -S, 0, 3 * S)
    wanted = data.draw(st.sampled_from(edges)) + data.draw(st.integers(-2, 2))
    plan = JobPlan("train", expected_bytes, 1, 2, 1 << 61, rate_Bps, 0, limits[0], limits[1], ratio)
    needed_ns = plan.deadline_ns - now - laxity_ns(plan, now, done + 4)
    plan = replace(plan, deadline_ns=max(2, min(wanted + now + needed_ns, 1 << 61)))
    maps.write_plan(acting.fds, JOB, plan)
    write_bytes_done(acting, done)
    laxity = laxity_ns(plan, now, done + 4)
    expected = class_of(laxity, thresholds, current or 0, hysteresis, *limits)
    assert sender.send(now) == expected
    assert acting.control()["class"] == expected


@pytest.mark.parametrize(
    ("plan_limits", "job_limits", "laxity", "expected"),
    [
        ((0, 7), (0, 7), -S, 7),
        ((0, 7), (0, 7), S, 0),
        ((2, 5), (0, 7), -S, 5),
        ((2, 5), (0, 7), S, 2),
        # What the job may never have, no plan gives it.
        ((0, 7), (1, 4), -S, 4),
        ((0, 7), (1, 4), S, 1),
        ((6, 7), (1, 4), S, 4),
        ((0, 2), (4, 5), -S, 4),
    ],
)
def test_floor_and_ceiling_of_the_plan_and_of_the_job_hold(
    plan_limits: tuple[int, int],
    job_limits: tuple[int, int],
    laxity: int,
    expected: int,
    flow: Acting,
) -> None:
    floor, ceiling = job_limits
    flow.job(class_default=floor, class_floor=floor, class_ceiling=ceiling)
    plan = replace(PLAN, class_floor=plan_limits[0], class_ceiling=plan_limits[1], rate_Bps=0)
    maps.write_plan(flow.fds, JOB, plan)
    assert Sender(flow).send(plan.deadline_ns - laxity) == expected


def test_a_class_is_kept_inside_its_band_and_left_above_it(flow: Acting) -> None:
    """Default thresholds: class 4 below 50 ms, left from 56.25 ms on."""
    maps.write_plan(flow.fds, JOB, replace(PLAN, rate_Bps=0))
    sender = Sender(flow)
    classes = [
        sender.send(PLAN.deadline_ns - laxity_ms * MS)
        for laxity_ms in (900, 51, 49, 51, 56, 57, 51, 49, 4, 5, 6, 900)
    ]
    assert classes == [0, 3, 4, 4, 4, 3, 3, 4, 7, 7, 6, 0]


def test_bytes_that_leave_raise_the_laxity(flow: Acting) -> None:
    flow.job(class_default=0, class_ceiling=7)
    plan = replace(PLAN, expected_bytes=40 * 1024, rate_Bps=1 << 20, deadline_ns=START_ns + 40 * MS)
    maps.write_plan(flow.fds, JOB, plan)
    # A KiB takes about a millisecond, and no time passes: 2 ms to spare, 3, and so on.
    seen: list[int] = []
    for psn in range(40):
        sent = flow.send(packet(SEND_ONLY, psn, 1024))
        spare_ns = laxity_ns(plan, START_ns, (psn + 1) * 1024)
        current = seen[-1] if seen else 0
        assert DSCPS.index(sent.frame[15] >> 2) == class_of(
            spare_ns, DEFAULT_THRESHOLDS_ns, current
        )
        seen.append(DSCPS.index(sent.frame[15] >> 2))
    assert seen == sorted(seen, reverse=True)
    assert (seen[0], seen[-1]) == (7, 4)


def test_a_plan_without_a_deadline_leaves_the_default_class(flow: Acting) -> None:
    record = np.zeros((), layout.JOB_PLAN)
    record["valid_until_ns"], record["expected_bytes"], record["class_ceiling"] = 1 << 60, 1, 7
    for buffer in range(2):
        key = struct.pack("<I", JOB * 2 + buffer)
        libbpf.map_update(flow.fds["plans"], key, record.tobytes())
    assert Sender(flow).send(START_ns + 5 * S) == 3
    assert flow.acts()[Act.PLAN_EXPIRED] == 0


# ---- expiry ----


def test_from_the_moment_it_expires_a_plan_means_nothing(flow: Acting) -> None:
    flow.port(PortFlag.PACE)
    plan = replace(PLAN, pace=True, rate_Bps=1_000_000, class_floor=6, class_ceiling=6)
    maps.write_plan(flow.fds, JOB, plan)
    flow.at(plan.valid_until_ns - 1)
    last = flow.send(packet(SEND_ONLY, 0, 4), tstamp=777)
    last_bytes = len(last.frame)
    assert (last.priority, last.tstamp) == (8 + 6, plan.valid_until_ns - 1)
    assert flow.acts()[Act.PLAN_EXPIRED] == 0
    # What was paced may still wait in fq: the next packet must not overtake it, and is charged
    # nothing. Then nobody is paced any more.
    free_ns = plan.valid_until_ns - 1 + last_bytes * 1000
    expected = ((plan.valid_until_ns, free_ns), (free_ns - 1, free_ns), (free_ns, 777))
    for psn, (now, tstamp) in enumerate(expected, start=1):
        flow.at(now)
        sent = flow.send(packet(SEND_ONLY, psn, 4), tstamp=777)
        assert (sent.priority, sent.tstamp) == (8 + 3, tstamp)
        assert flow.acts()[Act.PLAN_EXPIRED] == psn
    assert flow.acts()[Act.PACED] == 3


def test_without_its_plan_a_job_keeps_its_own_rate_and_gap(flow: Acting) -> None:
    flow.port(PortFlag.PACE)
    flow.job(pace_Bps=1_000_000, gap_ns=MS)
    plan = replace(PLAN, pace=True, rate_Bps=2_000_000, gap_ns=S)
    maps.write_plan(flow.fds, JOB, plan)
    frame = packet(SEND_ONLY, 0, 4)
    starts = plan.valid_until_ns - 1, plan.valid_until_ns + 2 * MS
    for start, rate in zip(starts, (2_000_000, 1_000_000), strict=True):
        flow.at(start)
        departures = [flow.send(frame).tstamp for _ in range(3)]
        step = len(frame) * S // rate
        assert departures == [start, start + step, start + 2 * step]
    # 2 ms are a pause again: the plan's second no longer counts.
    flow.at(starts[1] + 4 * MS)
    flow.send(packet(SEND_ONLY, 1, 4))
    assert flow.progress()["iteration"] == 2
    assert flow.acts()[Act.PLAN_EXPIRED] == 4


def test_only_data_of_a_job_that_had_a_plan_counts_as_past_it(flow: Acting) -> None:
    sender = Sender(flow)
    sender.send(PLAN.valid_until_ns)
    maps.write_plan(flow.fds, JOB, None)
    sender.send(PLAN.valid_until_ns)
    assert flow.acts()[Act.PLAN_EXPIRED] == 0
    maps.write_plan(flow.fds, JOB, PLAN)
    flow.send(packet(ACK, 0))
    flow.send(packet(CNP, 0))
    flow.receive(packet(SEND_ONLY, 0, 4, src=V4[1], dst=V4[0]))
    assert flow.acts()[Act.PLAN_EXPIRED] == 0
    sender.send(PLAN.valid_until_ns)
    assert flow.acts()[Act.PLAN_EXPIRED] == 1


def test_an_expired_plan_moves_the_class_at_the_next_message_only(flow: Acting) -> None:
    maps.write_plan(flow.fds, JOB, replace(PLAN, class_floor=6, class_ceiling=6))
    flow.send(packet(BY_NAME["RC_SEND_FIRST"], 0, 1024))
    flow.at(PLAN.valid_until_ns)
    for psn, opcode, number in ((1, "MIDDLE", 6), (2, "LAST", 6), (3, "ONLY", 3)):
        assert flow.send(packet(BY_NAME[f"RC_SEND_{opcode}"], psn, 4)).priority == 8 + number


# ---- whose plan, and which ----


def test_the_plan_of_another_job_has_no_effect(flow: Acting) -> None:
    flow.port(PortFlag.PACE)
    plan = replace(PLAN, class_floor=6, class_ceiling=6, pace=True, rate_Bps=1000)
    for job in (JOB - 1, JOB + 1, 2 * JOB, OTHER_JOB):
        maps.write_plan(flow.fds, job, plan)
    sent = flow.send(packet(SEND_ONLY, 0, 4), tstamp=777)
    assert (sent.priority, sent.tstamp) == (8 + 3, 777)


def plan_records(acting: Acting) -> list[bytes]:
    keys = (struct.pack("<I", JOB * 2 + buffer) for buffer in range(2))
    size = layout.JOB_PLAN.itemsize
    records = [libbpf.map_lookup(acting.fds["plans"], key, size) for key in keys]
    return [record or b"" for record in records]


def job_record(acting: Acting) -> np.void:
    raw = libbpf.map_lookup(
        acting.fds["jobs"], struct.pack("<I", JOB), layout.JOB_SETTINGS.itemsize
    )
    assert raw is not None
    record: np.void = np.frombuffer(raw, layout.JOB_SETTINGS)[0]
    return record


def test_a_plan_is_written_where_no_packet_looks_and_then_switched_to(flow: Acting) -> None:
    flow.job(class_default=2, class_floor=1, class_ceiling=5, pace_Bps=123, gap_ns=456)
    settings_before = job_record(flow)
    for number in (4, 5, 2, 1):
        before, in_force = plan_records(flow), int(job_record(flow)["plan_buffer"])
        maps.write_plan(flow.fds, JOB, replace(PLAN, class_floor=number, class_ceiling=number))
        after, now_in_force = plan_records(flow), int(job_record(flow)["plan_buffer"])
        assert now_in_force == 1 - in_force
        assert after[in_force] == before[in_force]
        assert after[now_in_force] != before[now_in_force]
        for name in ("flags", "class_default", "class_floor", "class_ceiling", "pace_Bps",
                     "gap_ns"):  # fmt: skip
            assert job_record(flow)[name] == settings_before[name]
        assert Sender(flow).send(START_ns) == number


def test_what_stands_in_the_other_buffer_has_no_effect(flow: Acting) -> None:
    maps.write_plan(flow.fds, JOB, replace(PLAN, class_floor=6, class_ceiling=6))
    other = JOB * 2 + 1 - int(job_record(flow)["plan_buffer"])
    junk = b"\xff" * layout.JOB_PLAN.itemsize
    libbpf.map_update(flow.fds["plans"], struct.pack("<I", other), junk)
    assert Sender(flow).send(START_ns) == 6


def test_other_settings_of_a_job_leave_its_plan_in_force(flow: Acting) -> None:
    sender = Sender(flow)
    for number in (6, 5):  # once in each buffer
        plan = replace(PLAN, class_floor=number, class_ceiling=number)
        maps.write_plan(flow.fds, JOB, plan)
        flow.job(class_default=1, class_ceiling=7)
        assert sender.send(START_ns) == number
    maps.write_plan(flow.fds, JOB, None)
    assert sender.send(START_ns) == 1
