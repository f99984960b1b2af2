"""kquant_swiglu: y = silu(x · Gᵀ) ⊙ (x · Uᵀ) for gate and up weights kept as GGUF encodes them.

x: [M, K] float32, bfloat16 or float16. gate, up: uint8 [N, row_bytes], raw rows of GGUF tensors of
types gate_qtype and up_qtype, which may differ (see kquant_linear). Returns [M, N] in x's dtype:
products, silu(g) = g / (1 + exp(-g)) and their product are float32, rounded once. ValueError for
another type or size. (Shazeer 2020, "GLU Variants Improve Transformer".)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..gguf import QTYPES
from ._contract import FLOAT_DTYPES, Case, Cost, Op, generator, nbytes, randn
from ._kquant import SHAPES, edge_inputs, fixed, matmul, random_weight


def fake(
    x: torch.Tensor, gate: torch.Tensor, gate_qtype: str, up: torch.Tensor, up_qtype: str
) -> torch.Tensor:
    return x.new_empty(x.shape[0], gate.shape[0])


def reference(
    x: torch.Tensor, gate: torch.Tensor, gate_qtype: str, up: torch.Tensor, up_qtype: str
) -> torch.Tensor:
    g = matmul(x, gate, gate_qtype)
    return (torch.nn.functional.silu(g) * matmul(x, up, up_qtype)).to(x.dtype)


def cost(
    x: torch.Tensor, gate: torch.Tensor, gate_qtype: str, up: torch.Tensor, up_qtype: str
) -> Cost:
    m, n = x.shape[0], gate.shape[0]
    return Cost(
        bytes=nbytes(x, gate, up) + m * n * x.element_size(),
        flops=4 * m * n * x.shape[1] + 5 * m * n,
    )


def cases() -> Iterator[Case]:
    for qtype in QTYPES:
        for m, n, k in SHAPES:
            yield Case(f"{qtype}/f32/{m}x{n}x{k}", _make(m, n, k, qtype), qtype=qtype)
        for name, dtype in list(FLOAT_DTYPES.items())[1:]:
            for m, n, k in ((2, 65, 512), (5, 257, 768)):
                make = _make(m, n, k, qtype, dtype=dtype)
                yield Case(f"{qtype}/{name}/{m}x{n}x{k}", make, name, qtype)
    for name in FLOAT_DTYPES:
        for gate, up in (("Q4_K", "Q6_K"), ("Q6_K", "Q5_K"), ("Q4_K", "Q5_K"), ("Q8_0", "F16")):
            for m in (1, 6):
                make = _make(m, 257, 768, gate, up, FLOAT_DTYPES[name])
                yield Case(f"{gate}+{up}/{name}/{m}x257x768", make, name, gate)
    for name, x, weight in edge_inputs("Q4_K"):
        make = fixed(x, weight, "Q4_K", weight.flip(0), "Q4_K")
        yield Case(f"Q4_K/edge/{name}", make, qtype="Q4_K")
    yield Case("F32/gate-1e38", _huge_gates, qtype="F32")
    for qtype in ("Q4_K", "Q6_K"):
        make = _make(4, 19968, 6656, qtype)
        yield Case(f"{qtype}/f32/4x19968x6656", make, qtype=qtype, slow=True)
    yield from _refusals()


def _huge_gates() -> tuple[torch.Tensor, torch.Tensor, str, torch.Tensor, str]:
    """Gates of -1e38, where silu is 0 and no small remainder of exp may be left, up to 1e30."""
    x = torch.ones(1, 1)
    gate = torch.tensor([-1e38, -1e5, -100.0, -80.0, 0.0, 80.0, 100.0, 1e30])[:, None]
    up = torch.ones_like(gate)
    return x, gate.view(torch.uint8), "F32", up.view(torch.uint8), "F32"


def _make(
    m: int, n: int, k: int, gate: str, up: str = "", dtype: torch.dtype = torch.float32
) -> Any:
    def make() -> tuple[torch.Tensor, torch.Tensor, str, torch.Tensor, str]:
        g = generator("swiglu", m, n, k, gate, up, str(dtype))
        x = randn(g, m, k, dtype=dtype)
        other = up or gate
        return x, random_weight(g, n, k, gate), gate, random_weight(g, n, k, other), other

    return make


def _refusals() -> Iterator[Case]:
    x = torch.ones(2, 512)
    q4, q6 = torch.zeros(3, 288, dtype=torch.uint8), torch.zeros(3, 420, dtype=torch.uint8)

    def refuse(name: str, error: str, *args: Any) -> Case:
        return Case(f"refuse/{name}", fixed(*args), error=error)

    yield refuse("gate-qtype", "gate_qtype: expected one of", x, q4, "Q2_K", q4, "Q4_K")
    yield refuse("up-qtype", "up_qtype: expected one of", x, q4, "Q4_K", q4, "Q2_K")
    yield refuse("gate-bytes", "gate: expected rows of 420 bytes", x, q4, "Q6_K", q4, "Q4_K")
    yield refuse("up-bytes", "up: expected rows of 420 bytes", x, q4, "Q4_K", q4, "Q6_K")
    yield refuse("up-rows", "up: expected 3 rows", x, q4, "Q4_K", q6[:2], "Q6_K")
    narrow = x[:, :384].contiguous()
    yield refuse("k", "x: expected rows of a multiple of 256", narrow, q4, "Q4_K", q4, "Q4_K")


def bench() -> Iterator[Case]:
    for m in (1, 2, 4, 8, 16, 512):
        make = _make(m, 19968, 6656, "Q4_K")
        yield Case(f"Q4_K/{m}x19968x6656", make, qtype="Q4_K", slow=m not in (1, 512))


OP = Op(
    name="kquant_swiglu",
    args="Tensor x, Tensor gate, str gate_qtype, Tensor up, str up_qtype",
    fake=fake,
    reference=reference,
    cases=cases,
    cost=cost,
    rows=("x",),
    qtypes=tuple(QTYPES),
    # The relative errors of two products of 1e-4 add up; silu keeps theirs about as it is.
    integer_nmse=2e-4,
    bench=bench,
)
