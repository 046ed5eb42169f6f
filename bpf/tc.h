/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What both tc programs share: from an skb to a parsed and accounted packet, and on to what acts on it. */
#ifndef STELLAR_TC_H
#define STELLAR_TC_H

#include "act.h"
#include "port.h"
#ifdef STELLAR_BENCH_FLOWS
#include "spread.h"
#endif

/* Other people's filters behind ours still run. */
#define TC_PASS_ON TC_ACT_UNSPEC

static __always_inline int tc_observe(struct __sk_buff *skb, __u32 direction)
{
	struct sighting seen = {};
	struct roce_packet *packet;
	__u32 port = port_number();
	void *data = (void *)(long)skb->data;
	void *data_end = (void *)(long)skb->data_end;
	int reason;

	/* Forwarded packets may have most of their headers in page fragments. */
	if (data + ROCE_HEADER_BYTES > data_end && data_end - data < skb->len) {
		bpf_skb_pull_data(skb, skb->len < ROCE_HEADER_BYTES ? skb->len : ROCE_HEADER_BYTES);
		data = (void *)(long)skb->data;
		data_end = (void *)(long)skb->data_end;
	}
	packet = packet_take(port, direction);
	if (!packet)
		return TC_PASS_ON;
	reason = roce_parse(data, data_end, skb->len, packet);
	if (reason == REASON_ROCE) {
		if (skb->vlan_present) {
			/* The tag travels beside the frame; on the wire it is part of it. */
			packet->tags++;
			packet->rare = 1;
			packet->wire_len += 4;
			packet->vlan_tci = skb->vlan_tci;
		}
#ifdef STELLAR_BENCH_FLOWS
		spread(packet);
#endif
		reason = observe(packet, &seen);
	}
	count_reason(port, direction, reason);
	if (!port_acts())
		return TC_PASS_ON;
	if (reason != REASON_ROCE || !seen.flow) {
		if (direction == DIRECTION_EGRESS)
			hand_over_other(port, skb->len);
		return TC_PASS_ON;
	}
	if (direction == DIRECTION_EGRESS) {
		if (hand_over_egress(packet, &seen) && act_egress(skb, packet))
			return TC_ACT_SHOT;
	} else if (hand_over_ingress(packet, &seen) && act_ingress(packet)) {
		return TC_ACT_SHOT;
	}
	return TC_PASS_ON;
}

#endif
