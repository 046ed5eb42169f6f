"""The lab kernel comes from the machine's own apt sources, and its settings are insisted on."""

import subprocess
from pathlib import Path

import pytest

from labkernel import LabError, apt, build
from labkernel.wire import Decoder, Frame, encode, encode_number, number


def test_the_mirror_is_read_from_one_line_sources(tmp_path, monkeypatch):
    (tmp_path / "sources.list").write_text(
        "# deb http://commented.example/debian trixie main\n"
        "deb http://first.example/debian trixie main contrib\n"
        "deb-src http://source.example/debian trixie main\n"
    )
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/more.list").write_text(
        "deb [arch=amd64 signed-by=/k.gpg] http://second.example/debian trixie main\n"
        "deb http://other.example/tools stable main\n"
    )
    (tmp_path / "sources.list.d/old.list.save").write_text("deb http://saved.example trixie main\n")
    monkeypatch.setattr(apt, "APT", tmp_path)
    assert apt.own_mirrors("trixie") == [
        "http://first.example/debian",
        "http://second.example/debian",
    ]


def test_the_mirror_is_read_from_deb822_sources(tmp_path, monkeypatch):
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/debian.sources").write_text(
        "Types: deb deb-src\n"
        "# a comment inside\n"
        "URIs: http://first.example/debian\n"
        "Suites: trixie\n"
        " trixie-updates\n"
        "Components: main\n"
        "\n"
        "Types: deb\n"
        "Enabled: no\n"
        "URIs: http://disabled.example/debian\n"
        "Suites: trixie\n"
        "Components: main\n"
        "\n"
        "types: deb\n"
        "uris: http://security.example/debian-security\n"
        "suites: trixie-security\n"
        "components: main\n"
    )
    monkeypatch.setattr(apt, "APT", tmp_path)
    assert apt.own_mirrors("trixie") == ["http://first.example/debian"]


def test_a_machine_of_another_distribution_is_told_what_it_can_do(tmp_path, monkeypatch):
    release = {"ID": "ubuntu", "VERSION_CODENAME": "noble"}
    monkeypatch.setattr(apt, "os_release", lambda: release)
    with pytest.raises(LabError, match=r"--mirror.*--source"):
        apt.newest_source(tmp_path)


def test_a_full_disk_is_noticed_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "NEEDED_BYTES", 1 << 60)
    monkeypatch.setattr(build, "TOOLS", ())
    monkeypatch.setattr(build, "HEADERS", ())
    with pytest.raises(LabError, match=r"MiB free and the build needs .*XDG_CACHE_HOME"):
        build.check_machine(tmp_path)


def test_missing_tools_are_named_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "TOOLS", ("gcc", "no-such-tool"))
    with pytest.raises(LabError, match=r"no-such-tool; run scripts/setup"):
        build.check_machine(tmp_path)


class FakeMake:
    """Stands in for kbuild: takes every setting but those named."""

    def __init__(self, tree: Path, refused: str) -> None:
        self.config = tree / ".config"
        self.refused = refused

    def run(self, what: str, target: str) -> None:
        if target == "tinyconfig":
            self.config.write_text("CONFIG_SLUB_TINY=y\n")
        else:
            lines = self.config.read_text().splitlines()
            self.config.write_text(
                "".join(f"{line}\n" for line in lines[1:] if self.refused not in line)
            )


def test_settings_that_the_kernel_does_not_take_are_listed(tmp_path):
    with pytest.raises(LabError, match=r"did not take 1 settings .*: CONFIG_RDMA_RXE=y;"):
        build.configure(tmp_path, FakeMake(tmp_path, "CONFIG_RDMA_RXE"))


def test_a_setting_that_is_off_because_it_does_not_exist_is_taken(tmp_path):
    build.configure(tmp_path, FakeMake(tmp_path, "# CONFIG_SLUB_TINY"))


def test_the_cache_key_depends_on_settings_and_not_on_comments(tmp_path, monkeypatch):
    fragment = tmp_path / "fragment"
    monkeypatch.setattr(build, "FRAGMENT", fragment)
    fragment.write_text("# a\nCONFIG_A=y\n# CONFIG_B is not set\n")
    key = build.fragment_hash()
    fragment.write_text("# CONFIG_B is not set\n# another remark\nCONFIG_A=y\n")
    assert build.fragment_hash() == key
    fragment.write_text("CONFIG_A=y\n")
    assert build.fragment_hash() != key


def test_the_newest_cached_kernel_of_the_fragment_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.find_kernel() is None
    for version in ("7.9.1", "7.10.2", "7.3.4"):
        folder = build.cache_folder() / f"{version}-{build.fragment_hash()}"
        folder.mkdir(parents=True)
        (folder / "linux").touch()
    (build.cache_folder() / "8.0.0-000000000000").mkdir()
    kernel = build.find_kernel()
    assert kernel is not None
    assert kernel.parent.name.startswith("7.10.2-")


def test_a_failed_step_shows_the_end_of_its_log(tmp_path):
    (tmp_path / "Makefile").write_text("broken:\n\t@echo the reason; exit 1\n")
    make = build.Make(tmp_path, tmp_path / "log")
    with pytest.raises(LabError, match=r"compiling failed.*(?s:.*)the reason"):
        make.run("compiling", "broken")


def test_a_file_that_is_no_kernel_source_is_refused_by_name(tmp_path):
    plain = tmp_path / "plain.tar.xz"
    subprocess.run(["tar", "-cJf", plain, "-C", "/etc", "hostname"], check=True)
    with pytest.raises(LabError, match=r"plain\.tar\.xz holds 0 kernel trees"):
        build.unpack(plain, tmp_path / "tree")


def test_frames_survive_any_cutting_of_the_stream():
    stream = encode(Frame.STDOUT, b"\x00\xff") + encode(Frame.STDIN_EOF)
    stream += encode_number(Frame.EXIT, 137)
    decoder = Decoder()
    frames = [frame for byte in stream for frame in decoder.feed(bytes([byte]))]
    assert frames == [
        (Frame.STDOUT, b"\x00\xff"),
        (Frame.STDIN_EOF, b""),
        (Frame.EXIT, (137).to_bytes(4, "big")),
    ]
    assert number(frames[2][1]) == 137
