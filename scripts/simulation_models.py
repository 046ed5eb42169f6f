"""What scripts/simulate takes from the models of congestion control: margins, map, queue, incast."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from controller.congestion.dcqcn import PRESETS
from controller.congestion.fixed_point import start_near
from controller.congestion.fluid import DcqcnLoop, FluidStart, line_rate_start, simulate_dcqcn
from controller.congestion.stability import dcqcn_stability, margin_ladder
from controller.congestion.stability_map import stability_map
from controller.priority.ports import SLOT_ns
from controller.sim.packets.oscillation import oscillation

US_ns = 1e3
# CoNEXT 2016, section 3: N flows at 40 Gb/s, feedback after tau*.
FLOWS, DELAYS_us = (2, 10, 64), (1, 50, 85, 100)
QUESTION_FLOWS, QUESTION_us = 10, 50

MAP_FLOWS = (2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MAP_DELAYS_us = tuple(range(0, 201, 10))
# 0: DCQCN's own marking. The last is the live marker's window.
MAP_WINDOWS_us = (0.0, 50.0, 192.0, DcqcnLoop(1).window_slots * SLOT_ns / US_ns)
# The delay at which the longest stable window is looked for: one switch, short cables.
NEAR_us = 1.0

# The marking line of 40 Gb/s, and the same slope without a step to 1 at Kmax.
ENDLESS = 100
# A queue that moves by less than this share of itself is at rest.
REST_SHARE = 0.01
INCASTS = ("incast", "incast-shared", "incast-endless")


@dataclass(frozen=True)
class How:
    """How measurements are taken.

    Attributes
    ----------
    folder
        Where figures go.
    processes
        At once.
    quick
        Few seeds and short runs, to try the script; figures mean nothing then.
    """

    folder: Path
    processes: int
    quick: bool


def side_by_side(
    function: Callable[[Any], Any], tasks: Sequence[Any], processes: int
) -> Iterator[tuple[Any, Any]]:
    """Tasks and what `function` gave for them, in the order in which they are done."""
    # Not fork: scipy and numpy have threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(tasks)), context) as executor:
        futures = {executor.submit(function, task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()


# ---- margins ----


def margins(_how: How) -> dict[str, Any]:
    """The published stability analysis beside the exact one, and beside the published numbers."""
    rows = []
    for flows in FLOWS:
        for delay_us in DELAYS_us:
            loop = DcqcnLoop(flows, delay_us * US_ns)
            found = dcqcn_stability(loop)
            rows.append(
                {
                    "flows": flows,
                    "delay_us": delay_us,
                    "published_deg": found.published.margin_deg,
                    "published_p": found.published.share,
                    "published_q_bytes": found.published.queue_bytes,
                    "published_critical_us": found.published.critical_delay_us,
                    "exact_deg": found.exact.margin_deg,
                    "p": found.exact.share,
                    "q_bytes": found.exact.queue_bytes,
                    "critical_us": found.exact.critical_delay_us,
                    "stable": found.exact.stable,
                    "missing": found.exact.missing,
                }
            )
    question = DcqcnLoop(QUESTION_FLOWS, QUESTION_us * US_ns)
    return {
        "rows": rows,
        "question": {"flows": QUESTION_FLOWS, "delay_us": QUESTION_us},
        "ladder": [
            {"what": step.what, "margin_deg": step.margin_deg, "alone_deg": step.alone_deg}
            for step in margin_ladder(question)
        ],
        "agreement": _agreement(),
    }


def _agreement() -> dict[str, Any]:
    """Largest differences from the authors' own numbers, which the tests have."""
    from controller.congestion.convergence import convergence_s
    from controller.congestion.stability import timely_stability
    from controller.congestion.timely import TimelyLoop
    from tests.congestion.settings import paper_loop
    from tests.congestion.test_stability_published import CONVERGENCE, MARGINS, TIMELY_MARGINS

    dcqcn = [
        abs(
            dcqcn_stability(paper_loop(flows, delay_us, *setting)).published.margin_deg - margin_deg
        )
        for (link, kmax, step, delay_us), column in MARGINS.items()
        for setting in [(link, kmax, step)]
        for flows, margin_deg in column.items()
    ]
    timely = [
        abs(timely_stability(TimelyLoop(flows, delay_us * US_ns)).published.margin_deg - margin_deg)
        for delay_us, column in TIMELY_MARGINS.items()
        for flows, margin_deg in column.items()
    ]
    times = [
        abs(convergence_s(paper_loop(flows, kmax_KB=kmax, r_ai_Mbps=step, g=1 / per_g)) / s - 1)
        for (kmax, step, per_g), column in CONVERGENCE.items()
        for flows, s in column.items()
    ]
    return {
        "dcqcn_margins": {"numbers": len(dcqcn), "settings": len(MARGINS), "worst": max(dcqcn)},
        "timely_margins": {
            "numbers": len(timely),
            "settings": len(TIMELY_MARGINS),
            "worst": max(timely),
        },
        "convergence": {"numbers": len(times), "settings": len(CONVERGENCE), "worst": max(times)},
    }


# ---- map ----


def longest_window_us(loop: DcqcnLoop) -> float:
    """The longest window up to the live one with which a loop is stable at a short delay.

    0: not even without a window; where there is no fixed point, as if the line went on.
    """

    def is_stable(window_us: float) -> bool:
        found = stability_map(loop, [loop.flows], [NEAR_us], [window_us])
        return bool(found.rightmost_per_s[0, 0, 0] < 0)

    low, high = 0.0, MAP_WINDOWS_us[-1]
    if is_stable(high):
        return high
    if not is_stable(low):
        return 0.0
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (middle, high) if is_stable(middle) else (low, middle)
    return low


def stability(how: How) -> dict[str, Any]:
    """Where the loop is stable, over flows, delays and windows, for both sets of constants."""
    flows = MAP_FLOWS[::3] if how.quick else MAP_FLOWS
    delays_us = MAP_DELAYS_us[::5] if how.quick else MAP_DELAYS_us
    tasks = [(name, count, delays_us) for name in PRESETS for count in flows]
    found: dict[tuple[str, int], dict[str, Any]] = {
        (task[0], task[1]): row for task, row in side_by_side(_map_row, tasks, how.processes)
    }
    return {
        "flows": list(flows),
        "delays_us": list(delays_us),
        "windows_us": list(MAP_WINDOWS_us),
        "near_us": NEAR_us,
        "presets": {name: [found[name, count] for count in flows] for name in PRESETS},
    }


def _map_row(task: tuple[str, int, Sequence[float]]) -> dict[str, Any]:
    """One number of flows; axes of `per_s` are windows and delays."""
    name, flows, delays_us = task
    loop = DcqcnLoop(flows, 0.0, PRESETS[name])
    found = stability_map(loop, [flows], delays_us, MAP_WINDOWS_us)
    critical_us = found.critical_delay_us[:, 0].tolist()
    return {
        "flows": flows,
        "p": float(found.share[0]),
        "exists": bool(found.exists[0]),
        "critical_us": [None if np.isinf(delay_us) else delay_us for delay_us in critical_us],
        "per_s": found.rightmost_per_s[:, 0, :].tolist(),
        "longest_window_us": longest_window_us(loop),
    }


# ---- queue ----


def queue(how: How) -> dict[str, Any]:
    """What the queue of ten flows does: fluid, flow by flow, packet by packet."""
    tasks: list[tuple[str, Any]] = [("fluid", how.quick), ("flows", how.quick)]
    # Long ones first.
    tasks += sorted(
        (("packets", entry) for entry in _packet_tasks(how.quick)),
        key=lambda task: -float(task[1]["scale"]),
    )
    rows: list[dict[str, Any]] = []
    for (name, entry), found in side_by_side(_queue_task, tasks, how.processes):
        label = f"{entry['delay_us']} us, seed {entry['seed']}" if name == "packets" else ""
        print(f"simulate: queue: {name} {label}".rstrip(), flush=True)
        rows += found
    order = {
        "fluid": 0,
        "flows": 1,
        "packets": 2,
    }
    rows.sort(
        key=lambda row: (
            order[row["model"]], row["line"], row["scale"], row["echo"], row["delay_us"],
            row["start"], row["seed"],
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
    return {"fluid": _fluid_rows, "flows": _flow_rows, "packets": _packet_row}[name](of)


def _row(model: str, delay_us: float, **more: Any) -> dict[str, Any]:
    """`line`: "paper", or "endless" where marks go on along the line beyond Kmax."""
    default = {"line": "paper", "scale": 1, "echo": "", "start": "", "seed": 0}
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


def _flow_rows(quick: bool) -> list[dict[str, Any]]:
    """The built-in scenario `steady`, for ten flows."""
    from controller.lab.congestion_scenario import load_scenario
    from controller.lab.kinds import find_scenario
    from controller.sim.congestion.steady import simulate_steady
    from controller.sim.congestion.steady_experiment import SteadyExperiment

    experiment = load_scenario(find_scenario("steady").path).experiment
    assert isinstance(experiment, SteadyExperiment)
    experiment = replace(
        experiment,
        flows=(QUESTION_FLOWS,),
        delays_ns=(1_000, 10_000, 25_000, 50_000, 85_000),
        windows=(False,),
        seeds=1 if quick else 2,
    )
    conditions = experiment.conditions
    if quick:
        conditions = replace(conditions, seconds=0.02, warmup_s=0.01)
    cases = experiment.cases()
    outcomes = simulate_steady(cases, conditions)
    return [
        _row(
            "flows",
            case.delay_ns / US_ns,
            seed=case.seed,
            start="fair share",
            utilisation=outcome.utilisation,
            empty=outcome.empty,
            **_queue_figures(outcome.queue_bytes, conditions.sample_ns / 1e9),
        )
        for case, outcome in zip(cases, outcomes, strict=True)
    ]


def _packet_tasks(quick: bool) -> list[dict[str, Any]]:
    """Settings of the packet simulator; `alpha` 0: flows start at line rate."""
    seconds = 0.01 if quick else 0.2

    def entry(delay_us: float, **more: Any) -> dict[str, Any]:
        default = {"echo": "forgotten", "line": "paper", "scale": 1, "alpha": 0.0, "seed": 0}
        return {"delay_us": delay_us, "seconds": seconds, **default, **more}

    tasks = [
        entry(delay_us, echo=echo, seed=seed)
        for echo in ("held", "forgotten")
        for delay_us in (1, QUESTION_us)
        for seed in ((0,) if quick else (0, 1))
    ]
    tasks += [entry(10), entry(25), entry(QUESTION_us, line="endless")]
    if not quick:
        # Ten times the flows on ten times the link, begun at the fixed point: what is left of a
        # swing there is no noise of single packets.
        alpha = float(start_near([DcqcnLoop(QUESTION_FLOWS)]).alpha[0, 0])
        tasks.append(entry(QUESTION_us, scale=10, alpha=alpha, seconds=0.06))
    return tasks


def _packet_row(entry: dict[str, Any]) -> list[dict[str, Any]]:
    from controller.sim.packets.steady import PAPER_LINE, MarkingLine, SteadySetting, packet_steady

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
            warm_up_s=min(seconds / 4, 0.05),
            seed=entry["seed"],
            line=line,
            echo_holds=entry["echo"] == "held",
            scale=entry["scale"],
            start_alpha=entry["alpha"],
        )
    )
    return [
        _row(
            "packets",
            entry["delay_us"],
            line=entry["line"],
            scale=entry["scale"],
            echo=entry["echo"],
            start="fixed point" if entry["alpha"] else "line rate",
            seed=entry["seed"],
            utilisation=found.utilisation,
            empty=found.idle_share,
            queue_mean_bytes=found.queue_mean_bytes,
            queue_std_bytes=found.queue_std_bytes,
            queue_max_bytes=found.queue_max_bytes,
            left=found.swing.correlation,
            hz=found.swing.dominant_hz,
        )
    ]


# ---- incast ----


def incast(how: How) -> dict[str, Any]:
    """Throughput stability under incast: DCQCN and our changes to it."""
    names = ("incast-quick",) if how.quick else INCASTS
    tasks = [(name, str(how.folder)) for name in names]
    found = {}
    for (name, _), document in side_by_side(_incast, tasks, how.processes):
        print(f"simulate: incast: {name} in {document['took_s']:.0f} s", flush=True)
        found[name] = document
    return {"scenarios": {name: found[name] for name in names}}


def _incast(task: tuple[str, str]) -> dict[str, Any]:
    from controller.lab.congestion_scenario import load_scenario, run
    from controller.lab.kinds import find_scenario

    name, folder = task
    began_s = time.monotonic()
    report = run(load_scenario(find_scenario(name).path))
    document = report.to_json()
    with TemporaryDirectory() as drawn:
        for path in report.figures(Path(drawn)):
            if path.stem == "stability":
                (Path(folder) / f"model-{name}.svg").write_bytes(path.read_bytes())
    return {**document, "took_s": time.monotonic() - began_s}
