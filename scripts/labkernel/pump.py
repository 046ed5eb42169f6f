"""Between the caller of `scripts/lab run` and the guest: streams, signals and time limits."""

import os
import select
import signal
import time

from labkernel.guest import Guest
from labkernel.spec import FORWARDED, GRACE_S, window_size
from labkernel.wire import (
    LINE_WINDOW_BYTES,
    STDIN_WINDOW_BYTES,
    Decoder,
    Frame,
    encode,
    encode_number,
    number,
)

BOOT_LIMIT_S = 60.0  # 0.6 s on an idle machine; busy build machines have been 20 times slower
IMPATIENT_INTERRUPTS = 3  # a user who presses Ctrl-C that often wants the guest gone
CHUNK_BYTES = 64 * 1024
# A pipe that polls as writable takes at least PIPE_BUF bytes without blocking.
OUTPUT_STEP_BYTES = select.PIPE_BUF
PENDING_LIMIT_BYTES = 1 << 20


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
