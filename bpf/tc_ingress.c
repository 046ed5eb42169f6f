// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* tc ingress, for interfaces where XDP is not wanted: parse -> observe -> reaction
 * point. */
#include "tc.h"

int stellar_tc_in(struct __sk_buff *skb)
{
	return tc_observe(skb, DIRECTION_INGRESS);
}
