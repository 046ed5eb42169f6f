"""What docs/simulated-results.md says follows from the figures, not from hope."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from controller.sim.congestion.steady import SteadyCase, SteadyConditions, simulate_steady

_SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(_SCRIPTS))
tables = importlib.import_module("simulation_tables")
models = importlib.import_module("simulation_tables_models")
marks_tables = importlib.import_module("simulation_tables_marks")
marks = importlib.import_module("simulation_marks")
words = importlib.import_module("simulation_text")
figures = importlib.import_module("simulation_figures")
sys.path.remove(str(_SCRIPTS))


# ---- margins ----


def margin_row(published_deg: float | None, stable: bool, missing: str = "") -> dict[str, Any]:
    return {
        "flows": 10, "delay_us": 50, "published_deg": published_deg,
        "published_stable": None if published_deg is None else published_deg > 0,
        "published_p": 0.0078,
        "published_q_bytes": 1.5e5, "published_critical_us": 20.8, "exact_deg": 1.85, "p": 0.006,
        "q_bytes": None if missing else 122.6e3, "critical_us": 62.5, "stable": stable,
        "missing": missing,
    }  # fmt: skip


def margins(rows: list[dict[str, Any]], worst_deg: float = 0.09) -> str:
    agreement = {"numbers": 3, "settings": 2}
    document = {
        "rows": rows,
        "question": {"flows": 10, "delay_us": 50},
        "ladder": [{"what": "published", "margin_deg": -6.6, "alone_deg": -6.6}],
        "agreement": {
            "dcqcn_margins": {**agreement, "worst": worst_deg},
            "timely_margins": {**agreement, "worst": 0.01},
            "convergence": {**agreement, "worst": 1e-5},
        },
    }
    return str(models.margins_section({"model-margins": document}))


@pytest.mark.parametrize(
    ("row", "is_contradicted"),
    [
        (margin_row(-6.62, stable=True), True),
        (margin_row(6.62, stable=True), False),
        (margin_row(-6.62, stable=False), False),
        (margin_row(43.2, stable=False, missing="above Pmax"), True),
        (margin_row(None, stable=True), False),
    ],
)
def test_a_published_margin_is_bold_where_the_exact_roots_say_another_thing(
    row: dict[str, Any], is_contradicted: bool
) -> None:
    text = margins([row])
    assert f"in {int(is_contradicted)} of 1 settings" in text
    assert ("| **" in text) == is_contradicted


def test_a_margin_too_far_from_the_authors_own_is_told() -> None:
    assert "The published method is met." in margins([margin_row(1, True)])
    assert "**The published method is not met.**" in margins([margin_row(1, True)], 0.11)


# ---- queue ----


def queue_row(model: str, left: float, delay_us: float = 50, **more: Any) -> dict[str, Any]:
    return {
        "model": model, "delay_us": delay_us, "line": "paper", "scale": 1, "echo": "",
        "start": "fair share", "factor": None, "seed": 0, "queue_mean_bytes": 1e5,
        "queue_std_bytes": 5e4, "utilisation": 0.98, "empty": 0.01, "left": left, "hz": 400.0,
        **more,
    }  # fmt: skip


FLUID = [
    queue_row("fluid", 0.0, start="line rate"),
    queue_row("fluid", 0.0, start="1.6 q*", factor=1.6),
    queue_row("fluid", 1.0, start="1.7 q*", factor=1.7),
]
REAL = [
    queue_row("flows", 0.2, 1, echo="held"),
    queue_row("flows", 0.8, echo="held"),
    queue_row("packets", 0.9, echo="forgotten", start="line rate"),
    queue_row("packets", 0.9, echo="forgotten", start="line rate", scale=4),
]


def queue(rows: list[dict[str, Any]], exact_deg: float = 1.85) -> str:
    document = {
        "flows": 10, "delay_us": 50, "fixed_point_bytes": 122.6e3, "exact_deg": exact_deg,
        "published_deg": -6.6, "critical_us": 62.5, "kmax_bytes": 2e5, "rows": rows,
    }  # fmt: skip
    return str(models.queue_section({"model-queue": document}))


def test_seeds_of_a_setting_are_one_row_with_their_mean() -> None:
    rows = [queue_row("flows", 0.2), queue_row("flows", 0.6, seed=1), queue_row("flows", 0.1, 1)]
    found = models.queue_rows({"rows": rows})
    assert [(row["left"], row["seeds"]) for row in found] == [(pytest.approx(0.4), 2), (0.1, 1)]


def test_the_step_at_kmax_is_named_only_where_starts_beyond_it_alone_swing() -> None:
    assert "swings when it begins at 1.7 q*: once the queue has passed Kmax" in queue(FLUID)
    below = [*FLUID, queue_row("fluid", 1.0, start="1.5 q*", factor=1.5)]
    assert "has passed Kmax" not in queue(below)
    calm = [{**row, "left": 0.0} for row in FLUID]
    assert "has passed Kmax" not in queue(calm) and "swings when" not in queue(calm)


def test_the_verdict_on_the_fixed_point_needs_swings_that_noise_does_not_explain() -> None:
    verdict = "**The fixed point is stable on paper"
    assert verdict in queue([*FLUID, *REAL])
    assert "flow by flow, echoes held, it settles at 1 us, swings at 50 us" in queue(REAL)
    assert verdict not in queue([*FLUID, *REAL], exact_deg=-1)
    assert verdict not in queue([*FLUID, *REAL[:-1]])
    assert verdict not in queue([*FLUID, *REAL[:-1], {**REAL[-1], "left": 0.3}])
    # Half of it is what noise of a quarter would be.
    assert verdict not in queue([*FLUID, *REAL[:-1], {**REAL[-1], "queue_std_bytes": 2.5e4}])
    assert "is not noise. " in queue([*FLUID, *REAL])
    endless = [{**row, "line": "endless"} for row in REAL[2:]]
    assert "is not noise nor the step at Kmax alone. " in queue([*FLUID, *REAL, *endless])
    assert verdict not in queue([*FLUID, REAL[0], {**REAL[1], "left": 0.1}, *REAL[2:]])


# ---- map ----


def map_row(flows: int, exists: bool, longest_us: float, per_s: float) -> dict[str, Any]:
    return {
        "flows": flows, "p": 0.006, "exists": exists, "critical_us": [62.5, None],
        "per_s": [[per_s, 1.0], [1.0, 1.0]], "longest_window_us": longest_us,
    }  # fmt: skip


def stability_map(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "flows": [row["flows"] for row in rows], "delays_us": [0, 50], "windows_us": [0, 1000.0],
        "near_us": 1.0, "presets": {"paper": rows},
    }  # fmt: skip


def test_a_live_window_that_is_nowhere_stable_is_bold() -> None:
    rows = [map_row(10, True, 140, -5.0), map_row(64, False, 1000, -1.0)]
    text = models.map_section({"model-map": stability_map(rows)})
    assert "a fixed point for 1 of 2 numbers of flows (10)" in text
    assert "**with the live window of 1000 us for none of 2 numbers of flows**" in text
    assert "longest stable windows at 1 us: 140 us (10 flows)" in text
    assert "| paper | 10 | 0.0060 | 62.5 | > 10,000 | 140 |" in text
    assert "| paper | 64 | **0.0060** |" in text
    rows[0]["longest_window_us"] = 1000
    text = models.map_section({"model-map": stability_map(rows)})
    assert "with the live window of 1000 us for 1 of 2 numbers of flows (10)" in text
    assert "**with" not in text


def test_the_map_is_drawn_by_delay_and_flows() -> None:
    rows = [map_row(10, True, 140, -5.0), map_row(64, False, 1000, -1.0)]
    assert figures.states(rows, 0) == [[0, 2], [1, 3]]
    pytest.importorskip("matplotlib")
    document = stability_map(rows)
    document["presets"]["connectx"] = rows
    assert len(figures.map_figure(document).axes) == 4


# ---- marks ----


def marks_document(live_used: float, least_us: float | None = 41.04) -> dict[str, Any]:
    """40 Gbit/s with a live window that uses so much of the port, 1 Gbit/s where all do."""
    windows = {1000.0: live_used, 48.0: 0.95, 0.0: 0.96}
    return {
        "command": "scripts/simulate marks", "stability_command": "controller lab stability",
        "preset": "paper", "flows": 10, "delays_us": [1, 50], "windows_us": list(windows),
        "slots": 16, "packet_bytes": 1000, "drain": 1.0, "echo": "held",
        "links": [{"link_Gbps": 40}, {"link_Gbps": 1}],
        "looked_at": [2, 64],
        "linear": [
            {
                "link_Gbps": link_Gbps, "window_us": window_us, "exists": True,
                "critical_us": least_us, "least_critical_us": least_us,
                "most_critical_us": least_us, "least_at_flows": 9, "fixed_points": [2, 3, 14],
                **(dict.fromkeys(("critical_us", "least_critical_us", "most_critical_us"), 0.0)
                   if (link_Gbps, window_us) == (40, 1000.0) else {}),
            }
            for link_Gbps in (40, 1)
            for window_us in windows
        ],
        "rows": [
            {
                "model": model, "link_Gbps": link_Gbps, "window_us": window_us, "seed": 0,
                "delay_us": delay_us, "seconds": 0.1, "jain": 0.99, "queue_mean_bytes": 5e4,
                "queue_std_bytes": 7e4, "utilisation": share if link_Gbps == 40 else 0.999,
            }
            for link_Gbps in (40, 1)
            for window_us, share in windows.items()
            for delay_us in (1, 50)
            for model in ("flows", "packets")
            if (model, link_Gbps, window_us) != ("flows", 1, 48.0)
        ],
        "left_out": [{"link_Gbps": 1, "window_us": 48.0, "model": "flows", "why": "too short"}],
    }  # fmt: skip


def test_a_window_that_costs_throughput_is_told_and_where_it_does_not() -> None:
    text = marks_tables.marks_section({"model-marks": marks_document(0.7)})
    assert (
        "**The live window of 1000 us costs 10 long flows throughput at 40 Gbit/s.** Over models "
        "and delays, they use 70 % of the port at 40 Gbit/s (instant: 96 %). At 1 Gbit/s the live "
        "window of 1000 us does not surely cost more than 2 points: 100 % of the port"
    ) in text
    assert "unstable at any delay at 40 Gbit/s" in text
    assert "| 40 | window of 1000 us | **0.0** | 0.0 | **70.0, 70.0** | 50/70, 50/70 |" in text
    verdict = marks_tables.verdict(marks_document(0.945))
    assert "throughput" not in verdict and verdict.startswith("At 40 and 1 Gbit/s the live")


def test_delays_within_which_a_loop_is_stable_are_rounded_down() -> None:
    claim = "stable with feedback within"
    found = marks_tables.claims(marks_document(0.7, 41.96))
    assert f"window of 48 us: {claim} 41 us at 40 Gbit/s and 41 us at 1 Gbit/s" in found
    assert f"instant: {claim} 10 ms at 40 Gbit/s" in marks_tables.claims(
        marks_document(0.7, None)
    )[2]  # fmt: skip


def test_a_cell_of_marks_that_is_left_out_says_why() -> None:
    text = marks_tables.marks_section({"model-marks": marks_document(0.7)})
    assert "Left out, flow by flow: 1 Gbit/s with 48 us, as too short." in text
    assert "| 1 | window of 48 us | 41.0 | 41.0 | (left out) |  |  | 99.9, 99.9 |" in text


def test_a_law_slowed_evenly_gives_the_same_figures_later() -> None:
    law = marks.Place(40).law

    def used(factor: int) -> Any:
        conditions = SteadyConditions(
            parameters=marks.slowed(law, factor), seconds=0.01 * factor, warmup_s=0.005 * factor,
            step_ns=1_000 * factor, sample_ns=10_000 * factor,
        )  # fmt: skip
        return simulate_steady([SteadyCase(10, 50_000 * factor)], conditions)[0]

    now, later = used(1), used(20)
    assert later.utilisation == pytest.approx(now.utilisation, rel=1e-3)
    assert later.queue_mean_bytes == pytest.approx(now.queue_mean_bytes, rel=1e-2)
    assert later.jain == pytest.approx(now.jain, rel=1e-3)


# ---- incast ----


def estimate(mean: float, half: float | None = 0.01) -> dict[str, float | None]:
    return {"mean": mean, "ci95": half}


def variant(stability: float, change: float | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "stability": estimate(stability), "window_mean_ns": estimate(4e6 * stability),
        "window_slowest_ns": None, "utilisation": estimate(0.9), "queue_p99_bytes": estimate(1e6),
    }  # fmt: skip
    if change is not None:
        found["stability_change_percent"] = estimate(change, 2.0)
    return found


def incast(mean_change: float, possible: dict[str, float]) -> dict[str, Any]:
    return {
        "seeds": 3, "jobs": 1, "target_percent": 35.0,
        "setting": {"workload": {"window_bytes": 1e8}, "bin_ns": 1e6,
                    "parameters": {"link_Bps": 12.5e9}},
        "degrees": {
            degree: {"standard": variant(0.8), "window": variant(0.6, -25.0 + number * 24),
                     "possible_change_percent": most}
            for number, (degree, most) in enumerate(possible.items())
        },
        "mean_change_percent": {
            "stability": {"window": estimate(mean_change)},
            "job_stability": {"window": None}, "flow_stability": {"window": estimate(1.0)},
        },
    }  # fmt: skip


def test_a_target_is_missed_and_out_of_reach_only_where_it_is() -> None:
    text = models.incast_part("incast", incast(34.9, {"4": 40.0, "32": 25.0}))
    assert "* `window`: +34.9 ± 0.0 % (**missed**: +35 %); of each flow +1.0 ± 0.0 %" in text
    assert "+35 % cannot be had with 32 senders" in text
    assert "standard DCQCN has 0.800 to 0.800 there. It would have to be below 0.741." in text
    text = models.incast_part("incast", incast(35.0, {"4": 40.0, "32": 36.0}))
    assert "(reached: +35 %)" in text and "cannot be had" not in text
    text = models.incast_part("incast", incast(1.0, {"4": 4.0, "32": 3.0}))
    assert "cannot be had with any of these numbers of senders" in text


def test_a_variant_is_bold_where_it_is_surely_worse() -> None:
    text = models.incast_part("incast", incast(1.0, {"4": 40.0, "32": 25.0}))
    assert "| 4 | 0.800 ± 0.010 | +40.0 | **-25.0 ± 2.0** |" in text
    assert "| 32 | 0.800 ± 0.010 | +25.0 | -1.0 ± 2.0 |" in text


def test_what_no_run_could_measure_has_no_row() -> None:
    text = models.others_table(incast(1.0, {"4": 40.0}), ["window"])
    assert "| length of a window | -25.0 % |" in text
    assert "slowest" not in text


# ---- policies ----

KEYS = ("allreduce_ms.mean", "allreduce_ms.slowest10", "allreduce_ms.p99")


def policy(mean: float, slowest: float, half: float = 0.02) -> dict[str, Any]:
    """Of a `fair` with 100 and 200 ms."""
    return {
        "allreduce_ms": {"mean": mean, "slowest10": slowest, "p99": slowest},
        "worst_slowdown": 1.2, "utilisation": 0.7,
        "vs_fair": {
            "allreduce_ms": {"mean": mean / 100 - 1, "slowest10": slowest / 200 - 1,
                             "p99": slowest / 200 - 1},
            "ci95": dict.fromkeys(KEYS, half),
        },
    }  # fmt: skip


def cluster(bound_ms: float = 50.0, **policies: dict[str, Any]) -> dict[str, Any]:
    return {
        "scenario": {"about": "jobs", "iterations": 20, "jobs": [{"count": 3}],
                     "conditions": {"qps_per_peer": 4}},
        "seeds": 10, "took_s": 120.0, "processes": 2, "figures": ["cdf"],
        "links": {"load": {"uplinks": {"mean": 0.4, "hottest": 0.8}}},
        "policies": {"fair": {**policy(100, 200), "vs_fair": None}, **policies},
        "bound": {"allreduce_ms": {"mean": bound_ms, "slowest10": bound_ms, "p99": bound_ms},
                  "worst_slowdown": 1.0},
    }  # fmt: skip


def test_a_missed_target_says_so_and_whether_anybody_could() -> None:
    text = tables.verdict(cluster(laxity=policy(59, 100)))
    assert "mean -41.0 ± 2.0 % (target -40 %: reached)" in text
    assert "slowest 10 % -50.0 ± 2.0 % (target -58 %: **missed**)" in text
    knowing = cluster(laxity=policy(70, 100), oracle=policy(65, 90))
    assert "(target -40 %: **missed**; `oracle`: -35.0 ± 2.0 %)" in tables.verdict(knowing)
    text = tables.verdict(cluster(bound_ms=70, laxity=policy(80, 150)))
    assert "(target -40 %: **missed**, and nobody can: undisturbed -30.0 %)" in text
    # Undisturbed, the slowest tenth would be 65 % lower.
    assert "-25.0 ± 2.0 % (target -58 %: **missed**)" in text


def test_policies_that_are_better_are_named() -> None:
    found = cluster(laxity=policy(80, 150), crux=policy(70, 160), oracle=policy(60, 120))
    assert "Lower on average: `crux` (-30.0 %)." in tables.verdict(found)
    assert "Lower in the slowest tenth" not in tables.verdict(found)


def test_a_policy_is_bold_where_it_is_surely_worse_than_fair() -> None:
    found = cluster(crux=policy(103, 203), laxity=policy(80, 150))
    row = next(line for line in tables.scenario_table(found).splitlines() if "crux" in line)
    assert "**+3.0 ± 2.0 %**" in row
    assert "| +1.5 ± 2.0 % |" in row


def test_scenarios_that_are_missing_are_named_with_their_command() -> None:
    text = tables.cluster_section(
        {"cluster-bursty": cluster(laxity=policy(80, 150)),
         "cluster-bursty-1qp": cluster(laxity=policy(104, 210))}
    )  # fmt: skip
    assert "Not simulated yet: steady-equal, mixed-models, many-small and few-large" in text
    assert "`scripts/simulate cluster`" in text
    assert "### `bursty`" in text and "results/cluster-bursty-cdf.svg" in text
    assert "| `bursty` | mean | **+4.0 ± 2.0 %** |" in text
    assert "though the hottest link" not in text


def test_links_that_are_asked_for_too_much_are_told() -> None:
    found = cluster(laxity=policy(80, 150))
    found["links"]["load"]["uplinks"]["hottest"] = 1.2
    text = tables.cluster_section({"cluster-bursty-1qp": found})
    assert "the hottest link is asked for more than it has in bursty" in text


def test_the_claim_counts_what_is_sure() -> None:
    text = tables.cluster_section(
        {"cluster-bursty": cluster(laxity=policy(55, 197)),
         "cluster-few-large": cluster(laxity=policy(103, 199))}
    )  # fmt: skip
    assert (
        "on average surely lower in 1, **surely higher in 1**, target (-40 %) **reached in 1**; "
        "in the slowest tenth surely lower in 0, surely higher in 0, target (-58 %) "
        "**reached in 0**."
    ) in text


# ---- soft-RoCE, speed ----


def side(measured_ms: float, *simulated_ms: float) -> dict[str, Any]:
    return {
        "measured": {"iteration_ms": measured_ms},
        "simulated": {
            plan: {"iteration_ms": value}
            for plan, value in zip(("1", "50"), simulated_ms, strict=True)
        },
    }


def test_errors_are_shares_of_what_was_measured() -> None:
    document = {
        "plans_ms": [1.0, 50.0],
        "mixes": {
            "two": {"fair": side(200, 202, 202), "laxity": side(100, 80, 90)},
            "three": {"fair": side(100, 97, 97)},
        },
    }
    assert tables.errors(document, "laxity", "1") == {"two": pytest.approx(-0.2)}
    text = tables.measured_section({"simulator": document})
    assert "off by 2.0 % in the median and 3.0 % at worst" in text
    assert "| two | `laxity` | 100.0 | 80.0 | -20.0 % | 90.0 | -10.0 % |" in text
    assert "| `laxity` | 20.0 | 20.0 | 10.0 | 10.0 |" in text


@pytest.mark.parametrize("iterations", [200, 1000])
def test_a_run_that_was_cut_short_says_so(iterations: int) -> None:
    row = {
        "nics": 256, "jobs": 16, "policy": "fair", "events": 1000, "decisions": 10,
        "flow_events": 10_000, "cpu_s": 1.0, "us_per_event": 1000.0, "ns_per_flow_event": 1e5,
    }  # fmt: skip
    document = {
        "python": "3.11",
        "cluster": [row, {**row, "nics": 4096, "ns_per_flow_event": 2e5}],
        "long": [{"kind": "steady", "nics": 1024, "jobs": 100, "buckets": 1, "cpu_s": 240.0,
                  "iterations": iterations, "wanted_iterations": 1000, "limit_s": 600.0,
                  "events": 9, "us_per_event": 1.0}],
        "flows": [{"flows": 256, "us_per_step": 50.0, "ns_per_flow_step": 195.0}],
        "packets": {"packets_per_s": 1e5, "events_per_s": 3e5},
    }  # fmt: skip
    text = tables.growth_section({"model-growth": document})
    assert "From 256 to 4,096 NICs (16 times as many)" in text
    assert "from 100,000 to 200,000 ns a flow-event" in text
    is_cut = iterations == 200
    assert ("**Not all 1,000 iterations**: they would take 20 min" in text) == is_cut


# ---- the page ----


def test_paragraphs_and_list_entries_are_wrapped_and_tables_are_not() -> None:
    word = "four " * 40
    text = f"# {word}\n\n{word}\n{word}\n* {word}\n* b\n\n| {word} |\n![{word}](x)\n"
    lines = words.wrapped(text).splitlines()
    assert [lines[0], *lines[-2:]] == [f"# {word}", f"| {word} |", f"![{word}](x)"]
    assert max(len(line) for line in lines[1:-2]) <= 120
    assert "* b" in lines and lines[6].startswith("* four") and lines[7].startswith("  four")
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(_SCRIPTS / "simulate"), *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_page_without_figures_says_which_command_makes_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = simulate("--page", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "simulated-results.md").read_text()
    for name in ("margins", "queue", "map", "marks", "incast", "cluster", "rxe", "growth"):
        assert f"Not simulated yet: `scripts/simulate {name}` does it." in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tomorrow",), "tomorrow: allowed are margins, queue"),
        (("--quick",), "--quick would replace the published figures"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[str, ...], message: str) -> None:
    done = simulate(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("{", "model-queue.json is damaged"), ("{}", "'rows' is not there")],
)
def test_a_damaged_document_is_named(tmp_path: Path, content: str, complaint: str) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "model-queue.json").write_text(content)
    done = simulate("--page", "--output", str(tmp_path))
    assert done.returncode == 1
    assert complaint in done.stderr
    assert "scripts/simulate queue makes" in done.stderr
