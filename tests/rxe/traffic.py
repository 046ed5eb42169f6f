"""Incast: several senders, one receiver behind a shaped port; what each variant does with it."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from controller.sim.fairness import jain
from tests.hosts import Controller, sh
from tests.rxe.port import COLUMNS
from tests.rxe.stream import PATH_MTU_BYTES, WINDOW_PACKETS, Board
from tests.rxe.verbs import SHAPED_CLASSID, Program, RxeHost, Switch

ROOT = Path(__file__).resolve().parents[2]
BIN_NS = 10_000_000
RATE_WINDOW_BINS = 10
SAMPLE_PERIOD_US = 2000
FIRST_TCP_PORT = 21000


@dataclass(frozen=True)
class Shape:
    """The port towards the receiver."""

    rate_bit: int
    limit_bytes: int
    burst_bytes: int


@dataclass(frozen=True)
class Load:
    """What each sender does."""

    message_bytes: int = 16384
    timeout: int = 15  # of the queue pair: 4.096 us * 2^N
    traffic_class: int = 0
    warmup_s: float = 1.0
    seconds: float = 5.0


@dataclass
class Outcome:
    """What one run measured; `of_run` figures include start and end, the others do not."""

    variant: str
    seconds: float
    goodput_bit: list[float]  # complete messages of each sender
    port_bit: float  # what the port has sent, headers and repetitions included
    goodput_share: float  # sum of goodputs over the port's rate
    jain: float
    drops: int
    backlog_p50_bytes: float
    backlog_p99_bytes: float
    backlog_max_bytes: float
    # What each sender brought to the switch, headers included: median of windows of 100 ms, as a
    # pause of the whole machine is none of the sender's.
    arrival_bit: list[float]
    port_cov: float  # of 10 ms bins of what the port has sent
    arrival_cov: list[float]  # of 10 ms bins of what each sender brought to the switch
    stall_share: list[float]  # of 10 ms bins in which a sender brought nothing
    sent_packets_of_run: int
    needed_packets_of_run: int
    retransmitted_of_run: int
    drops_of_run: int
    # Sent (rxe at the senders) - dropped (tc) - received (rxe at the receiver): three counts of
    # their own, so anything but 0 was lost beside the port, or the harness counts wrong.
    unexplained_of_run: int
    receiver: dict[str, int]  # rxe's counters, of the run
    senders: dict[str, int]
    samples: int
    # A gap of the order of the queue pair's timeout: the machine stood still, not the network.
    sample_gap_max_ms: float

    def row(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass
class Sender:
    """A running stream and where its progress stands."""

    program: Program
    server: Program
    board: Board


@dataclass(frozen=True)
class Variant:
    """What is done about congestion: entered before the queue pairs exist, left after them.

    Never under traffic: a change of a root qdisc can make the kernel refuse a packet, and rxe
    gives a queue pair up for that.
    """

    name: str
    setup: Callable[[Incast], contextlib.AbstractContextManager[Any]]
    controls: bool = True  # held against what control must reach


@contextlib.contextmanager
def controlled(
    config: str, targets: Sequence[str], before: Sequence[str] = (), after: Sequence[str] = ()
) -> Iterator[Controller]:
    """A controller on interfaces, started from the text of a configuration file.

    Parameters
    ----------
    config
        TOML.
    targets
        ``NETNS:INTERFACE``, as ``-i`` takes them.
    before, after
        Shell commands around it: qdiscs of the senders. `after` runs whatever happened.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "controller.toml"
        path.write_text(config)
        controller = Controller(Path(folder) / "run")
        try:
            for command in before:
                sh(command)
            controller.start(*targets, extra=("--config", str(path)))
            yield controller
        finally:
            controller.close()
            for command in after:
                sh(command, check=False)


@contextlib.contextmanager
def paced(bed: Incast, share: float) -> Iterator[None]:
    """fq on every sender, its `maxrate` an equal part of a share of the port's rate.

    What a control that knew everything would do: the yardstick beside the ones that learn it.
    """
    rate_bit = int(bed.shape.rate_bit * share / len(bed.senders))
    try:
        for host in bed.senders:
            host.sh(f"tc qdisc replace dev {host.interface} root fq maxrate {rate_bit}bit "
                    f"flow_limit {4 * WINDOW_PACKETS}")  # fmt: skip
        yield
    finally:
        for host in bed.senders:
            host.sh(f"tc qdisc del dev {host.interface} root", check=False)


class Incast:
    """Senders and a receiver around a switch.

    Parameters
    ----------
    switch, hosts
        As rxe_switched() gives them; the last host receives.
    shape
        Of the port towards the receiver, put there at once.
    load
        What the senders do.
    """

    def __init__(self, switch: Switch, hosts: Sequence[RxeHost], shape: Shape, load: Load) -> None:
        self.switch = switch
        self.senders, self.receiver = list(hosts[:-1]), hosts[-1]
        self.shape, self.load = shape, load
        switch.keep_order(hosts)
        switch.shape(self.receiver, shape.rate_bit, shape.limit_bytes, shape.burst_bytes)

    @property
    def port(self) -> str:
        """The shaped port."""
        return self.switch.port_to(self.receiver)

    @property
    def port_target(self) -> str:
        """The shaped port, as the controller's ``-i`` takes it."""
        return f"{self.switch.netns}:{self.port}"

    @contextlib.contextmanager
    def _streams(self, folder: Path) -> Iterator[list[Sender]]:
        """One stream from each sender, connected, not started."""
        with contextlib.ExitStack() as stack:
            senders = []
            for number, host in enumerate(self.senders):
                tcp_port = FIRST_TCP_PORT + number
                common = ["--bytes", str(self.load.message_bytes)]
                common += ["--timeout", str(self.load.timeout)]
                common += ["--traffic-class", str(self.load.traffic_class)]
                server = stack.enter_context(
                    Program(self.receiver, self._command(self.receiver, tcp_port, common))
                )
                server.wait_listening(tcp_port)
                path = folder / f"board{number}"
                board = Board(path, create=True)
                arguments = [*common, "--connect", self.receiver.address, "--board", str(path)]
                program = stack.enter_context(
                    Program(host, self._command(host, tcp_port, arguments))
                )
                senders.append(Sender(program, server, board))
            for sender in senders:
                sender.program.wait_for("ready")
            yield senders

    @staticmethod
    def _command(host: RxeHost, tcp_port: int, arguments: Sequence[str]) -> list[str]:
        gid = host.gid_index(host.address)
        head = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.rxe.stream"]
        return [*head, host.device, str(gid), str(tcp_port), *arguments]

    @contextlib.contextmanager
    def _sampling(self, path: Path) -> Iterator[None]:
        """Sample the shaped port into a file."""
        arrivals = [self.switch.port_to(host) for host in self.senders]
        command = [
            "env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.rxe.port",
            str(path), str(SAMPLE_PERIOD_US), self.port, SHAPED_CLASSID, *arrivals,
        ]  # fmt: skip
        with Program(self.switch, command) as program:
            program.wait_for("sampling")
            yield
            program.process.send_signal(signal.SIGTERM)
            program.wait(10)

    def run(self, variant: Variant) -> Outcome:
        """Set a variant up, run all senders at once, measure."""
        with variant.setup(self):
            return self.measure(variant.name)

    def measure(self, variant: str) -> Outcome:
        """Run all senders at once, under what is set up already, and measure."""
        hosts = [*self.senders, self.receiver]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with self._streams(folder) as senders:
                before = {host.netns: host.counters() for host in hosts}
                with self._sampling(folder / "samples"):
                    start_ns = time.monotonic_ns() + 20_000_000
                    for sender in senders:
                        sender.board.start_at(start_ns)
                    time.sleep(self.load.warmup_s)
                    first = [sender.board.read()[2:] for sender in senders]
                    begin_ns = time.monotonic_ns()
                    time.sleep(self.load.seconds)
                    last = [sender.board.read()[2:] for sender in senders]
                    end_ns = time.monotonic_ns()
                    for sender in senders:
                        sender.board.stop()
                    for sender in senders:
                        sender.program.wait(60)
                        sender.server.wait(60)
                total = [sender.board.read()[2] for sender in senders]
            counters = {
                host.netns: {
                    key: value - before[host.netns].get(key, 0)
                    for key, value in host.counters().items()
                }
                for host in hosts
            }
            columns = len(COLUMNS) + len(self.senders)
            samples = np.fromfile(folder / "samples", "<u8").reshape(-1, columns).astype(float)
        goodput = [
            (after[0] - before_[0]) * 8e9 / max(1, after[1] - before_[1])
            for before_, after in zip(first, last, strict=True)
        ]
        return self._outcome(variant, goodput, samples, (begin_ns, end_ns), total, counters)

    def _outcome(
        self,
        variant: str,
        goodput_bit: list[float],
        samples: npt.NDArray[np.float64],
        interval_ns: tuple[int, int],
        total_bytes: list[int],
        counters: dict[str, dict[str, int]],
    ) -> Outcome:
        """Put together what was measured."""
        time_ns = samples[:, 0]
        steady = samples[(time_ns >= interval_ns[0]) & (time_ns <= interval_ns[1])]
        grid = np.arange(interval_ns[0], interval_ns[1], BIN_NS, dtype=float)
        sent_bins = np.diff(np.interp(grid, time_ns, samples[:, 1]))
        arrivals = samples[:, len(COLUMNS) :].T
        arrival_bins = [np.diff(np.interp(grid, time_ns, column)) for column in arrivals]
        span_s = (steady[-1, 0] - steady[0, 0]) / 1e9
        backlog = steady[:, 3]
        sent = sum(counters[host.netns]["sent_pkts"] for host in self.senders)
        needed = sum(total_bytes) // min(PATH_MTU_BYTES, self.load.message_bytes)
        senders = {
            key: sum(counters[host.netns][key] for host in self.senders)
            for key in ("rcvd_seq_err", "completer_retry_err", "retry_exceeded_err", "send_err")
        }
        receiver = {
            key: counters[self.receiver.netns][key]
            for key in ("duplicate_request", "out_of_seq_request", "rcvd_pkts")
        }
        drops = int(samples[-1, 4] - samples[0, 4])
        return Outcome(
            variant=variant,
            seconds=span_s,
            goodput_bit=goodput_bit,
            port_bit=(steady[-1, 1] - steady[0, 1]) * 8 / span_s,
            goodput_share=sum(goodput_bit) / self.shape.rate_bit,
            jain=jain(np.asarray(goodput_bit)),
            drops=int(steady[-1, 4] - steady[0, 4]),
            backlog_p50_bytes=float(np.percentile(backlog, 50)),
            backlog_p99_bytes=float(np.percentile(backlog, 99)),
            backlog_max_bytes=float(backlog.max()),
            arrival_bit=[_window_rate_bit(bins) for bins in arrival_bins],
            port_cov=_cov(sent_bins),
            arrival_cov=[_cov(bins) for bins in arrival_bins],
            stall_share=[float(np.mean(bins < 1)) for bins in arrival_bins],
            sent_packets_of_run=sent,
            needed_packets_of_run=needed,
            retransmitted_of_run=sent - needed,
            drops_of_run=drops,
            unexplained_of_run=sent - drops - receiver["rcvd_pkts"],
            receiver=receiver,
            senders=senders,
            samples=len(steady),
            sample_gap_max_ms=float(np.diff(samples[:, 0]).max()) / 1e6,
        )


def _cov(bins: npt.NDArray[np.float64]) -> float:
    mean = float(bins.mean())
    return float(bins.std()) / mean if mean else 0.0


def _window_rate_bit(bins: npt.NDArray[np.float64]) -> float:
    whole = len(bins) // RATE_WINDOW_BINS * RATE_WINDOW_BINS
    windows = bins[:whole].reshape(-1, RATE_WINDOW_BINS).sum(axis=1)
    return float(np.median(windows)) * 8e9 / (RATE_WINDOW_BINS * BIN_NS)
