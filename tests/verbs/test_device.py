"""Opening a device where there is none."""

from __future__ import annotations

import subprocess
import sys


def test_without_any_rdma_device_the_error_says_how_to_make_one() -> None:
    """In a network namespace of its own nothing is there, whatever the machine has."""
    code = (
        "from controller.errors import StellarError\n"
        "from controller.verbs.device import Device\n"
        "try:\n"
        "    Device()\n"
        "except StellarError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    result = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith("DeviceError There is no RDMA device")
    assert "rdma link add" in result.stdout
