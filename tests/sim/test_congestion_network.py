"""Links and flows in steps of time: marks, queues, paths, back-pressure, conservation of bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from controller.congestion.dcqcn import PRESETS, preset
from controller.congestion.flows import DcqcnFlows
from controller.congestion.marking import SlidingWindow, VirtualQueue, mark_probability
from controller.errors import UsageError
from controller.sim.congestion import chance
from controller.sim.congestion.feedback import CnpFeedback
from controller.sim.congestion.links import Link, Links
from controller.sim.congestion.network import Network

RATE = 5e9  # 40 Gbit/s
PACKET = 1_000
LINE = Link(RATE, 5_000, 200_000, 0.01)


def network(
    links: list[Link],
    paths: list[list[int]],
    streams: list[int] | None = None,
    *,
    step_ns: int = 1_000,
    seed: int = 1,
) -> Network:
    """Flows at line rate over paths, with the paper's constants and a delay of 10 us."""
    count = len(paths if streams is None else streams)
    flows = DcqcnFlows(PRESETS["paper"], count)
    feedback = CnpFeedback(flows, chance.keys(seed, count), 10_000, step_ns)
    return Network(
        feedback,
        links,
        np.array(paths),
        None if streams is None else np.array(streams),
        step_ns=step_ns,
        packet_bytes=PACKET,
    )


def rates_of(net: Network, rates_Bps: list[float]) -> None:
    net.feedback.flows.set_rates(np.arange(len(rates_Bps)), np.array(rates_Bps))  # type: ignore[attr-defined]


def test_marking_probabilities_are_those_of_one_queue_after_the_other() -> None:
    lines = [LINE, replace(LINE, pmax=1.0), replace(LINE, kmax_bytes=5_000), LINE.unmarked()]
    for queue in (0, 4_999, 5_000, 5_001, 80_000, 200_000, 200_001, 10**7):
        links = Links(lines, 1_000)
        links.queue_bytes[:] = queue
        wanted = [
            mark_probability(queue, line.kmin_bytes, line.kmax_bytes, line.pmax) for line in lines
        ]
        assert links.probabilities() == pytest.approx(wanted)


@pytest.mark.parametrize("drain_share", [1.0, 0.95])
def test_the_window_is_that_of_the_live_marker(drain_share: float) -> None:
    random = np.random.default_rng(3)
    links = Links([replace(LINE, window=True, drain_share=drain_share)], 500)
    model = SlidingWindow(VirtualQueue(RATE * drain_share), 62_500, 16)
    level = 1.0
    for step in range(1, 10_000):
        if step % 400 == 1:
            level = random.choice([0.2, 0.8, 1.3, 2.0])
        nbytes = float(random.poisson(level * RATE * 500e-9 / PACKET)) * PACKET
        # The model takes one packet at the begin of the step, the links mix it into the step.
        seen = model.arrive((step - 1) * 500, int(nbytes))
        difference = abs(float(links.marking_queue()[0]) - seen)
        # A slot ends within a step: up to two steps' bytes in each of the 15 samples.
        assert difference <= 4 * RATE * 500e-9
        links.step(np.array([nbytes]))


def test_an_instant_marker_looks_at_the_queue_of_the_moment() -> None:
    links = Links([LINE, replace(LINE, window=True)], 1_000)
    links.step(np.array([100_000.0, 100_000.0]))
    assert links.marking_queue() == pytest.approx([95_000, 95_000 / 16])


def test_a_link_serves_its_rate_and_keeps_the_rest() -> None:
    links = Links([LINE, LINE], 1_000)
    share = links.step(np.array([20_000.0, 4_000.0]))
    assert links.served_bytes.tolist() == [5_000, 4_000]
    assert links.queue_bytes.tolist() == [15_000, 0]
    assert share.tolist() == [0.25, 1]


def test_no_byte_is_lost_or_made_on_paths_of_several_links() -> None:
    random = np.random.default_rng(5)
    links = [replace(LINE, rate_Bps=RATE * factor) for factor in (1, 0.5, 0.7, 1, 0.3)]
    paths = [[0, 1, 2], [3, 1, -1], [3, 4, 2], [0, -1, -1], [4, 2, -1]]
    net = network(links, paths)
    sent, served = np.zeros(5), np.zeros(5)
    for _ in range(3_000):
        delivered = net.step(random.random(5) < 0.9)
        np.add.at(sent, net.sent_flows, net.sent_bytes)
        served += net.links.served_bytes
        assert (delivered >= 0).all()
    within = net._backlog.sum(axis=0) + net._between[1:].sum(axis=0)
    np.testing.assert_allclose(sent, net.delivered_bytes + within, rtol=1e-9)
    queues = net.links.queue_bytes
    assert net._backlog.sum() == pytest.approx(queues.sum(), rel=1e-6)
    assert (served <= np.array([link.rate_Bps for link in links]) * 3e-3 + 1).all()
    # The last link of flow 3 is the first of flow 0: both pass it.
    assert served[0] == pytest.approx(sent[0] + sent[3] - queues[0], rel=1e-9)


def test_a_flow_behind_a_narrow_link_burdens_the_next_one_with_what_passed_only() -> None:
    narrow, wide = replace(LINE.unmarked(), rate_Bps=RATE / 4), LINE.unmarked()
    net = network([narrow, wide], [[0, 1]])
    for _ in range(2_000):
        net.step()
    assert net.links.queue_bytes[0] > 1e6
    assert net.links.queue_bytes[1] == 0
    assert net.delivered_bytes[0] == pytest.approx(RATE / 4 * 2e-3, rel=0.01)


def test_what_shares_a_queue_leaves_it_in_its_proportions() -> None:
    net = network([LINE.unmarked()], [[0]] * 2)
    rates_of(net, [RATE, RATE / 2])
    for _ in range(300):
        net.step()
    assert net.delivered_bytes[0] / net.delivered_bytes[1] == pytest.approx(2, rel=0.15)


def test_a_paced_flow_sends_its_rate_in_whole_packets() -> None:
    net = network([LINE], [[0]])
    rates_of(net, [RATE / 7])
    sizes = []
    # Less than the time of fast recovery: its target is its rate.
    for _ in range(300):
        net.step()
        sizes += net.sent_bytes.tolist()
    assert set(sizes) == {PACKET}
    assert len(sizes) == pytest.approx(RATE / 7 * 300e-6 / PACKET, abs=1)


def test_a_flow_sends_what_it_was_offered_and_no_more() -> None:
    net = network([LINE, LINE], [[0], [1]])
    net.silence(np.array([0, 1]))
    net.offer(np.array([1]), np.array([12_345.0]), np.array([0.0]))
    for _ in range(100):
        net.step()
    assert net.delivered_bytes.tolist() == [0, 12_345]
    assert net.unsent_bytes.tolist() == [0, 0]


def test_who_may_not_send_does_not() -> None:
    net = network([LINE, LINE], [[0], [1]])
    for _ in range(100):
        net.step(np.array([True, False]))
    assert net.delivered_bytes[0] > 0
    assert net.delivered_bytes[1] == 0
    net.step(np.array([True, True]))
    assert net.sent_flows.tolist() == [0, 1]


@pytest.mark.parametrize("step_ns", [500, 2_000])
def test_senders_are_held_so_that_the_queue_stays_at_the_pause_threshold(step_ns: int) -> None:
    longest = []
    for pause_bytes in (float("inf"), 500_000):
        link = replace(LINE, pause_bytes=pause_bytes)
        net = network([link], [[0]] * 32, [0] * 32, step_ns=step_ns)
        queues = []
        for _ in range(300_000 // step_ns):
            net.step()
            queues.append(float(net.links.queue_bytes[0]))
            assert net.links.served_bytes[0] > 0
        longest.append(max(queues))
    # Whole packets: each sender may be one ahead of what it is given.
    assert 500_000 - 1 <= longest[1] <= 500_000 + 32 * PACKET < longest[0]


def test_notifications_keep_their_interval_and_their_delay() -> None:
    net = network([replace(LINE, kmin_bytes=0, kmax_bytes=0)], [[0]] * 2)
    feedback = net.feedback
    assert isinstance(feedback, CnpFeedback)
    cut_at = []
    for _ in range(400):
        before = int(feedback.flows.cuts[0])
        net.step()
        if feedback.flows.cuts[0] > before:
            cut_at.append(net.now_ns)
    # In the first step the queue is empty when its packets come; the second one's are marked.
    assert cut_at[0] == 2_000 + 10_000
    assert min(np.diff(cut_at)) >= 50_000
    assert feedback.notifications[0] == pytest.approx(len(cut_at), abs=1)


@pytest.mark.parametrize(("holds", "sent_at"), [(True, [10, 60]), (False, [10])])
def test_a_mark_within_the_interval_is_told_at_its_end(holds: bool, sent_at: list[int]) -> None:
    flows = DcqcnFlows(PRESETS["paper"], 2)
    feedback = CnpFeedback(flows, chance.keys(1, 2), 0, 1_000, holds)
    one = np.ones(1)
    told = []
    for step in range(1, 200):
        before = int(feedback.notifications[0])
        feedback.advance(step * 1_000)
        # Two marks within one interval make one CNP, at its end.
        if step in (10, 20, 30):
            feedback.sent(np.array([0]), one * PACKET, one * 0.0, lambda: one)
        if feedback.notifications[0] > before:
            told.append(step)
    assert told == sent_at
    assert feedback.notifications[1] == 0


def test_a_held_mark_is_lost_with_its_flow() -> None:
    feedback = CnpFeedback(DcqcnFlows(PRESETS["paper"], 1), chance.keys(1, 1), 0, 1_000)
    one = np.ones(1)
    for step in range(1, 200):
        feedback.advance(step * 1_000)
        if step in (10, 20):
            feedback.sent(np.array([0]), one * PACKET, one * 0.0, lambda: one)
        if step == 30:
            feedback.reset(np.array([0]))
    assert feedback.notifications[0] == 0


def test_the_share_of_marked_packets_is_the_probability() -> None:
    # A queue that stays at one length, each packet of a flow in a step of its own, no interval.
    parameters = replace(PRESETS["paper"], echo_interval_ns=0)
    flows = DcqcnFlows(parameters, 4_000)
    feedback = CnpFeedback(flows, chance.keys(9, 4_000), 1_000, 1_000)
    everyone, one = np.arange(4_000), np.ones(4_000)
    for step in range(1, 51):
        feedback.advance(step * 1_000)
        feedback.sent(everyone, one * PACKET, one * 0.97**2, lambda: one)
    share = feedback.notifications.sum() / (50 * 4_000)
    # Two packets at 3 %; four standard deviations.
    wanted = 1 - 0.97**2
    assert share == pytest.approx(wanted, abs=4 * np.sqrt(wanted / (50 * 4_000)))


def test_a_replicate_is_the_same_alone_and_beside_others() -> None:
    def rates(replicates: list[int]) -> np.ndarray:
        count = 8 * len(replicates)
        flows = DcqcnFlows(PRESETS["paper"], (len(replicates), 8))
        keys = np.concatenate([chance.keys(seed, 8) for seed in replicates])
        net = Network(
            CnpFeedback(flows, keys, 10_000, 1_000), [LINE] * len(replicates),
            np.arange(len(replicates)), np.arange(count) // 8, packet_bytes=PACKET,
        )  # fmt: skip
        # Long enough that not every flow has a mark in every interval.
        for _ in range(12_000):
            net.step()
        return flows.rates_Bps

    together = rates([4, 5, 6])
    assert np.array_equal(together[1], rates([5])[0])
    assert not np.array_equal(together[0], together[1])


def test_random_numbers_are_even_and_independent() -> None:
    keys = chance.keys(0, 1_000)
    table = np.array([chance.uniform(keys, turn) for turn in range(200)])
    assert table.min() >= 0
    assert table.max() < 1
    counts = np.histogram(table, 20, (0, 1))[0]
    assert abs(counts - 10_000).max() < 5 * np.sqrt(10_000)
    # Of neighbours in time and in number.
    for other in (np.roll(table, 1, axis=0), np.roll(table, 1, axis=1)):
        assert abs(np.corrcoef(table.ravel(), other.ravel())[0, 1]) < 0.01


def test_a_rerouted_flow_is_a_new_one_and_its_queued_bytes_are_gone() -> None:
    net = network([LINE, LINE], [[0], [0]])
    for _ in range(20):
        net.step()
    assert net.links.queue_bytes[0] > 0
    net.reroute(np.array([1]), np.array([[1]]))
    flows = net.feedback.flows  # type: ignore[attr-defined]
    assert flows.rates_Bps[1] == preset("paper", RATE).link_Bps
    assert net._backlog.sum() == pytest.approx(net.links.queue_bytes.sum(), rel=1e-9)
    net.step()
    assert net.links.served_bytes[1] > 0


@pytest.mark.parametrize(
    ("paths", "streams"),
    [([[2]], None), ([[-1]], None), ([[0, -1, 1]], None), ([[0]], [1]), ([[0]], [-1])],
)
def test_impossible_paths_and_streams_are_refused(
    paths: list[list[int]], streams: list[int] | None
) -> None:
    with pytest.raises(UsageError):
        network([LINE, LINE], paths, streams)


@pytest.mark.parametrize("key", ["rate_Bps", "pause_bytes", "drain_share", "pmax"])
def test_impossible_links_are_named(key: str) -> None:
    with pytest.raises(UsageError, match=key):
        replace(LINE, **{key: -1.0})
