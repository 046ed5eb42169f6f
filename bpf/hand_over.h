/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * From observing to acting: what acting needs of the flow table goes into the packet in hand,
 * and the flow is not looked at again. The verifier then meets the acting part in one state,
 * whichever of its many ways through the observer it came.
 */
#ifndef STELLAR_HAND_OVER_H
#define STELLAR_HAND_OVER_H

#include "ecn.h"
#include "rewrite.h"

/* Slot of an outgoing flow, looked up anew when the controller has changed assignments. */
static __always_inline __u32 slot_of(struct flow_stats *flow, struct flow_key *key)
{
	__u32 zero = 0, *epoch = control_epoch.lookup(&zero), *slot;

	if (!epoch)
		return 0;
	if (flow->epoch != *epoch) {
		slot = assignments.lookup(key);
		flow->slot = slot ? *slot : 0;
		flow->epoch = *epoch;
	}
	return flow->slot;
}

/* Whether the sender of `data` is to be told now; if so it counts as told. */
static __always_inline int echo_due(struct flow_stats *data, const struct port_control *settings,
				    const struct roce_packet *packet)
{
	__u32 ce = data->ecn[ECN_CE];
	__u64 now;

	if (ce == data->echo_ce)
		return 0;
	now = exact_time(packet); /* an ACK's time may be a tick old */
	if (data->echoes && now < data->echo_ns + settings->echo_interval_ns)
		return 0;
	data->echo_ce = ce;
	data->echo_ns = now;
	ADD(data->echoes, 1);
	return 1;
}

/* What a responder sends to end a request: it carries no data of the job. */
static __always_inline int is_answer(__u32 kind)
{
	return kind == KIND_ACK || kind == KIND_NAK || kind == KIND_CNP || kind == KIND_ATOMIC_ACK;
}

/* Whether nothing that this flow sent before and that asks for an acknowledgement lacks one. */
static __always_inline int is_drained(const struct flow_stats *flow,
				      const struct roce_packet *packet)
{
	__u32 next = packet->psn;

	if (packet->transport != TRANSPORT_RC && packet->transport != TRANSPORT_XRC)
		return 1;
	if (IN_SET(OPS_RESPONSE, packet->operation)) {
		/* Its PSN is the peer's. What counts are the requests of this side, if any. */
		if (!(flow->flags & FLOW_PSN_VALID))
			return 1;
		next = flow->next_psn;
	}
	return (flow->flags & FLOW_ACKED) && psn_add(flow->acked_psn, 1) == next;
}

/* Outgoing. Returns whether there is anything to do. */
static __always_inline int hand_over_egress(struct roce_packet *packet, const struct sighting *seen)
{
	__u32 port = packet->key.port;
	struct port_control *settings = port_controls.lookup(&port);

	if (!settings)
		return 0;
	packet->slot = slot_of(seen->flow, &packet->key);
	/* What is never marked takes its part of the link all the same. */
	if ((!FORGET(packet->slot) || is_answer(packet->kind)) &&
	    (settings->flags & (PORT_MARK | PORT_MARK_INSTANT)))
		marker_pass(port, settings, exact_time(packet), packet->wire_len);
	if (!FORGET(packet->slot))
		return 0;
	packet->drained = is_drained(seen->flow, packet);
	packet->with_reads = seen->flow->kinds[KIND_READ_RESPONSE] != 0;
	packet->echo = packet->kind == KIND_ACK && seen->partner &&
		       (settings->flags & (PORT_ECHO_BECN | PORT_ECHO_CNP)) &&
		       echo_due(seen->partner, settings, packet);
	return 1;
}

/* A frame that is not RoCEv2 leaves: it takes its part of the link. */
static __always_inline void hand_over_other(__u32 port, __u32 bytes)
{
	struct port_control *settings = port_controls.lookup(&port);

	if (settings && (settings->flags & (PORT_MARK | PORT_MARK_INSTANT)))
		marker_pass(port, settings, exact_time(0), bytes);
}

/* Incoming. Returns whether there is anything to do: for CNPs, and ACKs with BECN. */
static __always_inline int hand_over_ingress(struct roce_packet *packet,
					     const struct sighting *seen)
{
	struct flow_stats *about = seen->partner;
	__u32 zero = 0, *epoch = control_epoch.lookup(&zero);
	struct flow_key key;

	if (packet->kind == KIND_CNP) {
		/* Addressed to the sender's queue pair, as ACKs are: one flow with them. */
		partner_key(&key, &packet->key, seen->flow->peer_qpn);
		about = flows.lookup(&key);
	} else if (!packet->becn || !packet->has_aeth) {
		return 0;
	}
	/* A slot of an earlier epoch may be another flow's by now: wait until this one sends. */
	packet->slot = about && epoch && about->epoch == *epoch ? about->slot : 0;
	return 1;
}

#endif
