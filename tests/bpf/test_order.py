"""PSN order of a flow: gaps, late and repeated packets, and what a responder makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from controller.dataplane.layout import PSN_GAP_SLOTS
from tests.hook import Hook
from tests.packets import (
    ACK,
    BY_NAME,
    READ_FIRST,
    READ_LAST,
    READ_MIDDLE,
    READ_ONLY,
    READ_REQUEST,
    SEND_LAST,
    SEND_MIDDLE,
    SEND_ONLY,
    WRITE_FIRST,
    WRITE_ONLY,
    Opcode,
    packet,
)

MTU = 1024
COUNTERS = (
    "gap_packets",
    "gap_events",
    "recovered",
    "duplicates",
    "sequence_errors",
    "duplicate_requests",
    "capture_loss_packets",
    "psn_resyncs",
)


def counters(flow: np.void, *names: str) -> dict[str, int]:
    """Order counters that are not zero, or the named ones."""
    values = {name: int(flow[name]) for name in names or COUNTERS}
    return values if names else {name: value for name, value in values.items() if value}


def sends(hook: Hook, psns: Sequence[int], opcode: Opcode = SEND_ONLY) -> np.void:
    """Run one packet for each PSN, return the flow."""
    hook.run(*(packet(opcode, psn, 4) for psn in psns))
    return hook.flow()


def test_packets_in_order_raise_no_counter(hook: Hook) -> None:
    assert counters(sends(hook, range(100, 140))) == {}


@pytest.mark.parametrize("first", [0xFFFFFF, 0xFFFFF0, 0x7FFFF8, 0])
def test_order_holds_across_the_wrap_of_psns(first: int, hook: Hook) -> None:
    flow = sends(hook, [(first + step) & 0xFFFFFF for step in range(20)])
    assert counters(flow) == {}
    assert flow["next_psn"] == (first + 20) & 0xFFFFFF


def test_a_gap_across_the_wrap_is_counted_and_filled(hook: Hook) -> None:
    flow = sends(hook, [0xFFFFFD, 2])
    assert counters(flow) == {"gap_packets": 4, "gap_events": 1, "sequence_errors": 1}
    flow = sends(hook, [0xFFFFFE, 0xFFFFFF, 0, 1])
    assert counters(flow, "recovered", "duplicates") == {"recovered": 4, "duplicates": 0}


def test_jumped_psns_are_a_gap(hook: Hook) -> None:
    flow = sends(hook, [1, 2, 5, 6, 8])
    assert counters(flow, "gap_packets", "gap_events") == {"gap_packets": 3, "gap_events": 2}


def test_the_first_sight_of_a_jumped_psn_recovers_it_and_the_second_is_a_duplicate(
    hook: Hook,
) -> None:
    flow = sends(hook, [1, 5])
    assert (flow["gap_packets"], flow["recovered"]) == (3, 0)
    flow = sends(hook, [3, 2, 4])  # from the middle first: the gap is split
    assert (flow["recovered"], flow["duplicates"]) == (3, 0)
    flow = sends(hook, [3, 2, 4, 5, 1])
    assert (flow["recovered"], flow["duplicates"]) == (3, 5)


def test_a_late_last_packet_completes_its_message_once(hook: Hook) -> None:
    hook.run(packet(SEND_MIDDLE, 1, MTU), packet(SEND_ONLY, 3, 4))
    assert hook.flow()["messages"] == 1
    hook.run(packet(SEND_LAST, 2, 4), packet(SEND_LAST, 2, 4))
    assert hook.flow()["messages"] == 2


def test_go_back_n_after_one_lost_packet_is_one_sequence_error(hook: Hook) -> None:
    # 3 is lost; the responder NAKs once at 4 and drops all until 3 comes again.
    flow = sends(hook, [1, 2, 4, 5, 6, 7, 3, 4, 5, 6, 7, 8])
    assert counters(flow) == {
        "gap_packets": 1,
        "gap_events": 1,
        "recovered": 1,
        "duplicates": 4,
        "sequence_errors": 1,
    }


def test_a_retransmission_after_a_lost_ack_is_a_duplicate_request(hook: Hook) -> None:
    flow = sends(hook, [1, 2, 3, 2, 3, 4])
    assert counters(flow) == {"duplicates": 2, "duplicate_requests": 2}


def test_a_second_loss_after_recovery_is_a_second_sequence_error(hook: Hook) -> None:
    flow = sends(hook, [1, 3, 2, 3, 4, 6, 5, 6])
    assert counters(flow, "sequence_errors", "duplicate_requests") == {
        "sequence_errors": 2,
        "duplicate_requests": 0,
    }


@pytest.mark.parametrize("jump", [65537, -65538, 1 << 23])
def test_a_huge_jump_is_a_new_life_and_no_loss(jump: int, hook: Hook) -> None:
    flow = sends(hook, [1000, (1001 + jump) & 0xFFFFFF, (1002 + jump) & 0xFFFFFF])
    assert counters(flow) == {"psn_resyncs": 1}
    assert flow["messages"] == 3


@pytest.mark.parametrize("jump", [65536, 1000])
def test_a_jump_within_a_window_is_a_gap(jump: int, hook: Hook) -> None:
    flow = sends(hook, [1000, 1001 + jump])
    assert counters(flow, "gap_packets", "psn_resyncs") == {"gap_packets": jump, "psn_resyncs": 0}


def test_old_gaps_do_not_outlive_a_resync(hook: Hook) -> None:
    sends(hook, [10, 20, 1_000_000])
    flow = sends(hook, [999_995])
    assert (flow["recovered"], flow["duplicates"]) == (0, 1)


@pytest.mark.parametrize("name", ["UD_SEND_ONLY", "RD_SEND_ONLY"])
def test_datagrams_have_no_order(name: str, hook: Hook) -> None:
    assert counters(sends(hook, [5, 9, 2, 2, 1 << 20], BY_NAME[name])) == {}


def test_an_unreliable_connection_has_gaps_but_no_responder_that_complains(hook: Hook) -> None:
    flow = sends(hook, [1, 2, 5, 6, 9, 5], BY_NAME["UC_SEND_ONLY"])
    assert counters(flow) == {"gap_packets": 4, "gap_events": 2, "duplicates": 1}


def test_an_extended_reliable_connection_is_ordered(hook: Hook) -> None:
    flow = sends(hook, [1, 3, 2], BY_NAME["XRC_SEND_ONLY"])
    assert counters(flow, "gap_packets", "recovered", "sequence_errors") == {
        "gap_packets": 1,
        "recovered": 1,
        "sequence_errors": 1,
    }


def test_answers_are_not_part_of_the_order_of_requests(hook: Hook) -> None:
    sends(hook, [1, 2])
    hook.run(packet(ACK, 900), packet(READ_ONLY, 77, 4), packet(BY_NAME["CNP"], 0))
    assert counters(sends(hook, [3])) == {}


def test_an_atomic_uses_one_psn(hook: Hook) -> None:
    hook.run(*(packet(BY_NAME[f"RC_{name}"], psn) for psn, name in enumerate(
        ["COMPARE_SWAP", "FETCH_ADD", "ATOMIC_WRITE", "FLUSH", "COMPARE_SWAP"]
    )))  # fmt: skip
    assert counters(hook.flow()) == {}
    assert hook.flow()["messages"] == 5


# ---- READ requests: one PSN for each packet of the response ----


def read(psn: int, length: int) -> bytes:
    return packet(READ_REQUEST, psn, dma_length=length)


@pytest.mark.parametrize(
    ("length", "span"), [(0, 1), (1, 1), (MTU, 1), (MTU + 1, 2), (10 * MTU, 10), (1 << 20, 1024)]
)
def test_a_read_uses_a_psn_for_each_packet_of_its_response(
    length: int, span: int, hook: Hook
) -> None:
    hook.run(packet(WRITE_FIRST, 9, MTU), read(10, length), packet(SEND_ONLY, 10 + span, 4))
    assert counters(hook.flow()) == {}
    hook.run(read(11 + span, length), packet(SEND_ONLY, 12 + 2 * span, 4))
    assert counters(hook.flow(), "gap_packets") == {"gap_packets": 1}


@pytest.mark.parametrize("span", [3, 4, 9, 48])
def test_a_read_of_unknown_path_mtu_is_no_loss_whatever_the_mtu_is(span: int, hook: Hook) -> None:
    # 12,000 bytes are 3 packets of 4096 bytes, or 47 of 256.
    hook.run(read(10, 12_000), packet(SEND_ONLY, 10 + min(span, 47), 4))
    assert counters(hook.flow()) == {}
    hook.run(packet(SEND_ONLY, 11 + min(span, 47), 4))
    assert counters(hook.flow()) == {}


def test_a_loss_behind_a_read_of_unknown_path_mtu_counts_what_is_certain(hook: Hook) -> None:
    hook.run(read(10, 12_000), packet(SEND_ONLY, 10 + 47 + 2, 4))
    assert counters(hook.flow(), "gap_packets") == {"gap_packets": 2}


def test_the_largest_payload_seen_narrows_an_unknown_path_mtu(hook: Hook) -> None:
    # A payload of 3000 bytes needs a path MTU of 4096: 12,000 bytes are 3 packets.
    hook.run(packet(SEND_ONLY, 9, 3000 if hook.is_xdp else 2900))
    hook.run(read(10, 12_000), packet(SEND_ONLY, 14, 4))
    assert counters(hook.flow(), "gap_packets") == {"gap_packets": 1}


def test_a_lost_read_that_comes_again_leaves_nothing_missing(hook: Hook) -> None:
    hook.run(packet(WRITE_FIRST, 9, MTU), packet(SEND_ONLY, 14, 4))
    assert hook.flow()["gap_packets"] == 4
    hook.run(read(10, 4 * MTU), packet(SEND_ONLY, 14, 4), packet(SEND_ONLY, 15, 4))
    assert counters(hook.flow()) == {
        "gap_packets": 4,
        "gap_events": 1,
        "recovered": 4,
        "duplicates": 1,
        "sequence_errors": 1,
    }
    assert not hook.flow()["gaps"]["count"].any()


def test_a_read_resumed_midway_is_a_duplicate_request(hook: Hook) -> None:
    # The requester has the first two packets and asks for the rest again (9.7.5.1.2).
    hook.run(packet(WRITE_FIRST, 9, MTU), read(10, 4 * MTU), read(12, 2 * MTU))
    assert counters(hook.flow()) == {"duplicates": 1, "duplicate_requests": 1}
    assert hook.flow()["messages"] == 1
    hook.run(packet(SEND_ONLY, 14, 4))
    assert counters(hook.flow(), "gap_packets", "sequence_errors") == {
        "gap_packets": 0,
        "sequence_errors": 0,
    }


# ---- READ responses ----


def test_responses_in_order_raise_no_counter(hook: Hook) -> None:
    hook.run(
        packet(READ_FIRST, 0xFFFFFF, MTU), packet(READ_MIDDLE, 0, MTU), packet(READ_LAST, 1, 4),
        packet(READ_ONLY, 2, 4), packet(READ_FIRST, 9, MTU), packet(READ_LAST, 10, 4),
    )  # fmt: skip
    assert counters(hook.flow(), "response_gap_packets", "response_duplicates") == {
        "response_gap_packets": 0,
        "response_duplicates": 0,
    }
    assert counters(hook.flow()) == {}


def test_a_hole_in_a_response_is_counted(hook: Hook) -> None:
    hook.run(packet(READ_FIRST, 5, MTU), packet(READ_MIDDLE, 8, MTU), packet(READ_LAST, 11, 4))
    assert hook.flow()["response_gap_packets"] == 4


def test_a_repeated_part_of_a_response_is_counted(hook: Hook) -> None:
    hook.run(
        packet(READ_FIRST, 5, MTU), packet(READ_MIDDLE, 6, MTU), packet(READ_MIDDLE, 6, MTU),
        packet(READ_LAST, 7, 4),
    )  # fmt: skip
    assert counters(hook.flow(), "response_gap_packets", "response_duplicates") == {
        "response_gap_packets": 0,
        "response_duplicates": 1,
    }


def test_a_capture_that_begins_within_a_response_has_no_hole(hook: Hook) -> None:
    hook.run(packet(READ_MIDDLE, 500, MTU), packet(READ_MIDDLE, 501, MTU))
    assert hook.flow()["response_gap_packets"] == 0


# ---- against a model ----


@dataclass(frozen=True)
class Request:
    """A request of `span` PSNs; PSNs here do not wrap."""

    psn: int
    span: int
    is_read: bool
    ends: bool

    def frame(self, base: int) -> bytes:
        if self.is_read:
            length = self.span * MTU - 3
            return packet(READ_REQUEST, base + self.psn, dma_length=length)
        return packet(WRITE_ONLY if self.ends else SEND_MIDDLE, base + self.psn, MTU)


@dataclass
class Observer:
    """What an omniscient observer counts: it remembers every PSN it has seen."""

    next: int
    missing: set[int] = field(default_factory=set)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys((*COUNTERS[:4], "messages", "packets"), 0)
    )
    most_holes: int = 0

    def see(self, request: Request) -> None:
        self.counts["packets"] += 1
        if request.psn >= self.next:
            jumped = range(self.next, request.psn)
            self.missing.update(jumped)
            self.counts["gap_packets"] += len(jumped)
            self.counts["gap_events"] += bool(jumped)
            self.next = request.psn + request.span
        else:
            found = self.missing.intersection(range(request.psn, request.psn + request.span))
            self.missing -= found
            self.counts["recovered"] += len(found)
            self.counts["duplicates"] += not found
            if not found:
                return
        self.counts["messages"] += request.ends
        holes = sum(psn - 1 not in self.missing for psn in self.missing)
        self.most_holes = max(self.most_holes, holes)


@dataclass
class Responder:
    """The responder of IBTA vol. 1, 9.7.5: one expected PSN, one NAK for each loss."""

    expected: int
    nak_sent: bool = False
    sequence_errors: int = 0
    duplicate_requests: int = 0

    def receive(self, request: Request) -> None:
        if request.psn == self.expected:
            self.expected += request.span
            self.nak_sent = False
        elif request.psn < self.expected:
            self.duplicate_requests += 1
        elif not self.nak_sent:
            self.nak_sent = True
            self.sequence_errors += 1


def arrivals(random: Random, length: int) -> list[Request]:
    """Requests of a connection in the order in which a lossy network delivers them."""
    # The first one tells the path MTU.
    requests, psn = [Request(0, 1, False, False)], 1
    for _ in range(length - 1):
        is_read = random.random() < 0.3
        span = random.randint(1, 6) if is_read else 1
        requests.append(Request(psn, span, is_read, is_read or random.random() < 0.5))
        psn += span
    delivered, at = [requests[0]], 1
    while at < length and len(delivered) < 4 * length:
        request, fate = requests[at], random.random()
        at += 1
        if fate < 0.12:
            continue  # lost
        delivered.append(request)
        if fate < 0.18:
            delivered.append(request)  # duplicated
        elif fate < 0.26 and len(delivered) > 2:
            delivered[-2:] = reversed(delivered[-2:])  # overtaken
        elif fate < 0.36:
            at = random.randrange(max(1, at - 8), at)  # the sender goes back
        elif fate < 0.42:
            reads = [r for r in requests[1:at] if r.span > 1]
            if reads:  # a READ is resumed behind the part that has come
                whole = random.choice(reads)
                skip = random.randrange(1, whole.span)
                rest = Request(whole.psn + skip, whole.span - skip, True, True)
                delivered.append(rest)
    return delivered


@settings(
    max_examples=300,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(
    seed=st.integers(0, 1 << 48),
    length=st.integers(2, 60),
    base=st.sampled_from([0, 1000, 0xFFFFFF, 0xFFFFE0, 0x7FFFF0]),
)
def test_any_order_is_counted_as_the_models_count_it(
    seed: int, length: int, base: int, xdp: Hook
) -> None:
    delivered = arrivals(Random(seed), length)
    first = delivered[0]
    observer = Observer(next=first.psn + first.span)
    observer.counts["packets"] = 1
    observer.counts["messages"] = first.ends
    responder = Responder(expected=first.psn + first.span)
    for request in delivered[1:]:
        observer.see(request)
        responder.receive(request)
    # A flow remembers so many holes; with more it may take a late packet for a duplicate.
    assume(observer.most_holes <= PSN_GAP_SLOTS)

    xdp.forget()
    xdp.run(*(request.frame(base) for request in delivered))
    flow = xdp.flow()
    assert {name: int(flow[name]) for name in observer.counts} == observer.counts
    assert flow["sequence_errors"] == responder.sequence_errors
    assert flow["duplicate_requests"] == responder.duplicate_requests
    assert flow["next_psn"] == (base + observer.next) & 0xFFFFFF
    assert flow["expected_psn"] == (base + responder.expected) & 0xFFFFFF
    assert flow["gaps"]["count"].sum() == len(observer.missing)
