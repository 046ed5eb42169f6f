/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What differs between two attachments of one program: immediates that the loader writes
 * into the instructions below before it loads the program.
 */
#ifndef STELLAR_PORT_H
#define STELLAR_PORT_H

#include "shared.h"

/* The loader looks for a 64-bit immediate load of this value. */
#define STELLAR_PORT_PLACEHOLDER 0x57e11a0157e11a01

static __always_inline __u32 port_number(void)
{
	__u64 port;

	/* asm: the compiler must not fold the placeholder into arithmetic */
	asm volatile("%0 = 0x57e11a0157e11a01 ll" : "=r"(port));
	return port & (STELLAR_MAX_PORTS - 1);
}

/* Whether this attachment acts on packets, or only observes. The loader writes 0 or 1 here;
 * with 0 the verifier takes out all that acts, so an observer does not pay for it. */
#define STELLAR_ACTS_PLACEHOLDER 0x57e11a0257e11a02

static __always_inline __u64 port_acts(void)
{
	__u64 acts;

	asm volatile("%0 = 0x57e11a0257e11a02 ll" : "=r"(acts));
	return acts;
}

#endif
