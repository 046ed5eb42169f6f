"""Files are written whole, by force only, and devices are written to, never replaced."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from controller.errors import UsageError
from controller.files import check_writable, write_text


def full(*_arguments: object, **_options: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_is_replaced_by_force_only_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write_text(path, "one", force=False)
    with pytest.raises(UsageError, match="exists"):
        write_text(path, "two", force=False)
    path.chmod(0o640)
    write_text(path, "three", force=True)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("three", 0o640)
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    write_text(tmp_path / "link", "text", force=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "text"


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(path, "text", force=True)
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert path.is_fifo()


def test_a_full_disk_is_told_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    path.write_text("old")
    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(UsageError, match="out cannot be written: No space left on device"):
        write_text(path, "new", force=True)
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_a_full_device_is_told_and_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "device"
    os.mkfifo(path)
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UsageError, match="device cannot be written: No space left on device"):
        write_text(path, "new", force=True)
    assert path.is_fifo()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "is a folder"),
        ("nowhere/out", "nowhere does not exist"),
        ("x" * 300, "File name too long"),
        ("x" * 300 + "/out", "File name too long"),
    ],
)
def test_what_cannot_be_written_is_refused_early(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_writable(tmp_path / name, force=True)
