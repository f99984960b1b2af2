"""Hypothesis strategies for each op's arguments: small shapes, every dtype, type and layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from glimmer_ops.gguf import QTYPES
from glimmer_ops.ops._contract import FLOAT_DTYPES, generator, randn
from glimmer_ops.ops._kquant import random_weight
from glimmer_ops.ops.qk_norm_rope_kv import _args as qk_args
from glimmer_ops.ops.sdpa import _args as sdpa_args

Draw = Callable[..., Any]

ROWS = st.integers(1, 16)  # row invariance holds up to 16
DTYPES = st.sampled_from(list(FLOAT_DTYPES.values()))
SEEDS = st.integers(0, 2**32)


def _gain(draw: Draw, g: torch.Generator, dim: int) -> torch.Tensor | None:
    dtype = draw(st.none() | DTYPES)
    return None if dtype is None else (1 + 0.1 * randn(g, dim)).to(dtype)


@st.composite
def rms_norm(draw: Draw) -> tuple[Any, ...]:
    m, d, dtype, g = draw(ROWS), draw(st.integers(1, 300)), draw(DTYPES), generator(draw(SEEDS))
    x = (randn(g, m, d) * draw(st.sampled_from([1e-3, 1.0, 100.0]))).to(dtype)
    return x, _gain(draw, g, d), draw(st.sampled_from([1e-5, 1e-8]))


@st.composite
def add_rms_norm(draw: Draw) -> tuple[Any, ...]:
    m, d, dtype, g = draw(ROWS), draw(st.integers(1, 300)), draw(DTYPES), generator(draw(SEEDS))
    residual, x = (
        (randn(g, m, d) * draw(st.sampled_from([1e-3, 1.0, 100.0]))).to(dtype) for _ in range(2)
    )
    following = _gain(draw, g, d)
    if draw(st.booleans()):
        return residual, x, None, None, following, 1e-5
    return residual, x, _gain(draw, g, d), 1e-8, following, 1e-5


def _k(draw: Draw, *qtypes: str) -> int:
    """A row length that is whole blocks of every type."""
    block = max(QTYPES[q][0] for q in qtypes)
    return block * draw(st.integers(1, 3 if block == 256 else 40))


def _linear(draw: Draw, *qtypes: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    m, n, k, g = draw(ROWS), draw(st.integers(1, 70)), _k(draw, *qtypes), generator(draw(SEEDS))
    x = randn(g, m, k, dtype=draw(DTYPES))
    return x, [random_weight(g, n, k, q) for q in qtypes]


@st.composite
def kquant_linear(draw: Draw) -> tuple[Any, ...]:
    qtype = draw(st.sampled_from(list(QTYPES)))
    x, (weight,) = _linear(draw, qtype)
    return x, weight, qtype


@st.composite
def kquant_logits(draw: Draw) -> tuple[Any, ...]:
    qtype = draw(st.sampled_from(list(QTYPES)))
    x, (weight,) = _linear(draw, qtype)
    return x, weight, qtype, draw(st.sampled_from([0.2, 1.0])), draw(st.sampled_from([0.0, 20.0]))


@st.composite
def kquant_swiglu(draw: Draw) -> tuple[Any, ...]:
    gate, up = (draw(st.sampled_from(list(QTYPES))) for _ in range(2))
    x, weights = _linear(draw, gate, up)
    return x, weights[0], gate, weights[1], up


@st.composite
def kquant_embedding(draw: Draw) -> tuple[Any, ...]:
    qtype = draw(st.sampled_from(list(QTYPES)))
    n, k, g = draw(st.integers(1, 40)), _k(draw, qtype), generator(draw(SEEDS))
    ids = draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=16))
    return torch.tensor(ids), random_weight(g, n, k, qtype), qtype


def _heads(draw: Draw, even: bool) -> tuple[int, int, int]:
    kv, group, dim = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 20))
    return kv * group, kv, dim * (2 if even else 1)


def _tokens(draw: Draw, slots: int) -> list[tuple[int, int]]:
    """Up to 16 distinct (slot, pos) pairs and padding, in any order."""
    token = st.tuples(st.integers(0, slots - 1), st.integers(0, 300)) | st.just((-1, 0))
    return draw(
        st.lists(token, min_size=1, max_size=16, unique_by=lambda t: t if t[0] >= 0 else object())
    )


def _layout(draw: Draw) -> dict[str, Any]:
    slots, paged = draw(st.integers(1, 3)), draw(st.booleans())
    size = draw(st.sampled_from([1, 3, 16, 64]))
    return {"slots": slots, **({"page_size": size} if paged else {"cache_len": 301})}


@st.composite
def qk_norm_rope_kv(draw: Draw) -> tuple[Any, ...]:
    rope, layout = draw(st.sampled_from(["none", "interleaved", "half"])), _layout(draw)
    return qk_args(
        _tokens(draw, layout["slots"]),
        draw(DTYPES),
        _heads(draw, rope != "none"),
        rope,
        weights=draw(st.booleans()),
        with_q=draw(st.booleans()),
        cache_dtype=draw(DTYPES),
        nan_padding=True,
        **layout,
    )()


@st.composite
def sdpa(draw: Draw) -> tuple[Any, ...]:
    layout = _layout(draw)
    return sdpa_args(
        _tokens(draw, layout["slots"]),
        draw(DTYPES),
        _heads(draw, False),
        draw(st.sampled_from([0, 1, 5, 64, 100])),
        draw(st.booleans()),
        gate=draw(st.booleans()),
        cache_dtype=draw(DTYPES),
        nan_padding=True,
        **layout,
    )()


@st.composite
def sample(draw: Draw) -> tuple[Any, ...]:
    r, v, g = draw(ROWS), draw(st.integers(1, 300)), generator(draw(SEEDS))

    def rows(values: st.SearchStrategy[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(draw(st.lists(values, min_size=r, max_size=r)), dtype=dtype)

    i64 = st.integers(-(2**63), 2**63 - 1)
    return (
        3 * randn(g, r, v),
        rows(st.sampled_from([0.0, 0.5, 1.0, 2.0]), torch.float32),
        rows(st.integers(-1, 60), torch.int64),
        rows(st.sampled_from([0.0, 0.3, 0.9, 1.0, 1.5]), torch.float32),
        rows(i64, torch.int64),
        rows(i64, torch.int64),
    )


# Of every op that has one, by the op's name.
ARGUMENTS: dict[str, Callable[[], st.SearchStrategy[tuple[Any, ...]]]] = {
    f.__name__: f
    for f in (
        rms_norm,
        add_rms_norm,
        kquant_linear,
        kquant_logits,
        kquant_swiglu,
        kquant_embedding,
        qk_norm_rope_kv,
        sdpa,
        sample,
    )
}
