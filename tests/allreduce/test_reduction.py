"""Reductions: every type and operation, exactly; float16 by way of float32 as numpy has it."""

from __future__ import annotations

import warnings
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from controller.allreduce import half
from controller.allreduce.reduction import (
    Collective,
    DType,
    Op,
    bus_factor,
    finish,
    reduce_into,
)
from controller.errors import UsageError

Array = npt.NDArray[Any]

FLOATS = [each for each in DType if each.label.lstrip("b").startswith("float")]
INTEGERS = [each for each in DType if each not in FLOATS]

dtypes = pytest.mark.parametrize("dtype", DType, ids=lambda each: each.label)
floats = pytest.mark.parametrize("dtype", FLOATS, ids=lambda each: each.label)
integers = pytest.mark.parametrize("dtype", INTEGERS, ids=lambda each: each.label)
ops = pytest.mark.parametrize("op", Op, ids=lambda each: each.label)

# Below and above what is done by numpy itself, on both sides of a block, and several.
LENGTHS = (0, 1, 1000, half.BLOCK - 1, half.BLOCK, 2 * half.BLOCK + 17)


def bits(array: Array) -> Array:
    return array.view(f"u{array.itemsize}")


def random_numbers(dtype: DType, count: int, seed: int) -> Array:
    generator = np.random.default_rng(seed)
    if dtype in INTEGERS:
        limits = np.iinfo(dtype.numpy)
        return generator.integers(limits.min, limits.max, count, dtype.numpy, endpoint=True)
    return (generator.normal(size=count) * 8).astype(dtype.numpy)


def every_half(seed: int) -> npt.NDArray[np.float16]:
    """All float16 in a random order, twice."""
    found = np.arange(1 << 16, dtype=np.uint16).repeat(2)
    np.random.default_rng(seed).shuffle(found)
    return found.view(np.float16)


@dtypes
@ops
def test_a_reduction_is_the_operation_rounded_once(dtype: DType, op: Op) -> None:
    ufuncs = {Op.SUM: np.add, Op.AVG: np.add, Op.PROD: np.multiply}
    ufunc = ufuncs.get(op, np.maximum if op is Op.MAX else np.minimum)
    # float64 holds sums of these 16-bit floats in full, and of float32 up to a harmless rounding.
    wide = dtype.numpy if dtype in (*INTEGERS, DType.FLOAT64) else np.dtype(np.float64)
    for count in LENGTHS:
        accumulator, incoming = (random_numbers(dtype, count, seed) for seed in (1, 2))
        with np.errstate(all="ignore"):
            expected = ufunc(accumulator.astype(wide), incoming.astype(wide)).astype(dtype.numpy)
        unchanged = incoming.copy()
        reduce_into(op, dtype, accumulator, incoming)
        np.testing.assert_array_equal(bits(accumulator), bits(expected))
        np.testing.assert_array_equal(bits(incoming), bits(unchanged))


@integers
def test_integers_wrap_as_in_c(dtype: DType) -> None:
    width = 8 * dtype.numpy.itemsize
    left, right = (random_numbers(dtype, 500, seed) for seed in (3, 4))
    for op, exact in (
        (Op.SUM, [int(a) + int(b) for a, b in zip(left, right, strict=True)]),
        (Op.PROD, [int(a) * int(b) for a, b in zip(left, right, strict=True)]),
    ):
        accumulator = left.copy()
        reduce_into(op, dtype, accumulator, right)
        half_range = 1 << (width - 1)
        wrapped = [(value + half_range) % (2 * half_range) - half_range for value in exact]
        assert accumulator.tolist() == wrapped


@integers
@pytest.mark.parametrize("size", [2, 3, 8, 300])
def test_an_average_of_integers_is_truncated_towards_zero(dtype: DType, size: int) -> None:
    limits = np.iinfo(dtype.numpy)
    array = random_numbers(dtype, 1000, 5)
    array[:8] = [limits.min, limits.min + 1, -1, 0, 1, limits.max, -size % 100, -7]
    expected = [int(Fraction(int(value), size)) for value in array]
    finish(Op.AVG, dtype, array, size)
    assert array.tolist() == expected


@floats
@pytest.mark.parametrize("size", [2, 3, 5, 8, 3000, 70_000])
def test_an_average_of_floats_is_divided_with_one_rounding(dtype: DType, size: int) -> None:
    array = random_numbers(dtype, 2 * half.BLOCK + 5, 6)
    if dtype is DType.FLOAT64:
        expected = array / size
    else:
        expected = (array.astype(np.float64) / size).astype(dtype.numpy)
    finish(Op.AVG, dtype, array, size)
    np.testing.assert_array_equal(bits(array), bits(expected))


@dtypes
@pytest.mark.parametrize("op", [op for op in Op if op is not Op.AVG], ids=lambda each: each.label)
def test_only_averages_are_divided(dtype: DType, op: Op) -> None:
    array = random_numbers(dtype, 100, 7)
    unchanged = array.copy()
    finish(op, dtype, array, 3)
    np.testing.assert_array_equal(bits(array), bits(unchanged))


@floats
@ops
def test_nan_on_either_side_gives_nan(dtype: DType, op: Op) -> None:
    for count in (4, 20_000):
        clean = np.ones(count, dtype.numpy)
        with_nan = clean.copy()
        with_nan[count // 2] = np.nan
        for left, right in ((clean, with_nan), (with_nan, clean)):
            accumulator = left.copy()
            reduce_into(op, dtype, accumulator, right)
            found = np.isnan(accumulator)
            assert found[count // 2]
            assert found.sum() == 1


@floats
def test_an_overflow_is_infinite_and_warns_nobody(dtype: DType) -> None:
    info = ml_dtypes.finfo(dtype.numpy)
    for count in (4, 20_000):
        accumulator = np.full(count, info.max, dtype.numpy)
        accumulator[0] = info.min
        incoming = accumulator.copy()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            reduce_into(Op.SUM, dtype, accumulator, incoming)
            finish(Op.AVG, dtype, accumulator, 2)
        assert accumulator[0] == -np.inf
        assert (accumulator[1:] == np.inf).all()


@pytest.mark.parametrize("finite", [False, True])
def test_float16_sums_are_those_of_numpy_bit_for_bit(finite: bool) -> None:
    for seed in range(4):
        left, right = every_half(2 * seed), every_half(2 * seed + 1)
        if finite:
            left, right = (
                np.where(np.isfinite(each), each, np.float16(-0.0)) for each in (left, right)
            )
        with np.errstate(all="ignore"):
            expected = left + right
        half.add(left, right)
        np.testing.assert_array_equal(bits(left), bits(expected))


def test_widening_gives_every_float16_its_float32() -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    for source in (every, every[np.isfinite(every)]):
        for start in range(0, source.size, half.BLOCK):
            block = source[start : start + half.BLOCK]
            out = np.empty(block.size, np.float32)
            half.widen(block, out, half.Scratch())
            np.testing.assert_array_equal(bits(out), bits(block.astype(np.float32)))


def test_arrays_that_do_not_fit_together_are_refused() -> None:
    array = np.zeros(4, np.float32)
    for accumulator, incoming, dtype in (
        (array, np.zeros(1, np.float32), DType.FLOAT32),
        (array, np.zeros(4, np.float64), DType.FLOAT32),
        (array, array.copy(), DType.INT32),
        (array.reshape(2, 2), np.ones((2, 2), np.float32), DType.FLOAT32),
    ):
        with pytest.raises(ValueError, match="are not"):
            reduce_into(Op.SUM, dtype, accumulator, incoming)


def test_the_numbers_on_the_wire_stay_as_they_are() -> None:
    assert {each.label: int(each) for each in DType} == {
        "int8": 0,
        "int32": 2,
        "int64": 4,
        "float16": 6,
        "float32": 7,
        "float64": 8,
        "bfloat16": 9,
    }
    assert {each.label: int(each) for each in Op} == {
        "sum": 0,
        "prod": 1,
        "max": 2,
        "min": 3,
        "avg": 4,
    }


@dtypes
def test_a_type_is_found_by_its_name_and_by_an_array_of_it(dtype: DType) -> None:
    assert DType.parse(dtype.label) is dtype
    assert DType.of(np.zeros(1, dtype.numpy).dtype) is dtype


def test_unknown_types_and_operations_are_refused_with_what_is_allowed() -> None:
    with pytest.raises(UsageError, match=r"'float8'; allowed: int8, int32, .*bfloat16"):
        DType.parse("float8")
    with pytest.raises(UsageError, match="complex64; allowed: int8"):
        DType.of(np.complex64)
    with pytest.raises(UsageError, match=r"allowed: int8.* native byte order"):
        DType.of(np.dtype(np.float32).newbyteorder())
    with pytest.raises(UsageError, match="'xor'; allowed: sum, prod, max, min, avg"):
        Op.parse("xor")


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert bus_factor(Collective.ALL_REDUCE, 4) == 1.5
    assert bus_factor(Collective.REDUCE_SCATTER, 4) == 0.75
    assert bus_factor(Collective.ALL_GATHER, 4) == 0.75
    assert bus_factor(Collective.BROADCAST, 4) == 1
    assert bus_factor(Collective.ALL_REDUCE, 1) == 0
