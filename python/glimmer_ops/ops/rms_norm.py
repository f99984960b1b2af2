"""rms_norm: y = x / sqrt(mean(x²) + eps) · weight over the last dimension.

x: [..., D] float32, bfloat16 or float16. weight: [D] of any of them, an absolute gain, or None.
Returns x's shape and dtype. Squares, mean and gain are in float32 or better whatever the dtype;
the result is rounded once. (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ._contract import FLOAT_DTYPES, Case, Cost, Op, generator, nbytes, randn


def normalize(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMS-normalised x in float64, unrounded."""
    f = x.double()
    y = f / torch.sqrt(f.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight.double()


def fake(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return torch.empty_like(x)


def reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return normalize(x, weight, eps).to(x.dtype)


def cost(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> Cost:
    return Cost(bytes=2 * nbytes(x) + nbytes(weight), flops=4 * x.numel())


def cases() -> Iterator[Case]:
    for name, dtype in FLOAT_DTYPES.items():
        for m, d in (
            (1, 6656),
            (5, 6656),
            (7, 769),
            (3, 6655),
            (2, 6657),
            (1, 1),
            (16, 8),
            (0, 64),
        ):
            yield Case(f"{name}/{m}x{d}", _args(m, d, dtype), name)
        yield Case(f"{name}/no-weight", _args(3, 512, dtype, weight=None), name)
        yield Case(f"{name}/f32-weight", _args(3, 512, dtype, weight=torch.float32), name)
        # A gain near 1 loses its bits if it is applied in the storage type.
        yield Case(f"{name}/weight-1.001", _args(3, 512, dtype, torch.float32, gain=1.001), name)
        # Squares of large float16 values overflow float16; tiny rows are ruled by eps.
        yield Case(f"{name}/large", _args(2, 6656, dtype, scale=60000.0, constant=True), name)
        yield Case(f"{name}/large-300", _args(2, 6656, dtype, scale=300.0), name)
        for eps in (1e-5, 1e-8):
            yield Case(f"{name}/tiny-eps{eps:g}", _args(3, 512, dtype, scale=1e-4, eps=eps), name)
    yield Case("f32/3d", lambda: (randn(generator("3d"), 2, 3, 128), None, 1e-5))
    yield Case("f32/zeros", lambda: (torch.zeros(2, 64), torch.ones(64), 1e-5))
    # Squares beyond float32's range, above and below.
    for scale in (1e25, 1e-25):
        yield Case(f"f32/{scale:g}", _args(3, 100, torch.float32, scale=scale, eps=0.0))
    yield Case("f32/131072", _args(1, 131072, torch.float32))
    bad_weight = lambda: (torch.ones(2, 64), torch.ones(63), 1e-5)  # noqa: E731
    yield Case("refuse/weight-size", bad_weight, error="weight: expected shape [64]")
    yield Case(
        "refuse/int", lambda: (torch.ones(2, 4).int(), None, 1e-5), error="x: expected float"
    )
    nan = float("nan")
    yield Case("refuse/eps", lambda: (torch.ones(2, 4), None, nan), error="eps: expected")


def _args(
    m: int,
    d: int,
    dtype: torch.dtype,
    weight: torch.dtype | None | str = "same",
    scale: float = 1.0,
    eps: float = 1e-5,
    gain: float | None = None,
    constant: bool = False,
) -> Any:
    def make() -> tuple[torch.Tensor, torch.Tensor | None, float]:
        g = generator(m, d, str(dtype), scale, eps)
        x = torch.ones(m, d) if constant else randn(g, m, d)
        w = None
        if weight is not None:
            w = torch.full((d,), gain) if gain else 1 + 0.1 * randn(g, d)
            w = w.to(dtype if weight == "same" else weight)
        return (x * scale).to(dtype), w, eps

    return make


def bench() -> Iterator[Case]:
    for m in (1, 16, 512):
        yield Case(f"{m}x6656", _args(m, 6656, torch.float32), resident=m < 512, slow=m == 16)


OP = Op(
    name="rms_norm",
    args="Tensor x, Tensor? weight, float eps",
    fake=fake,
    reference=reference,
    cases=cases,
    cost=cost,
    rows=("x",),
    bench=bench,
)
