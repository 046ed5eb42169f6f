"""Fixtures that several folders share: the dataplane's programs, compiled and loaded once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from controller.dataplane import layout
from controller.dataplane.compile import Artifact, compile_programs
from controller.dataplane.loader import (
    TC_EGRESS,
    TC_INGRESS,
    XDP_INGRESS,
    Dataplane,
    compile_dataplane,
)
from tests.acting import Acting
from tests.hook import MAX_FLOWS, PACKET_MEMBERS, VERDICTS, Hook, Replay, clear, run_c
from tests.hosts import Controller

# An example's time says something of the machine, and a machine may stand still for longer than
# the 200 ms that hypothesis allows.
settings.register_profile(
    "patient", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    """A controller with a run directory of its own, not started yet; stopped afterwards."""
    instance = Controller(tmp_path / "run")
    try:
        yield instance
    finally:
        instance.close()


@pytest.fixture(scope="session")
def root() -> None:
    """Tests that load BPF programs stop here when they may not."""
    if os.geteuid():
        pytest.exit("These tests load BPF programs: run them as root (sudo).", returncode=2)


@pytest.fixture(scope="session")
def artifact(root: None) -> Artifact:
    """The dataplane's programs, compiled once."""
    return compile_dataplane()


@pytest.fixture(scope="session")
def replay_artifact(root: None) -> Artifact:
    """The replay build of the XDP program."""
    defines = {"STELLAR_REPLAY": "1", "STELLAR_ALLOW_CUT": "1"}
    return compile_programs(["xdp_ingress.c"], [XDP_INGRESS], defines)


@pytest.fixture(scope="session")
def packet_dtype(tmp_path_factory: pytest.TempPathFactory) -> np.dtype:
    """Layout of struct roce_packet as gcc sees it."""
    tmp = tmp_path_factory.mktemp("roce_packet")
    lines = "".join(
        f'printf("%zu %zu\\n", offsetof(struct roce_packet, {name}),'
        f" sizeof(((struct roce_packet *)0)->{name}));"
        for name in PACKET_MEMBERS
    )
    output = run_c(
        tmp,
        "#include <stddef.h>\n#include <stdio.h>\n#include <linux/types.h>\n"
        '#include <linux/bpf.h>\n#include "roce.h"\n'
        f'int main(void) {{ {lines} printf("%zu\\n", sizeof(struct roce_packet)); }}\n',
    )
    *members, size = (line.split() for line in output.splitlines())
    return np.dtype(
        {
            "names": PACKET_MEMBERS,
            "formats": [
                layout.FLOW_KEY if name == "key" else f"<u{bytes_}"
                for name, (_, bytes_) in zip(PACKET_MEMBERS, members, strict=True)
            ],
            "offsets": [int(offset) for offset, _ in members],
            "itemsize": int(size[0]),
        }
    )


@pytest.fixture(scope="session")
def loaded(artifact: Artifact, packet_dtype: np.dtype) -> Iterator[dict[str, Hook]]:
    """The three programs on one port, sharing their maps."""
    dataplane = Dataplane(artifact, max_flows=MAX_FLOWS)
    hooks = {name: Hook(dataplane, name, packet_dtype) for name in VERDICTS}
    yield hooks
    for hook in hooks.values():
        hook.close()
    dataplane.close()


@pytest.fixture
def hooks(loaded: dict[str, Hook]) -> dict[str, Hook]:
    """The three programs with empty maps."""
    clear(loaded[XDP_INGRESS].dataplane)
    return loaded


@pytest.fixture(params=[XDP_INGRESS, TC_INGRESS, TC_EGRESS])
def hook(request: pytest.FixtureRequest, hooks: dict[str, Hook]) -> Hook:
    """Each of the three programs in turn."""
    return hooks[request.param]


@pytest.fixture
def xdp(hooks: dict[str, Hook]) -> Hook:
    """XDP ingress."""
    return hooks[XDP_INGRESS]


@pytest.fixture
def egress(hooks: dict[str, Hook]) -> Hook:
    """tc egress, with the maps of `xdp`."""
    return hooks[TC_EGRESS]


@pytest.fixture(scope="session")
def _acting(root: None, packet_dtype: np.dtype) -> Iterator[Acting]:
    dataplane = Dataplane(compile_dataplane({"STELLAR_TEST_CLOCK": "1"}), max_flows=MAX_FLOWS)
    acting = Acting(dataplane, packet_dtype)
    yield acting
    acting.close()
    dataplane.close()


@pytest.fixture
def acting(_acting: Acting) -> Acting:
    """The programs of a port that acts, on the test's own clock, with empty maps."""
    _acting.reset()
    return _acting


@pytest.fixture(scope="session")
def _replay(replay_artifact: Artifact, packet_dtype: np.dtype) -> Iterator[Replay]:
    dataplane = Dataplane(replay_artifact, max_flows=MAX_FLOWS)
    hook = Replay(dataplane, XDP_INGRESS, packet_dtype)
    yield hook
    hook.close()
    dataplane.close()


@pytest.fixture
def replay(_replay: Replay) -> Replay:
    """The replay build with empty maps."""
    clear(_replay.dataplane)
    return _replay
