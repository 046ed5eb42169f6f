"""``controller class``, ``job`` and ``policy``: what the running controller does to packets."""

from __future__ import annotations

import time
from typing import Any

import click

from controller.cli_common import JSON_OPTION, ask, print_json
from controller.errors import UsageError

_CLASS = click.IntRange(0, 7)


# ---- classes ----


@click.group()
def class_group() -> None:
    """The eight traffic classes: what their packets carry, and what they may use."""


@class_group.command("show")
@JSON_OPTION
@click.pass_context
def class_show(ctx: click.Context, as_json: bool) -> None:
    """Show the classes of the running controller."""
    from controller.telemetry.control_views import classes_text

    answer = ask(ctx, "classes")
    if as_json:
        print_json(answer)
    else:
        click.echo(classes_text(answer["classes"]))


@class_group.command("set")
@click.argument("number", type=_CLASS)
@click.option("--dscp", type=int, help="0 .. 63, each class its own.")
@click.option("--priority", type=int, help="skb->priority, 0 .. 15.")
@click.option("--kmin", metavar="SIZE", help="Mark nothing below this queue (with --kmax).")
@click.option("--kmax", metavar="SIZE", help="Mark everything from this queue on.")
@click.option("--by-rate", is_flag=True, help="Kmin and Kmax by the link's rate again.")
@click.option("--pmax", type=float, help="Marking probability just below Kmax, above 0 .. 1.")
@click.option("--floor", type=float, help="Share of the link it is sure of, 0 .. 1.")
@click.option("--ceiling", type=float, help="Share of the link it gets at most, 0 .. 1.")
@JSON_OPTION
@click.pass_context
def class_set(
    ctx: click.Context,
    number: int,
    dscp: int | None,
    priority: int | None,
    kmin: str | None,
    kmax: str | None,
    by_rate: bool,
    pmax: float | None,
    floor: float | None,
    ceiling: float | None,
    as_json: bool,
) -> None:
    """Change class NUMBER at run time.

    Floors and ceilings take effect with the next `qdisc setup`, which takes them from here.
    """
    from controller.telemetry.control_views import classes_text
    from controller.units import parse_bytes

    changes: dict[str, Any] = {
        "dscp": dscp,
        "priority": priority,
        "kmin_bytes": parse_bytes(kmin, "--kmin") if kmin is not None else None,
        "kmax_bytes": parse_bytes(kmax, "--kmax") if kmax is not None else None,
        "pmax": pmax,
        "floor_share": floor,
        "ceiling_share": ceiling,
    }
    if by_rate and (kmin or kmax):
        raise UsageError("--by-rate and --kmin or --kmax exclude each other.")
    changes = {name: value for name, value in changes.items() if value is not None}
    if by_rate:
        changes |= {"kmin_bytes": None, "kmax_bytes": None}
    if not changes:
        raise UsageError("Nothing is to be changed.", "Give --dscp, --priority, --kmin, ...")
    answer = ask(ctx, "class-set", number=number, changes=changes)
    if as_json:
        print_json(answer)
    else:
        click.echo(classes_text([answer["class"]]))


# ---- jobs ----


@click.group()
def job() -> None:
    """Jobs: which flows belong to which, and what is done to them."""


@job.command("list")
@JSON_OPTION
@click.pass_context
def job_list(ctx: click.Context, as_json: bool) -> None:
    """List the jobs with what their flows came to."""
    from controller.telemetry.control_views import jobs_text

    answer = ask(ctx, "jobs")
    if as_json:
        print_json(answer)
    else:
        click.echo(jobs_text(answer["jobs"], answer["reported_only"]))


@job.command("show")
@click.argument("name")
@JSON_OPTION
@click.pass_context
def job_show(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show one job: rule, plan, progress, and each flow's class and rate."""
    from controller.telemetry.control_views import job_text

    answer = ask(ctx, "job", name=name)
    if as_json:
        print_json(answer)
    else:
        click.echo(job_text(answer["job"]))


def _criteria(texts: tuple[str, ...]) -> dict[str, list[str]]:
    """``CRITERION=VALUE`` -> {criterion: values}."""
    result: dict[str, list[str]] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key or not value:
            raise UsageError(
                f"--match {text!r} cannot be read; expected CRITERION=VALUE.",
                "Examples: --match src=10.1.0.0/16, --match command='python*'.",
            )
        result.setdefault(key, []).append(value)
    return result


@job.command("set")
@click.argument("name")
@click.option("--match", "matches", multiple=True, metavar="CRITERION=VALUE",
              help="src, dst, address (prefixes), qpn, pid, uid, command, cgroup, env; all "
                   "criteria must hold, values of one are alternatives. Without any: processes "
                   "with STELLAR_JOB=NAME.")  # fmt: skip
@click.option("--class", "traffic_class", type=_CLASS, help="Class without a plan.  [3]")
@click.option("--floor", "class_floor", type=_CLASS, help="Lowest class a plan may give.  [0]")
@click.option("--ceiling", "class_ceiling", type=_CLASS,
              help="Highest class a plan may give.  [6]")  # fmt: skip
@click.option("--rate", metavar="R",
              help="Pace the sum of its flows on an interface: 10gbit, 12.5MB; 0: "
                   "not.")  # fmt: skip
@click.option("--set-ect/--keep-ect", "set_ect", default=None,
              help="Make its packets ECN-capable, so that they can be marked.")  # fmt: skip
@click.option("--dcqcn/--no-dcqcn", "dcqcn", default=None,
              help="Whether DCQCN governs its flows.  [as configured]")  # fmt: skip
@click.option(
    "--gap", metavar="TIME", help="A silence this long ends an iteration.  [by link rate]"
)
@click.option("--max-slowdown", type=float, metavar="X",
              help="Bound of its iteration time, times the undisturbed one; 0: as for all.  "
                   "[0]")  # fmt: skip
@click.option("--gpus", type=int, help="GPUs that it trains on, for policies that count them.  [1]")
@JSON_OPTION
@click.pass_context
def job_set(
    ctx: click.Context,
    name: str,
    matches: tuple[str, ...],
    traffic_class: int | None,
    class_floor: int | None,
    class_ceiling: int | None,
    rate: str | None,
    set_ect: bool | None,
    dcqcn: bool | None,
    gap: str | None,
    max_slowdown: float | None,
    gpus: int | None,
    as_json: bool,
) -> None:
    """Create job NAME, or change what is given; flows go on meanwhile."""
    from controller.priority.jobs import JobMatch
    from controller.telemetry.control_views import job_text
    from controller.units import parse_ns, parse_rate_Bps

    changes: dict[str, Any] = {
        "traffic_class": traffic_class,
        "class_floor": class_floor,
        "class_ceiling": class_ceiling,
        "set_ect": set_ect,
        "dcqcn": dcqcn,
        "rate_Bps": None if rate is None else 0 if rate == "0" else parse_rate_Bps(rate, "--rate"),
        "gap_ns": parse_ns(gap, "--gap") if gap is not None else None,
        "max_slowdown": max_slowdown,
        "gpus": gpus,
        "match": JobMatch.parse(_criteria(matches), "--match").to_json() if matches else None,
    }
    changes = {key: value for key, value in changes.items() if value is not None}
    answer = ask(ctx, "job-set", job={"name": name, **changes})
    if as_json:
        print_json(answer)
    else:
        click.echo(job_text(answer["job"]))


@job.command("delete")
@click.argument("name")
@JSON_OPTION
@click.pass_context
def job_delete(ctx: click.Context, name: str, as_json: bool) -> None:
    """Forget job NAME; its flows are left as they are from now on."""
    answer = ask(ctx, "job-delete", name=name)
    if as_json:
        print_json(answer)
    else:
        click.echo(f"job {name} is deleted")


@job.command("plan")
@click.argument("name")
@click.option("--bytes", "expected", metavar="SIZE",
              help="Payload that this host sends in the window.")  # fmt: skip
@click.option(
    "--in", "start", metavar="TIME", default="0ns", help="The window begins in TIME.  [now]"
)
@click.option("--deadline", metavar="TIME", help="The window's bytes are to be there in TIME.")
@click.option("--rate", metavar="R", help="Rate that its flows can expect.")
@click.option("--pace", is_flag=True, help="Hold its flows to that rate.")
@click.option("--valid", metavar="TIME", help="The plan holds so long.  [twice the deadline]")
@click.option("--gap", metavar="TIME", default="0ns",
              help="A silence this long ends the iteration.  [the job's]")  # fmt: skip
@click.option("--floor", "class_floor", type=_CLASS, default=0, help="Lowest class.  [the job's]")
@click.option("--ceiling", "class_ceiling", type=_CLASS, default=7,
              help="Highest class.  [the job's]")  # fmt: skip
@click.option("--compression", type=float, default=1.0, show_default=True,
              help="Bytes on the wire for each byte, above 0 .. 1.")  # fmt: skip
@click.option("--clear", is_flag=True, help="Take the plan away.")
@JSON_OPTION
@click.pass_context
def job_plan(
    ctx: click.Context,
    name: str,
    expected: str | None,
    start: str,
    deadline: str | None,
    rate: str | None,
    pace: bool,
    valid: str | None,
    gap: str,
    class_floor: int,
    class_ceiling: int,
    compression: float,
    clear: bool,
    as_json: bool,
) -> None:
    """Say by hand what is expected of NAME's iteration: less time left, higher class."""
    from controller.priority.jobs import JobPlan
    from controller.telemetry.control_views import plan_text
    from controller.units import parse_bytes, parse_ns, parse_rate_Bps

    if clear:
        answer = ask(ctx, "job-plan-clear", name=name)
        if as_json:
            print_json(answer)
        else:
            click.echo(f"job {name} has no plan; its class is the default")
        return
    if expected is None or deadline is None:
        raise UsageError(
            "A plan needs --bytes and --deadline.",
            "Example: controller job plan NAME --bytes 100MB --deadline 50ms --rate 10gbit",
        )
    now_ns = time.monotonic_ns()
    window_start_ns = now_ns + parse_ns(start, "--in")
    deadline_ns = now_ns + parse_ns(deadline, "--deadline")
    plan = JobPlan(
        job=name,
        expected_bytes=parse_bytes(expected, "--bytes"),
        window_start_ns=window_start_ns,
        deadline_ns=deadline_ns,
        # A job that is late needs its class most: the plan outlives its deadline.
        valid_until_ns=now_ns + parse_ns(valid, "--valid") if valid else 2 * deadline_ns - now_ns,
        rate_Bps=parse_rate_Bps(rate, "--rate") if rate else 0,
        gap_ns=parse_ns(gap, "--gap"),
        class_floor=class_floor,
        class_ceiling=class_ceiling,
        compression_ratio=compression,
        pace=pace,
    )
    answer = ask(ctx, "job-plan", plan=plan.to_json())
    if as_json:
        print_json(answer)
    else:
        click.echo(plan_text(answer["plan"], time.monotonic_ns()))
        for warning in answer["warnings"]:
            click.echo(f"warning: not done here: {warning}")


# ---- policy ----


@click.command("policy")
@click.argument("name", required=False)
@JSON_OPTION
@click.pass_context
def policy_command(ctx: click.Context, name: str | None, as_json: bool) -> None:
    """Show how jobs that share a link are ranked, or rank them by policy NAME from now on.

    laxity (the default), fair, static, mltcp, crux, cassini; off: no plans.
    """
    answer = ask(ctx, "policy", **({"name": name} if name else {}))
    if as_json:
        print_json(answer)
    else:
        others = ", ".join(each for each in answer["policies"] if each != answer["policy"])
        click.echo(f"policy {answer['policy']}; others: {others}")
        for warning in answer["warnings"]:
            click.echo(f"warning: not done here: {warning}")
