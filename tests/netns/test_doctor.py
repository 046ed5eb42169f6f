"""The doctor tells the truth about this machine and leaves it as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from controller.ops import doctor, doctor_bpf, doctor_machine, probe
from controller.ops.check import FAIL, INFO, OK, WARN, Check

ROOT = Path(__file__).parents[2]
PRINT_REPORT = (
    "import json; from controller.ops.doctor import run_doctor; r = run_doctor();"
    "print(json.dumps(r.to_json())); raise SystemExit(r.exit_code)"
)
NAMES = {
    "privileges", "kernel", "cpu", "clock", "memlock", "huge pages", "jit", "bcc", "libbpf",
    "headers", "compile", "maps", "programs", "namespaces", "veth", "clsact", "native XDP",
    "fq", "HTB", "netem", "rdma core", "rxe", "rdma netns", "interfaces", "pyverbs",
    "perftest", "tshark", "lab kernel",
}  # fmt: skip
# On a busy machine the compiler may take longer than the doctor waits: a warning.
WORKS = (OK, WARN)


def host_network() -> tuple[object, object]:
    """Links and qdiscs; without the link of a test that may run at the same time."""

    def tool(name: str, *command: str) -> object:
        done = subprocess.run(command, capture_output=True, check=True)
        return [row for row in json.loads(done.stdout) if not row[name].startswith("rdv")]

    links = tool("ifname", "ip", "-j", "link")
    return links, tool("dev", "tc", "-j", "qdisc")


@pytest.fixture(scope="module")
def examined() -> Iterator[tuple[doctor.DoctorReport, float]]:
    before = host_network()
    start_s = time.monotonic()
    report = doctor.run_doctor()
    yield report, time.monotonic() - start_s
    assert host_network() == before


def by_name(report: doctor.DoctorReport) -> dict[str, Check]:
    return {check.name: check for check in report.checks}


def test_links_and_qdiscs_of_the_host_stay_as_they_are() -> None:
    before = host_network()
    doctor.run_doctor()
    assert host_network() == before


def test_every_check_has_one_line_with_a_reason(
    examined: tuple[doctor.DoctorReport, float],
) -> None:
    report, _ = examined
    assert {check.name for check in report.checks} == NAMES
    assert len(report.checks) == len(NAMES)
    for check in report.checks:
        assert check.status in (OK, WARN, FAIL, INFO)
        assert check.found and check.reason
        assert check.remedy or check.status in (OK, INFO), check


def test_it_takes_less_than_five_seconds(examined: tuple[doctor.DoctorReport, float]) -> None:
    took_s = [examined[1]]
    # The best of some: others may use the CPUs meanwhile.
    while min(took_s) >= 5 and len(took_s) < 5:
        start_s = time.monotonic()
        doctor.run_doctor()
        took_s.append(time.monotonic() - start_s)
    assert min(took_s) < 5, took_s


def test_root_with_bcc_can_observe(examined: tuple[doctor.DoctorReport, float]) -> None:
    report, _ = examined
    for name in ("privileges", "bcc", "compile", "maps", "programs", "veth", "clsact"):
        assert by_name(report)[name].status in WORKS, by_name(report)[name]
    assert report.abilities["observe"].how == "yes"
    assert report.abilities["analyze"].how == "yes"
    assert report.abilities["rdma"].how in ("natively", "lab", "no")
    assert report.exit_code == 0


def test_rdma_lines_agree_with_sysfs(examined: tuple[doctor.DoctorReport, float]) -> None:
    report, _ = examined
    if not Path("/sys/class/infiniband").exists():
        assert by_name(report)["rdma core"].status == WARN
        assert report.abilities["rdma"].how != "natively"


def test_qdisc_lines_agree_with_tc(examined: tuple[doctor.DoctorReport, float]) -> None:
    report, _ = examined
    for name, kind in (("fq", "fq"), ("HTB", "htb"), ("netem", "netem")):
        script = f"ip link add x0 type veth peer name x1 && tc qdisc add dev x0 root {kind}"
        command = ["unshare", "-n", "sh", "-c", script]
        works = subprocess.run(command, capture_output=True, check=False).returncode == 0
        line = by_name(report)[name]
        # It does not claim to know what was not answered in time.
        assert (line.status == OK) == works or "no answer within" in line.found


def test_json_has_stable_keys_and_text_fits_80_columns(
    examined: tuple[doctor.DoctorReport, float],
) -> None:
    report, _ = examined
    document = json.loads(json.dumps(report.to_json()))
    assert set(document) == {"checks", "abilities"}
    for check in document["checks"]:
        assert set(check) == {"name", "status", "found", "reason", "remedy"}
    assert set(document["abilities"]) == {"observe", "rdma", "analyze"}
    lines = report.to_text().splitlines()
    assert max(map(len, lines)) <= 80
    for name in NAMES:
        assert any(line[5:].startswith(name) for line in lines), name


def run_as_nobody() -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups",
         sys.executable, "-c", PRINT_REPORT],
        capture_output=True, text=True, check=False, cwd="/",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_without_root_it_says_so_and_nothing_else_breaks() -> None:
    result = run_as_nobody()
    assert result.stderr == ""
    assert result.returncode == 1
    document = json.loads(result.stdout)
    checks = {check["name"]: check for check in document["checks"]}
    assert set(checks) == NAMES
    assert checks["privileges"]["status"] == FAIL
    for name in ("compile", "maps", "programs", "clsact", "native XDP"):
        assert checks[name]["status"] == INFO
        assert checks[name]["found"] == "needs root to tell"
    assert document["abilities"]["observe"]["how"] == "no"


def test_a_check_that_breaks_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Check:
        raise ZeroDivisionError("no clocks at all")

    monkeypatch.setattr(doctor_machine, "clock", broken)
    report = doctor.run_doctor()
    assert {check.name for check in report.checks} == NAMES
    assert by_name(report)["clock"].status == WARN
    assert "no clocks at all" in by_name(report)["clock"].found
    assert report.exit_code == 0


def test_a_probe_that_dies_fails_its_lines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(what: str, timeout_s: float) -> dict[str, str]:
        if what == "network":
            raise RuntimeError("killed")
        return probe.run_probe(what, timeout_s)

    monkeypatch.setattr("controller.ops.doctor.run_probe", dies)
    report = doctor.run_doctor()
    assert by_name(report)["clsact"].status == FAIL
    assert by_name(report)["clsact"].found == "killed"
    assert by_name(report)["programs"].status in WORKS
    assert report.exit_code == 1
    assert report.abilities["analyze"].how == "yes"


def test_a_slow_compiler_is_no_verdict() -> None:
    future: Future[dict[str, str]] = Future()
    future.set_exception(TimeoutError("no answer within 4 s"))
    checks = doctor_bpf.programs(doctor._answer(future))
    assert [check.status for check in checks] == [WARN, WARN, WARN]
    assert all("no answer within 4 s" in check.found for check in checks)
