// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* tc egress: gives a frame a VLAN tag that travels beside it, as a VLAN device does. */

int push_tag(struct __sk_buff *skb)
{
	if (!skb->vlan_present)
		bpf_skb_vlan_push(skb, 0x0081 /* 0x8100 in network order */, 5);
	return -1; /* the next program */
}
