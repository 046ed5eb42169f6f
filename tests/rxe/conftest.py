"""Fixtures of the tests with real verbs traffic. They need rxe across network namespaces."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

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


@pytest.fixture(scope="session")
def rxe_hosts(rxe_kernel: None) -> Iterator[tuple[RxeHost, RxeHost]]:
    """Two hosts with soft-RoCE on one veth; `observed` has its controller on them."""
    with rxe_pair() as hosts:
        yield hosts


@pytest.fixture(scope="module")
def switched_hosts(rxe_kernel: None) -> Iterator[tuple[Switch, list[RxeHost]]]:
    """Three hosts with soft-RoCE around a switch."""
    with rxe_switched(3) as result:
        yield result


@pytest.fixture(scope="session")
def observed(
    rxe_hosts: tuple[RxeHost, RxeHost], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Observed]:
    """The pair with a controller on both hosts, started once: it takes seconds."""
    yield from _observe(rxe_hosts, tmp_path_factory)


@pytest.fixture(scope="module")
def observed_switched(
    switched_hosts: tuple[Switch, list[RxeHost]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Observed]:
    """The switched hosts with a controller on all of them; the switch is not observed."""
    yield from _observe(switched_hosts[1], tmp_path_factory)


def _observe(
    hosts: Sequence[RxeHost], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Observed]:
    controller = Controller(tmp_path_factory.mktemp("controller") / "run")
    try:
        controller.start(*(host.target for host in hosts))
        yield Observed(hosts, controller)
    finally:
        controller.close()
