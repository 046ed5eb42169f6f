"""What needs no RDMA device: choosing a GID, checking a peer's parameters, naming a status."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest

from controller.errors import InputError
from controller.verbs.device import Gid, address_of_gid, choose_gid
from controller.verbs.enums import status_name, verbs
from controller.verbs.queue_pair import Endpoint

LINK_LOCAL, GLOBAL6, IPV4 = "fe80::1", "fd00:77::1", "::ffff:10.0.0.1"


def gids(*texts: str) -> list[Gid]:
    return [Gid(index, text, address_of_gid(text)) for index, text in enumerate(texts)]


def test_an_ipv4_address_travels_as_a_mapped_one() -> None:
    assert address_of_gid("0000:0000:0000:0000:0000:ffff:0a4d:0001") == ipaddress.ip_address(
        "10.77.0.1"
    )


@pytest.mark.parametrize(
    ("table", "wish", "chosen"),
    [
        ((LINK_LOCAL, IPV4), {}, 1),
        ((LINK_LOCAL, GLOBAL6, IPV4), {}, 2),
        ((IPV4, LINK_LOCAL, GLOBAL6), {"family": 6}, 2),
        ((LINK_LOCAL,), {}, 0),
        ((LINK_LOCAL, IPV4), {"address": "fe80::1"}, 0),
        ((LINK_LOCAL, IPV4), {"address": "10.0.0.1"}, 1),
        ((IPV4, "::ffff:10.0.0.2"), {"address": "10.0.0.2"}, 1),
        ((IPV4, "::ffff:10.0.0.2"), {}, 0),
    ],
)
def test_a_gid_is_chosen_by_routability_and_family_and_not_by_number(
    table: tuple[str, ...], wish: dict[str, Any], chosen: int
) -> None:
    found = choose_gid(gids(*table), **wish)
    assert found is not None
    assert found.index == chosen


@pytest.mark.parametrize("wish", [{"address": "10.0.0.9"}, {"family": 6}])
def test_no_gid_is_chosen_when_none_fits(wish: dict[str, Any]) -> None:
    assert choose_gid(gids(IPV4), **wish) is None


GOOD = {"qpn": 17, "psn": 12345, "gid": IPV4, "mtu_bytes": 4096}


def test_an_endpoint_is_read_as_it_was_written() -> None:
    endpoint = Endpoint.from_json(GOOD, "Rank 3")
    assert Endpoint.from_json(endpoint.to_json(), "Rank 3") == endpoint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qpn", 0), ("qpn", 1), ("qpn", 1 << 24), ("qpn", "17"), ("qpn", True), ("qpn", None),
        ("psn", -1), ("psn", 1 << 24), ("psn", 1.5),
        ("gid", "not a gid"), ("gid", 7), ("gid", "::"), ("gid", "ff02::1"),
        ("mtu_bytes", 1500), ("mtu_bytes", 128), ("mtu_bytes", 8192),
    ],
)  # fmt: skip
def test_a_peers_parameter_out_of_range_is_an_error_that_names_it(key: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"Rank 3 sent {key} = "):
        Endpoint.from_json({**GOOD, key: value}, "Rank 3")


def test_statuses_have_the_names_and_numbers_of_verbs_h() -> None:
    names = [name for name in dir(verbs) if name.startswith("IBV_WC_") and name.endswith("_ERR")]
    assert len(names) > 15
    for name in [*names, "IBV_WC_SUCCESS"]:
        assert f"IBV_WC_{status_name(getattr(verbs, name))}" == name
    assert status_name(999) == "status 999"
