"""Compute times and readiness of buckets, by published numbers."""

from __future__ import annotations

import itertools

import pytest

from controller.sim.models import (
    MODELS,
    bucketed,
    find_model,
    gpt_parameters,
    llama_parameters,
    ready_shares,
)

MIB = 1 << 20


def test_gpt2_xl_has_the_parameters_of_its_checkpoint():
    # The published checkpoint of GPT-2 1.5B.
    assert sum(gpt_parameters(48, 1600, 50_257, 1024)) == 1_557_611_200
    assert find_model("gpt2-xl").nbytes == 2 * 1_557_611_200


def test_llama_7b_has_the_parameters_of_its_checkpoint():
    assert sum(llama_parameters(32, 4096, 11_008, 32_000)) == 6_738_415_616


@pytest.mark.parametrize(
    ("name", "ranks", "nbytes"),
    # AICB's workloads: gradients of 2 bytes on each of `ranks` tensor-parallel ranks.
    [("gpt3-13b", 8, 3_248_619_520), ("llama-7b", 2, 6_754_926_592)],
)
def test_gradients_have_the_bytes_of_measured_workloads(name, ranks, nbytes):
    # Ranks keep copies of small parameters, and pad the vocabulary.
    assert find_model(name).nbytes == pytest.approx(ranks * nbytes, rel=0.012)


def test_resnet50_has_the_step_of_its_trace():
    model = find_model("resnet50")
    # HolisticTraceAnalysis, nccl_data.json: 220.5 ms from a first AllReduce to the next.
    assert sum(model.passes_ns()) == pytest.approx(220.5e6)


def test_gpt_13b_computes_as_long_as_its_profile():
    # AICB: 40 layers of 752 + 750 us forward, twice as much backward, each sequence; the head
    # and the embedding come to 3 % more.
    forward_ns, backward_ns = find_model("gpt3-13b").passes_ns(microbatches=1)
    assert forward_ns == pytest.approx(40 * 1_502_000, rel=0.03)
    assert forward_ns >= 40 * 1_502_000
    assert backward_ns == pytest.approx(2 * forward_ns)


def test_bert_large_computes_as_fast_as_it_was_measured():
    # 28.28 sentences a second, 14 in a step.
    assert sum(find_model("bert-large").passes_ns()) == pytest.approx(14 / 28.28 * 1e9)


def test_only_the_last_backward_pass_sends():
    model = find_model("llama-7b")
    before_ns, last_ns = model.passes_ns(microbatches=4)
    assert last_ns == model.backward_ns
    assert before_ns + last_ns == pytest.approx(4 * (model.forward_ns + model.backward_ns))


def test_a_bucket_is_ready_when_backward_has_passed_its_last_parameter():
    parameters = [30 * MIB, 20 * MIB, 10 * MIB, MIB]
    work = [0.0, 3.0, 2.0, 1.0]
    assert bucketed(parameters) == (MIB, 30 * MIB, 30 * MIB)
    assert ready_shares(parameters, work) == pytest.approx((1 / 6, 1, 1))
    # A head that shares the embedding's matrix comes first, and delays all others.
    assert ready_shares(parameters, work, first_work=2.0) == pytest.approx((3 / 8, 1, 1))


@pytest.mark.parametrize("name", MODELS)
def test_buckets_are_ready_one_after_the_other_until_backward_ends(name):
    model = find_model(name)
    shares = model.ready_shares
    assert len(shares) == len(model.buckets_nbytes)
    assert all(0 < one <= other for one, other in itertools.pairwise(shares))
    assert shares[-1] == 1
    assert 0 < model.share < 1 and model.source and model.compute_source


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [1, 2, 5, 1000])
def test_merged_buckets_keep_the_sum_and_wait_for_their_last_part(name, count):
    model = find_model(name)
    merged = model.merged(count)
    assert sum(nbytes for _, nbytes in merged) == model.nbytes
    assert 1 <= len(merged) <= min(count, len(model.buckets_nbytes))
    ends = dict(zip(itertools.accumulate(model.buckets_nbytes), model.ready_shares, strict=True))
    sums = itertools.accumulate(nbytes for _, nbytes in merged)
    assert [ends[end] for end in sums] == [share for share, _ in merged]
