"""Files that `controller trace` writes: whole or not at all, and never over another by accident."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from controller.errors import InputError, UsageError
from controller.iteration.series import SyncWindow, Trace
from controller.iteration.traces import require_times
from controller.iteration.traces.table_csv import collectives_csv, windows_csv


def trace_csv(
    trace: Trace, windows: Sequence[SyncWindow], as_windows: bool, name: str
) -> tuple[str, int]:
    """A trace as CSV that `read_trace` reads again.

    Parameters
    ----------
    trace, windows
        As read, and the sync windows in it.
    as_windows
        Write windows. A trace that has windows of its own is written so in any case: they are not
        to be found again in its collectives.
    name
        What errors call the trace.

    Returns
    -------
    tuple of str and int
        The text, and its rows.

    Raises
    ------
    InputError
        The trace has no times, or windows are asked for and none were found.
    """
    require_times(trace, name)
    if as_windows or trace.windows:
        if not windows:
            raise InputError(
                f"{name}: no sync window was found in {len(trace.collectives)} collectives.",
                "Leave --windows out to write the collectives.",
            )
        return windows_csv(windows), len(windows)
    return collectives_csv(trace.collectives), len(trace.collectives)


def check_writable(path: Path, force: bool) -> None:
    """Refuse early what `write_text` would refuse after a long read.

    Raises
    ------
    UsageError
        The file exists and `force` is not set, or its folder does not exist.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder.", "Give the name of a file in it.")
    if path.exists() and not force:
        raise UsageError(f"{path} exists.", "Add --force to overwrite it.")
    if not path.parent.is_dir():
        raise UsageError(f"The folder {path.parent} does not exist.", "Make it first.")


def write_text(path: Path, text: str, force: bool) -> None:
    """Write a file in one step: readers see the old one or the new one, never a part.

    Parameters
    ----------
    path
        Where; a link is followed.
    text
        The whole content.
    force
        Whether an existing file is replaced.

    Raises
    ------
    UsageError
        See `check_writable`; or the folder cannot be written to.
    """
    check_writable(path, force)
    target = path.resolve()
    # A device or a pipe (/dev/stdout) can only be written to, not replaced.
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")
        return
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
        Path(temporary).chmod(mode)
        Path(temporary).replace(target)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _umask() -> int:
    # There is no other way to read it than to set it.
    mask = os.umask(0)
    os.umask(mask)
    return mask
