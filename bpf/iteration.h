/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * How far a job is in its iteration: payload sent since the last pause of gap_ns. Every
 * outgoing flow of the job on this host counts, whatever its interface.
 */
#ifndef STELLAR_ITERATION_H
#define STELLAR_ITERATION_H

#include "count.h"

/* Account `bytes` of new payload. Returns the bytes of this iteration so far. */
static __always_inline __u64 iteration_advance(struct job_progress *job, __u32 number, __u64 gap_ns,
					       __u64 bytes, __u64 now)
{
	struct iteration_event event = {};

	/* Several CPUs may see the pause; the lock lets one of them begin the iteration. */
	if (gap_ns && job->last_ns + gap_ns < now) {
		bpf_spin_lock(&job->lock);
		if (job->last_ns + gap_ns < now) {
			event.job = number;
			event.iteration = ++job->iteration;
			event.start_ns = now;
			event.previous_start_ns = job->start_ns;
			event.previous_last_ns = job->last_ns;
			event.previous_bytes = job->bytes;
			job->start_ns = now;
			job->last_ns = now;
			job->bytes = 0;
		}
		bpf_spin_unlock(&job->lock);
		if (event.job)
			events.ringbuf_output(&event, sizeof(event), 0);
	}
	if (now > job->last_ns)
		job->last_ns = now;
	if (bytes)
		ADD(job->bytes, bytes);
	return job->bytes;
}

/* Where in its sync window a job is. Through the packet in hand, so that the verifier does not
 * follow each phase to the end. */
static __always_inline __u32 phase_of(struct roce_packet *packet, const struct job_plan *plan,
				      __u64 bytes, const struct dcqcn_control *constants, __u64 now)
{
	packet->phase = PHASE_MIDDLE; /* nothing known: plain DCQCN */
	if (now < plan->window_start_ns) {
		packet->phase = PHASE_IDLE;
	} else if (plan->expected_bytes) {
		if (bytes << 8 < plan->expected_bytes * constants->begin_q8)
			packet->phase = PHASE_BEGIN;
		else if (bytes << 8 >= plan->expected_bytes * constants->end_q8)
			packet->phase = PHASE_END;
	}
	return FORGET(packet->phase);
}

#endif
