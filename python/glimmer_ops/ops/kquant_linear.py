"""kquant_linear: y = x · Wᵀ for weights kept as GGUF encodes them.

x: [M, K] float32, bfloat16 or float16. weight: uint8 [N, row_bytes], the raw rows of a GGUF tensor
of type qtype: Q4_K, Q5_K, Q6_K (K a multiple of 256), Q8_0 (of 32), F16, BF16 or F32. Returns
[M, N] in x's dtype, rounded once. ValueError for another qtype, dtype or size.

The exact path keeps x in float32. The default path rounds x to int8 in groups of 32, with scale
max|x| / 127, for the first four types; a group with a NaN or an infinity makes its row NaN there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..gguf import QTYPES
from ._contract import FLOAT_DTYPES, Case, Cost, Op, nbytes
from ._kquant import INT8_QTYPES, K_QUANTS, SHAPES, edge_inputs, fixed, linear_inputs, matmul


def fake(x: torch.Tensor, weight: torch.Tensor, qtype: str) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def reference(x: torch.Tensor, weight: torch.Tensor, qtype: str) -> torch.Tensor:
    return matmul(x, weight, qtype).to(x.dtype)


def cost(x: torch.Tensor, weight: torch.Tensor, qtype: str) -> Cost:
    m, n = x.shape[0], weight.shape[0]
    return Cost(bytes=nbytes(x, weight) + m * n * x.element_size(), flops=2 * m * n * x.shape[1])


def cases() -> Iterator[Case]:
    for qtype in QTYPES:
        for name, dtype in FLOAT_DTYPES.items():
            for m, n, k in SHAPES:
                make = _make(m, n, k, qtype, dtype)
                yield Case(f"{qtype}/{name}/{m}x{n}x{k}", make, name, qtype)
    # Rows that are not whole super-blocks, where the type allows them.
    for qtype, k in (("Q8_0", 32), ("Q8_0", 896), ("F16", 1), ("BF16", 300), ("F32", 257)):
        for m in (1, 7):
            yield Case(f"{qtype}/f32/{m}x101x{k}", _make(m, 101, k, qtype), qtype=qtype)
    for qtype in INT8_QTYPES:
        for name, x, weight in edge_inputs(qtype):
            yield Case(f"{qtype}/edge/{name}", fixed(x, weight, qtype), qtype=qtype)
        yield Case(f"{qtype}/edge/n-zero", _make(2, 0, 256, qtype), qtype=qtype)
    for m, n, k in ((1, 19968, 6656), (17, 6656, 19968)):
        for qtype in ("Q4_K", "Q6_K"):
            make = _make(m, n, k, qtype)
            yield Case(f"{qtype}/f32/{m}x{n}x{k}", make, qtype=qtype, slow=True)
    yield from _refusals()


def _make(m: int, n: int, k: int, qtype: str, dtype: torch.dtype = torch.float32) -> Any:
    return lambda: (*linear_inputs(m, n, k, qtype, dtype), qtype)


def _refusals() -> Iterator[Case]:
    x = torch.ones(2, 512)
    rows = torch.zeros(3, 288, dtype=torch.uint8)

    def refuse(name: str, error: str, x: torch.Tensor, weight: torch.Tensor, qtype: str) -> Case:
        return Case(f"refuse/{name}", fixed(x, weight, qtype), error=error)

    for k in (3200, 896, 0):
        short = torch.zeros(3, k // 256 * 144, dtype=torch.uint8)
        yield refuse(
            f"k-{k}", "x: expected rows of a multiple of 256", x.new_ones(2, k), short, "Q4_K"
        )
    q80 = torch.zeros(3, 34, dtype=torch.uint8)
    yield refuse(
        "k-48-q8_0", "x: expected rows of a multiple of 32", x.new_ones(2, 48), q80, "Q8_0"
    )
    for qtype in ("Q3_K", "q4_k", ""):
        yield refuse(f"qtype-{qtype or 'empty'}", "qtype: expected one of Q4_K", x, rows, qtype)
    for size in (287, 289, 144, 352, 0):
        error = "weight: expected rows of 288 bytes for 512 Q4_K weights"
        yield refuse(f"row-bytes-{size}", error, x, rows.new_zeros(3, size), "Q4_K")
    yield refuse("weight-dtype", "weight: expected uint8", x, rows.float(), "Q4_K")
    yield refuse("weight-dims", "weight: expected 2 dimensions", x, rows[0], "Q4_K")
    yield refuse("x-dtype", "x: expected float32", x.int(), rows, "Q4_K")
    yield refuse("x-dims", "x: expected 2 dimensions", x[0], rows, "Q4_K")


def bench() -> Iterator[Case]:
    """The model's projections (N, K), the widest at every M that decides a path."""

    def case(qtype: str, m: int, n: int, k: int, slow: bool) -> Case:
        return Case(f"{qtype}/{m}x{n}x{k}", _make(m, n, k, qtype), qtype=qtype, slow=slow)

    for qtype in K_QUANTS:
        for m in (1, 2, 4, 8, 16, 512):
            yield case(qtype, m, 19968, 6656, slow=qtype != "Q4_K" or m in (2, 8))
    for qtype in ("Q4_K", "Q6_K"):
        yield case(qtype, 1, 6656, 19968, slow=True)
    for n, k in ((4096, 6656), (256, 6656), (6656, 4096)):
        yield case("Q4_K", 1, n, k, slow=True)


OP = Op(
    name="kquant_linear",
    args="Tensor x, Tensor weight, str qtype",
    fake=fake,
    reference=reference,
    cases=cases,
    cost=cost,
    rows=("x",),
    qtypes=tuple(QTYPES),
    integer_nmse=1e-4,
    bench=bench,
)
