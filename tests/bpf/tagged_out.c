// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* tc egress for a frame whose VLAN tag travels beside it, as a VLAN interface hands it over. */
#include "tc.h"

int stellar_tagged_out(struct __sk_buff *skb)
{
	/* The first tag that is pushed stays beside the frame. */
	bpf_skb_vlan_push(skb, 0x0081 /* 0x8100 in network order */, 0x6005);
	return tc_observe(skb, DIRECTION_EGRESS);
}
