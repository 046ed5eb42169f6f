"""Compiled programs are kept between starts, where that is possible."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.dataplane import artifact_cache, compile
from controller.dataplane.artifact_cache import MAX_ENTRIES, VARIABLE, cache_directory
from controller.dataplane.compile_key import system_headers
from controller.errors import UsageError
from tests.bpf.cached import NOBODY, SOURCE, Compiler, build, entries
from tests.hosts import sh


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of a program that a test may change."""
    return Path(shutil.copy(SOURCE, tmp_path / "copy.c"))


# ---- what is kept ----


def test_what_comes_from_the_cache_is_what_was_compiled(
    root: None, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real compiler, which the second call has not got."""
    first = build()
    (entry,) = entries(place)
    libraries = {Path(row[0]).name for row in json.loads(entry.read_bytes().split(b"\n", 2)[2])
                 ["compiler"]}  # fmt: skip
    assert any(name.startswith("libbcc") for name in libraries)
    assert any(name.startswith("libLLVM") for name in libraries)

    def fail(_: object) -> dict[str, Any]:
        raise AssertionError("it compiles again")

    monkeypatch.setattr(compile, "_compile_apart", fail)
    assert build() == first
    assert len(first.programs["push_tag"].instructions) > 16


def test_directory_and_files_are_for_their_owner_only(place: Path, compiler: Compiler) -> None:
    before = os.umask(0)
    try:
        build()
    finally:
        os.umask(before)
    assert place.stat().st_mode & 0o777 == 0o700
    for path in place.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path


def test_a_change_of_source_header_definition_or_compiler_compiles_anew(
    place: Path, compiler: Compiler, source: Path
) -> None:
    def runs_of(expected: int, **defines: str) -> None:
        build(source, **defines)
        build(source, **defines)
        assert compiler.runs == expected

    runs_of(1)
    source.write_text(source.read_text() + "\n#define MORE 1\n")
    runs_of(2)
    header = source.with_name("local.h")
    header.write_text("#define LOCAL 1\n")
    # An absolute path, as local includes are looked for below bpf/ only.
    source.write_text(f'#include "{header}"\n' + source.read_text())
    runs_of(3)
    header.write_text("#define LOCAL 2\n")
    runs_of(4)
    runs_of(5, STELLAR_TEST_CLOCK="1")
    compiler.file.write_bytes(b"version 2.0")
    runs_of(6)
    compiler.file.unlink()  # BCC is gone: what it made is not used, as nobody can tell
    with pytest.raises(FileNotFoundError):
        build(source)
    assert compiler.runs == 7


@pytest.mark.parametrize(
    "change",
    [
        ("controller.dataplane.compile_key.platform.release", lambda: "9.9.9"),
        ("controller.dataplane.compile_key.system_headers", lambda _: {"linux/bpf.h": b"newer"}),
        ("controller.dataplane.compile_key.layout.ABI", -1),
    ],
    ids=["kernel", "headers", "abi"],
)
def test_another_kernel_other_headers_or_another_abi_compile_anew(
    place: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, change: tuple[str, Any]
) -> None:
    build()
    monkeypatch.setattr(*change)
    build()
    assert compiler.runs == 2


def test_the_headers_of_the_system_are_found_through_one_another() -> None:
    found = system_headers("#include <uapi/linux/pkt_cls.h>\n")
    assert {"linux/pkt_cls.h", "linux/types.h", "asm/types.h", "asm-generic/types.h"} <= set(found)
    assert all(found.values())


def test_the_longest_unused_entries_go_and_abandoned_files_too(
    place: Path, compiler: Compiler
) -> None:
    build()
    (first,) = entries(place)
    other = [place / f"{number:040x}" for number in range(MAX_ENTRIES)]
    for age_s, path in enumerate(other, start=10):
        path.touch()
        os.utime(path, (time.time() - age_s,) * 2)
    os.utime(first, (1, 1))
    build()  # a use makes it the youngest
    old, young = place / ".new-1-old", place / ".new-1-young"
    for path in (old, young):
        path.touch()
    os.utime(old, (1, 1))
    build(STELLAR_TEST_CLOCK="1")
    left = entries(place)
    assert compiler.runs == 2
    assert young in left and old not in left
    assert first in left
    assert not {*other[-2:]} & {*left} and {*other[:-2]} <= {*left}
    assert len(left) == MAX_ENTRIES + 1  # and the young one


def test_eight_starts_at_once_compile_once_and_all_have_the_result(
    place: Path, compiler: Compiler
) -> None:
    compiler.seconds = 0.4
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def start() -> None:
        answers.put(build().programs["push_tag"].instructions)

    processes = [context.Process(target=start) for _ in range(8)]
    for process in processes:
        process.start()
    results = [answers.get() for _ in processes]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert compiler.runs == 1
    assert len(set(results)) == 1
    assert len(entries(place)) == 1


def test_a_process_that_hangs_while_it_compiles_does_not_stop_the_others(
    place: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_cache, "_LOCK_LIMIT_S", 0.2)
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def hang() -> None:
        def never(_: object) -> dict[str, Any]:
            ready.set()
            time.sleep(60)
            return {}

        monkeypatch.setattr(compile, "_compile_apart", never)
        build()

    process = context.Process(target=hang)
    process.start()
    try:
        assert ready.wait(30)
        build()
    finally:
        process.kill()
        process.join()
    assert compiler.runs == 1
    assert len(entries(place)) == 1


# ---- where it cannot be ----


@pytest.fixture
def small_disk(root: None, tmp_path: Path) -> Iterator[Path]:
    """A file system with place for a directory and hardly more."""
    path = tmp_path / "disk"
    path.mkdir()
    sh(f"mount -t tmpfs -o size=4k,mode=700 small {path}")
    try:
        yield path
    finally:
        sh(f"umount {path}")


def test_with_a_full_disk_it_compiles_every_time_and_leaves_nothing(
    small_disk: Path,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (small_disk / "ballast").write_bytes(bytes(4096))
    place = small_disk / "bpf"
    monkeypatch.setenv(VARIABLE, str(place))
    with caplog.at_level(logging.INFO):
        assert build() == build()
    assert compiler.runs == 2
    assert entries(place) == []
    assert "No space left" in caplog.text


def test_where_nothing_can_be_written_it_compiles_every_time(
    small_disk: Path,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sh(f"mount -o remount,ro {small_disk}")
    monkeypatch.setenv(VARIABLE, str(small_disk / "bpf"))
    with caplog.at_level(logging.INFO):
        assert build() == build()
    assert compiler.runs == 2
    assert "Read-only file system" in caplog.text


def test_a_cache_on_a_disk_that_became_read_only_is_still_used(
    small_disk: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(small_disk / "bpf"))
    build()
    sh(f"mount -o remount,ro {small_disk}")
    build()
    assert compiler.runs == 1


# ---- where it is ----


def test_its_place_is_below_the_users_cache_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/stellar/bpf")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache/stellar/bpf"
    monkeypatch.setenv(VARIABLE, "/elsewhere")
    assert cache_directory() == Path("/elsewhere")
    monkeypatch.setenv(VARIABLE, "off")
    assert cache_directory() is None
    monkeypatch.setenv(VARIABLE, "here")
    with pytest.raises(UsageError, match="'here'; allowed: off, or the absolute path"):
        cache_directory()


def test_a_home_of_somebody_else_is_not_used(
    root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under a sudo that keeps HOME."""
    os.chown(tmp_path, NOBODY, -1)
    for name in (VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = cache_directory()
    assert found is not None
    assert not found.is_relative_to(tmp_path)


def test_switched_off_it_neither_reads_nor_writes(
    place: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    build()
    before = entries(place)
    monkeypatch.setenv(VARIABLE, "off")
    build()
    build(STELLAR_TEST_CLOCK="1")
    assert compiler.runs == 3
    assert entries(place) == before
