"""fuse(model, draft): upstream's MuseGlimmerModel, and DFlashDraftModel -> the fused graph.

Upstream's loader (`executorch.examples.models.muse_glimmer`) lays a layer's projections out in one
of three ways: q, k, v and gate apart; [q | k | v | gate] in one matrix; [q | k | gate] in one and v
apart; gate and up joined or apart. The graph takes all of them: a joined matrix is cut by rows,
without a copy. A draft model has one layout.

Weight types taken: raw GGUF rows (`ExportableGGUFTensor` of Q4_K, Q5_K or Q6_K) and plain float32,
float16 or bfloat16 tensors. Anything repacked for another backend is refused by name.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from glimmer_ops.config import DraftConfig, ModelConfig, check_draft

from .graph import DRAFT, FusedModel, Weight

FLOAT_QTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
GGUF_QTYPES = {"q4_k": "Q4_K", "q5_k": "Q5_K", "q6_k": "Q6_K"}
DRAFT_LAYER = {  # upstream's names -> the graph's
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def model_config(upstream: Any) -> ModelConfig:
    """The ModelConfig of an upstream model's MuseGlimmerConfig.

    Raises ValueError for a variant that the fused graph does not express.
    """
    c = upstream.config
    for name in ("use_qk_norm", "use_attn_o_gate", "normalize_tok_embeddings"):
        if not getattr(c, name):
            raise ValueError(f"config.{name}: expected True, found False")
    windows = [layer.self_attn.window_size for layer in upstream.layers]
    sliding = tuple(w > 0 for w in windows)
    for i, layer in enumerate(upstream.layers):
        if layer.self_attn.use_rope != sliding[i]:
            raise ValueError(
                f"layers.{i}: expected RoPE exactly on sliding-window layers, found "
                f"use_rope={layer.self_attn.use_rope} with window {windows[i]}"
            )
    distinct = sorted({w for w in windows if w > 0})
    if len(distinct) > 1:
        raise ValueError(f"layers: expected one window size, found {distinct}")
    attn_scale = upstream.layers[0].self_attn.attn_scale
    config = ModelConfig(
        dim=c.dim,
        n_layers=c.n_layers,
        n_heads=c.n_heads,
        n_kv_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        ffn_dim=c.ffn_dim,
        vocab_size=c.vocab_size,
        eps=c.norm_eps,
        post_eps=c.post_norm_eps,
        rope_theta=c.rope_theta,
        window=distinct[0] if distinct else 0,
        sliding=sliding,
        soft_cap=c.output_soft_cap_temp,
        logit_scale=c.output_multiplier,
        q_scale=attn_scale * math.sqrt(c.head_dim),
        k_scale=1.0,
        context_length=c.max_seq_len,
    )
    config.validate()
    return config


def draft_config(upstream: Any) -> DraftConfig:
    """The DraftConfig of an upstream draft model's DFlashConfig.

    A layer is sliding where `sliding_window_pattern` says so: without a pattern upstream builds
    global layers only, whatever `sliding_window`. Raises ValueError naming the bad field.
    """
    c = upstream.config
    sliding = tuple(bool(layer.self_attn.is_sliding) for layer in upstream.layers)
    config = DraftConfig(
        dim=c.dim,
        n_layers=c.n_layers,
        n_heads=c.n_heads,
        n_kv_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        ffn_dim=c.ffn_dim,
        eps=c.norm_eps,
        rope_theta=c.rope_theta,
        window=(c.sliding_window or 0) if any(sliding) else 0,
        sliding=sliding,
        block_size=c.block_size,
        target_layers=tuple(c.target_layers),
        mask_token_id=c.mask_token_id,
        context_length=c.max_seq_len,
    )
    try:
        config.validate()
    except ValueError as error:
        raise ValueError(f"draft: {error}") from None
    return config


def _rows(name: str, weight: Any, start: int = 0, end: int | None = None) -> Weight:
    """Rows [start, end) of an upstream weight as raw bytes."""
    tensor = getattr(weight, "data", weight)
    raw, ggml_type = getattr(weight, "raw", None), getattr(weight, "ggml_type", None)
    if raw is not None and str(ggml_type).lower() in GGUF_QTYPES:
        return Weight(raw.reshape(raw.shape[0], -1)[start:end], GGUF_QTYPES[str(ggml_type).lower()])
    if type(tensor) is torch.Tensor and tensor.dtype in FLOAT_QTYPES:
        rows = tensor.detach()[start:end].contiguous()
        return Weight(rows.view(torch.uint8), FLOAT_QTYPES[tensor.dtype])
    raise ValueError(
        f"{name}: expected raw GGUF rows (Q4_K, Q5_K, Q6_K) or a float32, float16 or bfloat16 "
        f"tensor, found {type(weight).__name__} of {tensor.dtype}: "
        "load the model with backend='mlx'"
    )


def _norm(module: Any) -> Weight:
    return Weight(module.weight.detach().float().contiguous(), "F32")


def _attention(prefix: str, attn: Any, path: str) -> dict[str, Weight]:
    q, kv = attn.q_dim, attn.kv_dim
    if hasattr(attn, "qko_proj"):
        w, name = attn.qko_proj.weight, f"{path}.qko_proj"
        cuts = {"attn_q": (0, q), "attn_k": (q, q + kv), "attn_gate": (q + kv, None)}
        parts = {n: _rows(name, w, *cut) for n, cut in cuts.items()}
        parts["attn_v"] = _rows(f"{path}.v_proj", attn.v_proj.weight)
    elif hasattr(attn, "qkv_proj"):
        w, name = attn.qkv_proj.weight, f"{path}.qkv_proj"
        ends = {"attn_q": (0, q), "attn_k": (q, q + kv), "attn_v": (q + kv, q + 2 * kv)}
        parts = {n: _rows(name, w, *cut) for n, cut in ends.items()}
        parts["attn_gate"] = _rows(name, w, q + 2 * kv)
    else:
        apart = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_gate": "og_proj"}
        parts = {n: _rows(f"{path}.{m}", getattr(attn, m).weight) for n, m in apart.items()}
    parts["attn_output"] = _rows(f"{path}.o_proj", attn.o_proj.weight)
    return {prefix + n: w for n, w in parts.items()}


def _ffn(prefix: str, mlp: Any, path: str) -> dict[str, Weight]:
    if hasattr(mlp, "gate_up_proj"):
        w, name, f = mlp.gate_up_proj.weight, f"{path}.gate_up_proj", mlp.intermediate_size
        gate, up = _rows(name, w, 0, f), _rows(name, w, f)
    else:
        gate = _rows(f"{path}.gate_proj", mlp.gate_proj.weight)
        up = _rows(f"{path}.up_proj", mlp.up_proj.weight)
    down = _rows(f"{path}.down_proj", mlp.down_proj.weight)
    return {prefix + "ffn_gate": gate, prefix + "ffn_up": up, prefix + "ffn_down": down}


def _draft_weights(draft: Any) -> dict[str, Weight]:
    names = {"fc": "fc", "hidden_norm": "enc_output_norm", "norm": "output_norm"}
    for i in range(len(draft.layers)):
        names |= {f"layers.{i}.{theirs}": f"blk_{i}_{ours}" for theirs, ours in DRAFT_LAYER.items()}
    weights = {}
    for theirs, ours in names.items():
        module = draft.get_submodule(theirs)
        is_norm = module.weight.dim() == 1
        weights[DRAFT + ours] = (
            _norm(module) if is_norm else _rows(f"draft.{theirs}", module.weight)
        )
    return weights


def fuse(model: Any, draft: Any = None) -> FusedModel:
    """The fused graph of an upstream `MuseGlimmerModel`, sharing its weights' memory.

    draft: the `DFlashDraftModel` of a draft model for it, whose embedding and head are the
    model's. Raises ValueError naming the weight or setting that the graph cannot take, or in which
    the draft does not fit the model.
    """
    config = model_config(model)
    weights = {
        "token_embd": _rows("embed_tokens", model.embed_tokens.weight),
        "output": _rows("lm_head", model.lm_head.weight),
        "output_norm": _norm(model.output_norm),
    }
    for i, layer in enumerate(model.layers):
        b, path = f"blk_{i}_", f"layers.{i}"
        weights |= _attention(b, layer.self_attn, f"{path}.self_attn")
        weights |= _ffn(b, layer.mlp, f"{path}.mlp")
        weights[b + "attn_norm"] = _norm(layer.self_attn.qkv_proj_norm)
        weights[b + "ffn_norm"] = _norm(layer.mlp.norm)
        weights[b + "post_attention_norm"] = _norm(layer.post_attn_norm)
        weights[b + "post_ffw_norm"] = _norm(layer.post_ffn_norm)
    if draft is None:
        return FusedModel(config, weights)
    draft_settings = draft_config(draft)
    check_draft(draft_settings, config)
    return FusedModel(config, weights | _draft_weights(draft), draft=draft_settings)
