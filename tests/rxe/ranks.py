"""Ranks of a communicator, one process in each host's namespace; each runs a scenario.

Also the program that such a process runs: ``python -m tests.rxe.ranks SCENARIO ARGUMENTS_JSON``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rxe.verbs import Program, RxeHost

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Rank:
    """A running rank."""

    number: int
    program: Program
    result_path: Path

    def wait(self, timeout_s: float = 120) -> Any:
        """What its scenario returned."""
        self.program.wait(timeout_s)
        return json.loads(self.result_path.read_text())


@contextlib.contextmanager
def ranks(
    hosts: Sequence[RxeHost], scenario: str, arguments: dict[str, Any] | None = None
) -> Iterator[list[Rank]]:
    """Start one rank a host; all are ended at the end."""
    with tempfile.TemporaryDirectory(prefix="ranks") as folder, contextlib.ExitStack() as stack:
        running = []
        for number, host in enumerate(hosts):
            result = Path(folder, f"result{number}")
            environment = {
                "RANK": str(number), "WORLD_SIZE": str(len(hosts)), "LOCAL_RANK": str(number),
                "MASTER_ADDR": f"unix:{folder}/rendezvous", "PYTHONPATH": str(ROOT),
            }  # fmt: skip
            command = ["env", *(f"{key}={value}" for key, value in environment.items())]
            command += [sys.executable, "-m", "tests.rxe.ranks", scenario]
            command += [json.dumps(arguments or {}), str(result)]
            running.append(Rank(number, stack.enter_context(Program(host, command)), result))
        yield running


def run_ranks(
    hosts: Sequence[RxeHost],
    scenario: str,
    arguments: dict[str, Any] | None = None,
    timeout_s: float = 120,
) -> list[Any]:
    """Run a scenario on one rank a host to its end; what each of them returned."""
    deadline = time.monotonic() + timeout_s
    with ranks(hosts, scenario, arguments) as running:
        return [rank.wait(max(1.0, deadline - time.monotonic())) for rank in running]


def main() -> None:
    """Run one rank."""
    from tests.rxe import scenarios

    # As launchers do. In the lab kernel it also matters more than usual: threads of one process on
    # two processors take milliseconds to hand over to one another.
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[int(os.environ["RANK"]) % len(processors)]})
    name, arguments, result = sys.argv[1:]
    answer = getattr(scenarios, name)(**json.loads(arguments))
    partial = Path(f"{result}.{os.getpid()}")
    partial.write_text(json.dumps(answer))
    partial.rename(result)


if __name__ == "__main__":
    main()
