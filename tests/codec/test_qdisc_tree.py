"""The HTB tree as numbers: floors that fit, floors that keep queue pairs alive, tc's lines."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.errors import UsageError
from controller.ops.qdisc_tree import (
    CLASSES,
    FLOW_LIMIT_PACKETS,
    WINDOW_PACKETS,
    MAX_RATE_Bps,
    MIN_RATE_Bps,
    Tree,
    classid,
    fq_options,
    plan_queues,
    plan_tree,
    safe_timeout,
    tree_commands,
    window_bytes,
)
from controller.priority.classes import TrafficClass, default_classes

MBIT = 125_000
GBIT = 1000 * MBIT


def _classes(floors: list[float], ceilings: list[float] | None = None) -> list[TrafficClass]:
    return [
        TrafficClass(number, number, number, floor_share=floor, ceiling_share=ceiling)
        for number, (floor, ceiling) in enumerate(
            zip(floors, ceilings or [1.0] * len(floors), strict=True)
        )
    ]


def _sum_of_floors(tree: Tree) -> int:
    return sum(leaf.floor_Bps for leaf in tree.leaves)


_shares = st.lists(st.floats(0, 1), min_size=8, max_size=8).map(
    # Scaled into 100 %, keeping proportions.
    lambda shares: [share / max(1.0, sum(shares)) for share in shares]
)


@given(_shares, st.integers(10 * MBIT, 400 * GBIT), st.sampled_from([1500, 4200, 9000, 65535]))
def test_whatever_the_shares_the_floors_fit_into_the_link(
    floors: list[float], rate_Bps: int, mtu_bytes: int
) -> None:
    tree = plan_tree(_classes(floors), rate_Bps, mtu_bytes)
    assert _sum_of_floors(tree) <= rate_Bps
    assert all(0 < leaf.floor_Bps <= leaf.ceiling_Bps <= rate_Bps for leaf in tree.leaves)
    for leaf, share in zip(tree.leaves, floors, strict=False):
        # A thousandth may go to other traffic and to each class of floor 0.
        assert leaf.floor_Bps >= rate_Bps * share - 0.009 * rate_Bps - 1


@pytest.mark.parametrize("rate_Bps", [10 * MBIT, 100 * MBIT, GBIT, 25 * GBIT, 400 * GBIT])
def test_floors_that_were_chosen_are_kept(rate_Bps: int) -> None:
    floors = [0.02, 0.03, 0.05, 0.05, 0.1, 0.1, 0.1, 0.2]
    ceilings = [0.5, 1.0, 1.0, 0.25, 1.0, 1.0, 0.9, 0.3]
    tree = plan_tree(_classes(floors, ceilings), rate_Bps, 4200, raisable=())
    for number, leaf in enumerate(tree.leaves[:-1]):
        assert leaf.number == number
        assert leaf.prio == 7 - number
        assert leaf.minor == 0x10 + number
        assert leaf.floor_Bps == pytest.approx(rate_Bps * floors[number], abs=1)
        assert leaf.ceiling_Bps == pytest.approx(rate_Bps * ceilings[number], abs=1)
        assert not leaf.raised
    other = tree.leaves[-1]
    assert (other.number, other.minor, other.ceiling_Bps) == (None, 2, rate_Bps)


def test_on_a_fast_link_default_floors_keep_every_queue_pair_alive() -> None:
    tree = plan_tree(default_classes(), 10 * GBIT, 4200)
    assert not tree.warnings
    assert not any(leaf.raised for leaf in tree.leaves)
    # 128 packets of 4096 + 80 + 18 bytes at 5 % of 10 Gbit/s, by hand: 8.59 ms.
    assert window_bytes(4200) == 536_832
    assert tree.drain_ns(tree.leaves[0]) == 8_589_312


def test_at_1_gbit_default_floors_are_raised_lowest_class_first_and_the_rest_is_warned_of() -> None:
    tree = plan_tree(default_classes(), GBIT, 4200)
    # Half of 67.1 ms for 536832 bytes: 15.998841 MB/s.
    assert [leaf.raised for leaf in tree.leaves] == [True] * 6 + [False, True, False]
    for leaf in tree.leaves:
        assert leaf.floor_Bps == (15_998_841 if leaf.raised else 6_250_000)
        assert tree.is_safe(leaf) == leaf.raised
    assert _sum_of_floors(tree) <= GBIT
    (warning,) = tree.warnings
    assert warning.startswith("class 6 and other: ")
    assert "85.89 ms" in warning and "67.11 ms" in warning and "-u 16" in warning


def test_a_chosen_floor_is_not_raised_but_warned_of() -> None:
    tree = plan_tree(default_classes(), GBIT, 4200, raisable={1, 2, 3, 4, 5, 6, 7})
    assert not tree.leaves[0].raised
    assert re.match(r"class(es)? 0\b", tree.warnings[0])


def test_a_ceiling_below_the_needed_rate_stops_the_raise() -> None:
    tree = plan_tree(_classes([0.05] * 8, [0.06] + [1.0] * 7), GBIT, 4200)
    assert not tree.leaves[0].raised
    assert tree.leaves[0].floor_Bps == 6_250_000


def test_a_longer_qp_timeout_needs_no_raise() -> None:
    tree = plan_tree(default_classes(), GBIT, 4200, qp_timeout=18)
    assert not tree.warnings
    assert not any(leaf.raised for leaf in tree.leaves)


@given(st.integers(1, 10**12))
def test_the_recommended_timeout_is_the_smallest_of_which_the_drain_is_half(drain_ns: int) -> None:
    attribute = safe_timeout(drain_ns)
    assert drain_ns <= 4096 * 2**attribute / 2
    assert attribute == 1 or drain_ns > 4096 * 2 ** (attribute - 1) / 2


@pytest.mark.parametrize(
    ("mtu_bytes", "frame_bytes"),
    [(9000, 4194), (4200, 4194), (4150, 2146), (1500, 1122), (600, 610), (300, 318)],
)
def test_the_window_is_counted_with_the_path_mtu_that_fits(
    mtu_bytes: int, frame_bytes: int
) -> None:
    assert window_bytes(mtu_bytes) == 128 * frame_bytes


def test_floors_of_100_percent_leave_a_thousandth_for_other_traffic() -> None:
    tree = plan_tree(_classes([0.1] * 6 + [0.3, 0.1]), GBIT, 1500, raisable=())
    assert tree.leaves[-1].floor_Bps == GBIT // 1000
    assert tree.leaves[6].floor_Bps == GBIT * 3 // 10 - GBIT // 1000
    assert _sum_of_floors(tree) == GBIT
    assert any("taken from class 6" in warning for warning in tree.warnings)


@pytest.mark.parametrize(
    ("floors", "ceilings", "rate_Bps", "qp_timeout", "found", "allowed"),
    [
        ([0.2] * 8, [1.0] * 8, GBIT, 14, "160 %", "at most 100 %"),
        ([0.13] * 8, [1.0] * 8, GBIT, 14, "104 %", "at most 100 %"),
        ([0.05] * 8, [1.0] * 8, 0, 14, "0 bit/s", "1 Mbit/s .. 1 Tbit/s"),
        ([0.05] * 8, [1.0] * 8, MIN_RATE_Bps - 1, 14, "1 Mbit/s", "1 Mbit/s .. 1 Tbit/s"),
        ([0.05] * 8, [1.0] * 8, MAX_RATE_Bps + 1, 14, "1 Tbit/s", "1 Mbit/s .. 1 Tbit/s"),
        ([0.05] * 8, [1.0] * 8, GBIT, 0, "attribute 0", "1 .. 31"),
        ([0.05] * 8, [1.0] * 8, GBIT, 32, "attribute 32", "1 .. 31"),
        ([0.05] * 7, [1.0] * 7, GBIT, 14, "0, 1, 2, 3, 4, 5, 6", "each once"),
    ],
)
def test_impossible_links_and_shares_are_refused(
    floors: list[float],
    ceilings: list[float],
    rate_Bps: int,
    qp_timeout: int,
    found: str,
    allowed: str,
) -> None:
    with pytest.raises(UsageError) as caught:
        plan_tree(_classes(floors, ceilings), rate_Bps, 1500, qp_timeout)
    assert found in caught.value.message
    assert allowed in caught.value.message


def test_a_packet_with_a_class_id_as_priority_finds_its_leaf() -> None:
    tree = plan_tree(default_classes(), GBIT, 4200)
    for leaf in tree.leaves[:-1]:
        assert leaf.number is not None
        assert classid(leaf.number) == 0x57E1_0010 + leaf.number
        assert f"{classid(leaf.number) >> 16:x}:{classid(leaf.number) & 0xFFFF:x}" == leaf.classid
        # Its low four bits are the class, for priority maps.
        assert classid(leaf.number) & 0xF == leaf.number


@pytest.mark.parametrize("rate_Bps", [10 * MBIT, 100 * MBIT, 10 * GBIT, 400 * GBIT])
@pytest.mark.parametrize("mtu_bytes", [1500, 9000, 65535])
def test_bursts_and_quanta_hold_frames_and_fit_into_the_kernels_numbers(
    rate_Bps: int, mtu_bytes: int
) -> None:
    tree = plan_tree(default_classes(), rate_Bps, mtu_bytes)
    lines = tree_commands(tree, "eth0", "fq", with_root=True)
    classes = [line for line in lines if line.startswith("class ")]
    assert len(classes) == 1 + CLASSES + 1
    for line in classes:
        words = line.split()
        option = {name: words[words.index(name) + 1] for name in words if name in (
            "rate", "ceil", "burst", "cburst", "quantum")}  # fmt: skip
        for rate, burst in (("rate", "burst"), ("ceil", "cburst")):
            filling_s = int(option[burst]) / int(option[rate].removesuffix("bps"))
            assert int(option[burst]) >= 2 * mtu_bytes
            # 32 bits of 64 ns; tc cuts to whole microseconds.
            assert 2e-6 <= filling_s < 2**32 * 64e-9
        # Above 200000 and below 1000 the kernel complains.
        assert mtu_bytes <= int(option["quantum"]) <= 200_000


def test_a_second_setup_touches_no_root_and_adds_nothing_twice() -> None:
    tree = plan_tree(default_classes(), GBIT, 4200)
    first = tree_commands(tree, "eth0", "pfifo", with_root=True)
    again = tree_commands(tree, "eth0", "pfifo", with_root=False)
    assert first[0] == "qdisc add dev eth0 root handle 57e1: htb default 2"
    assert again == first[1:]
    assert all(" replace " in line for line in again)
    handles = [line.split(" handle ")[1].split()[0] for line in again if " handle " in line]
    assert len(set(handles)) == CLASSES + 1


def test_one_flow_of_fq_holds_several_windows_and_no_departure_time_is_refused() -> None:
    words = fq_options().split()
    assert int(words[words.index("flow_limit") + 1]) == FLOW_LIMIT_PACKETS >= 4 * WINDOW_PACKETS
    assert int(words[words.index("limit") + 1]) >= FLOW_LIMIT_PACKETS
    assert "horizon_cap" in words


def test_mqprio_gives_each_class_its_priority_and_spreads_the_queues() -> None:
    plan = plan_queues([0, 1, 2, 3, 4, 5, 6, 7], 20)
    assert plan.priority_to_class == (0, 1, 2, 3, 4, 5, 6, 7, *[1] * 8)
    assert plan.queues == ((3, 0), (3, 3), (3, 6), (3, 9), (2, 12), (2, 14), (2, 16), (2, 18))
    assert plan_queues([15, 1, 2, 3, 4, 5, 6, 7], 8).priority_to_class[15] == 0


def test_mqprio_cannot_tell_classes_of_one_priority_apart() -> None:
    with pytest.raises(UsageError, match="class 3 both have priority 2"):
        plan_queues([0, 1, 2, 2, 4, 5, 6, 7], 8)
