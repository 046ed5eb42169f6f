/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the dataplane does to packets of flows that belong to a job, in order. A flow that
 * belongs to none is left exactly as it was.
 */
#ifndef STELLAR_ACT_H
#define STELLAR_ACT_H

#include "dcqcn.h"
#include "echo.h"
#include "hand_over.h"
#include "pace.h"

/* Everything that holds for a packet of a job's flow. */
struct orders {
	struct flow_control *control;
	struct job_settings *job;
	struct job_plan *plan; /* all zeros: none, or past valid_until_ns */
};

/* `data`: whether the packet is one that a plan is about. */
static __always_inline int orders_of(struct orders *orders, __u32 port, __u32 slot, __u64 now,
				     int data)
{
	__u64 valid_until_ns, holds;
	__u32 job, index;

	orders->control = controls.lookup(&slot);
	if (!orders->control)
		return 0;
	job = orders->control->job;
	orders->job = jobs.lookup(&job);
	if (!job || !orders->job)
		return 0;
	index = job * 2 + (orders->job->plan_buffer & 1);
	orders->plan = plans.lookup(&index);
	if (!orders->plan)
		return 0;
	valid_until_ns = orders->plan->valid_until_ns;
	if (data && valid_until_ns && now >= valid_until_ns)
		count_act(port, ACT_PLAN_EXPIRED);
	/* Past that, the plan of job 0, which nobody writes. By arithmetic that the compiler does
	 * not see through, as the verifier would follow both ways to the end. */
	holds = (now - valid_until_ns) >> 63;
	asm volatile("" : "+r"(holds));
	index *= holds;
	orders->plan = plans.lookup(&index);
	return orders->plan != 0;
}

/* The reaction point of the flow that an incoming CNP, or an ACK with BECN, is about. */
static __always_inline void act_on_feedback(struct roce_packet *packet)
{
	__u32 port = packet->key.port;
	struct port_control *settings = port_controls.lookup(&port);
	struct dcqcn_control *constants = dcqcn_controls.lookup(&port);
	struct orders orders = {};
	struct job_progress *done;
	__u64 predicted_Bps = 0, now;
	__u32 slot, job, phase = PHASE_MIDDLE;
	int cut;

	if (!settings || !constants || !(settings->flags & PORT_DCQCN))
		return;
	slot = packet->slot;
	now = exact_time(packet); /* an ACK's own may be a tick old */
	if (!slot || !orders_of(&orders, port, slot, now, 0) || !(orders.job->flags & JOB_DCQCN))
		return;
	job = orders.control->job;
	done = progress.lookup(&job);
	if (done) {
		predicted_Bps = orders.plan->predicted_Bps;
		phase = phase_of(packet, orders.plan, done->bytes, constants, now);
	}
	bpf_spin_lock(&orders.control->lock);
	cut = dcqcn_feedback(orders.control, constants, predicted_Bps, phase, now);
	bpf_spin_unlock(&orders.control->lock);
	if (cut)
		count_act(port, ACT_CUT);
}

/* Incoming CNPs, and ACKs with BECN. Returns whether the packet ends here. */
static __always_inline int act_ingress(struct roce_packet *packet)
{
	__u32 port = packet->key.port;
	struct port_control *settings;

	act_on_feedback(packet);
	if (packet->kind != KIND_CNP)
		return 0;
	settings = port_controls.lookup(&port);
	if (!settings || !(settings->flags & PORT_CONSUME_CNP))
		return 0;
	count_act(port, ACT_CNP_CONSUMED);
	return 1;
}

/* An ACK, NAK, CNP or atomic ACK of a job's flow: top class, and the echo of marks. */
static __always_inline void act_on_answer(struct __sk_buff *skb, struct roce_packet *packet,
					  const struct port_control *settings,
					  const struct flow_control *control)
{
	__u32 port = packet->key.port, number = STELLAR_TOP_CLASS, index;
	struct class_control *class = 0;
	__u8 wanted;

	/*
	 * To the requester, an ACK that overtakes a READ response means that the response is
	 * lost, and it asks again. So where a flow has READ responses its answers stay with
	 * them, in class and departure. A CNP has no place in the order of PSNs.
	 */
	if (packet->with_reads && packet->kind != KIND_CNP) {
		number = control->class;
		if (settings->flags & PORT_PACE)
			pace_behind(skb, packet, control, settings, exact_time(packet));
	}
	if (number < STELLAR_CLASSES) {
		index = port * STELLAR_CLASSES + number;
		class = class_controls.lookup(&index);
	}
	if (class) {
		wanted = class->dscp << 2 | (packet->traffic_class & ECN_MASK);
		skb->priority = settings->priority_base ? settings->priority_base + number
							: class->priority;
		count_act(port, ACT_CLASSED);
		if (wanted != packet->traffic_class && !write_traffic_class(skb, packet, wanted))
			count_act(port, ACT_REWRITTEN);
	}
	if (!packet->echo)
		return;
	if (settings->flags & PORT_ECHO_CNP) {
		if (!send_cnp(skb, packet, class ? class->dscp << 2 : 0)) {
			count_act(port, ACT_ECHO_CNP);
			return;
		}
		count_act(port, ACT_ECHO_FAILED);
	}
	if (!write_becn(skb, packet))
		count_act(port, ACT_ECHO_BECN);
}

/* Data (and requests for it) of a job's flow. Returns -1 when it is to be dropped. */
static __always_inline int act_on_data(struct __sk_buff *skb, struct roce_packet *packet,
				       const struct port_control *settings, struct orders *orders)
{
	struct flow_control *control = orders->control;
	__u32 port = packet->key.port, job = control->job, number, index;
	__u64 now = packet->now_ns, bytes = 0, gap_ns;
	__u32 payload = packet->sight == SIGHT_REPEATED ? 0 : packet->payload_len;
	struct job_progress *done = progress.lookup(&job);
	struct class_control *class;
	__u8 wanted, ecn;

	ADD(control->packets, 1);
	packet->job_Bps = orders->plan->pace_Bps;
	if (!packet->job_Bps)
		packet->job_Bps = orders->job->pace_Bps;
	packet->flow_Bps = 0;
	if (done) {
		gap_ns = orders->job->gap_ns;
		if (orders->plan->gap_ns)
			gap_ns = orders->plan->gap_ns;
		/* Silence that a retransmission ends was a loss: the iteration is not over. */
		if (packet->sight == SIGHT_REPEATED)
			gap_ns = 0;
		bytes = iteration_advance(done, job, gap_ns, payload, now);
	}

	number = CLASS_UNSET;
	if (settings->flags & PORT_BY_DSCP) {
		__u32 dscp = packet->traffic_class >> 2, *known = dscp_classes.lookup(&dscp);

		number = known ? *known : CLASS_UNSET;
	}
	if (number >= STELLAR_CLASSES)
		number = choose_class(control, packet, orders->job, orders->plan, bytes, now);
	packet->class = number;
	number = FORGET(packet->class);
	if (number < STELLAR_CLASSES) {
		index = port * STELLAR_CLASSES + number;
		class = class_controls.lookup(&index);
		if (!class)
			return 0;
		ADD(control->class_packets[number], 1);
		count_act(port, ACT_CLASSED);
		skb->priority = settings->priority_base ? settings->priority_base + number
							: class->priority;
		ecn = packet->traffic_class & ECN_MASK;
		if (ecn == ECN_NOT_ECT && (orders->job->flags & JOB_SET_ECT)) {
			ecn = ECN_ECT0;
			count_act(port, ACT_ECT_SET);
		}
		if ((settings->flags & (PORT_MARK | PORT_MARK_INSTANT)) &&
		    marker_decide(port, settings, class, number, now, packet->wire_len)) {
			if (ecn == ECN_NOT_ECT) {
				count_act(port, ACT_NOT_ECT);
			} else if (ecn != ECN_CE) {
				ecn = ECN_CE;
				ADD(control->marked, 1);
				count_act(port, ACT_MARKED);
			}
		}
		wanted = class->dscp << 2 | ecn;
		if (wanted != packet->traffic_class && !write_traffic_class(skb, packet, wanted) &&
		    (wanted ^ packet->traffic_class) >> 2)
			count_act(port, ACT_REWRITTEN);
	} else if (settings->flags & (PORT_MARK | PORT_MARK_INSTANT)) {
		marker_pass(port, settings, now, packet->wire_len);
	}

	if ((settings->flags & PORT_DCQCN) && (orders->job->flags & JOB_DCQCN)) {
		struct dcqcn_control *constants = dcqcn_controls.lookup(&port);

		if (constants && done) {
			__u64 predicted_Bps = orders->plan->predicted_Bps;
			__u32 phase = phase_of(packet, orders->plan, bytes, constants, now);

			if (predicted_Bps && (constants->flags & DCQCN_PREDICTION) &&
			    control->iteration != done->iteration) {
				control->iteration = done->iteration;
				dcqcn_begin_window(control, constants, predicted_Bps, now);
			}
			packet->flow_Bps =
				dcqcn_send(control, constants, phase, packet->wire_len, now);
		}
	}
	return settings->flags & PORT_PACE ? pace(skb, packet, control, settings, now) : 0;
}

/* Outgoing. Returns -1 when the packet is to be dropped. */
static __always_inline int act_egress(struct __sk_buff *skb, struct roce_packet *packet)
{
	__u32 port = packet->key.port;
	struct port_control *settings = port_controls.lookup(&port);
	struct orders orders = {};

	if (!settings ||
	    !orders_of(&orders, port, packet->slot, packet->now_ns, !is_answer(packet->kind)))
		return 0;
	if (is_answer(packet->kind)) {
		act_on_answer(skb, packet, settings, orders.control);
		return 0;
	}
	return act_on_data(skb, packet, settings, &orders);
}

#endif
