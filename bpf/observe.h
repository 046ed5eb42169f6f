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

#include "answer.h"

/* While a flow is not paired by the registry, look there on its first packets and then
 * on every 64th. */
#define PAIR_RETRY_MASK 63

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

#ifdef STELLAR_TEST_CLOCK
static __always_inline __u64 test_time(void)
{
	__u32 zero = 0;
	struct test_clock *clock = test_clock.lookup(&zero);
	__u64 now = 0;

	if (clock) {
		now = clock->now_ns;
		clock->now_ns += clock->step_ns;
	}
	return now;
}
#endif

/* CLOCK_MONOTONIC, or the capture's own clock. */
static __always_inline __u64 exact_time(const struct roce_packet *packet)
{
#if defined(STELLAR_REPLAY)
	return packet->captured_ns;
#elif defined(STELLAR_TEST_CLOCK)
	return test_time();
#else
	return bpf_ktime_get_ns();
#endif
}

/* The same clock as of the last tick (1 to 10 ms ago), for a third of the cost. */
static __always_inline __u64 coarse_time(const struct roce_packet *packet)
{
#if defined(STELLAR_REPLAY) || defined(STELLAR_TEST_CLOCK)
	return exact_time(packet);
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

/* What observe() looked up and the hand-over to acting wants. */
struct sighting {
	struct flow_stats *flow;
	struct flow_stats *partner; /* flow that an answer is about; 0 when not known */
};

/* Account one packet. Returns REASON_ROCE, or REASON_FLOW_TABLE_FULL. */
static __always_inline int observe(struct roce_packet *packet, struct sighting *seen)
{
	__u64 now;
	__u32 learnt_qpn = 0, learnt_state = 0;
	__u32 peer_qpn, pair_state, partner_pmtu = 0;
	int ordered = has_request_order(packet) && !IN_SET(OPS_RESPONSE, packet->operation);
	int answers = acknowledges(packet), probe, sight, refused;
	struct flow_stats *flow, *partner = 0;
	struct flow_key key;

	packet->kind = kind_of(packet);
	packet->sight = SIGHT_NEW;

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
		packet->sight = order_request(flow, packet);
		sight = FORGET(packet->sight);
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
	packet->now_ns = now;
	seen->flow = flow;
	seen->partner = partner;
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
