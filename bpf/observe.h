/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Per-flow accounting: packets, bytes, messages, PSN order, acknowledgements, ECN, RTT.
 *
 * One hash lookup a packet on the common path; acknowledgements take a second one, to
 * the flow of the request that they answer. Helper calls are not allowed while a
 * bpf_spin_lock is held, so each function says whether it runs under the lock.
 */
#ifndef STELLAR_OBSERVE_H
#define STELLAR_OBSERVE_H

#include "maps.h"

/* A jump this wide is no loss: RC windows are far smaller, so the queue pair number
 * lives anew with another first PSN. */
#define PSN_RESYNC_DISTANCE 65536

/* While a flow is not paired by the registry, look there on its first packets and then
 * on every 64th. */
#define PAIR_RETRY_MASK 63

/* Two requests of one PSN count as in flight together for this long. */
#define INFLIGHT_AMBIGUOUS_NS 1000000000ULL

#define IBTA_MIN_PMTU_LOG2 8  /* 256 */
#define IBTA_MAX_PMTU_LOG2 12 /* 4096 */

#ifdef STELLAR_REPLAY
/* A capture shows both directions of a flow at one point. */
#define PARTNER_DIRECTION(direction) (direction)
#else
#define PARTNER_DIRECTION(direction) ((direction) ^ 1)
#endif

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

static __always_inline __u32 rtt_bucket(__u64 rtt_ns)
{
	__u32 log2 = log2_floor(rtt_ns), half, bucket;

	if (log2 < RTT_FIRST_LOG2)
		return 0;
	half = rtt_ns >> (log2 - 1) & 1;
	bucket = (log2 - RTT_FIRST_LOG2) * 2 + half;
	return bucket < RTT_BUCKETS ? bucket : RTT_BUCKETS - 1;
}

static __always_inline int kind_of(const struct roce_packet *packet)
{
	__u8 operation = packet->operation;

	/* The commonest first. */
	if (operation == OP_ACKNOWLEDGE)
		return packet->syndrome >> AETH_KIND_SHIFT == AETH_KIND_ACK ? KIND_ACK : KIND_NAK;
	if (packet->opcode == OPCODE_CNP)
		return KIND_CNP;
	if (IN_SET(OPS_SEND, operation))
		return KIND_SEND;
	if (IN_SET(OPS_WRITE, operation))
		return KIND_WRITE;
	if (operation == OP_READ_REQUEST)
		return KIND_READ_REQUEST;
	if (IN_SET(OPS_READ_RESPONSE, operation))
		return KIND_READ_RESPONSE;
	if (IN_SET(OPS_ATOMIC, operation))
		return KIND_ATOMIC;
	if (operation == OP_ATOMIC_ACKNOWLEDGE)
		return KIND_ATOMIC_ACK;
	return KIND_OTHER;
}

/* Connected transports number their requests, one sequence a queue pair. A datagram
 * flow mixes the sequences of all its sending queue pairs. */
static __always_inline int has_request_order(const struct roce_packet *packet)
{
	return packet->transport == TRANSPORT_RC || packet->transport == TRANSPORT_UC ||
	       packet->transport == TRANSPORT_XRC;
}

static __always_inline int acknowledges(const struct roce_packet *packet)
{
	return packet->has_aeth &&
	       (packet->transport == TRANSPORT_RC || packet->transport == TRANSPORT_XRC);
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

/* ---- the flow ---- */

static __always_inline struct flow_stats *flow_create(struct roce_packet *packet, __u64 now)
{
	struct flow_event event = {};
	struct flow_stats *template;
	__u32 zero = 0;

	template = flow_template.lookup(&zero);
	if (!template)
		return 0;
	/* Another CPU may have been first: the lookup below finds its entry. */
	if (!flows.insert(&packet->key, template)) {
		event.key = packet->key;
		event.first_ns = now;
		event.psn = packet->psn;
		event.opcode = packet->opcode;
		events.ringbuf_output(&event, sizeof(event), 0);
	}
	return flows.lookup(&packet->key);
}

/* CLOCK_MONOTONIC, or the capture's own clock. */
static __always_inline __u64 exact_time(const struct roce_packet *packet)
{
#ifdef STELLAR_REPLAY
	return packet->captured_ns;
#else
	return bpf_ktime_get_ns();
#endif
}

/* The same clock as of the last tick (1 to 10 ms ago), for a third of the cost. */
static __always_inline __u64 coarse_time(const struct roce_packet *packet)
{
#ifdef STELLAR_REPLAY
	return packet->captured_ns;
#else
	return bpf_ktime_get_coarse_ns();
#endif
}

/* Amounts are added atomically, as packets that change nothing else take no lock. */
#define ADD(counter, amount) __sync_fetch_and_add(&(counter), amount)

/* What every packet adds, under the flow's lock or not. */
static __always_inline void count_amounts(struct flow_stats *flow, struct roce_packet *packet,
					  __u64 now)
{
	__u32 kind = FORGET(packet->kind);

	if (now > flow->last_ns)
		flow->last_ns = now;
	ADD(flow->packets, 1);
	ADD(flow->wire_bytes, packet->wire_len);
	if (packet->payload_len)
		ADD(flow->payload_bytes, packet->payload_len);
	if (kind < KIND_MAX)
		ADD(flow->kinds[kind], 1);
	ADD(flow->ecn[packet->traffic_class & 3], 1);
	if (packet->ack_request)
		ADD(flow->ack_requests, 1);
}

/* Whether this packet is like those before it, in all that is written under the lock. */
static __always_inline int changes_nothing(const struct flow_stats *flow,
					   const struct roce_packet *packet)
{
	return flow->packets && !packet->rare && flow->sport == packet->sport &&
	       flow->transport == packet->transport && packet->payload_len <= flow->max_payload &&
	       (flow->dscp_seen >> (packet->traffic_class >> 2) & 1) &&
	       (flow->pmtu_log2 || !IN_SET(OPS_FIRST | OPS_MIDDLE, packet->operation));
}

/* Whether a request is the very next one, nothing is missing or unsure, and no round trip
 * begins to be timed with it. Two CPUs with one flow's packets at the same moment see the
 * order that they make of it; amounts stay exact. */
static __always_inline int is_next(const struct flow_stats *flow, const struct roce_packet *packet,
				   int probe)
{
	return packet->psn == flow->next_psn && flow->expected_psn == flow->next_psn &&
	       !flow->psn_slack && packet->operation != OP_READ_REQUEST &&
	       (flow->flags & (FLOW_PSN_VALID | FLOW_SEQUENCE_ERROR)) == FLOW_PSN_VALID &&
	       (!probe || (flow->flags & FLOW_PROBE));
}

/* Account one packet. Returns REASON_ROCE, or REASON_FLOW_TABLE_FULL. */
static __always_inline int observe(struct roce_packet *packet)
{
	__u64 now;
	__u32 learnt_qpn = 0, learnt_state = 0;
	__u32 peer_qpn, pair_state, partner_pmtu = 0;
	int ordered = has_request_order(packet) && !IN_SET(OPS_RESPONSE, packet->operation);
	int answers = acknowledges(packet), probe, sight, refused;
	struct flow_stats *flow, *partner = 0;
	struct flow_key key;

	packet->kind = kind_of(packet);

	flow = flows.lookup(&packet->key);
	if (!flow) {
		flow = flow_create(packet, exact_time(packet));
		if (!flow)
			return REASON_FLOW_TABLE_FULL;
	}

	/* Unlocked reads: hints only, a stale one costs a lookup. */
	pair_state = flow->pair_state;
	peer_qpn = flow->peer_qpn;
	probe = ordered && packet->transport != TRANSPORT_UC &&
		(packet->ack_request || IN_SET(OPS_ALWAYS_ANSWERED, packet->operation));
	if ((answers || probe) && pair_state != PAIR_REGISTRY &&
	    (flow->packets <= PAIR_RETRY_MASK || !(flow->packets & PAIR_RETRY_MASK))) {
		struct pair *pair = pairs.lookup(&packet->key);

		if (pair) {
			learnt_qpn = pair->peer_qpn;
			learnt_state = pair->state;
		} else if (answers && pair_state == PAIR_UNKNOWN) {
			learnt_qpn = infer_peer(packet, exact_time(packet));
			learnt_state = PAIR_INFERRED;
		}
		if (learnt_qpn) {
			peer_qpn = learnt_qpn;
			pair_state = learnt_state;
		}
	}
	if (pair_state != PAIR_UNKNOWN &&
	    (answers || (packet->operation == OP_READ_REQUEST && !flow->pmtu_log2))) {
		partner_key(&key, &packet->key, peer_qpn);
		partner = flows.lookup(&key);
		if (partner && !answers)
			partner_pmtu = partner->pmtu_log2;
	}

	/* Most ACKs time nothing: all that their flow needs is roughly when it was last seen. */
	if (packet->operation == OP_ACKNOWLEDGE && flow->packets && partner &&
	    !((partner->flags & FLOW_PROBE) && partner->probe_psn == packet->psn))
		now = coarse_time(packet);
	else
		now = exact_time(packet);

	refused = packet->has_aeth && packet->syndrome >> AETH_KIND_SHIFT != AETH_KIND_ACK;
	packet->refused = refused;
	refused = FORGET(packet->refused);
	packet->settled = !learnt_qpn && changes_nothing(flow, packet) &&
			  (ordered ? is_next(flow, packet, probe)
				   : !refused && packet->kind != KIND_READ_RESPONSE);
	if (FORGET(packet->settled)) {
		count_amounts(flow, packet, now);
		if (ordered)
			flow->next_psn = flow->expected_psn = psn_add(packet->psn, 1);
		if (IN_SET(OPS_END, packet->operation))
			ADD(flow->messages, 1);
		goto accounted;
	}

	bpf_spin_lock(&flow->lock);
	if (!flow->packets) {
		flow->first_ns = now;
		flow->sport = packet->sport;
	}
	/* A CNP says nothing about its queue pair's transport. */
	if (!flow->packets || flow->transport == TRANSPORT_CNP)
		flow->transport = packet->transport;
	count_amounts(flow, packet, now);
	flow->dscp_seen |= 1ULL << (packet->traffic_class >> 2);
	if (packet->rare) {
		flow->fecn += packet->fecn;
		flow->becn += packet->becn;
		flow->cut_packets += packet->cut;
		if (packet->tags) {
			flow->vlan_packets++;
			flow->vlan_tci = packet->vlan_tci;
		}
		if (packet->source_qpn)
			flow->source_qpn = packet->source_qpn;
	}
	if (flow->sport != packet->sport) {
		flow->sport = packet->sport;
		flow->sport_changes++;
	}
	if (packet->payload_len > flow->max_payload)
		flow->max_payload = packet->payload_len;
	if (!flow->pmtu_log2) {
		if (IN_SET(OPS_FIRST | OPS_MIDDLE, packet->operation) &&
		    packet->transport != TRANSPORT_CNP)
			flow->pmtu_log2 = log2_floor(packet->payload_len);
		else
			flow->pmtu_log2 = partner_pmtu;
	}
	if (learnt_qpn && learnt_state >= flow->pair_state) {
		flow->peer_qpn = learnt_qpn;
		flow->pair_state = learnt_state;
	}

	if (ordered) {
		sight = order_request(flow, packet);
		if (sight != SIGHT_REPEATED && IN_SET(OPS_END, packet->operation))
			ADD(flow->messages, 1);
		/* Karn: only what was never sent before can time its ACK. */
		if (probe && sight == SIGHT_NEW && !(flow->flags & FLOW_PROBE)) {
			flow->flags |= FLOW_PROBE;
			flow->probe_psn = packet->psn;
			flow->probe_ns = now;
		}
	} else if (packet->kind == KIND_READ_RESPONSE) {
		order_response(flow, packet);
	} else if (IN_SET(OPS_END, packet->operation)) {
		ADD(flow->messages, 1); /* datagrams */
	}
	if (refused)
		count_syndrome(flow, packet->syndrome);
	bpf_spin_unlock(&flow->lock);

accounted:
	if (probe && pair_state == PAIR_UNKNOWN)
		inflight_remember(packet, now);
	if (answers && partner && !acknowledge_unlocked(partner, packet, pair_state)) {
		bpf_spin_lock(&partner->lock);
		acknowledge(partner, packet, now);
		if (pair_state >= partner->pair_state) {
			partner->peer_qpn = packet->key.dqpn;
			partner->pair_state = pair_state;
		}
		bpf_spin_unlock(&partner->lock);
	}
	return REASON_ROCE;
}

/* The packet in hand, cleared. */
static __always_inline struct roce_packet *packet_take(__u32 port, __u32 direction)
{
	struct roce_packet *packet;
	__u32 zero = 0;

	packet = packet_in_hand.lookup(&zero);
	if (packet) {
		__builtin_memset(packet, 0, ROCE_PACKET_CLEARED);
		packet->key.port = port;
		packet->key.direction = direction;
	}
	return packet;
}

static __always_inline void count_reason(__u32 port, __u32 direction, __u32 reason)
{
	__u32 index = (port * 2 + direction) * REASON_MAX + reason;
	__u64 *count = reasons.lookup(&index);

	if (count)
		(*count)++;
}

#endif
