"""What ``controller bench allreduce`` is to measure: sizes, types, operations, repetitions."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from controller.allreduce.link import memory_needed
from controller.allreduce.reduction import Collective, DType, Op
from controller.allreduce.settings import Settings
from controller.errors import UsageError
from controller.units import BYTES_FORMS, parse_bytes

ALGORITHMS = ("auto", "ring", "halving-doubling")
ALL = "all"
# Names of nccl-tests for types of ours.
_RANKS = 512  # as many as memory is set aside for
DTYPE_ALIASES = {"half": "float16", "float": "float32", "double": "float64"}

_DEFAULT_MIN_BYTES = 1 << 20
_DEFAULT_MAX_BYTES = 16 << 20
_DEFAULT_FACTOR = 4
_DEFAULT_RANDOM_MAX_BYTES = 1 << 20
_MAX_SIZES = 10_000
# nccl-tests count in powers of 1024.
_SHORT_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([KMG])", re.IGNORECASE | re.ASCII)
_SHORT_SCALES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_size(text: str, what: str) -> int:
    """Bytes from text: ``1M`` as nccl-tests read it (powers of 1024), ``1MiB``, ``1MB``, ``4096``.

    Raises
    ------
    UsageError
        Something else.
    """
    found = _SHORT_SIZE.fullmatch(text.strip())
    if found:
        return round(float(found[1]) * _SHORT_SCALES[found[2].lower()])
    try:
        return parse_bytes(text, what)
    except UsageError:
        raise UsageError(
            f"{what} {text!r} cannot be read; allowed: 64K, 1M, 1G (powers of 1024), {BYTES_FORMS}."
        ) from None


def plan_sizes(
    min_bytes: int | None, max_bytes: int | None, factor: float | None, step_bytes: int | None
) -> tuple[int, ...]:
    """Sizes from the smallest to the largest, by a factor or by a step.

    Parameters
    ----------
    min_bytes, max_bytes
        1 MiB and 16 MiB if None; one alone moves the other where they would cross.
    factor
        Above 1; 4 if it and the step are None.
    step_bytes
        Above 0.

    Raises
    ------
    UsageError
        They contradict one another, or give more than 10,000 sizes.
    """
    if factor is not None and step_bytes is not None:
        raise UsageError("--stepfactor and --stepbytes exclude each other.")
    if min_bytes is None:
        min_bytes = min(_DEFAULT_MIN_BYTES, _DEFAULT_MAX_BYTES if max_bytes is None else max_bytes)
    if max_bytes is None:
        max_bytes = max(_DEFAULT_MAX_BYTES, min_bytes)
    if min_bytes > max_bytes:
        raise UsageError(f"--minbytes {min_bytes} is above --maxbytes {max_bytes}.")
    if step_bytes is not None and step_bytes <= 0:
        raise UsageError("--stepbytes must be above 0.")
    if factor is None and step_bytes is None:
        factor = _DEFAULT_FACTOR
    if factor is not None and not 1 < factor < float("inf"):
        raise UsageError(f"--stepfactor is {factor:g}; expected more than 1.")
    sizes = [min_bytes]
    while True:
        if step_bytes is not None:
            following = sizes[-1] + step_bytes
        else:
            # From 0 and 1, a factor alone would never get on.
            following = max(sizes[-1] + 1, int(sizes[-1] * (factor or 1)))
        if following > max_bytes:
            return tuple(sizes)
        sizes.append(following)
        if len(sizes) > _MAX_SIZES:
            raise UsageError(
                f"That makes more than {_MAX_SIZES:,} sizes.", "Take a larger step, or a factor."
            )


@dataclass(frozen=True)
class BenchPlan:
    """The same on all ranks.

    Parameters
    ----------
    collective, algorithm
        By name; ``all`` collectives: random operations only.
    sizes
        Bytes of the whole buffer, rounded down to whole elements of every rank.
    dtypes, ops
        By name; `ops` has one entry, ``none``, where nothing is reduced.
    root
        Of a broadcast.
    iters, warmup_iters
        Measured operations of each kind, and those before them.
    checks
        Checked operations of each kind; 0: none.
    random
        Operations of random kind and size in place of all that; 0: none. Their sizes reach up
        to the largest one of `sizes`.
    seed
        Of the inputs and of the random kinds.
    timeout_s
        An operation that does not move for so long fails.
    chunk_bytes
        Bytes of a message at most; None: the communicator's default.
    record
        File on rank 0's host that takes a trace of what it asks its pool for; None: no trace. The
        other ranks ask for the same in the same order.
    """

    collective: str = Collective.ALL_REDUCE.value
    algorithm: str = "auto"
    sizes: tuple[int, ...] = (1 << 20,)
    dtypes: tuple[str, ...] = ("float32",)
    ops: tuple[str, ...] = ("sum",)
    root: int = 0
    iters: int = 20
    warmup_iters: int = 1
    checks: int = 1
    random: int = 0
    seed: int = 0
    timeout_s: float = 30.0
    chunk_bytes: int | None = None
    record: str | None = None

    @property
    def max_bytes(self) -> int:
        """The largest buffer."""
        return max(self.sizes)

    def settings(self) -> Settings:
        """Of the communicator: its pool holds all buffers, however they are rounded up.

        Raises
        ------
        UsageError
            A value is out of range.
        """
        defaults = Settings()
        # A random reduce-scatter's block may be rounded up to one element of each rank. Leases are
        # blocks of powers of two.
        rounding = 8 * _RANKS if self.random else 0
        buffer_bytes = 1 << max(20, (self.max_bytes + rounding - 1).bit_length())
        chunk_bytes = self.chunk_bytes or defaults.chunk_nbytes
        links = 2 * _RANKS.bit_length()
        slots_bytes = links * memory_needed(defaults.tokens, chunk_bytes, len(defaults.classes))
        return replace(
            defaults,
            timeout_s=self.timeout_s,
            chunk_nbytes=chunk_bytes,
            # Input, output, and the working copy of a reduce_scatter; the rest is for messages.
            pool_nbytes=max(
                defaults.pool_nbytes // 2,
                4 * buffer_bytes + (1 << (slots_bytes - 1).bit_length()),
            ),
        )

    def check_root(self, ranks: int) -> None:
        """Refuse a root that no group of this size has.

        Raises
        ------
        UsageError
            There is no such rank.
        """
        if self.root >= ranks:
            raise UsageError(f"--root is {self.root}; allowed: 0 .. {ranks - 1}.")

    def to_text(self) -> str:
        """For the command line of a rank."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> BenchPlan:
        """What to_text() gave."""
        fields: dict[str, Any] = json.loads(text)
        for name in ("sizes", "dtypes", "ops"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


def make_plan(
    *,
    collective: str | None,
    algorithm: str,
    min_bytes: str | None,
    max_bytes: str | None,
    factor: float | None,
    step_bytes: str | None,
    dtype: str | None,
    op: str | None,
    random: int,
    chunk: str | None,
    **rest: Any,
) -> BenchPlan:
    """A plan from the texts of the command line.

    Parameters
    ----------
    collective, algorithm, dtype, op
        Names; ``all`` stands for all types or operations. None: all_reduce, float32 and sum;
        any, for random operations.
    min_bytes, max_bytes, factor, step_bytes
        See plan_sizes(); random operations reach from 0 bytes to `max_bytes` (1 MiB).
    random
        Operations of random kind.
    chunk
        Size of a message.
    rest
        The plan's other fields.

    Raises
    ------
    UsageError
        A value cannot be read, or contradicts another one.
    """
    least = None if min_bytes is None else parse_size(min_bytes, "--minbytes")
    most = None if max_bytes is None else parse_size(max_bytes, "--maxbytes")
    step = None if step_bytes is None else parse_size(step_bytes, "--stepbytes")
    sizes: Sequence[int]
    if random:
        if least is not None or factor is not None or step is not None:
            raise UsageError(
                "--random takes sizes from 0 to --maxbytes: --minbytes and steps exclude it."
            )
        sizes = (_DEFAULT_RANDOM_MAX_BYTES if most is None else most,)
    else:
        sizes = plan_sizes(least, most, factor, step)
    collective = collective or (ALL if random else Collective.ALL_REDUCE.value)
    dtype = dtype or (ALL if random else DType.FLOAT32.label)
    op = op or (ALL if random else Op.SUM.label)
    dtypes = [known.label for known in DType]
    ops = [known.label for known in Op]
    if dtype != ALL:
        dtypes = [DType.parse(DTYPE_ALIASES.get(dtype, dtype)).label]
    if op != ALL:
        ops = [Op.parse(op).label]
    if collective in (Collective.ALL_GATHER.value, Collective.BROADCAST.value):
        ops = ["none"]
    plan = BenchPlan(
        collective=collective,
        algorithm=algorithm,
        sizes=tuple(sizes),
        dtypes=tuple(dtypes),
        ops=tuple(ops),
        random=random,
        chunk_bytes=None if chunk is None else parse_size(chunk, "--chunk"),
        **rest,
    )
    plan.settings()  # says what is out of range before anything is built
    return plan
