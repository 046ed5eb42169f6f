"""numpy mirror of ``bpf/shared.h``: what the kernel writes and Python reads.

``tests/bpf/test_layout.py`` compares every member's offset and size with what the
compiler says.
"""

from __future__ import annotations

import enum

import numpy as np

ABI = 1
MAX_PORTS = 64
MAX_FLOWS = 65536
PSN_GAP_SLOTS = 16
RTT_BUCKETS = 48
RTT_FIRST_LOG2 = 9


class Direction(enum.IntEnum):
    """Hook at which a flow was seen."""

    INGRESS = 0
    EGRESS = 1


class Reason(enum.IntEnum):
    """What became of a frame."""

    ROCE = 0
    NOT_ROCE = 1
    ROCEV1 = 2
    IP_FRAGMENT = 3
    TRUNCATED = 4
    BAD_IP = 5
    TOO_MANY_TAGS = 6
    TOO_MANY_EXTENSIONS = 7
    BAD_UDP_LENGTH = 8
    BAD_BTH = 9
    UNKNOWN_OPCODE = 10
    FLOW_TABLE_FULL = 11


class Kind(enum.IntEnum):
    """Kinds of packets."""

    SEND = 0
    WRITE = 1
    READ_REQUEST = 2
    READ_RESPONSE = 3
    ATOMIC = 4
    ATOMIC_ACK = 5
    ACK = 6
    NAK = 7
    CNP = 8
    OTHER = 9


class Transport(enum.IntEnum):
    """BTH opcode bits 7..5."""

    RC = 0
    UC = 1
    RD = 2
    UD = 3
    CNP = 4
    XRC = 5


class NakCode(enum.IntEnum):
    """AETH NAK codes."""

    PSN_SEQUENCE = 0
    INVALID_REQUEST = 1
    REMOTE_ACCESS = 2
    REMOTE_OPERATION = 3
    INVALID_RD_REQUEST = 4
    OTHER = 5


class PairState(enum.IntEnum):
    """How the opposite direction of a flow is known."""

    UNKNOWN = 0
    INFERRED = 1
    REGISTRY = 2


PSN_GAP = np.dtype([("start", "<u4"), ("count", "<u4")])

FLOW_KEY = np.dtype(
    [
        ("saddr", "u1", 16),
        ("daddr", "u1", 16),
        ("dqpn", "<u4"),
        ("port", "<u2"),
        ("direction", "u1"),
        ("pad", "u1"),
    ]
)

FLOW_STATS = np.dtype(
    [
        ("lock", "<u4"),
        ("transport", "u1"),
        ("pair_state", "u1"),
        ("pmtu_log2", "u1"),
        ("flags", "u1"),
        ("first_ns", "<u8"),
        ("last_ns", "<u8"),
        ("packets", "<u8"),
        ("wire_bytes", "<u8"),
        ("payload_bytes", "<u8"),
        ("messages", "<u8"),
        ("kinds", "<u8", len(Kind)),
        ("ecn", "<u8", 4),
        ("fecn", "<u8"),
        ("becn", "<u8"),
        ("ack_requests", "<u8"),
        ("dscp_seen", "<u8"),
        ("naks", "<u8", len(NakCode)),
        ("rnr_naks", "<u8"),
        ("gap_packets", "<u8"),
        ("gap_events", "<u8"),
        ("recovered", "<u8"),
        ("duplicates", "<u8"),
        ("capture_loss_packets", "<u8"),
        ("sequence_errors", "<u8"),
        ("duplicate_requests", "<u8"),
        ("psn_resyncs", "<u8"),
        ("response_gap_packets", "<u8"),
        ("response_duplicates", "<u8"),
        ("cut_packets", "<u8"),
        ("vlan_packets", "<u8"),
        ("probe_ns", "<u8"),
        ("rtt_count", "<u8"),
        ("rtt_sum_ns", "<u8"),
        ("rtt_min_ns", "<u8"),
        ("rtt_max_ns", "<u8"),
        ("next_psn", "<u4"),
        ("expected_psn", "<u4"),
        ("psn_slack", "<u4"),
        ("acked_psn", "<u4"),
        ("response_psn", "<u4"),
        ("probe_psn", "<u4"),
        ("peer_qpn", "<u4"),
        ("source_qpn", "<u4"),
        ("max_payload", "<u4"),
        ("sport", "<u2"),
        ("vlan_tci", "<u2"),
        ("sport_changes", "<u4"),
        ("pad", "<u4"),
        ("gaps", PSN_GAP, PSN_GAP_SLOTS),
        ("rtt_hist", "<u4", RTT_BUCKETS),
    ]
)

INFLIGHT_KEY = np.dtype(
    [
        ("saddr", "u1", 16),
        ("daddr", "u1", 16),
        ("psn", "<u4"),
        ("port", "<u2"),
        ("direction", "u1"),
        ("pad", "u1"),
    ]
)
INFLIGHT = np.dtype([("sent_ns", "<u8"), ("dqpn", "<u4"), ("ambiguous", "<u4")])
PAIR = np.dtype([("peer_qpn", "<u4"), ("state", "<u4")])
FLOW_EVENT = np.dtype(
    [("key", FLOW_KEY), ("first_ns", "<u8"), ("psn", "<u4"), ("opcode", "u1"), ("pad", "u1", 3)]
)
REPLAY_META = np.dtype([("now_ns", "<u8"), ("wire_len", "<u4"), ("pad", "<u4")])


def rtt_bucket_bounds_ns() -> np.ndarray:
    """Lower bounds of the RTT histogram's buckets, shape (RTT_BUCKETS,), in ns.

    Two buckets an octave; the first one holds everything below 768 ns, too.
    """
    octave = np.arange(RTT_BUCKETS) // 2 + RTT_FIRST_LOG2
    half = np.arange(RTT_BUCKETS) % 2
    bounds = (1 << octave) + half * (1 << (octave - 1))
    bounds[0] = 0
    return bounds
