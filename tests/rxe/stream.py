"""One side of an RC queue pair that writes messages until it is told to stop.

perftest reports one average and polls its completion queue without a pause, which on two
processors starves rxe. This one keeps so many messages posted that rxe's window is always full,
looks for completions every few milliseconds, and tells what is complete while it runs. A program,
run in a host's namespace: ``python -m tests.rxe.stream DEVICE GID_INDEX PORT [--connect ADDRESS
--board FILE] [options]``; the side that connects writes. Start, stop and progress are in FILE,
see `Board`.
"""

from __future__ import annotations

import argparse
import mmap
import os
import struct
import time
from pathlib import Path

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

from tests.rxe.rc_peer import connect

try:
    import pyverbs.enums as enums
except ImportError:  # its name in newer releases
    import pyverbs.libibverbs_enums as enums

POLL_S = 0.004
# rxe has at most 128 packets of a queue pair unacknowledged (RXE_MAX_UNACKED_PSNS).
WINDOW_PACKETS = 128
PATH_MTU_BYTES = 4096


class Board:
    """A file that the harness and one sender share: four numbers of 64 bits.

    ``start_ns`` and ``stop`` are the harness's, ``sent_bytes`` and ``stamp_ns`` the sender's:
    bytes of complete messages, and when (CLOCK_MONOTONIC) it looked.
    """

    _FORMAT = struct.Struct("<4Q")

    def __init__(self, path: Path, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(self._FORMAT.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), self._FORMAT.size)

    def read(self) -> tuple[int, int, int, int]:
        """start_ns, stop, sent_bytes, stamp_ns."""
        start_ns, stop, sent_bytes, stamp_ns = self._FORMAT.unpack(self._memory[:])
        return start_ns, stop, sent_bytes, stamp_ns

    def start_at(self, start_ns: int) -> None:
        """Let the sender begin at this time."""
        self._memory[0:8] = struct.pack("<Q", start_ns)

    def stop(self) -> None:
        """Let the sender post nothing more."""
        self._memory[8:16] = struct.pack("<Q", 1)

    def report(self, sent_bytes: int) -> None:
        """Tell the harness what is complete."""
        self._memory[16:32] = struct.pack("<2Q", sent_bytes, time.monotonic_ns())


def main() -> None:
    """Run one side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device")
    parser.add_argument("gid_index", type=int)
    parser.add_argument("port", type=int)
    parser.add_argument("--connect", default="")
    parser.add_argument("--board", type=Path, help="of the side that connects")
    parser.add_argument("--bytes", type=int, default=16384, help="of a message")
    parser.add_argument("--timeout", type=int, default=18, help="4.096 us * 2^N")
    parser.add_argument("--traffic-class", type=int, default=0, help="DSCP << 2 | ECN")
    arguments = parser.parse_args()

    line = connect(arguments)
    context = Context(name=arguments.device)
    pd = PD(context)
    # Twice the window: rxe must find the next message when an acknowledgement comes, and this
    # process looks only now and then.
    depth = max(4, 2 * WINDOW_PACKETS * PATH_MTU_BYTES // arguments.bytes)
    cq = CQ(context, depth + 1)
    access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
    mr = MR(pd, arguments.bytes, access)
    sge = SGE(mr.buf, arguments.bytes, mr.lkey)
    init = QPInitAttr(
        qp_type=enums.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(max_send_wr=depth), sq_sig_all=1
    )
    qp = QP(pd, init)
    gid = context.query_gid(1, arguments.gid_index)
    mine = {"gid": str(gid), "qpn": qp.qp_num, "rkey": mr.rkey, "address": mr.buf}
    peer = line.exchange(mine)
    route = GlobalRoute(
        dgid=GID(peer["gid"]),
        sgid_index=arguments.gid_index,
        hop_limit=64,
        traffic_class=arguments.traffic_class,
    )
    attributes = QPAttr(port_num=1)
    attributes.qp_access_flags = access
    attributes.dest_qp_num = peer["qpn"]
    attributes.path_mtu = enums.IBV_MTU_4096
    attributes.sq_psn = qp.qp_num
    attributes.rq_psn = peer["qpn"]
    attributes.timeout = arguments.timeout
    attributes.retry_cnt = attributes.rnr_retry = 7
    attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
    qp.to_rts(attributes)
    line.exchange("ready")
    print("ready", qp.qp_num, flush=True)
    if not arguments.connect:
        line.exchange("done")  # the sender needs our queue pair until now
        print("done", flush=True)
        return

    board = Board(arguments.board)
    while not (start_ns := board.read()[0]):
        time.sleep(POLL_S)
    time.sleep(max(0, start_ns - time.monotonic_ns()) / 1e9)
    posted = complete = 0
    stopping_since = 0.0
    while True:
        _, stop, _, _ = board.read()
        while not stop and posted - complete < depth:
            request = SendWR(opcode=enums.IBV_WR_RDMA_WRITE, num_sge=1, sg=[sge])
            request.set_wr_rdma(peer["rkey"], peer["address"])
            qp.post_send(request)
            posted += 1
        count, completions = cq.poll(num_entries=depth)
        for completion in completions or ():
            if completion.status != enums.IBV_WC_SUCCESS:
                raise SystemExit(f"completion status {completion.status} of message {complete}")
        if count:
            complete += count
            board.report(complete * arguments.bytes)
        if stop:
            if posted == complete:
                break
            stopping_since = stopping_since or time.monotonic()
            if time.monotonic() - stopping_since > 30:
                raise SystemExit(f"{posted - complete} messages were not complete after 30 s")
        time.sleep(POLL_S)
    line.exchange("done")
    print("done", os.getpid(), flush=True)


if __name__ == "__main__":
    main()
