"""Build the lab kernel from the distribution's kernel source, once per machine and fragment."""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from labkernel import LabError, say
from labkernel.apt import SourcePackage, download, newest_source

FRAGMENT = Path(__file__).resolve().parents[1] / "lab-kernel.config"
KERNEL_NAME = "linux"
# Measured for 7.3: 1.9 GiB of source tree, 0.4 GiB of objects, 0.3 GiB of packed source.
NEEDED_BYTES = 3 << 30
TOOLS = ("gcc", "make", "flex", "bison", "bc", "xz", "tar", "dpkg-deb", "apt-get", "strip")
HEADERS = ("libelf.h", "openssl/opensslv.h")
PROGRESS_S = 15.0
LOG_TAIL_LINES = 20
COMPILED = b"\n  CC "  # how make reports a compiled file


def cache_folder() -> Path:
    """Return the folder of all lab kernels of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stellar" / "lab"


def fragment_lines() -> list[str]:
    """Return the settings of the fragment, also the ones that switch something off."""
    text = FRAGMENT.read_text()
    return re.findall(r"^(?:CONFIG_\w+=.*|# CONFIG_\w+ is not set)$", text, re.MULTILINE)


def fragment_hash() -> str:
    """Return the key of the cache: the settings, whatever their order and comments."""
    return hashlib.sha256("\n".join(sorted(fragment_lines())).encode()).hexdigest()[:12]


def find_kernel() -> Path | None:
    """Return the newest cached kernel of the present fragment."""
    built = [
        folder / KERNEL_NAME
        for folder in cache_folder().glob(f"*-{fragment_hash()}")
        if (folder / KERNEL_NAME).is_file()
    ]
    return max(built, key=lambda kernel: version_key(kernel.parent.name), default=None)


def version_key(text: str) -> list[int]:
    """Return the numbers of a version before its first dash, for comparison."""
    return [int(digits) for digits in re.findall(r"\d+", text.partition("-")[0])]


@dataclass
class Progress:
    """Says what happens, with the time since the start."""

    begin: float

    def __call__(self, text: str) -> None:
        """Print one line."""
        say(f"[{time.monotonic() - self.begin:4.0f} s] {text}")


@contextlib.contextmanager
def build_lock(folder: Path) -> Iterator[None]:
    """Let one build at a time into the cache."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build of the lab kernel is running; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(source: Path | None = None, mirror: str | None = None) -> Path:
    """Return the lab kernel of the present fragment, building it if it is not cached."""
    kernel = find_kernel()
    if kernel:
        return kernel
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with build_lock(cache):
        kernel = find_kernel()
        if kernel:
            return kernel
        check_machine(cache)
        for stale in cache.glob(
            "build-*"
        ):  # we hold the lock: these are of builds that were killed
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=cache) as work:
            try:
                return build_in(Path(work), cache, source, mirror)
            except OSError as error:
                raise LabError(f"cannot build the lab kernel in {cache}: {error}") from error


def check_machine(cache: Path) -> None:
    """Refuse early what would fail late."""
    machine = os.uname().machine
    if machine != "x86_64":
        raise LabError(
            f"this machine is {machine}; the lab kernel (ARCH=um) exists for x86_64 only"
        )
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    for header in HEADERS:
        probe = ["gcc", "-E", "-xc", "-", "-include", header]
        if not missing and subprocess.run(probe, input=b"", capture_output=True).returncode:
            missing.append(header)
    if missing:
        raise LabError(f"building the lab kernel needs {', '.join(missing)}; run scripts/setup")
    free = shutil.disk_usage(cache).free
    if free < NEEDED_BYTES:
        raise LabError(
            f"{cache} has {free >> 20} MiB free and the build needs {NEEDED_BYTES >> 20} MiB for a "
            "while; free some, or set XDG_CACHE_HOME to a larger file system"
        )


def build_in(work: Path, cache: Path, source: Path | None, mirror: str | None) -> Path:
    """Fetch, configure, compile and install, with everything temporary below `work`."""
    progress = Progress(time.monotonic())
    log = cache / f"build-{fragment_hash()}.log"
    if source is None:
        progress("looking for the newest kernel source package")
        package: SourcePackage = newest_source(work / "apt", mirror)
        progress(f"downloading {package.name} {package.version} of {package.suite}")
        source = download(package, work / "apt")
    progress(f"unpacking {source.name}")
    tree = unpack(source, work / "tree")
    if source.is_relative_to(work):
        source.unlink()  # room for the objects

    make = Make(tree, log)
    progress(f"configuring from {FRAGMENT.name}")
    configure(tree, make)
    jobs = len(os.sched_getaffinity(0))
    progress(f"compiling with {jobs} jobs; minutes, once per machine (log: {log})")
    make.run("compiling the lab kernel", f"-j{jobs}", KERNEL_NAME, progress=progress)

    subprocess.run(["strip", KERNEL_NAME], cwd=tree, check=True)
    version = (tree / "include/config/kernel.release").read_text().strip()
    kernel = install(tree, cache / f"{version}-{fragment_hash()}")
    log.unlink()
    progress(f"installed {kernel}")
    return kernel


def unpack(source: Path, target: Path) -> Path:
    """Unpack a kernel tar ball, or the one inside a linux-source package; return its top folder."""
    target.mkdir()
    tar = ["tar", "--extract", "--xz", "--directory", str(target)]
    if source.suffix == ".deb":
        tarball = unpack_package(source, target.parent / "package")
        result = subprocess.run([*tar, "--file", tarball], capture_output=True, text=True)
        shutil.rmtree(target.parent / "package")
    else:
        result = subprocess.run([*tar, "--file", source], capture_output=True, text=True)
    if result.returncode:
        raise LabError(f"cannot unpack {source}: {last_line(result.stderr)}")
    trees = [path.parent for path in target.glob("*/Kconfig")]
    if len(trees) != 1:
        raise LabError(
            f"{source} holds {len(trees)} kernel trees; expected one, such as linux-7.2/"
        )
    return trees[0]


def unpack_package(package: Path, target: Path) -> Path:
    """Unpack a linux-source package; return the tar ball inside it."""
    result = subprocess.run(
        ["dpkg-deb", "--extract", package, target], capture_output=True, text=True
    )
    found = list(target.glob("usr/src/linux-source-*.tar.xz"))
    if result.returncode or not found:
        reason = last_line(result.stderr) or "no usr/src/linux-source-*.tar.xz inside"
        raise LabError(f"cannot unpack {package}: {reason}")
    return found[0]


def last_line(text: str) -> str:
    """Return the last line of a tool's output."""
    return text.strip().rpartition("\n")[2]


class Make:
    """Runs make in a kernel tree, with its output in a log."""

    def __init__(self, tree: Path, log: Path) -> None:
        self.tree = tree
        self.log = log
        log.write_bytes(b"")

    def run(self, what: str, *arguments: str, progress: Progress | None = None) -> None:
        """Run make to its end, saying now and then how far it is."""
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                ["make", "ARCH=um", *arguments],
                cwd=self.tree,
                env=os.environ | {"LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(PROGRESS_S)
                    break
                if progress:
                    progress(f"{self.log.read_bytes().count(COMPILED)} files compiled")
        except BaseException:  # interrupted: the compilers must not outlive us
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        if process.returncode:
            lines = self.log.read_text(errors="replace").splitlines()
            tail = "\n".join(lines[-LOG_TAIL_LINES:])
            raise LabError(f"{what} failed; the last lines of {self.log}:\n{tail}")


def configure(tree: Path, make: Make) -> None:
    """Write .config: the fragment over tinyconfig. Insist that every line of it took."""
    make.run("make tinyconfig", "tinyconfig")
    with (tree / ".config").open("a") as config:
        # A later line wins over an earlier one.
        config.write("\n".join(fragment_lines()) + "\n")
    make.run("make olddefconfig", "olddefconfig")
    took = set((tree / ".config").read_text().splitlines())
    # An option that does not exist counts as switched off.
    lost = [
        line
        for line in fragment_lines()
        if line not in took and not (line.startswith("#") and is_absent(line, took))
    ]
    if lost:
        raise LabError(
            f"this kernel did not take {len(lost)} settings of {FRAGMENT}: {', '.join(lost)}; each "
            "has a dependency that the fragment lacks, or no longer exists"
        )


def is_absent(off_line: str, config: set[str]) -> bool:
    """Tell whether `# CONFIG_X is not set` holds because the option is not there at all."""
    name = off_line.split()[1]
    return not any(line.startswith(f"{name}=") for line in config)


def install(tree: Path, target: Path) -> Path:
    """Put the kernel into the cache in one step, so that nobody sees half of it."""
    staging = Path(tempfile.mkdtemp(prefix="build-", dir=target.parent))
    shutil.copy2(tree / KERNEL_NAME, staging / KERNEL_NAME)
    shutil.copy2(tree / ".config", staging / "config")
    staging.chmod(0o755)
    if target.exists():  # an earlier kernel of the same name that lost its binary
        shutil.rmtree(target)
    staging.rename(target)
    return target / KERNEL_NAME
