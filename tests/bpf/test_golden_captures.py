"""Captures of soft-RoCE, recorded by scripts/record-captures: the observer counts what tshark does.

tests/captures/expected.json was computed by tshark when they were recorded; where tshark is
installed it is asked again, so that neither file can drift alone.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from controller.observe.analyze import analyze_file
from tests import tshark

CAPTURES = Path(__file__).resolve().parents[1] / "captures"
EXPECTED: dict[str, dict[str, Any]] = json.loads((CAPTURES / "expected.json").read_text())
NAMES = sorted(EXPECTED)


@pytest.fixture(scope="module")
def analyses(root: None) -> dict[str, dict[str, Any]]:
    """`controller analyze --json` of each capture."""
    return {name: analyze_file(CAPTURES / name).to_json() for name in NAMES}


def total(rows: list[dict[str, Any]], key: str) -> dict[str, int]:
    """Sum of one of the rows' name -> count tables, without zeros."""
    counter: Counter[str] = Counter()
    for row in rows:
        counter.update(row[key])
    return {name: count for name, count in sorted(counter.items()) if count}


def test_every_capture_is_expected_small_and_described() -> None:
    files = {path.name: path.stat().st_size for path in CAPTURES.glob("*.pcap.gz")}
    assert sorted(files) == NAMES
    assert max(files.values()) < 60_000
    text = (CAPTURES / "README.md").read_text()
    for name in NAMES:
        assert f"`{name}`" in text


@pytest.mark.parametrize("name", NAMES)
def test_a_capture_is_counted_as_tshark_counts_it(
    analyses: dict[str, dict[str, Any]], name: str
) -> None:
    analysis, expected = analyses[name], EXPECTED[name]
    rows = analysis["flows"]
    assert analysis["frames"] == expected["frames"]
    assert analysis["rocev2_packets"] == expected["rocev2_packets"]
    assert analysis["rocev1_packets"] == 0
    assert sum(analysis["ignored"].values()) == expected["frames"] - expected["rocev2_packets"]
    assert analysis["opcodes"] == expected["opcodes"]
    by_qpn: Counter[str] = Counter()
    for row in rows:
        by_qpn[f"0x{row['dqpn']:06x}"] += row["packets"]
    assert dict(sorted(by_qpn.items())) == expected["dest_qps"]
    assert total(rows, "ecn") == expected["ecn"]
    assert total(rows, "naks_by_code") == expected["naks"]
    for key in ("cnp", "rnr_naks", "vlan_packets"):
        assert sum(row[key] for row in rows) == expected[key], key
    assert sorted({dscp for row in rows for dscp in row["dscp"]}) == expected["dscp"]


@pytest.mark.parametrize("name", NAMES)
def test_requests_seen_twice_are_duplicates(analyses: dict[str, dict[str, Any]], name: str) -> None:
    """And so is what comes late and is older than the first packet seen: nothing tells it apart."""
    assert sum(row["duplicates"] for row in analyses[name]["flows"]) == (
        EXPECTED[name]["repeated_requests"] + EXPECTED[name]["below_first"]
    )


@pytest.mark.parametrize("name", NAMES)
def test_tshark_still_says_the_same(name: str) -> None:
    if shutil.which("tshark"):
        assert tshark.count(CAPTURES / name) == EXPECTED[name]


def verdicts(analysis: dict[str, Any]) -> set[str]:
    return {entry["verdict"] for entry in analysis["verdicts"]}


@pytest.mark.parametrize(
    ("name", "found", "absent"),
    [
        ("write", {"nothing_wrong"}, {"network_loss", "capture_loss", "reordering"}),
        ("read", {"nothing_wrong"}, {"network_loss", "capture_loss", "reordering"}),
        ("both-directions", {"nothing_wrong"}, {"network_loss", "capture_loss"}),
        ("many-qps", {"nothing_wrong"}, {"network_loss", "low_entropy"}),
        ("loss-at-receiver", {"network_loss"}, {"capture_loss", "receiver_limited"}),
        ("loss-at-sender", {"network_loss"}, {"capture_loss", "receiver_limited"}),
        ("rnr", {"receiver_limited"}, {"network_loss", "capture_loss"}),
        ("ce", {"marked"}, {"network_loss", "not_ect"}),
        ("cnp", {"marked"}, {"network_loss"}),
        ("uc", {"nothing_wrong"}, {"network_loss", "undecided_gaps"}),
    ],
)
def test_a_capture_gets_the_verdict_that_it_was_made_for(
    analyses: dict[str, dict[str, Any]], name: str, found: set[str], absent: set[str]
) -> None:
    names = verdicts(analyses[f"{name}.pcap.gz"])
    assert found <= names
    assert not absent & names


def test_the_sender_sees_the_retransmissions_and_the_receiver_the_gaps(
    analyses: dict[str, dict[str, Any]],
) -> None:
    """One run, recorded at both ends of a lossy network."""
    at_sender, at_receiver = (
        next(row for row in analyses[f"loss-at-{end}.pcap.gz"]["flows"] if row["messages"])
        for end in ("sender", "receiver")
    )
    assert at_sender["messages"] == at_receiver["messages"] == 20
    assert at_sender["gap_packets"] == 0
    assert at_sender["packets"] - at_sender["duplicates"] == 320
    assert at_receiver["packets"] - at_receiver["duplicates"] == 320
    assert 0 < at_receiver["recovered"] == at_receiver["gap_packets"]
    assert at_receiver["recovered"] <= at_sender["packets"] - at_receiver["packets"]
    naks = EXPECTED["loss-at-receiver.pcap.gz"]["naks"]["psn_sequence"]
    assert at_receiver["sequence_errors"] == naks
