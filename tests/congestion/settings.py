"""Loops of the published settings, by the columns of the published data."""

from dataclasses import replace

from controller.congestion.dcqcn import PRESETS
from controller.congestion.fluid import DcqcnLoop


def paper_loop(
    flows,
    delay_us=0.0,
    link_Gbps=40.0,
    kmax_KB=200.0,
    r_ai_Mbps=40.0,
    g=1 / 256,
    window_us=0.0,
    **changes,
):
    law = replace(
        PRESETS["paper"], link_Bps=link_Gbps * 1e9 / 8, g=g, rate_ai_Bps=r_ai_Mbps * 1e6 / 8
    )
    return DcqcnLoop(
        flows,
        delay_us * 1e3,
        law,
        kmax_bytes=kmax_KB * 1e3,
        window_ns=window_us * 1e3,
        **changes,
    )
