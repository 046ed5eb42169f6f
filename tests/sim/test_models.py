"""Gradients: their sizes by the published parameter counts, and their scaled buckets."""

from __future__ import annotations

import pytest

from controller.errors import UsageError
from controller.sim.models import MODELS, bert_parameters, bucketed, find_model

KIB, MIB = 1 << 10, 1 << 20


def test_resnet50_has_the_bytes_of_the_published_trace() -> None:
    # HolisticTraceAnalysis, nccl_data.json: five AllReduce of together 102,228,128 bytes a step;
    # torchvision's ResNet-50 has 25,557,032 parameters.
    model = find_model("resnet50")
    assert model.nbytes == 102_228_128 == 4 * 25_557_032
    assert len(model.buckets_nbytes) == 5


def test_bert_large_has_the_parameters_of_its_checkpoint() -> None:
    # bert-large-uncased without heads: 335,141,888 parameters.
    assert find_model("bert-large").nbytes == 4 * 335_141_888
    # bert-base-uncased: 109,482,240.
    assert sum(bert_parameters(12, 768, 30_522, 512)) == 4 * 109_482_240


def test_the_bucket_rule_gives_the_first_bucket_of_the_trace() -> None:
    # ResNet-50 ends with a layer of 2048 x 1000 weights and 1000 biases: the trace's first bucket.
    assert bucketed([40 * MIB, 4 * 2048 * 1000, 4000])[0] == 8_196_000


def test_a_bucket_is_closed_by_the_parameter_that_fills_it() -> None:
    parameters = [10 * MIB, 20 * MIB, 5 * MIB, MIB - 4, 4, 100]
    assert bucketed(parameters) == (MIB + 100, 25 * MIB, 10 * MIB)
    assert bucketed([]) == ()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("nbytes", [4, 10_000, 333_333, 5_000_000])
def test_scaled_buckets_keep_the_sum_and_a_least_size(name: str, nbytes: int) -> None:
    buckets = find_model(name).scaled(nbytes, 96 * KIB)
    assert abs(sum(buckets) - nbytes) <= 4 * len(buckets)
    assert all(size % 4 == 0 and size > 0 for size in buckets)
    assert len(buckets) == 1 or min(buckets) >= 96 * KIB
    assert len(buckets) <= len(find_model(name).buckets_nbytes)


def test_scaled_buckets_keep_their_proportions_where_none_is_merged() -> None:
    model = find_model("resnet50")
    buckets = model.scaled(model.nbytes // 10, 1)
    for small, large in zip(buckets, model.buckets_nbytes, strict=True):
        assert small == pytest.approx(large / 10, abs=4)


def test_an_unknown_model_is_an_error_that_names_all() -> None:
    with pytest.raises(UsageError, match="'vgg16' is unknown; allowed: resnet50, bert-large"):
        find_model("vgg16")
