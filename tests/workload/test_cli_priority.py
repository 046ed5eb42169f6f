"""`bench priority` as it is called, as far as no RDMA is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from controller.cli_priority import bench_priority
from controller.errors import StellarError
from controller.workload.mixes import MIXES
from controller.workload.runner import write_records
from tests.workload.contests import contest


def call(*arguments: str) -> str:
    result = CliRunner().invoke(bench_priority, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.output


def test_the_built_in_mixes_are_listed_in_80_columns() -> None:
    text = call("--list")
    assert max(map(len, text.splitlines())) <= 80
    assert [line.split(":")[0] for line in text.splitlines() if line[0] != " "] == list(MIXES)


def test_the_built_in_mixes_are_listed_as_json() -> None:
    assert [mix["name"] for mix in json.loads(call("--list", "--json"))] == list(MIXES)


def test_records_are_reported_without_running_anything(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    write_records(path, contest())
    assert "Mix hand: 2 jobs x 3 ranks" in call("--from", str(path))
    document = json.loads(call("--from", str(path), "--json"))
    assert list(document["policies"]) == ["fair", "laxity"]
    assert document["rate_bps"] == 50_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-m", "none"), "Mix 'none' is unknown"),
        (("-p", "fair,quick"), "Policy 'quick' is unknown"),
        (("-p", ""), "Policy '' is unknown"),
        (("--rate", "1"), "--rate '1' cannot be read"),
        (("--from", "/nowhere/records.json"), "/nowhere/records.json: No such file"),
        (("-o", "/nowhere/records.json"), "The folder /nowhere does not exist"),
        (("-o", "/"), "/ is a folder"),
        (("-o", "x" * 300), "File name too long"),
        (("-m", "x" * 300), "is unknown; allowed"),
        (("-m", "x" * 300 + ".toml"), "File name too long"),
        (("--from", "x" * 300), "File name too long"),
        (("--from", "records.json", "-m", "two-2-3"), "--mix has no effect here: --from reports"),
        (("--from", "records.json", "--seed", "1"), "--seed has no effect here: --from reports"),
        (("--list", "-p", "fair"), "--policies has no effect here: --list runs nothing"),
    ],
)
def test_wrong_arguments_end_it_before_anything_is_built(
    arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(StellarError, match=message):
        call(*arguments)
