/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * For benchmarks: BPF_PROG_TEST_RUN repeats one packet. Give each repetition the next PSN
 * of the next of STELLAR_BENCH_FLOWS flows, as traffic would. Every yardstick program does
 * the same, so that a ratio of two of them compares programs and not packets.
 */
#ifndef STELLAR_SPREAD_H
#define STELLAR_SPREAD_H

#include "maps.h"

#define SPREAD_FIRST_QPN     17
#define SPREAD_TRAFFIC_CLASS 2 /* ECT(0), DSCP 0 */

/* Repetitions so far, one counter a CPU. The benchmark sets it before each run: requests
 * go on where their last run ended, and ACKs answer the requests of the same positions. */
BPF_TABLE("percpu_array", __u32, __u64, spread_count, 1);

static __always_inline void spread(struct roce_packet *packet)
{
	__u32 zero = 0;
	__u64 *count = spread_count.lookup(&zero);

	if (!count)
		return;
	packet->key.dqpn = SPREAD_FIRST_QPN + *count % STELLAR_BENCH_FLOWS;
	packet->psn = (*count / STELLAR_BENCH_FLOWS) & PSN_MASK;
	(*count)++;
	if (packet->key.direction != DIRECTION_EGRESS)
		return;
	/* As it was before the last repetition wrote into it. */
	packet->traffic_class = SPREAD_TRAFFIC_CLASS;
	packet->becn = 0;
	packet->rare = 0;
}

#endif
