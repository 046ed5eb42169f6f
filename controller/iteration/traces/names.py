"""What libraries and profilers call operations and element types, in the words of this project."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

# Payloads are kept in signed 64 bits everywhere else; an op that claims more is not believed.
MAX_BYTES = 2**63 - 1

_NOT_LETTERS = re.compile(r"[^a-z]")
_OPS = (
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("allreduce", "all_reduce"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("sendrecv", "send_recv"),
    ("barrier", "barrier"),
)
_SINGLE_WORDS = {
    "send": "send_recv",
    "recv": "send_recv",
    "isend": "send_recv",
    "irecv": "send_recv",
    "bcast": "broadcast",
}

# Elements as c10, NCCL and the Chakra schema write them; lower case, without "c10::".
_ELEMENT_BYTES = {
    "float": 4, "float32": 4, "fp32": 4, "int": 4, "int32": 4, "uint32": 4, "unsigned int": 4,
    "half": 2, "float16": 2, "fp16": 2, "bfloat16": 2, "bf16": 2, "short": 2, "int16": 2,
    "uint16": 2, "double": 8, "float64": 8, "long": 8, "long int": 8, "int64": 8, "uint64": 8,
    "byte": 1, "char": 1, "signed char": 1, "unsigned char": 1, "int8": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "complexfloat": 8, "complex<float>": 8, "complexdouble": 16,
    "complex<double>": 16, "complexhalf": 4,
}  # fmt: skip

# ncclDataType_t of nccl.h, in its order from 0 (ncclInt8) to 11 (ncclFloat8e5m2).
_NCCL_ELEMENT_BYTES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)


@functools.lru_cache(maxsize=1024)
def canonical_op(name: str) -> str:
    """The operation that a name speaks of; "unknown" when it speaks of none.

    Parameters
    ----------
    name
        ``nccl:_reduce_scatter_base``, ``c10d::allreduce_``, ``ncclDevKernel_AllGather_RING_LL``,
        ``CommType.all_to_all``, ``grads-reduce-scatter``, ``Send``, ...
    """
    letters = _NOT_LETTERS.sub("", name.lower())
    for part, op in _OPS:
        if part in letters:
            return op
    last = _NOT_LETTERS.sub("", name.lower().rpartition(":")[2].rpartition(".")[2])
    return _SINGLE_WORDS.get(last, "unknown")


def element_bytes(dtype: str) -> int | None:
    """Bytes of one element of a type by its name; None: not a type that is known."""
    return _ELEMENT_BYTES.get(dtype.lower().removeprefix("c10::"))


def nccl_element_bytes(code: int) -> int | None:
    """Bytes of one element by NCCL's number of its type (``ncclDataType_t``); None: unknown."""
    return _NCCL_ELEMENT_BYTES[code] if 0 <= code < len(_NCCL_ELEMENT_BYTES) else None


def payload_bytes(elements: object, dtype: object) -> int | None:
    """Bytes of so many elements of a type by its name; None where either is not told."""
    if not isinstance(elements, int) or isinstance(elements, bool) or not isinstance(dtype, str):
        return None
    size = element_bytes(dtype)
    if size is None or elements < 0 or elements > MAX_BYTES // size:
        return None
    return elements * size


def tensors_bytes(dims: object, types: object) -> int | None:
    """Bytes of all tensors among the inputs of a call.

    Parameters
    ----------
    dims
        Per input its dimensions ``[8, 1024]``, for a list of tensors a list of them; ``[]`` for
        what is no tensor.
    types
        Per input ``float``, ``c10::Half``, ``Tensor(float)``,
        ``GenericList[Tensor(float),Tensor(float)]``; ``Scalar`` and the like for other things.

    Returns
    -------
    int or None
        None when no input is a tensor of a known type: then nothing is known of the bytes.
    """
    if not isinstance(dims, Sequence) or not isinstance(types, Sequence):
        return None
    total: int | None = None
    for shape, kind in zip(dims, types, strict=False):
        if not isinstance(kind, str) or not isinstance(shape, Sequence):
            continue
        found = re.search(r"Tensor\(([^()]+)\)", kind)
        size = element_bytes(found[1] if found else kind)
        # "int" of a plain number has no dimensions; a tensor without any holds one element, but
        # nobody reduces that through a c10d call without flattening it first.
        if size is None or not shape:
            continue
        elements = _elements(shape)
        if elements is None or elements > MAX_BYTES // size:
            return None
        total = (total or 0) + elements * size
    return total if total is None or total <= MAX_BYTES else None


def _elements(shape: Sequence[Any]) -> int | None:
    """Elements of one tensor ([8, 4]), or of a list of tensors ([[8, 4], [2]])."""
    if all(isinstance(item, Sequence) and not isinstance(item, str) for item in shape):
        total = 0
        for item in shape:
            part = _elements(item) if item else None
            if part is None:
                return None
            total += part
        return total
    product = 1
    for item in shape:
        if not isinstance(item, int) or item < 0 or product > MAX_BYTES:
            return None
        product *= item
    return product
