"""``controller doctor``: what this machine can and cannot do, why, and the remedy.

Each line is found out for itself; one that fails says so and leaves the others alone.
Whatever needs trying is tried in a process, and where it concerns the network in a
network namespace, that ends at once (``controller.ops.probe``).
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from controller.ops import doctor_bpf, doctor_machine, doctor_rdma
from controller.ops.check import FAIL, INFO, OK, Check, failed_check
from controller.ops.doctor_bpf import SLOW
from controller.ops.probe import run_probe

_PROBE_TIMEOUT_S = 4.0
_WIDTH = 80
# Checks without which no packet can be seen.
_OBSERVE_NEEDS = (
    "privileges",
    "bcc",
    "libbpf",
    "compile",
    "maps",
    "programs",
    "clsact",
)
# A capture is replayed through the same BPF program, which needs no interface.
_ANALYZE_NEEDS = ("privileges", "bcc", "libbpf", "compile", "maps", "programs")


@dataclass(frozen=True)
class Ability:
    """A summary verdict; ``how`` is yes or no, for RDMA natively, lab or no."""

    how: str
    because: str


@dataclass(frozen=True)
class DoctorReport:
    """All checks and what follows from them."""

    checks: tuple[Check, ...]
    abilities: dict[str, Ability]

    @property
    def exit_code(self) -> int:
        """0 when traffic can be observed here, else 1."""
        return 0 if self.abilities["observe"].how == "yes" else 1

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        return {
            "checks": [asdict(check) for check in self.checks],
            "abilities": {name: asdict(ability) for name, ability in self.abilities.items()},
        }

    def to_text(self) -> str:
        """At most 80 columns; reason and remedy where something is missing."""
        lines: list[str] = []
        for check in self.checks:
            lines += _wrap(f"{check.status:<5}{check.name:<13}", check.found)
            if check.status != OK:
                lines += _wrap(" " * 20, check.reason)
                lines += _wrap(" " * 18 + "> ", check.remedy)
        lines.append("")
        titles = {
            "observe": "can observe software and forwarded traffic",
            "rdma": "can run RDMA here",
            "analyze": "can analyze captures",
        }
        for name, ability in self.abilities.items():
            lines += _wrap("", f"{titles[name]}: {ability.how}, {ability.because}", indent=2)
        return "\n".join(lines)


def _wrap(prefix: str, text: str, indent: int | None = None) -> list[str]:
    if not text:
        return [prefix.rstrip()] if prefix.strip(" >") else []
    rest = " " * (len(prefix) if indent is None else indent)
    return textwrap.wrap(
        text, _WIDTH, initial_indent=prefix, subsequent_indent=rest, break_on_hyphens=False
    )


def _guard(name: str, function: Callable[[], Check | list[Check]]) -> list[Check]:
    """Run one check; an error of its own becomes its result."""
    try:
        result = function()
    except Exception as error:  # a broken check must not hide the others
        return [failed_check(name, error)]
    return result if isinstance(result, list) else [result]


def _answer(future: Future[dict[str, str]]) -> dict[str, str]:
    """Return a probe's steps; when it died or was too slow, that stands for every step."""
    try:
        return future.result()
    except TimeoutError as error:
        return {SLOW: str(error)}
    except Exception as error:
        return {"": str(error) or type(error).__name__}


def run_doctor() -> DoctorReport:
    """Examine this machine; takes a few seconds at most and changes nothing."""
    with ThreadPoolExecutor(max_workers=6) as pool:
        network = pool.submit(run_probe, "network", _PROBE_TIMEOUT_S)
        programs = pool.submit(run_probe, "programs", _PROBE_TIMEOUT_S)
        plan: Sequence[tuple[str, Callable[[], Check | list[Check]]]] = (
            ("privileges", doctor_machine.privileges),
            ("kernel", doctor_machine.kernel),
            ("cpu", doctor_machine.cpus),
            ("clock", doctor_machine.clock),
            ("memlock", doctor_machine.memlock),
            ("huge pages", doctor_machine.huge_pages),
            ("jit", doctor_bpf.jit),
            ("bcc", doctor_bpf.bcc),
            ("libbpf", doctor_bpf.libbpf),
            ("headers", doctor_bpf.headers),
            ("compile", lambda: doctor_bpf.programs(_answer(programs))),
            ("network", lambda: doctor_bpf.network(_answer(network))),
            ("rdma core", doctor_rdma.rdma_core),
            ("rxe", doctor_rdma.rxe),
            ("rdma netns", doctor_rdma.rdma_netns),
            ("interfaces", doctor_rdma.interfaces),
            ("pyverbs", doctor_rdma.pyverbs),
            ("perftest", doctor_rdma.perftest),
            ("tshark", doctor_machine.tshark),
            ("lab kernel", doctor_rdma.lab_kernel),
        )
        futures = [pool.submit(_guard, name, function) for name, function in plan]
        checks = tuple(check for future in futures for check in future.result())
    return DoctorReport(checks, _abilities(checks))


def _abilities(checks: Sequence[Check]) -> dict[str, Ability]:
    by_name = {check.name: check for check in checks}
    observe = _needs(by_name, _OBSERVE_NEEDS, "programs load and clsact is there")
    analyze = _needs(by_name, _ANALYZE_NEEDS, "the programs that replay them load")
    if observe.how == "yes" and by_name["native XDP"].status != OK:
        observe = Ability("yes", "at tc only: native XDP does not work here")
    return {"observe": observe, "rdma": _rdma(by_name), "analyze": analyze}


def _needs(by_name: dict[str, Check], names: Sequence[str], otherwise: str) -> Ability:
    if os.geteuid() and by_name["privileges"].status == FAIL:
        return Ability("no", "this user may not load BPF programs")
    # A warning (a slow compiler, a missing CAP_SYS_ADMIN) leaves it possible.
    missing = [n for n in names if n not in by_name or by_name[n].status in (FAIL, INFO)]
    if missing:
        check = by_name.get(missing[0])
        return Ability("no", f"{missing[0]}: {check.found if check else 'not found out'}")
    return Ability("yes", otherwise)


def _rdma(by_name: dict[str, Check]) -> Ability:
    core, soft, lab = by_name["rdma core"], by_name["rxe"], by_name["lab kernel"]
    if core.status == OK and soft.status == OK:
        return Ability("natively", soft.found)
    if lab.status == OK:
        return Ability("lab", f"native: {(core if core.status != OK else soft).found}")
    return Ability("no", f"{core.found}; lab kernel: {lab.found}")
