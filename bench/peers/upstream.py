"""Upstream's eager modules (executorch.examples.models.muse_glimmer) on float32 weights.

Weights are dequantised before, as upstream's eager model holds them; caches are flat and float32,
and attention gets a ready mask. Each call includes Python's and torch's dispatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from glimmer_ops.check import clone_args
from glimmer_ops.ops._contract import Case, Op, nbytes
from glimmer_ops.ops._kquant import dequantize
from glimmer_ops.ops._paged import rows, visible

from ..probes.cpu import available_memory
from . import Counterpart, timed

Result = torch.Tensor | tuple[torch.Tensor, ...]
Call = Callable[[], Result]


def _rms_norm(weight: torch.Tensor | None, dim: int, eps: float) -> Callable[..., torch.Tensor]:
    from executorch.examples.models.muse_glimmer.model.model import RMSNorm, RMSNormNoWeight

    if weight is None:
        return RMSNormNoWeight(dim, eps)
    norm = RMSNorm(dim, eps)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> Call:
    norm = _rms_norm(weight, x.size(-1), eps)
    return lambda: norm(x)


def add_rms_norm(
    residual: torch.Tensor,
    x: torch.Tensor,
    post_weight: torch.Tensor | None,
    post_eps: float | None,
    next_weight: torch.Tensor | None,
    next_eps: float,
) -> Call:
    post: Callable[[torch.Tensor], torch.Tensor] = torch.nn.Identity()
    if post_eps is not None:
        post = _rms_norm(post_weight, x.size(-1), post_eps)
    following = _rms_norm(next_weight, x.size(-1), next_eps)

    def call() -> Result:
        total = residual + post(x)
        return total, following(total)

    return call


def kquant_linear(x: torch.Tensor, weight: torch.Tensor, qtype: str) -> Call:
    dense = dequantize(weight, qtype)
    return lambda: functional.linear(x, dense)


def kquant_swiglu(
    x: torch.Tensor, gate: torch.Tensor, gate_qtype: str, up: torch.Tensor, up_qtype: str
) -> Call:
    g, u = dequantize(gate, gate_qtype), dequantize(up, up_qtype)
    return lambda: functional.silu(functional.linear(x, g)) * functional.linear(x, u)


def kquant_logits(
    x: torch.Tensor, weight: torch.Tensor, qtype: str, multiplier: float, cap: float
) -> Call | None:
    if not cap:
        return None
    dense = dequantize(weight, qtype)
    return lambda: cap * torch.tanh(functional.linear(x, dense) * multiplier / cap)


def kquant_embedding(ids: torch.Tensor, weight: torch.Tensor, qtype: str) -> Call:
    dense = dequantize(weight, qtype)
    return lambda: functional.embedding(ids, dense)


def _one_run(pos: torch.Tensor, slot: torch.Tensor) -> bool:
    """Whether the tokens are consecutive ones of one sequence, which is all upstream has."""
    return bool((slot == 0).all()) and bool((pos.diff() == 1).all()) and len(pos) > 0


def qk_norm_rope_kv(*args: Any) -> Call | None:
    q, k, v, q_weight, k_weight, eps, rope, theta, pos, slot, _, k_cache, _ = args
    if q is None or rope != "interleaved" or not _one_run(pos, slot):
        return None
    from executorch.examples.models.muse_glimmer.model.model import FlatKVCache, apply_rotary_emb

    _, kv_heads, _, dim = k_cache.shape
    q_norm, k_norm = _rms_norm(q_weight, dim, eps), _rms_norm(k_weight, dim, eps)
    inv_freq = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    cache = FlatKVCache(1, int(pos.max()) + 1, kv_heads, dim)

    def heads(x: torch.Tensor, norm: Callable[..., torch.Tensor] | None) -> torch.Tensor:
        y = x.view(1, len(pos), -1, dim)
        return (y if norm is None else norm(y)).transpose(1, 2)

    def call() -> torch.Tensor:
        angle = torch.outer(pos.float(), inv_freq)
        cos, sin = torch.cos(angle)[None, None], torch.sin(angle)[None, None]
        xq, xk = apply_rotary_emb(heads(q, q_norm), heads(k, k_norm), cos, sin)
        cache.update(pos, xk, heads(v, None))
        return xq.transpose(1, 2).reshape(q.shape)

    return call


def sdpa(*args: Any) -> Call | None:
    q, k_cache, v_cache, pos, slot, table, scale, window, causal, gate = args
    if not causal or not _one_run(pos, slot):
        return None
    seen = [s for s in visible(pos, slot, window, causal) if s]
    begin, end = seen[0][0], seen[-1][1]
    k, v = (
        rows(c, table, 0, begin, end).float().transpose(0, 1)[None].contiguous()
        for c in (k_cache, v_cache)
    )
    mask = torch.zeros(len(seen), end - begin, dtype=torch.bool)
    for i, (low, high) in enumerate(seen):
        mask[i, low - begin : high - begin] = True
    dim = k_cache.size(3)

    def call() -> torch.Tensor:
        query = q.view(1, len(seen), -1, dim).transpose(1, 2)
        y = functional.scaled_dot_product_attention(
            query, k, v, attn_mask=mask, scale=scale, enable_gqa=True
        )
        y = y.transpose(1, 2).reshape(q.shape)
        return y if gate is None else torch.sigmoid(gate) * y

    return call


def sample(logits: torch.Tensor, temperature: torch.Tensor, *_: torch.Tensor) -> Call | None:
    return None if bool(temperature.any()) else (lambda: logits.argmax(-1))


CALLS: dict[str, Callable[..., Call | None]] = {
    f.__name__: f
    for f in (
        rms_norm,
        add_rms_norm,
        kquant_linear,
        kquant_swiglu,
        kquant_logits,
        kquant_embedding,
        qk_norm_rope_kv,
        sdpa,
        sample,
    )
}


class Upstream:
    name = "upstream"
    quick = True

    def missing(self) -> str:
        return ""

    @torch.no_grad()
    def counterpart(self, op: Op, case: Case, working_set: int, threads: int) -> Counterpart | None:
        make = CALLS.get(op.name)
        args = case.make()
        if make is None or any(isinstance(a, torch.Tensor) and _low(a) for a in args[:1]):
            return None
        dense = _dense_bytes(op, args)
        if 2 * dense > available_memory():
            return None
        call = make(*args)
        if call is None:
            return None
        copies = 1 if case.resident else max(1, math.ceil(working_set / max(1, dense)))
        copies = min(copies, max(1, available_memory() // 4 // max(1, dense)))
        calls: list[Call] = [call]
        calls += [c for _ in range(copies - 1) if (c := make(*clone_args(args)))]
        torch.set_num_threads(threads)

        def no_grad(run: Callable[[int, int, int], int]) -> Callable[[int, int, int], int]:
            return torch.no_grad()(run)

        weights = "eager, dequantised float32 weights" if op.qtypes else "eager, float32"
        return Counterpart(self.name, no_grad(timed(list(calls))), call, len(calls), 1e-6, weights)

    @torch.no_grad()
    def model(self, gguf: Path, name: str, tokens: int, threads: int) -> Counterpart | None:
        from ..model import fits_densely

        if not fits_densely(gguf):
            return None
        call = _model_call(gguf, name, tokens)
        torch.set_num_threads(threads)
        run = torch.no_grad()(timed([call]))
        return Counterpart(self.name, run, call, note="eager, dequantised float32 weights")


def _model_call(gguf: Path, name: str, tokens: int) -> Call:
    """The logits of the last token; decoding repeats the one behind the shortest prompt."""
    from glimmer_ops.gguf import load
    from glimmer_ops.oracle import load_upstream

    from ..fresh import PROMPT, prompt

    file = load(gguf)
    first = PROMPT if name == "decode" else 0
    model = load_upstream(file, first + tokens)
    ids = torch.tensor(prompt(first + tokens, file.config.vocab_size))
    positions = torch.arange(first + tokens)

    def forward(begin: int, end: int) -> torch.Tensor:
        embeds = model.tok_norm(model.embed_tokens(ids[None, begin:end]).float())
        return model.prefill_from_embeds(embeds, positions[begin:end])

    if first:
        forward(0, first)
    return lambda: forward(first, first + tokens)


def _low(x: torch.Tensor) -> bool:
    return x.dtype in (torch.float16, torch.bfloat16)


def _dense_bytes(op: Op, args: tuple[Any, ...]) -> int:
    """Bytes that one set takes: weights in float32, everything else as it is."""
    named = dict(zip(op.arg_names, args, strict=True))
    total = nbytes(*(a for a in args if isinstance(a, torch.Tensor)))
    for name, qtype in named.items():
        if name.endswith("qtype"):
            weight = named[name.removesuffix("_qtype") if name != "qtype" else "weight"]
            total += 4 * _weights(weight, qtype) - nbytes(weight)
    return total


def _weights(weight: torch.Tensor, qtype: str) -> int:
    from glimmer_ops.gguf import QTYPES

    block, size = QTYPES[qtype]
    return weight.numel() // size * block


PEER = Upstream()
