/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Pacing by earliest departure time (EDT): skb->tstamp, which fq on the same interface keeps.
 *
 * A departure beyond the horizon means that the sender outruns its rate. fq would drop it
 * (its own horizon), and so do other EDT users; but soft-RoCE takes a refused packet for a
 * local error and the queue pair is dead. So it departs at the horizon instead, counted;
 * packets of unreliable transports are dropped if the user asked for it.
 */
#ifndef STELLAR_PACE_H
#define STELLAR_PACE_H

#include "priority.h"

/* Fewer bytes a second are a mistake, and their times would not fit. */
#define PACE_MIN_BPS 1000

/*
 * Departure on one clock, and move it on by what this packet takes. Two CPUs may get the same
 * departure, but each one's bytes are charged, so the rate holds; only where both find the
 * clock idle at the same moment, one of the two packets may go uncharged. Beyond the horizon nothing
 * is charged: a sender that never waits must not push the clock away for ever.
 */
static __always_inline __u64 depart(__u64 *clock, __u32 bytes, __u64 rate_Bps, __u64 now,
				    __u64 horizon_ns)
{
	__u64 departure = *clock;

	if (departure > now + horizon_ns)
		return departure;
	if (departure < now) {
		*clock = now;
		departure = now;
	}
	ADD(*clock, bytes * NS_PER_S / (rate_Bps < PACE_MIN_BPS ? PACE_MIN_BPS : rate_Bps));
	return departure;
}

/* The later of `departure` and a clock that holds packets of before. */
static __always_inline __u64 behind(__u64 departure, const __u64 *clock)
{
	return *clock > departure ? *clock : departure;
}

/*
 * Give a packet its departure: not before the job's clock at job_Bps, nor before the flow's own
 * at flow_Bps. Where a rate has ended, what was sent at it may still wait in fq: the packet
 * departs behind that, and is charged nothing. Both rates come from the packet in hand, so that
 * the verifier follows one case and not every rate that may be 0. Returns 0, or -1 when the
 * packet is to be dropped.
 */
static __always_inline int pace(struct __sk_buff *skb, const struct roce_packet *packet,
				struct flow_control *control, const struct port_control *settings,
				__u64 now)
{
	__u64 job_Bps = FORGET(packet->job_Bps), flow_Bps = FORGET(packet->flow_Bps);
	__u64 departure = now, own, horizon_ns = settings->horizon_ns, *clock;
	__u32 port = packet->key.port, bytes = packet->wire_len;
	__u32 index = control->job * STELLAR_MAX_PORTS + port;

	clock = job_departures.lookup(&index);
	if (clock)
		departure = job_Bps ? depart(clock, bytes, job_Bps, now, horizon_ns)
				    : behind(departure, clock);
	if (flow_Bps) {
		own = depart(&control->departure_ns, bytes, flow_Bps, now, horizon_ns);
		departure = behind(departure, &own);
	} else {
		departure = behind(departure, &control->departure_ns);
	}
	if (!job_Bps && !flow_Bps && departure == now)
		return 0;
	ADD(control->paced, 1);
	count_act(port, ACT_PACED);
	if (departure > now + horizon_ns) {
		ADD(control->beyond_horizon, 1);
		count_act(port, ACT_BEYOND_HORIZON);
		if ((settings->flags & PORT_DROP_BEYOND) &&
		    (packet->transport == TRANSPORT_UC || packet->transport == TRANSPORT_UD))
			return -1;
		departure = now + horizon_ns;
	}
	skb->tstamp = departure;
	return 0;
}

/*
 * An answer that must not overtake the READ responses of its flow: it departs with the next
 * packet of the job and of the flow, and takes nothing of their rates.
 */
static __always_inline void pace_behind(struct __sk_buff *skb, const struct roce_packet *packet,
					const struct flow_control *control,
					const struct port_control *settings, __u64 now)
{
	__u32 index = control->job * STELLAR_MAX_PORTS + packet->key.port;
	__u64 *clock = job_departures.lookup(&index);
	__u64 departure = behind(now, &control->departure_ns);

	if (clock)
		departure = behind(departure, clock);
	if (departure == now)
		return;
	if (departure > now + settings->horizon_ns)
		departure = now + settings->horizon_ns;
	skb->tstamp = departure;
}

#endif
