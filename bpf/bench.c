// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Yardsticks for `controller bench dataplane`: what a program costs that does nothing,
 * that parses only, and that parses and looks one flow up. Never attached.
 */
#include "observe.h"
#include "port.h"
#include "spread.h"

static __always_inline int bench_parse(void *data, void *data_end, __u32 frame_len, int lookup,
				       __u32 direction)
{
	struct roce_packet *packet = packet_take(port_number(), direction);

	if (!packet)
		return 0;
	if (roce_parse(data, data_end, frame_len, packet) != REASON_ROCE)
		return 0;
	spread(packet);
	if (lookup)
		return flows.lookup(&packet->key) != 0;
	return 1;
}

#define XDP_DATA (void *)(long)context->data, (void *)(long)context->data_end
#define TC_DATA	 (void *)(long)skb->data, (void *)(long)skb->data_end

int stellar_xdp_empty(struct xdp_md *context)
{
	return XDP_PASS;
}

int stellar_xdp_parse(struct xdp_md *context)
{
	bench_parse(XDP_DATA, bpf_xdp_get_buff_len(context), 0, DIRECTION_INGRESS);
	return XDP_PASS;
}

int stellar_xdp_lookup(struct xdp_md *context)
{
	int found = bench_parse(XDP_DATA, bpf_xdp_get_buff_len(context), 1, DIRECTION_INGRESS);

	return found ? XDP_PASS : XDP_DROP;
}

int stellar_tc_empty(struct __sk_buff *skb)
{
	return TC_ACT_UNSPEC;
}

/* At ingress and at egress: the direction is part of the key that the lookup wants. */
int stellar_tc_parse_in(struct __sk_buff *skb)
{
	bench_parse(TC_DATA, skb->len, 0, DIRECTION_INGRESS);
	return TC_ACT_UNSPEC;
}

int stellar_tc_lookup_in(struct __sk_buff *skb)
{
	int found = bench_parse(TC_DATA, skb->len, 1, DIRECTION_INGRESS);

	return found ? TC_ACT_UNSPEC : TC_ACT_SHOT;
}

int stellar_tc_parse_out(struct __sk_buff *skb)
{
	bench_parse(TC_DATA, skb->len, 0, DIRECTION_EGRESS);
	return TC_ACT_UNSPEC;
}

int stellar_tc_lookup_out(struct __sk_buff *skb)
{
	int found = bench_parse(TC_DATA, skb->len, 1, DIRECTION_EGRESS);

	return found ? TC_ACT_UNSPEC : TC_ACT_SHOT;
}
