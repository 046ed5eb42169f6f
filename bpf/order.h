/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Order in PSNs: gaps and what fills them, what a go-back-N responder makes of it, READ
 * responses. Everything here runs under the flow's lock and is plain arithmetic on it.
 */
#ifndef STELLAR_ORDER_H
#define STELLAR_ORDER_H

#include "maps.h"

/* A jump this wide is no loss: RC windows are far smaller, so the queue pair number
 * lives anew with another first PSN. */
#define PSN_RESYNC_DISTANCE 65536

#define IBTA_MIN_PMTU_LOG2 8  /* 256 */
#define IBTA_MAX_PMTU_LOG2 12 /* 4096 */

/* Distance from PSN `from` to `to`, -2^23 .. 2^23 - 1. */
static __always_inline __s32 psn_distance(__u32 from, __u32 to)
{
	return (__s32)((to - from) << 8) >> 8;
}

static __always_inline __u32 psn_add(__u32 psn, __u32 count)
{
	return (psn + count) & PSN_MASK;
}

static __always_inline __u32 log2_floor(__u64 value)
{
	__u32 log2 = 0;

	if (value >> 32) {
		value >>= 32;
		log2 += 32;
	}
	if (value >> 16) {
		value >>= 16;
		log2 += 16;
	}
	if (value >> 8) {
		value >>= 8;
		log2 += 8;
	}
	if (value >> 4) {
		value >>= 4;
		log2 += 4;
	}
	if (value >> 2) {
		value >>= 2;
		log2 += 2;
	}
	return log2 + (value >> 1);
}

/* ---- missing PSN ranges (under the flow's lock) ---- */

static __always_inline void gap_open(struct flow_stats *flow, __u32 start, __u32 count)
{
	flow->gap_packets += count;
	flow->gap_events++;
	if (flow->flags & FLOW_ACKED) {
		/* What the peer has acknowledged was missed here, not lost. */
		__s32 acked = psn_distance(start, flow->acked_psn) + 1;

		if (acked > 0) {
			if (acked > count)
				acked = count;
			flow->capture_loss_packets += acked;
			start = psn_add(start, acked);
			count -= acked;
		}
	}
	if (!count)
		return;
#pragma unroll
	for (int slot = 0; slot < PSN_GAP_SLOTS; slot++) {
		if (!flow->gaps[slot].count) {
			flow->gaps[slot].start = start;
			flow->gaps[slot].count = count;
			return;
		}
	}
	/* No slot is free: the range in the first one, mostly the oldest, stays undecided. */
#pragma unroll
	for (int slot = 0; slot < PSN_GAP_SLOTS - 1; slot++)
		flow->gaps[slot] = flow->gaps[slot + 1];
	flow->gaps[PSN_GAP_SLOTS - 1].start = start;
	flow->gaps[PSN_GAP_SLOTS - 1].count = count;
}

/* `count` PSNs from `psn`, below next_psn, came: how many of them had been missing. */
static __always_inline __u32 gap_fill(struct flow_stats *flow, __u32 psn, __u32 count)
{
	__u32 rest_start = 0, rest_count = 0, filled = 0;

#pragma clang loop unroll(disable)
	for (int slot = 0; slot < PSN_GAP_SLOTS; slot++) {
		struct psn_gap *gap = &flow->gaps[slot];
		__s32 first = psn_distance(gap->start, psn), end = first + (__s32)count;

		if (first < 0)
			first = 0;
		if (end > (__s32)gap->count)
			end = gap->count;
		if (first < end) {
			filled += end - first;
			if (!first) {
				gap->start = psn_add(gap->start, end);
				gap->count -= end;
			} else {
				/* Only one gap can lie on both sides of what came. */
				rest_start = psn_add(gap->start, end);
				rest_count = gap->count - end;
				gap->count = first;
			}
		}
	}
	if (rest_count) {
#pragma unroll
		for (int slot = 0; slot < PSN_GAP_SLOTS; slot++) {
			if (rest_count && !flow->gaps[slot].count) {
				flow->gaps[slot].start = rest_start;
				flow->gaps[slot].count = rest_count;
				rest_count = 0;
			}
		}
	}
	return filled;
}

static __always_inline void gaps_acknowledge(struct flow_stats *flow, __u32 acked_psn)
{
#pragma unroll
	for (int slot = 0; slot < PSN_GAP_SLOTS; slot++) {
		struct psn_gap *gap = &flow->gaps[slot];
		__s32 acked = psn_distance(gap->start, acked_psn) + 1;

		if (gap->count && acked > 0) {
			if (acked > gap->count)
				acked = gap->count;
			flow->capture_loss_packets += acked;
			gap->start = psn_add(gap->start, acked);
			gap->count -= acked;
		}
	}
}

/* ---- order of requests (under the flow's lock) ---- */

/* PSNs that a READ request uses: one for each packet of its response. */
static __always_inline __u32 read_span(struct flow_stats *flow, __u32 read_len, __u32 *slack)
{
	__u32 lowest_log2 = IBTA_MIN_PMTU_LOG2, shortest;

	*slack = 0;
	if (!read_len)
		return 1;
	if (flow->pmtu_log2) {
		__u32 log2 = flow->pmtu_log2 & 15;

		return ((read_len - 1) >> log2) + 1;
	}
	/* No FIRST or MIDDLE packet told the path MTU yet: keep the bounds. */
	if (flow->max_payload > 1)
		lowest_log2 = log2_floor(flow->max_payload - 1) + 1;
	if (lowest_log2 < IBTA_MIN_PMTU_LOG2)
		lowest_log2 = IBTA_MIN_PMTU_LOG2;
	if (lowest_log2 > IBTA_MAX_PMTU_LOG2)
		lowest_log2 = IBTA_MAX_PMTU_LOG2;
	shortest = ((read_len - 1) >> IBTA_MAX_PMTU_LOG2) + 1;
	*slack = ((read_len - 1) >> lowest_log2) + 1 - shortest;
	return shortest;
}

static __always_inline void order_restart(struct flow_stats *flow, __u32 next_psn)
{
	flow->next_psn = flow->expected_psn = next_psn;
	flow->flags &= ~(FLOW_SEQUENCE_ERROR | FLOW_PROBE | FLOW_ACKED);
#pragma unroll
	for (int slot = 0; slot < PSN_GAP_SLOTS; slot++)
		flow->gaps[slot].count = 0;
}

/* What a go-back-N responder makes of this PSN (IBTA vol. 1, 9.7.5). */
static __always_inline void order_responder(struct flow_stats *flow, __u32 psn, __u32 span)
{
	__s32 ahead = psn_distance(flow->expected_psn, psn);

	if (!ahead) {
		flow->expected_psn = psn_add(psn, span);
		flow->flags &= ~FLOW_SEQUENCE_ERROR;
	} else if (ahead < 0) {
		flow->duplicate_requests++;
	} else if (!(flow->flags & FLOW_SEQUENCE_ERROR)) {
		flow->flags |= FLOW_SEQUENCE_ERROR;
		flow->sequence_errors++;
	}
}

/* Whether a request's PSN was seen before. */
enum sight {
	SIGHT_REPEATED = 0,
	SIGHT_LATE, /* first sight of a PSN that had been jumped over */
	SIGHT_NEW,  /* beyond all that were seen */
};

static __always_inline enum sight order_request(struct flow_stats *flow,
						const struct roce_packet *packet)
{
	__u32 psn = packet->psn, span = 1, slack = 0, next, filled, skipped;
	__s32 ahead;

	if (packet->operation == OP_READ_REQUEST)
		span = read_span(flow, packet->read_len, &slack);
	next = psn_add(psn, span);
	if (!(flow->flags & FLOW_PSN_VALID)) {
		flow->flags |= FLOW_PSN_VALID;
		flow->next_psn = flow->expected_psn = next;
		flow->psn_slack = slack;
		return SIGHT_NEW;
	}
	ahead = psn_distance(flow->next_psn, psn);
	if (ahead > 0 && flow->psn_slack) {
		/* The READ before this one used more PSNs than the fewest it could. */
		skipped = ahead < flow->psn_slack ? ahead : flow->psn_slack;
		if (flow->expected_psn == flow->next_psn)
			flow->expected_psn = psn_add(flow->next_psn, skipped);
		flow->next_psn = psn_add(flow->next_psn, skipped);
		ahead -= skipped;
	}
	if (ahead > PSN_RESYNC_DISTANCE || ahead < -PSN_RESYNC_DISTANCE) {
		flow->psn_resyncs++;
		order_restart(flow, next);
		flow->psn_slack = slack;
		return SIGHT_NEW;
	}
	if (ahead < 0) {
		filled = gap_fill(flow, psn, span + slack);
		flow->recovered += filled;
		if (!filled)
			flow->duplicates++;
		/* Karn: an ACK no longer tells which of the two it answers. */
		if ((flow->flags & FLOW_PROBE) && psn_distance(psn, flow->probe_psn) >= 0)
			flow->flags &= ~FLOW_PROBE;
		if (packet->transport != TRANSPORT_UC)
			order_responder(flow, psn, span);
		return filled ? SIGHT_LATE : SIGHT_REPEATED;
	}
	if (ahead > 0)
		gap_open(flow, flow->next_psn, ahead);
	if (packet->transport != TRANSPORT_UC)
		order_responder(flow, psn, span);
	flow->next_psn = next;
	flow->psn_slack = slack;
	return SIGHT_NEW;
}

/* READ responses are contiguous within a message (under the flow's lock). */
static __always_inline void order_response(struct flow_stats *flow,
					   const struct roce_packet *packet)
{
	__u8 operation = packet->operation;

	if ((operation == OP_READ_RESPONSE_MIDDLE || operation == OP_READ_RESPONSE_LAST) &&
	    (flow->flags & FLOW_RESPONSE_VALID)) {
		__s32 ahead = psn_distance(flow->response_psn, packet->psn);

		if (ahead < 0) {
			flow->response_duplicates++;
			return;
		}
		if (ahead < PSN_RESYNC_DISTANCE)
			flow->response_gap_packets += ahead;
	}
	flow->response_psn = psn_add(packet->psn, 1);
	if (operation == OP_READ_RESPONSE_FIRST || operation == OP_READ_RESPONSE_MIDDLE)
		flow->flags |= FLOW_RESPONSE_VALID;
	else
		flow->flags &= ~FLOW_RESPONSE_VALID;
}

#endif
