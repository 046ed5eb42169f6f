"""Try out, in a process that ends afterwards, what the doctor wants to know.

``python -m controller.ops.probe network`` makes a network namespace of its own, tries
queueing disciplines and XDP on a veth pair there and ends, and the namespace with it:
nothing of the host's network is touched. ``... programs`` compiles the dataplane,
creates its maps (small ones) and loads its programs, without attaching them.

Prints one JSON object: step -> "" when it worked, else the reason why it did not.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_QDISCS = ("clsact", "fq", "htb", "netem")
_PROBE_FLOWS = 64
_VETH = "stellar-probe0"
# r0 = XDP_PASS; exit
_XDP_PASS_PROGRAM = bytes.fromhex("b700000002000000 9500000000000000")


def _tool(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line.strip() for line in (result.stderr or result.stdout).splitlines()]
        text = "; ".join(line for line in lines if line)
        raise OSError(text.removeprefix("Error: ").rstrip(".") or f"exit {result.returncode}")


def _unshare() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _try_qdisc(kind: str) -> None:
    if kind == "clsact":
        _tool("tc", "qdisc", "add", "dev", _VETH, "clsact")
        return
    _tool("tc", "qdisc", "add", "dev", _VETH, "root", "handle", "1:", kind)
    _tool("tc", "qdisc", "del", "dev", _VETH, "root")


def _try_native_xdp() -> None:
    import socket

    from controller.dataplane import libbpf

    fd = libbpf.prog_load(
        libbpf.PROG_TYPE_XDP, "stellar_probe", _XDP_PASS_PROGRAM, libbpf.BPF_F_XDP_HAS_FRAGS
    )
    try:
        libbpf.xdp_attach(socket.if_nametoindex(_VETH), fd, libbpf.XDP_FLAGS_DRV_MODE)
    finally:
        os.close(fd)


def _reason(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{error.filename} is not installed"
    if isinstance(error, OSError) and error.errno and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _network() -> dict[str, str]:
    steps: dict[str, Callable[[], None]] = {
        "namespace": _unshare,
        "veth": lambda: _tool(
            "ip", "link", "add", _VETH, "type", "veth", "peer", "name", "stellar-probe1"
        ),
    }
    result: dict[str, str] = {}
    for step, action in steps.items():
        try:
            action()
            result[step] = ""
        except Exception as error:  # the reason is the result
            result[step] = _reason(error)
            return result  # never go on outside a namespace of our own
    for kind in _QDISCS:
        try:
            _try_qdisc(kind)
            result[kind] = ""
        except Exception as error:
            result[kind] = _reason(error)
    try:
        _try_native_xdp()
        result["xdp"] = ""
    except Exception as error:
        result["xdp"] = _reason(error)
    return result


def _programs() -> dict[str, str]:
    from controller.dataplane.loader import KERNEL_NAMES, Dataplane, compile_dataplane

    result: dict[str, str] = {}
    try:
        artifact = compile_dataplane()
        result["compile"] = ""
    except Exception as error:
        return result | {"compile": _reason(error)}
    try:
        dataplane = Dataplane(artifact, max_flows=_PROBE_FLOWS)
        result["maps"] = ""
    except Exception as error:
        return result | {"maps": _reason(error)}
    try:
        for function in KERNEL_NAMES:
            os.close(dataplane.load(function, 0))
        result["load"] = ""
    except Exception as error:
        result["load"] = _reason(error)
    return result


def run_probe(what: str, timeout_s: float) -> dict[str, str]:
    """Run ``network`` or ``programs`` in a process of its own.

    Raises
    ------
    TimeoutError
        It took longer than `timeout_s`; it and its children are gone.
    RuntimeError
        It died; the message is the last line of its error output.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "controller.ops.probe", what],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, 9)
            raise TimeoutError(f"no answer within {timeout_s:.0f} s") from error
    if process.returncode:
        lines = errors.strip().splitlines() or [f"exit status {process.returncode}"]
        raise RuntimeError(lines[-1])
    answer: dict[str, str] = json.loads(output)
    return answer


def main() -> None:
    """Run the probe that the first argument names."""
    json.dump({"network": _network, "programs": _programs}[sys.argv[1]](), sys.stdout)


if __name__ == "__main__":
    main()
