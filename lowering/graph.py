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
from glimmer_ops.config import DraftConfig, ModelConfig, check_draft
from glimmer_ops.gguf import GGUFDraft, GGUFModel, GGUFTensor

ROPE = "interleaved"  # pairs (2i, 2i + 1); the draft model's are halves
DRAFT = "draft_"  # begins the names of the draft model's weights and pools
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
DRAFT_LAYER = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "attn_q_norm",
    "attn_k_norm",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)


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


def weight_names(config: ModelConfig) -> list[str]:
    """Every weight that the graph reads."""
    layers = [f"blk_{i}_{n}" for i in range(config.n_layers) for n in LAYER_NORMS + LAYER_MATRICES]
    return ["token_embd", *layers, "output_norm", "output"]


def draft_weight_names(draft: DraftConfig) -> list[str]:
    """Every weight of the draft model."""
    layers = [f"blk_{i}_{n}" for i in range(draft.n_layers) for n in DRAFT_LAYER]
    return [DRAFT + n for n in ("fc", "enc_output_norm", *layers, "output_norm")]


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


@dataclass(frozen=True)
class PoolPages:
    """Pages of a layer's pools, by its kind. draft_*: of the draft model's layers."""

    of_global: int
    of_sliding: int
    draft_global: int = 0
    draft_sliding: int = 0


def make_pools(
    config: ModelConfig, draft: DraftConfig | None, pages: PoolPages, kv_dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Zeroed page pools [pages, kv_heads, 64, head_dim] of kv_dtype: k_<layer> and v_<layer>, and
    draft_k_<layer> and draft_v_<layer> of the draft model."""
    models: list[tuple[str, ModelConfig | DraftConfig, tuple[int, int]]] = [
        ("", config, (pages.of_global, pages.of_sliding))
    ]
    if draft is not None:
        models.append((DRAFT, draft, (pages.draft_global, pages.draft_sliding)))
    pools = {}
    for prefix, c, counts in models:
        for i, sliding in enumerate(c.sliding):
            shape = (counts[sliding], c.n_kv_heads, PAGE_SIZE, c.head_dim)
            for kind in "kv":
                pools[f"{prefix}{kind}_{i}"] = torch.zeros(shape, dtype=kv_dtype)
    return pools


class FusedModel(nn.Module):
    """The text model as `glimmer` ops.

    weights: every name of `weight_names(config)`, and of `draft_weight_names(draft)` when there is
    a draft model (see dflash). pools: see `make_pools`; None for a graph that only embeds. A
    buffer's full name is `weights_<id>.<name>` or `pools.<name>`, the same in every method, by
    which ExecuTorch shares it.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        pools: Mapping[str, torch.Tensor] | None = None,
        id_: str | None = None,
        draft: DraftConfig | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.draft = draft
        names = weight_names(config) + (draft_weight_names(draft) if draft else [])
        self.weights = {n: weights[n] for n in names if n in weights}
        self.id = id_ or weights_id(self.weights)
        data = {n: w.data for n, w in self.weights.items()}
        self.add_module(f"weights_{self.id}", _Buffers(data, persistent=True))
        if pools is not None:
            self.pools = _Buffers(pools, persistent=False)

    def with_pools(self, pools: Mapping[str, torch.Tensor]) -> FusedModel:
        return FusedModel(self.config, self.weights, pools, self.id, self.draft)

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
        taps: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Embeddings [T, dim] -> hidden states [T, dim] after the output norm.

        taps, when given, receives the residual [T, dim] before each of the draft's target_layers.
        """
        c = self.config
        h = torch.ops.glimmer.rms_norm(x, self._w("blk_0_attn_norm"), c.eps)
        for i, sliding in enumerate(c.sliding):
            if taps is not None and self.draft and i in self.draft.target_layers:
                taps.append(x)
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

    @staticmethod
    def reads(name: str) -> bool:
        """Whether an exported method reads the weight or pool of that name."""
        return True

    def method(self, cls: type[FusedModel]) -> FusedModel:
        """This model as an exported method, holding only the buffers that it reads: a method that
        held a pool which it does not write could not be loaded."""
        weights = {n: w for n, w in self.weights.items() if cls.reads(n)}
        pools = {n: p for n, p in self.pools.named_buffers() if cls.reads(n)}
        return cls(self.config, weights, pools, self.id, self.draft)


class EmbedText(FusedModel):
    @staticmethod
    def reads(name: str) -> bool:
        return name == "token_embd"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids)


class ForwardFromEmbeddings(FusedModel):
    @staticmethod
    def reads(name: str) -> bool:
        return name != "token_embd" and not name.startswith(DRAFT)

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
    @staticmethod
    def reads(name: str) -> bool:
        return not name.startswith(DRAFT)

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


METHODS: dict[str, type[FusedModel]] = {
    "embed_text": EmbedText,
    "forward_from_embeddings": ForwardFromEmbeddings,
    "decode": Decode,
}


def _gguf_name(name: str) -> str:
    """blk_3_attn_q -> blk.3.attn_q.weight, enc_output_norm -> enc.output_norm.weight."""
    if name.startswith("blk_"):
        layer, rest = name.removeprefix("blk_").split("_", 1)
        name = f"blk.{layer}.{rest}"
    return name.replace("enc_", "enc.", 1) + ".weight"


def _gguf_weight(tensor: GGUFTensor) -> Weight:
    """A weight as a slice of its file, unread; norms are read."""
    if len(tensor.shape) == 1:
        return Weight(torch.from_numpy(tensor.float32()), "F32")
    raw = torch.from_numpy(tensor.raw())
    return Weight(raw, tensor.qtype, Path(tensor.path), tensor.offset)


def from_gguf(model: GGUFModel, draft: GGUFDraft | None = None) -> FusedModel:
    """The fused graph of a loaded GGUF file; its weights stay on disk.

    draft: the file of a DFlash draft model for it. ValueError when it does not fit.
    """
    weights = {n: _gguf_weight(model.tensors[_gguf_name(n)]) for n in weight_names(model.config)}
    if draft is None:
        return FusedModel(model.config, weights)
    check_draft(draft.config, model.config)
    for name in draft_weight_names(draft.config):
        weights[name] = _gguf_weight(draft.tensors[_gguf_name(name.removeprefix(DRAFT))])
    return FusedModel(model.config, weights, draft=draft.config)
