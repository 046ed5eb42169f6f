// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* XDP ingress: parse -> observe -> reaction point. Every frame passes, except CNPs that end here. */
#include "observe.h"
#include "port.h"
#ifndef STELLAR_REPLAY
#include "act.h"
#endif
#ifdef STELLAR_BENCH_FLOWS
#include "spread.h"
#endif

#ifdef STELLAR_REPLAY
/* One CPU replays a capture: no atomics. */
static __always_inline void count_opcode(__u32 opcode)
{
	__u64 *count = opcodes.lookup(&opcode);

	if (count)
		(*count)++;
}
#endif

int stellar_xdp_in(struct xdp_md *context)
{
	void *data = (void *)(long)context->data;
	void *data_end = (void *)(long)context->data_end;
	struct sighting seen = {};
	struct roce_packet *packet;
	__u32 port = port_number(), frame_len;
	int reason;

#ifdef STELLAR_REPLAY
	struct replay_meta *meta = (void *)(long)context->data_meta;

	if ((void *)(meta + 1) > data)
		return XDP_ABORTED;
	frame_len = meta->wire_len;
#else
	frame_len = bpf_xdp_get_buff_len(context);
#endif
	packet = packet_take(port, DIRECTION_INGRESS);
	if (!packet)
		return XDP_PASS;
	reason = roce_parse(data, data_end, frame_len, packet);
	if (reason == REASON_ROCE) {
#ifdef STELLAR_BENCH_FLOWS
		spread(packet);
#endif
#ifdef STELLAR_REPLAY
		packet->captured_ns = meta->now_ns;
#endif
		reason = observe(packet, &seen);
#ifdef STELLAR_REPLAY
		if (reason == REASON_ROCE)
			count_opcode(packet->opcode);
#endif
	}
	count_reason(port, DIRECTION_INGRESS, reason);
#ifndef STELLAR_REPLAY
	if (port_acts() && reason == REASON_ROCE && seen.flow && hand_over_ingress(packet, &seen) &&
	    act_ingress(packet))
		return XDP_DROP;
#endif
	return XDP_PASS;
}
