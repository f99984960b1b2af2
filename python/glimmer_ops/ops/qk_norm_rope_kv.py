"""qk_norm_rope_kv: QK-norm, rotary embedding and the append to the key-value cache.

q: [T, n_heads·head_dim] or None (context injection: nothing but the append); k, v:
[T, kv_heads·head_dim] of q's dtype; float32, bfloat16 or float16. q_weight, k_weight: [head_dim]
gains or None. pos, slot: int64 [T]; slot -1 is a padding token: its inputs are not read, nothing
is appended, its output row is 0. k_cache, v_cache: one dtype of the three, which may differ from
q's; block_table: see _paged. Returns the normed and rotated q like q, or shape [0] without q.

Every head x of q and k becomes rope(x / sqrt(mean(x²) + eps) · weight), in float32 or better,
rounded once. Pair i of a head turns by pos · theta^(-2i/head_dim); the pair is elements (2i, 2i+1)
for rope "interleaved", (i, i + head_dim/2) for "half"; "none" turns nothing and reads no theta.
Angles are in float64. (Su et al. 2021, "RoFormer"; the two layouts are ggml's NORM and NEOX.)

Refused with ValueError: shapes that do not fit; slot outside [-1, slots); pos outside the table; a
written page that is absent; two tokens that write one cache row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ._contract import DEFAULT_NMSE, FLOAT_DTYPES, Case, Cost, Op, generator, nbytes, randn
from ._paged import Layout, build, locate, split_tokens
from .rms_norm import normalize

THETA = 5e5


def fake(
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    rope: str,
    theta: float,
    pos: torch.Tensor,
    slot: torch.Tensor,
    block_table: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    return k.new_empty(0) if q is None else torch.empty_like(q)


def rotate(x: torch.Tensor, pos: torch.Tensor, rope: str, theta: float) -> torch.Tensor:
    """x [T, heads, head_dim] float64, turned by each token's position."""
    if rope == "none":
        return x
    dim = x.size(-1)
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = (pos.double()[:, None] * frequency)[:, None]
    cos, sin = angle.cos(), angle.sin()
    if rope == "interleaved":
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def reference(
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    rope: str,
    theta: float,
    pos: torch.Tensor,
    slot: torch.Tensor,
    block_table: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    dim, real = k_cache.size(3), slot >= 0

    def heads(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        y = normalize(x[real].unflatten(1, (-1, dim)), weight, eps)
        return rotate(y, pos[real], rope, theta)

    page, row = locate(k_cache, block_table, slot[real], pos[real])
    k_cache[page, :, row] = heads(k, k_weight).to(k_cache.dtype)
    v_cache[page, :, row] = v[real].unflatten(1, (-1, dim)).to(v_cache.dtype)
    if q is None:
        return k.new_empty(0)
    out = torch.zeros_like(q)
    out[real] = heads(q, q_weight).flatten(1).to(q.dtype)
    return out


def cost(*args: Any) -> Cost:
    q, k, v, q_weight, k_weight, *_, pos, slot, table, k_cache, _ = args
    appended = 2 * k.numel() * k_cache.element_size()
    moved = nbytes(q) * 2 + nbytes(k, v, q_weight, k_weight, pos, slot, table) + appended
    turned = k.numel() + (0 if q is None else q.numel())
    return Cost(bytes=moved, flops=7 * turned)


POSITIONS = (0, 1, 63, 64, 65, 4095, 131071)


def cases() -> Iterator[Case]:
    run = [(0, p) for p in range(60, 68)]
    for name, dtype in FLOAT_DTYPES.items():
        for cache_name, cache in FLOAT_DTYPES.items():
            case_id = f"{name}/{cache_name}-cache"
            yield _case(case_id, name, _args(run, dtype, cache_dtype=cache), cache_name)
        far = [(0, p) for p in POSITIONS]
        for rope in ("interleaved", "half", "none"):
            yield _case(f"{name}/{rope}-far", name, _args(far, dtype, rope=rope))
        yield _case(f"{name}/weights", name, _args(run, dtype, rope="half", weights=True))
        mixed = [(2, 9), (-1, 0), (0, 64), (2, 10), (-1, -7), (1, 0), (0, 65)]
        make = _args(mixed, dtype, slots=3, nan_padding=True)
        yield _case(f"{name}/slots-and-padding", name, make)
        yield _case(f"{name}/small-1e-4", name, _args(run, dtype, scale=1e-4))
        yield _case(f"{name}/large-300", name, _args(run, dtype, scale=300.0))
    yield from _shapes(run)
    yield from _refusals()


def _shapes(run: list[tuple[int, int]]) -> Iterator[Case]:
    f32 = torch.float32
    for n, kv, dim in ((8, 2, 128), (4, 1, 64), (24, 1, 128), (28, 4, 128), (6, 3, 80), (2, 1, 6)):
        for rope in ("interleaved", "half"):
            make = _args(run, f32, heads=(n, kv, dim), rope=rope)
            yield _case(f"f32/{n}x{kv}x{dim}-{rope}", "f32", make)
    yield _case("f32/odd-head", "f32", _args(run, f32, heads=(3, 1, 7), rope="none"))
    yield _case("f32/head-1", "f32", _args(run, f32, heads=(2, 2, 1), rope="none"))
    # Neighbouring positions must turn differently: float16 or bfloat16 positions would not.
    near = [(0, p) for p in range(15962, 15969)]
    yield _case("f32/neighbours", "f32", _args(near, f32))
    for size in (1, 7, 16):
        yield _case(f"f32/page-{size}", "f32", _args(run, f32, page_size=size))
    yield _case("f32/flat", "f32", _args(run, f32, cache_len=80))
    yield _case("f32/ring", "f32", _args(run, f32, cache_len=8))
    both = [(1, 20), (0, 21), (1, 21)]
    yield _case("f32/ring-slots", "f32", _args(both, f32, slots=2, cache_len=16))
    yield _case("f32/inject", "f32", _args(run, f32, with_q=False, weights=True, rope="half"))
    yield _case("bf16/inject", "bf16", _args(run, torch.bfloat16, with_q=False))
    yield _case("f32/no-tokens", "f32", _args([], f32))
    yield _case("f32/only-padding", "f32", _args([(-1, 0)] * 3, f32, nan_padding=True))
    yield _case("f32/one", "f32", _args([(0, 100)], f32))
    yield _case("f32/prefill-130", "f32", _args([(0, p) for p in range(500, 630)], f32))


def _case(case_id: str, name: str, make: Any, cache: str = "f32") -> Case:
    if DEFAULT_NMSE[cache] <= DEFAULT_NMSE[name]:
        return Case(case_id, make, name)
    why = f"the {cache} cache rounds keys, and float32 arithmetic may fall on the other side"
    return Case(case_id, make, name, nmse=DEFAULT_NMSE[cache], why=why)


def _refusals() -> Iterator[Case]:
    f32, two = torch.float32, [(0, 3), (0, 4)]

    def change(**changes: Any) -> Any:
        """The arguments of two tokens with some replaced: a value, or a function of the old one."""

        def make() -> tuple[Any, ...]:
            args = dict(zip(OP.arg_names, _args(two, f32)(), strict=True))
            for name, value in changes.items():
                args[name] = value(args[name]) if callable(value) else value
            return tuple(args.values())

        return make

    ints = torch.tensor
    for case_id, make, error in (
        ("33-heads", change(q=torch.ones(2, 33 * 128)), "q: expected a multiple of 2 heads"),
        ("q-width", change(q=torch.ones(2, 4000)), "q: expected a multiple of 2 heads of 128"),
        ("q-empty", change(q=torch.ones(2, 0)), "q: expected a multiple"),
        ("q-rows", change(q=torch.ones(3, 4096)), "q: expected [2, n_heads * head_dim]"),
        ("q-dtype", change(q=torch.ones(2, 4096).half()), "q: expected float32"),
        ("k-width", change(k=torch.ones(2, 128)), "k: expected [T, kv_heads * head_dim = 256]"),
        ("v-shape", change(v=torch.ones(2, 128)), "v: expected float32[2, 256]"),
        ("weight", change(q_weight=torch.ones(127)), "q_weight: expected shape [128]"),
        ("k-weight", change(k_weight=torch.ones(2, 64)), "k_weight: expected shape [128]"),
        ("eps", change(eps=float("inf")), "eps: expected a finite value"),
        ("rope", change(rope="neox"), "rope: expected 'none', 'interleaved' or 'half', found"),
        ("theta", change(theta=0.0), "theta: expected a finite value > 0"),
        ("odd-head", _args(two, f32, heads=(3, 1, 7)), "k_cache: expected an even head_dim"),
        ("pos-dtype", change(pos=lambda p: p.int()), "pos: expected int64[2]"),
        ("slot-shape", change(slot=ints([0])), "slot: expected int64[2]"),
        ("table-dtype", change(block_table=lambda t: t.long()), "block_table: expected int32"),
        ("cache-dtype", change(v_cache=lambda c: c.half()), "v_cache: expected float32"),
        ("cache-3d", change(k_cache=lambda c: c[0].clone()), "k_cache: expected 4 dimensions"),
        ("slot-high", change(slot=ints([0, 1])), "slot: token 1: expected -1 (padding) or 0 <="),
        ("slot-low", change(slot=ints([0, -2])), "slot: token 1: expected -1"),
        ("pos-low", change(pos=ints([-1, 4])), "pos: token 0: expected 0 <= pos"),
        ("pos-high", change(pos=ints([3, 64])), "pos: token 1: expected 0 <= pos < 1 pages of 64"),
        ("pos-huge", change(pos=ints([3, 2**62])), "pos: token 1: expected 0 <= pos"),
        ("absent", change(block_table=lambda t: t * 0 - 1), "found -1 (absent)"),
        ("page-high", change(block_table=lambda t: t * 0 + 99), "expected 0 <= page < 3, found 99"),
        ("page-low", change(block_table=lambda t: t * 0 - 5), "expected 0 <= page < 3, found -5"),
        ("duplicate", change(pos=ints([4, 4])), "found token 0 (slot 0, pos 4) and token 1"),
        ("ring-wraps", _args([(0, 3), (0, 11)], f32, cache_len=8), "both at row 3 of page 0"),
        ("shared-page", _shared_page, "found token 0 (slot 0, pos 4) and token 1 (slot 1, pos 4)"),
    ):
        yield Case(f"refuse/{case_id}", make, error=error)


def _shared_page() -> tuple[Any, ...]:
    """Two slots that share a page, as after a missing copy on write."""
    args = list(_args([(0, 4), (1, 4)], torch.float32, slots=2)())
    args[10][1] = args[10][0]
    return tuple(args)


def _args(
    tokens: Iterable[tuple[int, int]],
    dtype: torch.dtype,
    heads: tuple[int, int, int] = (32, 2, 128),
    rope: str = "interleaved",
    weights: bool = False,
    scale: float = 1.0,
    nan_padding: bool = False,
    with_q: bool = True,
    cache_dtype: torch.dtype = torch.float32,
    **layout: Any,
) -> Any:
    """Arguments for (slot, pos) tokens and (n_heads, kv_heads, head_dim); layout: see Layout."""

    def make() -> tuple[Any, ...]:
        n_heads, kv_heads, dim = heads
        pos, slot = split_tokens(tokens)
        g = generator(pos.tolist(), slot.tolist(), heads, rope, str(dtype), str(cache_dtype))
        shape = Layout(kv_heads=kv_heads, head_dim=dim, dtype=cache_dtype, **layout)
        mapped = {s: pos[slot == s].tolist() for s in range(shape.slots)}
        k_cache, v_cache, table = build(g, shape, {}, mapped)
        q, k, v = (
            (randn(g, len(pos), n * dim) * scale).to(dtype) for n in (n_heads, kv_heads, kv_heads)
        )
        if nan_padding:
            for x in (q, k, v):
                x[slot < 0] = float("nan")
        gains = [1 + 0.1 * randn(g, dim) if weights else None for _ in range(2)]
        maybe_q = q if with_q else None
        return maybe_q, k, v, *gains, 1e-5, rope, THETA, pos, slot, table, k_cache, v_cache

    return make


def bench() -> Iterator[Case]:
    for t in (1, 16, 512):
        run = [(0, 3000 + i) for i in range(t)]
        make = _args(run, torch.float32, cache_dtype=torch.float16)
        case = _case(f"{t}-tokens", "f32", make, "f16")
        yield replace(case, resident=t < 512, slow=t == 16)


OP = Op(
    name="qk_norm_rope_kv",
    args=(
        "Tensor? q, Tensor k, Tensor v, Tensor? q_weight, Tensor? k_weight, float eps, str rope, "
        "float theta, Tensor pos, Tensor slot, Tensor? block_table, Tensor(a!) k_cache, "
        "Tensor(b!) v_cache"
    ),
    fake=fake,
    reference=reference,
    cases=cases,
    cost=cost,
    rows=("q", "k", "v", "pos", "slot"),
    bench=bench,
)
