"""What a model sends in an iteration: the gradient buckets of data-parallel training.

A bucket is what PyTorch's DistributedDataParallel hands to one AllReduce: parameters in reverse
order of their use, until a bucket has its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controller.errors import UsageError

FLOAT32_nbytes = 4
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
        Gradient of one iteration (float32), in the order in which it is sent.
    share
        Part of an undisturbed iteration that is communication, above 0 and below 1.
    source
        Where sizes and share are from.
    """

    name: str
    buckets_nbytes: tuple[int, ...]
    share: float
    source: str

    @property
    def nbytes(self) -> int:
        """The whole gradient."""
        return sum(self.buckets_nbytes)

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
    buckets: list[int] = []
    filled, limit = 0, _FIRST_BUCKET_nbytes
    for nbytes in reversed(parameters_nbytes):
        filled += nbytes
        if filled >= limit:
            buckets.append(filled)
            filled, limit = 0, _BUCKET_nbytes
    if filled:
        buckets.append(filled)
    return tuple(buckets)


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


def _whole_elements(nbytes: float) -> int:
    return max(1, round(nbytes / FLOAT32_nbytes)) * FLOAT32_nbytes


MODELS = {
    model.name: model
    for model in (
        Model(
            "resnet50",
            (8_196_000, 31_502_336, 26_255_360, 26_550_272, 9_724_160),
            0.39,
            "PyTorch profiler trace of two A100 (HolisticTraceAnalysis, nccl_data.json): five "
            "AllReduce of together 102,228,128 bytes in 85.1 of 220.5 ms",
        ),
        Model(
            "bert-large",
            bucketed(bert_parameters(24, 1024, 30_522, 512)),
            0.30,
            "335,141,888 parameters (Devlin et al. 2019); 14 sentences at 28.28 a second on a V100 "
            "(NVIDIA DeepLearningExamples, BERT, DGX-2, FP16) are 495 ms of compute, a long ring's "
            "2 x 1.34 GB at 100 Gbit/s are 214 ms",
        ),
    )
}
