/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Acknowledgements: syndromes, round trips, and which two directions are one queue pair.
 */
#ifndef STELLAR_ANSWER_H
#define STELLAR_ANSWER_H

#include "order.h"

/* Two requests of one PSN count as in flight together for this long. */
#define INFLIGHT_AMBIGUOUS_NS 1000000000ULL

#ifdef STELLAR_REPLAY
/* A capture shows both directions of a flow at one point. */
#define PARTNER_DIRECTION(direction) (direction)
#else
#define PARTNER_DIRECTION(direction) ((direction) ^ 1)
#endif

static __always_inline __u32 rtt_bucket(__u64 rtt_ns)
{
	__u32 log2 = log2_floor(rtt_ns), half, bucket;

	if (log2 < RTT_FIRST_LOG2)
		return 0;
	half = rtt_ns >> (log2 - 1) & 1;
	bucket = (log2 - RTT_FIRST_LOG2) * 2 + half;
	return bucket < RTT_BUCKETS ? bucket : RTT_BUCKETS - 1;
}

/* ---- acknowledgements ---- */

static __always_inline void count_syndrome(struct flow_stats *flow, __u8 syndrome)
{
	__u32 kind = syndrome >> AETH_KIND_SHIFT, code = syndrome & 0x1f;

	if (kind == AETH_KIND_RNR) {
		flow->rnr_naks++;
	} else if (kind == AETH_KIND_NAK) {
		if (code >= NAK_OTHER)
			code = NAK_OTHER;
		flow->naks[code]++;
	}
}

/* The answer to `request`'s packets has come (under the request flow's lock). */
static __always_inline void acknowledge(struct flow_stats *request, struct roce_packet *packet,
					__u64 now)
{
	__u32 kind = packet->syndrome >> AETH_KIND_SHIFT, psn = packet->psn;
	__s32 beyond = psn_distance(request->expected_psn, psn);

	if (!(request->flags & FLOW_PSN_VALID))
		return;
	if (kind == AETH_KIND_ACK) {
		if ((request->flags & FLOW_PROBE) && psn_distance(request->probe_psn, psn) >= 0) {
			if (request->probe_psn == psn && now >= request->probe_ns) {
				__u64 rtt_ns = now - request->probe_ns;
				__u32 bucket;

				request->rtt_count++;
				request->rtt_sum_ns += rtt_ns;
				if (request->rtt_count == 1 || rtt_ns < request->rtt_min_ns)
					request->rtt_min_ns = rtt_ns;
				if (rtt_ns > request->rtt_max_ns)
					request->rtt_max_ns = rtt_ns;
				packet->bucket = rtt_bucket(rtt_ns);
				bucket = FORGET(packet->bucket);
				if (bucket < RTT_BUCKETS)
					request->rtt_hist[bucket]++;
			}
			request->flags &= ~FLOW_PROBE;
		}
		if (!(request->flags & FLOW_ACKED) || psn_distance(request->acked_psn, psn) > 0) {
			request->flags |= FLOW_ACKED;
			request->acked_psn = psn;
			if (request->gap_packets)
				gaps_acknowledge(request, psn);
		}
		if (beyond >= 0 && beyond < PSN_RESYNC_DISTANCE) {
			/* The responder is further than what was seen here. */
			request->expected_psn = psn_add(psn, 1);
			request->flags &= ~FLOW_SEQUENCE_ERROR;
		}
	} else if (kind == AETH_KIND_RNR && beyond > -PSN_RESYNC_DISTANCE &&
		   beyond < PSN_RESYNC_DISTANCE) {
		/* The responder dropped this request and waits for it again. */
		request->expected_psn = psn;
	}
}

/*
 * The common ACK moves acked_psn and nothing else: one aligned store, for which the second
 * lock (a fifth of an ACK's whole cost) is not worth taking. Returns 0 when there is more
 * to do than that. Should two CPUs race, acked_psn is one ACK late until the next one.
 */
static __always_inline int acknowledge_unlocked(struct flow_stats *request,
						const struct roce_packet *packet, __u32 pair_state)
{
	__u32 flags = request->flags, psn = packet->psn;

	if (!(flags & FLOW_PSN_VALID) || !(flags & FLOW_ACKED) || request->gap_packets)
		return 0;
	if (packet->syndrome >> AETH_KIND_SHIFT != AETH_KIND_ACK)
		return 0;
	if (request->peer_qpn != packet->key.dqpn || request->pair_state != pair_state)
		return 0;
	if ((flags & FLOW_PROBE) && psn_distance(request->probe_psn, psn) >= 0)
		return 0;
	if (psn_distance(request->expected_psn, psn) >= 0)
		return 0;
	if (psn_distance(request->acked_psn, psn) > 0)
		request->acked_psn = psn;
	return 1;
}

static __always_inline void inflight_key_of(struct inflight_key *key,
					    const struct roce_packet *packet)
{
	__builtin_memset(key, 0, sizeof(*key));
	__builtin_memcpy(key->saddr, packet->key.saddr, 16);
	__builtin_memcpy(key->daddr, packet->key.daddr, 16);
	key->psn = packet->psn;
	key->port = packet->key.port;
	key->direction = packet->key.direction;
}

/* Remember a request that asks for an ACK, so that the ACK can tell the pair. */
static __always_inline void inflight_remember(const struct roce_packet *packet, __u64 now)
{
	struct inflight value = { .sent_ns = now, .dqpn = packet->key.dqpn };
	struct inflight_key key;
	struct inflight *other;

	inflight_key_of(&key, packet);
	other = inflight.lookup(&key);
	if (other && now - other->sent_ns < INFLIGHT_AMBIGUOUS_NS)
		value.ambiguous = other->ambiguous || other->dqpn != packet->key.dqpn;
	inflight.update(&key, &value);
}

/* Destination QPN of the requests that `packet` (an acknowledgement) answers, 0 when it
 * cannot be told. */
static __always_inline __u32 infer_peer(const struct roce_packet *packet, __u64 now)
{
	struct inflight_key key;
	struct inflight *request;
	__u32 dqpn;

	__builtin_memset(&key, 0, sizeof(key));
	__builtin_memcpy(key.saddr, packet->key.daddr, 16);
	__builtin_memcpy(key.daddr, packet->key.saddr, 16);
	key.psn = packet->psn;
	key.port = packet->key.port;
	key.direction = PARTNER_DIRECTION(packet->key.direction);
	request = inflight.lookup(&key);
	if (!request || request->ambiguous || now - request->sent_ns > INFLIGHT_AMBIGUOUS_NS)
		return 0;
	dqpn = request->dqpn;
	/* One request has one answer: an equal PSN of another queue pair finds nothing. */
	inflight.delete(&key);
	return dqpn;
}

static __always_inline void partner_key(struct flow_key *partner, const struct flow_key *key,
					__u32 peer_qpn)
{
	copy_address(partner->saddr, key->daddr);
	copy_address(partner->daddr, key->saddr);
	partner->dqpn = peer_qpn;
	partner->port = key->port;
	partner->direction = PARTNER_DIRECTION(key->direction);
	partner->pad = 0;
}

#endif
