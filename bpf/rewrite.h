/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Changes to a packet that its ICRC does not cover: traffic class (DSCP and ECN) and BECN.
 * At the parsed offset, as bpf_skb_ecn_set_ce() takes a tag inside the frame for the IP header.
 */
#ifndef STELLAR_REWRITE_H
#define STELLAR_REWRITE_H

#include "count.h"

#define ECN_MASK    3
#define ECN_NOT_ECT 0
#define ECN_ECT0    2
#define ECN_CE	    3
#define BTH_BECN    0x40
/* Of the byte with FECN and BECN, behind the start of the UDP header. */
#define BTH_ECN_OFFSET (8 + 4)

/* RFC 1624, equation 3; words as they lie in memory. */
static __always_inline __u16 checksum_update(__u16 checksum, __u16 old, __u16 new)
{
	__u32 sum = (__u16)~checksum + (__u16)~old + new;

	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

/* Set DSCP and ECN. Returns 0, or -1 when the header cannot be written. */
static __always_inline int write_traffic_class(struct __sk_buff *skb,
					       const struct roce_packet *packet, __u8 traffic_class)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	__u8 *header = data + (FORGET(packet->l3_offset) & 31);
	__u16 old;

	if ((void *)(header + 20) > end)
		return -1;
	old = *(__u16 *)header;
	if (header[0] >> 4 == 4) {
		header[1] = traffic_class;
		*(__u16 *)(header + 10) =
			checksum_update(*(__u16 *)(header + 10), old, *(__u16 *)header);
	} else {
		header[0] = (header[0] & 0xf0) | traffic_class >> 4;
		header[1] = (header[1] & 0x0f) | traffic_class << 4;
	}
	return 0;
}

/* Set BECN in the BTH, and mend the UDP checksum of a sender that fills it in. Pointers into
 * the packet are void afterwards. */
static __always_inline int write_becn(struct __sk_buff *skb, const struct roce_packet *packet)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	__u32 offset = FORGET(packet->l4_offset) & ROCE_MAX_L4_OFFSET;
	__u8 *udp = data + offset, old;

	if ((void *)(udp + 8 + sizeof(struct bth)) > end)
		return -1;
	old = udp[BTH_ECN_OFFSET];
	udp[BTH_ECN_OFFSET] = old | BTH_BECN;
	if (*(__u16 *)(udp + 6))
		bpf_l4_csum_replace(skb, offset + 6, bpf_htons(old << 8),
				    bpf_htons((old | BTH_BECN) << 8), 2 | BPF_F_MARK_MANGLED_0);
	return 0;
}

#endif
