"""Reads a ``[[job]]`` of a cluster scenario: a model, numbers, or a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.config_reader import Section, told_with
from controller.errors import UsageError
from controller.lab.scenario import MAX_ITERATIONS, MAX_JOBS, MAX_NICS, JobSpec
from controller.lab.trace_jobs import read_shape
from controller.priority.jobs import DEFAULT_CEILING, check_name
from controller.priority.policy import DEFAULT_MAX_SLOWDOWN
from controller.priority.ranges import MAX_BYTES, MAX_SLOWDOWN
from controller.sim.cluster.jobs import ALGORITHMS, RING, Bucket
from controller.sim.cluster.topology import LeafSpine
from controller.sim.models import MODELS, Model, find_model

_US = 1_000
_HOUR_ns = 3_600_000_000_000
_MAX_COMPUTE_ns = 100 * _HOUR_ns
_MAX_FACTORS = 100_000
# Each bucket is an event or more of the simulator; with more of them, results stay the same as
# long as a bucket is a small part of an iteration.
DEFAULT_BUCKETS, MAX_BUCKETS = 8, 256
# Backward takes twice as long as forward: two products of each matrix instead of one.
DEFAULT_FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class _Shape:
    """Times and gradient of an iteration, before the scenario's changes."""

    forward_ns: float
    backward_ns: float
    nbytes: int
    # (share of the backward pass, share of the bytes), rising.
    parts: tuple[tuple[float, float], ...]
    factors: tuple[float, ...]
    # Of a model's iteration; None: nobody knows.
    share: float | None
    gpus_per_nic: int
    source: str

    @property
    def compute_ns(self) -> float:
        return self.forward_ns + self.backward_ns


def read_job(section: Section, fabric: LeafSpine, jitter: float, folder: Path) -> JobSpec:
    """A job from its table.

    Parameters
    ----------
    section
        The table.
    fabric
        Its NICs' rate says what a share of the time is in bytes.
    jitter
        Where the job has none of its own.
    folder
        Where its trace is looked for.

    Raises
    ------
    UsageError
        A key is missing, unknown or has a wrong value.
    InputError
        Its trace cannot be read.
    """
    section.require("name", "a name")
    section.require("nics", "a number of NICs, or a list of them")
    name = str(section.text("name", ""))
    with told_with(section.where("name")):
        check_name(name)
    places, nics = _nics(section, fabric)
    shape = _shape(section, folder)
    forward_ns, backward_ns, nbytes = _times_and_bytes(section, shape, nics, fabric.nic_Bps)
    if section.flag("overlap", True):
        buckets = _buckets(shape.parts, nbytes)
    else:
        # What is sent back to back is one bucket.
        buckets = (Bucket(1.0, nbytes),)
    values: dict[str, Any] = {
        "algorithm": section.text("algorithm", RING, ALGORITHMS),
        "jitter": section.share("jitter", jitter),
        "count": section.integer("count", 1, 1, MAX_JOBS),
        "gpus_per_nic": section.integer("gpus_per_nic", shape.gpus_per_nic, 1, 1024),
        "traffic_class": section.integer("class", None, 0, DEFAULT_CEILING),
        "max_slowdown": section.number("max_slowdown", DEFAULT_MAX_SLOWDOWN, 1, MAX_SLOWDOWN),
        "arrival_ns": float(section.duration("arrival", 0, 0, _MAX_COMPUTE_ns)),
        "every_ns": float(section.duration("every", 0, 0, _MAX_COMPUTE_ns)),
        "iterations": section.integer("iterations", 0, 1, MAX_ITERATIONS),
    }
    section.finish()
    return JobSpec(
        name, nics, forward_ns, backward_ns, buckets, factors=shape.factors, places=places,
        source=shape.source, **values,
    )  # fmt: skip


def _nics(section: Section, fabric: LeafSpine) -> tuple[tuple[int, ...], int]:
    """NICs by number, if they are, and how many."""
    value = section.raw("nics", None)
    numbers = value if isinstance(value, list) else [value]
    if any(not isinstance(each, int) or isinstance(each, bool) for each in numbers):
        raise _wrong(section, "nics", value, "a number of NICs, or a list of them")
    if not isinstance(value, list):
        if not 2 <= value <= MAX_NICS:
            raise _wrong(section, "nics", value, f"2 .. {MAX_NICS}")
        return (), value
    if len(value) < 2 or len(set(value)) < len(value) or not _all_known(value, fabric):
        raise _wrong(section, "nics", value, f"two or more of 0 .. {fabric.nics - 1}, each once")
    return tuple(value), len(value)


def _all_known(nics: list[int], fabric: LeafSpine) -> bool:
    return min(nics) >= 0 and max(nics) < fabric.nics


def _shape(section: Section, folder: Path) -> _Shape:
    """What the job is made of: a model, a trace, or numbers alone."""
    model_name = section.text("model", None, tuple(MODELS))
    trace = section.text("trace", None)
    factors = section.raw("factors", None)
    count = section.integer("buckets", DEFAULT_BUCKETS, 1, MAX_BUCKETS)
    microbatches = section.integer("microbatches", None, 1, 100_000)
    if microbatches is not None and model_name is None:
        raise UsageError(
            f"{section.where('microbatches')} is given without a model; allowed: with one only.",
            "Leave it out, or name a model.",
        )
    if trace is not None and factors is not None:
        raise UsageError(
            f"{section.where('factors')} is given beside a trace; allowed: one of both.",
            "Leave one of them out.",
        )
    numbers = _factors(section, factors)
    if model_name is not None:
        shape = _of_model(find_model(model_name), count, microbatches or 0, numbers)
    else:
        parts = tuple(((part + 1) / count, (part + 1) / count) for part in range(count))
        shape = _Shape(0.0, 0.0, 0, parts, numbers, None, 1, "given numbers")
    if trace is None:
        return shape
    recorded = read_shape(folder / trace)
    whole_ns = shape.compute_ns or recorded.compute_ns
    forward = shape.forward_ns / whole_ns if shape.forward_ns else DEFAULT_FORWARD_SHARE
    return _Shape(
        recorded.compute_ns * forward,
        recorded.compute_ns * (1 - forward),
        recorded.window_nbytes or shape.nbytes,
        shape.parts,
        recorded.factors,
        shape.share,
        shape.gpus_per_nic,
        f"{recorded.source}{f', buckets of {model_name}' if model_name else ''}",
    )


def _of_model(model: Model, count: int, microbatches: int, factors: tuple[float, ...]) -> _Shape:
    forward_ns, backward_ns = model.passes_ns(microbatches)
    parts, sent = [], 0
    for share, nbytes in model.merged(count):
        sent += nbytes
        parts.append((share, sent / model.nbytes))
    return _Shape(
        forward_ns, backward_ns, model.nbytes, tuple(parts), factors, model.share,
        model.gpus_per_nic, model.name,
    )  # fmt: skip


def _factors(section: Section, value: Any) -> tuple[float, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not 2 <= len(value) <= _MAX_FACTORS:
        raise _wrong(section, "factors", value, f"a list of 2 .. {_MAX_FACTORS} numbers")
    for each in value:
        # `not .. <= ..` so that NaN fails.
        if isinstance(each, bool) or not isinstance(each, int | float) or not 0 < each <= 1000:
            raise _wrong(section, "factors", each, "numbers above 0 .. 1000")
    return tuple(float(each) for each in value)


def _times_and_bytes(
    section: Section, shape: _Shape, nics: int, nic_Bps: float
) -> tuple[float, float, int]:
    """Forward pass, backward pass and bytes after the scenario's changes."""
    period_ns = section.duration("period", None, _US, _MAX_COMPUTE_ns)
    share = section.number("share", None, 0, 0.999, above=True)
    compute_ns: float | None = section.duration("compute", None, _US, _MAX_COMPUTE_ns)
    usual = shape.forward_ns / shape.compute_ns if shape.compute_ns else DEFAULT_FORWARD_SHARE
    forward = section.number("forward_share", usual, 0, 1)
    nbytes = section.size("bytes", None, 1, MAX_BYTES)
    if period_ns is not None and (compute_ns is not None or nbytes is not None):
        other = "compute" if compute_ns is not None else "bytes"
        raise UsageError(
            f"{section.where('period')} is given beside {other}; allowed: period and share, or "
            "compute and bytes.",
            f"Leave period or {other} out.",
        )
    if share is not None and nbytes is not None:
        raise UsageError(
            f"{section.where('share')} is given beside bytes; allowed: one of both.",
            "Leave one of them out.",
        )
    if period_ns is not None:
        share = share or shape.share
        if share is None:
            section.require("share", "above 0 .. 0.999, where a period is given without a model")
        assert share is not None
        compute_ns = period_ns * (1 - share)
    compute_ns = compute_ns or shape.compute_ns
    if not compute_ns:
        raise UsageError(
            f"{section.label} has no compute time; allowed: a model, a trace, compute and bytes, "
            "or period and share.",
            "Add one of these.",
        )
    if share is not None:
        window_ns = compute_ns * share / (1 - share)
        # A ring carries 2 (n - 1) / n of the gradient on each link.
        nbytes = max(1, round(window_ns / 1e9 * nic_Bps * nics / (2 * (nics - 1))))
    nbytes = nbytes or shape.nbytes
    if not nbytes:
        raise UsageError(
            f"{section.label} has no gradient; allowed: a model, bytes, a share, or a trace that "
            "tells them.",
            "Add one of these.",
        )
    return compute_ns * forward, compute_ns * (1 - forward), nbytes


def _buckets(parts: tuple[tuple[float, float], ...], nbytes: int) -> tuple[Bucket, ...]:
    """The gradient cut at shares of its bytes; parts of nothing are left out."""
    buckets, sent = [], 0
    for ready, share in parts:
        end = round(share * nbytes)
        if end > sent:
            buckets.append(Bucket(ready, end - sent))
            sent = end
    return tuple(buckets)


def _wrong(section: Section, key: str, value: Any, allowed: str) -> UsageError:
    text = repr(value)
    if len(text) > 80:
        text = f"{text[:80]}..."
    return UsageError(f"{section.where(key)} is {text}; allowed: {allowed}.", "Correct it.")
