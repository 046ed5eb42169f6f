"""Files that commands write: whole or not at all, and never over another by accident."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from controller.errors import UsageError


def check_writable(path: Path, force: bool) -> None:
    """Refuse early what `write_text` would refuse after long work.

    Parameters
    ----------
    path
        Of the file.
    force
        Whether an existing file may be replaced.

    Raises
    ------
    UsageError
        The file exists and `force` is not set, it is a folder, or its folder is not there or
        cannot be written to.
    """
    folder = path.parent
    try:
        # Both raise where a name is too long.
        exists, is_folder = path.exists(), path.is_dir()
        has_folder = folder.is_dir()
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from None
    if is_folder:
        raise UsageError(f"{path} is a folder.", "Give the name of a file in it.")
    if exists and not force:
        raise UsageError(f"{path} exists.", "Add --force to overwrite it.")
    if not has_folder:
        raise UsageError(f"The folder {folder} does not exist.", "Make it first.")
    place = path if exists and not path.is_file() else folder
    if not os.access(place, os.W_OK):
        raise UsageError(f"{place} cannot be written to.", "Name another file.")


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
        See `check_writable`; or the file cannot be written, as on a full disk.
    """
    check_writable(path, force)
    temporary = None
    try:
        target = path.resolve()
        # A device or a pipe (/dev/stdout) can only be written to, not replaced.
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".stlr-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
        Path(temporary).chmod(mode)
        Path(temporary).replace(target)
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _unwritable(path: Path, error: Exception) -> UsageError:
    name = str(path) if len(str(path)) <= 200 else f"{str(path)[:200]}..."
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return UsageError(f"{name} cannot be written: {reason}.", "Name another file.")


def _umask() -> int:
    # There is no other way to read it than to set it.
    mask = os.umask(0)
    os.umask(mask)
    return mask
