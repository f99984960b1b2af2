"""The fused Muse Glimmer graph: eleven `glimmer` ops a layer, weights as raw GGUF rows.

Written once, in torch, over names only: every backend lowers this graph. Tokens of several
sequences share one flat axis T; `pos` and `slot` (int64 [T]) say where each belongs, and the page
tables (int32 [slots, max_pages]) where its keys and values lie.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from glimmer_ops import library  # noqa: F401  (defines torch.ops.glimmer)
from glimmer_ops.config import ModelConfig
from glimmer_ops.gguf import GGUFModel

ROPE = "interleaved"  # pairs (2i, 2i + 1); the draft model's are halves
PAGE_SIZE = 64
CHUNK_BYTES = 8 << 20
KV_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
LAYER_MATRICES = (
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_gate",
    "attn_output",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)
LAYER_NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")


@dataclass(frozen=True)
class Weight:
    """One tensor of the model.

    data: uint8 [N, row_bytes] raw GGUF rows of type qtype, or float32 [D] (qtype "F32") for a norm.
    It may be a memory map. path and offset, when given, say where the same bytes lie on disk, so
    that an export can stream them.
    """

    data: torch.Tensor
    qtype: str
    path: Path | None = None
    offset: int = 0

    def chunks(self) -> Iterator[bytes]:
        """The bytes in pieces of at most 8 MiB, from the file if there is one: a memory map would
        count as resident. OSError when the file has shrunk."""
        if self.path is None:
            flat = self.data.contiguous().reshape(-1).view(torch.uint8).numpy()
            for start in range(0, flat.nbytes, CHUNK_BYTES):
                yield flat[start : start + CHUNK_BYTES].tobytes()
            return
        with open(self.path, "rb") as f:
            f.seek(self.offset)
            left = self.data.nbytes
            while left > 0:
                chunk = f.read(min(left, CHUNK_BYTES))
                if not chunk:
                    raise OSError(f"{self.path}: ended while its weights were being read")
                left -= len(chunk)
                yield chunk


def weight_name(gguf_name: str) -> str:
    """The buffer's name of a GGUF tensor: blk.3.attn_q.weight -> blk_3_attn_q."""
    return gguf_name.removesuffix(".weight").replace(".", "_")


def weight_names(config: ModelConfig) -> list[str]:
    """Every weight that the graph reads."""
    layers = [f"blk_{i}_{n}" for i in range(config.n_layers) for n in LAYER_NORMS + LAYER_MATRICES]
    return ["token_embd", *layers, "output_norm", "output"]


def weights_id(weights: Mapping[str, Weight]) -> str:
    """16 hex digits of a hash over every name, type, shape and byte of the weights."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        w = weights[name]
        digest.update(f"{name} {w.qtype} {tuple(w.data.shape)}".encode())
        for chunk in w.chunks():
            digest.update(chunk)
    return digest.hexdigest()[:16]


class _Buffers(nn.Module):
    """A plain bag of buffers."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], persistent: bool) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=persistent)


def make_pools(
    config: ModelConfig, global_pages: int, sliding_pages: int, kv_dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Zeroed page pools k_<layer>, v_<layer>: [pages, kv_heads, 64, head_dim] of kv_dtype."""
    pools = {}
    for i, sliding in enumerate(config.sliding):
        pages = sliding_pages if sliding else global_pages
        for kind in "kv":
            shape = (pages, config.n_kv_heads, PAGE_SIZE, config.head_dim)
            pools[f"{kind}_{i}"] = torch.zeros(shape, dtype=kv_dtype)
    return pools


class FusedModel(nn.Module):
    """The text model as `glimmer` ops.

    weights: every name of `weight_names(config)`. pools: see `make_pools`; None for a graph that
    only embeds. A buffer's full name is `weights_<id>.<name>` or `pools.<k|v>_<layer>`, the same in
    every method, by which ExecuTorch shares it.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        pools: Mapping[str, torch.Tensor] | None = None,
        id_: str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.weights = {n: weights[n] for n in weight_names(config) if n in weights}
        self.id = id_ or weights_id(self.weights)
        data = {n: w.data for n, w in self.weights.items()}
        self.add_module(f"weights_{self.id}", _Buffers(data, persistent=True))
        if pools is not None:
            self.pools = _Buffers(pools, persistent=False)

    def with_pools(self, pools: Mapping[str, torch.Tensor]) -> FusedModel:
        return FusedModel(self.config, self.weights, pools, self.id)

    def _w(self, name: str) -> torch.Tensor:
        return getattr(getattr(self, f"weights_{self.id}"), name)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.ops.glimmer.kquant_linear(x, self._w(name), self.weights[name].qtype)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [T] -> float32 [T, dim]: the token rows, RMS-normalised without a gain."""
        qtype = self.weights["token_embd"].qtype
        rows = torch.ops.glimmer.kquant_embedding(ids, self._w("token_embd"), qtype)
        return torch.ops.glimmer.rms_norm(rows, None, self.config.eps)

    def blocks(
        self,
        x: torch.Tensor,
        pos: torch.Tensor,
        slot: torch.Tensor,
        global_table: torch.Tensor,
        sliding_table: torch.Tensor,
    ) -> torch.Tensor:
        """Embeddings [T, dim] -> hidden states [T, dim] after the output norm."""
        c = self.config
        h = torch.ops.glimmer.rms_norm(x, self._w("blk_0_attn_norm"), c.eps)
        for i, sliding in enumerate(c.sliding):
            b = f"blk_{i}_"
            table = sliding_table if sliding else global_table
            attn = self._attention(h, i, pos, slot, table)
            x, h = torch.ops.glimmer.add_rms_norm(
                x,
                attn,
                self._w(b + "post_attention_norm"),
                c.post_eps,
                self._w(b + "ffn_norm"),
                c.eps,
            )
            last = i + 1 == c.n_layers
            x, h = torch.ops.glimmer.add_rms_norm(
                x,
                self._ffn(h, b),
                self._w(b + "post_ffw_norm"),
                c.post_eps,
                self._w("output_norm" if last else f"blk_{i + 1}_attn_norm"),
                c.eps,
            )
        return h

    def _attention(
        self,
        h: torch.Tensor,
        layer: int,
        pos: torch.Tensor,
        slot: torch.Tensor,
        table: torch.Tensor,
    ) -> torch.Tensor:
        c, b = self.config, f"blk_{layer}_"
        sliding = c.sliding[layer]
        q, k, v = (self._linear(h, b + n) for n in ("attn_q", "attn_k", "attn_v"))
        gate = self._linear(h, b + "attn_gate")
        k_pool, v_pool = getattr(self.pools, f"k_{layer}"), getattr(self.pools, f"v_{layer}")
        q = torch.ops.glimmer.qk_norm_rope_kv(
            q,
            k,
            v,
            None,  # the gains of QK-norm are uniform and folded into the attention scale
            None,
            c.eps,
            ROPE if sliding else "none",
            c.rope_theta,
            pos,
            slot,
            table,
            k_pool,
            v_pool,
        )
        window = c.window if sliding else 0
        out = torch.ops.glimmer.sdpa(
            q, k_pool, v_pool, pos, slot, table, c.attn_scale, window, True, gate
        )
        return self._linear(out, b + "attn_output")

    def _ffn(self, h: torch.Tensor, b: str) -> torch.Tensor:
        gate, up = b + "ffn_gate", b + "ffn_up"
        f = torch.ops.glimmer.kquant_swiglu(
            h, self._w(gate), self.weights[gate].qtype, self._w(up), self.weights[up].qtype
        )
        return self._linear(f, b + "ffn_down")

    def head(self, h: torch.Tensor) -> torch.Tensor:
        """Hidden states [R, dim] -> float32 soft-capped logits [R, vocab_size]."""
        c = self.config
        qtype = self.weights["output"].qtype
        return torch.ops.glimmer.kquant_logits(
            h, self._w("output"), qtype, c.logit_scale, c.soft_cap
        )

    def method(self, name: str) -> FusedModel:
        """This model as the exported method `name`, holding only the buffers that it reads."""
        cls, uses = METHODS[name]
        weights = {n: w for n, w in self.weights.items() if uses(n)}
        pools = None if cls is EmbedText else dict(self.pools.named_buffers())
        return cls(self.config, weights, pools, self.id)


class EmbedText(FusedModel):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids)


class ForwardFromEmbeddings(FusedModel):
    def forward(
        self,
        embeds: torch.Tensor,
        pos: torch.Tensor,
        slot: torch.Tensor,
        global_table: torch.Tensor,
        sliding_table: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        h = self.blocks(embeds, pos, slot, global_table, sliding_table)
        return self.head(h.index_select(0, rows))


class Decode(FusedModel):
    def forward(
        self,
        ids: torch.Tensor,
        pos: torch.Tensor,
        slot: torch.Tensor,
        global_table: torch.Tensor,
        sliding_table: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        seed: torch.Tensor,
    ) -> torch.Tensor:
        h = self.blocks(self.embed(ids), pos, slot, global_table, sliding_table)
        return torch.ops.glimmer.sample(self.head(h), temperature, top_k, top_p, seed, pos)


METHODS = {
    "embed_text": (EmbedText, lambda n: n == "token_embd"),
    "forward_from_embeddings": (ForwardFromEmbeddings, lambda n: n != "token_embd"),
    "decode": (Decode, lambda n: True),
}


def gguf_weights(model: GGUFModel) -> Iterator[tuple[str, Weight]]:
    """The graph's weights as slices of the GGUF file, unread."""
    for name in weight_names(model.config):
        dotted = name.replace("blk_", "blk.", 1)
        if name.startswith("blk_"):
            layer, rest = name.removeprefix("blk_").split("_", 1)
            dotted = f"blk.{layer}.{rest}"
        tensor = model.tensors[dotted + ".weight"]
        if len(tensor.shape) == 1:
            yield name, Weight(torch.from_numpy(tensor.float32()), "F32")
        else:
            raw = torch.from_numpy(tensor.raw())
            yield name, Weight(raw, tensor.qtype, Path(tensor.path), tensor.offset)


def from_gguf(model: GGUFModel) -> FusedModel:
    """The fused graph of a loaded GGUF file; its weights stay on disk."""
    return FusedModel(model.config, dict(gguf_weights(model)))
