// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* tc ingress for a frame whose VLAN tag travels beside it, as a receiving NIC hands it over. */
#include "tc.h"

int stellar_tagged(struct __sk_buff *skb)
{
	/* The first tag that is pushed stays beside the frame. */
	bpf_skb_vlan_push(skb, 0x0081 /* 0x8100 in network order */, 0x6005);
	return tc_observe(skb, DIRECTION_INGRESS);
}
