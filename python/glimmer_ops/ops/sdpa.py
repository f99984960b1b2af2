"""sdpa: grouped-query attention over the paged cache, with an optional window and sigmoid gate.

q: [T, n_heads·head_dim] float32, bfloat16 or float16; head h reads kv head h // (n_heads/kv_heads).
k_cache, v_cache: one dtype of the three, which may differ from q's; pos, slot: int64 [T];
block_table: see _paged. gate: like q, or None. scale multiplies the scores. Returns
softmax(scale · q·Kᵀ)·V · sigmoid(gate), like q, in float32 or better, rounded once.

A token at position i of a slot sees keys j ≤ i (causal) or j ≤ the slot's largest position in this
call (causal=False: a block that is bidirectional among its own tokens), and i - j < window if
window > 0. Keys that no token sees may be absent or hold anything. slot -1 is a padding token: its
inputs are not read, its output row is 0. (Ainslie et al. 2023, "GQA".)

Refused with ValueError: shapes that do not fit; slot outside [-1, slots); pos outside the table or,
without a window, outside a contiguous cache; a visible page that is absent; a ring in which a
position of this call has overwritten a visible key (never when cache_len ≥ window + T - 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ._contract import FLOAT_DTYPES, Case, Cost, Op, generator, nbytes, randn
from ._paged import Layout, build, rows, split_tokens, visible

MODEL_SCALE = 43.7840518911 / 128


def fake(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pos: torch.Tensor,
    slot: torch.Tensor,
    block_table: torch.Tensor | None,
    scale: float,
    window: int,
    causal: bool,
    gate: torch.Tensor | None,
) -> torch.Tensor:
    return torch.empty_like(q)


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pos: torch.Tensor,
    slot: torch.Tensor,
    block_table: torch.Tensor | None,
    scale: float,
    window: int,
    causal: bool,
    gate: torch.Tensor | None,
) -> torch.Tensor:
    _, kv_heads, _, dim = k_cache.shape
    out = torch.zeros_like(q)
    for t, seen in enumerate(visible(pos, slot, window, causal)):
        if seen is None:
            continue
        k, v = (rows(c, block_table, int(slot[t]), *seen) for c in (k_cache, v_cache))
        query = q[t].double().view(kv_heads, -1, dim)
        weights = torch.softmax(torch.einsum("hgd,jhd->hgj", query, k) * scale, -1)
        y = torch.einsum("hgj,jhd->hgd", weights, v).flatten()
        out[t] = (y if gate is None else y * torch.sigmoid(gate[t].double())).to(q.dtype)
    return out


def cost(*args: Any) -> Cost:
    q, k_cache, _, pos, slot, table, _, window, causal, gate = args
    seen = [r for r in visible(pos, slot, window, causal) if r]
    ranges: dict[int, tuple[int, int]] = {}
    for s, r in zip([s for s in slot.tolist() if s >= 0], seen, strict=True):
        lo, hi = ranges.get(s, r)
        ranges[s] = (min(lo, r[0]), max(hi, r[1]))
    row = 2 * k_cache.size(1) * k_cache.size(3) * k_cache.element_size()
    keys = sum(hi - lo for lo, hi in ranges.values())
    moved = 2 * nbytes(q) + nbytes(gate, pos, slot, table) + keys * row
    return Cost(bytes=moved, flops=4 * q.size(1) * sum(hi - lo for lo, hi in seen))


def cases() -> Iterator[Case]:
    run = [(0, p) for p in range(125, 131)]
    for name, dtype in FLOAT_DTYPES.items():
        for cache_name, cache in FLOAT_DTYPES.items():
            make = _args(run, dtype, cache_dtype=cache)
            yield Case(f"{name}/{cache_name}-cache", make, name)
        yield Case(f"{name}/no-gate", _args(run, dtype, gate=False), name)
        mixed = [(2, 70), (-1, 0), (0, 9), (2, 71), (-1, -7), (1, 0), (0, 10)]
        for window in (0, 8):
            make = _args(mixed, dtype, slots=3, window=window, nan_padding=True)
            yield Case(f"{name}/slots-and-padding-w{window}", make, name)
        block = [(0, p) for p in range(100, 116)] + [(1, p) for p in range(3, 7)]
        for window in (0, 32):
            make = _args(block, dtype, (32, 8, 128), slots=2, window=window, causal=False)
            yield Case(f"{name}/block-w{window}", make, name)
    yield from _lengths()
    yield from _windows()
    yield from _shapes(run)
    yield from _scores(run)
    yield from _refusals()


def _lengths() -> Iterator[Case]:
    f32 = torch.float32
    for n in (1, 2, 5, 17, 31, 63, 64, 65, 509, 512, 513, 1025):
        yield Case(f"f32/kv-{n}", _args([(0, n - 1)], f32))
    yield Case("f32/q4-kv10", _args([(0, p) for p in range(6, 10)], f32))
    yield Case("f32/prefill-70", _args([(0, p) for p in range(70)], f32))
    yield Case("f32/two-ends", _args([(0, 0), (0, 700)], f32))
    yield Case("f32/kv-4100-f16", _args([(0, 4099)], f32, cache_dtype=torch.float16))
    make = _args([(0, 131071), (0, 4095)], f32, (2, 1, 8))
    yield Case("f32/kv-131072", make, slow=True)
    yield Case("f32/no-tokens", _args([], f32))
    yield Case("f32/only-padding", _args([(-1, 0)] * 3, f32, nan_padding=True))
    make = _args([(0, 5), (-1, 0), (1, 0)], f32, slots=2, nan_padding=True)
    yield Case("f32/one-empty-sequence", make)


def _windows() -> Iterator[Case]:
    f32, small = torch.float32, (4, 1, 64)
    yield Case("f32/window-4-seq-9", _args([(0, p) for p in range(9)], f32, small, window=4))
    edges = [(0, p) for p in (62, 63, 64, 65, 127, 128)]
    for window in (1, 2, 63, 64, 65):
        yield Case(f"f32/window-{window}", _args(edges, f32, small, window=window))
    # Only the visible pages exist.
    far = [(0, p) for p in range(131068, 131072)]
    yield Case("f32/far-window", _args(far, f32, window=100))
    yield Case("f32/model-window", _args([(0, 2046), (0, 2047), (0, 2048)], f32, window=2048))
    both = [(0, 4095), (1, 3)]
    yield Case("bf16/model-window", _args(both, torch.bfloat16, window=2048, slots=2), "bf16")
    # A window that starts in the middle of a key tile, over several of them.
    chunk = [(0, p) for p in range(812, 842)]
    yield Case("f32/window-750", _args(chunk, f32, small, window=750))
    yield Case("f32/prefill-window-50", _args([(0, p) for p in range(130)], f32, small, window=50))
    yield Case("f32/window-over-length", _args([(0, 9)], f32, small, window=2**40))
    inclusive = [(0, p) for p in range(200, 216)]
    make = _args(inclusive, f32, (32, 8, 128), window=65, causal=False)
    yield Case("f32/block-inclusive-window", make)


def _shapes(run: list[tuple[int, int]]) -> Iterator[Case]:
    f32 = torch.float32
    for heads in ((32, 2, 128), (8, 2, 128), (4, 1, 64), (24, 1, 128), (28, 4, 128), (32, 8, 128)):
        yield Case(f"f32/{'x'.join(map(str, heads))}", _args(run, f32, heads))
    for heads in ((2, 2, 1), (3, 1, 7), (6, 3, 80), (4, 2, 256), (96, 1, 16), (5, 5, 33)):
        make = _args(run, f32, heads, cache_dtype=torch.float16)
        yield Case(f"f32/{'x'.join(map(str, heads))}", make)
    for size in (1, 7, 16, 100):
        yield Case(f"f32/page-{size}", _args(run, f32, (4, 1, 64), page_size=size, window=50))
    yield Case("f32/flat", _args(run, f32, cache_len=131))
    yield Case("f32/flat-short-of-window", _args(run, f32, window=2048, cache_len=131))
    ring = [(1, 20), (0, 41), (1, 21), (0, 42)]
    yield Case("f32/ring", _args(ring, f32, window=8, slots=2, cache_len=9))
    # A ring of 8 with a window of 4 holds all that a chunk of 5 sees.
    for t in (1, 4, 5):
        chunk = [(0, p) for p in range(21, 21 + t)]
        yield Case(f"f32/ring-8-window-4-chunk-{t}", _args(chunk, f32, window=4, cache_len=8))


def _scores(run: list[tuple[int, int]]) -> Iterator[Case]:
    f32 = torch.float32
    why = "a float32 score near 1e3 is known to 6e-5, and a weight to 6e-5 of itself"
    yield Case("f32/scores-1e3", _args(run, f32, scale=90.0), nmse=1e-9, why=why)
    yield Case("f32/scores-1e4", _args(run, f32, scale=900.0))
    yield Case("bf16/scores-1e4", _args(run, torch.bfloat16, scale=900.0), "bf16")
    yield Case("f32/scores-equal", _args(run, f32, scale=0.0))
    yield Case("f32/negative-scale", _args(run, f32, scale=-0.3))
    # Every key gets the same score of -1e4: exp of it alone is 0.
    yield Case("f32/scores-all-low", _all_low)


def _all_low() -> tuple[Any, ...]:
    q, k_cache, v_cache, *rest = _args([(0, 70)], torch.float32, (4, 1, 64), scale=-1e4 / 64)()
    return torch.ones_like(q), torch.ones_like(k_cache), v_cache, *rest


def _refusals() -> Iterator[Case]:
    f32, two = torch.float32, [(0, 3), (0, 4)]

    def change(**changes: Any) -> Any:
        """The arguments of two tokens with some replaced: a value, or a function of the old one."""

        def make() -> tuple[Any, ...]:
            args = dict(zip(OP.arg_names, _args(two, f32, (32, 2, 128))(), strict=True))
            for name, value in changes.items():
                args[name] = value(args[name]) if callable(value) else value
            return tuple(args.values())

        return make

    def ring(begin: int, tokens: int, window: int = 4) -> Any:
        chunk = [(0, p) for p in range(begin, begin + tokens)]
        return _args(chunk, f32, window=window, cache_len=8)

    ints = torch.tensor
    for case_id, make, error in (
        ("33-heads", change(q=torch.ones(2, 33 * 128)), "q: expected a multiple of 2 heads of 128"),
        ("q-width", change(q=torch.ones(2, 100)), "q: expected a multiple of 2 heads of 128"),
        ("q-empty", change(q=torch.ones(2, 0)), "q: expected a multiple"),
        ("q-int", change(q=torch.ones(2, 4096).int()), "q: expected float32"),
        ("gate-shape", change(gate=torch.ones(2, 32)), "gate: expected float32[2, 4096]"),
        ("gate-dtype", change(gate=torch.ones(2, 4096).half()), "gate: expected float32[2, 4096]"),
        ("v-shape", change(v_cache=lambda c: c[:1].clone()), "v_cache: expected float32["),
        ("head-dim-0", change(k_cache=lambda c: c[..., :0].clone()), "k_cache: expected [pages"),
        ("pos-shape", change(pos=ints([3])), "pos: expected int64[2]"),
        ("slot-dtype", change(slot=ints([0, 0]).int()), "slot: expected int64[2]"),
        ("table-1d", change(block_table=lambda t: t[0].clone()), "block_table: expected 2 dim"),
        ("window", change(window=-1), "window: expected 0 (global) or more, found -1"),
        ("scale", change(scale=float("nan")), "scale: expected a finite value"),
        ("slot-high", change(slot=ints([0, 1])), "slot: token 1: expected -1 (padding) or"),
        ("slot-low", change(slot=ints([-3, 0])), "slot: token 0: expected -1 (padding) or"),
        ("pos-low", change(pos=ints([3, -1])), "pos: token 1: expected 0 <= pos"),
        ("pos-high", change(pos=ints([3, 64])), "pos: token 1: expected 0 <= pos < 1 pages of 64"),
        ("pos-huge", change(pos=ints([3, 2**62])), "pos: token 1: expected 0 <= pos"),
        ("absent", _absent_page, "needs page 1 of slot 0: expected 0 <= page < "),
        ("page-high", change(block_table=lambda t: t * 0 + 99), "expected 0 <= page < 3, found 99"),
        ("flat-full", _args([(0, 8)], f32, cache_len=8), "pos: token 0: expected pos < cache_len"),
        ("ring-chunk-6", ring(21, 6), "expected cache_len >= 9 for window 4, found 8"),
        ("ring-chunk-8", ring(21, 8), "k_cache: token 0 sees position 18, which position 28"),
        ("ring-window-9", ring(21, 1, window=9), "expected cache_len >= 9 for window 9, found 8"),
        ("no-slots", change(block_table=lambda t: t[:0].clone()), "slot: token 0: expected -1"),
    ):
        yield Case(f"refuse/{case_id}", make, error=error)


def _absent_page() -> tuple[Any, ...]:
    args = list(_args([(0, 200)], torch.float32, window=140)())
    args[5][0, 1] = -1
    return tuple(args)


def _args(
    tokens: Iterable[tuple[int, int]],
    dtype: torch.dtype,
    heads: tuple[int, int, int] = (32, 2, 128),
    window: int = 0,
    causal: bool = True,
    gate: bool = True,
    scale: float | None = None,
    nan_padding: bool = False,
    cache_dtype: torch.dtype = torch.float32,
    **layout: Any,
) -> Any:
    """Arguments for (slot, pos) tokens; every key that none of them sees is NaN or absent."""

    def make() -> tuple[Any, ...]:
        n_heads, kv_heads, dim = heads
        pos, slot = split_tokens(tokens)
        g = generator(pos.tolist(), slot.tolist(), heads, window, str(dtype), str(cache_dtype))
        shape = Layout(kv_heads=kv_heads, head_dim=dim, dtype=cache_dtype, **layout)
        filled: dict[int, set[int]] = {s: set() for s in range(shape.slots)}
        for s, seen in zip(slot.tolist(), visible(pos, slot, window, causal), strict=True):
            if seen is not None:
                filled[s].update(range(*seen))
        k_cache, v_cache, table = build(g, shape, filled)
        q, gates = (randn(g, len(pos), n_heads * dim, dtype=dtype) for _ in range(2))
        if nan_padding:
            q[slot < 0] = gates[slot < 0] = float("nan")
        factor = MODEL_SCALE * math.sqrt(128 / dim) if scale is None else scale
        maybe_gate = gates if gate else None
        return q, k_cache, v_cache, pos, slot, table, factor, window, causal, maybe_gate

    return make


def bench() -> Iterator[Case]:
    """The model's heads and caches: decoding with a long context, and chunks of a prompt."""

    def case(
        name: str, tokens: Iterable[tuple[int, int]], window: int = 0, slow: bool = False
    ) -> Case:
        make = _args(tokens, torch.float32, window=window, cache_dtype=torch.float16)
        return Case(name, make, slow=slow)

    for length in (4096, 32768, 512):
        yield case(f"decode-kv{length}", [(0, length - 1)], slow=length == 512)
    yield case("decode-kv32768-window2048", [(0, 32767)], 2048, slow=True)
    yield case("verify16-kv4096", [(0, p) for p in range(4080, 4096)], slow=True)
    yield case("prefill512-kv512", [(0, p) for p in range(512)])
    yield case("prefill512-kv4096", [(0, p) for p in range(3584, 4096)], slow=True)


OP = Op(
    name="sdpa",
    args=(
        "Tensor q, Tensor k_cache, Tensor v_cache, Tensor pos, Tensor slot, Tensor? block_table, "
        "float scale, int window, bool causal, Tensor? gate"
    ),
    fake=fake,
    reference=reference,
    cases=cases,
    cost=cost,
    rows=("q", "pos", "slot", "gate"),
    bench=bench,
)
