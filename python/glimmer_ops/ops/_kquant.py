"""GGUF weights as the K-quant ops see them: reference decoding, random rows, shared cases.

A weight is uint8 [N, row_bytes]: N encoded rows of K weights, as a GGUF file stores them
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Super-blocks of 256 weights:
Q4_K 144 bytes, Q5_K 176, Q6_K 210; Q8_0 has blocks of 32 weights in 34 bytes; F16, BF16 and F32
are plain. The reference decodes with the gguf package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import gguf
import numpy as np
import torch

from ..gguf import QTYPES, row_bytes
from ._contract import generator, randn

K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
INT8_QTYPES = (*K_QUANTS, "Q8_0")

# Byte offset of d in a block, and of dmin where there is one.
D_OFFSET = {"Q4_K": 0, "Q5_K": 0, "Q6_K": 208, "Q8_0": 0}
DMIN_OFFSET = {"Q4_K": 2, "Q5_K": 2}
# Bytes of sub-block scales.
SCALES = {"Q4_K": slice(4, 16), "Q5_K": slice(4, 16), "Q6_K": slice(192, 208)}

# Standard deviation of a weight in units of d when every other byte is uniformly random and dmin
# makes the mean zero.
_SPREAD = {"Q4_K": 259.0, "Q5_K": 531.0, "Q6_K": 1364.0, "Q8_0": 74.0}
_MEAN_Q = {"Q4_K": 7.5, "Q5_K": 15.5}

# (M, N, K) of ordinary cases: every M below and above the small-M path, tails of N, odd and even
# numbers of super-blocks, K = 26 · 256 as in the model. All have some 100 outputs or more: with
# fewer, the measured NMSE of int8 activations strays far from its expectation of about 3e-5.
SHAPES = (
    (0, 3, 256),
    (1, 257, 768),
    (2, 64, 512),
    (3, 257, 256),
    (5, 257, 768),
    (16, 64, 6656),
    (33, 3, 512),
    (100, 1, 768),
)


def dequantize(weight: torch.Tensor, qtype: str) -> torch.Tensor:
    """The weights as float32 [N, K], decoded by the gguf package."""
    kind = gguf.GGMLQuantizationType[qtype]
    block, size = QTYPES[qtype]
    n, k = weight.shape[0], weight.shape[1] // size * block
    if not weight.numel():
        return torch.empty(n, k)
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(weight.numpy(), kind).reshape(n, k))


def matmul(x: torch.Tensor, weight: torch.Tensor, qtype: str) -> torch.Tensor:
    """x · Wᵀ in float64: x [M, K], weight uint8 [N, row_bytes] -> [M, N]."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float64)
    step = max(1, (1 << 24) // max(1, x.shape[1]))  # decoded rows stay below 200 MB
    for n in range(0, weight.shape[0], step):
        out[:, n : n + step] = x.double() @ dequantize(weight[n : n + step], qtype).double().T
    return out


def random_weight(g: torch.Generator, n: int, k: int, qtype: str) -> torch.Tensor:
    """Valid encoded rows, uint8 [n, row_bytes], of weights of about 1/√k in size.

    Every bit pattern of scales, mins and values occurs; only d and dmin are chosen.
    """
    if qtype not in INT8_QTYPES:
        w = torch.randn(n, k, generator=g) / math.sqrt(k)
        dtype = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[qtype]
        return w.to(dtype).view(torch.uint8).reshape(n, row_bytes(k, qtype))
    _, size = QTYPES[qtype]
    shape = (n * row_bytes(k, qtype) // size, size)
    blocks = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
    d = (0.5 + torch.rand(blocks.shape[0], generator=g)) / (_SPREAD[qtype] * math.sqrt(k))
    set_half(blocks, D_OFFSET[qtype], d)
    if qtype in DMIN_OFFSET:
        set_half(blocks, DMIN_OFFSET[qtype], d * _MEAN_Q[qtype])
    return blocks.reshape(n, row_bytes(k, qtype))


def set_half(blocks: torch.Tensor, offset: int, value: torch.Tensor | float) -> None:
    """Stores value as float16 at a byte offset of every block, uint8 [blocks, size]."""
    values = torch.as_tensor(value, dtype=torch.float32).expand(blocks.shape[0])
    blocks[:, offset : offset + 2] = values.half().unsqueeze(1).view(torch.uint8)


def weight_edges(qtype: str) -> Iterator[tuple[str, Callable[[torch.Tensor], Any]]]:
    """Names of special block contents, with a function that writes them to a row's first block.

    The function takes uint8 [blocks, size] and changes it in place.
    """
    d, dmin = D_OFFSET[qtype], DMIN_OFFSET.get(qtype)
    yield "d-zero", lambda b: set_half(b[:1], d, 0.0)
    yield "d-subnormal", lambda b: set_half(b[:1], d, 3e-7)
    yield "d-negative", lambda b: b[:1, d + 1].bitwise_xor_(0x80)
    yield "d-nan", lambda b: set_half(b[:1], d, math.nan)
    yield "zero-block", lambda b: b[:1].zero_()
    if dmin is not None:
        yield "d-zero-dmin", lambda b: _only_min(b[:1], d, dmin)
        yield "dmin-nan", lambda b: set_half(b[:1], dmin, math.nan)
    if qtype == "Q6_K":
        yield "scales-negative", lambda b: b[:1, SCALES[qtype]].fill_(0x80)
        opposed = torch.tensor([127, 129] * 8, dtype=torch.uint8)  # in the two halves of a group
        yield "scales-opposed", lambda b: b[:1, SCALES[qtype]].copy_(opposed)


def _only_min(blocks: torch.Tensor, d: int, dmin: int) -> None:
    set_half(blocks, d, 0.0)
    set_half(blocks, dmin, 0.001)


def infinite_scale(blocks: torch.Tensor, qtype: str) -> None:
    """Gives the first block d = inf and one zero factor, so that its dot products are NaN."""
    set_half(blocks[:1], D_OFFSET[qtype], math.inf)
    start = SCALES[qtype].start if qtype in SCALES else 2
    stop = SCALES[qtype].stop if qtype in SCALES else blocks.shape[1]
    blocks[:1, start:stop] = 0


def fixed(*args: Any) -> Callable[[], tuple[Any, ...]]:
    """A case's `make` for arguments that exist already: copies of them each time."""
    return lambda: tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def linear_inputs(
    m: int, n: int, k: int, qtype: str, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Standard normal x [m, k] and random encoded rows [n, row_bytes]."""
    g = generator(m, n, k, qtype, str(dtype))
    return randn(g, m, k, dtype=dtype), random_weight(g, n, k, qtype)


def edge_inputs(qtype: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Named x and weight at the edges of both: what public bug reports and the format teach."""
    m, n, k = 3, 65, 512
    size = QTYPES[qtype][1]
    edges = [*weight_edges(qtype), ("d-inf", lambda b: infinite_scale(b, qtype))]
    for name, change in edges:
        x, weight = linear_inputs(m, n, k, qtype)
        change(weight[1].view(-1, size))
        yield name, x, weight
    for rows in (1, 64):  # sums of a group beyond float16, activations beyond it
        x, weight = linear_inputs(rows, n, k, qtype)
        x[:, 32:64] = 3000.0
        yield f"constant-3000-m{rows}", x, weight
        x, weight = linear_inputs(rows, n, k, qtype)
        yield f"amplitude-1e5-m{rows}", x * 1e5, weight
    x, weight = linear_inputs(m, n, k, qtype)
    x[1, 300] = math.nan
    yield "x-nan", x, weight
    x, weight = linear_inputs(m, n, k, qtype)
    x[1, 32:64] = 0.0
    x[2] = 0.0
    yield "x-zero", x, weight
    x, weight = linear_inputs(m, n, k, qtype)
    yield "x-tiny", x * 1e-30, weight


def constant_groups(x: torch.Tensor) -> torch.Tensor:
    """x with each group of 32 replaced by its first value: int8 quantisation keeps it exactly."""
    return x.view(x.shape[0], -1, 32)[:, :, :1].expand(-1, -1, 32).reshape(x.shape).contiguous()
