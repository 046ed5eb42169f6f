"""`controller qdisc` on a real kernel's veth: what lands where, and what is left behind."""

from __future__ import annotations

import json
import re
import socket
import time

import pytest
from click.testing import CliRunner

from controller.cli import cli
from controller.dataplane import interfaces
from controller.dataplane.netns import in_netns
from controller.errors import ConflictError, StellarError, UnsupportedError, UsageError
from controller.ops import qdisc
from controller.ops.qdisc_state import QdiscState
from controller.ops.qdisc_tree import HANDLE, classid, plan_tree, tree_commands
from controller.priority.classes import change, default_classes
from tests.arrivals import arrival_s, udp_listener
from tests.hosts import Host, sh

MBIT = 125_000
RATE_Bps = 100 * MBIT
PORT = 4000
_SO_SNDBUFFORCE = 32  # asm-generic/socket.h; Python has no name for it


def _setup(host: Host, rate_Bps: int = RATE_Bps, **options: object) -> qdisc.Setup:
    return qdisc.setup(host.netns, host.interface, default_classes(), rate_Bps, **options)  # type: ignore[arg-type]


def _read(host: Host) -> QdiscState:
    return qdisc.read(host.netns, host.interface)


def _kernel(host: Host) -> str:
    """What stands at the interface, as tc prints it."""
    qdiscs = sh(f"tc -n {host.netns} -j qdisc show")
    # Of htb it has a count of packets, and IPv6 sends some by itself.
    qdiscs = re.sub(r'"direct_packets_stat":\d+', '"direct_packets_stat":N', qdiscs)
    return qdiscs + sh(f"tc -n {host.netns} class show dev {host.interface}")


def _send(sender: Host, receiver: Host, priority: int, packets: int, size: int = 1000) -> float:
    """UDP packets with this skb->priority; seconds from the first to the last received."""

    def listen() -> socket.socket:
        return udp_listener(receiver.address, PORT, timeout_s=20)

    def speak() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 1 << 24)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
            for _ in range(packets):
                sock.sendto(b"x" * size, (receiver.address, PORT))

    with in_netns(receiver.netns, listen) as sock:
        in_netns(sender.netns, speak)
        times = [arrival_s(sock, size) for _ in range(packets)]
        return max(times) - min(times)


@pytest.fixture
def sender(hosts: tuple[Host, Host]) -> Host:
    return hosts[0]


def test_rates_floors_and_ceilings_in_the_kernel_are_those_asked_for(sender: Host) -> None:
    classes = change(default_classes(), 2, floor_share=0.2, ceiling_share=0.5)
    classes = change(classes, 6, ceiling_share=0.3)
    done = qdisc.setup(sender.netns, sender.interface, classes, RATE_Bps)
    assert (done.action, done.kind) == ("added", "htb")
    state = _read(sender)
    assert (state.kind, state.root_handle, state.complete) == ("htb", HANDLE, True)
    assert state.rate_Bps == RATE_Bps
    assert len(state.classes) == 9
    for entry, each in zip(classes, state.classes, strict=False):
        assert each.number == entry.number
        assert each.floor_Bps == RATE_Bps * entry.floor_share
        assert each.ceiling_Bps == RATE_Bps * entry.ceiling_share
        assert each.prio == 7 - entry.number
    other = state.classes[-1]
    assert (other.number, other.classid, other.floor_Bps) == (None, "57e1:2", RATE_Bps // 20)
    kinds = {each.leaf_kind for each in state.classes}
    assert kinds == {"fq" if qdisc.has_qdisc("fq") else "pfifo"}
    assert state.has_fq == state.all_fq == (kinds == {"fq"})


def test_a_rate_beyond_32_bits_is_read_back_whole(sender: Host) -> None:
    # 80 Gbit/s: more than the veth says to be, so past the check of its speed.
    tree = plan_tree(default_classes(), 10_000_000_000, 4200)
    lines = tree_commands(tree, sender.interface, "pfifo", with_root=True)
    for line in lines:
        sh(f"tc -n {sender.netns} {line}")
    state = _read(sender)
    assert (state.rate_Bps, state.complete) == (10_000_000_000, True)
    assert state.classes[0].ceiling_Bps == 10_000_000_000


def test_packets_with_a_class_id_land_in_its_class_and_others_in_other(
    hosts: tuple[Host, Host],
) -> None:
    sender, receiver = hosts
    _send(sender, receiver, 0, 1)  # neighbour discovery is over afterwards
    _setup(sender)
    for number in range(8):
        _send(sender, receiver, classid(number), 10 + number)
    # Neither a plain priority nor an id of no class is one of ours.
    _send(sender, receiver, 6, 20)
    _send(sender, receiver, 0x57E1_0030, 20)
    state = _read(sender)
    assert [each.sent_packets for each in state.classes[:8]] == [10 + n for n in range(8)]
    frame_bytes = 1000 + 8 + 20 + 14
    assert [each.sent_bytes for each in state.classes[:8]] == [
        (10 + n) * frame_bytes for n in range(8)
    ]
    assert state.classes[8].sent_packets >= 40
    assert state.drops == 0


@pytest.mark.parametrize(("number", "share"), [(7, 1.0), (3, 0.5)])
def test_a_class_reaches_its_ceiling_and_no_more(
    hosts: tuple[Host, Host], number: int, share: float
) -> None:
    sender, receiver = hosts
    classes = change(default_classes(), 3, ceiling_share=0.5)
    qdisc.setup(sender.netns, sender.interface, classes, 40 * MBIT)
    packets, reached = 2000, []
    for _ in range(5):
        seconds = _send(sender, receiver, classid(number), packets)
        reached.append((packets - 1) * 1042 / seconds / (40 * MBIT * share))
        assert reached[-1] < 1.05
        # Below it only as far as the machine's timers are late: where it stood still, once more.
        if reached[-1] > 0.85:
            break
    assert max(reached) > 0.85, reached


def test_a_second_setup_changes_in_place_and_keeps_what_waits(hosts: tuple[Host, Host]) -> None:
    sender, receiver = hosts
    # So slow that the next setup finds most of it waiting, however long it takes.
    slow = change(default_classes(), 5, ceiling_share=0.2)
    qdisc.setup(sender.netns, sender.interface, slow, 1 * MBIT)

    def fill() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 1 << 24)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, classid(5))
            for _ in range(200):
                sock.sendto(b"x" * 1000, (receiver.address, PORT))

    in_netns(sender.netns, fill)
    before = _read(sender).classes[5]
    assert before.backlog_packets > 100  # a second's worth is 24 packets
    done = qdisc.setup(sender.netns, sender.interface, slow, 2 * MBIT)
    after = _read(sender).classes[5]
    assert done.action == "changed"
    assert after.ceiling_Bps == 2 * MBIT * 0.2
    assert 50 < after.backlog_packets <= before.backlog_packets
    _setup(sender, 1000 * MBIT)
    for _ in range(100):
        last = _read(sender).classes[5]
        if not last.backlog_packets:
            break
        time.sleep(0.1)
    assert (last.sent_packets, last.backlog_packets, last.drops) == (200, 0, 0)


def test_clear_restores_what_was_before_and_works_twice(sender: Host) -> None:
    before, network = _kernel(sender), sender.network_state()
    _setup(sender)
    assert _kernel(sender) != before
    assert qdisc.clear(sender.netns, sender.interface)
    assert _kernel(sender) == before
    assert sender.network_state() == network
    assert not qdisc.clear(sender.netns, sender.interface)
    assert _kernel(sender) == before


def test_a_clsact_of_others_outlives_setup_and_clear(sender: Host) -> None:
    sh(f"tc -n {sender.netns} qdisc add dev {sender.interface} clsact")
    before = _kernel(sender)
    _setup(sender)
    assert qdisc.clear(sender.netns, sender.interface)
    assert _kernel(sender) == before


@pytest.mark.parametrize(
    "root",
    ["root pfifo", "root handle 1: htb default 1", "root handle 57e1: pfifo limit 7"],
)
def test_a_root_qdisc_of_others_is_named_and_left_alone(sender: Host, root: str) -> None:
    sh(f"tc -n {sender.netns} qdisc add dev {sender.interface} {root}")
    before = _kernel(sender)
    with pytest.raises(ConflictError) as caught:
        _setup(sender)
    kind = root.split()[-1] if root == "root pfifo" else root.split(": ")[1].split()[0]
    assert sender.target in caught.value.message and kind in caught.value.message
    assert "qdisc del" in caught.value.remedy
    assert not qdisc.clear(sender.netns, sender.interface)
    assert _kernel(sender) == before
    assert not _read(sender).ours


@pytest.mark.parametrize("done_lines", [1, 2, 3, 8, 17])
def test_a_setup_that_died_half_way_is_seen_and_mended(sender: Host, done_lines: int) -> None:
    before = _kernel(sender)
    tree = plan_tree(default_classes(), RATE_Bps, 4200)
    for line in tree_commands(tree, sender.interface, "pfifo", with_root=True)[:done_lines]:
        sh(f"tc -n {sender.netns} {line}")
    state = _read(sender)
    assert (state.ours, state.complete) == (True, False)
    _setup(sender)
    assert _read(sender).complete
    assert qdisc.clear(sender.netns, sender.interface)
    assert _kernel(sender) == before


def test_a_setup_that_fails_leaves_nothing_behind(
    sender: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _kernel(sender)
    good = tree_commands

    def broken(*arguments: object, **options: object) -> list[str]:
        lines = good(*arguments, **options)  # type: ignore[arg-type]
        return [*lines[:5], "qdisc add dev eth0 parent 57e1:77 pfifo"]

    monkeypatch.setattr(qdisc, "tree_commands", broken)
    with pytest.raises(StellarError, match="57e1:77"):
        _setup(sender)
    assert _kernel(sender) == before


def test_the_interface_of_a_hardware_rnic_is_refused_for_the_verbs_path(
    sender: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _kernel(sender)
    link = interfaces.RdmaLink("mlx5_0", sender.interface, is_virtual=False)
    monkeypatch.setattr(interfaces, "rdma_links", lambda netns: [link])
    with pytest.raises(UnsupportedError) as caught:
        _setup(sender)
    assert "mlx5_0" in caught.value.message
    assert "NCCL_IB_TC" in caught.value.remedy
    assert _kernel(sender) == before


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"rate_Bps": 0}, UsageError, "Rate 0"),
        # A veth says that it does 10 Gbit/s.
        ({"rate_Bps": 10_001 * MBIT}, UsageError, "above the speed of .*10 Gbit/s"),
        ({"rate_Bps": None}, UsageError, "needs the rate"),
        ({"rate_Bps": 10}, UsageError, "allowed: 1 Mbit/s"),
        ({"rate_Bps": RATE_Bps, "qp_timeout": 0}, UsageError, "allowed: 1 .. 31"),
    ],
)
def test_impossible_setups_are_refused_before_anything_changes(
    sender: Host, options: dict[str, object], kind: type[Exception], message: str
) -> None:
    before = _kernel(sender)
    with pytest.raises(kind, match=message):
        qdisc.setup(sender.netns, sender.interface, default_classes(), **options)  # type: ignore[arg-type]
    assert _kernel(sender) == before


def test_an_interface_without_queues_for_mqprio_keeps_its_tree(sender: Host) -> None:
    _setup(sender)
    before = _kernel(sender)
    # This veth has one transmit queue; where the kernel has no mqprio, that is the reason.
    with pytest.raises(UnsupportedError, match=r"1 transmit queues|no qdisc mqprio"):
        qdisc.setup(sender.netns, sender.interface, default_classes(), None, "mqprio")
    assert _kernel(sender) == before


def _command(*arguments: str, status: int = 0) -> str:
    # A run directory without a controller: the classes are the default ones.
    words = ["--run-dir", "/nonexistent", "qdisc", *arguments]
    result = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert result.exit_code == status, result.output
    return str(result.stderr if status else result.stdout)


@pytest.mark.parametrize("rate", ["1mbit", "100mbit", "1gbit", "9.999gbit"])
def test_the_commands_print_tables_of_80_columns(sender: Host, rate: str) -> None:
    texts = [
        _command("setup", sender.target, "--rate", rate, "--floor", "0=1%", "--ceiling", "0=0.5"),
        _command("show", sender.target),
        _command("clear", sender.target),
        _command("show", sender.target),
    ]
    assert max(len(line) for text in texts for line in text.splitlines()) <= 80
    assert texts[0].count("57e1:") == texts[1].count("57e1:1") + texts[1].count("57e1:2") == 9


def test_json_tells_what_was_set_and_what_is_there(sender: Host) -> None:
    done = json.loads(
        _command("setup", sender.target, "--rate", "100mbit", "--floor", "7=20%", "--json")
    )
    shown = json.loads(_command("show", sender.target, "--json"))
    assert (done["rate_Bps"], shown["rate_Bps"]) == (RATE_Bps, RATE_Bps)
    assert done["classes"][7]["floor_Bps"] == shown["classes"][7]["floor_Bps"] == RATE_Bps // 5
    assert done["classes"][7]["number"] == shown["classes"][7]["number"] == 7
    assert shown["ours"] and shown["kind"] == "htb"
    assert json.loads(_command("clear", sender.target, "--json"))["cleared"]
    assert not json.loads(_command("show", sender.target, "--json"))["ours"]


@pytest.mark.parametrize("text", ["7", "8=1%", "7=101%", "-1=5%", "7=x", "7=-0.1", "7=nan"])
def test_a_share_that_cannot_be_read_is_refused(sender: Host, text: str) -> None:
    told = _command("setup", sender.target, "--rate", "1gbit", "--floor", text, status=2)
    assert "CLASS=SHARE" in told
