/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Laxity -> class. Laxity is the time that is left when the rest of the iteration's bytes
 * has gone at the expected rate. controller/priority/laxity.py is the same policy on numbers.
 */
#ifndef STELLAR_PRIORITY_H
#define STELLAR_PRIORITY_H

#include "iteration.h"

#define NS_PER_S 1000000000ULL

/* Operations that begin a message, of requests and of READ responses. */
#define OPS_BEGIN                                                                                 \
	(OPS_FIRST | BIT_OF(OP_SEND_ONLY) | BIT_OF(OP_SEND_ONLY_IMM) | BIT_OF(OP_SEND_ONLY_INV) | \
	 BIT_OF(OP_WRITE_ONLY) | BIT_OF(OP_WRITE_ONLY_IMM) | BIT_OF(OP_READ_REQUEST) |            \
	 BIT_OF(OP_READ_RESPONSE_ONLY) | OPS_ATOMIC | BIT_OF(OP_FLUSH) | BIT_OF(OP_ATOMIC_WRITE))

static __always_inline __s64 laxity_ns(const struct job_plan *plan, __u64 bytes, __u64 now)
{
	__u64 rest = plan->expected_bytes > bytes ? plan->expected_bytes - bytes : 0;
	__u64 rest_ns = 0;

	/* KiB: bytes times 10^9 would pass 64 bits beyond 18 GB. */
	if (rest && plan->rate_Bps)
		rest_ns =
			(rest >> 10) * NS_PER_S / (plan->rate_Bps >> 10 ? plan->rate_Bps >> 10 : 1);
	return (__s64)(plan->deadline_ns - now) - (__s64)rest_ns;
}

/* How many of the thresholds a laxity is below. */
static __always_inline __u32 thresholds_above(const __s64 *threshold_ns, __s64 laxity)
{
	__u32 count = 0;

#pragma unroll
	for (__u32 i = 0; i < LAXITY_THRESHOLDS; i++) {
		__u64 below = laxity - threshold_ns[i];

		/* The sign, hidden from the compiler: of a comparison it would make a branch, and
		 * the verifier would follow each of 2^7 ways. */
		asm volatile("" : "+r"(below));
		count += below >> 63;
	}
	return count;
}

static __always_inline __u32 within(__u32 class, __u32 floor, __u32 ceiling)
{
	if (class < floor)
		class = floor;
	return class > ceiling ? ceiling : class;
}

/* Class for a laxity, between floor and ceiling. A class is left downwards only above a
 * threshold of its own, so that a flow does not flap. */
static __always_inline __u32 laxity_class(const struct laxity_control *policy, __s64 laxity,
					  __u32 current, __u32 floor, __u32 ceiling)
{
	__u32 class = thresholds_above(policy->raise_ns, laxity), held;

	if (current != CLASS_UNSET) {
		held = thresholds_above(policy->lower_ns, laxity);
		if (held > current)
			held = current;
		if (class < held)
			class = held;
	}
	return within(class, floor, ceiling);
}

/*
 * Class of a packet of a flow that belongs to a job. It changes at the beginning of a message
 * only: packets that overtake others of their queue pair make RC send again. A plan moves the
 * class within its own limits and the job's; where they contradict each other, the job's hold.
 */
static __always_inline __u32 choose_class(struct flow_control *control,
					  const struct roce_packet *packet,
					  const struct job_settings *job,
					  const struct job_plan *plan, __u64 bytes, __u64 now)
{
	__u32 current = control->class, class = job->class_default, zero = 0;
	struct laxity_control *policy;

	if (!IN_SET(OPS_BEGIN, packet->operation))
		return current;
	policy = laxity_controls.lookup(&zero);
	if (plan->deadline_ns && policy) {
		class = laxity_class(policy, laxity_ns(plan, bytes, now), current,
				     plan->class_floor, plan->class_ceiling);
		class = within(class, job->class_floor, job->class_ceiling);
	}
	if (class < STELLAR_CLASSES && class != current) {
		if (current != CLASS_UNSET && class > current && policy && policy->raise_drained &&
		    !packet->drained)
			return current;
		if (current != CLASS_UNSET)
			ADD(control->class_changes, 1);
		control->class = class;
		current = class;
	}
	return current;
}

#endif
