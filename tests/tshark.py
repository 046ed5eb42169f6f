"""What tshark makes of a capture: the second opinion on everything that the observer counts."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

_FIELDS = (
    "frame.protocols", "ip.src", "ip.dst", "ipv6.src", "ipv6.dst", "ip.dsfield.ecn",
    "ipv6.tclass.ecn", "ip.dsfield.dscp", "ipv6.tclass.dscp", "vlan.id",
    "infiniband.bth.opcode", "infiniband.bth.destqp", "infiniband.bth.psn",
    "infiniband.aeth.syndrome",
)  # fmt: skip
# Decode by port, not by guess: source ports are arbitrary, and port 69 would be taken for TFTP.
_OPTIONS = (
    "-d", "udp.port==4791,infiniband", "-o", "udp.try_heuristic_first:FALSE",
    "--disable-protocol", "tftp", "-n",
)  # fmt: skip
CNP = 0x81
# RC, UC and XRC requests (IBTA vol. 1, table 38): operations below RDMA READ Request and it,
# the atomics, SEND with Invalidate.
_REQUEST_OPERATIONS = {*range(0x0D), 0x13, 0x14, 0x16, 0x17}
_ORDERED_TRANSPORTS = {0, 1, 5}
_ECN = ("not_ect", "ect1", "ect0", "ce")
_NAK_CODES = (
    "psn_sequence", "invalid_request", "remote_access", "remote_operation", "invalid_rd_request",
)  # fmt: skip


def count(path: Path) -> dict[str, Any]:
    """Count the packets of a capture as tshark dissects it.

    Returns
    -------
    dict
        ``frames``, ``rocev2_packets``, ``opcodes`` {"0x0a": n}, ``dest_qps`` {"0x000011": n},
        ``ecn`` {"ce": n, ...}, ``cnp``, ``naks`` {"psn_sequence": n}, ``rnr_naks``, ``dscp``,
        ``vlan_packets``; ``repeated_requests``: requests whose source, destination,
        destination QP and PSN occurred before; ``below_first``: others whose PSN is below that
        of the first request of their source, destination and destination QP.
    """
    command = ["tshark", "-r", str(path), *_OPTIONS, "-T", "fields", "-E", "occurrence=f"]
    for field in _FIELDS:
        command += ["-e", field]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    frames = 0
    counters: dict[str, Counter[str]] = {
        name: Counter() for name in ("opcodes", "dest_qps", "ecn", "naks")
    }
    totals: Counter[str] = Counter()
    dscps: set[int] = set()
    seen: set[tuple[str, ...]] = set()
    first_psns: dict[tuple[str, ...], int] = {}
    for line in output.splitlines():
        frames += 1
        values = dict(zip(_FIELDS, line.split("\t"), strict=True))
        if not values["infiniband.bth.opcode"]:
            continue
        totals["rocev2_packets"] += 1
        opcode, qpn = int(values["infiniband.bth.opcode"]), values["infiniband.bth.destqp"]
        counters["opcodes"][f"0x{opcode:02x}"] += 1
        counters["dest_qps"][f"0x{int(qpn, 0):06x}"] += 1
        counters["ecn"][_ECN[int(values["ip.dsfield.ecn"] or values["ipv6.tclass.ecn"])]] += 1
        dscps.add(int(values["ip.dsfield.dscp"] or values["ipv6.tclass.dscp"]))
        totals["vlan_packets"] += bool(values["vlan.id"])
        totals["cnp"] += opcode == CNP
        if values["infiniband.aeth.syndrome"]:
            syndrome = int(values["infiniband.aeth.syndrome"])
            totals["rnr_naks"] += syndrome >> 5 == 1
            if syndrome >> 5 == 3:
                code = syndrome & 0x1F
                counters["naks"][_NAK_CODES[code] if code < len(_NAK_CODES) else "other"] += 1
        if opcode >> 5 in _ORDERED_TRANSPORTS and opcode & 0x1F in _REQUEST_OPERATIONS:
            source = values["ip.src"] or values["ipv6.src"]
            destination = values["ip.dst"] or values["ipv6.dst"]
            key = (source, destination, qpn, values["infiniband.bth.psn"])
            psn = int(values["infiniband.bth.psn"])
            first = first_psns.setdefault(key[:3], psn)
            if key in seen:
                totals["repeated_requests"] += 1
            elif (psn - first) & 0xFFFFFF >= 0x800000:
                totals["below_first"] += 1
            seen.add(key)
    names = (
        "rocev2_packets", "cnp", "rnr_naks", "vlan_packets", "repeated_requests", "below_first",
    )  # fmt: skip
    return {
        "frames": frames,
        **{name: totals[name] for name in names},
        **{name: dict(sorted(counter.items())) for name, counter in counters.items()},
        "dscp": sorted(dscps),
    }
