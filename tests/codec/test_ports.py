"""What is done on an interface follows from what it is and what the configuration says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.errors import UsageError
from controller.priority.ports import PortFacts, PortWishes, SLOT_ns, plan_port, slot_ns_of

GBIT_Bps = 125_000_000
SOFTWARE = PortFacts("software", tree_rate_Bps=GBIT_Bps, has_fq=True)
FORWARDED = PortFacts("forwarded", speed_Bps=10 * GBIT_Bps)


def test_without_dcqcn_classes_alone_are_enforced() -> None:
    plan = plan_port(SOFTWARE, PortWishes())
    assert (plan.mark, plan.echo, plan.dcqcn, plan.by_dscp) == ("off", "off", False, False)
    assert plan.pace  # a plan may ask for it at any time
    assert plan.missing == ()


def test_with_dcqcn_a_host_echoes_and_reacts_and_a_forwarder_marks() -> None:
    host = plan_port(SOFTWARE, PortWishes(dcqcn=True))
    assert (host.mark, host.echo, host.dcqcn, host.consume_cnp) == ("off", "becn", True, True)
    port = plan_port(FORWARDED, PortWishes(dcqcn=True))
    assert (port.mark, port.echo, port.dcqcn, port.by_dscp) == ("window", "off", False, True)
    assert not port.consume_cnp  # somebody behind it waits for them


@pytest.mark.parametrize("mark", ["window", "instant", "off"])
@pytest.mark.parametrize("echo", ["becn", "cnp", "off"])
def test_what_is_asked_for_beats_the_default(mark: str, echo: str) -> None:
    plan = plan_port(SOFTWARE, PortWishes(mark=mark, echo=echo, classify="dscp"))
    assert (plan.mark, plan.echo, plan.by_dscp) == (mark, echo, True)


def test_nothing_acts_on_a_hardware_rnic_and_the_verbs_path_is_named() -> None:
    plan = plan_port(PortFacts("bypass", 10 * GBIT_Bps), PortWishes(dcqcn=True, paced_jobs=True))
    assert (plan.mark, plan.echo, plan.dcqcn, plan.pace) == ("off", "off", False, False)
    (text,) = plan.missing
    assert "NCCL_IB_TC" in text


def test_without_a_rate_of_the_link_marks_and_dcqcn_are_off_and_it_says_so() -> None:
    facts = PortFacts("software", has_fq=True)
    plan = plan_port(facts, PortWishes(mark="window", dcqcn=True))
    assert (plan.mark, plan.dcqcn) == ("off", False)
    (text,) = plan.missing
    assert "marking and DCQCN" in text and "rate" in text


def test_pacing_without_fq_is_missing_only_where_somebody_wants_it() -> None:
    facts = replace(SOFTWARE, has_fq=False)
    assert plan_port(facts, PortWishes()).missing == ()
    for wishes in (PortWishes(pace=True), PortWishes(paced_jobs=True), PortWishes(dcqcn=True)):
        plan = plan_port(facts, wishes)
        assert not plan.pace
        assert any("fq" in text for text in plan.missing)


def test_pacing_that_is_switched_off_although_a_job_has_a_rate_is_told() -> None:
    plan = plan_port(SOFTWARE, PortWishes(pace=False, paced_jobs=True))
    assert not plan.pace
    assert any("pace is off" in text for text in plan.missing)


def test_the_configured_rate_beats_the_trees_and_that_the_nics() -> None:
    facts = PortFacts("software", speed_Bps=4 * GBIT_Bps, tree_rate_Bps=2 * GBIT_Bps, has_fq=True)
    assert plan_port(facts, PortWishes(rate_Bps=GBIT_Bps)).link_Bps == GBIT_Bps
    assert plan_port(facts, PortWishes()).link_Bps == 2 * GBIT_Bps
    assert plan_port(replace(facts, tree_rate_Bps=0), PortWishes()).link_Bps == 4 * GBIT_Bps
    over = plan_port(facts, PortWishes(rate_Bps=3 * GBIT_Bps))
    assert any("HTB tree" in text for text in over.missing)


def test_a_rate_above_the_nics_is_refused() -> None:
    with pytest.raises(UsageError, match="above the NIC's speed"):
        plan_port(FORWARDED, PortWishes(rate_Bps=11 * GBIT_Bps))


def test_a_slot_is_never_shorter_than_a_packet() -> None:
    assert slot_ns_of(50 * GBIT_Bps) == SLOT_ns
    assert slot_ns_of(0) == SLOT_ns
    assert slot_ns_of(GBIT_Bps // 10) == 336_000
