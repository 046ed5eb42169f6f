/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Notification point: tell the sender of CE-marked data. By BECN in an ACK on its way, or by a
 * congestion notification packet (IBTA annex A17.9.3) sent in front of that ACK: a copy of the
 * ACK's headers with another opcode, 16 reserved bytes and an ICRC of its own.
 */
#ifndef STELLAR_ECHO_H
#define STELLAR_ECHO_H

#include "rewrite.h"

#define CNP_L4_BYTES	 (8 + sizeof(struct bth) + ROCE_CNP_RESERVED_BYTES + ROCE_ICRC_BYTES)
#define ACK_L4_BYTES	 (8 + sizeof(struct bth) + 4 + ROCE_ICRC_BYTES)
#define CNP_GROWTH	 (CNP_L4_BYTES - ACK_L4_BYTES)
#define IPV4_BYTES	 20
#define IPV6_BYTES	 40
#define CNP_MAX_L3_BYTES (IPV6_BYTES + CNP_L4_BYTES)

/* IP header and all behind it of an ACK or CNP. */
struct small_packet {
	__u8 bytes[CNP_MAX_L3_BYTES];
};

static __always_inline __u32 crc32_byte(__u32 crc, __u8 byte)
{
	__u32 index = (crc ^ byte) & 0xff;
	__u32 *entry = crc32_table.lookup(&index);

	return entry ? crc >> 8 ^ *entry : 0;
}

/* ICRC of an IP packet of `length` bytes, its own left off (A17.3.3): eight bytes of ones
 * stand for the missing LRH; what routers may change counts as ones. */
static __always_inline __u32 icrc(const struct small_packet *packet, __u32 l4, __u32 length)
{
	__u32 crc = 0xffffffff;

#pragma clang loop unroll(disable)
	for (int i = 0; i < 8; i++)
		crc = crc32_byte(crc, 0xff);
#pragma clang loop unroll(disable)
	for (__u32 i = 0; i < CNP_MAX_L3_BYTES - ROCE_ICRC_BYTES; i++) {
		__u8 byte = packet->bytes[i];

		if (i >= length)
			break;
		if (l4 == IPV4_BYTES) {
			/* ToS, TTL, header checksum */
			if (i == 1 || i == 8 || i == 10 || i == 11)
				byte = 0xff;
		} else {
			/* traffic class and flow label, hop limit */
			if (i == 0)
				byte |= 0x0f;
			if (i == 1 || i == 2 || i == 3 || i == 7)
				byte = 0xff;
		}
		/* UDP checksum, BTH byte with FECN and BECN */
		if (i == l4 + 6 || i == l4 + 7 || i == l4 + BTH_ECN_OFFSET)
			byte = 0xff;
		crc = crc32_byte(crc, byte);
	}
	return ~crc;
}

/* Turn the headers of an ACK into those of a CNP, in place. */
static __always_inline void make_cnp(struct small_packet *packet, __u32 l4, __u8 traffic_class)
{
	__u8 *ip = packet->bytes, *udp = ip + l4, *bth = udp + 8;
	__u32 crc, total = l4 + CNP_L4_BYTES;

	if (l4 == IPV4_BYTES) {
		__u32 sum = 0;

		ip[1] = traffic_class;
		*(__be16 *)(ip + 2) = bpf_htons(total);
		*(__be16 *)(ip + 10) = 0;
#pragma unroll
		for (int i = 0; i < IPV4_BYTES; i += 2)
			sum += *(__u16 *)(ip + i);
		sum = (sum & 0xffff) + (sum >> 16);
		sum = (sum & 0xffff) + (sum >> 16);
		*(__u16 *)(ip + 10) = ~sum;
	} else {
		ip[0] = (ip[0] & 0xf0) | traffic_class >> 4;
		ip[1] = (ip[1] & 0x0f) | traffic_class << 4;
		*(__be16 *)(ip + 4) = bpf_htons(CNP_L4_BYTES);
	}
	*(__be16 *)(udp + 4) = bpf_htons(CNP_L4_BYTES);
	*(__be16 *)(udp + 6) = 0; /* none: its ICRC protects it */
	bth[0] = OPCODE_CNP;
	bth[1] = 0;		 /* no solicited event, no migration state, no pad, version 0 */
	bth[4] = BTH_BECN;	 /* partition key and queue pair as in the ACK */
	*(__u32 *)(bth + 8) = 0; /* no ACK asked for, PSN 0 */
	__builtin_memset(bth + 12, 0, ROCE_CNP_RESERVED_BYTES);
	crc = icrc(packet, l4, total - ROCE_ICRC_BYTES);
	/* Little endian on the wire, as rxe and hardware send it. */
	__builtin_memcpy(bth + 12 + ROCE_CNP_RESERVED_BYTES, &crc, ROCE_ICRC_BYTES);
}

/* With one IP header length, a constant: the verifier wants constant sizes. */
static __always_inline int send_cnp_of(struct __sk_buff *skb, __u32 l3, __u32 l4,
				       __u8 traffic_class)
{
	struct small_packet ack, cnp;
	__u32 length = l3 + l4 + ACK_L4_BYTES;
	__u8 *udp = ack.bytes + l4;
	long error;

	/* Not with padding or anything else behind the packet. */
	if (skb->len != length)
		return -1;
	__builtin_memset(&ack, 0, sizeof(ack));
	if (bpf_skb_load_bytes(skb, l3, &ack, l4 + ACK_L4_BYTES))
		return -1;
	/* IPv4 with 20 bytes of options is as long as IPv6. */
	if (ack.bytes[0] >> 4 != (l4 == IPV4_BYTES ? 4 : 6))
		return -1;
	/* A checksum may still have to be filled in by the device, over what it then finds. */
	if (udp[6] || udp[7])
		return -1;
	if (bpf_skb_change_tail(skb, length + CNP_GROWTH, 0))
		return -1;
	cnp = ack;
	make_cnp(&cnp, l4, traffic_class);
	error = bpf_skb_store_bytes(skb, l3, &cnp, l4 + CNP_L4_BYTES, 0);
	if (!error) {
		error = bpf_clone_redirect(skb, skb->ifindex, 0);
		bpf_skb_store_bytes(skb, l3, &ack, l4 + ACK_L4_BYTES, 0);
	}
	bpf_skb_change_tail(skb, length, 0);
	return error ? -1 : 0;
}

/*
 * Send a CNP in front of the ACK in hand. Returns 0, or -1 when none was sent: the ACK is not
 * the plain one of which a CNP can be made, or there is no memory, or the queue is full. The
 * clone passes this hook again and overwrites the packet in hand, but for its offsets.
 */
static __always_inline int send_cnp(struct __sk_buff *skb, const struct roce_packet *packet,
				    __u8 traffic_class)
{
	__u32 l3 = packet->l3_offset, l4 = packet->l4_offset - packet->l3_offset;

	if (l4 == IPV4_BYTES)
		return send_cnp_of(skb, l3, IPV4_BYTES, traffic_class);
	if (l4 == IPV6_BYTES)
		return send_cnp_of(skb, l3, IPV6_BYTES, traffic_class);
	return -1;
}

#endif
