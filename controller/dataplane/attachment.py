"""What is attached where: the record that outlives the process."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from controller.errors import UsageError

# Ingress hooks: XDP in the driver, XDP behind the driver, tc.
MODES = ("native", "generic", "tc")


def parse_target(text: str) -> tuple[str, str]:
    """``NETNS:IF`` or ``IF`` -> (namespace, interface); "" is the current namespace."""
    netns, separator, name = text.rpartition(":")
    # A namespace is a file of that name in /run/netns.
    is_file_name = netns not in (".", "..") and "/" not in netns and len(os.fsencode(netns)) < 256
    if not name or (separator and not netns) or not is_file_name or "\0" in text:
        raise UsageError(
            f"Interface {text!r} is not of the form IF or NETNS:IF.", "Example: -i host1:eth0"
        )
    return netns, name


@dataclass
class Attachment:
    """What is attached to one interface; kept in the state file while it lasts.

    ``drops_before`` are the host's drop counters at the time of attaching; ``acts``: its
    programs act on packets of jobs, and do not only observe.
    """

    port: int
    netns: str
    netns_inode: int
    interface: str
    ifindex: int
    mode: str
    clsact_is_ours: bool
    drops_before: dict[str, int] = field(default_factory=dict)
    acts: bool = False

    @property
    def label(self) -> str:
        """``netns:interface``, or the interface alone in the first namespace."""
        return f"{self.netns}:{self.interface}" if self.netns else self.interface

    def to_json(self) -> dict[str, Any]:
        """Members by name."""
        return asdict(self)
