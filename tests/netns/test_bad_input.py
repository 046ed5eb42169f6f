"""Wrong input: one paragraph that names the thing and the remedy, and nothing attached."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import Controller, Host, sh

Hosts = tuple[Host, Host]


def refused(controller: Controller, *arguments: str) -> tuple[int, str]:
    result = controller.run(*arguments, check=False)
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    return result.returncode, result.stderr


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nowhere:eth0", ["no network namespace 'nowhere'", "there are:"]),
        ("{netns}:eth7", ["no interface 'eth7'", "eth0"]),
        (":eth0", ["NETNS:IF"]),
        ("{netns}:", ["NETNS:IF"]),
    ],
)
def test_an_unknown_target_is_named(
    hosts: Hosts, controller: Controller, target: str, words: list[str]
) -> None:
    before = hosts[0].network_state()
    code, text = refused(
        controller, "start", "--detach", "-i", hosts[0].target,
        "-i", target.format(netns=hosts[0].netns),
    )  # fmt: skip
    assert code == 2
    for word in words:
        assert word in text
    assert hosts[0].network_state() == before


def test_a_start_without_any_interface_says_how_to_name_one(controller: Controller) -> None:
    code, text = refused(controller, "start")
    assert code == 2
    assert "-i [NETNS:]IF" in text


def test_an_unknown_mode_lists_the_known_ones(controller: Controller) -> None:
    code, text = refused(controller, "start", "-i", "eth0", "--mode", "fast")
    assert code == 2
    assert "native" in text and "generic" in text and "tc" in text


_FOREIGN = """
import ctypes, os, sys, time
from controller.dataplane import libbpf, loader
from controller.dataplane.netns import in_netns
# r0 = XDP_PASS; exit
code = bytes.fromhex("b700000002000000" "9500000000000000")
fd = libbpf.prog_load(libbpf.PROG_TYPE_XDP, "someone_else", code, libbpf.BPF_F_XDP_HAS_FRAGS)
netns, name = sys.argv[1:]
def work():
    import socket
    libbpf.xdp_attach(socket.if_nametoindex(name), fd, libbpf.XDP_FLAGS_DRV_MODE)
in_netns(netns, work)
"""


def test_a_foreign_xdp_program_is_named_and_stays(hosts: Hosts, controller: Controller) -> None:
    a, b = hosts
    subprocess.run([sys.executable, "-c", _FOREIGN, a.netns, a.interface], check=True)
    before = [host.network_state() for host in hosts]
    code, text = refused(controller, "start", "--detach", "-i", b.target, "-i", a.target)
    assert code == 5
    assert "someone_else" in text and "--mode tc" in text
    assert [host.network_state() for host in hosts] == before
    # ... and the way around that the error names works
    controller.start(a.target, extra=("--mode", "tc"))
    assert "someone_else" in a.sh("ip -d link show dev eth0")
    controller.run("stop")
    assert a.network_state() == before[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[observe]\nmax_flow = 5\n", ["observe.max_flow", "unknown", "max_flows"]),
        ("[observe]\nmax_flows = 1\n", ["observe.max_flows", "is 1", "64 .."]),
        ("[observe]\nmax_flows = 'many'\n", ["observe.max_flows", "'many'"]),
        ("[observer]\n", ["observer", "unknown", "observe, interface"]),
        ("[[interface]]\nmode = 'tc'\n", ["interface[1].name", "missing"]),
        ("[[interface]]\nname = 'a'\nmode = 'x'\n", ["interface[1].mode", "'x'", "native"]),
        ("[interface]\nname = 'a'\n", ["[[interface]]"]),
        ("observe = 3\n", ["observe", "a table"]),
        ("[observe\n", ["not TOML"]),
        ("[[class]]\nnumber = 2\ndscp = 64\n", ["class[1].dscp is 64", "0 .. 63"]),
        ("[[class]]\nnumber = 2\ndscp = 26\n", ["Classes 2 and 4 both have dscp 26"]),
        ("[[class]]\nnumber = 2\nfloor = 0.7\n", ["key class", "110%", "up to 100 %"]),
        ("[[class]]\nnumber = 2\nkmin = '2MB'\nkmax = '1MB'\n", ["class[1]", "above kmax"]),
        ("[[job]]\nname = 'a'\nrate = '0mbit'\n", ["job[1].rate is '0mbit'", "8 kbit/s .. "]),
        ("[[job]]\nname = 'a'\n[[job]]\nname = 'a'\n", ["Job a stands twice"]),
        ("[[job]]\nname = 'a'\nmatch.src = 'b'\n", ["job[1].match.src", "10.0.0.0/24"]),
        ("[[interface]]\nname = 'a'\nmark = 'x'\n", ["interface[1].mark", "window, instant"]),
        ("[laxity]\nthresholds = ['1s']\n", ["laxity.thresholds", "7 durations"]),
        ("[dcqcn]\ng = 0\n", ["dcqcn.g is 0", "above 0 .. 1"]),
    ],
)
def test_a_wrong_configuration_names_file_key_and_what_is_allowed(
    controller: Controller, tmp_path: Path, text: str, words: list[str]
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    code, message = refused(controller, "start", "--config", str(path))
    assert code == 2
    assert str(path) in message
    for word in words:
        assert word in message


def test_a_wrong_configuration_attaches_nothing(
    hosts: Hosts, controller: Controller, tmp_path: Path
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(
        f"[[interface]]\nname = '{hosts[0].target}'\n"
        "[[class]]\nnumber = 2\nkmin = '2MB'\nkmax = '1MB'\n"
    )
    before = hosts[0].network_state()
    code, message = refused(controller, "start", "--detach", "--config", str(path))
    assert code == 2
    assert "above kmax" in message
    assert hosts[0].network_state() == before
    assert not controller.run_dir.exists() or not list(controller.run_dir.glob("state.*"))


def test_a_configuration_file_starts_the_interfaces_it_names(
    hosts: Hosts, controller: Controller, tmp_path: Path
) -> None:
    path = tmp_path / "stellar.toml"
    path.write_text(
        f"[observe]\nmax_flows = 1000\nidle_flow_s = 0\n"
        f"[[interface]]\nname = '{hosts[0].target}'\nmode = 'tc'\n"
    )
    controller.start(extra=("--config", str(path)))
    status = controller.json("status")
    assert status["max_flows"] == 1000
    assert [(e["interface"], e["mode"]) for e in status["interfaces"]] == [(hosts[0].target, "tc")]


def test_without_a_controller_the_reports_say_how_to_start_one(controller: Controller) -> None:
    for command in (["status"], ["flows"], ["top"], ["explain", "x"], ["attach", "eth0"]):
        code, text = refused(controller, *command)
        assert code == 6
        assert "controller start" in text


def test_without_root_the_privilege_is_named(tmp_path: Path) -> None:
    result = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable,
         "-m", "controller", "--run-dir", "/tmp/stellar-nobody", "start", "-i", "lo"],
        capture_output=True, text=True, check=False, cwd="/",
    )  # fmt: skip
    assert result.returncode == 3, result.stderr
    assert "uid 65534" in result.stderr and "sudo" in result.stderr


def test_a_damaged_state_file_is_named_and_nothing_is_touched(
    hosts: Hosts, controller: Controller
) -> None:
    controller.run_dir.mkdir(mode=0o700)
    state = controller.run_dir / "state.json"
    state.write_text("{")
    before = hosts[0].network_state()
    code, text = refused(controller, "start", "--detach", "-i", hosts[0].target)
    assert code == 1
    assert str(state) in text
    assert hosts[0].network_state() == before
    assert state.read_text() == "{"
    state.unlink()


def test_an_interface_that_is_not_ethernet_is_refused(hosts: Hosts, controller: Controller) -> None:
    sh(f"ip -n {hosts[0].netns} tuntap add mode tun name tun0")
    code, text = refused(controller, "start", "--detach", "-i", f"{hosts[0].netns}:tun0")
    assert code == 2
    assert "not Ethernet" in text


def test_requests_to_the_control_socket_are_bounded_and_validated(
    hosts: Hosts, controller: Controller
) -> None:
    import json
    import socket

    controller.start(hosts[0].target)
    path = str(controller.run_dir / "control.sock")

    def ask(data: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(path)
            connection.settimeout(20)
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                return connection.recv(65536)
            except ConnectionError:
                return b""

    for data in (b"", b"\n", b"[]\n", b"{}\n", b'{"command": "dance"}\n', b"\xff\xfe\n",
                 b'{"command": "attach", "arguments": 7}\n',
                 b'{"command": "attach", "arguments": {}}\n'):  # fmt: skip
        assert "not understood" in json.loads(ask(data))["error"]
    assert ask(b"x" * 200_000 + b"\n") == b""
    assert controller.json("status")["running"]
