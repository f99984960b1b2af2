"""kquant_embedding: rows of a weight kept as GGUF encodes it, decoded by index.

ids: [T] int64. weight: uint8 [N, row_bytes], the raw rows of a GGUF tensor of type qtype (see
kquant_linear). Returns float32 [T, K], bit for bit what the gguf package decodes. ValueError for
an id outside [0, N), before anything is written, and for another type or size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from ..gguf import QTYPES
from ._contract import Case, Cost, Op, generator
from ._kquant import D_OFFSET, dequantize, fixed, random_weight, weight_edges


def fake(ids: torch.Tensor, weight: torch.Tensor, qtype: str) -> torch.Tensor:
    block, size = QTYPES[qtype]
    return ids.new_empty(ids.shape[0], weight.shape[1] // size * block, dtype=torch.float32)


def reference(ids: torch.Tensor, weight: torch.Tensor, qtype: str) -> torch.Tensor:
    return dequantize(weight[ids], qtype)


def cost(ids: torch.Tensor, weight: torch.Tensor, qtype: str) -> Cost:
    block, size = QTYPES[qtype]
    t, stride = ids.shape[0], weight.shape[1]
    k = stride // size * block
    return Cost(bytes=t * (8 + stride + 4 * k), flops=2 * t * k)


def cases() -> Iterator[Case]:
    for qtype in QTYPES:
        for t, n, k in ((0, 3, 256), (1, 5, 256), (17, 64, 768), (3, 7, 6656)):
            yield _exact(f"{qtype}/{t}x{n}x{k}", qtype, *_args(t, n, k, qtype))
        for name, change in weight_edges(qtype) if qtype in D_OFFSET else ():
            _, weight = _args(3, 4, 512, qtype)
            change(weight[1].view(-1, QTYPES[qtype][1]))
            yield _exact(f"{qtype}/edge/{name}", qtype, torch.tensor([1, 0, 1]), weight)
    for qtype, k in (("Q8_0", 96), ("F16", 33), ("BF16", 1), ("F32", 7)):
        yield _exact(f"{qtype}/5x9x{k}", qtype, *_args(5, 9, k, qtype))
    yield from _refusals()


def _exact(case_id: str, qtype: str, ids: torch.Tensor, weight: torch.Tensor) -> Case:
    make = fixed(ids, weight, qtype)
    return Case(case_id, make, qtype=qtype, nmse=0.0, why="decoding is bit-exact")


def _args(t: int, n: int, k: int, qtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    g = generator("embedding", t, n, k, qtype)
    return torch.randint(0, n, (t,), generator=g), random_weight(g, n, k, qtype)


def _refusals() -> Iterator[Case]:
    ids = torch.tensor([0])
    rows = torch.zeros(5, 288, dtype=torch.uint8)

    def refuse(name: str, error: str, ids: torch.Tensor, weight: torch.Tensor, qtype: str) -> Case:
        return Case(f"refuse/{name}", fixed(ids, weight, qtype), error=error)

    for bad in (-1, 5, 1 << 40, -(1 << 63)):
        error = f"ids: expected ids in [0, 5), found {bad} at 1"
        yield refuse(f"id-{bad}", error, torch.tensor([0, bad]), rows, "Q4_K")
    yield refuse("no-rows", "ids: expected ids in [0, 0), found 0", ids, rows[:0], "Q4_K")
    yield refuse("qtype", "qtype: expected one of", ids, rows, "IQ4_XS")
    yield refuse("row-bytes", "weight: expected rows of a multiple of 210", ids, rows, "Q6_K")
    yield refuse("ids-dtype", "ids: expected int64", ids.int(), rows, "Q4_K")
    yield refuse("ids-dims", "ids: expected 1 dimensions", ids.unsqueeze(0), rows, "Q4_K")


def bench() -> Iterator[Case]:
    """A short table: its rows count, not its length."""
    for t in (1, 16, 512):
        yield Case(
            f"Q4_K/{t}x8192x6656",
            partial(_bench_args, t),
            qtype="Q4_K",
            nmse=0.0,
            why="decoding is bit-exact",
            resident=t < 512,
            slow=t == 16,
        )


def _bench_args(t: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    return *_args(t, 8192, 6656, "Q4_K"), "Q4_K"


OP = Op(
    name="kquant_embedding",
    args="Tensor ids, Tensor weight, str qtype",
    fake=fake,
    reference=reference,
    cases=cases,
    cost=cost,
    rows=("ids",),
    dtypes=("f32",),
    qtypes=tuple(QTYPES),
    bench=bench,
)
