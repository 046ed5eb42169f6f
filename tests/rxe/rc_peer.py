"""One side of some RC queue pairs, for what perftest cannot do.

Chosen first PSNs (all queue pairs start with the same one), receives that are posted late,
one message in flight or all of them, a pause behind the first one. A program, run in a host's
namespace: ``rc_peer.py DEVICE GID_INDEX PORT [--connect ADDRESS] [options]``; the side that
connects sends. Prints its queue pair numbers as JSON once they are connected, ``first`` when the
first message of each is complete, and ``done`` at the end.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from pathlib import Path
from typing import Any

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

try:
    import pyverbs.enums as enums
except ImportError:  # its name in newer releases
    import pyverbs.libibverbs_enums as enums

# IBTA vol. 1, table 46: 12 is 0.64 ms, the granularity of the kernel's timers makes it more.
MIN_RNR_TIMER = 12
RETRY_FOREVER = 7
TIMEOUT_1_S = 18  # 4.096 us * 2^18


class Line:
    """JSON lines over TCP."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Two files: one text file of both directions forgets what it read ahead when written.
        self._reader, self._writer = connection.makefile("r"), connection.makefile("w")

    def exchange(self, document: Any) -> Any:
        """Send ours, return theirs: a barrier, too."""
        self._writer.write(json.dumps(document) + "\n")
        self._writer.flush()
        return json.loads(self._reader.readline())


def connect(arguments: argparse.Namespace) -> Line:
    """To the other side, or wait for it."""
    if arguments.connect:
        return Line(socket.create_connection((arguments.connect, arguments.port), timeout=30))
    with socket.create_server(("", arguments.port)) as server:
        server.settimeout(30)
        connection, _ = server.accept()
        connection.settimeout(600)  # the other side may write for minutes
        return Line(connection)


def wait_completions(cq: CQ, count: int) -> None:
    """Poll until `count` completions came; all of them must be good."""
    deadline = time.monotonic() + 50
    while count:
        number, completions = cq.poll(num_entries=16)
        for completion in completions or ():
            if completion.status != enums.IBV_WC_SUCCESS:
                raise SystemExit(f"completion status {completion.status}")
        count -= number
        if not number:
            if time.monotonic() > deadline:
                raise SystemExit(f"{count} completions are missing")
            time.sleep(0.0005)  # leave the processor to rxe


def send(
    arguments: argparse.Namespace, qps: list[QP], cq: CQ, sge: SGE, peer: dict[str, Any]
) -> None:
    """Send all messages on all queue pairs."""
    waiting = 0
    for number in range(arguments.messages):
        for qp in qps:
            if arguments.write:
                request = SendWR(opcode=enums.IBV_WR_RDMA_WRITE, num_sge=1, sg=[sge])
                request.set_wr_rdma(peer["rkey"], peer["address"])
            else:
                request = SendWR(opcode=enums.IBV_WR_SEND, num_sge=1, sg=[sge])
            qp.post_send(request)
        waiting += len(qps)
        if number == 0 or not arguments.pipelined:
            wait_completions(cq, waiting)
            waiting = 0
        if number == 0:
            print("first", flush=True)
            while arguments.go_file and not Path(arguments.go_file).exists():
                time.sleep(0.01)
        if arguments.pause_ms:
            time.sleep(arguments.pause_ms / 1e3)
    wait_completions(cq, waiting)


def main() -> None:
    """Run one side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device")
    parser.add_argument("gid_index", type=int)
    parser.add_argument("port", type=int)
    parser.add_argument("--connect", default="")
    parser.add_argument("--qps", type=int, default=1)
    parser.add_argument("--psn", type=int, default=0)
    parser.add_argument("--messages", type=int, default=100)
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--write", action="store_true", help="RDMA WRITE, not SEND")
    parser.add_argument("--timeout", type=int, default=TIMEOUT_1_S, help="4.096 us * 2^N")
    parser.add_argument("--go-file", help="send the second message when this file exists")
    parser.add_argument("--until-file", help="with --write: all again until this file exists")
    parser.add_argument("--late-ms", type=float, default=0.0, help="post each receive so late")
    parser.add_argument("--pipelined", action="store_true", help="post all sends at once")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="between two sends")
    arguments = parser.parse_args()

    line = connect(arguments)
    context = Context(name=arguments.device)
    pd = PD(context)
    depth = arguments.messages + 1
    cq = CQ(context, 2 * depth * arguments.qps)
    access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
    mr = MR(pd, arguments.bytes, access)
    sge = SGE(mr.buf, arguments.bytes, mr.lkey)
    cap = QPCap(max_send_wr=depth, max_recv_wr=depth)
    init = QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap, sq_sig_all=1)
    qps = [QP(pd, init) for _ in range(arguments.qps)]
    gid = context.query_gid(1, arguments.gid_index)
    mine = {"gid": str(gid), "qpns": [qp.qp_num for qp in qps], "rkey": mr.rkey, "address": mr.buf}
    peer = line.exchange(mine)
    for qp, remote in zip(qps, peer["qpns"], strict=True):
        route = GlobalRoute(dgid=GID(peer["gid"]), sgid_index=arguments.gid_index, hop_limit=64)
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = access
        attributes.dest_qp_num = remote
        attributes.path_mtu = enums.IBV_MTU_4096
        attributes.rq_psn = attributes.sq_psn = arguments.psn
        attributes.min_rnr_timer = MIN_RNR_TIMER
        attributes.timeout = arguments.timeout
        attributes.retry_cnt = attributes.rnr_retry = RETRY_FOREVER
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        qp.to_rts(attributes)
    pairs = [[qp.qp_num, remote] for qp, remote in zip(qps, peer["qpns"], strict=True)]
    print(json.dumps(pairs), flush=True)

    if arguments.connect:
        line.exchange("ready")
        send(arguments, qps, cq, sge, peer)
        while arguments.until_file and not Path(arguments.until_file).exists():
            send(arguments, qps, cq, sge, peer)
    else:
        receives = 0 if arguments.write else arguments.messages
        if not arguments.late_ms:
            for qp in qps:
                for _ in range(receives):
                    qp.post_recv(RecvWR(num_sge=1, sg=[sge]))
        line.exchange("ready")
        if arguments.late_ms:
            for _ in range(receives):
                time.sleep(arguments.late_ms / 1e3)
                for qp in qps:
                    qp.post_recv(RecvWR(num_sge=1, sg=[sge]))
        wait_completions(cq, receives * len(qps))
    line.exchange("done")  # the other side still needs our queue pairs until now
    print("done", flush=True)


if __name__ == "__main__":
    main()
