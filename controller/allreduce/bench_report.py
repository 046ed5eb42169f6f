"""Results of ``controller bench allreduce``: JSON, and a table in the columns of nccl-tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from controller.allreduce.bench_plan import ALL
from controller.allreduce.reduction import Collective, bus_factor


@dataclass(frozen=True)
class BenchResult:
    """One size, type and operation, in place or out of place.

    Parameters
    ----------
    bytes
        Of the whole buffer: of all ranks' parts for reduce_scatter and all_gather.
    count
        Elements, of one rank's part there.
    dtype, op, root
        ``op`` is ``none`` and ``root`` -1 where there is none.
    algorithm
        What ran: ``ring``, ``halving-doubling``, or ``broadcast``.
    in_place
        Whether input and output are the same memory.
    time_us
        Average of the iterations on the rank where it was longest, in microseconds.
    algbw_GBps, busbw_GBps
        In units of 10^9 bytes a second; see `reduction.bus_factor`.
    wrong
        Elements that differ from the exact result, over all ranks; None: not checked.
    """

    bytes: int
    count: int
    dtype: str
    op: str
    root: int
    algorithm: str
    in_place: bool
    time_us: float
    algbw_GBps: float
    busbw_GBps: float
    wrong: int | None

    @classmethod
    def of(
        cls, collective: Collective, ranks: int, *, nbytes: int, time_us: float, **rest: Any
    ) -> BenchResult:
        """Put the bandwidths to a time; both are 0 for no bytes."""
        algbw = nbytes / time_us / 1e3 if time_us > 0 else 0.0
        return cls(
            bytes=nbytes,
            time_us=round(time_us, 3),
            algbw_GBps=round(algbw, 6),
            busbw_GBps=round(algbw * bus_factor(collective, ranks), 6),
            **rest,
        )

    def row(self) -> str:
        """The line of the table."""
        wrong = "N/A" if self.wrong is None else f"{self.wrong}"
        return (
            f"{self.bytes:>11}{self.count:>11}{self.dtype:>9}{self.op:>5}{self.root:>5}"
            f"{'in' if self.in_place else 'out':>4}{_digits(self.time_us):>10}"
            f"{self.algbw_GBps:>9.4f}{self.busbw_GBps:>9.4f}{wrong:>7}"
        )


@dataclass(frozen=True)
class RandomResult:
    """Many operations of random collective, size, type, operation and placement.

    Parameters
    ----------
    operations, wrong_operations
        All, and those with a wrong element on any rank.
    elements, wrong
        Elements checked and elements wrong, over all ranks.
    seed
        Gives the same operations again.
    seconds
        For all of them.
    by_collective
        Operations of each.
    """

    operations: int
    wrong_operations: int
    elements: int
    wrong: int
    seed: int
    seconds: float
    by_collective: Mapping[str, int]

    def lines(self) -> list[str]:
        """For the report."""
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(self.by_collective.items()))
        return [
            f"{self.operations:,} random operations in {self.seconds:.1f} s (seed {self.seed}):",
            f"  {kinds}",
            f"  {self.elements:,} elements checked, {self.wrong:,} wrong "
            f"in {self.wrong_operations:,} operations",
        ]


@dataclass(frozen=True)
class BenchReport:
    """All results of one run.

    Parameters
    ----------
    ranks, collective
        Who did what.
    results
        In the order of the measurements.
    facts
        What the numbers depend on: ``devices``, ``algorithm``, ``chunk_bytes``, ``kernel``, ...
    random
        The outcome of ``--random``.
    limit_GBps
        Goodput of one link of as many concurrent ``ib_write_bw`` as ranks, in a ring; None:
        not measured.
    peers
        busbw of other implementations at the largest size, in GB/s.
    peer_results
        The same for every size: name -> {bytes: busbw_GBps}.
    notes
        What was left out, and why.
    """

    ranks: int
    collective: str
    results: tuple[BenchResult, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    random: RandomResult | None = None
    limit_GBps: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)
    peer_results: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def wrong(self) -> int:
        """Wrong elements of everything that was checked."""
        random = self.random.wrong if self.random else 0
        return random + sum(result.wrong or 0 for result in self.results)

    @property
    def checked(self) -> bool:
        """Whether anything was checked."""
        return self.random is not None or any(r.wrong is not None for r in self.results)

    @property
    def average_busbw_GBps(self) -> float:
        """Mean of all results, as nccl-tests print it."""
        return sum(r.busbw_GBps for r in self.results) / max(1, len(self.results))

    def with_notes(self, *notes: str) -> BenchReport:
        """The same with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        document = asdict(self)
        document["peer_results"] = {
            name: [{"bytes": size, "busbw_GBps": value} for size, value in sorted(found.items())]
            for name, found in self.peer_results.items()
        }
        document["wrong"] = self.wrong if self.checked else None
        document["average_busbw_GBps"] = round(self.average_busbw_GBps, 6)
        return document

    def head(self) -> list[str]:
        """Lines above the table; all of them comments."""
        facts = self.facts
        what = "all collectives" if self.collective == ALL else self.collective
        lines = [f"# {what}, {self.ranks} rank{'s' if self.ranks > 1 else ''}, "
                 f"algorithm {facts.get('algorithm', 'auto')}" + _extras(facts)]  # fmt: skip
        lines += [f"#   rank {rank}: {name}" for rank, name in enumerate(facts.get("devices", ()))]
        if self.random is None:
            lines += table_head()
        return lines

    def foot(self) -> list[str]:
        """Lines below the table."""
        lines: list[str] = []
        if self.random:
            lines += self.random.lines()
        if self.checked:
            lines.append(f"# Out of bounds values: {self.wrong} {'FAILED' if self.wrong else 'OK'}")
        if self.results:
            lines.append(f"# Avg bus bandwidth   : {self.average_busbw_GBps:.4f} GB/s")
            used = sorted({result.algorithm for result in self.results})
            if len(used) > 1:
                lines += [f"#   {name}: {_sizes(self.results, name)}" for name in used]
        if self.limit_GBps is not None:
            lines += self._beside()
        lines += [f"# {note}" for note in self.notes]
        return lines

    def _beside(self) -> list[str]:
        """Ours and the others' beside the limit, for each size."""
        limit = self.limit_GBps or 0.0
        ours: dict[int, float] = {}
        for result in self.results:
            ours[result.bytes] = max(ours.get(result.bytes, 0.0), result.busbw_GBps)
        columns: dict[str, Mapping[int, float]] = {"stellar": ours, **self.peer_results}
        lines = [
            f"# {self.ranks} concurrent ib_write_bw in a ring: {limit:.4f} GB/s each. busbw, "
            "share of that:",
            f"#{'size':>11}" + "".join(f"{name:>18}" for name in columns),
        ]
        for size in sorted(ours):
            cells = "".join(f"{_cell(values.get(size), limit):>18}" for values in columns.values())
            lines.append(f"#{size:>11}{cells}")
        return lines

    def to_text(self) -> str:
        """Return the whole report, at most 80 columns wide where names are short."""
        rows = [result.row() for result in self.results]
        return "\n".join([*self.head(), *rows, *self.foot()])


def table_head() -> list[str]:
    """The two lines with names and units of the columns."""
    return [
        f"#{'size':>10}{'count':>11}{'type':>9}{'op':>5}{'root':>5}{'':>4}{'time':>10}"
        f"{'algbw':>9}{'busbw':>9}{'#wrong':>7}",
        f"#{'(B)':>10}{'(elements)':>11}{'':>23}{'(us)':>10}{'(GB/s)':>9}{'(GB/s)':>9}",
    ]


def _extras(facts: Mapping[str, Any]) -> str:
    text = ""
    if chunk := facts.get("chunk_bytes"):
        text += f", chunks of {chunk} B"
    if kernel := facts.get("kernel"):
        text += f", Linux {kernel}"
    return text


def _digits(time_us: float) -> str:
    """Microseconds with as many decimal places as help."""
    return f"{time_us:.2f}" if time_us < 1e5 else f"{time_us:.0f}"


def _cell(value: float | None, limit: float) -> str:
    if value is None:
        return "-"
    return f"{value:.4f} ({value / limit:.2f})" if limit else f"{value:.4f}"


def _sizes(results: Sequence[BenchResult], algorithm: str) -> str:
    sizes = sorted({result.bytes for result in results if result.algorithm == algorithm})
    if len(sizes) == 1:
        return f"{sizes[0]} B"
    return f"{sizes[0]} .. {sizes[-1]} B"
