"""Families of request traces that eviction policies are compared on.

Each is drawn from a seed, for a pool of about 1000 regions at scale 1. Regions stay below 1 % of
the pool. The recorded-like ones have the tensor shapes of public models.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from random import Random

from controller.memory.policies.model_buffers import (
    PIECE_BYTES,
    Trace,
    resnet50,
    total,
    transformer,
)

_REGION_BYTES = 1 << 20
_MIN_BYTES = 4 << 10


@dataclass(frozen=True)
class Family:
    """A trace and the pool it is meant for.

    Attributes
    ----------
    requests
        (key, bytes), in order.
    capacity_bytes
        Of the pool.
    """

    requests: Trace
    capacity_bytes: int


class _Zipf:
    """Draws 0 .. n - 1, the i-th most popular with probability ~ 1 / i^alpha."""

    def __init__(self, n: int, alpha: float, random: Random) -> None:
        self._cumulative = list(accumulate((rank + 1) ** -alpha for rank in range(n)))
        self._random = random

    def draw(self) -> int:
        return bisect_left(self._cumulative, self._random.random() * self._cumulative[-1])


def _equal(keys: Iterator[str], room: float) -> Family:
    """Regions of one size, in a pool with room for that many."""
    return Family([(key, _REGION_BYTES) for key in keys], int(room) * _REGION_BYTES)


def _loop(name: str, n: int, rounds: int) -> Iterator[str]:
    for _ in range(rounds):
        for number in range(n):
            yield f"{name}{number}"


def _mixed(
    base: Iterator[str], share: float, other: Callable[[], str], random: Random
) -> Iterator[str]:
    """Requests of `base`, and others between them that make up this share of all."""
    for key in base:
        yield key
        while random.random() < share:
            yield other()


# ---- loops ----


def loop(random: Random, scale: float) -> Family:
    """A loop with room for nine tenths of it."""
    return _equal(_loop("b", int(1000 * scale), 40), 900 * scale)


def loop_far(random: Random, scale: float) -> Family:
    """A loop three times the pool."""
    return _equal(_loop("b", int(2100 * scale), 20), 700 * scale)


def loop_one_shot(random: Random, scale: float) -> Family:
    """A loop, with a buffer that is never used again after every fourth request."""
    fresh = count()
    keys = _mixed(_loop("b", int(1000 * scale), 30), 0.2, lambda: f"once{next(fresh)}", random)
    return _equal(keys, 900 * scale)


def loop_scans(random: Random, scale: float) -> Family:
    """A loop that fits; now and then a checkpoint touches as much again, once."""

    def keys() -> Iterator[str]:
        fresh = count()
        for _ in range(20):
            yield from _loop("b", int(700 * scale), 2)
            for _ in range(int(random.uniform(300, 900) * scale)):
                yield f"once{next(fresh)}"

    return _equal(keys(), 800 * scale)


def loop_zipf(random: Random, scale: float) -> Family:
    """A loop, and requests of uneven popularity between."""
    zipf = _Zipf(int(5000 * scale), 0.9, random)
    keys = _mixed(_loop("b", int(800 * scale), 30), 0.4, lambda: f"z{zipf.draw()}", random)
    return _equal(keys, 1000 * scale)


def growing(random: Random, scale: float) -> Family:
    """A loop that gets longer each time."""

    def keys() -> Iterator[str]:
        for number in range(40):
            yield from _loop("b", int((400 + 20 * number) * scale), 1)

    return _equal(keys(), 900 * scale)


def shrinking(random: Random, scale: float) -> Family:
    """A loop that gets shorter each time."""

    def keys() -> Iterator[str]:
        for number in range(40):
            yield from _loop("b", int((1200 - 20 * number) * scale), 1)

    return _equal(keys(), 800 * scale)


def shuffled(random: Random, scale: float) -> Family:
    """A loop in another order each time."""

    def keys() -> Iterator[str]:
        names = [f"b{number}" for number in range(int(1000 * scale))]
        for _ in range(40):
            random.shuffle(names)
            yield from names

    return _equal(keys(), 700 * scale)


def skipping(random: Random, scale: float) -> Family:
    """A loop that leaves out a fifth each time, another fifth."""
    keys = (key for key in _loop("b", int(1000 * scale), 40) if random.random() < 0.8)
    return _equal(keys, 700 * scale)


def forward_backward(random: Random, scale: float) -> Family:
    """Layers forward, then backward, then the optimizer's buffers."""

    def keys() -> Iterator[str]:
        layers = [f"l{number}" for number in range(int(800 * scale))]
        for _ in range(20):
            yield from layers
            yield from reversed(layers)
            yield from _loop("o", int(400 * scale), 1)

    return _equal(keys(), 700 * scale)


def micro_batches(random: Random, scale: float) -> Family:
    """Four micro-batches over the same buffers, then the optimizer's, three times as many."""

    def keys() -> Iterator[str]:
        for _ in range(18):
            yield from _loop("m", int(300 * scale), 4)
            yield from _loop("o", int(900 * scale), 1)

    return _equal(keys(), 800 * scale)


def phases(random: Random, scale: float) -> Family:
    """One loop after another, each over new buffers."""

    def keys() -> Iterator[str]:
        for number in range(5):
            yield from _loop(f"p{number}-", int(random.uniform(800, 1200) * scale), 8)

    return _equal(keys(), 900 * scale)


# ---- popularity and recency ----


def hot_zipf(random: Random, scale: float) -> Family:
    """Half of the requests go to few hot buffers, the others are of uneven popularity."""
    zipf = _Zipf(int(5000 * scale), 0.9, random)
    hot = int(200 * scale)
    keys = (
        f"hot{random.randrange(hot)}" if random.random() < 0.5 else f"z{zipf.draw()}"
        for _ in range(int(40_000 * scale))
    )
    return _equal(keys, 1000 * scale)


def zipf(random: Random, scale: float) -> Family:
    """Requests of uneven popularity alone."""
    draws = _Zipf(int(10_000 * scale), 0.8, random)
    keys = (f"z{draws.draw()}" for _ in range(int(40_000 * scale)))
    return _equal(keys, 1000 * scale)


def recent(random: Random, scale: float) -> Family:
    """What was used lately is used again: the depth in the LRU stack is exponential."""

    def keys() -> Iterator[str]:
        stack = [f"b{number}" for number in range(int(3000 * scale))]
        for _ in range(int(40_000 * scale)):
            depth = min(int(random.expovariate(1 / (300 * scale))), len(stack) - 1)
            stack.insert(0, stack.pop(depth))
            yield stack[0]

    return _equal(keys(), 500 * scale)


# ---- several jobs ----


def turns(random: Random, scale: float) -> Family:
    """Two jobs whose loops both fill the pool take turns of ten iterations."""

    def keys() -> Iterator[str]:
        for number in range(8):
            yield from _loop("ab"[number % 2], int(1000 * scale), 10)

    return _equal(keys(), 1000 * scale)


def turns_tight(random: Random, scale: float) -> Family:
    """Two jobs whose loops are larger than the pool take turns of five iterations or so."""

    def keys() -> Iterator[str]:
        for number in range(12):
            yield from _loop("ab"[number % 2], int(700 * scale), random.randrange(4, 8))

    return _equal(keys(), 500 * scale)


def bursts(random: Random, scale: float) -> Family:
    """Two jobs of unequal size send in bursts, each going on where it stopped."""

    def keys() -> Iterator[str]:
        loops = [_loop("a", int(500 * scale), 100), _loop("b", int(900 * scale), 100)]
        for number in range(180):
            for _ in range(int(random.uniform(50, 400) * scale)):
                yield next(loops[number % 2])

    return _equal(keys(), 1000 * scale)


def tenants(random: Random, scale: float) -> Family:
    """Four jobs at once, each at its own rate."""

    def keys() -> Iterator[str]:
        sizes = (300, 450, 700, 150)
        loops = [_loop(f"t{n}-", int(size * scale), 500) for n, size in enumerate(sizes)]
        for _ in range(int(40_000 * scale)):
            yield next(random.choices(loops, (3, 2, 3, 1))[0])

    return _equal(keys(), 1200 * scale)


# ---- unequal sizes ----


def _log_normal(keys: Iterator[str], room: float, random: Random) -> Family:
    """Log-normal sizes around 1 MiB, from 4 KiB to just under 1 % of the pool."""
    requests = list(keys)
    capacity = int(room * 2.05 * _REGION_BYTES)  # the mean is exp(1.2**2 / 2) times the median
    largest = capacity // 100 - 1
    sizes: dict[str, int] = {}
    for key in requests:
        if key not in sizes:
            drawn = int(_REGION_BYTES * random.lognormvariate(0.0, 1.2))
            sizes[key] = min(max(drawn, _MIN_BYTES), largest)
    return Family([(key, sizes[key]) for key in requests], capacity)


def sizes_loop(random: Random, scale: float) -> Family:
    """A loop over buffers of unequal size."""
    return _log_normal(_loop("b", int(1000 * scale), 40), 800 * scale, random)


def sizes_zipf(random: Random, scale: float) -> Family:
    """Buffers of unequal size and popularity."""
    draws = _Zipf(int(6000 * scale), 0.9, random)
    keys = (f"z{draws.draw()}" for _ in range(int(40_000 * scale)))
    return _log_normal(keys, 800 * scale, random)


# ---- runs of public models ----


def run_ddp(random: Random, scale: float) -> Family:
    """GPT-2 XL, gradients as backward yields them; neighbours swap; evaluation now and then."""
    layers = transformer("gpt2", max(4, int(48 * scale)), 1600, int(50257 * scale))
    requests: Trace = []
    fresh = count()
    for iteration in range(40):
        order = list(reversed(layers))
        for _ in range(2):  # streams of the backward pass finish in another order
            at = random.randrange(len(order) - 1)
            order[at : at + 2] = reversed(order[at : at + 2])
        for layer in order:
            requests += layer
        if iteration % 10 == 9:
            requests += [(f"eval/{next(fresh)}", PIECE_BYTES // 2) for _ in range(int(80 * scale))]
    return Family(requests, int(0.85 * total(layers)))


def run_fsdp(random: Random, scale: float) -> Family:
    """BERT-large, sharded: all-gather forward, again backward, reduce-scatter behind it."""
    layers = transformer("bert", max(6, int(24 * scale)), 1024, int(30522 * scale))
    requests: Trace = []
    for _ in range(40):
        for layer in layers:
            requests += layer
        for layer in reversed(layers):
            requests += layer
            requests += [(f"{key}.grad", nbytes) for key, nbytes in layer]
    return Family(requests, int(1.3 * total(layers)))


def run_pair(random: Random, scale: float) -> Family:
    """BERT-large and ResNet-50 on one host, each at its own pace."""
    bert = [
        request for layer in reversed(transformer("bert", 24, 1024, 30522)) for request in layer
    ]
    resnet = [request for layer in reversed(resnet50("resnet")) for request in layer]
    requests: Trace = []
    positions = [0, 0]
    jobs = (bert, resnet)
    while len(requests) < 40_000 * scale:
        which = int(random.random() < 0.4)
        for _ in range(random.randrange(5, 40)):
            job = jobs[which]
            requests.append(job[positions[which] % len(job)])
            positions[which] += 1
    total = sum(nbytes for job in jobs for _key, nbytes in job)
    return Family(requests, int(0.8 * total))


FAMILIES: dict[str, Callable[[Random, float], Family]] = {
    "loop": loop,
    "loop, three pools": loop_far,
    "loop + one-shot": loop_one_shot,
    "loop + scans": loop_scans,
    "loop + zipf": loop_zipf,
    "loop, growing": growing,
    "loop, shrinking": shrinking,
    "loop, shuffled": shuffled,
    "loop, skipping": skipping,
    "forward, backward": forward_backward,
    "micro-batches": micro_batches,
    "phases": phases,
    "hot + zipf": hot_zipf,
    "zipf": zipf,
    "recent": recent,
    "two jobs, turns": turns,
    "two jobs, tight turns": turns_tight,
    "two jobs, bursts": bursts,
    "four jobs at once": tenants,
    "sizes, loop": sizes_loop,
    "sizes, zipf": sizes_zipf,
    "run: GPT-2 XL, DDP": run_ddp,
    "run: BERT, FSDP": run_fsdp,
    "run: BERT + ResNet": run_pair,
}


def make_family(name: str, seed: int, scale: float = 1.0) -> Family:
    """Draw a family's trace.

    Parameters
    ----------
    name
        One of `FAMILIES`.
    seed
        The same seed, the same trace.
    scale
        Of the pool and of the trace.
    """
    return FAMILIES[name](Random(f"{name} {seed}"), scale)
