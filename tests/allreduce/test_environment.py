"""What launchers set, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from controller.allreduce.environment import (
    Master,
    Placement,
    TlsFiles,
    first_host,
    insecure_allowed,
)
from controller.errors import UsageError

Environ = Mapping[str, str]

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08],gpu11",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, Placement(5, 8, 1, Master("node0", 29500))),
        # An IPv6 address has no brackets in MASTER_ADDR.
        (
            TORCHRUN | {"MASTER_ADDR": "fd00::1"},
            Placement(5, 8, 1, Master("fd00::1", 29500)),
        ),
        (TORCHRUN | {"MASTER_ADDR": "unix:/run/x"}, Placement(5, 8, 1, Master(path="/run/x"))),
        # torchrun's agent listens on MASTER_PORT itself.
        (
            TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
            Placement(5, 8, 1, Master("node0", 29501)),
        ),
        (
            TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "STELLAR_MASTER_PORT": "7"},
            Placement(5, 8, 1, Master("node0", 7)),
        ),
        (
            TORCHRUN | {"STELLAR_MASTER_ADDR": "unix:/run/s"},
            Placement(5, 8, 1, Master(path="/run/s")),
        ),
        (SLURM, Placement(3, 4, 1, Master("gpu07", 20000 + 4711 * 37 % 10000))),
        (
            SLURM | {"MASTER_ADDR": "m", "MASTER_PORT": "1"},
            Placement(3, 4, 1, Master("m", 1)),
        ),
        (
            OPEN_MPI | {"MASTER_ADDR": "m", "MASTER_PORT": "65535"},
            Placement(2, 3, 0, Master("m", 65535)),
        ),
        # mpirun inside a Slurm allocation, torchrun inside srun.
        (
            SLURM | OPEN_MPI | {"MASTER_ADDR": "m", "MASTER_PORT": "1"},
            Placement(2, 3, 0, Master("m", 1)),
        ),
        (SLURM | TORCHRUN, Placement(5, 8, 1, Master("node0", 29500))),
        # A batch script has a size and no rank: not a launched process.
        (
            {"SLURM_NTASKS": "9"} | TORCHRUN,
            Placement(5, 8, 1, Master("node0", 29500)),
        ),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Placement(0, 1, 0, None)),
    ],
)
def test_a_launchers_variables_give_the_place(environ: Environ, expected: Placement) -> None:
    assert Placement.from_environment(environ) == expected


@pytest.mark.parametrize(
    ("address", "local_rank"),
    [("127.0.0.1", 3), ("localhost", 3), ("::1", 3), ("unix:/x", 3), ("10.0.0.1", 0), ("host", 0)],
)
def test_without_a_local_rank_it_is_the_rank_on_one_host_and_0_across_hosts(
    address: str, local_rank: int
) -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": address, "MASTER_PORT": "1"}
    assert Placement.from_environment(environ).local_rank == local_rank


def test_arguments_win_over_variables() -> None:
    found = Placement.from_environment(
        TORCHRUN, rank=1, size=2, local_rank=0, master="unix:/run/other"
    )
    assert found == Placement(1, 2, 0, Master(path="/run/other"))
    assert Placement.from_environment(TORCHRUN, local_rank=0).local_rank == 0
    # Another launcher's local rank says nothing about a rank that was given.
    assert Placement.from_environment(TORCHRUN, rank=1, size=2).local_rank == 0


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({}, ["none of RANK, WORLD_SIZE"]),
        ({"RANK": "1"}, ["RANK=1", "WORLD_SIZE is not set"]),
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "RANK is not set"]),
        ({"SLURM_NTASKS": "4"}, ["SLURM_NTASKS=4"]),
        ({"OMPI_COMM_WORLD_RANK": "1"}, ["OMPI_COMM_WORLD_RANK=1", "SIZE is not set"]),
        (TORCHRUN | {"WORLD_SIZE": "4"}, ["Rank 5", "group of 4", "RANK=5, WORLD_SIZE=4"]),
        (TORCHRUN | {"WORLD_SIZE": "0"}, ["0 ranks", "WORLD_SIZE=0"]),
        (TORCHRUN | {"WORLD_SIZE": "70000"}, ["70000 ranks", "65536"]),
        (TORCHRUN | {"RANK": "-1"}, ["RANK is '-1'"]),
        (TORCHRUN | {"RANK": "٣"}, ["RANK is"]),
        (TORCHRUN | {"WORLD_SIZE": "eight"}, ["WORLD_SIZE is 'eight'"]),
        (TORCHRUN | {"LOCAL_RANK": "9"}, ["Local rank 9", "LOCAL_RANK=9"]),
        (TORCHRUN | {"MASTER_PORT": "0"}, ["node0:0", "1 .. 65535"]),
        (TORCHRUN | {"MASTER_PORT": "70000"}, ["node0:70000"]),
        (TORCHRUN | {"MASTER_PORT": "x"}, ["MASTER_PORT is 'x'"]),
        (TORCHRUN | {"MASTER_ADDR": "unix:"}, ["unix:"]),
        (TORCHRUN | {"MASTER_ADDR": "unix:relative"}, ["no absolute path"]),
        (TORCHRUN | {"MASTER_ADDR": "unix:/" + "x" * 107}, ["107 bytes"]),
        (TORCHRUN | {"MASTER_ADDR": ""}, ["MASTER_PORT=29500", "no address"]),
        (OPEN_MPI, ["rank 0 of 3", "OMPI_COMM_WORLD_RANK=2", "mpirun -x"]),
        (OPEN_MPI | {"MASTER_ADDR": "m"}, ["MASTER_ADDR=m", "no port"]),
        (SLURM | {"SLURM_STEP_NODELIST": "[01-02"}, ["[01-02"]),
    ],
)
def test_half_a_set_or_values_that_cannot_be_are_refused_by_name(
    environ: Environ, parts: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        Placement.from_environment(environ)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("given", [{"rank": 1}, {"size": 2}])
def test_a_rank_without_a_size_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="both or neither"):
        Placement.from_environment(TORCHRUN, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hostlist", "host"),
    [
        ("login", "login"),
        ("a,b", "a"),
        ("gpu[007-009,12],login", "gpu007"),
        ("gpu[12,14]", "gpu12"),
        ("r[1-2]n[05-06].x", "r1n05.x"),
        ("node-1.example.org,node-2", "node-1.example.org"),
    ],
)
def test_the_first_host_of_a_slurm_list_is_found(hostlist: str, host: str) -> None:
    assert first_host(hostlist) == host


@pytest.mark.parametrize("hostlist", ["", ",a", "a[1", "a]", "[]", "a b", "a[x-y]"])
def test_what_is_no_slurm_list_is_refused(hostlist: str) -> None:
    with pytest.raises(UsageError, match="host list"):
        first_host(hostlist)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h:1", Master("h", 1)),
        ("10.0.0.1:80", Master("10.0.0.1", 80)),
        ("[fd00::1]:80", Master("fd00::1", 80)),
        ("unix:/a:b", Master(path="/a:b")),
    ],
)
def test_a_masters_text_is_read_and_written_alike(text: str, expected: Master) -> None:
    assert Master.parse(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize("text", ["", "h", "h:", ":1", "fd00::1", "h:1:2", "[]:1", "unix:"])
def test_what_is_no_master_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Master.parse(text)


def test_tls_files_come_all_three_or_not_at_all() -> None:
    all_three = {"STELLAR_TLS_CA": "a", "STELLAR_TLS_CERT": "b", "STELLAR_TLS_KEY": "c"}
    assert TlsFiles.from_environment({}) is None
    assert TlsFiles.from_environment(all_three) == TlsFiles("a", "b", "c")
    for name in all_three:
        with pytest.raises(UsageError, match=f"missing: {name}"):
            TlsFiles.from_environment({**all_three, name: ""})


@pytest.mark.parametrize(
    ("value", "allowed"), [(None, False), ("", False), ("0", False), ("1", True)]
)
def test_only_1_allows_an_insecure_rendezvous(value: str | None, allowed: bool) -> None:
    environ = {} if value is None else {"STELLAR_INSECURE_RENDEZVOUS": value}
    assert insecure_allowed(environ) is allowed
    with pytest.raises(UsageError, match="STELLAR_INSECURE_RENDEZVOUS is 'yes'"):
        insecure_allowed({"STELLAR_INSECURE_RENDEZVOUS": "yes"})
