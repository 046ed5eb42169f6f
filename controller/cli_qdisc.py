"""``controller qdisc``: the queues that enforce classes at an interface's egress."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from controller.cli_common import JSON_OPTION, ask, print_json
from controller.errors import NotRunningError, UsageError

if TYPE_CHECKING:
    from controller.priority.classes import TrafficClass

_TARGET = click.argument("interface", metavar="[NETNS:]IF")


def _shares(option: str, texts: tuple[str, ...]) -> dict[int, float]:
    """``CLASS=SHARE`` -> {class: share}; ``10%`` and ``0.1`` are the same."""
    result: dict[int, float] = {}
    for text in texts:
        number, separator, share = text.partition("=")
        try:
            value = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
            if not separator or not 0 <= int(number) <= 7 or not 0 <= value <= 1:
                raise ValueError
        except ValueError as error:
            raise UsageError(
                f"{option} {text!r} cannot be read; allowed: CLASS=SHARE with CLASS 0 .. 7 and "
                "SHARE 0% .. 100% (or 0 .. 1), such as 7=20%."
            ) from error
        result[int(number)] = value
    return result


def _classes(ctx: click.Context) -> tuple[TrafficClass, ...]:
    """Classes of the running controller, or the default ones where none runs."""
    from controller.priority.classes import TrafficClass, default_classes

    try:
        answer = ask(ctx, "classes")
    except NotRunningError:
        return default_classes()
    return tuple(TrafficClass.from_json(entry) for entry in answer["classes"])


def _tell_controller(ctx: click.Context) -> None:
    """A running controller looks at its interfaces' queues at once, not within seconds."""
    with contextlib.suppress(NotRunningError):
        ask(ctx, "refresh")


@click.group()
def qdisc() -> None:
    """Queues that enforce classes at an interface's egress.

    They stay when the controller ends, and work without one.
    """


@qdisc.command("setup")
@_TARGET
@click.option("--rate", metavar="R",
              help="What the link carries: 25gbit, 100mbit (bits/s), 12.5MB (bytes/s). "
                   "Needed for htb.")  # fmt: skip
@click.option("--kind", type=click.Choice(["htb", "mqprio"]), default="htb", show_default=True,
              help="htb shapes in the kernel; mqprio maps classes to a NIC's queues (8 or "
                   "more).")  # fmt: skip
@click.option("--floor", "floors", multiple=True, metavar="CLASS=SHARE",
              help="What a class is sure of, such as 0=5%; repeat for several.")  # fmt: skip
@click.option("--ceiling", "ceilings", multiple=True, metavar="CLASS=SHARE",
              help="What a class gets at most, such as 0=50%; repeat for several.")  # fmt: skip
@click.option("--qp-timeout", type=click.IntRange(1, 31), default=14, show_default=True,
              help="Timeout attribute of the queue pairs (4.096 us * 2^N): a floor should drain "
                   "one window in half of it.")  # fmt: skip
@JSON_OPTION
@click.pass_context
def setup_command(
    ctx: click.Context,
    interface: str,
    rate: str | None,
    kind: str,
    floors: tuple[str, ...],
    ceilings: tuple[str, ...],
    qp_timeout: int,
    as_json: bool,
) -> None:
    """Give each class its queue, floor and ceiling; again: change them in place.

    The classes are the running controller's (class show), or the default ones.
    Changing rates, floors or ceilings of a tree that is there loses no packet. The
    first setup and a change of --kind swap the root qdisc: the kernel may then refuse
    a packet, and a soft-RoCE queue pair that sends at that moment can die of it (1 of 8
    did). Set up before jobs start.
    """
    from controller.dataplane.attachment import parse_target
    from controller.ops.qdisc import setup
    from controller.ops.qdisc_text import setup_json, setup_text
    from controller.priority.classes import default_classes, validate
    from controller.units import parse_rate_Bps

    netns, name = parse_target(interface)
    rate_Bps = parse_rate_Bps(rate, "--rate") if rate is not None else None
    floor_shares, ceiling_shares = _shares("--floor", floors), _shares("--ceiling", ceilings)
    classes = _classes(ctx)
    classes = tuple(
        replace(
            entry,
            floor_share=floor_shares.get(entry.number, entry.floor_share),
            ceiling_share=ceiling_shares.get(entry.number, entry.ceiling_share),
        )
        for entry in classes
    )
    validate(classes)
    defaults = default_classes()
    raisable = {
        number
        for number in set(range(len(classes))) - set(floor_shares)
        if classes[number].floor_share == defaults[number].floor_share
    }
    done = setup(netns, name, classes, rate_Bps, kind, qp_timeout, raisable)
    _tell_controller(ctx)
    if as_json:
        print_json(setup_json(done))
    else:
        click.echo(setup_text(done))


@qdisc.command("clear")
@_TARGET
@JSON_OPTION
@click.pass_context
def clear_command(ctx: click.Context, interface: str, as_json: bool) -> None:
    """Take ours away and restore the kernel's default; others' stay. Works twice.

    What waits in the queues is lost, and the kernel may refuse a packet: a soft-RoCE
    queue pair that sends at that moment can die of it (2 of 8 did). Clear after jobs
    ended.
    """
    from controller.dataplane.attachment import parse_target
    from controller.ops.qdisc import clear

    netns, name = parse_target(interface)
    was_there = clear(netns, name)
    _tell_controller(ctx)
    if as_json:
        print_json({"interface": interface, "cleared": was_there})
    elif was_there:
        click.echo(f"{interface}: cleared; the kernel's default qdisc is back")
    else:
        click.echo(f"{interface}: nothing of ours was there")


@qdisc.command("show")
@_TARGET
@JSON_OPTION
def show_command(interface: str, as_json: bool) -> None:
    """Show the queues of an interface: classes, rates, what waits, what was dropped."""
    from controller.dataplane.attachment import parse_target
    from controller.ops.qdisc import read
    from controller.ops.qdisc_text import state_text

    state = read(*parse_target(interface))
    if as_json:
        print_json(state.to_json())
    else:
        click.echo(state_text(state))
