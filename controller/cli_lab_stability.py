"""``controller lab stability``: is a congestion control loop stable, published and exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from controller.cli_common import JSON_OPTION, print_json, refuse_options
from controller.errors import UsageError

if TYPE_CHECKING:
    from controller.congestion.stability_report import StabilityReport

_Gbit_Bps = 10**9 / 8
_Mbit_Bps = 10**6 / 8
_DCQCN_LINK_Gbps, _TIMELY_LINK_Gbps = 40.0, 10.0
# Scripts give both models the same options; what TIMELY does not have is named as ignored.
_NOT_TIMELY = {"kmax_kb": "--kmax-kb", "kmin_kb": "--kmin-kb", "pmax": "--pmax", "gain": "--g"}


@click.command("stability")
@click.option("--flows", type=int, required=True, help="Flows at the bottleneck.")
@click.option("--delay-us", type=float, default=0.0, show_default=True, help="Of the control loop.")
@click.option("--link-gbps", type=float, help="Bottleneck. [default: 40; 10 with --model timely]")
@click.option("--r-ai-mbps", type=float, help="Additive step. [default: the preset's; timely: 10]")
@click.option("--kmax-kb", type=float, help="Kmax. [default: 200]")
@click.option("--kmin-kb", type=float, help="Kmin. [default: 5]")
@click.option("--pmax", type=float, help="Pmax, 0 .. 1. [default: 0.01]")
@click.option("--g", "gain", type=float, help="Gain of alpha. [default: the preset's]")
@click.option(
    "--window-us", type=float, help="Marks from a window's average of 16 slots. [default: 0: none]"
)
@click.option(
    "--preset", type=click.Choice(["paper", "connectx"]), help="All else. [default: paper]"
)
@click.option("--model", type=click.Choice(["dcqcn", "timely"]), default="dcqcn", show_default=True)
@JSON_OPTION
@click.pass_context
def stability_command(ctx: click.Context, /, model: str, as_json: bool, **options: Any) -> None:
    """Tell whether the loop of N flows and one queue is stable.

    Beside the published method (CoNEXT 2016: approximated fixed point, phase margin) stands the
    exact one: fixed point and linearisation of the same fluid model without approximations, the
    roots of the delayed system, and the smallest delay at which they reach the imaginary axis.
    """
    if model == "timely":
        refuse_options(ctx, "patched TIMELY marks no packets", "window_us", "preset")
        report = _timely(options)
    else:
        report = _dcqcn(options)
    if as_json:
        print_json(report.to_json())
    else:
        click.echo(report.text())


def _number(options: dict[str, Any], key: str, default: float, low: float, high: float) -> float:
    """An option's value, above `low` and at most `high`."""
    value: float = default if options[key] is None else options[key]
    # False for NaN, too.
    if not low < value <= high:
        name = key.replace("_", "-")
        raise UsageError(
            f"--{name} is {value:g}; allowed: above {low:g}, at most {high:g}.", "Correct it."
        )
    return value


def _common(options: dict[str, Any], link_Gbps: float) -> tuple[int, float, float]:
    """Flows, delay in us and link rate in Gb/s."""
    from controller.congestion.fluid import MAX_FLOWS

    flows, delay_us = options["flows"], options["delay_us"]
    if not 1 <= flows <= MAX_FLOWS:
        raise UsageError(f"--flows is {flows}; allowed: 1 .. {MAX_FLOWS}.", "Correct it.")
    if not 0 <= delay_us <= 1e6:
        raise UsageError(f"--delay-us is {delay_us:g}; allowed: 0 .. 1000000.", "Correct it.")
    return flows, delay_us, _number(options, "link_gbps", link_Gbps, 0, 1e5)


def _dcqcn(options: dict[str, Any]) -> StabilityReport:
    from dataclasses import replace

    from controller.congestion.dcqcn import MIN_GAIN, PRESETS
    from controller.congestion.fluid import DcqcnLoop
    from controller.congestion.stability import dcqcn_stability, margin_ladder
    from controller.congestion.stability_report import StabilityReport
    from controller.priority.classes import KMAX_BYTES, KMIN_BYTES, PMAX

    preset = options["preset"] or "paper"
    law = PRESETS[preset]
    flows, delay_us, link_Gbps = _common(options, _DCQCN_LINK_Gbps)
    link_Bps = link_Gbps * _Gbit_Bps
    step_Mbps = _number(
        options, "r_ai_mbps", min(law.rate_ai_Bps, link_Bps) / _Mbit_Bps, 0, link_Gbps * 1000
    )
    gain = law.g if options["gain"] is None else options["gain"]
    if not MIN_GAIN <= gain <= 1:
        raise UsageError(f"--g is {gain:g}; allowed: {MIN_GAIN:.3g} .. 1.", "Correct it.")
    kmax_kb = _number(options, "kmax_kb", KMAX_BYTES / 1000, 0, 1e7)
    kmin_kb = KMIN_BYTES / 1000 if options["kmin_kb"] is None else options["kmin_kb"]
    # The model marks packets of 1 KB, and a line shorter than one has no slope to speak of.
    if not 0 <= kmin_kb <= kmax_kb - 1:
        raise UsageError(
            f"--kmin-kb is {kmin_kb:g}; allowed: 0 .. one below --kmax-kb ({kmax_kb:g}).",
            "Correct one of them.",
        )
    pmax = _number(options, "pmax", PMAX, 0, 1)
    window_us = options["window_us"] or 0.0
    if not 0 <= window_us <= 1e6:
        raise UsageError(f"--window-us is {window_us:g}; allowed: 0 .. 1000000.", "Correct it.")
    step_Bps = step_Mbps * _Mbit_Bps
    loop = DcqcnLoop(
        flows=flows,
        delay_ns=delay_us * 1000,
        # The published settings change these and leave bytes and times of 40 Gb/s as they are.
        parameters=replace(
            law,
            link_Bps=link_Bps,
            g=gain,
            rate_ai_Bps=step_Bps,
            rate_hai_Bps=min(max(law.rate_hai_Bps, step_Bps), link_Bps),
            min_rate_Bps=min(law.min_rate_Bps, link_Bps),
        ),
        kmin_bytes=kmin_kb * 1000,
        kmax_bytes=kmax_kb * 1000,
        pmax=pmax,
        window_ns=window_us * 1000,
    )
    result = dcqcn_stability(loop)
    window = f"window {window_us:g} us" if window_us else "no window"
    return StabilityReport(
        model="dcqcn",
        setting={
            "flows": flows,
            "delay_us": delay_us,
            "link_gbps": link_Gbps,
            "r_ai_mbps": step_Mbps,
            "kmin_kb": kmin_kb,
            "kmax_kb": kmax_kb,
            "pmax": pmax,
            "g": gain,
            "window_us": window_us,
            "preset": preset,
        },
        title=(
            f"DCQCN ({preset}), {flows} flows, {link_Gbps:g} Gbit/s, loop delay {delay_us:g} us\n"
            f"  R_AI {step_Mbps:g} Mbit/s, g {gain:.4g}, Kmin/Kmax {kmin_kb:g}/{kmax_kb:g} kB, "
            f"Pmax {pmax:g}, {window}"
        ),
        result=result,
        # Without windows on either side, and from a margin that there is.
        ladder=margin_ladder(loop)
        if result.published.margin_deg is not None and not window_us
        else [],
    )


def _timely(options: dict[str, Any]) -> StabilityReport:
    from controller.congestion.stability import timely_stability
    from controller.congestion.stability_report import StabilityReport
    from controller.congestion.timely import TimelyLoop

    flows, delay_us, link_Gbps = _common(options, _TIMELY_LINK_Gbps)
    default_Mbps = min(TimelyLoop(1).step_Bps / _Mbit_Bps, link_Gbps * 1000)
    step_Mbps = _number(options, "r_ai_mbps", default_Mbps, 0, link_Gbps * 1000)
    loop = TimelyLoop(
        flows=flows,
        delay_ns=delay_us * 1000,
        link_Bps=link_Gbps * _Gbit_Bps,
        step_Bps=step_Mbps * _Mbit_Bps,
    )
    ignored = [name for key, name in _NOT_TIMELY.items() if options[key] is not None]
    return StabilityReport(
        model="timely",
        setting={
            "flows": flows,
            "delay_us": delay_us,
            "link_gbps": link_Gbps,
            "r_ai_mbps": step_Mbps,
            "ignored": ignored,
        },
        title=(
            f"Patched TIMELY, {flows} flows, {link_Gbps:g} Gbit/s, propagation {delay_us:g} us\n"
            f"  delta {step_Mbps:g} Mbit/s, beta {loop.decrease:g}, "
            f"segments of {loop.segment_bytes / 1000:g} kB"
            + (f"\n  Not of this model, ignored: {', '.join(ignored)}" if ignored else "")
        ),
        result=timely_stability(loop),
        ladder=[],
    )
