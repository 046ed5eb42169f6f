"""Run one command in the lab kernel, with the manners of an ordinary child process."""

import contextlib
import ctypes
import fcntl
import json
import os
import re
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
import tty
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkernel import EXIT_GUEST_DIED, EXIT_GUEST_MEMORY, EXIT_TIMEOUT, LabError, say
from labkernel.wire import (
    LINE_WINDOW_BYTES,
    STDIN_WINDOW_BYTES,
    Decoder,
    Frame,
    encode,
    encode_number,
    number,
)

FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
BOOT_LIMIT_S = 60.0  # 0.6 s on an idle machine; busy build machines have been 20 times slower
GRACE_S = 5.0  # from SIGTERM to SIGKILL when the time limit has passed
HALT_LIMIT_S = 5.0
IMPATIENT_INTERRUPTS = 3  # a user who presses Ctrl-C that often wants the guest gone
CHUNK_BYTES = 64 * 1024
# A pipe that polls as writable takes at least PIPE_BUF bytes without blocking.
OUTPUT_STEP_BYTES = select.PIPE_BUF
PENDING_LIMIT_BYTES = 1 << 20
CONSOLE_TAIL_LINES = 20
PR_SET_PDEATHSIG = 1
# In the guest these are fresh and empty; a folder below one of them must be mounted by itself.
HIDDEN = (Path("/run"), Path("/dev/shm"))
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class RunSpec:
    """What to run, and with what."""

    command: list[str]
    results: Path
    env: dict[str, str]
    timeout_s: float | None = None
    memory: str = "4G"
    cpus: int = 2
    terminal: bool = False
    cwd: Path = field(default_factory=Path.cwd)

    def start_message(self) -> bytes:
        """Return the payload of the START frame."""
        folders: list[tuple[str, bool]] = [(str(self.results), True)]
        for path in (self.cwd, Path(__file__).resolve().parents[2]):
            if any(path.is_relative_to(hidden) for hidden in HIDDEN):
                folders.insert(0, (str(path), False))
        message: dict[str, Any] = {
            "command": self.command,
            "env": self.env,
            "cwd": str(self.cwd),
            "folders": folders,
            "cpu_mhz": host_cpu_mhz(),
            "terminal": window_size() if self.terminal else 0,
        }
        return json.dumps(message).encode()


def command_env(kind: str, results: Path, extra: dict[str, str]) -> dict[str, str]:
    """Return the environment of the command: the caller's, with system directories in PATH."""
    env = dict(os.environ)
    path = env.get("PATH", "").split(":")
    env["PATH"] = ":".join([*filter(None, path), *(set_minus(SYSTEM_PATH.split(":"), path))])
    env |= {"STELLAR_LAB": kind, "STELLAR_RESULTS": str(results)}
    return env | extra


def set_minus(items: list[str], without: list[str]) -> list[str]:
    """Return `items` that are not in `without`, in order."""
    return [item for item in items if item not in without]


def host_cpu_mhz() -> str:
    """Return the host's clock rate; 1000 where the host does not tell."""
    found = re.search(r"^cpu MHz\s*:\s*([\d.]+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else "1000.000"


def window_size() -> int:
    """Return the terminal's size as rows << 16 | columns."""
    rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))
    return (rows or 24) << 16 | (columns or 80)


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as 512M or 4G."""
    found = re.fullmatch(r"(\d+)([MG])", text)
    if not found:
        raise LabError(
            f"--mem is {text!r}; expected a whole number with M or G, such as 512M or 4G"
        )
    size = int(found[1]) << {"M": 20, "G": 30}[found[2]]
    if size < 256 << 20:
        raise LabError(f"--mem is {text}; the lab kernel needs at least 256M")
    return size


def memory_folder(size_bytes: int) -> Path:
    """Return where the guest's memory can live as a file, on a RAM file system if there is one."""
    found = []
    for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        try:
            info = os.statvfs(folder)
        except OSError as error:
            found.append(f"{folder}: {error.strerror}")
            continue
        free = info.f_bavail * info.f_frsize
        if info.f_flag & os.ST_NOEXEC:
            found.append(f"{folder}: mounted noexec")
        elif free < size_bytes:
            found.append(f"{folder}: {free >> 20} MiB free")
        else:
            return folder
    raise LabError(
        f"the lab kernel keeps its memory ({size_bytes >> 20} MiB) in a file, and no folder has "
        f"room for it ({'; '.join(found)}); free space there, set TMPDIR, or give a smaller --mem"
    )


class Guest:
    """One boot of the lab kernel: an ordinary process, its serial line and its console log."""

    def __init__(self, kernel: Path, spec: RunSpec) -> None:
        self.spec = spec
        self.folder = Path(tempfile.mkdtemp(prefix="stellar-lab-"))
        self.console = self.folder / "console.log"
        # The kernel's command line splits at blanks; the link's path has none.
        init = self.folder / "init"
        init.symlink_to(Path(__file__).resolve().parents[1] / "lab-init")
        memory = memory_folder(parse_bytes(spec.memory))
        self.line, theirs = socket.socketpair()
        arguments = [
            "seccomp=on",  # SMP needs it
            f"ncpus={spec.cpus}",
            f"mem={spec.memory}",
            f"uml_dir={self.folder}/",
            "root=/dev/root",
            "rootfstype=hostfs",
            "rootflags=/",
            "ro",
            f"init={init}",
            "con=null",
            "con0=null,fd:1",
            "ssl=null",
            f"ssl0=fd:{theirs.fileno()}",
            "panic=-1",
        ]
        with self.console.open("wb") as log, theirs:
            self.process = subprocess.Popen(
                [kernel, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env={"PATH": SYSTEM_PATH, "TMPDIR": str(memory)},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self.line.setblocking(False)
        self.pidfd = os.pidfd_open(self.process.pid)

    def end(self, patience_s: float) -> None:
        """Wait for the guest to power off; then kill whatever is left of it.

        The kernel's process is reaped last: until then its group's id cannot be another's.
        """
        select.select([self.pidfd], [], [], patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.line.close()
        os.close(self.pidfd)

    def console_text(self) -> str:
        """Return what the kernel printed."""
        return self.console.read_text(errors="replace").replace("\r", "")

    def remove(self) -> None:
        """Delete the files of this boot."""
        shutil.rmtree(self.folder, ignore_errors=True)


def die_with_parent() -> None:
    """Prepare the kernel's process: no core files, and no life without this one."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Pump:
    """Moves bytes, signals and time limits between this process and the guest."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self.spec = guest.spec
        self.decoder = Decoder()
        self.to_guest = bytearray()
        self.held: list[bytes] = []  # frames from before the guest is ready for them
        self.outputs = {1: bytearray(), 2: bytearray()}
        self.closed: set[int] = set()
        self.line_window = LINE_WINDOW_BYTES
        self.stdin_window = STDIN_WINDOW_BYTES
        self.stdin_open = True
        self.greeted = False
        self.started = False
        self.status: int | None = None
        self.failure: str | None = None
        self.timed_out = False
        self.interrupts = 0
        self.deadline: float | None = time.monotonic() + BOOT_LIMIT_S

    def send(self, frame: bytes) -> None:
        """Queue a frame; before START has gone out, keep it back."""
        if self.greeted:
            self.to_guest += frame
        else:
            self.held.append(frame)

    def run(self) -> None:
        """Pump until the exit status and all output have arrived, or the guest is gone."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        caught = FORWARDED + ((signal.SIGWINCH,) if self.spec.terminal else ())
        previous = {number_: signal.signal(number_, lambda *_: None) for number_ in caught}
        previous_wake = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        try:
            while self.step(wake_read):
                pass
            self.drain()
        finally:
            signal.set_wakeup_fd(previous_wake)
            for number_, handler in previous.items():
                signal.signal(number_, handler)
            os.close(wake_read)
            os.close(wake_write)

    def step(self, wake: int) -> bool:
        """Do one round; return whether another is needed."""
        ready = self.wait(wake)
        if wake in ready:
            for signal_number in os.read(wake, 4096):
                self.take_signal(signal_number)
        line = self.guest.line.fileno()
        if ready.get(line, 0) & (select.POLLIN | select.POLLHUP):
            self.read_line()
        if 0 in ready:
            self.read_stdin()
        for stream in self.outputs:
            if stream in ready:
                self.write_output(stream)
        if self.to_guest and self.line_window:
            self.write_line()
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self.take_timeout()
        gone = self.guest.pidfd in ready
        return self.status is None and self.failure is None and not gone

    def wait(self, wake: int) -> dict[int, int]:
        """Wait until something can be done; return the ready descriptors and their events."""
        events = {wake: select.POLLIN, self.guest.pidfd: select.POLLIN}
        line = 0
        if max(map(len, self.outputs.values())) < PENDING_LIMIT_BYTES:
            line |= select.POLLIN
        if self.to_guest and self.line_window:
            line |= select.POLLOUT
        events[self.guest.line.fileno()] = line
        if self.greeted and self.stdin_open and self.stdin_window:
            events[0] = select.POLLIN
        for stream, data in self.outputs.items():
            if data:
                events[stream] = select.POLLOUT
        poll = select.poll()
        for descriptor, mask in events.items():
            poll.register(descriptor, mask)
        limit_ms = None
        if self.deadline is not None:
            limit_ms = max(0, int((self.deadline - time.monotonic()) * 1000) + 1)
        return dict(poll.poll(limit_ms))

    def read_line(self) -> bool:
        """Take frames from the guest; return whether there may be more."""
        try:
            data = self.guest.line.recv(CHUNK_BYTES)
        except BlockingIOError:
            return False
        except ConnectionError:
            return False
        for kind, payload in self.decoder.feed(data):
            self.handle(kind, payload)
        return bool(data)

    def handle(self, kind: Frame, payload: bytes) -> None:
        """Act on one frame of the guest."""
        match kind:
            case Frame.HELLO:
                self.greeted = True
                self.send(encode(Frame.START, self.spec.start_message()))
                for frame in self.held:
                    self.send(frame)
            case Frame.STARTED:
                self.started = True
                limit = self.spec.timeout_s
                self.deadline = None if limit is None else time.monotonic() + limit
            case Frame.STDOUT | Frame.STDERR:
                stream = 1 if kind is Frame.STDOUT else 2
                if stream not in self.closed:
                    self.outputs[stream] += payload
            case Frame.LINE_ACK:
                self.line_window += number(payload)
            case Frame.STDIN_ACK:
                self.stdin_window += number(payload)
            case Frame.EXIT:
                self.status = number(payload)
            case Frame.FAILED:
                self.failure = payload.decode(errors="replace")
            case _:
                pass

    def read_stdin(self) -> None:
        """Pass on standard input; a closed or broken one counts as its end."""
        try:
            data = os.read(0, self.stdin_window)
        except OSError:
            data = b""
        if data:
            self.stdin_window -= len(data)
            self.send(encode(Frame.STDIN, data))
        else:
            self.stdin_open = False
            self.send(encode(Frame.STDIN_EOF))

    def write_output(self, stream: int) -> None:
        """Write a piece of output that cannot block."""
        data = self.outputs[stream]
        try:
            written = os.write(stream, data[:OUTPUT_STEP_BYTES])
        except BlockingIOError:
            return
        except OSError:  # nobody reads: let the command see that too
            written = len(data)
            self.closed.add(stream)
            self.send(encode_number(Frame.CLOSE, stream))
        del data[:written]

    def write_line(self) -> None:
        """Write to the guest what fits."""
        try:
            written = self.guest.line.send(self.to_guest[: self.line_window])
        except BlockingIOError:
            return
        except ConnectionError:  # it has ended; `step` sees that by its pidfd
            self.to_guest.clear()
            return
        self.line_window -= written
        del self.to_guest[:written]

    def take_signal(self, signal_number: int) -> None:
        """Forward a signal to the command."""
        if signal_number == signal.SIGWINCH:
            self.send(encode_number(Frame.WINDOW, window_size()))
            return
        if signal_number == signal.SIGINT:
            self.interrupts += 1
            if self.interrupts >= IMPATIENT_INTERRUPTS:
                self.status = 128 + signal.SIGINT
                self.kill()
        self.send(encode_number(Frame.SIGNAL, signal_number))

    def take_timeout(self) -> None:
        """Handle a passed deadline: of the boot, of the command, of its grace after SIGTERM."""
        self.deadline = None
        if not self.started:
            self.failure = f"it did not start within {BOOT_LIMIT_S:.0f} s"
            self.kill()
        elif not self.timed_out and self.spec.timeout_s is not None:
            self.timed_out = True
            self.send(encode_number(Frame.SIGNAL, signal.SIGTERM))
            self.deadline = time.monotonic() + GRACE_S
        else:
            self.kill()

    def kill(self) -> None:
        """Kill the guest at once."""
        os.killpg(self.guest.process.pid, signal.SIGKILL)

    def drain(self) -> None:
        """Fetch what is still on the line and write out what is pending."""
        while self.read_line():
            pass
        for stream, data in self.outputs.items():
            while data and stream not in self.closed:
                select.select([], [stream], [])
                self.write_output(stream)


def run(kernel: Path, spec: RunSpec) -> int:
    """Run `spec` in the lab kernel; return the exit status of `scripts/lab run`."""
    guest = Guest(kernel, spec)
    pump = Pump(guest)
    saved = termios.tcgetattr(0) if spec.terminal else None
    try:
        if saved:
            tty.setraw(0)
        pump.run()
    finally:
        guest.end(HALT_LIMIT_S if pump.status is not None else 0.0)
        if saved:
            termios.tcsetattr(0, termios.TCSADRAIN, saved)
    try:
        return conclude(guest, pump)
    finally:
        guest.remove()


def conclude(guest: Guest, pump: Pump) -> int:
    """Turn how the guest ended into an exit status, and into words where something went wrong."""
    console = guest.console_text()
    killed = re.findall(r"Out of memory: Killed process \d+ \(.*?\)", console)
    problem, status = None, pump.status
    if pump.timed_out:
        problem = f"the command ran longer than its {guest.spec.timeout_s:g} s and was ended"
        status = EXIT_TIMEOUT
    elif killed and status != 0:
        problem = (
            f"the guest ran out of its {guest.spec.memory} of memory ({'; '.join(killed)}); "
            "give more with --mem"
        )
        status = EXIT_GUEST_MEMORY
    elif pump.failure is not None:
        problem, status = f"the lab kernel could not be set up: {pump.failure}", None
    elif status is None:
        problem, status = "the lab kernel died while the command ran", EXIT_GUEST_DIED
    if problem is None and status is not None:
        trouble = re.findall(r"^.*(?:BUG:|Oops|WARNING: .* at ).*$", console, re.MULTILINE)
        if killed or trouble:
            keep_console(guest)
            say(f"the guest's kernel complained: {(killed + trouble)[0].strip()}")
        return status
    keep_console(guest)
    if status != EXIT_TIMEOUT:
        tail = "\n".join(console.rstrip().splitlines()[-CONSOLE_TAIL_LINES:])
        print(f"--- last lines of its console\n{tail}\n---", file=sys.stderr)
    if status is None:
        raise LabError(str(problem))
    say(str(problem))
    return status


def keep_console(guest: Guest) -> None:
    """Save the console log for the user."""
    shutil.copyfile(guest.console, guest.spec.results / "console.log")
