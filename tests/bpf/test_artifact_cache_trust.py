"""What others may have written, or is damaged, is not loaded into the kernel."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from controller.dataplane.artifact_cache import open_cache
from tests.bpf.cached import NOBODY, Compiler, build, entries


def spoil_owner(entry: Path) -> None:
    os.chown(entry, NOBODY, NOBODY)


def spoil_directory_owner(entry: Path) -> None:
    os.chown(entry.parent, NOBODY, -1)


def link_elsewhere(entry: Path) -> None:
    other = entry.parent.with_name("elsewhere")
    entry.rename(other)
    entry.symlink_to(other)


def put_a_pipe(entry: Path) -> None:
    entry.unlink()
    os.mkfifo(entry, 0o600)


def change_an_instruction(entry: Path) -> None:
    entry.write_bytes(entry.read_bytes().replace(b"twAAAA", b"twABAA"))


def of_another_key(entry: Path) -> None:
    with open_cache(entry.parent) as cache:
        assert cache
        document = cache.load(entry.name)
        assert document
        cache.store("0" * 40, document)
    entry.with_name("0" * 40).rename(entry)


def without_programs(entry: Path) -> None:
    with open_cache(entry.parent) as cache:
        assert cache
        document = cache.load(entry.name)
        assert document
        cache.store(entry.name, {"maps": [], "compiler": document["compiler"]})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_owner, "belongs to user 65534, expected"),
        (lambda entry: entry.chmod(0o620), "others may write it (mode 0620)"),
        (lambda entry: entry.chmod(0o602), "others may write it (mode 0602)"),
        (link_elsewhere, "damaged"),
        (put_a_pipe, "no regular file"),
        (spoil_directory_owner, "belongs to user 65534, expected"),
        (lambda entry: entry.parent.chmod(0o720), "others may write it (mode 0720)"),
        (lambda entry: entry.parent.chmod(0o1777), "others may write it (mode 1777)"),
        (lambda entry: entry.parent.parent.chmod(0o777), "others may write"),
        (change_an_instruction, "checksum"),
        (lambda entry: entry.write_bytes(entry.read_bytes()[:-1]), "checksum"),
        (lambda entry: entry.write_bytes(b""), "damaged"),
        (lambda entry: entry.write_bytes(b"\xff\n\xff\n\xff"), "damaged"),
        (of_another_key, "another key"),
        (without_programs, "cannot be used"),
    ],
    ids=[
        "owner", "group-write", "other-write", "symbolic-link", "pipe", "directory-owner",
        "directory-group-write", "directory-like-tmp", "parent-open", "changed", "cut", "empty",
        "binary", "other-key", "no-programs",
    ],
)  # fmt: skip
def test_what_others_may_have_written_or_is_damaged_is_compiled_anew_and_the_log_tells(
    root: None,
    place: Path,
    compiler: Compiler,
    caplog: pytest.LogCaptureFixture,
    spoil: Any,
    words: str,
) -> None:
    first = build()
    (entry,) = entries(place)
    try:
        with caplog.at_level(logging.INFO):
            spoil(entry)
            assert build() == first
    finally:
        place.parent.chmod(0o700)
    assert compiler.runs == 2
    assert words in caplog.text
    assert caplog.text.count("anew") == 1


def test_a_damaged_entry_is_replaced_by_a_good_one(place: Path, compiler: Compiler) -> None:
    build()
    (entry,) = entries(place)
    entry.write_bytes(b"")
    build()
    build()
    assert compiler.runs == 2
