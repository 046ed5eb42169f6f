/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * DCQCN reaction point (Zhu et al., SIGCOMM 2015, 3.1), one a flow. State
 * changes under the flow's lock; there are no timers: expiries that are due are worked off
 * when a packet comes by, those of a long silence in closed form.
 * controller/congestion/reaction_point.py is an independent model that takes every step.
 *
 * `volatile` throughout: kept in registers, the numbers of each way through the code would be
 * different ones to the verifier, and it would follow them all.
 *
 * Fixed point: alpha << 32, shares of a rate << 24; rates are whole bytes a second.
 */
#ifndef STELLAR_DCQCN_H
#define STELLAR_DCQCN_H

#include "iteration.h"

#define ALPHA_ONE (1ULL << 32)

/* A rate so near the link's is the link's: the limiter is released. 11.5 halvings: cuts and
 * recoveries lead to whole ones, and rounding shall not decide. */
#define DCQCN_RELEASE_Q19 181

/* Bounds of the loop over the timer's due expiries, each turn one of them or many in closed
 * form. What a packet leaves is worked off with the next ones. A cut must know the rate: after
 * no silence does a preset need more than 100 turns, 80 of them hyper increase that the timer's
 * stage decides on, at a quarter of the step. */
#define DCQCN_TURNS_SEND     24
#define DCQCN_TURNS_FEEDBACK 112

/* Stages beyond are this one. Hyper increase has reached the link's rate long before. */
#define DCQCN_MAX_STAGE (1U << 20)

/* All ones where a < b, else 0; both below 2^63. No branch here and in what follows, neither for
 * the compiler: the verifier would follow both sides of each in every turn of the loop. */
static __always_inline __u64 below(__u64 a, __u64 b)
{
	__u64 difference = a - b;

	asm volatile("" : "+r"(difference));
	return (__s64)difference >> 63;
}

static __always_inline __u64 lesser(__u64 a, __u64 b)
{
	return b ^ ((a ^ b) & below(a, b));
}

/* base_q32 ^ n by squaring. Beyond 2^20 nothing is left of it: g is at least 2^-16. */
#define POWER_BITS 20

static __always_inline __u64 power_q32(__u64 base_q32, __u64 n)
{
	__u64 result = ALPHA_ONE;

	if (n >> POWER_BITS)
		return 0;
#pragma unroll
	for (int bit = 0; bit < POWER_BITS; bit++) {
		__u64 chosen = 0 - (n >> bit & 1);

		/* Hidden from the compiler, which would make a branch of it, and the verifier
		 * would follow each of 2^20 ways. */
		asm volatile("" : "+r"(chosen));
		result = ((result * base_q32 >> 32) & chosen) | (result & ~chosen);
		base_q32 = base_q32 * base_q32 >> 32;
	}
	return result;
}

/* alpha now: it shrinks by g for each update period without feedback. */
static __always_inline __u64 alpha_decayed(const volatile struct flow_control *control,
					   const struct dcqcn_control *constants, __u64 now)
{
	__u64 periods = 0;

	if (now > control->alpha_ns && constants->alpha_update_ns)
		periods = (now - control->alpha_ns) / constants->alpha_update_ns;
	/* alpha may be 1 and the power, too, but only without a period. */
	if (!periods)
		return control->alpha_q32;
	return (control->alpha_q32 >> 1) * power_q32(ALPHA_ONE - constants->g_q32, periods) >> 31;
}

/* By how much the expiry that is counted already raises the target rate. */
static __always_inline __u64 dcqcn_step(const volatile struct flow_control *control,
					const struct dcqcn_control *constants, __u32 phase_q8)
{
	__u64 timer = control->timer_stage, bytes = control->byte_stage;
	__u64 least = lesser(timer, bytes), most = timer + bytes - least;
	__u64 recover = constants->fast_recovery_steps, hyper = below(recover, least);
	__u64 step = ((least - recover) * constants->rate_hai_Bps & hyper) |
		     (constants->rate_ai_Bps & ~hyper);

	/* The smallest factor is 1 / 256: with it, this still reaches the link's rate. */
	step = lesser(step, constants->link_Bps << 8);
	/* F of them recover. */
	return (step * phase_q8 >> 8) & below(recover, most);
}

/* `n` increases by the same step: the distance from Rc to Rt goes to the step by halves. Several
 * only where the target stays below the link's rate. Rc is rounded up, so that it gets there. */
static __always_inline void dcqcn_increase(volatile struct flow_control *control,
					   const struct dcqcn_control *constants, __u64 step,
					   __u64 n)
{
	__u64 link = constants->link_Bps, rate = control->rc_Bps, gap;
	__u64 target = lesser(control->rt_Bps, link); /* the link may have been faster before */

	step = lesser(step, link - target);
	gap = (target - rate) & below(rate, target);
	gap = step + ((__s64)(gap - step) >> lesser(n, 63));
	target += n * step;
	control->rt_Bps = target;
	control->rc_Bps = target - gap;
}

/* From this rate on a flow is free. */
static __always_inline __u64 dcqcn_free_Bps(const struct dcqcn_control *constants)
{
	return constants->link_Bps - (constants->link_Bps * DCQCN_RELEASE_Q19 >> 19);
}

static __always_inline void dcqcn_release(volatile struct flow_control *control,
					  const struct dcqcn_control *constants)
{
	if (control->rc_Bps < dcqcn_free_Bps(constants))
		return;
	control->limited = 0;
	control->rc_Bps = control->rt_Bps = constants->link_Bps;
	control->timer_stage = control->byte_stage = 0;
	control->bytes = 0;
}

/* One expiry of the timer, or as many of `due` as are known to be alike. Returns how many. */
static __always_inline __u64 dcqcn_expire(volatile struct flow_control *control,
					  const struct dcqcn_control *constants, __u32 phase_q8,
					  __u64 due)
{
	__u64 free = dcqcn_free_Bps(constants), target = control->rt_Bps;
	__u64 stage = control->timer_stage + 1, step, alike, n;

	control->timer_stage = stage;
	step = dcqcn_step(control, constants, phase_q8);
	/* The step stays unless the timer's stage decides on it; no release below `free`. */
	alike = below(constants->fast_recovery_steps, stage) & ~below(stage, control->byte_stage) &
		below(target, free);
	/* | 1: the step may be 0, and one expiry less at a time does no harm. */
	n = lesser(due, ((free - target) & alike) / (step | 1));
	n += 1 & below(n, 1);
	control->timer_stage = lesser(stage + n - 1, DCQCN_MAX_STAGE);
	dcqcn_increase(control, constants, step, n);
	return n;
}

static __always_inline __u32 phase_factor_q8(const struct dcqcn_control *constants, __u32 phase)
{
	return constants->flags & DCQCN_PHASES ? constants->phase_q8[phase & 3] : 256;
}

/* Work off the timer's expiries until `now` (under the lock). */
static __always_inline void dcqcn_advance(volatile struct flow_control *control,
					  const struct dcqcn_control *constants, __u32 phase,
					  int turns, __u64 now)
{
	__u32 phase_q8 = phase_factor_q8(constants, phase);
	__u64 due, done = 0, free = dcqcn_free_Bps(constants);

	if (!control->limited || control->expiry_ns > now || !constants->timer_ns)
		return;
	phase &= 3;
	due = (now - control->expiry_ns) / constants->timer_ns + 1;
#pragma clang loop unroll(disable)
	for (int i = 0; i < turns; i++) {
		if (done >= due || control->rc_Bps >= free)
			break;
		done += dcqcn_expire(control, constants, phase_q8, due - done);
	}
	dcqcn_release(control, constants);
	control->expiry_ns += done * constants->timer_ns;
	control->phase = phase;
	control->increases[phase] += done;
}

/* Begin to limit at `rc` with target `rt`; stages and clocks start anew. */
static __always_inline void dcqcn_limit(volatile struct flow_control *control,
					const struct dcqcn_control *constants, __u64 rc, __u64 rt,
					__u64 now)
{
	if (rt > constants->link_Bps)
		rt = constants->link_Bps;
	if (rc > constants->link_Bps)
		rc = constants->link_Bps;
	control->rc_Bps = rc < constants->min_rate_Bps ? constants->min_rate_Bps : rc;
	control->rt_Bps = rt < control->rc_Bps ? control->rc_Bps : rt;
	control->timer_stage = control->byte_stage = 0;
	control->bytes = 0;
	control->expiry_ns = now + constants->timer_ns;
	control->limited = 1;
	dcqcn_release(control, constants);
}

/* Feedback has come (under the lock). Returns whether it cut the rate. */
static __always_inline int dcqcn_feedback(volatile struct flow_control *control,
					  const struct dcqcn_control *constants,
					  __u64 predicted_Bps, __u32 phase, __u64 now)
{
	__u64 alpha, rc, rt, share_q24;

	control->feedback++;
	/* Another CPU was faster: not before what it did. */
	if (now < control->cut_ns)
		now = control->cut_ns;
	dcqcn_advance(control, constants, phase, DCQCN_TURNS_FEEDBACK, now);
	if (control->cut_before && now - control->cut_ns < constants->decrease_interval_ns) {
		control->suppressed++;
		return 0;
	}
	alpha = control->cut_before ? alpha_decayed(control, constants, now)
				    : constants->initial_alpha_q32;
	if (!control->limited && constants->first_cut_Bps) {
		rt = rc = constants->first_cut_Bps;
	} else {
		rt = rc = control->limited ? control->rc_Bps : constants->link_Bps;
		/* Rc (1 - alpha / 2) */
		share_q24 = alpha >> 9;
		if (share_q24 > constants->max_decrease_q24)
			share_q24 = constants->max_decrease_q24;
		rc -= rc * share_q24 >> 24;
	}
	if (predicted_Bps > constants->link_Bps)
		predicted_Bps = constants->link_Bps;
	if ((constants->flags & DCQCN_PREDICTION) && predicted_Bps > rt) {
		rt = predicted_Bps;
		control->prediction_floors++;
	}
	dcqcn_limit(control, constants, rc, rt, now);
	control->alpha_q32 = alpha - (alpha * constants->g_q32 >> 32) + constants->g_q32;
	control->alpha_ns = now;
	control->cut_ns = now;
	control->cut_before = 1;
	control->cuts++;
	return 1;
}

/* A flow's first packet of an iteration, with a prediction: begin there and not at line rate.
 * Expiries that are due are overtaken by it. */
static __always_inline void dcqcn_begin_window(volatile struct flow_control *control,
					       const struct dcqcn_control *constants,
					       __u64 predicted_Bps, __u64 now)
{
	bpf_spin_lock((struct bpf_spin_lock *)&control->lock);
	dcqcn_limit(control, constants, predicted_Bps, predicted_Bps, now);
	control->prediction_starts++;
	bpf_spin_unlock((struct bpf_spin_lock *)&control->lock);
}

/* The byte counter has expired (under the lock). Once a packet, however long that is. */
static __always_inline void dcqcn_count_bytes(volatile struct flow_control *control,
					      const struct dcqcn_control *constants, __u32 phase)
{
	/* Other CPUs add to it without the lock. */
	ADD(control->bytes, -constants->byte_counter);
	control->byte_stage = lesser(control->byte_stage + 1, DCQCN_MAX_STAGE);
	phase &= 3;
	control->phase = phase;
	control->increases[phase]++;
	dcqcn_increase(control, constants,
		       dcqcn_step(control, constants, phase_factor_q8(constants, phase)), 1);
	dcqcn_release(control, constants);
}

/* A packet is sent: rate in force, 0 for no limit. */
static __always_inline __u64 dcqcn_send(volatile struct flow_control *control,
					const struct dcqcn_control *constants, __u32 phase,
					__u32 bytes, __u64 now)
{
	if (!control->limited)
		return 0;
	ADD(control->bytes, bytes);
	if (now >= control->expiry_ns || control->bytes >= constants->byte_counter) {
		bpf_spin_lock((struct bpf_spin_lock *)&control->lock);
		dcqcn_advance(control, constants, phase, DCQCN_TURNS_SEND, now);
		/* The timer's expiries come first, also those that are left for the next packet. */
		if (control->limited && control->expiry_ns > now &&
		    control->bytes >= constants->byte_counter)
			dcqcn_count_bytes(control, constants, phase);
		bpf_spin_unlock((struct bpf_spin_lock *)&control->lock);
	}
	return control->limited ? control->rc_Bps : 0;
}

#endif
