"""Compression: what is left out comes later, all ranks get the same, the ratio is the real one."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from controller.allreduce import half
from controller.allreduce.compression import Cast, Compression, TopK
from controller.allreduce.reduction import DType
from controller.allreduce.schedule import Algorithm, plan_all_gather, plan_all_reduce
from controller.errors import InputError, UsageError

Array = npt.NDArray[Any]

casts = pytest.mark.parametrize("short", [DType.FLOAT16, DType.BFLOAT16], ids=lambda d: d.label)
sources = pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64], ids=lambda d: d.label)


def gradients(count: int, dtype: DType, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=count).astype(dtype.numpy)


@casts
@sources
def test_a_cast_is_that_of_numpy_and_back_without_loss(short: DType, dtype: DType) -> None:
    for count in (0, 1, half.BLOCK + 3):
        array = gradients(count, dtype)
        unchanged = array.copy()
        cast = Cast(short.label)
        wire = cast.compress(array)
        np.testing.assert_array_equal(wire, array.astype(short.numpy))
        np.testing.assert_array_equal(array, unchanged)
        out = np.empty_like(array)
        cast.restore(wire, out)
        np.testing.assert_array_equal(out, wire.astype(dtype.numpy))
        assert cast.overflowed == 0


@sources
def test_elements_beyond_float16_become_infinite_and_are_counted(dtype: DType) -> None:
    array = np.array([65504, 65520, -1e9, np.inf, -np.inf, np.nan, 0], dtype.numpy)
    cast = Cast(DType.FLOAT16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wire = cast.compress(array)
        wire = cast.compress(array[:5], wire[:5])
    assert wire.tolist() == [65504, np.inf, -np.inf, np.inf, -np.inf]
    assert cast.overflowed == 4


def test_a_cast_writes_where_it_is_told() -> None:
    array, out = gradients(100, DType.FLOAT32), np.empty(100, np.float16)
    cast = Cast(DType.FLOAT16)
    assert cast.compress(array, out) is out
    np.testing.assert_array_equal(out, array.astype(np.float16))
    with pytest.raises(ValueError, match="out is"):
        cast.compress(array, np.empty(99, np.float16))
    with pytest.raises(ValueError, match="do not stand for"):
        cast.restore(out, np.empty(99, np.float32))


@sources
@pytest.mark.parametrize("density", [0.01, 0.3, 1.0])
def test_what_was_sent_and_the_residual_are_all_that_was_given(
    dtype: DType, density: float
) -> None:
    # Integers, so that sums are exact.
    generator = np.random.default_rng(3)
    given, sent = np.zeros(500, dtype.numpy), np.zeros(500, dtype.numpy)
    compression = TopK(density)
    step, out = np.empty(500, dtype.numpy), np.empty(500, dtype.numpy)
    for _ in range(40):
        step[:] = generator.integers(-1000, 1000, 500)
        given += step
        compression.decompress_sum([compression.compress(step, "layer")], out)
        assert np.count_nonzero(out) <= compression.selected(500)
        sent += out
    residual = compression.residual("layer")
    assert residual is not None
    np.testing.assert_array_equal(sent + residual, given)
    if density == 1:
        assert not residual.any()


def test_every_element_that_keeps_coming_is_sent_in_the_end() -> None:
    # Small ones grow in the residual until they are the largest.
    step = np.linspace(0.1, 1, 100, dtype=np.float32)
    compression, total, out = TopK(0.05), np.zeros(100), np.empty(100, np.float32)
    for _ in range(2000):
        compression.decompress_sum([compression.compress(step, 0)], out)
        total += out
    np.testing.assert_allclose(total, 2000 * step.astype(np.float64), rtol=0.1)


def test_the_largest_magnitudes_are_selected() -> None:
    array = np.array([1, -9, 3, 0, 8, -2], np.float32)
    compression, out = TopK(0.5), np.empty(6, np.float32)
    compression.decompress_sum([compression.compress(array, None)], out)
    assert out.tolist() == [0, -9, 3, 0, 8, 0]
    residual = compression.residual(None)
    assert residual is not None
    assert residual.tolist() == [1, 0, 0, 0, 0, -2]
    assert array.tolist() == [1, -9, 3, 0, 8, -2]


@sources
def test_selections_of_all_ranks_add_up_in_the_order_of_ranks(dtype: DType) -> None:
    ranks = [(TopK(0.4), gradients(50, dtype, seed)) for seed in range(5)]
    packed = [compression.compress(array, "w") for compression, array in ranks]
    expected = np.zeros(50, dtype.numpy)
    for compression, array in ranks:
        residual = compression.residual("w")
        assert residual is not None
        expected += array - residual
    results = set()
    for compression, _ in ranks:
        out = np.full(50, np.nan, dtype.numpy)
        compression.decompress_sum(packed, out)
        results.add(out.tobytes())
    assert results == {expected.tobytes()}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_at_least_one_element_of_a_short_array_is_sent(count: int) -> None:
    compression = TopK(1e-9)
    array = gradients(count, DType.FLOAT32)
    packed = compression.compress(array, "short")
    assert packed.dtype == np.int8
    assert packed.nbytes == compression.wire_nbytes(count, DType.FLOAT32) == 8 * min(count, 1)
    out = np.ones(count, np.float32)
    compression.decompress_sum([packed, packed], out)
    assert np.count_nonzero(out) == min(count, 1)
    assert compression.ratio > 0


def test_an_overflow_is_passed_on_at_once_and_does_not_stay() -> None:
    compression, out = TopK(0.02), np.empty(100, np.float32)
    spoilt = np.ones(100, np.float32)
    spoilt[10:20] = np.nan
    spoilt[30] = np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compression.decompress_sum([compression.compress(spoilt, "k")], out)
    assert not np.isfinite(out).all()
    residual = compression.residual("k")
    assert residual is not None
    assert residual.sum() == 100 - 11


def test_keys_have_residuals_of_their_own_until_forgotten() -> None:
    compression = TopK(0.5)
    compression.compress(np.array([1, 2], np.float32), "a")
    assert compression.residual("b") is None
    with pytest.raises(UsageError, match=r"Key 'a' of top-k of density 0.5 is now 3 float32"):
        compression.compress(np.zeros(3, np.float32), "a")
    compression.forget("a")
    compression.forget("a")
    compression.compress(np.zeros(3, np.float32), "a")


def test_selections_that_do_not_fit_are_refused_with_their_rank() -> None:
    compression, out = TopK(0.1), np.empty(40, np.float32)
    good = compression.compress(gradients(40, DType.FLOAT32), 0)
    for indices in ((-1, 3, 4, 5), (1, 2, 3, 40), (1, 2, 2, 3), (4, 3, 2, 1)):
        bad = good.copy()
        bad[16:].view(np.int32)[:] = indices
        with pytest.raises(InputError, match="Rank 1 sent indices"):
            compression.decompress_sum([good, bad], out)
    with pytest.raises(InputError, match=r"Rank 0 sent 24 bytes of top-k of density 0.1, not 32"):
        compression.decompress_sum([good[:24], good], out)


def test_the_ratio_counts_all_bytes_of_the_last_array() -> None:
    cast, top = Cast(DType.BFLOAT16), TopK(0.01)
    assert (cast.ratio, round(top.ratio, 4)) == (0.5, 0.02)
    cast.compress(np.zeros(10, np.float64))
    assert cast.ratio == 0.25
    # Four bytes of index to eight of value.
    assert top.compress(np.zeros(1000, np.float64), 0).nbytes == 10 * 12
    assert top.ratio == 0.015


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("compression", [Cast(DType.FLOAT16), TopK(0.1)], ids=str)
def test_the_ratio_of_traffic_is_that_of_the_plans(compression: Compression, size: int) -> None:
    count = 800
    plain = plan_all_reduce(Algorithm.RING, 0, size, count, count)
    before = 4 * sum(send.stop - send.start for send in plain.sends)
    nbytes = compression.wire_nbytes(count, DType.FLOAT32)
    if isinstance(compression, TopK):
        gather = plan_all_gather(Algorithm.RING, 0, size, nbytes, nbytes)
        after = sum(send.stop - send.start for send in gather.sends)
    else:
        after = 2 * sum(send.stop - send.start for send in plain.sends)
    ratio = compression.traffic_ratio(count, DType.FLOAT32, size)
    assert after / before == pytest.approx(ratio)


def test_what_cannot_be_compressed_is_refused() -> None:
    with pytest.raises(UsageError, match="cast to bfloat16 was given int32; allowed: float32"):
        Cast().compress(np.zeros(3, np.int32))
    with pytest.raises(UsageError, match=r"density 0.5 was given float16"):
        TopK(0.5).compress(np.zeros(3, np.float16), 0)
    with pytest.raises(UsageError, match="Cast is to float32; allowed: float16, bfloat16"):
        Cast("float32")
    for density in (0, -1, 1.1, float("nan")):
        with pytest.raises(UsageError, match="Density is"):
            TopK(density)
    with pytest.raises(ValueError, match="2 dimensions"):
        TopK(0.5).compress(np.zeros((2, 2), np.float32), 0)
    with pytest.raises(ValueError, match="out is"):
        TopK(0.5).compress(np.zeros(4, np.float32), 0, np.empty(3, np.int8))


def test_kinds_of_compression_have_different_numbers() -> None:
    kinds = [Cast(DType.FLOAT16), Cast(DType.BFLOAT16), TopK(0.5)]
    assert [each.wire_id for each in kinds] == [1, 2, 3]
