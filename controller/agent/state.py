"""What has to survive the agent: which attachments are ours, and their maps' ids.

One small file in the run directory, replaced atomically and written *before* anything
is attached, so that a crash at any moment leaves a file that names at least all there is.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controller.dataplane import layout
from controller.dataplane.attachment import Attachment
from controller.errors import ConflictError, PrivilegeError, StellarError, UsageError

# sun_path of unix(7), with its closing zero.
_MAX_SOCKET_PATH_BYTES = 107
_FILES = {"state.json", "state.new", "control.sock", "controller.log", "lock"}


@dataclass
class State:
    """Contents of the state file. ``control``: classes and jobs, see `Steering.to_json`."""

    attachments: list[Attachment] = field(default_factory=list)
    map_ids: dict[str, int] = field(default_factory=dict)
    abi: int = layout.ABI
    control: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Members by name."""
        return {
            "abi": self.abi,
            "map_ids": self.map_ids,
            "attachments": [attachment.to_json() for attachment in self.attachments],
            "control": self.control,
        }


class RunDirectory:
    """The directory of one controller: state, lock, control socket, log. Owner only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state_path = path / "state.json"
        self.socket_path = path / "control.sock"
        self.log_path = path / "controller.log"
        self._lock_fd = -1

    def create(self) -> None:
        """Make the directory, for its owner only.

        Raises
        ------
        PrivilegeError
            It cannot be created, or belongs to somebody else.
        UsageError
            Its name is too long, or it is in use for something else.
        """
        if len(os.fsencode(self.socket_path.resolve())) > _MAX_SOCKET_PATH_BYTES:
            raise UsageError(
                f"Run directory {self.path} has too long a name for a socket in it.",
                "Name another one with --run-dir.",
            )
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.path.stat()
            if status.st_uid != os.geteuid():
                raise PrivilegeError(
                    f"Run directory {self.path} belongs to uid {status.st_uid}, not to "
                    f"{os.geteuid()}.",
                    "Name another one with --run-dir.",
                )
            if status.st_mode & 0o077:
                # Another's directory (--run-dir /tmp) must not be closed to its users.
                if {entry.name for entry in self.path.iterdir()} - _FILES:
                    raise UsageError(
                        f"Run directory {self.path} is open to others and holds other files.",
                        "Name an own one with --run-dir; it is created when it does not exist.",
                    )
                self.path.chmod(0o700)
        except OSError as error:
            raise PrivilegeError(
                f"Run directory {self.path} cannot be created: {error.strerror}.",
                "Run as root, or name another directory with --run-dir.",
            ) from error

    def lock(self) -> None:
        """Be the only controller here until the process ends.

        Raises
        ------
        ConflictError
            Another controller runs.
        """
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(fd, 32, 0).decode().strip()
            os.close(fd)
            raise ConflictError(
                f"A controller runs already in {self.path} (pid {pid or 'unknown'}).",
                "Use `controller attach` to add an interface, `controller stop` to end it, or "
                "--run-dir for a second one.",
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        self._lock_fd = fd

    def unlock(self) -> None:
        """Let another controller in."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def read_state(self) -> State | None:
        """State of this or an earlier controller, None when there is none.

        Raises
        ------
        StellarError
            The file is damaged.
        """
        try:
            document = json.loads(self.state_path.read_text())
            return State(
                [Attachment(**entry) for entry in document["attachments"]],
                {str(name): int(number) for name, number in document["map_ids"].items()},
                int(document["abi"]),
                dict(document.get("control", {})),
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StellarError(
                f"State file {self.state_path} is damaged: {error!r}.",
                "Look what is attached (`ip link`, `tc filter show`), then delete the file.",
            ) from error

    def write_state(self, state: State) -> None:
        """Replace the state file in one step."""
        temporary = self.state_path.with_suffix(".new")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(state.to_json(), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.state_path)

    def remove_state(self) -> None:
        """Nothing is attached any more."""
        self.state_path.unlink(missing_ok=True)
        self.socket_path.unlink(missing_ok=True)
