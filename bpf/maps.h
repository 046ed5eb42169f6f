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

#ifdef STELLAR_REPLAY
/* RoCEv2 packets by BTH opcode. */
BPF_TABLE("array", __u32, __u64, opcodes, 256);
#endif

#endif
