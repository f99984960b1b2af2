"""kquant_logits: y = cap · tanh(x · Wᵀ · multiplier / cap), the soft-capped output head.

x: [M, K] float32, bfloat16 or float16. weight: uint8 [N, row_bytes], the raw rows of a GGUF tensor
of type qtype (see kquant_linear). multiplier: finite. cap: finite and >= 0; 0 means no cap,
y = x · Wᵀ · multiplier. Returns float32 [M, N] whatever x is: near ties of logits decide tokens.
ValueError for another type, size or value. (Bello et al. 2016, arXiv:1611.09940, clip logits so.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ..gguf import QTYPES
from ._contract import FLOAT_DTYPES, Case, Cost, Op, nbytes
from ._kquant import INT8_QTYPES, SHAPES, constant_groups, edge_inputs, fixed, linear_inputs, matmul

MULTIPLIER, CAP = 0.19611613513, 20.0  # Muse Glimmer's


def fake(
    x: torch.Tensor, weight: torch.Tensor, qtype: str, multiplier: float, cap: float
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


def reference(
    x: torch.Tensor, weight: torch.Tensor, qtype: str, multiplier: float, cap: float
) -> torch.Tensor:
    y = matmul(x, weight, qtype) * multiplier
    return (cap * torch.tanh(y / cap) if cap else y).float()


def cost(x: torch.Tensor, weight: torch.Tensor, qtype: str, multiplier: float, cap: float) -> Cost:
    m, n = x.shape[0], weight.shape[0]
    return Cost(bytes=nbytes(x, weight) + 4 * m * n, flops=2 * m * n * x.shape[1] + 3 * m * n)


def cases() -> Iterator[Case]:
    # The result is float32 whatever x is, so every case has float32's bound.
    for qtype in QTYPES:
        for m, n, k in SHAPES:
            yield Case(f"{qtype}/f32/{m}x{n}x{k}", _make(m, n, k, qtype), qtype=qtype)
        for name, dtype in list(FLOAT_DTYPES.items())[1:]:
            make = _make(5, 257, 768, qtype, dtype=dtype)
            yield Case(f"{qtype}/{name}/5x257x768", make, qtype=qtype)
    for qtype in INT8_QTYPES:
        make = _make(3, 65, 512, qtype, MULTIPLIER, 0.0)
        yield Case(f"{qtype}/no-cap", make, qtype=qtype)
        make = _make(3, 65, 512, qtype, 1.0, 20.0, scale=20.0)
        yield Case(f"{qtype}/half-saturated", make, qtype=qtype)
        # Where tanh saturates, an error near 0 grows to 2 · cap: take x that int8 keeps exactly.
        make = _make(3, 65, 512, qtype, 1.0, 20.0, scale=1e6, constant=True)
        yield Case(f"{qtype}/saturated", make, qtype=qtype)
        make = _make(3, 65, 512, qtype, 1.0, 20.0, scale=1e-3)
        yield Case(f"{qtype}/small", make, qtype=qtype)
        make = _make(3, 65, 512, qtype, -2.0, 0.05, constant=True)
        yield Case(f"{qtype}/tiny-cap", make, qtype=qtype)
    for name, x, weight in edge_inputs("Q5_K"):
        cap = 0.0 if name.startswith("amplitude") else CAP
        make = fixed(x, weight, "Q5_K", MULTIPLIER, cap)
        yield Case(f"Q5_K/edge/{name}", make, qtype="Q5_K")
    yield Case("Q5_K/2x202048x6656", _make(2, 202048, 6656, "Q5_K"), qtype="Q5_K", slow=True)
    for cap in (-1.0, math.inf, math.nan, 1e-60):
        yield Case(f"refuse/cap-{cap}", _make(1, 3, 256, "Q4_K", 1.0, cap), error="cap: expected")
    for value in (math.inf, math.nan, 1e39):
        make = _make(1, 3, 256, "Q4_K", value, 0.0)
        yield Case(f"refuse/multiplier-{value}", make, error="multiplier: expected a finite")
    bad = fixed(torch.ones(1, 256), torch.zeros(3, 144, dtype=torch.uint8), "F64", 1.0, 0.0)
    yield Case("refuse/qtype", bad, error="qtype: expected one of")


def _make(
    m: int,
    n: int,
    k: int,
    qtype: str,
    multiplier: float = MULTIPLIER,
    cap: float = CAP,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    constant: bool = False,
) -> Any:
    def make() -> tuple[torch.Tensor, torch.Tensor, str, float, float]:
        x, weight = linear_inputs(m, n, k, qtype, dtype)
        x = constant_groups(x) if constant else x
        return x * scale, weight, qtype, multiplier, cap

    return make


def bench() -> Iterator[Case]:
    """The model's head, an eighth of it in a quick run."""
    for m, n in ((1, 25256), (1, 202048), (16, 202048)):
        case_id = f"Q5_K/{m}x{n}x6656"
        yield Case(case_id, _make(m, n, 6656, "Q5_K"), qtype="Q5_K", slow=n == 202048)


OP = Op(
    name="kquant_logits",
    args="Tensor x, Tensor weight, str qtype, float multiplier, float cap",
    fake=fake,
    reference=reference,
    cases=cases,
    cost=cost,
    rows=("x",),
    qtypes=tuple(QTYPES),
    integer_nmse=1e-4,
    bench=bench,
)
