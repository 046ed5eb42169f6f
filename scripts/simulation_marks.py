"""What scripts/simulate takes about marks by a window: three models, links of several rates."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from simulation_models import QUESTION_FLOWS, How, NEAR_us, QUESTION_us, US_ns, finite, side_by_side

from controller.congestion.dcqcn import PRESETS, DcqcnParameters, preset
from controller.congestion.fixed_point import fixed_point
from controller.congestion.fluid import DcqcnLoop
from controller.congestion.stability_map import stability_map
from controller.priority.classes import default_classes, thresholds
from controller.priority.ports import SLOT_ns, slot_ns_of

if TYPE_CHECKING:
    from controller.sim.congestion.steady import SteadyOutcome
    from controller.sim.packets.steady import SteadyResult

PRESET = "paper"
LINKS_Gbps = (100, 40, 10, 1)
# The live window, one that fits fast links, and DCQCN's own marks by the queue of the moment.
SLOTS_ns = (SLOT_ns, 3_000, 0)
SLOTS = DcqcnLoop(1).window_slots
DELAYS_us = (round(NEAR_us), QUESTION_us)
# Numbers of flows among which those with a fixed point are looked for.
FLOWS = range(2, 65)
PACKET_BYTES = 1000
# Up to 40 Gb/s as many packets on every link: below, all times stretch as the controller's do.
WARMUP_s, SECONDS = 0.05, 0.1
# Of the flow-by-flow model: some packets' time.
STEPS_ns = {100: 500, 40: 1_000, 10: 2_500, 1: 25_000}
# With slots of `SLOTS_ns[1]` slowed to the live ones: four steps a slot.
SLOWED_STEP_ns = SLOT_ns // 4
FLOW_SEEDS = 2


@dataclass(frozen=True)
class Place:
    """A link with the constants and the marking line that the controller has for it."""

    link_Gbps: int

    @property
    def law(self) -> DcqcnParameters:
        """Constants of DCQCN."""
        return preset(PRESET, self.link_Gbps * 1e9 / 8)

    @property
    def line(self) -> tuple[int, int, float]:
        """Kmin, Kmax and Pmax."""
        return thresholds(default_classes()[0], self.law.link_Bps)

    @property
    def stretch(self) -> float:
        """How much longer times are than at 40 Gb/s."""
        return self.law.timer_ns / PRESETS[PRESET].timer_ns


def marks(how: How) -> dict[str, Any]:
    """Marks by windows and by the queue of the moment: linearised, flow by flow, by packets."""
    links = LINKS_Gbps[1::2] if how.quick else LINKS_Gbps
    tasks: list[tuple[str, int, int, int, bool]] = []
    for link_Gbps in links:
        tasks.append(("linear", link_Gbps, 0, 0, how.quick))
        for slot_ns in SLOTS_ns:
            if not left_out(link_Gbps, slot_ns):
                tasks.append(("flows", link_Gbps, slot_ns, 0, how.quick))
            for delay_us in DELAYS_us:
                tasks.append(("packets", link_Gbps, slot_ns, delay_us, how.quick))
    order = [task[:4] for task in tasks]
    found: dict[tuple[str, int, int, int], Any] = {}
    # Longest first.
    long_first = sorted(tasks, key=lambda task: (task[0] == "linear", -task[1]))
    for task, result in side_by_side(_task, long_first, how.processes):
        name, link_Gbps, slot_ns, delay_us, _ = task
        label = f"{link_Gbps} Gbit/s"
        if name != "linear":
            label += f", window {SLOTS * slot_ns / US_ns:g} us" if slot_ns else ", instant"
        print(f"simulate: marks: {name}, {label}", flush=True)
        found[name, link_Gbps, slot_ns, delay_us] = result
    linear = [row for key in order if key[0] == "linear" for row in found[key]]
    return {
        "command": "scripts/simulate marks",
        "stability_command": f"controller lab stability --flows {QUESTION_FLOWS} "
        f"--delay-us {QUESTION_us}",
        "preset": PRESET,
        "flows": QUESTION_FLOWS,
        "delays_us": list(DELAYS_us),
        "windows_us": [SLOTS * slot_ns / US_ns for slot_ns in SLOTS_ns],
        "slots": SLOTS,
        "packet_bytes": PACKET_BYTES,
        "drain": 1.0,
        "echo": "held",
        "links": [_link(Place(link_Gbps)) for link_Gbps in links],
        "looked_at": [FLOWS[0], FLOWS[-1]],
        "linear": linear,
        "rows": [row for key in order if key[0] != "linear" for row in found[key]],
        "left_out": [
            {
                "link_Gbps": link_Gbps,
                "window_us": SLOTS * slot_ns / US_ns,
                "model": "flows",
                "why": left_out(link_Gbps, slot_ns),
            }
            for link_Gbps in links
            for slot_ns in SLOTS_ns
            if left_out(link_Gbps, slot_ns)
        ],
    }


def _link(place: Place) -> dict[str, Any]:
    kmin_bytes, kmax_bytes, pmax = place.line
    return {
        "link_Gbps": place.link_Gbps,
        "kmin_bytes": kmin_bytes,
        "kmax_bytes": kmax_bytes,
        "pmax": pmax,
        "parameters": asdict(place.law),
    }


def left_out(link_Gbps: int, slot_ns: int) -> str:
    """Why the flow-by-flow model has no figures for a slot; empty where it has."""
    if (
        slot_ns in (0, SLOT_ns)
        or slot_ns_of(round(_slowed(link_Gbps, slot_ns).link_Bps)) == SLOT_ns
    ):
        return ""
    return "the model's slots are no shorter than the time of a packet of 4200 bytes"


def _slowed(link_Gbps: int, slot_ns: int) -> DcqcnParameters:
    """Constants for which the live slot is what `slot_ns` is on a link: all is slower, evenly."""
    return slowed(Place(link_Gbps).law, SLOT_ns / slot_ns)


def slowed(law: DcqcnParameters, factor: float) -> DcqcnParameters:
    """The same law with all times `factor` times as long and all rates as much lower.

    With packets as large as before every event comes at `factor` times its time, and nothing else
    changes: a window of other slots is simulated by a model that has slots of one length.
    """
    changes: dict[str, Any] = {}
    for field in fields(law):
        value = getattr(law, field.name)
        if field.name.endswith("_ns"):
            changes[field.name] = round(value * factor)
        elif field.name.endswith("_Bps"):
            changes[field.name] = value / factor
    return replace(law, **changes)


def _task(task: tuple[str, int, int, int, bool]) -> list[dict[str, Any]]:
    name, link_Gbps, slot_ns, delay_us, quick = task
    place = Place(link_Gbps)
    if name == "linear":
        return _linear_rows(place)
    if name == "flows":
        return _flow_rows(place, slot_ns, quick)
    return [_packet_row(place, slot_ns, delay_us, quick)]


def _linear_rows(place: Place) -> list[dict[str, Any]]:
    """Critical delays of `QUESTION_FLOWS`, and the least of all numbers with a fixed point."""
    kmin_bytes, kmax_bytes, pmax = place.line
    loops = [
        DcqcnLoop(flows, 0.0, place.law, kmin_bytes, kmax_bytes, pmax, packet_bytes=PACKET_BYTES)
        for flows in FLOWS
    ]
    rests = fixed_point(loops).exists[:, 0]
    flows = [loop.flows for loop, exists in zip(loops, rests, strict=True) if exists]
    windows_us = [SLOTS * slot_ns / US_ns for slot_ns in SLOTS_ns]
    found = stability_map(loops[0], flows, [], windows_us).critical_delay_us
    rows = []
    for window_us, critical_us in zip(windows_us, found, strict=True):
        by_flows: dict[int, float] = dict(zip(flows, critical_us.tolist(), strict=True))
        least_at = min(by_flows, key=lambda count: by_flows[count])
        asked = QUESTION_FLOWS in by_flows
        rows.append(
            {
                "link_Gbps": place.link_Gbps,
                "window_us": window_us,
                "exists": asked,
                "critical_us": finite(by_flows[QUESTION_FLOWS]) if asked else None,
                "fixed_points": flows,
                "least_critical_us": finite(by_flows[least_at]),
                "least_at_flows": least_at,
                "most_critical_us": finite(max(by_flows.values())),
            }
        )
    return rows


def _row(
    model: str,
    place: Place,
    slot_ns: int,
    delay_us: float,
    found: SteadyOutcome | SteadyResult,
    empty: float,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model": model,
        "link_Gbps": place.link_Gbps,
        "window_us": SLOTS * slot_ns / US_ns,
        "delay_us": delay_us,
        **more,
        "utilisation": found.utilisation,
        "jain": found.jain,
        "queue_mean_bytes": found.queue_mean_bytes,
        "queue_std_bytes": found.queue_std_bytes,
        "empty": empty,
        "hyper": found.hyper,
    }


def _flow_rows(place: Place, slot_ns: int, quick: bool) -> list[dict[str, Any]]:
    """Of both delays; begins at the fair share."""
    from controller.sim.congestion.steady import SteadyCase, SteadyConditions, simulate_steady

    law, step_ns, factor = place.law, STEPS_ns[place.link_Gbps], 1.0
    if slot_ns not in (0, SLOT_ns):
        law, step_ns = _slowed(place.link_Gbps, slot_ns), SLOWED_STEP_ns
        factor = SLOT_ns / slot_ns
    seconds, warmup_s = _seconds(place, quick)
    kmin_bytes, kmax_bytes, pmax = place.line
    conditions = SteadyConditions(
        parameters=law,
        kmin_bytes=kmin_bytes,
        kmax_bytes=kmax_bytes,
        pmax=pmax,
        seconds=seconds * factor,
        warmup_s=warmup_s * factor,
        step_ns=step_ns,
        sample_ns=10 * step_ns,
        packet_bytes=PACKET_BYTES,
    )
    cases = [
        SteadyCase(QUESTION_FLOWS, round(delay_us * US_ns * factor), seed, bool(slot_ns))
        for delay_us in DELAYS_us
        for seed in range(1 if quick else FLOW_SEEDS)
    ]
    return [
        _row(
            "flows",
            place,
            slot_ns,
            round(case.delay_ns / US_ns / factor),
            outcome,
            outcome.empty,
            seed=case.seed,
            seconds=seconds,
            warmup_s=warmup_s,
            step_us=step_ns / factor / US_ns,
        )
        for case, outcome in zip(cases, simulate_steady(cases, conditions), strict=True)
    ]


def _seconds(place: Place, quick: bool) -> tuple[float, float]:
    """Simulated time that is measured, and before it."""
    share = 0.1 if quick else 1.0
    return SECONDS * place.stretch * share, WARMUP_s * place.stretch * share


def _packet_row(place: Place, slot_ns: int, delay_us: int, quick: bool) -> dict[str, Any]:
    """One delay; flows start at line rate."""
    from controller.sim.packets.port import MarkingLine
    from controller.sim.packets.steady import SteadySetting, packet_steady

    law = place.law
    seconds, warmup_s = _seconds(place, quick)
    found = packet_steady(
        SteadySetting(
            QUESTION_FLOWS,
            round(delay_us * US_ns),
            seconds=seconds,
            warm_up_s=warmup_s,
            packet_bytes=PACKET_BYTES,
            link_Bps=round(law.link_Bps),
            line=MarkingLine(*place.line),
            parameters=law,
            window_slots=SLOTS if slot_ns else 0,
            slot_ns=slot_ns or SLOT_ns,
            # As the live marker does, with a window or without.
            at_departure=False,
            sample_ns=round(5 * US_ns * place.stretch),
        )
    )
    return _row(
        "packets",
        place,
        slot_ns,
        delay_us,
        found,
        found.idle_share,
        seed=0,
        seconds=seconds,
        warmup_s=warmup_s,
    )
