/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Congestion point: a virtual queue that drains somewhat slower than the link, sampled at the
 * ends of time slots. The mean of the last slots and of the moment goes through Kmin, Kmax
 * and Pmax (RED as in DCQCN, SIGCOMM 2015, 3.1). controller/congestion/marking.py is the same
 * on floating-point numbers.
 *
 * Every packet adds its bytes atomically. All else changes under the lock, but for a queue that
 * runs empty. What another CPU reads meanwhile may make one packet's decision wrong.
 */
#ifndef STELLAR_ECN_H
#define STELLAR_ECN_H

#include "count.h"

/* Products stay inside 64 bits for 2^32 ns (4.3 s), up to 1.6 Tbit/s. After a longer silence at
 * least 17 GB count as drained: a queue is empty then. */
#define MARKER_FORGET_SHIFT 34

/* The line that a queue follows from `base` is begun anew after this long at the latest, for a
 * drain rate may change. Each time up to a byte does not drain: 15 bytes a second, where once
 * a slot it would be a tenth of a 1 Mbit/s link. */
#define MARKER_REBASE_NS (1ULL << 26)

/* Samples are 32 bits wide. */
#define MARKER_UNLIMITED 0xffffffffULL

/* A difference, or 0 where it is negative. Without a branch: the verifier would follow a known
 * zero down every way behind it. */
static __always_inline __u64 positive(__u64 difference)
{
	__u64 sign = difference;

	asm volatile("" : "+r"(sign)); /* the compiler must not make a branch of it */
	return difference & ~((__s64)sign >> 63);
}

static __always_inline int is_negative(__u64 number)
{
	/* Or the compiler takes the sum apart into its comparisons. */
	asm volatile("" : "+r"(number));
	return (__s64)number < 0;
}

static __always_inline __u64 at_most(__u64 amount, __u64 limit)
{
	return limit - positive(limit - amount);
}

/* Queue at `at`, of which `arrived` are the bytes that came until then. */
static __always_inline __u64 marker_queue(const struct marker *marker, __u64 arrived,
					  __u64 drain_q24, __u64 at)
{
	__u64 elapsed = positive(at - marker->base_ns);
	__u64 queue = marker->base_queue + arrived - marker->base_arrived;
	__u64 drained = elapsed * drain_q24 >> 24 | elapsed >> 32 << MARKER_FORGET_SHIFT;

	return positive(queue - drained);
}

/* Negative when the queue is full, or its line old. */
static __always_inline __u64 line_holds(const struct marker *marker, __u64 queue, __u64 limit,
					__u64 now)
{
	return (limit - queue) | (marker->base_ns + MARKER_REBASE_NS - 1 - now);
}

/* Take the samples of all slots that ended before `now` (under the lock). */
static __always_inline void marker_sample(struct marker *marker, __u64 drain_q24, __u64 slot_ns,
					  __u64 limit, __u64 now)
{
	__u64 arrived = marker->arrived, end_ns = marker->slot_end_ns, sum = marker->sum, sample;
	__u64 passed = (now - end_ns) / slot_ns;
	__u32 oldest = marker->oldest;

	/* Of a long pause, only the last slots are still in the window. */
	end_ns += positive(passed - MARKER_SLOTS) * slot_ns;
#pragma clang loop unroll(disable)
	for (int i = 0; i <= MARKER_SLOTS; i++) {
		if (end_ns > now)
			break;
		oldest &= MARKER_SLOTS - 1;
		sample = at_most(marker_queue(marker, arrived, drain_q24, end_ns), limit);
		sum += sample - marker->samples[oldest];
		marker->samples[oldest] = sample;
		oldest++;
		end_ns += slot_ns;
	}
	marker->oldest = oldest;
	marker->slot_end_ns = end_ns;
	marker->sum = sum;
}

/* Let the queue follow a new line from `now` where the old one is too old, or the queue full:
 * then the half of it is forgotten, so that not every packet finds it full (under the lock). */
static __always_inline void marker_rebase(struct marker *marker, __u64 drain_q24, __u64 limit,
					  __u64 now)
{
	__u64 arrived = marker->arrived, queue = marker_queue(marker, arrived, drain_q24, now);

	if (!is_negative(line_holds(marker, queue, limit, now)))
		return;
	marker->base_queue = is_negative(limit - queue) ? limit / 2 : queue;
	marker->base_arrived = arrived;
	marker->base_ns += positive(now - marker->base_ns);
}

/*
 * A packet arrives: bring the queue up to date, then add it. Before drain rate and slot are
 * configured, no queue is kept. Another CPU's clock may be ahead: until this one's is as far,
 * nothing drains.
 */
static __always_inline void marker_arrive(struct marker *marker, __u64 drain_q24, __u64 slot_ns,
					  __u64 limit, __u64 now, __u32 bytes)
{
	__u64 arrived = marker->arrived, queue, window;

	if (!drain_q24 || !slot_ns)
		return;
	queue = marker_queue(marker, arrived, drain_q24, now);
	/* A slot has ended, or the line has to: one branch for the verifier, not four. */
	if (is_negative((marker->slot_end_ns - 1 - now) | line_holds(marker, queue, limit, now))) {
		bpf_spin_lock(&marker->lock);
		if (now >= marker->slot_end_ns)
			marker_sample(marker, drain_q24, slot_ns, limit, now);
		marker_rebase(marker, drain_q24, limit, now);
		bpf_spin_unlock(&marker->lock);
		arrived = marker->arrived;
		queue = marker_queue(marker, arrived, drain_q24, now);
	}
	if (is_negative(queue - 1)) {
		/*
		 * It ran empty, and what was not used of the link is lost: a new line. Under a
		 * light load this is every packet, so it takes no lock (50 ns). In this order a
		 * reader between two stores finds the queue empty, too; should two CPUs write at
		 * once, what came in that moment may count twice, or not.
		 */
		marker->base_queue = 0;
		asm volatile("" ::: "memory");
		marker->base_arrived = arrived;
		asm volatile("" ::: "memory");
		marker->base_ns += positive(now - marker->base_ns);
	}
	marker->queue = queue;
	/* The moment stands for the open slot, in place of the oldest sample. */
	window = marker->sum - marker->samples[marker->oldest & (MARKER_SLOTS - 1)] + queue;
	marker->average = window / MARKER_SLOTS;
	ADD(marker->arrived, bytes);
}

/* Probability << 32 of a mark: none up to Kmin, certainty (2^32) above Kmax. */
static __always_inline __u64 mark_probability_q32(const struct class_control *class, __u64 queue)
{
	if (queue <= class->kmin_bytes)
		return 0;
	if (queue > class->kmax_bytes)
		return 1ULL << 32;
	return (queue - class->kmin_bytes) * class->pmax_q32 /
	       (class->kmax_bytes - class->kmin_bytes);
}

static __always_inline struct marker *marker_of(__u32 port, __u32 class)
{
	__u32 index = port * MARKERS_PER_PORT + class;

	return markers.lookup(&index);
}

/* Traffic that is not marked takes its part of the link, too. How much of it is too much, a
 * class decides. */
static __always_inline void marker_pass(__u32 port, const struct port_control *settings, __u64 now,
					__u32 bytes)
{
	struct marker *all = marker_of(port, STELLAR_CLASSES);

	if (all)
		marker_arrive(all, settings->drain_q24, settings->slot_ns, MARKER_UNLIMITED, now,
			      bytes);
}

/*
 * Where a class takes a queue for full. One sample of half this size lifts the window's average
 * above Kmax: more would not mark more, but take long to drain after traffic that heeds no
 * marks. Kmax of two classes should not differ more than this either: the port's queue is full
 * where the lowest one says so.
 */
static __always_inline __u64 marker_limit(const struct class_control *class)
{
	__u64 limit = (class->kmax_bytes + 1ULL) * (2 * MARKER_SLOTS);

	return limit < MARKER_UNLIMITED ? limit : MARKER_UNLIMITED;
}

/* Whether this packet is to be marked; counts it in both queues either way. */
static __always_inline int marker_decide(__u32 port, const struct port_control *settings,
					 const struct class_control *class, __u32 number, __u64 now,
					 __u32 bytes)
{
	struct marker *all = marker_of(port, STELLAR_CLASSES), *own = marker_of(port, number);
	__u64 average, queue, limit = marker_limit(class);

	if (!all || !own)
		return 0;
	marker_arrive(all, settings->drain_q24, settings->slot_ns, limit, now, bytes);
	marker_arrive(own, class->drain_q24, settings->slot_ns, limit, now, bytes);
	/* The class's share may be exhausted, or the whole port: the worse of them. */
	average = all->average > own->average ? all->average : own->average;
	queue = all->queue > own->queue ? all->queue : own->queue;
	if (settings->flags & PORT_MARK_INSTANT)
		return (__u64)bpf_get_prandom_u32() < mark_probability_q32(class, queue);
	if (average > class->kmin_bytes) {
		if ((__u64)bpf_get_prandom_u32() >= mark_probability_q32(class, average))
			return 0;
		if (queue <= class->kmin_bytes)
			count_act(port, ACT_WINDOW_ONLY);
		return 1;
	}
	if (queue > class->kmin_bytes)
		count_act(port, ACT_WINDOW_SPARED);
	return 0;
}

#endif
