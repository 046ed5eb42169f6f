"""Records of a contest as a JSON document, and back with every value checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from controller.errors import InputError, UsageError
from controller.ops.qdisc_tree import MAX_RATE_Bps, MIN_RATE_Bps
from controller.priority.ranges import check_integer
from controller.sim.measures import Iteration
from controller.workload.contest import Contest, Options, Turn
from controller.workload.fabric import COUNTERS
from controller.workload.mixes import Mix, MixJob
from controller.workload.plan import MAX_RANKS, Traffic

_FORMAT = "stellar-priority-1"
# Of any clock, and of any count: what fits into 64 bits.
_MOST = 2.0**63
_TIMES = ("compute_begin_ns", "window_begin_ns", "window_end_ns")


def contest_json(contest: Contest) -> dict[str, Any]:
    """Raw records; `read_contest` reads them."""
    return {"format": _FORMAT, **asdict(contest)}


def read_contest(document: Mapping[str, Any]) -> Contest:
    """From `contest_json`.

    Raises
    ------
    InputError
        It is something else, incomplete, or has a value that cannot be.
    """
    if document.get("format") != _FORMAT:
        raise InputError(
            f"The records have the format {document.get('format')!r}; expected {_FORMAT!r}.",
            "Make them with: controller bench priority -o FILE",
        )
    try:
        return _contest(document)
    except UsageError as error:
        raise InputError(error.message, error.remedy) from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"The records are incomplete or damaged: {error}.") from error


def _contest(document: Mapping[str, Any]) -> Contest:
    mix_part, options = document["mix"], document["options"]
    mix = Mix(
        _text("mix.name", mix_part["name"]),
        tuple(MixJob(**_numbers("mix.jobs", job)) for job in mix_part["jobs"]),
        _number("mix.jitter", mix_part["jitter"]),
        mix_part["start"],
    )
    traffic = Traffic.from_json(_numbers("traffic", document["traffic"]))
    check_integer("traffic.rate_Bps", traffic.rate_Bps, MIN_RATE_Bps, MAX_RATE_Bps)
    check_integer("traffic.ranks", traffic.ranks, 2, MAX_RANKS)
    traffic.settings()  # complains about what else cannot be
    policies = options["policies"]
    if not isinstance(policies, list):
        raise _wrong("options.policies", policies, "a list")
    names = {job.name for job in mix.jobs}
    alone_ns = {
        name: tuple(_number(f"alone_ns.{name}", value, above=True) for value in values)
        for name, values in document["alone_ns"].items()
    }
    for name in sorted(names):
        if not alone_ns.get(name):
            raise InputError(f"The records have no windows of job {name} alone.")
    return Contest(
        mix=mix,
        traffic=traffic,
        options=Options(**{**options, "policies": tuple(policies)}),
        alone_ns=alone_ns,
        turns=tuple(
            _turn(f"turns[{place}]", turn, names, policies)
            for place, turn in enumerate(document["turns"])
        ),
        kernel=_text("kernel", document["kernel"]),
    )


def _turn(where: str, turn: Mapping[str, Any], jobs: set[str], policies: list[str]) -> Turn:
    policy = _text(f"{where}.policy", turn["policy"])
    if policy not in policies:
        raise _wrong(f"{where}.policy", policy, f"one of {', '.join(policies)}")
    counters = {
        name: _whole(f"{where}.counters.{name}", turn["counters"][name]) for name in COUNTERS
    }
    return Turn(
        round=_whole(f"{where}.round", turn["round"]),
        policy=policy,
        records=tuple(
            _record(f"{where}.records[{place}]", row, jobs)
            for place, row in enumerate(turn["records"])
        ),
        counters=counters,
        control_bytes=_whole(f"{where}.control_bytes", turn["control_bytes"]),
        wall_s=_number(f"{where}.wall_s", turn["wall_s"]),
        agent_cpu_s=_number(f"{where}.agent_cpu_s", turn["agent_cpu_s"]),
    )


def _record(where: str, row: Mapping[str, Any], jobs: set[str]) -> Iteration:
    job = _text(f"{where}.job", row["job"])
    if job not in jobs:
        raise _wrong(f"{where}.job", job, f"one of {', '.join(sorted(jobs))}")
    begin_ns, window_ns, end_ns = (_number(f"{where}.{name}", row[name]) for name in _TIMES)
    if not begin_ns <= window_ns < end_ns:
        raise InputError(f"{where}: its times are not in order.", "The file is damaged.")
    return Iteration(
        job, _whole(f"{where}.iteration", row["iteration"]), begin_ns, window_ns, end_ns
    )


def _wrong(where: str, found: object, expected: str) -> InputError:
    return InputError(f"{where} is {found!r:.80}; expected {expected}.", "The file is damaged.")


def _number(where: str, value: Any, above: bool = False) -> Any:
    """The value, if it is a number from 0; with `above`, not 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(where, value, "a number")
    # NaN is in no range.
    if not 0 <= value <= _MOST or (above and value == 0):
        raise _wrong(where, value, f"a number {'above' if above else 'from'} 0")
    return value


def _whole(where: str, value: Any) -> int:
    if isinstance(value, float) or _number(where, value) != value:
        raise _wrong(where, value, "a whole number")
    return int(value)


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(where, value, "text")
    return value


def _numbers(where: str, members: Any) -> dict[str, Any]:
    """The members of an object, those that are not text checked to be numbers."""
    if not isinstance(members, dict):
        raise _wrong(where, members, "an object")
    return {
        name: value if isinstance(value, str) else _number(f"{where}.{name}", value)
        for name, value in members.items()
    }
