/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What is done to packets, counted by port and act. */
#ifndef STELLAR_COUNT_H
#define STELLAR_COUNT_H

#include "observe.h"

static __always_inline void count_act(__u32 port, __u32 act)
{
	__u32 index = port * ACT_MAX + act;
	__u64 *count = acts.lookup(&index);

	if (count)
		(*count)++;
}

#endif
