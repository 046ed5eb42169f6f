"""What a model computes and sends in an iteration of data-parallel training.

A bucket is what PyTorch's DistributedDataParallel hands to one AllReduce: parameters in reverse
order of their use, until a bucket has its size. It is ready when the backward pass has come to
its last parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from controller.errors import UsageError

FLOAT32_nbytes = 4
FLOAT16_nbytes = 2
_MS = 1e6
# torch.nn.parallel.DistributedDataParallel: bucket_cap_mb=25, and a first bucket of 1 MiB
# (dist._DEFAULT_FIRST_BUCKET_BYTES) so that communication begins early.
_FIRST_BUCKET_nbytes = 1 << 20
_BUCKET_nbytes = 25 << 20


@dataclass(frozen=True)
class Model:
    """A model as the network sees it.

    Parameters
    ----------
    name
        As a mix names it.
    buckets_nbytes
        Gradient of one iteration, in the order in which it is sent.
    share
        Part of an undisturbed iteration that is communication, above 0 and below 1.
    source
        Where sizes and share are from.
    forward_ns, backward_ns
        Compute of one rank for one microbatch. What is neither (input, optimizer) counts as
        forward: nothing is ready to be sent meanwhile.
    ready_shares
        What of the backward pass is done when a bucket is ready, above 0 .. 1; one each.
    microbatches
        Of an iteration, on each rank: their gradients are added up, and sent in the backward pass
        of the last.
    gpus_per_nic
        GPUs that compute for one rank, and share its NIC.
    compute_source
        Where times and shares are from.
    """

    name: str
    buckets_nbytes: tuple[int, ...]
    share: float
    source: str
    forward_ns: float
    backward_ns: float
    ready_shares: tuple[float, ...]
    compute_source: str
    microbatches: int = 1
    gpus_per_nic: int = 1

    @property
    def nbytes(self) -> int:
        """The whole gradient."""
        return sum(self.buckets_nbytes)

    def passes_ns(self, microbatches: int = 0) -> tuple[float, float]:
        """What comes before the backward pass that sends, and that pass.

        Parameters
        ----------
        microbatches
            Of an iteration; 0: as many as the model has.
        """
        before = (microbatches or self.microbatches) - 1
        return self.forward_ns + before * (self.forward_ns + self.backward_ns), self.backward_ns

    def merged(self, count: int) -> tuple[tuple[float, int], ...]:
        """At most so many buckets of about equal size; each is ready when its last part is.

        Parameters
        ----------
        count
            From 1.

        Returns
        -------
        tuple of (float, int)
            Share of the backward pass and bytes, in order.
        """
        merged: list[tuple[float, int]] = []
        sent = begun = 0
        for share, nbytes in zip(self.ready_shares, self.buckets_nbytes, strict=True):
            sent += nbytes
            # In whole numbers: rounded parts of the sum would leave a last bucket of nothing.
            if sent * count >= (len(merged) + 1) * self.nbytes:
                merged.append((share, sent - begun))
                begun = sent
        return tuple(merged)

    def scaled(self, nbytes: int, smallest_nbytes: int) -> tuple[int, ...]:
        """The buckets of a gradient of another size, in the same proportions.

        Parameters
        ----------
        nbytes
            What they add up to, about; each is rounded to whole elements.
        smallest_nbytes
            Neighbours are merged until they have this: on a slow link a bucket of a few
            packets would measure the cost of an operation, not of its bytes.

        Returns
        -------
        tuple of int
            One or more sizes, in order.
        """
        factor = nbytes / self.nbytes
        buckets: list[int] = []
        waiting = 0.0
        for bucket in self.buckets_nbytes:
            waiting += bucket * factor
            if waiting >= smallest_nbytes:
                buckets.append(_whole_elements(waiting))
                waiting = 0.0
        if waiting:
            last = buckets.pop() if buckets else 0
            buckets.append(_whole_elements(last + waiting))
        return tuple(buckets)


def find_model(name: str) -> Model:
    """The model of this name.

    Raises
    ------
    UsageError
        There is none; names those there are.
    """
    if name not in MODELS:
        raise UsageError(f"Model {name!r} is unknown; allowed: {', '.join(MODELS)}.")
    return MODELS[name]


def bucketed(parameters_nbytes: Sequence[int]) -> tuple[int, ...]:
    """Buckets of DistributedDataParallel for parameters in the order of the forward pass.

    A parameter is never divided, and a bucket is closed by the one that fills it.
    """
    backwards = parameters_nbytes[::-1]
    return tuple(
        sum(backwards[begin:end]) for begin, end in itertools.pairwise((0, *_ends(backwards)))
    )


def ready_shares(
    parameters_nbytes: Sequence[int], work: Sequence[float], first_work: float = 0.0
) -> tuple[float, ...]:
    """What of the backward pass is done when each bucket of `bucketed` is ready.

    Parameters
    ----------
    parameters_nbytes
        In the order of the forward pass.
    work
        Computation for each of them in any unit: a matrix takes as much as it has elements,
        an embedding none.
    first_work
        What the backward pass begins with before it comes to the last parameter: a head that
        shares its matrix with the embedding.

    Returns
    -------
    tuple of float
        Rising, above 0 .. 1.
    """
    done = [first_work, *itertools.accumulate(work[::-1], initial=first_work)][1:]
    ends = _ends(parameters_nbytes[::-1])
    return tuple(done[end] / done[-1] for end in ends)


def _ends(backwards_nbytes: Sequence[int]) -> list[int]:
    """Where buckets end among parameters in the order of the backward pass."""
    ends: list[int] = []
    filled, limit = 0, _FIRST_BUCKET_nbytes
    for place, nbytes in enumerate(backwards_nbytes):
        filled += nbytes
        if filled >= limit:
            ends.append(place + 1)
            filled, limit = 0, _BUCKET_nbytes
    if filled:
        ends.append(len(backwards_nbytes))
    return ends


def bert_parameters(
    layers: int, hidden: int, vocabulary: int, positions: int, types: int = 2
) -> tuple[int, ...]:
    """Bytes of each parameter of BERT in the order of the forward pass (feed-forward 4 x hidden).

    Devlin et al., NAACL 2019, section 3; biases and layer norms as in its published checkpoints.
    """
    norm = (hidden, hidden)
    linear = (hidden * hidden, hidden)
    feed_forward = 4 * hidden
    layer = (
        *(linear * 4), *norm,
        hidden * feed_forward, feed_forward, feed_forward * hidden, hidden, *norm,
    )  # fmt: skip
    embeddings = (vocabulary * hidden, positions * hidden, types * hidden, *norm)
    elements = (*embeddings, *(layer * layers), *linear)
    return tuple(FLOAT32_nbytes * count for count in elements)


def gpt_parameters(layers: int, hidden: int, vocabulary: int, positions: int) -> tuple[int, ...]:
    """Elements of each parameter of GPT-2 and GPT-3 in the order of the forward pass.

    Radford et al. 2019, Brown et al. 2020 (section 2.1); the head is the embedding's matrix.
    """
    norm = (hidden, hidden)
    feed_forward = 4 * hidden
    layer = (
        *norm, 3 * hidden * hidden, 3 * hidden, hidden * hidden, hidden,
        *norm, hidden * feed_forward, feed_forward, feed_forward * hidden, hidden,
    )  # fmt: skip
    return (vocabulary * hidden, positions * hidden, *(layer * layers), *norm)


def llama_parameters(
    layers: int, hidden: int, feed_forward: int, vocabulary: int
) -> tuple[int, ...]:
    """Elements of each parameter of LLaMA in the order of the forward pass.

    Touvron et al. 2023, section 2.2: no biases, a gated feed-forward, a head of its own.
    """
    layer = (*(hidden * hidden,) * 4, hidden, *(hidden * feed_forward,) * 3, hidden)
    return (vocabulary * hidden, *(layer * layers), hidden, vocabulary * hidden)


def _whole_elements(nbytes: float) -> int:
    return max(1, round(nbytes / FLOAT32_nbytes)) * FLOAT32_nbytes


# A long ring sends each byte of a gradient twice.
_RING_FACTOR = 2
_SHARE_LINK_Bps = 12.5e9
_BACKWARD = "backward takes twice the forward pass (two products of each matrix instead of one)"
_IN_ORDER = "buckets are ready by the elements of matrices that backward has passed"


def _share(nbytes: int, compute_ns: float) -> float:
    """Communication of an iteration without overlap, on a link of 100 Gbit/s."""
    window_ns = _RING_FACTOR * nbytes / _SHARE_LINK_Bps * 1e9
    return round(window_ns / (window_ns + compute_ns), 2)


def _resnet50() -> Model:
    return Model(
        "resnet50",
        (8_196_000, 31_502_336, 26_255_360, 26_550_272, 9_724_160),
        0.39,
        "PyTorch profiler trace of two A100 (HolisticTraceAnalysis, nccl_data.json): five "
        "AllReduce of together 102,228,128 bytes in 85.1 of 220.5 ms",
        # Means of its three steps. The last layers have most of the parameters and little of
        # the computation: half of the backward pass goes to the last tenth of the gradient.
        forward_ns=134.9 * _MS,
        backward_ns=85.6 * _MS,
        ready_shares=(0.035, 0.139, 0.212, 0.526, 1.0),
        compute_source="the same trace: backward from its begin on the GPU to the launch of the "
        "last AllReduce, buckets by their launches, the rest of the step before it",
    )


def _bert_large() -> Model:
    parameters = bert_parameters(24, 1024, 30_522, 512)
    step_ns = 14 / 28.28 * 1e9
    return Model(
        "bert-large",
        bucketed(parameters),
        0.30,
        "335,141,888 parameters (Devlin et al. 2019); 14 sentences at 28.28 a second on a V100 "
        "(NVIDIA DeepLearningExamples, BERT, DGX-2, FP16) are 495 ms of compute, a long ring's "
        "2 x 1.34 GB at 100 Gbit/s are 214 ms",
        forward_ns=step_ns / 3,
        backward_ns=step_ns * 2 / 3,
        ready_shares=ready_shares(parameters, _without_embeddings(parameters, 3)),
        compute_source=f"the same; {_BACKWARD}; {_IN_ORDER}",
    )


# AICB, workload of GPT-13B (tensor parallel 8, one sequence of 2,048), profile of an A100: 752 us
# of attention and 750 us of feed-forward in each of 40 layers forward, and the same twice
# backward.
_GPT_13B_LAYER_ns = 752_000 + 750_000
_GPT_13B = {"layers": 40, "hidden": 5120, "positions": 2048, "vocabulary": 50_257}


def _layer_flops(hidden: int, positions: int) -> float:
    """Of one layer forward on one sequence (Narayanan et al., SC 2021, appendix)."""
    return 24 * positions * hidden**2 + 4 * positions**2 * hidden


_A100_FLOPS = _layer_flops(_GPT_13B["hidden"], _GPT_13B["positions"]) / (
    8 * _GPT_13B_LAYER_ns * 1e-9
)


def _gpt(
    name: str,
    layers: int,
    hidden: int,
    positions: int,
    vocabulary: int,
    *,
    gpus: int,
    sequences: int,
    batch: str,
    microbatch: int = 1,
) -> Model:
    """A GPT by its architecture, as fast as the profile of the 13B one.

    Parameters
    ----------
    gpus
        Tensor-parallel GPUs of a rank.
    sequences, microbatch
        Of an iteration and of a microbatch on a rank.
    batch
        Where `sequences` is from.
    """
    elements = gpt_parameters(layers, hidden, vocabulary, positions)
    nbytes = [FLOAT16_nbytes * count for count in elements]
    head = vocabulary * hidden
    flops = layers * _layer_flops(hidden, positions) + 2 * positions * head
    forward_ns = microbatch * flops / (gpus * _A100_FLOPS) * 1e9
    microbatches = sequences // microbatch
    return Model(
        name,
        bucketed(nbytes),
        _share(sum(nbytes), 3 * forward_ns * microbatches),
        f"{sum(elements):,} parameters ({layers} layers of {hidden}), gradients of 2 bytes; the "
        "share is that of a long ring at 100 Gbit/s without overlap",
        forward_ns=forward_ns,
        backward_ns=2 * forward_ns,
        ready_shares=ready_shares(nbytes, _without_embeddings(elements, 2), float(head)),
        compute_source=f"{_A100_FLOPS / 1e12:.0f} TFLOP/s on each GPU, what AICB's A100 profile "
        f"of GPT-13B with tensor parallel 8 has; {batch}; {_BACKWARD}; {_IN_ORDER}",
        microbatches=microbatches,
        gpus_per_nic=gpus,
    )


def _llama_7b() -> Model:
    elements = llama_parameters(32, 4096, 11_008, 32_000)
    nbytes = [FLOAT16_nbytes * count for count in elements]
    # AICB, workload of Llama-7B, tensor parallel 2: attention and feed-forward of a layer.
    forward_ns = 32 * (539_986 + 486_330.0)
    backward_ns = 32 * 2 * (592_000 + 529_500.0)
    microbatches = 16
    return Model(
        "llama-7b",
        bucketed(nbytes),
        _share(sum(nbytes), microbatches * (forward_ns + backward_ns)),
        f"{sum(elements):,} parameters (Touvron et al. 2023), gradients of 2 bytes; the share is "
        "that of a long ring at 100 Gbit/s without overlap",
        forward_ns=forward_ns,
        backward_ns=backward_ns,
        ready_shares=ready_shares(nbytes, _without_embeddings(elements, 1)),
        compute_source="AICB's A100 profile of Llama-7B with tensor parallel 2, one sequence of "
        f"2,048 a microbatch; 16 of them an iteration as for gpt3-6.7b; {_IN_ORDER}",
        microbatches=microbatches,
        gpus_per_nic=2,
    )


def _without_embeddings(parameters: Sequence[int], embeddings: int) -> list[float]:
    """Work of each parameter: a look-up in the first ones computes nothing."""
    return [0.0] * embeddings + [float(count) for count in parameters[embeddings:]]


_GPT3_BATCH = "2M tokens an iteration (Brown et al. 2020, table 2.1) on 64 ranks"
MODELS = {
    model.name: model
    for model in (
        _resnet50(),
        _bert_large(),
        _gpt(
            "gpt2-xl", 48, 1600, 1024, 50_257, gpus=1, sequences=16, microbatch=8,
            batch="512 sequences an iteration (Radford et al. 2019, section 3) on 32 ranks",
        ),
        _gpt("gpt3-6.7b", 32, 4096, 2048, 50_257, gpus=4, sequences=16, batch=_GPT3_BATCH),
        _gpt("gpt3-13b", **_GPT_13B, gpus=8, sequences=16, batch=_GPT3_BATCH),
        _llama_7b(),
    )
}  # fmt: skip
