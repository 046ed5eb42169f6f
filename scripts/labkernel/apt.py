"""Find and fetch a kernel source package through a private apt configuration.

The machine's own apt state stays as it is: a suite such as <stable>-backports is not added to it,
only its mirror is read from it.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from labkernel import OLDEST_KERNEL, LabError

APT = Path("/etc/apt")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


@dataclass(frozen=True)
class SourcePackage:
    """A linux-source package that apt can download."""

    name: str
    version: str
    suite: str

    @property
    def series(self) -> tuple[int, int]:
        """Return the kernel series that the package's name tells."""
        major, minor = self.name.removeprefix("linux-source-").split(".")
        return int(major), int(minor)

    @property
    def version_numbers(self) -> list[int]:
        """Return the numbers in the package's version, for comparison."""
        return [int(digits) for digits in re.findall(r"\d+", self.version)]


def os_release() -> dict[str, str]:
    """Return /etc/os-release as a dictionary."""
    found = re.findall(r'^(\w+)="?(.*?)"?$', Path("/etc/os-release").read_text(), re.MULTILINE)
    return dict(found)


def own_mirrors(codename: str) -> list[str]:
    """Return the mirrors that this machine takes its own release from, in apt's order."""
    mirrors: list[str] = []
    files = [APT / "sources.list", *sorted((APT / "sources.list.d").glob("*"))]
    for path in files:
        if path.suffix == ".sources":
            entries = deb822_entries(path.read_text())
        elif path.suffix == ".list" and path.is_file():
            entries = one_line_entries(path.read_text())
        else:
            continue
        mirrors += [uri for uri, suite in entries if suite == codename and uri not in mirrors]
    return mirrors


def one_line_entries(text: str) -> list[tuple[str, str]]:
    """Return (URI, suite) of every `deb [options] URI suite component...` line."""
    return re.findall(r"^\s*deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)", text, re.MULTILINE)


def deb822_entries(text: str) -> list[tuple[str, str]]:
    """Return (URI, suite) of every enabled binary source in a deb822 file."""
    entries = []
    for stanza in re.split(r"\n\s*\n", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)):
        # A value goes on where the next line begins with a blank.
        fields = {
            name.lower(): value.split()
            for name, value in re.findall(
                r"^([\w-]+):[ \t]*(.*(?:\n[ \t].*)*)", stanza, re.MULTILINE
            )
        }
        if "deb" in fields.get("types", []) and fields.get("enabled", ["yes"]) != ["no"]:
            entries += [(uri, suite) for uri in fields["uris"] for suite in fields["suites"]]
    return entries


def newest_source(folder: Path, mirror: str | None = None) -> SourcePackage:
    """Return the newest linux-source package of the backports suites that the mirror has.

    `folder` becomes the private apt configuration, ready for `download`.
    """
    codename = os_release().get("VERSION_CODENAME", "")
    mirrors = [mirror] if mirror else own_mirrors(codename)
    if os_release().get("ID") != "debian" and not mirror:
        raise LabError(
            "the kernel source comes from Debian's <stable>-backports and this machine takes its "
            "packages from another distribution; give a Debian mirror with --mirror, or a kernel "
            f"{OLDEST_KERNEL[0]}.{OLDEST_KERNEL[1]} or newer with --source FILE.tar.xz"
        )
    if not mirrors:
        raise LabError(
            f"no apt source for {codename!r} in {APT}/sources.list or {APT}/sources.list.d; give a "
            "Debian mirror with --mirror"
        )
    if not KEYRING.exists():
        raise LabError(f"{KEYRING} is missing; install the package debian-archive-keyring")

    reports: list[str] = []
    found: list[tuple[SourcePackage, str]] = []
    for uri in mirrors:
        suites = ["stable-backports", f"{codename}-backports"]
        for suite in suites:
            write_configuration(folder, uri, suite)
            update = apt(folder, "apt-get", "update")
            if update.returncode:
                reports.append(f"{uri} {suite}: {first_error(update.stderr)}")
                continue
            # Caching mirrors keep a suite's alias and its real name apart, and one may be older.
            suites += [name for name in codenames(folder) if name not in suites]
            packages = source_packages(folder, suite)
            names = ", ".join(package.name for package in packages)
            reports.append(f"{uri} {suite}: {names or 'no linux-source package'}")
            found += [(package, uri) for package in packages if package.series >= OLDEST_KERNEL]
    if not found:
        raise LabError(
            f"no linux-source package of {OLDEST_KERNEL[0]}.{OLDEST_KERNEL[1]} or newer. Found: "
            f"{'; '.join(reports)}. Give another Debian mirror with --mirror, or a kernel with "
            "--source FILE.tar.xz"
        )
    package, uri = max(found, key=lambda item: (item[0].series, item[0].version_numbers))
    write_configuration(folder, uri, package.suite)
    return package


def codenames(folder: Path) -> list[str]:
    """Return the real names of the suites whose lists apt has just fetched."""
    texts = [path.read_text() for path in (folder / "lists").glob("*Release")]
    return [name for text in texts for name in re.findall(r"^Codename: (\S+)$", text, re.MULTILINE)]


def write_configuration(folder: Path, uri: str, suite: str) -> None:
    """Write an apt configuration that knows one suite and nothing of the machine's packages."""
    shutil.rmtree(folder / "lists", ignore_errors=True)
    (folder / "lists/partial").mkdir(parents=True, exist_ok=True)
    (folder / "cache/archives/partial").mkdir(parents=True, exist_ok=True)
    (folder / "sources.list").write_text(f"deb [signed-by={KEYRING}] {uri} {suite} main\n")
    (folder / "apt.conf").write_text(
        f'Dir::State::lists "{folder}/lists";\n'
        f'Dir::Cache "{folder}/cache";\n'
        f'Dir::Etc::sourcelist "{folder}/sources.list";\n'
        'Dir::Etc::sourceparts "/dev/null";\n'
        'Dir::State::status "/dev/null";\n'
        'Acquire::Languages "none";\n'
        'APT::Sandbox::User "";\n'
    )


def apt(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run an apt tool with the private configuration."""
    env = os.environ | {"APT_CONFIG": str(folder / "apt.conf"), "LC_ALL": "C"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def source_packages(folder: Path, suite: str) -> list[SourcePackage]:
    """Return the linux-source-X.Y packages of the configured suite."""
    names = apt(folder, "apt-cache", "pkgnames", "linux-source-").stdout.split()
    packages = []
    for name in names:
        if not re.fullmatch(r"linux-source-\d+\.\d+", name):
            continue
        shown = apt(folder, "apt-cache", "show", "--no-all-versions", name).stdout
        version = re.search(r"^Version: (.+)$", shown, re.MULTILINE)
        if version:
            packages.append(SourcePackage(name, version[1], suite))
    return packages


def download(package: SourcePackage, folder: Path) -> Path:
    """Download a package into the private folder; return its file."""
    for attempt in ("refreshed", "downloaded"):
        # The lists may be of another suite than the package: `newest_source` looked at several.
        command = ["update"] if attempt == "refreshed" else ["download", package.name]
        result = apt(folder, "apt-get", *command)
        if result.returncode:
            raise LabError(
                f"{package.name} {package.version} cannot be {attempt}: "
                f"{first_error(result.stderr)}; try again, or give --source FILE.tar.xz"
            )
    return next(folder.glob("linux-source-*.deb"))


def first_error(text: str) -> str:
    """Return apt's first error line."""
    errors = [line for line in text.splitlines() if line.startswith("E:")]
    return errors[0].removeprefix("E: ") if errors else text.strip() or "unknown error"
