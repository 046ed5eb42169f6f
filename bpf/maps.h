/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Every map. The loader creates them (once; all programs and all attached interfaces
 * share them) and may change only the sizes marked so.
 */
#ifndef STELLAR_MAPS_H
#define STELLAR_MAPS_H

#include "roce.h"

/* The packet in hand, one a CPU. In a map and not on the stack for the verifier's sake:
 * it follows every constant on the stack down every path, and forgets what is in a map. */
BPF_TABLE("percpu_array", __u32, struct roce_packet, packet_in_hand, 1);

/* One entry a flow, interface and direction. Preallocated: a flow's first packet must
 * not fail for lack of atomic memory. Not an LRU: a flow must never lose its counters
 * silently; idle ones are folded and deleted by the controller. Size: `max_flows`. */
BPF_TABLE("hash", struct flow_key, struct flow_stats, flows, STELLAR_MAX_FLOWS);

/* A zeroed flow_stats: too large for the BPF stack, read only. */
BPF_TABLE("array", __u32, struct flow_stats, flow_template, 1);

/* Frames by interface, direction and reason; a counter a CPU, no atomics on the path
 * that every packet of the host takes. */
BPF_TABLE("percpu_array", __u32, __u64, reasons, STELLAR_MAX_PORTS * 2 * REASON_MAX);

/* Requests awaiting their ACK while their queue pair is not paired: one a QP in flight
 * is enough, the oldest may go. */
BPF_TABLE("lru_hash", struct inflight_key, struct inflight, inflight, 16384);

/* Written by the controller from `rdma res show qp`, both directions of each pair.
 * Size: `max_flows`; filled only for local queue pairs, hence not preallocated. */
BPF_F_TABLE("hash", struct flow_key, struct pair, pairs, STELLAR_MAX_FLOWS, BPF_F_NO_PREALLOC);

/* New flows, 64 bytes each: 4096 of them between two reads of the controller. A full
 * ring loses the event, never the flow: the table is scanned as well. */
BPF_RINGBUF_OUTPUT(events, 64);

#ifndef STELLAR_REPLAY
/* ---- control, written by the controller unless said otherwise ---- */

BPF_TABLE("array", __u32, struct port_control, port_controls, STELLAR_MAX_PORTS);
BPF_TABLE("array", __u32, struct class_control, class_controls, STELLAR_MAX_PORTS *STELLAR_CLASSES);
BPF_TABLE("array", __u32, struct dcqcn_control, dcqcn_controls, STELLAR_MAX_PORTS);
BPF_TABLE("array", __u32, struct laxity_control, laxity_controls, 1);

/* DSCP -> class, CLASS_UNSET where no class has it. */
BPF_TABLE("array", __u32, __u32, dscp_classes, 64);

BPF_TABLE("array", __u32, struct job_settings, jobs, STELLAR_MAX_JOBS);

/* Two a job: the controller writes the one that does not hold and then switches. */
BPF_TABLE("array", __u32, struct job_plan, plans, STELLAR_MAX_JOBS * 2);

/* Which outgoing flow has which slot. Size: STELLAR_MAX_CONTROLS. Looked at only when
 * control_epoch is another than when the flow was looked up. Preallocated: many flows of a
 * job begin at once, and the kernel refills free entries of other maps with its next tick. */
BPF_TABLE("hash", struct flow_key, __u32, assignments, STELLAR_MAX_CONTROLS);
BPF_TABLE("array", __u32, __u32, control_epoch, 1);

/* CRC-32 of each byte: the ICRC of a CNP. */
BPF_TABLE("array", __u32, __u32, crc32_table, 256);

/* Written by the programs; a slot's first state by the controller. An array, so that the
 * way from a flow to its state is an index and no second hash lookup. */
BPF_TABLE("array", __u32, struct flow_control, controls, STELLAR_MAX_CONTROLS);
BPF_TABLE("array", __u32, struct job_progress, progress, STELLAR_MAX_JOBS);

/* Departure of the next packet of a job on a port, at the job's own rate. */
BPF_TABLE("array", __u32, __u64, job_departures, STELLAR_MAX_JOBS *STELLAR_MAX_PORTS);
BPF_TABLE("array", __u32, struct marker, markers, STELLAR_MAX_PORTS *MARKERS_PER_PORT);
BPF_TABLE("percpu_array", __u32, __u64, acts, STELLAR_MAX_PORTS *ACT_MAX);
#endif

#ifdef STELLAR_TEST_CLOCK
/* The time in tests: every look at the clock moves it on by a step. */
BPF_TABLE("array", __u32, struct test_clock, test_clock, 1);
#endif

#ifdef STELLAR_REPLAY
/* RoCEv2 packets by BTH opcode. */
BPF_TABLE("array", __u32, __u64, opcodes, 256);
#endif

#endif
