/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Structs and enums that cross the kernel boundary. controller/dataplane/layout.py
 * mirrors them; tests/bpf/test_layout.py compares both, member by member.
 */
#ifndef STELLAR_SHARED_H
#define STELLAR_SHARED_H

/* Changes whenever a struct below changes its meaning or layout: a controller adopts the
 * maps of an earlier one only when both had the same number. */
#define STELLAR_ABI 1

#define STELLAR_MAX_PORTS 64	/* attached interfaces of one controller */
#define STELLAR_MAX_FLOWS 65536 /* default; the loader may create a larger or smaller table */

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
	__u32 pad;
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

/* What replay hands to the program in front of the frame (XDP metadata). */
struct replay_meta {
	__u64 now_ns;
	__u32 wire_len; /* the frame's own length, as the capture's record tells it */
	__u32 pad;
};

#endif
