"""Tables of docs/results.md about iterations: prediction, policies, what planning costs."""

from __future__ import annotations

from typing import Any

NAIVE = ("last", "mean", "ewma02")
BASE, OURS = "fair", "laxity"
# Asked of the predictor: random series called periodic, after any number of periods.
FALSE_BOUND = 0.01
# Asked of `laxity` where jobs contend: AllReduce times against `fair`, and the mean iteration time
# of every job against its own under `fair`.
MEAN_BOUND, SLOWEST_BOUND, JOB_BOUND = -0.40, -0.58, 1.05

# The machine explains the agent's p99 where that of the yardstick is this share of it at least.
ALIKE = 0.8


def _bold_if(text: str, condition: bool) -> str:
    return f"**{text}**" if condition else text


def _percent(change: float) -> str:
    return f"{100 * change:+.0f} %"


def _share(share: float, digits: int) -> str:
    return f"{100 * share:.{digits}f} %"


# ---- prediction ----


def prediction_table(document: Any) -> str:
    """Recorded series of `scripts/score-predictor`; the lowest error of a row is bold."""
    lines = [
        "| series | iterations | scored | ours, % | last, % | mean, % | EWMA 0.2, % "
        "| begin p50, % | p95, % | bytes, % | change noticed at |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for entry in document["series"]:
        errors = [entry["error_pct"]["mean"], *(entry["naive_error_pct"][key] for key in NAIVE)]
        cells = [_bold_if(f"{error:.2f}", error == min(errors)) for error in errors]
        start, payload = entry["start_error_pct"], entry["bytes_error_pct"]
        changes = ", ".join(map(str, entry["changes"]))
        if entry["known_change"]:
            changes += f" (it changes at {entry['known_change']})"
        lines.append(
            f"| {entry['series']} | {entry['iterations']} | {entry['scored']} "
            f"| {' | '.join(cells)} | {start['p50']:.2f} | {start['p95']:.2f} "
            f"| {'' if payload is None else f'{payload:.2f}'} | {changes} |"
        )
    return "\n".join(lines)


def prediction_losses(document: Any) -> str:
    """One line for each recorded series that misses something, and for each made one."""
    lines = [
        f"* {entry['series']}: {'; '.join(entry['not_reached'])} ({entry['scored']} predictions)"
        for entry in document["series"]
        if entry["not_reached"]
    ]
    for entry in document["made"]:
        best = min(NAIVE, key=lambda key: entry["naive_error_pct"][key])
        if entry["error_pct"] >= entry["naive_error_pct"][best]:
            lines.append(
                f"* made series `{entry['family']}`: {entry['error_pct']:.2f} %, `{best}` "
                f"{entry['naive_error_pct'][best]:.2f} %"
            )
    lines += [
        f"* random series `{entry['family']}`: {_share(entry['worst_false_share'], 1)} called periodic "
        f"after {entry['worst_periods']} periods"
        for entry in document["random"]
        if entry["worst_false_share"] > FALSE_BOUND
    ]
    return "\n".join(lines) or "* nothing"


def prediction_sources(document: Any) -> str:
    """Where the recorded series come from: source (licence): series, ..."""
    sources: dict[str, list[str]] = {}
    for entry in document["series"]:
        sources.setdefault(entry["source"] or "not told", []).append(entry["series"])
    return "\n".join(f"* {source}: {'; '.join(names)}" for source, names in sources.items())


def made_table(document: Any) -> str:
    """Made series: mean errors by family."""
    lines = [
        "| made series | | ours, % | last, % | mean, % | EWMA 0.2, % |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for entry in document["made"]:
        errors = [entry["error_pct"], *(entry["naive_error_pct"][key] for key in NAIVE)]
        cells = [_bold_if(f"{error:.2f}", error == min(errors)) for error in errors]
        lines.append(f"| {entry['family']} | {entry['about']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def random_table(document: Any) -> str:
    """How often random series are called periodic."""
    lines = [
        "| random series | of all verdicts | at worst | after periods |",
        "|---|---:|---:|---:|",
    ]
    for entry in document["random"]:
        worst = _share(entry["worst_false_share"], 2)
        lines.append(
            f"| {entry['family']} | {_share(entry['false_share'], 2)} "
            f"| {_bold_if(worst, entry['worst_false_share'] > FALSE_BOUND)} "
            f"| {entry['worst_periods']} |"
        )
    return "\n".join(lines)


def prediction_section(document: Any) -> str:
    """The section's text."""
    made, chance = document["made"][0], document["random"][0]
    return f"""`scripts/score-predictor FOLDER...` (one file: `controller predict FILE`): each period is predicted from what came before it,
online, and scored beside "as the last one", "as the mean so far" and EWMA 0.2. Mean error of the period; error of the
begin of the next window as a share of the period (asked of profiler and straggler series: p50 at most 1 %, p95 at most 5 %);
mean error of bytes (at most 1 %). The lowest mean error is bold.

{prediction_table(document)}

Not reached:

{prediction_losses(document)}

Profiler traces have three to six steps: one to four predictions say little. The other files of these folders say which
collectives ran, not when, or are no traces: {len(document["not_scored"])} were not scored. Made series, means of
{made["seeds"]} seeds of {made["periods"]} periods:

{made_table(document)}

Where iterations are independent, their mean cannot be beaten; on a walk the last value cannot, and after a new level it is
right at once, while a predictor has to notice.

Random series called periodic, {chance["seeds"]:,} series of {chance["periods"]} periods each (bound: {_share(FALSE_BOUND, 0)}). Windows that all have the same
bytes speak for a job that trains, so they are believed more easily:

{random_table(document)}

The series are recorded by others and are not part of this repository:

{prediction_sources(document)}"""


# ---- policies ----


def _worst_job(policy: Any) -> float | None:
    """Highest mean iteration time of a job against its own without controller."""
    changes = [job["vs_fair"]["iteration_mean"] for job in policy["jobs"].values()
               if job["vs_fair"]]  # fmt: skip
    return 1 + max(changes) if changes else None


def priority_table(document: Any) -> str:
    """Mixes and policies of `scripts/compare-priority`, with the bounds of each mix."""
    lines = [
        "| mix | policy | iterations | AllReduce, ms: mean | slowest 10 % | iteration, ms: p50 | p99 "
        "| AllReduce mean against `fair` | slowest 10 % | worst job's iteration against `fair` "
        "| sent again | agent's CPU |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for mix, entry in document["mixes"].items():
        for name, found in entry["policies"].items():
            allreduce, iteration, change = (
                found["allreduce_ms"], found["iteration_ms"], found["vs_fair"],
            )  # fmt: skip
            against = ["", "", ""]
            if change and name != BASE:
                worst = _worst_job(found)
                against = [_percent(change["allreduce_mean"]), _percent(change["allreduce_slowest"]),
                           "" if worst is None else f"{worst:.2f}"]  # fmt: skip
            health = found["health"]
            lines.append(
                f"| {mix if name == next(iter(entry['policies'])) else ''} | `{name}` "
                f"| {found['iterations']} | {allreduce['mean']:.0f} | {allreduce['slowest10']:.0f} "
                f"| {iteration['p50']:.0f} | {iteration['p99']:.0f} | {' | '.join(against)} "
                f"| {_share(health['resent_share'], 2)} | {_share(health['agent_cpu_share'], 1)} |"
            )
        for label, key in (("knows all", "found"), ("undisturbed", "isolated")):
            if entry["oracle"]:
                change = entry["oracle"][key]
                lines.append(
                    f"| | *{label}* | | | | | | {_percent(change['allreduce_mean'])} "
                    f"| {_percent(change['allreduce_slowest'])} | | | |"
                )
    return "\n".join(lines)


def priority_verdicts(document: Any) -> str:
    """One line for each mix: what `laxity` gains, and whether that is what was asked for."""
    lines = []
    for mix, entry in document["mixes"].items():
        ours = entry["policies"].get(OURS)
        if not ours or not ours["vs_fair"]:
            continue
        change, worst = ours["vs_fair"], _worst_job(ours)
        missed = []
        if change["allreduce_mean"] > MEAN_BOUND:
            missed.append("mean")
        if change["allreduce_slowest"] > SLOWEST_BOUND:
            missed.append("slowest 10 %")
        if worst is not None and worst > JOB_BOUND:
            missed.append(f"a job at {worst:.2f} of its `fair` iteration")
        possible = entry["oracle"]["found"] if entry["oracle"] else None
        line = (
            f"* {mix}: AllReduce {_percent(change['allreduce_mean'])} on average, "
            f"{_percent(change['allreduce_slowest'])} in the slowest tenth"
        )
        if possible:
            line += (
                f"; knowing all: {_percent(possible['allreduce_mean'])}, "
                f"{_percent(possible['allreduce_slowest'])}"
            )
        lines.append(line + (f" (**missed: {', '.join(missed)}**)" if missed else " (reached)"))
    return "\n".join(lines) or f"* `{OURS}` or `{BASE}` was not run"


def priority_settings(document: Any) -> str:
    """How each mix was run, one line for all that were run alike."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for mix, entry in document["mixes"].items():
        keys = ("ranks", "rate_bps", "chunk_bytes", "rounds", "iterations", "warmup", "kernel")
        alike.setdefault(tuple(entry[key] for key in keys), []).append(mix)
    lines = []
    for (ranks, rate, chunk, rounds, iterations, warmup, kernel), mixes in alike.items():
        lines.append(
            f"* {', '.join(mixes)}: {ranks} ranks a job, {rate / 1e6:g} Mbit/s a host, messages of "
            f"{chunk >> 10} KiB, {rounds} rounds of {iterations} iterations of the slowest job "
            f"after {warmup} that do not count; Linux {kernel}"
        )
    return "\n".join(lines)


def priority_section(document: Any) -> str:
    """The section's text."""
    if not document["mixes"]:
        return "Not measured yet: `scripts/compare-priority` makes `docs/results/priority.json`."
    counts = [
        job["iterations"]
        for entry in document["mixes"].values()
        for policy in entry["policies"].values()
        for job in policy["jobs"].values()
    ]
    return f"""`scripts/lab run --timeout 2400 --results docs/results -- scripts/compare-priority` (one mix: `controller bench priority -m MIX`,
`--list` shows them): AllReduce jobs of the engine on soft-RoCE, every host's link shaped, gradients and communication
shares of ResNet-50 and BERT-Large scaled to it; computation is a sleep. The policies of a mix take turns in one boot, with
the same compute times; {min(counts)} to {max(counts)} iterations a job count. Two mixes may be of different boots: compare within
a mix. `fair` has the same queues and no controller. Compute times vary by 20 %, in the `steady` mixes by 2 %, as
those of published traces do. *knows all*: the best order that a search finds which knows every compute time;
*undisturbed*: every window alone, which no order can beat.

{priority_settings(document)}

{priority_table(document)}

Asked for where jobs contend: AllReduce {_share(-MEAN_BOUND, 0)} lower on average, {_share(-SLOWEST_BOUND, 0)} in the slowest tenth, no job's mean iteration
above {JOB_BOUND} of its `fair` one. `{OURS}`:

{priority_verdicts(document)}

Where *knows all* gains little, nobody can gain: the link is busy, and one job's wait is another's. A sync window that
finds the link free costs nothing under any policy, so what is gained is gained where windows meet.

![sync windows](results/priority-timeline.svg)

![iteration times](results/priority-cdf.svg)"""


def simulated_section(document: Any) -> str:
    """Means over the mixes of `scripts/compare-policies`, and where `laxity` loses."""
    mixes = document["mixes"]
    lines = ["| policy | AllReduce mean | slowest 10 % | slowest 10 %, worst mix | worst job |",
             "|---|---:|---:|---:|---:|"]  # fmt: skip
    for name in mixes[0]["policies"]:
        rows = [entry["policies"][name] for entry in mixes]
        mean, slowest = (
            sum(row[member] for row in rows) / len(rows)
            for member in ("allreduce_mean", "allreduce_slowest")
        )
        worst = max(row["allreduce_slowest"] for row in rows)
        lines.append(
            f"| {name} | {100 * mean:+.1f} % | {100 * slowest:+.1f} % | {_percent(worst)} "
            f"| {max(row['worst_job'] for row in rows):.2f} |"
        )
    table = "\n".join(lines)
    return f"""`scripts/compare-policies`: the same policies in the simulator, {len(mixes)} mixes of two and three jobs, {document["seeds"]} seeds,
{document["iterations"]} iterations of the slowest job, against `fair`; means over the mixes, and the worst of them. *Handicap* and
*credit* are constants of `laxity` (0.5, and credit from 1.2 on). They were chosen on mixes like these, so this is no
independent test of them.

{table}"""


# ---- planning ----


def planning_section(document: Any) -> str:
    """The section's text, of `scripts/bench-agent`."""
    latency, yardstick = document["plan_latency_us"], document["yardstick_us"]
    target = document["target_p99_us"]
    missed = latency["p99"] > target
    text = f"""`sudo scripts/bench-agent{" --realtime" if document["realtime"] else ""}`: a real controller on one end of a veth, {document["jobs"]} jobs of
{document["iterations_per_s"]:g} iterations a second made of synthetic frames, {document["seconds"]:.0f} s, policy `{document["policy"]}`, natively (Linux
{document["kernel"]}, {document["processors"]} processors, load average {document["load_average"]}). Yardstick: a fixed piece of work in another
process, woken as often, just before.

| what | p50, us | p99, us |
|---|---:|---:|
| event to plan in the map | {latency["p50"]:,.0f} | {_bold_if(f"{latency['p99']:,.0f}", missed)} |
| yardstick (best: {yardstick["best"]:,.0f}) | {yardstick["p50"]:,.0f} | {yardstick["p99"]:,.0f} |

Bound: p99 {target:,.0f} us, {"**missed**" if missed else "reached"}."""
    if missed and yardstick["p99"] >= ALIKE * latency["p99"]:
        text += (
            " The yardstick, which does no planning, misses it by about as much:\nthis machine"
            " stands still now and then, and the figure says more of it than of the agent."
        )
    share, model_share = document["control_to_job_bytes"], document["control_to_job_bytes_resnet50"]
    return f"""{text}

Processor: {_share(document["cpu_share"], 1)} of one ({_share(document["cpu_share_idle"], 2)} idle), {document["cpu_us_per_event"]:,.0f} us an event, in which
{document["plans"] / max(1, document["events"]):.1f} plans are written. Control: {document["control_bytes_per_iteration"]:.0f} bytes an iteration, none of them on the network;
{_share(share, 2)} of the jobs' bytes with windows of {document["window_bytes"]:,} bytes as here, {_share(model_share, 5)} with ResNet-50's gradient (bound: 3 %)."""
