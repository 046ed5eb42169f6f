/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Structs and enums that cross the kernel boundary. controller/dataplane/layout.py
 * mirrors them; tests/bpf/test_layout.py compares both, member by member.
 */
#ifndef STELLAR_SHARED_H
#define STELLAR_SHARED_H

/* Changes whenever a struct below changes its meaning or layout: a controller adopts the
 * maps of an earlier one only when both had the same number. */
#define STELLAR_ABI 2

#define STELLAR_MAX_PORTS    64	   /* attached interfaces of one controller */
#define STELLAR_MAX_FLOWS    65536 /* default; the loader may create a larger or smaller table */
#define STELLAR_CLASSES	     8 /* traffic classes, 0 lowest; the highest carries ACK, NAK, CNP */
#define STELLAR_TOP_CLASS    7
#define STELLAR_MAX_JOBS     256   /* job 0: none */
#define STELLAR_MAX_CONTROLS 16384 /* outgoing flows of jobs; slot 0: none */

/* Missing PSN ranges remembered for each flow until they are filled or acknowledged. */
#define PSN_GAP_SLOTS 16

/* Two buckets an octave from 512 ns up; the last one is open (about 5.7 s and more). */
#define RTT_BUCKETS    48
#define RTT_FIRST_LOG2 9

enum direction {
	DIRECTION_INGRESS = 0,
	DIRECTION_EGRESS = 1,
};

/* What became of a frame. Anything but REASON_ROCE passes untouched, only counted. */
enum reason {
	REASON_ROCE = 0,
	REASON_NOT_ROCE,	    /* another protocol or another UDP port */
	REASON_ROCEV1,		    /* ethertype 0x8915 */
	REASON_IP_FRAGMENT,	    /* UDP fragment: no transport header to trust */
	REASON_TRUNCATED,	    /* the frame ends before its headers or its IP length say */
	REASON_BAD_IP,		    /* IP version, header length or total length impossible */
	REASON_TOO_MANY_TAGS,	    /* more than two VLAN tags */
	REASON_TOO_MANY_EXTENSIONS, /* IPv6 extension headers beyond the bound */
	REASON_BAD_UDP_LENGTH,	    /* UDP length beyond IP's, or too short for BTH + ICRC */
	REASON_BAD_BTH,		    /* transport version not 0, or pad longer than the payload */
	REASON_UNKNOWN_OPCODE,
	REASON_FLOW_TABLE_FULL, /* RoCE, but no room for a new flow */
	REASON_MAX,
};

enum kind {
	KIND_SEND = 0,
	KIND_WRITE,
	KIND_READ_REQUEST,
	KIND_READ_RESPONSE,
	KIND_ATOMIC,
	KIND_ATOMIC_ACK,
	KIND_ACK, /* AETH syndrome says ACK */
	KIND_NAK, /* NAK or RNR NAK */
	KIND_CNP,
	KIND_OTHER, /* FLUSH, RD RESYNC */
	KIND_MAX,
};

/* BTH opcode bits 7..5 */
enum transport {
	TRANSPORT_RC = 0,
	TRANSPORT_UC = 1,
	TRANSPORT_RD = 2,
	TRANSPORT_UD = 3,
	TRANSPORT_CNP = 4,
	TRANSPORT_XRC = 5,
};

/* AETH NAK codes (IBTA vol. 1, 9.7.5.2.1) */
enum nak_code {
	NAK_PSN_SEQUENCE = 0,
	NAK_INVALID_REQUEST,
	NAK_REMOTE_ACCESS,
	NAK_REMOTE_OPERATION,
	NAK_INVALID_RD_REQUEST,
	NAK_OTHER, /* reserved codes */
	NAK_MAX,
};

enum pair_state {
	PAIR_UNKNOWN = 0,
	PAIR_INFERRED, /* an acknowledgement's PSN met one request in flight between these hosts */
	PAIR_REGISTRY, /* told by the host's own list of queue pairs */
};

/* One direction of one queue pair as one interface sees it. Addresses are IPv6; an
 * IPv4 one is v4-mapped (::ffff:a.b.c.d). */
struct flow_key {
	__u8 saddr[16];
	__u8 daddr[16];
	__u32 dqpn;
	__u16 port; /* number of the attached interface: ifindex is not unique across namespaces */
	__u8 direction; /* enum direction */
	__u8 pad;
} __attribute__((aligned(8))); /* so that copies go by eight bytes */

struct psn_gap {
	__u32 start;
	__u32 count; /* 0: slot is free */
};

#define FLOW_PSN_VALID	    1  /* next_psn and expected_psn hold */
#define FLOW_SEQUENCE_ERROR 2  /* the responder has NAKed and waits for expected_psn */
#define FLOW_PROBE	    4  /* probe_psn awaits its ACK */
#define FLOW_RESPONSE_VALID 8  /* response_psn holds: a READ response is under way */
#define FLOW_ACKED	    16 /* acked_psn holds */

struct flow_stats {
	struct bpf_spin_lock lock; /* several CPUs may serve one flow: counters stay exact */
	__u8 transport;		   /* enum transport of the first packet */
	__u8 pair_state;	   /* enum pair_state */
	__u8 pmtu_log2;		   /* path MTU, from a FIRST or MIDDLE payload; 0: not seen yet */
	__u8 flags;		   /* FLOW_* */
	__u64 first_ns;
	__u64 last_ns;
	__u64 packets;
	__u64 wire_bytes; /* Ethernet header to ICRC, without FCS */
	__u64 payload_bytes;
	__u64 messages; /* requests complete on the wire, each counted once */
	__u64 kinds[KIND_MAX];
	__u64 ecn[4]; /* by IP ECN codepoint: Not-ECT, ECT(1), ECT(0), CE */
	__u64 fecn;
	__u64 becn;
	__u64 ack_requests;
	__u64 dscp_seen; /* bit n: DSCP n was seen */
	__u64 naks[NAK_MAX];
	__u64 rnr_naks;
	/* order of requests, in PSNs of this direction's sender */
	__u64 gap_packets; /* PSNs jumped over */
	__u64 gap_events;
	__u64 recovered;	    /* first sight of a PSN that had been jumped over */
	__u64 duplicates;	    /* PSNs seen before */
	__u64 capture_loss_packets; /* jumped over, never seen, yet acknowledged */
	__u64 sequence_errors;	    /* a go-back-N responder would NAK here */
	__u64 duplicate_requests;   /* PSNs below what that responder expects */
	__u64 psn_resyncs; /* jumps too wide for a gap: a new life of the queue pair number */
	/* order of READ responses within a message */
	__u64 response_gap_packets;
	__u64 response_duplicates;
	__u64 cut_packets; /* shorter than their IP length says (captures only) */
	__u64 vlan_packets;
	__u64 probe_ns;
	__u64 rtt_count;
	__u64 rtt_sum_ns;
	__u64 rtt_min_ns;
	__u64 rtt_max_ns;
	__u32 next_psn;	    /* one past the highest PSN seen */
	__u32 expected_psn; /* what a go-back-N responder waits for */
	__u32 psn_slack; /* PSNs that an earlier READ of unknown length in packets may have used */
	__u32 acked_psn; /* highest PSN acknowledged by the peer */
	__u32 response_psn; /* next PSN of the READ response under way */
	__u32 probe_psn;
	__u32 peer_qpn;	   /* destination QPN of the opposite direction, see pair_state */
	__u32 source_qpn;  /* DETH source QPN of the last datagram */
	__u32 max_payload; /* largest payload of one packet */
	__u16 sport;	   /* UDP source port of the last packet */
	__u16 vlan_tci;	   /* outer tag of the last tagged packet */
	__u32 sport_changes;
	__u32 epoch;   /* control_epoch when `slot` was looked up */
	__u32 slot;    /* of this outgoing flow in `controls`; 0: belongs to no job */
	__u32 echo_ce; /* ecn[CE] (low 32 bits) when the sender was last told */
	__u64 echo_ns; /* when that was */
	__u64 echoes;  /* how often */
	struct psn_gap gaps[PSN_GAP_SLOTS];
	__u32 rtt_hist[RTT_BUCKETS];
};

/* A request whose ACK is awaited while its queue pair is not paired yet. */
struct inflight_key {
	__u8 saddr[16];
	__u8 daddr[16];
	__u32 psn;
	__u16 port;
	__u8 direction;
	__u8 pad;
};

struct inflight {
	__u64 sent_ns;
	__u32 dqpn;
	__u32 ambiguous; /* two queue pairs of these hosts had this PSN in flight */
};

struct pair {
	__u32 peer_qpn;
	__u32 state; /* enum pair_state */
};

struct flow_event {
	struct flow_key key;
	__u64 first_ns;
	__u32 psn;
	__u8 opcode;
	__u8 pad[3];
};

/* ---- control: written by the controller ---- */

#define PORT_MARK	  1   /* congestion point: mark by the window's average queue */
#define PORT_MARK_INSTANT 2   /* congestion point: mark by the queue of the moment */
#define PORT_ECHO_BECN	  4   /* notification point: BECN in the next ACK */
#define PORT_ECHO_CNP	  8   /* notification point: congestion notification packets */
#define PORT_DCQCN	  16  /* reaction point */
#define PORT_PACE	  32  /* departure times: fq is there */
#define PORT_BY_DSCP	  64  /* class from the packet's DSCP: a forwarder */
#define PORT_CONSUME_CNP  128 /* CNPs end here: rxe does not know them */
#define PORT_DROP_BEYOND  256 /* unreliable packets beyond the horizon are dropped */

struct port_control {
	__u32 flags;	     /* PORT_* */
	__u32 priority_base; /* 0: each class's own; else the leaf of class c is base + c */
	__u64 link_Bps;
	__u64 drain_q24;	/* of the port's virtual queue, bytes per ns << 24 */
	__u64 slot_ns;		/* of the marker's window */
	__u64 horizon_ns;	/* no departure later than this from now */
	__u64 echo_interval_ns; /* at most one echo a flow in it */
};

/* One class on one port. */
struct class_control {
	__u32 priority; /* skb->priority */
	__u32 kmin_bytes;
	__u32 kmax_bytes;
	__u32 pmax_q32;	 /* marking probability at kmax << 32 */
	__u64 drain_q24; /* of the class's virtual queue, bytes per ns << 24 */
	__u8 dscp;
	__u8 pad[7];
};

#define JOB_SET_ECT 1 /* Not-ECT data becomes ECT(0) */
#define JOB_DCQCN   2

struct job_settings {
	__u32 flags; /* JOB_* */
	__u8 class_default;
	__u8 class_floor;
	__u8 class_ceiling;
	__u8 plan_buffer; /* which of the job's two plans holds */
	__u64 pace_Bps;	  /* of all its flows of one port together; 0: as fast as it can */
	__u64 gap_ns;	  /* a pause this long ends an iteration */
};

/* What the agent expects of a job's current iteration. */
struct job_plan {
	__u64 expected_bytes; /* payload, all outgoing flows of this host */
	__u64 window_start_ns;
	__u64 deadline_ns; /* 0: none, the class stays the default */
	__u64 valid_until_ns;
	__u64 rate_Bps;	     /* at which the rest is expected to go: laxity */
	__u64 pace_Bps;	     /* as in job_settings, while this plan holds */
	__u64 predicted_Bps; /* of one flow: start and floor of DCQCN's target rate; 0: unknown */
	__u64 gap_ns;	     /* 0: the job's */
	__u8 class_floor;
	__u8 class_ceiling;
	__u8 pad[6];
};

struct job_progress {
	struct bpf_spin_lock lock; /* the start of an iteration; amounts are atomic */
	__u32 iteration;
	__u64 start_ns;
	__u64 last_ns;
	__u64 bytes; /* payload sent for the first time in this iteration */
};

/* Sent when an iteration begins: what the one before came to. */
struct iteration_event {
	__u32 job;
	__u32 iteration; /* the one that begins */
	__u64 start_ns;
	__u64 previous_start_ns;
	__u64 previous_last_ns;
	__u64 previous_bytes;
};

#define LAXITY_THRESHOLDS (STELLAR_CLASSES - 1)

struct laxity_control {
	__s64 raise_ns[LAXITY_THRESHOLDS]; /* below the i-th, class i + 1 begins; descending */
	__s64 lower_ns[LAXITY_THRESHOLDS]; /* above the i-th, class i + 1 is left */
	__u64 raise_drained;		   /* a flow rises only when all it sent is acknowledged */
};

enum phase {
	PHASE_IDLE = 0, /* the sync window that is expected has not begun */
	PHASE_BEGIN,
	PHASE_MIDDLE, /* also without a plan: plain DCQCN */
	PHASE_END,
	PHASE_MAX,
};

#define DCQCN_PREDICTION 1
#define DCQCN_PHASES	 2

/* Constants of the reaction point on one port; controller/congestion/dcqcn.py has their sources. */
struct dcqcn_control {
	__u64 link_Bps;
	__u64 min_rate_Bps;
	__u64 rate_ai_Bps;
	__u64 rate_hai_Bps;
	__u64 timer_ns;
	__u64 byte_counter;
	__u64 alpha_update_ns;
	__u64 decrease_interval_ns;
	__u64 initial_alpha_q32;
	__u32 g_q32;
	__u32 max_decrease_q24; /* share of the rate that one cut may take << 24 */
	__u32 fast_recovery_steps;
	__u32 flags;		   /* DCQCN_* */
	__u64 first_cut_Bps;	   /* rate that the first cut sets; 0: cut from the rate in force */
	__u32 phase_q8[PHASE_MAX]; /* factor of both increase steps << 8 */
	__u32 begin_q8;		   /* share of the expected bytes that is the beginning << 8 */
	__u32 end_q8;		   /* share where the end begins << 8 */
};

#define CLASS_UNSET 255

/* An outgoing flow of a job. */
struct flow_control {
	struct bpf_spin_lock lock; /* reaction point */
	__u32 job;
	__u8 class;   /* CLASS_UNSET until its first message begins */
	__u8 limited; /* the reaction point is at work: rc_Bps holds */
	__u8 cut_before;
	__u8 phase;	    /* enum phase, of the last increase */
	__u32 iteration;    /* of the job, in which this flow has sent */
	__u64 departure_ns; /* of the next packet at rc_Bps */
	/* reaction point */
	__u64 rc_Bps;
	__u64 rt_Bps;
	__u64 alpha_q32;
	__u64 alpha_ns; /* when alpha was set */
	__u64 cut_ns;
	__u64 expiry_ns; /* next one of the timer */
	__u64 bytes;	 /* since the byte counter's last expiry */
	__u32 timer_stage;
	__u32 byte_stage;
	/* counters */
	__u64 packets;
	__u64 feedback;	  /* CNPs, and ACKs with BECN */
	__u64 suppressed; /* of these, too soon after a cut */
	__u64 cuts;
	__u64 prediction_starts; /* windows begun at the predicted rate */
	__u64 prediction_floors; /* cuts whose target rate the prediction held up */
	__u64 increases[PHASE_MAX];
	__u64 class_changes;
	__u64 class_packets[STELLAR_CLASSES];
	__u64 paced;	      /* packets given a departure time */
	__u64 beyond_horizon; /* of these, brought back to the horizon, or dropped */
	__u64 marked;	      /* CE set here */
};

/* ---- congestion point ---- */

#define MARKER_SLOTS 16 /* a power of two; the queue of the moment stands for the open slot */
/* The class's own virtual queue, and the one that all traffic of the port shares. */
#define MARKERS_PER_PORT (STELLAR_CLASSES + 1)

struct marker {
	struct bpf_spin_lock lock; /* the end of a slot */
	__u32 oldest;		   /* sample that is replaced next */
	__u64 arrived;		   /* bytes, ever */
	/* The virtual queue was base_queue bytes at base_ns, when base_arrived bytes had come. */
	__u64 base_arrived;
	__u64 base_ns;
	__u64 base_queue;
	__u64 slot_end_ns;
	__u64 sum;		     /* of the samples */
	__u64 average;		     /* at the last packet, for reports */
	__u64 queue;		     /* likewise */
	__u32 samples[MARKER_SLOTS]; /* queue at the ends of the last slots */
};

/* What was done on a port, by what. */
enum act {
	ACT_CLASSED = 0, /* packets given a class */
	ACT_REWRITTEN,	 /* of these, DSCP changed */
	ACT_ECT_SET,
	ACT_MARKED,	   /* CE set */
	ACT_NOT_ECT,	   /* would have been marked, but is Not-ECT */
	ACT_WINDOW_ONLY,   /* marked by the average where the moment's queue is below Kmin */
	ACT_WINDOW_SPARED, /* below Kmin on average where the moment's queue is not */
	ACT_ECHO_BECN,
	ACT_ECHO_CNP,
	ACT_ECHO_FAILED, /* no CNP could be built: BECN instead */
	ACT_CNP_CONSUMED,
	ACT_CUT,
	ACT_PACED,
	ACT_BEYOND_HORIZON,
	ACT_PLAN_EXPIRED, /* packets of a job whose plan is over */
	ACT_MAX,
};

/* What replay hands to the program in front of the frame (XDP metadata). */
struct replay_meta {
	__u64 now_ns;
	__u32 wire_len; /* the frame's own length, as the capture's record tells it */
	__u32 pad;
};

/* The clock of the test build. */
struct test_clock {
	__u64 now_ns;
	__u64 step_ns; /* added after each look */
};

#endif
