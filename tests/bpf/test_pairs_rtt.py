"""Acknowledgements: whose requests they answer, how long that took, and what they prove."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pytest

from controller.dataplane import layout
from controller.dataplane.layout import PairState
from tests.hook import Hook, Replay
from tests.packets import (
    ACK,
    BY_NAME,
    NAK_SYNDROME,
    READ_FIRST,
    READ_LAST,
    READ_MIDDLE,
    READ_REQUEST,
    RNR_SYNDROME,
    SEND_ONLY,
    V4,
    WRITE_FIRST,
    Opcode,
    packet,
)

REQUESTER, RESPONDER = V4
REQUEST_QPN, ANSWER_QPN = 0x000A01, 0x000B02
MTU = 1024
SECOND = 1_000_000_000


@dataclass
class Connection:
    """A queue pair whose requests pass one hook and whose answers pass another.

    In a capture both are one hook.
    """

    requests: Hook
    answers: Hook
    request_qpn: int = REQUEST_QPN
    answer_qpn: int = ANSWER_QPN

    def request_frame(
        self, psn: int, opcode: Opcode = SEND_ONLY, ack_req: bool = True, dma_length: int = 0
    ) -> bytes:
        payload = MTU if opcode in (WRITE_FIRST, READ_FIRST) else 4 if opcode.payload else 0
        return packet(
            opcode, psn, payload, dqpn=self.request_qpn, src=REQUESTER, dst=RESPONDER,
            ack_req=ack_req, dma_length=dma_length,
        )  # fmt: skip

    def answer_frame(self, psn: int, opcode: Opcode = ACK, syndrome: int = 0) -> bytes:
        payload = MTU if opcode in (READ_FIRST, READ_MIDDLE) else 0
        return packet(
            opcode, psn, payload, dqpn=self.answer_qpn, src=RESPONDER, dst=REQUESTER,
            syndrome=syndrome,
        )  # fmt: skip

    def request(self, *psns: int, ack_req: bool = True, opcode: Opcode = SEND_ONLY) -> None:
        self.requests.run(*(self.request_frame(psn, opcode, ack_req) for psn in psns))

    def answer(self, psn: int, opcode: Opcode = ACK, syndrome: int = 0) -> None:
        self.answers.run(self.answer_frame(psn, opcode, syndrome))

    def register(self) -> None:
        """What the registry writes when it knows both ends."""
        self.requests.write_pair(self.request_qpn, self.answer_qpn, REQUESTER, RESPONDER)
        self.answers.write_pair(self.answer_qpn, self.request_qpn, RESPONDER, REQUESTER)

    @property
    def flow(self) -> np.void:
        """Counters of the requests."""
        return self.requests.flow(self.request_qpn, REQUESTER, RESPONDER)

    @property
    def answer_flow(self) -> np.void:
        """Counters of the answers."""
        return self.answers.flow(self.answer_qpn, RESPONDER, REQUESTER)


@pytest.fixture(params=["requests come in", "requests go out"])
def connection(request: pytest.FixtureRequest, xdp: Hook, egress: Hook) -> Connection:
    """A connection of which this host is the responder, or the requester."""
    if request.param == "requests come in":
        return Connection(xdp, egress)
    return Connection(egress, xdp)


@pytest.fixture
def paired(connection: Connection) -> Connection:
    """The same, known to the registry."""
    connection.register()
    return connection


# ---- pairs ----


def test_the_registry_pairs_both_directions(paired: Connection) -> None:
    paired.request(1)
    paired.answer(1)
    assert (paired.flow["peer_qpn"], paired.flow["pair_state"]) == (
        ANSWER_QPN,
        PairState.REGISTRY,
    )
    assert (paired.answer_flow["peer_qpn"], paired.answer_flow["pair_state"]) == (
        REQUEST_QPN,
        PairState.REGISTRY,
    )


def test_an_ack_whose_psn_is_in_flight_once_infers_the_pair(connection: Connection) -> None:
    connection.request(700)
    assert connection.flow["pair_state"] == PairState.UNKNOWN
    connection.answer(700)
    assert (connection.flow["peer_qpn"], connection.flow["pair_state"]) == (
        ANSWER_QPN,
        PairState.INFERRED,
    )
    assert (connection.answer_flow["peer_qpn"], connection.answer_flow["pair_state"]) == (
        REQUEST_QPN,
        PairState.INFERRED,
    )


def test_a_request_that_asks_for_no_ack_infers_no_pair(connection: Connection) -> None:
    connection.request(700, ack_req=False)
    connection.answer(700)
    assert connection.answer_flow["pair_state"] == PairState.UNKNOWN


@pytest.mark.parametrize(
    ("request_name", "answer_name"),
    [
        ("RC_RDMA_READ_REQUEST", "RC_RDMA_READ_RESPONSE_ONLY"),
        ("RC_COMPARE_SWAP", "RC_ATOMIC_ACKNOWLEDGE"),
        ("RC_FLUSH", "RC_RDMA_READ_RESPONSE_ONLY"),
        ("XRC_FETCH_ADD", "XRC_ATOMIC_ACKNOWLEDGE"),
    ],
)
def test_reads_and_atomics_are_answered_without_asking(
    request_name: str, answer_name: str, connection: Connection
) -> None:
    connection.request(700, ack_req=False, opcode=BY_NAME[request_name])
    connection.answer(700, BY_NAME[answer_name])
    assert connection.flow["pair_state"] == PairState.INFERRED
    assert connection.flow["rtt_count"] == 1


def test_another_psn_infers_no_pair(connection: Connection) -> None:
    connection.request(700)
    connection.answer(701)
    assert connection.answer_flow["pair_state"] == PairState.UNKNOWN


def test_a_psn_that_two_queue_pairs_have_in_flight_infers_no_pair(
    connection: Connection,
) -> None:
    other = Connection(connection.requests, connection.answers, 0x000A05, 0x000B06)
    for who in (connection, other):
        who.request(700)
    for who in (connection, other):
        who.answer(700)
        assert who.answer_flow["pair_state"] == PairState.UNKNOWN
        assert who.flow["pair_state"] == PairState.UNKNOWN


def test_one_request_is_answered_by_one_queue_pair(connection: Connection) -> None:
    stranger = Connection(connection.requests, connection.answers, 0x000A05, 0x000B06)
    connection.request(700)
    connection.answer(700)
    stranger.answer(700)
    assert connection.answer_flow["pair_state"] == PairState.INFERRED
    assert stranger.answer_flow["pair_state"] == PairState.UNKNOWN


def test_a_repeated_ambiguous_request_stays_ambiguous(connection: Connection) -> None:
    other = Connection(connection.requests, connection.answers, 0x000A05, 0x000B06)
    connection.request(700)
    other.request(700)
    other.request(700)
    connection.answer(700)
    assert connection.answer_flow["pair_state"] == PairState.UNKNOWN


def test_ports_and_directions_of_inferred_pairs_do_not_mix(xdp: Hook, egress: Hook) -> None:
    # Requests and answers both come in: two connections that share a PSN by chance.
    strangers = Connection(xdp, xdp)
    strangers.request(700)
    strangers.answer(700)
    assert strangers.answer_flow["pair_state"] == PairState.UNKNOWN
    elsewhere = Hook(egress.dataplane, egress.function, egress.packet_dtype, port=9)
    strangers = Connection(xdp, elsewhere)
    strangers.request(701)
    strangers.answer(701)
    assert strangers.answer_flow["pair_state"] == PairState.UNKNOWN
    elsewhere.close()


def test_the_registry_wins_over_an_inferred_pair(connection: Connection) -> None:
    wrong = Connection(connection.requests, connection.answers, 0x000A05, ANSWER_QPN)
    wrong.request(700)
    connection.answer(700)
    assert connection.answer_flow["peer_qpn"] == 0x000A05
    connection.register()
    connection.request(701)
    connection.answer(701)
    assert (connection.answer_flow["peer_qpn"], connection.answer_flow["pair_state"]) == (
        REQUEST_QPN,
        PairState.REGISTRY,
    )
    assert (connection.flow["peer_qpn"], connection.flow["pair_state"]) == (
        ANSWER_QPN,
        PairState.REGISTRY,
    )


def test_an_inferred_pair_never_replaces_one_of_the_registry(paired: Connection) -> None:
    paired.request(1)
    paired.answer(1)
    stranger = Connection(paired.requests, paired.answers, REQUEST_QPN, 0x000B06)
    stranger.request(2)
    stranger.answer(2)
    assert (paired.flow["peer_qpn"], paired.flow["pair_state"]) == (
        ANSWER_QPN,
        PairState.REGISTRY,
    )


def test_a_pair_that_the_registry_learns_late_is_taken_up(connection: Connection) -> None:
    for psn in range(200):
        connection.answer(psn)
    assert connection.answer_flow["pair_state"] == PairState.UNKNOWN
    connection.register()
    for psn in range(200, 264):
        connection.answer(psn)
    assert connection.answer_flow["pair_state"] == PairState.REGISTRY


def test_a_paired_response_tells_the_path_mtu_of_reads(paired: Connection) -> None:
    length = 12_000
    paired.requests.run(paired.request_frame(1, READ_REQUEST, dma_length=MTU))
    paired.answer(1, READ_FIRST)
    paired.requests.run(paired.request_frame(2, READ_REQUEST, dma_length=length))
    span = -(-length // MTU)
    paired.request(2 + span + 1)
    assert paired.flow["gap_packets"] == 1


# ---- what an acknowledgement proves ----


def test_a_gap_that_is_acknowledged_without_retransmission_is_capture_loss(
    paired: Connection,
) -> None:
    paired.request(1, 2, 6)
    assert paired.flow["capture_loss_packets"] == 0
    paired.answer(6)
    assert (paired.flow["gap_packets"], paired.flow["capture_loss_packets"]) == (3, 3)
    assert paired.flow["recovered"] == 0
    # The responder is beyond the gap: no sequence error follows from it.
    errors = int(paired.flow["sequence_errors"])
    paired.request(7, 8)
    assert paired.flow["sequence_errors"] == errors
    assert paired.flow["duplicate_requests"] == 0


def test_an_ack_within_a_gap_proves_only_its_first_part(paired: Connection) -> None:
    paired.request(1, 2, 6)
    paired.answer(3)
    assert paired.flow["capture_loss_packets"] == 1
    paired.request(4, 5)
    assert (paired.flow["recovered"], paired.flow["capture_loss_packets"]) == (2, 1)
    paired.answer(6)
    assert paired.flow["capture_loss_packets"] == 1


def test_a_gap_that_was_retransmitted_before_its_ack_is_no_capture_loss(
    paired: Connection,
) -> None:
    paired.request(1, 2, 6)
    paired.answer(2, syndrome=NAK_SYNDROME)
    paired.request(3, 4, 5, 6)
    paired.answer(6)
    assert (paired.flow["capture_loss_packets"], paired.flow["recovered"]) == (0, 3)


def test_a_gap_that_was_acknowledged_already_when_it_was_seen_is_capture_loss(
    paired: Connection,
) -> None:
    paired.request(1)
    paired.answer(4)  # 2 to 4 passed unseen
    paired.request(5)
    assert (paired.flow["gap_packets"], paired.flow["capture_loss_packets"]) == (3, 3)
    assert paired.flow["sequence_errors"] == 0


def test_a_nak_proves_nothing_about_the_gap_it_complains_of(paired: Connection) -> None:
    paired.request(1, 2, 6)
    paired.answer(3, syndrome=NAK_SYNDROME)
    assert paired.flow["capture_loss_packets"] == 0


def test_a_response_acknowledges_like_an_ack(paired: Connection) -> None:
    paired.request(1, 4)
    paired.answer(4, READ_LAST)
    assert paired.flow["capture_loss_packets"] == 2


def test_an_ack_from_a_former_life_proves_nothing(paired: Connection) -> None:
    paired.request(1, 1_000_000, 1_000_005)
    paired.answer(1)
    assert paired.flow["capture_loss_packets"] == 0


def test_after_an_rnr_nak_the_same_request_is_no_duplicate_request(paired: Connection) -> None:
    paired.request(1, 2, 3)
    paired.answer(2, syndrome=RNR_SYNDROME)
    paired.request(2, 3)
    assert paired.flow["duplicates"] == 2
    assert paired.flow["duplicate_requests"] == 0
    assert paired.answer_flow["rnr_naks"] == 1


def test_a_senseless_rnr_nak_does_not_move_the_responder(paired: Connection) -> None:
    paired.request(1, 2)
    paired.answer(0x700000, syndrome=RNR_SYNDROME)
    paired.request(3, 4)
    assert (paired.flow["sequence_errors"], paired.flow["duplicate_requests"]) == (0, 0)


# ---- round trips ----


def test_a_round_trip_lies_between_the_calls_around_it(paired: Connection) -> None:
    before = time.monotonic_ns()
    paired.request(1)
    sent = time.monotonic_ns()
    time.sleep(0.002)
    answered = time.monotonic_ns()
    paired.answer(1)
    after = time.monotonic_ns()
    flow = paired.flow
    assert flow["rtt_count"] == 1
    assert answered - sent <= flow["rtt_sum_ns"] <= after - before
    assert flow["rtt_min_ns"] == flow["rtt_max_ns"] == flow["rtt_sum_ns"]


@pytest.fixture
def capture(replay: Replay) -> Connection:
    """A connection in a capture, where both directions are seen at one point."""
    return Connection(replay, replay)


def exchange(capture: Connection, events: list[tuple[str, int, int]]) -> None:
    """Events are (kind, PSN, time in ns)."""
    replay = capture.requests
    assert isinstance(replay, Replay)
    for kind, psn, now_ns in events:
        replay.run_at(
            now_ns,
            capture.answer_frame(psn, syndrome=NAK_SYNDROME if kind == "nak" else 0)
            if kind in ("ack", "nak")
            else capture.request_frame(psn, ack_req=kind == "request"),
        )


def test_round_trips_are_summed_and_sorted_into_half_octaves(capture: Connection) -> None:
    bounds = layout.rtt_bucket_bounds_ns()
    samples = [0, 1, 511, 512, 767, 768, 1023, 1024, 1535, 1536, 40_000, 67_000_000,
               5_000_000_000, 1 << 40]  # fmt: skip
    samples += [int(bound) + offset for bound in bounds[1:] for offset in (-1, 0)]
    now_ns = SECOND
    for psn, rtt_ns in enumerate(samples):
        exchange(capture, [("request", psn, now_ns), ("ack", psn, now_ns + rtt_ns)])
        now_ns += rtt_ns + 1000
    flow = capture.flow
    assert flow["rtt_count"] == len(samples)
    assert flow["rtt_sum_ns"] == sum(samples)
    assert (flow["rtt_min_ns"], flow["rtt_max_ns"]) == (0, 1 << 40)
    expected = np.bincount(np.searchsorted(bounds, samples, side="right") - 1, minlength=48)
    assert flow["rtt_hist"].tolist() == expected.tolist()


def test_one_request_at_a_time_is_timed(capture: Connection) -> None:
    exchange(
        capture,
        [
            ("request", 1, 1000),
            ("request", 2, 2000),
            ("ack", 1, 5000),
            ("ack", 2, 6000),
            ("request", 3, 7000),
            ("ack", 3, 8500),
        ],
    )
    assert (capture.flow["rtt_count"], capture.flow["rtt_sum_ns"]) == (2, 4000 + 1500)


def test_a_coalesced_ack_times_nothing_but_frees_the_probe(capture: Connection) -> None:
    exchange(
        capture,
        [
            ("request", 1, 1000),
            ("request", 2, 2000),
            ("ack", 2, 6000),
            ("request", 3, 7000),
            ("ack", 3, 9000),
        ],
    )
    assert (capture.flow["rtt_count"], capture.flow["rtt_sum_ns"]) == (1, 2000)


def test_a_retransmitted_request_is_not_timed(capture: Connection) -> None:
    exchange(
        capture,
        [("request", 1, 1000), ("request", 2, 1500), ("request", 1, 90_000), ("ack", 1, 91_000)],
    )
    assert capture.flow["rtt_count"] == 0


def test_the_retransmitted_last_request_is_not_timed(capture: Connection) -> None:
    exchange(capture, [("request", 1, 1000), ("request", 1, 90_000), ("ack", 1, 91_000)])
    assert capture.flow["rtt_count"] == 0
    exchange(capture, [("request", 2, 100_000), ("ack", 2, 103_000)])
    assert (capture.flow["rtt_count"], capture.flow["rtt_sum_ns"]) == (1, 3000)


def test_a_late_request_is_not_timed(capture: Connection) -> None:
    # Its first copy may have passed unseen.
    exchange(capture, [("quiet", 1, 0), ("quiet", 3, 10), ("request", 2, 20), ("ack", 2, 90)])
    assert capture.flow["rtt_count"] == 0


def test_a_retransmission_of_earlier_requests_spoils_the_probe(capture: Connection) -> None:
    # The ACK of 5 may come from either round of go-back-N.
    exchange(
        capture,
        [("quiet", 3, 1), ("request", 5, 2), ("quiet", 4, 3), ("request", 5, 4), ("ack", 5, 9)],
    )
    assert capture.flow["rtt_count"] == 0


def test_a_nak_times_nothing(capture: Connection) -> None:
    exchange(capture, [("request", 1, 1000), ("nak", 1, 2000)])
    assert capture.flow["rtt_count"] == 0


def test_a_clock_that_steps_back_times_nothing(capture: Connection) -> None:
    exchange(capture, [("request", 1, 5000), ("ack", 1, 4000)])
    assert capture.flow["rtt_count"] == 0


def test_a_read_is_timed_by_the_first_packet_of_its_response(capture: Connection) -> None:
    replay = capture.requests
    assert isinstance(replay, Replay)
    replay.run_at(500, capture.request_frame(9, WRITE_FIRST, ack_req=False))
    replay.run_at(1000, capture.request_frame(10, READ_REQUEST, False, dma_length=3 * MTU))
    replay.run_at(8000, capture.answer_frame(10, READ_FIRST))
    replay.run_at(8500, capture.answer_frame(11, READ_MIDDLE))
    replay.run_at(9000, capture.answer_frame(12, READ_LAST))
    assert (capture.flow["rtt_count"], capture.flow["rtt_sum_ns"]) == (1, 7000)


def test_an_unreliable_connection_has_no_round_trip(capture: Connection) -> None:
    replay = capture.requests
    assert isinstance(replay, Replay)
    replay.run_at(1, capture.request_frame(1, BY_NAME["UC_SEND_ONLY"]))
    replay.run_at(2, capture.answer_frame(1))
    assert capture.flow["rtt_count"] == 0
    assert capture.answer_flow["pair_state"] == PairState.UNKNOWN


def test_a_request_of_long_ago_infers_no_pair(capture: Connection) -> None:
    exchange(capture, [("request", 700, SECOND), ("ack", 700, 3 * SECOND)])
    assert capture.answer_flow["pair_state"] == PairState.UNKNOWN


def test_an_old_request_of_another_queue_pair_makes_no_new_one_ambiguous(
    capture: Connection,
) -> None:
    other = Connection(capture.requests, capture.answers, 0x000A05, 0x000B06)
    exchange(other, [("request", 700, SECOND)])
    exchange(capture, [("request", 700, 3 * SECOND), ("ack", 700, 3 * SECOND + 9)])
    assert capture.flow["peer_qpn"] == ANSWER_QPN
