/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Wire formats of RoCEv2 and the one parser: frame -> struct roce_packet.
 *
 * Contract of every parse_*() below: `cursor->at` points to the header; the function
 * checks bounds, fills its part of the descriptor, advances, and returns 0 or the
 * enum reason for which the frame is not RoCEv2. Later stages read the descriptor only.
 *
 * Sources: IBTA Architecture Specification vol. 1, ch. 5 and 9, annexes A14 (XRC),
 * A17 (RoCEv2), A19 (FLUSH, ATOMIC WRITE).
 */
#ifndef STELLAR_ROCE_H
#define STELLAR_ROCE_H

#include "shared.h"

#define ROCE_UDP_PORT		4791
#define ROCE_MAX_TAGS		2
#define ROCE_MAX_EXTENSIONS	6
#define ROCE_ICRC_BYTES		4
#define ROCE_CNP_RESERVED_BYTES 16

/* The longest header stack the parser accepts reads at most this far into a frame,
 * IPv6 extension headers apart: Ethernet 14, two tags 8, IPv4 60, UDP 8, BTH 12,
 * RDETH 4, DETH 8, AtomicETH 28. */
#define ROCE_HEADER_BYTES 142

#define ETHERTYPE_IPV4	 0x0800
#define ETHERTYPE_IPV6	 0x86dd
#define ETHERTYPE_CTAG	 0x8100
#define ETHERTYPE_STAG	 0x88a8
#define ETHERTYPE_ROCEV1 0x8915

/* UDP headers further inside a frame than this are not looked for. */
#define ROCE_MAX_L4_OFFSET 511

#define PROTO_HOP_BY_HOP   0
#define PROTO_UDP	   17
#define PROTO_ROUTING	   43
#define PROTO_FRAGMENT	   44
#define PROTO_AUTH	   51
#define PROTO_DEST_OPTIONS 60

/* Reads a member of the packet in hand anew, so that the verifier treats it as any number
 * instead of following each value that it may have to the end of the program. */
#define FORGET(member) (*(volatile typeof(member) *)&(member))

#define PSN_MASK 0xffffff
#define QPN_MASK 0xffffff

#define OPCODE_CNP	0x81
#define AETH_KIND_SHIFT 5
#define AETH_KIND_ACK	0
#define AETH_KIND_RNR	1
#define AETH_KIND_NAK	3

/* Operations: opcode bits 4..0, the same for all transports that have them. */
enum operation {
	OP_SEND_FIRST = 0,
	OP_SEND_MIDDLE,
	OP_SEND_LAST,
	OP_SEND_LAST_IMM,
	OP_SEND_ONLY,
	OP_SEND_ONLY_IMM,
	OP_WRITE_FIRST,
	OP_WRITE_MIDDLE,
	OP_WRITE_LAST,
	OP_WRITE_LAST_IMM,
	OP_WRITE_ONLY,
	OP_WRITE_ONLY_IMM,
	OP_READ_REQUEST,
	OP_READ_RESPONSE_FIRST,
	OP_READ_RESPONSE_MIDDLE,
	OP_READ_RESPONSE_LAST,
	OP_READ_RESPONSE_ONLY,
	OP_ACKNOWLEDGE,
	OP_ATOMIC_ACKNOWLEDGE,
	OP_COMPARE_SWAP,
	OP_FETCH_ADD,
	OP_RESYNC, /* RD only */
	OP_SEND_LAST_INV,
	OP_SEND_ONLY_INV,
	OP_FLUSH = 28,
	OP_ATOMIC_WRITE = 29,
};

/* Sets of operations as bit masks: the BPF side has no constant tables, and a shift
 * and an AND are cheaper than a map of them. */
#define BIT_OF(operation)      (1U << (operation))
#define IN_SET(set, operation) (((set) >> (operation)) & 1)

#define OPS_FIRST (BIT_OF(OP_SEND_FIRST) | BIT_OF(OP_WRITE_FIRST) | BIT_OF(OP_READ_RESPONSE_FIRST))
#define OPS_MIDDLE \
	(BIT_OF(OP_SEND_MIDDLE) | BIT_OF(OP_WRITE_MIDDLE) | BIT_OF(OP_READ_RESPONSE_MIDDLE))
#define OPS_SEND                                                                      \
	(BIT_OF(OP_SEND_FIRST) | BIT_OF(OP_SEND_MIDDLE) | BIT_OF(OP_SEND_LAST) |      \
	 BIT_OF(OP_SEND_LAST_IMM) | BIT_OF(OP_SEND_ONLY) | BIT_OF(OP_SEND_ONLY_IMM) | \
	 BIT_OF(OP_SEND_LAST_INV) | BIT_OF(OP_SEND_ONLY_INV))
#define OPS_WRITE                                                                        \
	(BIT_OF(OP_WRITE_FIRST) | BIT_OF(OP_WRITE_MIDDLE) | BIT_OF(OP_WRITE_LAST) |      \
	 BIT_OF(OP_WRITE_LAST_IMM) | BIT_OF(OP_WRITE_ONLY) | BIT_OF(OP_WRITE_ONLY_IMM) | \
	 BIT_OF(OP_ATOMIC_WRITE))
#define OPS_READ_RESPONSE                                                   \
	(BIT_OF(OP_READ_RESPONSE_FIRST) | BIT_OF(OP_READ_RESPONSE_MIDDLE) | \
	 BIT_OF(OP_READ_RESPONSE_LAST) | BIT_OF(OP_READ_RESPONSE_ONLY))
#define OPS_RESPONSE (OPS_READ_RESPONSE | BIT_OF(OP_ACKNOWLEDGE) | BIT_OF(OP_ATOMIC_ACKNOWLEDGE))
#define OPS_ATOMIC   (BIT_OF(OP_COMPARE_SWAP) | BIT_OF(OP_FETCH_ADD))
/* The packet that completes a request message. */
#define OPS_END                                                                                \
	(BIT_OF(OP_SEND_LAST) | BIT_OF(OP_SEND_LAST_IMM) | BIT_OF(OP_SEND_ONLY) |              \
	 BIT_OF(OP_SEND_ONLY_IMM) | BIT_OF(OP_SEND_LAST_INV) | BIT_OF(OP_SEND_ONLY_INV) |      \
	 BIT_OF(OP_WRITE_LAST) | BIT_OF(OP_WRITE_LAST_IMM) | BIT_OF(OP_WRITE_ONLY) |           \
	 BIT_OF(OP_WRITE_ONLY_IMM) | BIT_OF(OP_READ_REQUEST) | OPS_ATOMIC | BIT_OF(OP_FLUSH) | \
	 BIT_OF(OP_ATOMIC_WRITE))

/* Requests that are answered whether or not they ask for it. */
#define OPS_ALWAYS_ANSWERED \
	(BIT_OF(OP_READ_REQUEST) | OPS_ATOMIC | BIT_OF(OP_FLUSH) | BIT_OF(OP_ATOMIC_WRITE))

#define OPS_WITH_IMM                                                                       \
	(BIT_OF(OP_SEND_LAST_IMM) | BIT_OF(OP_SEND_ONLY_IMM) | BIT_OF(OP_WRITE_LAST_IMM) | \
	 BIT_OF(OP_WRITE_ONLY_IMM))
#define OPS_WITH_IETH (BIT_OF(OP_SEND_LAST_INV) | BIT_OF(OP_SEND_ONLY_INV))
#define OPS_WITH_RETH                                                                 \
	(BIT_OF(OP_WRITE_FIRST) | BIT_OF(OP_WRITE_ONLY) | BIT_OF(OP_WRITE_ONLY_IMM) | \
	 BIT_OF(OP_READ_REQUEST) | BIT_OF(OP_FLUSH) | BIT_OF(OP_ATOMIC_WRITE))
#define OPS_WITH_AETH ((OPS_RESPONSE) & ~BIT_OF(OP_READ_RESPONSE_MIDDLE))

/* Operations that each transport defines. */
#define OPS_RC_UC_COMMON (BIT_OF(OP_READ_REQUEST) - 1)
#define OPS_OF_RC \
	((BIT_OF(OP_RESYNC) - 1) | OPS_WITH_IETH | BIT_OF(OP_FLUSH) | BIT_OF(OP_ATOMIC_WRITE))
#define OPS_OF_UC  OPS_RC_UC_COMMON
#define OPS_OF_RD  ((BIT_OF(OP_SEND_LAST_INV) - 1) | BIT_OF(OP_FLUSH) | BIT_OF(OP_ATOMIC_WRITE))
#define OPS_OF_UD  (BIT_OF(OP_SEND_ONLY) | BIT_OF(OP_SEND_ONLY_IMM))
#define OPS_OF_XRC ((BIT_OF(OP_RESYNC) - 1) | OPS_WITH_IETH)

struct bth {
	__u8 opcode;
	__u8 flags; /* solicited event, migration, pad count (2), transport version (4) */
	__be16 pkey;
	__u8 ecn; /* FECN, BECN, 6 reserved: not covered by the ICRC */
	__u8 dqpn[3];
	__u8 ack_request; /* bit 7 */
	__u8 psn[3];
} __attribute__((packed));

struct roce_packet {
	struct flow_key key; /* port and direction are the caller's */
	/* What not every packet has: cleared by packet_take(). */
	struct {
		__u32 read_len;	  /* RETH DMA length of a READ request */
		__u32 source_qpn; /* of the DETH */
		__u16 vlan_tci;	  /* of the outer tag */
		__u8 tags;
		__u8 has_aeth;
		__u8 syndrome; /* of the AETH */
		__u8 cut;      /* the frame is shorter than its IP length says */
		__u8 rare;     /* has FECN, BECN, a tag or a source QPN, or is cut */
		__u8 pad;
	};
	/* What the parser sets in every RoCEv2 packet. */
	__u32 psn;
	__u32 wire_len; /* link header + IP length */
	__u32 payload_len;
	__u16 sport;
	__u8 opcode;
	__u8 operation;
	__u8 transport;
	__u8 ack_request;
	__u8 fecn;
	__u8 becn;
	__u8 traffic_class; /* IPv4 ToS / IPv6 traffic class: DSCP << 2 | ECN */
	__u8 pads[3];
	__u32 refused;	   /* an RNR NAK or NAK, by observe() */
	__u32 settled;	   /* changes nothing but amounts, by observe() */
	__u32 ip_len;	   /* IP header and all behind it */
	__u32 l4_len;	   /* UDP header and all behind it, as IP tells */
	__u32 l3_offset;   /* of the IP header */
	__u32 l4_offset;   /* of the UDP header */
	__u32 leading_len; /* extension headers in front of RETH or AETH */
	__u32 header_len;  /* BTH and all extension headers */
	__u32 kind;	   /* enum kind, by observe() */
	__u32 bucket;	   /* of the round trip, by acknowledge() */
	__u32 sight;	   /* of a request: enum sight, by observe() */
	/* What acting is handed, see hand_over.h. */
	__u32 slot;	  /* of the outgoing flow in `controls` that this packet is about */
	__u32 drained;	  /* all that its flow sent before is acknowledged, or never will be */
	__u32 class;	  /* by choose_class() */
	__u32 phase;	  /* by phase_of() */
	__u32 echo;	  /* an ACK that is to tell of marks */
	__u32 with_reads; /* its flow has sent READ responses */
	__u64 job_Bps;	  /* rates of departures, by act_on_data(); 0: none */
	__u64 flow_Bps;
	__u64 now_ns;	   /* when it was observed */
	__u64 captured_ns; /* replay only: the capture's time stamp */
};

/* The part that packet_take() clears: key and optional members. */
#define ROCE_PACKET_CLEARED __builtin_offsetof(struct roce_packet, psn)

struct cursor {
	void *at;
	void *end;
};

/* One load a number, whatever its address: the kernels that RDMA hosts run allow it (the
 * verifier refuses where they do not), and byte by byte it is six times the instructions. */
static __always_inline __u32 be32(const void *at)
{
	return bpf_ntohl(*(const __u32 *)at);
}

static __always_inline __u16 be16(const void *at)
{
	return bpf_ntohs(*(const __u16 *)at);
}

/* The low three of four bytes. */
static __always_inline __u32 be24(const void *at)
{
	return be32(at) & 0xffffff;
}

static __always_inline void copy_address(__u8 *to, const __u8 *from)
{
	((__u64 *)to)[0] = ((const __u64 *)from)[0];
	((__u64 *)to)[1] = ((const __u64 *)from)[1];
}

/* ::ffff:a.b.c.d */
static __always_inline void map_ipv4(__u8 *to, const __u8 *from)
{
	((__u64 *)to)[0] = 0;
	((__u32 *)to)[2] = bpf_htonl(0xffff);
	((__u32 *)to)[3] = *(const __u32 *)from;
}

static __always_inline int parse_ethernet(struct cursor *cursor, struct roce_packet *packet,
					  __u16 *ethertype)
{
	__u8 *header = cursor->at;

	if ((void *)(header + 14) > cursor->end)
		return REASON_TRUNCATED;
	*ethertype = be16(header + 12);
	cursor->at = header + 14;

#pragma unroll
	for (int tag = 0; tag < ROCE_MAX_TAGS; tag++) {
		__u8 *tci = cursor->at;

		if (*ethertype != ETHERTYPE_CTAG && *ethertype != ETHERTYPE_STAG)
			return 0;
		if ((void *)(tci + 4) > cursor->end)
			return REASON_TRUNCATED;
		if (!packet->tags)
			packet->vlan_tci = be16(tci);
		packet->tags++;
		*ethertype = be16(tci + 2);
		cursor->at = tci + 4;
	}
	if (*ethertype == ETHERTYPE_CTAG || *ethertype == ETHERTYPE_STAG)
		return REASON_TOO_MANY_TAGS;
	return 0;
}

static __always_inline int parse_ipv4(struct cursor *cursor, struct roce_packet *packet,
				      __u32 *ip_len, __u32 *l4_len)
{
	__u8 *header = cursor->at;
	__u32 header_len;

	if ((void *)(header + 20) > cursor->end)
		return REASON_TRUNCATED;
	header_len = (header[0] & 0xf) * 4;
	*ip_len = be16(header + 2);
	if (header[0] >> 4 != 4 || header_len < 20 || *ip_len < header_len)
		return REASON_BAD_IP;
	if (header[9] != PROTO_UDP)
		return REASON_NOT_ROCE;
	if (be16(header + 6) & 0x3fff)
		return REASON_IP_FRAGMENT;
	packet->traffic_class = header[1];
	map_ipv4(packet->key.saddr, header + 12);
	map_ipv4(packet->key.daddr, header + 16);
	*l4_len = *ip_len - header_len;
	cursor->at = header + header_len;
	return 0;
}

static __always_inline int is_extension(__u8 next)
{
	return next == PROTO_HOP_BY_HOP || next == PROTO_ROUTING || next == PROTO_FRAGMENT ||
	       next == PROTO_AUTH || next == PROTO_DEST_OPTIONS;
}

static __always_inline int parse_ipv6(struct cursor *cursor, struct roce_packet *packet,
				      __u32 *ip_len, __u32 *l4_len)
{
	__u8 *header = cursor->at;
	__u8 next;

	if ((void *)(header + 40) > cursor->end)
		return REASON_TRUNCATED;
	if (header[0] >> 4 != 6)
		return REASON_BAD_IP;
	*l4_len = be16(header + 4);
	*ip_len = *l4_len + 40;
	packet->traffic_class = header[0] << 4 | header[1] >> 4;
	copy_address(packet->key.saddr, header + 8);
	copy_address(packet->key.daddr, header + 24);
	next = header[6];
	cursor->at = header + 40;

#pragma unroll
	for (int extension = 0; extension < ROCE_MAX_EXTENSIONS; extension++) {
		__u8 *option = cursor->at;
		__u32 length;

		if (next == PROTO_UDP)
			return 0;
		if (!is_extension(next))
			return REASON_NOT_ROCE;
		if ((void *)(option + 8) > cursor->end)
			return REASON_TRUNCATED;
		if (next == PROTO_FRAGMENT) {
			/* An atomic fragment (offset 0, no more) is a whole packet. */
			if (be16(option + 2) & 0xfff9)
				return option[0] == PROTO_UDP ? REASON_IP_FRAGMENT
							      : REASON_NOT_ROCE;
			length = 8;
		} else if (next == PROTO_AUTH) {
			length = (option[1] + 2) * 4;
		} else {
			length = (option[1] + 1) * 8;
		}
		if (*l4_len < length)
			return REASON_BAD_IP;
		*l4_len -= length;
		next = option[0];
		cursor->at = option + length;
	}
	if (next == PROTO_UDP)
		return 0;
	return is_extension(next) ? REASON_TOO_MANY_EXTENSIONS : REASON_NOT_ROCE;
}

static __always_inline int parse_udp(struct cursor *cursor, struct roce_packet *packet,
				     __u32 l4_len, __u32 *udp_payload)
{
	__u8 *header = cursor->at;
	__u32 length;

	if ((void *)(header + 8) > cursor->end)
		return REASON_TRUNCATED;
	if (be16(header + 2) != ROCE_UDP_PORT)
		return REASON_NOT_ROCE;
	length = be16(header + 4);
	if (length > l4_len || length < 8 + sizeof(struct bth) + ROCE_ICRC_BYTES)
		return REASON_BAD_UDP_LENGTH;
	packet->sport = be16(header);
	*udp_payload = length - 8;
	cursor->at = header + 8;
	return 0;
}

static __always_inline int transport_has(__u8 transport, __u8 operation)
{
	if (transport == TRANSPORT_RC)
		return IN_SET(OPS_OF_RC, operation);
	if (transport == TRANSPORT_UC)
		return IN_SET(OPS_OF_UC, operation);
	if (transport == TRANSPORT_RD)
		return IN_SET(OPS_OF_RD, operation);
	if (transport == TRANSPORT_UD)
		return IN_SET(OPS_OF_UD, operation);
	if (transport == TRANSPORT_XRC)
		return IN_SET(OPS_OF_XRC, operation);
	return 0;
}

/* Bytes of extension headers in front of RETH, AtomicETH or AETH: RDETH, DETH, XRCETH, FETH. */
static __always_inline __u32 leading_extensions(__u8 transport, __u8 operation)
{
	int request = !IN_SET(OPS_RESPONSE, operation);

	if (transport == TRANSPORT_RD)
		return request ? 4 + 8 + (operation == OP_FLUSH) * 4 : 4;
	if (transport == TRANSPORT_UD)
		return 8;
	if (transport == TRANSPORT_XRC)
		return request ? 4 : 0;
	return operation == OP_FLUSH ? 4 : 0;
}

/* Bytes of RETH, AtomicETH, AETH, AtomicAckETH, ImmDt and IETH. */
static __always_inline __u32 trailing_extensions(__u8 operation)
{
	__u32 length = 0;

	length += IN_SET(OPS_WITH_RETH, operation) * 16;
	length += IN_SET(OPS_ATOMIC, operation) * 28;
	length += IN_SET(OPS_WITH_AETH, operation) * 4;
	length += IN_SET(BIT_OF(OP_ATOMIC_ACKNOWLEDGE), operation) * 8;
	length += IN_SET(OPS_WITH_IMM | OPS_WITH_IETH, operation) * 4;
	return length;
}

/* BTH and the extension headers that its opcode announces. */
static __always_inline int parse_transport(struct cursor *cursor, struct roce_packet *packet,
					   __u32 udp_payload)
{
	struct bth *bth = cursor->at;
	__u8 *extension;
	__u32 header_len;
	__u8 operation, transport, pad;

	if ((void *)(bth + 1) > cursor->end)
		return REASON_TRUNCATED;
	if (bth->flags & 0xf)
		return REASON_BAD_BTH;
	pad = bth->flags >> 4 & 3;
	packet->opcode = bth->opcode;
	packet->operation = operation = bth->opcode & 0x1f;
	packet->transport = transport = bth->opcode >> 5;
	packet->fecn = bth->ecn >> 7;
	packet->becn = bth->ecn >> 6 & 1;
	packet->key.dqpn = be24(&bth->ecn);
	packet->ack_request = bth->ack_request >> 7;
	packet->psn = be24(&bth->ack_request);

	if (bth->opcode == OPCODE_CNP) {
		packet->leading_len = 0;
		packet->header_len = sizeof(*bth) + ROCE_CNP_RESERVED_BYTES;
	} else {
		if (!transport_has(transport, operation))
			return REASON_UNKNOWN_OPCODE;
		packet->has_aeth = IN_SET(OPS_WITH_AETH, operation);
		packet->leading_len = leading_extensions(transport, operation);
		packet->header_len =
			sizeof(*bth) + packet->leading_len + trailing_extensions(operation);
	}

	header_len = FORGET(packet->header_len) & 63;
	if (udp_payload < header_len + pad + ROCE_ICRC_BYTES)
		return pad ? REASON_BAD_BTH : REASON_BAD_UDP_LENGTH;
	if ((void *)bth + header_len > cursor->end)
		return REASON_TRUNCATED;
	packet->payload_len = udp_payload - header_len - pad - ROCE_ICRC_BYTES;

	/* The bounds are known to hold from here on, but not to the verifier. */
	extension = (void *)(bth + 1) + (FORGET(packet->leading_len) & 31);
	if (packet->has_aeth && (void *)(extension + 4) <= cursor->end)
		packet->syndrome = extension[0];
	if (operation == OP_READ_REQUEST && (void *)(extension + 16) <= cursor->end)
		packet->read_len = be32(extension + 12);
	if (transport == TRANSPORT_UD || transport == TRANSPORT_RD) {
		extension = (void *)(bth + 1) + (transport == TRANSPORT_RD ? 4 : 0);
		if (!IN_SET(OPS_RESPONSE, operation) && (void *)(extension + 8) <= cursor->end)
			packet->source_qpn = be24(extension + 4);
	}
	return 0;
}

/*
 * Parse one frame. `frame_len` is its own length, of which the part up to `data_end`
 * can be read. Returns REASON_ROCE or why it is not RoCEv2.
 */
static __always_inline int roce_parse(void *data, void *data_end, __u32 frame_len,
				      struct roce_packet *packet)
{
	struct cursor cursor = { .at = data, .end = data_end };
	__u32 ip_len = 0, l4_len = 0, udp_payload = 0, l4_offset;
	__u16 ethertype;
	int reason;

	reason = parse_ethernet(&cursor, packet, &ethertype);
	if (reason)
		return reason;
	packet->l3_offset = 14 + 4 * packet->tags;
	if (ethertype == ETHERTYPE_IPV4)
		reason = parse_ipv4(&cursor, packet, &ip_len, &l4_len);
	else if (ethertype == ETHERTYPE_IPV6)
		reason = parse_ipv6(&cursor, packet, &ip_len, &l4_len);
	else
		return ethertype == ETHERTYPE_ROCEV1 ? REASON_ROCEV1 : REASON_NOT_ROCE;
	if (reason)
		return reason;
	packet->ip_len = ip_len;
	packet->l4_len = l4_len;
	packet->l4_offset = cursor.at - data;
	l4_offset = FORGET(packet->l4_offset);
	if (l4_offset > ROCE_MAX_L4_OFFSET)
		return REASON_TOO_MANY_EXTENSIONS;
	cursor.at = data + l4_offset;
	reason = parse_udp(&cursor, packet, FORGET(packet->l4_len), &udp_payload);
	if (reason)
		return reason;
	reason = parse_transport(&cursor, packet, udp_payload);
	if (reason)
		return reason;
	packet->wire_len = 14 + 4 * packet->tags + packet->ip_len;
	if (frame_len < packet->wire_len) {
#ifdef STELLAR_REPLAY
		packet->cut = 1;
#endif
#ifndef STELLAR_ALLOW_CUT /* A capture may hold the first bytes of a frame only. */
		return REASON_TRUNCATED;
#endif
	}
	packet->rare = packet->fecn | packet->becn | packet->cut | packet->tags |
		       (packet->source_qpn != 0);
	return REASON_ROCE;
}

#endif
