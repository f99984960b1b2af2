"""add_rms_norm: the sandwich tail, a post-norm, a residual sum and the next pre-norm in one op.

residual' = residual + rms_norm(x, post_weight, post_eps), or residual + x with post_eps None
normed    = rms_norm(residual', next_weight, next_eps)

residual, x: [T, D] of one dtype, float32, bfloat16 or float16. post_weight, next_weight: [D] of any
of them, or None. Returns (residual', normed), both like residual. The sum is in float32, rounded
once to the dtype; the next norm reads the rounded sum, so that the op equals the ops it replaces.
Muse Glimmer's post_eps is 1e-8 and next_eps 1e-5; its DFlash draft has no post-norms, so post_eps
None and no post_weight. (Norm: see rms_norm.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ._contract import FLOAT_DTYPES, Case, Cost, Op, generator, nbytes, randn
from .rms_norm import normalize


def fake(
    residual: torch.Tensor,
    x: torch.Tensor,
    post_weight: torch.Tensor | None,
    post_eps: float | None,
    next_weight: torch.Tensor | None,
    next_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(residual), torch.empty_like(residual)


def reference(
    residual: torch.Tensor,
    x: torch.Tensor,
    post_weight: torch.Tensor | None,
    post_eps: float | None,
    next_weight: torch.Tensor | None,
    next_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    added = x.double() if post_eps is None else normalize(x, post_weight, post_eps)
    total = (residual.double() + added).to(residual.dtype)
    return total, normalize(total, next_weight, next_eps).to(residual.dtype)


def cost(
    residual: torch.Tensor,
    x: torch.Tensor,
    post_weight: torch.Tensor | None,
    post_eps: float | None,
    next_weight: torch.Tensor | None,
    next_eps: float,
) -> Cost:
    return Cost(bytes=4 * nbytes(x) + nbytes(post_weight, next_weight), flops=9 * x.numel())


def cases() -> Iterator[Case]:
    for name, dtype in FLOAT_DTYPES.items():
        for m, d in ((1, 6656), (5, 6656), (7, 769), (3, 6655), (2, 6657), (1, 1), (4, 8), (0, 64)):
            yield Case(f"{name}/{m}x{d}", _args(m, d, dtype), name)
        yield Case(f"{name}/no-weights", _args(3, 512, dtype, weights=None), name)
        yield Case(f"{name}/f32-weights", _args(3, 512, dtype, weights=torch.float32), name)
        for m, d in ((3, 512), (5, 6657)):
            make = _args(m, d, dtype, eps=(None, 1e-5))
            yield Case(f"{name}/no-post-norm-{m}x{d}", make, name)
        # Constant rows whose squares overflow float16. Gains in float32: with float16 ones most
        # sums would be exact ties, which float32 arithmetic breaks at random.
        for value in (300.0, 7600.0, 60000.0):
            make = _args(2, 6656, dtype, torch.float32, x_scale=value, constant=True)
            yield Case(f"{name}/constant-{value:g}", make, name)
        # Small rows tell eps 1e-8 from 1e-5, and the post eps from the next one.
        for scale in (1e-3, 1e-4, 1e-5):
            make = _args(3, 512, dtype, x_scale=scale, r_scale=scale)
            yield Case(f"{name}/small-{scale:g}", make, name)
        make = _args(3, 512, dtype, x_scale=1e-4, r_scale=1e-4, eps=(1e-5, 1e-8))
        yield Case(f"{name}/small-eps-swapped", make, name)
        # The post-norm's output is lost in a large residual unless the sum is rounded only once.
        yield Case(f"{name}/large-residual", _args(3, 512, dtype, r_scale=300.0), name)
    zeros = torch.zeros(2, 64)
    yield Case("f32/zeros", lambda: (zeros.clone(), zeros.clone(), None, 1e-8, None, 1e-5))
    yield Case("f32/65536", _args(2, 65536, torch.float32))
    yield from _refusals()


def _refusals() -> Iterator[Case]:
    def args(r: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
        return lambda: (r, x, *rest)

    ones, nan = torch.ones(2, 64), float("nan")
    plain = (None, 1e-8, None, 1e-5)
    short = torch.ones(63)
    for case_id, make, error in (
        ("x-shape", args(ones, torch.ones(2, 63), *plain), "x: expected float32[2, 64]"),
        ("x-rows", args(ones, torch.ones(3, 64), *plain), "x: expected float32[2, 64]"),
        ("x-dtype", args(ones, ones.half(), *plain), "x: expected float32[2, 64]"),
        ("1d", args(ones[0], ones[0], *plain), "residual: expected 2 dimensions"),
        ("int", args(ones.int(), ones.int(), *plain), "residual: expected float32"),
        ("empty", args(ones[:, :0], ones[:, :0], *plain), "residual: expected a non-empty"),
        ("post-weight", args(ones, ones, short, 1e-8, None, 1e-5), "post_weight: expected"),
        ("next-weight", args(ones, ones, None, 1e-8, short, 1e-5), "next_weight: expected"),
        ("no-post", args(ones, ones, ones[0], None, None, 1e-5), "post_weight: expected None"),
        ("post-eps", args(ones, ones, None, nan, None, 1e-5), "post_eps: expected"),
        ("next-eps", args(ones, ones, None, 1e-8, None, -1.0), "next_eps: expected"),
    ):
        yield Case(f"refuse/{case_id}", make, error=error)


def _args(
    m: int,
    d: int,
    dtype: torch.dtype,
    weights: torch.dtype | None | str = "same",
    x_scale: float = 1.0,
    r_scale: float = 1.0,
    eps: tuple[float | None, float] = (1e-8, 1e-5),
    constant: bool = False,
) -> Any:
    def make() -> tuple[Any, ...]:
        g = generator(m, d, str(dtype), x_scale, r_scale, eps)
        residual = (randn(g, m, d) * r_scale).to(dtype)
        x = ((torch.ones(m, d) if constant else randn(g, m, d)) * x_scale).to(dtype)
        post = following = None
        if weights is not None:
            kind = dtype if weights == "same" else weights
            post, following = ((1 + 0.1 * randn(g, d)).to(kind) for _ in range(2))
        if eps[0] is None:
            post = None
        return residual, x, post, eps[0], following, eps[1]

    return make


def bench() -> Iterator[Case]:
    for m in (1, 16, 512):
        yield Case(f"{m}x6656", _args(m, 6656, torch.float32), resident=m < 512, slow=m == 16)


OP = Op(
    name="add_rms_norm",
    args=(
        "Tensor residual, Tensor x, Tensor? post_weight, float? post_eps, "
        "Tensor? next_weight, float next_eps"
    ),
    fake=fake,
    reference=reference,
    cases=cases,
    cost=cost,
    returns=2,
    rows=("residual", "x"),
    bench=bench,
)
