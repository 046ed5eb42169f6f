"""A contest from beginning to end, and its records as a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from controller.allreduce.bench_plan import parse_size
from controller.errors import InputError, UsageError
from controller.files import write_text
from controller.ops.qdisc_tree import MAX_RATE_Bps, MIN_RATE_Bps
from controller.units import format_rate, parse_rate_Bps
from controller.workload.contest import Contest, Options, Progress, run_contest
from controller.workload.control import refuse_other
from controller.workload.fabric import shared_hosts
from controller.workload.mixes import Mix
from controller.workload.plan import Traffic
from controller.workload.stored import contest_json, read_contest


def make_traffic(rate: str, ranks: int, chunk: str) -> Traffic:
    """From the options of the command line.

    Raises
    ------
    UsageError
        One cannot be read or is impossible.
    """
    rate_Bps = parse_rate_Bps(rate, "--rate")
    if not MIN_RATE_Bps <= rate_Bps <= MAX_RATE_Bps:
        raise UsageError(
            f"--rate {rate} cannot be shaped; allowed: {format_rate(MIN_RATE_Bps)} .. "
            f"{format_rate(MAX_RATE_Bps)}."
        )
    traffic = Traffic(rate_Bps, ranks, parse_size(chunk, "--chunk"))
    traffic.settings()  # complains about a chunk that cannot be
    return traffic


def compare(
    mix: Mix,
    traffic: Traffic,
    options: Options,
    progress: Progress,
    told: Callable[[str], None] = lambda _: None,
    run_dir: Path | None = None,
) -> Contest:
    """Build the hosts, run the contest there, remove the hosts. See `contest.run_contest`.

    Raises
    ------
    ConflictError
        Another controller runs in `run_dir`.
    StellarError
        The hosts cannot be built, a controller cannot start, or a rank failed.
    """
    if run_dir is not None:
        refuse_other(run_dir)
    with shared_hosts(traffic) as bed:
        return run_contest(mix, traffic, bed, options, progress, told, run_dir)


def write_records(path: Path, contest: Contest) -> None:
    """Write all records; a file that is there is replaced as a whole.

    Raises
    ------
    UsageError
        The file cannot be written.
    """
    write_text(path, json.dumps(contest_json(contest), allow_nan=False) + "\n", force=True)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def read_records(path: Path) -> Contest:
    """Read what `write_records` wrote.

    Raises
    ------
    InputError
        The file cannot be read, or holds something else.
    """
    try:
        document = json.loads(path.read_text(), parse_constant=_refuse_constant)
    except OSError as error:
        raise InputError(
            f"{str(path)[:200]}: {error.strerror}.", "Name a readable file."
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {error}.") from error
    if not isinstance(document, dict):
        raise InputError(f"{path}: a {type(document).__name__}; expected an object.")
    try:
        return read_contest(document)
    except (InputError, UsageError) as error:
        raise InputError(f"{path}: {error.message}", error.remedy) from error
