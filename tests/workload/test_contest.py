"""Turns, the controller's configuration, and records that survive a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from controller.config import load_config
from controller.errors import InputError, UsageError
from controller.ops import testbed
from controller.workload.contest import Options
from controller.workload.control import config_text, parse_cpu_s
from controller.workload.plan import Traffic
from controller.workload.runner import make_traffic, read_records, write_records
from tests.workload.contests import MIX, contest

HOSTS = tuple(
    testbed.BedHost(n, f"ns{n}", "eth0", f"10.78.0.{n + 1}", f"port{n}") for n in range(3)
)
BED = testbed.Testbed("bridge", HOSTS, 4200)


def test_every_other_round_takes_the_policies_in_opposite_order() -> None:
    options = Options(("fair", "static", "laxity"), rounds=3)
    assert options.turns() == [
        (0, "fair"), (0, "static"), (0, "laxity"),
        (1, "laxity"), (1, "static"), (1, "fair"),
        (2, "fair"), (2, "static"), (2, "laxity"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"policies": ("fair", "best")}, "Policy 'best' is unknown; allowed: fair, "),
        ({"policies": ("fair", "fair")}, "fair is named twice"),
        ({"policies": ()}, "No policy is named"),
        ({"rounds": 0}, "Number of rounds is 0"),
        ({"iterations": 0}, "Number of iterations is 0"),
        ({"warmup": 0}, "Number of warm-up iterations is 0"),
    ],
)
def test_impossible_options_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Options(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(("policy", "classes"), [("static", [5, 4]), ("laxity", [3, 3])])
def test_the_controller_accepts_its_configuration(
    tmp_path: Path, policy: str, classes: list[int]
) -> None:
    path = tmp_path / "stellar.toml"
    path.write_text(config_text(MIX, Traffic(6_250_000), BED, policy))
    config = load_config(path)
    assert [(each.netns, each.name, each.rate_Bps) for each in config.interfaces] == [
        (f"ns{n}", "eth0", 6_250_000) for n in range(3)
    ]
    assert [job.name for job in config.jobs] == [job.name for job in MIX.jobs]
    # Only `static` is told an order; the others have to find one.
    assert [job.traffic_class for job in config.jobs] == classes
    assert config.priority.policy == policy


def test_the_processor_time_of_a_process_is_read_past_any_name() -> None:
    fields = ["S", *["0"] * 10, "150", "50", *["0"] * 30]
    line = f"4711 (a name) with (brackets)) {' '.join(fields)}"
    assert parse_cpu_s(line) == 200 / os.sysconf("SC_CLK_TCK")
    own = parse_cpu_s(Path("/proc/self/stat").read_text())
    assert own == pytest.approx(sum(os.times()[:2]), abs=0.1)


@pytest.mark.parametrize("text", ["", "1 (a) S 1", "1 (a) S " + "x " * 40])
def test_what_is_no_stat_line_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="no line of /proc/PID/stat"):
        parse_cpu_s(text)


def test_records_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    path.write_text("old")
    before = contest()
    write_records(path, before)
    assert read_records(path) == before
    assert [each.name for each in tmp_path.iterdir()] == ["records.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[1]", "a list; expected an object"),
        ("{}", "have the format None"),
        ('{"format": "stellar-priority-1"}', "incomplete or damaged: 'mix'"),
        ('{"format": "stellar-priority-1", "kernel": NaN}', "NaN is no number of JSON"),
        ('{"format": "stellar-priority-1", "mix": {"jobs": [{"x": 1}]}}', "incomplete"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_file_of_something_else_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "records.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read_records(path)
    assert str(path) in caught.value.message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("0", 3, "32K"), "--rate 0 cannot be shaped"),
        (("10", 3, "32K"), "--rate '10' cannot be read"),
        (("50mbit", 3, "5000"), "multiple of 4096"),
        (("50mbit", 3, "x"), "--chunk 'x' cannot be read"),
    ],
)
def test_impossible_traffic_is_refused(arguments: tuple[str, int, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_traffic(*arguments)
    assert make_traffic("50mbit", 3, "32K") == Traffic(6_250_000, 3, 32 << 10)
