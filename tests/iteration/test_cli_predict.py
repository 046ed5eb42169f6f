"""``controller predict``: its table, its JSON, its errors."""

from __future__ import annotations

import json
from random import Random

import pytest
from click.testing import CliRunner

from controller.cli_predict import predict_command
from controller.errors import InputError

KEYS = {"periodic", "period_us", "iterations", "error_pct", "naive_error_pct"}


def csv_of(periods_us, size=4_000_000):
    lines, now = ["start_us,bytes"], 0.0
    for period_us in (*periods_us, 0.0):
        lines.append(f"{now:.3f},{size}")
        now += period_us
    return "\n".join(lines) + "\n"


@pytest.fixture
def trace(tmp_path):
    random = Random(3)
    path = tmp_path / "windows.csv"
    path.write_text(csv_of([random.gauss(100_000, 1_000) for _ in range(30)]))
    return path


def run(*arguments, input=None):
    return CliRunner().invoke(predict_command, [str(one) for one in arguments], input=input)


def test_json_has_the_documented_keys(trace):
    document = json.loads(run(trace, "--json").output)
    assert set(document) >= KEYS
    assert set(document["error_pct"]) == {"mean", "p50", "p95"}
    assert set(document["naive_error_pct"]) == {"last", "mean", "ewma02"}
    assert document["periodic"] is True
    assert document["period_us"] == pytest.approx(100_000, rel=0.01)
    assert document["iterations"] == 31
    assert document["bytes_error_pct"] == 0
    assert "predictions" not in document


def test_list_adds_every_prediction(trace):
    document = json.loads(run(trace, "--json", "--list").output)
    assert len(document["predictions"]) == document["scored"] == 29
    assert document["predictions"][0]["window"] == 3
    listed = run(trace, "--list").output
    assert listed.count("\n") >= 29 + 8


def test_the_table_puts_ours_beside_naive_in_80_columns(trace):
    output = run(trace, "--list").output
    for word in ("ours", "last", "mean", "ewma 0.2", "p95", "periodic", "31 iterations"):
        assert word in output
    assert max(len(line) for line in output.splitlines()) <= 80


def test_a_loss_against_naive_predictions_is_told(tmp_path):
    path = tmp_path / "flat.csv"
    path.write_text(csv_of([100_000.0] * 8))
    assert "No better than the best naive" in run(path).output


def test_standard_input_is_read(trace):
    result = run("-", "--json", input=trace.read_text())
    assert json.loads(result.output)["iterations"] == 31


def test_random_begins_are_called_not_periodic(tmp_path):
    random = Random(4)
    path = tmp_path / "random.csv"
    path.write_text(csv_of([random.expovariate(1e-5) + 1 for _ in range(50)]))
    assert "NOT periodic" in run(path).output
    assert json.loads(run(path, "--json").output)["periodic"] is False


def test_what_is_no_trace_is_refused(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_text("roses are red\nviolets are blue\n")
    assert isinstance(run(path).exception, InputError)


def test_too_few_windows_are_counted_in_the_error(tmp_path):
    path = tmp_path / "two.csv"
    path.write_text(csv_of([100_000.0]))
    error = run(path).exception
    assert isinstance(error, InputError)
    assert "2 sync windows" in str(error)
    assert "3 with different begins are needed" in str(error)
