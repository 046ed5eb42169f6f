"""What scripts/simulate takes from three models of one queue: fluid, flow by flow, by packets."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
from simulation_models import QUESTION_FLOWS, How, QUESTION_us, US_ns, side_by_side

from controller.congestion.dcqcn import PRESETS
from controller.congestion.fixed_point import start_near
from controller.congestion.fluid import DcqcnLoop, FluidStart, line_rate_start, simulate_dcqcn
from controller.congestion.stability import dcqcn_stability
from controller.sim.packets.oscillation import oscillation

MODELS = ("fluid", "flows", "packets")
# What a receiver does with a mark that comes too soon after a CNP; the live one holds it.
ECHOES = ("held", "forgotten")
# The marking line of 40 Gb/s, and the same slope without a step to 1 at Kmax.
ENDLESS = 100
# Of packets: so many times the flows, link and thresholds.
SCALE = 5
# A queue that moves by less than this share of itself is at rest.
REST_SHARE = 0.01


def queue(how: How) -> dict[str, Any]:
    """What the queue of ten flows does: fluid, flow by flow, packet by packet."""
    tasks: list[tuple[str, Any]] = [("fluid", how.quick)]
    tasks += [("flows", (echo, how.quick)) for echo in ECHOES]
    # Long ones first, so that no processor waits for them in the end.
    packets = sorted(_packet_tasks(how.quick), key=lambda entry: -float(entry["scale"]))
    tasks += [("packets", entry) for entry in packets]
    rows: list[dict[str, Any]] = []
    for (name, entry), found in side_by_side(_queue_task, tasks, how.processes):
        label = f"{entry['delay_us']} us, seed {entry['seed']}" if name == "packets" else ""
        print(f"simulate: queue: {name} {label}".rstrip(), flush=True)
        rows += found
    rows.sort(
        key=lambda row: (
            MODELS.index(row["model"]), row["line"] != "paper", row["scale"], row["echo"],
            row["delay_us"], row["factor"] or 0.0, row["seed"],
        )
    )  # fmt: skip
    fixed = dcqcn_stability(DcqcnLoop(QUESTION_FLOWS, QUESTION_us * US_ns))
    return {
        "flows": QUESTION_FLOWS,
        "delay_us": QUESTION_us,
        "fixed_point_bytes": fixed.exact.queue_bytes,
        "exact_deg": fixed.exact.margin_deg,
        "published_deg": fixed.published.margin_deg,
        "critical_us": fixed.exact.critical_delay_us,
        "kmax_bytes": DcqcnLoop(1).kmax_bytes,
        "rows": rows,
    }


def _queue_task(task: tuple[str, Any]) -> list[dict[str, Any]]:
    name, of = task
    if name == "packets":
        return [_packet_row(of)]
    return _fluid_rows(of) if name == "fluid" else _flow_rows(of)


def _row(model: str, delay_us: float, **more: Any) -> dict[str, Any]:
    """A row of the document.

    `line` is "paper", or "endless" where marks go on along the line beyond Kmax; `factor` is the
    queue at the start over that of the fixed point, where it begins beside it.
    """
    default = {"line": "paper", "scale": 1, "echo": "", "start": "", "factor": None, "seed": 0}
    return {"model": model, "delay_us": delay_us, **default, **more}


def _fluid_rows(quick: bool) -> list[dict[str, Any]]:
    law = PRESETS["paper"]
    plain = DcqcnLoop(QUESTION_FLOWS, 0.0, law)
    endless = replace(
        plain,
        kmax_bytes=plain.kmin_bytes + ENDLESS * (plain.kmax_bytes - plain.kmin_bytes),
        pmax=plain.pmax * ENDLESS,
    )
    # 1.7 times the fixed point's queue is just above Kmax, 1.6 times just below.
    chosen = [
        (line, delay_us, factor)
        for delay_us in (1, QUESTION_us, 85)
        for line, factor in (("paper", None), ("paper", 1.6), ("paper", 1.7), ("endless", 1.7))
    ]
    loops, starts = [], []
    for line, delay_us, factor in chosen:
        loop = replace(endless if line == "endless" else plain, delay_ns=delay_us * US_ns)
        loops.append(loop)
        starts.append(line_rate_start([loop]) if factor is None else start_near([loop], factor))
    start = FluidStart(
        *(np.concatenate([getattr(one, f.name) for one in starts]) for f in fields(FluidStart))
    )
    seconds = 0.03 if quick else 0.3
    series = simulate_dcqcn(loops, seconds, start=start, step_s=5e-6, samples=3000)
    link_Bps = law.link_Bps
    sample_s = float(series.time_s[1] - series.time_s[0])
    rows = []
    for index, (line, delay_us, factor) in enumerate(chosen):
        queue_bytes = series.queue_bytes[-1000:, index]
        rates_Bps = series.rate_Bps[-1000:, index].sum(axis=1)
        used = np.where(queue_bytes > 0, 1.0, np.minimum(1.0, rates_Bps / link_Bps))
        rows.append(
            _row(
                "fluid",
                delay_us,
                line=line,
                start="line rate" if factor is None else f"{factor:g} q*",
                factor=factor,
                utilisation=float(used.mean()),
                empty=float((queue_bytes == 0).mean()),
                **_queue_figures(queue_bytes, sample_s),
            )
        )
    return rows


def _queue_figures(queue_bytes: Any, sample_s: float) -> dict[str, Any]:
    mean, std = float(queue_bytes.mean()), float(queue_bytes.std())
    swing = oscillation(queue_bytes, sample_s)
    # The last traces of a swing that has died out are still periodic.
    rests = std < REST_SHARE * mean
    return {
        "queue_mean_bytes": mean,
        "queue_std_bytes": std,
        "queue_max_bytes": float(queue_bytes.max()),
        "left": 0.0 if rests else swing.correlation,
        "hz": 0.0 if rests else swing.dominant_hz,
    }


def _flow_rows(task: tuple[str, bool]) -> list[dict[str, Any]]:
    """The built-in scenario `steady`, for ten flows."""
    from controller.lab.congestion_scenario import load_scenario
    from controller.lab.kinds import find_scenario
    from controller.sim.congestion.steady import simulate_steady
    from controller.sim.congestion.steady_experiment import SteadyExperiment

    echo, quick = task
    experiment = load_scenario(find_scenario("steady").path).experiment
    assert isinstance(experiment, SteadyExperiment)
    experiment = replace(
        experiment,
        flows=(QUESTION_FLOWS,),
        delays_ns=(1_000, 10_000, 25_000, 50_000, 85_000),
        windows=(False,),
        seeds=1 if quick else 2,
    )
    conditions = replace(experiment.conditions, echo_holds=echo == "held")
    if quick:
        conditions = replace(conditions, seconds=0.02, warmup_s=0.01)
    cases = experiment.cases()
    outcomes = simulate_steady(cases, conditions)
    return [
        _row(
            "flows",
            case.delay_ns / US_ns,
            echo=echo,
            seed=case.seed,
            start="fair share",
            utilisation=outcome.utilisation,
            empty=outcome.empty,
            **_queue_figures(outcome.queue_bytes, conditions.sample_ns / 1e9),
        )
        for case, outcome in zip(cases, outcomes, strict=True)
    ]


def _packet_tasks(quick: bool) -> list[dict[str, Any]]:
    """Settings of the packet simulator; flows start at line rate."""
    seconds = 0.01 if quick else 0.2

    def entry(delay_us: float, **more: Any) -> dict[str, Any]:
        default = {"echo": "forgotten", "line": "paper", "scale": 1, "seed": 0}
        return {"delay_us": delay_us, "seconds": seconds, **default, **more}

    tasks = [
        entry(delay_us, echo=echo, seed=seed)
        for echo in ECHOES
        for delay_us in (1, QUESTION_us)
        for seed in ((0,) if quick else (0, 1))
    ]
    tasks += [entry(10), entry(25), entry(QUESTION_us, line="endless")]
    # More flows on as many times the link: a swing that stays as large is no noise of packets.
    long = entry(QUESTION_us, scale=SCALE, seconds=seconds / 2)
    return [*tasks, long, {**long, "line": "endless"}]


def _packet_row(entry: dict[str, Any]) -> dict[str, Any]:
    from controller.sim.packets.port import MarkingLine
    from controller.sim.packets.steady import PAPER_LINE, SteadySetting, packet_steady

    line = PAPER_LINE
    if entry["line"] == "endless":
        line = MarkingLine(
            line.kmin_bytes,
            line.kmin_bytes + ENDLESS * (line.kmax_bytes - line.kmin_bytes),
            line.pmax * ENDLESS,
        )
    seconds = entry["seconds"]
    found = packet_steady(
        SteadySetting(
            QUESTION_FLOWS,
            round(entry["delay_us"] * US_ns),
            seconds=seconds,
            warm_up_s=min(seconds, 0.05),
            seed=entry["seed"],
            line=line,
            echo_holds=entry["echo"] == "held",
            scale=entry["scale"],
        )
    )
    return _row(
        "packets",
        entry["delay_us"],
        line=entry["line"],
        scale=entry["scale"],
        echo=entry["echo"],
        start="line rate",
        seed=entry["seed"],
        utilisation=found.utilisation,
        empty=found.idle_share,
        queue_mean_bytes=found.queue_mean_bytes,
        queue_std_bytes=found.queue_std_bytes,
        queue_max_bytes=found.queue_max_bytes,
        left=found.swing.correlation,
        hz=found.swing.dominant_hz,
    )
