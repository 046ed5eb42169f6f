"""Departure times on real traffic: a job leaves at the rate that is set, and nothing dies of it.

The rate is what the switch's port towards the sender has received, by its own counter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.hosts import Controller
from tests.rxe.traffic import Incast, Load, Outcome, Shape, Variant
from tests.rxe.verbs import RxeHost, Switch

Switched = tuple[Switch, list[RxeHost]]
RATES_Mbit = (10, 20, 50, 100)
TOLERANCE = 0.05
# A pause of the machine makes a rate too low: such a run is repeated.
ATTEMPTS = 4
# Twice the fastest rate: the port is not what limits.
LINK_bit = 200_000_000
CONFIG = """
[[job]]
name = "paced"
[job.match]
command = "python*"
"""


@pytest.fixture(scope="module")
def bed(switched_hosts: Switched) -> Iterator[Incast]:
    """One sender and one receiver of the three hosts, the port far from full."""
    switch, hosts = switched_hosts
    shape = Shape(LINK_bit, 4_000_000, LINK_bit // 8 // 300)
    yield Incast(switch, [hosts[0], hosts[2]], shape, Load(timeout=18, seconds=3.0))
    switch.heal(hosts[2])


@pytest.fixture(scope="module")
def pacer(bed: Incast, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """A controller on the sender, with fq leaves in the classes' tree."""
    folder = tmp_path_factory.mktemp("pacer")
    config = folder / "stellar.toml"
    config.write_text(CONFIG)
    controller = Controller(folder / "run")
    target = bed.senders[0].target
    try:
        controller.run("qdisc", "setup", target, "--rate", "1gbit")
        controller.start(target, extra=("--config", str(config), "--mode", "tc"))
        yield controller
    finally:
        controller.close()
        controller.run("qdisc", "clear", target, check=False)


@contextlib.contextmanager
def _nothing(_bed: Incast) -> Iterator[None]:
    yield


def measure(bed: Incast, least_Mbit: float) -> Outcome:
    """The first run at this rate or above, or the last one."""
    for _ in range(ATTEMPTS):
        outcome = bed.run(Variant("paced", _nothing))
        if outcome.arrival_bit[0] >= 1e6 * least_Mbit:
            break
    return outcome


@pytest.mark.parametrize("rate_Mbit", RATES_Mbit)
def test_a_job_leaves_within_5_percent_of_its_rate(
    bed: Incast, pacer: Controller, rate_Mbit: int
) -> None:
    pacer.run("job", "set", "paced", "--rate", f"{rate_Mbit}mbit")
    outcome = measure(bed, (1 - TOLERANCE) * rate_Mbit)
    print(f"set {rate_Mbit} Mbit/s, arrived {outcome.arrival_bit[0] / 1e6:.2f}")  # pytest -rP
    assert outcome.arrival_bit[0] / 1e6 == pytest.approx(rate_Mbit, rel=TOLERANCE)
    assert outcome.retransmitted_of_run == 0, outcome
    assert outcome.receiver["out_of_seq_request"] == 0
    assert outcome.senders["send_err"] == 0
    (flow, *_) = [f for f in pacer.json("job", "show", "paced")["job"]["flows"] if f["paced"]][-1:]
    assert flow["beyond_horizon"] == 0
    (entry,) = pacer.json("status")["interfaces"]
    assert entry["control"]["pace"] is True
    assert (entry["qdisc"]["horizon_drops"], entry["qdisc"]["horizon_caps"]) == (0, 0)


def test_without_a_rate_the_same_job_is_faster_than_any_of_these(
    bed: Incast, pacer: Controller
) -> None:
    pacer.run("job", "set", "paced", "--rate", "0")
    least_Mbit = 1.2 * max(RATES_Mbit)
    assert measure(bed, least_Mbit).arrival_bit[0] / 1e6 >= least_Mbit
