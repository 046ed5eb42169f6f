"""What to do about each verdict, in the words and knobs of those who run RoCE clusters."""

from __future__ import annotations

NETWORK_LOSS = (
    "Look where the path drops: on the switches, drops of the lossless queue and PFC pause "
    "counters of each port; on both hosts `ethtool -S IF | grep -E 'discard|out_of_buffer|"
    "pause|crc|symbol'`. Usual causes: PFC not enabled for this DSCP's priority on every hop "
    "(`mlnx_qos -i IF`, trust DSCP), ECN thresholds above the PFC headroom, a bad cable (CRC "
    "and symbol errors)."
)
TIMEOUT_LOSS = (
    "Compare `out_of_sequence` and `local_ack_timeout_err` of `rdma statistic show` on both "
    "ends. Losses at the end of a message show as timeouts only: check the switch drops as "
    "for NAKs. Without drops the responder is late: raise the QP timeout (NCCL_IB_TIMEOUT, "
    "default 20 = 4 s), and look for PFC pauses on the way back."
)
ACK_TIMEOUT = (
    "Raise the QP timeout (NCCL_IB_TIMEOUT, default 20 = 4 s; perftest -u, default 14 = 67 ms) "
    "above the worst round trip. If that is long already, find what keeps the responder from "
    "its work: too few CPUs for soft-RoCE, PFC pauses, a full receive queue."
)
HOST_DROPS = (
    "Mend the host first: grow the ring (`ethtool -G IF rx MAX`) or the qdisc's limit that "
    "the counters name, let the receiving CPUs keep up (IRQ affinity, RPS), and check the "
    "MTU: it must hold the path MTU plus 96 bytes of headers."
)
CAPTURE_LOSS = (
    "Nothing in the network. Capture with less loss: a snap length of 128 bytes "
    "(`tcpdump -s 128 -B 65536`), a filter on UDP port 4791, an own port for the mirror; "
    "an oversubscribed mirror port drops silently."
)
OBSERVER_LOSS = (
    "Nothing in the network: these packets took a way that is not observed (another port of "
    "a bond, a NIC that bypasses the kernel). `controller status` tells what is attached; "
    "attach to the remaining interfaces."
)
UNDECIDED_CAPTURE = (
    "Do not read this as loss. Capture both directions, somewhat longer, until the "
    "acknowledgements of the last requests are in the file; compare with the drop counters "
    "of the capturing tool (`tcpdump` prints them at its end)."
)
UNDECIDED = (
    "Do not read this as loss. Attach where both directions of the flow pass, and look again: "
    "an acknowledgement or a second transmission decides."
)
RECEIVER_LIMITED = (
    "Post more receives, or earlier: RQ or SRQ depth of the receiving application, and its "
    "CPU (a busy progress thread posts late). rnr_retry = 7 (forever) and a small min_rnr_timer "
    "keep the queue pair alive meanwhile; `rdma statistic show` counts out_of_buffer there."
)
REMOTE_ERROR = {
    "invalid_request": (
        "Invalid request: the message is longer than the posted receive, or the operation "
        "is not enabled: compare message and receive sizes, qp_access_flags and "
        "max_dest_rd_atomic of the peer."
    ),
    "remote_access": (
        "Remote access: rkey, address or length is not in a registered region with that "
        "access: look for a region deregistered or moved during the transfer, and "
        "IBV_ACCESS_REMOTE_* flags."
    ),
    "remote_operation": (
        "Remote operation: the peer's NIC could not complete the request: read the peer's "
        "completion errors and `dmesg`."
    ),
    "invalid_rd_request": "Invalid RD request: the peer's queue pair is of another type.",
    "other": "Reserved NAK code: the peer's NIC or firmware speaks another dialect; update it.",
}
MARKED = (
    "Find the queue that marks: ECN-marked packets of each switch port's RoCE class; incast "
    "at the receiver is the usual one. See that DCQCN is on at both ends (`mlnx_qos`, "
    "/sys/class/net/IF/ecn/roce_np and roce_rp), that Kmin/Kmax fit the link speed, and "
    "let jobs take turns (`controller` priorities) rather than share the queue."
)
ONE_SIDED_DSCP = (
    "Set the same traffic class at both ends: NCCL_IB_TC (106 = DSCP 26 with ECT) on every "
    "rank, or the host default (`cma_roce_tos -d DEV -t 106`; /sys/class/infiniband/DEV/tc/1/"
    "traffic_class). If a switch rewrites it, make its port trust DSCP."
)
DSCP_0 = (
    "If the fabric has a lossless or an own class for RoCE, choose it: NCCL_IB_TC=106 (DSCP 26 "
    "with ECT), UCX_IB_TRAFFIC_CLASS=106, or `cma_roce_tos -d DEV -t 106`; PFC and ECN are "
    "usually configured for that DSCP only."
)
NOT_ECT = (
    "Set ECT in the traffic class: its low two bits are the ECN field, so NCCL_IB_TC=106 "
    "means DSCP 26 and ECT(0), 104 the same without ECN. ConnectX sets ECT itself once "
    "roce_rp is enabled for the priority."
)
LOW_ENTROPY = (
    "More source ports: NCCL_IB_QPS_PER_CONNECTION=4 with NCCL_IB_SPLIT_DATA_ON_QPS=1, a flow "
    "label in the address handle (rdma-core derives the port from it), or a switch that "
    "hashes on the destination QP or routes adaptively."
)
REORDERING = (
    "Packet spraying or adaptive routing, or a LAG that is rehashed: legal only if both NICs "
    "accept it (ConnectX: `mlxreg ... roce_accl adaptive_routing_forced_en`, out-of-order "
    "placement). Otherwise keep flows on one path."
)
REORDERING_CAPTURE = (
    "Perhaps the capture itself (several receive queues, merged files): look at backward "
    "timestamps. Otherwise packet spraying, adaptive routing or a rehashed LAG, which both "
    "NICs must accept (out-of-order placement)."
)
CAPTURED_TWICE = (
    "Capture at one point: one direction of the mirror, one interface rather than `-i any`; "
    "or remove the copies (`editcap -d IN OUT`) and analyze again."
)
NOTHING_WRONG = (
    "Look above the network: compute time, stragglers among the ranks, host memory and PCIe, "
    "the application's pipeline."
)
