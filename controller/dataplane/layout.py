"""numpy mirror of ``bpf/shared.h``: what the kernel writes and Python reads.

``tests/bpf/test_layout.py`` compares every member's offset and size with what the
compiler says.
"""

from __future__ import annotations

import enum

import numpy as np

ABI = 2
MAX_PORTS = 64
MAX_FLOWS = 65536
PSN_GAP_SLOTS = 16
RTT_BUCKETS = 48
RTT_FIRST_LOG2 = 9
CLASSES = 8
TOP_CLASS = 7
MAX_JOBS = 256
MAX_CONTROLS = 16384
CLASS_UNSET = 255
MARKER_SLOTS = 16
MARKERS_PER_PORT = CLASSES + 1


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


class PortFlag(enum.IntFlag):
    """What is done on a port."""

    MARK = 1
    MARK_INSTANT = 2
    ECHO_BECN = 4
    ECHO_CNP = 8
    DCQCN = 16
    PACE = 32
    BY_DSCP = 64
    CONSUME_CNP = 128
    DROP_BEYOND = 256


class JobFlag(enum.IntFlag):
    """What is done to a job's packets."""

    SET_ECT = 1
    DCQCN = 2


class DcqcnFlag(enum.IntFlag):
    """Changes to DCQCN that are switched on."""

    PREDICTION = 1
    PHASES = 2


class PhaseNumber(enum.IntEnum):
    """Where in its sync window a job is."""

    IDLE = 0
    BEGIN = 1
    MIDDLE = 2
    END = 3


class Act(enum.IntEnum):
    """What was done to packets of a port."""

    CLASSED = 0
    REWRITTEN = 1
    ECT_SET = 2
    MARKED = 3
    NOT_ECT = 4
    WINDOW_ONLY = 5
    WINDOW_SPARED = 6
    ECHO_BECN = 7
    ECHO_CNP = 8
    ECHO_FAILED = 9
    CNP_CONSUMED = 10
    CUT = 11
    PACED = 12
    BEYOND_HORIZON = 13
    PLAN_EXPIRED = 14


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
        ("epoch", "<u4"),
        ("slot", "<u4"),
        ("echo_ce", "<u4"),
        ("echo_ns", "<u8"),
        ("echoes", "<u8"),
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
TEST_CLOCK = np.dtype([("now_ns", "<u8"), ("step_ns", "<u8")])

PORT_CONTROL = np.dtype(
    [
        ("flags", "<u4"),
        ("priority_base", "<u4"),
        ("link_Bps", "<u8"),
        ("drain_q24", "<u8"),
        ("slot_ns", "<u8"),
        ("horizon_ns", "<u8"),
        ("echo_interval_ns", "<u8"),
    ]
)
CLASS_CONTROL = np.dtype(
    [
        ("priority", "<u4"),
        ("kmin_bytes", "<u4"),
        ("kmax_bytes", "<u4"),
        ("pmax_q32", "<u4"),
        ("drain_q24", "<u8"),
        ("dscp", "u1"),
        ("pad", "u1", 7),
    ]
)
JOB_SETTINGS = np.dtype(
    [
        ("flags", "<u4"),
        ("class_default", "u1"),
        ("class_floor", "u1"),
        ("class_ceiling", "u1"),
        ("plan_buffer", "u1"),
        ("pace_Bps", "<u8"),
        ("gap_ns", "<u8"),
    ]
)
JOB_PLAN = np.dtype(
    [
        ("expected_bytes", "<u8"),
        ("window_start_ns", "<u8"),
        ("deadline_ns", "<u8"),
        ("valid_until_ns", "<u8"),
        ("rate_Bps", "<u8"),
        ("pace_Bps", "<u8"),
        ("predicted_Bps", "<u8"),
        ("gap_ns", "<u8"),
        ("class_floor", "u1"),
        ("class_ceiling", "u1"),
        ("pad", "u1", 6),
    ]
)
JOB_PROGRESS = np.dtype(
    [
        ("lock", "<u4"),
        ("iteration", "<u4"),
        ("start_ns", "<u8"),
        ("last_ns", "<u8"),
        ("bytes", "<u8"),
    ]
)
ITERATION_EVENT = np.dtype(
    [
        ("job", "<u4"),
        ("iteration", "<u4"),
        ("start_ns", "<u8"),
        ("previous_start_ns", "<u8"),
        ("previous_last_ns", "<u8"),
        ("previous_bytes", "<u8"),
    ]
)
LAXITY_CONTROL = np.dtype(
    [
        ("raise_ns", "<i8", CLASSES - 1),
        ("lower_ns", "<i8", CLASSES - 1),
        ("raise_drained", "<u8"),
    ]
)
DCQCN_CONTROL = np.dtype(
    [
        ("link_Bps", "<u8"),
        ("min_rate_Bps", "<u8"),
        ("rate_ai_Bps", "<u8"),
        ("rate_hai_Bps", "<u8"),
        ("timer_ns", "<u8"),
        ("byte_counter", "<u8"),
        ("alpha_update_ns", "<u8"),
        ("decrease_interval_ns", "<u8"),
        ("initial_alpha_q32", "<u8"),
        ("g_q32", "<u4"),
        ("max_decrease_q24", "<u4"),
        ("fast_recovery_steps", "<u4"),
        ("flags", "<u4"),
        ("first_cut_Bps", "<u8"),
        ("phase_q8", "<u4", len(PhaseNumber)),
        ("begin_q8", "<u4"),
        ("end_q8", "<u4"),
    ]
)
FLOW_CONTROL = np.dtype(
    [
        ("lock", "<u4"),
        ("job", "<u4"),
        ("class", "u1"),
        ("limited", "u1"),
        ("cut_before", "u1"),
        ("phase", "u1"),
        ("iteration", "<u4"),
        ("departure_ns", "<u8"),
        ("rc_Bps", "<u8"),
        ("rt_Bps", "<u8"),
        ("alpha_q32", "<u8"),
        ("alpha_ns", "<u8"),
        ("cut_ns", "<u8"),
        ("expiry_ns", "<u8"),
        ("bytes", "<u8"),
        ("timer_stage", "<u4"),
        ("byte_stage", "<u4"),
        ("packets", "<u8"),
        ("feedback", "<u8"),
        ("suppressed", "<u8"),
        ("cuts", "<u8"),
        ("prediction_starts", "<u8"),
        ("prediction_floors", "<u8"),
        ("increases", "<u8", len(PhaseNumber)),
        ("class_changes", "<u8"),
        ("class_packets", "<u8", CLASSES),
        ("paced", "<u8"),
        ("beyond_horizon", "<u8"),
        ("marked", "<u8"),
    ]
)
MARKER = np.dtype(
    [
        ("lock", "<u4"),
        ("oldest", "<u4"),
        ("arrived", "<u8"),
        ("base_arrived", "<u8"),
        ("base_ns", "<u8"),
        ("base_queue", "<u8"),
        ("slot_end_ns", "<u8"),
        ("sum", "<u8"),
        ("average", "<u8"),
        ("queue", "<u8"),
        ("samples", "<u4", MARKER_SLOTS),
    ]
)


def rtt_bucket_bounds_ns() -> np.ndarray:
    """Lower bounds of the RTT histogram's buckets, shape (RTT_BUCKETS,), in ns.

    Two buckets an octave; the first one holds everything below 768 ns, too.
    """
    octave = np.arange(RTT_BUCKETS) // 2 + RTT_FIRST_LOG2
    half = np.arange(RTT_BUCKETS) % 2
    bounds = (1 << octave) + half * (1 << (octave - 1))
    bounds[0] = 0
    return bounds
