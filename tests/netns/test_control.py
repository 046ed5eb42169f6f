"""The controller acts on packets of jobs, as they leave on the wire; on nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.agent.client import ask
from controller.agent.state import RunDirectory
from tests.hosts import Controller, Host
from tests.waiting import wait

Hosts = tuple[Host, Host]
Send = Callable[..., None]

# Prints the ToS byte of each RoCEv2 packet over IPv4 that comes in, one a line.
_LISTENER = """
import socket
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
raw.bind(("eth0", 0x0800))
print("ready", flush=True)
while True:
    frame, address = raw.recvfrom(9000)
    if address[2] == socket.PACKET_OUTGOING or frame[23] != 17:
        continue
    udp = 14 + (frame[14] & 15) * 4
    if frame[udp + 2 : udp + 4] == b"\\x12\\xb7":
        dqpn = int.from_bytes(frame[udp + 13 : udp + 16], "big")
        print(dqpn, frame[15], flush=True)
"""


class Listener:
    """What came in at a host: (destination QPN, ToS byte) of each RoCEv2 packet."""

    def __init__(self, host: Host, output: Path) -> None:
        self._output = output
        with output.open("w") as file:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", host.netns, sys.executable, "-c", _LISTENER], stdout=file
            )
        self._read = 0
        self._lines(1)

    def _lines(self, count: int) -> list[str]:
        for _ in range(1500):
            # A line that crosses a page of the file is seen in two steps.
            lines = self._output.read_text().split("\n")[self._read : -1]
            if len(lines) >= count:
                self._read += count
                return lines[:count]
            time.sleep(0.02)
        raise AssertionError(f"{len(lines)} packets came, not {count}")

    def packets(self, count: int) -> list[tuple[int, int]]:
        """The next `count` packets."""
        return [(int(qpn), int(tos)) for qpn, tos in map(str.split, self._lines(count))]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def listener(hosts: Hosts, tmp_path: Path) -> Iterator[Listener]:
    """At the second host."""
    instance = Listener(hosts[1], tmp_path / "listener")
    yield instance
    instance.close()


def job(controller: Controller, name: str) -> dict[str, Any]:
    # Asked for directly: the command starts a Python, and some tests have seconds only.
    document: dict[str, Any] = ask(RunDirectory(controller.run_dir), "job", name=name)["job"]
    return document


def wait_for_flow(controller: Controller, name: str) -> None:
    """Until the agent knows that the flow which has just begun is the job's."""
    wait(lambda: job(controller, name)["flows"])


def interface(controller: Controller, host: Host) -> dict[str, Any]:
    entries = controller.json("status")["interfaces"]
    (entry,) = [entry for entry in entries if entry["interface"] == host.target]
    return dict(entry)


def config_file(tmp_path: Path, text: str) -> tuple[str, str]:
    path = tmp_path / "stellar.toml"
    path.write_text(text)
    return "--config", str(path)


# The hosts have no RDMA device, so their interfaces count as forwarders': ask for job classes.
CONFIG = """
[[interface]]
name = "{target}"
classify = "job"

[[job]]
name = "train"
class = 5
set_ect = true
[job.match]
dst = "{peer}/32"
qpn = 17
"""


def test_a_flow_of_a_job_leaves_with_its_class_and_every_other_one_as_it_was(
    hosts: Hosts, controller: Controller, send: Send, listener: Listener, tmp_path: Path
) -> None:
    a, b = hosts
    controller.start(extra=config_file(tmp_path, CONFIG.format(target=a.target, peer=b.address)))
    send(a, b, 0, 1)
    listener.packets(1)  # the first packet tells the agent of the flow
    wait_for_flow(controller, "train")
    send(a, b, 1, 20)
    assert listener.packets(20) == [(17, 34 << 2 | 2)] * 20
    send(a, b, 0, 5, qpn=18)
    assert listener.packets(5) == [(18, 2)] * 5
    acts = interface(controller, a)["control"]["acts"]
    assert acts["classed"] == acts["rewritten"] == 20
    (flow,) = job(controller, "train")["flows"]
    assert (flow["class"], flow["class_packets"][5]) == (5, 20)


def test_classes_and_jobs_change_at_run_time(
    hosts: Hosts, controller: Controller, send: Send, listener: Listener
) -> None:
    a, b = hosts
    controller.start(a.target)
    send(a, b, 0, 3)
    assert listener.packets(3) == [(17, 2)] * 3  # no job yet: nobody touches it
    assert interface(controller, a)["acts"] is False
    controller.run("job", "set", "train", "--match", f"dst={b.address}", "--class", "2")
    assert interface(controller, a)["acts"] is True
    # By DSCP, as a forwarder: DSCP 0 is class 1's.
    send(a, b, 3, 3)
    assert listener.packets(3) == [(17, 0 << 2 | 2)] * 3
    assert job(controller, "train")["flows"][0]["class_packets"][1] == 3
    controller.run("class", "set", "1", "--dscp", "5")
    send(a, b, 6, 3)  # DSCP 0 is nobody's now, so the job's class holds
    assert listener.packets(3) == [(17, 10 << 2 | 2)] * 3
    controller.run("job", "set", "train", "--class", "6")
    send(a, b, 9, 3)
    assert listener.packets(3) == [(17, 40 << 2 | 2)] * 3
    controller.run("job", "delete", "train")
    assert interface(controller, a)["acts"] is False
    send(a, b, 12, 3)
    assert listener.packets(3) == [(17, 2)] * 3


def test_a_plan_raises_the_class_and_expires(
    hosts: Hosts, controller: Controller, send: Send, listener: Listener, tmp_path: Path
) -> None:
    a, b = hosts
    controller.start(extra=config_file(tmp_path, CONFIG.format(target=a.target, peer=b.address)))
    send(a, b, 0, 1)
    listener.packets(1)
    wait_for_flow(controller, "train")
    controller.run(
        "job",
        "plan",
        "train",
        "--bytes",
        "100MB",
        "--deadline",
        "6s",
        "--rate",
        "100mbit",
        "--valid",
        "6s",
    )  # 8 s of work in 6 s: no laxity
    send(a, b, 1, 2)
    assert listener.packets(2) == [(17, 40 << 2 | 2)] * 2  # class 6, the job's ceiling
    assert job(controller, "train")["plan"]["in_force"] is True
    wait(lambda: not job(controller, "train")["plan"]["in_force"])
    send(a, b, 3, 2)
    assert listener.packets(2) == [(17, 34 << 2 | 2)] * 2
    assert job(controller, "train")["plan"]["in_force"] is False


def test_a_killed_controller_leaves_its_classes_in_force_and_the_next_one_knows_its_jobs(
    hosts: Hosts, controller: Controller, send: Send, listener: Listener, tmp_path: Path
) -> None:
    a, b = hosts
    before = [host.network_state() for host in hosts]
    pid = controller.start(
        extra=config_file(tmp_path, CONFIG.format(target=a.target, peer=b.address))
    )
    controller.run("job", "set", "other", "--match", "qpn=99", "--class", "1")
    controller.run("class", "set", "5", "--dscp", "33")
    send(a, b, 0, 1)
    listener.packets(1)
    wait_for_flow(controller, "train")
    send(a, b, 1, 5)
    assert listener.packets(5) == [(17, 33 << 2 | 2)] * 5
    controller.kill(pid)
    send(a, b, 6, 5)  # nobody is there
    assert listener.packets(5) == [(17, 33 << 2 | 2)] * 5
    controller.start()
    assert {entry["name"] for entry in controller.json("job", "list")["jobs"]} == {"train", "other"}
    assert controller.json("class", "show")["classes"][5]["dscp"] == 33
    wait_for_flow(controller, "train")
    (flow,) = job(controller, "train")["flows"]
    assert flow["class_packets"][5] == 10  # counted on while nobody was there
    send(a, b, 11, 5)
    assert listener.packets(5) == [(17, 33 << 2 | 2)] * 5
    controller.run("stop")
    assert [host.network_state() for host in hosts] == before


def test_a_job_is_found_by_its_process_only_where_queue_pairs_are_known(
    hosts: Hosts, controller: Controller, send: Send, listener: Listener
) -> None:
    a, b = hosts
    controller.start(a.target)
    controller.run("job", "set", "mine", "--match", f"pid={os.getpid()}", "--class", "6")
    send(a, b, 0, 1)
    listener.packets(1)
    time.sleep(0.5)
    send(a, b, 1, 3)
    assert listener.packets(3) == [(17, 2)] * 3
    assert job(controller, "mine")["flows"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("class", "set", "3", "--dscp", "64"), ["dscp is 64", "0 .. 63"]),
        (("class", "set", "3", "--dscp", "26"), ["26", "3 and 4"]),
        (("class", "set", "3", "--floor", "0.9"), ["floor", "100 %"]),
        (("class", "set", "3", "--kmin", "2MB", "--kmax", "1MB"), ["kmin", "kmax"]),
        (("class", "set", "3"), ["Nothing"]),
        (("job", "set", "x", "--match", "src=fish"), ["src", "fish"]),
        (("job", "set", "x", "--match", "colour=red"), ["colour", "src"]),
        (("job", "set", "x", "--match", "src"), ["CRITERION=VALUE"]),
        (("job", "set", "x", "--rate", "fast"), ["--rate", "fast"]),
        (("job", "set", "no spaces"), ["no spaces"]),
        (("job", "show", "nobody"), ["nobody", "there are: none"]),
        (("job", "delete", "nobody"), ["nobody", "there are: none"]),
        (("job", "plan", "nobody", "--bytes", "1MB", "--deadline", "1s"), ["nobody"]),
        (("job", "plan", "nobody"), ["--bytes", "--deadline"]),
        (("job", "plan", "x", "--bytes", "1MB", "--deadline", "1s", "--pace"), ["pace"]),
    ],
)  # fmt: skip
def test_a_wrong_order_is_refused_with_what_is_allowed(
    running: Controller, arguments: tuple[str, ...], words: list[str]
) -> None:
    result = running.run(*arguments, check=False)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_a_rate_above_the_link_is_refused(
    hosts: Hosts, controller: Controller, tmp_path: Path
) -> None:
    text = f'[[interface]]\nname = "{hosts[0].target}"\nrate = "100mbit"\n'
    controller.start(extra=config_file(tmp_path, text))
    result = controller.run("job", "set", "x", "--rate", "101mbit", check=False)
    assert result.returncode == 2
    assert "101 Mbit/s" in result.stderr and "100 Mbit/s" in result.stderr
    controller.run("job", "set", "x", "--rate", "99mbit")
    missing = interface(controller, hosts[0])["control"]["missing"]
    assert any("fq" in text for text in missing)  # this kernel cannot pace, and says so


def test_without_a_controller_orders_say_so(controller: Controller) -> None:
    for arguments in (("class", "show"), ("job", "list"), ("job", "set", "x")):
        result = controller.run(*arguments, check=False)
        assert result.returncode == 6, arguments
        assert "controller start" in result.stderr


def test_control_views_fit_80_columns(hosts: Hosts, controller: Controller, send: Send) -> None:
    a, b = hosts
    controller.start(a.target)
    controller.run("job", "set", "a-name-of-thirty-one-characters", "--match", "src=10.0.0.0/8",
                   "--match", "command=python3 -m torch.distributed.run*")  # fmt: skip
    send(a, b, 0, 5)
    for arguments in (
        ("status",), ("class", "show"), ("job", "list"),
        ("job", "show", "a-name-of-thirty-one-characters"),
    ):  # fmt: skip
        text = controller.run(*arguments).stdout
        assert max(map(len, text.splitlines())) <= 80, text


def test_a_pause_ends_an_iteration_and_its_bytes_are_reported(
    hosts: Hosts, controller: Controller, send: Send
) -> None:
    a, b = hosts
    controller.start(a.target)
    controller.run("job", "set", "train", "--match", f"dst={b.address}", "--gap", "2s")
    send(a, b, 0, 1)
    wait_for_flow(controller, "train")
    send(a, b, 1, 50)
    time.sleep(2.2)
    send(a, b, 51, 3)
    wait(lambda: job(controller, "train")["last_iteration"])
    shown = job(controller, "train")
    last = shown["last_iteration"]
    # The very first packet was seen before its flow was known to be the job's.
    assert last["sent_bytes"] == 50 * 256
    assert last["period_ns"] >= 2_000_000_000 > last["window_ns"] > 0
    assert shown["iteration"] == last["number"] + 1
    assert shown["iteration_bytes"] == 3 * 256


def test_qdisc_setup_takes_the_running_controllers_classes_and_it_notices_at_once(
    hosts: Hosts, controller: Controller
) -> None:
    a, _ = hosts
    controller.start(a.target)
    controller.run("job", "set", "train", "--match", "dst=10.0.0.0/8")
    controller.run("class", "set", "6", "--floor", "0.2", "--ceiling", "0.5")
    before = a.network_state()[1]
    try:
        controller.run("qdisc", "setup", a.target, "--rate", "80mbit")
        classes = {e["number"]: e for e in controller.json("qdisc", "show", a.target)["classes"]}
        assert classes[6]["floor_Bps"] == 2_000_000
        assert classes[6]["ceiling_Bps"] == 5_000_000
        entry = interface(controller, a)
        assert entry["control"]["link_Bps"] == 10_000_000
        assert (entry["qdisc"]["ours"], entry["qdisc"]["kind"]) == (True, "htb")
    finally:
        controller.run("qdisc", "clear", a.target)
    assert a.network_state()[1] == before
    assert interface(controller, a)["control"]["link_Bps"] == 0
