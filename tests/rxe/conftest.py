"""Fixtures of the tests with real verbs traffic. They need rxe across network namespaces."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import Controller
from tests.rxe.verbs import Observed, RxeHost, Switch, rxe_pair, rxe_switched

_HOW = "run these with: scripts/lab run -- .venv/bin/python -m pytest tests/rxe"


@pytest.fixture(scope="session", autouse=True)
def rxe_kernel() -> None:
    """End the whole run, not skip, where the kernel cannot do it."""
    if os.geteuid():
        pytest.exit(f"tests/rxe need root; {_HOW}", returncode=2)
    try:
        with rxe_pair():
            pass
    except (AssertionError, OSError) as error:
        pytest.exit(
            f"this kernel ({os.uname().release}) has no rxe across namespaces ({error}); {_HOW}",
            returncode=2,
        )


@pytest.fixture(scope="module")
def rxe_hosts(rxe_kernel: None) -> Iterator[tuple[RxeHost, RxeHost]]:
    """Two hosts with soft-RoCE on one veth."""
    with rxe_pair() as hosts:
        yield hosts


@pytest.fixture(scope="module")
def switched_hosts(rxe_kernel: None) -> Iterator[tuple[Switch, list[RxeHost]]]:
    """Three hosts with soft-RoCE around a switch."""
    with rxe_switched(3) as result:
        yield result


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of the module's controller."""
    return tmp_path_factory.mktemp("controller") / "run"


@pytest.fixture(scope="module")
def observed(rxe_hosts: tuple[RxeHost, RxeHost], run_dir: Path) -> Iterator[Observed]:
    """The pair with a controller on both hosts."""
    yield from _observe(rxe_hosts, run_dir)


@pytest.fixture(scope="module")
def observed_switched(
    switched_hosts: tuple[Switch, list[RxeHost]], run_dir: Path
) -> Iterator[Observed]:
    """The switched hosts with a controller on all of them; the switch is not observed."""
    yield from _observe(switched_hosts[1], run_dir)


def _observe(hosts: tuple[RxeHost, ...] | list[RxeHost], run_dir: Path) -> Iterator[Observed]:
    controller = Controller(run_dir)
    try:
        controller.start(*(host.target for host in hosts))
        yield Observed(hosts, controller)
    finally:
        controller.close()
