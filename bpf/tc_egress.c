// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* tc egress: parse -> observe -> class, mark, echo, rate, departure. */
#include "tc.h"

int stellar_tc_out(struct __sk_buff *skb)
{
	return tc_observe(skb, DIRECTION_EGRESS);
}
