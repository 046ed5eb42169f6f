"""The gradient buffers of public models: names and sizes, layer by layer."""

from __future__ import annotations

_FP32_BYTES = 4
# Larger tensors are registered in pieces, as torch's DDP cuts buckets of 25 MiB.
PIECE_BYTES = 8 << 20

# (key, bytes) of one request after the other.
Trace = list[tuple[str, int]]


def pieces(name: str, shape: tuple[int, ...]) -> Trace:
    """A tensor of float32 as the buffers that are registered."""
    nbytes = _FP32_BYTES
    for length in shape:
        nbytes *= length
    whole, rest = divmod(nbytes, PIECE_BYTES)
    sizes = [PIECE_BYTES] * whole + [rest] * bool(rest)
    return [(f"{name}.{number}", size) for number, size in enumerate(sizes)]


def transformer(name: str, layers: int, width: int, vocabulary: int) -> list[Trace]:
    """Gradients of a transformer (GPT-2: Radford et al. 2019; BERT: Devlin et al. 2019).

    Parameters
    ----------
    name
        Of the job, the first part of each key.
    layers, width, vocabulary
        Blocks, hidden size, and tokens of the embedding.

    Returns
    -------
    list
        The embedding, then each block, in forward order.
    """
    result = [pieces(f"{name}/embedding", (vocabulary, width))]
    for number in range(layers):
        layer: Trace = []
        for part, shape in (
            ("norm", (4, width)),
            ("qkv", (3 * width, width)),
            ("proj", (width, width)),
            ("up", (4 * width, width)),
            ("down", (width, 4 * width)),
        ):
            layer += pieces(f"{name}/{number}.{part}", shape)
        result.append(layer)
    return result


def resnet50(name: str) -> list[Trace]:
    """Gradients of ResNet-50 (He et al. 2016, table 1), block by block in forward order."""
    result = [pieces(f"{name}/stem", (64, 3, 7, 7))]
    inputs = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            layer: Trace = []
            for part, shape in (
                ("a", (width, inputs, 1, 1)),
                ("b", (width, width, 3, 3)),
                ("c", (4 * width, width, 1, 1)),
                ("norm", (12, width)),
            ):
                layer += pieces(f"{name}/{stage}.{block}.{part}", shape)
            result.append(layer)
            inputs = 4 * width
    return [*result, pieces(f"{name}/fc", (1000, 2048))]


def total(layers: list[Trace]) -> int:
    """Their bytes."""
    return sum(nbytes for layer in layers for _key, nbytes in layer)
